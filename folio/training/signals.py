"""What signals ask of a run: to save and stop, or to save and continue."""

import os
import signal
import socket
import threading
from typing import Any

from folio.base.workers import under_torchrun
from folio.machine import distributed


class SignalHandler:
    """What signals ask of a run, while the block lasts.

    The first SIGINT or SIGTERM asks it to save and stop (`stop` is the signal's number). The second has its usual
    effect, except under torchrun, which forwards a signal that the terminal has sent already, and kills in the end.
    SIGUSR1, on systems that have it, asks it to save and continue (`save`, which the run resets). Outside the main
    thread, where Python allows no signal handlers, nothing is asked.

    A thread prints a line at once: Python calls a handler only when an operation ends, such as a backward pass.
    """

    stop: int = 0
    save: bool = False
    ends: str = "the first step"  # after which the run stops if it is asked to

    def __enter__(self) -> "SignalHandler":
        self.previous = {}
        if threading.current_thread() is threading.main_thread():
            self.received, self.sent = socket.socketpair()
            self.sent.setblocking(False)
            self.previous_descriptor = signal.set_wakeup_fd(self.sent.fileno(), warn_on_full_buffer=False)
            self.announcer = threading.Thread(target=self._announce, daemon=True)
            self.announcer.start()
            for number in (signal.SIGINT, signal.SIGTERM):
                self.previous[number] = signal.signal(number, self.ask_to_stop)
            if hasattr(signal, "SIGUSR1"):
                self.previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self.ask_to_save)
        return self

    def _announce(self) -> None:
        """Print what the first signal does. Each signal arrives as a byte, its number."""
        is_announced = distributed.rank_from_env() > 0
        while signals := self.received.recv(1):
            if signals[0] in (signal.SIGINT, signal.SIGTERM) and not is_announced:
                again = "" if under_torchrun() else "; a second signal stops it at once"
                begin = "\n" if os.isatty(2) else ""  # below the progress bar
                os.write(2, f"{begin}stopping after {self.ends}{again}\n".encode())
                is_announced = True

    def ask_to_stop(self, number: int, frame: Any) -> None:
        self.stop = number
        if under_torchrun():
            return
        for handled in (signal.SIGINT, signal.SIGTERM):
            signal.signal(handled, self.previous[handled])

    def ask_to_save(self, number: int, frame: Any) -> None:
        self.save = True

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        if self.previous:
            signal.set_wakeup_fd(self.previous_descriptor)
            self.sent.shutdown(socket.SHUT_WR)  # ends the thread, even if a forked process has the socket
            self.sent.close()
            self.announcer.join()
            self.received.close()
