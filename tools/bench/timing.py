"""What the bench scripts share: settings, rounds that alternate, ratios, tables, busy cores, servers, and a browser."""

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
    repeats: PositiveInt = 3  # how often to repeat each measurement
    busy: NonNegativeInt = 0  # processes that each keep a core busy meanwhile
    peer: str | None = None  # folder of a checkout of nanoGPT to compare with; None: without one

    def problems(self) -> list[tuple[str, str]]:
        """The device is there."""
        if self.device == "cuda" and not torch.cuda.is_available():
            return [("device", "torch finds no CUDA GPU here; use cpu")]
        return []


def unknown_names(setting: str, text: str, known: Iterable[str]) -> list[tuple[str, str]]:
    """The problem of a comma-separated setting with a name that is not among the known ones, for Settings.problems."""
    if unknown := [name for name in comma_separated(text) if name not in known]:
        return [(setting, f"{unknown[0]!r} is not one of {', '.join(known)}; separate several with commas")]
    return []


def not_integers(setting: str, text: str, at_least: int) -> list[tuple[str, str]]:
    """The problem of a comma-separated setting with a part that is not such an integer, for Settings.problems."""
    numbers = [part for part in comma_separated(text) if part.isdecimal() and int(part) >= at_least]
    if numbers != comma_separated(text):
        return [(setting, f"it must be integers of at least {at_least}, separated by commas")]
    return []


# --- measuring --------------------------------------------------------------------------------------------------------


def time_calls(action: Callable[[], object], count: int) -> float:
    """Seconds that `count` calls of `action` take together."""
    began = time.perf_counter()
    for _ in range(count):
        action()
    return time.perf_counter() - began


def alternate(methods: dict[Name, Callable[[], Result]], rounds: int, warmup: bool = True) -> dict[Name, list[Result]]:
    """What each method returned in each round. A round calls all methods, so that a slow minute affects all of them.

    warmup: call all of them once before.
    """
    if warmup:
        for measure in methods.values():
            measure()
    results = [{name: measure() for name, measure in methods.items()} for _ in range(rounds)]
    return {name: [result[name] for result in results] for name in methods}


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run `count` processes that each keep one core busy until the block ends."""
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
    """As a whole number, or with the digits that a small one needs."""
    median = statistics.median(values)
    return f"{median:,.0f}" if median >= 100 else f"{median:.3g}"


def format_ratios(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """The median of the ratios of each round's measurements, and their range."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def print_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table in Markdown, and an empty line."""
    for row in (heads, ["---"] * len(heads), *rows):
        print("|", " | ".join(map(str, row)), "|")
    print(flush=True)


def describe_device(device: str) -> str:
    """The device and the version of torch, for the line above the tables."""
    name = f"{torch.get_num_threads()} threads" if device == "cpu" else torch.cuda.get_device_name(device)
    return f"{name}, torch {torch.__version__}"


# --- servers and a browser --------------------------------------------------------------------------------------------


@contextmanager
def running_server(tool: str, *arguments: str) -> Iterator[tuple[int, str]]:
    """The process id and the address of a script in tools/ that serves until the block ends. Raises UserError."""
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
    """A browser of playwright. program: None: chromium or google-chrome. Raises UserError if it is not installed."""
    program = program or shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        raise UserError("browser: there is no chromium or google-chrome here; name one, as in --browser=/opt/chrome")
    try:  # of requirements-dev.txt, because nothing else outside of the tests needs it
        sync_api = importlib.import_module("playwright.sync_api")
    except ImportError:
        raise UserError("playwright is not installed: pip install -r requirements-dev.txt") from None
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()
