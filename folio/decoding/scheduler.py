"""Continuous batching ("Orca", Yu et al. 2022): completions join and leave the rows of a batch between decoding steps.

`generate` runs a scheduler for one batch of prompts, an Engine (folio/web/engine.py) for requests as they arrive.

Dimensions: B batch (rows), V vocabulary.
"""

import sys
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from folio import UserError
from folio.decoding.decoders import Decoder
from folio.decoding.kv_cache import Prefix, split_documents
from folio.decoding.sampling import Sample, Sampling
from model import POSITIONS

NAN = "the model computes NaN: use another checkpoint, or --dtype=float32 if its weights are good"
RECENT = 16  # the first rows of a batch, in which the least recently used context is overwritten first

# --- completions ------------------------------------------------------------------------------------------------------


class TokenLogprobs(NamedTuple):
    """Log-probabilities in nats under the model, before temperature, penalties, and filters."""

    logprob: float  # of the token
    top: list[tuple[int, float]]  # the most likely tokens and their log-probabilities, in descending order


@dataclass(eq=False)
class Completion:
    """A continuation of a prompt. Only the scheduler writes its results."""

    prompt: Sequence[int]  # ids, at least one
    sampling: Sampling
    max_new_tokens: int | None = None  # None: until the context is full, at least one
    seed: int = 1337
    sample: int = 0  # number of the sample: random numbers are a function of (seed, sample, position)
    context_stride: int | None = None  # see `generate`
    logprobs: int | None = None  # None: no log-probabilities; k: those of each token and of the k most likely ones
    notify: Callable[[], None] | None = None  # called by an Engine's thread when there are new results
    # --- results ---
    tokens: list[int] = field(default_factory=list)  # without the end-of-text token
    token_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each token, appended before it
    finish_reason: Literal["stop", "length", "cancelled", "error"] | None = None  # set last; stop: end of text
    error: str = ""  # the message, if finish_reason is "error"
    row: int | None = None  # its row of the batch, while it has one


class LaunchedStep(NamedTuple):
    """A step whose tokens are not fetched yet."""

    completions: dict[int, Completion]  # by row
    fetch: Callable[[], list[int]]
    logits: Tensor  # (B, V) from which the tokens were sampled


class Scheduler:
    """Decodes completions in the rows of a batch. Completions wait for a free row, first come first served."""

    def __init__(self, decoder: Decoder, rows: int, vocab_size: int | None = None, eot: int | None = None):
        self.batch = decoder.batch(rows, vocab_size)
        self.block_size, self.can_slide = decoder.config.block_size, POSITIONS[decoder.config.position].can_slide
        self.vocab_size, self.eot = vocab_size or decoder.config.vocab_size, eot
        self.document_token = decoder.config.document_token
        self.capacity = self.block_size - self.batch.steps_ahead  # maximum length of a context that a step can extend
        self.logits = self.batch.logits  # from which the tokens that `step` returned were sampled
        self.waiting: deque[Completion] = deque()
        self.completions: dict[int, Completion] = {}  # by row
        # The ids at positions 0, 1, ... of each row's cache, also after its completion has ended. The newest id was
        # sampled, and may not be in the cache yet.
        self.contexts: list[list[int]] = [[] for _ in range(rows)]
        self.free_rows = list(range(rows))  # the least recently used row first
        # A row, its context, and the number of its ids that have been computed.
        self.partial_prefill: tuple[int, list[int], int] | None = None
        self.shortened: dict[int, list[int]] = {}  # rows whose context is prefilled again, and what remains of it
        self.prefilled: list[int] = []  # rows whose next token is sampled from the logits of the prefill
        self.decoding: dict[int, Completion] = {}  # rows whose next token is computed from the newest one
        self.in_flight: deque[LaunchedStep] = deque()

    def add(self, completion: Completion) -> None:
        if completion.max_new_tokens is None:
            document = split_documents(completion.prompt, self.document_token)[-1]
            completion.max_new_tokens = max(1, self.block_size - len(document))
        self.waiting.append(completion)

    def cancel(self, completion: Completion) -> None:
        """Cancel a completion, unless it has ended."""
        if completion.row is not None:
            self._end(completion, "cancelled")
        elif completion in self.waiting:
            self.waiting.remove(completion)
            completion.finish_reason = "cancelled"

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.completions or self.in_flight)

    # --- prefill ------------------------------------------------------------------------------------------------------

    def _prefill(self) -> dict[int, Completion]:
        """Prefill the next chunk of tokens. Returns the completions that this ended, by row."""
        remaining = self.batch.chunk or sys.maxsize  # tokens of the chunk
        contexts: dict[int, list[int]] = {}
        prefixes: dict[int, Prefix] = {}
        complete: list[int] = []
        while remaining > 0 and (next_context := self._next_context(contexts)):
            row, context, prefix = next_context
            count = prefix.length if prefix else 0
            part = context[: count + remaining]
            remaining -= len(part) - count
            self.contexts[row] = contexts[row] = part
            if prefix:
                prefixes[row] = prefix
            self.partial_prefill = (row, context, len(part)) if len(part) < len(context) else None
            if not self.partial_prefill:
                complete.append(row)
        if contexts:
            self.batch.prefill(contexts, prefixes)
        return self._finish_prefill(complete) if complete else {}

    def _next_context(self, chunk: Container[int]) -> tuple[int, list[int], Prefix | None] | None:
        """The next row to prefill, its context, and the cached prefix. chunk: the rows of the same chunk so far."""
        if self.partial_prefill:
            row, context, count = self.partial_prefill
            return row, context, Prefix(row, count)
        if self.shortened:
            return *self.shortened.popitem(), None
        if not self.waiting or not self.free_rows:
            return None
        completion = self.waiting[0]
        context = split_documents(completion.prompt, self.document_token)[-1][-self.block_size :]
        prefix = self._longest_prefix(context, chunk)
        if prefix and prefix.row in chunk:  # the prefix is not computed yet
            return None
        self.waiting.popleft()
        completion.row = row = self._take_row(prefix)
        self.completions[row] = completion
        sample = Sample(completion.prompt, completion.sample, completion.sampling, completion.seed)
        self.batch.start(row, sample)
        return row, context, prefix

    def _longest_prefix(self, context: list[int], chunk: Iterable[int]) -> Prefix | None:
        """The longest prefix of the context in any row. It excludes the last id, which is needed for its logits."""
        rows = range(len(self.contexts)) if self.batch.keeps_rows else [*self.decoding, *self.prefilled, *chunk]
        longest = None
        for row in rows:
            cached = self.contexts[row]
            if cached and cached[0] == context[0] and len(cached) < self.block_size:  # full contexts may have slid
                length = shared_length(context[:-1], cached[:-1])
                if length > (longest.length if longest else 0):
                    longest = Prefix(row, length)
        return longest

    def _take_row(self, prefix: Prefix | None) -> int:
        """Allocate a free row: the one with the prefix, or one whose old context is unlikely to be reused."""
        if prefix and prefix.row in self.free_rows:
            row = prefix.row
        elif self.batch.keeps_rows:
            row = next((row for row in self.free_rows if row < RECENT), min(self.free_rows))
        else:
            row = min(self.free_rows)  # a step computes all rows up to the last active one
        self.free_rows.remove(row)
        return row

    def _finish_prefill(self, rows: list[int]) -> dict[int, Completion]:
        """Queue completely prefilled rows for sampling. Returns the completions that fail instead, by row."""
        has_nan = self.batch.logits[rows].isnan().any(dim=-1)
        failed = {row for row, nan in zip(rows, has_nan.tolist(), strict=True) if nan} if has_nan.any() else set()
        ended = {row: self.completions[row] for row in rows if row in failed}
        for completion in ended.values():
            completion.error = NAN
            self._end(completion, "error")
        self.prefilled += [row for row in rows if row not in ended]
        return ended

    # --- steps --------------------------------------------------------------------------------------------------------

    def step(self, whole_prompts: bool = False) -> dict[int, Completion]:
        """Compute the next token of each row, and prefill a chunk of waiting prompts (whole_prompts: all that fit).

        Returns the completions that have a new token or have ended, by row. If steps are launched ahead, these are the
        tokens of an earlier step.
        """
        launched = dict(self.decoding)
        if self.decoding:
            fetch = self.batch.step(list(self.decoding))
        ended = self._prefill()
        while whole_prompts and (self.partial_prefill or self.shortened or (self.waiting and self.free_rows)):
            ended |= self._prefill()
        if self.prefilled:
            fetch = self.batch.sample(self.prefilled)  # fetches the newest token of every row, also of the step's rows
        for row in self.prefilled:
            launched[row] = self.completions[row]
            can_grow = len(self.contexts[row]) <= self.capacity or self._slides(self.completions[row])
            if can_grow and self.contexts[row][-1] != self.document_token:
                self.decoding[row] = self.completions[row]
        self.prefilled = []
        if launched:
            self.in_flight.append(LaunchedStep(launched, fetch, self.batch.logits))
        if len(self.in_flight) > (self.batch.steps_ahead if launched else 0):
            return self._finish_step(self.in_flight.popleft()) | ended
        return ended

    def _finish_step(self, step: LaunchedStep) -> dict[int, Completion]:
        """Fetch the tokens of a step. Returns its completions, by row."""
        tokens, self.logits = step.fetch(), step.logits
        completions = {row: c for row, c in step.completions.items() if c.row == row}  # those that still run
        self._add_logprobs({row: c for row, c in completions.items() if c.logprobs is not None}, tokens)
        for row, completion in completions.items():
            token, context = tokens[row], self.contexts[row]
            if token == self.eot:
                self._end(completion, "stop")
                continue
            completion.tokens.append(token)
            context.append(token)
            if len(completion.tokens) == completion.max_new_tokens:
                self._end(completion, "length")
            elif context[-2] == self.document_token:  # no step is in flight
                self.decoding.pop(row, None)
                self.shortened[row], self.contexts[row] = [token], []
            elif token == self.document_token and self.in_flight and row in self.decoding:
                del self.decoding[row]  # the step in flight samples the first token of the next document
            elif len(context) > self.capacity and not self._slides(completion):
                self.decoding.pop(row, None)
                if len(context) > self.block_size:  # no step is in flight
                    self.shortened[row], self.contexts[row] = context[-self._window(completion) - 1 :], []
        return completions

    def _slides(self, completion: Completion) -> bool:
        """Whether new tokens replace the oldest ones in the cache when the context is full."""
        return self.can_slide and completion.context_stride is None

    def _window(self, completion: Completion) -> int:
        """The number of tokens before the newest one that remain of a full context."""
        return self.block_size - min(completion.context_stride or self.block_size // 2 or 1, self.block_size)

    def _add_logprobs(self, completions: dict[int, Completion], tokens: list[int]) -> None:
        """Record the log-probabilities of a step's tokens for these completions, by row."""
        rows = [row for row in completions if tokens[row] != self.eot]
        if rows:
            top_count = max(completions[row].logprobs for row in rows)
            logprobs = self._logprobs(self.logits[rows], [tokens[row] for row in rows], top_count)
            for row, (logprob, top) in zip(rows, logprobs, strict=True):
                completions[row].token_logprobs.append(TokenLogprobs(logprob, top[: completions[row].logprobs]))

    def _logprobs(self, logits: Tensor, tokens: list[int], top_count: int) -> list[TokenLogprobs]:
        """Log-probabilities of tokens (T,) under logits (T, V), and those of the `top_count` most likely tokens."""
        logprobs = logits.float().log_softmax(dim=-1)[:, : self.vocab_size]
        token_logprobs = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
        top = logprobs.topk(min(top_count, self.vocab_size))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return [
            TokenLogprobs(logprob, list(zip(ids, values, strict=True)))
            for logprob, (ids, values) in zip(token_logprobs, pairs, strict=True)
        ]

    def _end(self, completion: Completion, reason: Literal["stop", "length", "cancelled", "error"]) -> None:
        """End a completion and free its row."""
        row = completion.row
        del self.completions[row]
        self.decoding.pop(row, None)
        self.shortened.pop(row, None)
        if row in self.prefilled:
            self.prefilled.remove(row)
        if self.partial_prefill and self.partial_prefill[0] == row:
            self.partial_prefill = None
        if reason == "error":
            self.contexts[row] = []
        self.free_rows.append(row)
        completion.row, completion.finish_reason = None, reason


def shared_length(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the longest common prefix of two sequences."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return next(i for i in range(length) if a[i] != b[i])


# --- one batch of prompts ---------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One token of each row."""

    tokens: list[int | None]  # None for a row that has ended, and on a GPU while its context is prefilled again
    logits: Tensor  # (B, V), float32, before any filter; valid until the next step


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
    """Yield the tokens that follow each prompt (at least one id), one step at a time, until all rows have ended.

    The reference implementation is GPT.generate in model.py. This one caches keys and values, ends rows individually,
    and samples as folio/decoding/sampling.py does.

    A row ends before the id `eot`, when the caller sets its entry of `ended`, or after max_new_tokens (None: when its
    context is full, but after at least one token). Ids >= vocab_size, the padding of a vocabulary, are never sampled.
    Row b is sample samples[b] (default: b), whose random numbers are a function of (seed, sample, position) in any
    batch. Raises UserError if the model computes NaN.

    A token attends to at most block_size tokens. When a row's context is full, its newest block_size - stride tokens
    and the new one are prefilled again, at positions 0, 1, .... With stride=1, each token costs a prefill of the whole
    context. The default, block_size // 2, costs a prefill of half a context every block_size // 2 tokens. If positions
    can slide (PositionEncoding.can_slide), the default prefills nothing: the new token replaces the oldest one in the
    cache. (It still depends on older tokens, through the keys and values that later tokens computed from them.)

    With GPTConfig.document_token, a context begins after the last document token of the prompt, and again after each
    one that is sampled.
    """
    rows = range(len(prompts))
    ended = [False for _ in rows] if ended is None else ended
    scheduler = Scheduler(decoder, len(prompts), vocab_size, eot)
    numbers = rows if samples is None else samples
    completions = [
        Completion(list(prompt), sampling or Sampling(), max_new_tokens, seed, number, stride)
        for prompt, number in zip(prompts, numbers, strict=True)
    ]
    for completion in completions:
        scheduler.add(completion)
    while scheduler.is_busy:
        tokens: list[int | None] = [None for _ in rows]
        for row, completion in scheduler.step(whole_prompts=True).items():
            if completion.finish_reason == "error":
                raise UserError(completion.error)
            if completion.finish_reason != "stop":
                tokens[row] = completion.tokens[-1]
        if tokens.count(None) < len(tokens):
            yield Step(tokens, scheduler.logits)
        for row, completion in enumerate(completions):
            if ended[row]:
                scheduler.cancel(completion)
            elif completion.finish_reason:
                ended[row] = True
