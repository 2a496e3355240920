"""95 % confidence intervals and significance tests for means, ratios, and differences between groups of runs.

Intervals need only NumPy; tests need scipy.
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
    half_width: float | None  # the 95 % interval is value ± half_width; None: too few samples
    p: float | None = None  # two-sided p-value under a true value of 0; 1: too few samples; None: not tested

    @property
    def low(self) -> float | None:
        return None if self.half_width is None else self.value - self.half_width

    @property
    def high(self) -> float | None:
        return None if self.half_width is None else self.value + self.half_width


def plus_minus(estimate: Estimate, sign: str = "") -> str:
    """Format a value and half the width of its 95 % interval."""
    half_width = "" if estimate.half_width is None else f" ± {estimate.half_width:.4f}"
    return f"{estimate.value:{sign}.4f}{half_width}"


NORMAL_975 = NormalDist().inv_cdf(0.975)
# The logarithm of Student's 97.5 % quantile is a smooth function of 1 / degrees of freedom, from the normal
# distribution's at 0 to Cauchy's at 1. These are the coefficients of its polynomial of degree 8, highest power first,
# by least squares on scipy's quantiles at 200 Chebyshev nodes.
LOG_T_975 = (
    *(0.025162767, -0.13909858, 0.27673379, -0.15776915, -0.19950591),
    *(0.14500422, 0.70829889, 1.2103381, 0.67292626),
)
NEARLY_ALL = 1e-6  # with less weight in the other samples, they tell nothing about the variance


def estimate_mean(values: np.ndarray) -> Estimate:
    """Estimate the mean of independent samples (n,) by Student's t."""
    mean = float(values.mean())
    return estimate_ratio(mean, values - mean, np.ones(len(values)))


def share_interval(successes: int, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a probability from n independent trials (Wilson 1927). Its width is never 0."""
    z2 = NORMAL_975**2
    half_width = math.sqrt(z2 * (successes * (n - successes) / n + z2 / 4))
    low, one_minus_high = ((count + z2 / 2 - half_width) / (n + z2) for count in (successes, n - successes))
    return max(0.0, low), 1 - max(0.0, one_minus_high)


def ratio_influence(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return n times each sample's influence on the ratio sum(values) / sum(weights). All are (n,).

    This is the linearization of Cochran 1977, Sampling Techniques, section 2.11. With equal weights, it is the values
    minus their mean.
    """
    ratio = float(values.sum() / weights.sum())
    return (values - ratio * weights) / weights.mean()


def leave_one_out_influence(samples: np.ndarray, score: Callable[[np.ndarray], float]) -> np.ndarray:
    """Return n times each sample's influence on a score of the samples' sum, (S,): (n,), with mean 0. samples: (n, S).

    This is the jackknife of Quenouille and Tukey: the score is recomputed without each sample. For the mean of
    samples, it is the samples minus their mean.
    """
    n, total = len(samples), samples.sum(axis=0)
    if n < 2:
        return np.zeros(n)
    without = np.array([score(total - sample) for sample in samples])  # (n,)
    return (n - 1) * (without.mean() - without)


def standard_error(influence: np.ndarray, weights: np.ndarray) -> tuple[float, float] | None:
    """Return the standard error of a ratio over n samples of unequal weights, and its degrees of freedom.

    influence: ratio_influence, (n,). weights: (n,), in any unit. None: one sample has all the weight, or almost.

    A long document pulls the ratio toward its own value, so its residual is too small, and a few long documents are a
    small sample, however many short ones there are. Bell and McCaffrey 2002, "Bias reduction in standard errors for
    linear regression with multi-stage samples", correct both for documents whose means have the same variance: each
    squared residual is divided by the share of it that is expected to remain, and the degrees of freedom are those of
    the sum of squares (Satterthwaite's). With equal weights, they are the standard error of a mean, and n - 1.
    """
    shares = weights / weights.sum()  # h
    if shares.max() > 1 - NEARLY_ALL:
        return None
    squares = float(shares @ shares)
    remaining = 1 - 2 * shares + squares  # of the variance of each residual, m_i - sum of h_j m_j
    variance = float((influence**2 / remaining).sum()) / len(influence) ** 2
    # It is the quadratic form m^T M m of the documents' means m, where M = (I - 1 h^T)^T diag(d) (I - 1 h^T). If these
    # are independent with equal variances, it has trace(M)^2 / trace(M M) degrees of freedom; trace(M) is `squares`.
    d = shares**2 / remaining
    sums = [float(d @ shares**power) for power in range(3)]
    trace_of_square = squares**2 * sums[0] ** 2 + 2 * sums[0] * sums[2] - 4 * squares * sums[0] * sums[1]
    trace_of_square += 2 * sums[1] ** 2 + float(d**2 @ (1 + 2 * squares - 4 * shares))
    return math.sqrt(variance), max(1.0, squares**2 / trace_of_square)


def effective_number(weights: np.ndarray) -> float:
    """Return the number of samples of equal weight whose mean has the same variance (Kish 1965)."""
    return float(weights.sum() ** 2 / (weights @ weights))


def estimate_ratio(ratio: float, influence: np.ndarray, weights: np.ndarray) -> Estimate:
    """Estimate a ratio by Student's t. influence, weights: see standard_error."""
    if (error := standard_error(influence, weights)) is None:
        return Estimate(ratio, None)
    return Estimate(ratio, student_t_975(error[1]) * error[0])


def ratio_difference(difference: float, influence: np.ndarray, weights: np.ndarray) -> Estimate:
    """Estimate and test the difference of two ratios over the same n samples.

    influence: the difference of their ratio_influence, (n,). weights: see standard_error.
    """
    if (error := standard_error(influence, weights)) is None:
        return Estimate(difference, None, 1.0)
    return _t_test(difference, *error)


def paired_difference(first: np.ndarray, second: np.ndarray) -> Estimate:
    """Estimate and test the mean of second - first by the paired t-test. Sample i of both, (n,), shares its seed.

    Equal to scipy.stats.ttest_rel(second, first), but defined for differences without variance.
    """
    difference = second - first
    mean = float(difference.mean())
    return ratio_difference(mean, difference - mean, np.ones(len(difference)))


def welch_difference(first: np.ndarray, second: np.ndarray) -> Estimate:
    """Estimate and test the mean of `second` (m,) minus that of `first` (n,), independent groups, by Welch's t-test.

    Their variances may differ (Welch 1947). The degrees of freedom are Satterthwaite's. Equal to
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
    """Compare each of P settings with the one of the lowest mean loss, over runs with the same S seeds.

    losses: (P, S). A setting is worse than the best if its interval, value ± half_width, is above 0. The p-values are
    adjusted for multiple comparisons, and for selecting the best from the same runs. Two tests must agree:

    - Tukey's range test with the seeds as blocks, which pools the variance of all settings. It is repeated without the
      settings that were worse, because these often have the largest variance, for example at a high learning rate.
    - The paired t-test of the setting and the best, because the settings' variances may differ.

    For two settings, both are the paired t-test.
    """
    n_settings, n_seeds = losses.shape
    best = int(losses.mean(axis=1).argmin())
    pairs = [paired_difference(losses[best], setting_losses) for setting_losses in losses]
    if n_seeds < 2:
        return pairs
    estimates, remaining, p = list(pairs), list(range(n_settings)), 0.0
    while len(remaining) > 1:
        tukey = _tukey_differences(losses[remaining], remaining.index(best))
        for setting, difference in zip(remaining, tukey, strict=True):
            half_width = max(difference.half_width, pairs[setting].half_width)
            p_adjusted = max(difference.p, pairs[setting].p, p)
            estimates[setting] = Estimate(pairs[setting].value, half_width, p_adjusted)
        worse = [setting for setting in remaining if estimates[setting].low > 0]
        if not worse:
            break
        p = max(estimates[setting].p for setting in worse)  # p-values must not decrease between repetitions
        remaining = [setting for setting in remaining if setting not in worse]
    return estimates


def _tukey_differences(losses: np.ndarray, best: int) -> list[Estimate]:
    """Return the differences of P settings, (P, S), to one of them, with Tukey's simultaneous intervals."""
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
    """Return the 95 % quantile, which takes scipy about 50 ms."""
    from scipy.stats import studentized_range

    return float(studentized_range.ppf(0.95, n, degrees_of_freedom))


def _t_test(value: float, standard_error: float, degrees_of_freedom: float) -> Estimate:
    from scipy import stats

    half_width = student_t_975(degrees_of_freedom) * standard_error
    if standard_error == 0:
        return Estimate(value, half_width, 1.0 if value == 0 else 0.0)
    return Estimate(value, half_width, float(2 * stats.t(degrees_of_freedom).sf(abs(value) / standard_error)))


def student_t_975(degrees_of_freedom: float) -> float:
    """Return the 97.5 % quantile of Student's t for at least 1 degree of freedom, within a relative error of 2e-7."""
    return math.exp(np.polyval(LOG_T_975, 1 / degrees_of_freedom))
