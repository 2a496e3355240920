"""An ordered map over a stream of items in several processes, and child processes that end with their parent.

Children of a parent killed by SIGKILL would otherwise keep its standard output open, so that a pipe never closes.
"""

import functools
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from folio import UserError
from folio.base import stop_signals

Item = TypeVar("Item")
GRACE_SECONDS = 1  # for a child process to end by itself
ENDS_WITH_PARENT = "FOLIO_ENDS_WITH_PARENT"  # environment variable of a script started with child_options


def cores() -> int:
    """The number of CPU cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")  # what torchrun sets
LAUNCHERS = {  # the variable with the number of processes that were started together, and not only reserved, by name
    "SLURM_STEP_NUM_TASKS": "srun",  # SLURM_NTASKS is also set in a batch script, which is one process
    "OMPI_COMM_WORLD_SIZE": "Open MPI",
    "PMI_SIZE": "MPI",
}


def under_torchrun() -> bool:
    """Whether torchrun, or a launcher that sets the same variables, started this process."""
    return os.environ.keys() >= {*TORCHRUN}


def check_launch() -> None:
    """Raise UserError if several processes were started together, but torchrun's variables are missing or invalid.

    Without them, each process would train the whole run.
    """
    if under_torchrun():
        numbers = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        *ranks, size = (int(number) if number.isdecimal() else -1 for number in numbers.values())
        if not all(0 <= rank < size for rank in ranks):
            shown = ", ".join(f"{name}={number}" for name, number in numbers.items())
            raise UserError(
                f"{shown}: the ranks must be integers from 0 to WORLD_SIZE - 1; start train.py with torchrun"
            )
        return
    values = {name: os.environ[name] for name in TORCHRUN if name in os.environ}
    missing = [name for name in TORCHRUN if name not in os.environ]
    if values.keys() - {"MASTER_ADDR"} and values.get("WORLD_SIZE") != "1":
        shown = ", ".join(f"{name}={value}" for name, value in values.items())
        raise UserError(
            f"{shown}: for a run in several processes, {' and '.join(missing)} must be set, too; start them with "
            f"torchrun, which sets them, or unset {' and '.join(values)} for a single process"
        )
    for name, launcher in LAUNCHERS.items():
        if os.environ.get(name, "1") not in ("", "0", "1"):
            raise UserError(
                f"{name}={os.environ[name]}: {launcher} started several processes, and each would train the whole run, "
                f"because {', '.join(missing)} are not set; let it start torchrun once per machine "
                f"(docs/use/scaling.md), or start one process"
            )


# --- workers ----------------------------------------------------------------------------------------------------------


def map_in_order(
    function: Callable, items: Iterable[Item], workers: int, *arguments: Any
) -> Iterator[tuple[Item, Any]]:
    """Yield each item with function(item, *arguments), in order. workers: number of processes; 0: this process.

    Reads only a few items ahead, to bound memory. Raises UserError if a worker process cannot start, or ends.
    """
    if not workers:
        for item in items:
            yield item, function(item, *arguments)
        return
    pool = WorkerPool()
    pending: deque[Item] = deque()
    try:
        pool.start(workers, function, arguments)
        for item in items:
            pending.append(item)
            pool.send(item)
            if len(pending) > 2 * workers:
                yield pending.popleft(), pool.next_result()
        while pending:
            yield pending.popleft(), pool.next_result()
    finally:
        pool.kill()


class WorkerPool:
    """Processes that apply a function to items.

    This process has no thread for them: one could hold a lock while a worker is forked, and be stopped by Ctrl-C at any
    point. So it reads results only when it waits for one, and the workers have threads that receive and send.
    """

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self.connections: list[Connection] = []
        self.assigned: deque[Connection] = deque()  # the worker of each item whose result was not returned, in order
        self.results: dict[Connection, deque] = {}  # received and not returned, by worker

    def start(self, count: int, function: Callable, arguments: tuple[Any, ...]) -> None:
        """Start the processes. Raises UserError."""
        try:
            with stop_signals.delayed(), _terminal_signals_blocked():
                for _ in range(count):
                    ours, theirs = multiprocessing.Pipe()
                    self.connections.append(ours)
                    self.results[ours] = deque()
                    with theirs:
                        process = multiprocessing.Process(target=_work, args=(theirs, function, arguments), daemon=True)
                        process.start()
                    self.processes.append(process)
        except OSError as error:
            raise UserError(
                f"num_workers={count}: a worker process cannot start ({error.strerror}); use a smaller --num_workers"
            ) from None

    def send(self, item: Any) -> None:
        """Send an item to the worker with the fewest unfinished ones."""
        self._receive(timeout=0)
        unfinished = {ours: -len(results) for ours, results in self.results.items()}
        for ours in self.assigned:
            unfinished[ours] += 1
        worker = min(self.connections, key=unfinished.__getitem__)
        try:
            worker.send(item)
        except OSError:
            self._raise_ended()
        self.assigned.append(worker)

    def next_result(self) -> Any:
        """Return the result for the first item that has none. Raises the function's exceptions, and UserError."""
        worker = self.assigned.popleft()
        while not self.results[worker]:
            self._receive()
        result, error, details = self.results[worker].popleft()
        if error:
            raise error from RuntimeError(details)
        return result

    def _receive(self, timeout: float | None = None) -> None:
        """Receive the available results, or wait for one."""
        for ours in connection.wait(self.connections, timeout):
            try:
                self.results[ours].append(ours.recv())
            except (EOFError, OSError):
                self._raise_ended()

    def _raise_ended(self) -> None:
        raise UserError(
            "a worker process was killed, probably because memory ran out; use a smaller --num_workers"
        ) from None

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for ours in self.connections:
            ours.close()


@contextmanager
def _terminal_signals_blocked() -> Iterator[None]:
    """Block SIGINT and SIGHUP in this thread, and in processes started in the block. No effect on Windows.

    A terminal sends them to all processes, but only the main process handles them.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _work(ours: Connection, function: Callable, arguments: tuple[Any, ...]) -> None:
    """Run a worker process: apply the function to each item that is received, and send the result.

    Threads receive and send, so that the main process never waits for a computation.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Windows, which cannot block it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.setswitchinterval(5e-4)  # seconds; the threads need the interpreter's lock for each 200 KB
    items, results = queue.SimpleQueue(), queue.SimpleQueue()
    try:
        threading.Thread(target=_receive_items, args=(ours, items), daemon=True).start()
        threading.Thread(target=_send_results, args=(ours, results), daemon=True).start()
    except RuntimeError:  # the limit of processes and threads; the main process sees that the connection is closed
        os._exit(1)
    while True:
        item = items.get()
        try:
            results.put((function(item, *arguments), None, ""))
        except Exception as error:
            results.put((None, error, traceback.format_exc()))


def _receive_items(ours: Connection, items: queue.SimpleQueue) -> None:
    """Put what is received into a queue. Ends the process when the main process has ended.

    Where processes are forked, the connection stays open then: this process has a copy of its other end.
    """
    main_process = multiprocessing.parent_process().sentinel
    with suppress(EOFError, OSError):
        while ours in connection.wait([ours, main_process]):
            items.put(ours.recv())
    os._exit(1)


def _send_results(ours: Connection, results: queue.SimpleQueue) -> None:
    """Send what is put into a queue."""
    while True:
        result = results.get()
        try:
            ours.send(result)
        except OSError:  # the main process has ended
            os._exit(1)
        except Exception as error:  # it cannot be pickled
            ours.send((None, TypeError(f"the result of a worker cannot be sent: {error}"), traceback.format_exc()))


# --- child processes --------------------------------------------------------------------------------------------------


@functools.cache
def _open_pipe() -> tuple[int, int]:
    """A pipe to which nothing is written. Its readers receive end-of-file when this process ends."""
    return os.pipe()


def child_options(**environment: str) -> dict[str, Any]:
    """Arguments of subprocess.Popen for a project script that ends with this process.

    The script does not belong to the processes that a launcher started, though this process may. environment:
    additional environment variables.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in (*TORCHRUN, *LAUNCHERS)}
    return {"stdin": _open_pipe()[0], "env": {**inherited, **environment, ENDS_WITH_PARENT: "1"}}


def run_child(script: str, *arguments: str, **environment: str) -> int:
    """Run a script of the project, and return its exit status. If a signal stops this process, wait for the script.

    environment: additional environment variables.
    """
    process = subprocess.Popen([sys.executable, script, *arguments], **child_options(**environment))
    try:
        return process.wait()
    except KeyboardInterrupt:
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)  # a terminal sends the signal to both
            raise
        process.terminate()
        process.wait()
        raise


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
        if hasattr(signal, "pthread_kill"):  # to the main thread: in another one, the signal would not end its waits
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait_for_end, daemon=True).start()
