import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from folio.data.tokenizer import CharTokenizer
from folio.decoding.language_model import LanguageModel
from folio.decoding.scheduler import Completion
from folio.machine import memory
from folio.web.engine import Engine, QueueFull, max_rows
from tests.support.decoding import GREEDY, random_model
from tests.support.waiting import wait_until

TOKENIZER = CharTokenizer("\n abcdefghijklmnopqr", eot=True)
FOREVER = 10**9  # tokens


@pytest.fixture(scope="module")
def gpt() -> LanguageModel:
    return LanguageModel(random_model(5, vocab_size=TOKENIZER.vocab_size, block_size=32), TOKENIZER)


@pytest.fixture
def engine(gpt) -> Iterator[Engine]:
    engine = Engine(gpt, rows=4, max_waiting=3)
    yield engine
    engine.close()


def generate(engine: Engine, completion: Completion) -> Completion:
    """Submit a completion, and wait for its end."""
    progress = threading.Event()
    completion.notify = progress.set
    engine.submit([completion])
    while completion.finish_reason is None:
        assert progress.wait(60)
        progress.clear()
    return completion


def test_completions_wait_for_rows_and_a_full_queue_is_an_error(engine):
    running = [Completion([1], GREEDY, FOREVER, context_stride=16) for _ in range(4)]
    engine.submit(running)
    wait_until(lambda: engine.active == 4)
    waiting = [Completion([2], GREEDY, 5) for _ in range(3)]
    for completion in waiting:
        engine.submit([completion])
    assert engine.waiting == 3
    with pytest.raises(QueueFull, match="3 completions are already waiting"):
        engine.submit([Completion([3], GREEDY, 5)])
    engine.cancel(running)
    wait_until(lambda: all(completion.finish_reason == "length" for completion in waiting))
    assert [completion.finish_reason for completion in running] == ["cancelled"] * 4
    assert engine.active == engine.waiting == 0


def test_completions_can_be_cancelled(engine):
    """While running, while waiting, and after they have ended."""
    notified = threading.Event()
    running = [Completion([1], GREEDY, FOREVER, context_stride=16) for _ in range(4)]
    engine.submit(running)
    wait_until(lambda: all(completion.tokens for completion in running))
    first, second = [Completion([2], GREEDY, 5, notify=notified.set) for _ in range(2)], Completion([3], GREEDY, 5)
    engine.submit(first)
    engine.submit([second])
    engine.cancel([*first, second])
    wait_until(lambda: all(completion.finish_reason == "cancelled" for completion in (*first, second)))
    assert notified.wait(60) and engine.active == 4
    engine.cancel([*first, *running])
    wait_until(lambda: engine.active == 0)
    done = generate(engine, Completion([1], GREEDY, 3))
    engine.cancel([done])
    assert generate(engine, Completion([1], GREEDY, 3)).tokens == done.tokens and done.finish_reason == "length"


def test_the_engine_continues_after_an_error(engine, capsys):
    completion = Completion([1, 99], GREEDY, 5)  # not an id of the vocabulary
    assert generate(engine, completion).finish_reason == "error"
    assert "terminal" in completion.error and "IndexError" in capsys.readouterr().err
    assert len(generate(engine, Completion([1], GREEDY, 5)).tokens) == 5 and engine.active == 0


def test_a_closed_engine_has_no_thread_and_refuses_completions(gpt):
    """Closing also notifies the waiting completions, which waited forever."""
    engine, notified = Engine(gpt, rows=1), threading.Event()
    completions = [Completion([n], GREEDY, FOREVER, context_stride=16) for n in range(3)]
    completions[2].notify = notified.set
    engine.submit(completions)
    wait_until(lambda: bool(completions[0].tokens))
    thread = engine.thread
    engine.close()
    assert not thread.is_alive() and engine.thread is None
    assert [completion.finish_reason for completion in completions] == ["cancelled"] * 3 and notified.is_set()
    with pytest.raises(QueueFull, match="closed"):
        engine.submit([Completion([1], GREEDY, 1)])
    engine.close()


def test_an_idle_engine_stops_its_thread_and_can_be_freed(gpt):
    engine = Engine(gpt, rows=1, idle_timeout=0.01)
    assert len(generate(engine, Completion([1], GREEDY, 5)).tokens) == 5
    reference = weakref.ref(engine)
    wait_until(lambda: reference().thread is None)
    assert len(generate(engine, Completion([1], GREEDY, 5)).tokens) == 5  # a new thread
    del engine
    wait_until(lambda: gc.collect() >= 0 and reference() is None)


def test_the_number_of_rows_follows_the_free_memory(gpt, monkeypatch):
    assert Engine(gpt).rows == 256
    monkeypatch.setattr(memory, "free", lambda device: 20 * gpt.decoder.row_bytes)
    assert max_rows(gpt) == 10
    monkeypatch.setattr(memory, "free", lambda device: 100)
    assert max_rows(gpt) == 1
