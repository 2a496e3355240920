"""The state of training: saved and restored."""

import math

import pytest
import torch

from folio.training.evaluations import Evaluations
from folio.training.guard import StepGuard
from folio.training.optim import make_optimizer
from folio.training.state import TrainState
from model import GPT, GPTConfig
from tests.support.runs import same_tensors


def new_state(seed: int, kind: str = "adamw") -> TrainState:
    model = GPT(GPTConfig(block_size=8, vocab_size=20, n_layer=2, n_head=2, n_embd=16), seed)
    optimizer = make_optimizer(model, kind, 1e-2, (0.9, 0.95), 0.1, torch.float32)
    guard = StepGuard(torch.device("cpu"), None)
    return TrainState(model, model, optimizer, torch.amp.GradScaler("cpu", enabled=False), guard, Evaluations())


def take_steps(state: TrainState, count: int) -> None:
    for _ in range(count):
        idx = torch.randint(20, (2, 9), generator=torch.Generator().manual_seed(state.step))
        state.net(idx[:, :-1], targets=idx[:, 1:])[1].backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.step, state.next_sequence = state.step + 1, state.next_sequence + 2


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_restored_state_continues_identically(kind, seed):
    straight, saved, restored = new_state(seed, kind), new_state(seed, kind), new_state(seed + 1, kind)
    take_steps(straight, 7)
    take_steps(saved, 4)
    saved.evaluations.add({"val_loss": 2.5}, saved.step, None)
    weights, optimizer = saved.tensors(keep=True, copy=True)
    progress = saved.progress()
    take_steps(saved, 2)  # does not change the copies
    restored.model.load_state_dict(weights, strict=False)
    restored.load(progress, optimizer)
    assert restored.progress() == progress and (restored.step, restored.next_sequence) == (4, 8)
    take_steps(restored, 3)
    results = (state.tensors(keep=True, copy=False) for state in (restored, straight))
    for tensors, expected in zip(*results, strict=True):
        assert same_tensors(tensors, expected) and tensors
    assert restored.tensors(keep=False, copy=False) == ({}, {})


def test_a_state_without_an_evaluation_has_no_best_loss():
    """JSON has no infinity."""
    state, restored = new_state(1), new_state(1)
    assert state.progress()["best_val_loss"] is None
    restored.load(state.progress(), state.tensors(keep=True, copy=True)[1])
    assert restored.evaluations.best_val_loss == math.inf and restored.evaluations.best_step == 0
