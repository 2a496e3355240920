"""Continuous batching: one thread generates the completions of all requests, which arrive through a queue."""

import threading
import traceback
from collections.abc import Iterable, Sequence

import torch

from folio import UserError
from folio.decoding.language_model import LanguageModel
from folio.decoding.scheduler import Completion, Scheduler
from folio.machine import memory

MAX_ROWS = 256
IDLE_TIMEOUT = 60  # seconds without work after which the thread exits, so that an unused engine can be freed
MEMORY_FRACTION = 0.5  # maximum fraction of the free memory for the KV cache


class QueueFull(UserError):
    """The queue is full, or the engine is closed."""


class Engine:
    """Generates up to `rows` completions at a time; others wait. Thread-safe.

    In float32, a completion has the same tokens as from LanguageModel, whatever else is in the batch.
    """

    def __init__(
        self, gpt: LanguageModel, rows: int | None = None, max_waiting: int = 64, idle_timeout: float = IDLE_TIMEOUT
    ):
        """rows: None for MAX_ROWS, or fewer if memory is short. max_waiting: length of the queue.

        idle_timeout: seconds without work after which the thread exits.
        """
        self.gpt, self.rows, self.max_waiting = gpt, rows or max_rows(gpt), max_waiting
        self.idle_timeout = idle_timeout
        self.scheduler = self._new_scheduler()
        self.condition = threading.Condition()
        self.submitted: list[Completion] = []  # not yet in the scheduler
        self.cancelled: list[Completion] = []
        self.closed = False
        self.thread: threading.Thread | None = None  # None while idle

    def _new_scheduler(self) -> Scheduler:
        tokenizer = self.gpt.tokenizer
        return Scheduler(self.gpt.decoder, self.rows, tokenizer.vocab_size, tokenizer.eot)

    def submit(self, completions: Sequence[Completion]) -> None:
        """Queue completions. Raises QueueFull if the queue is full."""
        with self.condition:
            if self.closed:
                raise QueueFull("the engine is closed")
            if self.waiting >= self.max_waiting:
                raise QueueFull(f"{self.waiting:,} completions are already waiting; try again later")
            self.submitted += completions
            self._wake()

    def cancel(self, completions: Iterable[Completion]) -> None:
        """Cancel unfinished completions. Their rows are freed after the current step."""
        with self.condition:
            self.cancelled += completions
            self._wake()

    def _wake(self) -> None:
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
            self.thread.start()
        self.condition.notify_all()

    @property
    def active(self) -> int:
        """Rows in use."""
        return len(self.scheduler.completions)

    @property
    def waiting(self) -> int:
        """Completions without a row."""
        return max(0, len(self.submitted) + len(self.scheduler.waiting) - len(self.scheduler.free_rows))

    def close(self) -> None:
        """Cancel unfinished completions and stop the thread."""
        with self.condition:
            self.closed, thread = True, self.thread
            self.condition.notify_all()
        if thread:
            thread.join()

    def _run(self) -> None:
        while True:
            with self.condition:
                has_work = self.condition.wait_for(self._has_work, timeout=self.idle_timeout)
                if self.closed:
                    self.cancelled += [*self.submitted, *self.scheduler.completions.values(), *self.scheduler.waiting]
                updated = self._update()
                if self.closed or not has_work:
                    self.thread = None
                    break
            try:
                updated += self.scheduler.step().values()
            except Exception:
                traceback.print_exc()
                updated += self._fail()
            notify(updated)
        notify(updated)

    def _has_work(self) -> bool:
        return bool(self.submitted or self.cancelled or self.closed or self.scheduler.is_busy)

    def _update(self) -> list[Completion]:
        """Pass submissions and cancellations to the scheduler. Return the cancelled completions."""
        for completion in self.submitted:
            self.scheduler.add(completion)
        cancelled = [completion for completion in self.cancelled if completion.finish_reason is None]
        for completion in cancelled:
            self.scheduler.cancel(completion)
        self.submitted, self.cancelled = [], []
        return cancelled

    def _fail(self) -> list[Completion]:
        """End all completions after an internal error, and return them."""
        failed = [*self.scheduler.completions.values(), *self.scheduler.waiting]
        self.scheduler = self._new_scheduler()
        for completion in failed:
            completion.error, completion.finish_reason = "the engine failed; see the server's terminal", "error"
        return failed


def notify(completions: Iterable[Completion]) -> None:
    """Call each distinct `notify` callback of these completions once."""
    for callback in {completion.notify for completion in completions if completion.notify}:
        callback()


def max_rows(gpt: LanguageModel) -> int:
    """Return the number of rows that fit in MEMORY_FRACTION of the free memory, from 1 to MAX_ROWS."""
    device = gpt.runtime.device
    available = memory.free(device) or memory.free(torch.device("cpu"))  # Apple GPUs share the CPU's memory
    return max(1, min(MAX_ROWS, int(MEMORY_FRACTION * available / gpt.decoder.row_bytes)))
