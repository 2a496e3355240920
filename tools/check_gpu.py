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

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio.base.settings import NonEmptyStr, Settings, comma_separated, run_script  # noqa: E402
from folio.machine.runtime import DEVICES  # noqa: E402
from lab.bench.baselines import is_nanogpt  # noqa: E402
from lab.bench.timing import unknown_names  # noqa: E402
from lab.gpu.processes import PARTS, run_process  # noqa: E402
from lab.gpu.report import Report, describe_machine  # noqa: E402


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
        run_process(number, cfg.torch_device, cfg.peer, report)
        part = report.parts[str(number)]
        print(f"{part['status']} after {part['seconds']:.0f} s", flush=True)
    failed = [number for number in cfg.numbers if report.parts[str(number)]["status"] == "failed"]
    print(f"\n{len(failed)} of {len(cfg.numbers)} parts failed; see {report.folder / 'gpu-report.md'}")
    if failed:
        raise SystemExit(len(failed))


if __name__ == "__main__":
    run_script(main, CheckConfig, needs_output=False)
