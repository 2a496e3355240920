"""A family of models, ordered by their channels: a larger one also has more layers and a longer context.

The recipe is config/shakespeare_char.py's. Its parts were compared in docs/lab/lab-book.md, on a CPU and with at most
384 channels. Larger models have the shapes of GPT-2.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from model import GPTConfig

CHANNELS = (32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024, 1280)
MIN_CONTEXT, MAX_CONTEXT = 128, 1024  # tokens, if the model has as many channels
LARGE_VOCABULARY = 8192  # tokens; the weights of more do not make a model better
RECIPE = {
    "activation": "gelu",
    "optimizer": "muon",
    "muon_learning_rate": 0.03,
    "learning_rate": 8e-3,
    "lr_schedule": "wsd",
    "warmup_iters": 0,
    "min_lr": 0.0,
    "beta2": 0.99,
}
DECAY = 0.7  # of the steps, at the end of a run
STEP_TOKENS = 4096  # at least, except in short runs
MIN_STEPS = 256  # of a run whose length is that of its time
MIN_STEPS_OF_EPOCHS = 1024  # of one that reads its text MAX_EPOCHS times: more steps take time, but no text
DROPOUT = 0.1  # in long runs of a model that is large for its text (docs/lab/model-size.md)
DROPOUT_EPOCHS = 12  # beyond which it helps
LARGE_WEIGHTS_PER_TOKEN = 1.5  # of the text, beyond which a model overfits
MAX_WEIGHTS_PER_TOKEN = 5  # beyond which it overfits with dropout, too


@dataclass(frozen=True)
class Shape:
    """A model of the family. The fields are train.py's settings."""

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int

    @classmethod
    def of(cls, channels: int) -> "Shape":
        n_layer = min(max(1, round(channels / 40)), 12) if channels <= 768 else 12 + 3 * (channels - 768) // 64
        n_head = channels // (32 if channels <= 512 else 64)
        return cls(n_layer, n_head, channels, min(channels, MAX_CONTEXT))

    def for_tokens(self, tokens: int) -> "Shape":
        """The shape with a context that is not too long for a run of this many tokens.

        128 tokens up to 32 million, 256 up to 128 million, and so on: a short run does not learn to use a longer one.
        """
        context = 2 ** round(math.log2(MIN_CONTEXT * (max(tokens, 1) / 16e6) ** 0.5))
        return replace(self, block_size=min(self.block_size, max(MIN_CONTEXT, context)))

    def matrix_weights(self, vocab_size: int) -> int:
        """The weights that count in a law of losses: those that a token is multiplied by.

        Of the output matrix, these are the rows of at most LARGE_VOCABULARY tokens: with GPT-2's 50,257, a forecast
        with all of them preferred models with too few channels (docs/lab/model-size.md).
        """
        return 12 * self.n_layer * self.n_embd**2 + min(vocab_size, LARGE_VOCABULARY) * self.n_embd

    def flops_per_token(self, vocab_size: int) -> int:
        return GPTConfig(vocab_size=vocab_size, bias=False, **asdict(self)).flops_per_token()["total"]

    def dropout(self, tokens: int, unique_tokens: int) -> float:
        """The dropout of a run that reads a text of unique_tokens for this many tokens."""
        is_long = tokens > DROPOUT_EPOCHS * unique_tokens
        return DROPOUT if is_long and self.is_large_for(unique_tokens) else 0.0

    def is_large_for(self, unique_tokens: int, weights_per_token: float = LARGE_WEIGHTS_PER_TOKEN) -> bool:
        """Whether the model overfits a text of this many tokens."""
        return 12 * self.n_layer * self.n_embd**2 > weights_per_token * unique_tokens

    def settings(self, tokens: int, step_tokens: int, dropout: float) -> dict[str, Any]:
        """train.py's settings of a run of this many tokens, in steps of about step_tokens."""
        batch_size = max(1, step_tokens // self.block_size)
        steps = max(1, tokens // (batch_size * self.block_size))
        counts = {"max_iters": steps, "wsd_decay_iters": round(DECAY * steps)}
        return {**asdict(self), "dropout": dropout, "batch_size": batch_size, **RECIPE, **counts}


RECIPE_CHANNELS = 128  # of config/shakespeare_char.py


def step_tokens(tokens: float, min_steps: int = MIN_STEPS) -> int:
    """The tokens per step of a run: 4,096 for 10 million, in proportion to tokens^0.57 (Li et al. 2025, "Step Law").

    It is a power of two, at least STEP_TOKENS, because Muon's time per step does not depend on it. But a short run has
    min_steps steps.
    """
    by_length = 2 ** round(math.log2(STEP_TOKENS * (max(tokens, 1) / 1e7) ** 0.57))
    return max(1, min(max(STEP_TOKENS, by_length), 2 ** math.floor(math.log2(max(tokens / min_steps, 1)))))
