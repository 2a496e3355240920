from dataclasses import replace

import pytest

from folio.experiments.ideas.pair_queue import PairQueue
from folio.experiments.sweep.outcome import Outcome, Trial
from folio.experiments.sweep.trial_folder import claim
from tests.support.runs import write_run
from tests.support.sweeps import parse, run, small_sweep


@pytest.fixture
def new_queue(data_dir, tmp_path):
    """Return a function that makes a queue of four pairs, which needs a number of them for a verdict."""
    words = [word for word in small_sweep(data_dir, tmp_path / "sweep") if "n_layer" not in word]

    def queue(n_pairs: int) -> PairQueue:
        queue = PairQueue(parse(["n_layer=1,2", "--seeds=4", *words])[1], lambda pairs: len(pairs) == n_pairs)
        queue.poll_seconds = 0.01
        return queue

    return queue


def test_pairs_alternate_until_the_verdict_is_known(new_queue):
    queue, trained = new_queue(3), []

    def train(trial: Trial) -> Outcome:
        trained.append(trial.key)
        claim(queue.folder(trial), queue.sweep.description(trial))
        write_run(queue.folder(trial), {8: 2.0})
        return trial.outcome("finished", loss=2.0)

    run(queue, train)
    assert trained == [(0, 1337), (1, 1337), (1, 1338), (0, 1338), (0, 1339), (1, 1339)]
    assert [(a.point, b.point, a.seed, b.seed) for a, b in queue.complete()] == [
        (0, 1, s, s) for s in (1337, 1338, 1339)
    ]
    assert queue.max_runs() == 8 and queue.runs_left(queue.outcomes()) == 2
    more = new_queue(4)
    run(more, lambda trial: replace(train(trial), loss=1.0))
    assert trained[6:] == [(1, 1340), (0, 1340)]


@pytest.mark.parametrize("point", [0, 1])
def test_a_failure_ends_the_experiment(point, new_queue):
    """It waited forever for the other run of the pair."""
    queue = new_queue(3)

    def train(trial: Trial) -> Outcome:
        if trial.point == point:
            return trial.outcome("failed", error="memory")
        claim(queue.folder(trial), queue.sweep.description(trial))
        write_run(queue.folder(trial), {8: 2.0})
        return trial.outcome("finished", loss=2.0)

    run(queue, train)
    assert "failed" in {outcome.state for outcome in queue.outcomes()} and queue.complete() == []
