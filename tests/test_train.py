"""End-to-end tests of train(). Others through train() are in test_session.py, test_resume.py and test_budget.py."""

import json
import math
import os
import re
import shutil
import signal
from collections import Counter
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

import train as train_script
from folio import UserError
from folio.checkpoints import checkpoint, run_folder
from folio.checkpoints.build_model import model_from_tensors
from folio.data.find_data import find_datasets
from folio.data.shards import DatasetError, Shard
from folio.data.windows import Mixture, ValidationWindows
from folio.machine import kernels
from folio.machine.kernels import compile_loss
from folio.machine.runtime import Runtime, resolve_runtime
from folio.training.evaluations import Evaluations
from folio.training.guard import StepGuard
from folio.training.optim import LearningRates, make_optimizer, muon_matrices
from folio.training.planning import resolve
from folio.training.session import Session, TrainingError
from folio.training.state import TrainState
from model import GPT, POSITIONS, GPTConfig
from tests.support.foreign import write_nanogpt_data
from tests.support.prepared import edit_split, ids_of
from tests.support.runs import assert_same_run, read_losses, read_metrics, same_tensors
from tests.support.sampling import sample_text
from tests.support.simulated_gpu import SimulatedGPU
from tests.support.tolerances import gradients_error, network_operations, normal_limit, rounding_error
from train import TrainConfig, mean_loss, train


def entropy(text: str) -> float:
    """The loss of a model that knows the frequencies of characters, and ignores their context."""
    shares = np.array([*Counter(text).values()]) / len(text)
    return float(-shares @ np.log(shares))


# --- a run and what it writes -----------------------------------------------------------------------------------------


@pytest.mark.architecture("this test, whose settings train GPT-2 to what it expects")
def test_a_run_learns_and_writes_metrics_samples_and_checkpoints(tiny, text, capsys):
    cfg = tiny(max_iters=60, eval_interval=20, log_interval=5, sample_tokens=200)
    best = train(cfg).best_val_loss
    metrics = read_metrics(cfg.out_dir)
    assert [line["step"] for line in metrics] == [1, *range(5, 61, 5)]
    assert [line["step"] for line in metrics if line["val_loss"] is not None] == [20, 40, 60]
    variance = cfg.n_embd * 0.02**2  # of a new model's logits: see test_model.py
    error = variance + normal_limit() * math.sqrt(variance / (cfg.batch_size * cfg.block_size))
    assert abs(metrics[0]["loss"] - np.log(len(set(text)))) < error
    assert best < entropy(text)
    assert best == min(line["val_loss"] for line in metrics if line["val_loss"] is not None)
    last = metrics[-1]
    assert last["tokens"] == 60 * 4 * 32 and last["tokens_per_second"] > 0 and last["peak_memory"] > 0
    samples = [json.loads(line) for line in Path(cfg.out_dir, "samples.jsonl").read_text().splitlines()]
    assert [(sample["step"], len(sample["text"])) for sample in samples] == [(20, 200), (40, 200), (60, 200)]
    saved = checkpoint.load(Path(cfg.out_dir), "best")
    assert saved.state["best_val_loss"] == best and saved.state["config"]["n_layer"] == 2
    out = capsys.readouterr().out
    assert "step 1/60: loss 3." in out and f"best validation loss {best:.4f}" in out


def test_eval_only_prints_the_loss_and_changes_no_file(tiny, capsys):
    best = train(tiny(sample_tokens=0)).best_val_loss
    assert "a sample of" not in capsys.readouterr().out
    files = {path: path.stat().st_mtime_ns for path in Path(tiny().out_dir).rglob("*")}
    val_loss = train(tiny(eval_only=True, init_from="resume")).best_val_loss
    assert "validation set of verse (512 tokens), in contexts of 32\n" in capsys.readouterr().out
    assert val_loss == read_metrics(tiny().out_dir)[-1]["val_loss"] >= best
    assert files == {path: path.stat().st_mtime_ns for path in Path(tiny().out_dir).rglob("*")}


def test_wandb_offline_resumes_its_run(tiny):
    train(tiny(wandb_log=True, max_iters=3))
    wandb_id = checkpoint.load(Path(tiny().out_dir)).state["wandb_id"]
    train(tiny(wandb_log=True, max_iters=6, init_from="resume"))
    assert wandb_id and checkpoint.load(Path(tiny().out_dir)).state["wandb_id"] == wandb_id
    assert list(Path(tiny().out_dir, "wandb").glob(f"offline-run-*-{wandb_id}"))


def test_wandb_that_cannot_finish_does_not_fail_the_run(tiny, monkeypatch, capsys):
    """A complete run ended with a traceback, without its summary."""
    import wandb

    service = Mock(id="x", starting_step=0)
    service.finish.side_effect = wandb.errors.CommError("gone away")
    monkeypatch.setattr(wandb, "init", lambda **settings: service)
    train(tiny(wandb_log=True, max_iters=3))
    printed = capsys.readouterr()
    assert "wandb could not finish (gone away)" in printed.err and "finished: 3 of 3 steps" in printed.out


def test_wandb_without_a_login_is_a_one_line_error(tiny, monkeypatch):
    import wandb

    error = wandb.errors.UsageError("No API key configured.\nUse `wandb login`")
    monkeypatch.setattr(wandb, "init", Mock(side_effect=error))
    with pytest.raises(UserError, match=r"No API key configured\.\); use wandb login"):
        train(tiny(wandb_log=True))


# --- exactness --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_is_bitwise_identical(tiny, tmp_path, optimizer):
    tiny = partial(tiny, optimizer=optimizer, eval_interval=1, sample_tokens=0)
    uninterrupted, resumed = tiny(), tiny(out_dir=str(tmp_path / "resumed"))
    train(uninterrupted)
    # The learning rate depends on max_iters, so lr_decay_iters gives the first parts the whole run's schedule.
    train(tiny(out_dir=resumed.out_dir, max_iters=5, lr_decay_iters=12))
    train(tiny(out_dir=resumed.out_dir, max_iters=9, lr_decay_iters=12, init_from="resume"))
    train(tiny(out_dir=resumed.out_dir, init_from="resume"))
    assert_same_run(uninterrupted.out_dir, resumed.out_dir)


@pytest.mark.parametrize("frozen", ["learning_rate", "muon_learning_rate"])
def test_a_learning_rate_of_0_freezes_only_the_parameters_of_its_optimizer(tiny, frozen):
    """With Muon, --learning_rate=0 froze the whole model, though the output said that matrices have their own rate."""
    train(tiny(optimizer="muon", max_iters=2, **{frozen: 0.0}))
    model = checkpoint.load(Path(tiny().out_dir)).build()
    initial = GPT(model.config, tiny().seed)
    unchanged = {name for name, p in initial.named_parameters() if torch.equal(p, model.get_parameter(name))}
    matrices = muon_matrices(initial).keys()
    others = {name for name, _ in initial.named_parameters()} - matrices
    assert unchanged == (others if frozen == "learning_rate" else matrices)
    assert (read_metrics(tiny().out_dir)[-1]["lr"] == 0) == (frozen == "learning_rate")


def test_a_run_with_workers_is_repeated_and_resumed_bitwise(tiny, tmp_path, capsys, set_threads):
    """With dropout, accumulation and recomputed activations; also on one core."""
    set_threads(2)
    settings = dict(optimizer="muon", dtype="bfloat16", gradient_accumulation_steps=2, recompute=True)
    runs = [tiny(**settings, workers=2, out_dir=str(tmp_path / name)) for name in ("one", "two", "resumed", "one core")]
    first, second, resumed, one_core = runs
    train(first)
    train(second)
    assert_same_run(first.out_dir, second.out_dir)
    for cfg in (resumed, one_core):
        train(cfg.replace(max_iters=6, lr_decay_iters=12))
    assert "2 workers" in capsys.readouterr().out
    train(tiny(**settings, out_dir=resumed.out_dir, init_from="resume"))
    assert "eager (as before), 2 workers" in capsys.readouterr().out
    assert_same_run(first.out_dir, resumed.out_dir)
    set_threads(1)
    train(tiny(**settings, out_dir=one_core.out_dir, init_from="resume"))
    assert_same_run(first.out_dir, one_core.out_dir)
    parts = checkpoint.load(Path(resumed.out_dir)).state["parts"]
    assert [part["resolved"]["workers"] for part in parts] == [2, 2] and all(part["exact"] for part in parts)


def test_evaluations_do_not_affect_training(tiny, tmp_path):
    many, few = tiny(eval_interval=2), tiny(eval_interval=100, out_dir=str(tmp_path / "few"))
    train(many)
    train(few)
    a, b = checkpoint.load(Path(many.out_dir)), checkpoint.load(Path(few.out_dir))
    assert same_tensors(a.model, b.model)


FROZEN = dict(learning_rate=0.0, dropout=0.0)  # so that steps do not amplify the rounding of earlier steps


def assert_same_steps(actual: TrainConfig, expected: TrainConfig) -> None:
    """Assert that losses, gradient norms, and moments of two runs with FROZEN differ only by rounding."""
    a, b = (checkpoint.load(Path(cfg.out_dir)) for cfg in (actual, expected))
    assert a.state["next_sequence"] == b.state["next_sequence"]
    T, config = expected.block_size, a.config()
    # Logits, which are smaller than the loss here, a log-sum-exp, and a mean.
    loss_error = 2 * rounding_error(network_operations(config, T) + config.vocab_size + expected.step_tokens)
    grad_error = gradients_error(config, expected.step_tokens // T, T)
    lines, others = (np.array(read_losses(cfg.out_dir), dtype=float) for cfg in (actual, expected))  # NaN: not measured
    for column, error in ((1, loss_error), (2, loss_error), (4, grad_error)):
        np.testing.assert_allclose(lines[:, column], others[:, column], rtol=error)
    moments, expected_moments = a.optimizer(), b.optimizer()
    for name in [name for name in moments if name.endswith(("exp_avg", "momentum_buffer"))]:
        error = (moments[name] - expected_moments[name]).norm()
        assert error <= grad_error * expected_moments[name].norm(), name


def test_several_workers_compute_what_one_does(tiny, tmp_path, set_threads):
    set_threads(2)
    one, two = tiny(**FROZEN), tiny(**FROZEN, workers=2, out_dir=str(tmp_path / "two"))
    train(one)
    train(two)
    assert_same_steps(two, one)


@pytest.mark.parametrize("masked", ["no targets", "some targets", "all targets of a micro-batch"])
def test_gradient_accumulation_equals_one_large_batch(
    tiny, data_dir, masked_dir, without_targets, tmp_path, capsys, masked
):
    """Each target of a step has the same weight in any micro-batch."""
    settings = dict(data_dir=str(data_dir) if masked == "no targets" else masked_dir, max_iters=4, eval_interval=4)
    if masked == "all targets of a micro-batch":
        without_targets(range(1, 7))
    settings |= dict(FROZEN, eval_iters=None, workers=1, gradient_accumulation_steps=None, total_batch_tokens=8 * 32)
    large, *others = [tiny(**settings, batch_size=B, out_dir=str(tmp_path / f"{B}")) for B in (8, 1, 2)]
    train(large)
    for cfg in others:
        train(cfg)
        assert_same_steps(cfg, large)
    assert ("some of them masked" in capsys.readouterr().out) == (masked != "no targets")
    _, y = Mixture(find_datasets("verse", settings["data_dir"]), 32, 1337, "epoch").batch(0, 32)
    n_targets = (y != -1).sum(axis=1).tolist()
    assert (len({*n_targets}) > 3) == (masked != "no targets") and (0 in n_targets) == masked.startswith("all")


# --- the validation loss ----------------------------------------------------------------------------------------------


def test_the_validation_loss_is_the_mean_over_all_tokens(seed):
    """Not over batches: it does not depend on the batch size."""
    data = [Shard(np.random.default_rng(seed).integers(20, size=203).astype("<u2"))]
    model = GPT(GPTConfig(block_size=8, vocab_size=20, n_layer=1, n_head=1, n_embd=8), seed)
    runtime = resolve_runtime("cpu", "float32", False)
    total = 0.0
    for start in range(0, 202, 8):
        row = torch.from_numpy(data[0].ids[None, start : start + 9].astype(int))
        total += model(row[:, :-1], row[:, 1:])[1].item() * (row.shape[1] - 1)
    loss_fn = compile_loss(model, runtime)
    for batch_size in (1, 3, 26, 100):
        val_loss = mean_loss(loss_fn, ValidationWindows(data, 8, 20), runtime, batch_size)
        operations = network_operations(model.config, 8) + 20 + 202  # logits, log-sum-exp, and mean
        assert val_loss == pytest.approx(total / 202, rel=2 * rounding_error(operations))


def test_a_loss_in_reused_memory_is_copied(seed):
    """A CUDA graph writes every loss into the same memory, but evaluations read the losses at their end."""
    data = [Shard(np.random.default_rng(seed).integers(20, size=203).astype("<u2"))]
    model = GPT(GPTConfig(block_size=8, vocab_size=20, n_layer=1, n_head=1, n_embd=8), seed)
    runtime, static_loss = resolve_runtime("cpu", "float32", False), torch.zeros(())
    eager = compile_loss(model, runtime)
    expected = mean_loss(eager, ValidationWindows(data, 8, 20), runtime, 3)

    def replayed(x, y):
        return static_loss.copy_(eager(x, y))

    assert mean_loss(replayed, ValidationWindows(data, 8, 20), runtime, 3) == expected


# --- data -------------------------------------------------------------------------------------------------------------


def test_a_mixture_trains_resumes_and_reports_its_epochs(tiny, mixed_dir, tmp_path, capsys):
    mixed = dict(dataset="verse:0.7,prose:0.3", data_dir=mixed_dir)
    uninterrupted, resumed = str(tmp_path / "uninterrupted"), str(tmp_path / "resumed")
    train(tiny(**mixed, out_dir=uninterrupted))
    out = capsys.readouterr().out
    assert "verse: 18,581 training" in out and "70.0% of the sequences" in out and "30.0% of the sequences" in out
    assert "trained for " in out and " epochs of prose (verse " in out
    train(tiny(**mixed, out_dir=resumed, max_iters=6, lr_decay_iters=12))
    train(tiny(**mixed, out_dir=resumed, lr_decay_iters=12, init_from="resume"))
    a, b = checkpoint.load(Path(uninterrupted)), checkpoint.load(Path(resumed))
    assert same_tensors(a.model, b.model)
    last = read_metrics(uninterrupted)[-1]
    assert last["val_loss"] == pytest.approx(0.7 * last["val_loss/verse"] + 0.3 * last["val_loss/prose"])
    assert last["epochs/prose"] == pytest.approx(15 / ((6480 - 32) * 200 // (201 * 32)))
    for other in ("verse:0.5,prose:0.5", "verse"):
        with pytest.raises(UserError, match="is not this run's original data"):
            train(tiny(**{**mixed, "dataset": other}, out_dir=resumed, init_from="resume", max_iters=20))


@pytest.mark.architecture("this test, whose settings train GPT-2 to what it expects")
def test_a_nanogpt_data_set_trains_and_samples(tiny, tmp_path, capsys):
    write_nanogpt_data(tmp_path / "nanogpt")
    cfg = tiny(dataset=str(tmp_path / "nanogpt"), max_iters=40, learning_rate=1e-2, dropout=0.0)
    assert train(cfg).best_val_loss < math.log(2)  # so the next of the three characters has a probability above 1/2
    assert sample_text(cfg.out_dir, start="\na", max_new_tokens=6, temperature=0.0) == "\nab\nab\na\n"


def test_validation_data_without_counted_targets_is_refused(tiny, masked_dir):
    """The first evaluation raised IndexError."""
    folder = Path(masked_dir, "verse")
    edit_split(folder, "val", mask=np.zeros(len(ids_of(folder, "val")), np.uint8))
    with pytest.raises(DatasetError, match="no token of the validation data counts as a target"):
        train(tiny(data_dir=masked_dir))


# --- bad steps --------------------------------------------------------------------------------------------------------


@pytest.fixture
def inject_bad_gradients(monkeypatch):
    """A function that sets one gradient of the given steps to a value, like a faulty GPU or an overflow."""

    def inject(steps: range, value: float = float("nan")) -> None:
        clip, step_numbers = nn.utils.clip_grad_norm_, iter(range(1, 1000))

        def clip_with_bad_gradient(parameters, *args):
            parameters = list(parameters)
            if next(step_numbers) in steps:
                parameters[3].grad[0] = value
            return clip(parameters, *args)

        monkeypatch.setattr(nn.utils, "clip_grad_norm_", clip_with_bad_gradient)

    return inject


@pytest.fixture
def without_targets(monkeypatch):
    """A function that masks all targets of sequences, as no data set does: windows without targets are not drawn."""

    def mask(sequences: range) -> None:
        batch = Mixture.batch

        def masked_batch(self, first, count):
            x, y = batch(self, first, count)
            return x, np.where(np.isin(np.arange(first, first + count), sequences)[:, None], -1, y)

        monkeypatch.setattr(Mixture, "batch", masked_batch)

    return mask


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_without_targets_has_no_loss_and_changes_nothing(
    tiny, masked_dir, without_targets, capsys, tmp_path, optimizer
):
    """Its loss was 0.0000, and weight decay and momentum changed the weights. The step and the data advance."""
    without_targets(range(4 * 4, 4 * 5))
    settings = dict(data_dir=masked_dir, optimizer=optimizer, batch_size=2, gradient_accumulation_steps=2)
    settings |= dict(eval_interval=1, lr_decay_iters=12, keep_last=5, workers=1)
    cfg = tiny(max_iters=5, **settings)
    train(cfg)
    out = capsys.readouterr().out
    before, after = (checkpoint.load(Path(cfg.out_dir, f"step-{step:06d}")) for step in (4, 5))
    assert same_tensors(before.model, after.model) and same_tensors(before.optimizer(), after.optimizer())
    assert after.state["next_sequence"] == 5 * 4 and after.state["guard"]["without_targets"] == 1
    line = read_metrics(cfg.out_dir)[-1]
    assert line["loss"] is line["grad_norm"] is None and line["skipped"] == 0 and line["val_loss"] > 0
    assert "step 5 has no targets, so it has no loss" in out and "step 5/5: no targets, val " in out
    assert "1 step had no targets, and changed no weights" in out

    train(tiny(max_iters=7, **settings, init_from="resume"))
    straight = tiny(max_iters=7, **settings, out_dir=str(tmp_path / "straight"))
    train(straight)
    assert_same_run(cfg.out_dir, straight.out_dir)
    assert checkpoint.load(Path(straight.out_dir)).state["guard"]["without_targets"] == 1


@pytest.mark.parametrize("device, optimizer, value", [
    ("cpu", "adamw", math.nan), ("cpu", "adamw", math.inf), ("mps", "adamw", math.nan), ("mps", "muon", math.nan),
])  # fmt: skip
def test_a_bad_gradient_changes_no_weights_or_optimizer_state(tiny, inject_bad_gradients, device, optimizer, value):
    """On Apple's GPU, the host skips the step, because its optimizers do not support found_inf. Each copy from it is
    synchronous, because no event tells of its end.
    """
    inject_bad_gradients(range(5, 6), value)
    settings = dict(max_iters=5, lr_decay_iters=12, save_interval_minutes=None, eval_interval=4, keep_last=5)
    cfg = tiny(**settings, device=device, optimizer=optimizer)
    with SimulatedGPU("mps") if device == "mps" else nullcontext():
        train(cfg)
    before, after = (checkpoint.load(Path(cfg.out_dir, f"step-{step:06d}")) for step in (4, 5))
    assert same_tensors(before.model, after.model)
    assert same_tensors(before.optimizer(), after.optimizer())
    assert after.state["guard"]["skipped"] == 1 and after.state["next_sequence"] == 5 * 4
    assert [line["skipped"] for line in read_metrics(cfg.out_dir)] == [0, 0, 0, 0, 1]
    record = json.loads(Path(cfg.out_dir, "skipped", "step-000005.json").read_text(encoding="utf-8"))
    assert record["sequences"] == [16, 19] and len(record["text"]) == 4 and len(record["text"][0]) == 32
    assert [step["step"] for step in record["before"]] == [1, 2, 3, 4]
    if device == "cpu":
        train(tiny(init_from="resume"))
        guard = checkpoint.load(Path(cfg.out_dir)).state["guard"]
        assert guard["skipped"] == 1 and guard["in_a_row"] == 0
        assert guard["moments"] == after.state["guard"]["moments"]


def test_too_many_bad_steps_in_a_row_stop_the_run(tiny, inject_bad_gradients):
    inject_bad_gradients(range(7, 100))
    with pytest.raises(TrainingError, match=r"at step 10: the gradient.*is intact; resume.*--dtype=float32"):
        train(tiny(max_bad_steps=4))
    assert run_folder.last_state(Path(tiny().out_dir))["step"] == 6
    assert all(tensor.isfinite().all() for tensor in checkpoint.load(Path(tiny().out_dir)).model.values())
    assert TrainingError.exit_code == 1


def test_weights_that_are_not_finite_stop_the_run(tiny, monkeypatch):
    train(tiny(max_iters=3))

    def from_bad_tensors(config, tensors):
        tensors["transformer.ln_f.weight"][0] = float("nan")
        return model_from_tensors(config, tensors)

    monkeypatch.setattr(checkpoint, "model_from_tensors", from_bad_tensors)
    with pytest.raises(TrainingError, match="the weights are not finite"):
        train(tiny(init_from="resume", max_bad_steps=2))
    assert run_folder.last_state(Path(tiny().out_dir))["step"] == 3


@pytest.mark.architecture("this test, whose settings make GPT-2 diverge")
def test_a_diverged_run_stops_without_saving_a_checkpoint(tiny):
    cfg = tiny(max_iters=200, eval_interval=1, grad_clip=0.0, learning_rate=1e30, lr_schedule="constant")
    with pytest.raises(TrainingError, match=r"the validation loss is nan") as stop:
        train(cfg)
    assert "start again with a smaller --learning_rate" in str(stop.value) and "intact" not in str(stop.value)
    assert not run_folder.exists(Path(cfg.out_dir))
    train(tiny(max_iters=2))
    with pytest.raises(TrainingError) as stop:  # the checkpoint is that of the previous run, which this one replaces
        train(replace(cfg, overwrite=True))
    assert "intact" not in str(stop.value)


def test_skip_spikes_skips_spikes(tiny, inject_bad_gradients):
    inject_bad_gradients(range(110, 112), 1e4)
    train(tiny(max_iters=115, eval_interval=200, skip_spikes=20.0, log_interval=50))
    skipped = sorted(path.name for path in Path(tiny().out_dir, "skipped").iterdir())
    assert skipped == ["step-000110.json", "step-000111.json"]
    assert read_metrics(tiny().out_dir)[-1]["skipped"] == 2
    record = json.loads(Path(tiny().out_dir, "skipped", "step-000110.json").read_text(encoding="utf-8"))
    assert [step["step"] for step in record["before"]] == list(range(60, 110))


def test_a_float16_gradient_that_overflows_at_every_loss_scale_stops_the_run(tiny, monkeypatch):
    """Each overflow was attributed to the loss scale, so the run never stopped."""
    half = Runtime(torch.device("cpu"), torch.float16, False, "float16")
    monkeypatch.setattr(resolve, "resolve_runtime", lambda *args: half)
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=4.0))
    forward = GPT.forward

    def forward_with_infinite_gradient(self, *args, **kwargs):
        logits, loss = forward(self, *args, **kwargs)
        if self.training:
            loss.register_hook(lambda gradient: gradient * math.inf)
        return logits, loss

    monkeypatch.setattr(GPT, "forward", forward_with_infinite_gradient)
    with pytest.raises(TrainingError, match="the gradient is not finite"):
        train(tiny(max_iters=50, max_bad_steps=3))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("infinite", ["loss", "gradient"])
def test_a_float16_step_that_is_infinite_only_halves_the_loss_scale(optimizer, infinite, seed):
    """It changes no weight, moment or count of updates. The scale doubles after two good steps in a row."""
    torch.manual_seed(seed)
    half, x = Runtime(torch.device("cpu"), torch.float16, False, "float16"), torch.randint(20, (2, 2, 8))
    batches = [(x[0], x[1], 0.5), (x[1], x[0], 0.5)]
    shape = SimpleNamespace(count=2, sequences=4)
    loader = SimpleNamespace(runtime=half, shape=shape, micro_batches=lambda first: batches)
    loader.seed_dropout = lambda *step: None
    model = GPT(GPTConfig(block_size=8, vocab_size=20, n_layer=1, n_head=2, n_embd=16))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    guard = StepGuard(half.device, None)
    updates = make_optimizer(model, optimizer, 1e-2, (0.9, 0.95), 0.1)
    state, loss_fn = TrainState(model, model, updates, scaler, guard, Evaluations()), compile_loss(model, half)

    def bad_loss(x, y):
        loss = loss_fn(x, y)
        if infinite == "gradient":
            loss.register_hook(lambda gradient: gradient * math.inf)
        return loss * math.inf if infinite == "loss" else loss

    scales, tensors = [], []
    for function in (loss_fn, loss_fn, loss_fn, bad_loss, loss_fn, loss_fn):
        train_script.train_step(state, function, loader, LearningRates(1e-2, 0.02), 1.0, seed)
        scales.append(scaler.get_scale())
        weights, moments = state.tensors(keep=True, copy=True)
        tensors.append(weights | moments)
    assert scales == [2.0**n for n in (10, 11, 11, 10, 10, 11)]
    assert [same_tensors(*pair) for pair in pairwise(tensors)] == [False, False, True, False, False]
    assert {value.item() for name, value in tensors[-1].items() if name.endswith("/step")} == {5.0}
    guard.send()
    losses = [step.loss for step in guard.read(state.step)]
    assert state.step == 6 and guard.skipped == (infinite == "loss") and losses[5] < losses[0]


# --- dtype, compilation, device ---------------------------------------------------------------------------------------


def test_bfloat16_on_a_cpu(tiny, text):
    assert train(tiny(dtype="bfloat16", max_iters=40)).best_val_loss < entropy(text)


NO_CODE = "aot_eager_decomp_partition"  # the backend that divides graphs as the default one, but generates no code


@pytest.mark.parametrize(
    "mode, backend",
    [(True, NO_CODE), *(pytest.param(mode, None, marks=pytest.mark.slow) for mode in (True, "reduce-overhead"))],
)
def test_compiled_training_on_a_cpu(tiny, tmp_path, mode, backend, monkeypatch, capsys):
    """On a CPU, both modes compile the same code with a C++ compiler; they differ in CUDA graphs."""
    if backend:
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    elif not any(map(shutil.which, ("g++", "clang++"))):
        pytest.skip("torch.compile needs a C++ compiler")
    settings = dict(FROZEN, n_layer=1, batch_size=8, eval_iters=2)
    eager, compiled = tiny(**settings), tiny(**settings, compile=mode, out_dir=str(tmp_path / "compiled"))
    train(eager)
    train(compiled)
    assert_same_steps(compiled, eager)
    assert "compiled: 2 graphs, 0 graph breaks" in capsys.readouterr().out  # evaluation and training


def test_a_run_reports_that_nothing_was_compiled(tiny, monkeypatch, capsys):
    """With FSDP and activation checkpointing, torch.compile compiled nothing, and the run said "compiled"."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    train(tiny(compile=True, max_iters=2))
    output = capsys.readouterr().out
    assert output.count("torch.compile compiled nothing: training runs in eager mode") == 1


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # the test's dtype is float32
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch captures an empty one for its memory
def test_cuda_graphs_on_a_gpu(tiny, tmp_path):
    eager = tiny(**FROZEN, device="cuda")
    captured = tiny(**FROZEN, device="cuda", compile="reduce-overhead", out_dir=str(tmp_path / "captured"))
    train(eager)
    train(captured)
    assert_same_steps(captured, eager)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_training_and_resuming_on_a_gpu(tiny, text, dtype):
    cfg = tiny(device="cuda", dtype=dtype, max_iters=60)
    assert train(cfg).best_val_loss < entropy(text)
    train(tiny(device="cuda", dtype=dtype, max_iters=70, init_from="resume"))
    assert run_folder.last_state(Path(cfg.out_dir))["step"] == 70


@pytest.mark.gpu
def test_a_deterministic_run_on_a_gpu_resumes_bitwise_identically(tiny, tmp_path):
    settings = dict(device="cuda", dtype="bfloat16", compile=False, deterministic=True)
    uninterrupted, resumed = tiny(**settings), tiny(**settings, out_dir=str(tmp_path / "resumed"))
    train(uninterrupted)
    train(tiny(**settings, out_dir=resumed.out_dir, max_iters=6, lr_decay_iters=12))
    train(tiny(**settings, out_dir=resumed.out_dir, init_from="resume"))
    assert_same_run(uninterrupted.out_dir, resumed.out_dir)
    lines = Path(resumed.out_dir, "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [6, 12]  # cumsum failed in each sample


# --- on a simulated GPU -----------------------------------------------------------------------------------------------


def record_waits(gpu: SimulatedGPU, monkeypatch) -> dict[str, list[list[str]]]:
    """What the host waits for in each call of these functions of a run."""
    waits = {"train_step": [], "end_step": [], "evaluate": []}

    def record(owner: object, name: str) -> None:
        function = getattr(owner, name)

        def recorded(*args):
            before = len(gpu.waits)
            result = function(*args)
            waits[name].append(gpu.waits[before:])
            return result

        monkeypatch.setattr(owner, name, recorded)

    for name in waits:
        record(Session if name == "end_step" else train_script, name)
    return waits


ON_THE_GPU = {
    "adamw": dict(gradient_accumulation_steps=3, batch_size=30),  # keeps the data in the GPU's memory
    "muon": dict(optimizer="muon", muon_learning_rate=0.0, skip_spikes=5.0, recompute=True, position="relative"),
    "masked": dict(position="rotary"),
    "float16": dict(position="alibi"),
}


@pytest.mark.parametrize("case", ON_THE_GPU)
def test_the_host_waits_for_a_gpu_only_at_logged_steps(tiny, masked_dir, tmp_path, monkeypatch, case):
    """Steps are queued on a GPU ahead of time. The losses are those on a CPU.

    A logged step is read one step later; the last one at once, because it is evaluated and saved.
    """
    settings = dict(**ON_THE_GPU[case], **FROZEN, max_iters=10, log_interval=4, eval_interval=99, sample_tokens=0)
    if case == "masked":
        settings["data_dir"] = masked_dir
    dtype = "float16" if case == "float16" else "float32"
    expected, cfg = tiny(**settings, out_dir=str(tmp_path / "cpu")), tiny(**settings, device="cuda", dtype=dtype)
    train(expected)
    with SimulatedGPU() as gpu:
        waits = record_waits(gpu, monkeypatch)
        train(cfg)
    assert waits["train_step"] == [[]] * 10
    assert waits["end_step"] == [["Event.synchronize"] * (step in (2, 5, 9, 10)) for step in range(1, 11)]
    assert waits["evaluate"] == [["tolist"]] * 2
    assert_same_steps(cfg, expected)
    assert bool(checkpoint.load(Path(cfg.out_dir)).state["grad_scaler"]) == (case == "float16")


RAISING = {  # operators on CUDA, by their names in the documentation of torch.use_deterministic_algorithms
    "torch.nn.AvgPool3d": {"avg_pool3d_backward"},
    "torch.nn.AdaptiveAvgPool2d": {"_adaptive_avg_pool2d_backward"},
    "torch.nn.AdaptiveAvgPool3d": {"_adaptive_avg_pool3d_backward"},
    "torch.nn.AdaptiveMaxPool2d": {"adaptive_max_pool2d_backward"},
    "torch.nn.FractionalMaxPool2d": {"fractional_max_pool2d_backward"},
    "torch.nn.FractionalMaxPool3d": {"fractional_max_pool3d_backward"},
    "torch.nn.MaxUnpool1d": {"max_unpool2d"},
    "torch.nn.MaxUnpool2d": {"max_unpool2d"},
    "torch.nn.MaxUnpool3d": {"max_unpool3d"},
    "torch.nn.functional.interpolate": {
        f"upsample_{mode}_backward" for mode in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")
    },
    **{f"torch.nn.ReflectionPad{n}d": {f"reflection_pad{n}d_backward"} for n in (1, 2, 3)},
    "torch.nn.NLLLoss": {"nll_loss2d_forward"},  # aten/src/ATen/native/cuda/NLLLoss2d.cu; not nll_loss_forward
    "torch.nn.CTCLoss": {"_ctc_loss_backward"},
    "torch.nn.EmbeddingBag": {"_embedding_bag_dense_backward"},
    "torch.Tensor.put_": {"put", "put_"},
    "torch.histc": {"histc"},
    "torch.bincount": {"bincount"},
    "torch.median": {"median", "nanmedian", "kthvalue"},
    "torch.nn.functional.grid_sample": {"grid_sampler_2d_backward", "grid_sampler_3d_backward"},
    "torch.cumsum": {"cumsum", "cumsum_"},
    "torch.Tensor.scatter_reduce": {"scatter_reduce", "scatter_reduce_"},
    "torch.Tensor.resize_": set(),  # of a quantized tensor
}


def test_the_list_of_operators_that_raise_is_complete():
    text = torch.use_deterministic_algorithms.__doc__
    documentation = text.split("operations will throw a")[1].split("In addition")[0]
    names = re.findall(r"\* :(?:class|func):`(.*?)`", documentation)
    assert len(names) > 20 and {*names} <= RAISING.keys()


@pytest.mark.parametrize("position", POSITIONS)
def test_a_deterministic_run_on_a_gpu_uses_no_operator_that_raises(tiny, monkeypatch, position):
    """Training, evaluation and sampling, which ran a cumulative sum on the GPU. Now the CPU does."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(kernels, "MAX_LOGITS", 2000)
    optimizer = "muon" if position in ("relative", "none") else "adamw"
    settings = dict(position=position, optimizer=optimizer, skip_spikes=5.0, max_iters=2, eval_iters=1)
    with SimulatedGPU() as gpu:
        train(tiny(**settings, device="cuda", deterministic=True))
    assert not gpu.operators["cuda"] & set().union(*RAISING.values())
    assert "cumsum" in gpu.operators["cpu"]
    assert gpu.replays
    assert {"_fused_adamw_", "_foreach_norm", "_log_softmax"} <= gpu.operators["cuda"]


# --- the command line -------------------------------------------------------------------------------------------------


def test_print_config_prints_all_settings_and_does_nothing_else(tiny, capsys):
    train_script.main(tiny(print_config=True, dataset="prose"))
    out = capsys.readouterr().out.splitlines()
    assert "n_layer = 2" in out and "dataset = 'prose'" in out and len(out) == len(fields(tiny()))
    assert not Path(tiny().out_dir).exists()


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_exit_status_says_which_signal_stopped_the_run(tiny, monkeypatch, capsys, number, status):
    """It was 0, so a script could not distinguish a stopped run from a finished one."""
    train_step = train_script.train_step

    def step_and_signal(state, *args):
        train_step(state, *args)
        if state.step == 3:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(train_script, "train_step", step_and_signal)
    with pytest.raises(SystemExit) as exit:
        train_script.main(tiny())
    assert exit.value.code == status and run_folder.last_state(Path(tiny().out_dir))["step"] == 3
    out = capsys.readouterr().out
    assert f"stopped by {signal.Signals(number).name} and saved after step 3" in out and "continue: " in out


def test_huge_numbers_are_refused_at_once(tiny):
    """They ended in a traceback, also by an overflow of a division, or in a search for a smaller batch size."""
    for setting in ("n_embd", "batch_size", "gradient_accumulation_steps", "max_iters"):
        with pytest.raises(UserError):
            train(tiny(**{setting: 10**23}))
        with pytest.raises(UserError):
            train(tiny(block_size=1024, **{"batch_size" if setting == "max_iters" else setting: 10**13}))
    with pytest.raises(UserError, match=r"total_batch_tokens=10+: "):
        train(tiny(total_batch_tokens=10**30, gradient_accumulation_steps=None))
