import signal
import sys

import pytest

from folio.experiments.sweep import trial
from folio.experiments.sweep.trial import failure_reason, run_training


@pytest.mark.parametrize(
    ("code", "output", "reason"),
    [
        (0, "error: of a repeated evaluation", None),
        (2, "step 1\nerror: too much\nanother line", "too much"),
        (1, "Traceback:\nValueError: x\n\n", "ValueError: x"),
        (1, "", "no output"),
        (-signal.SIGSEGV, "step 1/20: loss 2.1", "killed by SIGSEGV"),
        (-signal.SIGKILL, "step 1/20: loss 2.1", "killed by SIGKILL, possibly because memory ran out"),
    ],
)
def test_a_failure_has_a_reason(code, output, reason):
    """The reported reason of a killed run was its last line, a loss."""
    assert failure_reason(code, output.encode()) == reason


def test_a_failure_does_not_have_the_reason_of_an_earlier_attempt(tmp_path, monkeypatch):
    (tmp_path / "output.txt").write_text("error: out of memory\n")
    failing = [sys.executable, "-c", "raise SystemExit('error: too much')"]
    monkeypatch.setattr(trial, "train_command", lambda *_: failing)
    assert run_training(tmp_path, [], {}, lambda step, evaluations: "train") == "too much"
    assert "out of memory" in (tmp_path / "output.txt").read_text()
