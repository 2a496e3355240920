import asyncio
import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from folio import UserError
from folio.web import server
from folio.web.server import RequestError, host_headers, json_response, listen, make_app, make_server, read_json
from tests.support.servers import Client, running
from tests.support.waiting import wait_until

ALLOWED = "https://allowed.example"


def error_content(problem: RequestError) -> dict:
    return {"problem": [problem.status, str(problem)]}


async def echo(request: Request) -> Response:
    return json_response(await read_json(request))


async def fail(request: Request) -> Response:
    errors = {"user": UserError("the reason"), "http": HTTPException(409, "busy"), "other": KeyError()}
    raise errors[request.path_params["how"]]


@contextmanager
def serving(answer: Callable = echo, stall_seconds: float = 60, **limits) -> Iterator[int]:
    """Run a server in a thread, with a function for /echo. Yields its port."""
    listener = listen("127.0.0.1", 0, stall_seconds)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**14)  # small, to detect a client that does not read
    port = listener.getsockname()[1]
    routes = [Route("/echo", answer, methods=["POST"]), Route("/fail/{how}", fail)]
    app = make_app(routes, error_content, host_headers(["127.0.0.1"], port), frozenset({ALLOWED}))
    with running(make_server(app, **limits), listener):
        yield port


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving() as port:
        yield port


JSON = {"content-type": "application/json"}


def request(port: int, method: str, path: str, body: str | bytes | None = None, **headers: str) -> tuple[int, dict]:
    """Return the status and the JSON of the response."""
    response = Client(port).request(method, path, body, **headers)
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-store"
    return response.status, response.json()


def head(port: int, length: int = 2) -> bytes:
    lines = ["POST /echo HTTP/1.1", f"Host: 127.0.0.1:{port}", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


def test_the_body_must_be_json_of_limited_size(port):
    assert request(port, "POST", "/echo", '{"a": [1]}') == (200, {"a": [1]})
    nested = '{"a":' * 50_000 + "1" + "}" * 50_000
    for body in ("", "{", "NaN", '{"a": -Infinity}', "[" * 100_000, nested, b"\xff", b'{"a": "\xff"}'):
        assert request(port, "POST", "/echo", body) == (400, {"problem": [400, "the body is not valid JSON"]})
    largest = json.dumps("x" * (server.MAX_BODY_BYTES - 2))
    assert request(port, "POST", "/echo", largest)[0] == 200
    assert request(port, "POST", "/echo", largest + " ")[0] == 413
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:  # endless body
        connection.sendall(head(port).replace(b"Content-Length: 2", b"Transfer-Encoding: chunked"))
        assert is_closed(connection, b"10000\r\n" + b"x" * 2**16 + b"\r\n")


def test_all_errors_have_the_same_format(port):
    for method, path, status, remedy in (
        ("GET", "/fail/user", 400, "the reason"),
        ("GET", "/fail/http", 409, "busy"),
        ("GET", "/fail/other", 500, "terminal"),
        ("GET", "/none", 404, "/echo, /fail"),
        ("GET", "/echo", 405, "must be POST"),
        ("POST", "/echo/", 404, "/echo, /fail"),
    ):
        answered, content = request(port, method, path)
        assert answered == status == content["problem"][0], path
        assert remedy in content["problem"][1], path


def test_pages_of_other_sites_are_refused_unless_allowed(port):
    own = f"http://127.0.0.1:{port}"
    for origin in (own, ALLOWED):
        assert request(port, "POST", "/echo", "1", origin=origin) == (200, 1)
    foreign = ["http://example.com", "null", f"{own}0", own.replace("http", "https"), f"http://localhost:{port}"]
    for origin in (*foreign, f"{ALLOWED}.example.com", f"{ALLOWED}/"):
        assert request(port, "POST", "/echo", "1", origin=origin)[0] == 403
    strange = ["localhost:1", f"127.0.0.1:{port}0", f"127.0.0.1:{port}, example.com"]
    for host in ("example.com", "127.0.0.1", "", f"example.com:{port}", *strange):
        assert request(port, "POST", "/echo", "1", host=host)[0] == 403
        assert request(port, "POST", "/echo", "1", host=host, origin=f"http://{host}")[0] == 403  # DNS rebinding
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""):
        assert request(port, "POST", "/echo", "1", **{"content-type": kind})[0] == 415
    assert request(port, "POST", "/echo", "1", **{"content-type": "Application/JSON; charset=utf-8"})[0] == 200


@pytest.mark.parametrize("duplicate", ["Host: example.com", "Origin: null", None])
def test_duplicate_and_missing_headers(port, duplicate):
    first, *others = head(port).decode().splitlines()
    lines = [first, f"Origin: http://127.0.0.1:{port}", duplicate, *others]
    if duplicate is None:
        lines = [first.replace("1.1", "1.0"), *others[1:]]  # HTTP/1.0 does not require Host
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n12")
        assert connection.recv(4096).split()[1] in (b"400", b"403")


def test_invalid_http_is_refused(port):
    for data in (b"\x16\x03\x01\x02\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"GET /\r\n\r\n", b"x" * (2**16 + 1)):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(data)
            assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")


def is_closed(connection: socket.socket, drip: bytes) -> bool:
    """Whether the server closes the connection while `drip` is sent repeatedly."""
    connection.settimeout(0.01)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            connection.sendall(drip)
            if connection.recv(2**12) == b"":
                return True
        except TimeoutError:
            pass
        except ConnectionError:
            return True
    return False


def test_a_slow_request_is_disconnected():
    with serving(request_seconds=0.2) as port:
        full, slow = head(port) + b"12", head(port, 10**6)
        for part, drip in ((b"", b""), (b"POST /echo HT", b"T"), (slow, b"1"), (full + slow, b"1"), (full, b"T")):
            with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
                connection.sendall(part)
                assert is_closed(connection, drip), (part, drip)


class Clock:
    """The clock of the server's timeouts, which reads it once per tick."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now, self.ticks = 0.0, 0
        monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=self.read))

    def read(self) -> float:
        self.ticks += 1
        return self.now

    def advance(self, seconds: float) -> None:
        """Advance the clock between two ticks, and wait for them."""
        for change in (0, seconds, 0):
            self.now += change
            ticks = self.ticks
            wait_until(lambda ticks=ticks: self.ticks > ticks)


def test_the_timeout_applies_to_each_request_of_a_connection(monkeypatch):
    clock = Clock(monkeypatch)
    with serving(request_seconds=10) as port, closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        for _ in range(3):
            connection.request("POST", "/echo", "1", JSON)
            assert connection.getresponse().read() == b"1"
            clock.advance(6)


def test_the_timeout_does_not_limit_the_response(monkeypatch):
    clock = Clock(monkeypatch)

    async def slow(request: Request) -> Response:
        content = await read_json(request)
        await asyncio.to_thread(clock.advance, 100)
        return json_response(content)

    with serving(slow, request_seconds=10) as port:
        assert request(port, "POST", "/echo", "1") == (200, 1)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="needs Linux")
def test_a_client_that_does_not_read_is_disconnected():
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

    with serving(answer, stall_seconds=0.2) as port, connect_slowly(port) as connection:
        assert connection.recv(10) == b"HTTP/1.1 2" and ended.wait(60)


def connect_slowly(port: int) -> socket.socket:
    """Return a connection with a small receive buffer, on which a request was sent."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", port))
    connection.sendall(head(port) + b"{}")
    return connection


def test_a_client_that_reads_slowly_gets_everything():
    """A large response was cut off after stall_seconds."""
    size = 2**22

    async def answer(request: Request) -> Response:
        return Response(b"x" * size)

    with serving(answer, stall_seconds=1.0) as port, connect_slowly(port) as connection:
        received, until = 0, time.monotonic() + 1.5
        while received < size and (part := connection.recv(2**14)):
            received += len(part)
            if time.monotonic() < until:
                time.sleep(0.01)
        assert received >= size


def test_connections_are_limited():
    with serving(max_connections=3) as port:
        idle = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(3)]
        assert Client(port).request("POST", "/echo", "1").status == 503
        for connection in idle:
            connection.close()
        wait_until(lambda: Client(port).request("POST", "/echo", "1").status == 200)


def test_host_headers():
    assert host_headers(["LOCALHOST", "::1"], 8000) == {"localhost:8000", "[::1]:8000"}
    assert host_headers(["example.org"], 80) == {"example.org:80", "example.org"}


def test_a_server_does_not_close_logging_handlers():
    """uvicorn's logging configuration closed them, and absl's handler then closed stderr."""
    handler, closed = logging.Handler(), []
    handler.close = lambda: closed.append(True)
    with serving():
        assert not closed
