"""Find the best model for a text and a time: measure small models, fit a scaling law, and write config files.

    python tools/scaling.py shakespeare_char                      3 minutes of measuring; answers for 5, 30, and 120
    python tools/scaling.py novel --minutes=10 --times=60
    python tools/scaling.py novel --gpu=H100 --times=30           for a GPU of the data sheets; measured here

Trains models of several sizes and lengths to the end of their schedules, and fits a law to their validation losses
(docs/lab/model-size.md). Settings, times and folders that cannot work are refused before that. Prints the best model
for each time, its expected loss with an interval of 90%, and the losses of models of half and twice the size.
OUT_DIR/minutes-30.py trains the best model for 30 minutes, and OUT_DIR/scaling.html shows the runs and the law. The law
is saved in the folder of the data set, for train.py --size=auto and tools/plan.py.
"""

import contextlib
import io
import math
import os
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import folio.machine.openmp  # noqa: E402, F401  # isort: skip  (before torch)
from tqdm import tqdm  # noqa: E402

from folio import UserError  # noqa: E402
from folio.base import settings  # noqa: E402
from folio.base.commands import command, short_path  # noqa: E402
from folio.base.files import atomic_write, locked  # noqa: E402
from folio.base.number_format import format_tokens  # noqa: E402
from folio.base.progress import progress_bar  # noqa: E402
from folio.base.settings import CommaSeparated, NonEmptyStr, NonNegativeInt, PositiveFloat, Settings  # noqa: E402
from folio.base.stop_signals import StopSignal  # noqa: E402
from folio.base.terminal import say, table, terminal_width  # noqa: E402
from folio.checkpoints.find_runs import is_run  # noqa: E402
from folio.data.find_data import find_datasets  # noqa: E402
from folio.data.shards import has_data  # noqa: E402
from folio.data.windows import Mixture  # noqa: E402
from folio.experiments import static_page  # noqa: E402
from folio.experiments.runs import Run  # noqa: E402
from folio.experiments.scaling_page import scaling_page  # noqa: E402
from folio.machine.gpus import GPUS, TYPICAL_MFU, find_gpu  # noqa: E402
from folio.training.planning.choice import (  # noqa: E402
    MAX_EPOCHS,
    Candidate,
    StepSeconds,
    affordable_tokens,
    rank_shapes,
    seconds_by_flops,
)
from folio.training.planning.law import RunSize, ScalingLaw, fit  # noqa: E402
from folio.training.planning.measured_law import MeasuredLaw, law_file, typical_law  # noqa: E402
from folio.training.planning.shapes import CHANNELS, Shape, step_tokens  # noqa: E402
from folio.training.planning.step_times import StepTimes  # noqa: E402
from train import TrainConfig, train  # noqa: E402

DEFAULT_TIMES = ("5", "30", "120")
MIN_STEPS = 500  # of a measured run
TOKENS_PER_WEIGHT = 2  # at least, in a measured run
SECOND_LENGTH = 4  # of the second run of the smallest shape, relative to the first
MAX_LENGTH = 8  # of the largest shape's run, relative to the shortest that the law needs
VALIDATION_TOKENS = 1 << 19  # per evaluation
N_RUNS = 4
OVERHEAD_SECONDS = 4.0  # of a run: its start and its evaluations
PROBE_STEPS = 40  # for the speed of the machine
LOCK = "scaling.lock"  # in OUT_DIR


@dataclass(frozen=True)
class ScalingConfig(Settings):
    # --- what to train ---
    dataset: tuple[str, ...] = ()  # DATASET: folder in data_dir, or a path
    data_dir: str | None = None  # folder of the data sets; None: data/ next to train.py
    times: CommaSeparated = ()  # minutes of training to answer for; none: 5, 30 and 120
    gpu: str | None = None  # a GPU to answer for, such as H100; None: this machine
    # --- measuring ---
    minutes: PositiveFloat = 3.0  # time for measuring
    seed: NonNegativeInt = 1337  # of the measured runs
    # --- output ---
    out_dir: NonEmptyStr | None = None  # folder of the config files and the page; None: scaling-DATASET

    def problems(self) -> list[tuple[str, str]]:
        problems = []
        if len(self.dataset) != 1 or set(":,") & set(Path(self.dataset[0]).name):
            example = "python tools/scaling.py shakespeare_char"
            problems.append(("dataset", f"name one data set, as in {example}; the law of a mixture is not measured"))
        if not all(is_positive(time) for time in self.times):
            problems.append(("times", "write minutes above 0, separated by commas, as in --times=5,30"))
        if self.gpu and (find_gpu(self.gpu) or (None, None))[1] is None:
            problems.append(("gpu", f"it is not one of {', '.join(GPUS)}"))
        return problems

    @property
    def name(self) -> str:
        return Path(self.dataset[0]).name

    @property
    def folder(self) -> Path:
        return Path(self.out_dir or f"scaling-{self.name}")


def is_positive(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return 0 < float(text) < float("inf")
    return False


class MeasuredRun(NamedTuple):
    """A run that the law is fitted to."""

    shape: Shape
    size: RunSize
    loss: float  # validation loss, nats per token
    tokens_per_second: float

    def note_speed(self, step_times: StepTimes) -> None:
        n_tokens = self.size.tokens // self.size.steps
        step_times.measured(self.shape, n_tokens, n_tokens / self.tokens_per_second)


class Plan(NamedTuple):
    """Runs of three shapes that are long enough for the law, as shapes and tokens."""

    runs: list[tuple[Shape, int]]
    seconds: float


def main(cfg: ScalingConfig) -> None:
    data = Mixture(find_datasets(cfg.dataset[0], cfg.data_dir), block_size=1, seed=cfg.seed, sampling="epoch")
    with output_folder(cfg, data):
        step_times = StepTimes(data.vocab_size)
        check_time(cfg, data, step_times)
        runs = measure(cfg, data, step_times)
        laws = fit([run.size for run in runs], [run.loss for run in runs], typical_law(data))
        law = MeasuredLaw(data.hash, [run.size for run in runs], [run.loss for run in runs], laws)
        law.save(data)
        say(f"{laws[0]} nats per token")
        answers = answer(cfg, data, laws, step_seconds(cfg, data, step_times))
        print(table(HEADS, table_rows(answers, data), terminal_width(sys.stdout)))
        write_files(cfg, data, law, runs, answers)


# --- before training --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def output_folder(cfg: ScalingConfig, data: Mixture) -> Iterator[None]:
    """Hold the lock of OUT_DIR. Raises UserError if the results cannot be written."""
    folder, law_path = cfg.folder, law_file(data)
    if is_run(folder) or has_data(folder):
        raise UserError(f"out_dir={folder}: it is the folder of a run or of a data set; choose another one")
    if not os.access(law_path if law_path.exists() else law_path.parent, os.W_OK):
        raise UserError(f"{law_path} cannot be written, where train.py looks for the law; copy the data set")
    in_use = f"out_dir={folder}: another tools/scaling.py is measuring there; choose another --out_dir"
    with contextlib.ExitStack() as stack:
        stack.callback(remove_empty, folder)
        try:
            stack.enter_context(locked(folder / LOCK, in_use))
        except OSError as error:
            raise cannot_write(cfg, error) from None
        yield


def remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def cannot_write(cfg: ScalingConfig, error: OSError) -> UserError:
    return UserError(f"out_dir={cfg.folder} cannot be written ({error.strerror}); choose another --out_dir")


def check_time(cfg: ScalingConfig, data: Mixture, step_times: StepTimes) -> None:
    """Raise UserError if the text or a time is too short. Measures the machine with some steps of the first run."""
    plans = possible_plans(data, step_times)
    if not plans:
        raise UserError(f"dataset={cfg.name}: its {data.training_tokens:,} training tokens are too few for a law")
    shape, tokens = plans[0].runs[0]
    n_tokens = step_tokens(tokens)
    say("measuring the speed of this machine")
    step_times.measured(shape, n_tokens, probe(cfg, shape, n_tokens))
    minutes = min(plan.seconds for plan in possible_plans(data, step_times)) / 60
    if minutes >= cfg.minutes:
        raise UserError(
            f"minutes={cfg.minutes:g}: the {N_RUNS} shortest runs take {minutes:.1f} minutes on this machine; use "
            f"--minutes={math.ceil(minutes + 0.1)} or more"
        )
    typical = [ScalingLaw.from_parameters(typical_law(data).mean)]
    answer(cfg, data, typical, step_seconds(cfg, data, step_times))


def probe(cfg: ScalingConfig, shape: Shape, n_tokens: int) -> float:
    """Return the seconds per step of a shape."""
    recipe = {**shape.settings(PROBE_STEPS * n_tokens, n_tokens, 0.0), "eval_iters": 1}
    _, tokens_per_second = train_with(cfg, recipe)
    return n_tokens / tokens_per_second


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(cfg: ScalingConfig, data: Mixture, step_times: StepTimes) -> list[MeasuredRun]:
    """Train models of three shapes within the time for measuring.

    The last run is of the largest shape, and as long as the time allows: a few large runs forecast better than many
    small ones (docs/lab/model-size.md). A machine that turns out to be slower or faster changes the plan. If there is
    no time left for any plan, the shortest one is completed.
    """
    begin = time.perf_counter()
    runs: list[MeasuredRun] = []
    done: set[tuple[Shape, int]] = set()
    with progress_bar(total=round(60 * cfg.minutes), unit="s") as bar:
        while True:
            left = 60 * cfg.minutes - (time.perf_counter() - begin)
            planned = choose_plan(possible_plans(data, step_times, done), left).runs
            if not planned:  # all runs are those of another plan, too
                break
            shape, tokens = planned[0]
            done.add((shape, tokens))
            if len(planned) == 1:
                longest = affordable_tokens(shape, step_times, left - OVERHEAD_SECONDS)
                tokens = max(tokens, min(MAX_LENGTH * tokens, longest))
            runs.append(train_one(cfg, data, shape, min(tokens, MAX_EPOCHS * data.training_tokens)))
            runs[-1].note_speed(step_times)
            bar.update(round(time.perf_counter() - begin) - bar.n)
            tqdm.write(describe(runs[-1]))
            if len(planned) == 1:
                break
    return runs


def choose_plan(plans: Sequence[Plan], seconds: float) -> Plan:
    """Return the plan of the largest shapes that takes this time; if there is none, the shortest one."""
    affordable = [plan for plan in plans if plan.seconds < seconds]
    return affordable[-1] if affordable else min(plans, key=lambda plan: plan.seconds)


def possible_plans(data: Mixture, step_times: StepTimes, done: Collection[tuple[Shape, int]] = ()) -> list[Plan]:
    """Return the runs that are not done, for each three shapes that suit the text, the smallest shapes first.

    The smallest shape has a short and a long run. Each run has at least MIN_STEPS steps and TOKENS_PER_WEIGHT tokens
    per weight, which is long enough for the law.
    """

    def shortest(shape: Shape) -> int:
        tokens = TOKENS_PER_WEIGHT * shape.matrix_weights(data.vocab_size)
        return max(tokens, MIN_STEPS * step_tokens(tokens))

    def run_seconds(run: tuple[Shape, int]) -> float:
        n_tokens = step_tokens(run[1])
        return OVERHEAD_SECONDS + run[1] / n_tokens * step_times(run[0], n_tokens)

    plans = []
    shapes = [shape for shape in map(Shape.of, CHANNELS) if shape.block_size < data.training_tokens]
    for small, medium, large in zip(shapes, shapes[1:], shapes[2:], strict=False):
        runs = [(small, 1), (medium, 1), (small, SECOND_LENGTH), (large, 1)]
        runs = [(shape, length * shortest(shape)) for shape, length in runs]
        runs = [run for run in runs if run not in done]
        plans.append(Plan(runs, sum(map(run_seconds, runs))))
    return plans


def train_one(cfg: ScalingConfig, data: Mixture, shape: Shape, tokens: int) -> MeasuredRun:
    """Train a model to the end of its schedule. Raises KeyboardInterrupt if a signal stops it."""
    recipe = shape.settings(tokens, step_tokens(tokens), shape.dropout(tokens, data.training_tokens))
    batch_tokens = recipe["batch_size"] * shape.block_size
    loss, speed = train_with(cfg, {**recipe, "eval_iters": -(-VALIDATION_TOKENS // batch_tokens)})
    tokens = recipe["max_iters"] * batch_tokens
    size = RunSize(shape.matrix_weights(data.vocab_size), tokens, recipe["max_iters"], data.training_tokens)
    return MeasuredRun(shape, size, loss, speed)


def train_with(cfg: ScalingConfig, recipe: Mapping[str, Any]) -> tuple[float, float]:
    """Train a model, and return its validation loss and tokens per second. recipe: settings of train.py."""
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        run_settings = TrainConfig(
            **recipe,
            out_dir=str(Path(folder, "run")),
            dataset=cfg.dataset[0],
            data_dir=cfg.data_dir,
            seed=cfg.seed,
            eval_interval=recipe["max_iters"],
            sample_tokens=0,
        )
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            result = train(run_settings)
        if result.stopped_by:
            raise StopSignal(result.stopped_by)
        return result.best_val_loss, Run.of(Path(run_settings.out_dir)).totals()["tokens_per_second"]


def describe(run: MeasuredRun) -> str:
    return (
        f"{run.shape.n_layer} x {run.shape.n_embd}, {format_tokens(run.size.tokens)} tokens: loss {run.loss:.4f}, "
        f"{run.tokens_per_second:,.0f} tokens/s"
    )


def run_cells(run: MeasuredRun) -> list[str]:
    """A row of the page's table of measured runs; see scaling_page.RUN_HEADS."""
    size = f"{run.shape.n_layer} x {run.shape.n_embd}"
    return [size, format_tokens(run.size.tokens), f"{run.loss:.4f}", f"{run.tokens_per_second:,.0f}"]


# --- answers ----------------------------------------------------------------------------------------------------------


def answer(
    cfg: ScalingConfig, data: Mixture, laws: Sequence[ScalingLaw], seconds_per_step: StepSeconds
) -> dict[str, list[Candidate]]:
    """The shapes for each time, the best first. Raises UserError if there is no time for a step."""
    answers = {}
    for minutes in cfg.times or DEFAULT_TIMES:
        seconds = 60 * float(minutes)
        answers[minutes] = rank_shapes(laws, seconds_per_step, seconds, data.training_tokens, data.vocab_size)
        if not answers[minutes]:
            raise UserError(f"times={minutes}: no model can be trained in {minutes} minutes; use more")
    return answers


def step_seconds(cfg: ScalingConfig, data: Mixture, step_times: StepTimes) -> StepSeconds:
    """The seconds per step, as measured; for a GPU, by the data sheet, as in tools/plan.py."""
    if cfg.gpu:
        return seconds_by_flops(TYPICAL_MFU * 1e12 * find_gpu(cfg.gpu)[1].tflops, data.vocab_size)
    return step_times


def neighbor(candidates: Sequence[Candidate], data: Mixture, factor: float) -> Candidate:
    """The candidate whose weights are the nearest to `factor` times those of the best one."""
    weights = [candidate.shape.matrix_weights(data.vocab_size) for candidate in candidates]
    return min(candidates, key=lambda c: abs(math.log(c.shape.matrix_weights(data.vocab_size) / weights[0] / factor)))


HEADS = ("minutes", "layers x channels", "weights", "context", "tokens", "epochs", "expected loss", "half", "twice")


def table_rows(answers: Mapping[str, Sequence[Candidate]], data: Mixture) -> list[list[str]]:
    """A row for each time. The last two columns are the losses of models of about half and twice the size."""
    rows = []
    for minutes, candidates in answers.items():
        best = candidates[0]
        half, twice = (neighbor(candidates, data, factor) for factor in (0.5, 2.0))
        rows.append(
            [
                minutes,
                f"{best.shape.n_layer} x {best.shape.n_embd}",
                format_tokens(best.shape.matrix_weights(data.vocab_size)),
                str(best.shape.block_size),
                format_tokens(best.tokens),
                f"{best.tokens / data.training_tokens:.2g}",
                str(best.forecast),
                f"{half.forecast.loss:.3f}",
                f"{twice.forecast.loss:.3f}",
            ]
        )
    return rows


# --- files ------------------------------------------------------------------------------------------------------------


def write_files(
    cfg: ScalingConfig, data: Mixture, law: MeasuredLaw, runs: Sequence[MeasuredRun], answers: Mapping[str, Any]
) -> None:
    """Write the config files and the page. Raises UserError if they cannot be written."""
    folder = cfg.folder
    try:
        for minutes, candidates in answers.items():
            path = folder / f"minutes-{minutes}.py"
            with atomic_write(path) as temporary:
                temporary.write_text(config_file(cfg, path, minutes, candidates[0]), encoding="utf-8")
            say(f"train it for {minutes} minutes: {command('train.py', short_path(path))}")
        page = scaling_page(cfg.name, law, [run_cells(run) for run in runs], HEADS, table_rows(answers, data), answers)
        static_page.write(folder / "scaling.html", page)
    except OSError as error:
        raise cannot_write(cfg, error) from None
    say(f"{short_path(folder / 'scaling.html')}: the runs and the law; {short_path(law_file(data))}: all numbers")


def config_file(cfg: ScalingConfig, path: Path, minutes: str, best: Candidate) -> str:
    """The config file that trains a model for a time."""
    where = f"a {find_gpu(cfg.gpu)[0]}, by its data sheet" if cfg.gpu else "this machine"
    lines = [
        f"# python train.py {path.as_posix()}",
        "#",
        f"# The best model for {minutes} minutes on {where}, by tools/scaling.py.",
        f"# Expected validation loss: {best.forecast}. Not run yet.",
        f"out_dir = {f'out-{cfg.name}-{minutes}'!r}",
        f"dataset = {cfg.dataset[0]!r}",
        f"minutes = {float(minutes):g}  # sets max_iters",
        "",
        *(f"{name} = {value!r}" for name, value in best.settings.items()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    settings.run_script(main, ScalingConfig, needs_output=False)
