"""A run's folder: which checkpoints remain, pointers, and folders that are not checkpoints."""

import os
import shutil
import sys

import pytest

from folio.base.files import read_json, write_json
from folio.checkpoints import checkpoint, find_runs, run_folder
from folio.checkpoints.run_folder import CheckpointError
from folio.checkpoints.snapshots import find_snapshots
from folio.data import tokenizer
from tests.support.checkpoints import save, save_state
from tests.support.runs import blank_part, blank_state, edit_state


def test_a_checkpoint_from_before_a_resume_is_not_the_best_of_the_run(tmp_path):
    """After a resume from before a damaged best checkpoint, best.json still named it, and later ones were removed."""

    def save_loss(step: int, loss: float, best_step: int, parts: list) -> None:
        state = blank_state(step, best_val_loss=loss, best_step=best_step, parts=parts)
        save_state(tmp_path, state, keep_last=2)

    for step, loss in ((3, 2.0), (4, 1.9), (5, 1.5)):
        save_loss(step, loss, step, [blank_part(0)])
    weights = tmp_path / "step-000005" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    parts = [blank_part(0), blank_part(4)]
    for step, loss, best_step in ((6, 1.8, 6), (7, 1.85, 6), (8, 1.85, 6), (9, 1.85, 6)):
        save_loss(step, loss, best_step, parts)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000006", "step-000008", "step-000009"]
    assert checkpoint.load(tmp_path, "best").state["step"] == 6


def test_last_and_best_are_kept(tmp_path):
    for step, best in ((1, True), (2, True), (3, False), (4, False)):
        save(tmp_path, step, best)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000002", "step-000004"]
    assert checkpoint.load(tmp_path, "best").state["step"] == 2
    assert checkpoint.load(tmp_path, "last").state["step"] == 4 == run_folder.last_state(tmp_path)["step"]


def test_without_an_evaluation_the_last_checkpoint_is_loaded_as_the_best(tmp_path):
    """A run that was stopped early had no best.json, so that the printed command for sampling failed."""
    save(tmp_path, 1, best=False)
    assert checkpoint.load(tmp_path, "best").state["step"] == 1


@pytest.mark.parametrize("best", [True, False])
def test_replace_removes_the_previous_run_and_no_other_file(tmp_path, best):
    """--overwrite=True removed the previous run before the new one had saved anything."""
    assert not run_folder.exists(tmp_path)
    for step in (1, 5, 9):
        save(tmp_path, step, keep_last=5)
    (tmp_path / "notes.txt").write_text("mine")
    evaluation = {} if best else dict(best_step=0, best_val_loss=None)
    state = blank_state(5, run_id="another", **evaluation)
    path = save_state(tmp_path, state, keep_last=5, replace=True)
    assert [folder.name for folder in tmp_path.glob("step-*")] == ["step-000005"] and (tmp_path / "notes.txt").exists()
    assert checkpoint.load(tmp_path, "best").path == path and (tmp_path / "best.json").exists() == best


@pytest.mark.parametrize("pointer", ["last.json", "best.json"])
def test_a_pointer_that_cannot_be_written_loses_nothing(tmp_path, monkeypatch, pointer, capsys):
    """The save counted as failed although its checkpoint was complete, and later ones replaced the best one."""
    save(tmp_path, 1)

    def write(path, value):
        if path.name == pointer:
            raise OSError(28, "No space left on device")
        write_json(path, value)

    monkeypatch.setattr(run_folder, "write_json", write)
    save(tmp_path, 2)
    assert "step-000002 is saved, but not all pointers" in capsys.readouterr().err
    assert [path.name for path in run_folder.directories(tmp_path)] == ["step-000001", "step-000002"]
    for which in ("last", "best"):
        assert checkpoint.load(tmp_path, which).state["step"] == 2
    monkeypatch.undo()
    save(tmp_path, 3, best=False)
    assert checkpoint.load(tmp_path).state["step"] == 3 and checkpoint.load(tmp_path, "best").state["step"] == 2
    assert [path.name for path in run_folder.directories(tmp_path)] == ["step-000002", "step-000003"]


def test_a_kill_while_a_run_is_overwritten_does_not_bring_back_the_old_run(tmp_path):
    """A kill after the new run's first save, before the old checkpoints are removed."""
    for step in (5, 9):
        save(tmp_path, step, keep_last=2)
    shutil.copytree(tmp_path, tmp_path / "before")
    save_state(tmp_path, blank_state(2, run_id="another", best_val_loss=5.0), replace=True)
    for path in run_folder.directories(tmp_path / "before"):
        path.rename(tmp_path / path.name)
    for which in ("last", "best"):
        assert checkpoint.load(tmp_path, which).state["step"] == 2


@pytest.mark.parametrize("which", ["last", "best"])
@pytest.mark.parametrize("content", ["", "{", "[]", "3", "../x", 5, "the other one", None])
def test_a_damaged_pointer_does_not_lose_the_run(tmp_path, which, content, capsys):
    """With a damaged best.json, sample.py silently loaded the last checkpoint, and the next save removed the best."""
    for step, best in ((1, True), (2, True), (3, False)):
        save(tmp_path, step, best)
    names = {"last": "step-000003", "best": "step-000002"}
    pointer = tmp_path / f"{which}.json"
    if content is None:
        pointer.unlink()
    elif content in ("../x", 5):
        write_json(pointer, {"checkpoint": content})
    elif content == "the other one":
        shutil.copy(tmp_path / ("best.json" if which == "last" else "last.json"), pointer)
    else:
        pointer.write_text(content)
    assert run_folder.exists(tmp_path)
    for other, name in names.items():
        assert checkpoint.load(tmp_path, other).path.name == name
    problem = f"{pointer} {'is missing' if content is None else 'names '}"
    assert problem in capsys.readouterr().err
    run_folder.restore_pointers(tmp_path)
    assert f"{names[which]} is the {which} one; rewriting it" in capsys.readouterr().err
    assert read_json(pointer) == {"checkpoint": names[which]}
    save(tmp_path, 4, best=False)
    assert [path.name for path in run_folder.directories(tmp_path)] == ["step-000002", "step-000004"]


@pytest.mark.parametrize("damaged", [(1,), (2,), (2, 3)])
def test_a_damaged_best_checkpoint_is_reported_if_the_last_one_is_damaged_too(tmp_path, damaged, capsys):
    """best.json was called wrong, and rewritten or removed. The first one of the damaged ones is the best."""
    paths = [save(tmp_path, step, best=step < 3, keep_last=3) for step in range(1, 1 + damaged[-1])]
    for step in damaged:
        (paths[step - 1] / "state.json").write_text("{}", encoding="utf-8")
    best = paths[damaged[0] - 1]
    run_folder.restore_pointers(tmp_path)
    assert capsys.readouterr().err == "" and read_json(tmp_path / "best.json") == {"checkpoint": best.name}
    if damaged == (1,):
        with pytest.raises(CheckpointError, match=r"state\.json has changed"):
            checkpoint.load(tmp_path, "best")
    else:
        assert checkpoint.load(tmp_path, "best").state["step"] == 1
        assert f"{best / 'state.json'} has changed since it was written" in capsys.readouterr().err


def test_saving_an_earlier_step_removes_later_checkpoints(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step, best=False, keep_last=3)
    save(tmp_path, 15, best=False, keep_last=2)
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-000010", "step-000015"]


@pytest.mark.skipif(sys.platform != "linux", reason="file names are Unicode on other systems")
def test_a_run_whose_name_is_not_utf8_is_not_called_damaged(tmp_path):
    """safetensors cannot open such a path."""
    out_dir = tmp_path / os.fsdecode(b"out-\xe9")
    path = save(out_dir, 1)
    for source in (out_dir, path):
        with pytest.raises(CheckpointError, match=r"out-.*: it is not UTF-8; .*rename the file or folder"):
            checkpoint.load(source)
    out_dir.rename(tmp_path / "out")
    assert checkpoint.load(tmp_path / "out").state["step"] == 1


@pytest.mark.parametrize("name", ["step-²", "step-٣", "step-", "step-1x", "step--1"])
def test_a_folder_with_another_name_is_not_a_checkpoint(name, tmp_path):
    """'²'.isdigit() is true, but int('²') fails, so that such a folder in a run ended tools with a traceback."""
    path = save(tmp_path, 1)
    (tmp_path / name).mkdir()
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / f"{name}.safetensors").touch()
    assert run_folder.directories(tmp_path) == [path] and find_snapshots(tmp_path) == {}
    assert tokenizer.load(tmp_path).vocab_size == checkpoint.load(tmp_path).tokenizer.vocab_size
    assert find_runs.runs_under(tmp_path) == [tmp_path]
    (tmp_path / "last.json").unlink()
    assert tokenizer.load(tmp_path).vocab_size == checkpoint.load(tmp_path).tokenizer.vocab_size


def test_the_torchrun_id_is_read_from_a_damaged_checkpoint(tmp_path):
    """Under torchrun, --overwrite=True failed if the newest checkpoint was damaged, because all of it was read."""
    assert run_folder.last_state(tmp_path).get("torchrun") is None
    for step, run in ((1, "first"), (2, "second")):
        path = save(tmp_path, step, keep_last=2)
        edit_state(path, lambda state, run=run: state.update(torchrun=run))
    (tmp_path / "step-000002" / "model.safetensors").unlink()
    assert run_folder.last_state(tmp_path).get("torchrun") == "second"
    (tmp_path / "step-000002" / "state.json").write_text("{")
    assert run_folder.last_state(tmp_path).get("torchrun") == "first"
