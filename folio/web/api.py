"""An OpenAI-compatible server of one model: completions, streamed or not, many at a time.

    GET  /v1/models, /v1/models/ID      the model
    POST /v1/completions                texts that continue prompts
    POST /v1/chat/completions           for a model that was trained on pairs; otherwise 404
    POST /tokenize, /detokenize         and GET /tokenizer_info: the tokenizer, as vLLM and lm-eval have it
    GET  /health                        the rows that are in use; needs no key

docs/serving.md describes it. The protocol is in folio/web/completions.py, the batch in folio/web/engine.py.
"""

import asyncio
import hmac
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from folio.data.sources.pairs import CHAT_TEMPLATES
from folio.data.tokenizer import EOT_TEXT
from folio.decoding.language_model import LanguageModel
from folio.web import completions, server
from folio.web.chat import ChatTemplate
from folio.web.completions import ChatAnswer, Choice, ChoiceDelta, CompletionAnswer, Limits, RequestError
from folio.web.engine import Engine, QueueFull
from folio.web.server import Guard, json_response, read_json

SENDING_INTERVAL = 0.02  # seconds: tokens that are generated in this time are sent together
MOST_EVENTS = 2000  # per second, of all streams: if there are many, more tokens are sent together
RETRY_AFTER = 1  # seconds, when the queue is full
LARGE_BODY = 2**14  # bytes from which on a request is read in a thread, because its tokens may take long
EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"x-accel-buffering", b"no"),  # nginx passes events on as they arrive
]

T = TypeVar("T")


# --- errors -----------------------------------------------------------------------------------------------------------


def error_content(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def content_of(problem: RequestError) -> dict[str, Any]:
    return error_content(problem.status, str(problem), problem.param, problem.code)


async def refuse(request: HTTPRequest, problem: Exception) -> Response:
    assert isinstance(problem, RequestError)
    # OpenAI's clients repeat a request twice after an error of the server
    headers = {"x-should-retry": "false"} if problem.code in ("engine_error", "timeout") else {}
    return json_response(content_of(problem), problem.status, headers)


async def refuse_for_now(request: HTTPRequest, problem: Exception) -> Response:
    message = "too many requests are waiting; try again later"
    return json_response(error_content(429, message, code="queue_full"), 429, {"retry-after": str(RETRY_AFTER)})


class KeyRequired:
    """Refuses requests without the key, except for /health."""

    def __init__(self, app: ASGIApp, key: str):
        self.app, self.key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = (given[0] if len(given) == 1 else b"").partition(b" ")
        app = self.app
        if scope["path"] != "/health" and not (scheme.lower() == b"bearer" and hmac.compare_digest(key, self.key)):
            message = "give the key of this server, as in the header Authorization: Bearer KEY"
            content = error_content(401, message, code="invalid_api_key")
            app = json_response(content, 401, {"www-authenticate": "Bearer"})
        await app(scope, receive, send)


# --- the model --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Served:
    """A model as clients know it, and the requests that are being answered."""

    engine: Engine
    model_id: str
    fingerprint: str  # of the checkpoint
    chat: ChatTemplate | None = None
    limits: Limits = field(default_factory=Limits)
    timeout: float = 600.0  # seconds for a request
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.open: set[CompletionResponse] = set()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.is_notified = False  # whether the loop will look at what is new
        self.timer: asyncio.TimerHandle | None = None  # of the next time when all requests are woken
        self.last = 0.0  # when they were

    @property
    def gpt(self) -> LanguageModel:
        return self.engine.gpt

    def notify(self) -> None:
        """Called by the engine's thread after a step that has news."""
        if not self.is_notified:
            self.is_notified = True
            with suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self.look)

    def look(self) -> None:
        """Wake the requests with a first token or an end, and soon all others."""
        self.is_notified = False  # before looking, so that nothing is missed
        for response in self.open:
            response.wake(urgent=True)
        if self.timer is None:
            interval = max(SENDING_INTERVAL, len(self.open) / MOST_EVENTS)
            self.timer = self.loop.call_at(self.last + interval, self.wake_all)

    def wake_all(self) -> None:
        self.timer, self.last = None, self.loop.time()
        for response in self.open:
            response.wake(urgent=False)

    async def respond(self, request: HTTPRequest, chat: ChatTemplate | None) -> "CompletionResponse":
        """Begin to answer a request of /v1/completions or /v1/chat/completions."""
        self.loop = asyncio.get_running_loop()
        body = await read_json(request)
        self.check_model(body.get("model") if isinstance(body, dict) else None)

        def read() -> completions.Request:
            return completions.read_request(body, self.gpt, self.limits, self.notify, chat)

        parsed = await in_thread_if_large(request, read)
        kind = ChatAnswer if chat else CompletionAnswer
        return CompletionResponse(self, parsed, kind(parsed, self.model_id, self.fingerprint, self.gpt.tokenizer))

    def check_model(self, name: Any) -> None:
        if name is not None and not isinstance(name, str):
            raise RequestError("model: it takes text", "model")
        if name not in (None, self.model_id):
            raise no_such_model(name)

    def describe(self) -> dict[str, Any]:
        """The model as an object of /v1/models."""
        described = {"id": self.model_id, "object": "model", "created": self.created, "owned_by": "folio"}
        return {**described, "max_model_len": self.gpt.model.config.block_size}


def no_such_model(name: str) -> RequestError:
    return RequestError(
        f"there is no model {name[:100]!r}; GET /v1/models names the one of this server",
        "model",
        "model_not_found",
        404,
    )


async def in_thread_if_large(request: HTTPRequest, read: Callable[[], T]) -> T:
    """What `read` makes of the body. Meanwhile, others are answered if it is large."""
    is_large = int(request.headers.get("content-length", LARGE_BODY)) >= LARGE_BODY
    return await run_in_threadpool(read) if is_large else read()


# --- answers ----------------------------------------------------------------------------------------------------------


class Gone(Exception):
    """The client has disconnected."""


class CompletionResponse:
    """The answer to a request for completions, an ASGI application: as a stream while they are generated, or whole."""

    def __init__(self, served: Served, request: completions.Request, answer: CompletionAnswer):
        self.served, self.request, self.answer = served, request, answer
        self.unfinished = list(request.choices)
        self.reads_all = request.stream or any(choice.text.stop for choice in request.choices)
        self.news = asyncio.Event()
        self.problem: Exception | None = None  # why it ends early

    def wake(self, urgent: bool) -> None:
        """Called by the loop when there may be news."""
        if self.reads_all:
            is_new = any(choice.is_urgent if urgent else choice.has_news for choice in self.unfinished)
        else:
            is_new = all(choice.completion.finish_reason for choice in self.unfinished)
        if is_new:
            self.news.set()

    def end(self, problem: Exception) -> None:
        """End early, and free the rows now: `send` may be waiting for a client that does not read."""
        self.problem = problem
        self.free_rows()
        self.news.set()

    def free_rows(self) -> None:
        if self.unfinished:
            self.served.engine.cancel(choice.completion for choice in self.unfinished)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        served = self.served
        served.engine.submit(self.request.completions)  # raises QueueFull
        late = RequestError(
            f"the answer was not complete within {served.timeout:,g} s; lower max_tokens or n",
            code="timeout",
            status=503,
        )
        expiry = served.loop.call_later(served.timeout, self.end, late)
        watcher = asyncio.create_task(self.watch(receive))
        served.open.add(self)
        try:
            await (self.send_stream(send) if self.request.stream else self.send_whole(send))
        except Gone:
            pass
        finally:
            served.open.discard(self)
            watcher.cancel()
            expiry.cancel()
            self.free_rows()

    async def watch(self, receive: Receive) -> None:
        """Wait for the client to disconnect."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.end(Gone())

    async def pieces(self) -> list[tuple[Choice, ChoiceDelta]]:
        """What is new of the choices, when something is. Choices that have ended leave `unfinished`."""
        await self.news.wait()
        self.news.clear()
        if self.problem:
            raise self.problem
        pieces = [(choice, choice.read()) for choice in self.unfinished if choice.has_news]
        ended = [choice for choice, piece in pieces if piece.finish_reason]
        if ended:
            self.unfinished = [choice for choice in self.unfinished if not choice.finish_reason]
            self.served.engine.cancel(choice.completion for choice in ended if not choice.completion.finish_reason)
        return pieces

    async def send_whole(self, send: Send) -> None:
        read: dict[int, list[ChoiceDelta]] = {choice.index: [] for choice in self.request.choices}
        while self.unfinished:
            for choice, piece in await self.pieces():
                read[choice.index].append(piece)

        def to_json() -> Response:
            return json_response(self.answer.to_json([*read.values()]))

        is_large = any(completion.logprobs is not None for completion in self.request.completions)
        response = await run_in_threadpool(to_json) if is_large else to_json()
        await response({"type": "http"}, None, send)

    async def send_stream(self, send: Send) -> None:
        """The response begins with the first news, so that an error before it has a status of its own."""
        answer, begun, more = self.answer, False, True
        while more:
            try:
                pieces = await self.pieces()
                events = [answer.event(choice, piece) for choice, piece in pieces if piece.text or piece.finish_reason]
                more = bool(self.unfinished)
                if not more and self.request.include_usage:
                    events.append(answer.usage_event())
            except RequestError as problem:
                if not begun:
                    raise
                events, more = [answer.error_event(content_of(problem))], False
            if not begun:
                await send({"type": "http.response.start", "status": 200, "headers": [*EVENT_STREAM]})
                events = [answer.begin(choice) for choice in self.request.choices] + events
                begun = True
            if not more:
                events.append(b"data: [DONE]\n\n")
            if events:
                await send({"type": "http.response.body", "body": b"".join(events), "more_body": more})


# --- routes -----------------------------------------------------------------------------------------------------------


def make_app(
    served: Served, hosts: frozenset[str], origins: frozenset[str] = frozenset(), key: str | None = None
) -> Guard:
    """The application. hosts, origins: as in Guard. key: what clients must give; None: nothing."""
    tokenizer = served.gpt.tokenizer

    async def health(request: HTTPRequest) -> Response:
        engine = served.engine
        counts = {"rows": engine.rows, "active": engine.active, "waiting": engine.waiting}
        return json_response({"status": "ok", **counts})

    async def models(request: HTTPRequest) -> Response:
        return json_response({"object": "list", "data": [served.describe()]})

    async def model(request: HTTPRequest) -> Response:
        if request.path_params["name"] != served.model_id:
            raise no_such_model(request.path_params["name"])
        return json_response(served.describe())

    async def complete(request: HTTPRequest) -> CompletionResponse:
        return await served.respond(request, None)

    async def chat(request: HTTPRequest) -> CompletionResponse:
        if served.chat is None:
            message = "this model continues text; it was not trained to chat: use /v1/completions"
            raise RequestError(message, code="chat_not_supported", status=404)
        return await served.respond(request, served.chat)

    async def tokenize(request: HTTPRequest) -> Response:
        body = await read_json(request)
        text = body.get("prompt") if isinstance(body, dict) else None
        if not isinstance(text, str):
            raise RequestError("prompt: it takes text", "prompt")
        tokens = (
            await in_thread_if_large(request, partial(completions.encode, text, "prompt", tokenizer)) if text else []
        )
        counts = {"count": len(tokens), "max_model_len": served.gpt.model.config.block_size}
        return json_response({**counts, "tokens": tokens})

    async def detokenize(request: HTTPRequest) -> Response:
        body = await read_json(request)
        tokens = body.get("tokens") if isinstance(body, dict) else None
        if not isinstance(tokens, list) or not all(map(completions.is_id, tokens)):
            raise RequestError("tokens: it takes a list of token ids", "tokens")

        def decode() -> Response:
            completions.check_ids(tokens, "tokens", tokenizer)
            return json_response({"prompt": completions.decode(tokens, tokenizer)})

        return await in_thread_if_large(request, decode)

    async def tokenizer_info(request: HTTPRequest) -> Response:
        special = None if tokenizer.eot is None else EOT_TEXT
        info = {"tokenizer_class": tokenizer.kind, "vocab_size": tokenizer.vocab_size}
        info |= {"model_max_length": served.gpt.model.config.block_size, "bos_token": special, "eos_token": special}
        template = served.chat and CHAT_TEMPLATES[served.chat.prompt_format]
        return json_response({**info, "pad_token": None, "chat_template": template})

    post = ["POST"]
    routes = [
        Route("/health", health),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/completions", complete, methods=post),
        Route("/v1/chat/completions", chat, methods=post),
        Route("/tokenize", tokenize, methods=post),
        Route("/detokenize", detokenize, methods=post),
        Route("/tokenizer_info", tokenizer_info),
    ]
    starlette = server.make_app(routes, error_content)
    starlette.add_exception_handler(RequestError, refuse)
    starlette.add_exception_handler(QueueFull, refuse_for_now)
    app: ASGIApp = KeyRequired(starlette, key) if key else starlette
    if origins:
        app = CORSMiddleware(app, allow_origins=[*origins], allow_methods=["GET", "POST"], allow_headers=["*"])
    return Guard(app, error_content, hosts, origins)
