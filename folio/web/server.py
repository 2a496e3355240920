"""Parts shared by the HTTP servers: application, access checks, JSON bodies with a size limit, errors, and sockets.

Each server defines its error format as an ErrorContent.
"""

import hmac
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NoReturn

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

from folio import UserError
from folio.base.stop_signals import handled_by
from folio.base.terminal import say

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_BODY_BYTES = 2**20
REQUEST_SECONDS = 10.0  # timeout for receiving a request
STALL_SECONDS = 60.0  # until a client that stops reading a response is disconnected
KEEP_ALIVE_SECONDS = 5  # until an idle connection is closed
MAX_CONNECTIONS = 1000
FAILURE = "internal server error; see the server's terminal"


class RequestError(UserError):
    """An invalid or refused request. param: field name. code: OpenAI's error code. status: HTTP status."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.param, self.code, self.status, self.headers = param, code, status, headers or {}


ErrorContent = Callable[[RequestError], Any]  # returns the JSON of an error


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(content), status, headers, media_type="application/json")


# --- requests ---------------------------------------------------------------------------------------------------------


class OriginCheck:
    """Refuses requests from pages of other sites: checks Host, Origin, and Content-Type."""

    def __init__(self, app: ASGIApp, error: ErrorContent, hosts: frozenset[str], origins: frozenset[str] = frozenset()):
        """hosts: accepted values of Host, such as "127.0.0.1:8000". origins: other accepted values of Origin, such as
        "https://example.com".
        """
        self.app, self.error, self.hosts, self.origins = app, error, hosts, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
                if message["status"] >= 400:  # the rest of the body stays unread
                    message["headers"] += [(b"connection", b"close")]
            await send(message)

        problem = self.problem(scope) if scope["type"] == "http" else None
        app = json_response(self.error(problem), problem.status) if problem else self.app
        await app(scope, receive, send_with_headers)

    def problem(self, scope: Scope) -> RequestError | None:
        """Return why a request is refused, or None."""
        hosts, origins = header_values(scope, b"host"), header_values(scope, b"origin")
        if len(hosts) != 1 or hosts[0] not in self.hosts:
            return RequestError("the Host header does not match this server", status=403)
        if not {*origins} <= {f"http://{hosts[0]}"} and not (len(origins) == 1 and origins[0] in self.origins):
            return RequestError("requests from pages of other sites are not allowed", status=403)
        types = [value.split(";")[0].strip() for value in header_values(scope, b"content-type")]
        if scope["method"] == "POST" and types != ["application/json"]:
            return RequestError("Content-Type must be application/json", status=415)
        return None


class KeyRequired:
    """Refuses requests without the API key, except to /health."""

    def __init__(self, app: ASGIApp, error: ErrorContent, key: str):
        self.app, self.error, self.key = app, error, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["type"] == "http" and scope["path"] != "/health" and not self.has_key(scope):
            message = "missing or wrong API key; send the header Authorization: Bearer KEY"
            content = self.error(RequestError(message, code="invalid_api_key", status=401))
            app = json_response(content, 401, {"www-authenticate": "Bearer"})
        await app(scope, receive, send)

    def has_key(self, scope: Scope) -> bool:
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = (values[0] if len(values) == 1 else b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key, self.key)


def header_values(scope: Scope, name: bytes) -> list[str]:
    """Return the values of a header in lower case."""
    return [value.decode("latin-1").lower() for header, value in scope["headers"] if header == name]


async def read_json(request: Request) -> Any:
    """Read and parse the body of a request. Raises RequestError."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(f"the body must have at most {MAX_BODY_BYTES:,} bytes", status=413)

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(body, parse_constant=refuse)
    except (ValueError, RecursionError):
        raise RequestError("the body is not valid JSON") from None


# --- the application --------------------------------------------------------------------------------------------------


def make_app(
    routes: Iterable[Route],
    error: ErrorContent,
    hosts: frozenset[str],
    origins: frozenset[str] = frozenset(),
    key: str | None = None,
    close: Callable[[], None] = lambda: None,
) -> OriginCheck:
    """Build an application in which all errors have the same format. A UserError becomes status 400.

    hosts, origins: see OriginCheck. key: required API key, or None. close: called at shutdown.
    """
    routes = [*routes]
    paths = ", ".join(dict.fromkeys(route.path.partition("/{")[0] for route in routes))

    async def refuse(request: Request, problem: UserError) -> Response:
        problem = problem if isinstance(problem, RequestError) else RequestError(str(problem))
        return json_response(error(problem), problem.status, problem.headers)

    async def refuse_request(request: Request, problem: HTTPException) -> Response:
        status, headers = problem.status_code, problem.headers or {}
        message = problem.detail
        if status == 404:
            message = f"unknown path; the paths are {paths}"
        elif "Allow" in headers:
            message = f"the method must be {headers['Allow']}"
        return await refuse(request, RequestError(message, status=status, headers=headers))

    async def ignore(request: Request, problem: Exception) -> Response:
        return Response()  # the client has disconnected

    async def fail(request: Request, problem: Exception) -> Response:
        return await refuse(request, RequestError(FAILURE, status=500))  # uvicorn prints the traceback

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        close()

    handlers = {UserError: refuse, HTTPException: refuse_request, ClientDisconnect: ignore, Exception: fail}
    cors = dict(allow_origins=[*origins], allow_methods=["GET", "POST"], allow_headers=["*"])
    middleware = [Middleware(CORSMiddleware, **cors)] if origins else []
    middleware += [Middleware(KeyRequired, error=error, key=key)] if key else []
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False
    return OriginCheck(app, error, hosts, origins)


# --- connections ------------------------------------------------------------------------------------------------------


def listen(host: str, port: int, stall_seconds: float = STALL_SECONDS) -> socket.socket:
    """Listen on the port, or on a free one if it cannot be used. Raises UserError.

    On Linux, a client that reads nothing for stall_seconds is disconnected. Otherwise, a response would wait forever.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    problem: OSError | None = None
    for requested_port in (port, 0):
        listener = socket.socket(family, socket.SOCK_STREAM)
        if os.name == "posix":  # on Windows, this would allow two servers on one port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * stall_seconds))
        try:
            listener.bind((host, requested_port))
            listener.listen()
            if problem:
                say(f"port {port} cannot be used ({problem.strerror}); using {listener.getsockname()[1]}")
            return listener
        except OSError as error:
            listener.close()
            problem = error
    raise UserError(f"host={host}: cannot listen on this address ({problem})")


def host_headers(hosts: Iterable[str], port: int) -> frozenset[str]:
    """Return the values of the Host header for a server with these names and this port."""
    names = [f"[{host}]" if ":" in host else host.lower() for host in hosts]
    return frozenset(f"{name}:{port}" for name in names) | frozenset(names if port == 80 else ())


def server_url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class Server(uvicorn.Server):
    """uvicorn with a timeout for receiving requests. Shutdown ends streams."""

    def __init__(self, config: uvicorn.Config, request_seconds: float):
        super().__init__(config)
        self.request_seconds = request_seconds
        self.waiting: dict[tuple, float] = {}  # start time by (connection, its latest request)

    async def on_tick(self, counter: int) -> bool:
        """Close connections whose request does not arrive in time. Called every 0.1 s.

        uvicorn would wait forever, so clients that send partial requests could use up all connections.
        """
        now, previous = time.monotonic(), self.waiting
        connections = [c for c in self.server_state.connections if is_waiting(c.cycle)]
        self.waiting = {(c, c.cycle): previous.get((c, c.cycle), now) for c in connections}
        for (connection, _), since in self.waiting.items():
            if now > since + self.request_seconds:
                connection.transport.close()
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Shut down at SIGHUP, too. After the shutdown, uvicorn raises the signal again."""
        with super().capture_signals(), handled_by(self.handle_exit):
            yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the connections first, because uvicorn waits for streams to end."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await super().shutdown(sockets)


def is_waiting(cycle: RequestResponseCycle | None) -> bool:
    """Whether a connection, given its latest request, waits for a request or for the rest of it."""
    return cycle is None or cycle.more_body or cycle.response_complete


def make_server(
    app: OriginCheck, request_seconds: float = REQUEST_SECONDS, max_connections: int = MAX_CONNECTIONS
) -> Server:
    """Return the server of an application. Server.run(sockets=[...]) runs it until Ctrl-C."""
    limits = dict(limit_concurrency=max_connections, timeout_keep_alive=KEEP_ALIVE_SECONDS)
    settings = dict(http="h11", ws="none", lifespan="on", proxy_headers=False, **limits)
    logs = dict(log_config=None, log_level="error")  # uvicorn's configuration would close all logging handlers
    return Server(uvicorn.Config(app, **settings, **logs), request_seconds)
