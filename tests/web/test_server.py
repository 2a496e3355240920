import asyncio
import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from folio import UserError
from folio.web import server
from folio.web.server import RequestError, json_response, listen, make_app, make_server, names_of, read_json
from tests.support.servers import running
from tests.support.waiting import wait_until

ALLOWED = "https://allowed.example"


def error_content(problem: RequestError) -> dict:
    return {"problem": [problem.status, str(problem)]}


async def echo(request: Request) -> Response:
    return json_response(await read_json(request))


async def fail(request: Request) -> Response:
    raise {"user": UserError("the reason"), "http": HTTPException(409, "busy")}.get(
        request.path_params["how"], KeyError()
    )


@contextmanager
def serving(stall_seconds: float = 60, **limits) -> Iterator[int]:
    """A server that repeats what it gets, in a thread; its port."""
    listener = listen("127.0.0.1", 0, stall_seconds)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**14)  # so that it notices when a client does not read
    port = listener.getsockname()[1]
    routes = [Route("/echo", echo, methods=["POST"]), Route("/fail/{how}", fail)]
    app = make_app(routes, error_content, names_of(["127.0.0.1"], port), frozenset({ALLOWED}))
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


def head(port: int, length: int = 2) -> bytes:
    lines = ["POST /echo HTTP/1.1", f"Host: 127.0.0.1:{port}", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


def test_the_body_must_be_json_of_a_bounded_size(port):
    assert request(port, "POST", "/echo", '{"a": [1]}') == (200, {"a": [1]})
    nested = '{"a":' * 50_000 + "1" + "}" * 50_000
    for body in ("", "{", "NaN", '{"a": -Infinity}', "[" * 100_000, nested, b"\xff", b'{"a": "\xff"}'):
        assert request(port, "POST", "/echo", body) == (400, {"problem": [400, "the body is not JSON"]})
    largest = json.dumps("x" * (server.LARGEST_BODY - 2))
    assert request(port, "POST", "/echo", largest)[0] == 200
    assert request(port, "POST", "/echo", largest + " ")[0] == 413
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:  # a body without an end
        connection.sendall(head(port).replace(b"Content-Length: 2", b"Transfer-Encoding: chunked"))
        assert is_closed(connection, b"10000\r\n" + b"x" * 2**16 + b"\r\n")


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
    foreign = ["http://example.com", "null", f"{own}0", own.replace("http", "https"), f"http://localhost:{port}"]
    for origin in (*foreign, f"{ALLOWED}.example.com", f"{ALLOWED}/"):
        assert request(port, "POST", "/echo", "1", origin=origin)[0] == 403
    for host in ("example.com", "127.0.0.1", "", f"example.com:{port}"):
        assert request(port, "POST", "/echo", "1", host=host)[0] == 403
        assert request(port, "POST", "/echo", "1", host=host, origin=f"http://{host}")[0] == 403  # DNS rebinding
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""):
        assert request(port, "POST", "/echo", "1", **{"content-type": kind})[0] == 415
    assert request(port, "POST", "/echo", "1", **{"content-type": "Application/JSON; charset=utf-8"})[0] == 200


@pytest.mark.parametrize("doubled", ["Host: example.com", "Origin: null", None])
def test_a_header_that_is_doubled_or_missing(port, doubled):
    lines = head(port).decode().splitlines()
    if doubled == "Origin: null":
        lines.insert(1, f"Origin: http://127.0.0.1:{port}")
    if doubled:
        lines.insert(2, doubled)
    else:
        lines = [lines[0].replace("1.1", "1.0"), *lines[2:]]  # HTTP/1.0 does without Host
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n12")
        assert connection.recv(4096).split()[1] in (b"400", b"403")


def test_what_is_not_http_is_refused(port):
    for data in (b"\x16\x03\x01\x02\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"GET /\r\n\r\n", b"x" * (2**16 + 1)):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(data)
            assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")


def is_closed(connection: socket.socket, drip: bytes) -> bool:
    """Whether the server closes the connection, to which a byte is sent from time to time."""
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


def test_a_request_that_arrives_slowly_ends_its_connection():
    with serving(request_seconds=0.2) as port:
        whole, slow = head(port) + b"12", head(port, 10**6)
        for part, drip in ((b"", b""), (b"POST /echo HT", b"T"), (slow, b"1"), (whole + slow, b"1"), (whole, b"T")):
            with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
                connection.sendall(part)
                assert is_closed(connection, drip), (part, drip)


def test_each_request_of_a_connection_has_the_time_for_itself():
    with serving(request_seconds=0.2) as port, closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        for _ in range(4):
            time.sleep(0.1)
            connection.request("POST", "/echo", "1", {"content-type": "application/json"})
            assert connection.getresponse().read() == b"1"


def test_an_answer_may_take_longer_than_the_request(monkeypatch):
    async def slow(request: Request) -> Response:
        await asyncio.sleep(0.5)
        return json_response(await read_json(request))

    monkeypatch.setitem(globals(), "echo", slow)
    with serving(request_seconds=0.2) as port:
        assert request(port, "POST", "/echo", "1") == (200, 1)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux watches what clients read")
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
    with serving(stall_seconds=0.2) as port, connect_slowly(port) as connection:
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

    monkeypatch.setitem(globals(), "echo", answer)
    with serving(stall_seconds=1.0) as port, connect_slowly(port) as connection:
        received, until = 0, time.monotonic() + 1.5
        while received < size and (part := connection.recv(2**14)):
            received += len(part)
            if time.monotonic() < until:
                time.sleep(0.01)
        assert received >= size


def test_connections_are_limited(monkeypatch):
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 3)
    with serving() as port:
        idle = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(3)]
        assert status_of(port) == 503
        for connection in idle:
            connection.close()
        wait_until(lambda: status_of(port) == 200)


def status_of(port: int) -> int:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("POST", "/echo", "1", {"content-type": "application/json"})
        return connection.getresponse().status


def test_the_names_of_a_server():
    assert names_of(["LOCALHOST", "::1"], 8000) == {"localhost:8000", "[::1]:8000"}
    assert names_of(["example.org"], 80) == {"example.org:80", "example.org"}


def test_a_server_leaves_the_handlers_of_logs_open():
    """uvicorn's configuration closed them, and with absl's handler the standard error that it wrote to."""
    handler, closed = logging.Handler(), []
    handler.close = lambda: closed.append(True)
    with serving():
        assert not closed
