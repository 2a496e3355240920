"""The schedule of a run: its learning rate, evaluations and number of steps."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache

from folio.base.settings import COMMAND_LINE
from folio.training.optim import DECAYS, LearningRates


@dataclass(frozen=True)
class StepCounts:
    """Settings that count steps. None: a default that depends on max_iters."""

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

    def resolved(self) -> "StepCounts":
        """The counts with a value for each default."""
        lr_decay_iters = self.lr_decay_iters or self.max_iters
        wsd_decay_iters = lr_decay_iters // 5 if self.wsd_decay_iters is None else self.wsd_decay_iters
        return StepCounts(self.max_iters, self.warmup_steps, lr_decay_iters, wsd_decay_iters, self.eval_steps)

    @property
    def evaluations(self) -> int:
        return -(-self.max_iters // self.eval_steps)

    def __str__(self) -> str:
        return ", ".join(f"{name} {n:,}" for name, n in asdict(self).items() if n)

    def scaled(self, max_iters: int, names: list[str]) -> "StepCounts":
        """The counts for a run of max_iters steps. Those in `names` are scaled and rounded up; the others stay."""
        counts = {name: getattr(self, name) for name in names}
        scaled_counts = {name: -(-n * max_iters // self.max_iters) for name, n in counts.items() if n and n > 0}
        return replace(self, **{**scaled_counts, "max_iters": max_iters})

    def continued(self, step: int, names: list[str]) -> "StepCounts":
        """The counts of a run that has already done `step` steps. Those in `names` are scaled; the decay is to come."""
        counts = self.scaled(step + self.max_iters, names)
        return replace(counts, wsd_decay_iters=counts.wsd_decay_iters and min(counts.wsd_decay_iters, self.max_iters))

    def without_second_warmup(self, before: "StepCounts", step: int) -> "StepCounts":
        """The counts of a run resumed after `step`: a warmup of the counts `before` that is over is not repeated."""
        if before.warmup_steps <= step < self.warmup_steps:
            return replace(self, warmup_iters=before.warmup_steps)
        return self

    def scaling_with_max_iters(self, origins: Mapping[str, str]) -> list[str]:
        """The counts that scale with max_iters, by where each setting was set (`origins`).

        If the command line sets max_iters, all counts scale. Otherwise, counts set on the command line do not, and
        none does if max_iters is not set.
        """
        origin = origins.get("max_iters")
        if origin is None and origins:
            return []
        if origin == COMMAND_LINE:
            return list(STEP_COUNTS)
        return [name for name in STEP_COUNTS if origins.get(name) != COMMAND_LINE]


STEP_COUNTS = tuple(field.name for field in fields(StepCounts))


def scaled_to_override(counts: StepCounts, origins: Mapping[str, str], file_max_iters: int) -> StepCounts:
    """Scale a config file's counts if the command line overrides its max_iters, `file_max_iters`.

    Counts set on the command line stay.
    """
    if origins.get("max_iters") != COMMAND_LINE or counts.max_iters < 1 or file_max_iters in (counts.max_iters, 0):
        return counts
    names = [name for name in STEP_COUNTS if origins.get(name, COMMAND_LINE) != COMMAND_LINE]
    return replace(counts, max_iters=file_max_iters).scaled(counts.max_iters, names)


class Schedule:
    """The learning rate and the evaluations of a run as functions of the step, and the number of steps.

    The settings are a recipe for counts.max_iters steps. A time budget makes `decisions` (step, max_iters) about the
    length of the run. Each one stretches or compresses the rest of the recipe, which keeps its learning rates and its
    number of evaluations. So the schedule is a pure function of the settings and the decisions, which checkpoints hold.

    lr_factor: a factor of all learning rates, which a rollback lowers (rollback.py).
    """

    def __init__(
        self,
        counts: StepCounts,
        lr_schedule: str = "constant",
        learning_rate: float = 0.0,
        min_lr: float | None = None,
        decisions: list[tuple[int, int]] | None = None,
        lr_factor: float = 1.0,
        muon_learning_rate: float = 0.0,
    ):
        self.counts, self.lr_schedule, self.lr_factor = counts.resolved(), lr_schedule, lr_factor
        self.learning_rate, self.muon_learning_rate = learning_rate, muon_learning_rate
        self.peak = learning_rate or muon_learning_rate or 1.0  # of the schedule that both rates follow
        self.min_lr = self.peak / 10 if min_lr is None else min_lr
        self.decisions = [tuple(decision) for decision in decisions or [(0, counts.max_iters)]]

    @property
    def max_iters(self) -> int:
        return self.decisions[-1][1]

    def decide(self, step: int, max_iters: int) -> None:
        """Set the total number of steps to `max_iters`, decided after `step`. The run ends now if they are equal."""
        assert max_iters >= step
        self.decisions.append((step, max_iters))

    def recipe_step(self, step: int) -> float:
        """The step of the recipe that `step` corresponds to; equal to `step` if no decision was made."""
        recipe_step = 0.0
        ends = [begin for begin, _ in self.decisions[1:]] + [step]
        for (begin, max_iters), end in zip(self.decisions, ends, strict=True):
            end = min(end, step)
            if end > begin:
                recipe_step += (end - begin) * ((self.counts.max_iters - recipe_step) / (max_iters - begin))
        return recipe_step

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of step 0, 1, 2, ..., without Muon's."""
        return self.learning_rates_at(step).learning_rate

    def learning_rates_at(self, step: int) -> LearningRates:
        """The learning rates of step 0, 1, 2, ..., which are in the same proportion at each step."""
        rate = self.lr_factor * self.recipe_rate(self.recipe_step(step))
        return LearningRates(rate * (self.learning_rate / self.peak), rate * (self.muon_learning_rate / self.peak))

    def recipe_rate(self, step: float) -> float:
        """The learning rate of a step of the recipe, of which the highest is `peak`.

        It increases linearly during the first warmup_iters steps. Then it follows DECAYS to `min_lr` at step
        lr_decay_iters, or is constant. "wsd" decays only during the last wsd_decay_iters of these steps.
        """
        warmup_iters, lr_decay_iters = self.counts.warmup_iters, self.counts.lr_decay_iters
        decay = None if self.lr_schedule == "constant" else DECAYS[self.lr_schedule]
        # In the first steps, Adam knows the usual size of gradients from few of them, and those of a new model change
        # fast, so full steps may do harm. In the last ones, small steps average out the noise of the batches.
        if step < warmup_iters:
            return self.peak * (step + 1) / (warmup_iters + 1)
        if decay is None:
            return self.peak
        if step >= lr_decay_iters:
            return self.min_lr
        is_wsd = self.lr_schedule == "wsd"
        begin = max(warmup_iters, lr_decay_iters - self.counts.wsd_decay_iters) if is_wsd else warmup_iters
        if step < begin:
            return self.peak
        return self.min_lr + decay((step - begin) / (lr_decay_iters - begin)) * (self.peak - self.min_lr)

    def evaluates(self, step: int) -> bool:
        """Whether the run evaluates after `step`: every eval_steps steps of the recipe, and at the end."""
        interval = self.counts.eval_interval
        passed = self.recipe_step(step) // interval > self.recipe_step(step - 1) // interval
        return passed or step == self.max_iters

    def evaluations_after(self, step: int) -> int:
        """The number of evaluations after `step`."""
        interval = self.counts.eval_interval
        remaining = math.ceil(self.counts.max_iters / interval) - int(self.recipe_step(step) // interval)
        return max(1, remaining) if step < self.max_iters else 0


@cache
def snapshot_steps(count: int, max_iters: int) -> tuple[int, ...]:
    """The steps after which to take `count` snapshots: 0, max_iters, and others evenly spaced in log(1 + step).

    If there are fewer steps, one follows each of them. A single snapshot is taken after the last step.
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
    """Whether to take one of `count` snapshots after `step`, which a time budget may move."""
    if count == 0 or step == schedule.max_iters:
        return count > 0
    previous, current = schedule.recipe_step(step - 1) if step else -1, schedule.recipe_step(step)
    return any(previous < planned <= current for planned in snapshot_steps(count, schedule.counts.max_iters))
