"""What the project's servers share: who may ask, bounded JSON bodies, errors of one shape, time-outs, the socket.

A server gives the shape of its errors as an ErrorContent, which all parts of this file use.
"""

import asyncio
import json
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from folio import UserError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
LARGEST_BODY = 2**20  # bytes of a request
REQUEST_SECONDS = 10.0  # for a request to arrive as a whole
STALL_SECONDS = 60.0  # until a client that reads nothing of an answer is disconnected
LARGEST_PIPELINED = 2**16  # bytes that a client may send while a request is answered
KEEP_ALIVE_SECONDS = 5  # until a connection without a request is closed
MOST_CONNECTIONS = 1000
FAILURE = "the server could not answer; its terminal shows why"

ErrorContent = Callable[[int, str], Any]  # (status, message) -> the JSON that says it


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(content), status, headers, media_type="application/json")


# --- requests ---------------------------------------------------------------------------------------------------------


class Guard:
    """Refuses requests that a page of another site could cause."""

    def __init__(self, app: ASGIApp, error: ErrorContent, hosts: frozenset[str], origins: frozenset[str] = frozenset()):
        """hosts: the values of Host that are the server, such as "127.0.0.1:8000". origins: other sites' pages that may
        ask, such as "https://example.com".
        """
        self.app, self.error, self.hosts, self.origins = app, error, hosts, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the server has no {scope['type']}")

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
                if message["status"] >= 400:  # the rest of the body is not read
                    message["headers"] += [(b"connection", b"close")]
            await send(message)

        problem = self.problem(scope)
        app = json_response(self.error(*problem), problem[0]) if problem else self.app
        await app(scope, receive, send_with_headers)

    def problem(self, scope: Scope) -> tuple[int, str] | None:
        """The status and the message for a request that is refused."""
        hosts, origins = header_values(scope, b"host"), header_values(scope, b"origin")
        if len(hosts) != 1 or hosts[0] not in self.hosts:
            return 403, "the header Host does not name this server"
        if not {*origins} <= {f"http://{hosts[0]}"} and not (len(origins) == 1 and origins[0] in self.origins):
            return 403, "this server does not answer pages of other sites"
        types = [value.split(";")[0].strip() for value in header_values(scope, b"content-type")]
        if scope["method"] == "POST" and types != ["application/json"]:
            return 415, "the body must be application/json"
        return None


def header_values(scope: Scope, name: bytes) -> list[str]:
    """The values of a header in lower case."""
    return [value.decode("latin-1").lower() for header, value in scope["headers"] if header == name]


async def read_json(request: Request) -> Any:
    """The body of a request. Raises UserError, or HTTPException for one that is too large."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > LARGEST_BODY:
            raise HTTPException(413, f"a request must not be larger than {LARGEST_BODY:,} bytes")

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(body, parse_constant=refuse)
    except (ValueError, RecursionError):
        raise UserError("the body is not JSON") from None


def make_app(routes: Iterable[Route], error: ErrorContent) -> Starlette:
    """An application whose errors all have one shape. A UserError is the client's mistake."""
    routes = [*routes]
    paths = ", ".join(dict.fromkeys(route.path.partition("/{")[0] for route in routes))

    async def refuse(request: Request, problem: Exception) -> Response:
        return json_response(error(400, str(problem)), 400)

    async def refuse_request(request: Request, problem: HTTPException) -> Response:
        status, headers = problem.status_code, problem.headers or {}
        message = problem.detail
        if status == 404:
            message = f"there is no such path; there are {paths}"
        elif "Allow" in headers:
            message = f"the method must be {headers['Allow']}"
        return json_response(error(status, message), status, headers)

    async def ignore(request: Request, problem: Exception) -> Response:
        return Response()  # to nobody: the client has gone

    async def fail(request: Request, problem: Exception) -> Response:
        return json_response(error(500, FAILURE), 500)  # uvicorn prints the traceback

    handlers = {UserError: refuse, HTTPException: refuse_request, ClientDisconnect: ignore, Exception: fail}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


# --- connections ------------------------------------------------------------------------------------------------------


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens to the port, or to a free one if that cannot be used. Raises UserError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    problem: OSError | None = None
    for wanted in (port, 0):
        listener = socket.socket(family, socket.SOCK_STREAM)
        if os.name == "posix":  # elsewhere, it would share the port of another server
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, wanted))
            listener.listen()
            if problem:
                print(f"port {port} cannot be used ({problem.strerror}); {listener.getsockname()[1]} is free")
            return listener
        except OSError as error:
            listener.close()
            problem = error
    raise UserError(f"host={host}: no port can be opened there ({problem})")


def names_of(hosts: Iterable[str], port: int) -> frozenset[str]:
    """The values of the header Host by which clients ask a server with this port and one of these names."""
    names = [f"[{host}]" if ":" in host else host.lower() for host in hosts]
    return frozenset(f"{name}:{port}" for name in names) | frozenset(names if port == 80 else ())


def address_of(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class Connection(H11Protocol):
    """uvicorn's connection, with a time-out for each request, a limit on their number, and errors of one shape."""

    error: ErrorContent
    request_seconds: float
    most_connections: int
    stall_seconds: float
    deadline: asyncio.TimerHandle | None = None  # runs while a request arrives
    stalled: asyncio.TimerHandle | None = None  # runs while the client does not read

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # pause_writing is called whenever the client does not read
        if len(self.connections) > self.most_connections:
            self.refuse(503, "the server has too many connections; try again later")
        else:
            self.deadline = self.loop.call_later(self.request_seconds, self.time_out)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self.end_deadline()
        self.resume_writing()

    def handle_events(self) -> None:
        """Called whenever data may have arrived."""
        super().handle_events()
        state = self.conn.their_state
        if state is h11.SEND_BODY or (state is h11.IDLE and self.conn.trailing_data[0]):  # a part of a request
            self.deadline = self.deadline or self.loop.call_later(self.request_seconds, self.time_out)
        else:
            self.end_deadline()
        pipelined = len(self.conn.trailing_data[0]) if state is h11.DONE else 0
        if pipelined > LARGEST_PIPELINED:
            self.transport.abort()
        elif pipelined:  # uvicorn has stopped to read, and would not notice that the client disconnects
            self.flow.resume_reading()

    def end_deadline(self) -> None:
        if self.deadline:
            self.deadline.cancel()
            self.deadline = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self.watch_reader(self.transport.get_write_buffer_size())

    def watch_reader(self, unsent: int) -> None:
        """Disconnect the client if it reads none of so many bytes for too long."""
        self.stalled = self.loop.call_later(self.stall_seconds, self.check_reader, unsent)

    def check_reader(self, unsent: int) -> None:
        if (size := self.transport.get_write_buffer_size()) < unsent:
            self.watch_reader(size)
        else:
            self.transport.abort()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.stalled:
            self.stalled.cancel()
            self.stalled = None

    def time_out(self) -> None:
        self.refuse(408, f"the request did not arrive within {self.request_seconds:g} seconds")

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, "this is not an HTTP request")

    def refuse(self, status: int, message: str) -> None:
        """Answer without the application, if the answer has not begun, and close the connection."""
        if not self.transport.is_closing() and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(self.error(status, message)).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()


class Server(uvicorn.Server):
    """uvicorn, which closes connections when it stops instead of waiting for streams to end."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await super().shutdown(sockets)


def make_server(
    app: Guard,
    request_seconds: float = REQUEST_SECONDS,
    stall_seconds: float = STALL_SECONDS,
    most_connections: int = MOST_CONNECTIONS,
) -> Server:
    """The server of an application; Server.run(sockets=[...]) runs it until Ctrl-C."""
    limits = dict(request_seconds=request_seconds, stall_seconds=stall_seconds, most_connections=most_connections)
    protocol = type("Connection", (Connection,), {"error": staticmethod(app.error), **limits})
    settings = dict(ws="none", lifespan="off", proxy_headers=False, timeout_keep_alive=KEEP_ALIVE_SECONDS)
    logs = dict(log_config=None, log_level="error")  # its own configuration closes every handler of the process
    return Server(uvicorn.Config(app, http=protocol, **settings, **logs))
