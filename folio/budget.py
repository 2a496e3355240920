"""How many steps a run takes: decided when it starts and, under a budget of time, again when the pace changes."""

import math
import time
from typing import Any


class Plan:
    """The decisions on a run's length, (step, max_iters) each, and which step of the recipe each step stands for.

    A recipe of `recipe_iters` steps that is stretched or shortened passes through the same learning rates and as many
    evaluations. A later decision does this to the rest of the recipe only: the steps before it keep what they had. So
    a step's learning rate is a pure function of the decisions.
    """

    def __init__(self, recipe_iters: int, decisions: list[tuple[int, int]] | None = None):
        self.recipe_iters = recipe_iters
        self.decisions = [tuple(decision) for decision in decisions or [(0, recipe_iters)]]

    @property
    def max_iters(self) -> int:
        return self.decisions[-1][1]

    def decide(self, step: int, max_iters: int) -> None:
        """From `step` on, the run has `max_iters` steps; `step` itself for a run that ends with it."""
        assert max_iters >= step
        self.decisions.append((step, max_iters))

    def recipe_step(self, step: int) -> float:
        """The step of the recipe that `step` stands for; the same number where nothing was decided later."""
        place = 0.0
        ends = [begin for begin, _ in self.decisions[1:]] + [step]
        for (begin, max_iters), end in zip(self.decisions, ends, strict=True):
            end = min(end, step)
            if end > begin:
                place += (end - begin) * ((self.recipe_iters - place) / (max_iters - begin))
        return place

    def evaluates(self, step: int, interval: int) -> bool:
        """Whether the run evaluates after `step`: every `interval` steps of the recipe, and at the end."""
        passed = self.recipe_step(step) // interval > self.recipe_step(step - 1) // interval
        return passed or step == self.max_iters

    def evaluations_after(self, step: int, interval: int) -> int:
        """How many evaluations are left after `step`."""
        ahead = math.ceil(self.recipe_iters / interval) - int(self.recipe_step(step) // interval)
        return max(1, ahead) if step < self.max_iters else 0


class Budget:
    """Keeps a run within its time, by what steps and evaluations take while it runs.

    minutes: of the whole run. step_seconds, evaluation_seconds, saving_seconds, ending_seconds: what one step, one
    evaluation, its checkpoint and sample, and the end of the run are expected to take. spent: seconds that the run has
    taken already.
    """

    LATE = 0.02  # of the budget: a run that is so much behind its plan gets a new one
    SAME = 0.01  # of the steps that are left: a new plan that changes less is not worth a decision

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
        self.seconds = 60 * minutes
        self.step_seconds, self.evaluation_seconds = step_seconds, evaluation_seconds
        self.saving_seconds, self.ending_seconds = saving_seconds, ending_seconds
        self.began = time.perf_counter() - spent
        self.start_stretch(step)

    def start_stretch(self, step: int) -> None:
        """Begin to measure a stretch of steps, after a decision or an evaluation."""
        self.first_step = self.last_step = step
        self.started = self.latest = time.perf_counter()
        self.slowest = 0.0, 0  # seconds and steps between two marks
        self.is_late = False

    def mark(self, step: int) -> None:
        """Record that the device has just finished `step`; `is_late` says whether it is much behind its plan."""
        now = time.perf_counter()
        if step > self.last_step:
            gap = now - self.latest, step - self.last_step
            self.slowest = max(self.slowest, gap, key=lambda gap: gap[0] / max(1, gap[1]))
            self.latest, self.last_step = now, step
        behind = now - self.started - (step - self.first_step) * self.step_seconds
        self.is_late = behind > max(self.LATE * self.seconds, 2 * self.step_seconds)

    def note_evaluation(self, seconds: float) -> None:
        """An evaluation has taken so long. The mean with what was expected, so that one of them does not end a run."""
        self.evaluation_seconds = (self.evaluation_seconds + seconds) / 2

    def note_saving(self, seconds: float) -> None:
        """The same for its checkpoint and sample."""
        self.saving_seconds = (self.saving_seconds + seconds) / 2

    def pace(self) -> float:
        """Seconds per step in this stretch, without its slowest part if there are others: a stall is not a pace."""
        seconds, steps = self.latest - self.started, self.last_step - self.first_step
        if steps > self.slowest[1]:
            seconds, steps = seconds - self.slowest[0], steps - self.slowest[1]
        return seconds / steps if steps else self.step_seconds

    def max_iters(self, step: int, plan: Plan, eval_interval: int) -> int:
        """The number of steps that fits the time, after `step`; the plan's own where that is about the same."""
        self.step_seconds = self.pace()
        left = self.began + self.seconds - time.perf_counter() - self.ending_seconds
        left -= plan.evaluations_after(step, eval_interval) * (self.evaluation_seconds + self.saving_seconds)
        steps_left = max(0, int(left / max(self.step_seconds, 1e-9)))
        planned = plan.max_iters - step
        return plan.max_iters if abs(steps_left - planned) <= self.SAME * planned else step + steps_left

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        names = ("step_seconds", "evaluation_seconds", "saving_seconds", "ending_seconds")
        return {name: getattr(self, name) for name in names} | {"spent": time.perf_counter() - self.began}
