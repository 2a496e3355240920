"""Measure generation speed against baselines, alternating in one run.

    python lab/bench/sampling.py --models="char 10.7M" --peer=../nanoGPT
    python lab/bench/sampling.py --models="GPT-2 124M" --llama=../llama --temperature=0 --prompt_tokens=1000
    python lab/bench/sampling.py --models="GPT-2 124M" --device=cuda --rows=1,64

The models have random weights, which are the same for Folio, transformers' `generate`, and the baseline: one text after
another, without a cache. With --peer, a checkout of nanoGPT, the baseline is nanoGPT's `generate`. With --llama, a
folder with llama.cpp (npm install --prefix FOLDER node-llama-cpp), it is measured on the same weights. The last column
compares the speed per text, with the first number of rows, with the limit of reading all weights from memory once per
token.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from folio.base.settings import NonNegativeFloat, NonNegativeInt, comma_separated, run_script  # noqa: E402
from folio.data.tokenizer import CharTokenizer  # noqa: E402
from folio.decoding.language_model import GenerationConfig, LanguageModel  # noqa: E402
from lab.bench import baselines  # noqa: E402
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
)
from model import GPT, GPTConfig  # noqa: E402

MODELS = {  # name -> (arguments of GPTConfig, tokens to generate)
    "char 0.8M": (dict(block_size=64, vocab_size=65, n_layer=4, n_head=4, n_embd=128, bias=False), 400),
    "char 10.7M": (dict(block_size=256, vocab_size=65, n_layer=6, n_head=6, n_embd=384, bias=False), 255),
    "GPT-2 124M": (dict(block_size=1024, vocab_size=50257, n_layer=12, n_head=12, n_embd=768), 64),
}
FOLIO_DTYPES = {"float32": 4, "bfloat16": 2, "int8": 1, "int4": 18 / 32}  # bytes per weight
MIN_SECONDS = 0.5  # per measurement
LLAMA_MATRICES = ("F16", "Q8_0", "Q4_0")


@dataclass(frozen=True)
class SampleBenchConfig(BenchConfig):
    # --- measurements ---
    models: str = "char 0.8M,char 10.7M,GPT-2 124M"  # comma-separated
    rows: str = "1,10"  # texts per batch, comma-separated
    prompt_tokens: NonNegativeInt = 0  # also measure the time to the first token after a prompt of this length; 0: off
    temperature: NonNegativeFloat = 0.8  # with top_k=200; 0: greedy
    llama: str | None = None  # folder of node-llama-cpp, to compare with llama.cpp
    llama_threads: str = "1,2"  # numbers of threads of llama.cpp, comma-separated

    def problems(self) -> list[tuple[str, str]]:
        """Require known models, integers, and a CPU for llama.cpp."""
        problems = [
            *super().problems(),
            *unknown_names("models", self.models, MODELS),
            *not_integers("rows", self.rows, at_least=1),
            *not_integers("llama_threads", self.llama_threads, at_least=1),
        ]
        if self.llama and self.device != "cpu":
            problems.append(("llama", "llama.cpp is measured on a CPU; omit --llama, or use --device=cpu"))
        return problems


class Case(NamedTuple):
    """A prompt, the number of rows, and the number of tokens to generate."""

    prompt: tuple[int, ...]
    rows: int
    count: int

    @property
    def title(self) -> str:
        if self.count == 1:
            return f"first token after {len(self.prompt):,}, ms"
        return f"batch of {self.rows}, tokens/s"

    def format(self, speeds: list[float]) -> str:
        """speeds: tokens per second."""
        return format_median([1000 / speed for speed in speeds] if self.count == 1 else speeds)


class Method(NamedTuple):
    """A generation method."""

    speed: Callable[[Sequence[int], int, int], float]  # returns tokens per second, given a Case's fields
    bytes_per_token: float  # of the weights


def main(cfg: SampleBenchConfig) -> None:
    bandwidth = memory_bandwidth(cfg.device)
    print(f"memory bandwidth: {bandwidth / 1e9:,.0f} GB/s, on {describe_device(cfg.device)}\n")
    for name in comma_separated(cfg.models):
        shape, count = MODELS[name]
        cases = [Case((1,), int(rows), count) for rows in comma_separated(cfg.rows)]
        if 0 < cfg.prompt_tokens < shape["block_size"]:
            cases.append(Case(tuple(k % shape["vocab_size"] for k in range(cfg.prompt_tokens)), 1, 1))
        model = GPT(GPTConfig(**shape)).eval().to(cfg.device)
        titles = [head for case in cases for head in (case.title, "ratio")]
        with TemporaryDirectory() as folder, busy_processes(cfg.busy):
            methods = make_methods(model, shape, cfg, Path(folder))
            rows = measure_rows(methods, cases, cfg.repeats, bandwidth)
            print_table([f"{name}, {count} tokens", *titles, "of the memory limit"], rows)


def measure_rows(methods: dict[str, Method], cases: list[Case], repeats: int, bandwidth: float) -> Iterator[list[str]]:
    """Yield a table row per method. The first method is the baseline. bandwidth: bytes of memory per second."""
    calls = {(name, case): partial(method.speed, *case) for name, method in methods.items() for case in cases}
    speeds = alternate(calls, repeats)
    baseline = next(iter(methods))
    for name, method in methods.items():
        row = [name]
        for case in cases:
            row += [case.format(speeds[name, case]), format_ratios(speeds[name, case], speeds[baseline, case])]
        per_text = statistics.median(speeds[name, cases[0]]) / cases[0].rows
        yield [*row, f"{per_text * method.bytes_per_token / bandwidth:.0%}"]


def memory_bandwidth(device: str) -> float:
    """Measure the memory bandwidth of reading a large tensor, in bytes per second."""
    ones = torch.ones(300_000_000, device=device)
    return max(ones.nbytes / time_calls(lambda: ones.sum().item(), 1) for _ in range(5))


def make_methods(model: GPT, shape: dict[str, Any], cfg: SampleBenchConfig, folder: Path) -> dict[str, Method]:
    """Return all methods by name, the baseline first. folder: for llama.cpp's files."""
    parameters = model.num_params()
    weights = parameters["total"] - parameters["positions"]  # read once per token
    if cfg.peer:
        baseline, baseline_model = "nanoGPT, float32", baselines.nanogpt_model(Path(cfg.peer), shape).to(cfg.device)
    else:
        baseline, baseline_model = "baseline, float32", model
    generate = partial(baselines.generate_recomputed, baseline_model, cfg.temperature)
    methods = {baseline: timed(generate, 4 * weights)}
    for dtype in (torch.float32, torch.bfloat16):
        hf_model = baselines.transformers_model(model).to(cfg.device, dtype)
        name = f"transformers, {str(dtype).removeprefix('torch.')}"
        generate = partial(baselines.generate_transformers, hf_model, cfg.temperature)
        methods[name] = timed(generate, dtype.itemsize * weights)
    if cfg.llama:
        for matrices in LLAMA_MATRICES:
            file = folder / f"{matrices}.gguf"
            size = baselines.write_llama_model(model, file, matrices)
            for threads in map(int, comma_separated(cfg.llama_threads)):
                speed = partial(baselines.llama_speed, Path(cfg.llama), file, threads, cfg.temperature)
                methods[f"llama.cpp, {matrices}, {threads} threads"] = Method(speed, size)
    tokenizer = CharTokenizer("".join(map(chr, range(shape["vocab_size"]))))
    for dtype, size in FOLIO_DTYPES.items():
        if dtype in ("float32", "bfloat16") or cfg.device == "cpu":
            folio_model = LanguageModel(model, tokenizer, cfg.device, dtype)
            methods[f"Folio, {dtype}"] = timed(partial(generate_folio, folio_model, cfg.temperature), size * weights)
    return methods


def timed(generate: Callable[[Sequence[int], int, int], list[list[int]]], bytes_per_token: float) -> Method:
    """Return a method that times `generate`, repeatedly if it is fast. generate: returns the generated ids."""

    def speed(prompt: Sequence[int], rows: int, count: int) -> float:
        start, tokens = time.perf_counter(), 0
        while (seconds := time.perf_counter() - start) < MIN_SECONDS:
            tokens += sum(map(len, generate(prompt, rows, count)))
        return tokens / seconds

    return Method(speed, bytes_per_token)


def generate_folio(
    model: LanguageModel, temperature: float, prompt: Sequence[int], rows: int, count: int
) -> list[list[int]]:
    """Generate with Folio, like the methods of lab/bench/baselines.py."""
    config = GenerationConfig(max_new_tokens=count, temperature=temperature, top_k=baselines.TOP_K)
    (batch,) = model.batches([(prompt, sample) for sample in range(rows)], config.replace(batch_size=rows))
    steps = [step.tokens for step in batch.steps]
    return [list(ids) for ids in zip(*steps, strict=True)]


if __name__ == "__main__":
    run_script(main, SampleBenchConfig)
