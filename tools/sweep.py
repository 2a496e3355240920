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

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import folio.machine.openmp  # noqa: E402, F401  # isort: skip  (before torch)
from folio import UserError  # noqa: E402
from folio.base.commands import short_path  # noqa: E402
from folio.base.files import write_json  # noqa: E402
from folio.base.packages import require  # noqa: E402
from folio.base.settings import NonEmptyStr, PositiveInt, Settings, help_text, run_script  # noqa: E402
from train import TrainConfig  # noqa: E402


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


def main(argv: list[str]) -> None:
    if "--help" in argv or "-h" in argv:
        print(help_text(SweepConfig))
        return
    require("a sweep", "optuna", "sqlalchemy", "scipy")
    from folio.experiments.sweep.arguments import parse_sweep
    from folio.experiments.sweep.runner import Runner
    from folio.experiments.sweep.study import reporting_a_lost_database
    from folio.experiments.sweep.sweep_folder import reserve_folder, with_copied_files

    cfg, sweep = parse_sweep(SweepConfig, TrainConfig, argv)
    with reserve_folder(sweep.out_dir, is_shared=bool(cfg.storage)), reporting_a_lost_database():
        study = open_sweep(cfg, sweep)
        stopped = Runner(with_copied_files(sweep), study, cfg.jobs).run()
        states = {outcome.state for outcome in sweep.outcomes(study)}
        if states - {"waiting", "running"}:
            show_results(sweep, study)
    if stopped:
        print(f"stopped {stopped}; the same command continues")
        raise SystemExit(130)
    if "finished" not in states:
        raise UserError("no run has finished; correct what made them fail, and repeat the command with --retry_failed")


def open_sweep(cfg: SweepConfig, sweep: Any) -> Any:
    """The study of a sweep, with its trials. Raises UserError."""
    from folio.experiments.sweep.study import open_storage, open_study, sqlite_url

    grace_period = cfg.grace_period if cfg.storage else None
    study = open_study(
        open_storage(cfg.storage or sqlite_url(sweep.out_dir / "study.db"), grace_period),
        sweep.name,
        sweep.record,
        sweep.space,
        sweep.first_trials(),
        prune_after=sweep.evaluations // 3 if sweep.is_search and cfg.prune else None,
        alone=cfg.storage is None,  # this process holds the lock of the folder
    )
    if cfg.retry_failed:
        study.retry_failed()
    if sweep.is_search:  # with more seeds than before
        finished = {outcome.point: outcome.params for outcome in study.outcomes() if outcome.state == "finished"}
        study.add(finished.items(), sweep.seeds)
    if not cfg.storage:  # otherwise, another worker may want them
        study.withdraw(sweep.points, sweep.seeds)
    return study


def show_results(sweep: Any, study: Any) -> None:
    """Print the table; write sweep.html and results.json."""
    from folio.experiments.sweep.results import as_json, format_table, notes, summarize
    from folio.experiments.sweep.results_page import sweep_page
    from folio.experiments.sweep.sweep_folder import writing

    outcomes = sweep.outcomes(study)
    rows, importances = summarize(outcomes, sweep.seeds), study.importances()
    remarks = notes(rows, outcomes, sweep.seeds, sweep.is_search)
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


if __name__ == "__main__":
    run_script(main)
