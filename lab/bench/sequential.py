"""Measure how often the verdicts of folio/evaluation/sequential.py are false, and how many pairs they take.

    python lab/bench/sequential.py
    python lab/bench/sequential.py --experiments=5000 --noise=differences.json

Effects and spreads are in standard deviations (SD) of a pair's difference. An experiment has at most 8 pairs. A verdict
is false if it says "better" or "worse" without an effect. A ledger is ten experiments of four pairs, with 30 degrees of
freedom. --noise: a JSON list of lists of measured differences. Each list is standardized, and the values are drawn with
random signs.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from folio.base.files import read_json  # noqa: E402
from folio.base.settings import NonNegativeInt, PositiveInt, Settings, run_script  # noqa: E402
from folio.evaluation.sequential import (  # noqa: E402
    KEPT_LOOKS,
    MAX_PAIRS,
    MIN_DEVIATION,
    Spread,
    half_width,
    lord_levels,
)

PAIRS = 8
LEDGER_DF = 30
LOGS = np.arange(-9, 6, 0.1)  # of deviations, between which widths are interpolated

Width = Callable[[int, np.ndarray], np.ndarray]  # half widths after n pairs, by the deviation


@dataclass(frozen=True)
class SequentialBenchConfig(Settings):
    experiments: PositiveInt = 20_000  # simulated experiments per figure
    ledgers: PositiveInt = 400  # simulated ledgers per figure
    noise: str | None = None  # JSON file of measured differences
    seed: NonNegativeInt = 0  # random seed


def noises(cfg: SequentialBenchConfig) -> dict[str, np.ndarray]:
    """Return differences without an effect by the name of their distribution: (experiments, MAX_PAIRS), variance 1."""
    rng, shape = np.random.default_rng(cfg.seed), (cfg.experiments, MAX_PAIRS)
    drawn = {
        "normal": rng.normal(size=shape),
        "Student's t, 5 df": rng.standard_t(5, size=shape) / math.sqrt(5 / 3),
        "skewed (exponential)": rng.exponential(size=shape) - 1,
    }
    if cfg.noise:
        lists = [np.array(values, float) for values in read_json(Path(cfg.noise)) if len(set(values)) > 1]
        pool = np.concatenate([(values - values.mean()) / values.std() for values in lists])
        drawn["measured"] = rng.choice(pool, size=shape) * rng.choice([-1, 1], size=shape)
    return drawn


@cache
def log_widths(n: int, df: int) -> np.ndarray:
    return np.log(half_width(n, np.exp(LOGS), Spread(1.0, df) if df else None))


def used(ledger: np.ndarray | None = None) -> Width:
    """Widths of the module. ledger: its estimated spread in each experiment."""
    if ledger is None:
        return lambda n, s: s * math.exp(np.interp(0.0, LOGS, log_widths(n, 0)))
    return lambda n, s: ledger * np.exp(np.interp(np.log(s / ledger), LOGS, log_widths(n, LEDGER_DF)))


def equal_spending(rng: np.random.Generator) -> Width:
    """Student's t, where each look adds a seventh of 5 % of false verdicts: exact quantiles of 400,000 experiments."""
    values = rng.normal(size=(400_000, PAIRS))
    critical = {}
    for n in range(2, PAIRS + 1):
        t = np.abs(values[:, :n].mean(1)) * math.sqrt(n) / values[:, :n].std(1, ddof=1)
        critical[n] = np.quantile(t, 1 - 0.05 / 7 * 400_000 / len(t))
        values = values[t <= critical[n]]
    return lambda n, s: critical[n] * s / math.sqrt(n)


def mixture(n: int, s: np.ndarray) -> np.ndarray:
    """Lai's (1976) confidence sequence by Robbins' mixture: effects are normal, with a deviation of 2 SD."""
    growth = 1 + 4 * n
    bound = (20**2 * growth) ** (1 / n)
    return s * math.sqrt((n - 1) * (bound - 1) / (1 - bound / growth) / n) if bound < growth else s * np.inf


def fixed(pairs: int, t: float) -> Width:
    """The t-test after a fixed number of pairs; t: its quantile."""
    return lambda n, s: s * (t / math.sqrt(n) if n == pairs else np.inf)


def moments(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the means and standard deviations of the rows. Measured differences may be drawn twice."""
    return values.mean(axis=1), np.maximum(values.std(axis=1, ddof=1), MIN_DEVIATION)


def run(noise: np.ndarray, effect: float, width: Width, last: int = PAIRS) -> tuple[float, float, float]:
    """Return the shares of experiments with a verdict and with intervals that all contain the effect, and the pairs."""
    running, pairs, hit = np.full(len(noise), True), np.full(len(noise), last), np.full(len(noise), True)
    for n in range(2, last + 1):
        mean, deviation = moments(effect + noise[:, :n])
        h = width(n, deviation)
        hit &= np.abs(mean - effect) <= h
        stops = running & (np.abs(mean) > h)
        pairs[stops] = n
        running &= ~stops
    return 1 - running.mean(), hit.mean(), pairs.mean()


def row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def header(*cells: str) -> None:
    print()
    row(*cells)
    print(f"|{'---|' * len(cells)}")


def verdicts(drawn: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    normal = drawn["normal"]
    methods = {"used": used(), "equal spending": equal_spending(rng), "t-mixture": mixture}
    methods |= {"t-test of 3 pairs": fixed(3, 4.303), "t-test of 8 pairs": fixed(8, 2.365)}
    header("without a ledger", "false", "intervals contain", *(f"{effect} SD: power, pairs" for effect in (1, 2, 3, 5)))
    for name, width in methods.items():
        last = 3 if name == "t-test of 3 pairs" else PAIRS
        false, coverage, _ = run(normal, 0, width, last)
        cells = [run(normal, effect, width, last) for effect in (1, 2, 3, 5)]
        row(name, f"{false:.1%}", f"{coverage:.1%}", *(f"{power:.3f}, {pairs:.2f}" for power, _, pairs in cells))
    row("used, up to 16", *(f"{x:.1%}" for x in run(normal, 0, used(), MAX_PAIRS)[:2]), *([""] * 4))
    header("true spread / ledger's", "false", "intervals contain", "power at 2 SD", "pairs at 2 SD", "without a ledger")
    estimate = np.sqrt(rng.chisquare(LEDGER_DF, len(normal)) / LEDGER_DF)
    for ratio in (1 / 3, 1 / 1.5, 1, 1.5, 2, 3):
        width = used(estimate / ratio)
        false, coverage, _ = run(normal, 0, width)
        power, _, pairs = run(normal, 2, width)
        own = run(normal, 2, used())[2]
        row(f"{ratio:.2g}", f"{false:.1%}", f"{coverage:.1%}", f"{power:.3f}", f"{pairs:.2f}", f"{own:.2f}")
    header("noise", "false, no ledger", "false, ledger", "contain, no ledger", "contain, ledger", "pairs at 2 SD")
    for name, noise in drawn.items():
        (a, b, _), (c, d, _) = (run(noise, 0, width) for width in (used(), used(estimate)))
        row(name, f"{a:.1%}", f"{c:.1%}", f"{b:.1%}", f"{d:.1%}", f"{run(noise, 2, used())[2]:.2f}")


def no_difference(noise: np.ndarray, rng: np.random.Generator) -> None:
    """The shares of experiments that end with "no difference" larger than 0.005."""
    header(
        "spread of a difference", "no effect: found, pairs", "with a ledger", "effect of 0.005: wrong", "with a ledger"
    )
    estimate = np.sqrt(rng.chisquare(LEDGER_DF, len(noise)) / LEDGER_DF)
    for spread in (0.001, 0.002, 0.0025, 0.003, 0.0035, 0.004, 0.005, 0.01):
        cells = []
        for effect in (0.0, 0.005 / spread):
            for width in (used(), used(estimate)):
                within, open_, pairs = np.zeros(len(noise), bool), np.full(len(noise), True), np.full(len(noise), PAIRS)
                for n in range(2, PAIRS + 1):
                    mean, deviation = moments(effect + noise[:, :n])
                    h = width(n, deviation)
                    direction, equal = np.abs(mean) > h, np.abs(mean) + h <= 0.005 / spread
                    within |= open_ & equal & ~direction
                    pairs[open_ & (equal | direction)] = n
                    open_ &= ~(equal | direction)
                cells.append(f"{within.mean():.1%}" + ("" if effect else f", {pairs.mean():.2f}"))
        row(f"{spread:g}", *cells)


def adaptive(p_values: np.ndarray, candidate: float, discard: float, level: float = 0.10) -> list[bool]:
    """SAFFRON (Ramdas et al. 2018), and ADDIS (Tian and Ramdas 2019) if discard < 1: which changes are kept."""
    gamma = np.arange(1, len(p_values) + 2) ** -1.6 / 2.285766
    clock, starts, flags = 0, [0], []  # the clock counts p-values between candidate and discard
    for p in p_values:
        budgets = ((level / 2 if k < 2 else level) * gamma[clock - start] for k, start in enumerate(starts))
        flags.append(bool(p <= min(candidate, (discard - candidate) * sum(budgets))))
        clock += candidate < p <= discard
        if flags[-1]:
            starts.append(clock)
    return flags


def kept_changes(cfg: SequentialBenchConfig, rng: np.random.Generator) -> None:
    """The mean share of false changes among the kept, and the share of the better changes that are kept."""
    from scipy.stats import t

    procedures: dict[str, Callable[[np.ndarray], list[bool]]] = {
        "LORD++": lambda p: [bool(a <= b) for a, b in zip(p, lord_levels(p), strict=False)],
        "SAFFRON": lambda p: adaptive(p, 0.5, 1.0),
        "ADDIS": lambda p: adaptive(p, 0.25, 0.5),
        "p <= 0.05": lambda p: list(p <= 0.05),
    }
    header("experiments, pairs", "better", "effect", *(f"{name}: false, kept" for name in procedures))
    for count, pairs, share, effect in [
        (count, pairs, share, effect)
        for count in (40, 200)
        for pairs in (8, 16)
        for share in (0.05, 0.2, 0.5)
        for effect in (1, 2, 5)
    ]:
        sums = {name: np.zeros(2) for name in procedures}
        n_better = 0
        for _ in range(cfg.ledgers * 40 // count):
            better = rng.random(count) < share
            values = rng.normal(size=(count, MAX_PAIRS)) - effect * better[:, None]
            looks = [n for n in KEPT_LOOKS if n <= pairs]
            stats = [values[:, :n].mean(1) * math.sqrt(n) / values[:, :n].std(1, ddof=1) for n in looks]
            p_values = [len(KEPT_LOOKS) * t.cdf(x, n - 1) for x, n in zip(stats, looks, strict=True)]
            p = np.minimum(1, np.min(p_values, axis=0))  # as kept_p
            n_better += better.sum()
            for name, procedure in procedures.items():
                flags = np.array(procedure(p))
                sums[name] += (flags & ~better).sum() / max(1, flags.sum()), (flags & better).sum()
        cells = (f"{a / (cfg.ledgers * 40 // count):.3f}, {b / max(1, n_better):.2f}" for a, b in sums.values())
        row(f"{count}, {pairs}", f"{share:.0%}", f"{effect} SD", *cells)


def main(cfg: SequentialBenchConfig) -> None:
    rng = np.random.default_rng(cfg.seed + 1)
    drawn = noises(cfg)
    verdicts(drawn, rng)
    no_difference(drawn["normal"], rng)
    kept_changes(cfg, rng)


if __name__ == "__main__":
    run_script(main, SequentialBenchConfig)
