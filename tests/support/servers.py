"""Servers in a thread, and in a process."""

import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from folio.web.server import Guard, Server, host_headers, listen, make_server
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


@contextmanager
def serving_app(make_app: Callable[[frozenset[str]], Guard]) -> Iterator[int]:
    """Serve an application, made for its Host headers, on 127.0.0.1. Yields the port."""
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with running(make_server(make_app(host_headers(["127.0.0.1"], port))), listener):
        yield port


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
