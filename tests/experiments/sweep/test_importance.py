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


@pytest.mark.parametrize("n_seeds", [1, 3])
def test_shares_are_sums_of_squares_of_explicit_means(n_seeds, seed):
    space = [Values("a", (1, 2)), Values("b", (1, 2, 3)), Values("c", (1, 2, 3, 4)), Values("one", (7,))]
    losses = np.random.default_rng(seed).normal(size=(24, 3))
    means, points, expected = losses[:, :n_seeds].mean(axis=1), grid(space), {}
    for dimension in space:
        groups = [means[[point[dimension.name] == value for point in points]] for value in dimension.values]
        expected[dimension.name] = sum(len(g) * (g.mean() - means.mean()) ** 2 for g in groups) / (24 * means.var())
    shares = grid_importances(space, range(n_seeds), outcomes_of(space, losses.tolist())[::-1])
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
