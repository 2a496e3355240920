import os
import random
import shutil
from pathlib import Path

import pytest

from folio.base.files import read_json, sha256, write_json
from folio.checkpoints import checkpoint, foreign, run_folder
from folio.checkpoints.checkpoint import Checkpoint
from folio.checkpoints.identify import NoCheckpointError
from folio.checkpoints.run_folder import CheckpointError
from folio.data.tokenizer import CharTokenizer
from tests.support.checkpoints import OPTIMIZER, WEIGHTS, save, save_state
from tests.support.disk import assert_durable, flip_bit, record_disk, run_killed_at
from tests.support.runs import blank_part, blank_state, edit_state, same_tensors


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


def test_a_checkpoint_is_synced_before_it_is_renamed_and_before_a_pointer_names_it(tmp_path, monkeypatch):
    calls = record_disk(monkeypatch)
    path = save(tmp_path, 1)
    position = assert_durable(calls, path, *(file.name for file in path.iterdir()))
    assert_durable(calls[position:], tmp_path / "last.json")


def test_model_settings_that_are_newer_than_a_run_have_their_defaults(tmp_path):
    """Old and new runs with equal models differed in `position`: None and "learned"."""
    settings = checkpoint.load(save(tmp_path, 1)).settings()
    assert settings["start"] == "é\n" and settings["position"] == "learned" and "vocab_size" not in settings
    foreign = Checkpoint(tmp_path, {}, CharTokenizer("ab"), {"model": {"n_layer": 1}})
    assert foreign.settings() == {}


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("operation", ["sync", "rename"])
def test_a_failed_save_keeps_the_previous_checkpoint(tmp_path, monkeypatch, step, operation):
    """The old checkpoint of the same step was removed before the new one was renamed."""
    path = save(tmp_path, 1)
    rename = Path.rename

    def fail(*args):
        raise OSError(28, "No space left on device")

    if operation == "sync":
        monkeypatch.setattr(checkpoint, "sync", fail)
    else:
        is_new = f"{os.getpid()}.tmp"
        monkeypatch.setattr(Path, "rename", lambda p, to: fail() if p.name.endswith(is_new) else rename(p, to))
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, step)
    assert checkpoint.load(tmp_path).path == path
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.json", "last.json", "step-000001"]


@pytest.mark.parametrize("saved_step, after", [(10, "a rollback"), (20, "a kill")])
def test_a_kill_while_a_checkpoint_is_replaced_loses_nothing(tmp_path, saved_step, after):
    """Between two renames, the old and the new checkpoint had temporary names, and the next start deleted both.

    The run has checkpoints of steps 10 and 20, and a new part from step 10: after a rollback, which is saved at once,
    or because step 20 was damaged, which is reached again. While last.json named step 20, a rollback was not found.
    """
    for step in (10, 20):
        save(tmp_path / "before", step, best=False, keep_last=2)
    parts = [blank_part(0), blank_part(10, after=after)]

    def save_again(out_dir: Path) -> Path:
        state = blank_state(saved_step, best_step=0, best_val_loss=None, parts=parts)
        return save_state(out_dir, state, keep_last=2)

    event, outcomes = 0, []
    while True:
        out_dir = shutil.copytree(tmp_path / "before", tmp_path / f"killed-{event}")
        if not run_killed_at(event, lambda out_dir=out_dir: save_again(out_dir)):
            break
        found = checkpoint.load(out_dir).state
        checkpoint.clear_unfinished(out_dir)
        run_folder.restore_pointers(out_dir)
        last = checkpoint.load(out_dir)
        assert last.state == found and last.path.parent == out_dir and not list(out_dir.glob(".*"))
        replaced = run_folder.read_state(out_dir / f"step-0000{saved_step}")
        is_new = len(replaced["parts"]) == 2
        assert last.state == (replaced if is_new else run_folder.read_state(out_dir / "step-000020"))
        outcomes.append(is_new)
        assert save_again(out_dir) == checkpoint.load(out_dir).path == out_dir / f"step-0000{saved_step}"
        event += 1
    assert outcomes == sorted(outcomes) and outcomes.count(False) > 5 and outcomes.count(True) > 3


def test_a_renamed_checkpoint_is_an_error(tmp_path):
    path = save(tmp_path, 1)
    path.rename(tmp_path / "step-000007")
    with pytest.raises(CheckpointError, match=r"step-000007 holds step 1\b"):
        checkpoint.load(tmp_path)
    shutil.copytree(tmp_path / "step-000007", tmp_path / "mine")
    assert checkpoint.load(tmp_path / "mine").state["step"] == 1


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "tokenizer.json", "state.json", "manifest.json"]
)
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_loaded(tmp_path, name, seed, capsys):
    """Each file is truncated at random lengths, has random bits flipped, and is missing."""
    rng = random.Random(seed)
    for step in (1, 2, 3):
        path = save(tmp_path, step, best=step == 1, keep_last=2) / name
    content = path.read_bytes()
    cuts = [content[: rng.randrange(len(content))] for _ in range(8)]
    for damaged in [*cuts, *(flip_bit(content, rng) for _ in range(40))]:
        path.write_bytes(damaged)
        step = checkpoint.load(tmp_path).state["step"]
        err = capsys.readouterr().err
        harmless = step == 3 and name == "manifest.json"  # a flipped bit may leave the values unchanged
        assert harmless or (step == 2 and "step-000003" in err and "loading step-000002" in err)
        if not harmless:
            with pytest.raises(CheckpointError, match="step-000003"):
                checkpoint.load(path.parent)
    path.unlink()
    assert checkpoint.load(tmp_path).state["step"] == 2
    assert checkpoint.load(tmp_path, "best").state["step"] == 1


def test_the_optimizer_is_read_only_to_resume(tmp_path, monkeypatch):
    """Sampling also computed the sha256 of the optimizer's state, which takes 0.7 s for GPT-2's."""
    path = save(tmp_path, 1)
    hashed = []
    monkeypatch.setattr(run_folder, "sha256", lambda file: hashed.append(file.name) or sha256(file))
    assert same_tensors(foreign.load(str(tmp_path)).model, WEIGHTS)
    assert set(hashed) == {"model.safetensors", "state.json", "tokenizer.json"}
    (path / "optimizer.safetensors").unlink()
    assert same_tensors(foreign.load(str(path)).model, WEIGHTS)
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is missing"):
        checkpoint.load(path)


def test_lazy_tensors_equal_the_saved_tensors(tmp_path):
    save(tmp_path, 1)
    loaded = checkpoint.load(tmp_path, lazy=True)
    assert same_tensors(dict(loaded.model), WEIGHTS) and len(loaded.model) == len(WEIGHTS)
    name = next(iter(WEIGHTS))
    assert loaded.model[name].data_ptr() != loaded.model[name].data_ptr()  # newly allocated on each access
    with pytest.raises(KeyError):
        loaded.model["other"]
    assert loaded.model.get("other") is None
    (tmp_path / "step-000001" / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors has changed"):
        checkpoint.load(tmp_path, lazy=True)


def test_folders_without_a_valid_checkpoint_are_errors(tmp_path):
    for path in (tmp_path, tmp_path / "missing", tmp_path / "missing" / "out"):
        with pytest.raises(NoCheckpointError, match="holds no checkpoint: t"):
            checkpoint.load(path)
    (save(tmp_path, 1) / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("version", [1, 3, "2", 2.5, True, None, 10**300, "missing"])
def test_another_format_version_is_an_error(tmp_path, version):
    """Version 1 was read; without a version, the checkpoint was called damaged."""
    path = save(tmp_path, 1)
    change = {} if version == "missing" else {"format_version": version}
    edit_state(path, lambda state: (state.pop("format_version"), state.update(change)))
    for source in (tmp_path, path):
        with pytest.raises(CheckpointError, match=r"version is .*, and only 2 is supported; use the version") as error:
            checkpoint.load(source)
        assert "\n" not in str(error.value)
        assert str(version)[:9] in str(error.value)


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json", "tokenizer.json"])
def test_a_device_in_a_checkpoint_is_an_error(name, tmp_path):
    folder = save(tmp_path, 1)
    manifest = read_json(folder / "manifest.json")
    manifest.pop(name, None)
    (folder / name).unlink()
    (folder / name).symlink_to(os.devnull)
    with pytest.raises(CheckpointError):
        checkpoint.load(folder)
    if name != "manifest.json":
        write_json(folder / "manifest.json", manifest)  # an untrusted manifest may omit it
        with pytest.raises(CheckpointError):
            checkpoint.load(folder)


def test_a_save_succeeds_if_an_old_checkpoint_cannot_be_removed(tmp_path, monkeypatch):
    """If the folder of an old checkpoint was a link, a successful save was reported as failed."""
    linked_run = tmp_path / "linked"
    out_dir = tmp_path / "out"
    save(linked_run, 1)
    out_dir.mkdir()
    (out_dir / "step-000001").symlink_to(linked_run / "step-000001", target_is_directory=True)
    save(out_dir, 2)
    assert [path.name for path in sorted(out_dir.glob("step-*"))] == ["step-000002"]
    assert checkpoint.load(linked_run).state["step"] == 1  # only the link is removed

    def fail(path, ignore_errors=False):
        if not ignore_errors:
            raise PermissionError("Permission denied")

    monkeypatch.setattr(checkpoint.shutil, "rmtree", fail)
    save(out_dir, 3)
    assert checkpoint.load(out_dir).state["step"] == 3
