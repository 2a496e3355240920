"""The samples of the viewer's playground, token by token, with the tokens that could have been sampled instead."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Le

from folio import UserError
from folio.configurator import NonNegativeInt
from folio.generate import Step, TextStream
from folio.language_model import GenerationConfig, LanguageModel
from folio.tokenizer import Tokenizer

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


def stream_samples(
    gpt: LanguageModel, question: GenerationQuestion, lock: AbstractContextManager
) -> Iterator[dict[str, Any]]:
    """The events of TraceProvider.generate. lock: held during a step, and free between two steps."""
    count = question.num_samples
    rows = [SampledRow(gpt.tokenizer, question.stop) for _ in range(count)]
    beginning = question.ids[max(0, len(question.ids) - question.begun) :]
    begun = [[row.text.push(token) for token in beginning] for row in rows]
    ended = [row.text.ended for row in rows]
    steps = gpt.steps([list(question.ids)] * count, range(count), question, ended)
    yield {"begun": begun[0]}
    while True:
        with lock:
            step = next(steps, None)
            choices = most_likely(step, RUNNERS_UP, gpt.tokenizer.vocab_size) if step else []
        if step is None:
            break
        yield {
            "samples": [
                row.end(question.max_new_tokens) if token is None else row.push(token, *choice)
                for row, token, choice in zip(rows, step.tokens, choices, strict=True)
            ]
        }
        ended[:] = [end or row.text.ended for end, row in zip(ended, rows, strict=True)]
    yield {"samples": [row.end(question.max_new_tokens) for row in rows]}


class SampledRow:
    """A sample as a page gets it."""

    def __init__(self, tokenizer: Tokenizer, stop: str | None):
        self.text = TextStream(tokenizer, stop)
        self.tokens = 0  # so far
        self.reported = False  # whether its end has been

    def push(self, token: int, probability: float, runners_up: list[tuple[int, float]]) -> list[Any]:
        self.tokens += 1
        return [token, self.text.push(token), probability, runners_up]

    def end(self, max_new_tokens: int) -> list[Any] | None:
        """The end of the sample, which there is only once."""
        if self.reported:
            return None
        self.reported = True
        length = "max_new_tokens" if self.tokens == max_new_tokens else "end of text"
        why = "stop" if self.text.ended else length
        return [None, self.text.push(None), why]


def most_likely(step: Step, count: int, vocab_size: int) -> list[tuple[float, list[tuple[int, float]]]]:
    """For each row, its token's probability, and so many of the most likely other tokens with theirs.

    Ids from vocab_size on are padding. Raises UserError if the model computes NaN.
    """
    probabilities = step.logits[:, :vocab_size].softmax(dim=-1)  # (B, V)
    top = probabilities.topk(min(count + 1, probabilities.shape[-1]))
    if not top.values.isfinite().all():
        raise UserError("the model computes NaN or infinity: use another checkpoint")
    choices = []
    for row, (token, ids, values) in enumerate(
        zip(step.tokens, top.indices.tolist(), top.values.tolist(), strict=True)
    ):
        others = [(other, p) for other, p in zip(ids, values, strict=True) if other != token]
        choices.append((0.0 if token is None else probabilities[row, token].item(), others[:count]))
    return choices
