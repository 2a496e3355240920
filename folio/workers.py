"""Applies a function to a stream of items in several processes, and returns the results in order."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from folio import UserError

Item = TypeVar("Item")


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_in_order(
    function: Callable, items: Iterable[Item], workers: int, *arguments: Any
) -> Iterator[tuple[Item, Any]]:
    """Each item with function(item, *arguments), computed by this many processes; 0: by this process.

    Only a few items are read ahead, so that memory does not grow with their number. Raises UserError if a worker
    process is killed.
    """
    if not workers:
        for item in items:
            yield item, function(item, *arguments)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context(), _start_worker, (function, arguments))
    with _sigint_blocked():  # a Ctrl-C during startup could kill some processes, and the others then wait forever
        for _ in range(workers):
            pool.submit(int)
    waiting: deque[tuple[Item, Future]] = deque()
    try:
        for item in items:
            waiting.append((item, pool.submit(_apply, item)))
            if len(waiting) > 2 * workers:
                item, result = waiting.popleft()
                yield item, result.result()
        for item, result in waiting:
            yield item, result.result()
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed, most often because the memory was full; "
            "start again with a smaller --num_workers"
        ) from None
    finally:
        _shut_down(pool)


def _shut_down(pool: ProcessPoolExecutor) -> None:
    """Stop the processes of a pool. Another Ctrl-C has no effect: the main process would wait for them forever."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    while True:
        try:
            if is_main:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            pool.shutdown(cancel_futures=True)
            break
        except KeyboardInterrupt:  # it came before it was ignored
            continue
    if is_main:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block; processes that start inside never receive it. No effect on Windows."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(function: Callable, arguments: tuple[Any, ...]) -> None:
    """Store in a worker process what it applies to each item."""
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the main process handles Ctrl-C
    _work = function, arguments


def _apply(item: Any) -> Any:
    function, arguments = _work
    return function(item, *arguments)
