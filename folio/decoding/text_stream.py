"""The text of generated tokens: complete characters, up to a stop string."""

import codecs
from collections.abc import Iterator, Sequence

from folio.data.tokenizer import Tokenizer
from folio.decoding.decoders import make_decoder
from folio.decoding.prompts import default_prompt
from folio.decoding.sampling import Sampling
from folio.decoding.scheduler import Step, generate
from folio.machine.runtime import Runtime
from model import GPT


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
