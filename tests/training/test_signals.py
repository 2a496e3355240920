"""The signal handler. test_session.py tests how a run reacts to signals."""

import os
import signal
from pathlib import Path

import pytest

import train as train_script
from folio.checkpoints import run_folder
from folio.training.signals import SignalHandler
from tests.support.waiting import wait_until
from train import train


def test_the_first_signal_requests_a_stop_and_the_second_interrupts():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    with SignalHandler() as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.save and not signals.stop
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.stop == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before


def test_a_closed_terminal_stops_once_unless_nohup_ignores_it():
    """The kernel and the shell each send SIGHUP; the second one must not prevent the save that the first one causes."""
    for handler, stop in ((signal.SIG_DFL, signal.SIGHUP), (signal.SIG_IGN, 0)):
        before = signal.signal(signal.SIGHUP, handler)
        try:
            with SignalHandler() as signals:
                for _ in range(2):
                    os.kill(os.getpid(), signal.SIGHUP)
                    assert signals.stop == stop
            assert signal.getsignal(signal.SIGHUP) == handler
        finally:
            signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_prints_a_line_at_once(tiny, monkeypatch, capfd, number):
    """After a SIGTERM, a run with slow steps or evaluations printed nothing for ten minutes."""
    evaluate, evaluations = train_script.evaluate, []

    def send_and_evaluate(*args):
        evaluations.append(args)
        if len(evaluations) == 2:  # the first one is before the first step
            os.kill(os.getpid(), number)
            wait_until(lambda: "stopping after this evaluation; a second signal stops it at once\n" in read(capfd))
        return evaluate(*args)

    printed = ""

    def read(capfd) -> str:
        nonlocal printed
        printed += capfd.readouterr().err
        return printed

    monkeypatch.setattr(train_script, "evaluate", send_and_evaluate)
    assert train(tiny()).stopped_by == number
    assert run_folder.last_state(Path(tiny().out_dir))["step"] == 6 and read(capfd).count("stopping after") == 1


def test_the_thread_ends_even_if_a_forked_process_has_the_socket():
    """The thread waited until every process had closed the socket."""
    with SignalHandler() as signals:
        inherited = os.dup(signals.sender.fileno())
    os.close(inherited)
    assert not signals.announcer.is_alive()
