"""Measure the recall of near-duplicate detection on modified copies of passages of your text.

    python lab/bench/duplicates.py speeches/ --words=300
    python lab/bench/duplicates.py pages.jsonl --passages=500

The documents are passages of consecutive words. Copies are exact, have a fraction of their words replaced by random
words of the text, or are truncated. Other passages of the text have no near duplicate, unless the text repeats itself.
Recall is the fraction of copies whose passage is detected, at the threshold of `--dedup=near` and at a stricter one;
the similarity is exact, from all shingles. The last line is the time per 100 MB.
"""

import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from annotated_types import Ge

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError  # noqa: E402
from folio.base.settings import NonNegativeInt, PositiveInt, Settings, run_script  # noqa: E402
from folio.data.blocks import iterate_texts  # noqa: E402
from folio.data.corpus import Corpus  # noqa: E402
from folio.data.inputs import find_sources  # noqa: E402
from folio.data.leakage import SHINGLE, SIMILARITY, compute_signatures, find_similar  # noqa: E402
from lab.bench.timing import print_table  # noqa: E402

STRICT = 0.8  # threshold of Lee et al. 2021, for comparison
REPLACED_FRACTIONS = (0.01, 0.05, 0.1, 0.2, 0.3)  # of the words
TRUNCATED_FRACTIONS = (0.9, 0.75, 0.5)  # of the words that remain


@dataclass(frozen=True)
class DuplicatesBenchConfig(Settings):
    inputs: tuple[str, ...] = ()  # text files or folders
    words: Annotated[int, Ge(20)] = 300  # per passage
    passages: PositiveInt = 1000  # number of passages to copy, and of unrelated passages
    seed: NonNegativeInt = 1337

    def problems(self) -> list[tuple[str, str]]:
        return [] if self.inputs else [("inputs", "name a text file or a folder")]


class Row(NamedTuple):
    """Results for one kind of copies."""

    kind: str
    copies: int
    similarity: float  # mean exact similarity
    recall: float
    strict_recall: float  # with the threshold STRICT


def main(cfg: DuplicatesBenchConfig) -> None:
    corpus = Corpus(find_sources(cfg.inputs))
    words = " ".join(text for block in corpus.blocks() for text in iterate_texts(block)).split()
    rng = random.Random(cfg.seed)
    starts = range(0, len(words) - cfg.words + 1, cfg.words)
    if len(starts) < 2 * cfg.passages:
        raise UserError(
            f"the text has {len(starts):,} passages of {cfg.words} words, but {2 * cfg.passages:,} are needed: set "
            f"fewer --passages, or give more text"
        )
    passages = [words[start : start + cfg.words] for start in rng.sample(starts, 2 * cfg.passages)]
    rows = measure(passages[: cfg.passages], passages[cfg.passages :], words, rng)
    print(f"{cfg.passages:,} passages of {cfg.words} words, and copies of them; near duplicates from {SIMILARITY}\n")
    cells = [(row.kind, f"{row.similarity:.2f}", f"{row.recall:.1%}", f"{row.strict_recall:.1%}") for row in rows[:-1]]
    print_table(("copy", "similarity", "recall", f"recall from {STRICT}"), cells)
    false_positives = round(rows[-1].recall * rows[-1].copies)
    print(f"{false_positives} of {rows[-1].copies:,} other passages are false positives")
    contents = [" ".join(passage).encode() for passage in passages]
    start = time.process_time()
    for first in range(0, len(contents), 100):
        compute_signatures(contents[first : first + 100])
    seconds = (time.process_time() - start) / sum(map(len, contents)) * 1e8
    print(f"the signatures of these passages take {seconds:.1f} s on one core per 100 MB")


def measure(
    passages: Sequence[list[str]], others: Sequence[list[str]], vocabulary: Sequence[str], rng: random.Random
) -> list[Row]:
    """Return a row per kind of copies of passages, and a last one for `others`, which are not copies."""
    signatures = sign(passages)
    rows = []
    for kind, copies in plant(passages, vocabulary, rng):
        copy_signatures = sign(copies)
        detected = is_detected(signatures, copy_signatures)
        strict = [(a == b).mean() >= STRICT for a, b in zip(signatures, copy_signatures, strict=True)]
        exact = [jaccard(a, b) for a, b in zip(passages, copies, strict=True)]
        rows.append(Row(kind, len(copies), float(np.mean(exact)), float(np.mean(detected)), float(np.mean(strict))))
    unrelated = is_detected(signatures, sign(others))
    return [*rows, Row("unrelated", len(others), 0.0, float(np.mean(unrelated)), 0.0)]


def is_detected(known: np.ndarray, signatures: np.ndarray) -> np.ndarray:
    """Return whether each of the signatures (D, P) is similar to a known one, (D,) bool."""
    return find_similar(np.concatenate([known, signatures]), known=len(known))[len(known) :] >= 0


def sign(passages: Sequence[list[str]]) -> np.ndarray:
    """Return the signatures of passages: (D, P)."""
    return compute_signatures([" ".join(passage).encode() for passage in passages])


def plant(
    passages: Sequence[list[str]], vocabulary: Sequence[str], rng: random.Random
) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield each kind of copies, with a copy of each passage."""
    yield "exact", [list(passage) for passage in passages]
    for share in REPLACED_FRACTIONS:
        yield f"{share:.0%} of the words changed", [change(passage, share, vocabulary, rng) for passage in passages]
    for share in TRUNCATED_FRACTIONS:
        yield f"cut to {share:.0%}", [passage[: round(share * len(passage))] for passage in passages]


def change(passage: list[str], share: float, vocabulary: Sequence[str], rng: random.Random) -> list[str]:
    """Return a copy in which a fraction of the words, at least one, is replaced by random words."""
    changed = list(passage)
    for index in rng.sample(range(len(passage)), max(1, round(share * len(passage)))):
        changed[index] = rng.choice(vocabulary)
    return changed


def jaccard(first: list[str], second: list[str]) -> float:
    """Return the exact Jaccard index of the shingles of two passages, without normalizing words."""
    a, b = ({tuple(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)} for words in (first, second))
    return len(a & b) / len(a | b)


if __name__ == "__main__":
    run_script(main, DuplicatesBenchConfig)
