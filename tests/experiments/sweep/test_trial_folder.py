import json
import socket

import pytest

from folio import UserError
from folio.experiments.runs import Run
from folio.experiments.sweep.outcome import TrialFailed
from folio.experiments.sweep.trial_folder import (
    check,
    claim,
    clear_failure,
    is_finished,
    read_failure,
    read_results,
    record_failure,
)

DESCRIPTION = {"sweep": {"n_embd": 16}, "params": {"n_head": 2}, "seed": 5}


def test_a_folder_belongs_to_one_trial(tmp_path):
    assert check(tmp_path, DESCRIPTION) is None and check(tmp_path / "new", DESCRIPTION) is None
    claim(tmp_path, DESCRIPTION)
    assert check(tmp_path, DESCRIPTION) == socket.gethostname()
    claim(tmp_path, DESCRIPTION)  # as after an interruption
    with pytest.raises(UserError, match="another run; remove it, or choose another --out_dir"):
        claim(tmp_path, {**DESCRIPTION, "seed": 6})
    (tmp_path / "trial.json").write_text(json.dumps(DESCRIPTION))  # as earlier versions wrote it
    assert check(tmp_path, DESCRIPTION) is None


@pytest.mark.parametrize("content", ["", "5", "[1]", "{}"])
def test_a_damaged_description_does_not_match(content, tmp_path):
    (tmp_path / "trial.json").write_text(content)
    with pytest.raises(UserError, match="another run"):
        check(tmp_path, DESCRIPTION)


def test_a_run_without_a_description_does_not_match(tmp_path):
    (tmp_path / "step-000002").mkdir()
    with pytest.raises(UserError, match="another run"):
        check(tmp_path, DESCRIPTION)


def test_a_failure_is_recorded_until_it_is_cleared(tmp_path):
    assert read_failure(tmp_path) is None and not is_finished(tmp_path)
    record_failure(tmp_path, "memory ran out")
    assert read_failure(tmp_path) == "memory ran out"
    clear_failure(tmp_path)
    clear_failure(tmp_path)
    assert read_failure(tmp_path) is None
    (tmp_path / "failed.json").write_text("{")
    assert "damaged" in read_failure(tmp_path)


def line_of(step: int, val_loss: float | None) -> dict:
    """A line of metrics.jsonl, of steps of 64 tokens."""
    return {"step": step, "val_loss": val_loss, "tokens": 64 * step, "tokens_per_second": 32.0, "peak_memory": None}


def test_results_have_the_lowest_loss_after_step_0(tmp_path):
    lines = [line_of(0, 1.0), line_of(2, 3.0), line_of(4, 2.5), line_of(6, 2.75), line_of(7, None)]
    assert read_results(Run(tmp_path, "run", lines, {}, "finished")) == {
        "loss": 2.5,
        "text": None,
        "step": 4,
        "tokens": 448,
        "seconds": 14.0,
        "evaluations": ((128, 3.0), (256, 2.5), (384, 2.75)),
    }
    with pytest.raises(TrialFailed, match="without an evaluation"):
        read_results(Run(tmp_path, "run", lines[:1], {}, "stopped"))
