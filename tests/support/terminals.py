"""A pseudo-terminal as the standard output and error of the test."""

import contextlib
import os
import struct
import threading
from collections.abc import Iterator
from unittest import mock

import pytest


@contextlib.contextmanager
def terminal(columns: int, **env: str) -> Iterator[list[str]]:
    """Redirect output to a terminal. Yields a list that has the lines on its screen after the block.

    env: environment variables; TERM is xterm. Of a line that carriage returns have overwritten, the last part is kept.
    """
    pty, fcntl, termios = map(pytest.importorskip, ("pty", "fcntl", "termios"))
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    output, lines = bytearray(), []

    def read() -> None:
        with contextlib.suppress(OSError):  # at the end
            while part := os.read(parent, 1 << 16):
                output.extend(part)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with (
            open(child, "w", encoding="utf-8") as stream,
            contextlib.redirect_stdout(stream),
            contextlib.redirect_stderr(stream),
            mock.patch.dict(os.environ, {"TERM": "xterm", **env}),
        ):
            yield lines
    finally:
        reader.join()
        os.close(parent)
    lines += [line.rpartition("\r")[2] for line in output.decode().replace("\r\n", "\n").split("\n")]
