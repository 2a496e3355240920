"""The viewer's HTTP server: one page, and a trace provider that answers its questions.

    GET  /           the page, as one document, gzipped
    POST /ask        a question of folio/web/questions.py; the answer is binary
    POST /generate   sampling settings; the response is a stream of JSON lines with the tokens of each sample

Pages of other sites are refused: requests need the server's own Host, no other Origin, and a JSON body.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from folio.experiments.charts import CHART_STYLE
from folio.experiments.static_page import BASE_STYLE, hash_source
from folio.web import server
from folio.web.questions import TraceProvider
from folio.web.server import OriginCheck, RequestError, read_json
from folio.web.streaming import GenerationResponse, Responses

PAGE = Path(__file__).resolve().parent / "page"


def read_scripts(paths: Iterable[Path]) -> str:
    """Concatenate scripts, without indentation and comments.

    A comment at the end of a line begins with " // ", which must not occur in strings of the scripts.
    """
    text = "".join(path.read_text(encoding="utf-8") for path in paths)
    return re.sub(r"^\s*(//.*\s+)*| // .*", "", text, flags=re.MULTILINE).rstrip()


def read_style() -> str:
    """Return the shared style sheets and the viewer's own, without unnecessary spaces and semicolons.

    Their strings must not contain the punctuation below or a colon before a space.
    """
    text = "".join(path.read_text(encoding="utf-8") for path in (BASE_STYLE, CHART_STYLE, PAGE / "style.css"))
    return re.sub(r";?\s*([{};,])\s*|(?<=:)\s+", r"\1", text)


def read_page() -> str:
    """Return page.html with its style sheet and scripts inlined. Adjacent scripts become one.

    They are classic scripts, not ES modules, so that this page and the file of html_file.py are one document each.
    Inline modules have no URLs to import each other by. Blob URLs with an import map would work in the page, but a
    worker, such as the engine of the file, has no import map.
    """

    def scripts(match: re.Match) -> str:
        return read_scripts(PAGE / name for name in re.findall(r'src="([\w./-]+)"', match.group()))

    page = (PAGE / "page.html").read_text(encoding="utf-8")
    page = re.sub(r"<link rel.*>", lambda _: f"<style>{read_style()}</style>", page)
    return re.sub(r"(<script src.*\s+)+", lambda m: f"<script>\n{scripts(m)}\n</script>\n", page)


def content_security_policy(page: str) -> str:
    """Allow only the page's own scripts and styles, and requests to its server."""

    def sources(tag: str) -> str:
        return " ".join(map(hash_source, re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)))

    return (
        f"default-src 'none'; script-src {sources('script')}; style-src {sources('style')}; img-src data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def error_content(problem: RequestError) -> dict[str, str]:
    """Return the JSON of an error."""
    return {"error": str(problem)}


def make_app(provider: TraceProvider, hosts: frozenset[str]) -> OriginCheck:
    """Build the application. hosts: see OriginCheck."""
    page = read_page()
    policy = content_security_policy(page)
    responses = Responses()

    async def send_page(request: Request) -> Response:
        return HTMLResponse(page, headers={"content-security-policy": policy})

    async def ask(request: Request) -> Response:
        question = await read_json(request)
        answer = await run_in_threadpool(lambda: provider.answer(question).to_bytes())
        return Response(answer, media_type="application/octet-stream")

    async def generate(request: Request) -> GenerationResponse:
        engine, format = await run_in_threadpool(provider.sampler, await read_json(request))
        return GenerationResponse(responses, engine, format)

    post = ["POST"]
    routes = [
        Route("/", send_page, middleware=[Middleware(GZipMiddleware)]),
        Route("/ask", ask, methods=post),
        Route("/generate", generate, methods=post),
    ]
    return server.make_app(routes, error_content, hosts, close=provider.close)
