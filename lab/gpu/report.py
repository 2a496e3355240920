"""The report of tools/check_gpu.py on a machine: gpu-report.json and gpu-report.md."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from folio import UserError
from folio.base.files import read_json, write_json
from folio.base.settings import ROOT
from folio.machine.memory import format_bytes
from lab.gpu.part import markdown


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
