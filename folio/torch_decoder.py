"""Decoding with torch, on any device: prefill, steps with a key-value cache, CUDA graphs, and sampling on the device.

Dimensions: B batch (rows), T time, V vocabulary.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from folio.generate import Samples, next_token_probabilities, sample_token, uniforms
from folio.kv_cache import KVCache
from folio.runtime import Runtime
from model import GPT

STEPS_AHEAD = {"cuda": 1}


class TorchDecoder:
    """A model on its device. Puts it into eval mode."""

    def __init__(self, model: GPT, runtime: Runtime):
        self.model, self.config, self.runtime = model.eval(), model.config, runtime

        # torch's CPU kernel for one query and many keys is 2 to 5 times as fast in float32 as in bfloat16.
        self.cache_dtype = torch.float32 if runtime.device.type == "cpu" else runtime.dtype

    @property
    def row_bytes(self) -> int:
        """Two caches (full contexts are prefilled into a second one), a block's activations, and logits."""
        context = self.cache_dtype.itemsize * self.config.block_size * self.config.n_embd  # of one activation
        return (2 * 2 * self.config.n_layer + 16) * context + 32 * self.config.vocab_size

    def batch(self, samples: Samples) -> "TorchBatch":
        return TorchBatch(self, samples)


class TorchBatch:
    """Rows of a batch, which all take part in each step, as if those that have ended had not."""

    def __init__(self, decoder: TorchDecoder, samples: Samples):
        self.model, self.runtime, rows = decoder.model, decoder.runtime, len(samples.prompts)
        model, runtime = self.model, self.runtime
        self.sampler = TokenSampler(samples, runtime.device)
        self.steps_ahead = STEPS_AHEAD.get(runtime.device.type, 0)
        self.cache = KVCache(model.config, rows, decoder.cache_dtype, runtime.device)
        self.logits = torch.zeros(rows, model.config.vocab_size, device=runtime.device)
        self.chosen = torch.zeros(rows, 1, dtype=torch.long, device=runtime.device)
        # Autocast's copies of the weights would not outlive a capture.
        capturable = runtime.device.type == "cuda" and model.transformer.wte.weight.dtype == runtime.dtype
        self.forward = CUDAGraphDecoder(model, self.cache) if capturable else partial(model.forward, attend=self.cache)

    @property
    def lengths(self) -> list[int]:
        return self.cache.lengths

    @torch.inference_mode()
    def prefill(self, contexts: dict[int, list[int]]) -> None:
        """Contexts of one length are computed together, and equal contexts only once."""
        cache, logits = self.cache, self.logits.clone()
        for length in sorted({len(context) for context in contexts.values()} - {0}):
            rows_of: dict[tuple[int, ...], list[int]] = {}
            for row, context in contexts.items():
                if len(context) == length:
                    rows_of.setdefault(tuple(context), []).append(row)
            part = KVCache(self.model.config, len(rows_of), cache.kv.dtype, self.runtime.device)
            with inference_context(self.model, self.runtime):
                idx = torch.tensor(list(rows_of), device=self.runtime.device)
                part_logits, _ = self.model(idx, attend=part)  # (n, 1, V)
            for n, rows in enumerate(rows_of.values()):
                cache.kv[:, :, rows, :, :length] = part.kv[:, :, n : n + 1, :, :length]
                logits[rows] = part_logits[n, -1].float()
        lengths = dict(enumerate(cache.lengths)) | {row: len(context) for row, context in contexts.items()}
        cache.set_lengths(list(lengths.values()))
        self.logits = logits

    @torch.inference_mode()
    def sample(self, rows: list[int]) -> Callable[[], list[int]]:
        self.chosen = self.sampler.sample(self.logits)
        return to_host(self.chosen)

    @torch.inference_mode()
    def step(self, rows: list[int]) -> Callable[[], list[int]]:
        with inference_context(self.model, self.runtime):
            self.logits = self.forward(self.chosen)[0][:, 0].float()
        return self.sample(rows)


def inference_context(model: GPT, runtime: Runtime) -> AbstractContextManager:
    """The context of a forward pass: none for weights that are in the runtime's dtype, else its autocast."""
    return nullcontext() if model.transformer.wte.weight.dtype == runtime.dtype else runtime.compute()


def sampling_device(device: torch.device) -> torch.device:
    """Where to sample tokens for a model on `device`: there, or on the CPU for devices without float64 (Apple's)."""
    return device if device.type in ("cpu", "cuda") else torch.device("cpu")


class TokenSampler:
    """Samples each row's next token."""

    CHUNK = 1024  # steps whose random numbers are computed together

    def __init__(self, samples: Samples, device: torch.device):
        self.samples, self.device = samples, device
        self.step = 0
        self.occurred: Tensor | None = None  # (B, V) of bool, for the repetition penalty

    def sample(self, logits: Tensor) -> Tensor:
        """The tokens of the next step, (B, 1), from logits (B, V)."""
        prompts, sample_numbers, sampling, seed, vocab_size = self.samples
        if vocab_size is not None and vocab_size < logits.shape[-1]:
            logits[:, vocab_size:] = -torch.inf
        penalizes = sampling.repetition_penalty != 1
        if sampling.temperature == 0 and not penalizes:
            return logits.argmax(dim=-1, keepdim=True)
        if penalizes and self.occurred is None:
            self.occurred = torch.zeros(logits.shape, dtype=torch.bool, device=self.device)
            for row, prompt in enumerate(prompts):
                self.occurred[row, torch.tensor(list(prompt))] = True
        if self.step % self.CHUNK == 0:
            numbers = uniforms(seed, sample_numbers, self.step, self.CHUNK)
            self.numbers = numbers.to(sampling_device(self.device)).T[:, :, None].unbind()  # (B, 1) for each step
        probabilities = next_token_probabilities(logits, sampling, self.occurred)  # (B, V)
        ids = sample_token(probabilities, self.numbers[self.step % self.CHUNK])
        if self.occurred is not None:
            self.occurred.scatter_(1, ids, True)
        self.step += 1
        return ids


def to_host(chosen: Tensor) -> Callable[[], list[int]]:
    """Return a function that fetches the ids (B, 1) as a list. On CUDA it does not wait for later work."""
    if chosen.device.type != "cuda":
        return chosen[:, 0].tolist
    host = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=True)
    host.copy_(chosen, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def fetch() -> list[int]:
        copied.synchronize()
        return host[:, 0].tolist()

    return fetch


class CUDAGraphDecoder:
    """One token per row on CUDA, captured as graphs, because launching the small kernels one by one takes longer than
    running them. Each graph attends to a fixed number of positions, a multiple of GRANULARITY.
    """

    GRANULARITY = 256

    def __init__(self, model: GPT, cache: KVCache):
        self.model, self.cache = model, cache
        self.ids = torch.zeros(len(cache.lengths), 1, dtype=torch.long, device=cache.kv.device)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def __call__(self, ids: Tensor) -> tuple[Tensor, None]:
        """Like the model's forward: ids (B, 1) to logits (B, 1, V) and no loss."""
        self.ids.copy_(ids)
        lengths = [length + 1 for length in self.cache.lengths]
        capacity = -(-max(lengths) // self.GRANULARITY) * self.GRANULARITY
        capacity = min(capacity, self.model.config.block_size)
        if capacity not in self.graphs:
            self.graphs[capacity] = self.capture(capacity)
        graph, logits = self.graphs[capacity]
        graph.replay()
        self.cache.lengths = lengths
        return logits.clone(), None

    def capture(self, capacity: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        lengths, last = self.cache.lengths, self.cache.last.clone()
        self.cache.capacity = capacity
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # keeps what kernels allocate at their first call out of the graph
            self.model.forward(self.ids, attend=self.cache)
        torch.cuda.current_stream().wait_stream(stream)
        self.cache.last.copy_(last)
        with torch.cuda.graph(graph):
            logits, _ = self.model.forward(self.ids, attend=self.cache)
        self.cache.capacity, self.cache.lengths = None, lengths
        return graph, logits
