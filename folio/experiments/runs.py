"""Read a run's folder: its metrics, its settings, and whether it is running, finished, stopped or failed."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from folio import UserError
from folio.base.files import is_locked, read_json
from folio.checkpoints import run_folder
from folio.checkpoints.checkpoint import MODEL_SETTINGS
from folio.checkpoints.find_runs import is_run, written_at
from folio.checkpoints.schema import PartRecord, measured_since, measured_text
from folio.training.run_log import ABANDONED, read_lines
from model import GPT, GPTConfig

LOGGED = ("loss", "val_loss", "lr", "grad_norm", "skipped", "tokens_per_second", "peak_memory")  # numbers or None


@dataclass(frozen=True)
class Run:
    """The content of a run's folder. Reading it neither waits for nor disturbs a process that is training there.

    status: "running": a process holds the folder's lock. "finished" or "stopped" (by a signal): the last step is saved.
    "failed": the run ended by an error or a kill, without saving its last step. "unknown": a lock file exists, but the
    file system does not support locks.
    """

    folder: Path
    name: str
    lines: list[dict[str, Any]]  # metrics.jsonl; the line of step 0 holds only an evaluation
    state: dict[str, Any]  # state.json of the last checkpoint; empty without one
    status: str

    @classmethod
    def of(cls, folder: Path, name: str | None = None) -> "Run":
        """Read a run's folder, without weights. name: default is the folder's. Raises UserError if it is not a run."""
        if not is_run(folder):
            raise UserError(f"{folder} is not a run's folder")
        locked = is_locked(folder / ".lock")  # first: once the lock is free, the run has saved everything
        state = read_state(folder)  # before the metrics: a checkpoint's evaluation is logged before it is saved
        lines = read_metrics(folder)
        is_new = bool(lines) or locked is not False  # otherwise the file is empty or damaged
        if is_new and (folder / "metrics.jsonl").exists() and not is_logged(state, lines):
            state = {}
        name = folder.resolve().name if name is None else name
        return cls(folder, name, lines, state, status_of(locked, lines, state))

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """Lines of samples.jsonl."""
        return read_samples(self.folder)

    @cached_property
    def plan(self) -> dict[str, Any]:
        """Content of plan.json; empty without it. Raises UserError if it is damaged."""
        path = self.folder / "plan.json"
        try:
            plan = read_json(path) if path.exists() else {}
            if not isinstance(plan, dict) or (path.exists() and not isinstance(plan.get("by"), str)):
                raise ValueError("it is not a plan")
            return plan
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is damaged ({error}); remove it, or write it again with tools/plan.py") from None

    @cached_property
    def abandoned(self) -> dict[int, list[dict[str, Any]]]:
        """Lines of metrics.jsonl that each rollback has made obsolete, by its number."""
        lines = sorted(read_metrics(self.folder, abandoned=True), key=lambda line: line[ABANDONED])
        return {number: list(group) for number, group in groupby(lines, key=lambda line: line[ABANDONED])}

    @property
    def config(self) -> dict[str, Any]:
        """Settings of the last checkpoint, with defaults for newer model settings; empty without a checkpoint."""
        return self.state.get("config", {})

    @cached_property
    def written(self) -> datetime | None:
        """Time of the run's last write; None without any."""
        seconds = written_at(self.folder)
        return datetime.fromtimestamp(seconds) if seconds else None

    @property
    def step(self) -> int:
        """Last logged step or, without a log, last saved step."""
        return self.lines[-1]["step"] if self.lines else self.state.get("step", 0)

    @property
    def parts(self) -> list[PartRecord]:
        """Parts of the run in its last checkpoint; empty without a checkpoint."""
        return self.state.get("parts", [])

    @property
    def evaluated_text(self) -> str | None:
        """An identifier of the text of the validation losses; None without a checkpoint.

        Only losses of runs with the same one are comparable.
        """
        if "dataset" not in self.state:
            return None
        windows, max_tokens = measured_text(self.parts[-1])
        part = f"{max_tokens} in contexts of {self.config.get('block_size')}" if max_tokens else "all"
        part += "" if self.is_held_out else ", not held out"
        return f"{self.state['dataset']['hash']}: {part}, version {windows}"

    @property
    def is_held_out(self) -> bool:
        """False if the weights that the run started from were trained on another split of its data."""
        return not self.state.get("dataset", {}).get("not_held_out")

    @property
    def max_iters(self) -> int | None:
        """Planned number of steps; None if unknown."""
        return planned_steps(self.state)

    @property
    def tokens(self) -> int | None:
        return self.lines[-1]["tokens"] if self.lines else None

    @property
    def seconds(self) -> float | None:
        """Time of the training steps only."""
        return self.totals()["seconds"] if self.lines else None

    @property
    def best(self) -> tuple[float, int] | None:
        """Lowest validation loss after training started, and its step; None before the first evaluation."""
        if self.lines:
            return min(self.trained_evaluations(), default=None)
        return (self.state["best_val_loss"], self.state["best_step"]) if self.state.get("best_step") else None

    def totals(self) -> dict[str, float | None]:
        """Return the measured values that a plan forecasts, up to the last logged step. seconds: of steps only."""
        last = self.lines[-1]
        tokens_before = [0, *(line["tokens"] for line in self.lines[:-1])]
        timed_tokens, seconds = 0, 0.0
        for line, before in zip(self.lines, tokens_before, strict=True):
            if line["tokens_per_second"]:
                timed_tokens += line["tokens"] - before
                seconds += (line["tokens"] - before) / line["tokens_per_second"]
        return {
            "steps": last["step"],
            "tokens": last["tokens"],
            "tokens_per_second": timed_tokens / seconds if seconds else None,
            "seconds": last["tokens"] * seconds / timed_tokens if timed_tokens else None,
            "memory": max(line["peak_memory"] or 0 for line in self.lines) or None,
        }

    def times(self, lines: list[dict[str, Any]] | None = None, tokens: int = 0) -> list[float]:
        """Return the seconds of the training steps up to each of the lines, by default all logged ones.

        tokens: those before the first line. A line without a speed, such as that of step 1, has the mean speed.
        """
        mean, seconds, times = self.totals()["tokens_per_second"], 0.0, []
        for line in self.lines if lines is None else lines:
            speed = line["tokens_per_second"] or mean
            seconds += (line["tokens"] - tokens) / speed if speed else math.nan
            tokens = line["tokens"]
            times.append(seconds)
        return times

    def evaluations(self) -> list[tuple[float, int]]:
        """Return the validation loss and step of each evaluation on the text that is measured now."""
        begin = measured_since(self.parts)
        lines = [line for line in self.lines if line["val_loss"] is not None and line["step"] > begin]
        return [(line["val_loss"], line["step"]) for line in lines]

    def trained_evaluations(self) -> list[tuple[float, int]]:
        """Return the evaluations after step 0, which have checkpoints."""
        return [(loss, step) for loss, step in self.evaluations() if step]

    def parameters(self) -> int | None:
        """Return the number of parameters; None without a checkpoint, or if the model is not Folio's."""
        try:
            with torch.device("meta"):
                return GPT(GPTConfig(**self.state["model"])).num_params()["total"]
        except (LookupError, TypeError, ValueError):
            return None


def describe_not_held_out(runs: Sequence[Run]) -> str | None:
    """Return a line about the runs whose validation text is not held out; None if there are none."""
    if not (names := [run.name for run in runs if not run.is_held_out]):
        return None
    return f"{', '.join(names)}: started from weights that may have been trained on its validation text"


def read_metrics(folder: Path, abandoned: bool = False) -> list[dict[str, Any]]:
    """Read the undamaged lines of metrics.jsonl, with None for missing values; empty if it is unreadable.

    abandoned: read the lines that rollbacks have made obsolete instead.
    """
    with suppress(OSError):
        return [
            {**dict.fromkeys(LOGGED), **line}
            for line in read_lines(folder / "metrics.jsonl", abandoned=abandoned)[0]
            if type(line.get("tokens")) is int
            and all(isinstance(line.get(name), int | float | None) for name in LOGGED)
        ]
    return []


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """Read the undamaged lines of samples.jsonl; empty if it is unreadable."""
    with suppress(OSError):
        return [line for line in read_lines(folder / "samples.jsonl")[0] if isinstance(line.get("text"), str)]
    return []


def read_state(folder: Path) -> dict[str, Any]:
    """Read state.json of the last readable checkpoint; empty without one.

    Model settings newer than the checkpoint have their defaults.
    """
    state = run_folder.last_state(folder)
    defaults = {name: getattr(GPTConfig, name) for name in MODEL_SETTINGS}
    return {**state, "config": {**defaults, **state["config"]}} if state else {}


def planned_steps(state: dict[str, Any]) -> int | None:
    """Return the planned number of steps, by the last decision; None without a checkpoint.

    state: state.json of the last checkpoint, or empty.
    """
    return state["parts"][-1]["decisions"][-1][1] if state else None


def is_logged(state: dict[str, Any], lines: list[dict[str, Any]]) -> bool:
    """Return whether a checkpoint belongs to the run in metrics.jsonl.

    Until a new run with --overwrite=True saves its first checkpoint, the folder has those of the previous run. A
    checkpoint belongs to the log if the log has its best evaluation, or its step if it has none. An evaluation at its
    step is also sufficient, because the line of the best one may be damaged.
    """
    val_losses = {line["step"]: line["val_loss"] for line in lines}
    if not state.get("best_step"):
        return state.get("step") in val_losses
    is_best_logged = val_losses.get(state["best_step"]) == state.get("best_val_loss")
    return is_best_logged or val_losses.get(state.get("step")) is not None


def status_of(locked: bool | None, lines: list[dict[str, Any]], state: dict[str, Any]) -> str:
    """Return a run's status. locked: whether a process holds its lock; None if unknown."""
    if locked is None:
        return "unknown"
    if locked:
        return "running"
    reason = state.get("stopped_by")
    if not reason or (lines and lines[-1]["step"] > state["step"]):
        return "failed"
    return "finished" if reason == "its end" else "stopped"
