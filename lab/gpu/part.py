"""What the parts of tools/check_gpu.py share: their record, and short runs of train.py."""

import pickle
import random
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from folio.base.settings import ROOT
from folio.base.workers import child_options
from folio.data.corpus import Corpus
from folio.data.inputs import find_sources
from folio.data.prepare import PrepareConfig, prepare
from folio.machine.runtime import resolve_runtime
from folio.training.run_log import read_lines


class Skip(Exception):
    """Raised by a part that does not apply. The message is the reason."""


class Part:
    """The record of a part: tables, failures, and notes. Every change is printed and saved."""

    def __init__(self, title: str, seconds: float, device: torch.device, folder: Path, save: Callable[[dict], None]):
        """seconds: the time limit. folder: for temporary files. save: called with the record after each change."""
        self.seconds, self.device, self.folder, self.save = seconds, device, folder, save
        self.is_small = device.type == "cpu"  # a rehearsal
        self.start_time = time.monotonic()
        self.record = dict(title=title, status="running", seconds=0.0, tables=[], failures=[], notes=[])

    def table(self, *heads: str) -> None:
        """Begin a table."""
        self.record["tables"].append({"heads": list(heads), "rows": []})
        print("", *markdown(heads, [])[:2], sep="\n")

    def row(self, *cells: object) -> None:
        """Add a row to the last table."""
        self.record["tables"][-1]["rows"].append([str(cell) for cell in cells])
        self.update(markdown(cells, [])[0])

    def note(self, line: str) -> None:
        self.record["notes"].append(line)
        self.update(f"- {line}")

    def check(self, passed: bool, failure: str) -> None:
        """Record a failure unless the check passed."""
        if not passed:
            self.record["failures"].append(failure)
            self.update(f"- failed: {failure}")

    @property
    def failures(self) -> int:
        return len(self.record["failures"])

    def result_since(self, failures: int) -> str:
        """The result of the checks since there were this many failures, for a table."""
        return "passed" if self.failures == failures else "FAILED"

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Record an error in the block as a failure, and continue after the block."""
        try:
            yield
        except Skip:
            raise
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            self.check(False, f"{what}: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")

    @property
    def is_late(self) -> bool:
        """Whether three quarters of the time limit have passed, so that no other measurement should begin."""
        return time.monotonic() - self.start_time > 0.75 * self.seconds

    def run(self, function: Callable[["Part"], None]) -> None:
        """Run the part, and record its status."""
        status = "passed"
        try:
            with self.attempt("error"):
                function(self)
        except Skip as reason:
            status = "skipped"
            self.note(f"skipped: {reason}")
        self.update("", "failed" if self.failures else status)

    def update(self, line: str, status: str = "running") -> None:
        print(line, flush=True)
        self.record |= {"status": status, "seconds": round(time.monotonic() - self.start_time, 1)}
        self.save(self.record)


def markdown(heads: Iterable[object], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a Markdown table, and an empty line."""
    heads = list(heads)
    return [f"| {' | '.join(map(str, row))} |" for row in (heads, ["---"] * len(heads), *rows)] + [""]


def supported_dtypes(device: torch.device) -> list[torch.dtype]:
    """The dtypes that train.py accepts on the device, the fastest one first."""
    if device.type != "cuda":
        return [torch.bfloat16, torch.float32]
    has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return [*([torch.bfloat16] if has_bfloat16 else []), torch.float16, torch.float32]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def can_compile(device: torch.device) -> bool:
    """Whether train.py compiles long runs on the device. On a CPU it does not, but a rehearsal does."""
    precision = torch.get_float32_matmul_precision()
    compiled = resolve_runtime(str(device), "auto", "auto").compile
    torch.set_float32_matmul_precision(precision)
    return bool(compiled) or device.type == "cpu"


@contextmanager
def quick_compiler(device: torch.device) -> Iterator[None]:
    """On a CPU, compile to graphs of eager operations, because generating C++ takes up to 20 s."""
    compiler = partial(torch.compile, backend="aot_eager") if device.type == "cpu" else torch.compile
    with mock.patch.object(torch, "compile", compiler):
        yield


def compiler_counters() -> dict[str, Counter[str]]:
    """The counters of torch's compiler, set to 0."""
    from torch._dynamo.utils import counters  # takes a second

    counters.clear()
    return counters


# --- runs of train.py -------------------------------------------------------------------------------------------------

TINY_RUN = dict(dataset="sentences", n_layer=2, n_head=2, n_embd=64, block_size=64, batch_size=8, learning_rate=3e-3)
TINY_RUN |= dict(max_iters=30, warmup_iters=2, eval_interval=15, eval_iters=2, log_interval=1, sample_tokens=20)


def tiny_run(part: Part, out_dir: str, **changes: Any) -> list[str]:
    """Arguments of train.py for a run of seconds. out_dir: a name in the part's folder."""
    places = {"device": part.device, "data_dir": part.folder / "data", "out_dir": part.folder / out_dir}
    return [f"--{name}={value}" for name, value in {**TINY_RUN, **places, **changes}.items()]


def prepare_text(part: Part, name: str, sentences: int = 2000) -> Path:
    """Prepare a data set of random sentences of 34 characters. Returns the folder for --data_dir."""
    rng, source = random.Random(1), part.folder / f"{name}.txt"
    words = "the a king queen sword rose speaks sleeps and in of under old red night day".split()
    lines = (" ".join(rng.choices(words, k=7)).capitalize() + ".\n" for _ in range(sentences))
    source.write_text("".join(lines), encoding="utf-8")
    settings = PrepareConfig(name=name, data_dir=str(part.folder / "data"), num_workers=0)
    prepare(settings, Corpus(find_sources([str(source)])), name)
    return part.folder / "data"


def write_random_tokens(part: Part, name: str, vocab_size: int, tokens: int = 2**20) -> Path:
    """Write a data set of random tokens in nanoGPT's format, each id with a character. Returns the folder for
    --data_dir. Unlike with GPT-2's tokenizer, a large vocabulary needs no download.
    """
    folder = part.folder / "data" / name
    folder.mkdir(parents=True)
    for split in ("train", "val"):
        ids = np.random.default_rng(1).integers(vocab_size, size=tokens)
        ids.astype("<u2").tofile(folder / f"{split}.bin")
    itos = {i: chr(0x10000 + i) for i in range(vocab_size)}
    meta = {"vocab_size": vocab_size, "itos": itos, "stoi": {character: i for i, character in itos.items()}}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return part.folder / "data"


def run_python(*words: object) -> str:
    """Run Python with these arguments in Folio's folder. Returns its output; raises RuntimeError if it fails."""
    command, output = [sys.executable, *map(str, words)], dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    result = subprocess.run(command, cwd=ROOT, encoding="utf-8", errors="replace", **output, **child_options())
    if result.returncode:
        print(result.stdout[-4000:])
        last_line = (result.stdout.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"exit code {result.returncode}: {last_line}")
    return result.stdout


def logged(out_dir: Path, name: str) -> list[float]:
    """The values of a metric that a run has logged, in the order of steps."""
    return [line[name] for line in read_lines(out_dir / "metrics.jsonl")[0] if line[name] is not None]
