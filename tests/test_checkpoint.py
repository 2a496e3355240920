import random
from pathlib import Path

import pytest
import torch

from folio import checkpoint
from folio.checkpoint import CheckpointError
from folio.files import read_json, write_json
from folio.tokenizer import CharTokenizer

WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.ones(1, dtype=torch.bfloat16)}
MOMENTS = {"a.weight/exp_avg": torch.rand(2, 3), "a.weight/step": torch.tensor(3.0)}


def save(out_dir: Path, step: int, best: bool = True, keep_last: int = 1) -> Path:
    state = {"next_sequence": 7 * step, "config": {"start": "é\n"}, "best_step": 0, "evaluations_since_best": 0}
    state |= {key: {} for key in ("model", "resolved", "dataset", "guard", "grad_scaler", "versions")}
    return checkpoint.save(out_dir, step, WEIGHTS, MOMENTS, CharTokenizer("ab"), state, best, keep_last)


def test_what_is_saved_comes_back(tmp_path):
    path = save(tmp_path, 250)
    assert path == tmp_path / "step-000250"
    for source in (tmp_path, path):
        loaded = checkpoint.load(source)
        assert loaded.path == path and loaded.tokenizer.characters == "ab"
        assert loaded.state["step"] == 250 and loaded.state["next_sequence"] == 1750
        assert loaded.state["config"] == {"start": "é\n"}
        for saved, back in ((WEIGHTS, loaded.model), (MOMENTS, loaded.optimizer())):
            assert saved.keys() == back.keys() and all(torch.equal(saved[name], back[name]) for name in saved)
    assert not list(tmp_path.glob(".*"))
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1  # whoever may read one may read all


def test_last_and_best_are_kept(tmp_path):
    for step, best in ((1, True), (2, True), (3, False), (4, False)):
        save(tmp_path, step, best)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000002", "step-000004"]
    assert checkpoint.load(tmp_path, "best").state["step"] == 2
    assert checkpoint.load(tmp_path, "last").state["step"] == 4 == checkpoint.last_state(tmp_path)["step"]


def test_without_an_evaluation_the_last_is_the_best_there_is(tmp_path):
    """A run stopped early had no best.json, and the command that it printed for sampling failed."""
    save(tmp_path, 1, best=False)
    assert checkpoint.load(tmp_path, "best").state["step"] == 1


def test_the_same_step_can_be_saved_again(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 1, best=False)
    assert checkpoint.load(tmp_path, "best").state["step"] == 1


@pytest.mark.parametrize("best", [True, False])
def test_another_run_takes_the_place_of_what_is_there(tmp_path, best):
    """--overwrite=True removed the earlier run before the new one had saved anything, and often it never did."""
    assert not checkpoint.exists(tmp_path)
    for step in (1, 5, 9):
        save(tmp_path, step, keep_last=5)
    (tmp_path / "notes.txt").write_text("mine")
    state = checkpoint.load(tmp_path).state
    path = checkpoint.save(tmp_path, 5, WEIGHTS, MOMENTS, CharTokenizer("ab"), state, best, 5, replace=True)
    assert [found.name for found in tmp_path.glob("step-*")] == ["step-000005"] and (tmp_path / "notes.txt").exists()
    assert checkpoint.load(tmp_path, "best").path == path and (tmp_path / "best.json").exists() == best


def test_a_write_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "sync", full)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, 2)
    assert checkpoint.load(tmp_path).state["step"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.json", "last.json", "step-000001"]


FILES = ["model.safetensors", "optimizer.safetensors", "tokenizer.json", "state.json", "manifest.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path, name, seed, capsys):
    """Every file, cut at random lengths, with random bits flipped, and gone."""
    rng = random.Random(seed)
    for step in (1, 2, 3):
        path = save(tmp_path, step, best=step == 1, keep_last=2) / name
    content = path.read_bytes()
    damages = [content[: rng.randrange(len(content))] for _ in range(8)]
    for _ in range(40):
        flipped = bytearray(content)
        flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        damages.append(bytes(flipped))
    for damage in damages:
        path.write_bytes(damage)
        try:
            taken = checkpoint.load(tmp_path).state["step"]
        finally:
            said = capsys.readouterr().err
        harmless = taken == 3 and name == "manifest.json"  # a flipped bit may leave all that it says the same
        assert harmless or (taken == 2 and "step-000003" in said and "loading step-000002" in said)
        if not harmless:
            with pytest.raises(CheckpointError, match="step-000003"):
                checkpoint.load(path.parent)
    path.unlink()
    assert checkpoint.load(tmp_path).state["step"] == 2
    assert checkpoint.load(tmp_path, "best").state["step"] == 1


@pytest.mark.parametrize("pointer", ["last.json", "best.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"checkpoint": "../x"}', '{"checkpoint": 5}', None])
def test_a_damaged_pointer_does_not_lose_the_run(tmp_path, pointer, content):
    for step in (1, 2):
        save(tmp_path, step, keep_last=2)
    (tmp_path / pointer).unlink() if content is None else (tmp_path / pointer).write_text(content)
    assert checkpoint.exists(tmp_path)
    for which in ("last", "best"):
        assert checkpoint.load(tmp_path, which).state["step"] == 2
    save(tmp_path, 3)
    assert checkpoint.load(tmp_path).state["step"] == 3


def test_what_a_kill_left_is_cleared(tmp_path):
    save(tmp_path, 1)
    (tmp_path / ".step-000002.77.tmp").mkdir()
    (tmp_path / ".step-000002.77.tmp" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".last.json.77.tmp").write_text("{")
    checkpoint.clear_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.json", "last.json", "step-000001"]


def test_going_back_drops_what_lies_beyond(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step, best=False, keep_last=3)
    save(tmp_path, 15, best=False, keep_last=2)
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-000010", "step-000015"]


def test_what_is_no_checkpoint_is_told(tmp_path):
    with pytest.raises(CheckpointError, match="gone holds no checkpoint: train one first"):
        checkpoint.load(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="it is not a checkpoint's folder"):
        checkpoint.load(tmp_path)
    (save(tmp_path, 1) / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.load(tmp_path)


def test_a_later_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT_VERSION", 2)
    save(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format version 2 is not 1"):
        checkpoint.load(tmp_path)


def test_files_are_replaced_whole(tmp_path):
    write_json(tmp_path / "deep" / "x.json", {"a": "é"})
    assert read_json(tmp_path / "deep" / "x.json") == {"a": "é"}
    with pytest.raises(TypeError):
        write_json(tmp_path / "deep" / "x.json", object())
    assert read_json(tmp_path / "deep" / "x.json") == {"a": "é"}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["x.json"]


def test_an_old_checkpoint_that_cannot_be_removed_is_no_failure(tmp_path, monkeypatch):
    """Where an old step's folder was a link, the save had succeeded and was reported as failed."""
    elsewhere = tmp_path / "elsewhere"
    out_dir = tmp_path / "out"
    save(elsewhere, 1)
    out_dir.mkdir()
    (out_dir / "step-000001").symlink_to(elsewhere / "step-000001", target_is_directory=True)
    save(out_dir, 2)
    assert [path.name for path in sorted(out_dir.glob("step-*"))] == ["step-000002"]
    assert checkpoint.load(elsewhere).state["step"] == 1  # only the link is removed

    def refuse(path):
        raise PermissionError("not yours")

    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda path, ignore_errors=False: ignore_errors or refuse(path))
    save(out_dir, 3)
    assert checkpoint.load(out_dir).state["step"] == 3


def test_who_wrote_it_is_known_of_a_damaged_checkpoint(tmp_path):
    """Under torchrun, --overwrite=True was refused where the newest checkpoint was damaged: all of it was read."""
    assert checkpoint.written_by(tmp_path) is None
    for step, run in ((1, "first"), (2, "second")):
        path = save(tmp_path, step, keep_last=2)
        write_json(path / "state.json", {**read_json(path / "state.json"), "torchrun": run})
    (tmp_path / "step-000002" / "model.safetensors").unlink()
    assert checkpoint.written_by(tmp_path) == "second"
    (tmp_path / "step-000002" / "state.json").write_text("{")
    assert checkpoint.written_by(tmp_path) == "first"
