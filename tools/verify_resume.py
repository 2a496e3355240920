"""Verify on this machine that a run killed by SIGKILL resumes bitwise identically.

    python tools/verify_resume.py config/shakespeare_char.py --kills=20 --eval_interval=10 --eval_iters=1
    python tools/verify_resume.py config/shakespeare_char.py --processes=2 --device=cpu    kills one of two processes

Trains once without interruption. Then trains with the same settings, but is killed at random steps and resumed with
--init_from=resume. Compares weights, optimizer, data state and logged metrics bitwise. Prints a certificate, and exits
with 1 on any difference. Every setting of train.py is accepted; on a GPU, add --deterministic=True.
"""

import hashlib
import json
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import numpy as np
import psutil
import torch
from annotated_types import Ge, Le

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError  # noqa: E402
from folio.base import settings  # noqa: E402
from folio.base.settings import PositiveInt  # noqa: E402
from folio.base.workers import child_options  # noqa: E402
from folio.checkpoints import checkpoint, run_folder  # noqa: E402
from folio.checkpoints.schema import RunProgress  # noqa: E402
from folio.data.find_data import find_datasets  # noqa: E402
from folio.training.planning.resolve import versions  # noqa: E402
from train import TrainConfig  # noqa: E402

LOGGED = ("step", "tokens", "loss", "val_loss", "lr", "grad_norm", "skipped")  # all metrics but speed and memory


@dataclass(frozen=True)
class VerifyConfig(TrainConfig):
    # --- verification ---
    kills: PositiveInt = 20  # number of kills of the second run
    processes: PositiveInt = 1  # more than 1: train by torchrun, and kill a random process
    kills_in_write: Annotated[float, Ge(0), Le(1)] = 0.3  # fraction of kills during a checkpoint write
    work_dir: str | None = None  # folder of both runs; None: a temporary folder

    def problems(self) -> list[tuple[str, str]]:
        """Check the settings of training, and refuse a time budget."""
        if self.minutes:
            return [*super().problems(), ("minutes", "both runs must have the same length; give --max_iters")]
        return super().problems()


def main(cfg: VerifyConfig) -> None:
    find_datasets(cfg.dataset, cfg.data_dir)  # prepares missing data before the first run is timed
    with work_folder(cfg) as folder:
        reference, killed = folder / "reference", folder / "killed"
        start_time = time.perf_counter()
        finish(start(cfg, reference), reference)
        print(f"uninterrupted: {time.perf_counter() - start_time:.1f} s")
        kills, in_write, lost = kill_and_resume(cfg, killed)
        finish(start(cfg, killed), killed)
        differences = compare(reference, killed)
        weights = checkpoint.load(killed).model
        digest = hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights))).hexdigest()
        certificate = {
            "settings": {f.name: v for f in fields(TrainConfig) if (v := getattr(cfg, f.name)) != f.default},
            "computed": checkpoint.load(killed).state["parts"][-1]["resolved"],
            "processes": cfg.processes,
            "machine": f"{platform.platform()}, {platform.machine()}, {torch.get_num_threads()} threads",
            "versions": versions(),
            "kills": kills,
            "kills during a checkpoint write": in_write,
            "runs lost": lost,
            "differences": differences or "none: 0 bits of weights, optimizer, data state and logged numbers",
            "sha256 of the weights": digest,
        }
        print(json.dumps(certificate, indent=1, ensure_ascii=False))
        if differences or lost:
            raise SystemExit(1)


@contextmanager
def work_folder(cfg: VerifyConfig) -> Iterator[Path]:
    if cfg.work_dir:
        yield Path(cfg.work_dir)
        return
    folder = Path(tempfile.mkdtemp(prefix="verify-resume-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def start(cfg: VerifyConfig, out_dir: Path) -> subprocess.Popen:
    """Start train.py in `out_dir`, or resume it from its last checkpoint. Its output goes to out_dir.log."""
    values = {f.name: getattr(cfg, f.name) for f in fields(TrainConfig)}
    changed = [f.name for f in fields(TrainConfig) if f.name in cfg.origins or values[f.name] != f.default]
    options = {name: values[name] for name in changed}
    options |= {"out_dir": out_dir, "init_from": "resume" if run_folder.exists(out_dir) else cfg.init_from}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{out_dir}.log", "ab") as log:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={cfg.processes}"]
        command = [sys.executable, *(launcher if cfg.processes > 1 else []), str(ROOT / "train.py"), *arguments]
        return subprocess.Popen(command, stdout=log, stderr=log, **child_options())


def finish(process: subprocess.Popen, out_dir: Path) -> None:
    if process.wait():
        tail = Path(f"{out_dir}.log").read_text(encoding="utf-8", errors="replace")[-2000:]
        raise UserError(f"a run ended with exit code {process.returncode}:\n{tail}")


def kill_and_resume(cfg: VerifyConfig, out_dir: Path) -> tuple[int, int, int]:
    """Kill the run in `out_dir` cfg.kills times. Returns the number of kills, kills during a write, and lost runs.

    Kills wait for progress rather than for a time, so that they do not depend on the speed of the machine: for a
    half-written checkpoint, a line of output during startup, or a step in the next few checkpoint intervals.
    """
    rng = random.Random(cfg.seed)
    in_write = lost = safe_step = 0
    for kill in range(1, cfg.kills + 1):
        leftover = half_written(out_dir)  # checkpoints of processes killed earlier
        n_lines = count_lines(Path(f"{out_dir}.log"))
        process = start(cfg, out_dir)
        if rng.random() < cfg.kills_in_write:
            wait_until(process, lambda leftover=leftover: not leftover >= half_written(out_dir))
            time.sleep(rng.choice((0, rng.uniform(0, 0.03))))  # a random point of the write
        elif rng.random() < 0.2:
            target = n_lines + rng.randint(0, 4)
            wait_until(process, lambda target=target: count_lines(Path(f"{out_dir}.log")) >= target)
        else:
            log = Log(out_dir / "metrics.jsonl")
            target = max(safe_step, 0) + rng.randint(1, 4 * cfg.step_counts.eval_steps)
            wait_until(process, lambda log=log, target=target: log.step() >= target)
        exit_code = process.poll()
        workers = psutil.Process(process.pid).children() if cfg.processes > 1 and exit_code is None else []
        (rng.choice(workers) if workers else process).kill()
        process.wait()  # torchrun ends the other processes
        if exit_code is not None:
            finish(process, out_dir)
            raise UserError(f"the run ended after {kill - 1} kills; use more --max_iters or fewer --kills")
        in_write += not leftover >= half_written(out_dir)
        if run_folder.exists(out_dir) or safe_step:
            try:
                step = checkpoint.load(out_dir).state["step"]
            except UserError:
                step = -1
            lost += step < safe_step
            safe_step = max(step, safe_step)
        print(f"kill {kill} of {cfg.kills}: {in_write} during a write, step {safe_step:,} is safe", flush=True)
    return cfg.kills, in_write, lost


def wait_until(process: subprocess.Popen, condition: Callable[[], bool]) -> None:
    """Wait until the condition holds or the process has ended."""
    while process.poll() is None and not condition():
        time.sleep(0.001)


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


class Log:
    """metrics.jsonl of a process. A run replaces the file when it starts, so the old file's lines do not count."""

    def __init__(self, path: Path):
        self.path = path
        self.initial_inode = self.inode()

    def inode(self) -> int | None:
        return self.path.stat().st_ino if self.path.exists() else None

    def step(self) -> int:
        """Return the last step that the process has logged, or 0."""
        if self.inode() in (None, self.initial_inode):
            return 0
        with open(self.path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - 4096))
            lines = file.read().split(b"\n")[:-1]  # without an incomplete last line
        return json.loads(lines[-1])["step"] if lines else 0


def half_written(out_dir: Path) -> set[Path]:
    return {path for path in out_dir.glob(".step-*.tmp") if ".removed." not in path.name}


def compare(first: Path, second: Path) -> list[str]:
    """Return the differences between two finished runs."""
    differences = []
    for which in ("last", "best"):
        a, b = checkpoint.load(first, which), checkpoint.load(second, which)
        for part, tensors, others in (("weights", a.model, b.model), ("optimizer", a.optimizer(), b.optimizer())):
            if tensors.keys() != others.keys():
                differences.append(f"{which}: the names of the {part} differ")
                continue
            bits = sum(different_bits(tensors[name], others[name]) for name in tensors)
            if bits:
                differences.append(f"{which}: {bits:,} bits of the {part}")
        changed = [key for key in RunProgress.__annotations__ if a.state[key] != b.state[key]]
        differences += [f"{which}: {key}: {a.state[key]} and {b.state[key]}" for key in changed]
    logs = []
    for out_dir in (first, second):
        lines = map(json.loads, (out_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        logs.append([[line[name] for name in LOGGED] for line in lines])
    if logs[0] != logs[1]:
        first_difference = next((a for a, b in zip(*logs, strict=False) if a != b), "their length")
        differences.append(f"metrics.jsonl, first at {first_difference}")
    return differences


def different_bits(a: torch.Tensor, b: torch.Tensor) -> int:
    first, second = (tensor.numpy().reshape(-1).view(np.uint8) for tensor in (a, b))
    return int(np.unpackbits(first ^ second).sum())


if __name__ == "__main__":
    settings.run_script(main, VerifyConfig, needs_output=False)
