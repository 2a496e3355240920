"""Generating text: sampling filters, the loop over tokens, stop strings. The decoders are in files of their own.

Dimensions: B batch (rows), T time, V vocabulary.
"""

import codecs
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from folio import UserError
from folio.randomness import hash64
from folio.runtime import Runtime
from folio.tokenizer import Tokenizer
from model import GPT, GPTConfig

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
    always kept; of equal ones at the end of the set, those with the lowest ids. logits: (..., V).
    """
    ordered, order = logits.sort(descending=True, dim=-1, stable=True)
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


def sample_token(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Sample by inverse transform: the first token at which the cumulative probability exceeds `uniform`.

    probabilities: (B, V). uniform: (B, 1) in [0, 1), on the sampling_device of the probabilities' device.
    Returns ids (B, 1) on the probabilities' device.
    """
    sums = probabilities.to(uniform.device).cumsum(dim=-1, dtype=torch.float64)
    return torch.searchsorted(sums, uniform * sums[:, -1:], right=True).to(probabilities.device)


# --- tokens -----------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One token of each row."""

    tokens: list[int | None]  # None for a row that has ended
    logits: Tensor  # (B, V), float32, before any filter; valid until the next step


class Samples(NamedTuple):
    """What to sample: row b is sample numbers[b] of prompts[b]. Its random numbers are a function of (seed,
    numbers[b], position).
    """

    prompts: Sequence[Sequence[int]]  # ids
    numbers: Sequence[int]
    sampling: Sampling
    seed: int
    vocab_size: int | None  # ids from it on, a model's padding, are never sampled


class Batch(Protocol):
    """Rows of tokens that are continued together."""

    logits: Tensor  # (B, V) in float32, after the newest token of each row
    steps_ahead: int  # steps to launch before a step's tokens are fetched, so that a GPU never waits for the host

    @property
    def lengths(self) -> list[int]:
        """How many tokens of each row have keys and values in the cache, or had before the context slid."""

    def prefill(self, contexts: dict[int, list[int]]) -> None:
        """Fill these rows of the cache with whole contexts, and compute the logits after them.

        An empty context empties its row. The other rows stay as they are.
        """

    def sample(self, rows: list[int]) -> Callable[[], list[int]]:
        """Sample the next token of these rows from their logits. Returns a function that fetches one of each row, which
        is meaningless for the other rows.
        """

    def step(self, rows: list[int]) -> Callable[[], list[int]]:
        """Append the tokens that were sampled last to these rows, and sample the next ones."""


class Decoder(Protocol):
    """A model's weights in the form that is fastest for decoding on its device."""

    config: GPTConfig

    @property
    def row_bytes(self) -> int:
        """How much memory a row of a batch takes."""

    def batch(self, samples: Samples) -> Batch: ...


def make_decoder(
    model: GPT, runtime: Runtime, dtype: str | None = None, weights: Mapping[str, Tensor] | None = None
) -> Decoder:
    """The decoder for the runtime's device. The model's weights must not change while it is used.

    dtype: "int8" or "int4" for a CPU; None: that of the weights. weights: as in CPUDecoder, for int8 and int4. Puts the
    model into eval mode. If the model or a sampling filter was changed, torch decodes. Raises UserError if that cannot
    compute in the dtype.
    """
    from folio.torch_decoder import TorchDecoder

    if runtime.device.type != "cpu":
        return TorchDecoder(model, runtime)
    from folio.cpu_decoder import CPUDecoder, computes_filters, computes_model

    if computes_model(model) and computes_filters():
        dtype = dtype or str(model.transformer.wte.weight.dtype).removeprefix("torch.")
        return CPUDecoder(model, dtype, weights)
    if dtype:
        changed = "model.py or folio/generate.py was changed"
        raise UserError(f"dtype={dtype}: {changed}, so torch decodes, which cannot compute in it; use --dtype=auto")
    return TorchDecoder(model, runtime)


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
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
    the batch. Raises UserError if the model computes NaN.

    A token attends to at most block_size tokens. When a row's context is full, its newest block_size - stride tokens
    are prefilled again at positions 0, 1, ..., followed by the new token. stride=1 costs a whole context per token;
    half of block_size, the default, costs half a context for that many tokens. If
    GPTConfig.can_slide, stride=None prefills nothing: the new token takes the place of the oldest one in the cache. (It
    then depends on older tokens too, through the keys and values that the layers computed from them.)
    """
    block_size = decoder.config.block_size
    slides = stride is None and decoder.config.can_slide
    window = block_size - min(stride or block_size // 2 or 1, block_size)
    contexts = [list(prompt)[-block_size:] for prompt in prompts]
    ended = [False] * len(contexts) if ended is None else ended
    limits = [max(1, block_size - len(prompt)) if max_new_tokens is None else max_new_tokens for prompt in prompts]
    numbers = range(len(contexts)) if samples is None else samples
    batch = decoder.batch(Samples(prompts, numbers, sampling or Sampling(), seed, vocab_size))

    def launch_steps() -> Iterator[tuple[Callable[[], list[int]], Tensor]]:
        """For each step a function that fetches its tokens, and the logits that they were sampled from."""
        batch.prefill(dict(enumerate(contexts)))
        if batch.logits.isnan().any():
            raise UserError(
                "the model computes NaN: use another checkpoint, or --dtype=float32 if its weights are good"
            )
        unread = [batch.sample(list(range(len(contexts))))]  # the steps that are not yet in `contexts`
        yield unread[-1], batch.logits
        for _ in range(max(limits) - 1):
            if slides:
                unread.clear()  # no context is prefilled again
            elif full := [row for row, length in enumerate(batch.lengths) if length == block_size]:
                for fetch in unread:
                    contexts[:] = [[*context, token] for context, token in zip(contexts, fetch(), strict=True)]
                unread.clear()
                for row in full:  # nothing for a row that has ended; the newest token follows below
                    contexts[row] = contexts[row][len(contexts[row]) - 1 - (0 if ended[row] else window) :]
                batch.prefill({row: contexts[row][:-1] for row in full})
            unread.append(batch.step([row for row, end in enumerate(ended) if not end]))
            yield unread[-1], batch.logits

    in_flight: deque = deque()
    count = 0  # tokens of each row so far
    for launched in chain(launch_steps(), [None] * batch.steps_ahead):
        in_flight.append(launched)
        if len(in_flight) <= batch.steps_ahead:
            continue
        fetch, logits = in_flight.popleft()
        tokens = fetch()
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


def default_prompt(tokenizer: Tokenizer) -> list[int]:
    """The prompt if none is given: the end-of-text token, else a line break, else the first token."""
    if tokenizer.eot is not None:
        return [tokenizer.eot]
    return [next((i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\n"), 0)]


# --- text -------------------------------------------------------------------------------------------------------------


class TextStream:
    """The text of one row as its tokens arrive: complete characters, up to the first of the `stop` strings to appear.

    Text that may turn out to be the beginning of one is held back until it is clear that it is not.
    """

    def __init__(self, tokenizer: Tokenizer, stop: str | Sequence[str] | None = None):
        self.tokenizer, self.stop = tokenizer, (stop,) if isinstance(stop, str) else tuple(stop or ())
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
        if found := [(self.held_back.index(stop), stop) for stop in self.stop if stop in self.held_back]:
            self.ended = True
            begin, _ = min(found, key=lambda at: (at[0] + len(at[1]), at[0]))  # complete first, however tokens are cut
            return self.held_back[:begin]
        keep = 0 if self.ended else max((overlap(self.held_back, stop) for stop in self.stop), default=0)
        end = len(self.held_back) - keep
        shown, self.held_back = self.held_back[:end], self.held_back[end:]
        return shown


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text are the beginning of `stop`, but not all of it."""
    longest = min(len(stop) - 1, len(text))
    return next(n for n in range(longest, -1, -1) if text.endswith(stop[:n]))


def stream_text(tokenizer: Tokenizer, steps: Iterator[Step]) -> Iterator[str]:
    """The text of the first row, piece by piece."""
    text = TextStream(tokenizer)
    for step in steps:
        yield text.push(step.tokens[0])
    yield text.push(None)
