"""What a run's folder says about its steps: which settings they had, and which checkpoint one is replayed from."""

import math
import statistics
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from torch import Tensor

from folio import UserError
from folio.base import settings
from folio.base.files import read_json, step_number
from folio.base.progress import note
from folio.base.settings import Config, ConfigError
from folio.checkpoints import checkpoint, foreign, run_folder
from folio.checkpoints.checkpoint import Checkpoint
from folio.checkpoints.run_folder import CheckpointError, NoCheckpointError, precedes
from folio.data.tokenizer import Tokenizer
from folio.experiments.runs import LOGGED, is_logged, read_metrics
from folio.machine import distributed
from folio.machine.runtime import Runtime
from folio.training.start import INEXACT, versions
from folio.training.state import TrainState

JUDGED = ("loss", "grad_norm")  # the numbers of a step that are logged and compared


@dataclass(frozen=True)
class Part(Generic[Config]):
    """The steps after `begin`, up to `end`, for which a run had the same settings."""

    begin: int
    end: float  # infinity for the last part
    cfg: Config
    decisions: list[tuple[int, int]] | None  # of a time budget; None: without one, or not known
    resolved: dict[str, Any]  # Runtime.resolved


@dataclass(frozen=True)
class History(Generic[Config]):
    """What a run's folder says about its steps. Another process may be training there."""

    folder: Path
    newest: Checkpoint
    states: dict[int, dict[str, Any]]  # state.json of the checkpoints by step
    parts: list[Part[Config]]  # in order
    started_from: str  # `init_from` of the first part; "resume" if no checkpoint says it
    lines: dict[int, dict[str, Any]]  # of metrics.jsonl by step, without step 0; after them, records of skipped steps

    @classmethod
    def of(cls, folder: Path, settings: type[Config]) -> "History[Config]":
        """Read a run's folder. settings: train.py's class. Raises UserError if it is not one, or has no checkpoint."""
        require_run(folder)
        newest = checkpoint.load(folder)
        states = {newest.state["step"]: newest.state}
        for path in run_folder.newest_first(folder):
            with suppress(CheckpointError):  # it is damaged, or has been removed
                state = run_folder.read_state(path)
                if precedes(state, newest.state):
                    states[state["step"]] = state
        try:
            parts = parts_of(states, settings)
            origins = [state.get("started_from") or state["config"]["init_from"] for state in states.values()]
        except (ConfigError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{newest.path}: state.json is damaged: {error}") from None
        started_from = next((origin for origin in origins if origin != "resume"), "resume")
        lines = {line["step"]: line for line in read_metrics(folder) if line["step"] > 0}
        lines |= {step: line for step, line in read_skipped(folder).items() if step > max(lines, default=0)}
        return cls(folder, newest, states, parts, started_from, lines)

    def threads_at(self, step: int) -> int | None:
        """With how many CPU threads torch computed a step; None if the checkpoint after it is too old to say it."""
        after = min((saved for saved in self.states if saved >= step), default=max(self.states))
        return self.states[after].get("threads")

    @property
    def last_step(self) -> int:
        """The last step that is known to be done."""
        return max(self.newest.state["step"], *self.lines)

    def require_step(self, step: int) -> None:
        """Raise UserError if the run has not come to this step."""
        if step > self.last_step:
            raise UserError(f"step={step}: the last step of {self.folder} is {self.last_step:,}; choose one up to it")

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

    def doubts(self, begin: int, step: int, runtimes: list[Runtime]) -> list[str]:
        """Why the replay of a step from the state after `begin` steps may differ from the run, as far as is known.

        runtimes: of each part that is replayed.
        """
        reasons = []
        parts = self.parts_between(begin, step)
        for part, runtime in zip(parts, runtimes, strict=True):
            reasons += different_runtimes(part, runtime)
            if part.cfg.minutes and part.decisions is None:
                reasons.append(f"no checkpoint says how long the run was to be before step {part.end:,}")
        trained, now = self.newest.state["versions"].get("torch"), versions()["torch"]
        if trained != now:
            reasons.append(f"it was trained with torch {trained}, and this is {now}")
        for resume in self.newest.state.get("resumes") or []:
            explained = INEXACT & resume["changes"].keys() or "decisions" in resume
            if begin <= resume["step"] < step and not resume["exact"] and not explained:
                reasons.append(f"after step {resume['step']:,} it was resumed on another machine or version of torch")
        if begin == 0 and self.started_from == "resume":
            reasons.append("no checkpoint says what it started from; random weights were assumed")
        elif begin == 0 and self.started_from != "scratch":
            reasons.append(f"the weights of {self.started_from}, from which it started, may have changed")
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


def parts_of(states: dict[int, dict[str, Any]], cls: type[Config]) -> list[Part[Config]]:
    """The parts of a run, from state.json of its checkpoints by step.

    The newest one has the settings of the last part, and what each resume had changed.
    """
    newest = states[max(states)]
    config, end, parts = newest["config"], math.inf, []
    changed = [resume for resume in newest.get("resumes") or [] if resume["changes"]]
    for resume in [*reversed(changed), {"step": 0, "changes": {}}]:
        begin = resume["step"]
        of_part = [state for step, state in sorted(states.items()) if begin < step <= end]
        state = of_part[-1] if of_part else newest
        decisions = state.get("decisions") if config.get("minutes") and of_part else None
        cfg = settings.from_json(cls, config)
        parts.append(Part(begin, end, cfg, decisions, state["resolved"]))
        config = {**config, **{name: before for name, (before, _) in resume["changes"].items()}}
        end = begin
    return parts[::-1]


def different_runtimes(part: Part, runtime: Runtime) -> list[str]:
    """Why a part of a run is not replayed bitwise on this runtime, as far as is known."""
    trained, now, reasons = part.resolved, runtime.resolved, []
    for name in ("device", "dtype", "compile"):
        if trained.get(name) != now[name]:
            reasons.append(f"it was trained with {name}={trained.get(name)}, and this is {now[name]}")
    before, size = trained.get("processes", 1), runtime.group.size
    if before != size:
        masks = " and drops out other elements" if runs_dropout(part.cfg) else ""
        other = f"{size} process{'es' if size > 1 else ''} add{'' if size > 1 else 's'} in another order{masks}"
        start = "python" if before == 1 else f"torchrun --standalone --nproc_per_node={before}"
        reasons.append(f"it was trained by {before} process{'es' if before > 1 else ''}, and {other} (use {start})")
    if now["device"] == "cuda" and not part.cfg.deterministic:
        reasons.append("without deterministic=True, CUDA adds in an order that varies")
    if now["compile"]:
        reasons.append("torch.compile may generate other code")
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
