"""Run one trial of a sweep: train.py in a subprocess, monitored through its log."""

import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from folio.base.settings import ROOT
from folio.base.workers import child_options
from folio.checkpoints import run_folder
from folio.training.run_log import read_lines

POLL_SECONDS = 0.5
OUTPUT = "output.txt"  # output of train.py, in the trial's folder
Action = Literal["train", "stop", "kill"]  # stop: at a checkpoint


def train_command(folder: Path, arguments: list[str], code: Path) -> list[str]:
    """Return the command that starts a trial in `folder`, or resumes it from its last checkpoint. code: Folio's."""
    script = [sys.executable, str(code / "train.py")]
    if run_folder.exists(folder):
        data_dir = [argument for argument in arguments if argument.startswith("--data_dir=")]
        return [*script, "--init_from=resume", *data_dir, f"--out_dir={folder}"]
    return [*script, *arguments, f"--out_dir={folder}"]


def run_training(
    folder: Path,
    arguments: list[str],
    environment: Mapping[str, str],
    watch: Callable[[int, list[tuple[int, float]]], Action],
    code: Path = ROOT,
) -> str | None:
    """Train in `folder`, an existing folder that no other process is using. Returns the reason of a failure, or None.

    watch: called regularly with the last logged step and all evaluations, (step, validation loss). Returns the next
    action. code: the folder of train.py.
    """
    with open(folder / OUTPUT, "ab") as output:
        start = output.tell()  # after the output of earlier attempts
        process = subprocess.Popen(
            train_command(folder, arguments, code),
            stdout=output,
            stderr=subprocess.STDOUT,
            **child_options(**environment),
            start_new_session=True,  # Ctrl-C must reach only the sweep, which then stops its trials
        )
        stopping = False
        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
                action = watch(*read_progress(folder))
                if action == "kill":
                    process.kill()
                elif action == "stop" and not stopping:  # a second signal would prevent saving
                    process.terminate()
                    stopping = True
            return failure_reason(process.returncode, (folder / OUTPUT).read_bytes()[start:])
        finally:  # after an exception, the process may be running
            if process.poll() is None and not stopping:
                process.terminate()
            process.wait()


def read_progress(folder: Path) -> tuple[int, list[tuple[int, float]]]:
    """Return the last logged step, and the evaluations after step 0: (step, validation loss)."""
    lines, last = read_lines(folder / "metrics.jsonl")
    evaluations = [(line["step"], line["val_loss"]) for line in lines if line["step"] and line.get("val_loss")]
    return last or 0, evaluations


def failure_reason(code: int, output: bytes) -> str | None:
    """Return the signal that killed a run, its last error message, or its last line. None if it succeeded."""
    if code == 0:
        return None
    if code < 0:
        name = signal.Signals(-code).name
        return f"killed by {name}" + (", possibly because memory ran out" if name == "SIGKILL" else "")
    lines = [line.strip() for line in output.decode("utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["no output"])[-1]
