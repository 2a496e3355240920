"""What surrounds the steps of a run: metrics, checkpoints, signals, the time budget, and steps that were skipped."""

import math
import os
import shlex
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from folio import UserError
from folio.base.number_format import counted
from folio.base.progress import note
from folio.base.workers import under_torchrun
from folio.checkpoints import checkpoint, run_folder
from folio.checkpoints.checkpoint import NullSaver, Saver
from folio.checkpoints.snapshots import remove_snapshots
from folio.data.windows import Mixture
from folio.machine import distributed
from folio.machine.distributed import Requests
from folio.machine.runtime import Runtime
from folio.training.budget import Budget, until
from folio.training.describe import reason_to_end
from folio.training.guard import JudgedStep
from folio.training.run_log import Clock, Metrics, NullMetrics
from folio.training.schedule import Schedule, snapshot_is_due
from folio.training.start import Start, cannot_write
from folio.training.state import TrainState


class TrainingError(UserError):
    """A run that cannot continue, though its settings are valid."""

    exit_code = 1


class Session:
    """The surroundings of a run's steps, on every rank: stopping, gathering weights and failed saves concern all ranks.
    Only rank 0's metrics and saver write anything.

        with Session(...) as session:
            session.log_start(losses)  # of an evaluation before the first step of a new run
            while not session.finished:
                train_step(...)
                session.end_step()  # sets should_log, should_evaluate and should_save
                ...evaluate...      # if should_evaluate
                session.log(losses), session.snapshot(), session.save(), session.sample()  # in this order, if due

    start: with train.py's settings. record: what a checkpoint says about the run, besides its progress. sample:
    generates so many tokens of text for samples.jsonl; None: no samples.
    """

    def __init__(
        self,
        start: Start,
        state: TrainState,
        schedule: Schedule,
        budget: Budget | None,
        data: Mixture,
        runtime: Runtime,
        record: dict[str, Any],
        sample: Callable[[int], Iterator[str]] | None,
    ):
        self.cfg, self.state, self.schedule, self.budget = start.cfg, state, schedule, budget
        self.data, self.runtime, self.record, self.sample_text = data, runtime, record, sample
        self.group, self.out_dir, self.resuming = runtime.group, Path(self.cfg.out_dir), start.resuming
        self.sequences = self.cfg.accumulation * self.cfg.batch_size  # per step
        self.tokens = self.sequences * self.cfg.block_size
        self.metrics, self.saver = self._open_writers(start)
        self.signals, self.requests, self.clock = SignalHandler(), Requests(self.group), Clock()
        self.stopped_by = 0  # the signal that ends the run
        self.should_log = self.should_save = False  # after the current step
        self.should_evaluate = not start.resuming and (budget is None or budget.evaluates_first)
        self.evaluate_from = 0  # under a time budget, the first step that may be followed by an evaluation
        self.said_replan = False  # whether a change of the length was printed since the last evaluation
        self.unread: int | None = None  # a step whose numbers are still on their way from the device
        self.read_step = 0  # the last step that was read
        self.steps: list[JudgedStep] = []  # the steps up to it, since the reading before
        self.rate: float | None = None  # steps per second then
        self.losses: dict[str, float] = {}  # of the last evaluation
        self.improved = False  # whether it was the best
        self.warned_at = 0  # the best step for which a rise of the validation loss was printed
        self.resumed_at, self.earlier_rate = state.step, start.last_learning_rate
        self.best_before = math.inf, 0  # best_val_loss and best_step before it
        self.read_at = self.logged_at = self.saved_at = time.perf_counter()

    def _open_writers(self, start: Start) -> tuple[Metrics, Saver]:
        if self.group.rank:
            return NullMetrics(), NullSaver()
        replaces = self.cfg.overwrite and not start.resuming
        try:
            self.out_dir.mkdir(parents=True, exist_ok=True)
            checkpoint.clear_unfinished(self.out_dir)
            if start.resuming:
                run_folder.restore_pointers(self.out_dir)
            if replaces:
                shutil.rmtree(self.out_dir / "skipped", ignore_errors=True)
            remove_snapshots(self.out_dir, self.state.step or -1)  # of another run, or of an abandoned future
            wandb_id, config = start.earlier.get("wandb_id"), self.record["config"]
            metrics = Metrics(self.out_dir, self.state.step, self.schedule.max_iters, config, wandb_id)
        except OSError as error:
            raise cannot_write(self.out_dir, error) from None
        return metrics, Saver(self.out_dir, self.data.tokenizer, self.cfg.keep_last, replaces)

    def __enter__(self) -> "Session":
        with ExitStack() as stack:
            for part in (self.metrics, self.saver, self.signals):
                stack.enter_context(part)
            if self.resuming:
                self.replan(at_least=1)  # the last step is always evaluated and saved
            self.stack = stack.pop_all()  # closed by __exit__
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception) and self.group.gloo:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            where = f"rank {self.group.rank} of {self.group.size}, step {self.state.step:,}"
            note(f"{where}: {lines[0]}")
        self.stack.__exit__(kind, error, traceback)

    @property
    def finished(self) -> bool:
        return self.stopped_by != 0 or reason_to_end(self.cfg, self.state, self.schedule) is not None

    def log_start(self, losses: dict[str, float]) -> None:
        """Write the validation loss before the first step as the line of step 0 of metrics.jsonl, and a snapshot.

        losses: empty if there was no time for an evaluation.
        """
        if losses:
            vocab_size = self.data.tokenizer.vocab_size
            remark = f" (if all {vocab_size:,} tokens were equally likely: {math.log(vocab_size):.4f})"
            self.metrics.log(self._metrics_line(0, losses), remark)
        if self.budget and losses and not self.runtime.compile:  # the first evaluation compiles, which is not repeated
            self.budget.note_evaluation(time.perf_counter() - self.read_at)
        if self.should_snapshot:
            self.snapshot()
        self.replan(at_least=1)

    def end_step(self) -> None:
        """Set what to do after this step, the same on every rank, and read the numbers to log.

        On a device that works asynchronously, a step without an evaluation or a save is logged here, one step later.
        """
        step = self.state.step
        self.metrics.advance()
        if self.unread:  # the device has the next step to work on now
            self._read(self.unread)
            self.log({})
            self.unread = None
        if self.budget and not self.runtime.runs_ahead:
            self.budget.mark(step)
        minutes = (time.perf_counter() - self.saved_at) / 60
        save = self.signals.save or minutes >= (self.cfg.save_interval_minutes or math.inf)
        late = self.budget is not None and self.budget.is_late
        moved = not self.saver.folder_is_in_place()
        asked = self.requests.agree(self.signals.stop, save, late, moved)  # every step, to obey signals
        self.stopped_by, save, late, moved = asked
        if moved:
            raise self._moved()
        if late and not self._evaluates(step):
            self.replan()
        self.should_evaluate, self.should_save = self._evaluates(step), bool(self.stopped_by or save)
        self.signals.ends = "this evaluation" if self.should_evaluate else "this step"
        pauses = self.should_evaluate or self.should_save
        self.should_log = pauses or step % self.cfg.log_interval == 0 or step == 1
        if not self.should_log:
            return
        self.state.guard.send()
        if self.runtime.runs_ahead and not pauses:
            self.unread, self.should_log = step, False
            return
        self._read(step)
        self.read_at = time.perf_counter()

    def _evaluates(self, step: int) -> bool:
        return self.schedule.evaluates(step) and (step >= self.evaluate_from or step == self.schedule.max_iters)

    def _moved(self) -> TrainingError:
        """The error of a run whose folder was moved or removed. Another run may write to a folder at its path."""
        place = self.group.broadcast(self.saver.folder_now())
        stops = f"so the run stops after step {self.state.step:,}"
        if place is None:
            return TrainingError(f"out_dir={self.out_dir} was removed, {stops}")
        resume = shlex.join(["--init_from=resume", f"--out_dir={place}"])
        return TrainingError(f"out_dir={self.out_dir} was moved to {place}, {stops}; resume it there with {resume}")

    def _read(self, step: int) -> None:
        """Wait for the device to finish `step`; report steps that were skipped since the last time."""
        self.read_step, self.steps = step, self.state.guard.read(step)
        self.rate = self.clock.rate(step)
        if self.budget:
            self.budget.mark(step)
        for judged in self.steps:
            if judged.skipped:
                self.metrics.say(self._record_skipped(judged))

    def _record_skipped(self, judged: JudgedStep) -> str:
        """Write what a skipped step had read into skipped/; returns a line about it."""
        if self.group.rank:
            return ""
        first = (judged.step - 1) * self.sequences
        inputs, _ = self.data.batch(first, self.sequences)
        return self.state.guard.record(self.out_dir, judged, first, inputs, self.data.tokenizer)

    def log(self, losses: dict[str, float]) -> None:
        """Write the line of metrics.jsonl of the step that was read. losses: of an evaluation after it.

        Raises TrainingError if the run cannot continue.
        """
        step, newest, guard = self.read_step, self.steps[-1], self.state.guard
        if losses and self.budget:
            self.budget.note_evaluation(time.perf_counter() - self.read_at)
        val_loss, max_bad_steps = losses.get("val_loss"), self.cfg.max_bad_steps
        if not guard.can_continue(max_bad_steps, val_loss):
            self._wait_for_checkpoint()
            has_checkpoint = run_folder.exists(self.out_dir) and not self.saver.replace  # of this run
            reason = guard.diagnose(self.state.model, max_bad_steps, val_loss, has_checkpoint)
            raise TrainingError(f"stopped at step {step:,}: {reason}")
        tokens_per_second = self.rate and self.rate * self.tokens
        peak_flops = (self.runtime.peak_flops() or 0.0) * self.group.size
        flops = self.state.model.config.flops_per_token()["total"]
        line = self._metrics_line(
            step,
            losses,
            loss=newest.loss,
            lr=self.schedule.learning_rate_at(step - 1),
            grad_norm=newest.grad_norm,
            tokens_per_second=tokens_per_second,
            mfu=tokens_per_second * flops / peak_flops if tokens_per_second and peak_flops else None,
        )
        self.metrics.log(line, self._remark(losses["val_loss"]) if losses else "")
        self.clock.start(step)
        self.logged_at = time.perf_counter()
        if losses:
            self.replan()  # before the checkpoint, which holds the decision
            self.said_replan = False
        if losses or self.should_save:
            self._wait_for_checkpoint()  # one that failed is not the best, with which this evaluation is compared
            self.best_before = self.state.best_val_loss, self.state.best_step
        if losses:
            if not self.group.gloo:  # several processes agree after the next step
                self.stopped_by = self.signals.stop
            self.signals.ends = "the next step"
            self._count_evaluation(losses)

    def _metrics_line(self, step: int, losses: dict[str, float], **numbers: float | None) -> dict[str, Any]:
        """A line of metrics.jsonl. losses: of an evaluation. numbers: what else is known, by name."""
        return {
            "step": step,
            "tokens": step * self.tokens,
            "loss": None,
            "val_loss": None,
            **losses,
            **{f"epochs/{name}": n for name, n in self.data.epochs(step * self.sequences).items()},
            "lr": None,
            "grad_norm": None,
            "skipped": self.state.guard.skipped,
            "tokens_per_second": None,
            "mfu": None,
            "peak_memory": self.runtime.peak_memory(),
            **numbers,
        }

    def _remark(self, val_loss: float) -> str:
        """How far an evaluation is above the best one, if it is."""
        best, best_step = self.state.best_val_loss, self.state.best_step
        return f" ({val_loss - best:.4f} above the best, of step {best_step:,})" if val_loss > best else ""

    def _count_evaluation(self, losses: dict[str, float]) -> None:
        self.losses, state = losses, self.state
        self.improved = state.note_evaluation(losses["val_loss"])
        self.should_save |= self.finished or self.improved or self.cfg.always_save_checkpoint
        if self.has_risen and self.warned_at != state.best_step:
            self.metrics.say(f"step {state.step:,}: {self.describe_rise()}")
            self.warned_at = state.best_step

    @property
    def has_risen(self) -> bool:
        """Whether two or more evaluations in a row were above the best, and the last one at least 1 % above it."""
        if not self.losses or self.state.evaluations_since_best < 2 or self.rate_was_raised:
            return False
        return self.losses["val_loss"] > 1.01 * self.state.best_val_loss

    @property
    def rate_was_raised(self) -> bool:
        """Whether the best evaluation was at a lower learning rate, before the run was extended."""
        if self.earlier_rate is None or self.state.best_step > self.resumed_at:
            return False
        return self.schedule.learning_rate_at(self.state.step) > self.earlier_rate

    def describe_rise(self) -> str:
        """By how much the validation loss has risen, probably why, and what helps.

        A model that overfits has a training loss below the best validation loss. With a learning rate that is too high,
        both losses rise.
        """
        best, last, best_step = self.state.best_val_loss, self.losses["val_loss"], self.state.best_step
        training_loss = self.steps[-1].loss
        if training_loss < best:
            reason = "the model overfits (more text, more dropout or a smaller model would help)"
        else:
            reason = f"the training loss is {training_loss:.4f}, so the learning rate is probably too high"
        return (
            f"the validation loss has risen by {last - best:.4f} since step {best_step:,}, from {best:.4f} to "
            f"{last:.4f}: {reason}; sample.py takes the best checkpoint, of step {best_step:,}"
        )

    @property
    def should_snapshot(self) -> bool:
        return snapshot_is_due(self.state.step, self.cfg.snapshots, self.schedule)

    def snapshot(self) -> None:
        """Write a snapshot of the weights in the background, before the checkpoint that a later run resumes from."""
        self._wait_for_snapshot()
        weights = self.state.weights(keep=self.group.rank == 0, copy=self.cfg.async_save)
        self.saver.begin_snapshot(self.state.step, weights)
        if not self.cfg.async_save:
            self._wait_for_snapshot()
        self.group.barrier()

    def _wait_for_snapshot(self) -> None:
        """Wait for the snapshot that is being written. One that failed is reported."""
        if failure := self.saver.wait_for_snapshot():
            self.metrics.say(f"the snapshot of {failure}; training continues without it")

    def save(self) -> None:
        """Write a checkpoint; in the background, unless the run ends with it."""
        reason = signal.Signals(self.stopped_by).name if self.stopped_by else "its end" if self.finished else None
        state = {
            **self.record,
            **self.state.progress(),
            "stopped_by": reason,
            "wandb_id": self.metrics.wandb_id,
            "decisions": list(self.schedule.decisions),
            "budget": self.budget and self.budget.state(),
        }
        weights, optimizer = self.state.tensors(keep=self.group.rank == 0, copy=self.cfg.async_save)
        self.saver.begin(self.state.step, weights, optimizer, state)
        if self.finished or not self.cfg.async_save:
            self._wait_for_checkpoint(last=self.finished)
        self.saved_at, self.signals.save = time.perf_counter(), False
        self._continue_together()

    def _wait_for_checkpoint(self, last: bool = False) -> None:
        """Wait for the checkpoint that is being written. One that failed is not the best; training continues unless it
        is the `last`. Raises TrainingError.
        """
        self._wait_for_snapshot()
        failure = self.group.broadcast(self.saver.wait())
        if not failure:
            return
        self.state.best_val_loss, self.state.best_step = self.best_before
        if self.group.broadcast(not self.saver.folder_is_in_place()):
            raise self._moved()
        if last:
            raise TrainingError(f"{failure}; the checkpoints before it are unchanged")
        self.metrics.say(f"{failure}; training continues, and the next save tries again")

    def sample(self) -> None:
        """Add a sample to samples.jsonl after an evaluation. It is optional: it comes last and cannot fail the run."""
        began = time.perf_counter()
        tokens = self.cfg.sample_tokens
        deadline = self.budget.sample_deadline(is_last=False) if self.budget else math.inf
        if self.sample_text and tokens:
            self.metrics.sample(self.state.step, lambda: "".join(until(deadline, self.sample_text(tokens))))
        self._continue_together()
        if self.budget:
            self.budget.note_saving(time.perf_counter() - self.logged_at)
            if self.sample_text and tokens and time.perf_counter() < deadline:
                self.budget.note_sample(tokens, time.perf_counter() - began)
            self.replan()

    def _continue_together(self) -> None:
        self.group.barrier()  # rank 0 may have written or sampled for a long time
        self.clock.start(self.state.step)

    def replan(self, at_least: int = 0) -> None:
        """Under a time budget, recompute max_iters from current timings, the same on every rank.

        at_least: how many steps to run in any case.
        """
        step = self.state.step
        if self.budget is None or step >= self.schedule.max_iters:
            return
        before = self.schedule.max_iters
        fitting, self.evaluate_from = self.group.broadcast(self.budget.plan(step, self.schedule))
        max_iters = max(step + at_least, fitting)
        if max_iters != before and not self.said_replan:
            budget = self.budget
            self.metrics.say(
                f"step {step:,}: the run now has {counted(max_iters, 'step')} instead of {before:,}, "
                f"to fit into {counted(budget.minutes, 'minute')} "
                f"(a step takes {1000 * budget.step_seconds:,.1f} ms, an evaluation {budget.evaluation_seconds:.2g} s)"
            )
            self.said_replan = True
        if max_iters != before:
            self.schedule.decide(step, max_iters)
            self.metrics.lengthen(max_iters)
        self.budget.start_stretch(step)


class SignalHandler:
    """What signals ask of a run, while the block lasts.

    The first SIGINT or SIGTERM asks it to save and stop (`stop` is the signal's number). The second has its usual
    effect, except under torchrun, which forwards a signal that the terminal has sent already, and kills in the end.
    SIGUSR1, on systems that have it, asks it to save and continue (`save`, which the run resets). Outside the main
    thread, where Python allows no signal handlers, nothing is asked.

    A thread prints a line at once: Python calls a handler only when an operation ends, such as a backward pass.
    """

    stop: int = 0
    save: bool = False
    ends: str = "the first step"  # after which the run stops if it is asked to

    def __enter__(self) -> "SignalHandler":
        self.previous = {}
        if threading.current_thread() is threading.main_thread():
            self.received, self.sent = socket.socketpair()
            self.sent.setblocking(False)
            self.previous_descriptor = signal.set_wakeup_fd(self.sent.fileno(), warn_on_full_buffer=False)
            self.announcer = threading.Thread(target=self._announce, daemon=True)
            self.announcer.start()
            for number in (signal.SIGINT, signal.SIGTERM):
                self.previous[number] = signal.signal(number, self.ask_to_stop)
            if hasattr(signal, "SIGUSR1"):
                self.previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self.ask_to_save)
        return self

    def _announce(self) -> None:
        """Print what the first signal does. Each signal arrives as a byte, its number."""
        is_announced = distributed.rank_from_env() > 0
        while signals := self.received.recv(1):
            if signals[0] in (signal.SIGINT, signal.SIGTERM) and not is_announced:
                again = "" if under_torchrun() else "; a second signal stops it at once"
                begin = "\n" if os.isatty(2) else ""  # below the progress bar
                os.write(2, f"{begin}stopping after {self.ends}{again}\n".encode())
                is_announced = True

    def ask_to_stop(self, number: int, frame: Any) -> None:
        self.stop = number
        if under_torchrun():
            return
        for handled in (signal.SIGINT, signal.SIGTERM):
            signal.signal(handled, self.previous[handled])

    def ask_to_save(self, number: int, frame: Any) -> None:
        self.save = True

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        if self.previous:
            signal.set_wakeup_fd(self.previous_descriptor)
            self.sent.shutdown(socket.SHUT_WR)  # ends the thread, even if a forked process has the socket
            self.sent.close()
            self.announcer.join()
            self.received.close()
