"""The validation loss as a function of a model's size and of the text it is trained on.

    L(N, D) = E + (A / N^alpha + B / D^beta)^s

With s = 1, this is the law of Hoffmann et al. 2022 ("Chinchilla"). With a smaller s, a large model gains more from
additional text than a small one, as in Kaplan et al. 2020, where E = 0. For models of up to 5 million weights, the
errors are half as large with s = 0.3, and E is nearly 0: it cannot be told from the measured losses.

N: weights that a token is multiplied by, at most WEIGHTS_PER_TOKEN for each token of the text, because more weights do
not lower the loss of a small text; D: effective training tokens. A repeated token counts less (Muennighoff et al.
2023), the more so the larger the model is for its text, and a run of S steps counts as D / (1 + FIRST_STEPS / S)
tokens, because its first steps learn less (McCandlish et al. 2018).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

EPOCHS_SCALE = 15.39  # R*_D of Muennighoff et al.: repetitions after which one has lost 63% of its value
OVERFITTING, MIN_EPOCHS_SCALE = 4, 3  # R* for models that are large for their text (docs/lab/model-size.md)
WEIGHTS_PER_TOKEN = 10  # of the text, that a model can use
FIRST_STEPS = 100
INTERVAL = (0.05, 0.95)  # quantiles
MIN_EXPONENT = 0.01  # of alpha, beta and s
ERROR = 0.01  # standard deviation of ln L in a run, from seeds and from the law itself


class RunSize(NamedTuple):
    """What the loss of a run depends on."""

    weights: int  # N
    tokens: int  # D, including repetitions
    steps: int  # S
    unique_tokens: int  # U, of the training text


@dataclass(frozen=True)
class ScalingLaw:
    """The law of a text."""

    E: float  # nats per token
    A: float
    alpha: float
    B: float
    beta: float
    s: float = 1.0

    @classmethod
    def from_parameters(cls, parameters: Sequence[float]) -> "ScalingLaw":
        """parameters: ln E, ln A, alpha, ln B, beta, s."""
        e, a, alpha, b, beta, s = map(float, parameters)
        return cls(math.exp(e), math.exp(a), alpha, math.exp(b), beta, s)

    def __str__(self) -> str:
        size, length = f"{self.A:.3g} / N^{self.alpha:.3f}", f"{self.B:.3g} / D^{self.beta:.3f}"
        return f"L(N, D) = {self.E:.3f} + ({size} + {length})^{self.s:.2f}"

    @property
    def parameters(self) -> list[float]:
        return [math.log(self.E), math.log(self.A), self.alpha, math.log(self.B), self.beta, self.s]

    def losses(self, runs: Sequence[RunSize]) -> list[float]:
        """The losses, in nats per token, of models that are trained to the end of their schedule."""
        return log_losses(torch.tensor([self.parameters], dtype=torch.float64), runs)[0].exp().tolist()


class Forecast(NamedTuple):
    """An expected loss in nats per token, and its interval."""

    loss: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.loss:.3f} ({self.low:.3f} to {self.high:.3f})"


def forecast(laws: Sequence[ScalingLaw], run: RunSize) -> Forecast:
    """The expected loss of a run. laws: from `fit`."""
    losses = [law.losses([run])[0] for law in laws]
    return Forecast(losses[0], *np.quantile(losses, INTERVAL).tolist())


def log_losses(theta: Tensor, runs: Sequence[RunSize]) -> Tensor:
    """ln L of each run under each law: (K, P). theta: ScalingLaw.parameters of K laws, (K, 6)."""
    N, D, S, U = torch.tensor(runs, dtype=torch.float64).unbind(dim=1)  # (P,) each
    e, a, alpha, b, beta, s = theta.unsqueeze(-1).unbind(dim=1)  # (K, 1) each
    scale = (EPOCHS_SCALE / (1 + OVERFITTING * N / U)).clamp(min=MIN_EPOCHS_SCALE)
    N, D = torch.minimum(N, WEIGHTS_PER_TOKEN * U), D / (1 + FIRST_STEPS / S)
    repetitions = (D / U - 1).clamp(min=0)
    D = torch.minimum(D, U) * (1 - scale * torch.expm1(-repetitions / scale))
    return torch.logaddexp(e, s * torch.logaddexp(a - alpha * N.log(), b - beta * D.log()))


@dataclass(frozen=True)
class Prior:
    """What is known about the law of a text before it is measured: mean and standard deviation of its parameters."""

    mean: tuple[float, ...]  # ln E, ln A, alpha, ln B, beta, s
    std: tuple[float, ...]

    def per_token(self, bytes_per_token: float) -> "Prior":
        """For losses in nats per token, if this one is for nats per byte, of a text with this many bytes per token."""
        e, a, alpha, b, beta, s = self.mean
        k = math.log(bytes_per_token)
        return Prior((e + k, a + k / s, alpha, b + k / s - beta * k, beta, s), self.std)


def fit(
    runs: Sequence[RunSize], losses: Sequence[float], prior: Prior, samples: int = 200, seed: int = 0
) -> list[ScalingLaw]:
    """Fit the law to the losses of runs. Returns the best fit, then `samples` others, whose spread is its uncertainty.

    Minimizes a Huber loss of the errors of ln L in units of ERROR, as Hoffmann et al., plus the prior. A sample is the
    fit to losses with random errors, with a prior whose mean is drawn from the prior (a parametric bootstrap).
    """
    rng, K = np.random.default_rng(seed), samples + 1
    mean, std = (torch.tensor(values, dtype=torch.float64) for values in (prior.mean, prior.std))
    draws = torch.from_numpy(rng.standard_normal((K, len(mean))))
    errors = torch.from_numpy(rng.standard_normal((K, len(runs)))) * ERROR
    draws[0], errors[0] = 0.0, 0.0
    means = mean + std * draws  # (K, 6)
    targets = torch.tensor(losses, dtype=torch.float64).log() + errors  # (K, P)
    z = torch.zeros_like(means, requires_grad=True)  # (parameters - mean) / std
    lowest = torch.tensor([-math.inf, -math.inf, MIN_EXPONENT, -math.inf, MIN_EXPONENT, MIN_EXPONENT])
    optimizer = torch.optim.LBFGS([z], max_iter=1000, history_size=50, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        residuals = (log_losses((means + std * z).maximum(lowest), runs) - targets) / ERROR
        total = F.huber_loss(residuals, torch.zeros_like(residuals), reduction="sum") + z.square().sum() / 2
        total.backward()
        return total

    optimizer.step(closure)
    return [ScalingLaw.from_parameters(row) for row in (means + std * z).maximum(lowest).tolist()]
