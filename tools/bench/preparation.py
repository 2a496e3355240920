"""Measure preparing a text and drawing batches, against nanoGPT's method, alternating in one run.

    python tools/bench/preparation.py enwik8 --split_on="  <page>"
    python tools/bench/preparation.py novel.txt --split_on="\\n\\n" --repeats=5

Both methods start from the same JSON lines and tokenize them with GPT-2's BPE. The baseline runs `datasets.map` over
`encode_ordinary` with one process per core, keeps ids as lists, and copies them into one memmap. Its batches open a
memmap and stack slices of it.
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
from tools.bench import baselines  # noqa: E402
from tools.bench.baselines import memmap_batch  # noqa: E402
from tools.bench.timing import alternate, format_median, format_ratios, print_table, time_calls  # noqa: E402

MB = 1_000_000


@dataclass(frozen=True)
class DataBenchConfig(Settings):
    # --- text ---
    text: tuple[str, ...] = ()  # a text file
    split_on: NonEmptyStr = "\\n\\n"  # separator of documents; \n is a line break
    # --- measuring ---
    repeats: PositiveInt = 3  # how often to repeat each measurement

    def problems(self) -> list[tuple[str, str]]:
        """There is one text, which exists."""
        if len(self.text) != 1:
            return [("text", "name one text file, as in python tools/bench/preparation.py novel.txt")]
        return [] if Path(self.text[0]).is_file() else [("text", "there is no such file")]


def main(cfg: DataBenchConfig) -> None:
    gpt2_tokenizer()  # downloaded before anything is timed
    with tempfile.TemporaryDirectory() as scratch:
        dataset = bench_preparation(Path(cfg.text[0]), line_breaks(cfg.split_on), cfg.repeats, Path(scratch))
        bench_batches(dataset, cfg.repeats)


# --- preparing --------------------------------------------------------------------------------------------------------


class Usage(NamedTuple):
    """What a command needs: seconds from start to end, peak bytes of memory, and peak bytes of the files it wrote."""

    seconds: float
    memory: float
    disk: float


def bench_preparation(source: Path, split_on: str, repeats: int, folder: Path) -> Path:
    """Measure both methods of preparing a text, print the table, and return the data set that Folio prepared."""
    documents = source.read_text(encoding="utf-8").split(split_on)
    lines, doubled = folder / "lines.jsonl", folder / "doubled.jsonl"
    write_lines(lines, documents)
    dataset = folder / "folio" / "text"
    prepare = [str(ROOT / "prepare" / "text.py"), "--tokenizer=gpt2", f"--data_dir={dataset.parent}", "--name=text"]
    commands = {
        "baseline": [baselines.__file__, str(lines), str(folder / "baseline")],
        "folio": [*prepare, str(lines), "--check_leakage=False"],  # the baseline does not compare documents either
        "folio, with what validation shares": [*prepare, str(lines)],
    }

    def measure(command: list[str]) -> Usage:
        shutil.rmtree(folder / "baseline", ignore_errors=True)
        shutil.rmtree(dataset.parent, ignore_errors=True)
        return measure_command(command, folder)

    runs = alternate({name: partial(measure, words) for name, words in commands.items()}, repeats, warmup=False)
    tokens = sum(read_json(dataset / "report.json")["tokens"].values())
    write_lines(doubled, documents + documents)
    twice = measure_command([*prepare, str(doubled), "--check_leakage=False", "--overwrite=True"], folder)
    size = source.stat().st_size / MB
    print(f"\n{source.name}: {size:,.1f} MB, {len(documents):,} documents, {tokens:,} tokens, {cores()} cores\n")
    print_preparation(runs, twice, tokens)
    shutil.rmtree(dataset.parent)  # with twice the text; the batches are drawn from the text itself
    subprocess.run([sys.executable, *commands["folio"]], check=True, stdout=subprocess.DEVNULL, **child_options())
    return dataset


def write_lines(path: Path, documents: list[str]) -> None:
    """Write the documents as JSON lines, the input of both methods."""
    with open(path, "w", encoding="utf-8") as file:
        for document in documents:
            file.write(json.dumps({"text": document}, ensure_ascii=False) + "\n")


def print_preparation(runs: dict[str, list[Usage]], twice: Usage, tokens: int) -> None:
    """Print a row of medians per method; `twice` is Folio's run on twice the text, and so on twice the tokens."""
    baseline = statistics.median(run.seconds for run in runs["baseline"])
    rows = []
    cases = [*((method, usages, 1) for method, usages in runs.items()), ("folio, twice the text", [twice], 2)]
    for method, usages, texts in cases:
        median = Usage(*(statistics.median(column) for column in zip(*usages, strict=True)))
        texts_per_second = texts / median.seconds
        speeds = (f"{texts_per_second * tokens / 1e6:.2f} M", f"{texts_per_second * baseline:.2f}")
        sizes = (f"{median.memory / MB:,.0f} MB", f"{median.disk / MB:,.0f} MB")
        rows.append((method, f"{median.seconds:.2f}", *speeds, *sizes))
    print_table(("", "seconds", "tokens/s", "ratio", "peak memory", "peak size of files"), rows)
    print("Medians. Peak memory is the sum over all processes; shared pages are counted once.\n")


def measure_command(command: list[str], folder: Path) -> Usage:
    """Run a Python script that writes into `folder`, and measure it with all its processes."""
    size_before = folder_size(folder)
    began = time.perf_counter()
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
    seconds = time.perf_counter() - began
    finished.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{command} failed:\n{errors}")
    return Usage(seconds, **peaks)


def process_memory(pid: int) -> float:
    """Bytes of memory of a process and its descendants. On Linux, a page that they share counts once."""
    total = 0
    with suppress(psutil.Error):  # the process may have ended in the meantime
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                usage = each.memory_full_info()
                total += getattr(usage, "pss", usage.uss)
    return total


def folder_size(folder: Path) -> float:
    """Bytes of all files below a folder."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # the file may have been removed in the meantime
                total += os.stat(os.path.join(parent, name)).st_size
    return total


# --- batches ----------------------------------------------------------------------------------------------------------


def bench_batches(folder: Path, repeats: int) -> None:
    """Print the sequences per second of both methods, as torch tensors, on one core. Folio's order is shuffled."""
    torch.set_num_threads(1)
    dataset = open_dataset(folder)
    path = folder / read_json(folder / "meta.json")["splits"]["train"][0]["file"]
    rows = []
    for B, T in ((64, 256), (12, 1024)):
        windows = Mixture([(dataset, 1.0)], T, seed=1337, sampling="epoch")
        starts = count(0, B)  # the number of the next sequence
        methods = {
            "baseline": partial(sequence_rate, partial(memmap_batch, path, B, T), B, 300),
            "folio": partial(sequence_rate, partial(draw_batch, windows, starts, B), B, 3000),
        }
        speeds = alternate(methods, repeats)
        ratios = format_ratios(speeds["folio"], speeds["baseline"])
        rows.append((f"{B} x {T}", *map(format_median, speeds.values()), ratios))
    print_table(("batch", "baseline, sequences/s", "folio, sequences/s", "ratio"), rows)


def sequence_rate(draw: Callable[[], object], B: int, batches: int) -> float:
    """Sequences per second of drawing this number of batches."""
    return B * batches / time_calls(draw, batches)


def draw_batch(windows: Mixture, starts: Iterator[int], B: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Folio's next inputs and targets (B, T)."""
    x, y = windows.batch(next(starts), B)
    return torch.from_numpy(x), torch.from_numpy(y)


if __name__ == "__main__":
    run_script(main, DataBenchConfig)
