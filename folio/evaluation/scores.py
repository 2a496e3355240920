"""Results of evaluating a model: values with confidence intervals, and how much of each text the model could read."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from folio.base.number_format import counted
from folio.data.shards import MIN_DOCUMENTS, Dataset
from folio.data.sources.pairs import Pair
from folio.data.tokenizer import Tokenizer
from folio.decoding.prompts import documents_of
from folio.evaluation.intervals import effective_number, estimate_ratio, ratio_influence, share_interval

LOSS = "loss, nats per token"
PREPARED_AGAIN = "prepared again since the training: may contain training text"
MIN_EFFECTIVE = 0.5  # share of the samples; with a smaller effective number, the table shows it, and a line warns
MIN_RANGE = 16  # minimum number of positions in the first range of halvings


@dataclass(frozen=True)
class Measure:
    """A ratio of two sums over documents, for example nats over tokens."""

    source: str  # name of the text or task
    name: str
    unit: str  # of the samples: "documents", "blocks of 1,024 bytes", "passages", ...
    values: np.ndarray  # (n,)
    weights: np.ndarray  # (n,)
    better: str = "lower"  # or "higher"
    transform: Callable[[float], float] = float  # from the ratio to the reported value
    is_share: bool = False  # each value is between 0 and its weight
    parts_of: int | None = None  # number of documents of which the samples are parts; None: they are independent
    stderr: float | None = None  # of the reported value, by lm-eval; None: another task, or it has none

    @property
    def ratio(self) -> float:
        return float(self.values.sum() / self.weights.sum())

    @property
    def effective(self) -> float:
        """The number of samples of equal weight whose mean would be as certain; n if all weights are equal."""
        return effective_number(self.weights)

    @property
    def influence(self) -> np.ndarray:
        """n times each document's influence on the ratio: (n,)."""
        return ratio_influence(self.values, self.weights)

    def row(self) -> dict[str, Any]:
        """The measure's cells of a row of the results."""
        estimate = estimate_ratio(self.ratio, self.influence, self.weights)
        low, high = estimate.low, estimate.high
        if low is not None:
            low, high = self._share_interval(low, high) if self.is_share else (low, high)
            try:
                low, high = self.transform(low), self.transform(high)
            except OverflowError:  # the interval of a perplexity over a few very unlikely samples
                low = high = None
        row = {
            "of": self.source,
            "measure": self.name,
            "value": self.transform(self.ratio),
            "low": low,
            "high": high,
            "n": len(self.values),
            "effective": self.effective,
            "over": self.unit,
        }
        return row if self.stderr is None else {**row, "stderr": self.stderr}

    def warning(self) -> str | None:
        """Return why the interval may contain the true value in fewer than 95 % of texts, or None."""
        if self.parts_of is not None:
            same = "document" if self.parts_of == 1 else "documents"
            return (
                f"{self.source} has {counted(self.parts_of, 'document')}, so its intervals are over {self.unit}: they "
                f"describe other text of the same {same}, and other documents may differ more"
            )
        if self.effective < MIN_EFFECTIVE * len(self.values):
            return (
                f"{self.source}: its {len(self.values):,} {self.unit} differ much in length and count as "
                f"{self.effective:.1f} of equal length; if the value depends on the length, fewer than 95 % of such "
                f"intervals contain the true one (docs/use/evaluation.md#intervals)"
            )
        return None

    def _share_interval(self, low: float, high: float) -> tuple[float, float]:
        """Return an interval within 0 and 1. For binary values it is Wilson's, whose width is positive at 0 and 1."""
        weight = self.weights[0]
        if weight and (self.weights == weight).all() and np.isin(self.values, (0, weight)).all():
            return share_interval(int((self.values == weight).sum()), len(self.values))
        return max(0.0, low), min(1.0, high)


def halvings(context: int) -> list[tuple[int, int]]:
    """Split the positions 1 to `context` into ranges (first, last) by halving: the second half, then recursively.

    The range that begins at 1 has 16 to 31 positions, or `context` if that is less.
    """
    ranges, last = [], context
    while last >= 2 * MIN_RANGE:
        ranges.append((last // 2 + 1, last))
        last //= 2
    return [(1, last), *reversed(ranges)]


@dataclass(frozen=True)
class PositionLoss:
    """The loss at each position of W windows of a text. The token at position p is predicted from p tokens."""

    source: str  # name of the text
    windows: str  # sha256 of the tokens of the windows
    block_size: int  # context in training
    nats: np.ndarray  # (W, T) loss of each token, 0 if masked; T is less than N if the model lacks later positions
    counted: np.ndarray  # (W, N) False: the token is masked
    document: np.ndarray  # (W,) document number of each window's first token

    @property
    def measures(self) -> list[Measure | None]:
        """Return a measure per range of positions. It is None if the model lacks a position or all are masked.

        Its samples are the documents, because windows of the same document are not independent; with fewer than
        MIN_DOCUMENTS, they are the windows.
        """
        documents, group = np.unique(self.document, return_inverse=True)
        unit, parts_of = "documents", None
        if len(documents) < MIN_DOCUMENTS:
            group, unit, parts_of = np.arange(len(self.document)), "windows", len(documents)
        measures: list[Measure | None] = []
        for first, last in halvings(self.counted.shape[1]):
            nats, n_tokens = (
                np.bincount(group, column[:, first - 1 : last].sum(axis=1)) for column in (self.nats, self.counted)
            )  # (n,)
            has_tokens = n_tokens > 0
            is_known = last <= self.nats.shape[1] and has_tokens.any()
            measure = Measure(self.source, LOSS, unit, nats[has_tokens], n_tokens[has_tokens], parts_of=parts_of)
            measures.append(measure if is_known else None)
        return measures

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per range of positions. Its value is None if the model lacks a position or all are masked."""
        rows = []
        for (first, last), measure in zip(halvings(self.counted.shape[1]), self.measures, strict=True):
            row = {"of": self.source, "measure": LOSS, "value": None, "low": None, "high": None, "n": 0}
            row |= {"effective": 0, "over": "windows"} if measure is None else measure.row()
            rows.append({**row, "first": first, "last": last, "block_size": self.block_size})
        return rows

    def curve(self) -> list[float | None]:
        """Return the mean loss in nats at each of the N positions; None where the model lacks it or all are masked."""
        nats, n_tokens = self.nats.sum(axis=0), self.counted.sum(axis=0)  # (T,), (N,)
        means = [float(total / n) if n else None for total, n in zip(nats, n_tokens, strict=False)]
        return means + [None] * (len(n_tokens) - len(means))


@dataclass(frozen=True)
class Coverage:
    """How much of a text the model could read, and how much of it occurs in the model's training data."""

    characters: int | None = None  # in the text; None: a data set, which stores only tokens
    unknown: Counter[str] = field(default_factory=Counter)  # counts of the characters that were left out
    bytes: int | None = None  # of a validation set
    probes: int | None = None  # passages searched for in the training data; None: it was not searched
    probes_matched: int | None = None  # probes that occur there
    quoted: tuple[int, int] | None = None  # characters that occur there, and searched ones, of documents without probes
    prepared_again: bool = False  # True: a validation set for which PREPARED_AGAIN holds

    @property
    def may_be_trained_on(self) -> bool:
        """Whether some of the text occurs in the training data, or may occur there."""
        return bool(self.prepared_again or self.probes_matched or (self.quoted and self.quoted[0]))

    @property
    def left_out(self) -> int | None:
        return None if self.characters is None else self.unknown.total()


def count_characters(texts: Iterable[str], tokenizer: Tokenizer) -> Coverage:
    """Count the characters of texts, without <|endoftext|>, and those that are not in the vocabulary."""
    characters, unknown = 0, Counter()
    for text in itertools.chain.from_iterable(documents_of(tokenizer, text) for text in texts):
        characters += len(text)
        if tokenizer.count_unknown(text):
            unknown += Counter({c: n for c, n in Counter(text).items() if tokenizer.count_unknown(c)})
    return Coverage(characters, unknown)


@dataclass
class Evaluation:
    """The results of one model. Each text or task adds to them."""

    run: str
    measures: list[Measure] = field(default_factory=list)
    coverage: dict[str, Coverage] = field(default_factory=dict)  # by the name of the text or task
    positions: list[PositionLoss] = field(default_factory=list)
    more_rows: list[dict[str, Any]] = field(default_factory=list)  # values that are not ratios, such as distances
    groups: list[dict[str, Any]] = field(default_factory=list)  # rows of answers.group_rows
    answers: list[dict[str, Any]] = field(default_factory=list)  # the pairs with the model's answers, or its pieces
    signatures: dict[str, str] = field(default_factory=dict)  # of sacrebleu, by measure
    pairs: dict[str, list[Pair]] = field(default_factory=dict)  # the pairs of the answers, by their source
    benchmarks: list[dict[str, Any]] = field(default_factory=list)  # lm-eval's own results of its tasks and groups
    datasets: dict[str, Dataset] = field(default_factory=dict)  # of the measured validation sets, if they have bytes

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each measure and each range of positions, and more_rows."""
        rows = []
        results = [measure.row() for measure in self.measures] + self.more_rows
        results += [row for losses in self.positions for row in losses.rows()]
        for row in results:
            coverage = self.coverage[row["of"]]
            characters = {"characters": coverage.characters, "left_out": coverage.left_out}
            overlap = {"probes": coverage.probes, "probes_matched": coverage.probes_matched}
            overlap["prepared_again"] = coverage.prepared_again
            in_training, searched = coverage.quoted or (None, None)
            overlap |= {"characters_in_training": in_training, "characters_searched": searched}
            rows.append({"run": self.run, **row, **characters, **overlap})
        return rows

    def warnings(self) -> list[str]:
        """Return what limits the intervals, once per text."""
        measures = self.measures + [m for losses in self.positions for m in losses.measures if m is not None]
        warnings: dict[str, str] = {}
        for measure in measures:
            if warning := measure.warning():
                warnings.setdefault(measure.source, warning)
        return list(warnings.values())


def collect_results(models: Sequence[Evaluation]) -> dict[str, Any]:
    """Return the results of all models as JSON."""
    results: dict[str, Any] = {"results": [row for model in models for row in model.rows()]}
    if any(model.positions for model in models):
        results["curves"] = [
            {"run": model.run, "of": losses.source, "block_size": losses.block_size, "losses": losses.curve()}
            for model in models
            for losses in model.positions
        ]
    if signatures := {name: text for model in models for name, text in model.signatures.items()}:
        results |= {"signatures": signatures, "groups": [row for model in models for row in model.groups]}
    if benchmarks := [row for model in models for row in model.benchmarks]:
        results["benchmarks"] = benchmarks
    return results
