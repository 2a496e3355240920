"""Train with many settings and several seeds, and say which settings are better than others, and by how much.

    python tools/sweep.py config/shakespeare_char.py learning_rate=4e-3,8e-3 n_head=2,4 --max_iters=300
    python tools/sweep.py config/shakespeare_char.py learning_rate=1e-4..1e-1:log dropout=0..0.3 --trials=40 --minutes=1
    python tools/sweep.py config/shakespeare_char.py n_layer=2,3,4 --tokens=2e6 --seeds=5 --jobs=4
    python tools/sweep.py config/mine.py lr_schedule=cosine,wsd --storage=postgresql://me@host/sweeps   on each machine

Each combination of settings is a trial, which is trained with every seed. Lists of values make a grid of all
combinations. With --trials, optuna searches lists and ranges, and stops a trial whose first run is hopeless at an
evaluation. Any setting of train.py can be varied, or set for all trials as --name=value. Each run is one of train.py,
in a folder of its own: OUT_DIR/trial-000-seed-1337.

Ctrl-C stops the runs at a checkpoint; the same command continues, and with more --seeds or --trials adds to them. At
the end, and whenever the command is repeated, a table gives the mean and the 95 % interval of each trial over its
seeds, and its difference to the best. OUT_DIR/sweep.html shows the curves, and results.json holds all numbers.
"""

import os
import queue
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import folio.machine.openmp  # noqa: E402, F401  # isort: skip  (before torch)
import optuna  # noqa: E402
import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from folio import UserError  # noqa: E402
from folio.base import settings  # noqa: E402
from folio.base.commands import short_path  # noqa: E402
from folio.base.files import atomic_write, is_locked, locked, write_json  # noqa: E402
from folio.base.progress import progress_bar  # noqa: E402
from folio.base.settings import (  # noqa: E402
    COMMAND_LINE,
    ConfigError,
    NonEmptyStr,
    PositiveInt,
    Settings,
    help_text,
    run_script,
    split_arguments,
)
from folio.base.workers import cores  # noqa: E402
from folio.checkpoints.find_runs import LATEST, is_run  # noqa: E402
from folio.data.find_data import find_datasets  # noqa: E402
from folio.experiments.runs import Run  # noqa: E402
from folio.experiments.sweep.results import as_json, format_table, notes, summarize  # noqa: E402
from folio.experiments.sweep.results_page import sweep_page  # noqa: E402
from folio.experiments.sweep.space import Dimension, Values, corners, describe_point, grid, parse_space  # noqa: E402
from folio.experiments.sweep.study import (  # noqa: E402
    Outcome,
    Study,
    TrialFailed,
    TrialInterrupted,
    open_storage,
    open_study,
    reporting_a_lost_database,
    sqlite_url,
)
from folio.experiments.sweep.trial import claim, is_finished, run_training  # noqa: E402
from folio.training.schedule import scaled_to_override  # noqa: E402
from folio.training.start import cannot_write  # noqa: E402
from train import TrainConfig  # noqa: E402

# Settings of train.py that a sweep sets itself, or that make no sense in one, and what to do instead.
REFUSED = {
    "out_dir": "each trial has its own folder in the sweep's --out_dir",
    "data_dir": "vary dataset, which can be a folder's path",
    "seed": "set the number of seeds with --seeds, and the first one with --seed",
    "overwrite": "remove the sweep's folder to start again",
    "print_config": "leave it out",
    "eval_only": "leave it out",
    "minutes": "set one --minutes for all trials",
}
NOT_DEFINING = {"out_dir", "overwrite", "wandb_project", "wandb_run_name", "wandb_log", "data_dir", "print_config"}


@dataclass(frozen=True)
class SweepConfig(Settings):
    # --- what to try ---
    settings: tuple[str, ...] = ()  # of train.py: NAME=VALUE,VALUE or NAME=LOW..HIGH, with :log for a logarithmic one
    seeds: PositiveInt = 3  # runs per trial, with the seeds --seed, --seed + 1, ...
    trials: PositiveInt | None = None  # search with this many combinations, by optuna; None: the whole grid
    prune: bool = True  # in a search, stop what is worse than the median of the trials at the same evaluation
    retry_failed: bool = False  # True: run again what failed before
    tokens: PositiveInt | None = None  # to train on per run; sets max_iters; None: as train.py does (also --minutes)
    # --- where ---
    out_dir: NonEmptyStr | None = None  # folder of the sweep; None: sweep-NAME, after the config file
    jobs: PositiveInt | None = None  # runs at the same time; None: one per GPU, or one
    storage: NonEmptyStr | None = None  # database that several machines share; None: OUT_DIR/study.db
    grace_period: PositiveInt = 120  # seconds of silence after which a worker is taken for dead (with --storage)


@dataclass(frozen=True)
class Sweep:
    """A sweep's settings, and what it trains."""

    cfg: SweepConfig
    base: TrainConfig  # the settings that all trials share
    arguments: list[str]  # of train.py, for all trials
    space: list[Dimension]
    out_dir: Path

    @property
    def seeds(self) -> list[int]:
        return [self.base.seed + i for i in range(self.cfg.seeds)]

    @cached_property
    def points(self) -> int:
        """How many combinations of settings are tried."""
        return self.cfg.trials or len(grid(self.space))

    @property
    def evaluations(self) -> int:
        """Of each run, unless a setting that is varied changes their number."""
        counts = self.base.step_counts
        if self.cfg.tokens:
            shorter, origins = replace(counts, max_iters=self.max_iters_of({})), {**self.base.origins}
            counts = scaled_to_override(shorter, {**origins, "max_iters": COMMAND_LINE}, counts.max_iters)
        return counts.evaluations

    def outcomes(self, study: Study) -> list[Outcome]:
        """What is known of the trials; an earlier command may have added more of them."""
        return [o for o in study.outcomes() if o.point < self.points and o.seed in self.seeds]

    @property
    def name(self) -> str:
        """Of the folder, and of the study in the database."""
        return self.out_dir.resolve().name

    def folder(self, point: int, seed: int) -> Path:
        return self.out_dir / f"trial-{point:03d}-seed-{seed}"

    def arguments_of(self, params: dict[str, Any], seed: int) -> list[str]:
        """The arguments of train.py for a trial, without its folder."""
        arguments = [*self.arguments, *options(params), f"--seed={seed}"]
        if self.cfg.tokens:
            arguments.append(f"--max_iters={self.max_iters_of(params)}")
        return arguments

    def max_iters_of(self, params: dict[str, Any]) -> int:
        cfg = self.base.replace(**params)
        return max(1, round(self.cfg.tokens / cfg.step_tokens)) if self.cfg.tokens else cfg.max_iters

    def fraction(self, params: dict[str, Any], step: int, seconds: float) -> float:
        """How much of a trial is done after this step and time."""
        if self.base.minutes:
            return min(1.0, seconds / (60 * self.base.minutes))
        return min(1.0, step / self.max_iters_of(params))

    @cached_property
    def record(self) -> dict[str, Any]:
        """What defines the sweep: to be continued, it must be the same."""
        settings = {name: value for name, value in asdict(self.base).items() if name not in NOT_DEFINING}
        varied = next((d.values for d in self.space if isinstance(d, Values) and d.name == "dataset"), None)
        names = varied or [self.base.dataset]
        data = {name: [d.hash for d, _ in find_datasets(name, self.base.data_dir)] for name in names}
        return {
            "settings": " ".join(map(str, self.space)),
            "tokens": self.cfg.tokens,
            "search": self.cfg.trials is not None,
            **settings,
            "data": ", ".join(f"{name} ({' '.join(h[:8] for h in hashes)})" for name, hashes in data.items()),
        }


def parse_sweep(argv: list[str]) -> Sweep:
    """The sweep that a command line describes. Raises ConfigError."""
    mine, rest = split_arguments(SweepConfig, TrainConfig, argv)
    varied = [argument for argument in rest if not argument.startswith("--") and "=" in argument]
    arguments = [argument for argument in rest if argument not in varied]
    cfg = settings.load(SweepConfig, [*mine, *varied])
    space = parse_space(TrainConfig, varied)
    example = "python tools/sweep.py config/shakespeare_char.py learning_rate=1e-3,3e-3"
    if not space:
        lists = [argument for argument in arguments if argument.startswith("--") and re.search(r",|\.\.", argument)]
        hint = f"; write {lists[0].removeprefix('--')} without --" if lists else ""
        raise ConfigError(f"name a setting and its values, as in {example}{hint}")
    base = shared_settings(arguments, space)
    names = [dimension.name for dimension in space]
    for name in names:
        if name in REFUSED:
            raise ConfigError(f"{name} cannot be varied: {REFUSED[name]}")
    for name in ("overwrite", "print_config", "eval_only"):
        if getattr(base, name):
            raise ConfigError(f"--{name}: a sweep does not take it; {REFUSED[name]}")
    starts = {base.init_from, *next((d.values for d in space if d.name == "init_from"), ())}
    if "resume" in starts:
        raise ConfigError("--init_from=resume: repeat the sweep's command to continue it; it resumes its trials")
    if LATEST in starts and not Path(LATEST).is_dir():
        raise ConfigError(f"--init_from={LATEST}: name the run's folder, because the latest run will be a trial")
    if cfg.tokens and (base.minutes or "max_iters" in names or base.origins.get("max_iters") == COMMAND_LINE):
        raise ConfigError("--tokens determines max_iters; leave out --minutes and max_iters")
    if not base.origins:
        raise ConfigError(f"without a config file, the trials would be GPT-2; name one, as in {example}")
    if cfg.out_dir == LATEST:
        raise ConfigError(f"--out_dir={LATEST}: this name stands for the latest run; choose another --out_dir")
    if cfg.out_dir and is_run(Path(cfg.out_dir)):
        raise ConfigError(f"--out_dir={cfg.out_dir}: it is the folder of a run; choose another --out_dir")
    for name in names:
        if base.origins.get(name) == COMMAND_LINE:
            print(f"--{name}={getattr(base, name)} has no effect, because {name} is varied")
    if cfg.trials is None:
        grid(space)  # has no range
    config_file = next((Path(argument).stem for argument in arguments if not argument.startswith("--")), "gpt2")
    return Sweep(cfg, base, arguments, space, Path(cfg.out_dir or f"sweep-{config_file}"))


def shared_settings(arguments: list[str], space: list[Dimension]) -> TrainConfig:
    """The settings that all trials share. One that the trials replace may contradict others. Raises ConfigError."""
    try:
        return settings.load(TrainConfig, arguments)
    except ConfigError:
        for params in corners(space):
            with suppress(ConfigError), redirect_stdout(None):
                return settings.load(TrainConfig, [*arguments, *options(params)])
        raise


def options(params: dict[str, Any]) -> list[str]:
    """The options of train.py for a trial."""
    return [f"--{name}={value}" for name, value in params.items()]


# --- running the trials -----------------------------------------------------------------------------------------------


class Runner:
    """Runs the trials of a sweep, `jobs` at a time, and shows how far it is."""

    def __init__(self, sweep: Sweep, study: Study):
        self.sweep, self.study = sweep, study
        self.environments: queue.Queue[dict[str, str]] = queue.Queue()  # one for each job
        for environment in environments(sweep):
            self.environments.put(environment)
        self.jobs = self.environments.qsize()
        self.stopping, self.killing = threading.Event(), threading.Event()
        self.fractions: dict[tuple[int, int], float] = {}  # of each trial that is running
        self.bar = None

    def run(self) -> str | None:
        """Run trials until none is left, or a signal asks to stop. Returns how far it came then."""
        total = self.sweep.points * len(self.sweep.seeds)
        form = "{percentage:3.0f}%|{bar}| {desc} [{elapsed}<{remaining}]"
        with self.signals(), progress_bar(total=total, bar_format=form) as self.bar:
            self.refresh()
            self.bar.initial = self.done
            self.study.run(self.train, self.jobs, self.stopping.is_set, self.refresh)
        return f"after {self.done} of {total} runs" if self.stopping.is_set() else None

    @contextmanager
    def signals(self) -> Iterator[None]:
        """The first SIGINT, SIGTERM or SIGHUP stops the trials at a checkpoint; the second one kills them."""

        def stop(number: int, frame: Any) -> None:
            if self.stopping.is_set():
                self.killing.set()
            self.stopping.set()

        numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
        previous = {number: signal.signal(number, stop) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def train(self, trial: optuna.Trial) -> float:
        """Run one trial. Returns its lowest validation loss."""
        params = self.study.suggest(trial)
        point, seed = trial.user_attrs["point"], trial.user_attrs["seed"]
        folder, name = self.sweep.folder(point, seed), f"trial {point}, seed {seed} ({describe_point(params)})"
        environment = self.environments.get()
        trial.set_user_attr("host", socket.gethostname())
        trial.set_user_attr("error", None)  # of an earlier attempt
        try:
            self.wait_for(folder, name)
            return self.follow(trial, params, folder, environment)
        except optuna.exceptions.StorageInternalError:
            self.stopping.set()  # of the other trials, which could not be recorded
            raise
        except optuna.TrialPruned as pruned:
            tqdm.write(f"{name}: pruned {pruned}")
            raise
        except (TrialFailed, UserError, OSError) as failed:
            trial.set_user_attr("error", str(failed))
            tqdm.write(f"{name}: failed: {failed} (all that it printed: {folder / 'output.txt'})")
            raise TrialFailed from failed
        finally:
            self.environments.put(environment)
            self.fractions.pop((point, seed), None)

    def wait_for(self, folder: Path, name: str) -> None:
        """Wait for a run that a killed worker has left behind in this folder."""
        if is_locked(folder / ".lock"):
            tqdm.write(f"{name}: waiting, because a process that another sweep started is still training in {folder}")
        while is_locked(folder / ".lock"):
            if self.stopping.wait(0.5):
                raise TrialInterrupted

    def follow(self, trial: optuna.Trial, params: dict[str, Any], folder: Path, environment: dict[str, str]) -> float:
        """Train, report each evaluation to optuna, and stop if it says so.

        It is asked about the first seed only: settings that were good with one seed are trained with all.
        """
        point, seed = trial.user_attrs["point"], trial.user_attrs["seed"]
        arguments, judged = self.sweep.arguments_of(params, seed), seed == self.sweep.seeds[0]
        reported, is_hopeless = 0, False
        began = time.monotonic()

        def watch(step: int, evaluations: list[tuple[int, float]]) -> Literal["train", "stop", "kill"]:
            nonlocal reported, is_hopeless
            self.fractions[point, seed] = self.sweep.fraction(params, step, time.monotonic() - began)
            for _, loss in evaluations[reported:]:
                reported += 1
                if judged:
                    trial.report(loss, reported)
                    is_hopeless = is_hopeless or trial.should_prune()
            self.show()
            if self.killing.is_set():
                return "kill"
            return "stop" if is_hopeless or self.stopping.is_set() else "train"

        claim(folder, {"sweep": self.sweep.record, "params": params, "seed": seed})
        if not is_finished(folder):
            reason = run_training(folder, arguments, environment, watch)
            if self.stopping.is_set() and not is_finished(folder):
                raise TrialInterrupted
            if reason and not is_hopeless:
                raise TrialFailed(reason)
        run = Run.of(folder)
        evaluations = run.trained_evaluations()
        if not evaluations:
            raise TrialFailed("it ended without an evaluation")
        loss, step = min(evaluations)
        tokens_of = {line["step"]: line["tokens"] for line in run.lines}
        results = {
            "loss": loss,
            "step": step,
            "tokens": run.lines[-1]["tokens"],
            "seconds": run.measured()["seconds"],
            "evaluations": [[tokens_of[at], value] for value, at in evaluations],
        }
        for key, value in results.items():
            trial.set_user_attr(key, value)
        if is_hopeless and run.status != "finished":
            raise optuna.TrialPruned(f"after {reported} evaluations, at {loss:.4f}")
        self.study.add([(point, params)], self.sweep.seeds)  # in a search, the values are known only now
        seconds = f", {results['seconds']:,.1f} s" if results["seconds"] else ""
        tqdm.write(f"trial {point}, seed {seed} ({describe_point(params)}): {loss:.4f} at step {step:,}{seconds}")
        return loss

    # --- progress ---

    def refresh(self) -> None:
        """Count the trials that are done, also those of other workers, and find the best one."""
        outcomes = self.sweep.outcomes(self.study)
        remaining = 0
        for outcome in outcomes:
            if outcome.state in ("waiting", "running"):
                others = self.sweep.cfg.trials and outcome.seed == self.sweep.seeds[0]
                remaining += len(self.sweep.seeds) if others else 1  # a search adds the other seeds later
        finished = [outcome for outcome in outcomes if outcome.state == "finished"]
        best = min(finished, key=lambda outcome: outcome.loss, default=None)
        self.done = self.bar.total - remaining
        self.best = f", best {best.loss:.4f} (trial {best.point})" if best else ""
        self.show()

    def show(self) -> None:
        """Update the bar."""
        with self.bar.get_lock():
            self.bar.n = min(self.bar.total, self.done + sum(self.fractions.values()))
            self.bar.set_description_str(f"{self.done}/{self.bar.total} runs{self.best}")


def environments(sweep: Sweep) -> list[dict[str, str]]:
    """The environment variables of each job: its GPU, or its share of the cores. Raises UserError."""
    jobs, device = sweep.cfg.jobs, sweep.base.device
    gpus = torch.cuda.device_count() if device in ("auto", "cuda") else 0
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        if jobs and jobs > gpus:
            raise UserError(f"jobs={jobs}: each run has a GPU of its own, and this machine has {gpus}")
        return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in visible[: jobs or gpus]]
    jobs = jobs or 1
    if jobs == 1 or "OMP_NUM_THREADS" in os.environ:
        return [{}] * jobs
    return [{"OMP_NUM_THREADS": str(max(1, cores() // jobs))}] * jobs


# --- the command ------------------------------------------------------------------------------------------------------


def open_sweep(sweep: Sweep) -> Study:
    """The study of a sweep, with its trials. Raises UserError."""
    cfg, grace_period = sweep.cfg, sweep.cfg.grace_period if sweep.cfg.storage else None
    storage = open_storage(cfg.storage or sqlite_url(sweep.out_dir / "study.db"), grace_period)
    if cfg.trials is None:
        trials = list(enumerate(grid(sweep.space))), sweep.seeds
    else:
        trials = [(point, {}) for point in range(cfg.trials)], sweep.seeds[:1]
    study = open_study(
        storage,
        sweep.name,
        sweep.record,
        sweep.space,
        trials,
        prune_after=sweep.evaluations // 3 if cfg.trials and cfg.prune else None,
        alone=cfg.storage is None,  # this process holds the lock of the folder
    )
    if cfg.retry_failed:
        study.retry_failed()
    if cfg.trials:  # with more seeds than before
        finished = {outcome.point: outcome.params for outcome in study.outcomes() if outcome.state == "finished"}
        study.add(finished.items(), sweep.seeds)
    if not cfg.storage:  # otherwise, another worker may want them
        study.withdraw(sweep.points, sweep.seeds)
    return study


def show_results(sweep: Sweep, study: Study) -> None:
    """Print the table; write sweep.html and results.json."""
    outcomes = sweep.outcomes(study)
    rows, importances = summarize(outcomes, sweep.seeds), study.importances()
    remarks = notes(rows, outcomes, sweep.seeds, sweep.cfg.trials is not None)
    if importances:
        shares = ", ".join(f"{name} {share:.2f}" for name, share in importances.items())
        remarks.append(f"Importance of each setting: {shares}.")
    print()
    print(format_table([dimension.name for dimension in sweep.space], rows))
    print()
    print("\n".join(remarks))
    html = sweep_page(f"Folio: {sweep.name}", sweep.space, rows, outcomes, importances, remarks)
    with writing(sweep.out_dir):
        (sweep.out_dir / "sweep.html").write_text(html, encoding="utf-8")
        write_json(sweep.out_dir / "results.json", as_json(rows, outcomes, importances))
    print(f"{short_path(sweep.out_dir / 'sweep.html')}: curves, parallel coordinates, importance; open it in a browser")


def main(argv: list[str]) -> None:
    if "--help" in argv or "-h" in argv:
        print(help_text(SweepConfig))
        return
    sweep = parse_sweep(argv)
    busy = f"another process runs the sweep in {sweep.out_dir}; wait for it, or choose another --out_dir"
    with ExitStack() as stack:
        with writing(sweep.out_dir):
            sweep.out_dir.mkdir(parents=True, exist_ok=True)
            if not sweep.cfg.storage:
                stack.enter_context(locked(sweep.out_dir / ".sweep.lock", busy))
        stack.enter_context(reporting_a_lost_database())
        study = open_sweep(sweep)
        stopped = Runner(with_copied_files(sweep), study).run()
        states = {outcome.state for outcome in sweep.outcomes(study)}
        if states - {"waiting", "running"}:
            show_results(sweep, study)
    if stopped:
        print(f"stopped {stopped}; the same command continues")
        raise SystemExit(130)
    if "finished" not in states:
        raise UserError("no run has finished; correct what made them fail, and repeat the command with --retry_failed")


def with_copied_files(sweep: Sweep) -> Sweep:
    """The sweep with copies of its config files, because people edit those for the next experiment."""
    arguments = list(sweep.arguments)
    for number, argument in enumerate(arguments):
        if not argument.startswith("--"):
            copy = sweep.out_dir / f"{number}-{Path(argument).name}"
            with writing(sweep.out_dir), atomic_write(copy) as temporary:
                temporary.write_bytes(settings.find_config(argument).read_bytes())
            arguments[number] = str(copy)
    return replace(sweep, arguments=arguments)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn a failure to write in the block into one line. Raises UserError."""
    try:
        yield
    except OSError as error:
        raise cannot_write(folder, error) from None


if __name__ == "__main__":
    run_script(main)
