from types import SimpleNamespace

import pytest

from folio.experiments.ideas import paired_test
from folio.experiments.ideas.paired_test import PairedTest, speed_ratio
from folio.experiments.sweep.outcome import Outcome


@pytest.fixture
def new_test(monkeypatch):
    """Return a function that makes a test of runs that are not on disk."""
    monkeypatch.setattr(paired_test, "are_identical", lambda *_: False)
    monkeypatch.setattr(paired_test, "measured", lambda *_: {"tokens_per_second": None, "memory": None})

    def make(factors=(1.0, 1.0), **settings) -> PairedTest:
        monkeypatch.setattr(paired_test, "units", lambda *_: factors)
        known = {"smallest": 0.005, "max_seeds": 3, "confirm": False, "keep": True}
        experiment = SimpleNamespace(spread=None, sweep=SimpleNamespace(base=SimpleNamespace(minutes=None)))
        return PairedTest(experiment, SimpleNamespace(**known | settings), level=0.001)

    return make


def pairs(*losses: tuple[float, float]) -> list[tuple[Outcome, Outcome]]:
    return [
        tuple(Outcome(point, seed, {}, "finished", loss=loss) for point, loss in enumerate(pair))
        for seed, pair in enumerate(losses)
    ]


def test_losses_of_different_tokens_are_compared_per_byte(new_test):
    test = new_test((0.5, 0.25))
    test.is_decided(pairs((2.0, 3.0)))
    assert test.unit == "nats per byte" and test.losses(pairs((2.0, 3.0))) == [(1.0, 0.75)]


def test_other_text_is_no_verdict(new_test, capsys):
    test = new_test("the texts differ")
    assert test.is_decided(pairs((2.0, 1.0))) and test.verdict(pairs((2.0, 1.0))) == "failed"


def test_it_ends_at_the_maximum_of_pairs_and_prints_each_pair_once(new_test, capsys):
    test, noise = new_test(), [(2.0, 1.0), (2.0, 3.0), (2.0, 1.5)]
    for _ in range(2):
        assert [test.is_decided(pairs(*noise[:n])) for n in (1, 2, 3)] == [False, False, True]
    assert capsys.readouterr().out.count("pair ") == 3


def test_with_confirm_a_better_idea_goes_on_until_it_is_kept(new_test):
    sure = [(2.0, 1.0 + 0.0001 * n) for n in range(6)]
    decided = [new_test(confirm=confirm).is_enough(pairs(*sure[:3])) for confirm in (False, True)]
    assert decided == [True, False]
    test = new_test(confirm=True)
    assert test.is_decided(pairs(*sure[:1])) is False and test.is_enough(pairs(*sure[:4]))


def test_the_speed_ratio_is_bs_over_as():
    assert speed_ratio([{"tokens_per_second": 10}, {"tokens_per_second": 20}]) == 2
    assert speed_ratio([{"tokens_per_second": 10}, {"tokens_per_second": None}]) is None
