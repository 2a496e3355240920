"""--size=auto: the model that is expected to reach the lowest loss on the data in the minutes of a run."""

import io
import time
from contextlib import redirect_stdout
from dataclasses import replace

from folio import UserError
from folio.base.number_format import counted, format_tokens
from folio.base.settings import COMMAND_LINE, Config
from folio.data.find_data import find_datasets
from folio.training.loader import BatchLoader
from folio.training.planning.choice import TRAINING_SHARE, Candidate, rank_shapes
from folio.training.planning.law import ScalingLaw
from folio.training.planning.measured_law import MeasuredLaw, typical_law
from folio.training.planning.shapes import CHANNELS, Shape
from folio.training.planning.step_times import StepTimes
from folio.training.setup import TrainStep, find_runtime, make_loss, measure_step, open_data, wrap
from folio.training.start import SIZE_AUTO, Start, model_config


def choose_size(start: Start, train_step: TrainStep) -> Start:
    """With size="auto", return a start of the run with the best model, context, batch and recipe in its settings.

    Measures the speed of the shape that is expected to be the best, until it is the best at its measured speed. The
    time for this is part of the minutes of the run. train_step: train.py's.
    """
    if start.cfg.size is None or start.checkpoint:
        return start
    longest, shortest_context = longest_text(start.cfg), Shape.of(CHANNELS[0]).block_size
    if longest <= shortest_context:
        raise UserError(
            f"size=auto: {start.cfg.dataset} has {counted(longest, 'training token')}, and the smallest model reads "
            f"{shortest_context + 1} at a time; use more text"
        )
    data, begin = open_data(start.cfg.replace(block_size=shortest_context)), time.perf_counter()
    step_times = StepTimes(data.vocab_size)
    measured_law = MeasuredLaw.of(data)
    laws = measured_law.laws if measured_law else [ScalingLaw.from_parameters(typical_law(data).mean)]
    while True:
        spent = time.perf_counter() - begin
        seconds = 60 * start.cfg.minutes - spent
        ranked = rank_shapes(laws, step_times, seconds, data.training_tokens, data.vocab_size)
        ranked = [candidate for candidate in ranked if candidate.shape.block_size < longest]
        if not ranked:
            raise UserError(
                f"minutes={start.cfg.minutes:g}: size=auto needs more time, or more text than the "
                f"{counted(data.training_tokens, 'training token')} of {start.cfg.dataset}"
            )
        best = ranked[0]
        sized = replace(start, cfg=with_candidate(start.cfg, best), seconds_spent=spent)
        if best.shape.n_embd in step_times.ratios:
            break
        step_times.measured(best.shape, sized.cfg.step_tokens, step_seconds(sized, train_step))
    seconds_per_step = step_times(best.shape, best.step_tokens)
    print(describe(best, best.step_tokens / seconds_per_step, measured_law is not None))
    replaced = [
        f"{name}={getattr(start.cfg, name)} ({start.cfg.origins[name]})"
        for name in start.cfg.origins
        if start.cfg.is_from_file(name) and getattr(sized.cfg, name) != getattr(start.cfg, name)
    ]
    if replaced:
        print(f"size=auto replaces {', '.join(replaced)}")
    needed = best.tokens / best.step_tokens * seconds_per_step / TRAINING_SHARE
    if needed < 0.9 * seconds:
        epochs = best.tokens / best.unique_tokens
        minutes = f"{needed / 60:.2g} of {counted(start.cfg.minutes, 'minute')}"
        print(f"the run takes {minutes}: more than {epochs:.0f} epochs do not help")
        sized = replace(sized, fits_minutes=True)  # no evaluation takes an epoch from it
    return sized


def longest_text(cfg: Config) -> int:
    """The tokens of the longest training shard; of several data sets, of the one in which it is the shortest."""
    return min(max(map(len, dataset.train)) for dataset, _ in find_datasets(cfg.dataset, cfg.data_dir))


def with_candidate(cfg: Config, best: Candidate) -> Config:
    """train.py's settings with those of a candidate, except what the command line has set."""
    settings = {**best.settings, "gradient_accumulation_steps": None, "total_batch_tokens": None}
    chosen = {name: value for name, value in settings.items() if cfg.origins.get(name) != COMMAND_LINE}
    return cfg.replace({**cfg.origins, **dict.fromkeys(chosen, SIZE_AUTO)}, **chosen)


def step_seconds(start: Start, train_step: TrainStep) -> float:
    """Measure the seconds per step of a model, without compilation, as setup.measure_step."""
    cfg = start.cfg.replace(compile=False)
    data = open_data(cfg)
    config = model_config(cfg, data)
    with redirect_stdout(io.StringIO()):
        runtime = find_runtime(cfg, start, config)
    model, net = wrap(None, config, cfg, runtime)
    loader = BatchLoader(data, runtime, cfg.batch_size, cfg.accumulation)
    return measure_step(train_step, cfg, model, net, make_loss(net, runtime), loader)


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
