"""Samples of the viewer's playground, streamed token by token with the most likely alternatives."""

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

MAX_SAMPLES = 16  # per request
MAX_NEW_TOKENS = 4096
RUNNERS_UP = 10  # alternatives shown per token


@dataclass(frozen=True)
class GenerationQuestion(GenerationConfig):
    """A request of the page for samples."""

    num_samples: Annotated[int, Ge(1), Le(MAX_SAMPLES)] = 1
    max_new_tokens: Annotated[int, Ge(1), Le(MAX_NEW_TOKENS)] = 200
    model: NonNegativeInt = 0
    step: NonNegativeInt | None = None
    ids: tuple[int, ...] = ()
    begun: NonNegativeInt = 0  # number of ids, from the end, that already belong to the samples' text


class SampleLines(ResponseFormat):
    """JSON Lines with samples; TraceProvider.sampler describes the format."""

    media_type = "application/x-ndjson"

    def __init__(self, tokenizer: Tokenizer, question: GenerationQuestion):
        streams = [TextStream(tokenizer, question.stop) for _ in range(question.num_samples)]
        first_ids = question.ids[max(0, len(question.ids) - question.begun) :]
        first_texts = [[stream.push(token) for token in first_ids] for stream in streams]
        self.begun = first_texts[0]
        self.readers = [
            CompletionReader(
                Completion(
                    question.ids,
                    question.sampling,
                    question.max_new_tokens,
                    question.seed,
                    sample,
                    question.context_stride,
                    logprobs=RUNNERS_UP + 1,  # the sampled token may be one of them
                ),
                stream,
            )
            for sample, stream in enumerate(streams)
        ]

    def begin(self) -> bytes:
        return write_line({"begun": self.begun})

    def update(self) -> bytes:
        columns = [map(partial(entry, reader), reader.read()) if reader.has_update else [] for reader in self.readers]
        return b"".join(write_line({"samples": entries}) for entries in zip_longest(*columns))

    def error(self, problem: RequestError) -> bytes:
        return write_line({"error": str(problem)})


def write_line(event: dict[str, Any]) -> bytes:
    return json.dumps(event, allow_nan=False).encode() + b"\n"


def entry(reader: CompletionReader, token: NewToken) -> list[Any]:
    """Return the JSON of a token with its most likely alternatives, or of the end of a sample."""
    if token.id is None:
        limit = "max_new_tokens" if reader.finish_reason == "length" else "end of text"
        return [None, token.text, "stop" if reader.stopped else limit]
    logprob, top = token.logprobs
    others = [(other, math.exp(value)) for other, value in top if other != token.id]
    return [token.id, token.text, math.exp(logprob), others[:RUNNERS_UP]]
