import errno
import json
import os
import random
import shutil
import threading
from pathlib import Path

import pytest
import torch

from folio.base.files import FolderWatch, is_locked, read_json, sha256, short_repr, write_json
from folio.checkpoints import checkpoint, find_runs, foreign, run_folder
from folio.checkpoints.checkpoint import Checkpoint
from folio.checkpoints.run_folder import CheckpointError, NoCheckpointError
from folio.checkpoints.snapshots import find_snapshots
from folio.data import tokenizer
from folio.data.tokenizer import CharTokenizer
from tests.support.runs import blank_state, edit_manifest, edit_state, same_tensors

WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.ones(1, dtype=torch.bfloat16)}
OPTIMIZER = {"a.weight/exp_avg": torch.rand(2, 3), "a.weight/step": torch.tensor(3.0)}


def save(out_dir: Path, step: int, best: bool = True, keep_last: int = 1) -> Path:
    """Save a step of a run. best: whether its validation loss is the lowest of all steps; each is lower than before."""
    state = blank_state(step, next_sequence=7 * step, config={"start": "é\n"}, best_val_loss=1 / step)
    del state["format_version"]
    if not best:
        named = run_folder.RunFolder(out_dir).named("best")
        best_before = read_json(named[0] / "state.json") if named else {"best_step": 0, "best_val_loss": None}
        state |= {name: best_before[name] for name in ("best_step", "best_val_loss")}
    out_dir.mkdir(parents=True, exist_ok=True)
    return checkpoint.save(out_dir, step, WEIGHTS, OPTIMIZER, CharTokenizer("ab"), state, keep_last)


def test_a_saved_checkpoint_loads_unchanged(tmp_path):
    path = save(tmp_path, 250)
    assert path == tmp_path / "step-000250"
    for source in (tmp_path, path):
        loaded = checkpoint.load(source)
        assert loaded.path == path and loaded.tokenizer.characters == "ab"
        assert loaded.state["step"] == 250 and loaded.state["next_sequence"] == 1750
        assert loaded.state["config"] == {"start": "é\n"}
        assert same_tensors(loaded.model, WEIGHTS) and same_tensors(loaded.optimizer(), OPTIMIZER)
    assert not list(tmp_path.glob(".*"))
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1  # the same permissions for all files


def test_settings_of_the_model_that_a_run_did_not_know_yet_are_the_default(tmp_path):
    """Two settings of old and new runs differed in `position`: None and "learned"."""
    settings = checkpoint.load(save(tmp_path, 1)).settings()
    assert settings["start"] == "é\n" and settings["position"] == "learned" and "vocab_size" not in settings
    foreign = Checkpoint(tmp_path, {}, CharTokenizer("ab"), {"model": {"n_layer": 1}})
    assert foreign.settings() == {}


def test_a_checkpoint_from_before_a_resume_is_not_the_best_of_the_run(tmp_path):
    """The best one was damaged. After a resume from an earlier step, best.json still named it, and the next ones were
    removed.
    """

    def save_loss(step: int, loss: float, best_step: int, resumes: list) -> None:
        state = blank_state(step, best_val_loss=loss, best_step=best_step, resumes=resumes)
        del state["format_version"]
        checkpoint.save(tmp_path, step, WEIGHTS, OPTIMIZER, CharTokenizer("ab"), state, keep_last=2)

    for step, loss in ((3, 2.0), (4, 1.9), (5, 1.5)):
        save_loss(step, loss, step, [])
    weights = tmp_path / "step-000005" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    resumes = [{"step": 4, "after": "a signal", "changes": {}, "exact": True}]
    for step, loss, best_step in ((6, 1.8, 6), (7, 1.85, 6), (8, 1.85, 6), (9, 1.85, 6)):
        save_loss(step, loss, best_step, resumes)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000006", "step-000008", "step-000009"]
    assert checkpoint.load(tmp_path, "best").state["step"] == 6


def test_last_and_best_are_kept(tmp_path):
    for step, best in ((1, True), (2, True), (3, False), (4, False)):
        save(tmp_path, step, best)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000002", "step-000004"]
    assert checkpoint.load(tmp_path, "best").state["step"] == 2
    assert checkpoint.load(tmp_path, "last").state["step"] == 4 == run_folder.last_state(tmp_path)["step"]


def test_without_an_evaluation_the_last_checkpoint_is_loaded_as_the_best(tmp_path):
    """A run that was stopped early had no best.json, so the printed command for sampling failed."""
    save(tmp_path, 1, best=False)
    assert checkpoint.load(tmp_path, "best").state["step"] == 1


def test_the_same_step_can_be_saved_again(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 1, best=False)
    assert checkpoint.load(tmp_path, "best").state["step"] == 1


@pytest.mark.parametrize("best", [True, False])
def test_replace_removes_the_earlier_run_and_no_other_file(tmp_path, best):
    """--overwrite=True removed the earlier run before the new one had saved anything, and it might never do so."""
    assert not run_folder.exists(tmp_path)
    for step in (1, 5, 9):
        save(tmp_path, step, keep_last=5)
    (tmp_path / "notes.txt").write_text("mine")
    evaluation = {} if best else dict(best_step=0, best_val_loss=None)
    state = blank_state(5, run_id="another", **evaluation)
    path = checkpoint.save(tmp_path, 5, WEIGHTS, OPTIMIZER, CharTokenizer("ab"), state, 5, replace=True)
    assert [folder.name for folder in tmp_path.glob("step-*")] == ["step-000005"] and (tmp_path / "notes.txt").exists()
    assert checkpoint.load(tmp_path, "best").path == path and (tmp_path / "best.json").exists() == best


def test_a_failed_save_keeps_the_earlier_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def sync_to_full_disk(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "sync", sync_to_full_disk)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, 2)
    assert checkpoint.load(tmp_path).state["step"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.json", "last.json", "step-000001"]


def test_a_failed_save_keeps_the_same_step_of_an_earlier_run(tmp_path, monkeypatch):
    """The checkpoint that is replaced was removed before the new one was in its place."""
    path = save(tmp_path, 1)
    rename = Path.rename

    def refuse(self, target):
        if self.name.endswith(f"{os.getpid()}.tmp"):
            raise OSError(30, "Read-only file system")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="Read-only"):
        save(tmp_path, 1)
    assert checkpoint.load(tmp_path).path == path
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.json", "last.json", "step-000001"]


@pytest.mark.parametrize("pointer", ["last.json", "best.json"])
def test_a_pointer_that_cannot_be_written_loses_nothing(tmp_path, monkeypatch, pointer, capsys):
    """The save counted as failed, though its checkpoint was in place, and later ones replaced the best one."""
    save(tmp_path, 1)

    def write(path, value):
        if path.name == pointer:
            raise OSError(28, "No space left on device")
        write_json(path, value)

    monkeypatch.setattr(run_folder, "write_json", write)
    save(tmp_path, 2)
    assert "is saved, but not all pointers to checkpoints could be written" in capsys.readouterr().err
    assert [path.name for path in run_folder.directories(tmp_path)] == ["step-000001", "step-000002"]
    for which in ("last", "best"):
        assert checkpoint.load(tmp_path, which).state["step"] == 2
    monkeypatch.undo()
    save(tmp_path, 3, best=False)
    assert checkpoint.load(tmp_path).state["step"] == 3 and checkpoint.load(tmp_path, "best").state["step"] == 2
    assert [path.name for path in run_folder.directories(tmp_path)] == ["step-000002", "step-000003"]


def test_a_pointer_of_an_overwritten_run_does_not_lead_to_the_run_before(tmp_path):
    """A kill after the new run's first save, before the old checkpoints are removed."""
    for step in (5, 9):
        save(tmp_path, step, keep_last=2)
    shutil.copytree(tmp_path, tmp_path / "before")
    state = blank_state(2, run_id="another", best_val_loss=5.0)
    checkpoint.save(tmp_path, 2, WEIGHTS, OPTIMIZER, CharTokenizer("ab"), state, replace=True)
    for path in run_folder.directories(tmp_path / "before"):
        path.rename(tmp_path / path.name)
    for which in ("last", "best"):
        assert checkpoint.load(tmp_path, which).state["step"] == 2


def test_a_renamed_checkpoint_is_refused(tmp_path):
    path = save(tmp_path, 1)
    path.rename(tmp_path / "step-000007")
    with pytest.raises(CheckpointError, match=r"step-000007 holds step 1: it was renamed"):
        checkpoint.load(tmp_path)
    shutil.copytree(tmp_path / "step-000007", tmp_path / "mine")
    assert checkpoint.load(tmp_path / "mine").state["step"] == 1


IMPOSSIBLE = [
    ("step", -1),
    ("step", True),
    ("next_sequence", 10**30),
    ("best_val_loss", float("nan")),
    ("best_val_loss", 10**400),
    ("best_val_loss", None),
    ("best_step", 7),
    ("guard", {"moments": float("inf")}),
    ("guard", {"moments": [[0.0, float("inf"), 0.0], [0.0, 0.0, 0.0]]}),
    ("guard", {"moments": [[1e308, 0.0, 0.0], [0.0, 0.0, 0.0]]}),
    ("grad_scaler", {"scale": 0}),
    ("model", {"n_layer": 10**30}),
    ("model", {"dropout": float("nan")}),
    ("resolved", {"device": "cpu", "dtype": "float32", "compile": "x"}),
    ("dataset", {}),
    ("resolved", {"device": "cpu"}),
    ("resumes", [{"step": 1}]),
    ("decisions", [[0, -5]]),
    ("budget", {"spent": "1"}),
    ("threads", 0),
    ("origins", ["x"]),
]


@pytest.mark.parametrize("name, value", IMPOSSIBLE)
def test_an_impossible_value_in_state_json_is_refused(tmp_path, name, value):
    """With a manifest that fits, it was a traceback, or the run trained from a negative step."""
    path = save(tmp_path, 3)
    state = {**read_json(path / "state.json"), name: value}
    (path / "state.json").write_text(json.dumps(state))
    edit_manifest(path)
    with pytest.raises(CheckpointError, match=r"state\.json is not as Folio writes it: (best_step|" + name + ")$"):
        checkpoint.load(tmp_path)


FILES = ["model.safetensors", "optimizer.safetensors", "tokenizer.json", "state.json", "manifest.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_loaded(tmp_path, name, seed, capsys):
    """Each file is truncated at random lengths, has random bits flipped, and is missing."""
    rng = random.Random(seed)
    for step in (1, 2, 3):
        path = save(tmp_path, step, best=step == 1, keep_last=2) / name
    content = path.read_bytes()
    damaged_contents = [content[: rng.randrange(len(content))] for _ in range(8)]
    for _ in range(40):
        flipped = bytearray(content)
        flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        damaged_contents.append(bytes(flipped))
    for damaged in damaged_contents:
        path.write_bytes(damaged)
        step = checkpoint.load(tmp_path).state["step"]
        err = capsys.readouterr().err
        harmless = step == 3 and name == "manifest.json"  # a flipped bit may not change what the manifest says
        assert harmless or (step == 2 and "step-000003" in err and "loading step-000002" in err)
        if not harmless:
            with pytest.raises(CheckpointError, match="step-000003"):
                checkpoint.load(path.parent)
    path.unlink()
    assert checkpoint.load(tmp_path).state["step"] == 2
    assert checkpoint.load(tmp_path, "best").state["step"] == 1


def test_the_optimizer_is_read_only_to_resume(tmp_path, monkeypatch):
    """Sampling computed the sha256 of the optimizer's state too: 0.7 s for GPT-2's."""
    path = save(tmp_path, 1)
    hashed = []
    monkeypatch.setattr(run_folder, "sha256", lambda file: hashed.append(file.name) or sha256(file))
    assert same_tensors(foreign.load(str(tmp_path)).model, WEIGHTS)
    assert set(hashed) == {"model.safetensors", "state.json", "tokenizer.json"}
    (path / "optimizer.safetensors").unlink()
    assert same_tensors(foreign.load(str(path)).model, WEIGHTS)
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is missing: this checkpoint is damaged"):
        checkpoint.load(path)


def test_lazy_tensors_are_those_of_the_file(tmp_path):
    save(tmp_path, 1)
    loaded = checkpoint.load(tmp_path, lazy=True)
    assert same_tensors(dict(loaded.model), WEIGHTS) and len(loaded.model) == len(WEIGHTS)
    name = next(iter(WEIGHTS))
    assert loaded.model[name].data_ptr() != loaded.model[name].data_ptr()  # each time in memory of its own
    with pytest.raises(KeyError):
        loaded.model["other"]
    assert loaded.model.get("other") is None
    (tmp_path / "step-000001" / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors has changed since it was written"):
        checkpoint.load(tmp_path, lazy=True)


@pytest.mark.parametrize("pointer", ["last.json", "best.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"checkpoint": "../x"}', '{"checkpoint": 5}', None])
def test_a_damaged_pointer_does_not_lose_the_run(tmp_path, pointer, content):
    for step in (1, 2):
        save(tmp_path, step, keep_last=2)
    (tmp_path / pointer).unlink() if content is None else (tmp_path / pointer).write_text(content)
    assert run_folder.exists(tmp_path)
    for which in ("last", "best"):
        assert checkpoint.load(tmp_path, which).state["step"] == 2
    save(tmp_path, 3)
    assert checkpoint.load(tmp_path).state["step"] == 3


def test_unfinished_files_of_a_killed_process_are_removed(tmp_path):
    save(tmp_path, 1)
    (tmp_path / ".step-000002.77.tmp").mkdir()
    (tmp_path / ".step-000002.77.tmp" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".last.json.77.tmp").write_text("{")
    checkpoint.clear_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.json", "last.json", "step-000001"]


def test_saving_an_earlier_step_removes_later_checkpoints(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step, best=False, keep_last=3)
    save(tmp_path, 15, best=False, keep_last=2)
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-000010", "step-000015"]


def test_folders_without_a_valid_checkpoint_are_refused(tmp_path):
    for path in (tmp_path, tmp_path / "gone", tmp_path / "gone" / "out"):
        with pytest.raises(NoCheckpointError, match="holds no checkpoint: t"):
            checkpoint.load(path)
    (save(tmp_path, 1) / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.load(tmp_path)


def test_a_missing_checkpoint_is_an_error_that_names_the_newest_runs(tmp_path, monkeypatch):
    """In the same folder, or the run that the checkpoint would be in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    with pytest.raises(NoCheckpointError, match=r"^out holds no checkpoint: train one first: python train\.py config/"):
        checkpoint.load(Path("out"))
    for age, run in enumerate(["b", "d", "a", "c"]):
        os.utime(save(tmp_path / run, 1), (1e9 - age, 1e9 - age))
    for path in ("out", "gone"):
        with pytest.raises(NoCheckpointError, match=f"^{path} holds no checkpoint: try b or d or a$"):
            checkpoint.load(Path(path))
    with pytest.raises(NoCheckpointError, match=r"^a.step-000002 holds no checkpoint: try a$"):
        checkpoint.load(Path("a", "step-000002"))
    assert str(NoCheckpointError(tmp_path / "out", "--out_dir=")).endswith(f"or --out_dir={tmp_path / 'a'}")


def test_a_later_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT_VERSION", 2)
    save(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format version 2 is not 1"):
        checkpoint.load(tmp_path)


def test_only_regular_files_are_read(tmp_path):
    """A FIFO without a writer, and a link to /dev/zero, were waited for and read without end."""
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "fifo")
        thread = threading.Thread(target=is_locked, args=(tmp_path / "fifo",), daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
    (tmp_path / "folder").mkdir()
    (tmp_path / "device").symlink_to(os.devnull)
    for path in tmp_path.iterdir():
        for read in (read_json, sha256):
            with pytest.raises(OSError, match=f"{path.name} is not a regular file"):
                read(path)
    (tmp_path / "file").write_text("[1]")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_json(tmp_path / "link") == [1]


def test_a_huge_json_file_is_not_read(tmp_path, monkeypatch):
    with open(tmp_path / "huge.json", "wb") as file:
        file.truncate(2**34)
    monkeypatch.setattr(Path, "read_text", lambda *args, **named: pytest.fail("it was read"))
    with pytest.raises(ValueError, match=r"huge\.json has 17,179,869,184 bytes; the limit for this file is 67,108,864"):
        read_json(tmp_path / "huge.json")


def test_a_foreign_value_is_shortened_in_a_message():
    """Python does not print an integer of more than 4,300 digits."""
    assert short_repr(["a", -(10**9), None]) == "['a', -1000000000, None]"
    for value in ("x" * 10**6, [["x" * 99] * 99] * 99, {"a" * 999: {"b": {"c": 1}}}, 10**400, 10**5000):
        assert len(short_repr(value)) <= 123


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json", "tokenizer.json"])
def test_a_checkpoint_with_a_device_in_it_is_refused(name, tmp_path):
    folder = save(tmp_path, 1)
    (folder / name).unlink()
    (folder / name).symlink_to(os.devnull)
    manifest = read_json(folder / "manifest.json") if name != "manifest.json" else {}
    for listed in (True, False):  # a stranger's manifest need not list it
        if not listed and name != "manifest.json":
            write_json(folder / "manifest.json", {key: value for key, value in manifest.items() if key != name})
        with pytest.raises(CheckpointError):
            checkpoint.load(folder)


@pytest.mark.parametrize("name", ["step-²", "step-٣", "step-", "step-1x", "step--1"])
def test_a_folder_with_another_name_is_not_a_checkpoint(name, tmp_path):
    """'²'.isdigit() is true, and int('²') an error: such a folder in a run ended tools with a traceback."""
    path = save(tmp_path, 1)
    (tmp_path / name).mkdir()
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / f"{name}.safetensors").touch()
    assert run_folder.directories(tmp_path) == [path] and find_snapshots(tmp_path) == {}
    assert tokenizer.load(tmp_path).vocab_size == checkpoint.load(tmp_path).tokenizer.vocab_size
    assert find_runs.runs_under(tmp_path) == [tmp_path]
    (tmp_path / "last.json").unlink()
    assert tokenizer.load(tmp_path).vocab_size == checkpoint.load(tmp_path).tokenizer.vocab_size


def test_a_failed_write_keeps_the_earlier_file(tmp_path):
    write_json(tmp_path / "deep" / "x.json", {"a": "é"})
    assert read_json(tmp_path / "deep" / "x.json") == {"a": "é"}
    with pytest.raises(TypeError):
        write_json(tmp_path / "deep" / "x.json", object())
    assert read_json(tmp_path / "deep" / "x.json") == {"a": "é"}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["x.json"]


def test_a_disk_that_does_not_answer_has_not_moved_the_folder(tmp_path, monkeypatch):
    """A network disk that failed for a moment ended the run as if its folder had been removed, without a save."""
    watch, stat = FolderWatch(tmp_path), Path.stat

    def fail(path, **settings):
        if path == tmp_path:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return stat(path, **settings)

    monkeypatch.setattr(Path, "stat", fail)
    assert watch.is_in_place() and watch.where() is None
    monkeypatch.undo()
    assert watch.where() == tmp_path
    watch.close()


def test_a_save_succeeds_if_an_old_checkpoint_cannot_be_removed(tmp_path, monkeypatch):
    """If an old checkpoint's folder was a link, a save that had succeeded was reported as failed."""
    linked_run = tmp_path / "linked"
    out_dir = tmp_path / "out"
    save(linked_run, 1)
    out_dir.mkdir()
    (out_dir / "step-000001").symlink_to(linked_run / "step-000001", target_is_directory=True)
    save(out_dir, 2)
    assert [path.name for path in sorted(out_dir.glob("step-*"))] == ["step-000002"]
    assert checkpoint.load(linked_run).state["step"] == 1  # only the link is removed

    def refuse(path, ignore_errors=False):
        if not ignore_errors:
            raise PermissionError("not yours")

    monkeypatch.setattr(checkpoint.shutil, "rmtree", refuse)
    save(out_dir, 3)
    assert checkpoint.load(out_dir).state["step"] == 3


def test_written_by_also_reads_a_damaged_checkpoint(tmp_path):
    """Under torchrun, --overwrite=True was refused if the newest checkpoint was damaged, because all of it was read."""
    assert run_folder.written_by(tmp_path) is None
    for step, run in ((1, "first"), (2, "second")):
        path = save(tmp_path, step, keep_last=2)
        edit_state(path, lambda state, run=run: state.update(torchrun=run))
    (tmp_path / "step-000002" / "model.safetensors").unlink()
    assert run_folder.written_by(tmp_path) == "second"
    (tmp_path / "step-000002" / "state.json").write_text("{")
    assert run_folder.written_by(tmp_path) == "first"
