"""Applies a function to a stream of items in several processes, and returns the results in order.

Also ends child processes when their parent ends, even by SIGKILL: they would otherwise keep its standard output open,
and a pipe from it would never end.
"""

import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from folio import UserError

Item = TypeVar("Item")
ENDS_WITH_PARENT = "FOLIO_ENDS_WITH_PARENT"  # environment variable of a script whose standard input is a parent's pipe


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def under_torchrun() -> bool:
    """Whether torchrun, or anything that sets the same variables, started this process."""
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} <= os.environ.keys()


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
    waiting: deque[tuple[Item, Future]] = deque()
    try:
        with _ctrl_c_delayed(), _sigint_blocked():  # processes that start here never receive Ctrl-C
            for _ in range(workers):
                pool.submit(int)
        for item in items:
            with _ctrl_c_delayed():
                waiting.append((item, pool.submit(_apply, item)))
            if len(waiting) > 2 * workers:
                item, future = waiting.popleft()
                yield item, _result(future)
        for item, future in waiting:
            yield item, _result(future)
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed, most often because the memory was full; "
            "start again with a smaller --num_workers"
        ) from None
    finally:
        with _ctrl_c_delayed():
            pool.shutdown(cancel_futures=True)


def _result(future: Future) -> Any:
    """The result of a future. Ctrl-C takes effect within a tenth of a second."""
    while not future.done():
        with _ctrl_c_delayed():
            wait([future], timeout=0.1)
    return future.result()


@contextmanager
def _ctrl_c_delayed() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block.

    A KeyboardInterrupt inside the pool's own code can leave a lock held or be lost in a callback, and the program then
    never ends.
    """
    if threading.current_thread() is not threading.main_thread():  # the only thread that receives it
        yield
        return
    received = []
    before = signal.signal(signal.SIGINT, lambda *arguments: received.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if received and callable(before):
            before(*received[0])


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block the signal of Ctrl-C; processes that start inside inherit this. No effect on Windows."""
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
    threading.Thread(target=_exit_after_parent, daemon=True).start()
    _work = function, arguments


def _exit_after_parent() -> None:
    """Wait until the process that started this worker has ended, and exit."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _apply(item: Any) -> Any:
    function, arguments = _work
    return function(item, *arguments)


# --- scripts that are started as processes ----------------------------------------------------------------------------


@functools.cache
def _open_pipe() -> tuple[int, int]:
    """A pipe of this process, into which nothing is written. It ends when the process ends."""
    return os.pipe()


def child_options(**environment: str) -> dict[str, Any]:
    """Arguments of subprocess.Popen for one of the project's scripts, which ends when this process does.

    environment: variables besides those of this process.
    """
    return {"stdin": _open_pipe()[0], "env": {**os.environ, **environment, ENDS_WITH_PARENT: "1"}}


def end_with_parent() -> None:
    """In a process that was started with `child_options`: receive SIGTERM when the parent has ended.

    Standard input becomes empty, so that other processes do not inherit the pipe.
    """
    if not os.environ.pop(ENDS_WITH_PARENT, None):
        return
    pipe = os.dup(0)
    with open(os.devnull, "rb") as empty:
        os.dup2(empty.fileno(), 0)

    def wait_for_end() -> None:
        os.read(pipe, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait_for_end, daemon=True).start()
