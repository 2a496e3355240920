"""Records what happens in a step of a run that is trained again, and compares it with what was logged.

Sequences and dropout are functions of the seed and the step, so a step follows exactly from any checkpoint before it.

Dimensions: B batch, T time (block_size), V vocabulary.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from folio.data.windows import Place
from folio.experiments.run_history import JUDGED, History
from folio.machine import distributed
from folio.training.guard import JudgedStep
from folio.training.loader import BatchLoader
from folio.training.state import TrainState


class SequenceLosses(NamedTuple):
    """A sequence of a step. A token's loss is in nats; NaN if it does not count as a target."""

    number: int  # in the run, from 0
    place: Place
    ids: np.ndarray  # (T + 1,); the first one is only read
    losses: np.ndarray  # (T,), of ids[1:]
    guesses: np.ndarray  # (T,), the most likely tokens
    guess_p: np.ndarray  # (T,), their probabilities
    counted: np.ndarray  # (T,), bool

    @property
    def loss(self) -> float:
        """The mean over its targets; NaN without any."""
        return float(self.losses[self.counted].mean(dtype=np.float64)) if self.counted.any() else math.nan


class ParameterChange(NamedTuple):
    """What a step did to a parameter. The gradient is not clipped; the weights are those before the step."""

    name: str
    shape: list[int]
    optimizer: str
    learning_rate: float
    weight_decay: float
    gradient_norm: float
    weight_norm: float
    update_norm: float

    @property
    def relative_update(self) -> float | None:
        """The norm of the update divided by that of the weights."""
        return self.update_norm / self.weight_norm if self.weight_norm else None


class UnscalingObserver:
    """Stands in for a step's GradScaler, and calls `record` when the gradients are complete and not yet clipped: a step
    then unscales them.
    """

    def __init__(self, scaler: torch.amp.GradScaler, record: Any):
        self.scaler, self.record = scaler, record

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scaler, name)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        self.scaler.unscale_(optimizer)
        self.record()


class StepRecorder:
    """Records what train.train_step does, given this object's `state` and `loss_fn`, without changing a bit of it.

    Losses of tokens come from an additional forward pass before each micro-batch's own, with the same weights and the
    same dropout. Every rank holds one, and calls its methods.
    """

    def __init__(self, state: TrainState, loss_fn: Any, loader: BatchLoader):
        self.own_loss_fn, self.loader, self.model = loss_fn, loader, state.model
        self.state = replace(state, scaler=UnscalingObserver(state.scaler, self._record_gradients))
        self.first = state.next_sequence
        self.moments, self.loss_scale = state.guard.moments.tolist(), state.scaler.get_scale()
        self.before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.gradient_norms: dict[str, float] = {}
        self.passes: list[list[np.ndarray]] = []  # losses, guesses and their probabilities, (B, T) each

    def loss_fn(self, idx: Tensor, targets: Tensor) -> Tensor:
        self._record_tokens(idx, targets)
        torch.manual_seed(torch.initial_seed())  # as train_step has just done, for the same dropout
        return self.own_loss_fn(idx, targets)

    @torch.no_grad()
    def _record_tokens(self, idx: Tensor, targets: Tensor) -> None:
        with self.loader.runtime.compute():
            logits = self.model.logits(idx)  # (B, T, V)
        distributed.reshard(self.model)
        rows = []
        for row, next_ids in zip(logits, targets, strict=True):  # one by one, because logits take much memory
            log_p = row.float().log_softmax(dim=-1)  # (T, V)
            best, guesses = log_p.max(dim=-1)
            rows.append((F.nll_loss(log_p, next_ids, ignore_index=-1, reduction="none"), guesses, best.exp()))
        self.passes.append([torch.stack(tensors).cpu().numpy() for tensors in zip(*rows, strict=True)])

    def _record_gradients(self) -> None:
        for name, p in self.model.named_parameters():
            self.gradient_norms[name] = distributed.full_tensor(p.grad).norm().item()

    def sequences(self) -> list[SequenceLosses]:
        """The sequences of the step, of all ranks."""
        data, count, T = self.loader.data, self.loader.sequences, self.loader.data.block_size
        mine = [np.concatenate(parts)[: self.loader.mine] for parts in zip(*self.passes, strict=True)]
        of_ranks = self.loader.runtime.group.all_gather_object(mine)
        losses, guesses, guess_p = (np.concatenate(parts) for parts in zip(*of_ranks, strict=True))
        places, windows = data.places(self.first, count), dict(zip(data.names, data.training, strict=True))
        ids = [windows[place.dataset].ids[place.shard][place.offset : place.offset + T + 1] for place in places]
        counted = data.batch(self.first, count)[1] != -1
        rows = zip(places, ids, np.where(counted, losses, np.nan), guesses, guess_p, counted, strict=True)
        return [SequenceLosses(number, *row) for number, row in enumerate(rows, start=self.first)]

    @torch.no_grad()
    def parameters(self) -> list[ParameterChange]:
        """What the step did to each parameter."""
        groups = {p: group for group in self.state.optimizer.param_groups for p in group["params"]}
        changes = []
        for name, p in self.model.named_parameters():
            group, before = groups[p], self.before[name]
            norms = [distributed.full_tensor(tensor).norm().item() for tensor in (before, p - before)]
            optimizer = "Muon" if "shape" in group else "AdamW"
            settings = optimizer, group["lr"], group["weight_decay"]
            changes.append(ParameterChange(name, list(p.shape), *settings, self.gradient_norms[name], *norms))
        return changes

    def why_skipped(self, judged: JudgedStep, skip_spikes: float | None) -> str | None:
        """Why the guard skipped the step; None if it did not. judged: what the guard says about it."""
        if not math.isfinite(judged.loss):
            return f"its loss is {judged.loss}"
        if not judged.skipped and not math.isfinite(judged.grad_norm):
            return f"its gradient overflowed float16 at the loss scale {self.loss_scale:,g}, which is lowered"
        if not math.isfinite(judged.grad_norm):
            return f"its gradient norm is {judged.grad_norm}"
        if not judged.skipped:
            return None
        spikes = []
        values = ("loss", judged.loss), ("gradient norm", judged.grad_norm)
        for (name, value), (_, mean, variance) in zip(values, self.moments, strict=True):
            deviations = (value - mean) / math.sqrt(variance) if variance else math.inf
            if deviations > skip_spikes:
                spikes.append(f"its {name} is {deviations:.1f} standard deviations above the mean of {mean:.4f}")
        return f"{' and '.join(spikes)} (skip_spikes={skip_spikes:g})"


# --- the comparison with metrics.jsonl --------------------------------------------------------------------------------


def equal(value: float, logged: float | None) -> bool:
    """Whether a number is the logged one, bit for bit. Those that are not finite are logged as None."""
    return value == logged if logged is not None else not math.isfinite(value)


def is_logged_step(judged: JudgedStep, line: dict[str, Any]) -> bool:
    """Whether a step has the logged loss and gradient norm."""
    return all(equal(getattr(judged, name), line[name]) for name in JUDGED)


@dataclass(frozen=True)
class Comparison:
    """A replayed step, and those before it, beside metrics.jsonl."""

    judged: JudgedStep
    logged: dict[str, Any] | None  # the step's line
    equal_before: list[int]  # the logged steps before it that are equal to the log
    different_before: list[int]
    reasons: list[str]  # why the replay may differ

    @classmethod
    def of(
        cls, before: Iterable[JudgedStep], judged: JudgedStep, learning_rate: float, history: History, doubts: list[str]
    ) -> "Comparison":
        """before: the steps replayed before it. learning_rate: of the step."""
        lines = history.lines
        same: dict[bool, list[int]] = {True: [], False: []}
        for step in before:
            if line := lines.get(step.step):
                same[is_logged_step(step, line)].append(step.step)
        logged = lines.get(judged.step)
        reasons = [*doubts]
        if logged and logged["lr"] not in (None, learning_rate):
            rates = f"the logged learning rate is {logged['lr']:.6g}, not {learning_rate:.6g}"
            reasons.insert(0, f"{rates}: no checkpoint has the settings of this step")
        if not reasons:
            threads = f"another number of threads (here {torch.get_num_threads()}; set OMP_NUM_THREADS), "
            reasons = [f"{'' if history.threads_at(judged.step) else threads}another machine or version of Folio"]
        return cls(judged, logged, same[True], same[False], reasons)

    @property
    def bitwise(self) -> bool | None:
        """Whether loss and gradient norm are the logged ones, bit for bit. None if the step was not logged."""
        return is_logged_step(self.judged, self.logged) if self.logged else None

    def beside(self, name: str) -> str:
        """The step's "loss" or "grad_norm" beside the logged one, in words."""
        value = getattr(self.judged, name)
        if self.logged is None:
            return "not logged"
        logged, what = self.logged[name], "loss" if name == "loss" else "norm"
        if equal(value, logged):
            return f"equal to the logged {what}, bit for bit"
        if logged is None:
            return f"the logged {what} was not finite"
        return f"the logged {what} is {logged!r}, not {value!r} (a difference of {value - logged:.1e})"

    def lines(self) -> list[str]:
        """What else there is to say."""
        lines = [] if self.logged else [f"step {self.judged.step:,} was not logged"]
        if self.different_before:
            lines.append(f"the first step that differs from the log is {self.different_before[0]:,}")
        elif self.equal_before:
            n = len(self.equal_before)
            steps = f"the {n:,} logged steps" if n > 1 else "the only logged step"
            lines.append(f"{steps} replayed before it {'are' if n > 1 else 'is'} equal to the log, bit for bit")
        if self.different_before or self.bitwise is False:
            lines.append(f"the likely reason: {'; '.join(self.reasons)}")
        return lines
