"""The samples of the viewer's playground, token by token, with the tokens that could have been sampled instead."""

import itertools
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Le

from folio import UserError
from folio.base.settings import NonNegativeInt
from folio.data.tokenizer import Tokenizer
from folio.decoding.language_model import GenerationConfig
from folio.decoding.scheduler import Completion
from folio.decoding.text_stream import TextStream
from folio.web.engine import Engine

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


def stream_samples(engine: Engine, question: GenerationQuestion) -> Iterator[dict[str, Any]]:
    """The events of TraceProvider.generate. Raises UserError if the model computes NaN, and QueueFull."""
    rows = [SampledRow(engine.gpt.tokenizer, question.stop) for _ in range(question.num_samples)]
    beginning = question.ids[max(0, len(question.ids) - question.begun) :]
    begun = [[row.text.push(token) for token in beginning] for row in rows]
    yield {"begun": begun[0]}
    progress = threading.Event()
    completions = [
        Completion(
            question.ids,
            question.sampling,
            question.max_new_tokens,
            question.seed,
            sample,
            question.context_stride,
            logprobs=RUNNERS_UP + 1,  # one of them may be the token itself
            notify=progress.set,
        )
        for sample in range(question.num_samples)
    ]
    engine.submit([completion for row, completion in zip(rows, completions, strict=True) if not row.text.ended])
    try:
        for step in itertools.count():
            wait_for_step(completions, rows, step, progress)
            entries = [row.entry(completion, step) for row, completion in zip(rows, completions, strict=True)]
            yield {"samples": entries}
            engine.cancel([c for row, c in zip(rows, completions, strict=True) if row.text.ended])
            if all(row.reported for row in rows):
                return
    finally:
        engine.cancel(completions)


def wait_for_step(
    completions: list[Completion], rows: list["SampledRow"], step: int, progress: threading.Event
) -> None:
    """Wait until each sample has the token of that step, or has ended. Raises UserError if the engine failed before it.

    The engine may be some steps ahead: what it sampled before an error is shown.
    """
    while True:
        progress.clear()
        waiting = [c for row, c in zip(rows, completions, strict=True) if not row.text.ended]
        if all(len(c.tokens) > step or c.finish_reason for c in waiting):
            break
        progress.wait()
    for completion in waiting:
        if completion.finish_reason == "error" and len(completion.tokens) <= step:
            raise UserError(completion.error)


class SampledRow:
    """A sample as a page gets it."""

    def __init__(self, tokenizer: Tokenizer, stop: str | None):
        self.text = TextStream(tokenizer, stop)
        self.reported = False  # whether its end has been

    def entry(self, completion: Completion, step: int) -> list[Any] | None:
        """The sample's token of a step, or its end, which there is only once."""
        if len(completion.tokens) > step and not self.text.ended:
            token, (logprob, top) = completion.tokens[step], completion.token_logprobs[step]
            if not math.isfinite(logprob):
                raise UserError("the model computes NaN or infinity: use another checkpoint")
            others = [(other, math.exp(value)) for other, value in top if other != token]
            return [token, self.text.push(token), math.exp(logprob), others[:RUNNERS_UP]]
        if self.reported:
            return None
        self.reported = True
        length = "max_new_tokens" if len(completion.tokens) == completion.max_new_tokens else "end of text"
        why = "stop" if self.text.ended else length
        return [None, self.text.push(None), why]
