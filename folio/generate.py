"""Generating text: sampling filters, prefill, decoding with a key-value cache, stop strings.

Dimensions: B batch (rows), T time, V vocabulary.
"""

import codecs
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from folio import UserError
from folio.kv_cache import KVCache
from folio.randomness import hash64
from folio.runtime import Runtime
from folio.tokenizer import Tokenizer
from model import GPT

# --- filters ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """How a token is sampled from logits. The filters apply in this order, as in transformers."""

    repetition_penalty: float = 1.0  # divides the logits of tokens that occurred before; 1: off (Keskar et al. 2019)
    temperature: float = 1.0  # divides all logits; 0: always the most likely token
    top_k: int | None = None  # keep the k most likely tokens
    top_p: float | None = None  # keep the smallest set of most likely tokens whose probabilities sum to p or more
    min_p: float | None = None  # keep tokens whose probability is at least min_p times the largest


def penalize(logits: Tensor, occurred: Tensor, penalty: float) -> Tensor:
    """Divide the logits (..., V) of tokens that occurred (..., V) by the penalty; negative logits are multiplied by it.

    "CTRL" (Keskar et al. 2019), section 4.1, as implemented in transformers.
    """
    return torch.where(occurred, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Set all but the k largest logits (..., V) to -inf. Ties with the k-th largest are kept."""
    if k >= logits.shape[-1]:
        return logits
    kth = logits.topk(k).values[..., -1:]
    return logits.masked_fill(logits < kth, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the smallest set of most likely tokens whose probabilities sum to p or more; set other logits to -inf.

    Nucleus sampling: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration". The most likely token is
    always kept. logits: (..., V).
    """
    ordered, order = logits.sort(descending=True, dim=-1)
    probabilities = ordered.softmax(dim=-1)
    dropped = probabilities.cumsum(dim=-1) - probabilities >= p  # the sum over more likely tokens
    dropped[..., 0] = False  # even if p is so small that it is 0 in float32
    return logits.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Set logits (..., V) to -inf where the probability is below p times the largest (Nguyen et al. 2024)."""
    probabilities = logits.softmax(dim=-1)
    return logits.masked_fill(probabilities < p * probabilities.amax(dim=-1, keepdim=True), -torch.inf)


def next_token_probabilities(logits: Tensor, sampling: Sampling, occurred: Tensor | None = None) -> Tensor:
    """The distribution that the next token is sampled from: logits (..., V) to probabilities (..., V).

    occurred: which tokens occur in the text so far, (..., V) of bool, for the penalty. temperature=0 gives the most
    likely token probability 1.
    """
    if occurred is not None and sampling.repetition_penalty != 1:
        logits = penalize(logits, occurred, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p is not None:
        logits = keep_top_p(logits, sampling.top_p)
    if sampling.min_p is not None:
        logits = keep_min_p(logits, sampling.min_p)
    return logits.softmax(dim=-1)


def uniforms(seed: int, samples: Sequence[int], first: int, count: int) -> Tensor:
    """Uniform numbers in [0, 1), float64, (samples, count): one per sample and position first .. first + count - 1.

    Each is a function of (seed, sample, position), so that sample k is the same in any batch.
    """
    rows = np.array(samples, dtype=np.uint64)[:, None]
    bits = hash64(seed, rows, np.arange(first, first + count, dtype=np.uint64)) >> np.uint64(11)
    return torch.from_numpy(bits.astype(np.float64) * 2.0**-53)


def sampling_device(device: torch.device) -> torch.device:
    """Where to sample tokens for a model on `device`: there, or on the CPU for devices without float64 (Apple's)."""
    return device if device.type in ("cpu", "cuda") else torch.device("cpu")


def sample_token(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Sample by inverse transform: the first token at which the cumulative probability exceeds `uniform`.

    probabilities: (B, V). uniform: (B, 1) in [0, 1), on the sampling_device of the probabilities' device.
    Returns ids (B, 1) on the probabilities' device.
    """
    sums = probabilities.to(uniform.device).cumsum(dim=-1, dtype=torch.float64)
    return torch.searchsorted(sums, uniform * sums[:, -1:], right=True).to(probabilities.device)


# --- tokens -----------------------------------------------------------------------------------------------------------


class TokenSampler:
    """Samples each row's next token. Row b is sample samples[b]; its random numbers are a function of (seed, sample,
    position). Ids from vocab_size on are never sampled.
    """

    CHUNK = 1024  # steps whose random numbers are computed together

    def __init__(
        self,
        sampling: Sampling,
        prompts: Sequence[Sequence[int]],
        samples: Sequence[int],
        seed: int,
        steps: int,
        vocab_size: int | None,
        device: torch.device,
    ):
        self.sampling, self.prompts, self.samples, self.seed = sampling, prompts, samples, seed
        self.steps, self.vocab_size, self.device = steps, vocab_size, device
        self.occurred: Tensor | None = None  # (B, V) of bool, for the repetition penalty

    def sample(self, logits: Tensor, step: int) -> Tensor:
        """The tokens of step 0, 1, ..., (B, 1), from logits (B, V)."""
        if self.vocab_size is not None and self.vocab_size < logits.shape[-1]:
            logits[:, self.vocab_size :] = -torch.inf
        penalizes = self.sampling.repetition_penalty != 1
        if self.sampling.temperature == 0 and not penalizes:
            return logits.argmax(dim=-1, keepdim=True)
        if penalizes and self.occurred is None:
            self.occurred = torch.zeros(logits.shape, dtype=torch.bool, device=self.device)
            for row, prompt in enumerate(self.prompts):
                self.occurred[row, torch.tensor(list(prompt))] = True
        if step % self.CHUNK == 0:
            numbers = uniforms(self.seed, self.samples, step, min(self.CHUNK, self.steps - step))
            self.numbers = numbers.to(sampling_device(self.device)).T[:, :, None].unbind()  # (B, 1) for each step
        probabilities = next_token_probabilities(logits, self.sampling, self.occurred)  # (B, V)
        ids = sample_token(probabilities, self.numbers[step % self.CHUNK])
        if self.occurred is not None:
            self.occurred.scatter_(1, ids, True)
        return ids


STEPS_AHEAD = {"cuda": 1}  # steps launched before a step's tokens are fetched, so that a GPU never waits for the host


class Step(NamedTuple):
    """One token of each row."""

    tokens: list[int | None]  # None for a row that has ended
    logits: Tensor  # (B, V), float32, before any filter


@torch.inference_mode()
def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    runtime: Runtime,
    *,
    max_new_tokens: int | None,
    sampling: Sampling | None = None,
    vocab_size: int | None = None,
    eot: int | None = None,
    seed: int = 1337,
    samples: Sequence[int] | None = None,
    stride: int | None = None,
    ended: list[bool] | None = None,
) -> Iterator[Step]:
    """Yield the tokens that follow each prompt (at least one id each), one step at a time, until all rows have ended.

    A row ends before the id `eot`, when the caller sets its entry of `ended`, or after max_new_tokens (None: as many as
    fit into block_size after its prompt, at least one). Ids from `vocab_size` on, a model's padding, are never sampled.
    Row b is sample samples[b] (default: b), whose random numbers are a function of (seed, sample, position), whatever
    the batch. Puts the model into eval mode.

    A token attends to at most block_size tokens. When a row's context is full, its newest block_size - stride tokens
    are prefilled again at positions 0, 1, ..., followed by the new token. stride=1 costs a whole context per token;
    half of block_size, the default, costs half a context for that many tokens. If
    GPTConfig.can_slide, stride=None prefills nothing: the new token takes the place of the oldest one in the cache. (It
    then depends on older tokens too, through the keys and values that the layers computed from them.)
    """
    model.eval()
    block_size = model.config.block_size
    slides = stride is None and model.config.can_slide
    window = block_size - min(stride or block_size // 2 or 1, block_size)
    contexts = [list(prompt)[-block_size:] for prompt in prompts]
    ended = [False] * len(contexts) if ended is None else ended
    limits = [max(1, block_size - len(prompt)) if max_new_tokens is None else max_new_tokens for prompt in prompts]
    most = max(limits)
    samples = range(len(contexts)) if samples is None else samples
    sampler = TokenSampler(sampling or Sampling(), prompts, samples, seed, most, vocab_size, runtime.device)
    # torch's CPU kernel for one query and many keys is 2 to 5 times as fast in float32 as in bfloat16.
    dtype = torch.float32 if runtime.device.type == "cpu" else runtime.dtype
    cache = KVCache(model.config, len(contexts), dtype, runtime.device)
    # Autocast's copies of the weights would not outlive a capture.
    capturable = runtime.device.type == "cuda" and model.transformer.wte.weight.dtype == runtime.dtype
    forward = CUDAGraphDecoder(model, cache) if capturable else partial(model.forward, attend=cache)

    def launch_steps() -> Iterator[tuple[Callable[[], list[list[int]]], Tensor]]:
        """For each step a function that fetches its tokens, [[id], ...], and the logits they were sampled from."""
        logits = prefill(model, cache, dict(enumerate(contexts)), runtime)  # (B, V)
        if logits.isnan().any():
            raise UserError(
                "the model computes NaN: use another checkpoint, or --dtype=float32 if its weights are good"
            )
        unread = []  # the steps that are not yet in `contexts`
        for step in range(most):
            chosen = sampler.sample(logits, step)  # (B, 1)
            unread.append(to_host(chosen))
            yield unread[-1], logits
            if step + 1 == most:
                return
            if slides:
                unread.clear()  # no context is prefilled again
            elif full := [row for row, length in enumerate(cache.lengths) if length == block_size]:
                for tokens in unread:
                    contexts[:] = [context + token for context, token in zip(contexts, tokens(), strict=True)]
                unread.clear()
                for row in full:  # nothing for a row that has ended; the newest token follows below
                    contexts[row] = contexts[row][len(contexts[row]) - 1 - (0 if ended[row] else window) :]
                prefill(model, cache, {row: contexts[row][:-1] for row in full}, runtime)
            with inference_context(model, runtime):
                logits = forward(chosen)[0][:, 0].float()

    in_flight: deque = deque()
    steps_ahead = STEPS_AHEAD.get(runtime.device.type, 0)
    count = 0  # tokens of each row so far
    for launched in chain(launch_steps(), [None] * steps_ahead):
        in_flight.append(launched)
        if len(in_flight) <= steps_ahead:
            continue
        fetch, logits = in_flight.popleft()
        tokens = [token for (token,) in fetch()]
        for row, token in enumerate(tokens):
            ended[row] = ended[row] or token == eot
        if all(ended):
            return
        yield Step([None if end else token for token, end in zip(tokens, ended, strict=True)], logits)
        count += 1
        for row, limit in enumerate(limits):
            ended[row] = ended[row] or count >= limit
        if all(ended):
            return


def to_host(chosen: Tensor) -> Callable[[], list[list[int]]]:
    """Return a function that fetches the ids (B, 1) as lists. On CUDA it does not wait for work launched after them."""
    if chosen.device.type != "cuda":
        return chosen.tolist
    host = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=True)
    host.copy_(chosen, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def fetch() -> list[list[int]]:
        copied.synchronize()
        return host.tolist()

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


def prefill(model: GPT, cache: KVCache, contexts: dict[int, list[int]], runtime: Runtime) -> Tensor:
    """Fill these rows of the cache with whole contexts, which may be empty; the other rows stay as they are.

    Returns the logits after each context, (B, V) in float32; zeros in rows without one. Contexts of one length are
    computed together, and equal contexts only once.
    """
    logits = torch.zeros(len(cache.lengths), model.config.vocab_size, device=runtime.device)
    for length in sorted({len(context) for context in contexts.values()} - {0}):
        rows_of: dict[tuple[int, ...], list[int]] = {}
        for row, context in contexts.items():
            if len(context) == length:
                rows_of.setdefault(tuple(context), []).append(row)
        part = KVCache(model.config, len(rows_of), cache.kv.dtype, runtime.device)
        with inference_context(model, runtime):
            part_logits, _ = model(torch.tensor(list(rows_of), device=runtime.device), attend=part)  # (n, 1, V)
        for n, rows in enumerate(rows_of.values()):
            cache.kv[:, :, rows, :, :length] = part.kv[:, :, n : n + 1, :, :length]
            logits[rows] = part_logits[n, -1].float()
    lengths = dict(enumerate(cache.lengths)) | {row: len(context) for row, context in contexts.items()}
    cache.set_lengths(list(lengths.values()))
    return logits


def inference_context(model: GPT, runtime: Runtime) -> AbstractContextManager:
    """The context of a forward pass: none for weights that are in the runtime's dtype, else its autocast."""
    return nullcontext() if model.transformer.wte.weight.dtype == runtime.dtype else runtime.compute()


def default_prompt(tokenizer: Tokenizer) -> list[int]:
    """The prompt if none is given: the end-of-text token, else a line break, else the first token."""
    if tokenizer.eot is not None:
        return [tokenizer.eot]
    return [next((i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\n"), 0)]


# --- text -------------------------------------------------------------------------------------------------------------


class TextStream:
    """The text of one row as its tokens arrive: complete characters, up to the first `stop` string.

    Text that may turn out to be the beginning of `stop` is held back until it is clear that it is not.
    """

    def __init__(self, tokenizer: Tokenizer, stop: str | None = None):
        self.tokenizer, self.stop = tokenizer, stop
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.held_back = ""
        self.ended = False

    def push(self, token: int | None) -> str:
        """The text that can be shown after this token; None marks the end of the row."""
        if self.ended:
            return ""
        self.ended = token is None
        token_bytes = b"" if token is None else self.tokenizer.token_bytes(token)
        self.held_back += self.decoder.decode(token_bytes, final=token is None)
        if self.stop and self.stop in self.held_back:
            self.ended = True
            return self.held_back[: self.held_back.index(self.stop)]
        keep = 0  # characters
        if self.stop and not self.ended:
            longest = min(len(self.stop) - 1, len(self.held_back))
            keep = next(n for n in range(longest, -1, -1) if self.held_back.endswith(self.stop[:n]))
        end = len(self.held_back) - keep
        shown, self.held_back = self.held_back[:end], self.held_back[end:]
        return shown


def stream_text(tokenizer: Tokenizer, steps: Iterator[Step]) -> Iterator[str]:
    """The text of the first row, piece by piece."""
    text = TextStream(tokenizer)
    for step in steps:
        yield text.push(step.tokens[0])
    yield text.push(None)
