"""How much a correct result may differ from the expected one: by rounding, and by chance."""

import math
from statistics import NormalDist

import numpy as np
import torch

from model import GPT, GPTConfig

FALSE_ALARM = 1e-6  # probability with which a test may fail for a new seed although the code is correct

# --- rounding ---------------------------------------------------------------------------------------------------------


def rounding_error(operations: int, dtype: torch.dtype = torch.float32, values: int = 10**6) -> float:
    """Relative error after N roundings in a row, for all of many values with probability 1 - FALSE_ALARM.

    It is at most N u, with the unit roundoff u of the dtype (Higham, Accuracy and Stability of Numerical Algorithms,
    2002, lemma 3.1), and at most λ sqrt(N) u with probability 1 - 2 exp(-λ**2 / 2), if the roundings are independent
    (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019, theorem 2.4).
    """
    likely = math.sqrt(2 * math.log(2 * values / FALSE_ALARM)) * math.sqrt(operations)
    return min(operations, likely) * torch.finfo(dtype).eps / 2


def network_operations(config: GPTConfig, T: int) -> int:
    """Number of additions and multiplications in a row from a token to the logits, for a text of T tokens."""
    C, D = config.n_embd, config.n_embd // config.n_head
    norm = 2 * C + 8  # mean, variance, scale
    attention = C + D + 2 * T + C + 12  # projection, scores, softmax and sum over values, projection; positions
    mlp = C + 4 * C + 12  # with 12 for the activation
    return config.n_layer * (2 * norm + attention + mlp + 2) + norm + C


def network_tensors(config: GPTConfig) -> int:
    """Number of tensors in a row from a token to the logits, weights included.

    A block has 2 norms, q or k or v, scores, heads, projection, the 2 layers and the activation of the MLP, and 2 sums;
    and 6 weights. The others are the embedding, the norm at the end, its weight, and the output matrix.
    """
    return (11 + 6) * config.n_layer + 4


def logits_error(config: GPTConfig, T: int, dtype: torch.dtype = torch.float32) -> float:
    """Bound on the difference between two computations of logits for T tokens, relative to the largest one.

    dtype: of tensors; one of 16 bits is compared with float32. Sums are in float32 in any case.
    """
    if dtype == torch.float32:
        return 2 * rounding_error(network_operations(config, T))
    return rounding_error(network_tensors(config), dtype)


def largest_logit(model: GPT) -> float:
    """Bound on the absolute logits of any text: the last norm scales a state to sqrt(C) before its own weights."""
    norm, rows = model.transformer.ln_f, model.lm_head.weight
    state = norm.weight.abs().max() * math.sqrt(model.config.n_embd) + (0 if norm.bias is None else norm.bias.norm())
    return (rows.norm(dim=1).max() * state).item()


def within(expected: torch.Tensor | np.ndarray, error: float) -> dict[str, float]:
    """The arguments of assert_close that allow an error relative to the largest expected value."""
    return dict(rtol=0.0, atol=error * abs(expected).max().item())


def norm_error(roundings: int, dtype: torch.dtype = torch.float32) -> float:
    """Error of a tensor of many values after N roundings in a row, relative to its norm.

    Each rounding changes a value by at most u of it, independently of the others: the squares add up to N u**2.
    """
    return math.sqrt(roundings) * torch.finfo(dtype).eps / 2


def gradients_error(config: GPTConfig, B: int, T: int, dtype: torch.dtype = torch.float32) -> float:
    """Like logits_error, for the gradients of B sequences, relative to the norm of a parameter's gradient.

    The backward pass has twice as many operations as the forward pass, and sums over tokens.
    """
    if dtype == torch.float32:
        return norm_error(2 * (3 * network_operations(config, T) + B * T))
    return norm_error(3 * network_tensors(config), dtype)


# --- chance -----------------------------------------------------------------------------------------------------------


def normal_limit(comparisons: int = 1) -> float:
    """What none of several standard normal numbers exceeds, in absolute value, with probability 1 - FALSE_ALARM."""
    return NormalDist().inv_cdf(1 - FALSE_ALARM / 2 / comparisons)


def chi_square_limit(degrees_of_freedom: int, comparisons: int = 1) -> float:
    """What none of several chi-square numbers exceeds with probability 1 - FALSE_ALARM or more.

    The bound is lemma 1 of Laurent and Massart, Adaptive Estimation of a Quadratic Functional, 2000.
    """
    t = math.log(comparisons / FALSE_ALARM)
    return degrees_of_freedom + 2 * math.sqrt(degrees_of_freedom * t) + 2 * t


def binomial_range(n: int, p: float, comparisons: int = 1) -> range:
    """The numbers of successes in n independent trials that occur with probability 1 - FALSE_ALARM or more.

    p: the probability of success. comparisons: how many such numbers are checked.
    """
    if p in (0, 1):
        return range(round(n * p), round(n * p) + 1)
    log = [math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(n + 1)]
    share = np.exp([c + k * math.log(p) + (n - k) * math.log1p(-p) for k, c in enumerate(log)])
    tail = FALSE_ALARM / 2 / comparisons
    first = int(np.searchsorted(share.cumsum(), tail, side="right"))
    last = n - int(np.searchsorted(share[::-1].cumsum(), tail, side="right"))
    return range(first, last + 1)
