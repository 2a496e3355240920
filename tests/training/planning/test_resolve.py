"""What is decided before the first step of a run."""

import pytest

from folio import UserError
from folio.base.settings import COMMAND_LINE
from folio.training.planning import resolve
from folio.training.planning.resume import Draft
from tests.support.simulated import SimulatedMachine
from train import train


@pytest.mark.parametrize("evaluation, is_limited", [(0.5, False), (30, True)])
def test_a_run_that_evaluates_less_often_is_reported(evaluation, is_limited, tiny, monkeypatch, capsys):
    """This was printed whenever evaluations took any time."""
    monkeypatch.setattr(resolve, "evaluation_seconds", lambda *arguments: evaluation)
    cfg = tiny(minutes=10, eval_interval=100, max_iters=5000).replace({"eval_interval": COMMAND_LINE})
    resolve.fit_minutes(resolve.make_plan(Draft(cfg)), 0.1)
    assert ("so the run evaluates every" in capsys.readouterr().out) == is_limited


def test_a_batch_that_needs_twice_the_memory_is_refused(tiny, capsys):
    """The forecast was only printed, and the system killed the run."""
    with pytest.raises(UserError, match=r"far too little; use --batch_size="):
        train(tiny(batch_size=2**22, block_size=1024))
    assert capsys.readouterr().out.startswith("cpu (")  # what was decided before the error


def test_spikes_without_effect_are_named_when_the_number_of_steps_is_known(tiny, monkeypatch, capsys):
    SimulatedMachine(monkeypatch, lambda step: 0.1, lambda step: 0.0)
    train(tiny(max_iters=50, minutes=0.5, skip_spikes=6.0))
    assert "skip_spikes=6.0 (" not in capsys.readouterr().out
    train(tiny(max_iters=5000, minutes=0.05, skip_spikes=6.0, overwrite=True))
    assert "skip_spikes=6.0 (" in capsys.readouterr().out
