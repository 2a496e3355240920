"""Check everything about CUDA that cannot be checked without a GPU. Takes about ten minutes.

    python tools/check_gpu.py                      writes gpu-report.json and gpu-report.md
    python tools/check_gpu.py --parts=2,3          only these parts
    python tools/check_gpu.py --peer=../nanoGPT    also nanoGPT's training speed
    python tools/check_gpu.py --device=cpu         a rehearsal with small sizes, in about a minute

1 hardware     versions, matmul and copy rates          5 training speed   GPT-2 124M, memory, kernels; nanoGPT
2 correctness  logits, loss, gradients, optimizers      6 decoding speed   against the bandwidth of the memory
3 control      losses, kills, samples, compiled graphs  7 processes        DDP and FSDP on all GPUs
4 decoding     tokens of CUDA graphs and of threads     8 end to end       the README's two commands

Each part runs in a process with a time limit, and is written as soon as it is done. The exit code is the number of
failed parts. A part that does not apply is skipped, with a reason.
"""

import importlib.metadata
import json
import math
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError  # noqa: E402
from folio.base import settings  # noqa: E402
from folio.base.files import read_json, write_json  # noqa: E402
from folio.base.settings import NonEmptyStr, Settings, comma_separated  # noqa: E402
from folio.base.workers import child_options  # noqa: E402
from folio.data.corpus import Corpus, find_sources  # noqa: E402
from folio.data.find_data import find_datasets  # noqa: E402
from folio.data.prepare import PrepareConfig, prepare  # noqa: E402
from folio.data.tokenizer import ByteTokenizer  # noqa: E402
from folio.decoding.decoders import Decoder, make_decoder  # noqa: E402
from folio.decoding.language_model import LanguageModel  # noqa: E402
from folio.decoding.sampling import Sampling  # noqa: E402
from folio.decoding.scheduler import Completion, generate  # noqa: E402
from folio.decoding.torch_decoder import TorchDecoder  # noqa: E402
from folio.machine import memory  # noqa: E402
from folio.machine.gpus import data_sheet  # noqa: E402
from folio.machine.kernels import adapt, compile_loss, describe_attention, pad_vocabulary  # noqa: E402
from folio.machine.memory import format_bytes  # noqa: E402
from folio.machine.runtime import Runtime, resolve_runtime  # noqa: E402
from folio.training.forecast import training_memory  # noqa: E402
from folio.training.optim import make_optimizer, state_tensors, update  # noqa: E402
from folio.training.run_log import read_lines  # noqa: E402
from folio.web.engine import Engine  # noqa: E402
from model import GPT, POSITIONS, GPTConfig  # noqa: E402
from tools import verify_resume  # noqa: E402
from tools.bench.baselines import copy_checkout  # noqa: E402
from tools.bench.timing import time_calls, unknown_names, wait_for  # noqa: E402
from tools.bench.training import largest_operations, make_step, matmul_rate, nanogpt_speed  # noqa: E402

CPU = torch.device("cpu")


@dataclass(frozen=True)
class CheckConfig(Settings):
    # --- what to check ---
    parts: str = "1,2,3,4,5,6,7,8"  # comma-separated
    device: str = "auto"  # "cuda", "cuda:1", "mps"; auto: the first available of these; "cpu": a rehearsal
    peer: str | None = None  # folder of a nanoGPT checkout to compare with
    # --- report ---
    out_dir: NonEmptyStr = "."  # folder of gpu-report.json and gpu-report.md
    in_process: bool = False  # True: run the parts in this process, without time limits

    def problems(self) -> list[tuple[str, str]]:
        """Require known parts."""
        return unknown_names("parts", self.parts, map(str, PARTS))


def main(cfg: CheckConfig) -> None:
    if cfg.device == "auto" and not (torch.cuda.is_available() or torch.backends.mps.is_available()):
        raise UserError("device=auto: torch finds no GPU; for a rehearsal, use --device=cpu")
    device = resolve_runtime(cfg.device, "float32", False).device
    cfg = cfg.replace(device=str(device))
    report = Report(Path(cfg.out_dir), describe_machine(device))
    numbers = sorted(map(int, comma_separated(cfg.parts)))
    for number in numbers:
        print(f"\n## {number} {PARTS[number].title}\n", flush=True)
        (run_part if cfg.in_process else run_process)(number, cfg, report)
    failed = [number for number in numbers if report.parts[str(number)]["status"] == "failed"]
    statuses = ", ".join(f"{number} {report.parts[str(number)]['status']}" for number in numbers)
    print(f"\n{statuses}; see {report.folder / 'gpu-report.md'}")
    if failed:
        raise SystemExit(len(failed))


# --- report -----------------------------------------------------------------------------------------------------------


class Report:
    """The report on a machine. Replaces the same parts of an earlier report on the same machine."""

    def __init__(self, folder: Path, machine: dict[str, str]):
        self.folder, self.machine, self.parts = folder, machine, {}
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "gpu-report.json").is_file():
            earlier = read_json(folder / "gpu-report.json")
            self.parts = earlier["parts"] if earlier["machine"] == machine else {}

    def save(self, number: int, part: dict[str, Any]) -> None:
        self.parts = dict(sorted({**self.parts, str(number): part}.items()))
        write_json(self.folder / "gpu-report.json", {"machine": self.machine, "parts": self.parts})
        lines = ["# GPU report", "", *markdown(("machine", ""), [*self.machine.items()])]
        for name, part in self.parts.items():
            lines += [f"## {name} {part['title']}: {part['status']} after {part['seconds']:.0f} s", ""]
            for table in part["tables"]:
                lines += markdown(table["heads"], table["rows"])
            lines += [
                *(f"- failed: {failure}" for failure in part["failures"]),
                *(f"- {note}" for note in part["notes"]),
            ]
            lines.append("")
        (self.folder / "gpu-report.md").write_text("\n".join(lines), encoding="utf-8")


def markdown(heads: tuple[str, ...], rows: list[Any]) -> list[str]:
    """The lines of a Markdown table, and an empty line."""
    return [f"| {' | '.join(map(str, row))} |" for row in (heads, ["---"] * len(heads), *rows)] + [""]


class Skip(Exception):
    """Raised by a part that does not apply; the message is the reason."""


class Part:
    """The record of a part: tables, failed checks, and notes. Every change is printed and saved."""

    def __init__(self, number: int, cfg: CheckConfig, report: Report, folder: Path):
        self.cfg, self.device, self.folder = cfg, torch.device(cfg.device), folder
        self.small = self.device.type == "cpu"  # a rehearsal
        self.start_time, self.seconds = time.monotonic(), PARTS[number].seconds
        self.save = partial(report.save, number)
        self.record = dict(title=PARTS[number].title, status="running", seconds=0.0, tables=[], failures=[], notes=[])

    def table(self, *heads: str) -> None:
        """Begin a table."""
        self.record["tables"].append({"heads": list(heads), "rows": []})
        print("\n".join(["", *markdown(heads, [])[:2]]))

    def row(self, *cells: object) -> None:
        """Add a row to the last table."""
        self.record["tables"][-1]["rows"].append([str(cell) for cell in cells])
        self.update(markdown(cells, [])[0])

    def note(self, line: str) -> None:
        self.record["notes"].append(line)
        self.update(f"- {line}")

    def check(self, passed: bool, failure: str) -> str:
        """Record a failure unless `passed`. Returns the result for a table."""
        if not passed:
            self.record["failures"].append(failure)
            self.update(f"- failed: {failure}")
        return "passed" if passed else "FAILED"

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Record an error as a failure, and continue after the block."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.check(False, f"{what}: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")

    @property
    def is_late(self) -> bool:
        """Whether three quarters of the time limit have passed, so that optional measurements should be left out."""
        return time.monotonic() - self.start_time > 0.75 * self.seconds

    def update(self, line: str, status: str = "running") -> None:
        print(line, flush=True)
        self.record |= {"status": status, "seconds": round(time.monotonic() - self.start_time, 1)}
        self.save(self.record)


def run_part(number: int, cfg: CheckConfig, report: Report) -> None:
    """Run a part in this process."""
    with tempfile.TemporaryDirectory(dir=report.folder, prefix=".check-") as folder:
        part = Part(number, cfg, report, Path(folder))
        skipped = False
        with part.attempt("error"):
            try:
                PARTS[number].run(part)
            except Skip as reason:
                skipped = True
                part.note(f"skipped: {reason}")
        status = "failed" if part.record["failures"] else "skipped" if skipped else "passed"
        part.update(f"\n{status} after {part.record['seconds']:.0f} s", status)


def run_process(number: int, cfg: CheckConfig, report: Report) -> None:
    """Run a part in a new process, and copy its record into the report. The process is killed at its time limit."""
    seconds = PARTS[number].seconds
    with tempfile.TemporaryDirectory(prefix="check-gpu-") as folder:
        options = [f"--parts={number}", f"--device={cfg.device}", f"--peer={cfg.peer}", f"--out_dir={folder}"]
        command = [sys.executable, str(Path(__file__).resolve()), *options, "--in_process=True"]
        process = subprocess.Popen(command, **child_options())
        try:
            process.wait(seconds)
            failure = f"the process ended with exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            failure = f"stopped after its limit of {seconds} s"
        finally:
            process.kill()
            process.wait()
        path = Path(folder, "gpu-report.json")
        part = dict(title=PARTS[number].title, status="running", seconds=seconds, tables=[], failures=[], notes=[])
        part = read_json(path)["parts"].get(str(number), part) if path.is_file() else part
    if part["status"] == "running":
        part |= {"status": "failed", "failures": [*part["failures"], failure]}
        print(f"- failed: {failure}")
    report.save(number, part)


# --- shared by the parts ----------------------------------------------------------------------------------------------


def supported_dtypes(device: torch.device) -> list[torch.dtype]:
    """The dtypes that train.py accepts on the device, the fastest one first."""
    if device.type == "cuda":
        bfloat16 = [torch.bfloat16] if torch.cuda.is_bf16_supported(including_emulation=False) else []
        return [*bfloat16, torch.float16, torch.float32]
    return [torch.bfloat16, torch.float32]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def run(part: Part, *words: object) -> str:
    """Run a Python script or module in the part's folder, and return its output. Raises RuntimeError if it fails."""
    command = [sys.executable, *map(str, words)]
    options = child_options(PYTHONPATH=str(ROOT))
    process = subprocess.run(
        command, cwd=part.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
        **options,
    )  # fmt: skip
    if process.returncode:
        print(process.stdout[-4000:])
        last_line = (process.stdout.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"exit code {process.returncode}: {last_line}")
    return process.stdout


def prepare_text(part: Part, name: str, characters: int = 60_000) -> Path:
    """Prepare a data set of random sentences, one token per character. Returns the folder for --data_dir."""
    rng, folder = random.Random(1), part.folder / "data"
    words = "the a king queen sword rose speaks sleeps and in of under old red night day".split()
    lines = (" ".join(rng.choices(words, k=7)).capitalize() + ".\n" for _ in range(characters // 30))
    part.folder.joinpath(f"{name}.txt").write_text("".join(lines), encoding="utf-8")
    source = find_sources([str(part.folder / f"{name}.txt")])
    prepare(PrepareConfig(name=name, data_dir=str(folder), num_workers=0), Corpus(source), name)
    return folder


TINY_RUN = dict(n_layer=2, n_head=2, n_embd=64, block_size=64, batch_size=8, learning_rate=3e-3, warmup_iters=2) | dict(
    dataset="sentences", max_iters=30, eval_interval=15, eval_iters=2, log_interval=1, sample_tokens=20
)


def tiny_run(part: Part, out_dir: str, **changes: Any) -> list[str]:
    """Arguments of train.py for a run of seconds."""
    values = {**TINY_RUN, "device": part.device, "data_dir": part.folder / "data", "out_dir": part.folder / out_dir}
    return [f"--{name}={value}" for name, value in (values | changes).items()]


def logged(out_dir: Path, name: str) -> list[float]:
    """The logged values of a metric, in the order of steps."""
    return [line[name] for line in read_lines(out_dir / "metrics.jsonl")[0] if line[name] is not None]


@contextmanager
def fast_compiler(device: torch.device) -> Iterator[None]:
    """On a CPU, trace graphs without generating C++, which takes up to 20 s."""
    compiler = partial(torch.compile, backend="aot_eager") if device.type == "cpu" else torch.compile
    with mock.patch.object(torch, "compile", compiler):
        yield


# --- 1 hardware -------------------------------------------------------------------------------------------------------


def describe_machine(device: torch.device) -> dict[str, str]:
    """The device, its driver, and the versions of everything that computes on it."""
    facts = {"device": f"{device}, {platform.processor() or platform.machine()}"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["device"] = f"{torch.cuda.device_count()} x {properties.name}, sm_{properties.major}{properties.minor}"
        facts["memory"] = format_bytes(properties.total_memory)
        fields = "driver_version,pcie.link.gen.max,pcie.link.width.max,power.limit"
        facts["driver, PCIe, power limit"] = output_of("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")
        facts["CUDA, cuDNN"] = f"{torch.version.cuda}, {torch.backends.cudnn.version()}"
        if torch.distributed.is_nccl_available():
            facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    try:
        facts["triton"] = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        facts["triton"] = "not installed"
    facts["torch"] = str(torch.__version__)
    facts["system"] = f"{platform.platform()}, Python {platform.python_version()}"
    facts["commit"] = output_of("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12")
    return facts


def output_of(*command: str) -> str:
    """The first line that a command prints, or "unknown" if it fails."""
    try:
        result = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return result.stdout.partition("\n")[0].strip() or "unknown" if result.returncode == 0 else "unknown"


def check_hardware(part: Part) -> None:
    device, size = part.device, 512 if part.small else None
    result = (torch.ones(1000, device=device) + 1).sum().item()
    part.check(result == 2000, f"a kernel computes {result} instead of 2000")
    kinds = [(name_of(dtype), dtype, "highest") for dtype in supported_dtypes(device)]
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        kinds.append(("float32 as TF32", torch.float32, "high"))
    sheet = data_sheet(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    part.table("matmul", "TFLOP/s", "of the data sheet's bfloat16 or float16")
    for name, dtype, precision in kinds:
        with part.attempt(f"matmul in {name}"):
            rate = matmul_rate(dtype, str(device), precision, size)
            share = f"{rate / 1e12 / sheet.tflops:.0%}" if sheet and sheet.tflops else "unknown"
            part.row(name, f"{rate / 1e12:.3g}", share)
    torch.set_float32_matmul_precision("highest")
    part.table("copy", "GB/s")
    part.row("on the device, read and written", f"{copy_rate(device, device, part.small) / 1e9:.3g}")
    if device.type != "cpu":
        for pinned in (True, False) if device.type == "cuda" else (False,):
            kind = "pinned" if pinned else "pageable"
            part.row(f"{kind} host memory to the device", f"{copy_rate(CPU, device, pinned=pinned) / 1e9:.3g}")
            part.row(f"the device to {kind} host memory", f"{copy_rate(device, CPU, pinned=pinned) / 1e9:.3g}")


def copy_rate(source: torch.device, target: torch.device, small: bool = False, pinned: bool = False) -> float:
    """Bytes per second of copying a large tensor; on one device, of reading plus writing."""
    size = 2**24 if small else 2**29
    a, b = (
        torch.ones(size, dtype=torch.uint8, device=place, pin_memory=pinned and place.type == "cpu")
        for place in (source, target)
    )

    def copy() -> None:
        b.copy_(a, non_blocking=pinned)
        wait_for(source)
        wait_for(target)

    copy()
    return (2 if source == target else 1) * size / min(time_calls(copy, 1) for _ in range(5))


# --- 2 correctness ----------------------------------------------------------------------------------------------------

V, B, T = 500, 5, 64  # 320 targets, in chunks of at most 128
MARGIN = 5.0
LOSS_SCALE = {torch.float16: 4096.0}


class Results(NamedTuple):
    """Of one batch, in float64 on the CPU."""

    logits: Tensor | None  # (B, T, V)
    loss: Tensor
    gradients: dict[str, Tensor]


def check_correctness(part: Part) -> None:
    """Compare with the equations of model.py in float64 on the CPU.

    The error of a tensor is the norm of the difference relative to the norm of the tensor; gradients count by the worst
    parameter. An error may be MARGIN times the largest error of model.py in the same dtype on the CPU, over the
    position methods. This was measured for float32, bfloat16 and float16: errors of the gradients are 8e-7, 1e-2 and
    1.5e-3, within a factor of 2 for all methods and seeds. Folio's kernels for a CPU reach 2.7e-2 in bfloat16, with
    their norms in bfloat16. So a margin of 5 covers other kernels, and a gradient that is wrong by 5 % in bfloat16,
    0.7 % in float16, or 4e-6 in float32 fails.
    """
    batch = random_batch()
    references = {position: compute(small_model(position).double(), Runtime(CPU, torch.float32, False, ""), batch)
                  for position in POSITIONS}  # fmt: skip
    limits = {}
    part.table("dtype", "allowed error: logits", "loss", "gradients")
    for dtype in supported_dtypes(part.device):
        limits[dtype] = allowed_errors(dtype, references, batch)
        part.row(name_of(dtype), *(f"{limit:.1e}" for limit in limits[dtype].values()))
    part.table("dtype", "loss", "mode", "vocabulary", "logits", "loss", "gradients", "")
    cells = [(dtype, chunked, compiled, padded) for compiled in (False, True) for chunked in (True, False)
             for padded in (True, False) for dtype in supported_dtypes(part.device)]  # fmt: skip
    skipped = []
    for cell in cells:
        (dtype, chunked, compiled, padded), positions = cell, [*POSITIONS]
        if compiled and part.small:
            positions = ["rotary"] if dtype == torch.bfloat16 and chunked == padded else []
        if compiled and (part.is_late or part.device.type == "mps"):
            positions = []
        if not positions:
            skipped.append(cell)
            continue
        words = describe_cell(*cell)
        worst: dict[str, float] = {}
        passed = True
        for position in positions:
            with part.attempt(f"{position}, {', '.join(words)}"), fast_compiler(part.device):
                errors = compare(compute_on(part.device, position, *cell, batch), references[position])
                for quantity, (error, where) in errors.items():
                    worst[quantity] = max(worst.get(quantity, 0.0), error)
                    what = f"{position}, {', '.join(words)}: {where} differs by {error:.1e}"
                    passed &= part.check(error <= limits[dtype][quantity], what) == "passed"
        shown = [f"{worst[name]:.1e}" if name in worst else "-" for name in ("logits", "loss", "gradients")]
        part.row(*words, *shown, "passed" if passed and worst else "FAILED")
    if skipped:
        part.note(f"not run: {'; '.join(', '.join(describe_cell(*cell)) for cell in skipped)}")
    check_optimizers(part)


def describe_cell(dtype: torch.dtype, chunked: bool, compiled: bool, padded: bool) -> tuple[str, str, str, str]:
    return (
        name_of(dtype),
        "chunked" if chunked else "plain",
        "compiled" if compiled else "eager",
        "padded" if padded else "as it is",
    )


def small_model(position: str, vocab_size: int = V, block_size: int = T, scale: float = 0.05) -> GPT:
    """A model in which no parameter is 0 or 1."""
    shape = dict(n_layer=2, n_head=2, n_embd=128, bias=True)
    model = GPT(GPTConfig(block_size=block_size, vocab_size=vocab_size, position=position, **shape))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=scale)
    return model


def random_batch() -> tuple[Tensor, Tensor]:
    """Inputs and targets, (B, T) each; some targets are -1."""
    inputs, targets = torch.randint(V, (2, B, T), generator=torch.Generator().manual_seed(2))
    targets[torch.arange(B), torch.arange(B) * 7] = -1
    return inputs, targets


def compute(
    model: GPT,
    runtime: Runtime,
    batch: tuple[Tensor, Tensor],
    loss_fn: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Results:
    """Logits, unless a compiled loss_fn is given, the loss, and its gradients."""
    idx, targets = (tensor.to(runtime.device) for tensor in batch)
    scale = LOSS_SCALE.get(runtime.dtype, 1.0)
    with runtime.compute():
        logits = model.logits(idx).detach().cpu().double() if not runtime.compile else None
        loss = loss_fn(idx, targets) if loss_fn else model(idx, targets)[1]
    (loss * scale).backward()
    gradients = {name: p.grad.cpu().double() / scale for name, p in model.named_parameters()}
    wte, vocab_size = gradients["transformer.wte.weight"], model.config.vocab_size
    if wte[vocab_size:].any():
        raise ValueError("the padding of the vocabulary has a gradient")
    gradients["transformer.wte.weight"] = wte[:vocab_size]
    return Results(logits, loss.detach().cpu().double(), gradients)


def compute_on(
    device: torch.device, position: str, dtype: torch.dtype, chunked: bool, compiled: bool, padded: bool, batch: Any
) -> Results:
    """Results of Folio's training path."""
    runtime, model = Runtime(device, dtype, compiled, ""), small_model(position).to(device)
    if padded:
        pad_vocabulary(model, 128)
    adapt(model, runtime)
    if chunked:
        model.cross_entropy = partial(model.cross_entropy, max_logits=100 * V)
    if not compiled:
        return compute(model, runtime, batch, compile_loss(model, runtime))
    torch._dynamo.reset()  # otherwise the ninth model would not be compiled
    counters = compiler_counters()
    results = compute(model, runtime, batch, compile_loss(model, runtime))
    if counters["stats"]["unique_graphs"] != 1 or counters["graph_break"]:
        raise ValueError(f"{counters['stats']['unique_graphs']} graphs, breaks: {[*counters['graph_break']]}")
    return results


def compiler_counters() -> Any:
    """The counters of torch's compiler, set to 0."""
    from torch._dynamo.utils import counters  # takes a second

    counters.clear()
    return counters


def compare(results: Results, reference: Results) -> dict[str, tuple[float, str]]:
    """The error of each quantity, and the tensor that has it."""
    error, name = worst_error(results.gradients, reference.gradients)
    errors = {"loss": (relative_error(results.loss, reference.loss), "the loss")}
    errors["gradients"] = (error, f"the gradient of {name}")
    if results.logits is not None:
        errors["logits"] = (relative_error(results.logits, reference.logits), "the tensor of logits")
    return errors


def relative_error(a: Tensor, b: Tensor) -> float:
    error = ((a - b).norm() / b.norm()).item()
    return math.inf if math.isnan(error) else error


def allowed_errors(dtype: torch.dtype, references: dict[str, Results], batch: Any) -> dict[str, float]:
    """MARGIN times the errors of model.py on the CPU."""
    runtime = Runtime(CPU, dtype, False, "")
    errors = [compare(compute(small_model(position), runtime, batch), references[position]) for position in references]
    return {name: MARGIN * max(error[name][0] for error in errors) for name in ("logits", "loss", "gradients")}


def check_optimizers(part: Part) -> None:
    """Two steps with random gradients, then a skipped one whose gradients are not finite.

    The references are steps in float64, and a change may have MARGIN times the error of the same steps on the CPU.
    """
    part.table("optimizer", "matmuls", "change of the weights", "allowed", "moments", "allowed", "skipped step", "")
    kinds = [("adamw", torch.float32), *(("muon", dtype) for dtype in supported_dtypes(part.device))]
    for kind, dtype in kinds:
        if dtype == torch.float16:  # train.py uses float32
            continue
        with part.attempt(f"{kind} in {name_of(dtype)}"):
            exact = optimizer_steps(small_model("relative").double(), kind, torch.float64)
            on_cpu = optimizer_steps(small_model("relative"), kind, dtype)
            on_device = optimizer_steps(small_model("relative").to(part.device), kind, dtype)
            cells, passed = [], not on_device.moved_by_skipped_step
            for name in ("changes", "moments"):
                error = worst_error(getattr(on_device, name), getattr(exact, name))
                limit = MARGIN * worst_error(getattr(on_cpu, name), getattr(exact, name))[0]
                what = f"{kind} in {name_of(dtype)}: {name} of {error[1]} differ by {error[0]:.1e}"
                passed &= part.check(error[0] <= limit, what) == "passed"
                cells += [f"{error[0]:.1e}", f"{limit:.1e}"]
            moved = on_device.moved_by_skipped_step
            part.check(not moved, f"{kind} in {name_of(dtype)}: a skipped step changes {', '.join(moved[:3])}")
            part.row(
                kind,
                name_of(dtype),
                *cells,
                "changes nothing" if not moved else "FAILED",
                "passed" if passed else "FAILED",
            )


class Steps(NamedTuple):
    """Two optimizer steps, on the CPU in float64, and a skipped one."""

    changes: dict[str, Tensor]  # of the weights, by name
    moments: dict[str, Tensor]
    moved_by_skipped_step: list[str]  # tensors that it changed


def optimizer_steps(model: GPT, kind: str, dtype: torch.dtype) -> Steps:
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    device = next(model.parameters()).device
    optimizer = make_optimizer(model, kind, 1e-3, (0.9, 0.95), 0.1, 0.02, dtype)
    generator = torch.Generator().manual_seed(3)

    def step(number: int, factor: float, skip: float) -> None:
        for p in model.parameters():
            p.grad = (factor * torch.randn(p.shape, generator=generator)).to(p)
        update(optimizer, 1e-3, number, torch.tensor(skip, device=device), device.type in ("cpu", "cuda"))

    for number in range(2):
        step(number, 0.01, skip=0.0)
    state = {**dict(model.named_parameters()), **state_tensors(model, optimizer)}
    before = {name: tensor.detach().clone() for name, tensor in state.items()}
    step(2, math.nan, skip=1.0)
    moved = [name for name, tensor in state.items() if not torch.equal(tensor, before[name])]
    changes = {name: (before[name] - tensor).cpu().double() for name, tensor in initial.items()}
    moments = {name: tensor.cpu().double() for name, tensor in before.items() if "/" in name and tensor.dim()}
    return Steps(changes, moments, moved)


def worst_error(tensors: dict[str, Tensor], exact: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative error of any tensor, and its name."""
    return max((relative_error(tensor, exact[name]), name) for name, tensor in tensors.items())


# --- 3 control --------------------------------------------------------------------------------------------------------

MODES = (False, True, "reduce-overhead")  # of compile
WARMUP_STEPS = 5  # which compile and allocate, and may wait for the device


def check_control(part: Part) -> None:
    """Runs of train.py: losses, samples, graphs, no waiting for the device between logs; kills and resumes."""
    prepare_text(part, "sentences")
    part.table("compile", "dtype", "first losses", "last losses", "graphs, breaks", "CUDA graphs skipped", "sample", "")
    for mode in MODES:
        if mode and part.device.type == "mps" or mode == "reduce-overhead" and part.device.type != "cuda":
            part.note(f"compile={mode} does not apply to {part.device.type}")
            continue
        for dtype in supported_dtypes(part.device)[: 1 if mode and part.small else None]:
            with part.attempt(f"compile={mode} in {name_of(dtype)}"):
                check_run(part, mode, name_of(dtype))
    with part.attempt("kill and resume"):
        check_resume(part)


def check_run(part: Part, mode: bool | str, dtype: str) -> None:
    out_dir, what = part.folder / f"run-{mode}-{dtype}", f"compile={mode} in {dtype}"
    arguments = tiny_run(part, out_dir.name, compile=mode, dtype=dtype)
    run(part, "-c", "import sys; from tools import check_gpu; check_gpu.train_watched(sys.argv[1:])", *arguments)
    counts, losses = read_json(out_dir / "compiler.json"), logged(out_dir, "loss")
    first, last = statistics.mean(losses[:5]), statistics.mean(losses[-5:])
    texts = [line["text"] for line in read_lines(out_dir / "samples.jsonl")[0]]
    graphs = 2 if mode else 0  # of training and evaluation
    results = [
        part.check(all(map(math.isfinite, losses)), f"{what}: a loss is not finite"),
        part.check(last < first - 0.3, f"{what}: the loss falls from {first:.3f} to {last:.3f} only"),
        part.check(counts["graphs"] == graphs, f"{what}: {counts['graphs']} graphs instead of {graphs}"),
        part.check(not counts["breaks"], f"{what}: graph breaks: {', '.join(counts['breaks'])}"),
        part.check(not counts["skipped"], f"{what}: {counts['skipped']} CUDA graphs were skipped"),
        part.check(len(texts) == 2 and all(texts), f"{what}: the samples are {texts}"),
    ]
    sample = repr(texts[-1][:20]) if texts else "none"
    shown = (f"{first:.3f}", f"{last:.3f}", f"{counts['graphs']}, {len(counts['breaks'])}", counts["skipped"], sample)
    part.row(mode, dtype, *shown, max(results, key="passed FAILED".index))


def train_watched(arguments: list[str]) -> None:
    """Run train.py with the compiler's counters, which are written to compiler.json in out_dir.

    On CUDA, an operation that waits for the device is an error in a step and in logging it (WARMUP_STEPS excepted).
    """
    import train

    cfg = settings.load(train.TrainConfig, arguments)
    counters = compiler_counters()
    device = torch.device(cfg.device)

    def compile_counted(*arguments: Any) -> Any:
        counters.clear()  # resolve_runtime has compiled a function
        return compile_loss(*arguments)

    watched = mock.patch.multiple(
        train, compile_loss=compile_counted, train_step=forbid_waiting(train.train_step, device, lambda state: state)
    )
    end_step = forbid_waiting(train.Session.end_step, device, lambda session: session.state)
    with watched, mock.patch.object(train.Session, "end_step", end_step), fast_compiler(device):
        train.train(cfg)
    counts = {"graphs": counters["stats"]["unique_graphs"], "breaks": [*counters["graph_break"]]}
    write_json(Path(cfg.out_dir, "compiler.json"), counts | {"skipped": counters["inductor"]["cudagraph_skips"]})


def forbid_waiting(function: Callable[..., Any], device: torch.device, state_of: Callable[[Any], Any]) -> Callable:
    """Wrap a function of a TrainState, or of an object that has one, so that waiting for the device raises an error."""

    def watched(first: Any, *arguments: Any) -> Any:
        if device.type != "cuda" or state_of(first).step < WARMUP_STEPS:
            return function(first, *arguments)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return function(first, *arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return watched


def check_resume(part: Part) -> None:
    """Kill a run and resume it, with deterministic kernels, and compare it with an uninterrupted one."""
    part.table("dtype", "kills", "differences after resuming", "")
    kills, dtype = (1, "float32") if part.small else (2, name_of(supported_dtypes(part.device)[0]))
    values = {**TINY_RUN, "max_iters": 200, "eval_interval": 10, "eval_iters": 1, "sample_tokens": 5}
    values |= dict(data_dir=str(part.folder / "data"), device=str(part.device), dtype=dtype, compile=False)
    cfg = verify_resume.VerifyConfig(**values, deterministic=True, kills=kills, kills_in_write=0.0)
    whole, killed = part.folder / "whole", part.folder / "killed"
    verify_resume.finish(verify_resume.start(cfg, whole), whole)
    _, _, lost = verify_resume.kill_and_resume(cfg, killed)
    verify_resume.finish(verify_resume.start(cfg, killed), killed)
    differences = verify_resume.compare(whole, killed)
    result = part.check(not differences and not lost, f"after {kills} kills: {lost} lost; {'; '.join(differences)}")
    part.row(dtype, kills, "; ".join(differences) or "none", result)


# --- 4 decoding -------------------------------------------------------------------------------------------------------

SAMPLINGS = {
    "greedy": Sampling(temperature=0),
    "sampled": Sampling(temperature=0.9, top_k=50, top_p=0.95, repetition_penalty=1.1),
}


def check_decoding(part: Part) -> None:
    """Tokens in float32: those of the device, also from a server's thread and on the last GPU, are those of the CPU.

    The longest row reaches the end of its context, and with CUDA graphs, a graph of 256 positions and another one.
    """
    tokenizer = ByteTokenizer()
    block_size, count = (48, 16) if part.small else (320, 100)
    generator = torch.Generator().manual_seed(4)
    lengths = (block_size - count // 2, 3, block_size // 3, 1)
    prompts = [torch.randint(256, (length,), generator=generator).tolist() for length in lengths]
    places = {"the device": part.device, "a thread": part.device}
    if torch.cuda.device_count() > 1 and part.device.type == "cuda":
        places["a thread, last GPU"] = torch.device("cuda", torch.cuda.device_count() - 1)
    else:
        part.note("there is no second GPU, so threads decode on the only one")
    part.table("positions", "sampling", "rows x tokens", *places)
    for position in POSITIONS:
        model = small_model(position, tokenizer.vocab_size, block_size, 0.1)
        on_cpu = make_decoder(model, resolve_runtime("cpu", "float32", False))
        for name, sampling in SAMPLINGS.items():
            with part.attempt(f"{position}, {name}"):
                expected, cells = decode(on_cpu, prompts, count, sampling), []
                for place, device in places.items():
                    gpt = LanguageModel(model, tokenizer, str(device), "float32")
                    decode_there = decode_in_thread if "thread" in place else decode_with_torch
                    tokens = decode_there(gpt, prompts, count, sampling)
                    where = [row for row, ids in enumerate(expected) if tokens[row] != ids]
                    what = f"{position}, {name}, {place}: the tokens of rows {where} differ from those of the CPU"
                    cells.append(part.check(not where, what))
                part.row(position, name, f"{len(prompts)} x {count}", *cells)


def decode(decoder: Decoder, prompts: list[list[int]], count: int, sampling: Sampling) -> list[list[int]]:
    """The tokens that are generated after each prompt."""
    rows: list[list[int]] = [[] for _ in prompts]
    for step in generate(decoder, prompts, max_new_tokens=count, sampling=sampling, eot=ByteTokenizer.eot):
        for row, token in zip(rows, step.tokens, strict=True):
            row += [] if token is None else [token]
    return rows


def decode_with_torch(gpt: LanguageModel, prompts: list[list[int]], count: int, sampling: Sampling) -> list[list[int]]:
    """The same by torch, which LanguageModel uses on a GPU only."""
    return decode(TorchDecoder(gpt.model, gpt.runtime), prompts, count, sampling)


def decode_in_thread(gpt: LanguageModel, prompts: list[list[int]], count: int, sampling: Sampling) -> list[list[int]]:
    """The same in the thread of a server's engine."""
    engine, ended = Engine(gpt, rows=len(prompts)), threading.Event()
    completions = [Completion(p, sampling, count, sample=row, notify=ended.set) for row, p in enumerate(prompts)]
    engine.submit(completions)
    while not all(completion.finish_reason for completion in completions):
        ended.wait()
        ended.clear()
    engine.close()
    if errors := {completion.error for completion in completions} - {""}:
        raise RuntimeError("; ".join(errors))
    return [completion.tokens for completion in completions]


# --- 5 training speed -------------------------------------------------------------------------------------------------

GPT2 = GPTConfig(bias=False)
SMALL_GPT2 = GPTConfig(block_size=32, vocab_size=300, n_layer=2, n_head=2, n_embd=64, bias=False)
BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)


def check_training_speed(part: Part) -> None:
    """Steps with AdamW in the fastest dtype, compiled on CUDA."""
    device, config = part.device, SMALL_GPT2 if part.small else GPT2
    dtype = supported_dtypes(device)[0]
    runtime = Runtime(device, dtype, device.type == "cuda", "")
    sizes = [size for size in (4, 16, 32, 64) if size <= 4 or (not part.small and fits(config, size, runtime))]
    base = 32 if 32 in sizes else sizes[-1]
    matmul = matmul_rate(dtype, str(device), size=256 if part.small else None)
    sheet = runtime.peak_flops()
    with torch.device("meta"):
        part.note(f"attention by {describe_attention(runtime, GPT(config))}; matmul {matmul / 1e12:.3g} TFLOP/s")
    time_attention(part, config, base, dtype)
    steps = [(base, True, None), (base, False, None)] + [(size, True, None) for size in sizes[::-1] if size != base]
    if device.type == "cuda":
        steps += [(base, True, backend) for backend in BACKENDS[:3]]
    part.table("sequences", "vocabulary", "attention", "tokens/s", "MFU by the data sheet", "of matmul", "peak memory",
               "forecast", "first step, s")  # fmt: skip
    for size, padded, backend in steps:
        if part.is_late:
            part.note(f"no time for {size} sequences, padded={padded}, {backend}")
            continue
        with part.attempt(f"{size} sequences, padded={padded}, {backend}"):
            with sdpa_kernel(backend) if backend else nullcontext():
                speed, peak, first = training_speed(config, size, runtime, padded)
            flops = speed * config.flops_per_token()["total"]
            forecast = forecast_bytes(config, size, runtime)
            part.row(size, "padded" if padded else "as it is", backend.name if backend else "chosen", f"{speed:,.0f}",
                     f"{flops / sheet:.1%}" if sheet else "unknown", f"{flops / matmul:.1%}",
                     format_bytes(peak) if peak else "unknown", format_bytes(forecast), f"{first:.1f}")  # fmt: skip
            fitting = not peak or peak <= memory.HEADROOM * forecast
            part.check(fitting, f"{size} sequences take {format_bytes(peak or 0)}, forecast {format_bytes(forecast)}")
    if device.type != "mps":
        with part.attempt("profile"):
            milliseconds, rows = largest_operations(training_step(config, base, runtime, True), device.type == "cpu")
            part.table(f"share of a step of {milliseconds:,.1f} ms, {base} sequences", "")
            for row in rows:
                part.row(*row)
    if part.cfg.peer:
        with part.attempt("nanoGPT"):
            compare_with_nanogpt(part, config, base, runtime)


def forecast_bytes(config: GPTConfig, size: int, runtime: Runtime) -> int:
    with torch.device("meta"):
        model = GPT(config)
    kinds = dict(optimizer="adamw", dtype=runtime.dtype, device=runtime.device.type)
    return training_memory(model, size, **kinds).total


def fits(config: GPTConfig, size: int, runtime: Runtime) -> bool:
    available = memory.free(runtime.device)
    return available is None or memory.HEADROOM * forecast_bytes(config, size, runtime) <= available


def training_step(config: GPTConfig, size: int, runtime: Runtime, padded: bool) -> Callable[[], None]:
    return make_step(config, size, runtime, "adamw", 128 if padded else 1)


def training_speed(config: GPTConfig, size: int, runtime: Runtime, padded: bool) -> tuple[float, int | None, float]:
    """Tokens per second, the peak of allocated bytes (None: unknown), and the seconds of the first step."""
    device = runtime.device
    if runtime.compile:
        torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    step = training_step(config, size, runtime, padded)
    first = timed_steps(step, 1, device)
    timed_steps(step, 2, device)
    seconds = min(timed_steps(step, 5, device) for _ in range(1 if device.type == "cpu" else 3)) / 5
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return size * config.block_size / seconds, peak, first


def timed_steps(step: Callable[[], None], count: int, device: torch.device) -> float:
    """Seconds of some steps, until the device has finished them."""
    wait_for(device)
    start_time = time.perf_counter()
    time_calls(step, count)
    wait_for(device)
    return time.perf_counter() - start_time


def time_attention(part: Part, config: GPTConfig, size: int, dtype: torch.dtype) -> None:
    """Time attention alone, forward and backward, with each backend."""
    H, D = config.n_head, config.n_embd // config.n_head
    q, k, v = torch.randn(3, size, H, config.block_size, D, device=part.device, dtype=dtype).unbind()
    for tensor in (q, k, v):
        tensor.requires_grad_()
    flops = 14 * size * H * config.block_size**2 * D  # 2 matmuls forward, 5 backward; the causal half is not discounted
    part.table("attention, forward and backward", "ms per layer", "TFLOP/s")
    for backend in BACKENDS:
        try:
            with sdpa_kernel(backend):
                step = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()  # noqa: E731
                timed_steps(step, 2, part.device)
                seconds = timed_steps(step, 10, part.device) / 10
        except RuntimeError as error:
            part.row(backend.name, f"not available: {str(error).splitlines()[0]}", "")
            continue
        part.row(backend.name, f"{1000 * seconds:.3g}", f"{flops / seconds / 1e12:.3g}")


def compare_with_nanogpt(part: Part, config: GPTConfig, size: int, runtime: Runtime) -> None:
    """Alternate with nanoGPT's train.py, compiled, on random tokens; its vocabulary is 50,304."""
    checkout, T = part.folder / "nanogpt", config.block_size
    copy_checkout(Path(part.cfg.peer), checkout, part.folder, set())
    data = checkout / "data" / "random"
    data.mkdir(parents=True)
    for name in ("train.bin", "val.bin"):
        tokens = torch.randint(config.vocab_size, (2**20,), dtype=torch.int32)
        (data / name).write_bytes(tokens.numpy().astype("<u2").tobytes())
    shape = dict(n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd, block_size=T, batch_size=size)
    shape |= dict(device=part.device, dtype=name_of(runtime.dtype), compile=runtime.compile, dataset="random")
    shape |= dict(dropout=0.0, max_iters=20, eval_iters=1, log_interval=1, eval_interval=1000)
    words = [f"--{name}={value}" for name, value in shape.items()]
    part.table(f"round, {size} sequences", "Folio, tokens/s", "nanoGPT, tokens/s", "ratio")
    for number in (1, 2):
        folio, _, _ = training_speed(config, size, runtime, True)
        nanogpt = nanogpt_speed(words, checkout, size * T)
        part.row(number, f"{folio:,.0f}", f"{nanogpt:,.0f}", f"{folio / nanogpt:.2f}")


# --- 6 decoding speed -------------------------------------------------------------------------------------------------


def check_decoding_speed(part: Part) -> None:
    """Compare with the time to read the weights, and the positions of the cache that a graph covers, once per token."""
    device, config = part.device, SMALL_GPT2 if part.small else GPT2
    runtime = resolve_runtime(str(device), name_of(supported_dtypes(device)[0]), False)
    model = GPT(config).to(device, runtime.dtype)
    bandwidth = copy_rate(device, device, part.small)
    weights = sum(p.nbytes for name, p in model.named_parameters() if "wpe" not in name)
    prompt, count = (8, 16) if part.small else (16, 200)
    cache = 2 * config.n_layer * config.n_embd * runtime.dtype.itemsize * min(256, config.block_size)  # per row
    part.table("rows", "tokens/s", "ms per step", "limit of the memory, tokens/s", "share")
    for rows in (1, 4) if part.small else (1, 64):
        with part.attempt(f"{rows} rows"):
            speed = decoding_speed(TorchDecoder(model, runtime), rows, prompt, count)
            limit = rows * bandwidth / (weights + rows * cache)
            shown = f"{1000 * rows / speed:.3g}", f"{limit:,.0f}", f"{speed / limit:.0%}"
            part.row(rows, f"{speed:,.0f}", *shown)
    part.note(f"{format_bytes(weights)} of weights in {name_of(runtime.dtype)}; {bandwidth / 1e9:,.0f} GB/s in a copy")


def decoding_speed(decoder: TorchDecoder, rows: int, prompt: int, count: int) -> float:
    """Tokens per second of sampling, after the first steps, which capture graphs."""
    sampling = Sampling(temperature=0.8, top_k=200)
    steps = generate(decoder, [[1] * prompt] * rows, max_new_tokens=count, sampling=sampling)
    for _ in range(count // 8):
        next(steps)
    start_time = time.perf_counter()
    tokens = sum(len(step.tokens) for step in steps)
    return tokens / (time.perf_counter() - start_time)


# --- 7 processes ------------------------------------------------------------------------------------------------------


def check_processes(part: Part) -> None:
    """Losses in float32 of DDP and FSDP, with NCCL on all GPUs, against one process."""
    if part.device.type == "mps":
        raise Skip("torch.distributed has no backend for Apple's GPUs")
    processes = 2 if part.small else torch.cuda.device_count()
    if processes == 1:
        part.note("there is only one GPU: NCCL with one process")
    prepare_text(part, "sentences")
    changes = dict(dtype="float32", max_iters=20, eval_interval=10, sample_tokens=0, learning_rate=1e-3)
    changes |= dict(device=part.device.type, warmup_iters=5)
    run(part, ROOT / "train.py", *tiny_run(part, "one", **changes, compile=False))
    cells = [(parallel, compiled, recompute) for compiled in (False, True) for parallel in ("ddp", "fsdp")
             for recompute in (False, True)]  # fmt: skip
    part.table("parallel", "compile", "recompute", "processes", "largest difference of a loss", "tokens/s", "")
    for parallel, compiled, recompute in cells if not part.small else [("fsdp", False, True)]:
        what = f"{parallel}, compile={compiled}, recompute={recompute}"
        with part.attempt(what):
            out_dir = part.folder / f"{parallel}-{compiled}-{recompute}"
            options = tiny_run(part, out_dir.name, **changes, parallel=parallel, compile=compiled, recompute=recompute)
            launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}")
            run(part, *launcher, ROOT / "train.py", *options)
            difference = largest_difference(part.folder / "one", out_dir)
            speed = statistics.median(logged(out_dir, "tokens_per_second")[5:])
            result = part.check(difference <= 1e-4, f"{what}: losses differ by {difference:.1e}")
            part.row(parallel, compiled, recompute, processes, f"{difference:.1e}", f"{speed:,.0f}", result)


def largest_difference(first: Path, second: Path) -> float:
    """The largest difference of any logged loss between two runs. Raises ValueError if they logged different steps."""
    pairs = zip(*(logged(folder, "loss") + logged(folder, "val_loss") for folder in (first, second)), strict=True)
    return max(abs(a - b) for a, b in pairs)


# --- 8 end to end -----------------------------------------------------------------------------------------------------


def check_end_to_end(part: Part) -> None:
    """The README's two commands."""
    name, data = "shakespeare_char", []
    if not part.small:
        try:
            find_datasets(name, None)
        except UserError as error:
            part.note(f"the data set cannot be prepared, so the text is random sentences: {error}")
            data = [f"--data_dir={prepare_text(part, name, 1_000_000)}"]
    else:
        part.note("the text is random sentences")
        data = [f"--data_dir={prepare_text(part, name)}", "--max_iters=20", "--eval_interval=10", "--snapshots=0"]
    out_dir = part.folder / "out-shakespeare-char"
    part.table("command", "seconds", "result", "")
    start_time = time.perf_counter()
    options = [f"--out_dir={out_dir}", f"--device={part.device}"]
    run(part, ROOT / "train.py", "config/shakespeare_char.py", *options, *data)
    seconds, losses = time.perf_counter() - start_time, logged(out_dir, "val_loss")
    limit = losses[0] - 0.3 if data else 1.5  # 1.441 on a CPU, median of three seeds
    result = part.check(min(losses) < limit, f"the best validation loss is {min(losses):.4f}, not below {limit:.2f}")
    command = "python train.py config/shakespeare_char.py"
    part.row(f"`{command}`", f"{seconds:.1f}", f"validation loss {min(losses):.4f}", result)
    start_time = time.perf_counter()
    text = run(part, ROOT / "sample.py", *options)
    seconds, speed = time.perf_counter() - start_time, re.search(r"[\d,]+ tokens/s", text)
    result = part.check(len(text) > 500 and bool(speed), f"sample.py prints {text[:200]!r}")
    shown = speed[0] if speed else "no speed"
    part.row("`python sample.py --out_dir=out-shakespeare-char`", f"{seconds:.1f}", shown, result)


class PartSpec(NamedTuple):
    title: str
    run: Callable[[Part], None]
    seconds: int  # time limit


PARTS = {
    1: PartSpec("hardware", check_hardware, 60),
    2: PartSpec("correctness", check_correctness, 240),
    3: PartSpec("control", check_control, 240),
    4: PartSpec("decoding", check_decoding, 90),
    5: PartSpec("training speed", check_training_speed, 300),
    6: PartSpec("decoding speed", check_decoding_speed, 60),
    7: PartSpec("processes", check_processes, 240),
    8: PartSpec("end to end", check_end_to_end, 150),
}

if __name__ == "__main__":
    settings.run_script(main, CheckConfig)
