"""What passes between the runner of a sweep and the source of its trials: a trial to train, and its outcome.

A point is one value for each setting that the sweep varies. A trial is one run of train.py: a point with one seed.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

State = Literal["failed", "waiting", "running", "pruned", "finished"]


class TrialFailed(Exception):
    """A trial that cannot be completed; the sweep continues."""


class TrialInterrupted(Exception):
    """A trial that was stopped at a checkpoint, to be resumed later."""


@dataclass(frozen=True)
class Outcome:
    """What is known of a trial."""

    point: int
    seed: int
    params: dict[str, Any]
    state: State
    loss: float | None = None  # nats per token, the lowest validation loss
    step: int | None = None  # of it
    tokens: int | None = None  # trained on
    seconds: float | None = None  # of the steps
    evaluations: tuple[tuple[int, float], ...] = ()  # tokens and validation loss
    error: str | None = None  # why it failed
    host: str | None = None  # the machine that trained it


@dataclass(frozen=True)
class Trial:
    """A trial to train. No trial of a grid is hopeless."""

    point: int
    seed: int
    params: dict[str, Any]

    @property
    def key(self) -> tuple[int, int]:
        return self.point, self.seed

    def report(self, loss: float, number: int) -> bool:
        """Whether the run should stop, as hopeless, after its evaluation `number`, counted from 1, with this loss."""
        return False

    def outcome(self, state: State, **known: Any) -> Outcome:
        """What is known of the trial: its state, and other fields of Outcome."""
        return Outcome(self.point, self.seed, self.params, state, **known)


class TrialSource(Protocol):
    """The trials of a sweep: the folders of a grid, or the study of a search."""

    def run(
        self,
        train: Callable[[Trial], Outcome],
        jobs: int,
        stopping: threading.Event,
        after_trial: Callable[[], None],
    ) -> None:
        """Call `train` with each trial that waits, `jobs` at a time, until none waits or runs anywhere.

        train: returns what is known of the trial then, which is waiting again if it was interrupted. stopping: when it
        is set, no other trial starts; an error of the source sets it. after_trial: called after each trial, and from
        time to time while only other workers have trials.
        """

    def outcomes(self) -> list[Outcome]:
        """What is known of each trial, in the order of points and seeds."""

    def retry_failed(self) -> None:
        """Let the trials that failed wait again."""

    def importances(self) -> dict[str, float]:
        """The importance of each setting, the largest one first; empty if it is not known."""
