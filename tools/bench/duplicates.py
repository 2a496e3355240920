"""Measure how many near duplicates preparation finds, by planting copies of passages of your text.

    python tools/bench/duplicates.py speeches/ --words=300
    python tools/bench/duplicates.py pages.jsonl --passages=500

Passages of consecutive words are the documents. Copies are exact, or a share of the words, chosen at random, is
replaced by random words of the text, or the end is cut off. Passages from elsewhere in the text have no near duplicate,
unless the text repeats itself. Recall is the share of the copies for which their passage is found, at the threshold of
`--dedup=near` and at another one; the similarity is exact, from all shingles. It ends with the seconds per 100 MB.
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
from folio.data.corpus import Corpus, find_sources  # noqa: E402
from folio.data.leakage import SHINGLE, SIMILARITY, SimilarDocuments, compute_signatures  # noqa: E402
from tools.bench.timing import print_table  # noqa: E402

STRICT = 0.8  # the threshold of Lee et al. 2021, for comparison
CHANGED = (0.01, 0.05, 0.1, 0.2, 0.3)  # of the words
KEPT = (0.9, 0.75, 0.5)  # of the words, at the beginning


@dataclass(frozen=True)
class DuplicatesBenchConfig(Settings):
    inputs: tuple[str, ...] = ()  # text files or folders
    words: Annotated[int, Ge(20)] = 300  # per passage
    passages: PositiveInt = 1000  # to copy, and as many others
    seed: NonNegativeInt = 1337  # of the passages and of the changes

    def problems(self) -> list[tuple[str, str]]:
        return [] if self.inputs else [("inputs", "name a text file or a folder")]


class Row(NamedTuple):
    """What was found of one kind of copies."""

    kind: str
    copies: int
    similarity: float  # mean, exact
    found: float  # share of the copies whose passage is found
    found_strict: float  # the same with the threshold STRICT


def main(cfg: DuplicatesBenchConfig) -> None:
    corpus = Corpus(find_sources(cfg.inputs))
    words = " ".join(text for block in corpus.blocks() for text in iterate_texts(block)).split()
    rng = random.Random(cfg.seed)
    starts = range(0, len(words) - cfg.words + 1, cfg.words)
    if len(starts) < 2 * cfg.passages:
        raise UserError(
            f"the text has {len(starts):,} passages of {cfg.words} words, and {2 * cfg.passages:,} are needed: set "
            f"fewer --passages, or give more text"
        )
    passages = [words[start : start + cfg.words] for start in rng.sample(starts, 2 * cfg.passages)]
    rows = measure(passages[: cfg.passages], passages[cfg.passages :], words, rng)
    print(f"{cfg.passages:,} passages of {cfg.words} words, and copies of them; near duplicates from {SIMILARITY}\n")
    cells = [(row.kind, f"{row.similarity:.2f}", f"{row.found:.1%}", f"{row.found_strict:.1%}") for row in rows[:-1]]
    print_table(("copy", "similarity", "recall", f"recall from {STRICT}"), cells)
    found = round(rows[-1].found * rows[-1].copies)
    print(f"{found} of {rows[-1].copies:,} other passages are taken for a near duplicate of one of these")
    contents = [" ".join(passage).encode() for passage in passages]
    begun = time.process_time()
    for first in range(0, len(contents), 100):
        compute_signatures(contents[first : first + 100])
    seconds = (time.process_time() - begun) / sum(map(len, contents)) * 1e8
    print(f"signatures of such passages take {seconds:.1f} s of a core per 100 MB")


def measure(
    passages: Sequence[list[str]], others: Sequence[list[str]], vocabulary: Sequence[str], rng: random.Random
) -> list[Row]:
    """What is found of each kind of copies of passages; the last row is about others, which are not copies."""
    signatures = sign(passages)
    index = SimilarDocuments(signatures)
    rows = []
    for kind, copies in plant(passages, vocabulary, rng):
        of_copies = sign(copies)
        found = index.find(of_copies) >= 0
        strict = [(a == b).mean() >= STRICT for a, b in zip(signatures, of_copies, strict=True)]
        exact = [jaccard(a, b) for a, b in zip(passages, copies, strict=True)]
        rows.append(Row(kind, len(copies), float(np.mean(exact)), float(np.mean(found)), float(np.mean(strict))))
    unrelated = index.find(sign(others)) >= 0
    return [*rows, Row("unrelated", len(others), 0.0, float(np.mean(unrelated)), 0.0)]


def sign(passages: Sequence[list[str]]) -> np.ndarray:
    """The signatures of passages, (D, P)."""
    return compute_signatures([" ".join(passage).encode() for passage in passages])


def plant(
    passages: Sequence[list[str]], vocabulary: Sequence[str], rng: random.Random
) -> Iterator[tuple[str, list[list[str]]]]:
    """Each kind of copies, with a copy of each passage."""
    yield "exact", [list(passage) for passage in passages]
    for share in CHANGED:
        yield f"{share:.0%} of the words changed", [change(passage, share, vocabulary, rng) for passage in passages]
    for share in KEPT:
        yield f"cut to {share:.0%}", [passage[: round(share * len(passage))] for passage in passages]


def change(passage: list[str], share: float, vocabulary: Sequence[str], rng: random.Random) -> list[str]:
    """A copy in which a share of the words, at least one, is replaced by random words."""
    changed = list(passage)
    for at in rng.sample(range(len(passage)), max(1, round(share * len(passage)))):
        changed[at] = rng.choice(vocabulary)
    return changed


def jaccard(first: list[str], second: list[str]) -> float:
    """The exact Jaccard index of the shingles of two passages, by their words as they are."""
    a, b = ({tuple(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)} for words in (first, second))
    return len(a & b) / len(a | b)


if __name__ == "__main__":
    run_script(main, DuplicatesBenchConfig)
