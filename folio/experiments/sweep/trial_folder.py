"""The folder of a trial: its lock, its description, the machine that ran it, and whether it finished or failed."""

import socket
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from folio import UserError
from folio.base.files import is_locked, locked, read_json, write_json
from folio.checkpoints import run_folder
from folio.experiments.runs import Run
from folio.experiments.sweep.definition import Sweep
from folio.experiments.sweep.outcome import TrialFailed
from folio.experiments.sweep.sweep_folder import report_write_errors

LOCK = ".trial.lock"  # held by the sweep process that runs the trial; train.py holds .lock
DESCRIPTION = "trial.json"


class TrialLocks:
    """The locks of a sweep's trials, by point and seed, each held by the process that runs the trial.

    If a process is killed, the operating system releases its locks.
    """

    def __init__(self, sweep: Sweep):
        self.sweep = sweep
        self.taken: set[tuple[int, int]] = set()  # by threads of this process
        self.lock = threading.Lock()  # protects `taken`

    def is_taken(self, key: tuple[int, int]) -> bool:
        """Return whether a thread or process holds the lock of a trial."""
        return key in self.taken or bool(is_locked(self.sweep.folder(*key) / LOCK))

    def take(self, key: tuple[int, int], stack: ExitStack) -> bool:
        """Acquire the lock of a trial until the stack closes. Returns False if another thread or process holds it."""
        with self.lock:  # needed for threads on a file system without locks
            if key in self.taken:
                return False
            self.taken.add(key)
        stack.callback(self.taken.discard, key)
        with report_write_errors(self.sweep.out_dir):
            try:
                stack.enter_context(locked(self.sweep.folder(*key) / LOCK, "another process runs this trial"))
            except UserError:
                return False
        return True


def claim(folder: Path, description: dict[str, Any], failure: str | None = None) -> None:
    """Write a trial's description, this machine's name, and the reason of a failure to its folder.

    Raises UserError as `check`.
    """
    check(folder, description)
    write_json(folder / DESCRIPTION, {**description, "host": socket.gethostname(), "failure": failure})


def check(folder: Path, description: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return the machine that last ran this trial, if any, and the reason if it failed there.

    Raises UserError if the folder contains another run.
    """
    path = folder / DESCRIPTION
    if not path.exists() and not run_folder.exists(folder):
        return None, None
    recorded: dict[str, Any] = {}
    with suppress(OSError, ValueError, TypeError):  # it is missing, or damaged
        recorded = dict(read_json(path))
    host, failure = recorded.pop("host", None), recorded.pop("failure", None)
    if recorded != description:
        raise UserError(f"{folder} contains another run; remove it, or choose another --out_dir for the sweep")
    return host, failure


def is_finished(folder: Path) -> bool:
    """Return whether the run in this folder is finished."""
    return run_folder.exists(folder) and Run.of(folder).status == "finished"


def read_results(run: Run) -> dict[str, Any]:
    """Return the results of a trial's run as fields of Outcome. Raises TrialFailed without an evaluation."""
    evaluations = run.trained_evaluations()
    if not evaluations:
        raise TrialFailed("it ended without an evaluation")
    loss, step = min(evaluations)
    tokens_by_step = {line["step"]: line["tokens"] for line in run.lines}
    return {
        "loss": loss,
        "text": run.evaluated_text,
        "step": step,
        "tokens": run.lines[-1]["tokens"],
        "seconds": run.totals()["seconds"],
        "evaluations": tuple((tokens_by_step[step], loss) for loss, step in evaluations),
    }
