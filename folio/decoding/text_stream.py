"""Conversion of generated tokens to text: complete characters, up to a stop string."""

import codecs
from collections.abc import Iterator, Sequence

from folio import UserError
from folio.data.tokenizer import EOT_TEXT, Tokenizer
from folio.decoding.decoders import make_decoder
from folio.decoding.prompts import default_prompt
from folio.decoding.sampling import Sampling
from folio.decoding.scheduler import Step, generate
from folio.machine.runtime import Runtime
from model import GPT


class TextStream:
    """Converts the tokens of one row to text as they arrive: complete characters, up to the first stop string.

    Text that may be the beginning of a stop string is held back until this is decided.
    """

    def __init__(self, tokenizer: Tokenizer, stop: str | Sequence[str] | None = None):
        """Raises UserError for a stop string that cannot occur, because <|endoftext|> is a part of it."""
        self.tokenizer, stops = tokenizer, (stop,) if isinstance(stop, str) else stop or ()
        self.stop = tuple(clean_stop(tokenizer, stop) for stop in stops)
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.held_back = ""
        self.ended = False

    def push(self, token: int | None) -> str:
        """Add a token, and return the new text. None marks the end of the row."""
        if self.ended:
            return ""
        self.ended = token is None
        token_bytes = b"" if token is None else self.tokenizer.token_bytes(token)
        self.held_back += self.decoder.decode(token_bytes, final=token is None)
        if matches := [(self.held_back.index(stop), stop) for stop in self.stop if stop in self.held_back]:
            self.ended = True
            # The match that is complete first, so that the result does not depend on how text is split into tokens.
            begin, _ = min(matches, key=lambda match: (match[0] + len(match[1]), match[0]))
            return self.held_back[:begin]
        keep = 0 if self.ended else max((overlap(self.held_back, stop) for stop in self.stop), default=0)
        end = len(self.held_back) - keep
        new_text, self.held_back = self.held_back[:end], self.held_back[end:]
        return new_text


class TextBatch:
    """Texts that are generated together. Iterate either over the batch, once, or over its `steps`.

    numbers: of the requests. steps: of scheduler.generate. texts: generated so far; they are joined when they are read,
    because adding each piece to them would take quadratic time. streams: one for each text. ended: whether each text
    has ended, for `steps`.
    """

    def __init__(self, numbers: range, steps: Iterator[Step], streams: Sequence[TextStream], ended: list[bool]):
        self.numbers, self.steps, self.streams, self.ended = numbers, steps, streams, ended
        self.pieces: list[list[str]] = []  # of each step

    @property
    def texts(self) -> list[str]:
        return ["".join(pieces) for pieces in zip(*self.pieces, strict=True)] or ["" for _ in self.streams]

    def __iter__(self) -> Iterator[list[str]]:
        """Yield a piece of each text at each step: complete characters, up to the stop string."""
        for step in self.steps:
            self.pieces.append(
                [
                    stream.push(token) if token is not None or has_ended else ""
                    for stream, token, has_ended in zip(self.streams, step.tokens, self.ended, strict=True)
                ]
            )
            yield self.pieces[-1]
            self.ended[:] = [stream.ended for stream in self.streams]
        self.pieces.append([stream.push(None) for stream in self.streams])
        yield self.pieces[-1]

    def run(self) -> list[str]:
        """Generate the texts to their end, and return them."""
        for _ in self:
            pass
        return self.texts


def clean_stop(tokenizer: Tokenizer, stop: str) -> str:
    """Return a stop string with the line ends of the training data. Raises UserError if it cannot occur."""
    if tokenizer.eot is not None and EOT_TEXT in stop and stop != EOT_TEXT:
        raise UserError(f"stop={stop!r}: {EOT_TEXT} ends every text, so no text contains it; leave it out of stop")
    return tokenizer.clean(stop)


def overlap(text: str, stop: str) -> int:
    """The length of the longest proper prefix of `stop` that the text ends with."""
    max_length = min(len(stop) - 1, len(text))
    return next(n for n in range(max_length, -1, -1) if text.endswith(stop[:n]))


def sample_text(model: GPT, tokenizer: Tokenizer, runtime: Runtime, seed: int, tokens: int) -> Iterator[str]:
    """Yield a sample without a prompt in pieces."""
    steps = generate(
        make_decoder(model, runtime),
        [default_prompt(tokenizer)],
        max_new_tokens=tokens,
        sampling=Sampling(temperature=0.8),
        vocab_size=tokenizer.vocab_size,
        eot=tokenizer.eot,
        seed=seed,
    )
    for (piece,) in TextBatch(range(1), steps, [TextStream(tokenizer)], [False]):
        yield piece
