"""Continuous batching: completions of prompts join and leave the rows of a batch between the steps of decoding.

The idea is from "Orca" (Yu et al. 2022). `generate` runs a scheduler for one batch of prompts, an Engine for requests
as they arrive.

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
from folio.decoding.kv_cache import Prefix
from folio.decoding.sampling import Sample, Sampling

NAN = "the model computes NaN: use another checkpoint, or --dtype=float32 if its weights are good"
RECENT = 16  # rows, the first ones, whose old contexts are overwritten as late as possible

# --- completions ------------------------------------------------------------------------------------------------------


class TokenLogprobs(NamedTuple):
    """Log-probabilities in nats, of the model's own distribution: before the temperature, penalties, and filters."""

    logprob: float  # of the token
    top: list[tuple[int, float]]  # the most likely tokens and theirs, the most likely first


@dataclass(eq=False)
class Completion:
    """A continuation of a prompt. The scheduler appends to its results; others only read them."""

    prompt: Sequence[int]  # ids, at least one
    sampling: Sampling
    max_new_tokens: int | None = None  # None: as many as fit into the context after the prompt, at least one
    seed: int = 1337
    sample: int = 0  # its number: random numbers are a function of (seed, sample, position)
    context_stride: int | None = None  # as in `generate`
    logprobs: int | None = None  # None: no log-probabilities; k: those of each token and of the k most likely ones
    prompt_logprobs: bool = False  # also for the tokens of the prompt
    notify: Callable[[], None] | None = None  # an Engine's thread calls it when there are results
    # --- results ---
    tokens: list[int] = field(default_factory=list)  # without the end-of-text token
    token_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each token, appended before it
    prompt_token_logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # None for the first one
    finish_reason: Literal["stop", "length", "cancelled", "error"] | None = None  # set last; stop: end of text
    error: str = ""  # what happened, if that is the reason
    row: int | None = None  # of the batch, while it is in one


class Launched(NamedTuple):
    """A step whose tokens are not fetched yet."""

    completions: dict[int, Completion]  # by row
    fetch: Callable[[], list[int]]
    logits: Tensor  # (B, V), that the tokens were sampled from


class Scheduler:
    """Completions in the rows of a batch, step by step. Those that find no free row wait, first come first served."""

    def __init__(self, decoder: Decoder, rows: int, vocab_size: int | None = None, eot: int | None = None):
        self.batch = decoder.batch(rows, vocab_size)
        self.block_size, self.can_slide = decoder.config.block_size, decoder.config.can_slide
        self.vocab_size, self.eot = vocab_size or decoder.config.vocab_size, eot
        self.room = self.block_size - self.batch.steps_ahead  # ids of a context that can be continued in the cache
        self.logits = self.batch.logits  # of the tokens that `step` returned
        self.waiting: deque[Completion] = deque()
        self.completions: dict[int, Completion] = {}  # by row
        # The ids at positions 0, 1, ... of each row's cache, also after its completion has ended. The newest one was
        # sampled, and may not be in the cache yet.
        self.contexts: list[list[int]] = [[] for _ in range(rows)]
        self.free = list(range(rows))  # rows, the one that has been free for longest first
        self.partial: tuple[int, list[int]] | None = None  # a row of whose context only a part is in the cache
        self.full: dict[int, list[int]] = {}  # rows whose context was full, and what is left of it
        self.ready: list[int] = []  # rows that were prefilled, whose next token is to be sampled
        self.decoding: dict[int, Completion] = {}  # rows whose next token is computed from the newest one
        self.in_flight: deque[Launched] = deque()

    def add(self, completion: Completion) -> None:
        if completion.max_new_tokens is None:
            completion.max_new_tokens = max(1, self.block_size - len(completion.prompt))
        self.waiting.append(completion)

    def cancel(self, completion: Completion) -> None:
        """End a completion, if it has not ended."""
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
        """Prefill a chunk of the contexts that wait for it. Returns the completions that this ended, by row."""
        left = self.batch.chunk or sys.maxsize  # tokens of the chunk
        contexts: dict[int, list[int]] = {}
        prefixes: dict[int, Prefix] = {}
        complete: list[int] = []
        while left > 0 and (found := self._next_context(contexts)):
            row, context, prefix = found
            count = prefix.length if prefix else 0
            part = context[: count + left]
            left -= len(part) - count
            self.contexts[row] = part
            if self.completions[row].prompt_logprobs and not self.completions[row].tokens:
                self._score(self.completions[row], part, context, count)
            else:
                contexts[row] = part
            if prefix:
                prefixes[row] = prefix
            self.partial = (row, context) if len(part) < len(context) else None
            if not self.partial:
                complete.append(row)
        if contexts:
            self.batch.prefill(contexts, prefixes)
        return self._make_ready(complete) if complete else {}

    def _next_context(self, chunk: Container[int]) -> tuple[int, list[int], Prefix | None] | None:
        """A row to prefill, its context, and what need not be computed. chunk: the rows that are prefilled with it."""
        if self.partial:
            row, context = self.partial
            return row, context, Prefix(row, len(self.contexts[row]))
        if self.full:
            return *self.full.popitem(), None
        if not self.waiting or not self.free:
            return None
        completion = self.waiting[0]
        context = list(completion.prompt[-self.block_size :])
        prefix = None if completion.prompt_logprobs else self._longest_prefix(context, chunk)
        if prefix and prefix.row in chunk:  # it has not been computed yet
            return None
        self.waiting.popleft()
        completion.row = row = self._take_row(prefix)
        self.completions[row] = completion
        sample = Sample(completion.prompt, completion.sample, completion.sampling, completion.seed)
        self.batch.start(row, sample)
        return row, context, prefix

    def _longest_prefix(self, context: list[int], chunk: Iterable[int]) -> Prefix | None:
        """What the context has in common with another row. Its last id is computed anyway, for the logits after it."""
        rows = range(len(self.contexts)) if self.batch.keeps_rows else [*self.decoding, *self.ready, *chunk]
        longest = None
        for row in rows:
            cached = self.contexts[row]
            if cached and cached[0] == context[0] and len(cached) < self.block_size:  # longer ones may have slid
                length = shared_length(context[:-1], cached[:-1])
                if length > (longest.length if longest else 0):
                    longest = Prefix(row, length)
        return longest

    def _take_row(self, prefix: Prefix | None) -> int:
        """A free row: the one that has the prefix, or one whose old context will hardly be missed."""
        if prefix and prefix.row in self.free:
            row = prefix.row
        elif self.batch.keeps_rows:
            row = next((row for row in self.free if row < RECENT), min(self.free))
        else:
            row = min(self.free)  # a step computes all rows up to the last one that takes part
        self.free.remove(row)
        return row

    def _make_ready(self, rows: list[int]) -> dict[int, Completion]:
        """Let these rows be sampled, now that their contexts are complete. Returns the completions that end instead."""
        has_nan = self.batch.logits[rows].isnan().any(dim=-1)
        failed = {row for row, nan in zip(rows, has_nan.tolist(), strict=True) if nan} if has_nan.any() else set()
        ended = {
            row: self.completions[row] for row in rows if row in failed or self.completions[row].max_new_tokens == 0
        }
        for row, completion in ended.items():
            if row in failed:
                completion.error = NAN
            self._end(completion, "error" if row in failed else "length")
        self.ready += [row for row in rows if row not in ended]
        return ended

    def _score(self, completion: Completion, part: list[int], context: list[int], count: int) -> None:
        """Prefill the context's ids from `count` to the end of the part, and note their log-probabilities."""
        if count == 0:
            completion.prompt_token_logprobs = [None] * (len(completion.prompt) - len(context) + 1)
        following = context[count + 1 : len(part) + 1]
        logits = self.batch.score(completion.row, part, count)[: len(following)]
        completion.prompt_token_logprobs += self._logprobs(logits, following, completion.logprobs or 0)

    # --- steps --------------------------------------------------------------------------------------------------------

    def step(self, whole_prompts: bool = False) -> dict[int, Completion]:
        """Compute the next token of each row, and prefill a chunk of the prompts that wait, or all of them.

        Returns the completions that have a new token or have ended, by row. Where steps are launched ahead, the tokens
        are those of an earlier step.
        """
        launched = dict(self.decoding)
        if self.decoding:
            fetch = self.batch.step(list(self.decoding))
        ended = self._prefill()
        while whole_prompts and (self.partial or self.full or (self.waiting and self.free)):
            ended |= self._prefill()
        if self.ready:
            fetch = self.batch.sample(self.ready)  # also of the rows of the step: it fetches the newest token of each
        for row in self.ready:
            launched[row] = self.completions[row]
            if len(self.contexts[row]) <= self.room or self._slides(self.completions[row]):
                self.decoding[row] = self.completions[row]
        self.ready = []
        if launched:
            self.in_flight.append(Launched(launched, fetch, self.batch.logits))
        if len(self.in_flight) > (self.batch.steps_ahead if launched else 0):
            return self._finish(self.in_flight.popleft()) | ended
        return ended

    def _finish(self, launched: Launched) -> dict[int, Completion]:
        """Fetch the tokens of a step."""
        tokens, self.logits = launched.fetch(), launched.logits
        completions = {row: c for row, c in launched.completions.items() if c.row == row}  # that have not ended since
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
            elif len(context) > self.room and not self._slides(completion):
                self.decoding.pop(row, None)
                if len(context) > self.block_size:  # no step is in flight
                    self.full[row], self.contexts[row] = context[-self._window(completion) - 1 :], []
        return completions

    def _slides(self, completion: Completion) -> bool:
        """Whether new tokens take the places of the oldest ones in the cache when the context is full."""
        return self.can_slide and completion.context_stride is None

    def _window(self, completion: Completion) -> int:
        """How many tokens before the newest one remain of a full context."""
        return self.block_size - min(completion.context_stride or self.block_size // 2 or 1, self.block_size)

    def _add_logprobs(self, completions: dict[int, Completion], tokens: list[int]) -> None:
        """Note the log-probabilities of the tokens of a step for the completions that want them, by row."""
        rows = [row for row in completions if tokens[row] != self.eot]
        if rows:
            most = max(completions[row].logprobs for row in rows)
            of_rows = self._logprobs(self.logits[rows], [tokens[row] for row in rows], most)
            for row, (logprob, top) in zip(rows, of_rows, strict=True):
                completions[row].token_logprobs.append(TokenLogprobs(logprob, top[: completions[row].logprobs]))

    def _logprobs(self, logits: Tensor, tokens: list[int], most: int) -> list[TokenLogprobs]:
        """Of the tokens (T,) that were sampled from, or follow on, logits (T, V); and of so many of the most likely."""
        logprobs = logits.float().log_softmax(dim=-1)[:, : self.vocab_size]
        of_tokens = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
        top = logprobs.topk(min(most, self.vocab_size))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return [
            TokenLogprobs(logprob, list(zip(ids, values, strict=True)))
            for logprob, (ids, values) in zip(of_tokens, pairs, strict=True)
        ]

    def _end(self, completion: Completion, reason: Literal["stop", "length", "cancelled", "error"]) -> None:
        """Free the row of a completion."""
        row = completion.row
        del self.completions[row]
        self.decoding.pop(row, None)
        self.full.pop(row, None)
        if row in self.ready:
            self.ready.remove(row)
        if self.partial and self.partial[0] == row:
            self.partial = None
        if reason == "error":
            self.contexts[row] = []
        self.free.append(row)
        completion.row, completion.finish_reason = None, reason


def shared_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids two sequences have in common from their beginnings."""
    shortest = min(len(a), len(b))
    if a[:shortest] == b[:shortest]:
        return shortest
    return next(i for i in range(shortest) if a[i] != b[i])


# --- one batch of prompts ---------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One token of each row."""

    tokens: list[int | None]  # None for a row that has ended
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
    """Yield the tokens that follow each prompt (at least one id each), one step at a time, until all rows have ended.

    GPT.generate, in model.py, defines the distribution of the tokens. Here, keys and values are cached, rows end one by
    one, and the filters and the draw are those of folio/decoding/sampling.py.

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
