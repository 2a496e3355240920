"""The queue of a grid's trials: each trial's folder holds its state, and a lock that the process running it holds.

Processes and machines that share the sweep's folder share its trials. If a process is killed, the operating system
releases its locks, and another process resumes its trials from their checkpoints.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np

from folio import UserError
from folio.experiments.runs import Run
from folio.experiments.sweep.definition import Sweep
from folio.experiments.sweep.outcome import Outcome, Trial, TrialFailed, TrialSource
from folio.experiments.sweep.space import Values, grid
from folio.experiments.sweep.sweep_folder import report_write_errors
from folio.experiments.sweep.trial_folder import (
    TrialLocks,
    check,
    claim,
    is_finished,
    read_results,
)


class FolderQueue(TrialSource):
    """The trials of a grid, ordered by seed and then by combination."""

    def __init__(self, sweep: Sweep):
        self.sweep, self.locks = sweep, TrialLocks(sweep)
        points = list(enumerate(grid(sweep.space)))
        self.trials = [Trial(point, seed, params) for seed in sweep.seeds for point, params in points]
        self.finished: dict[tuple[int, int], Outcome] = {}  # by point and seed; final

    def folder(self, trial: Trial) -> Path:
        return self.sweep.folder(trial.point, trial.seed)

    # --- state ---

    def outcomes(self) -> list[Outcome]:
        """Return the outcome of each trial, sorted by point and seed."""
        return sorted(map(self.outcome, self.trials), key=lambda outcome: outcome.point)

    def outcome(self, trial: Trial) -> Outcome:
        """Return the current outcome of a trial. It is running while a thread or process has taken it."""
        if trial.key in self.finished:
            return self.finished[trial.key]
        is_running = self.locks.is_taken(trial.key)  # before reading the folder
        recorded = self.recorded(trial)
        return trial.outcome("running", host=recorded.host) if is_running else recorded

    def recorded(self, trial: Trial) -> Outcome:
        """Return the recorded outcome of a trial that no process runs: waiting, failed, or finished."""
        folder = self.folder(trial)
        try:
            host, failure = check(folder, self.sweep.description(trial))
            if failure:
                return trial.outcome("failed", error=failure, host=host)
            if not is_finished(folder):
                return trial.outcome("waiting", host=host)
            self.finished[trial.key] = trial.outcome("finished", **read_results(Run.of(folder)), host=host)
            return self.finished[trial.key]
        except (TrialFailed, UserError) as error:
            return trial.outcome("failed", error=str(error))

    def importances(self) -> dict[str, float]:
        """Return each setting's share of the variance of the mean losses; empty if a run is not finished."""
        return grid_importances(self.sweep.space, self.sweep.seeds, self.outcomes())

    # --- running ---

    def max_runs(self) -> int:
        return len(self.trials)

    def retry_failed(self) -> None:
        """Requeue the failed trials."""
        with report_write_errors(self.sweep.out_dir):
            for trial in self.trials:
                folder, description = self.folder(trial), self.sweep.description(trial)
                with suppress(UserError):  # the folder contains another run
                    if check(folder, description)[1]:
                        claim(folder, description)

    def run_next(self, train: Callable[[Trial], Outcome]) -> bool:
        """Call `train` with the next waiting trial. Returns False if other threads or processes have taken them all."""
        return any(self.try_to_run(trial, train) for trial in self.remaining())

    def remaining(self) -> list[Trial]:
        """Return the waiting trials, followed by the running ones."""
        states = {trial.key: self.outcome(trial).state for trial in self.trials}
        return [trial for state in ("waiting", "running") for trial in self.trials if states[trial.key] == state]

    def try_to_run(self, trial: Trial, train: Callable[[Trial], Outcome]) -> bool:
        """Run a trial if it is waiting. Returns False if another thread or process has taken it."""
        with ExitStack() as stack:
            if not self.locks.take(trial.key, stack) or self.recorded(trial).state != "waiting":
                return False
            outcome = train(trial)
            if outcome.state == "finished":
                self.finished[trial.key] = outcome
            if outcome.state == "failed":
                with report_write_errors(self.sweep.out_dir):
                    claim(self.folder(trial), self.sweep.description(trial), outcome.error)
            return True


def grid_importances(space: Sequence[Values], seeds: Sequence[int], outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return each setting's share of the variance of the mean losses, by an analysis of variance without replication.

    The share is the main effect: the variance of the means over all other settings. Interactions make up the rest.
    Empty if there is only one setting, a run of the grid is not finished, or all means are equal.
    """
    losses = {(outcome.point, outcome.seed): outcome.loss for outcome in outcomes if outcome.state == "finished"}
    shape = [len(dimension.values) for dimension in space]
    runs = [(point, seed) for point in range(math.prod(shape)) for seed in seeds]
    if len(space) < 2 or not losses.keys() >= set(runs):
        return {}
    means = np.array([losses[run] for run in runs]).reshape(*shape, len(seeds)).mean(axis=-1)  # one axis per setting
    if np.ptp(means) == 0:
        return {}
    effects = [means.mean(axis=tuple({*range(len(space))} - {axis})) for axis in range(len(space))]
    shares = {d.name: float(effect.var() / means.var()) for d, effect in zip(space, effects, strict=True)}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))
