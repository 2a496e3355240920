"""Runs of train.py that are killed at random moments and resumed, and the differences between two runs, bitwise."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import psutil
import torch

from folio import UserError
from folio.base.settings import ROOT
from folio.base.workers import child_options
from folio.checkpoints import checkpoint, run_folder
from folio.checkpoints.schema import RunProgress
from train import TrainConfig

LOGGED = ("step", "tokens", "loss", "val_loss", "lr", "grad_norm", "skipped")  # all metrics but speed and memory


def start(cfg: TrainConfig, out_dir: Path, processes: int = 1) -> subprocess.Popen:
    """Start train.py in `out_dir`, or resume it from its last checkpoint. Its output goes to out_dir.log.

    processes: more than 1: started by torchrun.
    """
    values = {f.name: getattr(cfg, f.name) for f in fields(TrainConfig)}
    changed = [f.name for f in fields(TrainConfig) if f.name in cfg.origins or values[f.name] != f.default]
    options = {name: values[name] for name in changed}
    options |= {"out_dir": out_dir, "init_from": "resume" if run_folder.exists(out_dir) else cfg.init_from}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{out_dir}.log", "ab") as log:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = [sys.executable, *(launcher if processes > 1 else []), str(ROOT / "train.py"), *arguments]
        return subprocess.Popen(command, stdout=log, stderr=log, **child_options())


def finish(process: subprocess.Popen, out_dir: Path) -> None:
    if process.wait():
        tail = Path(f"{out_dir}.log").read_text(encoding="utf-8", errors="replace")[-2000:]
        raise UserError(f"a run ended with exit code {process.returncode}:\n{tail}")


def kill_and_resume(
    cfg: TrainConfig, out_dir: Path, kills: int, fraction_in_write: float, processes: int = 1
) -> tuple[int, int]:
    """Start and kill the run in `out_dir` this often. Returns the numbers of kills during a write and of lost runs.

    Kills wait for progress rather than for a time, so that they do not depend on the speed of the machine: for a
    half-written checkpoint, a line of output during startup, or a step in the next few checkpoint intervals.
    """
    rng = random.Random(cfg.seed)
    in_write = lost = safe_step = 0
    for kill in range(1, kills + 1):
        leftover = half_written(out_dir)  # checkpoints of processes killed earlier
        n_lines = count_lines(Path(f"{out_dir}.log"))
        process = start(cfg, out_dir, processes)
        if rng.random() < fraction_in_write:
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
        workers = psutil.Process(process.pid).children() if processes > 1 and exit_code is None else []
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
        print(f"kill {kill} of {kills}: {in_write} during a write, step {safe_step:,} is safe", flush=True)
    return in_write, lost


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
