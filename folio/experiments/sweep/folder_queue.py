"""The queue of a grid's trials: each trial's folder holds its state, and a lock that the process running it holds.

Processes and machines that share the sweep's folder share its trials. If a process is killed, the operating system
releases its locks, and another process resumes its trials from their checkpoints.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from folio import UserError
from folio.experiments.runs import Run
from folio.experiments.sweep.definition import Sweep
from folio.experiments.sweep.importance import grid_importances
from folio.experiments.sweep.outcome import Outcome, Trial, TrialFailed, TrialSource
from folio.experiments.sweep.space import grid
from folio.experiments.sweep.sweep_folder import report_write_errors
from folio.experiments.sweep.trial_folder import (
    TrialLocks,
    check,
    clear_failure,
    is_finished,
    read_failure,
    read_results,
    record_failure,
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
            host = check(folder, self.sweep.description(trial))
            if error := read_failure(folder):
                return trial.outcome("failed", error=error, host=host)
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

    def retry_failed(self) -> None:
        """Requeue the failed trials."""
        with report_write_errors(self.sweep.out_dir):
            for trial in self.trials:
                clear_failure(self.folder(trial))

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
                    record_failure(self.folder(trial), outcome.error)
            return True
