import math

import numpy as np
import pytest

from folio.evaluation.sequential import (
    FACTORS,
    FLAT_DENSITY,
    KEPT_LOOKS,
    LOOK_ERRORS,
    MAX_PAIRS,
    MIN_DEVIATION,
    SPREAD_OF_SPREADS,
    ZETA,
    Spread,
    half_width,
    kept,
    kept_p,
    look,
    lord_levels,
    pooled_spread,
    tail_probability,
    verdict,
)
from tests.support.tolerances import binomial_range

# The share of the posterior beyond the largest factor f, with two pairs, is less than 1 / f divided by sqrt(pi / 2).
CUT_OFF = 1 / FACTORS[-1] / math.sqrt(math.pi / 2)


@pytest.mark.parametrize("n", LOOK_ERRORS)
def test_without_a_ledger_it_is_students_t(n):
    t = pytest.importorskip("scipy.stats").t(n - 1)
    distance, deviation = np.array([0, 0.01, 0.5, 3, 50]), 0.7
    expected = 2 * t.sf(distance * math.sqrt(n) / deviation)
    assert tail_probability(distance, n, deviation, None) == pytest.approx(expected, rel=1e-9, abs=CUT_OFF)
    # A quantile of t changes at most by the relative change of the probability (exactly, for Cauchy's heavy tails).
    expected = t.isf(LOOK_ERRORS[n] / 2) * deviation / math.sqrt(n)
    assert half_width(n, deviation, None) == pytest.approx(expected, rel=CUT_OFF / LOOK_ERRORS[n] + 1e-9)


@pytest.mark.parametrize("ratio", [0.05, 1, 20])
@pytest.mark.parametrize("n", [2, 5, 16])
def test_with_a_ledger_it_is_an_average_over_a_mixture_prior(n, ratio):
    """The same integral by adaptive quadrature, with the densities of scipy."""
    integrate, stats = pytest.importorskip("scipy.integrate"), pytest.importorskip("scipy.stats")
    spread, deviation, distance = Spread(2.0, 30), 2.0 * ratio, 1.5
    width = math.sqrt(SPREAD_OF_SPREADS**2 + 1 / (2 * spread.df))

    def posterior(log_sigma: float) -> float:
        prior = stats.norm.pdf(log_sigma, math.log(spread.value), width) + FLAT_DENSITY
        # The density of log(deviation**2), up to a factor: chi-squared with n - 1 degrees of freedom.
        chi_squared = (n - 1) * (deviation / math.exp(log_sigma)) ** 2
        return prior * stats.chi2.pdf(chi_squared, n - 1) * chi_squared

    def error(log_sigma: float) -> float:
        return 2 * stats.norm.sf(distance * math.sqrt(n) / math.exp(log_sigma)) * posterior(log_sigma)

    low, high = math.log(deviation) - 3, math.log(deviation) + 20
    peaks = [math.log(spread.value), math.log(deviation)]
    error, total = (integrate.quad(f, low, high, points=peaks, epsabs=1e-10, limit=200)[0] for f in (error, posterior))
    assert tail_probability(distance, n, deviation, spread) == pytest.approx(error / total, rel=1e-6)


def test_the_width_scales_with_the_unit_and_is_between_the_ledgers_and_students():
    deviation, spread = np.array([0.3, 1, 3]), Spread(1.0, 30)
    widths = half_width(4, deviation, spread)
    assert half_width(4, 1e-3 * deviation, Spread(1e-3, 30)) == pytest.approx(1e-3 * widths)
    flat = half_width(4, deviation, None)
    assert widths[0] > flat[0] and widths[1] < flat[1] and widths[2] < flat[2]  # the ledger pulls toward its spread
    assert half_width(4, 100.0, spread) == pytest.approx(half_width(4, 100.0, None))  # pairs overrule a ledger


def false_verdicts(rng: np.random.Generator, experiments: int, spread: Spread | None) -> np.ndarray:
    """Return in which experiments any interval misses the true difference of 0."""
    differences = rng.normal(size=(experiments, MAX_PAIRS))
    logs = np.linspace(-9, 2, 45)  # of deviations, between which the logarithm of the width is interpolated
    misses = np.zeros(experiments, bool)
    for n in LOOK_ERRORS:
        widths = np.log(half_width(n, np.exp(logs), spread))
        deviations = np.log(differences[:, :n].std(axis=1, ddof=1))
        misses |= np.abs(differences[:, :n].mean(axis=1)) > np.exp(np.interp(deviations, logs, widths))
    return misses


@pytest.mark.parametrize("spread", [None, Spread(1.0, 30)])
def test_all_intervals_contain_the_true_difference_in_95_percent_of_experiments(spread, seed):
    """A t-test after each of 2 to 8 pairs, each at 5 %, finds a difference in 18 % of experiments without one."""
    misses = false_verdicts(np.random.default_rng(seed), 4000, spread).sum()
    assert misses <= binomial_range(4000, 0.05)[-1]


def test_a_wrong_ledger_adds_few_false_verdicts(seed):
    """Without the constant half of the prior, a true spread of 3 times the ledger's gave 32 % false verdicts."""
    for ratio, limit in ((1.5, 0.07), (3, 0.10), (1 / 3, 0.05)):
        misses = false_verdicts(np.random.default_rng(seed), 2000, Spread(1 / ratio, 30)).sum()
        assert misses <= binomial_range(2000, limit)[-1]


@pytest.mark.parametrize("mean, expected", [(-0.01, "better"), (0.01, "worse"), (0.001, "no difference")])
def test_a_verdict_is_reached_and_is_not_changed_by_later_pairs(mean, expected, seed):
    rng = np.random.default_rng(seed)
    differences = mean + rng.normal(0, 5e-4, MAX_PAIRS)
    result, pairs = verdict(differences, None, smallest=0.005)
    assert result == expected and 2 <= pairs < MAX_PAIRS
    for n in range(1, MAX_PAIRS + 1):
        later = np.concatenate([differences[:n], rng.normal(-mean, 0.1, MAX_PAIRS - n)])
        if n < pairs:
            assert verdict(differences[:n], None, 0.005) == ("undecided", n)
        else:
            assert verdict(differences[:n], None, 0.005) == verdict(later, None, 0.005) == (result, pairs)


def test_a_difference_that_does_not_matter_may_be_better():
    """The first verdict counts, and a direction before "no difference"."""
    differences = np.array([-0.003, -0.00301, -0.00299, -0.003])
    assert verdict(differences, None, smallest=0.005)[0] == "better"
    assert verdict(differences + 0.003, None, smallest=0.005)[0] == "no difference"


def test_one_pair_and_equal_differences():
    """Two changes that compute the same have no deviation; one pair has no interval."""
    assert look(np.array([0.1]), None)[:2] == (0.1, None)
    assert verdict(np.zeros(0), None, 0.005) == ("undecided", 0)
    assert verdict(np.array([0.1]), Spread(0.01, 30), 0.005) == ("undecided", 1)
    zeros = look(np.zeros(2), None)
    assert zeros.value == 0 and zeros.half_width == pytest.approx(half_width(2, MIN_DEVIATION, None))
    assert verdict(np.zeros(3), None, 0.005) == ("no difference", 2)
    assert verdict(np.zeros(4), Spread(0.003, 30), 0.005)[0] == "no difference"
    assert verdict(np.zeros(3), None, 0) == ("undecided", 3)  # no interval has a width of 0


def test_pooled_spread():
    rng = np.random.default_rng(0)
    experiments = [rng.normal(mean, 2, n) for mean, n in ((0, 2), (50, 5), (-3, 1), (0, 0), (1, 8))]
    squares = [((d - d.mean()) ** 2).sum() for d in experiments if len(d)]
    assert pooled_spread(experiments) == Spread(pytest.approx(math.sqrt(sum(squares) / 12)), 1 + 4 + 7)
    assert pooled_spread([]) is None and pooled_spread([np.ones(1), np.zeros(0)]) is None
    assert pooled_spread([np.zeros(3)]) == Spread(MIN_DEVIATION, 2)


def test_p_values_of_kept_changes(seed):
    stats, rng = pytest.importorskip("scipy.stats"), np.random.default_rng(seed)
    differences = rng.normal(-1, 1, 20)
    one_sided = [stats.ttest_1samp(differences[:n], 0, alternative="less").pvalue for n in KEPT_LOOKS]
    for n in range(20):
        p = min([1, *(5 * p for p, look in zip(one_sided, KEPT_LOOKS, strict=True) if look <= n)])
        assert kept_p(differences[:n]) == pytest.approx(p, abs=5 * CUT_OFF)
    assert kept_p(-differences) > 0.5  # a worse change
    p_values = np.array([kept_p(rng.normal(size=16)) for _ in range(300)])
    for level in (0.02, 0.1):
        assert (p_values <= level).sum() <= binomial_range(300, level)[-1]


def test_levels_of_lord():
    """Ramdas et al. 2017, computed by hand: gamma(j) = j**-1.6 / zeta(1.6), and 0.05 of 0.1 are there at the start.

    The first kept change gives back 0.1 - 0.05, and further ones 0.1.
    """
    gamma = {j: j**-1.6 / 2.285766 for j in range(1, 6)}
    assert gamma[1] == pytest.approx(0.43749, abs=1e-5)
    expected = [
        0.05 * gamma[1],  # 0.0219
        0.05 * gamma[2],
        0.05 * gamma[3] + 0.05 * gamma[1],  # after the second experiment was kept
        0.05 * gamma[4] + 0.05 * gamma[2] + 0.1 * gamma[1],  # and the third
        0.05 * gamma[5] + 0.05 * gamma[3] + 0.1 * gamma[2],
    ]
    p_values = [0.022, 0.007, 0.025, 0.9]  # the first is just above its level
    assert lord_levels(p_values) == pytest.approx(expected)
    assert kept(p_values) == [False, True, True, False]
    assert lord_levels([]) == pytest.approx(expected[:1]) and kept([]) == []
    assert lord_levels([], level=0.2) == pytest.approx([2 * expected[0]])
    special = pytest.importorskip("scipy.special")
    assert special.zeta(1.6) == pytest.approx(ZETA, abs=1e-6)


def test_a_smaller_p_value_never_undoes_a_kept_change(seed):
    """An experiment that goes on may be kept later than experiments that began after it."""
    rng = np.random.default_rng(seed)
    for _ in range(50):
        p_values = rng.random(20) ** 5
        before = kept(p_values.tolist())
        smaller = p_values * np.where(rng.random(20) < 0.2, rng.random(20), 1)
        assert all(after for after, was_kept in zip(kept(smaller.tolist()), before, strict=True) if was_kept)


def test_few_kept_changes_are_false(seed):
    """If no change is better, the share of false ones is 1 as soon as one is kept: in 10 % of ledgers at most."""
    rng = np.random.default_rng(seed)
    ledgers = sum(any(kept(rng.random(40).tolist())) for _ in range(400))
    assert ledgers <= binomial_range(400, 0.1)[-1]
