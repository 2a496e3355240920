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
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from folio import UserError
from folio.trace_provider import TraceProvider

PAGE = Path(__file__).resolve().parent / "page"
LARGEST_BODY = 2**20  # bytes of a request


def read_page() -> str:
    """page.html with its style sheets and scripts inside."""
    page = (PAGE / "page.html").read_text(encoding="utf-8")

    def content(match: re.Match) -> str:
        return (PAGE / match.group(1)).read_text(encoding="utf-8").strip()

    page = re.sub(r'<link rel="stylesheet" href="([\w.-]+)">', lambda m: f"<style>\n{content(m)}\n</style>", page)
    return re.sub(r'<script src="([\w.-]+)"></script>', lambda m: f"<script>\n{content(m)}\n</script>", page)


def content_security_policy(page: str) -> str:
    """Only the page's own scripts and styles, and requests to the server that it came from."""

    def sources(tag: str) -> str:
        blocks = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(b.encode()).digest()).decode()}'" for b in blocks)

    return (
        f"default-src 'none'; script-src {sources('script')}; style-src {sources('style')}; img-src data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class OnlyFromHere:
    """Refuses requests that a page of another site could cause."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str]):
        """hosts: the values of Host that are the server, such as "127.0.0.1:8000"."""
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get("host", ""), headers.get("origin")
        if host not in self.hosts or origin not in (None, f"http://{host}"):
            return await error(403, "this server answers its own page only")(scope, receive, send)
        if scope["method"] == "POST" and headers.get("content-type", "").split(";")[0] != "application/json":
            return await error(415, "the body must be application/json")(scope, receive, send)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] += [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
            await send(message)

        await self.app(scope, receive, send_with_headers)


def error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status)


async def read_json(request: Request) -> Any:
    """The body of a request. Raises UserError."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > LARGEST_BODY:
            raise UserError(f"a request must not be larger than {LARGEST_BODY:,} bytes")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise UserError("the body is not JSON") from None


def make_app(provider: TraceProvider, hosts: frozenset[str]) -> Starlette:
    """The application. hosts: as in OnlyFromHere."""
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
                async for event in iterate_in_threadpool(events):
                    yield json.dumps(event) + "\n"
            finally:  # the page may have gone
                events.close()

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def refuse(request: Request, problem: Exception) -> Response:
        return error(400, str(problem))

    post = ["POST"]
    routes = [Route("/", send_page), Route("/ask", ask, methods=post), Route("/generate", generate, methods=post)]
    app = Starlette(routes=routes, exception_handlers={UserError: refuse})
    app.add_middleware(OnlyFromHere, hosts=hosts)
    return app
