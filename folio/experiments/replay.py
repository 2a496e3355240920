"""Replaying a step of a run: which settings it had, what happened in it, and whether that is what was logged.

Sequences and dropout are functions of the seed and the step, so a step follows exactly from any checkpoint before it.

Dimensions: B batch, T time (block_size), V vocabulary.
"""

import math
import statistics
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from folio import UserError
from folio.base import settings
from folio.base.files import read_json, step_number
from folio.base.progress import note
from folio.base.settings import Config, ConfigError
from folio.checkpoints import checkpoint, foreign, run_folder
from folio.checkpoints.checkpoint import Checkpoint
from folio.checkpoints.run_folder import CheckpointError, NoCheckpointError, precedes
from folio.checkpoints.schema import PartRecord
from folio.data.tokenizer import Tokenizer
from folio.data.windows import Place
from folio.experiments.runs import LOGGED, is_logged, read_metrics
from folio.machine import distributed
from folio.machine.runtime import Runtime
from folio.training.guard import JudgedStep
from folio.training.loader import BatchLoader
from folio.training.start import versions
from folio.training.state import TrainState

JUDGED = ("loss", "grad_norm")  # the numbers of a step that are logged and compared
COMPUTED_BY = ("resolved", "versions", "threads")  # what a step's rounding depends on, in the record of its part


# --- the run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part(Generic[Config]):
    """The steps after `begin`, up to `end`, which a run computed in the same way."""

    begin: int
    end: float  # infinity for the last part
    cfg: Config
    record: PartRecord

    @property
    def decisions(self) -> list[tuple[int, int]] | None:
        """Decisions of a time budget. None: without one, or not known."""
        return self.record["decisions"] if self.cfg.minutes else None


@dataclass(frozen=True)
class History(Generic[Config]):
    """What a run's folder says about its steps. Another process may be training there."""

    folder: Path
    newest: Checkpoint
    init_from: str | None  # what the run started from; None if no checkpoint says it
    parts: list[Part[Config]]  # in order
    lines: dict[int, dict[str, Any]]  # of metrics.jsonl by step, without step 0; after them, records of skipped steps

    @classmethod
    def of(cls, folder: Path, settings: type[Config]) -> "History[Config]":
        """Read a run's folder. settings: train.py's class. Raises UserError if it is not one, or has no checkpoint."""
        require_run(folder)
        newest = checkpoint.load(folder)
        records = run_folder.parts_of(folder, newest.state)
        try:
            parts = joined_parts(records, newest.state["config"], settings)
        except ConfigError as error:
            raise CheckpointError(f"{newest.path}: state.json is damaged: {error}") from None
        lines = {line["step"]: line for line in read_metrics(folder) if line["step"] > 0}
        lines |= {step: line for step, line in read_skipped(folder).items() if step > max(lines, default=0)}
        return cls(folder, newest, records[0]["init_from"], parts, lines)

    def require_step(self, step: int) -> None:
        """Raise UserError if the run has not come to this step, as far as is known."""
        last = max(self.newest.state["step"], *self.lines)
        if step > last:
            raise UserError(f"step={step}: the last step of {self.folder} is {last:,}; choose one up to it")

    def checkpoint_before(self, step: int) -> Checkpoint | None:
        """The newest checkpoint after fewer steps; None if there is none. Damaged ones are reported and left out."""
        if self.newest.state["step"] < step:
            return self.newest
        for path in run_folder.newest_first(self.folder):
            if step_number(path.name) >= min(step, self.newest.state["step"]):
                continue
            try:
                saved = checkpoint.load(path)
            except CheckpointError as error:
                problem = f"{path} was removed" if isinstance(error, NoCheckpointError) else error
                if distributed.rank_from_env() == 0:
                    note(f"{problem}; replaying from an earlier step")
                continue
            if precedes(saved.state, self.newest.state):
                return saved
        return None

    def parts_between(self, begin: int, end: int) -> list[Part[Config]]:
        """The parts that the steps after `begin`, up to `end`, belong to."""
        return [part for part in self.parts if max(part.begin, begin) < min(part.end, end)]

    @property
    def steps_per_second(self) -> float | None:
        """The median of what was logged; None if nothing was."""
        speeds = [
            line["tokens_per_second"] * line["step"] / line["tokens"]
            for line in self.lines.values()
            if line["tokens_per_second"]
        ]
        return statistics.median(speeds) if speeds else None

    def inexact_reasons(self, begin: int, step: int, runtimes: list[Runtime]) -> list[str]:
        """Why the replay of a step from the state after `begin` steps may differ from the run, as far as is known.

        runtimes: of each part that is replayed.
        """
        reasons = []
        for part, runtime in zip(self.parts_between(begin, step), runtimes, strict=True):
            reasons += different_runtimes(part, runtime)
        if begin == 0 and self.init_from is None:
            reasons.append("no checkpoint says what it started from; random weights were assumed")
        elif begin == 0 and self.init_from != "scratch":
            reasons.append(f"the weights of {self.init_from}, from which it started, may have changed")
        if self.lines and not is_logged(self.newest.state, [*self.lines.values()]):
            reasons.append("the newest checkpoint is not of the run in metrics.jsonl, which has not saved one yet")
        return list(dict.fromkeys(reasons))


def require_run(folder: Path) -> None:
    """Raise UserError if a folder has no checkpoints of a run, and say what it is."""
    if run_folder.exists(folder):
        return
    if (folder / "manifest.json").exists():
        raise UserError(f"{folder} is one checkpoint; name the run: {folder.resolve().parent}")
    if (folder / "metrics.jsonl").exists():
        raise UserError(f"{folder} has no checkpoint yet, which says what its settings are; wait for an evaluation")
    is_model = any((folder / name).exists() for name in ("config.json", "ckpt.pt"))
    if is_model or str(folder) in foreign.HUB or folder.is_file():
        raise UserError(f"{folder} holds weights and no run, so there are no steps to replay; name a run's folder")
    raise NoCheckpointError(folder)


def read_skipped(folder: Path) -> dict[int, dict[str, Any]]:
    """The loss and gradient norm of each skipped step that was recorded since the last line of metrics.jsonl, as when
    the run stopped because of it. A number that is not finite is None.
    """
    lines = {}
    for path in (folder / "skipped").glob("step-*.json"):
        with suppress(OSError, ValueError, LookupError, TypeError):
            if path.stat().st_mtime_ns < (folder / "metrics.jsonl").stat().st_mtime_ns:
                continue
            record = read_json(path)
            numbers = {name: float(record[name]) for name in JUDGED}  # of "NaN" if it is not finite
            finite = {name: x if math.isfinite(x) else None for name, x in numbers.items()}
            lines[int(record["step"])] = dict.fromkeys(LOGGED) | finite | {"step": int(record["step"])}
    return lines


def joined_parts(records: list[PartRecord], config: dict[str, Any], cls: type[Config]) -> list[Part[Config]]:
    """The parts of a run, those that were computed in the same way as one. Raises ConfigError.

    config: the settings of the last part. cls: their class.
    """
    parts: list[Part[Config]] = []
    end, later = math.inf, None
    for record in reversed(records):
        if later and not later["changes"] and all(later[name] == record[name] for name in COMPUTED_BY):
            parts[-1] = replace(parts[-1], begin=record["from_step"])
        else:
            parts.append(Part(record["from_step"], end, settings.from_json(cls, config), record))
        config = {**config, **{name: before for name, (before, _) in record["changes"].items()}}
        end, later = record["from_step"], record
    return parts[::-1]


def different_runtimes(part: Part, runtime: Runtime) -> list[str]:
    """Why a part of a run is not replayed bitwise on this runtime, as far as is known."""
    record, reasons = part.record, []
    now = {"torch": versions()["torch"], **runtime.resolved}
    if record["versions"]:
        trained = {"torch": record["versions"].get("torch"), **record["resolved"]}
        for name in ("torch", "device", "dtype", "compile"):
            if trained[name] != now[name]:
                reasons.append(f"it was trained with {name}={trained[name]}, and this is {now[name]}")
    else:
        reasons.append(f"no checkpoint says on which machine and torch it was trained after step {part.begin:,}")
    before, size = record["resolved"].get("processes", 1), runtime.group.size
    if before != size:
        masks = " and drops out other elements" if runs_dropout(part.cfg) else ""
        other = f"{size} process{'es' if size > 1 else ''} add{'' if size > 1 else 's'} in another order{masks}"
        start = "python" if before == 1 else f"torchrun --standalone --nproc_per_node={before}"
        reasons.append(f"it was trained by {before} process{'es' if before > 1 else ''}, and {other} (use {start})")
    if now["device"] == "cuda" and not part.cfg.deterministic:
        reasons.append("without deterministic=True, CUDA adds in an order that varies")
    if now["compile"]:
        reasons.append("torch.compile may generate other code")
    if record["threads"] is None:
        threads = f"here {torch.get_num_threads()}; set OMP_NUM_THREADS"
        reasons.append(f"no checkpoint says by how many threads it was trained ({threads})")
    if part.cfg.minutes and part.decisions is None:
        reasons.append(f"no checkpoint says how long the run was to be before step {part.end:,}")
    return reasons


def runs_dropout(cfg: Any) -> bool:
    """Whether train.py's settings drop anything out."""
    own = (cfg.embd_pdrop, cfg.attn_pdrop, cfg.resid_pdrop)
    return any(cfg.dropout if p is None else p for p in own)


@dataclass(frozen=True)
class HeldCheckpoint(Checkpoint):
    """A checkpoint in memory, from which the next part of a run resumes."""

    optimizer_tensors: dict[str, Tensor]

    @classmethod
    def of(cls, state: TrainState, tokenizer: Tokenizer, about: dict[str, Any]) -> "HeldCheckpoint":
        """about: what state.json holds besides the progress."""
        weights, optimizer = state.tensors(keep=True, copy=True)
        return cls(Path("memory"), weights, tokenizer, {**about, **state.progress()}, optimizer)

    def optimizer(self) -> dict[str, Tensor]:
        return self.optimizer_tensors


# --- the step ---------------------------------------------------------------------------------------------------------


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
        mine = [np.concatenate(parts)[: self.loader.local_sequences] for parts in zip(*self.passes, strict=True)]
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
        cls, before: Iterable[JudgedStep], judged: JudgedStep, learning_rate: float, lines: dict, reasons: list[str]
    ) -> "Comparison":
        """before: the steps replayed before it. learning_rate: of the step. lines: History.lines."""
        same: dict[bool, list[int]] = {True: [], False: []}
        for step in before:
            if line := lines.get(step.step):
                same[is_logged_step(step, line)].append(step.step)
        logged = lines.get(judged.step)
        if logged and logged["lr"] not in (None, learning_rate):
            rates = f"the logged learning rate is {logged['lr']:.6g}, not {learning_rate:.6g}"
            reasons = [f"{rates}: no checkpoint has the settings of this step", *reasons]
        return cls(judged, logged, same[True], same[False], reasons or ["another machine or version of Folio"])

    @property
    def bitwise(self) -> bool | None:
        """Whether loss and gradient norm are the logged ones, bit for bit. None if the step was not logged."""
        return is_logged_step(self.judged, self.logged) if self.logged else None

    def compare_logged(self, name: str) -> str:
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
