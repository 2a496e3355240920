"""A run before its first step, in one value: the result of resolve.py."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from folio.checkpoints.checkpoint import Checkpoint
from folio.data.windows import Mixture
from folio.machine.runtime import Runtime
from folio.training.loader import BatchShape
from folio.training.planning.budget import Budget
from folio.training.planning.resume import SavedRun
from folio.training.planning.train_settings import TrainSettings
from folio.training.schedule import Schedule, StepCounts
from model import GPTConfig


@dataclass(frozen=True)
class TimeLimit:
    """The time of a run whose number of steps follows from the seconds per step (fit_minutes)."""

    minutes: float
    start_time: float  # in time.perf_counter()'s seconds
    scaling: list[str]  # the step counts that follow the number of steps
    lengthening: list[str]  # those that follow the total number of steps, if the minutes are added to a run
    adds_minutes: bool
    step_seconds: float | None = None  # None: not measured yet


@dataclass(frozen=True)
class Plan:
    """A run before its first step: what it computes, on what, for how long, and what it writes."""

    settings: TrainSettings  # with a value for each "auto" and each default that depends on others (dropout: in model)
    data: Mixture
    model: GPTConfig
    runtime: Runtime
    batch: BatchShape
    counts: StepCounts  # as in checkpoints: None for a default that follows max_iters when the run is resumed
    schedule: Schedule  # with a time budget, its max_iters changes during the run
    budget: Budget
    time_limit: TimeLimit | None  # None: the number of steps is known
    weights: Checkpoint | None  # to resume or to finetune; None: from scratch
    saved: SavedRun | None  # the run to resume; None: a new run
    head_start: Checkpoint | None  # the state in which a new run begins after a race (race.py); None: before step 1
    forgets_evaluations: bool  # whether the resumed run measures other text than before
    record: dict[str, Any]  # the content of state.json, without the progress
    lines: list[str]  # to print

    @property
    def out_dir(self) -> Path:
        return Path(self.settings.out_dir)

    @property
    def resumes(self) -> bool:
        return self.saved is not None

    @property
    def saved_state(self) -> dict[str, Any]:
        """state.json of the run to resume; empty for a new run."""
        return self.saved.state if self.saved else {}

    @property
    def step(self) -> int:
        """The steps that are already done."""
        start = self.saved.checkpoint if self.saved else self.head_start
        return start.state["step"] if start else 0
