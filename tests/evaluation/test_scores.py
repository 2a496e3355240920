"""Values with their intervals, against manual calculations and simulated texts."""

import math

import numpy as np
import pytest

from folio.evaluation.scores import halvings
from folio.evaluation.tables import format_table
from tests.support.evaluations import measure_of
from tests.support.tolerances import binomial_range


def test_an_interval_by_hand():
    """Mean 4, standard deviation 2, standard error 2 / sqrt(3); Student's t of two degrees of freedom is 4.3027."""
    half_width = 4.302652730 * 2 / math.sqrt(3)
    row = measure_of([2, 4, 6]).row()
    assert (row["value"], row["low"], row["high"]) == pytest.approx((4, 4 - half_width, 4 + half_width))
    row = measure_of([2, 4, 6], transform=math.exp).row()
    assert row["low"] == pytest.approx(math.exp(4 - half_width))
    row = measure_of([2]).row()
    assert row["low"] is None and "unknown" in format_table([{"run": "a", **row}])


def test_intervals_have_95_percent_coverage(seed):
    """Documents of different lengths and means: about 95 % of the intervals contain the true value."""
    rng = np.random.default_rng(seed)
    hits = 0
    for _ in range(400):
        weights = rng.integers(1, 60, 100).astype(float)
        row = measure_of(list(weights * rng.normal(2.0, 0.5, 100)), list(weights)).row()
        hits += row["low"] < 2.0 < row["high"]
    assert hits in binomial_range(400, 0.95)


def test_ranges_of_positions():
    assert halvings(512) == [(1, 16), (17, 32), (33, 64), (65, 128), (129, 256), (257, 512)]
    assert halvings(31) == [(1, 31)] and halvings(1) == [(1, 1)]
    for context in range(1, 400):
        ranges = halvings(context)
        assert [p for first, last in ranges for p in range(first, last + 1)] == list(range(1, context + 1))
        assert ranges[0][1] < 32 and all(last // 2 == first - 1 for first, last in ranges[1:])
