"""Starts train.py in several processes, with torchrun or, which is faster, without it."""

import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.support.processes import start, wait
from train import TrainConfig

ROOT = Path(__file__).resolve().parent.parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
LONG_RUN = dict(batch_size=2, gradient_accumulation_steps=4, max_iters=200, warmup_iters=20, learning_rate=1e-3)
LONG_RUN |= dict(muon_learning_rate=0.01, eval_interval=100, eval_iters=None, dropout=0.0, sample_tokens=0)


def train_command(cfg: TrainConfig) -> list[str]:
    device = "cpu" if cfg.device == "auto" else cfg.device
    return [str(ROOT / "train.py"), *[f"--{name}={value}" for name, value in asdict(cfg).items()], f"--device={device}"]


def start_torchrun(cfg: TrainConfig, *options: str) -> subprocess.Popen:
    """Start torchrun in its own process group. Its output is appended to out_dir.log."""
    Path(cfg.out_dir).parent.mkdir(parents=True, exist_ok=True)
    with open(f"{cfg.out_dir}.log", "ab") as log:
        return subprocess.Popen(
            [*TORCHRUN, *options, *train_command(cfg)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def output(cfg: TrainConfig) -> str:
    """The output of the processes so far."""
    return Path(f"{cfg.out_dir}.log").read_text(encoding="utf-8")


def run_torchrun(processes: int, cfg: TrainConfig, *options: str) -> str:
    """Train with torchrun. Returns the output, which must not contain a warning."""
    torchrun = start_torchrun(cfg, "--standalone", f"--nproc_per_node={processes}", *options)
    assert torchrun.wait(timeout=300) == 0, output(cfg)
    assert "Warning" not in output(cfg), output(cfg)
    return output(cfg)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def start_ranks(processes: int, cfg: TrainConfig, **env: str) -> list[BaseProcess]:
    """Start train.py in several processes with torchrun's environment variables. Returns them by rank."""
    Path(cfg.out_dir).parent.mkdir(parents=True, exist_ok=True)
    return start_script_ranks(processes, train_command(cfg), f"{cfg.out_dir}.log", **env)


def start_script_ranks(processes: int, words: list[str], log: str, **env: str) -> list[BaseProcess]:
    """Start `python WORDS` in several processes with torchrun's environment variables. Returns them by rank.

    env: additional variables.
    """
    files = [os.devnull, log, log]
    address = dict(MASTER_ADDR="localhost", MASTER_PORT=str(free_port()))
    sizes = dict(WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes))
    ranks = map(str, range(processes))
    return [start(words, files, **address, **sizes, **env, RANK=rank, LOCAL_RANK=rank) for rank in ranks]


def run_ranks(processes: int, cfg: TrainConfig) -> str:
    """Like run_torchrun, without torchrun."""
    assert [wait(rank) for rank in start_ranks(processes, cfg)] == [0] * processes, output(cfg)
    assert "Warning" not in output(cfg), output(cfg)
    return output(cfg)


def wait_for_step(cfg: TrainConfig, step: int) -> None:
    """Wait until a step is logged. Every step must be logged."""
    log = Path(cfg.out_dir, "metrics.jsonl")
    deadline = time.monotonic() + 300
    while not log.exists() or len(log.read_bytes().splitlines()) < step:
        assert time.monotonic() < deadline, output(cfg)
        time.sleep(0.02)


def worker_ids(torchrun: subprocess.Popen) -> list[int]:
    """The process ids of torchrun's workers, by rank. Linux only."""
    return [int(pid) for pid in Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()]
