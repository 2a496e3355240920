"""The test of an experiment's arms: after each pair, the difference so far, until the verdict is known."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from folio.base.settings import Settings
from folio.base.terminal import say
from folio.evaluation.sequential import kept_p, look, verdict
from folio.experiments.ideas.experiment import Experiment, units
from folio.experiments.ideas.pair_queue import Pair
from folio.experiments.ideas.paired_runs import are_identical, measured, remove_weights

IDENTICAL = "identical"


class PairedTest:
    """What the complete pairs of an experiment show."""

    def __init__(self, experiment: Experiment, cfg: Settings, level: float):
        """cfg: the settings of tools/ab.py. level: of the p-value at which the idea is kept."""
        self.experiment, self.spread, self.cfg, self.level = experiment, experiment.spread, cfg, level
        self.factors, self.problem = (1.0, 1.0), None  # of the losses of A and B; why they are not comparable
        self.is_identical = False
        self.decisions: dict[int, bool] = {}  # by number of pairs

    def is_decided(self, pairs: Sequence[Pair]) -> bool:
        """Return whether the verdict is known. The first call with a number of pairs prints a line about the last."""
        if len(pairs) not in self.decisions:
            if len(pairs) == 1:
                self.begin(pairs[0])
            say(self.describe_pair(pairs))
            self.decisions[len(pairs)] = self.is_enough(pairs)
            if not self.cfg.keep and not self.is_identical:
                remove_weights(self.experiment, pairs)
        return self.decisions[len(pairs)]

    def is_enough(self, pairs: Sequence[Pair]) -> bool:
        verdict = self.verdict(pairs)
        if verdict == "better" and self.cfg.confirm:
            return self.is_kept(pairs)
        return verdict != "undecided" or len(pairs) >= self.cfg.max_seeds

    def is_kept(self, pairs: Sequence[Pair]) -> bool:
        """Return whether the idea is kept; see sequential.lord_levels."""
        return kept_p(self.differences(pairs)) <= self.level

    def begin(self, pair: Pair) -> None:
        """Find out whether the losses are comparable, and whether there is anything to compare."""
        factors = units(self.experiment, pair)
        if isinstance(factors, str):
            self.problem = factors
        else:
            self.factors = factors
            self.is_identical = are_identical(self.experiment, pair)

    @property
    def unit(self) -> str:
        return "nats per token" if self.factors == (1.0, 1.0) else "nats per byte"

    def losses(self, pairs: Sequence[Pair]) -> list[tuple[float, float]]:
        """Return the lowest validation losses of A and B in each pair."""
        return [(a.loss * self.factors[0], b.loss * self.factors[1]) for a, b in pairs]

    def differences(self, pairs: Sequence[Pair]) -> np.ndarray:
        """Return B's loss minus A's in each pair: (N,)."""
        return np.array([b - a for a, b in self.losses(pairs)])

    def verdict(self, pairs: Sequence[Pair]) -> str:
        if self.problem:
            return "failed"
        return IDENTICAL if self.is_identical else verdict(self.differences(pairs), self.spread, self.cfg.smallest)[0]

    def describe_pair(self, pairs: Sequence[Pair]) -> str:
        a, b = self.losses(pairs)[-1]
        line = f"pair {len(pairs)}, seed {pairs[-1][0].seed}: A {a:.4f}, B {b:.4f}"
        now = look(self.differences(pairs), self.spread)
        if now.half_width is None:
            line += f", B - A {now.value:+.4f}"
        else:
            line += f"; B - A {now.value:+.4f}, {now.low:+.4f} to {now.high:+.4f} after {len(pairs)} pairs"
        if self.experiment.sweep.base.minutes and (ratio := speed_ratio(self.costs(pairs))):
            line += f"; B trains {ratio:.2f} times as many tokens per second"
        return line

    def measurements(self, pairs: Sequence[Pair], facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return what the complete pairs add to the experiment's line of the ledger. facts: see runs.warm_up."""
        if not pairs:
            return {}
        now, costs = look(self.differences(pairs), self.spread), self.costs(pairs)
        return {
            "unit": self.unit,
            "losses": self.losses(pairs),
            "difference": now.value,
            "low": now.low,
            "high": now.high,
            "seconds": round(sum(outcome.seconds or 0 for pair in pairs for outcome in pair), 1),
            "speed_ratio": speed_ratio(costs),
            "models": [{**fact, **cost} for fact, cost in zip(facts, costs, strict=True)],
        }

    def costs(self, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
        """Return the tokens per second and peak memory of A and B."""
        return [measured(self.experiment, pairs, point) for point in range(2)]


def speed_ratio(costs: Sequence[dict[str, Any]]) -> float | None:
    """Return B's tokens per second, divided by A's; None if one is unknown."""
    a, b = (cost["tokens_per_second"] for cost in costs)
    return b / a if a and b else None
