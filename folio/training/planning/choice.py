"""The choice of a model for a text and a time, from a law of losses and the speed of each model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from folio.training.planning.law import Forecast, RunSize, ScalingLaw, forecast
from folio.training.planning.shapes import CHANNELS, MIN_STEP_TOKENS, Shape, step_tokens

MAX_EPOCHS = 40  # "Scaling Data-Constrained Language Models" (Muennighoff et al. 2023): more do not help
LARGE_MODEL_EPOCHS = 20  # the same for a model that is large for its text (docs/lab/model-size.md)
TRAINING_SHARE = 0.95  # of a run's time; the rest are evaluations, checkpoints and samples


@dataclass(frozen=True)
class Candidate:
    """A model, the length of its training, and the expected loss."""

    shape: Shape
    tokens: int
    unique_tokens: int
    forecast: Forecast

    @property
    def step_tokens(self) -> int:
        return step_tokens(self.tokens)

    @property
    def settings(self) -> dict[str, Any]:
        """train.py's settings."""
        return self.shape.settings(self.tokens, self.unique_tokens)


StepSeconds = Callable[[Shape, int], float]  # of the shape and the tokens per step


def affordable_tokens(shape: Shape, step_seconds: StepSeconds, seconds: float) -> int:
    """Return the tokens of the longest run that takes this time, with the tokens per step that its length implies."""

    def affordable(n_tokens: int) -> int:  # with steps of n_tokens
        return n_tokens * int(TRAINING_SHARE * seconds / step_seconds(shape, n_tokens))

    n_tokens = MIN_STEP_TOKENS
    while step_tokens(affordable(2 * n_tokens)) >= 2 * n_tokens:
        n_tokens *= 2
    return affordable(n_tokens)


def rank_shapes(
    laws: Sequence[ScalingLaw],
    step_seconds: StepSeconds,
    seconds: float,
    unique_tokens: int,
    vocab_size: int,
) -> list[Candidate]:
    """The shapes that can be trained in this time, the lowest expected loss first.

    A run has at most MAX_EPOCHS epochs, or LARGE_MODEL_EPOCHS if the shape is large for the text. laws: the best fit,
    and others for the interval. Empty if there is no time for a step, or no text for a window.
    """
    candidates = []
    for shape in map(Shape.of, CHANNELS):
        epochs = LARGE_MODEL_EPOCHS if shape.is_large_for(unique_tokens) else MAX_EPOCHS
        tokens = min(affordable_tokens(shape, step_seconds, seconds), epochs * unique_tokens)
        if tokens < step_tokens(tokens) or unique_tokens <= shape.block_size:
            continue
        size = RunSize(shape.matrix_weights(vocab_size), tokens, tokens // step_tokens(tokens), unique_tokens)
        candidates.append(Candidate(shape, tokens, unique_tokens, forecast(laws, size)))
    return sorted(candidates, key=lambda candidate: candidate.forecast.loss)
