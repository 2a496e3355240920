"""Sampling of tokens from logits: penalties, filters, and random numbers.

Dimensions: B batch (rows), V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from folio.base.randomness import hash64


@dataclass(frozen=True)
class Sampling:
    """Sampling settings. As in vLLM, logit_bias and the penalties apply first, the repetition penalty before the other
    two; then the filters apply in the order of the fields, as in transformers.
    """

    repetition_penalty: float = 1.0  # divides the logits of tokens that occurred before; 1: off (Keskar et al. 2019)
    temperature: float = 1.0  # divides all logits; 0: greedy
    top_k: int | None = None  # keep the k most likely tokens
    top_p: float | None = None  # keep the smallest set of most likely tokens whose probabilities sum to p or more
    min_p: float | None = None  # keep tokens whose probability is at least min_p times the largest
    presence_penalty: float = 0.0  # subtracted from the logits of tokens that were sampled before; 0: off (OpenAI)
    frequency_penalty: float = 0.0  # times a token's count, subtracted from its logit; 0: off (OpenAI)
    logit_bias: tuple[tuple[int, float], ...] = ()  # (id, value to add to its logit)

    @property
    def counts_tokens(self) -> bool:
        """Whether sampling depends on the number of times each token was sampled."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0


class Sample(NamedTuple):
    """The sampling settings of a batch's row. Its random numbers are a function of (seed, number, position)."""

    prompt: Sequence[int]  # ids, for the repetition penalty
    number: int
    sampling: Sampling
    seed: int


def penalize(logits: Tensor, occurred: Tensor, penalty: float) -> Tensor:
    """Divide the logits (..., V) of tokens that occurred (..., V) by the penalty; negative logits are multiplied by it.

    "CTRL" (Keskar et al. 2019), section 4.1, as implemented in transformers.
    """
    return torch.where(occurred, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def add_bias(logits: Tensor, bias: tuple[tuple[int, float], ...]) -> Tensor:
    """Add a value to the logits (..., V) of each id in `bias`."""
    ids, values = bias_tensors(bias, logits.device, logits.dtype)
    return logits.index_add(-1, ids, values.expand(*logits.shape[:-1], -1))


@lru_cache(maxsize=64)
def bias_tensors(
    bias: tuple[tuple[int, float], ...], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The ids and the values of a bias on a device. They are cached, because copying them to a GPU waits for it."""
    ids, values = zip(*bias, strict=True)
    return torch.tensor(ids, device=device), torch.tensor(values, device=device, dtype=dtype)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Set all but the k largest logits (..., V) to -inf. Ties with the k-th largest are kept."""
    if k >= logits.shape[-1]:
        return logits
    kth = logits.topk(k, sorted=False).values.amin(dim=-1, keepdim=True)
    return logits.masked_fill(logits < kth, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the smallest set of most likely tokens whose probabilities sum to p or more; set other logits to -inf.

    Nucleus sampling: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration". The most likely token is
    always kept. Ties at the end of the set are broken by the lowest id. logits: (..., V).
    """
    sorted_logits, order = logits.sort(descending=True, dim=-1, stable=True)
    probabilities = sorted_logits.softmax(dim=-1)
    removed = probabilities.cumsum(dim=-1) - probabilities >= p  # the sum over more likely tokens
    removed[..., 0] = False  # p may underflow to 0 in float32
    return logits.masked_fill(removed.scatter(-1, order, removed), -torch.inf)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Set logits (..., V) to -inf where the probability is below p times the largest (Nguyen et al. 2024)."""
    probabilities = logits.softmax(dim=-1)
    return logits.masked_fill(probabilities < p * probabilities.amax(dim=-1, keepdim=True), -torch.inf)


def next_token_probabilities(
    logits: Tensor, sampling: Sampling, occurred: Tensor | None = None, counts: Tensor | None = None
) -> Tensor:
    """Convert logits (..., V) to the probabilities (..., V) from which the next token is sampled.

    occurred: whether each token occurs in the text so far, bool (..., V), for the repetition penalty. counts: the
    number of times each token was sampled, float32 (..., V), for the other penalties. With temperature=0, the most
    likely token has probability 1.
    """
    if sampling.logit_bias:
        logits = add_bias(logits, sampling.logit_bias)
    if occurred is not None and sampling.repetition_penalty != 1:
        logits = penalize(logits, occurred, sampling.repetition_penalty)
    if counts is not None and sampling.counts_tokens:
        logits = logits - (sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0))
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p is not None:
        logits = keep_top_p(logits, sampling.top_p)
    if sampling.min_p is not None:
        logits = keep_min_p(logits, sampling.min_p)
    return logits.softmax(dim=-1)


def uniforms(seed: int, samples: Sequence[int], first: int, count: int) -> Tensor:
    """Uniform random numbers in [0, 1), float64 (samples, count), for positions first ... first + count - 1.

    Each number is a function of (seed, sample, position), so that samples do not depend on the batch.
    """
    rows = np.array(samples, dtype=np.uint64)[:, None]
    bits = hash64(seed, rows, np.arange(first, first + count, dtype=np.uint64)) >> np.uint64(11)
    return torch.from_numpy(bits.astype(np.float64) * 2.0**-53)


def sample_token(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Sample by inverse transform: return the first token at which the cumulative probability exceeds `uniform`.

    probabilities: (B, V). uniform: (B, 1) in [0, 1), on the same device. Returns ids (B, 1).
    """
    sums = probabilities.cumsum(dim=-1, dtype=torch.float64)
    return torch.searchsorted(sums, uniform * sums[:, -1:], right=True)
