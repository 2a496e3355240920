"""Servers in a thread, and in a process."""

import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from folio.web.server import Server
from tests.support import processes
from tests.support.waiting import wait_until


@contextmanager
def running(server: Server, listener: socket.socket) -> Iterator[None]:
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


def start_server(words: list, folder: Path, cwd: Path = processes.ROOT) -> tuple[BaseProcess, int]:
    """Start `python WORDS` in the folder cwd, which serves until a signal. Returns the process and its port.

    The process writes to the files "printed" and "errors" in the folder.
    """
    printed, errors = folder / "printed", folder / "errors"
    process = processes.start(words, [os.devnull, printed, errors], cwd)
    address = re.compile(r"http://\S+:(\d+)/.*\n")
    wait_until(lambda: process.exitcode is not None or (printed.exists() and address.search(printed.read_text())))
    assert process.exitcode is None, errors.read_text()
    return process, int(address.search(printed.read_text())[1])
