"""Time budgets: the number of steps that fit into `minutes`, planned at the start and whenever the speed changes."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from folio import UserError
from folio.base.number_format import counted
from folio.machine.distributed import Group
from folio.training.run_log import Metrics
from folio.training.schedule import Schedule, StepCounts

FINAL_SAMPLE_TOKENS = 300  # printed at the end of a run
EVALUATION_SHARE = 0.1  # of the time, for all evaluations but the last, with their checkpoints and samples
MIN_EVALUATIONS = 2  # in EVALUATION_SHARE of the time; if they do not fit, a part of the validation set is evaluated
MIN_VAL_TOKENS = 2**14
REPORTED_CHANGE = 0.1  # share of a run's steps; smaller changes only move the progress bar
ENDING_SECONDS = 1.0  # estimate for the end of a run, without the sample


def evaluation_seconds(val_tokens: int, step_tokens: int, step_seconds: float) -> float:
    """Estimate the duration of one evaluation: without a backward pass, a token takes a third of its training time."""
    return val_tokens / step_tokens * step_seconds / 3


def with_time_budget(
    counts: StepCounts,
    minutes: float,
    remaining: float,
    step_seconds: float,
    evaluation: float,
    scaling: list[str],
    batches: float,
) -> tuple[StepCounts, bool]:
    """Scale a recipe to the number of steps that fit into the `remaining` seconds of a run of `minutes`.

    Returns the step counts, and whether the run evaluates less often because of EVALUATION_SHARE.

    Time is planned for steps, for evaluations (each of `evaluation` seconds and `batches` batches), and for the end of
    the run. The number of evaluations stays the same, plus one at the start, if they take at most EVALUATION_SHARE of
    the time; otherwise there are fewer, at least the last one. scaling: the counts that follow the number of steps.
    Raises UserError if there is too little time.
    """
    if counts.eval_interval is None:
        counts, scaling = replace(counts, eval_interval=-(-counts.max_iters // 10)), [*scaling, "eval_interval"]
    available, affordable = remaining - ENDING_SECONDS, affordable_evaluations(minutes, evaluation)
    if "eval_interval" in scaling:
        evaluations = counts.evaluations
        steps = int((available - (1 + evaluations) * evaluation) / step_seconds)
    else:
        steps = int((available - 2 * evaluation) / (step_seconds + evaluation / counts.eval_interval))
        evaluations = -(-max(1, steps) // counts.eval_interval)
    is_limited = 1 + evaluations > affordable
    if is_limited:
        evaluations = max(1, int(affordable) - 1)
        steps = int((available - ((affordable >= 2) + evaluations) * evaluation) / step_seconds)
    if steps < 1:
        raise UserError(too_short(minutes, 60 * minutes - remaining, step_seconds, evaluation, batches))
    scaled = counts.scaled(steps, scaling)
    if is_limited:
        scaled = replace(scaled, eval_interval=-(-steps // evaluations))
    return scaled, is_limited


def affordable_evaluations(minutes: float, evaluation: float) -> float:
    """The number of evaluations that fit into EVALUATION_SHARE of the run; infinity if they take no time."""
    return EVALUATION_SHARE * 60 * minutes // evaluation if evaluation > 0 else math.inf


def affordable_tokens(minutes: float, tokens: Sequence[int], seconds_per_token: float) -> int | None:
    """The number of tokens of each validation set to evaluate, so that MIN_EVALUATIONS fit; None: all.

    tokens: of each validation set. The result is a power of two, so that runs with similar speeds evaluate the same
    text, and at least MIN_VAL_TOKENS.
    """

    def is_affordable(limit: int) -> bool:
        evaluation = sum(min(n, limit) for n in tokens) * seconds_per_token
        return affordable_evaluations(minutes, evaluation) >= MIN_EVALUATIONS

    limit = max(tokens)
    if limit <= MIN_VAL_TOKENS or is_affordable(limit):
        return None
    limit = 2 ** ((limit - 1).bit_length() - 1)  # the largest power of two below
    while limit > MIN_VAL_TOKENS and not is_affordable(limit):
        limit //= 2
    return limit


def too_short(minutes: float, spent: float, step_seconds: float, evaluation: float, batches: float) -> str:
    """The error message for a budget in which no step fits. It suggests a time that works.

    If shorter evaluations are enough, it also suggests --eval_iters.
    """
    min_minutes = (spent + ENDING_SECONDS + step_seconds + evaluation) / 60
    digits = 10 ** (math.floor(math.log10(min_minutes)) - 1)
    remedy = f"use --minutes={math.ceil(1.1 * min_minutes / digits) * digits:.6g}"
    free, share = 60 * minutes - spent - ENDING_SECONDS - step_seconds, EVALUATION_SHARE * 60 * minutes
    eval_iters = int(share * batches / evaluation) if evaluation and free >= share else 0
    if eval_iters:
        remedy = f"{remedy}, or --eval_iters={eval_iters}"
    return (
        f"minutes={minutes:g}: it is too short: a step takes {step_seconds:.2g} s and an evaluation {evaluation:.2g} s "
        f"here, after {spent:.2g} s for the start; {remedy}, or a smaller model"
    )


def take_until(deadline: float, pieces: Iterable[str]) -> Iterator[str]:
    """Yield pieces of text until the deadline (in time.perf_counter()'s seconds), at least one."""
    for piece in pieces:
        yield piece
        if time.perf_counter() >= deadline:
            return


class Budget:
    """Keeps a run within its time by measuring steps and evaluations.

    minutes: length of the run. step_seconds, evaluation_seconds, saving_seconds, ending_seconds: estimates for one
    step, one evaluation, its checkpoint and sample, and the end of the run. spent, evaluating: seconds that the run and
    its evaluations have taken so far.
    """

    MAX_DELAY = 0.02  # share of the budget; a run that is further behind is replanned
    MIN_CHANGE = 0.01  # share of the remaining steps; smaller changes are ignored

    def __init__(
        self,
        minutes: float,
        step_seconds: float,
        evaluation_seconds: float,
        saving_seconds: float = 0.0,
        ending_seconds: float = ENDING_SECONDS,
        spent: float = 0.0,
        evaluating: float = 0.0,
        step: int = 0,
    ):
        self.minutes, self.seconds = minutes, 60 * minutes
        self.step_seconds, self.evaluation_seconds = step_seconds, evaluation_seconds
        self.saving_seconds, self.ending_seconds = saving_seconds, ending_seconds
        self.start_time, self.evaluating = time.perf_counter() - spent, evaluating
        self.start_interval(step)

    def start_interval(self, step: int) -> None:
        """Start measuring an interval of steps, after a decision or an evaluation."""
        self.first_step = self.last_step = step
        self.interval_start = self.last_mark = time.perf_counter()
        self.slowest_gap = 0.0, 0  # seconds and steps between two marks
        self.is_late = False

    def mark(self, step: int) -> None:
        """Record that the device has just finished `step`, and set `is_late` if this is far behind the plan."""
        now = time.perf_counter()
        if step > self.last_step:
            gap = now - self.last_mark, step - self.last_step
            self.slowest_gap = max(self.slowest_gap, gap, key=lambda gap: gap[0] / max(1, gap[1]))
            self.last_mark, self.last_step = now, step
        delay = now - self.interval_start - (step - self.first_step) * self.step_seconds
        self.is_late = delay > max(self.MAX_DELAY * self.seconds, 2 * self.step_seconds)

    def begin_evaluation(self) -> None:
        self.evaluation_start = time.perf_counter()

    def end_evaluation(self) -> None:
        """Average an evaluation's duration with the estimate, so that one slow evaluation does not end the run."""
        self.evaluation_end = time.perf_counter()
        seconds = self.evaluation_end - self.evaluation_start
        self.evaluation_seconds = (self.evaluation_seconds + seconds) / 2
        self.evaluating += seconds

    def begin_sample(self) -> None:
        """Start timing a sample. Call it again after the first token, because the decoder may be compiled first."""
        self.sample_start = time.perf_counter()

    def end_sample(self, tokens: int) -> None:
        """Record the duration of the checkpoint and the sample after an evaluation.

        tokens: length of a complete sample, from which the duration of the final sample is estimated, or 0.
        """
        now = time.perf_counter()
        seconds = now - self.evaluation_end
        self.saving_seconds = (self.saving_seconds + seconds) / 2
        self.evaluating += seconds
        if tokens:
            self.ending_seconds = ENDING_SECONDS + (now - self.sample_start) / tokens * FINAL_SAMPLE_TOKENS

    def seconds_per_step(self) -> float:
        """Seconds per step in this interval, without its slowest gap, so that one stall does not skew the estimate."""
        seconds, steps = self.last_mark - self.interval_start, self.last_step - self.first_step
        if steps > self.slowest_gap[1]:
            seconds, steps = seconds - self.slowest_gap[0], steps - self.slowest_gap[1]
        return seconds / steps if steps else self.step_seconds

    @property
    def evaluates_first(self) -> bool:
        """Whether there is time for an evaluation before the first step."""
        return affordable_evaluations(self.minutes, self.evaluation_seconds) >= 2

    def evaluations_after(self, step: int, schedule: Schedule) -> int:
        """The number of the schedule's remaining evaluations that fit the time, at least the last one."""
        planned, seconds_each = schedule.evaluations_after(step), self.evaluation_seconds + self.saving_seconds
        if planned * seconds_each <= EVALUATION_SHARE * self.seconds - self.evaluating:
            return planned
        return min(planned, max(1, int((EVALUATION_SHARE * self.seconds - self.evaluating) / seconds_each)))

    def plan(self, step: int, schedule: Schedule) -> tuple[int, int]:
        """Plan the rest of the run after `step`. Returns the total number of steps (the schedule's if it is about the
        same), and the first step that may be followed by an evaluation.
        """
        self.step_seconds = self.seconds_per_step()
        evaluations = self.evaluations_after(step, schedule)
        remaining = self.start_time + self.seconds - time.perf_counter() - self.ending_seconds
        remaining -= evaluations * (self.evaluation_seconds + self.saving_seconds)
        possible_steps = max(0, int(remaining / max(self.step_seconds, 1e-9)))
        planned_steps = schedule.max_iters - step
        is_unchanged = abs(possible_steps - planned_steps) <= self.MIN_CHANGE * planned_steps
        max_iters = schedule.max_iters if is_unchanged else step + possible_steps
        if evaluations == schedule.evaluations_after(step):
            return max_iters, 0
        return max_iters, step + (max_iters - step) // evaluations

    def sample_deadline(self, is_last: bool) -> float:
        """Deadline of a sample, in time.perf_counter()'s seconds.

        It is the end of the run for the last sample, and half of the time left for evaluations for others.
        """
        now = time.perf_counter()
        if is_last:
            return max(now + ENDING_SECONDS, self.start_time + self.seconds)
        return now + (EVALUATION_SHARE * self.seconds - self.evaluating) / 2

    def state(self) -> dict[str, Any]:
        """The state to save in checkpoints."""
        names = ("step_seconds", "evaluation_seconds", "saving_seconds", "ending_seconds", "evaluating")
        return {name: getattr(self, name) for name in names} | {"spent": time.perf_counter() - self.start_time}


class NoBudget(Budget):
    """Unlimited time: the run has the schedule's steps and evaluations."""

    def __init__(self) -> None:
        super().__init__(math.inf, 0.0, 0.0)

    def plan(self, step: int, schedule: Schedule) -> tuple[int, int]:
        return schedule.max_iters, 0

    def state(self) -> None:
        return None


class Pacer:
    """Decides on every rank how many steps a run has and which are followed by an evaluation."""

    def __init__(self, budget: Budget, schedule: Schedule, group: Group, metrics: Metrics):
        self.budget, self.schedule, self.group, self.metrics = budget, schedule, group, metrics
        self.evaluate_from = 0  # the first step that may be followed by an evaluation
        self.reported_max_iters = schedule.max_iters  # the last one that was printed

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation follows `step`."""
        return self.schedule.evaluates(step) and (step >= self.evaluate_from or step == self.schedule.max_iters)

    def replan(self, step: int, min_steps: int = 0) -> None:
        """Recompute max_iters from current timings, the same on every rank, but run at least min_steps more steps."""
        budget, old_max_iters = self.budget, self.schedule.max_iters
        if step >= old_max_iters:
            return
        max_iters, self.evaluate_from = self.group.broadcast(budget.plan(step, self.schedule))
        max_iters = max(step + min_steps, max_iters)
        if abs(max_iters - self.reported_max_iters) > REPORTED_CHANGE * self.reported_max_iters:
            self.metrics.say(
                f"step {step:,}: the run now has {counted(max_iters, 'step')} instead of {self.reported_max_iters:,}, "
                f"to fit into {counted(budget.minutes, 'minute')} "
                f"(a step takes {1000 * budget.step_seconds:,.1f} ms, an evaluation {budget.evaluation_seconds:.2g} s)"
            )
            self.reported_max_iters = max_iters
        if max_iters != old_max_iters:
            self.schedule.decide(step, max_iters)
            self.metrics.set_max_iters(max_iters)
        budget.start_interval(step)
