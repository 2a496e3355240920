"""The lines that a training run prints about its data, its length, its losses and its end."""

import shlex
import sys
from collections.abc import Iterator
from typing import Any

from folio.base.number_format import counted
from folio.base.settings import COMMAND_LINE
from folio.data.shards import MIN_DOCUMENTS, Dataset, count_documents, describe_few_documents, pair_lengths
from folio.data.tokenizer import describe_large_vocabulary, vocabulary_is_large
from folio.data.windows import Mixture, TrainingWindows
from folio.machine import distributed
from folio.training.loader import BatchLoader
from folio.training.planning.choice import MAX_EPOCHS
from folio.training.rules import unused_settings
from folio.training.schedule import Schedule
from folio.training.start import Start
from folio.training.state import TrainState


def describe_run(cfg: Any, data: Mixture, schedule: Schedule, loader: BatchLoader) -> list[str]:
    """Describe the data and the length of a run with train.py's settings, and warn about questionable settings."""
    max_iters, warmup = schedule.max_iters, schedule.counts.warmup_steps
    lines = [data.describe(max_iters * loader.sequences)]
    for name, epochs in data.epochs(max_iters * loader.sequences).items():
        if epochs > MAX_EPOCHS:
            lines.append(
                f"{name} will be repeated for {epochs:,.0f} epochs: after about {MAX_EPOCHS}, repetition no longer "
                f"lowers the loss (Muennighoff et al. 2023), and the model memorizes; use more text or fewer steps"
            )
    for (dataset, _), windows in zip(data.datasets, data.training, strict=True):
        lines += describe_unfit_pairs(dataset, windows, data.tokenizer.eot)
        documents = count_documents(dataset.val, data.tokenizer.eot)
        if 0 < documents < MIN_DOCUMENTS:
            few = describe_few_documents(documents, sum(map(len, dataset.val)), windows.masked)
            lines.append(f"{dataset.folder.name}: {few}")
    tokens, is_bpe = data.training_tokens, data.tokenizer.kind in ("gpt2", "bpe")
    if cfg.init_from == "scratch" and is_bpe and vocabulary_is_large(tokens, data.vocab_size):
        lines.append(describe_large_vocabulary(tokens, data.vocab_size))
    if warmup >= max_iters:
        lines.append(f"warmup_iters={warmup:,}: the run of {counted(max_iters, 'step')} ends before its warmup does")
    by_command = [name for name, origin in cfg.origins.items() if origin == COMMAND_LINE]
    if cfg.optimizer == "muon" and "learning_rate" in by_command and "muon_learning_rate" not in by_command:
        lines.append(
            f"learning_rate={cfg.learning_rate:g} is AdamW's, for embeddings, norms and biases; the blocks' matrices "
            f"use muon_learning_rate={cfg.muon_learning_rate:g}"
        )
    if unused := unused_settings(cfg, schedule, loader.runtime):
        described = [f"{name}={getattr(cfg, name)} ({reason})" for name, reason in unused.items()]
        lines.append(f"settings without effect: {', '.join(described)}")
    step = (
        f"per step: {counted(cfg.batch_size, 'sequence')} x {counted(cfg.block_size, 'token')} x "
        f"{counted(cfg.accumulation, 'micro-batch', 'micro-batches')} = {counted(cfg.step_tokens, 'token')}"
    )
    if cfg.total_batch_tokens not in (None, cfg.step_tokens):
        step += f" (the nearest to total_batch_tokens={cfg.total_batch_tokens:,})"
    if loader.runtime.group.size > 1:
        step += f"; each process computes {loader.count} x {loader.rows} of the sequences"
    return [*lines, step]


def describe_resumed_schedule(start: Start, schedule: Schedule) -> str:
    """Describe the learning rate before and after a run is resumed."""
    step, last = start.saved_state["step"], start.last_learning_rate
    next_, final = schedule.learning_rate_at(step), schedule.learning_rate_at(schedule.max_iters - 1)
    line = (
        f"learning rate: {last:.3g} at the last step, {next_:.3g} at the next one, {final:.3g} at step "
        f"{schedule.max_iters:,} ({schedule.lr_schedule})"
    )
    if next_ > 1.5 * last and step > schedule.counts.warmup_steps:
        line += "; it increases, so the loss will increase at first"
    return line


def describe_unfit_pairs(dataset: Dataset, windows: TrainingWindows, eot: int | None) -> Iterator[str]:
    """Describe the pairs that do not fit into a window, and the windows that have no targets."""
    name, T, lengths = dataset.folder.name, windows.block_size, pair_lengths(dataset.train, eot)
    if unfit := int((lengths > T + 1).sum()):  # a window has T inputs and T targets, T + 1 tokens
        pair, prompts = ("turn", "messages") if dataset.prompt_format == "chat" else ("pair", "prompts")
        yield (
            f"{name}: {unfit:,} of {counted(len(lengths), pair)} {'is' if unfit == 1 else 'are'} longer than "
            f"block_size={T}, so that answers do not see all of their {prompts}; set --block_size={lengths.max() - 1}, "
            f"which fits the longest, or shorten them"
        )
    if windows.without_targets:
        starts = windows.without_targets + windows.useful
        yield f"{name}: {windows.without_targets:,} of {starts:,} possible windows have no targets, and are not used"


def reason_to_end(cfg: Any, state: TrainState, schedule: Schedule) -> str | None:
    """The reason why a run with train.py's settings ends now; None if it continues."""
    if state.step >= schedule.max_iters:
        steps = f"{state.step:,} of {counted(schedule.max_iters, 'step')}"
        if state.step > schedule.max_iters:
            steps = f"{counted(state.step, 'step is', 'steps are')} done, more than max_iters={schedule.max_iters:,}"
        return f"{steps} (minutes={cfg.minutes:g})" if cfg.minutes else steps
    if state.is_out_of(cfg.patience):
        return (
            f"the validation loss did not improve in {counted(state.evaluations_since_best, 'evaluation')} "
            f"(patience={cfg.patience})"
        )
    return None


def format_losses(losses: dict[str, float]) -> str:
    """Format the losses of several data sets, to print after their mean; empty for a single data set."""
    by_name = [f"{key.removeprefix('val_loss/')} {loss:.4f}" for key, loss in losses.items() if key != "val_loss"]
    return f" ({', '.join(by_name)})" if by_name else ""


def continue_command(cfg: Any, step: int, max_iters: int, out_of_patience: bool) -> str:
    """The command that continues a run. All other settings are in its checkpoint."""
    options = ["--init_from=resume", f"--out_dir={cfg.out_dir}"]
    if step >= max_iters:
        options.append(f"--max_iters={2 * step}")
    if out_of_patience:
        options.append("--patience=None")
    return shlex.join([*distributed.launch_command(), sys.argv[0], *options])


class OverfittingWatch:
    """Detects a rise of the validation loss.

    last_learning_rate: that of the last step before the run was resumed; None for a new one.
    """

    def __init__(self, state: TrainState, schedule: Schedule, last_learning_rate: float | None):
        self.state, self.schedule, self.last_learning_rate = state, schedule, last_learning_rate
        self.resumed_at = state.step
        self.losses: dict[str, float] = {}  # of the last evaluation
        self.training_loss: float | None = None  # at the last evaluation; None: no recent step had targets
        self.warned_at = 0  # the best step for which a rise was reported

    def record_evaluation(self, losses: dict[str, float], training_loss: float | None) -> None:
        self.losses, self.training_loss = losses, training_loss

    def remark(self, val_loss: float) -> str:
        """A remark on an evaluation that is worse than the best one; otherwise empty."""
        best, best_step = self.state.best_val_loss, self.state.best_step
        return f" ({val_loss - best:.4f} above the best, of step {best_step:,})" if val_loss > best else ""

    def warning(self) -> str | None:
        """A warning about a rise, once for each best step."""
        if not self.has_risen or self.warned_at == self.state.best_step:
            return None
        self.warned_at = self.state.best_step
        return self.describe()

    @property
    def has_risen(self) -> bool:
        """Whether two or more evaluations in a row were above the best, and the last one at least 1 % above it."""
        if not self.losses or self.state.evaluations_since_best < 2 or self.rate_was_raised:
            return False
        return self.losses["val_loss"] > 1.01 * self.state.best_val_loss

    @property
    def rate_was_raised(self) -> bool:
        """Whether the best evaluation was at a lower learning rate, before the run was extended."""
        if self.last_learning_rate is None or self.state.best_step > self.resumed_at:
            return False
        return self.schedule.learning_rate_at(self.state.step) > self.last_learning_rate

    def describe(self) -> str:
        """Describe the rise of the validation loss, its probable cause, and what helps.

        If the model overfits, the training loss is below the best validation loss. If the learning rate is too high,
        both losses rise.
        """
        best, last, best_step = self.state.best_val_loss, self.losses["val_loss"], self.state.best_step
        if self.training_loss is None:
            reason = "the last steps had no targets"
        elif self.training_loss < best:
            reason = "the model overfits (more text, more dropout or a smaller model would help)"
        else:
            reason = f"the training loss is {self.training_loss:.4f}, so the learning rate is probably too high"
        return (
            f"the validation loss has risen by {last - best:.4f} since step {best_step:,}, from {best:.4f} to "
            f"{last:.4f}: {reason}; sample.py takes the best checkpoint, of step {best_step:,}"
        )
