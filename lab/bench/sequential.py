"""Measure how often the verdicts of tools/ab.py are wrong, and how many pairs they take, on simulated experiments.

    python lab/bench/sequential.py
    python lab/bench/sequential.py --noise=differences.json --experiments=20000

The difference of a pair, B - A, has a standard deviation of 1 and a mean, the effect. The noise is normal, of Student's
t with 5 degrees of freedom, or skewed (exponential); with --noise, it is drawn from real differences: a JSON list of
lists, one per experiment without an effect, each divided by its standard deviation, with random signs. An experiment
stops at the first verdict, or after 8 pairs. A ledger has ten experiments of 5 pairs, whose spread is estimated.

The methods it is compared with: Student's t at equal errors of all looks, calibrated in advance by simulation; the
mixture of Student's t over effects (Lai 1976; its variance is that of one standard deviation), which is valid for any
number of looks; and one test after 3 or 8 pairs.
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from scipy import optimize, stats

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from folio.base.number_format import aligned_table  # noqa: E402
from folio.base.settings import NonNegativeInt, PositiveInt, Settings, run_script  # noqa: E402
from folio.evaluation.sequential import LUCK, Spread, half_width, kept, kept_p  # noqa: E402

LOOKS = range(2, 9)
LEDGER = (10, 5)  # experiments and pairs
RATIOS = np.arange(-8, 8, 0.1)  # of a deviation to a spread, as a logarithm
Widths = Callable[[int, np.ndarray], np.ndarray]  # half widths, by the number of pairs and the deviations


@dataclass(frozen=True)
class SequentialConfig(Settings):
    experiments: PositiveInt = 20_000
    noise: str | None = None  # JSON file of real differences; None: simulated
    seed: NonNegativeInt = 0


@dataclass(frozen=True)
class Experiments:
    """Means and standard deviations of the first n differences of E experiments without an effect: (E,) each."""

    noise: np.ndarray  # (E, pairs)

    def look(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        return self.noise[:, :n].mean(axis=1), self.noise[:, :n].std(axis=1, ddof=1)

    def run(self, widths: Widths, effect: float = 0.0, smallest: float = 0.0) -> dict[str, float]:
        """Return shares of verdicts, of experiments whose intervals all contain the effect, and the mean of pairs."""
        n_experiments = len(self.noise)
        pairs = np.full(n_experiments, LOOKS[-1])
        different, small, missed = (np.zeros(n_experiments, bool) for _ in range(3))
        for n in LOOKS:
            mean, deviation = self.look(n)
            width = widths(n, deviation)
            mean = mean + effect
            running = ~(different | small)
            different |= running & (np.abs(mean) > width)
            small |= running & ~different & (np.abs(mean) + width <= smallest)
            pairs[running & (different | small)] = n
            missed |= np.abs(mean - effect) > width
        return {
            "different": different.mean(),
            "small": small.mean(),
            "pairs": pairs.mean(),
            "contained": 1 - missed.mean(),
        }


@lru_cache
def table(n: int, df: int) -> np.ndarray:
    """Return the logarithms of the half widths at deviations exp(RATIOS), for a ledger with a spread of 1."""
    return np.log(half_width(n, np.exp(RATIOS), Spread(1.0, df) if df else None))


def used(spread: np.ndarray | float | None = None) -> Widths:
    """The method of tools/ab.py. spread: of a ledger's estimate, per experiment."""
    df = LEDGER[0] * (LEDGER[1] - 1) if spread is not None else 0
    unit = 1.0 if spread is None else spread
    return lambda n, deviation: unit * np.exp(np.interp(np.log(deviation / unit), RATIOS, table(n, df)))


def equal_errors(rng: np.random.Generator, n_experiments: int = 200_000) -> Widths:
    """Student's t at equal errors of all looks, 5 % in all: critical values that 1 in 140 crosses first at each."""
    training = Experiments(rng.standard_normal((n_experiments, LOOKS[-1])))
    running, critical = np.ones(n_experiments, bool), {}
    for n in LOOKS:
        mean, deviation = training.look(n)
        t = np.abs(mean) * math.sqrt(n) / deviation
        critical[n] = np.sort(t[running])[-round(0.05 / len(LOOKS) * n_experiments)]
        running &= t <= critical[n]
    return lambda n, deviation: critical[n] * deviation / math.sqrt(n)


def mixture(n: int, deviation: np.ndarray) -> np.ndarray:
    """Lai 1976: the mixture of t over normal effects with the variance of one pair. Its Bayes factor is 20 at the end.

    With t = mean sqrt(n) / deviation and the variance ratio r = 1 / (1 + n), it is sqrt(r) ((1 + t^2 / (n - 1)) /
    (1 + r t^2 / (n - 1)))^(n / 2). For few pairs, it may never be 20: then, the interval is infinite.
    """
    r = 1 / (1 + n)

    def log_factor(t: float) -> float:
        return (math.log(r) + n * math.log((1 + t * t / (n - 1)) / (1 + r * t * t / (n - 1)))) / 2 - math.log(20)

    t = optimize.brentq(log_factor, 0, 1e9) if log_factor(1e9) > 0 else math.inf
    return t * deviation / math.sqrt(n)


def one_test(pairs: int) -> Widths:
    """Student's t after this many pairs, and no other look."""
    t = stats.t(pairs - 1).ppf(0.975)
    return lambda n, deviation: t * deviation / math.sqrt(n) if n == pairs else np.full(len(deviation), np.inf)


def draw(kind: str, shape: tuple[int, int], rng: np.random.Generator, real: Sequence[np.ndarray]) -> np.ndarray:
    """Return noise of standard deviation 1 and mean 0."""
    if kind == "real":
        pool = np.concatenate([np.asarray(d) / np.std(d) for d in real])
        pool = pool / math.sqrt(float((pool**2).mean()))
        return rng.choice(pool, shape) * rng.choice([-1, 1], shape)
    if kind == "t":
        return rng.standard_t(5, shape) / math.sqrt(5 / 3)
    return rng.exponential(1.0, shape) - 1 if kind == "skewed" else rng.standard_normal(shape)


def luck_among_kept(share: float, effect: float, rng: np.random.Generator, n_ideas: int = 200, n_ledgers: int = 40):
    """Return the share of the kept ideas that are luck, and of the true ones that are kept, with --confirm.

    An idea that is not true has no effect. All experiments have 16 pairs, as after --confirm.
    """
    lucky, kept_of_true = [], []
    for _ in range(n_ledgers):
        is_true = rng.random(n_ideas) < share
        differences = rng.standard_normal((n_ideas, 16)) - effect * is_true[:, None]
        is_kept = np.array(kept([kept_p(d) for d in differences]))
        lucky.append((is_kept & ~is_true).sum() / max(is_kept.sum(), 1))
        kept_of_true.append((is_kept & is_true).sum() / max(is_true.sum(), 1))
    return float(np.mean(lucky)), float(np.mean(kept_of_true))


def main(cfg: SequentialConfig) -> None:
    rng = np.random.default_rng(cfg.seed)
    real = json.loads(Path(cfg.noise).read_text(encoding="utf-8")) if cfg.noise else []
    shape = (cfg.experiments, LOOKS[-1])
    normal = Experiments(draw("normal", shape, rng, real))
    estimate = np.sqrt(rng.chisquare(LEDGER[0] * (LEDGER[1] - 1), cfg.experiments) / (LEDGER[0] * (LEDGER[1] - 1)))

    print("False verdicts without an effect, and verdicts with effects of 1, 2, 5 standard deviations (mean pairs)\n")
    methods = {
        "used, no ledger": used(),
        "used, ledger of the true spread": used(estimate),
        "used, ledger 1.5 times too small": used(estimate / 1.5),
        "used, ledger 3 times too small": used(estimate / 3),
        "used, ledger 3 times too large": used(estimate * 3),
        "equal errors of all looks": equal_errors(rng),
        "mixture of t (Lai)": mixture,
        "one test after 3 pairs": one_test(3),
        "one test after 8 pairs": one_test(8),
    }
    rows = []
    for name, widths in methods.items():
        null = normal.run(widths)
        power = [normal.run(widths, effect) for effect in (1, 2, 5)]
        cells = [f"{result['different']:.3f} ({result['pairs']:.2f})" for result in power]
        rows.append([name, f"{null['different']:.3f}", *cells, f"{null['contained']:.3f}"])
    print(aligned_table(["method", "false", "1", "2", "5", "all intervals contain the truth"], rows))

    print("\nOther noise: false verdicts, without a ledger and with one of the true spread\n")
    kinds = ["normal", "t", "skewed", *(["real"] if real else [])]
    rows = []
    for kind in kinds:
        experiments = Experiments(draw(kind, shape, rng, real))
        rows.append([kind, *(f"{experiments.run(widths)['different']:.3f}" for widths in (used(), used(estimate)))])
    print(aligned_table(["noise", "no ledger", "ledger"], rows))

    print("\nNo difference larger than d, without a ledger and with one: wrong if the effect is d; right if it is 0\n")
    rows = []
    for d in (1.0, 1.5, 2.0, 2.5, 3.0, 4.0):
        cells = [normal.run(widths, effect, d)["small"] for widths in (used(), used(estimate)) for effect in (d, 0.0)]
        rows.append([f"{d:g}", f"{0.005 / d:.4f}", *(f"{cell:.3f}" for cell in cells)])
    heads = ["d / spread", "spread at d = 0.005", "wrong", "right", "wrong, ledger", "right, ledger"]
    print(aligned_table(heads, rows))

    print(f"\nLuck among 200 ideas: at most {LUCK:.0%} of the kept; true ideas that are kept\n")
    rows = []
    for share in (0.05, 0.2, 0.5):
        for effect in (1.0, 2.0):
            lucky, kept_of_true = luck_among_kept(share, effect, rng)
            rows.append([f"{share:.0%}", f"{effect:g}", f"{lucky:.3f}", f"{kept_of_true:.2f}"])
    print(aligned_table(["true ideas", "effect", "luck among kept", "kept of true"], rows))


if __name__ == "__main__":
    run_script(main, SequentialConfig)
