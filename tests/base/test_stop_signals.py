"""The signals that stop a script."""

import os
import signal
import sys

import pytest

from folio.base import stop_signals
from folio.base.settings import ROOT
from folio.base.stop_signals import StopSignal
from tests.support import processes
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals for other processes")
NUMBERS = [] if sys.platform == "win32" else [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]

SCRIPT = f"""
import signal, sys, tempfile, time
from pathlib import Path
sys.path[:0] = [{str(ROOT)!r}]
from folio.base.files import atomic_write
from folio.base.settings import run_script

def main(arguments):
    with atomic_write(Path("result")) as temporary, tempfile.TemporaryDirectory(dir="."):
        temporary.write_text("half")
        Path("started").touch()
        for _ in range(6000):  # a signal just before a sleep begins is handled when it ends
            time.sleep(0.1)

signal.signal(signal.SIGHUP, signal.DISPOSITION)
run_script(main)
"""


def start(folder, disposition="SIG_DFL"):
    (folder / "script.py").write_text(SCRIPT.replace("DISPOSITION", disposition))
    files = [os.devnull, folder / "out", folder / "err"]
    process = processes.start([folder / "script.py"], files, cwd=folder)
    wait_until((folder / "started").exists)
    return process


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_stops_a_script_without_half_written_files(number, tmp_path):
    """SIGTERM and SIGHUP ended it without a word, and its temporary files remained."""
    process = start(tmp_path)
    os.kill(process.pid, number)
    assert processes.wait(process) == 128 + number
    assert (tmp_path / "err").read_text() == f"stopped by {number.name}\n"
    assert {path.name for path in tmp_path.iterdir()} == {"script.py", "started", "out", "err"}


def test_nohup_works(tmp_path):
    process = start(tmp_path, "SIG_IGN")
    os.kill(process.pid, signal.SIGHUP)
    os.kill(process.pid, signal.SIGTERM)
    assert processes.wait(process) == 128 + signal.SIGTERM
    assert (tmp_path / "err").read_text() == "stopped by SIGTERM\n"


def test_a_closing_terminal_does_not_interrupt_the_cleanup():
    """The kernel and the shell each send SIGHUP."""
    with stop_signals.raised():
        with pytest.raises(StopSignal) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.value.number == signal.SIGHUP
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


def test_a_line_names_the_signal_and_what_was_kept():
    assert stop_signals.describe(KeyboardInterrupt()) == "stopped by SIGINT"
    stop = StopSignal(signal.SIGTERM, "nothing was kept")
    assert stop_signals.describe(stop) == "stopped by SIGTERM; nothing was kept"


def test_in_a_wait_of_other_code_a_signal_ends_the_process_at_once():
    """Python calls no handler during such a wait, so that SIGTERM had no effect for minutes."""
    with stop_signals.raised():
        handlers = [signal.getsignal(number) for number in NUMBERS]
        with stop_signals.immediate():
            assert {signal.getsignal(number) for number in NUMBERS} == {signal.SIG_DFL}
        assert [signal.getsignal(number) for number in NUMBERS] == handlers != [signal.SIG_DFL] * 3


def test_delayed_signals_arrive_after_the_block():
    """A KeyboardInterrupt in a callback of fork was lost, and the lock of logging remained held."""
    reached = False
    with stop_signals.raised(), pytest.raises(StopSignal) as stop, stop_signals.delayed():
        os.kill(os.getpid(), signal.SIGTERM)
        reached = True
    assert reached and stop.value.number == signal.SIGTERM
