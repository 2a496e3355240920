"""95 % confidence intervals and tests: of a mean, of a ratio, and of the differences between groups of runs.

Intervals need only NumPy, tests need scipy.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np


class Estimate(NamedTuple):
    """A value with its uncertainty. All but p are in the unit of the data."""

    value: float
    half_width: float | None  # the 95 % interval is value ± half_width; None: too few samples to know it
    p: float | None = None  # two-sided p-value of a true value of 0; 1 if it cannot be known; None: not tested

    @property
    def low(self) -> float | None:
        return None if self.half_width is None else self.value - self.half_width

    @property
    def high(self) -> float | None:
        return None if self.half_width is None else self.value + self.half_width


NORMAL_975 = NormalDist().inv_cdf(0.975)


def estimate_mean(values: np.ndarray) -> Estimate:
    """The mean of independent samples (n,), by Student's t."""
    mean = float(values.mean())
    return estimate_ratio(mean, values - mean)


def share_interval(successes: int, n: int) -> tuple[float, float]:
    """The 95 % interval of a probability from n independent trials (Wilson 1927). It has a width even at 0 and n."""
    z2 = NORMAL_975**2
    half_width = math.sqrt(z2 * (successes * (n - successes) / n + z2 / 4))
    low, one_minus_high = ((count + z2 / 2 - half_width) / (n + z2) for count in (successes, n - successes))
    return max(0.0, low), 1 - max(0.0, one_minus_high)


def ratio_influence(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """How far each sample moves the ratio sum(values) / sum(weights), times n: (n,), from values (n,), weights (n,).

    This is the linearization of Cochran 1977, Sampling Techniques, section 2.11. With equal weights, it is the values
    minus their mean.
    """
    ratio = float(values.sum() / weights.sum())
    return (values - ratio * weights) / weights.mean()


def leave_one_out_influence(samples: np.ndarray, score: Callable[[np.ndarray], float]) -> np.ndarray:
    """How far each of n samples, (n, S), moves a score of their sum, (S,), times n: (n,), with a mean of 0.

    This is the jackknife of Quenouille and Tukey: the score is computed again without each sample. For the mean of
    samples, it is the samples minus their mean.
    """
    n, total = len(samples), samples.sum(axis=0)
    if n < 2:
        return np.zeros(n)
    without = np.array([score(total - sample) for sample in samples])  # (n,)
    return (n - 1) * (without.mean() - without)


def estimate_ratio(ratio: float, influence: np.ndarray) -> Estimate:
    """A ratio by Student's t. influence: the ratio_influence of the n samples, (n,)."""
    n = len(influence)
    if n < 2:
        return Estimate(ratio, None)
    return Estimate(ratio, student_t_975(n - 1) * math.sqrt(float(influence @ influence) / (n * (n - 1))))


def ratio_difference(difference: float, influence: np.ndarray) -> Estimate:
    """The difference of two ratios over the same n samples, with its t-test.

    influence: the difference of both ratio_influence, (n,).
    """
    n = len(influence)
    if n < 2:
        return Estimate(difference, None, 1.0)
    return _t_test(difference, math.sqrt(float(influence @ influence) / (n * (n - 1))), n - 1)


def paired_difference(first: np.ndarray, second: np.ndarray) -> Estimate:
    """The mean of second - first, (n,) each, by the paired t-test. Sample i of both has something in common: its seed.

    Equal to scipy.stats.ttest_rel(second, first), but defined for differences without variance.
    """
    difference = second - first
    mean = float(difference.mean())
    return ratio_difference(mean, difference - mean)


def welch_difference(first: np.ndarray, second: np.ndarray) -> Estimate:
    """The mean of `second` (m,) minus the mean of `first` (n,), independent of each other, by Welch's t-test.

    The two may have different variances (Welch 1947). The degrees of freedom are Satterthwaite's. Equal to
    scipy.stats.ttest_ind(second, first, equal_var=False), but defined for groups without variance.
    """
    difference = float(second.mean() - first.mean())
    if min(len(first), len(second)) < 2:
        return Estimate(difference, None, 1.0)
    variances = [float(group.var(ddof=1)) / len(group) for group in (first, second)]  # of the means
    total = sum(variances)
    if total == 0:
        return _t_test(difference, 0.0, 1)
    terms = [variance**2 / (len(group) - 1) for variance, group in zip(variances, (first, second), strict=True)]
    return _t_test(difference, math.sqrt(total), total**2 / sum(terms))


def differences_to_best(losses: np.ndarray) -> list[Estimate]:
    """How far each of P settings is above the one with the lowest mean loss, from their runs with the same S seeds.

    losses: (P, S). A setting is worse than the best if its interval, value ± half_width, is above 0. The p-values are
    adjusted for the number of comparisons, and for the best being chosen by the same runs. Two tests must agree:

    - Tukey's range test with the seeds as blocks, which pools the noise of all settings. It is repeated without the
      settings that it found to be worse, which are often also the noisiest, as those with too high a learning rate.
    - The paired t-test of the setting and the best, because settings may differ in their noise.

    For two settings, both are the paired t-test.
    """
    n_settings, n_seeds = losses.shape
    best = int(losses.mean(axis=1).argmin())
    pairs = [paired_difference(losses[best], of_setting) for of_setting in losses]
    if n_seeds < 2:
        return pairs
    estimates, remaining, p = list(pairs), list(range(n_settings)), 0.0
    while len(remaining) > 1:
        tukey = _tukey(losses[remaining], remaining.index(best))
        for setting, of_setting in zip(remaining, tukey, strict=True):
            half_width = max(of_setting.half_width, pairs[setting].half_width)
            p_adjusted = max(of_setting.p, pairs[setting].p, p)
            estimates[setting] = Estimate(pairs[setting].value, half_width, p_adjusted)
        worse = [setting for setting in remaining if estimates[setting].low > 0]
        if not worse:
            break
        p = max(estimates[setting].p for setting in worse)  # p-values do not decrease from one repetition to the next
        remaining = [setting for setting in remaining if setting not in worse]
    return estimates


def _tukey(losses: np.ndarray, best: int) -> list[Estimate]:
    """The differences of P settings, (P, S), to one of them, with Tukey's simultaneous intervals; seeds are blocks."""
    from scipy.stats import studentized_range

    n_settings, n_seeds = losses.shape
    means = losses.mean(axis=1)
    residuals = losses - means[:, None] - losses.mean(axis=0) + losses.mean()
    degrees_of_freedom = (n_settings - 1) * (n_seeds - 1)
    standard_error = math.sqrt(float((residuals**2).sum()) / degrees_of_freedom / n_seeds)  # of one mean
    half_width = _studentized_range_95(n_settings, degrees_of_freedom) * standard_error
    differences = means - means[best]
    if standard_error == 0:
        return [Estimate(float(d), 0.0, 1.0 if d == 0 else 0.0) for d in differences]
    p_values = studentized_range.sf(differences / standard_error, n_settings, degrees_of_freedom)
    return [Estimate(float(d), half_width, float(p)) for d, p in zip(differences, p_values, strict=True)]


@lru_cache
def _studentized_range_95(n: int, degrees_of_freedom: int) -> float:
    """The 95 % quantile, which takes scipy some 50 ms."""
    from scipy.stats import studentized_range

    return float(studentized_range.ppf(0.95, n, degrees_of_freedom))


def _t_test(value: float, standard_error: float, degrees_of_freedom: float) -> Estimate:
    from scipy import stats

    half_width = student_t_975(degrees_of_freedom) * standard_error
    if standard_error == 0:
        return Estimate(value, half_width, 1.0 if value == 0 else 0.0)
    return Estimate(value, half_width, float(2 * stats.t(degrees_of_freedom).sf(abs(value) / standard_error)))


@lru_cache
def student_t_975(degrees_of_freedom: float) -> float:
    """The 97.5 % quantile of Student's t, by Newton's method on the integral of its density (Simpson's rule)."""
    v = degrees_of_freedom
    scale = math.exp(math.lgamma((v + 1) / 2) - math.lgamma(v / 2)) / math.sqrt(v * math.pi)
    weights = np.array([1.0, *[4.0, 2.0] * 500, 4.0, 1.0])
    quantile, step = NORMAL_975, 1.0  # below the result, from where the steps converge
    while abs(step) > 1e-12 * quantile:
        x = np.linspace(0, quantile, len(weights))
        density = scale * (1 + x * x / v) ** (-(v + 1) / 2)
        area = float(weights @ density) * quantile / (3 * (len(weights) - 1))
        step = (0.475 - area) / float(density[-1])
        quantile += step
    return quantile
