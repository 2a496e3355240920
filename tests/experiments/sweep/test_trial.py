import signal

import pytest

from folio.experiments.runs import Run
from folio.experiments.sweep.study import TrialFailed
from folio.experiments.sweep.trial import read_results, reason_of_failure, run_training


@pytest.mark.parametrize(
    ("code", "output", "reason"),
    [
        (0, "error: of an evaluation that was repeated", None),
        (2, "step 1\nerror: too much\nanother line", "too much"),
        (1, "Traceback:\nValueError: x\n\n", "ValueError: x"),
        (1, "", "it printed nothing"),
        (-signal.SIGSEGV, "step 1/20: loss 2.1", "killed by SIGSEGV"),
        (-signal.SIGKILL, "step 1/20: loss 2.1", "killed by SIGKILL, as the system does when memory runs out"),
    ],
)
def test_a_failure_has_a_reason(code, output, reason):
    """A run that was killed seemed to have failed for its last line, a loss."""
    assert reason_of_failure(code, output.encode()) == reason


def test_a_failure_has_not_the_reason_of_an_earlier_attempt(tmp_path):
    (tmp_path / "output.txt").write_text("error: out of memory\n")
    reason = run_training(tmp_path, ["--n_layer=none"], {}, lambda step, evaluations: "train")
    assert reason.startswith("command line: n_layer=none")
    assert "out of memory" in (tmp_path / "output.txt").read_text()


def line_of(step: int, val_loss: float | None) -> dict:
    """A line of metrics.jsonl, of steps of 64 tokens."""
    return {"step": step, "val_loss": val_loss, "tokens": 64 * step, "tokens_per_second": 32.0, "peak_memory": None}


def test_results_are_those_of_the_lowest_loss_after_a_step(tmp_path):
    lines = [line_of(0, 1.0), line_of(2, 3.0), line_of(4, 2.5), line_of(6, 2.75), line_of(7, None)]
    assert read_results(Run(tmp_path, "run", lines, {}, "finished")) == {
        "loss": 2.5,
        "step": 4,
        "tokens": 448,
        "seconds": 14.0,
        "evaluations": [[128, 3.0], [256, 2.5], [384, 2.75]],
    }
    with pytest.raises(TrialFailed, match="it ended without an evaluation"):
        read_results(Run(tmp_path, "run", lines[:1], {}, "stopped"))
