"""What evaluation reports of a model: values with their intervals, and how much of each text the model read."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from folio.statistics import estimate_ratio, ratio_influence
from folio.tokenizer import Tokenizer

LOSS = "loss, nats per token"


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
        return {
            "of": self.source,
            "measure": self.name,
            "value": self.transform(self.ratio),
            "low": self.transform(estimate.low) if known else None,
            "high": self.transform(estimate.high) if known else None,
            "n": len(self.values),
            "over": self.unit,
        }


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


class Evaluation(NamedTuple):
    """What was measured of one model."""

    run: str
    measures: list[Measure]
    readings: dict[str, Reading]  # by the name of the text or task

    def rows(self) -> list[dict[str, Any]]:
        """A row of the table for each measure."""
        rows = []
        for measure in self.measures:
            reading = self.readings[measure.source]
            characters = {"characters": reading.characters, "left_out": reading.left_out}
            overlap = {"probes": reading.probes, "probes_matched": reading.probes_matched}
            rows.append({"run": self.run, **measure.row(), **characters, **overlap})
        return rows
