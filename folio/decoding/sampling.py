"""How a token is sampled from logits: penalties, filters, and the draw.

Dimensions: B batch (rows), V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from folio.base.randomness import hash64


@dataclass(frozen=True)
class Sampling:
    """How a token is sampled from logits. The filters apply in this order, as in transformers; before them logit_bias,
    the repetition penalty, and the other two penalties, as in vLLM.
    """

    repetition_penalty: float = 1.0  # divides the logits of tokens that occurred before; 1: off (Keskar et al. 2019)
    temperature: float = 1.0  # divides all logits; 0: always the most likely token
    top_k: int | None = None  # keep the k most likely tokens
    top_p: float | None = None  # keep the smallest set of most likely tokens whose probabilities sum to p or more
    min_p: float | None = None  # keep tokens whose probability is at least min_p times the largest
    presence_penalty: float = 0.0  # subtracted from the logits of tokens that were sampled before; 0: off (OpenAI)
    frequency_penalty: float = 0.0  # subtracted as many times as the token was sampled before; 0: off (OpenAI)
    logit_bias: tuple[tuple[int, float], ...] = ()  # (id, what is added to its logit)

    @property
    def counts_tokens(self) -> bool:
        """Whether it depends on how often each token was sampled."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0


class Sample(NamedTuple):
    """What a row of a batch samples. Its random numbers are a function of (seed, number, position)."""

    prompt: Sequence[int]  # ids, which have occurred
    number: int
    sampling: Sampling
    seed: int


def penalize(logits: Tensor, occurred: Tensor, penalty: float) -> Tensor:
    """Divide the logits (..., V) of tokens that occurred (..., V) by the penalty; negative logits are multiplied by it.

    "CTRL" (Keskar et al. 2019), section 4.1, as implemented in transformers.
    """
    return torch.where(occurred, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def add_bias(logits: Tensor, bias: tuple[tuple[int, float], ...]) -> Tensor:
    """Add to the logits (..., V) of some ids."""
    ids, values = zip(*bias, strict=True)
    added = logits.new_tensor(values).expand(*logits.shape[:-1], -1)
    return logits.index_add(-1, torch.tensor(ids, device=logits.device), added)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Set all but the k largest logits (..., V) to -inf. Ties with the k-th largest are kept."""
    if k >= logits.shape[-1]:
        return logits
    kth = logits.topk(k).values[..., -1:]
    return logits.masked_fill(logits < kth, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the smallest set of most likely tokens whose probabilities sum to p or more; set other logits to -inf.

    Nucleus sampling: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration". The most likely token is
    always kept; of equal ones at the end of the set, those with the lowest ids. logits: (..., V).
    """
    ordered, order = logits.sort(descending=True, dim=-1, stable=True)
    probabilities = ordered.softmax(dim=-1)
    dropped = probabilities.cumsum(dim=-1) - probabilities >= p  # the sum over more likely tokens
    dropped[..., 0] = False  # even if p is so small that it is 0 in float32
    return logits.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Set logits (..., V) to -inf where the probability is below p times the largest (Nguyen et al. 2024)."""
    probabilities = logits.softmax(dim=-1)
    return logits.masked_fill(probabilities < p * probabilities.amax(dim=-1, keepdim=True), -torch.inf)


def next_token_probabilities(
    logits: Tensor, sampling: Sampling, occurred: Tensor | None = None, counts: Tensor | None = None
) -> Tensor:
    """The distribution that the next token is sampled from: logits (..., V) to probabilities (..., V).

    occurred: which tokens occur in the text so far, (..., V) of bool, for the repetition penalty. counts: how often
    each was sampled, (..., V) of float32, for the other penalties. temperature=0 gives the most likely token
    probability 1.
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
    """Uniform numbers in [0, 1), float64, (samples, count): one per sample and position first .. first + count - 1.

    Each is a function of (seed, sample, position), so that sample k is the same in any batch.
    """
    rows = np.array(samples, dtype=np.uint64)[:, None]
    bits = hash64(seed, rows, np.arange(first, first + count, dtype=np.uint64)) >> np.uint64(11)
    return torch.from_numpy(bits.astype(np.float64) * 2.0**-53)


def sample_token(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Sample by inverse transform: the first token at which the cumulative probability exceeds `uniform`.

    probabilities: (B, V). uniform: (B, 1) in [0, 1), on the sampling_device of the probabilities' device.
    Returns ids (B, 1) on the probabilities' device.
    """
    sums = probabilities.to(uniform.device).cumsum(dim=-1, dtype=torch.float64)
    return torch.searchsorted(sums, uniform * sums[:, -1:], right=True).to(probabilities.device)
