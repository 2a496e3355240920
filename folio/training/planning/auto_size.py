"""--size=auto: the model that is expected to reach the lowest loss on the data in the minutes of a run."""

import io
import time
from contextlib import redirect_stdout
from dataclasses import replace

from folio import UserError
from folio.base.number_format import counted, format_tokens
from folio.base.settings import COMMAND_LINE, Config
from folio.training.loader import BatchLoader
from folio.training.planning.choice import TRAINING_SHARE, Candidate, rank_shapes
from folio.training.planning.law import ScalingLaw
from folio.training.planning.measured_law import MeasuredLaw, typical_law
from folio.training.planning.step_times import StepTimes
from folio.training.setup import TrainStep, find_runtime, make_loss, measure_step, open_data, wrap
from folio.training.start import Start, model_config


def choose_size(start: Start, train_step: TrainStep) -> Start:
    """With size="auto", return a start of the run with the best model, context, batch and recipe in its settings.

    Measures the speed of the shape that is expected to be the best, until it is the best at its measured speed. The
    time for this is subtracted from the minutes of the run. train_step: train.py's.
    """
    if start.cfg.size is None or start.checkpoint:
        return start
    data, begin = open_data(start.cfg), time.perf_counter()
    step_times = StepTimes(data.vocab_size)
    measured_law = MeasuredLaw.of(data)
    laws = measured_law.laws if measured_law else [ScalingLaw.from_parameters(typical_law(data).mean)]
    while True:
        minutes = start.cfg.minutes - (time.perf_counter() - begin) / 60
        cfg = start.cfg.replace(minutes=round(minutes, 3))
        ranked = rank_shapes(laws, step_times, 60 * cfg.minutes, data.training_tokens, data.vocab_size)
        if not ranked:
            raise UserError(f"size=auto: {cfg.dataset} is too short, or minutes={start.cfg.minutes:g} are too few")
        best = ranked[0]
        sized = replace(start, cfg=with_candidate(cfg, best))
        if best.shape.n_embd in step_times.ratios:
            break
        step_times.measured(best.shape, sized.cfg.step_tokens, step_seconds(sized, train_step))
    seconds_per_step = step_times(best.shape, best.step_tokens)
    print(describe(best, best.step_tokens / seconds_per_step, measured_law is not None))
    needed = best.tokens / best.step_tokens * seconds_per_step / TRAINING_SHARE / 60
    if needed < 0.9 * cfg.minutes:
        epochs = best.tokens / best.unique_tokens
        print(f"the run takes {needed:.2g} of {cfg.minutes:.2g} minutes: more than {epochs:.0f} epochs do not help")
        sized = replace(sized, cfg=sized.cfg.replace(minutes=None))  # no evaluation takes an epoch from it
    return sized


def with_candidate(cfg: Config, best: Candidate) -> Config:
    """train.py's settings with those of a candidate, except what the command line has set."""
    settings = {**best.settings, "gradient_accumulation_steps": None, "total_batch_tokens": None}
    chosen = {name: value for name, value in settings.items() if cfg.origins.get(name) != COMMAND_LINE}
    return cfg.replace({**cfg.origins, **dict.fromkeys(chosen, "--size=auto")}, **chosen)


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
