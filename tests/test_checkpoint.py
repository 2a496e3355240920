from pathlib import Path

import pytest
import torch

from folio import checkpoint
from folio.checkpoint import CheckpointError
from folio.files import read_json, write_json
from folio.tokenizer import CharTokenizer

WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.ones(1, dtype=torch.bfloat16)}
MOMENTS = {"a.weight/exp_avg": torch.rand(2, 3), "a.weight/step": torch.tensor(3.0)}


def save(out_dir: Path, step: int, best: bool = True) -> Path:
    state = {"next_sequence": 7 * step, "config": {"start": "é\n"}}
    return checkpoint.save(out_dir, step, WEIGHTS, MOMENTS, CharTokenizer("ab"), state, best)


def test_what_is_saved_comes_back(tmp_path):
    path = save(tmp_path, 250)
    assert path == tmp_path / "step-000250"
    for source in (tmp_path, path):
        loaded = checkpoint.load(source)
        assert loaded.path == path and loaded.tokenizer.characters == "ab"
        assert loaded.state == {
            "format_version": 1,
            "step": 250,
            "next_sequence": 1750,
            "config": {"start": "é\n"},
        }
        for saved, back in ((WEIGHTS, loaded.model), (MOMENTS, loaded.optimizer())):
            assert saved.keys() == back.keys() and all(torch.equal(saved[name], back[name]) for name in saved)
    assert not list(tmp_path.glob(".*"))
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1  # whoever may read one may read all


def test_last_and_best_are_kept(tmp_path):
    for step, best in ((1, True), (2, True), (3, False), (4, False)):
        save(tmp_path, step, best)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000002", "step-000004"]
    assert checkpoint.load(tmp_path, "best").state["step"] == 2
    assert checkpoint.load(tmp_path, "last").state["step"] == 4 == checkpoint.last_step(tmp_path)


def test_without_an_evaluation_the_last_is_the_best_there_is(tmp_path):
    """A run stopped early had no best.json, and the command that it printed for sampling failed."""
    save(tmp_path, 1, best=False)
    assert checkpoint.load(tmp_path, "best").state["step"] == 1


def test_the_same_step_can_be_saved_again(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 1, best=False)
    assert checkpoint.load(tmp_path, "best").state["step"] == 1


def test_removing_all_leaves_other_files(tmp_path):
    assert not checkpoint.exists(tmp_path)
    save(tmp_path, 1)
    (tmp_path / "notes.txt").write_text("mine")
    assert checkpoint.exists(tmp_path)
    checkpoint.remove_all(tmp_path)
    assert not checkpoint.exists(tmp_path) and [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_write_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "sync", full)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, 2)
    assert checkpoint.load(tmp_path).state["step"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.json", "last.json", "step-000001"]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "tokenizer.json", "state.json"])
def test_damage_is_found(tmp_path, name):
    path = save(tmp_path, 1) / name
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=f"{name} has changed"):
        checkpoint.load(tmp_path)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=f"{name} has changed"):
        checkpoint.load(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        checkpoint.load(tmp_path)


def test_what_is_no_checkpoint_is_told(tmp_path):
    with pytest.raises(CheckpointError, match="gone holds no checkpoint: train one first"):
        checkpoint.load(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="it is not a checkpoint's folder"):
        checkpoint.load(tmp_path)
    (save(tmp_path, 1) / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.load(tmp_path)
    (tmp_path / "last.json").write_text("")
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
