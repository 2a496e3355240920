"""What a run's folder says: its numbers, its settings, and whether it is running, finished, stopped or failed."""

from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from folio import UserError
from folio.base.files import is_locked, read_json
from folio.checkpoints import run_folder
from folio.checkpoints.find_runs import is_run, written_at
from folio.checkpoints.run_folder import CheckpointError
from folio.checkpoints.schema import PartRecord
from folio.training.run_log import read_lines
from model import GPT, GPTConfig

LOGGED = ("loss", "val_loss", "lr", "grad_norm", "skipped", "tokens_per_second", "peak_memory")  # numbers or None


@dataclass(frozen=True)
class Run:
    """The content of a run's folder. Reading it neither waits for a process that trains there nor changes anything.

    status: "running": a process holds the folder's lock. "finished" and "stopped" (by SIGINT or SIGTERM): its last
    step is saved, with this reason. "failed": it ended without saving its last step, by an error or a kill.
    "unknown": a lock file exists, and the file system does not say whether it is held.
    """

    folder: Path
    name: str
    lines: list[dict[str, Any]]  # metrics.jsonl; the line of step 0 holds only an evaluation
    state: dict[str, Any]  # state.json of the last checkpoint; empty without one
    status: str

    @classmethod
    def of(cls, folder: Path, name: str | None = None) -> "Run":
        """Read a run's folder, without weights. name: to call it by; None: the folder's.

        Raises UserError if it is not a run's.
        """
        if not is_run(folder):
            raise UserError(f"{folder} is not a run's folder")
        held = is_locked(folder / ".lock")  # first: a run that has ended by then has saved everything
        state = read_state(folder)  # before the numbers: what a checkpoint contains has been logged before
        lines = read_metrics(folder)
        is_new = bool(lines) or held is not False  # else the file is empty or damaged
        if is_new and (folder / "metrics.jsonl").exists() and not is_logged(state, lines):
            state = {}
        return cls(folder, folder.resolve().name if name is None else name, lines, state, status_of(held, lines, state))

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """samples.jsonl."""
        return read_samples(self.folder)

    @cached_property
    def plan(self) -> dict[str, Any]:
        """plan.json; empty without one. Raises UserError if it is damaged."""
        path = self.folder / "plan.json"
        try:
            return read_json(path) if path.exists() else {}
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is damaged ({error}); remove it, or write it again with tools/plan.py") from None

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the last checkpoint, with defaults for model settings newer than it; empty without one."""
        return self.state.get("config", {})

    @cached_property
    def written(self) -> datetime | None:
        """When the run last wrote something; None if it has not yet."""
        seconds = written_at(self.folder)
        return datetime.fromtimestamp(seconds) if seconds else None

    @property
    def step(self) -> int:
        """How many steps the run has done, as far as it has logged or saved them."""
        return self.lines[-1]["step"] if self.lines else self.state.get("step", 0)

    @property
    def parts(self) -> list[PartRecord]:
        """The parts of the run, as its last checkpoint records them; empty without one."""
        return self.state.get("parts", [])

    @property
    def max_iters(self) -> int | None:
        """How many steps the run has, or had, to do; None if that is not known."""
        return planned_steps(self.state)

    @property
    def tokens(self) -> int | None:
        return self.lines[-1]["tokens"] if self.lines else None

    @property
    def seconds(self) -> float | None:
        """Of the steps only."""
        return self.measured()["seconds"] if self.lines else None

    @property
    def best(self) -> tuple[float, int] | None:
        """The lowest validation loss of the trained model, and its step; None before the first evaluation."""
        if self.lines:
            return min(self.trained_evaluations(), default=None)
        return (self.state["best_val_loss"], self.state["best_step"]) if self.state.get("best_step") else None

    def measured(self) -> dict[str, float | None]:
        """The measured values of what a plan forecasts, up to the last logged step. Seconds are those of steps only."""
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

    def evaluations(self) -> list[tuple[float, int]]:
        """The validation loss of each evaluation, and its step."""
        return [(line["val_loss"], line["step"]) for line in self.lines if line["val_loss"] is not None]

    def trained_evaluations(self) -> list[tuple[float, int]]:
        """Those after a step of training, which have a checkpoint."""
        return [(loss, step) for loss, step in self.evaluations() if step]

    def parameters(self) -> int | None:
        """The number of the model's parameters; None if there is no checkpoint, or the model is not one of Folio's."""
        try:
            with torch.device("meta"):
                return GPT(GPTConfig(**self.state["model"])).num_params()["total"]
        except (LookupError, TypeError, ValueError):
            return None


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without damaged ones and with None for what they lack; empty if it is unreadable."""
    with suppress(OSError):
        return [
            {**dict.fromkeys(LOGGED), **line}
            for line in read_lines(folder / "metrics.jsonl")[0]
            if type(line.get("tokens")) is int
            and all(isinstance(line.get(name), int | float | None) for name in LOGGED)
        ]
    return []


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """The lines of samples.jsonl, without damaged ones; empty if it is unreadable."""
    with suppress(OSError):
        return [line for line in read_lines(folder / "samples.jsonl")[0] if isinstance(line.get("text"), str)]
    return []


def read_state(folder: Path) -> dict[str, Any]:
    """state.json of the last checkpoint that has a readable one; empty without any.

    Its settings have defaults for model settings newer than the checkpoint.
    """
    for path in run_folder.newest_first(folder):
        with suppress(CheckpointError):  # it is damaged, or a run that trains has removed it
            state = run_folder.read_state(path)
            defaults = {field.name: field.default for field in fields(GPTConfig) if field.name != "vocab_size"}
            return {**state, "config": {**defaults, **state["config"]}}
    return {}


def planned_steps(state: dict[str, Any]) -> int | None:
    """How many steps a run has, or had, to do; under a time budget, by its last decision. None if that is not known.

    state: state.json of its last checkpoint; empty without one.
    """
    decisions = state["parts"][-1]["decisions"] if state else None
    if decisions:
        return decisions[-1][1]
    max_iters = state.get("config", {}).get("max_iters")
    return max_iters if type(max_iters) is int else None


def is_logged(state: dict[str, Any], lines: list[dict[str, Any]]) -> bool:
    """Whether metrics.jsonl contains a checkpoint's best evaluation, or its step if it has none.

    The evaluation after its step is enough, because the line of the best one may be damaged.

    Until a new run with --overwrite=True saves its first checkpoint, the folder has those of the run before.
    """
    val_losses = {line["step"]: line["val_loss"] for line in lines}
    if not state.get("best_step"):
        return state.get("step") in val_losses
    is_best_logged = val_losses.get(state["best_step"]) == state.get("best_val_loss")
    return is_best_logged or val_losses.get(state.get("step")) is not None


def status_of(held: bool | None, lines: list[dict[str, Any]], state: dict[str, Any]) -> str:
    """A run's status. held: whether a process holds its lock; None if that is not known."""
    if held is None:
        return "unknown"
    if held:
        return "running"
    reason = state.get("stopped_by")
    if not reason or (lines and lines[-1]["step"] > state["step"]):
        return "failed"
    return "finished" if reason == "its end" else "stopped"
