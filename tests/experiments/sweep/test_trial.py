import signal
import sys

import pytest

from folio.experiments.sweep import trial
from folio.experiments.sweep.trial import reason_of_failure, run_training


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


def test_a_failure_has_not_the_reason_of_an_earlier_attempt(tmp_path, monkeypatch):
    (tmp_path / "output.txt").write_text("error: out of memory\n")
    failing = [sys.executable, "-c", "raise SystemExit('error: too much')"]
    monkeypatch.setattr(trial, "train_command", lambda *_: failing)
    assert run_training(tmp_path, [], {}, lambda step, evaluations: "train") == "too much"
    assert "out of memory" in (tmp_path / "output.txt").read_text()
