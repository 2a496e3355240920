"""Shared parts of the benchmarks: settings, alternating measurements, tables, CPU load, servers, and a browser."""

import importlib
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from folio import UserError
from folio.base.settings import ROOT, NonNegativeInt, PositiveInt, Settings, comma_separated
from folio.base.workers import child_options

Name, Result = TypeVar("Name"), TypeVar("Result")


@dataclass(frozen=True)
class BenchConfig(Settings):
    # --- measuring ---
    device: Literal["cpu", "cuda"] = "cpu"
    repeats: PositiveInt = 3  # repetitions of each measurement
    busy: NonNegativeInt = 0  # number of background processes that each load a core
    peer: str | None = None  # folder of a nanoGPT checkout to compare with

    def problems(self) -> list[tuple[str, str]]:
        """Require an available device."""
        if self.device == "cuda" and not torch.cuda.is_available():
            return [("device", "torch finds no CUDA GPU; use cpu")]
        return []


def unknown_names(setting: str, text: str, known: Iterable[str]) -> list[tuple[str, str]]:
    """Return a problem for Settings.problems if a comma-separated setting contains an unknown name."""
    if unknown := [name for name in comma_separated(text) if name not in known]:
        return [(setting, f"{unknown[0]!r} is not one of {', '.join(known)}; separate several with commas")]
    return []


def not_integers(setting: str, text: str, at_least: int) -> list[tuple[str, str]]:
    """Return a problem for Settings.problems unless a comma-separated setting has integers of at least `at_least`."""
    numbers = [part for part in comma_separated(text) if part.isdecimal() and int(part) >= at_least]
    if numbers != comma_separated(text):
        return [(setting, f"it must be integers of at least {at_least}, separated by commas")]
    return []


# --- measurement ------------------------------------------------------------------------------------------------------


def time_calls(action: Callable[[], object], count: int) -> float:
    """Return the total seconds of `count` calls of `action`."""
    start = time.perf_counter()
    for _ in range(count):
        action()
    return time.perf_counter() - start


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def alternate(methods: dict[Name, Callable[[], Result]], rounds: int, warmup: bool = True) -> dict[Name, list[Result]]:
    """Call all methods in each round, so that varying machine load affects all of them. Returns each method's results.

    warmup: call all methods once before the first round.
    """
    if warmup:
        for measure in methods.values():
            measure()
    results = [{name: measure() for name, measure in methods.items()} for _ in range(rounds)]
    return {name: [result[name] for result in results] for name in methods}


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run `count` processes that each load a core during the block."""
    code = "from folio.base.workers import end_with_parent\nend_with_parent()\nwhile True: pass"
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen(command, cwd=ROOT, **child_options()) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


# --- tables -----------------------------------------------------------------------------------------------------------


def format_median(values: Sequence[float]) -> str:
    """Format the median as an integer, or with three significant digits below 100."""
    median = statistics.median(values)
    return f"{median:,.0f}" if median >= 100 else f"{median:.3g}"


def format_ratios(values: Sequence[float], references: Sequence[float]) -> str:
    """Format the median and the range of the ratios of each round."""
    ratios = [a / b for a, b in zip(values, references, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def print_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a Markdown table and an empty line."""
    for row in (heads, ["---"] * len(heads), *rows):
        print("|", " | ".join(map(str, row)), "|")
    print(flush=True)


def describe_device(device: str) -> str:
    """Describe the device and the version of torch."""
    name = f"{torch.get_num_threads()} threads" if device == "cpu" else torch.cuda.get_device_name(device)
    return f"{name}, torch {torch.__version__}"


# --- server and browser -----------------------------------------------------------------------------------------------


@contextmanager
def running_server(tool: str, *arguments: str) -> Iterator[tuple[int, str]]:
    """Run a server from tools/ during the block, and yield its process id and address. Raises UserError."""
    command = [sys.executable, str(ROOT / "tools" / tool), "--port=0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8", **child_options())
    try:
        address = next((word for line in process.stdout for word in line.split() if word.startswith("http://")), None)
        if address is None:
            raise UserError(f"tools/{tool} did not start; its output is above")
        yield process.pid, address
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


@contextmanager
def headless_chromium(program: str | None) -> Iterator[Any]:
    """Yield a playwright browser. program: default is chromium or google-chrome. Raises UserError if not installed."""
    program = program or shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        raise UserError("browser: chromium and google-chrome were not found; set a path, as in --browser=/opt/chrome")
    try:  # in requirements-dev.txt; otherwise, only tests need it
        sync_api = importlib.import_module("playwright.sync_api")
    except ImportError:
        raise UserError("playwright is not installed: pip install -r requirements-dev.txt") from None
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()
