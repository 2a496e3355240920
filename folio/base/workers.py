"""An ordered map over a stream of items in several processes, and child processes that end with their parent.

Children of a parent killed by SIGKILL would otherwise keep its standard output open, so that a pipe never closes.
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
ENDS_WITH_PARENT = "FOLIO_ENDS_WITH_PARENT"  # environment variable of a script started with child_options


def cores() -> int:
    """The number of CPU cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def under_torchrun() -> bool:
    """Whether torchrun, or a launcher that sets the same variables, started this process."""
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} <= os.environ.keys()


def map_in_order(
    function: Callable, items: Iterable[Item], workers: int, *arguments: Any
) -> Iterator[tuple[Item, Any]]:
    """Yield each item with function(item, *arguments), in order. workers: number of processes; 0: this process.

    Reads only a few items ahead, to bound memory. Raises UserError if a worker process is killed.
    """
    if not workers:
        for item in items:
            yield item, function(item, *arguments)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context(), _start_worker, (function, arguments))
    pending: deque[tuple[Item, Future]] = deque()
    try:
        with _ctrl_c_delayed(), _sigint_blocked():  # processes that start here never receive Ctrl-C
            for _ in range(workers):
                pool.submit(int)
        for item in items:
            with _ctrl_c_delayed():
                pending.append((item, pool.submit(_apply, item)))
            if len(pending) > 2 * workers:
                item, future = pending.popleft()
                yield item, _result(future)
        for item, future in pending:
            yield item, _result(future)
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed, probably because memory ran out; use a smaller --num_workers"
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

    A KeyboardInterrupt inside the pool's own code can leave a lock held or be lost in a callback; the program would
    then hang.
    """
    if threading.current_thread() is not threading.main_thread():  # the only thread that receives it
        yield
        return
    received = []
    handler = signal.signal(signal.SIGINT, lambda *arguments: received.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received and callable(handler):
            handler(*received[0])


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block SIGINT in this thread and in processes started inside the block. No effect on Windows."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _start_worker(function: Callable, arguments: tuple[Any, ...]) -> None:
    """Initialize a worker process with the function and arguments that it applies to each item."""
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the main process handles Ctrl-C
    threading.Thread(target=_exit_after_parent, daemon=True).start()
    _work = function, arguments


def _exit_after_parent() -> None:
    """Exit when the parent process ends."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _apply(item: Any) -> Any:
    function, arguments = _work
    return function(item, *arguments)


# --- child processes --------------------------------------------------------------------------------------------------


@functools.cache
def _open_pipe() -> tuple[int, int]:
    """A pipe to which nothing is written. Its readers receive end-of-file when this process ends."""
    return os.pipe()


def child_options(**environment: str) -> dict[str, Any]:
    """Arguments of subprocess.Popen for a project script that ends with this process.

    environment: additional environment variables.
    """
    return {"stdin": _open_pipe()[0], "env": {**os.environ, **environment, ENDS_WITH_PARENT: "1"}}


def end_with_parent() -> None:
    """In a process started with `child_options`, raise SIGTERM when the parent ends.

    Standard input becomes empty, so that the processes it starts do not inherit the pipe.
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
