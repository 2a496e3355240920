"""Train with many settings and several seeds, and compare the settings statistically.

    python tools/sweep.py config/shakespeare_char.py learning_rate=4e-3,8e-3 n_head=2,4 --max_iters=300
    python tools/sweep.py config/shakespeare_char.py learning_rate=1e-4..1e-1:log dropout=0..0.3 --trials=40 --minutes=1
    python tools/sweep.py config/shakespeare_char.py n_layer=2,3,4 --tokens=2e6 --seeds=5 --jobs=4
    python tools/sweep.py config/mine.py lr_schedule=cosine,wsd --out_dir=/shared/sweep   on each machine

Each combination of settings is a trial, which is trained with every seed. Lists of values form a grid. With --trials,
optuna searches lists and ranges, and prunes trials by their first run. Any setting of train.py can be varied, or set
for all trials as --name=value. Each run of train.py has its own folder, such as OUT_DIR/trial-000-seed-1337. Processes
and machines that run the same command in the same folder share its runs.

Ctrl-C, SIGTERM or closing the terminal stops the runs at a checkpoint; the same command resumes them, and adds runs
with more --seeds or --trials. At the end, a table shows the mean and the 95 % interval of each trial over its seeds,
and its difference from the best. OUT_DIR/sweep.html shows the curves, and results.json contains all results.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import folio.machine.openmp  # noqa: E402, F401  # isort: skip  (before torch)
from folio import UserError  # noqa: E402
from folio.base.commands import short_path  # noqa: E402
from folio.base.files import write_json  # noqa: E402
from folio.base.packages import require  # noqa: E402
from folio.base.settings import NonEmptyStr, PositiveInt, Settings, help_text, run_script  # noqa: E402
from folio.base.terminal import say, terminal_width  # noqa: E402
from folio.experiments import static_page  # noqa: E402
from folio.experiments.sweep.arguments import parse_sweep  # noqa: E402
from folio.experiments.sweep.definition import Sweep  # noqa: E402
from folio.experiments.sweep.folder_queue import FolderQueue  # noqa: E402
from folio.experiments.sweep.outcome import TrialSource  # noqa: E402
from folio.experiments.sweep.results import as_json, format_table, notes, summarize  # noqa: E402
from folio.experiments.sweep.results_page import sweep_page  # noqa: E402
from folio.experiments.sweep.runner import Runner  # noqa: E402
from folio.experiments.sweep.sweep_folder import checked_definition, copy_config_files, freeze_code, report_write_errors  # noqa: E402
from train import TrainConfig  # noqa: E402


@dataclass(frozen=True)
class SweepConfig(Settings):
    # --- trials ---
    settings: tuple[str, ...] = ()  # settings of train.py to vary: NAME=VALUE,VALUE or NAME=LOW..HIGH[:log]
    seeds: PositiveInt = 3  # runs per trial, with the seeds --seed, --seed + 1, ...
    trials: PositiveInt | None = None  # number of combinations in an optuna search; None: the whole grid
    prune: bool = True  # in a search, stop trials that are worse than the median at the same evaluation
    retry_failed: bool = False  # True: retry failed runs
    tokens: PositiveInt | None = None  # training tokens per run; sets max_iters; None: use --max_iters or --minutes
    # --- machines and output ---
    out_dir: NonEmptyStr | None = None  # folder of the sweep; None: sweep-NAME, after the config file
    jobs: PositiveInt | None = None  # number of concurrent runs; None: one per GPU, or 1 without GPUs
    storage: NonEmptyStr | None = None  # database of a search on machines without a shared folder; None: in OUT_DIR


def main(argv: list[str]) -> None:
    if "--help" in argv or "-h" in argv:
        print(help_text(SweepConfig))
        return
    cfg, sweep = parse_sweep(SweepConfig, TrainConfig, argv)
    if sweep.is_search:
        require("--trials", "optuna", "sqlalchemy")
    sweep = freeze_code(sweep)
    with open_trials(cfg, sweep) as trials:
        runner = Runner(copy_config_files(sweep), trials, cfg.jobs)
        stopped = runner.run()
        states = {outcome.state for outcome in trials.outcomes()}
        if states - {"waiting", "running"}:
            show_results(sweep, trials)
    if stopped:
        say(f"stopped {stopped}; repeat the command to resume")
        raise SystemExit(128 + runner.stopped_by)
    if "finished" not in states:
        raise UserError("no run has finished; fix the errors, and repeat the command with --retry_failed")


@contextmanager
def open_trials(cfg: SweepConfig, sweep: Sweep) -> Iterator[TrialSource]:
    """Open the trials of a sweep. Raises UserError, also if the storage of a search fails in the block."""
    with ExitStack() as stack:
        if sweep.is_search:
            from folio.experiments.sweep.study import open_study, storage_errors

            stack.enter_context(storage_errors())
        with checked_definition(sweep):
            trials = open_study(sweep, cfg.storage, cfg.prune) if sweep.is_search else FolderQueue(sweep)
            if cfg.retry_failed:
                trials.retry_failed()
        yield trials


def show_results(sweep: Sweep, trials: TrialSource) -> None:
    """Print the table; write sweep.html and results.json."""
    outcomes = trials.outcomes()
    rows, importances = summarize(outcomes, sweep.seeds), trials.importances()
    remarks = notes(rows, outcomes, sweep.seeds, sweep.is_search)
    if importances:
        shares = ", ".join(f"{name} {share:.2f}" for name, share in importances.items())
        remarks.append(f"Importance of each setting{' for the best trials' if sweep.is_search else ''}: {shares}.")
    print()
    print(format_table([dimension.name for dimension in sweep.space], rows, terminal_width(sys.stdout)))
    print()
    say(*remarks)
    html = sweep_page(f"Folio: {sweep.name}", sweep.space, rows, outcomes, importances, remarks)
    with report_write_errors(sweep.out_dir):
        static_page.write(sweep.out_dir / "sweep.html", html)
        write_json(sweep.out_dir / "results.json", as_json(rows, outcomes, importances))
    say(f"{short_path(sweep.out_dir / 'sweep.html')}: curves, parallel coordinates, importance; open it in a browser")


if __name__ == "__main__":
    run_script(main, needs_output=False)
