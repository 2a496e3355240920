"""Time budgets: how many steps fit into `minutes`, planned at the start and again when the machine's speed changes."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from folio import UserError
from folio.distributed import Group
from folio.schedule import Schedule, StepCounts

FINAL_SAMPLE_TOKENS = 300  # printed at the end of a run


def seconds_per_step(run_step: Callable[[], None], group: Group) -> float:
    """The median over 2 seconds, at least 5 steps, after 2 steps of warmup. run_step waits for the device."""
    times: list[float] = []
    while group.broadcast(len(times) < 7 or sum(times[2:]) < 2):
        began = time.perf_counter()
        run_step()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def evaluation_seconds(val_tokens: int, step_tokens: int, step_seconds: float) -> float:
    """A forecast for one evaluation: without a backward pass, a token takes a third of its time in training."""
    return val_tokens / step_tokens * step_seconds / 3


def with_time_budget(
    counts: StepCounts, minutes: float, remaining: float, step_seconds: float, evaluation: float, origins: Mapping
) -> StepCounts:
    """The same recipe with as many steps as fit into `remaining` seconds of a run of `minutes`.

    Time goes into steps, as many evaluations as before and one at the start (of `evaluation` seconds each), and 1
    second at the end.
    origins: where each setting was set. Raises UserError if there is too little time.
    """
    names = counts.scaling_with_max_iters(origins)
    if counts.eval_interval is None:
        counts, names = replace(counts, eval_interval=-(-counts.max_iters // 10)), [*names, "eval_interval"]
    if "eval_interval" in names:
        steps = int((remaining - 1 - (1 + counts.evaluations) * evaluation) / step_seconds)
    else:
        steps = int((remaining - 1 - 2 * evaluation) / (step_seconds + evaluation / counts.eval_interval))
    if steps < 1:
        raise UserError(
            f"minutes={minutes:g}: it is too short: a step takes {step_seconds:.2g} s and an evaluation "
            f"{evaluation:.2g} s here; use more minutes, a smaller model, or --eval_iters"
        )
    return counts.scaled(steps, names)


class Budget:
    """Keeps a run within its time, by measuring steps and evaluations while it runs.

    minutes: of the whole run. step_seconds, evaluation_seconds, saving_seconds, ending_seconds: what one step, one
    evaluation, its checkpoint and sample, and the end of the run are expected to take. spent: seconds that the run has
    taken already.
    """

    LATE = 0.02  # share of the budget; a run that is further behind is planned again
    UNCHANGED = 0.01  # share of the remaining steps; a smaller change is not worth a decision

    def __init__(
        self,
        minutes: float,
        step_seconds: float,
        evaluation_seconds: float,
        saving_seconds: float = 0.0,
        ending_seconds: float = 1.0,
        spent: float = 0.0,
        step: int = 0,
    ):
        self.minutes, self.seconds = minutes, 60 * minutes
        self.step_seconds, self.evaluation_seconds = step_seconds, evaluation_seconds
        self.saving_seconds, self.ending_seconds = saving_seconds, ending_seconds
        self.began = time.perf_counter() - spent
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

    def note_saving(self, seconds: float) -> None:
        """Record how long its checkpoint and sample took."""
        self.saving_seconds = (self.saving_seconds + seconds) / 2

    def note_sample(self, tokens: int, seconds: float) -> None:
        """Record a sample's duration; the run ends with another one."""
        self.ending_seconds = 1.0 + seconds / tokens * FINAL_SAMPLE_TOKENS

    def pace(self) -> float:
        """Seconds per step in this stretch, without its slowest part, so that one stall does not skew the estimate."""
        seconds, steps = self.latest - self.started, self.last_step - self.first_step
        if steps > self.slowest[1]:
            seconds, steps = seconds - self.slowest[0], steps - self.slowest[1]
        return seconds / steps if steps else self.step_seconds

    def max_iters(self, step: int, schedule: Schedule) -> int:
        """The number of steps that fits the time, decided after `step`; the schedule's own if it is about the same."""
        self.step_seconds = self.pace()
        remaining = self.began + self.seconds - time.perf_counter() - self.ending_seconds
        remaining -= schedule.evaluations_after(step) * (self.evaluation_seconds + self.saving_seconds)
        fitting = max(0, int(remaining / max(self.step_seconds, 1e-9)))
        planned = schedule.max_iters - step
        return schedule.max_iters if abs(fitting - planned) <= self.UNCHANGED * planned else step + fitting

    def state(self) -> dict[str, Any]:
        """State that checkpoints hold."""
        names = ("step_seconds", "evaluation_seconds", "saving_seconds", "ending_seconds")
        return {name: getattr(self, name) for name in names} | {"spent": time.perf_counter() - self.began}
