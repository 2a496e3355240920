"""Serves a report that follows runs while they train.

    GET /    the page; 304 if it is still the one of If-None-Match

A file cannot read other files in a browser, so a page that updates itself needs a server. It sends the whole page again
(live.js takes over what has changed), and renders it only after a run has written.
"""

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from folio.base.files import is_locked
from folio.web import server
from folio.web.server import OriginCheck
from folio.web.viewer import error_content

FILES = ("metrics.jsonl", "samples.jsonl", "last.json", "best.json", "plan.json")  # whose changes are shown


class LiveReport:
    """A page about runs, rendered again after one of them has changed.

    find: returns the folders of the runs. render: returns the page.
    """

    def __init__(self, find: Callable[[], list[Path]], render: Callable[[], str]):
        self.find, self.render = find, render
        self.lock = threading.Lock()
        self.state: list[tuple] = []
        self.html = self.etag = ""

    def page(self) -> tuple[str, str]:
        """Return the page and its ETag. Raises UserError."""
        with self.lock:
            state = [state_of(folder) for folder in self.find()]
            if state != self.state or not self.html:
                self.html = self.render()
                self.etag = f'"{hashlib.sha256(self.html.encode(errors="backslashreplace")).hexdigest()}"'
                self.state = state
            return self.html, self.etag


def state_of(folder: Path) -> tuple:
    """What changes when a run writes, starts, or ends."""
    stats = []
    for name in FILES:
        try:
            info = (folder / name).stat()
            stats.append((info.st_mtime_ns, info.st_size))
        except OSError:
            stats.append(None)
    return (folder, is_locked(folder / ".lock"), *stats)


def make_app(report: LiveReport, hosts: frozenset[str]) -> OriginCheck:
    """Build the application. hosts: see OriginCheck."""

    async def send_page(request: Request) -> Response:
        html, etag = await run_in_threadpool(report.page)
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers={"etag": etag})
        return HTMLResponse(html.encode(errors="backslashreplace"), headers={"etag": etag})

    routes = [Route("/", send_page, middleware=[Middleware(GZipMiddleware)])]
    return server.make_app(routes, error_content, hosts)
