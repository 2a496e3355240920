"""The lines that a training run prints about its data, its length, its losses and its end."""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from folio.base.number_format import counted
from folio.data.shards import MIN_DOCUMENTS, Dataset, count_documents, describe_few_documents, pair_lengths
from folio.data.tokenizer import describe_large_vocabulary, vocabulary_is_large
from folio.data.windows import TrainingWindows
from folio.machine import distributed
from folio.training.guard import MIN_STEPS
from folio.training.planning.choice import MAX_EPOCHS
from folio.training.planning.resume import SavedRun
from folio.training.planning.run_plan import Plan
from folio.training.planning.train_settings import TrainSettings
from folio.training.schedule import Schedule
from folio.training.state import TrainState


def describe_run(plan: Plan) -> list[str]:
    """Describe the data and the length of a run, and warn about what is unusual."""
    cfg, data, schedule = plan.settings, plan.data, plan.schedule
    max_iters, warmup = schedule.max_iters, schedule.counts.warmup_iters
    sequences = max_iters * plan.batch.sequences
    lines = [data.describe(sequences)]
    for name, epochs in data.epochs(sequences).items():
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
    if cfg.skip_spikes is not None and max_iters <= MIN_STEPS:
        reason = f"spikes are detected after {MIN_STEPS} steps"
        lines.append(f"settings without effect: skip_spikes={cfg.skip_spikes} ({reason})")
    return lines


def describe_resumed_schedule(saved: SavedRun, schedule: Schedule) -> str:
    """Describe the learning rates before and after a run is resumed."""
    step, max_iters = saved.step, schedule.max_iters
    last, next_, final = saved.learning_rates, *map(schedule.learning_rates_at, (step, max_iters - 1))
    line = f"learning rate: {describe_rates(last[0], next_[0], final[0], max_iters)}"
    if schedule.muon_learning_rate:
        line += f"; Muon's: {describe_rates(last[1], next_[1], final[1], max_iters)}"
    line += f" ({schedule.lr_schedule})"
    if next_.exceed(last, 1.5) and step > schedule.counts.warmup_iters:
        line += "; it increases, so the loss will increase at first"
    if schedule.lr_factor != 1:
        # The command line may repeat the rate that the run was started with, or set that of one optimizer only, so the
        # factor, without which the run would diverge again, stays even if a rate is set. The line gives what follows.
        peaks = {"learning_rate": schedule.learning_rate, "muon_learning_rate": schedule.muon_learning_rate}
        lowered = [f"{name}={peak:g} is {schedule.lr_factor * peak:g}" for name, peak in peaks.items() if peak]
        line += f"; rollbacks multiply learning rates by {schedule.lr_factor:g} ({', '.join(lowered)})"
    return line


def describe_rates(last: float, next_: float, final: float, max_iters: int) -> str:
    return f"{last:.3g} at the last step, {next_:.3g} at the next one, {final:.3g} at step {max_iters:,}"


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


def reason_to_end(cfg: TrainSettings, state: TrainState, schedule: Schedule) -> str | None:
    """The reason why a run ends now; None if it continues."""
    if state.step >= schedule.max_iters:
        steps = f"{state.step:,} of {counted(schedule.max_iters, 'step')}"
        if state.step > schedule.max_iters:
            steps = f"{counted(state.step, 'step is', 'steps are')} done, more than max_iters={schedule.max_iters:,}"
        return f"{steps} (minutes={cfg.minutes:g})" if cfg.minutes else steps
    if state.evaluations.is_out_of(cfg.patience):
        return (
            f"the validation loss did not improve in {counted(state.evaluations.since_best, 'evaluation')} "
            f"(patience={cfg.patience})"
        )
    return None


def format_losses(losses: dict[str, float]) -> str:
    """Format the losses of several data sets, to print after their mean; empty for a single data set."""
    by_name = [f"{key.removeprefix('val_loss/')} {loss:.4f}" for key, loss in losses.items() if key != "val_loss"]
    return f" ({', '.join(by_name)})" if by_name else ""


def next_commands(cfg: TrainSettings, step: int, max_iters: int, out_of_patience: bool) -> list[str]:
    """The commands that sample from a run, and continue it. All other settings are in its checkpoint."""
    sample = ["python", str(Path(sys.argv[0]).with_name("sample.py")), f"--out_dir={cfg.out_dir}"]
    resume = [*distributed.launch_command(), sys.argv[0], "--init_from=resume", f"--out_dir={cfg.out_dir}"]
    if step >= max_iters:
        resume.append(f"--max_iters={2 * step}")
    if out_of_patience:
        resume.append("--patience=None")
    return [f"sample:   {shlex.join(sample)}", f"continue: {shlex.join(resume)}"]
