"""An engine that generates completions for requests as they arrive: a thread with the model, behind a queue."""

import threading
import traceback
from collections.abc import Iterable, Sequence

import torch

from folio import UserError
from folio.decoding.language_model import LanguageModel
from folio.decoding.scheduler import Completion, Scheduler
from folio.machine import memory

MOST_ROWS = 256
IDLE = 60  # seconds without work, after which the thread ends, so that an engine that nobody uses goes
SHARE = 0.5  # of the free memory, at most, for keys and values


class QueueFull(UserError):
    """As many completions wait for a row as may."""


class Engine:
    """Generates completions, at most `rows` at a time; others wait. Any thread may use it.

    In float32, a completion has the tokens that LanguageModel generates with the same settings, whatever else is being
    generated.
    """

    def __init__(self, gpt: LanguageModel, rows: int | None = None, max_waiting: int = 64):
        """rows: None: MOST_ROWS, or fewer if memory holds fewer. max_waiting: completions that may wait for a row."""
        self.gpt, self.rows, self.max_waiting = gpt, rows or rows_that_fit(gpt), max_waiting
        self.scheduler = self._new_scheduler()
        self.condition = threading.Condition()
        self.submitted: list[Completion] = []  # not yet passed on to the scheduler
        self.cancelled: list[Completion] = []
        self.closed = False
        self.thread: threading.Thread | None = None  # while there is something to do, and for some time afterwards

    def _new_scheduler(self) -> Scheduler:
        tokenizer = self.gpt.tokenizer
        return Scheduler(self.gpt.decoder, self.rows, tokenizer.vocab_size, tokenizer.eot)

    def submit(self, completions: Sequence[Completion]) -> None:
        """Generate these completions when there are rows. Raises QueueFull if others fill the queue."""
        with self.condition:
            if self.closed:
                raise QueueFull("the engine is closed")
            if self.waiting >= self.max_waiting:
                raise QueueFull(f"{self.waiting:,} texts are waiting already; try again later")
            self.submitted += completions
            self._wake()

    def cancel(self, completions: Iterable[Completion]) -> None:
        """End completions, if they have not ended. Their rows are free after the current step."""
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
        """Completions for which there is no row yet."""
        return max(0, len(self.submitted) + len(self.scheduler.waiting) - len(self.scheduler.free_rows))

    def close(self) -> None:
        """Cancel what has not ended, and end the thread."""
        with self.condition:
            self.closed, thread = True, self.thread
            self.condition.notify_all()
        if thread:
            thread.join()

    def _run(self) -> None:
        while True:
            with self.condition:
                has_work = self.condition.wait_for(self._has_work, timeout=IDLE)
                if self.closed:
                    self.cancelled += [*self.submitted, *self.scheduler.completions.values(), *self.scheduler.waiting]
                news = self._update()
                if self.closed or not has_work:
                    self.thread = None
                    break
            try:
                news += self.scheduler.step().values()
            except Exception:
                traceback.print_exc()
                news += self._fail()
            notify(news)
        notify(news)

    def _has_work(self) -> bool:
        return bool(self.submitted or self.cancelled or self.closed or self.scheduler.is_busy)

    def _update(self) -> list[Completion]:
        """Pass submissions and cancellations on to the scheduler. Returns what was cancelled."""
        for completion in self.submitted:
            self.scheduler.add(completion)
        cancelled = [completion for completion in self.cancelled if completion.finish_reason is None]
        for completion in cancelled:
            self.scheduler.cancel(completion)
        self.submitted, self.cancelled = [], []
        return cancelled

    def _fail(self) -> list[Completion]:
        """End everything that was being generated, after an error of ours."""
        failed = [*self.scheduler.completions.values(), *self.scheduler.waiting]
        self.scheduler = self._new_scheduler()
        for completion in failed:
            completion.error, completion.finish_reason = "the engine failed; the server's terminal shows why", "error"
        return failed


def notify(completions: Iterable[Completion]) -> None:
    """Call the `notify` of these completions, each one once."""
    for call in {completion.notify for completion in completions if completion.notify}:
        call()


def rows_that_fit(gpt: LanguageModel) -> int:
    """MOST_ROWS, or as many as fit into a share of the free memory, but at least one."""
    device = gpt.runtime.device
    available = memory.free(device) or memory.free(torch.device("cpu"))  # Apple's GPUs use the CPU's
    return max(1, min(MOST_ROWS, int(SHARE * available / gpt.decoder.row_bytes)))
