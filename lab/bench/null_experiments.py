"""Count the false verdicts of tools/ab.py on arms that differ without an effect, with the losses of real runs.

    python lab/ideas/make_branches.py
    python tools/sweep.py config/shakespeare_char.py code=idea/base,idea/null-rename,idea/null-rounding --seeds=240 \
        --jobs=2 --max_iters=50 --eval_interval=50 --sample_tokens=0 --snapshots=0 --out_dir=nulls
    python lab/bench/null_experiments.py nulls
    python lab/bench/sequential.py --noise=nulls/differences.json

The first arm is A, and each other one is B. The pairs of an experiment are those of the next seeds, until its verdict
is known, so that no two experiments share a pair. With a ledger, each experiment knows the spread of all before it, of
all kinds, in an order that alternates between them.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from folio.base.files import write_json  # noqa: E402
from folio.base.settings import ConfigError, PositiveFloat, Settings, run_script  # noqa: E402
from folio.base.terminal import table  # noqa: E402
from folio.evaluation.sequential import MAX_PAIRS, pooled_spread, verdict  # noqa: E402
from folio.experiments.sweep.arms import CODE  # noqa: E402
from lab.bench.sweeps import folder_problems, read_losses  # noqa: E402

VERDICTS = ("better", "worse", "no difference", "undecided")


@dataclass(frozen=True)
class NullBenchConfig(Settings):
    sweep: tuple[str, ...] = ()  # folder of a sweep over code, with many seeds
    base: str = "idea/base"  # the arm that is A
    max_seeds: Annotated[int, Ge(2), Le(MAX_PAIRS)] = 8  # pairs after which a verdict is undecided
    smallest: PositiveFloat = 0.005  # see tools/ab.py

    def problems(self) -> list[tuple[str, str]]:
        """Require one folder with results."""
        return folder_problems(self.sweep)


def experiments(
    pairs: Mapping[str, np.ndarray], cfg: NullBenchConfig, has_ledger: bool
) -> dict[str, list[tuple[str, np.ndarray]]]:
    """Return the verdict of each experiment and its differences, by kind. pairs: B's losses minus A's, by kind.

    An experiment begins if there are enough pairs for all its looks.
    """
    results: dict[str, list[tuple[str, np.ndarray]]] = {kind: [] for kind in pairs}
    ledger: list[np.ndarray] = []
    left = dict(pairs)
    while any(len(values) >= cfg.max_seeds for values in left.values()):
        for kind in [kind for kind, values in left.items() if len(values) >= cfg.max_seeds]:
            spread = pooled_spread(ledger) if has_ledger else None
            result, n = verdict(left[kind][: cfg.max_seeds], spread, cfg.smallest)
            results[kind].append((result, left[kind][:n]))
            ledger.append(left[kind][:n])
            left[kind] = left[kind][n:]
    return results


def row(kind: str, results: list[tuple[str, np.ndarray]]) -> list[str]:
    counts = [sum(result == name for result, _ in results) for name in VERDICTS]
    pairs = np.mean([len(values) for _, values in results]) if results else 0
    false = f"{sum(counts[:2])} of {len(results)}"
    return [kind, false, *map(str, counts), f"{pairs:.1f}"]


def main(cfg: NullBenchConfig) -> None:
    losses = read_losses(cfg.sweep[0], cfg.max_seeds)
    base = losses.pop(f"{CODE}={cfg.base}", None)
    if base is None:
        raise ConfigError(f"base={cfg.base} is not an arm of {cfg.sweep[0]}: {', '.join(losses)}")
    pairs = {name.removeprefix(f"{CODE}="): values - base for name, values in losses.items()}
    for kind, values in pairs.items():
        print(f"{kind}: {len(values)} pairs, B - A {values.mean():+.5f}, standard deviation {values.std(ddof=1):.5f}")
    rows = []
    for has_ledger in (False, True):
        results = experiments(pairs, cfg, has_ledger)
        suffix = ", with a ledger" if has_ledger else ""
        rows += [row(f"{kind}{suffix}", kind_results) for kind, kind_results in results.items()]
        rows.append(row(f"all{suffix}", [result for kind_results in results.values() for result in kind_results]))
    print()
    print(table(["B", "false", *VERDICTS, "mean pairs"], rows, None))
    path = Path(cfg.sweep[0], "differences.json")
    write_json(path, [values.tolist() for values in pairs.values()])
    print(f"\n{path}: the differences of all pairs, for python lab/bench/sequential.py --noise={path}")


if __name__ == "__main__":
    run_script(main, NullBenchConfig)
