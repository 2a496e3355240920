"""folio/training/rollback.py, through train(): bad text, a rising loss, resuming, and replaying."""

import io
import json
import math
import re
import shutil
import signal
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, replace
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

import train as train_script
from folio.base.files import read_json, sha256, write_json
from folio.checkpoints import checkpoint, run_folder
from folio.checkpoints.snapshots import find_snapshots
from folio.data.find_data import find_datasets
from folio.data.windows import Mixture
from folio.experiments.report_page import report_page
from folio.experiments.runs import Run
from folio.training import run_log
from folio.training.evaluations import Evaluations
from folio.training.rollback import new_part
from folio.training.run_log import ABANDONED, read_lines
from folio.training.session import Session, TrainingError
from tests.support.disk import run_killed_at
from tests.support.runs import assert_same_losses, assert_same_run, assert_same_snapshots, set_losses
from tests.support.simulated import SimulatedMachine, assert_on_time
from tests.support.torchrun import run_ranks
from tools import replay
from tools.replay import ReplayConfig
from train import TrainConfig, train

BAD_STEPS = range(110, 122)  # whose text is random in bad_data


@pytest.fixture(scope="module")
def settings(data_dir, tmp_path_factory) -> dict:
    """Settings of a run that reads bad text at its steps 111 to 122, of 140, after a checkpoint at step 100.

    The sequences of these steps of tiny() are random characters.
    """
    folder = shutil.copytree(data_dir / "verse", tmp_path_factory.mktemp("bad") / "verse")
    data = Mixture(find_datasets("verse", str(data_dir)), block_size=32, seed=1337, sampling="epoch")
    (path,) = folder.glob("train*.bin")
    ids, rng = np.fromfile(path, dtype=np.uint16), np.random.default_rng(0)
    for place in data.places(4 * BAD_STEPS.start, 4 * len(BAD_STEPS)):
        ids[place.offset + 1 : place.offset + 32] = rng.integers(data.vocab_size, size=31)
    ids.tofile(path)
    meta = read_json(folder / "meta.json")
    meta["splits"]["train"][0]["sha256"] = sha256(path)
    write_json(folder / "meta.json", meta)
    every = dict(log_interval=1, eval_interval=25, eval_iters=2, snapshots=30, keep_last=20)
    bad = dict(data_dir=str(folder.parent), skip_spikes=8.0, max_bad_steps=4, on_divergence="rollback")
    return dict(n_layer=1, max_iters=140, optimizer="muon", learning_rate=1e-2, dropout=0.1, **every, **bad)


@pytest.fixture(scope="module")
def bad_run(tiny_in, settings, tmp_path_factory) -> tuple[Path, str]:
    """The folder and the output of a run with these settings."""
    cfg = tiny_in(**settings, out_dir=str(tmp_path_factory.mktemp("bad") / "out"))
    with redirect_stdout(io.StringIO()) as out:
        assert train(cfg).step == 140
    return Path(cfg.out_dir), out.getvalue()


def read_all_lines(out_dir: str | Path) -> list[dict]:
    return [json.loads(line) for line in Path(out_dir, "metrics.jsonl").read_text().splitlines()]


# --- bad text ---------------------------------------------------------------------------------------------------------


def test_a_run_skips_bad_text(bad_run):
    folder, out = bad_run
    state = checkpoint.load(folder).state
    _, *rollbacks = state["parts"]
    assert {part["from_step"] for part in rollbacks} == {100} and rollbacks[-1]["rollbacks"] == len(rollbacks)
    begin, end = rollbacks[0]["skipped_sequences"][0], rollbacks[-1]["skipped_sequences"][1]
    assert begin == 4 * 100 and end >= 4 * 122
    assert all(a["skipped_sequences"][1] == b["skipped_sequences"][0] for a, b in pairwise(rollbacks))
    assert rollbacks[-1]["lr_factor"] == 0.5 ** len(rollbacks)
    assert f"rollback {len(rollbacks)} of 3 to step 100: skipping sequences" in out
    assert state["next_sequence"] == 4 * 140 + end - begin
    assert max(find_snapshots(folder)) == 140

    kept, lines = read_lines(folder / "metrics.jsonl")[0], read_all_lines(folder)
    assert [line["step"] for line in kept] == list(range(141)) and kept[-1]["skipped"] < 4
    abandoned = [line for line in lines if ABANDONED in line]
    assert {line[ABANDONED] for line in abandoned} == set(range(1, len(rollbacks) + 1))
    assert min(line["step"] for line in abandoned) == 101 and len(lines) == len(kept) + len(abandoned)
    assert kept[110]["lr"] == pytest.approx(abandoned[9]["lr"] * rollbacks[-1]["lr_factor"])
    page = report_page([Run.of(folder)])
    assert "before a rollback" in page and f"{4 * 100:,} to" in page


def test_each_rollback_to_a_checkpoint_skips_as_much_again():
    """All that the rollbacks to a checkpoint have skipped is skipped once more, not only the last part of it."""
    part, parts, begin, config = {}, [{"from_step": 0}], 400, asdict(TrainConfig())
    for _ in range(3):
        saved = SimpleNamespace(state={"config": config, "step": 100, "next_sequence": begin, "parts": parts})
        part = new_part(TrainConfig, part, saved, begin + 40, config)
        parts = [*parts, part]
        begin = part["skipped_sequences"][1]
    assert [part["skipped_sequences"] for part in parts[1:]] == [(400, 440), (440, 560), (560, 800)]
    assert [part["lr_factor"] for part in parts[1:]] == [0.5, 0.25, 0.125]


def test_without_rollback_the_run_stops(tiny, settings):
    with pytest.raises(TrainingError, match="stopped at step 114: 4 spikes"):
        train(tiny(**{**settings, "on_divergence": "stop"}))


def test_a_divided_run_is_bitwise_the_same(tiny, settings, bad_run, at_step):
    """It is killed before and between its rollbacks, and stopped after them: a stop saves, and is rolled back to."""
    cfg, names = tiny(**settings), ("rollbacks", "lr_factor", "skipped_sequences")
    resume = replace(cfg, init_from="resume")
    kill = mock.Mock(side_effect=KeyboardInterrupt)
    for killed, plan in ((cfg, (106, kill)), (resume, (112, at_step, 103, kill))):
        at_step(*plan)
        with pytest.raises(KeyboardInterrupt):
            train(killed)
        assert checkpoint.load(Path(cfg.out_dir)).state["step"] == 100
    at_step(130, signal.raise_signal, signal.SIGTERM)
    assert train(resume).step == 131
    train(resume)
    assert_same_run(str(bad_run[0]), cfg.out_dir)
    whole, divided = (checkpoint.load(Path(folder)).state["parts"] for folder in (bad_run[0], cfg.out_dir))
    rollbacks = [[[part[name] for name in names] for part in p if names[2] in part] for p in (whole, divided)]
    assert rollbacks[0] == rollbacks[1] != []


def test_steps_after_a_rollback_are_replayed(bad_run, tmp_path, capsys):
    folder = shutil.copytree(bad_run[0], tmp_path / "copy")
    for path in {*folder.glob("step-*")} - {folder / "step-000140"}:
        shutil.rmtree(path)
    replay.main(ReplayConfig(run=(str(folder),), step=125))
    assert "bitwise identical to the logged loss" in capsys.readouterr().out


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_several_processes_roll_back_together(tiny, settings, tmp_path, parallel):
    settings = {**settings, "dropout": 0.0}
    one, two = (tiny(**settings, out_dir=str(tmp_path / name)) for name in ("one", "two"))
    train(one)
    run_ranks(2, replace(two, parallel=parallel))
    assert_same_losses(one, two, "lr", "grad_norm")
    parts = [checkpoint.load(Path(cfg.out_dir)).state["parts"] for cfg in (one, two)]
    assert [part["skipped_sequences"] for part in parts[0][1:]] == [part["skipped_sequences"] for part in parts[1][1:]]


# --- a rising loss ----------------------------------------------------------------------------------------------------


def test_a_run_whose_validation_loss_rises_is_rolled_back(tiny, monkeypatch, capsys):
    losses = [3.0, 2.0, 1.8, 2.5, 1.7, 1.6]
    set_losses(monkeypatch, *losses)
    cfg = tiny(max_iters=4, eval_interval=1, on_divergence="rollback")
    assert train(cfg).best_val_loss == 1.6
    message = "step 3: the validation loss rose to 2.5000, from 1.8000 before; rollback 1 of 3 to step 2"
    assert message in (out := capsys.readouterr().out) and out.count("rollback") == 1
    assert [line["val_loss"] for line in read_all_lines(cfg.out_dir)] == losses
    state = checkpoint.load(Path(cfg.out_dir)).state
    assert state["guard"]["val_losses"] == [2.0, 1.8, 1.7, 1.6] and state["parts"][-1]["skipped_sequences"] == [8, 12]


def rising_at_step_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the validation loss of a run rise at step 3, but not after a rollback, whatever process evaluates it."""
    end_evaluation = Session.end_evaluation

    def evaluate_and_diverge(self, losses, due):
        rises = self.state.step == 3 and not self.record["parts"][-1].get("rollbacks")
        return end_evaluation(self, {"val_loss": 9.0 if rises else 3.0 - self.state.step / 10}, due)

    monkeypatch.setattr(Session, "end_evaluation", evaluate_and_diverge)


def test_a_rollback_on_a_full_disk_stops_the_run_in_one_line_and_is_repeated_on_resume(tiny, tmp_path, monkeypatch):
    """It ended in a traceback. A rollback that was not saved had already marked the lines after it as abandoned, so
    that the resumed run removed those of its own history.
    """
    rising_at_step_3(monkeypatch)
    settings = dict(max_iters=4, eval_interval=1, snapshots=20, on_divergence="rollback")
    whole, divided = (tiny(**settings, out_dir=str(tmp_path / name)) for name in ("whole", "divided"))
    train(whole)
    write_lines, write = run_log._write_lines, checkpoint._write

    def fail_to_mark(path, lines):
        if any(ABANDONED.encode() in line for line in lines):
            raise OSError(28, "No space left on device")
        write_lines(path, lines)

    def fail_to_save(*arguments):
        if arguments[-1]["parts"][-1].get("rollbacks"):
            raise OSError(28, "No space left on device")
        write(*arguments)

    for cfg, module, name, fail in (
        (divided, run_log, "_write_lines", fail_to_mark),
        (replace(divided, init_from="resume"), checkpoint, "_write", fail_to_save),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, fail)
            with pytest.raises(TrainingError, match="No space left on device"):
                train(cfg)
    train(cfg)
    assert_same_history(whole.out_dir, divided.out_dir)


def assert_same_history(first: str, second: str) -> None:
    """Assert that two runs are the same, including snapshots, samples, and the lines that rollbacks have abandoned."""
    assert_same_run(first, second)
    assert_same_snapshots(first, second)
    a, b = (read_all_lines(out_dir) for out_dir in (first, second))
    names = ("step", "val_loss", ABANDONED)
    assert [[line.get(name) for name in names] for line in a] == [[line.get(name) for name in names] for line in b]
    assert Path(first, "samples.jsonl").read_text() == Path(second, "samples.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a killed run closes no files
def test_a_run_that_is_killed_at_any_file_system_event_of_a_rollback_resumes(tiny, tmp_path, monkeypatch):
    """A kill between two renames lost the checkpoint that the run had returned to."""
    rising_at_step_3(monkeypatch)
    monkeypatch.setattr(train_script, "reserve", lambda *arguments: nullcontext())  # a kill would release the lock
    settings = dict(max_iters=4, eval_interval=1, snapshots=20, on_divergence="rollback")
    whole = tiny(**settings, out_dir=str(tmp_path / "whole"))
    train(whole)
    for event in count():
        cfg = tiny(**settings, out_dir=str(tmp_path / f"killed-{event}"))
        if not run_killed_at(event, lambda cfg=cfg: train(cfg)):
            break
        cfg = replace(cfg, init_from="resume") if run_folder.exists(Path(cfg.out_dir)) else cfg
        train(cfg)
        assert_same_history(whole.out_dir, cfg.out_dir)
        shutil.rmtree(cfg.out_dir)
    assert event > 100


def test_after_three_rollbacks_the_run_stops(tiny, monkeypatch, capsys):
    set_losses(monkeypatch, 3.0, 2.0, *[2.5] * 4)
    with pytest.raises(TrainingError, match="the validation loss rose to"):
        train(tiny(max_iters=4, eval_interval=1, on_divergence="rollback"))
    assert len(re.findall("rollback . of 3", capsys.readouterr().out)) == 3


def test_before_its_first_evaluation_a_run_is_rolled_back_to_its_start(tiny, monkeypatch):
    set_losses(monkeypatch, 3.0, math.nan, 2.0, 1.9)
    cfg = tiny(max_iters=2, eval_interval=1, on_divergence="rollback")
    assert train(cfg).best_val_loss == 1.9
    parts = checkpoint.load(Path(cfg.out_dir)).state["parts"]
    assert [part["from_step"] for part in parts] == [0, 0] and parts[-1]["lr_factor"] == 0.5


def test_a_resumed_run_says_that_its_rates_are_lower_than_the_settings(tiny, monkeypatch, capsys):
    """The factor of a rollback silently lowered a --learning_rate of the command line."""
    set_losses(monkeypatch, 3.0, math.nan, 2.0, 1.9, 1.8, 1.7)
    cfg = tiny(max_iters=2, eval_interval=1, lr_schedule="constant", warmup_iters=0, on_divergence="rollback")
    train(cfg)
    for steps, rate in ((3, 0.01), (4, 0.02)):
        capsys.readouterr()
        train(replace(cfg, init_from="resume", max_iters=steps, learning_rate=rate))
        assert f"multiply learning rates by 0.5 (learning_rate={rate} is {rate / 2})" in capsys.readouterr().out
        assert read_all_lines(cfg.out_dir)[-1]["lr"] == 0.5 * rate


def test_a_rollback_before_a_resume_keeps_its_changed_settings(tiny, monkeypatch):
    set_losses(monkeypatch, 3.0, 2.0, 1.9, 2.5, 2.4, 1.8, 1.7, 1.6)
    cfg = tiny(max_iters=2, eval_interval=1, on_divergence="rollback", always_save_checkpoint=False)
    train(cfg)
    shutil.rmtree(Path(cfg.out_dir, "step-000002"))
    assert checkpoint.load(Path(cfg.out_dir)).state["step"] == 1
    train(replace(cfg, init_from="resume", max_iters=4, grad_clip=0.5))
    state = checkpoint.load(Path(cfg.out_dir)).state
    assert state["step"] == 4 and state["parts"][1]["changes"]["grad_clip"] == [1.0, 0.5]


def test_a_rollback_keeps_the_time_budget(tiny, monkeypatch):
    set_losses(monkeypatch, 3.0, 0.4, 0.3, 0.2, 5.0, *[0.1] * 20)  # below the training loss: no overfitting
    machine = SimulatedMachine(monkeypatch, lambda step: 0.1 if step < 150 else 0.2, lambda step: 0.5, trains=True)
    cfg = tiny(max_iters=100, eval_interval=10, minutes=0.5, sample_tokens=0, on_divergence="rollback")
    result = train(cfg)
    state = checkpoint.load(Path(cfg.out_dir)).state
    assert_on_time(machine.now, 0.5, step_seconds=0.2, evaluation_seconds=0.5)
    assert len(state["parts"]) == 2
    assert state["step"] == result.max_iters == state["parts"][-1]["decisions"][-1][1]
    assert all(step <= state["parts"][1]["from_step"] for step, _ in state["parts"][0]["decisions"])


def test_a_rollback_to_the_checkpoint_before_added_minutes_keeps_them(tiny, monkeypatch):
    """The checkpoint's plan, of the old length, would end the run at once."""
    set_losses(monkeypatch, 3.0, 2.5, math.nan, *[2.0] * 20)
    machine = SimulatedMachine(monkeypatch, lambda step: 0.1, lambda step: 0.1)
    cfg = tiny(max_iters=10, eval_interval=10, sample_tokens=0, on_divergence="rollback")
    train(cfg)
    begin = machine.now
    result = train(replace(cfg, init_from="resume", minutes=0.5))
    state = checkpoint.load(Path(cfg.out_dir)).state
    assert_on_time(machine.now - begin, 0.5, step_seconds=0.1, evaluation_seconds=0.1)
    assert state["step"] == result.max_iters > 15
    assert state["parts"][-1]["rollbacks"] == 1 and state["parts"][-1]["changes"]["minutes"] == [None, 0.5]


def test_a_run_that_is_extended_at_a_higher_rate_has_not_diverged(tiny, monkeypatch, capsys):
    remaining = set_losses(monkeypatch, 3.0, 2.0, 1.5, 1.7, 1.4, 1.3, 1.2)
    cfg = tiny(max_iters=2, eval_interval=1, warmup_iters=0, on_divergence="rollback")
    train(cfg)
    train(replace(cfg, init_from="resume", max_iters=6))
    assert "rollback" not in capsys.readouterr().out and not [*remaining]


def test_a_model_that_overfits_has_not_diverged():
    evaluations = Evaluations()
    evaluations.recent = [2.0, 1.5, 1.6]
    assert not evaluations.has_diverged(3.0, training_loss=1.0)
    assert evaluations.has_diverged(3.0, training_loss=1.7)
    assert not evaluations.has_diverged(1.55, training_loss=1.7)
