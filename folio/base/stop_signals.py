"""Signals that stop a script: SIGINT (Ctrl-C), SIGTERM (kill, a scheduler), and SIGHUP (its terminal was closed)."""

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


class StopSignal(KeyboardInterrupt):
    """A signal that stops the script. What cleans up after Ctrl-C cleans up after it.

    number: the signal. Like those of a KeyboardInterrupt, its arguments are words on what was kept.
    """

    def __init__(self, number: int, *outcome: str):
        super().__init__(*outcome)
        self.number = number


def stop_signals() -> list[int]:
    """The signals that stop a script. SIGHUP is not one of them where it is ignored, as under nohup, or on Windows."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


def number_of(interrupt: KeyboardInterrupt) -> int:
    """The number of the signal that raised an exception."""
    return interrupt.number if isinstance(interrupt, StopSignal) else signal.SIGINT


def describe(interrupt: KeyboardInterrupt) -> str:
    """A line about the signal that raised an exception: stopped by SIGTERM; nothing was kept."""
    return "; ".join([f"stopped by {signal.Signals(number_of(interrupt)).name}", *map(str, interrupt.args)])


@contextmanager
def raised() -> Iterator[None]:
    """Raise StopSignal for SIGTERM and SIGHUP in the block, as Python raises KeyboardInterrupt for SIGINT.

    By default they end the process at once, and its temporary files remain. A second SIGTERM still does. A second
    SIGHUP is ignored: when a terminal is closed, the kernel and the shell each send one.
    """
    numbers = [number for number in stop_signals() if signal.getsignal(number) == signal.SIG_DFL]

    def stop(number: int, frame: Any) -> None:
        for other in numbers:
            signal.signal(other, signal.SIG_DFL if other == signal.SIGTERM else signal.SIG_IGN)
        raise StopSignal(number)

    for number in numbers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def handled_by(handler: Any) -> Iterator[None]:
    """Handle the signals by `handler` in the block, as signal.signal does. Without effect in other threads."""
    numbers = stop_signals() if threading.current_thread() is threading.main_thread() else []
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def immediate() -> AbstractContextManager[None]:
    """Let the signals end the process at once in the block, where it does not execute Python code for a long time."""
    return handled_by(signal.SIG_DFL)


@contextmanager
def delayed() -> Iterator[None]:
    """Delay the signals to the end of the block, in which an exception could leave a lock held, as during a fork."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[tuple[int, Any]] = []
    numbers = [number for number in stop_signals() if callable(signal.getsignal(number))]
    handlers = {number: signal.signal(number, lambda *arguments: received.append(arguments)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in received:
            handlers[number](number, frame)
