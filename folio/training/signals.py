"""Handling of signals during training: save and stop, or save and continue."""

import os
import signal
import socket
import threading
from contextlib import suppress
from typing import Any

from folio.base.stop_signals import stop_signals
from folio.base.workers import under_torchrun
from folio.machine import distributed


class SignalHandler:
    """A context manager that turns signals into requests, `stop` and `save`.

    The first SIGINT, SIGTERM or SIGHUP requests to save and stop (`stop` is the signal's number). A second SIGINT or
    SIGTERM stops at once, except under torchrun, which forwards a signal that the terminal has already sent, and
    eventually kills the process. A second SIGHUP is ignored: when a terminal is closed, the kernel and the shell each
    send one. SIGUSR1, where it exists, requests to save and continue (`save`, which the run resets). Outside
    the main thread, where Python allows no signal handlers, this does nothing.

    A thread prints a line immediately, because Python calls a handler only when an operation ends, such as a backward
    pass.
    """

    stop: int = 0
    save: bool = False
    stops_after: str = "the first step"  # for the message

    def __enter__(self) -> "SignalHandler":
        self.previous, self.stop_signals = {}, stop_signals()
        if threading.current_thread() is threading.main_thread():
            self.receiver, self.sender = socket.socketpair()
            self.sender.setblocking(False)
            self.previous_descriptor = signal.set_wakeup_fd(self.sender.fileno(), warn_on_full_buffer=False)
            self.announcer = threading.Thread(target=self._announce, daemon=True)
            self.announcer.start()
            for number in self.stop_signals:
                self.previous[number] = signal.signal(number, self.request_stop)
            if hasattr(signal, "SIGUSR1"):
                self.previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self.request_save)
        return self

    def _announce(self) -> None:
        """Print a line for the first signal. Each signal arrives as a byte, its number."""
        is_announced = distributed.rank_from_env() > 0
        while signals := self.receiver.recv(1):
            if signals[0] in self.stop_signals and not is_announced:
                hint = "" if under_torchrun() else "; a second signal stops it at once"
                line_break = "\n" if os.isatty(2) else ""  # below the progress bar
                with suppress(OSError):  # the terminal was closed
                    os.write(2, f"{line_break}stopping after {self.stops_after}{hint}\n".encode())
                is_announced = True

    def request_stop(self, number: int, frame: Any) -> None:
        self.stop = self.stop or number
        if under_torchrun():
            return
        for handled in (signal.SIGINT, signal.SIGTERM):
            signal.signal(handled, self.previous[handled])

    def request_save(self, number: int, frame: Any) -> None:
        self.save = True

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        if self.previous:
            signal.set_wakeup_fd(self.previous_descriptor)
            self.sender.shutdown(socket.SHUT_WR)  # ends the thread, even if a forked process has the socket
            self.sender.close()
            self.announcer.join()
            self.receiver.close()
