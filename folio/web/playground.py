"""The samples of the viewer's playground, token by token, with the tokens that could have been sampled instead."""

import json
import math
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Annotated, Any

from annotated_types import Ge, Le

from folio.base.settings import NonNegativeInt
from folio.data.tokenizer import Tokenizer
from folio.decoding.language_model import GenerationConfig
from folio.decoding.scheduler import Completion
from folio.decoding.text_stream import TextStream
from folio.web.server import RequestError
from folio.web.streaming import CompletionReader, NewToken, ResponseFormat

MOST_SAMPLES = 16  # at a time
MOST_NEW_TOKENS = 4096
RUNNERS_UP = 10  # tokens that could have been sampled instead


@dataclass(frozen=True)
class GenerationQuestion(GenerationConfig):
    """What a page asks to be sampled."""

    num_samples: Annotated[int, Ge(1), Le(MOST_SAMPLES)] = 1
    max_new_tokens: Annotated[int, Ge(1), Le(MOST_NEW_TOKENS)] = 200
    model: NonNegativeInt = 0
    step: NonNegativeInt | None = None
    ids: tuple[int, ...] = ()
    begun: NonNegativeInt = 0  # how many of the ids, the last ones, are the beginning of the samples' text


class SampleLines(ResponseFormat):
    """Samples as lines of JSON, which TraceProvider.sampler describes."""

    media_type = "application/x-ndjson"

    def __init__(self, tokenizer: Tokenizer, question: GenerationQuestion):
        texts = [TextStream(tokenizer, question.stop) for _ in range(question.num_samples)]
        beginning = question.ids[max(0, len(question.ids) - question.begun) :]
        begun = [[text.push(token) for token in beginning] for text in texts]
        self.begun = begun[0]
        self.readers = [
            CompletionReader(
                Completion(
                    question.ids,
                    question.sampling,
                    question.max_new_tokens,
                    question.seed,
                    sample,
                    question.context_stride,
                    logprobs=RUNNERS_UP + 1,  # one of them may be the token itself
                ),
                text,
            )
            for sample, text in enumerate(texts)
        ]

    def begin(self) -> bytes:
        return write_line({"begun": self.begun})

    def news(self) -> bytes:
        news = [map(partial(entry, reader), reader.read()) if reader.has_news else [] for reader in self.readers]
        return b"".join(write_line({"samples": entries}) for entries in zip_longest(*news))

    def error(self, problem: RequestError) -> bytes:
        return write_line({"error": str(problem)})


def write_line(event: dict[str, Any]) -> bytes:
    return json.dumps(event, allow_nan=False).encode() + b"\n"


def entry(reader: CompletionReader, token: NewToken) -> list[Any]:
    """A token as a page gets it, with the most likely others; or the end of a sample."""
    if token.id is None:
        length = "max_new_tokens" if reader.finish_reason == "length" else "end of text"
        return [None, token.text, "stop" if reader.stopped else length]
    logprob, top = token.logprobs
    others = [(other, math.exp(value)) for other, value in top if other != token.id]
    return [token.id, token.text, math.exp(logprob), others[:RUNNERS_UP]]
