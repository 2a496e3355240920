"""Parts 1 and 5 of tools/check_gpu.py: the rates of the hardware, and the speed and memory of training GPT-2."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from folio.machine import memory
from folio.machine.gpus import data_sheet
from folio.machine.kernels import adapt, describe_attention
from folio.machine.memory import HEADROOM, format_bytes
from folio.machine.runtime import Runtime, resolve_runtime
from folio.training.planning.forecast import Memory, training_memory
from lab.bench.baselines import copy_checkout
from lab.bench.timing import time_calls, wait_for
from lab.bench.training import (
    SUSTAINED_SECONDS,
    folio_speed,
    largest_operations,
    make_step,
    matmul_rate,
    nanogpt_speed,
)
from lab.gpu.part import Part, name_of, supported_dtypes, write_random_tokens
from model import GPT, GPTConfig

# --- 1 hardware -------------------------------------------------------------------------------------------------------


def check_hardware(part: Part) -> None:
    """Run a kernel, and measure the rates of matmuls and copies."""
    device, size = part.device, 512 if part.is_small else None
    result = (torch.ones(1000, device=device) + 1).sum().item()
    part.check(result == 2000, f"a kernel computes {result} instead of 2000")
    kinds = [(name_of(dtype), dtype, "highest") for dtype in supported_dtypes(device)]
    sheet = None
    if device.type == "cuda":
        sheet = data_sheet(torch.cuda.get_device_name(device))
        if torch.cuda.get_device_capability(device) >= (8, 0):
            kinds.append(("float32 as TF32", torch.float32, "high"))
    part.table("matmul", "TFLOP/s", "of the data sheet, bfloat16 or float16", "TFLOP/s, sustained")
    for name, dtype, precision in kinds:
        with part.attempt(f"matmul in {name}"):
            rate = matmul_rate(dtype, str(device), precision, size) / 1e12
            share = f"{rate / sheet.tflops:.0%}" if sheet and sheet.tflops else "unknown"
            sustained = matmul_rate(dtype, str(device), precision, size, SUSTAINED_SECONDS[device.type]) / 1e12
            part.row(name, f"{rate:.3g}", share, f"{sustained:.3g}")
    part.table("copy", "GB/s")
    part.row("on the device, read and written", f"{copy_rate(device, device, part.is_small) / 1e9:.3g}")
    if not part.is_small:
        cpu = torch.device("cpu")
        for pinned in (True, False) if device.type == "cuda" else (False,):
            host = "pinned host memory" if pinned else "host memory"
            part.row(f"{host} to the device", f"{copy_rate(cpu, device, pinned=pinned) / 1e9:.3g}")
            part.row(f"the device to {host}", f"{copy_rate(device, cpu, pinned=pinned) / 1e9:.3g}")


COPY_BYTES = 2**29


def copy_rate(source: torch.device, target: torch.device, small: bool = False, pinned: bool = False) -> float:
    """Bytes per second of copying a large tensor; on one device, bytes read plus bytes written."""
    size = 2**24 if small else COPY_BYTES
    pins = (pinned and device.type == "cpu" for device in (source, target))
    a, b = (
        torch.ones(size, dtype=torch.uint8, device=device, pin_memory=pin)
        for device, pin in zip((source, target), pins, strict=True)
    )

    def copy() -> None:
        b.copy_(a, non_blocking=pinned)
        wait_for(source)
        wait_for(target)

    copy()
    return (2 if source == target else 1) * size / min(time_calls(copy, 1) for _ in range(5))


# --- 5 training speed -------------------------------------------------------------------------------------------------

GPT2 = GPTConfig(bias=False)
SMALL_GPT2 = GPTConfig(block_size=32, vocab_size=300, n_layer=2, n_head=2, n_embd=64, bias=False)
BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)


def check_training_speed(part: Part, peer: str | None = None) -> None:
    """Measure steps with AdamW in the fastest dtype, compiled on CUDA. peer: a checkout of nanoGPT."""
    device, config = part.device, SMALL_GPT2 if part.is_small else GPT2
    runtime = resolve_runtime(str(device), "auto", "auto")  # as in a long run of train.py
    sizes = [4] if part.is_small else [size for size in (4, 16, 32, 64) if size == 4 or fits(config, size, runtime)]
    base = 32 if 32 in sizes else sizes[-1]
    options = dict(size=256 if part.is_small else None, seconds=SUSTAINED_SECONDS[device.type])
    matmul, sheet = matmul_rate(runtime.dtype, str(device), **options), runtime.peak_flops()
    model = meta_model(config)
    adapt(model, runtime)
    kernel = describe_attention(runtime, model)
    part.note(f"{runtime.description}; attention by {kernel}")
    backends = time_attention(part, config, base, runtime.dtype)
    if device.type != "mps":
        with part.attempt("profile"):
            profile(part, config, base, runtime)
    if peer:
        with part.attempt("nanoGPT"):
            compare_with_nanogpt(part, Path(peer), config, base, runtime)
    cells = [(base, True, None), (base, False, None), *((size, True, None) for size in sizes[::-1] if size != base)]
    if device.type == "cuda":
        others = [backend for backend in backends if name_of_backend(backend) not in kernel]
        cells[2:2] = [(base, True, backend) for backend in others if backend != SDPBackend.MATH]
    part.table("sequences", "vocabulary", "attention", "tokens/s", "MFU by the data sheet", "of a sustained matmul",
               "peak memory", "forecast", "first step, s")  # fmt: skip
    for size, padded, backend in cells:
        cell = str(size), "padded" if padded else "not padded", name_of_backend(backend) if backend else "default"
        what = ", ".join(cell)
        if part.is_late:
            part.note(f"not run: {what}")
            continue
        with part.attempt(what), sdpa_kernel(backend) if backend else nullcontext():
            speed, peak, first = training_speed(config, size, runtime, padded)
            flops, required = speed * config.flops_per_token()["total"], forecast(config, size, runtime).total
            mfu = f"{flops / sheet:.1%}" if sheet else "unknown", f"{flops / matmul:.1%}"
            bytes_cells = format_bytes(peak) if peak else "unknown", format_bytes(required)
            part.row(*cell, f"{speed:,.0f}", *mfu, *bytes_cells, f"{first:.1f}")
            too_much = peak and peak > HEADROOM * required
            part.check(not too_much, f"{what}: {HEADROOM} times the forecast is less than the peak memory")


def name_of_backend(backend: SDPBackend) -> str:
    """The name as in describe_attention."""
    return backend.name.removesuffix("_ATTENTION").lower()


def meta_model(config: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)


def forecast(config: GPTConfig, size: int, runtime: Runtime) -> Memory:
    kinds = dict(optimizer="adamw", dtype=runtime.dtype, device=runtime.device.type, compiled=bool(runtime.compile))
    return training_memory(meta_model(config), size, **kinds)


def fits(config: GPTConfig, size: int, runtime: Runtime) -> bool:
    available = memory.free(runtime.device)
    return available is not None and forecast(config, size, runtime).fits(available)


def free_memory(runtime: Runtime) -> None:
    """Free the memory of earlier training steps. Later steps are compiled again."""
    if runtime.compile:
        torch.compiler.reset()
    gc.collect()  # models in reference cycles, also with compiled code
    if runtime.device.type == "cuda":
        torch.cuda.empty_cache()


def new_step(config: GPTConfig, size: int, runtime: Runtime, padded: bool) -> Callable[[], None]:
    """A training step, compiled independently of earlier ones."""
    free_memory(runtime)
    if runtime.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(runtime.device)
    return make_step(config, size, runtime, "adamw", 128 if padded else 1)


def training_speed(config: GPTConfig, size: int, runtime: Runtime, padded: bool) -> tuple[float, int | None, float]:
    """Tokens per second, peak bytes of tensors (None: unknown), and seconds of the first step."""
    device, step = runtime.device, new_step(config, size, runtime, padded)
    first, _ = timed(step, 1, device), timed(step, 2, device)
    seconds = min(timed(step, 5, device) for _ in range(1 if device.type == "cpu" else 3)) / 5
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return size * config.block_size / seconds, peak, first


def timed(action: Callable[[], object], count: int, device: torch.device) -> float:
    """Seconds of some calls, until the device has finished them."""

    def run() -> None:
        time_calls(action, count)
        wait_for(device)

    wait_for(device)
    return time_calls(run, 1)


def time_attention(part: Part, config: GPTConfig, size: int, dtype: torch.dtype) -> list[SDPBackend]:
    """Measure attention by itself with each of torch's implementations. Returns those that are available."""
    H, T, D = config.n_head, config.block_size, config.n_embd // config.n_head
    q, k, v = (torch.randn(size, H, T, D, device=part.device, dtype=dtype, requires_grad=True) for _ in range(3))
    gradient = torch.randn_like(v)  # that of a sum would be expanded, which some kernels copy first
    flops = 14 * size * H * T**2 * D  # of 2 matmuls forward and 5 backward, also for masked scores

    def step() -> None:
        scaled_dot_product_attention(q, k, v, is_causal=True).backward(gradient)

    part.table("attention, forward and backward", "ms per layer", "TFLOP/s")
    available = []
    for backend in BACKENDS:
        try:
            with sdpa_kernel(backend):
                timed(step, 2, part.device)
                seconds = timed(step, 10, part.device) / 10
            part.row(name_of_backend(backend), f"{1000 * seconds:.3g}", f"{flops / seconds / 1e12:.3g}")
            available.append(backend)
        except RuntimeError as error:
            part.row(name_of_backend(backend), f"not available: {str(error).splitlines()[0]}", "")
    return available


def profile(part: Part, config: GPTConfig, size: int, runtime: Runtime) -> None:
    milliseconds, rows = largest_operations(new_step(config, size, runtime, True), part.device.type == "cpu")
    part.table(f"share of a step of {milliseconds:,.1f} ms, {size} sequences", "")
    for row in rows:
        part.row(*row)


def compare_with_nanogpt(part: Part, peer: Path, config: GPTConfig, size: int, runtime: Runtime) -> None:
    """Measure both train.py with the same shape on the same random tokens, alternating.

    nanoGPT's vocabulary is 50,304, because its copy of the data set has no meta.pkl.
    """
    checkout, data_dir = part.folder / "nanogpt", write_random_tokens(part, "random", config.vocab_size)
    copy_checkout(peer, checkout, data_dir, {"random"})
    (checkout / "data" / "random" / "meta.pkl").unlink()
    values = dict(n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd, block_size=config.block_size)
    values |= dict(batch_size=size, dataset="random", dropout=0.0, max_iters=20, eval_iters=1, log_interval=1)
    values |= dict(device=part.device, dtype=name_of(runtime.dtype), compile=runtime.compile)
    options = [f"--{name}={value}" for name, value in values.items()]
    own_options = [*options, f"--data_dir={data_dir}", "--eval_interval=20"]
    free_memory(runtime)  # both are other processes on the same GPU
    part.table(f"round, {size} sequences", "Folio, tokens/s", "nanoGPT, tokens/s", "ratio")
    for number in range(1 if part.is_small else 2):
        folio = folio_speed(own_options, part.folder)
        nanogpt = nanogpt_speed(options, checkout, size * config.block_size)
        part.row(number + 1, f"{folio:,.0f}", f"{nanogpt:,.0f}", f"{folio / nanogpt:.2f}")
