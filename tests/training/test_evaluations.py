"""The record of a run's evaluations."""

import random

from folio.training.evaluations import Evaluations


def test_the_first_evaluation_with_the_lowest_loss_is_the_best(seed):
    rng = random.Random(seed)
    for patience in (1, 3, None):
        evaluations, losses = Evaluations(), []
        for step in range(1, 30):
            losses.append(float(rng.randrange(10)))
            best = min(losses)
            assert evaluations.add({"val_loss": losses[-1]}, step, None) == (losses.index(best) == step - 1)
            assert (evaluations.best_val_loss, evaluations.best_step) == (best, losses.index(best) + 1)
            is_out = patience is not None and step - evaluations.best_step >= patience
            assert evaluations.is_out_of(patience) == is_out
