"""The limits of tests/support/tolerances.py: correct results stay within them, and not by far."""

import math

import numpy as np
import pytest
import torch

from tests.support.tolerances import (
    FALSE_ALARM,
    binomial_range,
    chi_square_limit,
    norm_error,
    normal_limit,
    rounding_error,
)


@pytest.mark.parametrize("n, p, comparisons", [(400, 0.95, 1), (50, 0.5, 1), (200, 0.01, 4), (3, 0.3, 1)])
def test_a_number_of_successes_is_in_the_binomial_range(n, p, comparisons):
    inside = binomial_range(n, p, comparisons)
    shares = [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
    for outside, last in ((shares[: inside[0]], inside[0]), (shares[inside[-1] + 1 :], inside[-1])):
        assert sum(outside) <= FALSE_ALARM / 2 / comparisons < sum(outside) + shares[last]
    assert binomial_range(10, 0) == range(1) and binomial_range(10, 1) == range(10, 11)


@pytest.mark.needs("scipy")
def test_limits_match_scipys_distributions():
    from scipy import stats

    assert 2 * stats.norm.sf(normal_limit(3)) == pytest.approx(FALSE_ALARM / 3)
    for degrees in (1, 5, 41):
        assert stats.chi2.isf(FALSE_ALARM, degrees) < chi_square_limit(degrees) < 1.6 * stats.chi2.isf(1e-6, degrees)


@pytest.mark.parametrize("dtype, numpy_dtype", [(torch.float32, np.float32), (torch.float16, np.float16)])
def test_sums_have_at_most_the_rounding_error(dtype, numpy_dtype, seed):
    """Errors of 1,000 sums of 400 numbers, one after the other."""
    numbers = np.random.default_rng(seed).random((400, 1000)).astype(numpy_dtype)
    exact, total = numbers.astype(float).sum(axis=0), np.zeros(1000, numpy_dtype)
    for row in numbers:
        total += row
    errors = total / exact - 1
    assert np.abs(errors).max() < rounding_error(400, dtype) < 30 * np.abs(errors).max()
    assert np.linalg.norm(errors * exact) < norm_error(400, dtype) * np.linalg.norm(exact)
