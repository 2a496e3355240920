"""The interface between the runner of a sweep and its source of trials: a trial to train, and its outcome.

A point is one value for each varied setting. A trial is one run of train.py: a point with one seed.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from folio.experiments.sweep.space import describe_point

State = Literal["failed", "waiting", "running", "pruned", "finished"]


class TrialFailed(Exception):
    """Raised if a trial cannot be completed; the sweep continues."""


class TrialInterrupted(Exception):
    """Raised if a trial was stopped at a checkpoint and can be resumed."""


@dataclass(frozen=True)
class Outcome:
    """The state and results of a trial."""

    point: int
    seed: int
    params: dict[str, Any]
    state: State
    loss: float | None = None  # lowest validation loss, nats per token
    text: str | None = None  # Run.evaluated_text of the loss
    step: int | None = None  # of the lowest loss
    tokens: int | None = None  # number of training tokens
    seconds: float | None = None  # of training steps
    evaluations: tuple[tuple[int, float], ...] = ()  # (tokens, validation loss)
    error: str | None = None  # reason of a failure
    host: str | None = None  # the machine that trained it


@dataclass(frozen=True)
class Trial:
    """A trial to train. Trials of a grid are never pruned."""

    point: int
    seed: int
    params: dict[str, Any]

    @property
    def key(self) -> tuple[int, int]:
        return self.point, self.seed

    def report(self, loss: float, number: int) -> bool:
        """Return whether to prune the run after evaluation `number`, counted from 1, with this loss."""
        return False

    def outcome(self, state: State, **fields: Any) -> Outcome:
        """Return an outcome of this trial. fields: of Outcome."""
        return Outcome(self.point, self.seed, self.params, state, **fields)


class TrialSource(ABC):
    """The trials of a sweep, which processes and machines share: a grid's FolderQueue, or a search's Study."""

    poll_seconds = 1.0  # between looks at the trials of other workers

    def run(
        self,
        train: Callable[[Trial], Outcome],
        jobs: int,
        stopping: threading.Event,
        after_trial: Callable[[], None],
    ) -> None:
        """Call `train` with each waiting trial, `jobs` at once, until no trial waits, or runs in any process.

        train: returns the trial's outcome, which is waiting if it was interrupted. stopping: once set, no other trial
        starts; an error sets it. after_trial: called after each trial, and regularly while waiting for other workers.
        """

        def work() -> None:
            try:
                while not stopping.is_set():
                    has_run = self.run_next(train)
                    after_trial()
                    if not has_run:
                        if all(outcome.state not in ("waiting", "running") for outcome in self.outcomes()):
                            return
                        stopping.wait(self.poll_seconds)  # other threads or processes have taken the others
            except BaseException:
                stopping.set()  # for the other threads
                raise

        with ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(work) for _ in range(jobs - 1)]
            work()
            for future in futures:
                future.result()

    def describe(self, trial: Trial) -> str:
        """Return the name of a run for the output."""
        return f"trial {trial.point}, seed {trial.seed} ({describe_point(trial.params)})"

    def runs_left(self, outcomes: Sequence[Outcome]) -> int:
        """Return the number of runs that are not completed, at most. outcomes: the current ones."""
        return sum(outcome.state in ("waiting", "running") for outcome in outcomes)

    @abstractmethod
    def max_runs(self) -> int:
        """Return the number of runs if none is pruned or found to be unnecessary."""

    @abstractmethod
    def run_next(self, train: Callable[[Trial], Outcome]) -> bool:
        """Call `train` with the next waiting trial. Returns False if other threads or processes have taken them all."""

    @abstractmethod
    def outcomes(self) -> list[Outcome]:
        """Return the outcome of each trial, sorted by point and seed."""

    @abstractmethod
    def retry_failed(self) -> None:
        """Requeue the failed trials."""

    @abstractmethod
    def importances(self) -> dict[str, float]:
        """Return the importance of each setting in descending order; empty if unknown."""
