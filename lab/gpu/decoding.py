"""Parts 4 and 6 of tools/check_gpu.py: the tokens and the speed of decoding."""

import threading
import time
from functools import partial

import torch

from folio.data.tokenizer import ByteTokenizer
from folio.decoding.decoders import Decoder, make_decoder
from folio.decoding.language_model import LanguageModel
from folio.decoding.sampling import Sampling
from folio.decoding.scheduler import Completion, generate
from folio.decoding.torch_decoder import CUDAGraphDecoder, TorchDecoder
from folio.machine.memory import format_bytes
from folio.machine.runtime import resolve_runtime
from folio.web.engine import Engine
from lab.gpu.correctness import small_model
from lab.gpu.part import Part, name_of, supported_dtypes
from lab.gpu.speed import GPT2, SMALL_GPT2, copy_rate
from model import GPT, POSITIONS

SAMPLINGS = {
    "greedy": Sampling(temperature=0),
    "sampled": Sampling(temperature=0.9, top_k=50, top_p=0.95, repetition_penalty=1.1),
}


def check_tokens(part: Part) -> None:
    """Compare tokens in float32 with those of the CPU: of torch's decoder, of a server's thread, and on the last GPU.

    The rows have unequal lengths. The longest one fills its context, and changes from one CUDA graph to another.
    """
    block_size, count = (48, 16) if part.is_small else (320, 100)
    generator = torch.Generator().manual_seed(4)
    lengths = (block_size - count // 2, 3, block_size // 3, 1)
    prompts = [torch.randint(256, (length,), generator=generator).tolist() for length in lengths]
    last = torch.device("cuda", torch.cuda.device_count() - 1) if part.device.type == "cuda" else part.device
    places = {"the device": (part.device, decode_with_torch), "a thread": (part.device, decode_in_thread)}
    if last != part.device:
        places["a thread, last GPU"] = last, decode_in_thread
    part.table("position", "sampling", "rows x tokens", *places)
    for position in POSITIONS:
        model = small_model(position, ByteTokenizer.vocab_size, block_size, 0.1)
        on_cpu = make_decoder(model, resolve_runtime("cpu", "float32", False))
        for name, sampling in SAMPLINGS.items():
            expected, cells = decode(on_cpu, prompts, count, sampling), []
            for place, (device, decode_there) in places.items():
                what, failures = f"{position}, {name}, {place}", part.failures
                with part.attempt(what):
                    gpt = LanguageModel(model, ByteTokenizer(), str(device), "float32")
                    tokens = decode_there(gpt, prompts, count, sampling)
                    rows = [row for row, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b]
                    part.check(not rows, f"{what}: the tokens of rows {rows} are not those of the CPU")
                cells.append(part.result_since(failures))
            part.row(position, name, f"{len(prompts)} x {count}", *cells)


def decode(decoder: Decoder, prompts: list[list[int]], count: int, sampling: Sampling) -> list[list[int]]:
    """The tokens that are generated after each prompt."""
    rows: list[list[int]] = [[] for _ in prompts]
    for step in generate(decoder, prompts, max_new_tokens=count, sampling=sampling, eot=ByteTokenizer.eot):
        for row, token in zip(rows, step.tokens, strict=True):
            if token is not None:
                row.append(token)
    return rows


def decode_with_torch(gpt: LanguageModel, prompts: list[list[int]], count: int, sampling: Sampling) -> list[list[int]]:
    """`decode` with torch, also on a CPU."""
    return decode(TorchDecoder(gpt.model, gpt.runtime), prompts, count, sampling)


def decode_in_thread(gpt: LanguageModel, prompts: list[list[int]], count: int, sampling: Sampling) -> list[list[int]]:
    """`decode` in the thread of a server's engine. Raises RuntimeError if it fails."""
    engine, updated = Engine(gpt, rows=len(prompts)), threading.Event()
    new_completion = partial(Completion, sampling=sampling, max_new_tokens=count, notify=updated.set)
    completions = [new_completion(prompt, sample=row) for row, prompt in enumerate(prompts)]
    engine.submit(completions)
    while not all(completion.finish_reason for completion in completions):
        updated.wait()
        updated.clear()
    engine.close()
    if error := next((completion.error for completion in completions if completion.error), None):
        raise RuntimeError(error)
    return [completion.tokens for completion in completions]


def check_speed(part: Part) -> None:
    """Compare with the memory bandwidth: a step reads the weights and the cached positions that its graph covers."""
    device, config = part.device, SMALL_GPT2 if part.is_small else GPT2
    runtime = resolve_runtime(str(device), name_of(supported_dtypes(device)[0]), False)
    model, bandwidth = GPT(config).to(device, runtime.dtype), copy_rate(device, device, part.is_small)
    weights = sum(p.nbytes for name, p in model.named_parameters() if "wpe" not in name)
    positions = min(CUDAGraphDecoder.GRANULARITY, config.block_size)
    row_bytes = 2 * config.n_layer * config.n_embd * runtime.dtype.itemsize * positions
    part.note(f"{format_bytes(weights)} of weights in {name_of(runtime.dtype)}, {bandwidth / 1e9:,.0f} GB/s in a copy")
    part.table("rows", "tokens/s", "ms per step", "limit by memory bandwidth, tokens/s", "share")
    for rows in (1, 4) if part.is_small else (1, 64):
        with part.attempt(f"{rows} rows"):
            speed = decoding_speed(TorchDecoder(model, runtime), rows, 16 if part.is_small else 200)
            limit = rows * bandwidth / (weights + rows * row_bytes)
            part.row(rows, f"{speed:,.0f}", f"{1000 * rows / speed:.3g}", f"{limit:,.0f}", f"{speed / limit:.0%}")


def decoding_speed(decoder: TorchDecoder, rows: int, count: int) -> float:
    """Tokens per second after the first steps, which capture a graph."""
    sampling = Sampling(temperature=0.8, top_k=200)
    steps = generate(decoder, [[1] * 16] * rows, max_new_tokens=count, sampling=sampling)
    for _ in range(count // 8):
        next(steps)
    start_time = time.perf_counter()
    tokens = sum(len(step.tokens) for step in steps)
    return tokens / (time.perf_counter() - start_time)
