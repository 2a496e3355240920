"""Servers in a thread and in a process, and requests."""

import http.client
import json
import os
import queue
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from email.message import Message
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from folio.base.settings import Settings
from folio.web.server import OriginCheck, Server, host_headers, listen, make_server
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
def serving_app(make_app: Callable[[frozenset[str]], OriginCheck]) -> Iterator[int]:
    """Serve an application, made for its Host headers, on 127.0.0.1. Yields the port."""
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with running(make_server(make_app(host_headers(["127.0.0.1"], port))), listener):
        yield port


@contextmanager
def serving_tool(tool: ModuleType, cfg: Settings) -> Iterator[tuple[str, int]]:
    """Run tools/serve.py or tools/view.py in a thread. Yields the address and the port."""
    servers: queue.Queue = queue.Queue()
    make_server = tool.make_server

    def make_recorded_server(app: object) -> Server:
        server = make_server(app)
        run = server.run
        server.run = lambda sockets: (servers.put((server, sockets[0].getsockname())), run(sockets=sockets))
        return server

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tool, "make_server", make_recorded_server)
        thread = threading.Thread(target=tool.main, args=(cfg,))
        thread.start()
        server, (host, port, *_) = servers.get(timeout=300)
    try:
        yield host, port
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


class Response(NamedTuple):
    status: int
    headers: Message
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Requests to a server on this computer, each on a connection of its own."""

    def __init__(self, port: int):
        self.port = port

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> Response:
        """body: JSON, also as text. headers: with _ instead of -."""
        body = body if isinstance(body, str | bytes | None) else json.dumps(body)
        headers = {"content-type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path, body, headers)
            with connection.getresponse() as response:
                return Response(response.status, response.headers, response.read())


def open_request(port: int, path: str, body: dict) -> socket.socket:
    """Send a POST request to a server, and return the connection."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    content = json.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n{content}".encode())
    return connection
