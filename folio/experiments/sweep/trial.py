"""One trial of a sweep: train.py in a process of its own, followed by what it writes."""

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
OUTPUT = "output.txt"  # what train.py prints, in the trial's folder
Action = Literal["train", "stop", "kill"]  # what a run should do


def train_command(folder: Path, arguments: list[str]) -> list[str]:
    """The command of a trial in this folder: new, or resumed from its last checkpoint."""
    script = [sys.executable, str(ROOT / "train.py")]
    if run_folder.exists(folder):
        moved = [argument for argument in arguments if argument.startswith("--data_dir=")]
        return [*script, "--init_from=resume", *moved, f"--out_dir={folder}"]
    return [*script, *arguments, f"--out_dir={folder}"]


def run_training(
    folder: Path,
    arguments: list[str],
    environment: Mapping[str, str],
    watch: Callable[[int, list[tuple[int, float]]], Action],
) -> str | None:
    """Train in `folder`, which exists and which no other process is using. Returns why it failed, or None.

    watch: called with the last logged step and all evaluations, each a step and a validation loss, while it trains.
    It returns what the run should do. One that should stop saves first.
    """
    with open(folder / OUTPUT, "ab") as output:
        began = output.tell()  # after what an earlier attempt printed
        process = subprocess.Popen(
            train_command(folder, arguments),
            stdout=output,
            stderr=subprocess.STDOUT,
            **child_options(**environment),
            start_new_session=True,  # Ctrl-C is for the sweep, which then stops its trials
        )
        stopping = False
        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
                action = watch(*read_progress(folder))
                if action == "kill":
                    process.kill()
                elif action == "stop" and not stopping:  # a second signal would end it without saving
                    process.terminate()
                    stopping = True
            return reason_of_failure(process.returncode, (folder / OUTPUT).read_bytes()[began:])
        finally:  # by an exception, if it has not ended
            if process.poll() is None and not stopping:
                process.terminate()
            process.wait()


def read_progress(folder: Path) -> tuple[int, list[tuple[int, float]]]:
    """The last logged step, and the evaluations of a trained model: (step, validation loss)."""
    lines, last = read_lines(folder / "metrics.jsonl")
    evaluations = [(line["step"], line["val_loss"]) for line in lines if line["step"] and line.get("val_loss")]
    return last or 0, evaluations


def reason_of_failure(code: int, output: bytes) -> str | None:
    """The signal that killed a run, or the error that it printed last, or else its last line. None if it succeeded."""
    if code == 0:
        return None
    if code < 0:
        name = signal.Signals(-code).name
        return f"killed by {name}" + (", as the system does when memory runs out" if name == "SIGKILL" else "")
    lines = [line.strip() for line in output.decode("utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it printed nothing"])[-1]
