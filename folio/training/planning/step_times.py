"""The seconds per step of the family's models, before they are measured."""

import math
from dataclasses import dataclass, field

from folio.training.planning.shapes import Shape

TYPICAL = {  # channels -> ms per step and microseconds per token, on two cores of an AMD EPYC (Zen 5)
    32: (4.6, 0.5),
    64: (6.9, 1.7),
    96: (7.7, 3.1),
    128: (11.0, 7.5),
    160: (15.5, 14.6),
    192: (25.9, 24.0),
    224: (49.4, 34.8),
    256: (54.6, 46.3),
    320: (116, 103),
    384: (334, 166),
}
VOCAB_SIZE = 65  # of TYPICAL: Tiny Shakespeare's


@dataclass
class StepTimes:
    """The seconds per step as a function of the shape and the tokens per step.

    They are TYPICAL's times the ratio of a machine, which is that of the measured shape with the nearest channels.
    """

    vocab_size: int
    ratios: dict[int, float] = field(default_factory=dict)  # channels -> measured by typical seconds

    def __call__(self, shape: Shape, step_tokens: int) -> float:
        seconds = self.typical(shape, step_tokens)
        if not self.ratios:
            return seconds
        return seconds * self.ratios[min(self.ratios, key=lambda channels: abs(math.log(channels / shape.n_embd)))]

    def typical(self, shape: Shape, step_tokens: int) -> float:
        """Seconds per step on the machine of TYPICAL. For other shapes and vocabularies, by the FLOPs."""
        channels = min(TYPICAL, key=lambda channels: abs(channels - shape.n_embd))
        known = Shape.of(channels).flops_per_token(VOCAB_SIZE)
        per_step, per_token = TYPICAL[channels]
        per_step *= shape.flops_per_token(VOCAB_SIZE) / known
        per_token *= shape.flops_per_token(self.vocab_size) / known
        return 1e-3 * per_step + 1e-6 * per_token * step_tokens

    def measured(self, shape: Shape, step_tokens: int, seconds: float) -> None:
        """Take note of the measured seconds per step of a shape."""
        self.ratios[shape.n_embd] = seconds / self.typical(shape, step_tokens)
