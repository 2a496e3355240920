import socket

import pytest

from folio import UserError
from folio.experiments.runs import Run
from folio.experiments.sweep.outcome import TrialFailed
from folio.experiments.sweep.trial_folder import (
    check,
    claim,
    is_finished,
    read_results,
)
from tests.support.runs import line_of

DESCRIPTION = {"sweep": {"n_embd": 16}, "params": {"n_head": 2}, "seed": 5}


def test_a_folder_belongs_to_one_trial(tmp_path):
    assert check(tmp_path, DESCRIPTION) == check(tmp_path / "new", DESCRIPTION) == (None, None)
    claim(tmp_path, DESCRIPTION)
    assert check(tmp_path, DESCRIPTION) == (socket.gethostname(), None)
    claim(tmp_path, DESCRIPTION)  # as after an interruption
    with pytest.raises(UserError, match="another run; remove it, or choose another --out_dir"):
        claim(tmp_path, {**DESCRIPTION, "seed": 6})


def test_a_folder_without_a_valid_description_does_not_match(tmp_path):
    (tmp_path / "step-000002").mkdir()
    with pytest.raises(UserError, match="another run"):
        check(tmp_path, DESCRIPTION)
    for content in ("", "5", "[1]", "{}"):
        (tmp_path / "trial.json").write_text(content)
        with pytest.raises(UserError, match="another run"):
            check(tmp_path, DESCRIPTION)


def test_a_failure_is_recorded_until_the_trial_is_claimed_again(tmp_path):
    claim(tmp_path, DESCRIPTION, "memory ran out")
    assert check(tmp_path, DESCRIPTION) == (socket.gethostname(), "memory ran out") and not is_finished(tmp_path)
    claim(tmp_path, DESCRIPTION)
    assert check(tmp_path, DESCRIPTION) == (socket.gethostname(), None)


def test_results_have_the_lowest_loss_after_step_0(tmp_path):
    losses = {0: 1.0, 2: 3.0, 4: 2.5, 6: 2.75, 7: None}
    lines = [{**line_of(step, loss), "peak_memory": None} for step, loss in losses.items()]  # of 100 tokens, in 2 s
    assert read_results(Run(tmp_path, "run", lines, {}, "finished")) == {
        "loss": 2.5,
        "text": None,
        "step": 4,
        "tokens": 700,
        "seconds": 14.0,
        "evaluations": ((200, 3.0), (400, 2.5), (600, 2.75)),
    }
    with pytest.raises(TrialFailed, match="without an evaluation"):
        read_results(Run(tmp_path, "run", lines[:1], {}, "stopped"))
