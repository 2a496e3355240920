"""The viewer's server: one page, and a trace provider that answers its questions. It listens to this computer only.

    GET  /           the page, in one piece
    POST /ask        a question of folio/trace_provider.py; the answer in bytes
    POST /generate   settings of sampling; a line of JSON for each token of each sample, as they are generated

A page of another site cannot ask: requests need the server's own Host, an Origin that is the server or none, and JSON.
"""

import base64
import hashlib
import json
import re
import socket
import time
import traceback
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from folio import UserError
from folio.trace_provider import TraceProvider

PAGE = Path(__file__).resolve().parent / "page"
LARGEST_BODY = 2**20  # bytes of a request
SENDING_INTERVAL = 0.01  # seconds: tokens that are generated in this time are sent together
FAILURE = "the server could not answer; its terminal shows why"


def read_scripts(paths: Iterable[Path]) -> str:
    """Scripts or style sheets as one, without their indentation and comments.

    A comment at the end of a line begins with " // ", which must not occur in strings of the scripts.
    """
    text = "".join(path.read_text(encoding="utf-8") for path in paths)
    return re.sub(r"^\s*(//.*\s+)*| // .*", "", text, flags=re.MULTILINE).rstrip()


def read_page() -> str:
    """page.html with its style sheet and its scripts inside. Scripts that follow each other are one."""

    def content(match: re.Match) -> str:
        return read_scripts(PAGE / name for name in re.findall(r'(?:href|src)="([\w.-]+)"', match.group()))

    page = (PAGE / "page.html").read_text(encoding="utf-8")
    page = re.sub(r"<link rel.*>", lambda m: f"<style>\n{content(m)}\n</style>", page)
    return re.sub(r"(<script src.*\s+)+", lambda m: f"<script>\n{content(m)}\n</script>\n", page)


def hash_source(text: str) -> str:
    """What a content security policy allows an inline script or style by."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def content_security_policy(page: str) -> str:
    """Only the page's own scripts and styles, and requests to the server that it came from."""

    def sources(tag: str) -> str:
        return " ".join(map(hash_source, re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)))

    return (
        f"default-src 'none'; script-src {sources('script')}; style-src {sources('style')}; img-src data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class SameOriginOnly:
    """Refuses requests that a page of another site could cause."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str]):
        """hosts: the values of Host that are the server, such as "127.0.0.1:8000"."""
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the server has no {scope['type']}")

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
                if message["status"] >= 400:  # the rest of the body is not read
                    message["headers"] += [(b"connection", b"close")]
            await send(message)

        app = self.problem(scope) or self.app
        await app(scope, receive, send_with_headers)

    def problem(self, scope: Scope) -> Response | None:
        """The answer to a request that is refused."""

        def values(name: bytes) -> list[str]:
            return [value.decode("latin-1").lower() for header, value in scope["headers"] if header == name]

        hosts, origins = values(b"host"), values(b"origin")
        if len(hosts) != 1 or hosts[0] not in self.hosts or not {*origins} <= {f"http://{hosts[0]}"}:
            return error(403, "this server answers its own page only")
        types = [value.split(";")[0].strip() for value in values(b"content-type")]
        if scope["method"] == "POST" and types != ["application/json"]:
            return error(415, "the body must be application/json")
        return None


def error(status: int, message: str) -> Response:
    return Response(json.dumps({"error": message}), status, media_type="application/json")


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


def next_lines(events: Iterator[dict[str, Any]]) -> tuple[str, bool]:
    """The next events as lines of JSON, and whether more may follow. An exception is the last line, {"error": ...}."""
    lines, until = [], time.monotonic() + SENDING_INTERVAL
    more = False
    try:
        for event in events:
            lines.append(json.dumps(event, allow_nan=False))
            if time.monotonic() >= until:
                more = True
                break
    except UserError as problem:
        lines.append(json.dumps({"error": str(problem)}))
    except Exception:
        traceback.print_exc()
        lines.append(json.dumps({"error": FAILURE}))
    return "".join(f"{line}\n" for line in lines), more


def make_app(provider: TraceProvider, hosts: frozenset[str]) -> ASGIApp:
    """The application. hosts: as in SameOriginOnly."""
    page = read_page()
    policy = content_security_policy(page)

    async def send_page(request: Request) -> Response:
        return HTMLResponse(page, headers={"content-security-policy": policy})

    async def ask(request: Request) -> Response:
        question = await read_json(request)
        answer = await run_in_threadpool(lambda: provider.answer(question).to_bytes())
        return Response(answer, media_type="application/octet-stream")

    async def generate(request: Request) -> Response:
        events = provider.generate(await read_json(request))
        first = await run_in_threadpool(next, events)  # raises UserError before the response begins

        async def lines() -> AsyncIterator[str]:
            try:
                yield json.dumps(first) + "\n"
                more = True
                while more:
                    text, more = await run_in_threadpool(next_lines, events)
                    yield text
            finally:
                events.close()  # the page may have gone

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def refuse(request: Request, problem: Exception) -> Response:
        return error(400, str(problem))

    async def refuse_request(request: Request, problem: HTTPException) -> Response:
        return error(problem.status_code, problem.detail)

    async def ignore(request: Request, problem: Exception) -> Response:
        return Response()  # to nobody: the page has gone

    async def fail(request: Request, problem: Exception) -> Response:
        return error(500, FAILURE)  # uvicorn prints the traceback

    post = ["POST"]
    routes = [Route("/", send_page), Route("/ask", ask, methods=post), Route("/generate", generate, methods=post)]
    handlers = {UserError: refuse, HTTPException: refuse_request, ClientDisconnect: ignore, Exception: fail}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return SameOriginOnly(app, hosts)


class Server(uvicorn.Server):
    """uvicorn, which closes connections when it stops instead of waiting for streams to end."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await super().shutdown(sockets)


def make_server(app: ASGIApp) -> Server:
    """The server of an application; Server.run(sockets=[...]) runs it until Ctrl-C."""
    return Server(uvicorn.Config(app, http="h11", ws="none", lifespan="off", log_level="error", timeout_keep_alive=5))
