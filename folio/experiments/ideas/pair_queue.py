"""The queue of an experiment's runs: A and B with one seed, then with the next, until the verdict is known."""

from collections.abc import Callable, Sequence

from folio.experiments.sweep.definition import Sweep
from folio.experiments.sweep.folder_queue import FolderQueue
from folio.experiments.sweep.outcome import Outcome, Trial

Pair = tuple[Outcome, Outcome]  # of A and of B, with the same seed
A, B = 0, 1  # the points of a sweep over the code


class PairQueue(FolderQueue):
    """The runs of a sweep over two arms, one pair after the other. Which arm is first alternates."""

    def __init__(self, sweep: Sweep, is_decided: Callable[[Sequence[Pair]], bool]):
        """is_decided: whether the complete pairs, in the order of their seeds, are enough."""
        super().__init__(sweep)
        self.is_decided = is_decided
        by_key = {trial.key: trial for trial in self.trials}
        orders = [(A, B) if number % 2 == 0 else (B, A) for number in range(len(sweep.seeds))]
        self.pairs = [[by_key[arm, s] for arm in order] for s, order in zip(sweep.seeds, orders, strict=True)]

    def describe(self, trial: Trial) -> str:
        return f"{'AB'[trial.point]}, seed {trial.seed}"

    def runs_left(self, outcomes: Sequence[Outcome]) -> int:
        """The number of pairs is not known before the verdict."""
        return len(self.trials) - sum(outcome.state == "finished" for outcome in outcomes)

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes of the runs that are needed up to now, sorted by arm and seed."""
        outcomes = [outcome for pair in self.needed() for outcome in pair]
        if any(outcome.state == "failed" for outcome in outcomes):  # which ends the experiment
            outcomes = [outcome for outcome in outcomes if outcome.state != "waiting"]
        return sorted(outcomes, key=lambda outcome: outcome.point)

    def remaining(self) -> list[Trial]:
        """Return the runs that wait, in the order of their pair, followed by those that another process runs."""
        states = {(outcome.point, outcome.seed): outcome.state for outcome in self.outcomes()}
        trials = [trial for pair in self.pairs for trial in pair]
        return [trial for state in ("waiting", "running") for trial in trials if states.get(trial.key) == state]

    def complete(self) -> list[Pair]:
        """Return the pairs whose runs are finished, in the order of their seeds."""
        pairs = [sorted(pair, key=lambda outcome: outcome.point) for pair in self.needed()]
        return [(a, b) for a, b in pairs if a.state == b.state == "finished"]

    def needed(self) -> list[list[Outcome]]:
        """Return the outcomes of each pair that is complete, and of the next one unless the verdict is known."""
        pairs: list[list[Outcome]] = []
        complete: list[Pair] = []
        for trials in self.pairs:
            pairs.append([self.outcome(trial) for trial in trials])
            a, b = sorted(pairs[-1], key=lambda outcome: outcome.point)
            if not a.state == b.state == "finished":
                break
            complete.append((a, b))
            if self.is_decided(complete):
                break
        return pairs
