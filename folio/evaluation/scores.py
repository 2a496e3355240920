"""What evaluation reports of a model: values with their intervals, and how much of each text the model read."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from folio.data.sources.pairs import Pair
from folio.data.tokenizer import Tokenizer
from folio.evaluation.intervals import estimate_ratio, ratio_influence, share_interval

LOSS = "loss, nats per token"
MIN_RANGE = 16  # positions in the first range of halvings, at least


@dataclass(frozen=True)
class Measure:
    """A ratio of two sums over documents, for example nats over tokens."""

    source: str  # the text or task that was measured on
    name: str
    unit: str  # what the documents are: "documents", "blocks of 1,024 bytes", "passages", ...
    values: np.ndarray  # (n,)
    weights: np.ndarray  # (n,)
    better: str = "lower"  # or "higher"
    transform: Callable[[float], float] = float  # from the ratio to the reported value
    is_share: bool = False  # each value is between 0 and its weight

    @property
    def ratio(self) -> float:
        return float(self.values.sum() / self.weights.sum())

    @property
    def influence(self) -> np.ndarray:
        """How far each document moves the ratio, times n: (n,)."""
        return ratio_influence(self.values, self.weights)

    def row(self) -> dict[str, Any]:
        """Its part of a row of the table."""
        estimate = estimate_ratio(self.ratio, self.influence)
        known = estimate.half_width is not None
        low, high = estimate.low, estimate.high
        if known and self.is_share:
            low, high = self._interval_of_share(low, high)
        return {
            "of": self.source,
            "measure": self.name,
            "value": self.transform(self.ratio),
            "low": self.transform(low) if known else None,
            "high": self.transform(high) if known else None,
            "n": len(self.values),
            "over": self.unit,
        }

    def _interval_of_share(self, low: float, high: float) -> tuple[float, float]:
        """An interval within 0 and 1: of hits and misses by Wilson's method, which also has a width if all are hits."""
        weight = self.weights[0]
        if weight and (self.weights == weight).all() and np.isin(self.values, (0, weight)).all():
            return share_interval(int((self.values == weight).sum()), len(self.values))
        return max(0.0, low), min(1.0, high)


def halvings(context: int) -> list[tuple[int, int]]:
    """The positions 1 to `context` as ranges (first, last): the second half, the second half of the rest, and so on.

    The range that begins at 1 has 16 to 31 positions, or `context` if that is less.
    """
    ranges, last = [], context
    while last >= 2 * MIN_RANGE:
        ranges.append((last // 2 + 1, last))
        last //= 2
    return [(1, last), *reversed(ranges)]


@dataclass(frozen=True)
class PositionLoss:
    """The loss at each position of W windows of a text, where a token at position p is predicted from p tokens."""

    source: str  # the text that was measured on
    windows: str  # sha256 of the tokens of the windows
    block_size: int  # context in training
    nats: np.ndarray  # (W, T) loss of each token, 0 if it does not count; the model has only the first T of N positions
    counted: np.ndarray  # (W, N) whether a token counts

    def rows(self) -> list[dict[str, Any]]:
        """A row per range of positions, whose value is None if the model lacks a position, or if no token counts."""
        rows = []
        for first, last in halvings(self.counted.shape[1]):
            nats, n_tokens = (column[:, first - 1 : last].sum(axis=1) for column in (self.nats, self.counted))  # (W,)
            windows = n_tokens > 0
            row = {"of": self.source, "measure": LOSS, "value": None, "low": None, "high": None, "n": 0}
            if last <= self.nats.shape[1] and windows.any():
                row = Measure(self.source, LOSS, "windows", nats[windows], n_tokens[windows]).row()
            rows.append({**row, "over": "windows", "first": first, "last": last, "block_size": self.block_size})
        return rows

    def curve(self) -> list[float | None]:
        """The mean loss at each of the N positions, in nats; None if the model lacks it, or if no token counts."""
        nats, n_tokens = self.nats.sum(axis=0), self.counted.sum(axis=0)  # (T,), (N,)
        means = [float(total / n) if n else None for total, n in zip(nats, n_tokens, strict=False)]
        return means + [None] * (len(n_tokens) - len(means))


@dataclass(frozen=True)
class Reading:
    """What a model read of a text, and how much of it was found in the model's training data."""

    characters: int | None = None  # of the text; None: a data set, which stores only tokens
    unknown: Counter[str] = field(default_factory=Counter)  # characters that were left out, and how often
    bytes: int | None = None  # of a validation set
    probes: int | None = None  # passages that were looked up in the training data; None: it was not searched
    probes_matched: int | None = None  # how many of them occur there

    @property
    def left_out(self) -> int | None:
        return None if self.characters is None else self.unknown.total()


def read_characters(texts: Iterable[str], tokenizer: Tokenizer) -> Reading:
    """Count the characters of some texts, and those that are not in the vocabulary."""
    characters, unknown = 0, Counter()
    for text in texts:
        characters += len(text)
        if tokenizer.count_unknown(text):
            unknown += Counter({c: n for c, n in Counter(text).items() if tokenizer.count_unknown(c)})
    return Reading(characters, unknown)


@dataclass
class Evaluation:
    """What was measured of one model. Each text or task adds to it."""

    run: str
    measures: list[Measure] = field(default_factory=list)
    readings: dict[str, Reading] = field(default_factory=dict)  # by the name of the text or task
    positions: list[PositionLoss] = field(default_factory=list)
    more_rows: list[dict[str, Any]] = field(default_factory=list)  # of what is not a ratio of sums, such as a distance
    groups: list[dict[str, Any]] = field(default_factory=list)  # rows of answers.group_rows
    answers: list[dict[str, Any]] = field(default_factory=list)  # the pairs with the model's answers, or its pieces
    signatures: dict[str, str] = field(default_factory=dict)  # of sacrebleu, by measure
    pairs: dict[str, list[Pair]] = field(default_factory=dict)  # the pairs of the answers, by their source

    def rows(self) -> list[dict[str, Any]]:
        """A row of the table for each measure and range of positions, and the others."""
        rows = []
        measured = [measure.row() for measure in self.measures] + self.more_rows
        measured += [row for losses in self.positions for row in losses.rows()]
        for row in measured:
            reading = self.readings[row["of"]]
            characters = {"characters": reading.characters, "left_out": reading.left_out}
            overlap = {"probes": reading.probes, "probes_matched": reading.probes_matched}
            rows.append({"run": self.run, **row, **characters, **overlap})
        return rows

    def curves(self) -> list[dict[str, Any]]:
        """For each text, the mean loss at each position."""
        return [
            {"run": self.run, "of": losses.source, "block_size": losses.block_size, "losses": losses.curve()}
            for losses in self.positions
        ]


def collect_results(models: Sequence[Evaluation]) -> dict[str, Any]:
    """What was measured of all models, as JSON."""
    results: dict[str, Any] = {"results": [row for model in models for row in model.rows()]}
    if any(model.positions for model in models):
        results["curves"] = [curve for model in models for curve in model.curves()]
    if signatures := {name: text for model in models for name, text in model.signatures.items()}:
        results |= {"signatures": signatures, "groups": [row for model in models for row in model.groups]}
    return results
