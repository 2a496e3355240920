"""Streaming of completions over HTTP while they are generated, in any format.

A route returns a GenerationResponse. It submits completions to an engine, sends new tokens, and cancels completions
when the client disconnects, at a timeout, or at a stop string. The API's formats are in folio/web/completions.py, the
playground's is in folio/web/playground.py.
"""

import asyncio
import math
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from folio.decoding.scheduler import NAN, Completion, TokenLogprobs
from folio.decoding.text_stream import TextStream
from folio.web.engine import Engine, QueueFull
from folio.web.server import FAILURE, RequestError

SENDING_INTERVAL = 0.02  # seconds; tokens generated within this time are sent together
MAX_EVENTS_PER_SECOND = 2000  # summed over all responses; with many responses, the interval grows
RETRY_AFTER = 1  # seconds, when the queue is full
NO_RETRY = {"x-should-retry": "false"}  # OpenAI's clients retry twice after a server error


class NewToken(NamedTuple):
    """A token of a completion, or the end of the completion."""

    id: int | None  # None: the end
    text: str  # complete text that can be shown after this token
    logprobs: TokenLogprobs | None = None  # if requested


class CompletionReader:
    """Reads a completion while it is generated, up to a stop string."""

    def __init__(self, completion: Completion, text: TextStream):
        self.completion, self.text = completion, text
        self.tokens = 0  # number of tokens read
        self.finish_reason: str | None = None  # set when the completion is read to its end
        self.problem: RequestError | None = None  # set instead if the engine failed
        self.stopped = False  # by a stop string

    @property
    def has_ended(self) -> bool:
        return self.finish_reason is not None or self.problem is not None

    @property
    def has_update(self) -> bool:
        is_new = len(self.completion.tokens) > self.tokens or self.completion.finish_reason is not None
        return is_new and not self.has_ended

    @property
    def is_urgent(self) -> bool:
        """Whether the first token or the end has not been read yet."""
        return self.has_update and (self.tokens == 0 or self.completion.finish_reason is not None)

    def read(self) -> Iterator[NewToken]:
        """Yield the tokens generated since the last call, including those before an error of the engine."""
        completion, ended = self.completion, self.completion.finish_reason  # before the tokens: it is set after them
        for token in completion.tokens[self.tokens :]:
            if self.text.ended:
                break
            logprobs = None if completion.logprobs is None else completion.token_logprobs[self.tokens]
            if logprobs and math.isnan(logprobs.logprob):
                self.problem = engine_error(NAN)
                return
            self.tokens += 1
            yield NewToken(token, self.text.push(token), logprobs)
        self.stopped = self.text.ended
        if self.stopped:
            self.finish_reason = "stop"
        elif ended == "error":
            self.problem = engine_error(completion.error)
        elif ended == "cancelled":
            self.problem = RequestError("the server is stopping", code="stopping", status=503)
        elif ended:
            self.finish_reason = ended
        if self.finish_reason:
            yield NewToken(None, self.text.push(None))


def engine_error(message: str) -> RequestError:
    return RequestError(message, code="engine_error", status=500, headers=NO_RETRY)


class ResponseFormat:
    """Format of a response. Methods return bytes to send, possibly none. The first bytes start the response."""

    media_type: str
    readers: Sequence[CompletionReader]

    def begin(self) -> bytes:
        """Return what is sent before the first token. If empty, an early error of the engine has its own status."""
        return b""

    def update(self) -> bytes:
        """Return the new tokens of all readers."""

    def end(self) -> bytes:
        return b""

    def error(self, problem: RequestError) -> bytes:
        """Return the end of a response that fails after it has begun."""


class Responses:
    """The responses in progress. Wakes them when their completions have new tokens."""

    def __init__(self, sending_interval: float = SENDING_INTERVAL):
        self.sending_interval = sending_interval
        self.open: set[GenerationResponse] = set()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.is_notified = False  # whether wake_urgent is scheduled
        self.timer: asyncio.TimerHandle | None = None  # of the next wake_all
        self.last = 0.0  # time of the last wake_all

    def notify(self) -> None:
        """Schedule wake_urgent. Called by the engine's thread after a step."""
        if not self.is_notified:
            self.is_notified = True
            with suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self.wake_urgent)

    def wake_urgent(self) -> None:
        """Wake responses with a first token or an end now, and all others at the next interval."""
        self.is_notified = False  # before the loop, so that no notification is missed
        for response in self.open:
            if any(reader.is_urgent for reader in response.format.readers):
                response.updated.set()
        if self.timer is None:
            interval = max(self.sending_interval, len(self.open) / MAX_EVENTS_PER_SECOND)
            self.timer = self.loop.call_at(self.last + interval, self.wake_all)

    def wake_all(self) -> None:
        self.timer, self.last = None, self.loop.time()
        for response in self.open:
            if any(reader.has_update for reader in response.format.readers):
                response.updated.set()


class GenerationResponse:
    """An ASGI application that generates completions and streams the response."""

    def __init__(self, responses: Responses, engine: Engine, format: ResponseFormat, timeout: float | None = None):
        """timeout: seconds after which the response ends with an error."""
        self.responses, self.engine, self.format, self.timeout = responses, engine, format, timeout
        self.updated = asyncio.Event()
        self.problem: RequestError | None = None  # reason for an early end
        self.has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = self.responses.loop = asyncio.get_running_loop()
        completions = [reader.completion for reader in self.format.readers]
        for completion in completions:
            completion.notify = self.responses.notify
        try:
            self.engine.submit(completions)
        except QueueFull as problem:
            retry = {"retry-after": str(RETRY_AFTER)}
            raise RequestError(str(problem), code="queue_full", status=429, headers=retry) from None
        self.responses.open.add(self)
        watcher = loop.create_task(self.watch(receive))
        expiry = None if self.timeout is None else loop.call_later(self.timeout, self.expire)
        try:
            await self.send(send)
        finally:
            self.responses.open.discard(self)
            watcher.cancel()
            if expiry:
                expiry.cancel()
            self.cancel(self.format.readers)

    async def watch(self, receive: Receive) -> None:
        """Wait for the client to disconnect."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.fail(RequestError("the client has disconnected"))  # uvicorn drops it

    def expire(self) -> None:
        message = f"the response was not complete within {self.timeout:,g} s; lower max_tokens or n"
        self.fail(RequestError(message, code="timeout", status=503, headers=NO_RETRY))

    def fail(self, problem: RequestError) -> None:
        """End early. Frees the rows at once, because `send` may wait for a client that does not read."""
        self.problem = problem
        self.cancel(self.format.readers)
        self.updated.set()

    def cancel(self, readers: Iterable[CompletionReader]) -> None:
        """Cancel unfinished completions."""
        if unfinished := [reader.completion for reader in readers if reader.completion.finish_reason is None]:
            self.engine.cancel(unfinished)

    async def send(self, send: Send) -> None:
        format, readers = self.format, self.format.readers
        try:
            await self.write(send, format.begin())
            while not all(reader.has_ended for reader in readers):
                await self.updated.wait()
                self.updated.clear()
                if self.problem is None:
                    await self.write(send, format.update())
                self.cancel(reader for reader in readers if reader.stopped)
                if problem := self.problem or next((reader.problem for reader in readers if reader.problem), None):
                    raise problem
            last = await run_in_threadpool(format.end)  # slow for many log-probabilities
        except Exception as problem:
            if not self.has_begun:
                raise
            if not isinstance(problem, RequestError):
                traceback.print_exc()
                problem = RequestError(FAILURE, status=500)
            last = format.error(problem)
        await self.write(send, last)
        await send({"type": "http.response.body"})

    async def write(self, send: Send, content: bytes) -> None:
        if content and not self.has_begun:
            headers = [(b"content-type", self.format.media_type.encode()), (b"x-accel-buffering", b"no")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            self.has_begun = True
        if content:
            await send({"type": "http.response.body", "body": content, "more_body": True})
