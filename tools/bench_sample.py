"""Measure how fast tokens are generated, against the baselines, alternating in one run.

    python tools/bench_sample.py --models "char 10.7M" --peer=../nanoGPT
    python tools/bench_sample.py --models "GPT-2 124M" --device=cuda --rows 1 64

The models have random weights. Measured are Folio with its key-value cache, transformers' `generate` on the same
weights, and the baseline: one text after another, with the whole context recomputed for each token. Where --peer names
a checkout of nanoGPT, the baseline is nanoGPT's own `generate`. The last column compares the speed of the first number
of rows, per text, with the speed at which the memory of this machine can deliver the weights once per token.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio.configurator import run_script  # noqa: E402
from folio.generate import Sampling, generate  # noqa: E402
from folio.kernels import pack  # noqa: E402
from folio.runtime import resolve_runtime  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402
from tools import bench_baselines as baselines  # noqa: E402
from tools.bench_timing import busy_processes, describe_device, time_calls  # noqa: E402

MODELS = {  # name -> (arguments of GPTConfig, tokens to generate)
    "char 0.8M": (dict(block_size=64, vocab_size=65, n_layer=4, n_head=4, n_embd=128, bias=False), 400),
    "char 10.7M": (dict(block_size=256, vocab_size=65, n_layer=6, n_head=6, n_embd=384, bias=False), 255),
    "GPT-2 124M": (dict(block_size=1024, vocab_size=50257, n_layer=12, n_head=12, n_embd=768), 64),
}


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="tools/bench_sample.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=3, help="how often to repeat each measurement (%(default)s)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 10], help="texts at a time (1 10)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--peer", type=Path, help="a checkout of nanoGPT, whose generate becomes the baseline")
    parser.add_argument("--busy", type=int, default=0, help="processes that each keep a core busy (%(default)s)")
    args = parser.parse_args(words)
    bandwidth = memory_bandwidth(args.device)
    print(f"memory is read at {bandwidth / 1e9:,.0f} GB/s on {describe_device(args.device)}\n")
    for name in args.models:
        shape, count = MODELS[name]
        model = GPT(GPTConfig(**shape)).eval().to(args.device)
        baseline, methods = make_methods(model, shape, count, args)
        with busy_processes(args.busy):
            speeds = measure_speeds(baseline, methods, args.rows, args.repeats)
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
    model: GPT, shape: dict[str, Any], count: int, args: argparse.Namespace
) -> tuple[str, dict[str, Method]]:
    """The name of the baseline, and all methods by name, each with its own copy of the model."""
    methods = {}
    for dtype, size in (("float32", 4), ("bfloat16", 2), ("int8", 1)):
        ours = GPT(GPTConfig(**shape)).eval()
        ours.to(args.device, torch.float32 if dtype == "float32" else torch.bfloat16)
        if args.device == "cpu":
            pack(ours, int8=dtype == "int8")
        elif dtype == "int8":  # for CPUs only
            continue
        methods[f"Folio, {dtype}"] = Method(partial(generate_cached, ours, count), size)
    for dtype in (torch.float32, torch.bfloat16):
        theirs = baselines.transformers_model(model).to(args.device, dtype)
        name = f"transformers, {str(dtype).removeprefix('torch.')}"
        methods[name] = Method(partial(baselines.generate_transformers, theirs, count), dtype.itemsize)
    if args.peer:
        baseline, recomputing = "nanoGPT, float32", baselines.nanogpt_model(args.peer, shape).to(args.device)
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
    run_script(main)
