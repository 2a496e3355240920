"""Measure training against nanoGPT: the commands of both, alternating in one run.

    python lab/bench/training.py --peer=../nanoGPT
    python lab/bench/training.py --peer=../nanoGPT --parts=speed --models="GPT-2 124M" --device=cuda

speed:   tokens per second on the same model and batch, alternating; with --libraries=transformers,jax also of the plain
         loops in training_peers.py.
race:    the time from the start of the process to the first evaluation at or below a target loss: the final loss of
         nanoGPT's recipe for a CPU, and the loss in its README for an A100. A third race is for the lowest loss in the
         time of nanoGPT's recipe. Each saved checkpoint is evaluated again over the full validation set.
profile: the operations that take the most time in Folio's training step.
"""

import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import folio.machine.openmp  # noqa: E402, F401  (subprocesses, also nanoGPT's, inherit its environment variable)
from folio.base.files import read_json  # noqa: E402
from folio.base.settings import comma_separated, run_script  # noqa: E402
from folio.base.workers import child_options  # noqa: E402
from folio.data.find_data import find_datasets  # noqa: E402
from folio.data.shards import data_root, open_dataset  # noqa: E402
from folio.machine.data_parallel import clip_grad_norm, with_workers  # noqa: E402
from folio.machine.kernels import adapt, pad_vocabulary  # noqa: E402
from folio.machine.runtime import Runtime, resolve_runtime  # noqa: E402
from folio.training.optim import make_optimizer  # noqa: E402
from folio.training.setup import make_loss  # noqa: E402
from lab.bench import training_peers  # noqa: E402
from lab.bench.baselines import (  # noqa: E402
    NANOGPT_A100_LOSS,
    NANOGPT_CPU_LOSS,
    NANOGPT_CPU_RECIPE,
    copy_checkout,
)
from lab.bench.timing import (  # noqa: E402
    BenchConfig,
    alternate,
    busy_processes,
    describe_device,
    format_median,
    format_ratios,
    not_integers,
    print_table,
    time_calls,
    unknown_names,
    wait_for,
)
from model import GPT, GPTConfig  # noqa: E402

MODELS = {  # name -> (data set, settings of both programs); other settings are from their config files
    "char 0.6M": (  # the model of config/shakespeare_char.py
        "shakespeare_char",
        dict(n_layer=3, n_head=4, n_embd=128, block_size=128, batch_size=32, dropout=0.0),
    ),
    "char 0.8M": ("shakespeare_char", dict(n_layer=4, n_head=4, n_embd=128, block_size=64, batch_size=12, dropout=0.0)),
    "char 10.7M": (
        "shakespeare_char",
        dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=16, dropout=0.2),
    ),
    "char 10.7M without dropout": (
        "shakespeare_char",
        dict(n_layer=6, n_head=6, n_embd=384, block_size=256, batch_size=16, dropout=0.0),
    ),
    "GPT-2 124M": ("shakespeare", dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=16, dropout=0.0)),
}
RACE_DATASET = "shakespeare_char"
# A smaller model than in the recipe: in such a short time, more text helps more than more weights.
SMALLER = "--n_layer=1 --n_embd=96 --block_size=64 --muon_learning_rate=0.05 --max_iters=310 --wsd_decay_iters=217"
RACES = {  # name -> (target loss, or None for the lowest loss in nanoGPT's time; changes of Folio's recipe)
    f"to {NANOGPT_CPU_LOSS}": (NANOGPT_CPU_LOSS, [*SMALLER.split(), "--eval_interval=310"]),
    "in nanoGPT's time": (None, []),
    f"to {NANOGPT_A100_LOSS}": (NANOGPT_A100_LOSS, []),
}
MATMUL_SIZES = {"cpu": 2048, "cuda": 8192, "mps": 4096}  # square matrices for measuring the machine's limit
PRODUCTS = 20  # to queue on a GPU before waiting for it, in a sustained measurement
SUSTAINED_SECONDS = {"cpu": 0.0, "cuda": 2.0, "mps": 2.0}  # of measuring matmuls; 0: the best of five
IMPORT_SECONDS = 1.5  # from the start of a process to the start of its time budget
PARTS = ("speed", "race", "profile")


@dataclass(frozen=True)
class TrainBenchConfig(BenchConfig):
    # --- measurements ---
    parts: str = "speed,race,profile"  # comma-separated
    models: str = "char 0.8M,char 10.7M"  # comma-separated; also char 0.6M, char 10.7M without dropout, GPT-2 124M
    seeds: str = "1337,1,2"  # seeds of the races, comma-separated
    libraries: str = ""  # comma-separated: transformers, jax; their plain training loops, on a CPU
    data_dir: str | None = None  # folder of the data sets; None: data/ next to train.py

    def problems(self) -> list[tuple[str, str]]:
        """Require known parts and models, and integer seeds."""
        return [
            *super().problems(),
            *unknown_names("parts", self.parts, PARTS),
            *unknown_names("models", self.models, MODELS),
            *not_integers("seeds", self.seeds, at_least=0),
            *unknown_names("libraries", self.libraries, training_peers.LIBRARIES),
            *([("libraries", "their loops need --device=cpu")] if self.libraries and self.device != "cpu" else []),
        ]

    @property
    def data_root(self) -> Path:
        """Absolute directory of the data sets, for subprocesses with another working directory."""
        return data_root(self.data_dir).resolve()


def main(cfg: TrainBenchConfig) -> None:
    print(f"{describe_device(cfg.device)}\n")
    parts, models = comma_separated(cfg.parts), comma_separated(cfg.models)
    for library in comma_separated(cfg.libraries):
        training_peers.require_packages(library)
    with tempfile.TemporaryDirectory() as scratch, busy_processes(cfg.busy):
        folder = Path(scratch)
        datasets = {MODELS[name][0] for name in models}
        if "race" in parts:
            datasets.add(RACE_DATASET)
        for dataset in datasets:  # prepares missing data before the first measurement
            find_datasets(dataset, cfg.data_dir)
        if cfg.peer:
            copy_checkout(Path(cfg.peer), folder / "peer", cfg.data_root, datasets)
        if "speed" in parts:
            for name in models:
                bench_speed(name, folder, cfg)
        if "race" in parts:
            bench_races(folder, cfg)
        if "profile" in parts:
            for name in models:
                profile(name, cfg)


def run_timestamped(words: list[str], folder: Path) -> list[tuple[float, str]]:
    """Run a Python script in a folder. Returns each printed line with the seconds since the start."""
    start_time = time.perf_counter()
    lines = []
    with subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **child_options(PYTHONUNBUFFERED="1"),
    ) as process:
        for line in process.stdout:
            lines.append((time.perf_counter() - start_time, line.rstrip()))
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n" + "\n".join(line for _, line in lines[-20:]))
    return lines


# --- speed ------------------------------------------------------------------------------------------------------------


def bench_speed(model: str, folder: Path, cfg: TrainBenchConfig) -> None:
    """Measure both programs' training speed on the same model, and the matmul rate, alternating; print a table."""
    dataset, settings = MODELS[model]
    B, T = settings["batch_size"], settings["block_size"]
    shape = {key: settings[key] for key in ("n_layer", "n_head", "n_embd", "block_size")}
    vocab_size = open_dataset(cfg.data_root / dataset).vocab_size
    flops = GPTConfig(vocab_size=vocab_size, **shape).flops_per_token()["total"]
    steps = 60 if flops * B * T < 1e11 else 10
    sizes = [*(f"--{key}={value}" for key, value in settings.items()), f"--max_iters={steps}"]
    shared = [*sizes, f"--device={cfg.device}", f"--dataset={dataset}", "--eval_iters=1", "--log_interval=1"]
    compiled = {"nanoGPT": False, "nanoGPT, compiled": True} if cfg.device == "cpu" else {"nanoGPT": True}
    methods = {}
    for name, setting in compiled.items() if cfg.peer else ():
        methods[name] = partial(nanogpt_speed, [*shared, f"--compile={setting}"], folder / "peer", B * T)
    for library, dtype in product(comma_separated(cfg.libraries), ("float32", "bfloat16")):
        if library == "jax" and settings["dropout"]:
            continue
        words = [training_peers.__file__, library, *sizes, f"--vocab_size={vocab_size}", f"--dtype={dtype}"]
        methods[f"{library}, {dtype}"] = partial(printed_speed, words, folder, B * T)
    folio_options = [*shared, f"--compile={cfg.device != 'cpu'}", f"--eval_interval={steps}"]
    folio_options.append(f"--data_dir={cfg.data_root}")
    for name in ("AdamW", "Muon"):
        methods[f"Folio, {name}"] = partial(folio_speed, [*folio_options, f"--optimizer={name.lower()}"], folder)
    dtypes = (torch.float32, torch.bfloat16)
    sustained = SUSTAINED_SECONDS[torch.device(cfg.device).type]
    methods |= {str(dtype): partial(matmul_rate, dtype, cfg.device, seconds=sustained) for dtype in dtypes}
    measured = alternate(methods, cfg.repeats, warmup=False)
    single, half = (statistics.median(measured.pop(str(dtype))) for dtype in dtypes)
    rows = []
    reference = next(iter(methods))
    for program, speeds in measured.items():
        ratios = format_ratios(speeds, measured[reference])
        rate = flops * statistics.median(speeds)
        rows.append((program, format_median(speeds), ratios, f"{rate / 1e9:,.0f}", f"{rate / half:.0%}"))
    print_table((f"{model}, {B} x {T}", "tokens/s", "ratio", "GFLOP/s", "of bf16 matmul"), rows)
    n = MATMUL_SIZES[cfg.device]
    print(f"A matmul of {n:,} x {n:,}: {half / 1e9:,.0f} GFLOP/s in bfloat16, {single / 1e9:,.0f} in float32.\n")


def nanogpt_speed(settings: list[str], checkout: Path, tokens: int) -> float:
    """Train with nanoGPT. Returns its median tokens per second. tokens: per step."""
    return printed_speed(["train.py", "config/train_shakespeare_char.py", *settings], checkout, tokens)


def printed_speed(words: list[str], folder: Path, tokens: int) -> float:
    """Train with a script that prints the time of each step. Returns its median tokens per second. tokens: per step."""
    lines = run_timestamped(words, folder)
    milliseconds = [float(match[1]) for _, line in lines if (match := re.search(r"time ([\d.]+)ms", line))]
    return 1000 * tokens / statistics.median(without_warmup(milliseconds))


def folio_speed(settings: list[str], folder: Path) -> float:
    """Train with Folio. Returns its median tokens per second."""
    out_dir = folder / "folio"
    words = [str(ROOT / "train.py"), "config/nanogpt_char.py", *settings, f"--out_dir={out_dir}"]
    run_timestamped([*words, "--warmup_iters=1", "--sample_tokens=0", "--overwrite=True"], folder)
    speeds = [line["tokens_per_second"] for line in read_metrics(out_dir) if line["tokens_per_second"]]
    return statistics.median(without_warmup(speeds))


def without_warmup(steps: list[float]) -> list[float]:
    """Return the measurements of a run's steps without the first few steps."""
    return steps[5:] if len(steps) > 10 else steps[2:]


def read_metrics(out_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]


def matmul_rate(
    dtype: torch.dtype, device: str, precision: str = "highest", size: int | None = None, seconds: float = 0.0
) -> float:
    """Measure the FLOP/s of large matmuls: the best of five, or all in some seconds, one after another.

    After about a second, a GPU that reaches its power limit slows down, as it does in training. precision: of float32,
    see torch.set_float32_matmul_precision.
    """
    previous_precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    n = size or MATMUL_SIZES[torch.device(device).type]
    a = torch.randn(n, n, device=device).to(dtype)  # a GPU needs less power for constants, and is faster

    def multiply() -> None:
        a @ a
        wait_for(a.device)

    def multiply_often() -> None:
        for _ in range(PRODUCTS):
            a @ a
        wait_for(a.device)

    multiply()
    if seconds:
        times = []
        while sum(times) < seconds:
            times.append(time_calls(multiply_often, 1))
        per_product = statistics.mean(times) / PRODUCTS
    else:
        per_product = min(time_calls(multiply, 1) for _ in range(5))
    torch.set_float32_matmul_precision(previous_precision)
    return 2 * n**3 / per_product


# --- races ------------------------------------------------------------------------------------------------------------


class Evaluation(NamedTuple):
    """A printed validation loss, and the seconds since the start of the process."""

    seconds: float
    loss: float


class Result(NamedTuple):
    """One run of a race: the deciding evaluation, and the checkpoint's loss over the full validation set."""

    program: str
    race: str
    seconds: float
    loss: float
    full_loss: float


def bench_races(folder: Path, cfg: TrainBenchConfig) -> None:
    """Run all races, one process after another, once per seed; print a table."""
    results: list[Result] = []
    seconds = 60.0  # of nanoGPT's recipe; the default without a peer
    for seed in map(int, comma_separated(cfg.seeds)):
        if cfg.peer:
            results.append(race_nanogpt(folder / "peer", cfg))
            seconds = results[-1].seconds
        for race in RACES:
            results.append(race_folio(race, seed, seconds, folder, cfg))
            print(f"seed {seed}, {race}: {results[-1].seconds:.1f} s, loss {results[-1].loss:.4f}", flush=True)
    print_races(results)


def race_nanogpt(checkout: Path, cfg: TrainBenchConfig) -> Result:
    """Run nanoGPT's recipe for a CPU to its end."""
    words = ["train.py", *NANOGPT_CPU_RECIPE, f"--device={cfg.device}", "--compile=False", "--out_dir=out-race"]
    evaluation = parse_evaluations(run_timestamped(words, checkout), r"^step .* val loss ([\d.]+)")[-1]
    full_loss = evaluate_checkpoint(checkout / "out-race" / "ckpt.pt", cfg)
    return Result("nanoGPT", "its recipe for a CPU", *evaluation, full_loss)


def race_folio(race: str, seed: int, nanogpt_seconds: float, folder: Path, cfg: TrainBenchConfig) -> Result:
    """Run Folio's recipe with the changes of one race."""
    target, changes = RACES[race]
    out_dir = folder / "race"
    words = [str(ROOT / "train.py"), str(ROOT / "config" / "shakespeare_char.py"), f"--seed={seed}"]
    words += [f"--device={cfg.device}", f"--out_dir={out_dir}", f"--data_dir={cfg.data_root}", "--overwrite=True"]
    if target is None:
        words.append(f"--minutes={(nanogpt_seconds - IMPORT_SECONDS) / 60:.4f}")
    evaluations = parse_evaluations(run_timestamped([*words, *changes], folder), r"^step .* val ([\d.]+)")
    return Result("Folio", race, *finish(evaluations, target), evaluate_checkpoint(out_dir, cfg))


def parse_evaluations(lines: list[tuple[float, str]], pattern: str) -> list[Evaluation]:
    """Parse the evaluations in a program's output. The pattern's group is the loss."""
    return [Evaluation(seconds, float(match[1])) for seconds, line in lines if (match := re.search(pattern, line))]


def finish(evaluations: list[Evaluation], target: float | None) -> Evaluation:
    """Return the first evaluation at or below the target, or the last one without a target.

    If the run does not reach its target, the time is infinite.
    """
    if target is None:
        return evaluations[-1]
    for evaluation in evaluations:
        if evaluation.loss <= target:
            return evaluation
    return Evaluation(math.inf, evaluations[-1].loss)


def evaluate_checkpoint(path: Path, cfg: TrainBenchConfig) -> float:
    """Return the loss of a checkpoint over the full validation set, by tools/evaluate.py."""
    output = path.with_name("scored.json")
    words = [str(ROOT / "tools" / "evaluate.py"), str(path), f"--dataset={RACE_DATASET}", f"--data_dir={cfg.data_root}"]
    run_timestamped([*words, f"--device={cfg.device}", f"--json={output}"], path.parent)
    return next(row["value"] for row in read_json(output)["results"] if row["measure"].startswith("loss"))


def print_races(results: list[Result]) -> None:
    """Print a row per program and race, summarized over seeds."""
    nanogpt_times = [result.seconds for result in results if result.program == "nanoGPT"]
    nanogpt_median = statistics.median(nanogpt_times) if nanogpt_times else math.nan
    rows = []
    for program, race in dict.fromkeys((result.program, result.race) for result in results):
        runs = [result for result in results if (result.program, result.race) == (program, race)]
        times = [run.seconds for run in runs]
        median = statistics.median(times)
        seconds = f"{median:.1f} ({min(times):.1f} to {max(times):.1f})"
        losses = " / ".join(f"{run.loss:.4f}" for run in runs)
        full_loss = statistics.median(run.full_loss for run in runs)
        rows.append((f"{program}, {race}", seconds, f"{nanogpt_median / median:.1f}", losses, f"{full_loss:.4f}"))
    heads = ("", "seconds of the process", "nanoGPT's time / this time", "loss", "loss, full validation set")
    print_table(heads, rows)


# --- profile ----------------------------------------------------------------------------------------------------------


def profile(name: str, cfg: TrainBenchConfig) -> None:
    """Print the share of each torch operation in a training step of Folio with Muon."""
    dataset, settings = MODELS[name]
    vocab_size = open_dataset(cfg.data_root / dataset).vocab_size
    shape = {key: value for key, value in settings.items() if key != "batch_size"}
    config = GPTConfig(vocab_size=vocab_size, bias=False, activation="gelu", **shape)
    B = settings["batch_size"]
    runtime = with_workers(resolve_runtime(cfg.device, "auto", False), None, B, config.block_size * config.n_embd)
    step = make_step(config, B, runtime, "muon", runtime.size_multiple)
    milliseconds, rows = largest_operations(step, on_cpu=cfg.device == "cpu")
    print_table((f"{name}, Muon: share of the {milliseconds:,.0f} ms of operations per step", ""), rows)


def make_step(
    config: GPTConfig, batch_size: int, runtime: Runtime, optimizer_kind: str, vocabulary_multiple: int = 1
) -> Callable[[], None]:
    """Return a training step on random tokens. vocabulary_multiple: see pad_vocabulary."""
    model = GPT(config).to(runtime.device)
    pad_vocabulary(model, vocabulary_multiple)
    adapt(model, runtime)
    rates = dict(learning_rate=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    optimizer = make_optimizer(model, optimizer_kind, **rates, dtype=runtime.dtype, workers=runtime.workers)
    loss_fn = make_loss(model, runtime)
    x, y = torch.randint(config.vocab_size, (2, batch_size, config.block_size), device=runtime.device)

    def step() -> None:
        loss_fn(x, y).backward()
        clip_grad_norm(model.parameters(), 1.0, runtime)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def largest_operations(step: Callable[[], None], on_cpu: bool) -> tuple[float, list[tuple[str, str]]]:
    """Profile a training step. Returns the milliseconds of its operations, and the shares of the twelve largest.

    The operations of several workers are added up.
    """
    time_calls(step, 3)  # warmup
    steps = 3
    options = dict(experimental_config=_ExperimentalConfig(profile_all_threads=True))
    with torch.profiler.profile(acc_events=True, **options) as profiler:  # the default warns in torch 2.11
        time_calls(step, steps)
    microseconds = operation_times(profiler.key_averages(), on_cpu)
    total = sum(microseconds.values())
    largest = sorted(microseconds.items(), key=lambda item: -item[1])[:12]
    return total / steps / 1e3, [(f"`{operation}`", f"{spent / total:.1%}") for operation, spent in largest]


def operation_times(events: Iterable[FunctionEventAvg], on_cpu: bool) -> dict[str, float]:
    """Microseconds of each torch operation on a CPU, or of each kernel on a GPU.

    On a GPU, the device time of operations and annotations repeats that of their kernels.
    """
    if on_cpu:
        return {event.key: event.self_cpu_time_total for event in events}
    kernels = (event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation)
    return {event.key: event.self_device_time_total for event in kernels}


if __name__ == "__main__":
    run_script(main, TrainBenchConfig)
