"""Measure data preparation and batch loading against nanoGPT's methods, alternating in one run.

    python lab/bench/preparation.py enwik8 --split_on="  <page>"
    python lab/bench/preparation.py novel.txt --split_on="\\n\\n" --repeats=5

Both methods tokenize the same JSON lines with GPT-2's BPE. The baseline runs `datasets.map` over `encode_ordinary` with
one process per core, stores ids as lists, and copies them into one memmap. For each batch, it opens the memmap and
stacks slices.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from folio.base.files import read_json  # noqa: E402
from folio.base.settings import NonEmptyStr, PositiveInt, Settings, line_breaks, run_script  # noqa: E402
from folio.base.workers import child_options, cores  # noqa: E402
from folio.data.shards import open_dataset  # noqa: E402
from folio.data.tokenizer import gpt2_tokenizer  # noqa: E402
from folio.data.windows import Mixture  # noqa: E402
from lab.bench import baselines  # noqa: E402
from lab.bench.baselines import memmap_batch  # noqa: E402
from lab.bench.timing import alternate, format_median, format_ratios, print_table, time_calls  # noqa: E402

MB = 1_000_000


@dataclass(frozen=True)
class DataBenchConfig(Settings):
    # --- text ---
    text: tuple[str, ...] = ()  # text file
    split_on: NonEmptyStr = "\\n\\n"  # document separator; \n is a line break
    # --- measuring ---
    repeats: PositiveInt = 3  # repetitions of each measurement

    def problems(self) -> list[tuple[str, str]]:
        """Require one existing text file."""
        if len(self.text) != 1:
            return [("text", "name one text file, as in python lab/bench/preparation.py novel.txt")]
        return [] if Path(self.text[0]).is_file() else [("text", "no such file")]


def main(cfg: DataBenchConfig) -> None:
    gpt2_tokenizer()  # downloads it before the first measurement
    with tempfile.TemporaryDirectory() as scratch:
        dataset = bench_preparation(Path(cfg.text[0]), line_breaks(cfg.split_on), cfg.repeats, Path(scratch))
        bench_batches(dataset, cfg.repeats)


# --- preparation ------------------------------------------------------------------------------------------------------


class Usage(NamedTuple):
    """The resources of a command: seconds, peak bytes of memory, and peak bytes of written files."""

    seconds: float
    memory: float
    disk: float


def bench_preparation(source: Path, split_on: str, repeats: int, folder: Path) -> Path:
    """Measure both methods of preparation, print a table, and return Folio's data set."""
    documents = source.read_text(encoding="utf-8").split(split_on)
    lines, doubled = folder / "lines.jsonl", folder / "doubled.jsonl"
    write_lines(lines, documents)
    dataset = folder / "folio" / "text"
    prepare = [str(ROOT / "prepare" / "text.py"), "--tokenizer=gpt2", f"--data_dir={dataset.parent}", "--name=text"]
    commands = {
        "baseline": [baselines.__file__, str(lines), str(folder / "baseline")],
        "folio": [*prepare, str(lines), "--check_leakage=False"],  # the baseline has no such check
        "folio, with leakage check": [*prepare, str(lines)],
    }

    def measure(command: list[str]) -> Usage:
        shutil.rmtree(folder / "baseline", ignore_errors=True)
        shutil.rmtree(dataset.parent, ignore_errors=True)
        return measure_command(command, folder)

    runs = alternate({name: partial(measure, words) for name, words in commands.items()}, repeats, warmup=False)
    tokens = sum(read_json(dataset / "report.json")["tokens"].values())
    write_lines(doubled, documents + documents)
    twice_usage = measure_command([*prepare, str(doubled), "--check_leakage=False", "--overwrite=True"], folder)
    size = source.stat().st_size / MB
    print(f"\n{source.name}: {size:,.1f} MB, {len(documents):,} documents, {tokens:,} tokens, {cores()} cores\n")
    print_preparation(runs, twice_usage, tokens)
    shutil.rmtree(dataset.parent)  # it contains twice the text, but batches are measured on the original text
    subprocess.run([sys.executable, *commands["folio"]], check=True, stdout=subprocess.DEVNULL, **child_options())
    return dataset


def write_lines(path: Path, documents: list[str]) -> None:
    """Write the documents as JSON lines, the input of both methods."""
    with open(path, "w", encoding="utf-8") as file:
        for document in documents:
            file.write(json.dumps({"text": document}, ensure_ascii=False) + "\n")


def print_preparation(runs: dict[str, list[Usage]], twice_usage: Usage, tokens: int) -> None:
    """Print a row of medians per method. twice_usage: of Folio on twice the text. tokens: of the text."""
    baseline = statistics.median(run.seconds for run in runs["baseline"])
    rows = []
    cases = [*((method, usages, 1) for method, usages in runs.items()), ("folio, twice the text", [twice_usage], 2)]
    for method, usages, texts in cases:
        median = Usage(*(statistics.median(column) for column in zip(*usages, strict=True)))
        texts_per_second = texts / median.seconds
        speeds = (f"{texts_per_second * tokens / 1e6:.2f} M", f"{texts_per_second * baseline:.2f}")
        sizes = (f"{median.memory / MB:,.0f} MB", f"{median.disk / MB:,.0f} MB")
        rows.append((method, f"{median.seconds:.2f}", *speeds, *sizes))
    print_table(("", "seconds", "tokens/s", "ratio", "peak memory", "peak size of files"), rows)
    print("Medians. Peak memory is the sum over all processes; shared pages are counted once.\n")


def measure_command(command: list[str], folder: Path) -> Usage:
    """Run a Python script that writes to `folder`, and measure it with all its subprocesses."""
    size_before = folder_size(folder)
    start_time = time.perf_counter()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, *command], **pipes, **child_options())
    peaks = {"memory": 0.0, "disk": 0.0}
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(0.1):
            peaks["memory"] = max(peaks["memory"], process_memory(process.pid))
            peaks["disk"] = max(peaks["disk"], folder_size(folder) - size_before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, errors = process.communicate()
    seconds = time.perf_counter() - start_time
    finished.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{command} failed:\n{errors}")
    return Usage(seconds, **peaks)


def process_memory(pid: int) -> float:
    """Return the bytes of memory of a process and its descendants. On Linux, shared pages are counted once."""
    total = 0
    with suppress(psutil.Error):  # the process may have ended
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                usage = member.memory_full_info()
                total += getattr(usage, "pss", usage.uss)
    return total


def folder_size(folder: Path) -> float:
    """Return the bytes of all files in a folder tree."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # the file may have been removed
                total += os.stat(os.path.join(parent, name)).st_size
    return total


# --- batches ----------------------------------------------------------------------------------------------------------


def bench_batches(folder: Path, repeats: int) -> None:
    """Print the sequences per second of both methods as torch tensors, on one core. Folio's order is shuffled."""
    torch.set_num_threads(1)
    dataset = open_dataset(folder)
    path = folder / read_json(folder / "meta.json")["splits"]["train"][0]["file"]
    rows = []
    for B, T in ((64, 256), (12, 1024)):
        windows = Mixture([(dataset, 1.0)], T, seed=1337, sampling="epoch")
        starts = count(0, B)  # numbers of the first sequences of batches
        methods = {
            "baseline": partial(sequence_rate, partial(memmap_batch, path, B, T), B, 300),
            "folio": partial(sequence_rate, partial(next_batch, windows, starts, B), B, 3000),
        }
        speeds = alternate(methods, repeats)
        ratios = format_ratios(speeds["folio"], speeds["baseline"])
        rows.append((f"{B} x {T}", *map(format_median, speeds.values()), ratios))
    print_table(("batch", "baseline, sequences/s", "folio, sequences/s", "ratio"), rows)


def sequence_rate(draw: Callable[[], object], B: int, batches: int) -> float:
    """Return the sequences per second of `batches` calls of `draw`."""
    return B * batches / time_calls(draw, batches)


def next_batch(windows: Mixture, starts: Iterator[int], B: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Folio's next inputs and targets (B, T)."""
    x, y = windows.batch(next(starts), B)
    return torch.from_numpy(x), torch.from_numpy(y)


if __name__ == "__main__":
    run_script(main, DataBenchConfig)
