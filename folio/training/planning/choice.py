"""The choice of a model for a text and a time, from a law of losses and the speed of each model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from folio.training.planning.law import Forecast, RunSize, ScalingLaw, forecast
from folio.training.planning.shapes import (
    CHANNELS,
    MAX_WEIGHTS_PER_TOKEN,
    MIN_STEPS,
    MIN_STEPS_OF_EPOCHS,
    RECIPE_CHANNELS,
    Shape,
    step_tokens,
)

MAX_EPOCHS = 40  # "Scaling Data-Constrained Language Models" (Muennighoff et al. 2023): more do not help
FORECAST_ERROR = 0.02  # of the loss, by the law of other texts (docs/lab/model-size.md)
TRAINING_SHARE = 0.95  # of a run's time; the rest are evaluations, checkpoints and samples


@dataclass(frozen=True)
class Candidate:
    """A model, its batch and dropout, the length of its training, and the expected loss."""

    shape: Shape
    step_tokens: int
    dropout: float
    size: RunSize
    forecast: Forecast

    @property
    def name(self) -> str:
        """Its layers and channels."""
        return f"{self.shape.n_layer}x{self.shape.n_embd}"

    @property
    def run_name(self) -> str:
        """Its name, with dropout and epochs."""
        return f"{self.name}-dropout{self.dropout:g}-epochs{self.tokens / self.unique_tokens:.3g}"

    @property
    def tokens(self) -> int:
        return self.size.tokens

    @property
    def unique_tokens(self) -> int:
        return self.size.unique_tokens

    @property
    def settings(self) -> dict[str, Any]:
        """train.py's settings."""
        return self.shape.settings(self.tokens, self.step_tokens, self.dropout)


StepSeconds = Callable[[Shape, int], float]  # of the shape and the tokens per step


def seconds_by_flops(flops_per_second: float, vocab_size: int) -> StepSeconds:
    """The time of a step on a device that is not measured."""
    return lambda shape, n_tokens: n_tokens * shape.flops_per_token(vocab_size) / flops_per_second


def affordable_tokens(shape: Shape, step_seconds: StepSeconds, seconds: float, per_step: int | None = None) -> int:
    """Return the tokens of the longest run that takes this time.

    per_step: tokens; None: those that the length of the run implies.
    """

    def affordable(n_tokens: int) -> int:  # with steps of n_tokens
        return n_tokens * int(TRAINING_SHARE * seconds / step_seconds(shape, n_tokens))

    if per_step:
        return affordable(per_step)
    n_tokens = 1
    while step_tokens(affordable(2 * n_tokens)) >= 2 * n_tokens:
        n_tokens *= 2
    return affordable(n_tokens)


def rank_shapes(
    laws: Sequence[ScalingLaw],
    step_seconds: StepSeconds,
    seconds: float,
    unique_tokens: int,
    vocab_size: int,
    entered: Mapping[int, Candidate] = MappingProxyType({}),
) -> list[Candidate]:
    """The shapes that can be trained in this time, the lowest expected loss first.

    A run has at most MAX_EPOCHS epochs, and a model at most MAX_WEIGHTS_PER_TOKEN. laws: the best fit, and others for
    the interval. entered: candidates by their channels, whose context, batch and dropout stay. Empty if there is no
    time for a step, or no text for a window.
    """
    candidates = []
    for channels in CHANNELS:
        known = entered.get(channels)
        shape, per_step = (known.shape, known.step_tokens) if known else (Shape.of(channels), None)
        if shape.is_large_for(unique_tokens, MAX_WEIGHTS_PER_TOKEN) and channels > CHANNELS[0]:
            continue
        affordable = affordable_tokens(shape, step_seconds, seconds, per_step)
        tokens = min(affordable, MAX_EPOCHS * unique_tokens)
        dropout = known.dropout if known else shape.dropout(tokens, unique_tokens)
        if not known:
            ends_by_time = tokens == affordable
            shape = shape.for_tokens(tokens) if ends_by_time else shape
            min_steps = MIN_STEPS if ends_by_time else MIN_STEPS_OF_EPOCHS
            per_step = max(step_tokens(tokens, min_steps), shape.block_size)
        if tokens < per_step or unique_tokens <= shape.block_size:
            continue
        size = RunSize(shape.matrix_weights(vocab_size), tokens, tokens // per_step, unique_tokens)
        candidates.append(Candidate(shape, per_step, dropout, size, forecast(laws, size)))
    return sorted(candidates, key=lambda candidate: candidate.forecast.loss)


def recipes_shape(ranked: Sequence[Candidate]) -> Candidate:
    """The candidate with the shape of config/shakespeare_char.py; if the text is too short for it, the best one."""
    return next((candidate for candidate in ranked if candidate.shape.n_embd == RECIPE_CHANNELS), ranked[0])


def choose(ranked: Sequence[Candidate], is_measured: bool) -> Candidate:
    """The best of the ranked shapes. is_measured: whether the law is that of this text.

    With the law of other texts, a shape must be better than that of the recipe by the error of a forecast.
    """
    best, recipe = ranked[0], recipes_shape(ranked)
    is_clear = is_measured or best.forecast.loss < (1 - FORECAST_ERROR) * recipe.forecast.loss
    return best if is_clear else recipe
