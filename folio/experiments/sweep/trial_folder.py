"""What the folder of a trial says: which trial it is, on which machine it ran, and whether it is finished or failed."""

import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from folio import UserError
from folio.base.files import read_json, write_json
from folio.checkpoints import run_folder
from folio.experiments.runs import Run
from folio.experiments.sweep.outcome import TrialFailed

LOCK = ".trial.lock"  # held by the process that runs the trial of a grid; the run itself holds .lock
DESCRIPTION = "trial.json"
FAILURE = "failed.json"


def claim(folder: Path, description: dict[str, Any]) -> None:
    """Write into a trial's folder what the trial is, and the machine that runs it. Raises UserError, see `check`."""
    check(folder, description)
    write_json(folder / DESCRIPTION, {**description, "host": socket.gethostname()})


def check(folder: Path, description: dict[str, Any]) -> str | None:
    """Check that a folder holds this trial, or no run. Returns the machine that ran it last; None: none is recorded.

    Raises UserError if it holds another run.
    """
    path = folder / DESCRIPTION
    if not path.exists() and not run_folder.exists(folder):
        return None
    recorded: dict[str, Any] = {}
    with suppress(OSError, ValueError, TypeError):  # it is missing, or damaged
        recorded = dict(read_json(path))
    host = recorded.pop("host", None)
    if recorded != description:
        raise UserError(f"{folder} holds another run; remove it, or choose another --out_dir for the sweep")
    return host


def record_failure(folder: Path, reason: str) -> None:
    """Write into a trial's folder why it failed."""
    write_json(folder / FAILURE, {"error": reason})


def forget_failure(folder: Path) -> None:
    """Let a trial that failed be run again."""
    (folder / FAILURE).unlink(missing_ok=True)


def read_failure(folder: Path) -> str | None:
    """Why the trial failed; None if it did not."""
    path = folder / FAILURE
    try:
        return str(read_json(path)["error"]) if path.exists() else None
    except (OSError, ValueError, LookupError, TypeError):
        return f"{FAILURE} is damaged"


def is_finished(folder: Path) -> bool:
    """Whether the run in this folder has come to its end."""
    return run_folder.exists(folder) and Run.of(folder).status == "finished"


def read_results(run: Run) -> dict[str, Any]:
    """The lowest validation loss of a trial's run and its step; the tokens and seconds of training; all evaluations,
    each the tokens before it and its loss. Raises TrialFailed without an evaluation.
    """
    evaluations = run.trained_evaluations()
    if not evaluations:
        raise TrialFailed("it ended without an evaluation")
    loss, step = min(evaluations)
    tokens_of = {line["step"]: line["tokens"] for line in run.lines}
    return {
        "loss": loss,
        "step": step,
        "tokens": run.lines[-1]["tokens"],
        "seconds": run.measured()["seconds"],
        "evaluations": tuple((tokens_of[at], value) for value, at in evaluations),
    }
