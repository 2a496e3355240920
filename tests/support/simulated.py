"""A simulated machine, on which training steps and evaluations take given times."""

import torch

import train as train_script
from folio.machine.runtime import Runtime
from folio.training.guard import StepGuard
from folio.training.planning.budget import ENDING_SECONDS, Budget


class SimulatedMachine:
    """Replaces the clock by one that only steps and evaluations advance.

    step_seconds, evaluation_seconds: durations as functions of the number of completed steps. asynchronous: as on a
    GPU, a step takes only host_seconds on the host, which waits for the device when it reads the step's numbers.
    trains: whether steps compute anything; they
    advance the counters in any case.
    """

    def __init__(
        self,
        monkeypatch,
        step_seconds,
        evaluation_seconds,
        asynchronous: bool = False,
        trains: bool = False,
        host_seconds: float = 0.0,
    ):
        self.now = 0.0  # time on the host
        self.device = 0.0  # time at which the device finishes all queued work
        self.steps = 0
        self.finished: dict[tuple, float] = {}  # (guard, step) -> time at which the device finishes the step
        train_step, evaluate, read = train_script.train_step, train_script.evaluate, StepGuard.read

        def timed_step(state, loss_fn, loader, *args):
            if trains:
                train_step(state, loss_fn, loader, *args)
            else:
                state.guard.judge(torch.ones(()), torch.ones(()))
                state.step += 1
                state.next_sequence += loader.shape.sequences
            self.now += host_seconds
            self.device = max(self.device, self.now) + step_seconds(self.steps)
            self.finished[state.guard, state.step] = self.device
            self.now = self.now if asynchronous else self.device
            self.steps += 1

        def timed_read(guard, step):
            guard.sent_time.time = self.finished[guard, step]
            self.now = max(self.now, guard.sent_time.time)
            return read(guard, step)

        def timed_evaluation(*args):
            self.now = self.device = max(self.now, self.device) + evaluation_seconds(self.steps)
            return evaluate(*args)

        monkeypatch.setattr(train_script, "train_step", timed_step)
        monkeypatch.setattr(train_script, "evaluate", timed_evaluation)
        monkeypatch.setattr(StepGuard, "read", timed_read)
        monkeypatch.setattr(train_script.time, "perf_counter", lambda: self.now)
        if asynchronous:
            monkeypatch.setattr(Runtime, "is_asynchronous", True)


def assert_on_time(seconds: float, minutes: float, step_seconds: float, evaluation_seconds: float) -> None:
    """Assert that a run took its minutes, apart from what a plan does not consider.

    It ends early by ENDING_SECONDS, which take no time here, and by the part of a step that does not fit. It is late by
    a delay that is not noticed, or that two steps cause before it is. Either may be due to the estimate of the last
    evaluation, with its sample. A plan does not change by less than MIN_CHANGE.
    """
    planned, delay = 60 * minutes, max(Budget.MAX_DELAY * 60 * minutes, 2 * step_seconds)
    margin = evaluation_seconds + Budget.MIN_CHANGE * planned
    assert planned - ENDING_SECONDS - step_seconds - margin <= seconds <= planned + delay + margin
