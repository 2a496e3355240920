"""Measure the false positive rate and the power of a sweep's significance test.

    python tools/sweep.py config/shakespeare_char.py learning_rate=8e-3,6e-3 --max_iters=100 --seeds=600 --out_dir=many
    python lab/bench/sweeps.py many

The runs of a sweep with many seeds are divided into disjoint comparisons. Identical settings: all runs of a comparison
have the same settings, and each "setting" is a group of runs with different seeds. Different settings: the sweep's
combinations, with the same seeds.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError  # noqa: E402
from folio.base.files import read_json  # noqa: E402
from folio.base.settings import PositiveInt, Settings, run_script  # noqa: E402
from folio.evaluation.intervals import differences_to_best  # noqa: E402
from folio.experiments.sweep.space import describe_point  # noqa: E402


@dataclass(frozen=True)
class SweepBenchConfig(Settings):
    sweep: tuple[str, ...] = ()  # folder of a sweep with many seeds
    seeds: PositiveInt = 3  # per setting in a comparison

    def problems(self) -> list[tuple[str, str]]:
        """Require one folder with results."""
        return folder_problems(self.sweep)


def folder_problems(sweep: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the problem of a setting `sweep` that does not name one folder with results."""
    if len(sweep) != 1:
        return [("sweep", "name the folder of one sweep, as in python lab/bench/sweeps.py many")]
    return [] if Path(sweep[0], "results.json").is_file() else [("sweep", "it has no results.json")]


def read_losses(folder: str, seeds: int) -> dict[str, np.ndarray]:
    """Return the losses of each combination of a sweep, by its settings, with the seeds that all of them share: (N,).

    Raises UserError if there are fewer than `seeds`.
    """
    path = Path(folder, "results.json")
    try:
        combinations = read_json(path)["combinations"]
        losses = {describe_point(row["params"]): row["losses"] for row in combinations if row["losses"]}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error!r}); repeat the sweep's command to write it again") from None
    shared = sorted(set.intersection(*map(set, losses.values())) if losses else [], key=int)
    if len(shared) < seeds:
        raise UserError(f"{folder}: its combinations share {len(shared)} seeds; a comparison needs {seeds}")
    return {name: np.array([by_seed[seed] for seed in shared]) for name, by_seed in losses.items()}


def main(cfg: SweepBenchConfig) -> None:
    losses = read_losses(cfg.sweep[0], cfg.seeds)
    table = np.array(list(losses.values()))  # (combinations, seeds)
    print(f"{table.shape[1]} seeds, {cfg.seeds} per setting in a comparison")
    for name, values in losses.items():
        print(f"{name}: mean {values.mean():.4f}, standard deviation {values.std(ddof=1):.4f}")
    for settings in (2, 3, 6):
        report(f"{settings} identical settings", [c for values in table for c in split(values, settings, cfg.seeds)])
    if len(table) > 1:
        pairs = [table[:, i : i + cfg.seeds] for i in range(0, table.shape[1] - cfg.seeds + 1, cfg.seeds)]
        report("different settings, the same seeds", pairs)


def split(values: np.ndarray, settings: int, seeds: int) -> list[np.ndarray]:
    """Split the runs of one combination, (n,), into disjoint comparisons: (settings, seeds) each."""
    n = len(values) // (settings * seeds)
    return list(values[: n * settings * seeds].reshape(n, settings, seeds))


def report(name: str, comparisons: list[np.ndarray]) -> None:
    significant = sum(any(e.low > 0 for e in differences_to_best(losses)) for losses in comparisons)
    if comparisons:
        share = significant / len(comparisons)
        print(f"{name}: {significant} of {len(comparisons)} comparisons ({share:.1%}) find a difference")


if __name__ == "__main__":
    run_script(main, SweepBenchConfig)
