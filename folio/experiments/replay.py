"""Replay a training step of a run: find its settings, record its computation, and compare the result with the log.

Sequences and dropout are functions of the seed and the step, so any earlier checkpoint reproduces a step exactly.

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
from folio.base.files import read_json
from folio.base.settings import Config, ConfigError
from folio.checkpoints import checkpoint, run_folder
from folio.checkpoints.checkpoint import Checkpoint
from folio.checkpoints.identify import NoCheckpointError, identify
from folio.checkpoints.run_folder import CheckpointError, precedes
from folio.checkpoints.schema import PartRecord
from folio.data.tokenizer import Tokenizer
from folio.data.windows import Place
from folio.experiments.runs import LOGGED, is_logged, read_metrics
from folio.machine import distributed
from folio.machine.data_parallel import DataParallelLoss
from folio.machine.runtime import Runtime
from folio.training.guard import JudgedStep
from folio.training.loader import BatchLoader
from folio.training.planning.resolve import versions
from folio.training.state import TrainState

COMPARED = ("loss", "grad_norm")  # values of a step that are compared with the log
COMPUTATION_FIELDS = ("resolved", "versions", "threads", "rollbacks")  # of a PartRecord, which affect the result


# --- run --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part(Generic[Config]):
    """The steps after `begin`, up to `end`, which a run computed with the same settings and runtime."""

    begin: int
    end: float  # infinity for the last part
    cfg: Config
    record: PartRecord


@dataclass(frozen=True)
class History(Generic[Config]):
    """The recorded steps and checkpoints of a run's folder, in which another process may be training."""

    folder: Path
    newest: Checkpoint
    init_from: str  # what the run started from
    parts: list[Part[Config]]  # in order
    lines: dict[int, dict[str, Any]]  # of metrics.jsonl by step, without step 0, and records of skipped steps after it

    @classmethod
    def of(cls, folder: Path, settings: type[Config]) -> "History[Config]":
        """Read a run's folder. settings: train.py's class. Raises UserError if it is not a run or has no checkpoint."""
        require_run(folder)
        newest = checkpoint.load(folder)
        records = newest.state["parts"]
        try:
            parts = merge_parts(records, newest.state["config"], settings)
        except ConfigError as error:
            raise CheckpointError(f"{newest.path}: state.json is damaged: {error}") from None
        lines = {line["step"]: line for line in read_metrics(folder) if line["step"] > 0}
        lines |= {step: line for step, line in read_skipped(folder).items() if step > max(lines, default=0)}
        return cls(folder, newest, records[0]["init_from"], parts, lines)

    def require_step(self, step: int) -> None:
        """Raise UserError if the run has not recorded this step."""
        last = max(self.newest.state["step"], *self.lines)
        if step > last:
            raise UserError(f"step={step}: the last step of {self.folder} is {last:,}; choose one up to it")

    def checkpoint_before(self, step: int) -> Checkpoint | None:
        """Return the newest checkpoint before `step`, or None. Damaged checkpoints are reported and skipped."""
        if self.newest.state["step"] < step:
            return self.newest
        saved = checkpoint.load_before(self.folder, min(step, self.newest.state["step"]))
        return saved if saved and precedes(saved.state, self.newest.state) else None

    def parts_between(self, begin: int, end: int) -> list[Part[Config]]:
        """Return the parts that contain the steps after `begin`, up to `end`."""
        return [part for part in self.parts if max(part.begin, begin) < min(part.end, end)]

    @property
    def steps_per_second(self) -> float | None:
        """Median of the logged speeds; None without any."""
        speeds = [
            line["tokens_per_second"] * line["step"] / line["tokens"]
            for line in self.lines.values()
            if line["tokens_per_second"]
        ]
        return statistics.median(speeds) if speeds else None

    def inexact_reasons(self, begin: int, step: int, runtimes: list[Runtime]) -> list[str]:
        """Return known reasons why replaying a step from the state after `begin` steps may not be exact.

        runtimes: of each replayed part.
        """
        reasons = []
        for part, runtime in zip(self.parts_between(begin, step), runtimes, strict=True):
            reasons += runtime_differences(part, runtime)
        if begin == 0 and self.init_from != "scratch":
            reasons.append(f"the weights of {self.init_from}, from which it started, may have changed")
        if self.lines and not is_logged(self.newest.state, [*self.lines.values()]):
            reasons.append("the newest checkpoint is of an earlier run; the run in metrics.jsonl has not saved one yet")
        return list(dict.fromkeys(reasons))


def require_run(folder: Path) -> None:
    """Raise UserError, which says what the folder is, if it has no checkpoints of a run."""
    if run_folder.exists(folder):
        return
    if (folder / "manifest.json").exists():
        raise UserError(f"{folder} is one checkpoint; name the run: {folder.resolve().parent}")
    if (folder / "metrics.jsonl").exists():
        raise UserError(f"{folder} has no checkpoint yet; wait for an evaluation")
    identity = identify(folder)
    if identity and identity.format:
        raise UserError(f"{folder} contains only weights, so there are no steps to replay; name a run's folder")
    raise NoCheckpointError(folder)


def read_skipped(folder: Path) -> dict[int, dict[str, Any]]:
    """Read the loss and gradient norm of each skipped step recorded after the last line of metrics.jsonl.

    For example, the run may have stopped because of it. A number that is not finite is None.
    """
    lines = {}
    for path in (folder / "skipped").glob("step-*.json"):
        with suppress(OSError, ValueError, LookupError, TypeError):
            if path.stat().st_mtime_ns < (folder / "metrics.jsonl").stat().st_mtime_ns:
                continue
            record = read_json(path)
            values = {name: float(record[name]) for name in COMPARED}  # "NaN" if it is not finite
            finite = {name: x if math.isfinite(x) else None for name, x in values.items()}
            lines[int(record["step"])] = dict.fromkeys(LOGGED) | finite | {"step": int(record["step"])}
    return lines


def merge_parts(records: list[PartRecord], config: dict[str, Any], cls: type[Config]) -> list[Part[Config]]:
    """Merge consecutive parts of a run that have the same settings and runtime. Raises ConfigError.

    config: the settings of the last part. cls: the settings' class.
    """
    parts: list[Part[Config]] = []
    end, following = math.inf, None
    for record in reversed(records):
        same = following and all(following.get(field) == record.get(field) for field in COMPUTATION_FIELDS)
        if same and not following["changes"]:
            parts[-1] = replace(parts[-1], begin=record["from_step"], record={**record, **following})
        else:
            parts.append(Part(record["from_step"], end, settings.from_json(cls, config), record))
        config = {**config, **{name: before for name, (before, _) in record["changes"].items()}}
        end, following = record["from_step"], record
    return parts[::-1]


def runtime_differences(part: Part, runtime: Runtime) -> list[str]:
    """Return known reasons why replaying a part of a run on this runtime may not be exact."""
    record, reasons = part.record, []
    current = {"torch": versions()["torch"], **runtime.resolved}
    trained = {"torch": record["versions"]["torch"], **record["resolved"]}
    for name in ("torch", "device", "dtype", "compile"):
        if trained[name] != current[name]:
            reasons.append(f"it was trained with {name}={trained[name]}, not {current[name]}")
    trained_size, size = record["resolved"].get("processes", 1), runtime.group.size
    if trained_size != size:
        masks = " and use other dropout masks" if part.cfg.uses_dropout else ""
        processes = f"{trained_size} process{'es' if trained_size > 1 else ''}, not {size}"
        launcher = "python" if trained_size == 1 else f"torchrun --standalone --nproc_per_node={trained_size}"
        reasons.append(f"it was trained by {processes}, which add in another order{masks} (use {launcher})")
    if current["device"] == "cuda" and not part.cfg.deterministic:
        reasons.append("without deterministic=True, CUDA adds in a varying order")
    if current["compile"]:
        reasons.append("torch.compile may generate different code")
    return reasons


@dataclass(frozen=True)
class InMemoryCheckpoint(Checkpoint):
    """A checkpoint in memory, from which the next part of a replay resumes."""

    optimizer_tensors: dict[str, Tensor]

    @classmethod
    def of(cls, state: TrainState, tokenizer: Tokenizer, metadata: dict[str, Any]) -> "InMemoryCheckpoint":
        """metadata: the fields of state.json other than the progress."""
        weights, optimizer = state.tensors(keep=True, copy=True)
        return cls(Path("memory"), weights, tokenizer, {**metadata, **state.progress()}, optimizer)

    def optimizer(self) -> dict[str, Tensor]:
        return self.optimizer_tensors


# --- step -------------------------------------------------------------------------------------------------------------


class SequenceLosses(NamedTuple):
    """A sequence of a step. A token's loss is in nats; NaN if it is masked."""

    number: int  # index in the run, from 0
    place: Place
    ids: np.ndarray  # (T + 1,); the first is only an input
    losses: np.ndarray  # (T,), losses of ids[1:]
    guesses: np.ndarray  # (T,), the most likely tokens
    guess_p: np.ndarray  # (T,), their probabilities
    counted: np.ndarray  # (T,), False: masked

    @property
    def loss(self) -> float:
        """Mean loss over the targets; NaN without any."""
        return float(self.losses[self.counted].mean(dtype=np.float64)) if self.counted.any() else math.nan


class ParameterChange(NamedTuple):
    """The effect of a step on a parameter: norms of the unclipped gradient, the weights before, and the update."""

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
        """Norm of the update divided by the norm of the weights; None for weights of 0."""
        return self.update_norm / self.weight_norm if self.weight_norm else None


class UnscalingObserver:
    """A GradScaler that calls `record` after unscaling, when the gradients are complete but not yet clipped."""

    def __init__(self, scaler: torch.amp.GradScaler, record: Any):
        self.scaler, self.record = scaler, record

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scaler, name)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        self.scaler.unscale_(optimizer)
        self.record()


class StepRecorder:
    """Record a call of train.train_step with this object's `state` and `loss_fn`, without affecting its results.

    Token losses come from an additional forward pass before each micro-batch, with the same weights and dropout masks.
    Every rank needs a recorder and must call the same methods.
    """

    def __init__(self, state: TrainState, loss_fn: Any, loader: BatchLoader):
        self.original_loss_fn, self.loader, self.model = loss_fn, loader, state.model
        self.state = replace(state, scaler=UnscalingObserver(state.scaler, self._record_gradients))
        self.first = state.next_sequence
        self.moments, self.loss_scale = state.guard.moments.tolist(), state.scaler.get_scale()
        self.weights_before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.gradient_norms: dict[str, float] = {}
        self.passes: list[list[np.ndarray]] = []  # losses, guesses and their probabilities, (B, T) each

    def loss_fn(self, idx: Tensor, targets: Tensor) -> Tensor:
        self._record_tokens(idx, targets)
        torch.manual_seed(torch.initial_seed())  # as in train_step, for the same dropout masks
        return self.original_loss_fn(idx, targets)

    @torch.no_grad()
    def _record_tokens(self, idx: Tensor, targets: Tensor) -> None:
        if isinstance(self.original_loss_fn, DataParallelLoss):
            logits = self.original_loss_fn.logits(idx)  # (B, T, V)
        else:
            with self.loader.runtime.autocast():
                logits = self.model.logits(idx)
        distributed.reshard(self.model)
        rows = []
        for row, next_ids in zip(logits, targets, strict=True):  # row by row, to limit the memory of logits
            log_p = row.float().log_softmax(dim=-1)  # (T, V)
            best, guesses = log_p.max(dim=-1)
            rows.append((F.nll_loss(log_p, next_ids, ignore_index=-1, reduction="none"), guesses, best.exp()))
        self.passes.append([torch.stack(tensors).cpu().numpy() for tensors in zip(*rows, strict=True)])

    def _record_gradients(self) -> None:
        for name, p in self.model.named_parameters():
            self.gradient_norms[name] = distributed.full_tensor(p.grad).norm().item()

    def sequences(self) -> list[SequenceLosses]:
        """Return the sequences of the step on all ranks."""
        data, count, T = self.loader.data, self.loader.shape.sequences, self.loader.data.block_size
        local = [np.concatenate(parts)[: self.loader.shape.local_sequences] for parts in zip(*self.passes, strict=True)]
        gathered = self.loader.runtime.group.all_gather_object(local)
        losses, guesses, guess_p = (np.concatenate(parts) for parts in zip(*gathered, strict=True))
        places, windows = data.places(self.first, count), dict(zip(data.names, data.training, strict=True))
        ids = [windows[place.dataset].ids[place.shard][place.offset : place.offset + T + 1] for place in places]
        counted = data.batch(self.first, count)[1] != -1
        rows = zip(places, ids, np.where(counted, losses, np.nan), guesses, guess_p, counted, strict=True)
        return [SequenceLosses(number, *row) for number, row in enumerate(rows, start=self.first)]

    @torch.no_grad()
    def parameters(self) -> list[ParameterChange]:
        """Return the change of each parameter."""
        groups = {p: group for group in self.state.optimizer.param_groups for p in group["params"]}
        changes = []
        for name, p in self.model.named_parameters():
            group, before = groups[p], self.weights_before[name]
            norms = [distributed.full_tensor(tensor).norm().item() for tensor in (before, p - before)]
            optimizer = "Muon" if "shape" in group else "AdamW"
            settings = optimizer, group["lr"], group["weight_decay"]
            changes.append(ParameterChange(name, list(p.shape), *settings, self.gradient_norms[name], *norms))
        return changes

    def skip_reason(self, judged: JudgedStep, skip_spikes: float | None) -> str | None:
        """Return why the guard skipped the step, or None. judged: the guard's result."""
        if not math.isfinite(judged.loss):
            return f"its loss is {judged.loss}"
        if not judged.skipped and not math.isfinite(judged.grad_norm):
            return f"its gradient overflowed float16 at the loss scale {self.loss_scale:,g}, which was then lowered"
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


# --- comparison with metrics.jsonl ------------------------------------------------------------------------------------


def is_identical(value: float | None, logged: float | None) -> bool:
    """Return whether a value is bitwise identical to the logged one. None, and values that are not finite, are logged
    as None.
    """
    return value == logged if logged is not None else value is None or not math.isfinite(value)


def matches_log(judged: JudgedStep, line: dict[str, Any]) -> bool:
    """Return whether a step has the logged loss and gradient norm."""
    return all(is_identical(getattr(judged, name), line[name]) for name in COMPARED)


@dataclass(frozen=True)
class Comparison:
    """A replayed step, and the replayed steps before it, compared with metrics.jsonl."""

    judged: JudgedStep
    logged: dict[str, Any] | None  # the step's line
    equal_before: list[int]  # earlier replayed steps that are identical to the log
    different_before: list[int]  # earlier replayed steps that are not
    reasons: list[str]  # why the replay may not be exact

    @classmethod
    def of(
        cls, before: Iterable[JudgedStep], judged: JudgedStep, learning_rate: float, lines: dict, reasons: list[str]
    ) -> "Comparison":
        """before: the earlier replayed steps. learning_rate: of the step. lines: History.lines."""
        steps: dict[bool, list[int]] = {True: [], False: []}  # by whether they match the log
        for step in before:
            if line := lines.get(step.step):
                steps[matches_log(step, line)].append(step.step)
        logged = lines.get(judged.step)
        if logged and logged["lr"] not in (None, learning_rate):
            rates = f"the logged learning rate is {logged['lr']:.6g}, not {learning_rate:.6g}"
            reasons = [f"{rates}: the settings of this step are not recorded", *reasons]
        return cls(judged, logged, steps[True], steps[False], reasons or ["another machine or version of Folio"])

    @property
    def bitwise(self) -> bool | None:
        """Whether loss and gradient norm are bitwise identical to the log. None: the step was not logged."""
        return matches_log(self.judged, self.logged) if self.logged else None

    def compare_logged(self, name: str) -> str:
        """Describe how the step's "loss" or "grad_norm" compares with the logged value."""
        value = getattr(self.judged, name)
        if self.logged is None:
            return "not logged"
        logged, label = self.logged[name], "loss" if name == "loss" else "norm"
        if is_identical(value, logged):
            return f"bitwise identical to the logged {label}"
        if logged is None:
            return f"the logged {label} was not finite"
        return f"the logged {label} is {logged!r}, not {value!r} (a difference of {value - logged:.1e})"

    def lines(self) -> list[str]:
        """Return remarks about the comparison."""
        lines = [] if self.logged else [f"step {self.judged.step:,} was not logged"]
        if self.different_before:
            lines.append(f"the first step that differs from the log is {self.different_before[0]:,}")
        elif self.equal_before:
            n = len(self.equal_before)
            steps = f"the {n:,} logged steps" if n > 1 else "the only logged step"
            lines.append(f"{steps} replayed before it {'are' if n > 1 else 'is'} bitwise identical to the log")
        if self.different_before or self.bitwise is False:
            lines.append(f"the likely reason: {'; '.join(self.reasons)}")
        return lines
