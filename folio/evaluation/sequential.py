"""Sequential tests: whether a change B of A is better, with a look at the results after each pair of runs.

A pair has the same seed, and its difference is the loss of B minus that of A: B is better if the mean is negative.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from folio.evaluation.intervals import Estimate

Verdict = Literal["better", "worse", "no difference", "undecided"]

# The probability with which the interval of each look may miss the true difference, by the number of pairs. Their sum
# is an upper bound for the probability that any look misses it, whichever is the last (the union bound). It is larger
# than 5 % because looks share pairs, so they often miss together: in simulations (lab/bench/sequential.py), any of them
# misses in less than 5 % of experiments. Two pairs decide only extreme cases, and few experiments have more than eight.
LOOK_ERRORS = {2: 0.0012, 3: 0.016, 4: 0.019, 5: 0.0125, 6: 0.0095, 7: 0.0095, 8: 0.0095}
LOOK_ERRORS |= dict.fromkeys(range(9, 17), 0.0012)
MAX_PAIRS = max(LOOK_ERRORS)

# Possible standard deviations of a difference, relative to that of the pairs. With two pairs, it may be far larger.
FACTORS = np.exp(np.arange(-3, 20, 0.05))
SPREAD_OF_SPREADS = 0.3  # of ideas in a ledger: the standard deviation of the logarithms of their spreads
FLAT_DENSITY = 1 / (2 * math.log(16))  # of the logarithm: constant from 1/16 to 16 times a ledger's spread
# Differences are rounded to about this, because losses of a few nats are computed in float32. Equal differences, as of
# two changes that compute the same, have no other spread.
MIN_DEVIATION = 1e-6

LUCK = 0.10  # the share of the kept changes that may be no better
KEPT_LOOKS = (4, 6, 8, 12, 16)  # pairs
LORD_EXPONENT = 1.6
ZETA = 2.285766  # the sum of j**-LORD_EXPONENT, j = 1, 2, ...


@dataclass(frozen=True)
class Spread:
    """The standard deviation of a pair's difference, estimated from other experiments with the same recipe and budget.

    value: in nats per token, or another unit of losses. df: degrees of freedom of the estimate.
    """

    value: float
    df: int


def pooled_spread(experiments: Sequence[np.ndarray]) -> Spread | None:
    """Return the pooled standard deviation of differences (n,) around each experiment's mean. None: no two pairs.

    The sum of squares over the sum of degrees of freedom has almost no bias although experiments stop when the data
    say so: by chance similar pairs end an experiment early, but then they count less. If ideas have different spreads,
    it is above the median, which costs pairs but does not add false verdicts.
    """
    df = sum(len(differences) - 1 for differences in experiments if len(differences))
    squares = sum(float(((d - d.mean()) ** 2).sum()) for d in experiments if len(d))
    return Spread(max(math.sqrt(squares / df), MIN_DEVIATION), df) if df else None


def tail_probability(distance: np.ndarray, n: int, deviation: np.ndarray, spread: Spread | None) -> np.ndarray:
    """Return the probability that the true difference is further than `distance` from the mean of n differences.

    deviation: the standard deviation of the differences, with n - 1 degrees of freedom. It and distance broadcast.

    With a known standard deviation, it is that of a normal distribution; the result is its mean over FACTORS, weighted
    by their posterior probabilities. Without a ledger, the prior density of the logarithm is constant (Jeffreys), which
    gives Student's t. With a ledger, half of the prior is normal around its spread. The other half is constant, so that
    pairs that contradict the ledger are believed more than it (a robust mixture prior: Schmidli et al. 2014).
    """
    sigma = np.asarray(deviation)[..., None] * FACTORS  # (..., factors)
    posterior = np.exp(-(n - 1) * (np.log(FACTORS) + FACTORS**-2 / 2))  # the likelihood of the deviation
    if spread:
        width = math.hypot(SPREAD_OF_SPREADS, math.sqrt(1 / (2 * spread.df)))  # sampling error: of log(value)
        z = np.log(sigma / spread.value) / width
        posterior = posterior * (np.exp(-(z**2) / 2) / (width * math.sqrt(2 * math.pi)) + FLAT_DENSITY)
    z = np.asarray(distance)[..., None] * math.sqrt(n) / sigma
    two_tails = torch.special.erfc(torch.from_numpy(z / math.sqrt(2))).numpy()
    return (two_tails * posterior).sum(axis=-1) / posterior.sum(axis=-1)


def half_width(n: int, deviation: np.ndarray, spread: Spread | None) -> np.ndarray:
    """Return half the width of the interval after n pairs, 2 to MAX_PAIRS. Arguments: see tail_probability."""
    deviation = np.asarray(deviation)
    low, high = (np.log(deviation * factor) for factor in (FACTORS[0], FACTORS[-1]))
    for _ in range(40):  # bisection, to a relative error of exp(23) / 2**40
        middle = (low + high) / 2
        is_too_narrow = tail_probability(np.exp(middle), n, deviation, spread) > LOOK_ERRORS[n]
        low, high = np.where(is_too_narrow, middle, low), np.where(is_too_narrow, high, middle)
    return np.exp(high)


def look(differences: np.ndarray, spread: Spread | None) -> Estimate:
    """Return the mean of 1 to MAX_PAIRS differences (n,) with its interval; one pair has none. spread: of a ledger.

    In at least 95 % of experiments, the intervals of all looks contain the true difference.
    """
    n, mean = len(differences), float(differences.mean())
    return Estimate(mean, float(half_width(n, _deviation(differences), spread)) if n > 1 else None)


def verdict(differences: np.ndarray, spread: Spread | None, smallest: float) -> tuple[Verdict, int]:
    """Return the verdict on B, and the number of pairs after which it was reached. Later pairs never change it.

    differences: B minus A, at most MAX_PAIRS. smallest: differences up to this do not matter; same unit.
    """
    for n in range(2, len(differences) + 1):
        interval = look(differences[:n], spread)
        if interval.high < 0:
            return "better", n
        if interval.low > 0:
            return "worse", n
        if -smallest <= interval.low and interval.high <= smallest:
            return "no difference", n
    return "undecided", len(differences)


def kept_p(differences: np.ndarray) -> float:
    """Return the p-value of "B is not better", valid whenever the experiment stops. 1: too few pairs.

    It is the smallest one-sided p-value of Student's t at KEPT_LOOKS, times their number (Bonferroni). No ledger is
    used, so a wrong one cannot make it too small.
    """
    p = 1.0
    for n in KEPT_LOOKS:
        if n <= len(differences):
            mean = float(differences[:n].mean())
            tail = float(tail_probability(abs(mean), n, _deviation(differences[:n]), None)) / 2
            p = min(p, len(KEPT_LOOKS) * (tail if mean < 0 else 1 - tail))
    return p


def lord_levels(p_values: Sequence[float], level: float = LUCK) -> list[float]:
    """Return the level at which each experiment is tested, and that of the next one: one more than p_values.

    A change is kept if its p-value is at most its level. On average, at most `level` of the kept changes are not
    better, however many experiments there are. This is LORD++ (Ramdas et al. 2017, "Online control of the false
    discovery rate with decaying memory"): without kept changes, all levels add up to half of `level`, and each kept
    change raises the later ones. So smaller p-values of earlier experiments, after more pairs, never undo a decision.

    p_values: in the order in which the experiments began, which their results cannot change. They must be independent,
    so each experiment needs seeds of its own.
    """
    levels, starts = [], [-1]  # the levels decrease after each start: before the first experiment, or a kept change
    for t in range(len(p_values) + 1):
        budgets = ((level / 2 if k < 2 else level) * (t - start) ** -LORD_EXPONENT for k, start in enumerate(starts))
        levels.append(sum(budgets) / ZETA)
        if t < len(p_values) and p_values[t] <= levels[t]:
            starts.append(t)
    return levels


def kept(p_values: Sequence[float], level: float = LUCK) -> list[bool]:
    """Return which changes are kept. Arguments: see lord_levels."""
    return [p <= tested_at for p, tested_at in zip(p_values, lord_levels(p_values, level), strict=False)]


def _deviation(differences: np.ndarray) -> float:
    return max(float(differences.std(ddof=1)), MIN_DEVIATION)
