import os
import random
import shutil
from pathlib import Path

import pytest

from folio.base.files import read_json, sha256, write_json
from folio.checkpoints import checkpoint, foreign, run_folder
from folio.checkpoints.checkpoint import Checkpoint
from folio.checkpoints.run_folder import CheckpointError, NoCheckpointError
from folio.data.tokenizer import CharTokenizer
from tests.support.checkpoints import OPTIMIZER, WEIGHTS, save
from tests.support.disk import assert_durable, record_disk
from tests.support.runs import same_tensors


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


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """And before a pointer names it."""
    calls = record_disk(monkeypatch)
    path = save(tmp_path, 1)
    in_place = assert_durable(calls, path, *(file.name for file in path.iterdir()))
    assert_durable(calls[in_place:], tmp_path / "last.json")


def test_settings_of_the_model_that_a_run_did_not_know_yet_are_the_default(tmp_path):
    """Two settings of old and new runs differed in `position`: None and "learned"."""
    settings = checkpoint.load(save(tmp_path, 1)).settings()
    assert settings["start"] == "é\n" and settings["position"] == "learned" and "vocab_size" not in settings
    foreign = Checkpoint(tmp_path, {}, CharTokenizer("ab"), {"model": {"n_layer": 1}})
    assert foreign.settings() == {}


def test_the_same_step_can_be_saved_again(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 1, best=False)
    assert checkpoint.load(tmp_path, "best").state["step"] == 1


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


def test_a_renamed_checkpoint_is_refused(tmp_path):
    path = save(tmp_path, 1)
    path.rename(tmp_path / "step-000007")
    with pytest.raises(CheckpointError, match=r"step-000007 holds step 1: it was renamed"):
        checkpoint.load(tmp_path)
    shutil.copytree(tmp_path / "step-000007", tmp_path / "mine")
    assert checkpoint.load(tmp_path / "mine").state["step"] == 1


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


def test_unfinished_files_of_a_killed_process_are_removed(tmp_path):
    save(tmp_path, 1)
    (tmp_path / ".step-000002.77.tmp").mkdir()
    (tmp_path / ".step-000002.77.tmp" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".last.json.77.tmp").write_text("{")
    checkpoint.clear_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.json", "last.json", "step-000001"]


def test_folders_without_a_valid_checkpoint_are_refused(tmp_path):
    for path in (tmp_path, tmp_path / "gone", tmp_path / "gone" / "out"):
        with pytest.raises(NoCheckpointError, match="holds no checkpoint: t"):
            checkpoint.load(path)
    (save(tmp_path, 1) / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.load(tmp_path)


def test_a_later_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT_VERSION", 3)
    save(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format version 3 is not 2"):
        checkpoint.load(tmp_path)


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
