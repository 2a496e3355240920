"""folio/training/session.py, through train(): signals, metrics, checkpoints, full disks, patience, samples."""

import ast
import contextlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import train as train_script
from folio import UserError
from folio.base.files import is_locked, read_json
from folio.checkpoints import checkpoint, foreign, run_folder
from folio.training.out_dir import reserve
from folio.training.run_log import Metrics
from folio.training.session import TrainingError
from tests.support.processes import wait
from tests.support.runs import (
    assert_same_run,
    assert_same_snapshots,
    read_losses,
    read_metrics,
    run_with_losses,
    set_losses,
)
from tests.support.simulated import SimulatedMachine
from tests.support.terminals import terminal
from tests.support.torchrun import LONG_RUN, output, run_ranks, start_ranks, wait_for_step
from train import train


@pytest.fixture
def saved_steps(monkeypatch) -> list[int]:
    """The steps at which train() saves a checkpoint."""
    steps, save = [], checkpoint.save

    def recorded_save(out_dir, step, *args, **kwargs):
        steps.append(step)
        return save(out_dir, step, *args, **kwargs)

    monkeypatch.setattr(checkpoint, "save", recorded_save)
    return steps


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_stopped_by_a_signal_resumes_bitwise_identically(tiny, tmp_path, at_step, number):
    """When the terminal was closed (SIGHUP), the run ended at once, and lost the steps since its last checkpoint."""
    uninterrupted, stopped = tiny(), tiny(out_dir=str(tmp_path / "stopped"))
    train(uninterrupted)
    at_step(7, signal.raise_signal, number)
    train(stopped)
    assert run_folder.last_state(Path(stopped.out_dir))["step"] == 8  # the step after the signal
    assert checkpoint.load(Path(stopped.out_dir)).state["stopped_by"] == signal.Signals(number).name
    train(replace(stopped, init_from="resume"))
    assert_same_run(uninterrupted.out_dir, stopped.out_dir)


def test_sigusr1_saves_and_training_continues(tiny, saved_steps, at_step):
    at_step(3, signal.raise_signal, signal.SIGUSR1)
    train(tiny(eval_interval=100))
    assert saved_steps == [4, 12]


def test_two_fsdp_processes_survive_a_failed_save_stop_by_a_signal_and_resume(tiny, tmp_path):
    """Stopping, gathering weights and a failed save concern every rank, though only rank 0 writes anything."""
    settings = dict(LONG_RUN, max_iters=40, lr_decay_iters=40, eval_interval=10, eval_iters=1, dropout=0.1)
    settings |= dict(n_layer=1, parallel="fsdp", gradient_accumulation_steps=2, snapshots=12)
    uninterrupted, stopped = (tiny(**settings, out_dir=str(tmp_path / name)) for name in ("uninterrupted", "stopped"))
    run_ranks(2, uninterrupted)
    Path(stopped.out_dir).mkdir()
    Path(stopped.out_dir, "step-000010").write_text("a file where a checkpoint's folder should be")
    ranks = start_ranks(2, stopped)
    wait_for_step(stopped, 12)
    os.kill(ranks[1].pid, signal.SIGTERM)  # rank 1 gets the signal, and both stop
    assert [wait(rank) for rank in ranks] == [0, 0], output(stopped)
    assert "step 10 could not be saved" in output(stopped) and "training continues" in output(stopped)
    state = checkpoint.load(Path(stopped.out_dir)).state
    assert state["stopped_by"] == "SIGTERM" and 12 <= state["step"] < 40
    assert state["best_step"] != 10  # a checkpoint that was not saved is not the best
    assert "resuming from" in run_ranks(2, replace(stopped, init_from="resume"))
    assert_same_run(uninterrupted.out_dir, stopped.out_dir)
    assert_same_snapshots(uninterrupted.out_dir, stopped.out_dir)


def test_signals_to_one_of_two_processes_save_once_and_stop_all(tiny):
    """The processes agree one step after a request. The process repeated its request, so two steps were saved."""
    cfg = tiny(**{**LONG_RUN, "max_iters": 100_000, "eval_interval": 100_000}, save_interval_minutes=None, keep_last=10)
    ranks = start_ranks(2, cfg)
    for step, number in ((20, signal.SIGUSR1), (60, signal.SIGTERM)):
        wait_for_step(cfg, step)
        os.kill(ranks[1].pid, number)
    assert [wait(rank) for rank in ranks] == [0, 0], output(cfg)
    assert len(list(Path(cfg.out_dir).glob("step-*"))) == 2  # one for SIGUSR1, one for SIGTERM
    state = checkpoint.load(Path(cfg.out_dir)).state
    assert state["stopped_by"] == "SIGTERM" and f"saved after step {state['step']}" in output(cfg)


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_a_run_begins_with_the_loss_before_the_first_step(tiny, text, capsys):
    train(tiny(max_iters=3, learning_rate=0.0, min_lr=0.0))  # so that the loss never changes
    first = json.loads(Path(tiny().out_dir, "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == first["tokens"] == 0 and first["loss"] is None
    assert first["val_loss"] == read_metrics(tiny().out_dir)[-1]["val_loss"]
    lines = capsys.readouterr().out.splitlines()
    assert f"step 0/3: val {first['val_loss']:.4f} (uniform baseline: {math.log(len(set(text))):.4f})" in lines
    state = checkpoint.load(Path(tiny().out_dir)).state
    assert state["best_step"] == 3 and state["evaluations_since_best"] == 0  # it is not one of the evaluations
    train(tiny(max_iters=5, init_from="resume"))
    assert "step 0/" not in capsys.readouterr().out and len(read_metrics(tiny().out_dir)) == 5


def test_a_validation_loss_is_printed_only_where_it_was_measured(tiny, capsys):
    """Each line repeated the loss of the last evaluation."""
    train(tiny(max_iters=6, eval_interval=3))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    evaluated = [line.split("/")[0] for line in lines if " val " in line]
    assert len(lines) == 7 and evaluated == ["step 0", "step 3", "step 6"]


# --- when a checkpoint is saved ---------------------------------------------------------------------------------------


def test_a_checkpoint_is_saved_when_save_interval_minutes_have_passed(tiny, saved_steps):
    train(tiny(eval_interval=100, save_interval_minutes=1e-9, max_iters=4, always_save_checkpoint=False))
    assert saved_steps == [1, 2, 3, 4]


def test_without_always_save_checkpoint_only_the_best_and_the_last_are_saved(tiny, saved_steps):
    settings = dict(max_iters=9, eval_interval=2, learning_rate=0.0, min_lr=0.0)  # so that the loss never improves
    train(tiny(**settings, always_save_checkpoint=False))
    assert saved_steps == [2, 9]  # the first evaluation is the best
    saved_steps.clear()
    train(tiny(**settings, overwrite=True))
    assert saved_steps == [2, 4, 6, 8, 9]


@pytest.mark.parametrize("async_save", [True, False])
def test_async_save_writes_checkpoints_while_training_continues(tiny, monkeypatch, async_save):
    """The first checkpoint takes until step 7 is logged. Training does not wait for it; the next checkpoint does."""
    save, log, step_7_is_logged, events = checkpoint.save, Metrics.log, threading.Event(), []

    def slow_save(out_dir, step, *args):
        events.append(f"begin {step}")
        if step == 4:
            step_7_is_logged.wait(timeout=300 if async_save else 0.2)
        path = save(out_dir, step, *args)
        events.append(f"end {step}")
        return path

    def recorded_log(self, line, *remark):
        log(self, line, *remark)
        events.append(line["step"])
        if line["step"] == 7:
            step_7_is_logged.set()

    monkeypatch.setattr(checkpoint, "save", slow_save)
    monkeypatch.setattr(Metrics, "log", recorded_log)
    train(tiny(max_iters=8, eval_interval=4, async_save=async_save))
    assert (events.index("end 4") > events.index(7)) == async_save
    assert events.index("end 4") < events.index("begin 8") < events.index("end 8")
    a, b = (checkpoint.load(Path(tiny().out_dir, f"step-00000{step}")) for step in (4, 8))
    assert not torch.equal(a.model["transformer.wte.weight"], b.model["transformer.wte.weight"])


# --- disks that are full or cannot be written -------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path):
    """A disk of 1,500 KiB. A checkpoint of the tiny model takes about 340 KiB. Needs root on Linux."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(folder)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no small disk can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_does_not_end_a_run(tiny, small_disk, monkeypatch, capsys):
    """Failed saves are reported, training continues, and checkpoints are saved again once the disk has free space."""
    ballast, evaluate, evaluations = small_disk / "ballast", train_script.evaluate, itertools.count()

    def fill_disk_and_evaluate(*args):
        match next(evaluations):  # 0: before step 1
            case 2:
                ballast.write_bytes(bytes(900_000))
            case 4:
                ballast.unlink()
        return evaluate(*args)

    monkeypatch.setattr(train_script, "evaluate", fill_disk_and_evaluate)
    out_dir = small_disk / "out"
    train(tiny(out_dir=str(out_dir), max_iters=10, eval_interval=2, keep_last=1, async_save=False))
    out = capsys.readouterr().out
    assert [step for step in (2, 4, 6, 8, 10) if f"step {step} could not be saved" in out] == [4, 6]
    assert checkpoint.load(out_dir).state["step"] == 10
    assert not list(out_dir.glob(".*"))


def test_a_last_step_that_cannot_be_saved_is_an_error(tiny, small_disk):
    out_dir = small_disk / "out"
    train(tiny(out_dir=str(out_dir), max_iters=2, warmup_iters=0))
    (small_disk / "ballast").write_bytes(bytes(900_000))
    with pytest.raises(TrainingError, match=r"step 4 could not be saved .*; the checkpoints before it are unchanged"):
        train(tiny(out_dir=str(out_dir), max_iters=4, warmup_iters=0, init_from="resume"))
    assert checkpoint.load(out_dir).state["step"] == 2


def test_a_folder_that_cannot_be_written_is_an_error_at_the_start(tiny, small_disk, tmp_path):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(UserError, match=r"out_dir=.*cannot be written .*; choose another --out_dir"):
        train(tiny(out_dir=str(small_disk / "out")))
    (tmp_path / "file").write_text("")
    for invalid in (tmp_path / "file" / "out", tmp_path / ("x" * 300)):
        with pytest.raises(UserError, match=r"out_dir=.*cannot be written"):
            train(tiny(out_dir=str(invalid)))


def test_a_pointer_that_cannot_be_written_does_not_lose_the_best(tiny, monkeypatch, capsys):
    """The best loss was treated as unsaved, so that a later, worse evaluation replaced the best checkpoint."""
    write, refused = run_folder.write_json, []

    def write_to_full_disk(path, value):
        if path.name == "last.json" and value["checkpoint"] == "step-000002" and not refused:
            refused.append(path)
            raise OSError(28, "No space left on device")
        write(path, value)

    monkeypatch.setattr(run_folder, "write_json", write_to_full_disk)
    run_with_losses(tiny, monkeypatch, capsys, [2.5, 2.0, 2.8, 2.7, 2.6], keep_last=1)
    out_dir = Path(tiny().out_dir)
    best, last = checkpoint.load(out_dir, "best"), checkpoint.load(out_dir)
    assert refused and read_json(out_dir / "best.json") == {"checkpoint": best.path.name}
    assert (best.state["step"], last.state["step"], last.state["best_val_loss"]) == (2, 5, 2.0)


# --- folders that are moved -------------------------------------------------------------------------------------------


def test_a_run_whose_folder_is_moved_stops(tiny, tmp_path, at_step):
    """It wrote to a new folder at the old path, without a lock, where a second run was allowed too."""
    old, new = Path(tiny().out_dir), tmp_path / "elsewhere" / "new name"
    new.parent.mkdir()
    at_step(8, old.rename, new)
    moved = rf"out_dir={old} was moved to {new}, so the run stops after step [89]; resume"
    with pytest.raises(TrainingError, match=moved):
        train(tiny(eval_interval=4, async_save=False))
    assert not old.exists()
    train(tiny(out_dir=str(new), init_from="resume", eval_interval=4))
    train(tiny(out_dir=str(tmp_path / "uninterrupted"), eval_interval=4))
    assert_same_run(str(new), str(tmp_path / "uninterrupted"))


def test_a_moved_run_does_not_touch_a_new_run_at_its_old_path(tiny, tmp_path, at_step):
    """The two deleted each other's checkpoints, and the first to end removed the other's lock."""
    old = Path(tiny().out_dir)
    with contextlib.ExitStack() as another:

        def move_and_start_another() -> None:
            old.rename(tmp_path / "moved")
            another.enter_context(reserve(old, eval_only=False))

        at_step(3, move_and_start_another)
        with pytest.raises(TrainingError, match=f"was moved to {tmp_path / 'moved'}"):
            train(tiny(save_interval_minutes=1e-9))
        assert [path.name for path in old.iterdir()] == [".lock"] and is_locked(old / ".lock")
    assert run_folder.exists(tmp_path / "moved")


@pytest.mark.parametrize("async_save", [True, False])
def test_moving_the_folder_during_a_save_does_not_end_in_a_traceback(tiny, tmp_path, monkeypatch, async_save):
    old, write_tensors = Path(tiny().out_dir), checkpoint.write_tensors

    def move_and_save(*args):
        monkeypatch.undo()
        old.rename(tmp_path / "moved")
        write_tensors(*args)

    monkeypatch.setattr(checkpoint, "write_tensors", move_and_save)
    with pytest.raises(TrainingError, match=f"was moved to {tmp_path / 'moved'}, so the run stops"):
        train(tiny(async_save=async_save))
    assert not old.exists()


def test_a_run_whose_folder_is_removed_stops(tiny, at_step):
    at_step(3, shutil.rmtree, tiny().out_dir)
    with pytest.raises(TrainingError, match=r"was removed, so the run stops after step 4$"):
        train(tiny())
    assert not Path(tiny().out_dir).exists()


# --- patience ---------------------------------------------------------------------------------------------------------


def test_patience_ends_a_run_that_does_not_improve(tiny, capsys):
    """It ended without a message."""
    cfg = tiny(max_iters=50, eval_interval=2, learning_rate=0.0, min_lr=0.0, patience=3, always_save_checkpoint=False)
    train(cfg)
    assert run_folder.last_state(Path(cfg.out_dir))["step"] == 8  # the best evaluation at step 2, and 3 others
    assert checkpoint.load(Path(cfg.out_dir), "best").state["step"] == 2
    reason = "the validation loss did not improve in 3 evaluations (patience=3)"
    assert f"finished: {reason}" in capsys.readouterr().out
    train(cfg.replace(init_from="resume"))
    assert f"nothing to train: {reason}" in capsys.readouterr().out
    train(cfg.replace(init_from="resume", patience=4))
    assert run_folder.last_state(Path(cfg.out_dir))["step"] == 10


def test_patience_also_ends_a_run_on_a_full_disk(tiny, monkeypatch):
    """An evaluation whose checkpoint could not be saved was not counted, so the run continued to max_iters."""
    save = checkpoint.save

    def save_to_full_disk(out_dir, step, *args):
        if step > 2:
            raise OSError(28, "No space left on device")
        return save(out_dir, step, *args)

    monkeypatch.setattr(checkpoint, "save", save_to_full_disk)
    with pytest.raises(TrainingError, match="step 8 could not be saved"):
        train(tiny(max_iters=50, eval_interval=2, learning_rate=0.0, min_lr=0.0, patience=3))


# --- samples ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample_tokens", [10, 0])
def test_a_run_in_a_terminal_is_bitwise_identical_to_one_in_a_pipe(tiny, tmp_path, sample_tokens):
    """Only the terminal shows the change of the loss, the curve, and the beginning of the sample."""
    piped = tiny(sample_tokens=sample_tokens)
    train(piped)
    shown = tiny(sample_tokens=sample_tokens, out_dir=str(tmp_path / "shown"))
    with terminal(100) as lines:
        train(shown)
    assert_same_run(piped.out_dir, shown.out_dir)
    evaluated = [line for line in lines if re.search("val .* [▼▲].* (best|above)", line)]
    assert [line.split(":")[0] for line in evaluated] == ["step 6", "step 12"] and evaluated[1][-2:] in ("█▁", "▁█")
    following = [lines[lines.index(line) + 1] for line in evaluated]
    samples = [json.loads(line)["text"] for line in Path(shown.out_dir, "samples.jsonl").read_text().splitlines()]
    assert len(samples) == (2 if sample_tokens else 0)
    for sample, line in zip(samples, following, strict=False):
        assert line == "  " + " ".join(sample.split())


def test_samples_contain_no_padding_ids(tiny, tmp_path, monkeypatch):
    """An imported model may have embeddings for ids without a token. Sampling one of them ended the run, before its
    checkpoint was saved.
    """
    train(tiny(max_iters=2, eval_interval=2))
    saved = checkpoint.load(Path(tiny().out_dir))
    wte = torch.cat([saved.model["transformer.wte.weight"], torch.randn(500, 32)])  # much more likely than the others
    shape = {**saved.state["model"], "vocab_size": saved.tokenizer.vocab_size + 500}
    padded = replace(saved, model={**saved.model, "transformer.wte.weight": wte}, state={"model": shape})
    monkeypatch.setattr(foreign, "load", lambda path: padded)
    (tmp_path / "padded").mkdir()
    cfg = tiny(init_from=str(tmp_path / "padded"), out_dir=str(tmp_path / "tuned"))
    train(cfg)
    samples = [json.loads(line) for line in Path(cfg.out_dir, "samples.jsonl").read_text().splitlines()]
    assert [len(sample["text"]) for sample in samples] == [cfg.sample_tokens] * 2


def test_a_sample_that_fails_does_not_end_a_run(tiny, monkeypatch, capsys):
    """It ended the run before the checkpoint of the same step was saved."""

    def failing_generate(*args, **kwargs):
        assert run_folder.exists(Path(tiny().out_dir))  # the checkpoint is saved first
        raise RuntimeError("no sample today")

    monkeypatch.setattr("folio.decoding.text_stream.generate", failing_generate)
    train(tiny(async_save=False))
    assert checkpoint.load(Path(tiny().out_dir)).state["step"] == 12
    assert capsys.readouterr().out.count("no sample (RuntimeError: no sample today)") == 3  # twice, and at the end


@pytest.mark.parametrize("name, killed_at", [("sample", 6), ("sample", 12), ("log", 2)])
def test_a_killed_run_loses_nothing_that_it_had_to_write(tiny, tmp_path, name, killed_at, monkeypatch):
    """After a kill between an evaluation's checkpoint and its sample, samples.jsonl never got that sample.

    Resuming from the checkpoint of step 0 removed the evaluation and the snapshot of that step.
    """
    settings = dict(on_divergence="rollback", snapshots=5, async_save=False)
    train(tiny(**settings, out_dir=str(tmp_path / "uninterrupted")))
    write = getattr(Metrics, name)

    def write_or_die(self, step, *rest):
        if killed_at in (step, step["step"] if isinstance(step, dict) else None):
            raise KeyboardInterrupt
        write(self, step, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Metrics, name, write_or_die)
        train(tiny(**settings))
    train(tiny(**settings, init_from="resume"))
    folders = tiny().out_dir, str(tmp_path / "uninterrupted")
    assert_same_run(*folders)
    assert_same_snapshots(*folders)
    samples = [Path(folder, "samples.jsonl").read_bytes() for folder in folders]
    assert samples[0] == samples[1] and samples[0].count(b"\n") == 2  # none before the first step


def test_resuming_a_complete_run_repairs_what_a_kill_left(tiny, monkeypatch, capsys):
    """A kill before best.json was written: there was nothing to train, and the file was never repaired."""
    write, best = run_folder.write_json, Path(tiny().out_dir, "best.json")

    def write_or_die(path, value):
        if value["checkpoint"] == "step-000012" and path == best:
            raise KeyboardInterrupt
        write(path, value)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_folder, "write_json", write_or_die)
        set_losses(patch, 3.0, 2.0, 1.0)
        train(tiny())
    assert read_json(best)["checkpoint"] == "step-000006"
    for reported in (True, False):
        train(tiny(init_from="resume"))
        out, err = capsys.readouterr()
        assert "nothing to train" in out and ("best.json names step-000006" in err) == reported
        assert read_json(best)["checkpoint"] == "step-000012"


def test_an_evaluation_does_not_wait_for_the_previous_checkpoint(tiny, monkeypatch):
    """Writing a checkpoint overlaps the steps and the evaluation that follow it."""
    evaluated, save, evaluate = threading.Event(), checkpoint.save, train_script.evaluate

    def save_during_evaluation(out_dir, step, *args, **kwargs):
        assert step != 2 or evaluated.wait(timeout=300)  # the evaluation after step 4
        return save(out_dir, step, *args, **kwargs)

    def evaluate_and_tell(model, *args):
        losses = evaluate(model, *args)
        evaluations.append(losses)
        if len(evaluations) == 3:
            evaluated.set()
        return losses

    evaluations = []
    monkeypatch.setattr(checkpoint, "save", save_during_evaluation)
    monkeypatch.setattr(train_script, "evaluate", evaluate_and_tell)
    train(tiny(max_iters=6, eval_interval=2, save_interval_minutes=None))
    assert len(evaluations) == 4 and run_folder.last_state(Path(tiny().out_dir))["step"] == 6


def test_the_actions_after_a_step_may_be_in_any_order(tiny, tmp_path, monkeypatch):
    """With the lines for log and save swapped, the best checkpoint was not saved."""

    def run(train_function, name: str) -> dict[str, Any]:
        losses = iter([3.0, 2.0, 1.0, 4.0, 5.0])
        monkeypatch.setitem(train_function.__globals__, "evaluate", lambda *args: {"val_loss": next(losses)})
        settings = dict(max_iters=8, eval_interval=2, keep_last=1, snapshots=3, always_save_checkpoint=False)
        folder = tmp_path / name
        train_function(tiny(out_dir=str(folder), **settings))
        pointers = [json.loads((folder / f"{pointer}.json").read_text()) for pointer in ("best", "last")]
        snapshots = sorted(path.name for path in (folder / "snapshots").iterdir())
        weights = [(path / "model.safetensors").read_bytes() for path in sorted(folder.glob("step-*"))]
        return {"pointers": pointers, "snapshots": snapshots, "weights": weights, "losses": read_losses(folder)}

    expected = run(train, "as it is")
    assert expected["pointers"][0]["checkpoint"] == "step-000004" and len(expected["weights"]) == 2
    tree = ast.parse(Path(train_script.__file__).read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "train"]
    (loop,) = [node for node in ast.walk(tree) if isinstance(node, ast.While)]
    blocks = {ast.unparse(node.test).removeprefix("due."): node for node in loop.body if isinstance(node, ast.If)}
    places = sorted(loop.body.index(blocks[name]) for name in ("log", "snapshot", "save"))
    for order in itertools.permutations(["log", "snapshot", "save"]):
        for place, name in zip(places, order, strict=True):
            loop.body[place] = blocks[name]
        changed = dict(vars(train_script))
        exec(compile(tree, "train.py", "exec"), changed)
        assert run(changed["train"], " ".join(order)) == expected, order


@pytest.mark.parametrize("step_seconds, host_seconds", [(0.1, 0.0), (0.01, 0.1)])
def test_the_logged_speed_is_that_of_the_steps(tiny, monkeypatch, step_seconds, host_seconds):
    """Steps are read one step late, except before an evaluation. On an H200, a small model, whose steps take longer on
    the host than on the GPU, was reported to be several times as fast in these steps.
    """
    seconds = lambda steps: step_seconds  # noqa: E731
    SimulatedMachine(monkeypatch, seconds, lambda steps: 7.0, asynchronous=True, host_seconds=host_seconds)
    cfg = tiny(log_interval=2)
    train(cfg)
    speeds = [line["tokens_per_second"] for line in read_metrics(cfg.out_dir)]
    tokens_per_step = cfg.batch_size * cfg.block_size
    first, *speeds = speeds
    # The slower of host and device takes 0.1 s per step. The end of two steps may wait for the last one on the device.
    fastest, slowest = (2 * tokens_per_step / (2 * 0.1 + wait) for wait in (0, min(step_seconds, host_seconds)))
    assert first is None and len(speeds) == 6
    assert all(speed in (pytest.approx(fastest), pytest.approx(slowest)) for speed in speeds)
