"""Training steps as CUDA graphs, on a simulated GPU: state, memory and waiting, not speed."""

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import train as train_script
from folio import UserError
from folio.checkpoints import checkpoint
from folio.training import guard, optim
from folio.training.graphs.step_graph import StepGraph
from folio.training.loader import BatchLoader, BatchShape
from folio.training.planning.resolve import resolve
from folio.training.setup import open_run, open_state
from model import GPT, GPTConfig
from tests.support.operators import OperatorRecorder
from tests.support.runs import assert_same_run, read_losses
from tests.support.simulated_gpu import GPUTensor, SimulatedGPU
from train import TrainConfig, train

GRAPH = dict(device="cuda", step_graph=True, sample_tokens=0, max_iters=10)
CASES = {  # Muon's rate and momentum, dropout in several micro-batches, skipped steps, shares of masked data, ...
    "adamw": dict(gradient_accumulation_steps=2, dropout=0.2),
    "muon": dict(optimizer="muon", skip_spikes=0.5, max_bad_steps=99, position="relative", lr_schedule="linear"),
    "resident": dict(gradient_accumulation_steps=3, batch_size=30),
    "masked": dict(position="rotary"),
    "float16": dict(position="alibi", dtype="float16"),
}


@contextmanager
def without_captures():
    """Steps of StepGraph are computed as before a capture."""
    with mock.patch.object(StepGraph, "WARMUP_STEPS", 10**9):
        yield


@pytest.fixture
def settings(masked_dir, monkeypatch) -> Callable[..., dict]:
    """The settings of a case. Spikes are detected from the third step on."""
    monkeypatch.setattr(guard, "MIN_STEPS", 2)
    return lambda case: {**GRAPH, **CASES[case], **(dict(data_dir=masked_dir) if case == "masked" else {})}


@pytest.mark.parametrize("case", CASES)
def test_replayed_steps_equal_computed_ones(tiny, tmp_path, settings, case):
    """Bitwise: losses, gradient norms, skipped steps, weights, moments, and the loss scale."""
    replayed, computed = (tiny(**settings(case), out_dir=str(tmp_path / name)) for name in ("replayed", "computed"))
    with SimulatedGPU() as gpu:
        train(replayed)
    assert (gpu.captures, gpu.replays) == (1, 10 - StepGraph.WARMUP_STEPS)
    with SimulatedGPU() as gpu, without_captures():
        train(computed)
    assert gpu.captures == 0
    assert_same_run(replayed.out_dir, computed.out_dir)
    states = [checkpoint.load(Path(cfg.out_dir)).state for cfg in (replayed, computed)]
    assert all(states[0][name] == states[1][name] for name in ("guard", "grad_scaler"))
    assert (states[0]["guard"]["skipped"] > 0) == (case == "muon")
    assert bool(states[0]["grad_scaler"]) == (case == "float16")


@pytest.mark.parametrize("case", ["muon", "masked"])
def test_losses_are_those_without_graphs(tiny, tmp_path, settings, case):
    """The learning rates, in float32 on the device, are rounded differently."""
    graph = tiny(**settings(case), out_dir=str(tmp_path / "graph"))
    plain = tiny(**{**settings(case), "step_graph": False}, out_dir=str(tmp_path / "plain"))
    with SimulatedGPU():
        train(graph)
        train(plain)
    losses = [np.array(read_losses(cfg.out_dir), dtype=float) for cfg in (graph, plain)]  # NaN: not measured
    # A rate of an earlier step, which differs by a tenth, changes them by more. Rounding, by 6e-8, by much less.
    np.testing.assert_allclose(*losses, rtol=1e-3)


@pytest.mark.parametrize("case", ["adamw", "muon"])
def test_a_resumed_run_is_bitwise_identical(tiny, tmp_path, settings, case):
    """Its first steps are computed, those of the uninterrupted run were replayed."""
    whole, parts = (
        tiny(**settings(case), eval_interval=5, out_dir=str(tmp_path / name)) for name in ("whole", "parts")
    )
    with SimulatedGPU() as gpu:
        train(whole)
        train(tiny(**{**settings(case), "max_iters": 5}, lr_decay_iters=10, eval_interval=5, out_dir=parts.out_dir))
        train(tiny(**settings(case), eval_interval=5, init_from="resume", out_dir=parts.out_dir))
    assert gpu.captures == 3
    assert_same_run(whole.out_dir, parts.out_dir)


class Steps:
    """Steps of a run, and what the last one returned to the host and allocated."""

    def __init__(self, cfg: TrainConfig):
        self.plan = resolve(cfg, train_script.timed_step, train_script.evaluate)
        self.run, self.step = open_run(self.plan), StepGraph(train_script.train_step)
        self.state = open_state(self.plan, self.run)

    def take(self, count: int, loader: BatchLoader | None = None) -> None:
        cfg, state = self.plan.settings, self.state
        for _ in range(count):
            rates = self.plan.schedule.learning_rates_at(state.step)
            self.step(state, self.run.loss_fn, loader or self.run.loader, rates, cfg.grad_clip, cfg.seed)

    def results(self) -> list[torch.Tensor]:
        """The weights, the state of the optimizer, and the loss and norm of each step."""
        optimizer = optim.state_tensors(self.state.model, self.state.optimizer)
        tensors = (
            *self.state.model.parameters(),
            *optimizer.values(),
            *self.state.guard.judged,
            self.state.guard.moments,
        )
        return [tensor.detach().cpu() for tensor in tensors]


def assert_replays_equal_computed_steps(make: Callable[[], Steps], action: Callable[[Steps], None]) -> SimulatedGPU:
    """Assert that an action has bitwise the same results with and without a graph. Returns the GPU of the graph."""
    results = []
    for context in (without_captures(), mock.patch.object(StepGraph, "WARMUP_STEPS", 3)):
        with context, SimulatedGPU() as gpu:
            steps = make()
            action(steps)
            results.append(steps.results())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return gpu


@pytest.mark.parametrize("case", ["adamw", "muon"])
def test_after_a_rollback_a_new_graph_is_captured(tiny, tmp_path, settings, case):
    """A checkpoint is loaded into new tensors, which the graph before it does not change."""
    cfg = tiny(**{**settings(case), "max_iters": 20}, out_dir=str(tmp_path / "steps"))
    with SimulatedGPU():
        train(saved := tiny(**{**settings(case), "max_iters": 4}, out_dir=str(tmp_path / "saved")))

    def take_steps(steps: Steps) -> None:
        steps.take(6)
        steps.state.restore(checkpoint.load(Path(saved.out_dir)))
        steps.take(6)

    gpu = assert_replays_equal_computed_steps(lambda: Steps(cfg), take_steps)
    assert (gpu.captures, gpu.replays) == (2, 6)


def test_after_a_change_of_shape_a_new_graph_is_captured(tiny, settings):
    """copy_ would repeat the only row of a smaller batch."""
    cfg = tiny(**{**settings("muon"), "max_iters": 20})

    def take_steps(steps: Steps) -> None:
        steps.take(6)
        loader, group = steps.run.loader, steps.run.loader.runtime.group
        for batch_size, accumulation in ((1, 1), (2, 2)):
            steps.take(5, BatchLoader(loader.data, loader.runtime, BatchShape.of(batch_size, accumulation, group)))

    gpu = assert_replays_equal_computed_steps(lambda: Steps(cfg), take_steps)
    assert (gpu.captures, gpu.replays) == (3, 3 + 2 + 2)


@pytest.mark.parametrize("case", ["adamw", "muon", "masked", "float16"])
def test_a_replayed_step_waits_for_nothing_and_moves_nothing(tiny, settings, case):
    """The host only copies the batches and the rates, and the device only allocates the batches and a copy of the
    step's loss and norm.
    """
    with SimulatedGPU() as gpu:
        steps = Steps(tiny(**settings(case)))
        steps.take(5)

        def memory() -> list[int]:
            model, optimizer, moments = steps.state.model, steps.state.optimizer, steps.state.guard.moments
            tensors = [*model.parameters(), *optim.state_tensors(model, optimizer).values(), moments]
            rates = [group[name] for group in optimizer.param_groups for name in ("lr", "momentum") if name in group]
            return [tensor.values.data_ptr() for tensor in (*tensors, *rates)]

        before, waits, names = memory(), len(gpu.waits), []

        def record(name, args, result):
            if isinstance(result, GPUTensor):
                names.append(name)

        with OperatorRecorder(record):
            steps.take(1)
        assert gpu.captures == 1 and gpu.replays == 3 and gpu.waits[waits:] == [] and memory() == before
        micro_batches, groups = steps.run.loader.shape.count, steps.state.optimizer.param_groups
        rates = sum(2 if "shape" in group else 1 for group in groups)
        expected = ["_to_copy"] * 2 * micro_batches + ["copy_"] * 2 * micro_batches
        expected += ["fill_"] * (micro_batches + rates) + ["clone"]
        assert sorted(names) == sorted(expected)
        assert all(p.grad is None for p in steps.state.model.parameters())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_rates_in_tensors_are_rounded_to_float32(kind, seed):
    """The arithmetic of a captured step against that of others: the same but for the rounding of the rates."""
    torch.manual_seed(seed)
    changes = []
    config = GPTConfig(block_size=8, vocab_size=20, n_layer=1, n_head=2, n_embd=16)
    gradients = [torch.randn(p.shape) for p in GPT(config).parameters()]
    for has_tensors in (False, True):
        model = GPT(config)
        optimizer = optim.make_optimizer(model, kind, 0.0, (0.9, 0.95), 0.1)
        if has_tensors:
            optim.use_device_rates(optimizer)
        before = [p.detach().clone() for p in model.parameters()]
        for step in range(3):
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p.grad = gradient.clone()
            optim.update(optimizer, optim.LearningRates(1e-3 / (step + 1), 2e-2 / (step + 1)), step, torch.zeros(()))
        changes.append([p.detach() - old for p, old in zip(model.parameters(), before, strict=True)])
    for p, change, expected in zip(GPT(config).parameters(), *reversed(changes), strict=True):
        # Per step, the rate, its products with the decay and the direction, and the new weight are rounded. Muon's five
        # iterations multiply a small singular value, and the rounding of the momentum in it, by at most 3.4445^5.
        amplification = 2 * 3.4445**5 if kind == "muon" else 8
        error = 3 * 2**-23 * (p.abs().max() + amplification * expected.abs().max())
        assert (change - expected).abs().max() <= error and expected.abs().max() > 100 * error


@pytest.mark.parametrize("changes", [dict(device="cpu"), dict(compile="reduce-overhead"), dict(recompute=True)])
def test_settings_that_exclude_a_graph_are_errors(tiny, monkeypatch, changes):
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)
    with (
        SimulatedGPU(),
        pytest.raises(UserError, match=r"step_graph=True: .*(leave it out|use --)"),
    ):
        train(tiny(**{**GRAPH, **changes}))
