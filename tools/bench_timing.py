"""Helpers that the bench scripts share: timing calls, keeping cores busy, describing the device."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def time_calls(action: Callable[[], object], count: int) -> float:
    """Seconds that `count` calls of `action` take together."""
    began = time.perf_counter()
    for _ in range(count):
        action()
    return time.perf_counter() - began


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run `count` processes that each keep one core busy until the block ends."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def describe_device(device: str) -> str:
    """The device and the version of torch, for the line above the tables."""
    name = f"{torch.get_num_threads()} threads" if device == "cpu" else torch.cuda.get_device_name(device)
    return f"{name}, torch {torch.__version__}"
