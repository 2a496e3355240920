"""Servers in a thread."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from folio.web.server import Server


@contextmanager
def running(server: Server, listener: socket.socket) -> Iterator[None]:
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
