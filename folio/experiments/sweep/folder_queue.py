"""The queue of a grid's trials: each trial's folder holds its state, and a lock that the process running it holds.

Processes and machines that share the sweep's folder share its trials. If a process is killed, the operating system
releases its locks, and another process resumes its trials from their checkpoints.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from folio import UserError
from folio.base.files import is_locked, locked
from folio.experiments.runs import Run
from folio.experiments.sweep.definition import Sweep
from folio.experiments.sweep.importance import grid_importances
from folio.experiments.sweep.outcome import Outcome, Trial, TrialFailed
from folio.experiments.sweep.space import grid
from folio.experiments.sweep.sweep_folder import report_write_errors
from folio.experiments.sweep.trial_folder import (
    LOCK,
    check,
    clear_failure,
    is_finished,
    read_failure,
    read_results,
    record_failure,
)

POLL_SECONDS = 1.0


class FolderQueue:
    """The trials of a grid, ordered by seed and then by combination."""

    def __init__(self, sweep: Sweep, poll_seconds: float = POLL_SECONDS):
        self.sweep, self.poll_seconds = sweep, poll_seconds
        points = list(enumerate(grid(sweep.space)))
        self.trials = [Trial(point, seed, params) for seed in sweep.seeds for point, params in points]
        self.finished: dict[tuple[int, int], Outcome] = {}  # by point and seed; final
        self.taken: set[tuple[int, int]] = set()  # trials that threads of this process run
        self.lock = threading.Lock()  # protects `taken`

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
        is_running = trial.key in self.taken or is_locked(self.folder(trial) / LOCK)  # before reading the folder
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

    def run(
        self,
        train: Callable[[Trial], Outcome],
        jobs: int,
        stopping: threading.Event,
        after_trial: Callable[[], None],
    ) -> None:
        """Call `train` with each waiting trial, `jobs` at once, until no trial waits, or runs in any process."""

        def work() -> None:
            try:
                while not stopping.is_set() and (remaining := self.remaining()):
                    if not any(self.try_to_run(trial, train) for trial in remaining):
                        stopping.wait(self.poll_seconds)  # other threads or processes have taken them
                    after_trial()
            except BaseException:
                stopping.set()  # for the other threads
                raise

        with ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(work) for _ in range(jobs - 1)]
            work()
            for future in futures:
                future.result()

    def remaining(self) -> list[Trial]:
        """Return the waiting trials, followed by the running ones."""
        states = {trial.key: self.outcome(trial).state for trial in self.trials}
        return [trial for state in ("waiting", "running") for trial in self.trials if states[trial.key] == state]

    def try_to_run(self, trial: Trial, train: Callable[[Trial], Outcome]) -> bool:
        """Run a trial if it is waiting. Returns False if another thread or process has taken it."""
        with ExitStack() as stack:
            if not self.take(trial, stack) or self.recorded(trial).state != "waiting":
                return False
            outcome = train(trial)
            if outcome.state == "finished":
                self.finished[trial.key] = outcome
            if outcome.state == "failed":
                with report_write_errors(self.sweep.out_dir):
                    record_failure(self.folder(trial), outcome.error)
            return True

    def take(self, trial: Trial, stack: ExitStack) -> bool:
        """Acquire the lock of a trial until the stack closes. Returns False if another thread or process holds it."""
        with self.lock:  # needed for threads on a file system without locks
            if trial.key in self.taken:
                return False
            self.taken.add(trial.key)
        stack.callback(self.taken.discard, trial.key)
        with report_write_errors(self.sweep.out_dir):
            try:
                stack.enter_context(locked(self.folder(trial) / LOCK, "another process runs this trial"))
            except UserError:
                return False
        return True
