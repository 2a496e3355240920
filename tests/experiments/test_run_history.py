"""The settings, the checkpoint, and the runtime with which a step of a run is replayed."""

import shutil
from pathlib import Path

import pytest
import torch

from folio import UserError
from folio.checkpoints import checkpoint, run_folder
from tests.support.replays import SMALLEST, remove_checkpoints, replay
from tests.support.simulated import SimulatedMachine
from tools.replay import ReplayConfig, main
from train import train


def test_a_run_that_was_resumed_with_other_settings(tiny):
    """Each step has the settings that it had in the run, also if only the last checkpoint is left."""
    cfg = tiny(max_iters=4, lr_decay_iters=12)
    train(cfg)
    changes = dict(learning_rate=1e-3, dropout=0.3, batch_size=2, gradient_accumulation_steps=2, weight_decay=0.0)
    train(tiny(max_iters=8, init_from="resume", **changes))
    train(tiny(max_iters=8, init_from="resume", **changes, patience=9))  # nothing to train
    train(tiny(max_iters=12, init_from="resume", **{**changes, "grad_clip": 0.1}))
    assert replay(cfg, 10)["replayed_from"] == "the checkpoint of step 8"
    remove_checkpoints(cfg, *(int(path.name[5:]) for path in run_folder.directories(Path(cfg.out_dir))[:-1]))
    for step in (3, 4, 5, 9, 12):
        facts = replay(cfg, step)
        assert facts["bitwise"] and facts["equal_before"] == [*range(1, step)], step
        assert facts["replayed_from"] == "step 0, random weights"


def test_a_run_with_a_time_budget(tiny, monkeypatch, capsys):
    """Its learning rates follow from decisions on its length."""
    recipe = dict(max_iters=100, eval_interval=20, lr_schedule="wsd", wsd_decay_iters=50, warmup_iters=5, keep_last=9)
    cfg = tiny(**recipe, **SMALLEST, minutes=0.5, sample_tokens=0)
    with monkeypatch.context() as patch:
        SimulatedMachine(patch, lambda step: 0.5 if step < 20 else 1.5, lambda step: 0.1)
        train(cfg)
    state = checkpoint.load(Path(cfg.out_dir)).state
    assert len(state["decisions"]) > 1
    last = state["step"]
    assert replay(cfg, last)["bitwise"]
    train(tiny(**{**recipe, "max_iters": last + 3}, **SMALLEST, init_from="resume", minutes=None, sample_tokens=0))
    assert replay(cfg, last)["bitwise"] and replay(cfg, last + 2)["bitwise"]
    remove_checkpoints(cfg, *(int(path.name[5:]) for path in run_folder.directories(Path(cfg.out_dir))[:-1]))
    capsys.readouterr()
    facts = replay(cfg, last)
    assert facts["bitwise"] is False and "the logged learning rate is" in facts["remarks"][-1]
    assert f"no checkpoint says how long the run was to be before step {last:,}" in capsys.readouterr().out


def test_a_run_from_other_weights(tiny, tmp_path, capsys):
    """Its step 0 has these weights, also after it was resumed, when init_from is "resume"."""
    train(tiny(out_dir=str(tmp_path / "base")))
    cfg = tiny(out_dir=str(tmp_path / "fine"), init_from=str(tmp_path / "base"), max_iters=6, eval_interval=3)
    train(cfg)
    train(tiny(out_dir=cfg.out_dir, init_from="resume", max_iters=9))
    remove_checkpoints(cfg, 6)
    assert checkpoint.load(Path(cfg.out_dir)).state["started_from"] == str(tmp_path / "base")
    facts = replay(cfg, 7)
    assert facts["bitwise"] and facts["replayed_from"] == f"step 0, the weights of {tmp_path / 'base'}"
    train(tiny(out_dir=str(tmp_path / "base"), init_from="resume", max_iters=14))
    facts = replay(cfg, 2)
    assert facts["bitwise"] is False and facts["different_before"] == [1]
    assert "from which it started, may have changed" in facts["remarks"][-1]
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(UserError, match="no checkpoint before this step, and the weights that it started from cannot"):
        replay(cfg, 2)


def test_the_number_of_threads_is_that_of_the_run(tiny, monkeypatch, capsys):
    """With another number, sums are rounded differently."""
    train(tiny(max_iters=2))
    threads = torch.get_num_threads()
    assert checkpoint.load(Path(tiny().out_dir)).state["threads"] == threads
    with monkeypatch.context() as patch:
        set_to: list[int] = []
        patch.setattr(torch, "set_num_threads", set_to.append)
        assert replay(tiny(), 2)["bitwise"] and set_to == [threads]


def test_another_dtype_is_named_as_the_reason(tiny, capsys):
    train(tiny())
    facts = replay(tiny(), 12, dtype="bfloat16")
    assert facts["bitwise"] is False and facts["loss"] == pytest.approx(facts["logged_loss"], abs=0.05)
    reason = "it was trained with dtype=float32, and this is bfloat16"
    assert facts["remarks"] == ["the first step that differs from the log is 7", f"the likely reason: {reason}"]
    out = capsys.readouterr().out
    assert f"it may not be bitwise equal: {reason}" in out and "the logged loss is" in out


def test_a_damaged_checkpoint_is_left_out(tiny, capsys):
    cfg = tiny(eval_interval=3, keep_last=9)
    train(cfg)
    file = Path(cfg.out_dir, "step-000006", "model.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    facts = replay(cfg, 8)
    assert facts["bitwise"] and facts["replayed_from"] == "the checkpoint of step 3"
    assert "model.safetensors has changed since it was written" in capsys.readouterr().err
    Path(cfg.out_dir, "step-000003", "manifest.json").unlink()
    assert replay(cfg, 8)["replayed_from"] == "step 0, random weights"
    assert "step-000003 was removed; replaying from an earlier step" in capsys.readouterr().err


def test_a_checkpoint_of_an_abandoned_future_is_left_out(tiny, tmp_path):
    """The run was resumed from step 3, before it, with another learning rate, and keeps the older one of step 4."""
    cfg = tiny(eval_interval=1, keep_last=9, max_iters=4, lr_decay_iters=12)
    train(cfg)
    abandoned = Path(cfg.out_dir, "step-000004")
    abandoned.rename(tmp_path / "abandoned")
    train(tiny(eval_interval=5, keep_last=9, lr_decay_iters=12, max_iters=9, init_from="resume", learning_rate=1e-4))
    (tmp_path / "abandoned").rename(abandoned)
    facts = replay(cfg, 5)
    assert facts["bitwise"] and facts["replayed_from"] == "the checkpoint of step 3"


def test_a_step_or_a_run_that_does_not_exist_is_an_error(tiny, tmp_path, monkeypatch):
    cfg = tiny(max_iters=2, eval_interval=2)
    train(cfg)
    (tmp_path / "empty").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "metrics.jsonl").write_text('{"step": 0}\n')
    monkeypatch.chdir(tmp_path)
    for name, step, message in (
        ("out", 3, r"step=3: the last step of out is 2; choose one up to it"),
        ("out/step-000002", 1, r"is one checkpoint; name the run: .*out$"),
        ("gpt2", 1, r"gpt2 holds weights and no run, so there are no steps to replay"),
        ("empty", 1, r"empty holds no checkpoint: try out"),
        ("missing", 1, r"missing holds no checkpoint"),
        ("*", 1, r"\* matches \d folders; name one run: "),
        ("new", 1, r"new has no checkpoint yet, which says what its settings are; wait"),
    ):
        with pytest.raises(UserError, match=message):
            main(ReplayConfig(run=(name,), step=step))
