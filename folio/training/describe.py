"""What a training run says about its data, its length and its end."""

from typing import Any

from folio.base.number_format import counted
from folio.base.settings import COMMAND_LINE
from folio.data.tokenizer import describe_large_vocabulary, vocabulary_is_large
from folio.data.windows import Mixture
from folio.training.loader import BatchLoader
from folio.training.schedule import Schedule
from folio.training.start import Start
from folio.training.state import TrainState

MANY_EPOCHS = 40  # "Scaling Data-Constrained Language Models" (Muennighoff et al. 2023): more repetition adds nothing


def describe_run(cfg: Any, data: Mixture, schedule: Schedule, loader: BatchLoader) -> list[str]:
    """The data and the length of a run with train.py's settings, and what in it will probably disappoint."""
    max_iters, warmup = schedule.max_iters, schedule.counts.warmup_steps
    lines = [data.described(max_iters * loader.sequences)]
    for name, epochs in data.epochs(max_iters * loader.sequences).items():
        if epochs > MANY_EPOCHS:
            lines.append(
                f"{name} will be read {epochs:,.0f} times: after about {MANY_EPOCHS} times a text has nothing more to "
                f"teach (Muennighoff et al. 2023), and a model begins to memorize it; use more text or fewer steps"
            )
    tokens, is_bpe = data.training_tokens, data.tokenizer.kind in ("gpt2", "bpe")
    if cfg.init_from == "scratch" and is_bpe and vocabulary_is_large(tokens, data.vocab_size):
        lines.append(describe_large_vocabulary(tokens, data.vocab_size))
    if schedule.lr_schedule != "constant" and warmup >= max_iters:
        lines.append(f"warmup_iters={warmup:,}: the run of {max_iters:,} steps ends before its warmup does")
    by_command = [name for name, origin in cfg.origins.items() if origin == COMMAND_LINE]
    if cfg.optimizer == "muon" and "learning_rate" in by_command and "muon_learning_rate" not in by_command:
        lines.append(
            f"learning_rate={cfg.learning_rate:g} is AdamW's, for embeddings, norms and biases; the blocks' matrices "
            f"learn at muon_learning_rate={cfg.muon_learning_rate:g}"
        )
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
    """The learning rate that a resumed run continues with, beside the one that it stopped with."""
    step, before = start.earlier["step"], start.last_learning_rate
    now, end = schedule.learning_rate_at(step), schedule.learning_rate_at(schedule.max_iters - 1)
    line = (
        f"learning rate: {before:.3g} at the last step, {now:.3g} at the next one, {end:.3g} at step "
        f"{schedule.max_iters:,} ({schedule.lr_schedule})"
    )
    if now > 1.5 * before and step > schedule.counts.warmup_steps:
        line += "; it rises, so the loss will rise at first"
    return line


def reason_to_end(cfg: Any, state: TrainState, schedule: Schedule) -> str | None:
    """Why a run with train.py's settings ends after the steps that are done; None if it continues."""
    if state.step >= schedule.max_iters:
        steps = f"{state.step:,} of {schedule.max_iters:,} steps are done"
        if state.step > schedule.max_iters:
            steps = f"{state.step:,} steps are done, more than max_iters={schedule.max_iters:,}"
        return f"the time budget of {counted(cfg.minutes, 'minute')} is used up, {steps}" if cfg.minutes else steps
    if state.is_out_of(cfg.patience):
        return (
            f"the validation loss did not improve in {counted(state.evaluations_since_best, 'evaluation')} "
            f"(patience={cfg.patience})"
        )
    return None


def format_losses(losses: dict[str, float]) -> str:
    """The losses of several data sets, for printing after their mean; empty for a single one."""
    by_name = [f"{key.removeprefix('val_loss/')} {loss:.4f}" for key, loss in losses.items() if key != "val_loss"]
    return f" ({', '.join(by_name)})" if by_name else ""
