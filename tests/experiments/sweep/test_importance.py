import numpy as np
import pytest
import torch

from folio.experiments.sweep.importance import grid_importances
from folio.experiments.sweep.outcome import Outcome
from folio.experiments.sweep.space import Values, grid
from tests.support.tolerances import rounding_error


def outcomes_of(space: list[Values], losses: list[list[float]]) -> list[Outcome]:
    """losses: by point and seed."""
    return [
        Outcome(point, seed, params, "finished", loss=loss)
        for point, params in enumerate(grid(space))
        for seed, loss in enumerate(losses[point])
    ]


def test_a_manual_example():
    """Means of 1, 2, 3 and 3, 4, 8: the grand mean is 3.5, and the sum of squares 29.5. Rows: 6 x 1.5^2 = 13.5.
    Columns: 2 x (1.5^2 + 0.5^2 + 2^2) = 13. The remaining 3 are the interaction.
    """
    space = [Values("n_layer", (1, 2)), Values("n_head", (1, 2, 4))]
    losses = [[mean - 0.25, mean + 0.25] for mean in (1, 2, 3, 3, 4, 8)]
    shares = grid_importances(space, [0, 1], outcomes_of(space, losses))
    assert shares == pytest.approx({"n_layer": 13.5 / 29.5, "n_head": 13 / 29.5})
    assert list(shares) == ["n_layer", "n_head"]
    first_seed = grid_importances(space, [0], outcomes_of(space, losses))
    assert first_seed == pytest.approx(shares)  # a constant changes nothing


def test_shares_are_sums_of_squares_of_explicit_means(seed):
    space = [Values("a", (1, 2)), Values("b", (1, 2, 3)), Values("c", (1, 2, 3, 4)), Values("one", (7,))]
    losses = np.random.default_rng(seed).normal(size=(24, 3))
    means, points, expected = losses.mean(axis=1), grid(space), {}
    for dimension in space:
        groups = [means[[point[dimension.name] == value for point in points]] for value in dimension.values]
        expected[dimension.name] = sum(len(g) * (g.mean() - means.mean()) ** 2 for g in groups) / (24 * means.var())
    shares = grid_importances(space, [0, 1, 2], outcomes_of(space, losses.tolist())[::-1])
    error = rounding_error(24 * 3, torch.float64, values=1)  # of sums whose terms are at most the total
    assert shares == pytest.approx(expected, abs=error)
    assert [*shares.values()] == sorted(shares.values(), reverse=True) and shares["one"] < error


def test_importances_need_all_runs_two_settings_and_a_difference():
    space = [Values("n_layer", (1, 2)), Values("n_head", (1, 2))]
    outcomes = outcomes_of(space, [[1.0], [2.0], [3.0], [4.0]])
    assert grid_importances(space, [0], outcomes)
    assert grid_importances(space, [0, 1], outcomes) == {}
    assert grid_importances(space, [0], outcomes[:3]) == {}
    failed = Outcome(3, 0, {}, "failed", error="why")
    assert grid_importances(space, [0], [*outcomes[:3], failed]) == {}
    assert grid_importances(space[:1], [0], outcomes[:2]) == {}
    assert grid_importances(space, [0], outcomes_of(space, [[0.1]] * 4)) == {}
