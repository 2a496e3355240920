"""The parts of tools/check_gpu.py, each of which runs in its own process with a time limit."""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from folio.base.files import read_json
from folio.base.settings import ROOT, run_script
from folio.base.workers import child_options
from lab.gpu import correctness, decoding, runs, speed
from lab.gpu.part import Part
from lab.gpu.report import Report


class PartSpec(NamedTuple):
    title: str
    function: Callable[[Part], None]
    seconds: int  # time limit


PARTS = {
    1: PartSpec("hardware", speed.check_hardware, 60),
    2: PartSpec("correctness", correctness.check_correctness, 240),
    3: PartSpec("control", runs.check_control, 300),
    4: PartSpec("decoding", decoding.check_tokens, 150),
    5: PartSpec("training speed", speed.check_training_speed, 360),
    6: PartSpec("decoding speed", decoding.check_speed, 60),
    7: PartSpec("processes", runs.check_processes, 300),
    8: PartSpec("end to end", runs.check_end_to_end, 240),
}


def run_process(number: int, device: torch.device, peer: str | None, report: Report) -> None:
    """Run a part in a new process, which is killed at the time limit, and copy its record into the report.

    After Ctrl-C, the report has the rows of the interrupted part. peer: folder of a nanoGPT checkout.
    """
    spec, seconds = PARTS[number], PARTS[number].seconds * (2 if peer and number == 5 else 1)
    with tempfile.TemporaryDirectory(prefix="check-gpu-", ignore_cleanup_errors=True) as folder:
        arguments = [str(number), str(device), folder, *([str(Path(peer).resolve())] if peer else [])]
        command = [sys.executable, "-m", "lab.gpu.processes", *arguments]
        process = subprocess.Popen(command, cwd=ROOT, **child_options())
        part = Part(spec.title, seconds, device, Path(folder), partial(report.save, number))
        failure = "interrupted"
        try:
            process.wait(seconds)
            failure = f"the process ended with exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            failure = f"stopped at its time limit of {seconds} s"
        finally:
            kill(process)
            if (path := Path(folder, "gpu-report.json")).is_file():
                part.record = read_json(path)["parts"].get(str(number), part.record)
            if part.record["status"] == "running":
                part.check(False, failure)
                part.update("", "failed")
            report.save(number, part.record)


def run_part(arguments: list[str]) -> None:
    """Run a single part in this process, and write a report on it. arguments: number, device, folder, and peer."""
    name, device_name, folder, *peer = arguments
    number, device = int(name), torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    report, spec = Report(Path(folder), {}), PARTS[number]
    part = Part(spec.title, spec.seconds, device, report.folder, partial(report.save, number))
    part.run(partial(spec.function, peer=peer[0] if peer else None) if number == 5 else spec.function)


def kill(process: subprocess.Popen) -> None:
    """Kill a process and those that it started, unless it has ended."""
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
        process.wait()


if __name__ == "__main__":
    run_script(run_part)
