import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from folio.data.tokenizer import CharTokenizer
from folio.decoding.sampling import Sampling
from folio.decoding.scheduler import Completion, TokenLogprobs
from folio.decoding.text_stream import TextStream
from folio.web import streaming
from folio.web.server import FAILURE, RequestError
from folio.web.streaming import CompletionReader, GenerationResponse, NewToken, ResponseFormat, Responses

LETTERS = CharTokenizer("abcdef")


def new_reader(stop: str | None = None, **fields: Any) -> CompletionReader:
    return CompletionReader(Completion([0], Sampling(), **fields), TextStream(LETTERS, stop))


# --- reading ----------------------------------------------------------------------------------------------------------


def test_each_token_is_read_once_and_then_the_end():
    reader = new_reader(stop="cx")
    completion = reader.completion
    assert not reader.has_update
    completion.tokens += [1, 2]
    assert reader.is_urgent  # the first token
    assert [*reader.read()] == [NewToken(1, "b"), NewToken(2, "")]
    assert not reader.has_update
    completion.tokens.append(2)
    assert reader.has_update and not reader.is_urgent
    assert [*reader.read()] == [NewToken(2, "c")]
    completion.finish_reason = "length"
    assert reader.is_urgent and [*reader.read()] == [NewToken(None, "c")]  # text held back for the stop string
    assert reader.finish_reason == "length" and not reader.stopped and not reader.has_update


def test_tokens_that_arrive_during_a_read_are_read_next():
    reader = new_reader()
    reader.completion.tokens.append(0)
    tokens = reader.read()
    assert next(tokens).text == "a"
    reader.completion.tokens.append(1)
    reader.completion.finish_reason = "length"
    assert [*tokens] == [] and not reader.has_ended and reader.has_update
    assert [token.text for token in reader.read()] == ["b", ""] and reader.finish_reason == "length"


@pytest.mark.parametrize("reason, status", [("error", 500), ("cancelled", 503)])
def test_tokens_before_an_error_are_read(reason, status):
    reader = new_reader()
    reader.completion.tokens += [0, 1]
    reader.completion.error, reader.completion.finish_reason = "the reason", reason
    assert [token.text for token in reader.read()] == ["a", "b"]
    assert reader.problem.status == status and reader.finish_reason is None and reader.has_ended
    assert reason == "cancelled" or str(reader.problem) == "the reason"
    may_retry = reason == "cancelled"  # on another server; an error would be repeated
    assert reader.problem.headers == ({} if may_retry else {"x-should-retry": "false"})


def test_nan_after_the_first_token_is_an_error():
    """Its log-probabilities were sent as NaN, which is not JSON."""
    reader = new_reader(logprobs=0)
    reader.completion.tokens += [0, 1]
    reader.completion.token_logprobs += [TokenLogprobs(-1.0, []), TokenLogprobs(math.nan, [])]
    assert [*reader.read()] == [NewToken(0, "a", TokenLogprobs(-1.0, []))]
    assert reader.problem.status == 500 and "NaN" in str(reader.problem)


# --- responses --------------------------------------------------------------------------------------------------------


class Letters(ResponseFormat):
    """A format that sends only the text."""

    media_type = "text/plain"

    def __init__(self, *readers: CompletionReader):
        self.readers = readers

    def update(self) -> bytes:
        return "".join(token.text for reader in self.readers if reader.has_update for token in reader.read()).encode()

    def end(self) -> bytes:
        return b"."

    def error(self, problem: RequestError) -> bytes:
        return f"!{problem}".encode()


class ScriptedEngine:
    """An engine whose tokens are set by the test."""

    def __init__(self) -> None:
        self.cancelled: list[Completion] = []

    def submit(self, completions: Sequence[Completion]) -> None:
        pass

    def cancel(self, completions: Sequence[Completion]) -> None:
        self.cancelled += completions


class Exchange:
    """A response being sent, and the status and parts of the body that the client has received."""

    def __init__(self, reads: bool = True, sending_interval: float = streaming.SENDING_INTERVAL, **settings: Any):
        """reads: whether the client reads. settings: arguments of GenerationResponse."""
        self.reads, self.settings = reads, settings
        self.engine, self.responses = ScriptedEngine(), Responses(sending_interval)
        self.status: int | None = None
        self.parts: list[bytes] = []

    async def receive(self) -> None:
        await asyncio.Event().wait()  # the client does not disconnect

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message.get("body"):
            self.parts.append(message["body"])
        if not self.reads:
            await asyncio.Event().wait()

    def run(self, format: ResponseFormat, script: Callable[[], Awaitable[None]], ends: bool = True) -> None:
        """Send the response while the script runs. ends: wait for the end of the response."""

        async def run_both() -> None:
            response = GenerationResponse(self.responses, self.engine, format, **self.settings)
            task = asyncio.create_task(response({}, self.receive, self.send))
            await asyncio.sleep(0)  # until the completions are submitted
            await script()
            if ends:
                await task
            task.cancel()

        asyncio.run(asyncio.wait_for(run_both(), 60))

    async def generate(self, reader: CompletionReader, *tokens: int, finish_reason: str | None = None) -> None:
        """Add tokens to a completion, and wait until they are read."""
        reader.completion.tokens += tokens
        reader.completion.finish_reason = finish_reason
        reader.completion.notify()
        while reader.has_update and not self.engine.cancelled:
            await asyncio.sleep(0.001)


def test_tokens_are_sent_as_they_are_generated():
    exchange, reader = Exchange(sending_interval=0), new_reader()

    async def script() -> None:
        await exchange.generate(reader, 0)
        await exchange.generate(reader, 1, 2)
        await exchange.generate(reader, 3, finish_reason="length")

    exchange.run(Letters(reader), script)
    assert (exchange.status, exchange.parts) == (200, [b"a", b"bc", b"d", b"."])
    assert not exchange.engine.cancelled and not exchange.responses.open


def test_only_first_tokens_and_ends_are_sent_immediately():
    exchange, (first, second) = Exchange(sending_interval=1000), (new_reader(), new_reader())

    async def script() -> None:
        exchange.responses.last = asyncio.get_running_loop().time()
        await exchange.generate(first, 0)
        first.completion.tokens.append(1)
        first.completion.notify()
        await asyncio.sleep(0.01)
        assert exchange.parts == [b"a"]
        await exchange.generate(second, 2, finish_reason="length")
        await exchange.generate(first, finish_reason="length")

    exchange.run(Letters(first, second), script)
    assert exchange.parts == [b"a", b"bc", b"."]


def test_a_stop_string_frees_the_row_while_others_are_generated():
    exchange, first, second = Exchange(), new_reader(stop="b"), new_reader()

    async def script() -> None:
        await exchange.generate(first, 0, 1, 2)
        while first.completion not in exchange.engine.cancelled:
            await asyncio.sleep(0.001)
        await exchange.generate(second, 3, finish_reason="length")

    exchange.run(Letters(first, second), script)
    assert exchange.parts == [b"a", b"d", b"."]


def test_an_early_error_has_a_status_and_a_later_one_is_the_last_part(capfd):
    exchange, reader = Exchange(), new_reader()
    with pytest.raises(RequestError, match="stopping"):
        exchange.run(Letters(reader), lambda: exchange.generate(reader, finish_reason="cancelled"))
    assert exchange.status is None
    exchange, reader, other = Exchange(), new_reader(), new_reader()
    exchange.run(Letters(reader, other), lambda: exchange.generate(reader, 0, finish_reason="cancelled"))
    assert exchange.parts == [b"a", b"!the server is stopping"] and exchange.engine.cancelled == [other.completion]
    assert capfd.readouterr().err == ""


def test_an_unexpected_error_ends_the_response_and_prints_its_traceback(capfd):
    class Broken(Letters):
        def begin(self) -> bytes:
            return b"?"

        def update(self) -> bytes:
            raise RuntimeError("a secret")

    exchange, reader = Exchange(), new_reader()
    exchange.run(Broken(reader), lambda: exchange.generate(reader, 0))
    assert exchange.parts == [b"?", f"!{FAILURE}".encode()] and "RuntimeError: a secret" in capfd.readouterr().err


def test_a_timeout_frees_the_rows_of_a_client_that_does_not_read():
    """The timeout had no effect until the client read again."""
    exchange, reader = Exchange(reads=False, timeout=0.05), new_reader()

    async def script() -> None:
        await exchange.generate(reader, 0)
        while not exchange.engine.cancelled:
            await asyncio.sleep(0.001)
        assert exchange.engine.cancelled == [reader.completion]
        assert exchange.responses.open  # still waits for the client

    exchange.run(Letters(reader), script, ends=False)
