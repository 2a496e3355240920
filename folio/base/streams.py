"""Standard input, output and error of a script: closed by the parent, on a full disk, or without a reader."""

import errno
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from folio import UserError

STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))  # by descriptor


class OutputError(UserError):
    """Standard output cannot be written."""

    exit_code = 1


class OutputStream:
    """Standard output or error, which is discarded after its first failure.

    on_failure: called once, with the error.
    """

    def __init__(self, stream: TextIO, on_failure: Callable[[OSError], None]):
        self.stream, self.on_failure = stream, on_failure

    def write(self, text: str) -> int:
        try:
            self.stream.write(text)
        except OSError as error:
            self._fail(error)
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), self.stream.fileno())  # also discards what is buffered
        self.on_failure(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def open_streams(needs_output: bool) -> None:
    """Open closed standard streams on the null device, encode output as UTF-8, and handle failures of writing.

    needs_output: if standard output fails, raise BrokenPipeError if its reader has ended (as `| head` does), otherwise
    OutputError; False: print a line to standard error, and continue without it. Standard error is never needed.
    """
    for descriptor, (name, mode) in enumerate(STREAMS):
        if getattr(sys, name) is None:
            _open_null(descriptor, name, mode)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="replace")  # Windows consoles have other encodings

    def output_failed(error: OSError) -> None:
        problem = f"standard output cannot be written ({error.strerror})"
        if not needs_output:
            print(f"{problem}; continuing without it", file=sys.stderr, flush=True)
        elif error.errno in (errno.EPIPE, errno.EINVAL):  # EINVAL: a pipe without a reader on Windows
            raise BrokenPipeError(*error.args) from None
        else:
            raise OutputError(problem) from None

    sys.stdout = OutputStream(sys.stdout, output_failed)
    sys.stderr = OutputStream(sys.stderr, lambda error: None)


def _open_null(descriptor: int, name: str, mode: str) -> None:
    """Open a closed standard stream on the null device.

    Otherwise a file could get its descriptor, and what libraries and child processes print would be written into it.
    """
    null = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115  (open until the process exits)
    try:
        os.fstat(descriptor)
    except OSError:
        os.dup2(null.fileno(), descriptor)
    os.set_inheritable(descriptor, True)
    setattr(sys, name, null)
