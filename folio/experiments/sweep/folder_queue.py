"""The trials of a grid: their folders say what is known of each, and a lock in each folder which process runs it.

Processes and machines that share the folder of the sweep share its trials. If one is killed, the operating system
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
from folio.experiments.sweep.sweep_folder import writing
from folio.experiments.sweep.trial_folder import (
    LOCK,
    check,
    forget_failure,
    is_finished,
    read_failure,
    read_results,
    record_failure,
)

POLL_SECONDS = 1.0


class FolderQueue:
    """The trials of a grid, all combinations with the first seed before those with the second one."""

    def __init__(self, sweep: Sweep):
        self.sweep = sweep
        points = list(enumerate(grid(sweep.space)))
        self.trials = [Trial(point, seed, params) for seed in sweep.seeds for point, params in points]
        self.finished: dict[tuple[int, int], Outcome] = {}  # by point and seed; they do not change any more
        self.taken: set[tuple[int, int]] = set()  # by threads of this process
        self.lock = threading.Lock()  # of `taken`

    def folder(self, trial: Trial) -> Path:
        return self.sweep.folder(trial.point, trial.seed)

    # --- what is known of them ---

    def outcomes(self) -> list[Outcome]:
        """What is known of each trial, in the order of points and seeds."""
        return sorted(map(self.outcome, self.trials), key=lambda outcome: outcome.point)

    def outcome(self, trial: Trial) -> Outcome:
        """What is known of a trial now; it is running while a thread or a process has taken it."""
        if trial.key in self.finished:
            return self.finished[trial.key]
        is_running = trial.key in self.taken or is_locked(self.folder(trial) / LOCK)  # before what is recorded
        recorded = self.recorded(trial)
        return trial.outcome("running", host=recorded.host) if is_running else recorded

    def recorded(self, trial: Trial) -> Outcome:
        """What the folder says of a trial that no process runs: it is waiting, failed, or finished."""
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
        """The share of each setting in the variance of the mean losses; empty if a run is not finished."""
        return grid_importances(self.sweep.space, self.sweep.seeds, self.outcomes())

    # --- running them ---

    def retry_failed(self) -> None:
        """Let the trials that failed wait again."""
        with writing(self.sweep.out_dir):
            for trial in self.trials:
                forget_failure(self.folder(trial))

    def run(
        self,
        train: Callable[[Trial], Outcome],
        jobs: int,
        stopping: threading.Event,
        after_trial: Callable[[], None],
    ) -> None:
        """Call `train` with each trial that waits, `jobs` at a time, until none waits or runs anywhere."""

        def work() -> None:
            try:
                while not stopping.is_set() and (remaining := self.remaining()):
                    if not any(self.try_to_run(trial, train) for trial in remaining):
                        stopping.wait(POLL_SECONDS)  # other threads or processes have taken them
                    after_trial()
            except BaseException:
                stopping.set()  # for the other threads
                raise

        with ThreadPoolExecutor(jobs) as pool:
            others = [pool.submit(work) for _ in range(jobs - 1)]
            work()
            for other in others:
                other.result()

    def remaining(self) -> list[Trial]:
        """The trials that wait or run, those that wait first."""
        states = {trial.key: self.outcome(trial).state for trial in self.trials}
        return [trial for state in ("waiting", "running") for trial in self.trials if states[trial.key] == state]

    def try_to_run(self, trial: Trial, train: Callable[[Trial], Outcome]) -> bool:
        """Run a trial if it waits. Returns False if another thread or process has taken it."""
        with ExitStack() as stack:
            if not self.take(trial, stack) or self.recorded(trial).state != "waiting":
                return False
            outcome = train(trial)
            if outcome.state == "finished":
                self.finished[trial.key] = outcome
            if outcome.state == "failed":
                with writing(self.sweep.out_dir):
                    record_failure(self.folder(trial), outcome.error)
            return True

    def take(self, trial: Trial, stack: ExitStack) -> bool:
        """Hold the lock of a trial until the stack closes. Returns False if another thread or process holds it."""
        with self.lock:  # on a file system without locks, threads still need one
            if trial.key in self.taken:
                return False
            self.taken.add(trial.key)
        stack.callback(self.taken.discard, trial.key)
        with writing(self.sweep.out_dir):
            try:
                stack.enter_context(locked(self.folder(trial) / LOCK, "another process runs this trial"))
            except UserError:
                return False
        return True
