"""Snapshots written by train(), and the viewer's "run" question."""

import json
import random
import shutil
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from folio import UserError
from folio.checkpoints import checkpoint, run_folder
from folio.checkpoints.snapshots import find_snapshots, read_snapshot, write_snapshot
from folio.training.run_log import Metrics
from folio.training.schedule import Schedule, StepCounts, snapshot_is_due, snapshot_steps
from folio.web.questions import TraceProvider
from folio.web.viewed_model import ViewedModel
from model import GPT
from tests.support.disk import flip_bit
from tests.support.runs import assert_same_run, assert_same_snapshots, read_snapshots, same_tensors
from tests.support.tolerances import rounding_error
from tests.support.torchrun import LONG_RUN, run_torchrun
from tests.support.viewers import serving
from train import TrainConfig, train

# --- schedule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10, 30, 100])
@pytest.mark.parametrize("max_iters", [1, 2, 10, 30, 2700, 600_000])
def test_snapshots_are_spaced_logarithmically(count, max_iters):
    steps = snapshot_steps(count, max_iters)
    assert len(steps) == min(count, max_iters + 1) and list(steps) == sorted(set(steps))
    assert steps[-1:] == (max_iters,) * (count > 0) and steps[: count - 1][:1] == (0,) * (count > 1)
    ratios = [(1 + after) / (1 + step) for step, after in pairwise(steps) if after > step + 10]
    assert max(ratios, default=1) < 1.1 * min(ratios, default=1)  # ratios of close snapshots are rounded to steps


def test_a_time_budget_spreads_the_remaining_snapshots_over_the_remaining_steps():
    """If a decision lengthens or shortens the run, as many snapshots follow, at scaled steps, the last at its end."""

    def due(count: int, schedule: Schedule) -> list[int]:
        return [step for step in range(schedule.max_iters + 1) if snapshot_is_due(step, count, schedule)]

    schedule = Schedule(StepCounts(100))
    planned = due(9, schedule)
    assert planned == list(snapshot_steps(9, 100))
    first = [step for step in planned if step <= 20]
    schedule.decide(20, 180)  # doubles the remaining 80 steps
    assert due(9, schedule) == first + [20 + 2 * (step - 20) for step in planned if step > 20]
    schedule.decide(60, 61)
    stretched = Schedule(StepCounts(100), decisions=[(0, 100), (20, 180)])
    assert due(9, schedule) == [step for step in due(9, stretched) if step <= 60] + [61]
    assert due(1, schedule) == [61] and due(0, schedule) == []


# --- training ---------------------------------------------------------------------------------------------------------

EACH_STEP = dict(eval_interval=1, eval_iters=1, keep_last=100, sample_tokens=0)  # a checkpoint after each step


def assert_snapshots_are_the_weights(cfg: TrainConfig, steps: tuple[int, ...]) -> None:
    """Assert that a run with EACH_STEP has snapshots of these steps, with the weights of its checkpoints."""
    actual = read_snapshots(cfg.out_dir)
    assert tuple(actual) == steps
    for step in steps[1:]:
        saved = checkpoint.load(Path(cfg.out_dir, f"step-{step:06d}"))
        assert same_tensors(actual[step], saved.model)


@pytest.mark.parametrize("async_save", [True, False])
def test_a_snapshot_holds_the_weights_after_its_step(tiny, monkeypatch, async_save):
    """Even if it is written while the next step changes them: here, the first one is written after step 1."""
    step_1_is_done, advance, write = threading.Event(), Metrics.advance, checkpoint.write_snapshot

    def recorded_advance(self):
        advance(self)
        step_1_is_done.set()

    def slow_write(out_dir, step, weights):
        assert step_1_is_done.wait(timeout=300 if async_save else 0) or not async_save
        write(out_dir, step, weights)

    monkeypatch.setattr(checkpoint, "write_snapshot", slow_write)
    monkeypatch.setattr(Metrics, "advance", recorded_advance)
    cfg = tiny(**EACH_STEP, snapshots=6, async_save=async_save)
    train(cfg)
    assert_snapshots_are_the_weights(cfg, (0, 1, 2, 4, 7, 12))
    model = GPT(checkpoint.load(Path(cfg.out_dir)).config(), cfg.seed)
    assert same_tensors(read_snapshots(cfg.out_dir)[0], dict(model.named_parameters()))
    assert not list(Path(cfg.out_dir, "snapshots").glob(".*"))


def test_snapshots_change_nothing_else_and_are_not_pruned(tiny, tmp_path):
    without = tiny(keep_last=1)
    with_snapshots = tiny(keep_last=1, snapshots=100, out_dir=str(tmp_path / "with"))
    train(without)
    train(with_snapshots)
    assert_same_run(without.out_dir, with_snapshots.out_dir)
    assert list(read_snapshots(with_snapshots.out_dir)) == list(range(13))
    assert not Path(without.out_dir, "snapshots").exists()


def test_a_resumed_run_has_the_snapshots_of_an_uninterrupted_one(tiny, tmp_path, monkeypatch):
    """Snapshots after the resumed checkpoint and incomplete files are removed."""
    uninterrupted, killed = (tiny(snapshots=9, out_dir=str(tmp_path / name)) for name in ("uninterrupted", "killed"))
    train(uninterrupted)
    log = Metrics.log

    def log_and_kill_at_step_9(self, line, *remark):
        log(self, line, *remark)
        if line["step"] == 9:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "log", log_and_kill_at_step_9)
        with pytest.raises(KeyboardInterrupt):
            train(killed)
    assert list(read_snapshots(killed.out_dir)) == [0, 1, 2, 3, 4, 5, 7]
    folder = Path(killed.out_dir, "snapshots")
    unchanged = (folder / "step-000005.safetensors").stat()
    shutil.copy(folder / "step-000005.safetensors", folder / "step-000008.safetensors")
    (folder / ".step-000009.safetensors.123.tmp").write_bytes(b"incomplete")
    (folder / ".another folder").mkdir()  # as created by a file manager or an editor
    train(killed.replace(init_from="resume"))
    assert_same_snapshots(uninterrupted.out_dir, killed.out_dir)
    assert (folder / "step-000005.safetensors").stat() == unchanged
    assert [path.name for path in folder.glob(".*")] == [".another folder"]
    assert "snapshots" not in checkpoint.load(Path(killed.out_dir)).state["parts"][1]["changes"]


def test_a_new_run_in_the_same_folder_removes_the_snapshots(tiny, capsys):
    """Even if the previous run has no checkpoint. An evaluation changes nothing."""
    train(tiny(snapshots=5))
    steps = list(read_snapshots(tiny().out_dir))
    train(tiny(snapshots=30, init_from="resume", eval_only=True))
    assert list(read_snapshots(tiny().out_dir)) == steps == [0, 1, 3, 6, 12]
    train(tiny(snapshots=2, overwrite=True, max_iters=10))
    assert list(read_snapshots(tiny().out_dir)) == [0, 10]
    for path in run_folder.directories(Path(tiny().out_dir)):
        shutil.rmtree(path)
    train(tiny())
    assert not read_snapshots(tiny().out_dir)


def test_an_extended_run_keeps_its_snapshots_and_takes_new_ones(tiny):
    train(tiny(snapshots=4))
    train(tiny(init_from="resume", max_iters=24))
    assert list(read_snapshots(tiny().out_dir)) == [0, 1, 4, 12, 24]
    train(tiny(init_from="resume", max_iters=30, snapshots=1))
    assert list(read_snapshots(tiny().out_dir)) == [0, 1, 4, 12, 24, 30]


@pytest.mark.parametrize("async_save", [True, False])
def test_a_snapshot_that_cannot_be_written_does_not_end_the_run(tiny, capsys, async_save):
    cfg = tiny(snapshots=4, async_save=async_save)
    Path(cfg.out_dir).mkdir()
    Path(cfg.out_dir, "snapshots").write_text("a file where the folder should be")
    train(cfg)
    out = capsys.readouterr().out
    assert [step for step in range(13) if f"snapshot of step {step} could not be saved (" in out] == [0, 1, 4, 12]
    assert checkpoint.load(Path(cfg.out_dir)).state["step"] == 12


def test_a_snapshot_is_written_completely_or_not_at_all(tmp_path):
    """A full disk leaves no partial file, and the file has the default permissions."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    write_snapshot(tmp_path, 1, {"weight": torch.ones(100)})
    (tmp_path / "another file").touch()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError):
            write_snapshot(tmp_path, 2, {"weight": torch.ones(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (path,) = (tmp_path / "snapshots").iterdir()
    assert find_snapshots(tmp_path) == {1: path}
    assert path.stat().st_mode == (tmp_path / "another file").stat().st_mode


def test_a_damaged_snapshot_is_an_error(tmp_path, seed):
    """The viewer showed values of weights that a disk had corrupted."""
    rng, weights = random.Random(seed), {"weight": torch.rand(50)}
    for step in (1, 2):
        write_snapshot(tmp_path, step, weights)
    path, other = find_snapshots(tmp_path).values()
    content = path.read_bytes()
    assert same_tensors(read_snapshot(path), weights)
    for _ in range(50):
        path.write_bytes(flip_bit(content, rng))
        try:
            assert same_tensors(read_snapshot(path), weights)  # padding of the header
        except UserError as error:
            assert path.name in str(error)
    path.write_bytes(other.read_bytes())
    with pytest.raises(UserError, match="is the snapshot of step 2: "):
        read_snapshot(path)
    for metadata in (None, {"step": "1"}):  # was shown unchecked
        save_file(weights, path, metadata)
        with pytest.raises(UserError, match=r"no step or no sha256 .*; remove it"):
            read_snapshot(path)


@pytest.mark.slow  # tests/training/test_session.py resumes a run of two processes with snapshots
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_snapshots_of_two_processes(tiny, tmp_path, mode):
    """All ranks gather the weights, and rank 0 writes them."""
    settings = dict(LONG_RUN, **EACH_STEP, max_iters=12, warmup_iters=2, snapshots=6)
    one, two = tiny(**settings), tiny(**settings, parallel=mode, out_dir=str(tmp_path / "two"))
    train(one)
    run_torchrun(2, two)
    assert_snapshots_are_the_weights(two, (0, 1, 2, 4, 7, 12))
    assert same_tensors(read_snapshots(two.out_dir)[0], read_snapshots(one.out_dir)[0])


# --- the viewer's question --------------------------------------------------------------------------------------------


def ask(cfg: TrainConfig, viewed: ViewedModel | None = None, **fields) -> tuple[dict, dict]:
    """The facts of the answer to the question "run", and its tensors as lists."""
    viewed = viewed or ViewedModel(cfg.out_dir, "best", torch.device("cpu"))
    answer = TraceProvider([viewed], "").answer({"kind": "run", **fields})
    answer.to_bytes()  # raises if it cannot be sent
    return answer.facts, {name: tensor.tolist() for name, tensor in answer.tensors.items()}


def test_the_viewer_shows_the_metrics_of_a_run(tiny):
    cfg = tiny(snapshots=4, sample_tokens=5, log_interval=2)
    train(cfg)
    facts, columns = ask(cfg)
    lines = [json.loads(line) for line in Path(cfg.out_dir, "metrics.jsonl").read_text().splitlines()]
    assert columns["step"] == [0, 1, 2, 4, 6, 8, 10, 12] == [line["step"] for line in lines]
    for name, column in columns.items():
        expected = np.array([np.nan if line[name] is None else line[name] for line in lines])
        np.testing.assert_allclose(column, expected, rtol=rounding_error(1))  # they are sent in float32
    samples = [json.loads(line) for line in Path(cfg.out_dir, "samples.jsonl").read_text().splitlines()]
    assert facts["samples"] == [[line["step"], line["text"]] for line in samples]
    assert [step for step, _ in facts["samples"]] == [6, 12]
    assert facts["checkpoints"] == [0, 1, 4, 6, 12]
    assert not facts["training"] and facts["max_iters"] == facts["last"] == 12 and facts["stopped_by"] == "its end"
    assert ask(cfg, since=8)[1]["step"] == [10, 12]
    assert ask(cfg, since=12)[1]["step"] == [] and ask(cfg, since=500)[0]["last"] == 12


def test_the_viewer_follows_a_run_that_is_still_training(tiny, monkeypatch):
    """It shows new lines, checkpoints and snapshots, and that the run is training."""
    answers, log = {}, Metrics.log
    train(tiny(max_iters=3, snapshots=3))
    viewed = ViewedModel(tiny().out_dir, "last", torch.device("cpu"))

    def log_and_ask(self, line, *remark):
        log(self, line, *remark)
        answers[line["step"]] = ask(tiny(), viewed, since=3)

    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "log", log_and_ask)
        train(tiny(snapshots=3, init_from="resume", keep_last=1, async_save=False))
    assert answers[6][1]["step"] == [4, 5, 6] and answers[6][0]["training"] and answers[6][0]["stopped_by"] == "its end"
    assert answers[7][0]["checkpoints"] == [0, 1, 3, 6] and answers[7][0]["stopped_by"] is None
    assert answers[7][0]["max_iters"] == 12
    facts, _ = ask(tiny(), viewed)
    assert not facts["training"] and facts["checkpoints"] == [0, 1, 3, 12]  # 3 is the opened one
    assert viewed.model_at(3) is viewed.model and viewed.model_at(12).config == viewed.model.config


def test_the_viewer_skips_damaged_lines_and_needs_no_files(tiny):
    train(tiny(max_iters=4, sample_tokens=5))
    folder = Path(tiny().out_dir)
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b'not JSON\n[1]\n{"step": "5"}\n{"step": 5, "loss": "low"}\n\xff\n' + b"[" * 100_000 + b"\n")
        file.write(b'{"step": 6, "loss": 1.2')  # is being written
    with open(folder / "samples.jsonl", "ab") as file:
        file.write(b'{"step": 5}\n{"step": 6, "te')
    facts, columns = ask(tiny())
    assert columns["step"] == [0, 1, 2, 3, 4, 5] and np.isnan(columns["loss"][-1]) and facts["last"] == 5
    assert [step for step, _ in facts["samples"]] == [4]
    viewed = ViewedModel(tiny().out_dir, "best", torch.device("cpu"))
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    facts, columns = ask(tiny(), viewed)
    assert columns["step"] == [] and facts["samples"] == [] and facts["checkpoints"] == [4]
    viewed.run = viewed.step = None  # as for a model from another program
    assert ask(tiny(), viewed) == ({}, {})


def test_the_page_follows_a_run(browser, tiny):
    """New lines and checkpoints appear in the existing figures and slider, until the run has ended."""
    expect = pytest.importorskip("playwright.sync_api").expect
    expect.set_options(timeout=60_000)
    train(tiny(snapshots=4))
    folder = Path(tiny().out_dir)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (folder / ".lock").touch()  # as during training
    with serving([str(folder)]) as served, browser.new_context() as context:
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.goto(f"{served.url}#view=run")
        figure, slider = page.wait_for_selector("[data-testid=run-loss]"), page.locator("#checkpoint")
        rows = np.array(figure.evaluate("figure => figure.table().rows"))
        expected = [[line[name] for name in ("step", "loss", "val_loss")] for line in lines]
        np.testing.assert_allclose(rows, np.array(expected, float), rtol=rounding_error(1))
        expect(slider).to_have_attribute("max", "4")
        expect(slider).to_have_value("4")

        write_snapshot(folder, 3, checkpoint.load(folder).model)
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps({**lines[-1], "step": 13, "loss": 0.5, "val_loss": None}) + '\n{"step": 14')
        expect(slider).to_have_attribute("max", "5")
        expect(slider).to_have_value("5")
        row = figure.evaluate("figure => figure.table().rows.at(-1)")
        assert row[:2] == [13, 0.5] and figure.evaluate("figure => figure.isConnected")

        page.locator("[data-testid=run-loss] .drawing").click(position={"x": 60, "y": 100})  # near the axis
        expect(slider).to_have_value("0")
        (folder / ".lock").unlink()
        expect(page.get_by_test_id("run-status")).to_contain_text("has finished")
