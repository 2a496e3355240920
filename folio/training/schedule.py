"""What happens at which step of a run: its learning rate, its evaluations, its end."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache

from folio.base.settings import COMMAND_LINE
from folio.training.optim import lr_at


@dataclass(frozen=True)
class StepCounts:
    """The settings of a run that count steps. None is a default that depends on max_iters."""

    max_iters: int
    warmup_iters: int | None = None
    lr_decay_iters: int | None = None
    wsd_decay_iters: int | None = None
    eval_interval: int | None = None

    @property
    def warmup_steps(self) -> int:
        return min(2000, self.max_iters // 20) if self.warmup_iters is None else self.warmup_iters

    @property
    def eval_steps(self) -> int:
        """Steps between evaluations."""
        return self.eval_interval or min(2000, -(-self.max_iters // 10))

    @property
    def evaluations(self) -> int:
        return -(-self.max_iters // self.eval_steps)

    def __str__(self) -> str:
        return ", ".join(f"{name} {n:,}" for name, n in asdict(self).items() if n)

    def scaled(self, max_iters: int, names: list[str]) -> "StepCounts":
        """The counts for a run of max_iters steps: those in `names` in proportion, rounded up; the others as set."""
        counts = {name: getattr(self, name) for name in names}
        in_proportion = {name: -(-n * max_iters // self.max_iters) for name, n in counts.items() if n and n > 0}
        return replace(self, **{**in_proportion, "max_iters": max_iters})

    def scaling_with_max_iters(self, origins: Mapping[str, str]) -> list[str]:
        """The counts that scale with max_iters: those set in the same place.

        A count set on the command line without max_iters does not scale; nor do any if nobody set max_iters.
        """
        origin = origins.get("max_iters")
        if origin is None and origins:
            return []
        if origin == COMMAND_LINE:
            return list(STEP_COUNTS)
        return [name for name in STEP_COUNTS if origins.get(name) != COMMAND_LINE]


STEP_COUNTS = tuple(field.name for field in fields(StepCounts))


def scaled_to_override(counts: StepCounts, origins: Mapping[str, str], file_max_iters: int) -> StepCounts:
    """`counts` for a max_iters that the command line sets in place of a config file's `file_max_iters`.

    The file's other counts are meant for its own max_iters, so they are scaled; counts of the command line stay.
    """
    if origins.get("max_iters") != COMMAND_LINE or counts.max_iters < 1 or file_max_iters in (counts.max_iters, 0):
        return counts
    names = [name for name in STEP_COUNTS if origins.get(name, COMMAND_LINE) != COMMAND_LINE]
    return replace(counts, max_iters=file_max_iters).scaled(counts.max_iters, names)


class Schedule:
    """A run's learning rate and evaluations as functions of the step, and its number of steps.

    The settings are a recipe for counts.max_iters steps. A time budget makes `decisions` on the run's length, each a
    (step, max_iters). A decision stretches or shortens the rest of the recipe, which then passes through the same
    learning rates and as many evaluations; steps before it keep what they had. So everything here is a pure function
    of the settings and the decisions, which a checkpoint holds.
    """

    def __init__(
        self,
        counts: StepCounts,
        lr_schedule: str = "constant",
        learning_rate: float = 0.0,
        min_lr: float | None = None,
        decisions: list[tuple[int, int]] | None = None,
    ):
        self.counts, self.lr_schedule, self.learning_rate = counts, lr_schedule, learning_rate
        self.min_lr = learning_rate / 10 if min_lr is None else min_lr
        self.decisions = [tuple(decision) for decision in decisions or [(0, counts.max_iters)]]

    @property
    def max_iters(self) -> int:
        return self.decisions[-1][1]

    def decide(self, step: int, max_iters: int) -> None:
        """After `step`, the run has `max_iters` steps in all. If max_iters equals step, it ends now."""
        assert max_iters >= step
        self.decisions.append((step, max_iters))

    def recipe_step(self, step: int) -> float:
        """The step of the recipe that `step` corresponds to; equal to `step` if no decision was made."""
        position = 0.0
        ends = [begin for begin, _ in self.decisions[1:]] + [step]
        for (begin, max_iters), end in zip(self.decisions, ends, strict=True):
            end = min(end, step)
            if end > begin:
                position += (end - begin) * ((self.counts.max_iters - position) / (max_iters - begin))
        return position

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of step 0, 1, 2, ..."""
        lr_decay_iters = self.counts.lr_decay_iters or self.counts.max_iters
        wsd_decay_iters = self.counts.wsd_decay_iters
        return lr_at(
            self.recipe_step(step),
            schedule=self.lr_schedule,
            learning_rate=self.learning_rate,
            min_lr=self.min_lr,
            warmup_iters=self.counts.warmup_steps,
            lr_decay_iters=lr_decay_iters,
            wsd_decay_iters=lr_decay_iters // 5 if wsd_decay_iters is None else wsd_decay_iters,
        )

    def evaluates(self, step: int) -> bool:
        """Whether the run evaluates after `step`: every eval_steps steps of the recipe, and at the end."""
        interval = self.counts.eval_steps
        passed = self.recipe_step(step) // interval > self.recipe_step(step - 1) // interval
        return passed or step == self.max_iters

    def evaluations_after(self, step: int) -> int:
        """How many evaluations follow after `step`."""
        interval = self.counts.eval_steps
        remaining = math.ceil(self.counts.max_iters / interval) - int(self.recipe_step(step) // interval)
        return max(1, remaining) if step < self.max_iters else 0


@cache
def snapshot_steps(count: int, max_iters: int) -> tuple[int, ...]:
    """The steps after which to take `count` snapshots: 0, max_iters, and others, evenly spaced in log(1 + step).

    A run of fewer steps has one after each. A single snapshot is of the last step.
    """
    if count < 2:
        return (max_iters,) * count
    steps = [0]
    for remaining in range(min(count - 1, max_iters), 0, -1):
        last = steps[-1]
        ratio = ((1 + max_iters) / (1 + last)) ** (1 / remaining)
        steps.append(max(last + 1, round((1 + last) * ratio) - 1))
    return tuple(steps)


def snapshot_is_due(step: int, count: int, schedule: Schedule) -> bool:
    """Whether to take one of `count` snapshots after `step`. A time budget's decisions stretch or shorten the rest."""
    if count == 0 or step == schedule.max_iters:
        return count > 0
    before, now = schedule.recipe_step(step - 1) if step else -1, schedule.recipe_step(step)
    return any(before < planned <= now for planned in snapshot_steps(count, schedule.counts.max_iters))
