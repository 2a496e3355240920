"""--size=auto: the model that is expected to reach the lowest loss on the data in the minutes of a run."""

import time
from collections.abc import Callable
from dataclasses import replace

from folio import UserError
from folio.base.number_format import counted, format_tokens
from folio.base.settings import COMMAND_LINE
from folio.data.find_data import find_datasets
from folio.training.planning.choice import TRAINING_SHARE, Candidate, rank_shapes
from folio.training.planning.data import open_data
from folio.training.planning.law import ScalingLaw
from folio.training.planning.measured_law import MeasuredLaw, typical_law
from folio.training.planning.resume import SIZE_AUTO, Draft
from folio.training.planning.shapes import CHANNELS, Shape
from folio.training.planning.step_times import StepTimes
from folio.training.planning.train_settings import TrainSettings


def choose_size(draft: Draft, step_seconds: Callable[[Draft], float]) -> Draft:
    """For size="auto", return the draft with the best model, context, batch and recipe in its settings.

    step_seconds: measures the seconds per step of a draft. The shape that is expected to be the best is measured, until
    it is the best at its measured speed. The time for this is part of the minutes of the run.
    """
    cfg = draft.cfg
    longest, shortest_context = longest_text(cfg), Shape.of(CHANNELS[0]).block_size
    if longest <= shortest_context:
        raise UserError(
            f"size=auto: {cfg.dataset} has {counted(longest, 'training token')}, and the smallest model reads "
            f"{shortest_context + 1} at a time; use more text"
        )
    data = open_data(cfg.replace(block_size=shortest_context))
    begin = time.perf_counter()
    step_times = StepTimes(data.vocab_size)
    measured_law = MeasuredLaw.of(data)
    laws = measured_law.laws if measured_law else [ScalingLaw.from_parameters(typical_law(data).mean)]
    while True:
        spent = time.perf_counter() - begin
        seconds = 60 * cfg.minutes - spent
        ranked = rank_shapes(laws, step_times, seconds, data.training_tokens, data.vocab_size)
        ranked = [candidate for candidate in ranked if candidate.shape.block_size < longest]
        if not ranked:
            raise UserError(
                f"minutes={cfg.minutes:g}: size=auto needs more time, or more text than the "
                f"{counted(data.training_tokens, 'training token')} of {cfg.dataset}"
            )
        best = ranked[0]
        sized = with_candidate(cfg, best)
        if best.shape.n_embd in step_times.ratios:
            break
        trial = replace(draft, cfg=sized.replace(compile=False), lines=[])
        step_times.measured(best.shape, sized.step_tokens, step_seconds(trial))
    seconds_per_step = step_times(best.shape, best.step_tokens)
    lines = draft.lines
    lines.append(describe(best, best.step_tokens / seconds_per_step, measured_law is not None))
    replaced = [
        f"{name}={getattr(cfg, name)} ({cfg.origins[name]})"
        for name in cfg.origins
        if cfg.is_from_file(name) and getattr(sized, name) != getattr(cfg, name)
    ]
    if replaced:
        lines.append(f"size=auto replaces {', '.join(replaced)}")
    needed = best.tokens / best.step_tokens * seconds_per_step / TRAINING_SHARE
    fits_minutes = needed < 0.9 * seconds
    if fits_minutes:  # no evaluation takes an epoch from it
        epochs = best.tokens / best.unique_tokens
        minutes = f"{needed / 60:.2g} of {counted(cfg.minutes, 'minute')}"
        lines.append(f"the run takes {minutes}: more than {epochs:.0f} epochs do not help")
    return replace(draft, cfg=sized, seconds_spent=spent, fits_minutes=fits_minutes)


def longest_text(cfg: TrainSettings) -> int:
    """The tokens of the longest training shard; of several data sets, of the one in which it is the shortest."""
    return min(max(map(len, dataset.train)) for dataset, _ in find_datasets(cfg.dataset, cfg.data_dir))


def with_candidate(cfg: TrainSettings, best: Candidate) -> TrainSettings:
    """The settings with those of a candidate, except what the command line has set."""
    settings = {**best.settings, "gradient_accumulation_steps": None, "total_batch_tokens": None}
    chosen = {name: value for name, value in settings.items() if cfg.origins.get(name) != COMMAND_LINE}
    return cfg.replace({**cfg.origins, **dict.fromkeys(chosen, SIZE_AUTO)}, **chosen)


def describe(best: Candidate, tokens_per_second: float, is_measured: bool) -> str:
    """The line about the choice. is_measured: whether the law is that of this text."""
    shape = best.shape
    line = (
        f"size=auto: {counted(shape.n_layer, 'layer')} of {shape.n_embd} channels, contexts of {shape.block_size} "
        f"tokens, about {format_tokens(best.tokens)} tokens at {tokens_per_second:,.0f} per second"
    )
    if is_measured:
        return f"{line}; expected validation loss {best.forecast}"
    return f"{line}; by the scaling of other texts (tools/scaling.py measures that of this one)"
