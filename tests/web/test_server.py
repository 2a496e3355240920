import asyncio
import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager, suppress

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from folio import UserError
from folio.web import server
from folio.web.server import Guard, json_response, listen, make_server, names_of, read_json
from tests.support.servers import running

ALLOWED = "https://allowed.example"


def error_content(status: int, message: str) -> dict:
    return {"problem": [status, message]}


async def echo(request: Request) -> Response:
    return json_response(await read_json(request))


async def fail(request: Request) -> Response:
    raise {"user": UserError("the reason"), "http": HTTPException(409, "busy")}.get(
        request.path_params["how"], KeyError()
    )


@contextmanager
def serving(**limits) -> Iterator[int]:
    """A server that repeats what it gets, in a thread; its port."""
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    routes = [Route("/echo", echo, methods=["POST"]), Route("/fail/{how}", fail)]
    hosts = names_of(["127.0.0.1"], port)
    app = Guard(server.make_app(routes, error_content), error_content, hosts, frozenset({ALLOWED}))
    with running(make_server(app, **limits), listener):
        yield port


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving() as port:
        yield port


def request(port: int, method: str, path: str, body: str | bytes | None = None, **headers: str) -> tuple[int, dict]:
    """The status and the JSON of the answer."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request(method, path, body, {"content-type": "application/json", **headers})
        with connection.getresponse() as response:
            assert response.headers["content-type"] == "application/json"
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["cache-control"] == "no-store"
            return response.status, json.loads(response.read())


def raw(port: int, *parts: bytes) -> tuple[int, dict]:
    """Send bytes as they are, wait for the server to close the connection, and return its answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        for part in parts:
            connection.sendall(part)
        response = http.client.HTTPResponse(connection)
        response.begin()
        content = json.loads(response.read())
        with suppress(ConnectionResetError):  # it did not read everything
            assert connection.recv(1) == b""
        return response.status, content


def head(port: int, length: int = 2) -> bytes:
    lines = ["POST /echo HTTP/1.1", f"Host: 127.0.0.1:{port}", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


def test_the_body_must_be_json_of_a_bounded_size(port):
    assert request(port, "POST", "/echo", '{"a": [1]}') == (200, {"a": [1]})
    for body in ("", "{", "NaN", "[" * 100_000, b"\xff"):
        assert request(port, "POST", "/echo", body) == (400, {"problem": [400, "the body is not JSON"]})
    largest = json.dumps("x" * (server.LARGEST_BODY - 2))
    assert request(port, "POST", "/echo", largest)[0] == 200
    assert request(port, "POST", "/echo", largest + " ")[0] == 413


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("GET", "/fail/user", 400),
        ("GET", "/fail/http", 409),
        ("GET", "/fail/other", 500),
        ("GET", "/none", 404),
        ("GET", "/echo", 405),
        ("POST", "/echo/", 404),
    ],
)
def test_every_error_has_the_shape_of_the_server(port, method, path, status):
    answered, content = request(port, method, path)
    assert answered == status == content["problem"][0] and content["problem"][1]
    known = {404: "there is no such path; there are /echo, /fail", 405: "the method must be POST"}
    assert content["problem"][1] == known.get(status, content["problem"][1])


def test_pages_of_other_sites_are_refused_unless_they_are_allowed(port):
    own = f"http://127.0.0.1:{port}"
    for origin in (own, ALLOWED):
        assert request(port, "POST", "/echo", "1", origin=origin) == (200, 1)
    for origin in ("http://example.com", "null", f"{own}0", f"{ALLOWED}.example.com", f"{ALLOWED}/"):
        assert request(port, "POST", "/echo", "1", origin=origin)[0] == 403
    for host in ("example.com", "localhost:1", f"127.0.0.1:{port}0", f"127.0.0.1:{port}, example.com"):
        assert request(port, "POST", "/echo", "1", host=host)[0] == 403
    assert request(port, "POST", "/echo", "1", **{"content-type": "text/plain"})[0] == 415


def test_what_is_not_http_is_refused_in_the_same_shape(port):
    for data in (
        b"\x16\x03\x01\x02\r\n\r\n",
        b"GET / HTTP/9\r\n\r\n",
        b"\r\n\r\n",
        b"GET /\r\n\r\n",
        b"x" * (2**16 + 1),
    ):
        assert raw(port, data) == (400, {"problem": [400, "this is not an HTTP request"]})
    chunked = head(port).replace(b"Content-Length: 2", b"Transfer-Encoding: chunked")
    assert raw(port, chunked, b"nonsense\r\n")[0] == 400


def test_a_request_that_arrives_slowly_is_refused():
    """Even if a byte arrives from time to time."""
    with serving(request_seconds=0.3) as port:
        refused = (408, {"problem": [408, "the request did not arrive within 0.3 seconds"]})
        assert raw(port) == refused
        assert raw(port, b"POST /echo HT") == refused
        assert raw(port, head(port), b"1") == refused
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(head(port, 10**6))
            with pytest.raises(OSError):
                for _ in range(10**6):  # until the server has closed the connection
                    connection.sendall(b" ")
                    threading.Event().wait(0.01)
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            for _ in range(3):  # each request has the time for itself
                threading.Event().wait(0.2)
                connection.request("POST", "/echo", "1", {"content-type": "application/json"})
                assert connection.getresponse().read() == b"1"
            connection.sock.sendall(b"POST /echo HT")
            response = http.client.HTTPResponse(connection.sock)
            response.begin()
            assert response.status == 408


def test_an_answer_may_take_longer_than_the_request(monkeypatch):
    async def slow(request: Request) -> Response:
        await asyncio.sleep(0.5)
        return json_response(await read_json(request))

    monkeypatch.setitem(globals(), "echo", slow)
    with serving(request_seconds=0.2) as port:
        assert request(port, "POST", "/echo", "1") == (200, 1)


def test_a_client_that_does_not_read_is_disconnected(monkeypatch):
    ended = threading.Event()

    async def endless() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x" * 2**16
                await asyncio.sleep(0)
        finally:
            ended.set()

    async def answer(request: Request) -> Response:
        return StreamingResponse(endless())

    monkeypatch.setitem(globals(), "echo", answer)
    with serving(stall_seconds=0.2) as port, socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(head(port) + b"{}")
        assert connection.recv(10) == b"HTTP/1.1 2" and ended.wait(60)


def connect_slowly(port: int) -> socket.socket:
    """A connection with a small buffer, on which a request was sent."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", port))
    connection.sendall(head(port) + b"{}")
    return connection


def test_a_client_that_reads_slowly_gets_everything(monkeypatch):
    """A large answer was cut when the time of a client that does not read had passed."""
    size = 2**22

    async def answer(request: Request) -> Response:
        return Response(b"x" * size)

    def listen_with_small_buffers(host: str, port: int) -> socket.socket:
        listener = server.listen(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**14)
        return listener

    monkeypatch.setitem(globals(), "echo", answer)
    monkeypatch.setitem(globals(), "listen", listen_with_small_buffers)
    with serving(stall_seconds=1.0) as port, connect_slowly(port) as connection:
        received, until = 0, time.monotonic() + 2
        while received < size and (part := connection.recv(2**14)):
            received += len(part)
            if time.monotonic() < until:
                time.sleep(0.002)
        assert received >= size


def test_a_client_that_does_not_read_the_end_is_disconnected(monkeypatch):
    """The server waited for it without end if what was not sent was little."""
    made: list[server.Connection] = []
    lost = threading.Event()

    class Watched(server.Connection):
        def connection_made(self, transport: asyncio.Transport) -> None:
            made.append(self)
            super().connection_made(transport)

        def connection_lost(self, error: Exception | None) -> None:
            super().connection_lost(error)
            lost.set()

    async def until_the_buffers_are_full() -> AsyncIterator[bytes]:
        while made[0].transport.get_write_buffer_size() == 0:
            yield b"x" * 2**12

    async def answer(request: Request) -> Response:
        return StreamingResponse(until_the_buffers_are_full())

    monkeypatch.setattr(server, "Connection", Watched)
    monkeypatch.setitem(globals(), "echo", answer)
    with serving(stall_seconds=0.5) as port, connect_slowly(port):
        assert lost.wait(60)


@pytest.mark.parametrize("length", [1, 2**20])
def test_a_client_that_sends_more_and_disconnects_is_noticed(monkeypatch, length):
    """The server did not read while it answered, if a further request, or a part of it, had arrived."""
    waiting, gone = threading.Event(), threading.Event()

    async def answer(request: Request) -> Response:
        await request.body()
        asyncio.get_running_loop().call_soon(waiting.set)  # when it waits in `receive`
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone.set()
        return Response()

    monkeypatch.setitem(globals(), "echo", answer)
    with serving() as port:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(head(port) + b"{}")
            assert waiting.wait(60)
            with suppress(OSError):  # so much is not read
                connection.sendall(b"x" * length)
        assert gone.wait(60)


def test_connections_are_limited():
    with serving(most_connections=3) as port:
        idle = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(3)]
        status, content = raw(port)
        assert status == 503 and "too many connections" in content["problem"][1]
        for connection in idle:
            connection.close()
        while request_or_none(port) != (200, 1):  # until the server has noticed
            pass


def request_or_none(port: int) -> tuple[int, dict] | None:
    try:
        return request(port, "POST", "/echo", "1")
    except (OSError, http.client.HTTPException, AssertionError):
        return None


def test_the_names_of_a_server():
    assert names_of(["LOCALHOST", "::1"], 8000) == {"localhost:8000", "[::1]:8000"}
    assert names_of(["example.org"], 80) == {"example.org:80", "example.org"}


def test_a_server_leaves_the_handlers_of_logs_open():
    """uvicorn's configuration closed them, and with absl's handler the standard error that it wrote to."""
    handler, closed = logging.Handler(), []
    handler.close = lambda: closed.append(True)
    with serving():
        assert not closed
