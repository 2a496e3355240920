"""Time budgets: how many steps fit into `minutes`, planned at the start and again when the machine's speed changes."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from folio import UserError
from folio.base.number_format import counted
from folio.machine.distributed import Group
from folio.training.run_log import Metrics
from folio.training.schedule import Schedule, StepCounts

FINAL_SAMPLE_TOKENS = 300  # printed at the end of a run
EVALUATION_SHARE = 0.1  # of the time, for evaluations with their checkpoints and samples, except the last evaluation
ENDING_SECONDS = 1.0  # expected for the end of a run, without the sample


def seconds_per_step(run_step: Callable[[], None], group: Group, limit: float = math.inf) -> float:
    """The median over 2 seconds, at least 5 steps, after 2 steps of warmup. run_step waits for the device.

    On a slow machine: of the steps that fit into `limit` seconds, at least one, after a step of warmup.
    """
    times: list[float] = []
    while group.broadcast(len(times) < 2 or (sum(times) < limit and (len(times) < 7 or sum(times[2:]) < 2))):
        began = time.perf_counter()
        run_step()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:] or times[1:])


def evaluation_seconds(val_tokens: int, step_tokens: int, step_seconds: float) -> float:
    """A forecast for one evaluation: without a backward pass, a token takes a third of its time in training."""
    return val_tokens / step_tokens * step_seconds / 3


def with_time_budget(
    counts: StepCounts,
    minutes: float,
    remaining: float,
    step_seconds: float,
    evaluation: float,
    origins: Mapping,
    batches: float,
) -> tuple[StepCounts, bool]:
    """The same recipe with as many steps as fit into `remaining` seconds of a run of `minutes`.

    Also returns whether it evaluates less often, because of EVALUATION_SHARE.

    Time goes into steps, evaluations (of `evaluation` seconds and `batches` batches each), and 1 second at the end. As
    many evaluations as before, and one at the start, if they take at most EVALUATION_SHARE of the time; otherwise
    fewer, at least the last one. origins: where each setting was set. Raises UserError if there is too little time.
    """
    names = counts.scaling_with_max_iters(origins)
    if counts.eval_interval is None:
        counts, names = replace(counts, eval_interval=-(-counts.max_iters // 10)), [*names, "eval_interval"]
    available, affordable = remaining - ENDING_SECONDS, affordable_evaluations(minutes, evaluation)
    if "eval_interval" in names:
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
    scaled = counts.scaled(steps, names)
    if is_limited:
        scaled = replace(scaled, eval_interval=-(-steps // evaluations))
    return scaled, is_limited


def affordable_evaluations(minutes: float, evaluation: float) -> float:
    """How many evaluations take EVALUATION_SHARE of a run's time; infinity if they take none."""
    return EVALUATION_SHARE * 60 * minutes // evaluation if evaluation > 0 else math.inf


def too_short(minutes: float, spent: float, step_seconds: float, evaluation: float, batches: float) -> str:
    """The error for a budget in which no step fits, with the shortest time that works.

    If shorter evaluations are enough, it also names their --eval_iters.
    """
    least = (spent + ENDING_SECONDS + step_seconds + evaluation) / 60
    digits = 10 ** (math.floor(math.log10(least)) - 1)
    remedy = f"use --minutes={math.ceil(1.1 * least / digits) * digits:.6g}"
    free, share = 60 * minutes - spent - ENDING_SECONDS - step_seconds, EVALUATION_SHARE * 60 * minutes
    fitting = int(share * batches / evaluation) if evaluation and free >= share else 0
    if fitting:
        remedy = f"{remedy}, or --eval_iters={fitting}"
    return (
        f"minutes={minutes:g}: it is too short: a step takes {step_seconds:.2g} s and an evaluation {evaluation:.2g} s "
        f"here, after {spent:.2g} s for the start; {remedy}, or a smaller model"
    )


def until(deadline: float, pieces: Iterable[str]) -> Iterator[str]:
    """The pieces of a text up to a time of time.perf_counter(), at least one."""
    for piece in pieces:
        yield piece
        if time.perf_counter() >= deadline:
            return


class Budget:
    """Keeps a run within its time, by measuring steps and evaluations while it runs.

    minutes: of the whole run. step_seconds, evaluation_seconds, saving_seconds, ending_seconds: what one step, one
    evaluation, its checkpoint and sample, and the end of the run are expected to take. spent, evaluating: seconds that
    the run and its evaluations have taken already.
    """

    LATE = 0.02  # share of the budget; a run that is further behind is planned again
    UNCHANGED = 0.01  # share of the remaining steps; a smaller change is not worth a decision

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
        self.began, self.evaluating = time.perf_counter() - spent, evaluating
        self.start_stretch(step)

    def start_stretch(self, step: int) -> None:
        """Start measuring a stretch of steps, after a decision or an evaluation."""
        self.first_step = self.last_step = step
        self.started = self.latest = time.perf_counter()
        self.slowest = 0.0, 0  # seconds and steps between two marks
        self.is_late = False

    def mark(self, step: int) -> None:
        """Record that the device has just finished `step`; `is_late` says whether it is far behind its plan."""
        now = time.perf_counter()
        if step > self.last_step:
            gap = now - self.latest, step - self.last_step
            self.slowest = max(self.slowest, gap, key=lambda gap: gap[0] / max(1, gap[1]))
            self.latest, self.last_step = now, step
        behind = now - self.started - (step - self.first_step) * self.step_seconds
        self.is_late = behind > max(self.LATE * self.seconds, 2 * self.step_seconds)

    def note_evaluation(self, seconds: float) -> None:
        """Record an evaluation's duration, averaged with the forecast, so that a single slow one ends no run."""
        self.evaluation_seconds = (self.evaluation_seconds + seconds) / 2
        self.evaluating += seconds

    def note_saving(self, seconds: float) -> None:
        """Record how long its checkpoint and sample took."""
        self.saving_seconds = (self.saving_seconds + seconds) / 2
        self.evaluating += seconds

    def note_sample(self, tokens: int, seconds: float) -> None:
        """Record a sample's duration; the run ends with another one."""
        self.ending_seconds = ENDING_SECONDS + seconds / tokens * FINAL_SAMPLE_TOKENS

    def pace(self) -> float:
        """Seconds per step in this stretch, without its slowest part, so that one stall does not skew the estimate."""
        seconds, steps = self.latest - self.started, self.last_step - self.first_step
        if steps > self.slowest[1]:
            seconds, steps = seconds - self.slowest[0], steps - self.slowest[1]
        return seconds / steps if steps else self.step_seconds

    @property
    def evaluates_first(self) -> bool:
        """Whether there is time for an evaluation before the first step."""
        return affordable_evaluations(self.minutes, self.evaluation_seconds) >= 2

    def evaluations_after(self, step: int, schedule: Schedule) -> int:
        """How many of the schedule's evaluations there is time for, at least the last one."""
        planned, each = schedule.evaluations_after(step), self.evaluation_seconds + self.saving_seconds
        if planned * each <= EVALUATION_SHARE * self.seconds - self.evaluating:
            return planned
        return min(planned, max(1, int((EVALUATION_SHARE * self.seconds - self.evaluating) / each)))

    def plan(self, step: int, schedule: Schedule) -> tuple[int, int]:
        """The number of steps that fits the time, decided after `step` (the schedule's own if it is about the same),
        and the first step that may be followed by an evaluation.
        """
        self.step_seconds = self.pace()
        evaluations = self.evaluations_after(step, schedule)
        remaining = self.began + self.seconds - time.perf_counter() - self.ending_seconds
        remaining -= evaluations * (self.evaluation_seconds + self.saving_seconds)
        fitting = max(0, int(remaining / max(self.step_seconds, 1e-9)))
        planned = schedule.max_iters - step
        max_iters = schedule.max_iters if abs(fitting - planned) <= self.UNCHANGED * planned else step + fitting
        if evaluations == schedule.evaluations_after(step):
            return max_iters, 0
        return max_iters, step + (max_iters - step) // evaluations

    def sample_deadline(self, is_last: bool) -> float:
        """When a sample ends at the latest: with the run's time, or within half of what is left for evaluations."""
        now = time.perf_counter()
        if is_last:
            return max(now + ENDING_SECONDS, self.began + self.seconds)
        return now + (EVALUATION_SHARE * self.seconds - self.evaluating) / 2

    def state(self) -> dict[str, Any]:
        """State that checkpoints hold."""
        names = ("step_seconds", "evaluation_seconds", "saving_seconds", "ending_seconds", "evaluating")
        return {name: getattr(self, name) for name in names} | {"spent": time.perf_counter() - self.began}


class Pacer:
    """Plans how many steps a run has and which are followed by an evaluation, on every rank. Without a budget, as in
    the schedule.
    """

    def __init__(self, budget: Budget | None, schedule: Schedule, group: Group, metrics: Metrics):
        self.budget, self.schedule, self.group, self.metrics = budget, schedule, group, metrics
        self.evaluate_from = 0  # the first step that may be followed by an evaluation
        self.said_replan = False  # whether a change of the length was printed since the last evaluation
        self.began = self.ended = time.perf_counter()  # of the last evaluation
        self.sample_began = self.began  # the last sample

    @property
    def evaluates_first(self) -> bool:
        """Whether there is time for an evaluation before the first step."""
        return self.budget is None or self.budget.evaluates_first

    @property
    def is_late(self) -> bool:
        return self.budget is not None and self.budget.is_late

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation follows `step`."""
        return self.schedule.evaluates(step) and (step >= self.evaluate_from or step == self.schedule.max_iters)

    def mark(self, step: int) -> None:
        """Record that the device has just finished `step`."""
        if self.budget:
            self.budget.mark(step)

    def begin_evaluation(self) -> None:
        self.began = time.perf_counter()

    def measure_evaluation(self) -> None:
        """Record how long the evaluation took that ends now."""
        self.ended = time.perf_counter()
        if self.budget:
            self.budget.note_evaluation(self.ended - self.began)

    def end_evaluation(self, step: int) -> None:
        """Record how long the evaluation after `step` took, and plan the steps after it."""
        self.measure_evaluation()
        self.replan(step)
        self.said_replan = False

    def sample_deadline(self, is_last: bool) -> float:
        """When a sample ends at the latest, in time.perf_counter()'s seconds."""
        return self.budget.sample_deadline(is_last) if self.budget else math.inf

    def begin_sample(self) -> None:
        """Time the sample from here. Call it again after the first token: the first sample may compile its decoder."""
        self.sample_began = time.perf_counter()

    def end_sample(self, step: int, tokens: int) -> None:
        """Record how long the checkpoint and the sample after an evaluation took, and plan the steps after them.

        tokens: of a complete sample, or 0.
        """
        if self.budget is None:
            return
        now = time.perf_counter()
        self.budget.note_saving(now - self.ended)
        if tokens:
            self.budget.note_sample(tokens, now - self.sample_began)
        self.replan(step, at_least=1)  # no checkpoint of this step says that it is the last one

    def replan(self, step: int, at_least: int = 0) -> None:
        """Recompute max_iters from current timings, the same on every rank.

        at_least: how many steps to run in any case.
        """
        budget, before = self.budget, self.schedule.max_iters
        if budget is None or step >= before:
            return
        fitting, self.evaluate_from = self.group.broadcast(budget.plan(step, self.schedule))
        max_iters = max(step + at_least, fitting)
        if max_iters != before and not self.said_replan:
            self.metrics.say(
                f"step {step:,}: the run now has {counted(max_iters, 'step')} instead of {before:,}, "
                f"to fit into {counted(budget.minutes, 'minute')} "
                f"(a step takes {1000 * budget.step_seconds:,.1f} ms, an evaluation {budget.evaluation_seconds:.2g} s)"
            )
            self.said_replan = True
        if max_iters != before:
            self.schedule.decide(step, max_iters)
            self.metrics.lengthen(max_iters)
        budget.start_stretch(step)

    def state(self) -> dict[str, Any] | None:
        """State that checkpoints hold."""
        return self.budget and self.budget.state()
