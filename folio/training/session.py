"""Everything around the training steps: metrics, checkpoints, snapshots, samples, signals, and the time budget."""

import math
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

from folio import UserError
from folio.base.number_format import counted
from folio.base.progress import note
from folio.base.terminal import say
from folio.checkpoints import run_folder
from folio.checkpoints.checkpoint import Checkpoint, NullSaver, Saver, load_before
from folio.checkpoints.schema import PartRecord, measured_since
from folio.checkpoints.snapshots import remove_snapshots
from folio.machine.distributed import SharedFlags
from folio.machine.runtime import describe_compilation
from folio.training.describe import format_losses, reason_to_end
from folio.training.guard import JudgedStep
from folio.training.out_dir import cannot_write, remove_race, repair
from folio.training.planning.budget import FINAL_SAMPLE_TOKENS, Pacer, take_until
from folio.training.planning.run_plan import Plan
from folio.training.reference import find_reference
from folio.training.rollback import MAX_ROLLBACKS, new_part
from folio.training.run_log import Metrics, NullMetrics, StepReader, add_lost_sample
from folio.training.schedule import snapshot_is_due
from folio.training.signals import SignalHandler
from folio.training.state import TrainState, state_file


class TrainingError(UserError):
    """A run that cannot continue, though its settings are valid."""

    exit_code = 1


class Due(NamedTuple):
    """The actions that follow a step."""

    evaluate: bool = False
    log: bool = False
    snapshot: bool = False
    save: bool = False


class Session:
    """Everything around the training steps. Runs on every rank, but only rank 0 writes files.

        session = Session(...)
        session.repair()
        with session:  # opens the files
            session.log_start(losses)  # of an evaluation before the first step of a new run
            while not session.finished:
                train_step(...)
                due = session.end_step()
                if due.evaluate:
                    due = session.end_evaluation(evaluate(...), due)
                session.log(losses), session.snapshot(), session.save()  # each if it is due
                session.sample()  # after an evaluation

    The save follows the log and the snapshot, because a run that is killed and resumed does not repeat what came before
    it. Otherwise the order does not matter; a resumed run adds a sample that was lost.

    sample: a function that generates a number of tokens of text; None: no samples.
    """

    def __init__(self, plan: Plan, state: TrainState, sample: Callable[[int], Iterator[str]] | None):
        self.plan, self.state, self.schedule, self.record = plan, state, plan.schedule, plan.record
        self.cfg, self.data, self.runtime, self.out_dir = plan.settings, plan.data, plan.runtime, plan.out_dir
        self.group, self.sample_text = plan.runtime.group, sample
        self.evaluations, self.reader = state.evaluations, StepReader(state.guard)
        self.signals, self.requests = SignalHandler(), SharedFlags(self.group)
        # A higher learning rate than at the end of the run so far lets the loss rise at first.
        self.last_learning_rates = plan.saved.learning_rates if plan.saved else None
        if self.record["parts"][-1]["changes"] and self.rate_was_raised:
            self.evaluations.recent = []
        self.reference = find_reference(self.record["config"], type(self.cfg), self.data.hash)
        self.warned_at = 0  # the best step for which a rise of the validation loss was reported
        self.stopped_by = 0  # the signal that ends the run
        self.will_describe_compilation = bool(self.runtime.compile)  # after the first step
        # The best loss and its step, in the last checkpoint and in the one that is being written.
        self.saved_best = self.pending_best = self._best
        self.last_save = time.perf_counter()

    @property
    def _best(self) -> tuple[float, int]:
        return self.evaluations.best_val_loss, self.evaluations.best_step

    def repair(self) -> None:
        """Finish what a killed run left unfinished, and add its last sample if it is missing. Raises UserError."""
        self.group.barrier()  # every rank has read the checkpoint before anything in out_dir changes
        if self.group.rank:
            return
        repair(self.out_dir, self.plan.resumes)
        tokens = self.cfg.sample_tokens
        if self.plan.resumes and self.sample_text and tokens:
            add_lost_sample(self.out_dir, self.state.step, lambda: "".join(self.sample_text(tokens)))

    def _open_writers(self) -> tuple[Metrics, Saver]:
        if self.group.rank:
            return NullMetrics(), NullSaver()
        replaces = self.cfg.overwrite and not self.plan.resumes
        try:
            if replaces:
                shutil.rmtree(self.out_dir / "skipped", ignore_errors=True)
            step = self.state.step if self.plan.resumes else None
            remove_snapshots(self.out_dir, step)
            wandb_id, config = self.plan.saved_state.get("wandb_id"), self.record["config"]
            rollbacks = self.record["parts"][-1].get("rollbacks", 0)
            since = measured_since(self.record["parts"])
            metrics = Metrics(self.out_dir, step, self.schedule.max_iters, config, wandb_id, rollbacks, since)
        except OSError as error:
            raise cannot_write(self.out_dir, error) from None
        return metrics, Saver(self.out_dir, self.data.tokenizer, self.cfg.keep_last, replaces)

    def __enter__(self) -> "Session":
        self.metrics, self.saver = self._open_writers()
        self.pacer = Pacer(self.plan.budget, self.schedule, self.group, self.metrics)
        self.plan.budget.begin_evaluation()  # before the first step
        with ExitStack() as stack:
            for context in (self.metrics, self.saver, self.signals):
                stack.enter_context(context)
            if self.plan.resumes:
                self.pacer.replan(self.state.step, min_steps=1)  # the last step is always evaluated and saved
            self.stack = stack.pop_all()  # closed by __exit__
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception) and self.group.gloo:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            where = f"rank {self.group.rank} of {self.group.size}, step {self.state.step:,}"
            note(f"{where}: {lines[0]}")
        self.stack.__exit__(kind, error, traceback)

    @property
    def reason_to_end(self) -> str | None:
        """Why the run ends now, without a signal; None if it continues."""
        return reason_to_end(self.cfg, self.state, self.schedule)

    @property
    def finished(self) -> bool:
        return self.stopped_by != 0 or self.reason_to_end is not None

    @property
    def rate_was_raised(self) -> bool:
        """Whether the best evaluation was at a lower learning rate, AdamW's or Muon's, before the run was extended."""
        if self.last_learning_rates is None or self.evaluations.best_step > self.plan.step:
            return False
        return self.schedule.learning_rates_at(self.state.step).exceed(self.last_learning_rates)

    @property
    def loss_has_risen(self) -> bool:
        """Whether the validation loss has risen, though the learning rate was not raised."""
        return self.evaluations.has_risen and not self.rate_was_raised

    # --- steps --------------------------------------------------------------------------------------------------------

    @property
    def evaluates_first(self) -> bool:
        """Whether an evaluation precedes the first step of a new run."""
        return self.plan.budget.evaluates_first and not self.plan.head_start

    def log_start(self, losses: dict[str, float]) -> None:
        """Log the validation losses before the first step as step 0 of metrics.jsonl, and take the first snapshot.

        losses: empty if there was no time for an evaluation. A run that begins with the winner of a race logs its turns
        instead, and saves it.
        """
        if losses:
            vocab_size = self.data.tokenizer.vocab_size
            remark = f" (uniform baseline: {math.log(vocab_size):.4f})"
            self.metrics.log(self._metrics_line(0, losses), remark)
        if losses and not self.runtime.compile:  # compiling would distort the measurement
            self.plan.budget.end_evaluation()
        if self.plan.head_start:
            self._log_race(self.plan.head_start.path.parent.name)
        if self.cfg.snapshots and (self.plan.head_start or snapshot_is_due(0, self.cfg.snapshots, self.schedule)):
            self.snapshot()
        self.pacer.replan(self.state.step, min_steps=1)
        if self.plan.head_start:
            self.save(is_required=True)
            remove_race(self.out_dir)
        elif self.cfg.on_divergence == "rollback":
            self.save()  # to roll back to

    def _log_race(self, winner: str) -> None:
        """Log the turns of a race's winner, with which the run begins."""
        for turn in self.record["parts"][-1]["race"]:
            if turn["model"] == winner:
                step, speed = turn["step"], self.cfg.step_tokens / turn["step_seconds"]
                lr = self.schedule.learning_rate_at(step - 1)
                self.metrics.log(self._metrics_line(step, {}, loss=turn["loss"], lr=lr, tokens_per_second=speed))
        self.metrics.advance(self.state.step)

    def end_step(self) -> Due:
        """Read the step's numbers, and return the actions that follow it, the same on every rank.

        On an asynchronous device, a step without an evaluation or a save is logged here, one step later. Raises
        TrainingError if the run cannot continue.
        """
        step = self.state.step
        self.metrics.advance()
        if self.will_describe_compilation:
            self.metrics.say(describe_compilation())
            self.will_describe_compilation = False
        # A GPU works through a queue of steps, and reading a loss waits until its step is done. If that happened at
        # once, the GPU would be idle until the CPU has queued the next step. So a logged step is read one step later.
        if self.reader.sent:
            self._read_step()
            if self._rolls_back({}):
                return Due()
            self.log({})
        if not self.runtime.is_asynchronous:
            self.plan.budget.mark(step)
        minutes = (time.perf_counter() - self.last_save) / 60
        save = self.signals.save or minutes >= (self.cfg.save_interval_minutes or math.inf)
        moved = not self.saver.folder_is_in_place()
        requests = self.signals.stop, save, self.plan.budget.is_late, moved
        self.stopped_by, save, is_late, moved = self.requests.agree(*requests)  # every step, for signals
        if moved:
            raise self._moved_error()
        if is_late and not self.pacer.evaluates(step):
            self.pacer.replan(step)
        evaluate, save = self.pacer.evaluates(step), bool(self.stopped_by or save)
        self.signals.stops_after = "this evaluation" if evaluate else "this step"
        log = evaluate or save or step % self.cfg.log_interval == 0 or step == 1
        if log:
            self.reader.send(step)
        if self.runtime.is_asynchronous and not evaluate and not save:
            log = False
        if log:
            self._read_step()
            if not evaluate and self._rolls_back({}):
                return Due()
            self.plan.budget.begin_evaluation()
        return Due(evaluate, log, snapshot_is_due(step, self.cfg.snapshots, self.schedule), save)

    def _read_step(self) -> None:
        """Wait for the numbers of the step that was sent, and report steps since the last one that changed nothing."""
        for judged in self.reader.read():
            if judged.skipped:
                self.metrics.say(self._write_skipped(judged))
            if judged.loss is None:
                self.metrics.say(f"step {judged.step:,} has no targets, so it has no loss and changed no weights")
        self.plan.budget.mark(self.reader.step)

    def _write_skipped(self, judged: JudgedStep) -> str:
        """Write the batch of a skipped step to skipped/. Returns a line about it."""
        if self.group.rank:
            return ""
        sequences = self.plan.batch.sequences
        first = (judged.step - 1) * sequences + self._skipped_sequences
        inputs, _ = self.data.batch(first, sequences)
        return self.state.guard.write_skipped(self.out_dir, judged, first, inputs, self.data.tokenizer)

    @property
    def _skipped_sequences(self) -> int:
        """The sequences before the next step that rollbacks have skipped."""
        return self.state.next_sequence - self.state.step * self.plan.batch.sequences

    def _rolls_back(self, losses: dict[str, float]) -> bool:
        """Whether the run has diverged, and has therefore been rolled back. Raises TrainingError if it cannot be.

        A run diverges if too many steps in a row are bad, or if the validation loss is not finite or, with
        on_divergence="rollback", has risen. losses: of an evaluation after the step that was read, or empty.
        """
        guard, max_bad_steps, val_loss = self.state.guard, self.cfg.max_bad_steps, losses.get("val_loss")
        may_roll_back = self.cfg.on_divergence == "rollback"
        has_diverged = may_roll_back and self.evaluations.has_diverged(val_loss, guard.last_loss)
        if guard.can_continue(max_bad_steps, val_loss) and not has_diverged:
            return False
        self._wait_for_checkpoint()
        has_checkpoint = run_folder.exists(self.out_dir) and not self.saver.replace  # of this run
        reason, remedy = guard.diagnose(self.state.model, max_bad_steps, val_loss, self.evaluations, has_checkpoint)
        part, saved = self.record["parts"][-1], None
        if may_roll_back and has_checkpoint and part.get("rollbacks", 0) < MAX_ROLLBACKS:
            saved = load_before(self.out_dir, 1 + (self.evaluations.last_step if losses else self.reader.step))
        if saved is None:
            intact = ", and the last checkpoint is intact" if has_checkpoint else ""
            what = f"{reason}; this step was not saved{intact}; {remedy}"
            raise TrainingError(f"stopped at step {self.reader.step:,}: {what}")
        self.log(losses)
        new = new_part(type(self.cfg), part, saved, self.state.next_sequence, self.record["config"])
        self._roll_back(saved, new, reason)
        return True

    def _roll_back(self, saved: Checkpoint, part: PartRecord, reason: str) -> None:
        """Continue from a checkpoint of this run, with the sequences and the learning rates of a new part.

        Raises TrainingError if it cannot be written. The run then resumes from before the rollback, which is repeated.
        """
        step, (begin, end) = saved.state["step"], part["skipped_sequences"]
        if failure := self.group.broadcast(self._abandon_after(step, part["rollbacks"])):
            raise TrainingError(
                f"stopped at step {self.reader.step:,}: {reason}; the rollback to step {step:,} cannot be written "
                f"({failure}); make space in {self.out_dir}, and resume"
            )
        self.metrics.say(
            f"step {self.reader.step:,}: {reason}; rollback {part['rollbacks']} of {MAX_ROLLBACKS} to step {step:,}: "
            f"skipping sequences {begin:,} to {end - 1:,}, and learning rates times {part['lr_factor']:g}"
        )
        self.state.restore(saved)
        self.state.next_sequence = end
        self.record["parts"] = [*saved.state["parts"], part]
        self.schedule.lr_factor = part["lr_factor"]
        if self.cfg.minutes:
            decisions, config = saved.state["parts"][-1]["decisions"], saved.state["config"]
            if any(config[name] != self.record["config"][name] for name in ("minutes", "max_iters")):
                decisions = [(0, self.schedule.counts.max_iters)]  # the minutes were added after this checkpoint
            self.schedule.decisions = [tuple(decision) for decision in decisions]
        self.reader, self.last_learning_rates, self.warned_at = StepReader(self.state.guard), None, 0
        self.saved_best = self.pending_best = self._best
        self.metrics.roll_back(step, self.schedule.max_iters)
        self.pacer.replan(step, min_steps=1)
        self.save(is_required=True)

    def _abandon_after(self, step: int, rollbacks: int) -> str | None:
        """Mark the lines that were logged after a step as abandoned, and remove the snapshots after it.

        Returns the reason of a failure, or None.
        """
        if self.group.rank:
            return None
        try:
            self.metrics.abandon_after(step, rollbacks)
            remove_snapshots(self.out_dir, step)
        except OSError as error:
            return str(error)
        return None

    def _moved_error(self) -> TrainingError:
        """The error for a run whose folder was moved or removed: another run may write to the same path."""
        new_path = self.group.broadcast(self.saver.current_folder())
        consequence = f"so the run stops after step {self.state.step:,}"
        if new_path is None:
            return TrainingError(f"out_dir={self.out_dir} was removed, {consequence}")
        remedy = f"resume it there with {shlex.join(['--init_from=resume', f'--out_dir={new_path}'])}"
        return TrainingError(f"out_dir={self.out_dir} was moved to {new_path}, {consequence}; {remedy}")

    def end_evaluation(self, losses: dict[str, float], due: Due) -> Due:
        """Take note of an evaluation. Returns the actions that follow it: the best and the last evaluation are saved.

        No action follows if the run is rolled back. Raises TrainingError if it cannot continue.
        """
        if self._rolls_back(losses):
            return Due()
        self.plan.budget.end_evaluation()
        self.pacer.replan(self.state.step)
        self._wait_for_checkpoint()  # if it failed, it is not the best, to which this evaluation is compared
        if not self.group.gloo:  # several processes agree after the next step
            self.stopped_by = self.signals.stop
        self.signals.stops_after = "the next step"
        improved = self.evaluations.add(losses, self.state.step, self.state.guard.last_loss)
        self.reader.restart()
        return due._replace(save=due.save or self.finished or improved or self.cfg.always_save_checkpoint)

    # --- output -------------------------------------------------------------------------------------------------------

    def log(self, losses: dict[str, float]) -> None:
        """Write a line of metrics.jsonl for the step that was read, with the losses of an evaluation after it."""
        step, newest, rate = self.reader.step, self.reader.steps[-1], self.reader.rate
        tokens_per_second = rate and rate * self.cfg.step_tokens
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
        self.metrics.log(line, self.evaluations.remark(losses["val_loss"]) if losses else "")
        for warning in (self._warn_of_rise(), self._compare(step, losses["val_loss"])) if losses else ():
            if warning:
                self.metrics.say(f"step {step:,}: {warning}")

    def _warn_of_rise(self) -> str | None:
        """A warning about a rise of the validation loss, once for each best step."""
        if not self.loss_has_risen or self.warned_at == self.evaluations.best_step:
            return None
        self.warned_at = self.evaluations.best_step
        return self.evaluations.describe_rise()

    def _compare(self, step: int, val_loss: float) -> str | None:
        """A line about the first loss that is far from those of the same recipe, or None."""
        remark = self.reference and self.reference.remark(step, val_loss)
        if remark:
            self.reference = None
        return remark

    def _metrics_line(self, step: int, losses: dict[str, float], **numbers: float | None) -> dict[str, Any]:
        """A line of metrics.jsonl. losses: those of an evaluation. numbers: other known values, by name."""
        sequences = step * self.plan.batch.sequences + self._skipped_sequences
        return {
            "step": step,
            "tokens": step * self.cfg.step_tokens,
            "loss": None,
            "val_loss": None,
            **losses,
            **{f"epochs/{name}": n for name, n in self.data.epochs(sequences).items()},
            "lr": None,
            "grad_norm": None,
            "skipped": self.state.guard.skipped,
            "tokens_per_second": None,
            "mfu": None,
            "peak_memory": self.runtime.peak_memory(),
            **numbers,
        }

    def snapshot(self) -> None:
        """Write a snapshot of the weights in the background."""
        self._wait_for_snapshot()
        weights = self.state.weights(keep=self.group.rank == 0, copy=self.cfg.async_save)
        self.saver.begin_snapshot(self.state.step, weights)
        if not self.cfg.async_save:
            self._wait_for_snapshot()
        self.group.barrier()

    def _wait_for_snapshot(self) -> None:
        """Wait for the snapshot that is being written, and report a failure."""
        if failure := self.saver.wait("snapshot"):
            self.metrics.say(f"the snapshot of {failure}; training continues without it")

    def save(self, is_required: bool = False) -> None:
        """Write a checkpoint, in the background unless it is the last one or required.

        Training continues if it cannot be written, unless it is the last one or required: then raises TrainingError.
        """
        self._wait_for_checkpoint()
        self.pending_best = self._best
        reason = signal.Signals(self.stopped_by).name if self.stopped_by else "its end" if self.finished else None
        budget, wandb_id = self.plan.budget.state(), self.metrics.wandb_id
        state = state_file(self.record, self.state, self.schedule, budget, reason, wandb_id)
        weights, optimizer = self.state.tensors(keep=self.group.rank == 0, copy=self.cfg.async_save)
        self.saver.begin(self.state.step, weights, optimizer, state)
        is_required = is_required or self.finished
        if is_required or not self.cfg.async_save:
            self._wait_for_checkpoint(is_required)
        self.last_save, self.signals.save = time.perf_counter(), False
        self._barrier()

    def _wait_for_checkpoint(self, is_required: bool = False) -> None:
        """Wait for the checkpoint that is being written. If it failed, it does not count as the best one, and, if it is
        required, raises TrainingError.
        """
        self._wait_for_snapshot()
        failure = self.group.broadcast(self.saver.wait("checkpoint"))
        if not failure:
            self.saved_best = self.pending_best
            return
        self.evaluations.best_val_loss, self.evaluations.best_step = self.pending_best = self.saved_best
        if self.group.broadcast(not self.saver.folder_is_in_place()):
            raise self._moved_error()
        if is_required:
            raise TrainingError(f"{failure}; the checkpoints before it are unchanged")
        self.metrics.say(f"{failure}; training continues, and the next save tries again")

    def sample(self) -> None:
        """Add a sample to samples.jsonl after an evaluation. A failure does not end the run."""
        tokens, deadline = self.cfg.sample_tokens, self.plan.budget.sample_deadline(is_last=False)
        self.plan.budget.begin_sample()
        if self.sample_text and tokens:
            self.metrics.sample(self.state.step, lambda: self._timed_sample(tokens, deadline))
        self._barrier()
        is_complete = self.sample_text and tokens and time.perf_counter() < deadline
        self.plan.budget.end_sample(tokens if is_complete else 0)
        self.pacer.replan(self.state.step, min_steps=1)  # this step was not saved as the last one

    def _timed_sample(self, tokens: int, deadline: float) -> str:
        pieces = take_until(deadline, self.sample_text(tokens))
        first = next(pieces, "")
        self.plan.budget.begin_sample()
        return first + "".join(pieces)

    def print_summary(self) -> None:
        """Print how the run ended, its losses, and a sample of the trained model."""
        state, evaluations = self.state, self.evaluations
        if state.guard.without_targets:
            say(f"{counted(state.guard.without_targets, 'step')} had no targets, and changed no weights")
        if self.stopped_by:
            say(f"stopped by {signal.Signals(self.stopped_by).name} and saved after step {state.step:,}")
            return
        say(f"finished: {self.reason_to_end}")
        epochs = ", ".join(f"{n:,.2f} epochs of {name}" for name, n in self.data.epochs(state.next_sequence).items())
        say(f"trained for {epochs}{format_losses(evaluations.losses)}")
        say(f"best validation loss {evaluations.best_val_loss:.4f}, at step {evaluations.best_step:,}")
        if self.loss_has_risen:
            say(evaluations.describe_rise())
        self.print_sample()

    def print_sample(self) -> None:
        """Print a sample of the trained model, within the time budget. A failure is not an error: the run is saved."""
        if not (self.sample_text and self.cfg.sample_tokens) or self.group.rank:
            return
        deadline = self.plan.budget.sample_deadline(is_last=True)
        heading = f"sample from the model at step {self.state.step:,}"
        if self.evaluations.best_step != self.state.step:
            heading += f" (sample.py takes the best checkpoint, of step {self.evaluations.best_step:,})"
        say(f"{heading}:\n")
        try:
            for piece in take_until(deadline, self.sample_text(FINAL_SAMPLE_TOKENS)):
                print(piece, end="", flush=True)
            print("\n")
        except Exception as error:
            say(f"no sample ({type(error).__name__}: {error})")

    def _barrier(self) -> None:
        self.group.barrier()  # rank 0 may have spent a long time writing or sampling
        self.reader.restart()
