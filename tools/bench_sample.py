"""Measure how fast tokens are generated, against the baselines, alternating in one run.

    python tools/bench_sample.py --models="char 10.7M" --peer=../nanoGPT
    python tools/bench_sample.py --models="GPT-2 124M" --device=cuda --rows=1,64

The models have random weights. Measured are Folio with its key-value cache, transformers' `generate` on the same
weights, and the baseline: one text after another, with the whole context recomputed for each token. Where --peer names
a checkout of nanoGPT, the baseline is nanoGPT's own `generate`. The last column compares the speed of the first number
of rows, per text, with the speed at which the memory of this machine can deliver the weights once per token.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio.configurator import comma_separated, run_script  # noqa: E402
from folio.generate import Sampling, generate  # noqa: E402
from folio.kernels import pack  # noqa: E402
from folio.runtime import resolve_runtime  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402
from tools import bench_baselines as baselines  # noqa: E402
from tools.bench_timing import (  # noqa: E402
    BenchConfig,
    busy_processes,
    describe_device,
    not_integers,
    time_calls,
    unknown_names,
)

MODELS = {  # name -> (arguments of GPTConfig, tokens to generate)
    "char 0.8M": (dict(block_size=64, vocab_size=65, n_layer=4, n_head=4, n_embd=128, bias=False), 400),
    "char 10.7M": (dict(block_size=256, vocab_size=65, n_layer=6, n_head=6, n_embd=384, bias=False), 255),
    "GPT-2 124M": (dict(block_size=1024, vocab_size=50257, n_layer=12, n_head=12, n_embd=768), 64),
}


@dataclass(frozen=True)
class SampleBenchConfig(BenchConfig):
    # --- what is measured ---
    models: str = "char 0.8M,char 10.7M,GPT-2 124M"  # separated by commas
    rows: str = "1,10"  # texts at a time, separated by commas

    def problems(self) -> list[tuple[str, str]]:
        """The models are known, and the rows are numbers."""
        return [
            *super().problems(),
            *unknown_names("models", self.models, MODELS),
            *not_integers("rows", self.rows, at_least=1),
        ]


def main(cfg: SampleBenchConfig) -> None:
    bandwidth = memory_bandwidth(cfg.device)
    print(f"memory is read at {bandwidth / 1e9:,.0f} GB/s on {describe_device(cfg.device)}\n")
    row_counts = [int(rows) for rows in comma_separated(cfg.rows)]
    for name in comma_separated(cfg.models):
        shape, count = MODELS[name]
        model = GPT(GPTConfig(**shape)).eval().to(cfg.device)
        baseline, methods = make_methods(model, shape, count, cfg)
        with busy_processes(cfg.busy):
            speeds = measure_speeds(baseline, methods, row_counts, cfg.repeats)
        parameters = model.num_params()
        weights = parameters["total"] - parameters["positions"]  # read once per token
        limits = {method: bandwidth / (weights * size) for method, (_, size) in methods.items()}
        print_speeds(f"{name}, {count} tokens", speeds, baseline, limits)


def memory_bandwidth(device: str) -> float:
    """Bytes per second at which large tensors are read."""
    ones = torch.ones(300_000_000, device=device)
    return max(ones.nbytes / time_calls(lambda: ones.sum().item(), 1) for _ in range(5))


class Method(NamedTuple):
    """A way to generate: a function from a number of rows to the number of tokens generated, and bytes per weight."""

    generate: Callable[[int], int]
    bytes_per_weight: int


def make_methods(
    model: GPT, shape: dict[str, Any], count: int, cfg: SampleBenchConfig
) -> tuple[str, dict[str, Method]]:
    """The name of the baseline, and all methods by name, each with its own copy of the model."""
    methods = {}
    for dtype, size in (("float32", 4), ("bfloat16", 2), ("int8", 1)):
        ours = GPT(GPTConfig(**shape)).eval()
        ours.to(cfg.device, torch.float32 if dtype == "float32" else torch.bfloat16)
        if cfg.device == "cpu":
            pack(ours, int8=dtype == "int8")
        elif dtype == "int8":  # for CPUs only
            continue
        methods[f"Folio, {dtype}"] = Method(partial(generate_cached, ours, count), size)
    for dtype in (torch.float32, torch.bfloat16):
        theirs = baselines.transformers_model(model).to(cfg.device, dtype)
        name = f"transformers, {str(dtype).removeprefix('torch.')}"
        methods[name] = Method(partial(baselines.generate_transformers, theirs, count), dtype.itemsize)
    if cfg.peer:
        baseline, recomputing = "nanoGPT, float32", baselines.nanogpt_model(Path(cfg.peer), shape).to(cfg.device)
    else:
        baseline, recomputing = "baseline, float32", model
    methods[baseline] = Method(partial(baselines.generate_recomputed, recomputing, count), 4)
    return baseline, methods


def generate_cached(model: GPT, count: int, rows: int) -> int:
    """Generate `count` tokens in each of `rows` texts with Folio. Returns the number of generated tokens."""
    weight = model.transformer.wte.weight
    runtime = resolve_runtime(weight.device.type, str(weight.dtype).removeprefix("torch."), False)
    steps = generate(model, [[1]] * rows, runtime, max_new_tokens=count, sampling=Sampling(temperature=0.8, top_k=200))
    return sum(len(step.tokens) for step in steps)


def measure_speeds(
    baseline: str, methods: dict[str, Method], row_counts: list[int], repeats: int
) -> dict[str, dict[int, float]]:
    """Tokens per second by method and number of rows: medians after one unmeasured round, without the baseline."""
    speeds: dict[str, dict[int, list[float]]] = {method: {rows: [] for rows in row_counts} for method in methods}
    for repeat in range(repeats + 1):
        is_warmup = repeat == 0
        for method, (generate_rows, _) in methods.items():
            if is_warmup and method == baseline:  # slow, and nothing in it needs a warmup
                continue
            for rows in row_counts:
                began = time.perf_counter()
                speed = generate_rows(rows) / (time.perf_counter() - began)
                if not is_warmup:
                    speeds[method][rows].append(speed)
    return {
        method: {rows: statistics.median(values) for rows, values in by_rows.items()}
        for method, by_rows in speeds.items()
    }


def print_speeds(title: str, speeds: dict[str, dict[int, float]], baseline: str, limits: dict[str, float]) -> None:
    """Print a row per method; limits: tokens per second of one text at which the memory delivers the weights."""
    row_counts = list(speeds[baseline])
    heads = "".join(f" {rows} at a time, tokens/s | ratio |" for rows in row_counts)
    print(f"| {title} |{heads} of the memory limit |\n|{'---|' * (2 * len(row_counts) + 2)}")
    for method, by_rows in speeds.items():
        cells = "".join(f" {speed:,.0f} | {speed / speeds[baseline][rows]:.1f} |" for rows, speed in by_rows.items())
        first = row_counts[0]
        print(f"| {method} |{cells} {by_rows[first] / first / limits[method]:.0%} |")
    print()


if __name__ == "__main__":
    run_script(main, SampleBenchConfig)
