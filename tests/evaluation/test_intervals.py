import math
from dataclasses import replace

import numpy as np
import pytest
import torch

stats = pytest.importorskip("scipy.stats")

from folio.evaluation.intervals import (
    LOG_T_975,
    Estimate,
    _tukey_differences,
    differences_to_best,
    estimate_mean,
    estimate_ratio,
    leave_one_out_influence,
    paired_difference,
    ratio_difference,
    ratio_influence,
    share_interval,
    student_t_975,
    welch_difference,
)
from folio.evaluation.scores import Measure
from tests.support.evaluations import QUANTILE_ERROR, approx_interval, half_width_of
from tests.support.tolerances import binomial_range, rounding_error


def test_means_and_differences_match_scipy(seed):
    rng = np.random.default_rng(seed)
    a, b, c = rng.normal(2, 1, 5), rng.normal(2.5, 3, 5), rng.normal(3, 2, 7)
    for estimate, expected in (
        (ratio_difference(float(a.mean()), a - a.mean(), np.ones(5)), stats.ttest_1samp(a, 0)),
        (paired_difference(a, b), stats.ttest_rel(b, a)),
        (welch_difference(a, c), stats.ttest_ind(c, a, equal_var=False)),
    ):
        assert estimate.p == pytest.approx(expected.pvalue)
        assert (estimate.low, estimate.high) == approx_interval(expected.confidence_interval(0.95))
    mean = estimate_mean(a)
    assert (mean.low, mean.high) == approx_interval(stats.ttest_1samp(a, 0).confidence_interval(0.95))
    assert mean.p is None


def test_quantiles_of_students_t_match_scipy():
    for degrees_of_freedom in (*1 / np.linspace(1e-6, 1, 500), 1.5, 29.4, 5152):
        expected = stats.t(degrees_of_freedom).ppf(0.975)
        assert student_t_975(degrees_of_freedom) == pytest.approx(expected, rel=QUANTILE_ERROR)


def test_the_coefficients_of_the_quantile_are_reproducible():
    u = (1 - np.cos(np.pi * (np.arange(200) + 0.5) / 200)) / 2
    fit = np.polynomial.Chebyshev.fit(u, np.log(stats.t(1 / u).ppf(0.975)), len(LOG_T_975) - 1, domain=[0, 1])
    assert fit.convert(kind=np.polynomial.Polynomial).coef[::-1] == pytest.approx(LOG_T_975, rel=1e-6)


def test_intervals_of_shares_match_scipy(seed):
    rng = np.random.default_rng(seed)
    for n in (1, 2, 10, 997):
        for successes in (0, int(rng.integers(n + 1)), n):
            expected = stats.binomtest(successes, n).proportion_ci(method="wilson")
            error = 2 * rounding_error(20, torch.float64)  # each computation has fewer than 20 operations
            assert share_interval(successes, n) == pytest.approx((expected.low, expected.high), rel=error, abs=error)


@pytest.mark.parametrize("n, sigma", [(2, 1), (3, 0), (5, 2), (40, 0.5), (40, 1), (200, 1.8)])
def test_the_interval_of_a_ratio_matches_matrices(n, sigma, seed):
    rng = np.random.default_rng(seed)
    weights = np.exp(sigma * rng.normal(size=n))
    values = weights * rng.normal(2, 1, n)
    estimate = estimate_ratio(2.0, ratio_influence(values, weights), weights)
    assert estimate.half_width == pytest.approx(half_width_of(values, weights))
    difference = ratio_difference(2.0, ratio_influence(values, weights), weights)
    assert difference.half_width == estimate.half_width
    assert difference.p == pytest.approx(ratio_difference(2.0, ratio_influence(values, weights), 7 * weights).p)


def simulated_ratios(n: int, sigma: float, rho: float, texts: int) -> tuple[np.ndarray, np.ndarray]:
    """Values and weights, (texts, n) each, of documents whose expected ratio is 0.

    Lengths are lognormal with `sigma`; the means of documents have a correlation of rho with the logarithm. As in
    lab/bench/intervals.py.
    """
    rng = np.random.default_rng(0)  # not a new seed for each run: the bounds are for one sample of texts
    z = rng.normal(size=(texts, n))
    weights = np.exp(sigma * z)
    means = rho * (z - sigma) + math.sqrt(1 - rho**2) * rng.normal(size=(texts, n))
    return means * weights, weights


LEAST = {(n, sigma, 0): 0.93 for n in (2, 5, 12, 40, 200) for sigma in (0, 0.5, 1, 1.8)}  # its deviation is 0.9 %
LEAST |= {(12, 1, 0.5): 0.92, (40, 1, 0.5): 0.92, (12, 1.8, 0.5): 0.91, (200, 1.8, 0.5): 0.88}  # documented limits


@pytest.mark.parametrize("n, sigma, rho", LEAST)
def test_intervals_of_documents_of_different_lengths(n, sigma, rho):
    """With lengths of sigma 1, they contained the true value in 86 % of the texts of 12 documents; 1.8: 59 to 78 %.
    Two equally good models differed "significantly" on a quarter of the texts with a few long documents.
    """
    hits = false_positives = 0
    for values, weights in zip(*simulated_ratios(n, sigma, rho, 600), strict=True):
        ratio = float(values.sum() / weights.sum()), ratio_influence(values, weights), weights
        estimate = estimate_ratio(*ratio)
        hits += estimate.low < 0 < estimate.high
        false_positives += n == 12 and ratio_difference(*ratio).p < 0.05
    assert hits >= LEAST[n, sigma, rho] * 600
    assert false_positives <= (1 - LEAST[n, sigma, rho]) * 600


def test_samples_without_an_interval():
    """One document has all the weight, or there is one run per setting."""
    for weights in (np.array([1.0]), np.array([1.0, 0.0]), np.array([1e9, 1.0])):
        assert estimate_ratio(2.0, np.zeros(len(weights)), weights) == Estimate(2.0, None)
        assert ratio_difference(2.0, np.zeros(len(weights)), weights) == Estimate(2.0, None, 1.0)
    assert differences_to_best(np.array([[1.0], [1.0], [1.5]]))[1] == Estimate(0.0, None, 1.0)


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("difference", [paired_difference, welch_difference])
def test_five_percent_false_positives_and_a_true_effect_is_detected(difference, n, seed):
    rng = np.random.default_rng(seed)
    false_positives = detected = 0
    for k in range(400):
        common = rng.normal(0, 1, n) if difference is paired_difference else 0  # the effect of the seed
        a, b = (common + rng.normal(2, 0.1, n) for _ in range(2))
        false_positives += difference(a, b).p < 0.05
        detected += k < 40 and difference(a, b + 20).p < 0.05
    usual = binomial_range(400, 0.05)
    assert false_positives <= usual[-1]
    assert false_positives >= usual[0] or difference is welch_difference  # which has fewer with few values
    assert detected == 40  # an effect of 200 standard deviations


@pytest.mark.parametrize("difference", [paired_difference, welch_difference])
def test_few_or_equal_values(difference):
    """One value has no interval; equal values have no variance, for which scipy warns and returns nan."""
    one, ones, twos = np.ones(1), np.ones(3), np.full(3, 2.0)
    assert difference(one, one + 1) == (1, None, 1)
    assert difference(ones, ones) == (0, 0, 1) and difference(ones, twos) == (1, 0, 0)
    assert difference(ones, twos).low == difference(ones, twos).high == 1
    # One group without variance: both tests are that of the other group.
    assert difference(ones, np.arange(1.0, 4)).p == pytest.approx(stats.ttest_1samp([0.0, 1.0, 2.0], 0).pvalue)


def test_leave_one_out_influence_is_exact_for_a_mean_and_close_for_a_ratio(seed):
    rng = np.random.default_rng(seed)
    samples = np.stack([rng.normal(3, 1, 500), rng.uniform(1, 2, 500)], axis=1)
    influence = leave_one_out_influence(samples, lambda total: total[0] / 499)  # 499 samples without one
    assert influence == pytest.approx(samples[:, 0] - samples[:, 0].mean())
    influence = leave_one_out_influence(samples, lambda total: total[0] / total[1])
    # The next term of the expansion has another factor of the sample's weight: at most 2 of 500.
    expected = ratio_influence(*samples.T)
    assert influence == pytest.approx(expected, rel=2 * 2 / 500, abs=2 * 2 / 500 * np.abs(expected).mean())
    assert leave_one_out_influence(samples[:1], lambda total: total[0]).tolist() == [0]


def test_two_settings_are_compared_by_the_paired_t_test(seed):
    losses = np.random.default_rng(seed).normal(size=(2, 5))
    best = int(losses.mean(axis=1).argmin())
    estimate = differences_to_best(losses)[1 - best]
    expected = stats.ttest_rel(losses[1 - best], losses[best])
    assert estimate.p == pytest.approx(expected.pvalue)
    assert (estimate.low, estimate.high) == approx_interval(expected.confidence_interval(0.95))


def test_tukeys_intervals_match_a_published_example():
    """Montgomery, Design and Analysis of Experiments, vascular grafts: 4 pressures (settings) in 6 batches (blocks)."""
    rejects = """
        90.3 89.2 98.2 93.9 87.4 97.9
        92.5 89.5 90.6 94.7 87.0 95.8
        85.5 90.8 89.6 86.2 88.0 93.4
        82.5 89.5 85.6 87.4 78.9 90.7"""
    estimates = _tukey_differences(np.array(rejects.split(), float).reshape(4, 6), 3)
    # Mean squares of 7.33 for error (15 degrees of freedom) and q(0.05; 4, 15) = 4.08, each rounded to 0.01.
    error = 0.005 / 7.33 / 2 + 0.005 / 4.08
    for estimate, value in zip(estimates, [7.05, 71 / 12, 3.15, 0], strict=True):
        assert estimate.value == pytest.approx(value)
        assert estimate.half_width == pytest.approx(4.08 * math.sqrt(7.33 / 6), rel=error)


@pytest.mark.parametrize("spreads", [[1, 10], [1, 1, 1, 1, 10]])
def test_identical_settings_rarely_differ_significantly(spreads):
    """At most 9 of 100 comparisons of settings with the same mean, even if some settings are noisier than others."""
    rng = np.random.default_rng(0)  # not a new seed for each run: 5 % of 100 is 5 ± 2
    seeds = rng.normal(size=(100, 1, 3))  # an effect of the seed that all settings share
    samples = seeds + rng.normal(size=(100, len(spreads), 3)) * np.array(spreads)[:, None]
    significant = sum(any(e.low > 0 for e in differences_to_best(losses)) for losses in samples)
    assert significant <= 9


def test_a_true_effect_is_detected_next_to_a_noisy_bad_setting(seed):
    """The variance of a diverging setting must not hide the other differences."""
    rng = np.random.default_rng(seed)
    means, spreads = np.array([[1.50], [1.56], [1.60], [3.00]]), np.array([[0.004], [0.004], [0.004], [0.2]])
    for _ in range(12):  # differences of 15 standard deviations
        assert all(e.low > 0 for e in differences_to_best(means + spreads * rng.normal(size=(4, 3)))[1:])


def test_settings_without_an_effect_do_not_differ():
    losses = np.array([[1.0, 2.0], [1.0, 2.0], [1.5, 2.5]])
    assert [e.p for e in differences_to_best(losses)[:2]] == [1.0, 1.0]
    assert differences_to_best(losses)[2].low > 0


def test_the_interval_of_a_share_stays_within_0_and_1():
    """An accuracy of 19 out of 20 had the interval 0.85 to 1.05."""
    hits = Measure("x", "accuracy", "questions", np.array([1.0] * 19 + [0.0]), np.ones(20), "higher", is_share=True)
    copies = replace(hits, values=3 * hits.values, weights=3 * hits.weights)
    for row in (hits.row(), copies.row()):
        interval = stats.binomtest(19, 20).proportion_ci(method="wilson")
        assert (row["low"], row["high"]) == pytest.approx((interval.low, interval.high))
    scores = replace(hits, values=np.array([0.97] * 19 + [0.5])).row()
    assert 0.85 < scores["low"] < scores["value"] < scores["high"] <= 1
