"""Generating text: the choice of a decoder, the tokens that follow prompts, and their text up to a stop string.

Dimensions: B batch (rows), V vocabulary.
"""

import codecs
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from torch import Tensor

from folio import UserError
from folio.base.progress import note
from folio.data.tokenizer import Tokenizer
from folio.decoding.sampling import Sampling
from folio.decoding.scheduler import Completion, Decoder, Scheduler
from folio.machine.runtime import Runtime
from model import GPT

# --- tokens -----------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One token of each row."""

    tokens: list[int | None]  # None for a row that has ended
    logits: Tensor  # (B, V), float32, before any filter; valid until the next step


def make_decoder(
    model: GPT, runtime: Runtime, dtype: str | None = None, weights: Mapping[str, Tensor] | None = None
) -> Decoder:
    """The decoder for the runtime's device. The model's weights must not change while it is used.

    dtype: "int8" or "int4" for a CPU; None: that of the weights. weights: as in CPUDecoder, for int8 and int4. Puts the
    model into eval mode. If the model or a sampling filter was changed, or numba is missing, torch decodes, and a line
    says why. Raises UserError if that cannot compute in the dtype.
    """
    from folio.decoding.torch_decoder import TorchDecoder

    if runtime.device.type != "cpu":
        return TorchDecoder(model, runtime)
    from folio.decoding.cpu_decoder import CPUDecoder, why_torch_decodes

    reason = why_torch_decodes(model)
    if reason is None:
        dtype = dtype or str(model.transformer.wte.weight.dtype).removeprefix("torch.")
        return CPUDecoder(model, dtype, weights)
    if dtype:
        raise UserError(f"dtype={dtype}: torch decodes, which cannot compute in it, because {reason}; use --dtype=auto")
    print_once(f"torch decodes, which is slower, because {reason}")
    return TorchDecoder(model, runtime)


@cache
def print_once(line: str) -> None:
    note(line)


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


def sample_text(model: GPT, tokenizer: Tokenizer, runtime: Runtime, seed: int, tokens: int) -> Iterator[str]:
    """A sample without a prompt, piece by piece."""
    steps = generate(
        make_decoder(model, runtime),
        [default_prompt(tokenizer)],
        max_new_tokens=tokens,
        sampling=Sampling(temperature=0.8),
        vocab_size=tokenizer.vocab_size,
        eot=tokenizer.eot,
        seed=seed,
    )
    return stream_text(tokenizer, steps)
