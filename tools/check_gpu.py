"""Check everything about a GPU that cannot be checked without one, in at most half an hour.

    python tools/check_gpu.py                      writes gpu-report.json and gpu-report.md
    python tools/check_gpu.py --parts=2,3          only these parts
    python tools/check_gpu.py --peer=../nanoGPT    also nanoGPT's training speed
    python tools/check_gpu.py --device=cpu         a rehearsal with small sizes, in about a minute

1 hardware     versions, rates of matmuls and copies     5 training speed  GPT-2 124M: MFU, memory, kernels, nanoGPT
2 correctness  logits, losses, gradients, optimizers     6 decoding speed  against the memory bandwidth
3 control      losses, samples, graphs, kills, waiting   7 processes       DDP and FSDP on all GPUs
4 decoding     tokens of CUDA graphs and of threads      8 end to end      the README's two commands

Each part runs in its own process with a time limit, and the report is written after each part. The exit code is the
number of failed parts. A part that does not apply is skipped, with a reason.
"""

import importlib.metadata
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError  # noqa: E402
from folio.base import settings  # noqa: E402
from folio.base.files import read_json, write_json  # noqa: E402
from folio.base.settings import NonEmptyStr, Settings, comma_separated  # noqa: E402
from folio.base.workers import child_options  # noqa: E402
from folio.machine.memory import format_bytes  # noqa: E402
from folio.machine.runtime import DEVICES  # noqa: E402
from lab.bench.baselines import is_nanogpt  # noqa: E402
from lab.bench.timing import unknown_names  # noqa: E402
from lab.gpu import correctness, decoding, runs, speed  # noqa: E402
from lab.gpu.part import Part, markdown  # noqa: E402


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


@dataclass(frozen=True)
class CheckConfig(Settings):
    # --- what to check ---
    parts: str = "1,2,3,4,5,6,7,8"  # comma-separated
    device: str = "auto"  # "cuda", "cuda:1", "mps", "cpu" (a rehearsal); auto: the first available of cuda, mps
    peer: str | None = None  # folder of a nanoGPT checkout to compare with
    # --- report ---
    out_dir: NonEmptyStr = "."  # folder of gpu-report.json and gpu-report.md

    def problems(self) -> list[tuple[str, str]]:
        """Require known parts, an available device, and a checkout of nanoGPT if there is a peer."""
        problems = unknown_names("parts", self.parts, [*map(str, PARTS)])
        if not self.numbers and not problems:
            problems.append(("parts", "give at least one number, such as --parts=1"))
        if self.device.partition(":")[0] not in ("auto", *DEVICES):
            problems.append(("device", f"use auto, {', '.join(DEVICES)}"))
        elif not self.has_device:
            problems.append(("device", "torch finds no such GPU; for a rehearsal, use --device=cpu"))
        if self.peer and not is_nanogpt(Path(self.peer)):
            problems.append(("peer", "it is not a checkout of nanoGPT; give its path"))
        return problems

    @property
    def numbers(self) -> list[int]:
        """The numbers of the parts, in order."""
        return sorted({int(number) for number in comma_separated(self.parts) if number.isdecimal()})

    @property
    def torch_device(self) -> torch.device:
        """Raises RuntimeError if the name is not valid."""
        name = self.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "mps"
        return torch.device("cuda:0" if name == "cuda" else name)

    @property
    def has_device(self) -> bool:
        try:
            device = self.torch_device
        except RuntimeError:  # such as cuda:first
            return False
        if device.type == "cuda":
            return torch.cuda.is_available() and device.index < torch.cuda.device_count()
        return device.type == "cpu" or torch.backends.mps.is_available()


def main(cfg: CheckConfig) -> None:
    report = Report(Path(cfg.out_dir), describe_machine(cfg.torch_device))
    for number in cfg.numbers:
        print(f"\n## {number} {PARTS[number].title}", flush=True)
        run_process(number, cfg, report)
        part = report.parts[str(number)]
        print(f"{part['status']} after {part['seconds']:.0f} s", flush=True)
    failed = [number for number in cfg.numbers if report.parts[str(number)]["status"] == "failed"]
    print(f"\n{len(failed)} of {len(cfg.numbers)} parts failed; see {report.folder / 'gpu-report.md'}")
    if failed:
        raise SystemExit(len(failed))


def run_process(number: int, cfg: CheckConfig, report: "Report") -> None:
    """Run a part in a new process, which is killed at the time limit, and copy its record into the report.

    After Ctrl-C, the report has the rows of the interrupted part.
    """
    spec, seconds = PARTS[number], PARTS[number].seconds * (2 if cfg.peer and number == 5 else 1)
    with tempfile.TemporaryDirectory(prefix="check-gpu-", ignore_cleanup_errors=True) as folder:
        code = "from tools import check_gpu; check_gpu.settings.run_script(check_gpu.run_part, check_gpu.CheckConfig)"
        options = [f"--parts={number}", f"--device={cfg.torch_device}", f"--out_dir={folder}"]
        options += [f"--peer={Path(cfg.peer).resolve()}"] if cfg.peer else []
        process = subprocess.Popen([sys.executable, "-c", code, *options], cwd=ROOT, **child_options())
        part = Part(spec.title, seconds, cfg.torch_device, Path(folder), partial(report.save, number))
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


def run_part(cfg: CheckConfig) -> None:
    """Run a single part in this process, and write a report on it."""
    (number,), device = cfg.numbers, cfg.torch_device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    report, spec = Report(Path(cfg.out_dir), {}), PARTS[number]
    part = Part(spec.title, spec.seconds, device, report.folder, partial(report.save, number))
    part.run(partial(spec.function, peer=cfg.peer) if number == 5 else spec.function)


def kill(process: subprocess.Popen) -> None:
    """Kill a process and those that it started, unless it has ended."""
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
        process.wait()


# --- report -----------------------------------------------------------------------------------------------------------


class Report:
    """The report on a machine. Keeps other parts of an earlier report on the same machine and commit."""

    def __init__(self, folder: Path, machine: dict[str, str]):
        self.folder, self.machine, self.parts = folder, machine, {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise UserError(f"out_dir={folder}: it is not a folder; give another one") from None
        path = folder / "gpu-report.json"
        if not path.is_file():
            return
        try:
            earlier = read_json(path)
            self.parts = earlier["parts"] if earlier["machine"] == machine else {}
            self.lines()
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is damaged ({error}); remove it, or give another --out_dir") from None

    def save(self, number: int, record: dict[str, Any]) -> None:
        """Write the report with the record of a part."""
        self.parts = dict(sorted({**self.parts, str(number): record}.items()))
        write_json(self.folder / "gpu-report.json", {"machine": self.machine, "parts": self.parts})
        (self.folder / "gpu-report.md").write_text("\n".join(self.lines()), encoding="utf-8")

    def lines(self) -> list[str]:
        """The report in Markdown."""
        lines = ["# GPU report", "", *markdown(("", ""), self.machine.items())]
        for name, part in self.parts.items():
            lines += [f"## {name} {part['title']}: {part['status']} after {part['seconds']:.0f} s", ""]
            for table in part["tables"]:
                lines += markdown(table["heads"], table["rows"])
            lines += [f"- failed: {failure}" for failure in part["failures"]]
            lines += [f"- {note}" for note in part["notes"]] + [""]
        return lines


def describe_machine(device: torch.device) -> dict[str, str]:
    """The device, its driver, and the versions of everything that computes on it."""
    facts = {"device": f"{device}, {platform.processor() or platform.machine()}"}
    if device.type == "cuda":
        properties, fields = torch.cuda.get_device_properties(device), "driver_version,pcie.link.gen.max,power.limit"
        facts["device"] = f"{torch.cuda.device_count()} x {properties.name}, sm_{properties.major}{properties.minor}"
        facts["memory"] = format_bytes(properties.total_memory)
        query = ("nvidia-smi", f"--id=GPU-{properties.uuid}", f"--query-gpu={fields}", "--format=csv,noheader")
        facts["driver, PCIe generation, power limit"] = first_line(*query)
        facts["CUDA, cuDNN"] = f"{torch.version.cuda}, {torch.backends.cudnn.version()}"
        if torch.distributed.is_nccl_available():
            facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    installed = {package.name for package in importlib.metadata.distributions()}
    facts["triton"] = importlib.metadata.version("triton") if "triton" in installed else "not installed"
    facts["torch, Python"] = f"{torch.__version__}, {platform.python_version()}"
    facts["system"] = platform.platform()
    facts["commit"] = first_line("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12")
    return facts


def first_line(*command: str) -> str:
    """The first line that a command prints; "unknown" if it fails."""
    try:
        result = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return result.stdout.partition("\n")[0].strip() if result.returncode == 0 else "unknown"


if __name__ == "__main__":
    settings.run_script(main, CheckConfig, needs_output=False)
