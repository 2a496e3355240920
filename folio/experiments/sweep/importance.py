"""The importance of each setting in a grid."""

import math
from collections.abc import Sequence

import numpy as np

from folio.experiments.sweep.outcome import Outcome
from folio.experiments.sweep.space import Values


def grid_importances(space: Sequence[Values], seeds: Sequence[int], outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return each setting's share of the variance of the mean losses, by an analysis of variance without replication.

    The share is the main effect: the variance of the means over all other settings. Interactions make up the rest.
    Empty if there is only one setting, a run of the grid is not finished, or all means are equal.
    """
    losses = {(outcome.point, outcome.seed): outcome.loss for outcome in outcomes if outcome.state == "finished"}
    shape = [len(dimension.values) for dimension in space]
    runs = [(point, seed) for point in range(math.prod(shape)) for seed in seeds]
    if len(space) < 2 or not losses.keys() >= set(runs):
        return {}
    means = np.array([losses[run] for run in runs]).reshape(*shape, len(seeds)).mean(axis=-1)  # one axis per setting
    if np.ptp(means) == 0:
        return {}
    effects = [means.mean(axis=tuple({*range(len(space))} - {axis})) for axis in range(len(space))]
    shares = {d.name: float(effect.var() / means.var()) for d, effect in zip(space, effects, strict=True)}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))
