"""Near duplicates, against exact similarities and a search of all signatures."""

import random

import numpy as np
import pytest

from folio import UserError
from folio.base.settings import load
from folio.data.minhash import BANDS, PERMUTATIONS, SIMILARITY
from folio.data.near_duplicates import NO_WORDS, SimilarDocuments, count_near_duplicates, signatures_of
from tools.bench import duplicates as bench_duplicates
from tools.bench.duplicates import DuplicatesBenchConfig, change, jaccard, measure


def random_words(rng: random.Random, count: int) -> list[str]:
    """Words with frequencies as in a natural text."""
    return [f"w{int(rng.paretovariate(0.7))}" for _ in range(count)]


@pytest.mark.parametrize("words", [80, 400])
def test_planted_copies_are_found_and_others_are_not(words, seed):
    """At least 95 % of copies with 5 % of the words changed; of 300 unrelated documents none, or almost none."""
    rng = random.Random(seed)
    passages = [random_words(rng, words) for _ in range(600)]
    rows = {row.kind: row for row in measure(passages[:300], passages[300:], random_words(rng, 5000), rng)}
    assert rows["exact"].found == 1 and rows["exact"].similarity == 1
    assert rows["1% of the words changed"].found == 1 and rows["5% of the words changed"].found >= 0.95
    assert rows["5% of the words changed"].found_strict < 0.3  # its similarity is about 0.95**5 / (2 - 0.95**5)
    assert abs(rows["5% of the words changed"].similarity - 0.63) < 0.1
    assert rows["cut to 75%"].found >= 0.99
    assert rows["30% of the words changed"].found <= 0.01 and rows["unrelated"].found <= 0.01


def test_signatures_estimate_the_similarity(seed):
    rng = random.Random(seed)
    errors = []
    for share in (0.01, 0.03, 0.1, 0.2):
        for _ in range(50):
            first = random_words(rng, 200)
            second = change(first, share, random_words(rng, 500), rng)
            exact = jaccard(first, second)
            a, b = signatures_of([" ".join(words).encode() for words in (first, second)])
            estimate = (a == b).mean()
            errors.append((estimate - exact) / max(0.01, (exact * (1 - exact) / PERMUTATIONS) ** 0.5))
    assert abs(np.mean(errors)) < 0.4 and np.std(errors) < 1.4  # 0 and 1 are expected


def test_short_documents():
    a, b, empty, c, points = signatures_of([b"Two words!", b"two  words", b"", b"two birds", b"..."])
    assert (a == b).all() and (a != c).mean() > 0.9
    assert (empty == NO_WORDS).all() and (points == NO_WORDS).all()
    assert SimilarDocuments(np.array([empty])).find(points[None]).tolist() == [-1]
    assert len(signatures_of([])) == 0 and (signatures_of([b""]) == NO_WORDS).all()


def test_signatures_do_not_depend_on_the_other_documents_of_a_block(seed):
    rng = random.Random(seed)
    contents = [" ".join(random_words(rng, rng.choice([0, 1, 2, 4, 5, 6, 100]))).encode() for _ in range(60)]
    together = signatures_of(contents)
    assert np.array_equal(together, np.concatenate([signatures_of([content]) for content in contents]))
    long = b" ".join(b"%d" % rng.randrange(10**6) for _ in range(200_000))  # more than 1 MiB
    assert np.array_equal(*signatures_of([long, long[: 1 << 20]]))


def related_signatures(rng: np.random.Generator, count: int) -> np.ndarray:
    """Random signatures, most of which share a random part of their values with one before: (count, P)."""
    signatures = rng.integers(2**32 - 1, size=(count, PERMUTATIONS), dtype=np.uint32)
    for k in range(1, count):
        shared = rng.random(PERMUTATIONS) < rng.choice([0, 0.3, 0.45, 0.6, 0.8, 1])
        signatures[k, shared] = signatures[rng.integers(k), shared]
    return signatures


def share_a_band(first: np.ndarray, second: np.ndarray) -> bool:
    return bool((first == second).reshape(BANDS, -1).all(axis=1).any())


def test_what_is_found_is_the_first_similar_document_with_an_equal_band(seed):
    rng = np.random.default_rng(seed)
    signatures = related_signatures(rng, 400)
    for k in range(0, 400, 5):
        similar = np.flatnonzero((signatures[:k] == signatures[k]).mean(axis=1) >= SIMILARITY)
        similar = [number for number in similar.tolist() if share_a_band(signatures[number], signatures[k])]
        assert SimilarDocuments(signatures[:k]).find(signatures[k : k + 1]).tolist() == (similar[:1] or [-1])


def test_the_tables_are_the_same_one_by_one_and_at_once(seed):
    """Also when they grow while documents are added."""
    rng = np.random.default_rng(seed)
    signatures = related_signatures(rng, 3500)
    one_by_one = SimilarDocuments()
    kept = signatures[~np.concatenate([one_by_one.add_new(block) for block in np.split(signatures, [7, 8, 900, 3000])])]
    at_once, with_room = SimilarDocuments(kept), SimilarDocuments(expected=len(kept))
    assert not with_room.add_new(kept).any()
    for tables in (at_once, with_room):
        assert tables.count == one_by_one.count == len(kept) > 1024
        assert np.array_equal(tables.newest, one_by_one.newest) and np.array_equal(tables.older, one_by_one.older)


def test_of_documents_that_are_left_out_one_before_is_kept(seed):
    rng = np.random.default_rng(seed)
    signatures = related_signatures(rng, 400)
    left_out = SimilarDocuments().add_new(signatures)
    kept = signatures[~left_out]
    index = SimilarDocuments(kept)
    assert (index.find(signatures) >= 0).all()
    for k, of_document in enumerate(kept):
        similar = (kept[:k] == of_document).mean(axis=1) >= SIMILARITY
        assert not any(share_a_band(kept[number], of_document) for number in np.flatnonzero(similar))
    val = rng.random(400) < 0.2
    counts = count_near_duplicates(signatures, val)
    training = SimilarDocuments(signatures[~val])
    expected = (training.find(signatures[val]) >= 0).sum()
    assert counts == {"repeated": int(left_out.sum()), "val_in_train": expected} and 0 < expected < val.sum()


def test_the_tool(tmp_path, capsys, seed):
    (tmp_path / "text.txt").write_text(" ".join(random_words(random.Random(seed), 3000)), encoding="utf-8")
    words = [str(tmp_path / "text.txt"), "--words=50", "--passages=20"]
    bench_duplicates.main(load(DuplicatesBenchConfig, words))
    out = capsys.readouterr().out
    assert "| exact | 1.00 | 100.0% | 100.0% |" in out and "of 20 other passages are taken" in out
    with pytest.raises(UserError, match=r"the text has 60 passages of 50 words, and 2,000 are needed: set fewer --pas"):
        bench_duplicates.main(load(DuplicatesBenchConfig, words[:2]))
