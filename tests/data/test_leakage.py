"""Repeated text: hashes against words that are cut one character at a time, near duplicates against exact similarities
and a search of all signatures. What a data set's report says of them is in test_prepare.py.
"""

import random
from pathlib import Path

import numpy as np
import pytest

from folio import UserError
from folio.base.settings import load
from folio.data.leakage import (
    BANDS,
    BOUNDARY,
    BOUNDARY_WORD,
    NO_WORDS,
    PERMUTATIONS,
    SIMILARITY,
    HashFilter,
    KeySet,
    SimilarDocuments,
    count_leakage,
    mix,
    ngrams_within_documents,
    signatures_of,
    word_hashes,
)
from tools.bench import duplicates as bench_duplicates
from tools.bench.duplicates import DuplicatesBenchConfig, change, jaccard, measure

# --- words and n-grams ------------------------------------------------------------------------------------------------

CHARACTERS = [*"abXYZ019", *" .,;\n-_", *"éÉßẞЖжΣςσỆệᲐა中日カ한", "\u2019", "\u201c", "\u2013", "\u00a0", "«", "🎉"]


def is_separator(character: str) -> bool:
    """ASCII that is not a letter or digit, the signs of Latin-1, and typographic quotes and dashes."""
    if character.isascii():
        return not character.isalnum()
    return 0x80 <= ord(character) < 0xC0 or 0x2000 <= ord(character) < 0x2040


def words_of(text: str) -> list[str]:
    words, in_word = [], False
    for character in text:
        lower = character.casefold()
        if ord(character) < 0x2000 and (len(lower), len(lower.encode())) == (1, len(character.encode())):
            character = lower
        if is_separator(character):
            in_word = False
        elif in_word and not 0x3000 <= ord(character) < 0x10000:  # Chinese, Japanese, and Korean
            words[-1] += character
        else:
            words.append(character)
            in_word = True
    return words


def test_words_have_equal_hashes_where_they_are_equal(seed):
    rng, hash_of = random.Random(seed), {}
    for _ in range(300):
        text = "".join(rng.choices(CHARACTERS, k=rng.randrange(60)))
        words, hashes = words_of(text), word_hashes(text.encode())
        assert len(words) == len(hashes), text
        for word, of_word in zip(words, hashes.tolist(), strict=True):
            assert hash_of.setdefault(word, of_word) == of_word
    assert len(set(hash_of.values())) == len(hash_of) > 500


def test_case_and_punctuation_do_not_count():
    assert (
        word_hashes(b'"To be, or NOT to be?"').tolist()
        == word_hashes("\u2018to be \u2013 or not to be\u2019".encode()).tolist()
    )
    assert len(word_hashes(b"")) == len(word_hashes(b" ?!")) == len(word_hashes("…".encode())) == 0
    assert len(word_hashes(b"\xe2")) == 1  # a part of a character


@pytest.mark.parametrize(
    "text", ["Мороз и солнце; день чудесный", "Ὠδή στη χαρά της άνοιξης", "Trăm năm trong cõi người", "été"]
)
def test_case_does_not_count_in_other_alphabets(text):
    """Only ASCII was folded: a Russian text in capitals shared no words with the same text in small letters."""
    upper, lower = word_hashes(text.upper().encode()), word_hashes(text.lower().encode())
    assert upper.tolist() == lower.tolist() and len(set(upper)) == len(text.split())


@pytest.mark.parametrize("n", [1, 2, 5, 13])
def test_ngrams_have_equal_hashes_where_they_are_equal(n, seed):
    rng, hash_of = np.random.default_rng(seed), {}
    vocabulary = rng.integers(2**63, size=4, dtype=np.uint64)
    for size in (0, 1, n - 1, n, 40, 500):
        ids = rng.integers(4, size=size)
        hashes, starts = ngrams_within_documents(vocabulary[ids], n)
        assert starts.tolist() == list(range(size - n + 1))
        for start, of_ngram in enumerate(hashes.tolist()):
            assert hash_of.setdefault(tuple(ids[start : start + n]), of_ngram) == of_ngram
    assert len(set(hash_of.values())) == len(hash_of)


def test_no_ngram_crosses_the_end_of_a_document():
    documents = [b"a b c d", b"", b"e f", b"g h i"]
    words = word_hashes(BOUNDARY.join(documents))
    assert word_hashes(BOUNDARY).tolist() == [BOUNDARY_WORD]
    for short, expected in ((False, [0, 1, 9]), (True, [0, 1, 6, 9])):
        hashes, starts = ngrams_within_documents(words, 3, short)
        of_documents = [ngrams_within_documents(word_hashes(document), 3, short)[0] for document in documents]
        assert hashes.tolist() == np.concatenate(of_documents).tolist() and starts.tolist() == expected
    assert len(ngrams_within_documents(words[:2], 3)[0]) == 0


def test_the_hash_of_an_ngram_is_a_mixed_polynomial(seed):
    """Also that of fewer words, so that signatures stay the same."""
    words = np.random.default_rng(seed).integers(2**63, size=7, dtype=np.uint64)
    for n in (3, 7, 9):
        values = [words[k : k + n].tolist() for k in range(max(1, 8 - n))]
        expected = [
            sum(word * 0x9E3779B97F4A7C15 ** (len(ngram) - 1 - k) for k, word in enumerate(ngram)) % 2**64
            for ngram in values
        ]
        hashes, _ = ngrams_within_documents(words, n, short=True)
        assert hashes.tolist() == mix(np.array(expected, np.uint64)).tolist()


@pytest.mark.parametrize("size", [0, 1, 1000, 100_000])
def test_a_filter_finds_its_hashes_and_few_others(size, seed):
    rng = np.random.default_rng(seed)
    hashes, others = (rng.integers(2**64, size=n, dtype=np.uint64) for n in (size, 1000))
    looked_up = rng.permutation(np.concatenate([hashes, hashes[:10], others]))
    expected, likely = np.flatnonzero(np.isin(looked_up, hashes)), HashFilter(hashes).find(looked_up)
    assert np.isin(expected, likely).all() and len(likely) <= len(expected) + 100


def test_mixing():
    upper = mix(np.arange(1, 20_001, dtype=np.uint64)) >> np.uint64(32)  # all 32 upper bits follow from the lower ones
    assert len(np.unique(upper)) > 19_990


# --- equal documents --------------------------------------------------------------------------------------------------


def test_a_key_set_is_a_set(seed):
    rng, keys, python_set = np.random.default_rng(seed), KeySet(), set()
    for _ in range(300):
        added = rng.integers(0, 2000, size=rng.integers(0, 30)).astype(np.uint64)
        expected = []
        for key in added.tolist():
            expected.append(key in python_set)
            python_set.add(key)
        assert keys.add(added).tolist() == expected and keys.contains(added).all()
    assert keys.contains(np.arange(2100, dtype=np.uint64)).nonzero()[0].tolist() == sorted(python_set)
    assert sum(map(len, keys.levels)) == len(python_set) and len(keys.levels) < 12


def test_equal_documents_are_counted(seed):
    rng = np.random.default_rng(seed)
    keys, val = rng.integers(40, size=60), rng.random(60) < 0.3
    hashes = keys.astype(np.uint64) << np.uint64(1) | val.astype(np.uint64)
    expected = {"repeated": 60 - len({*keys.tolist()}), "val_in_train": int(np.isin(keys[val], keys[~val]).sum())}
    unknown = {"repeated": None, "val_in_train": None}
    assert count_leakage(hashes, None, Path(), None, None, 0) == {
        "duplicates": expected,
        "near_duplicates": unknown,
        "ngram_overlap": None,
    }


# --- near duplicates --------------------------------------------------------------------------------------------------


def random_words(rng: random.Random, count: int) -> list[str]:
    """Words with frequencies as in a natural text."""
    return [f"w{int(rng.paretovariate(0.7))}" for _ in range(count)]


@pytest.mark.parametrize("words", [80, 400])
def test_planted_copies_are_found_and_others_are_not(words, seed):
    """At least 95 % of copies with 5 % of the words changed; of 300 unrelated documents none, or almost none."""
    rng = random.Random(seed)
    passages = [random_words(rng, words) for _ in range(600)]
    rows = {row.kind: row for row in measure(passages[:300], passages[300:], random_words(rng, 5000), rng)}
    assert rows["exact"].recall == 1 and rows["exact"].similarity == 1
    assert rows["1% of the words changed"].recall == 1 and rows["5% of the words changed"].recall >= 0.95
    assert rows["5% of the words changed"].strict_recall < 0.3  # its similarity is about 0.95**5 / (2 - 0.95**5)
    assert abs(rows["5% of the words changed"].similarity - 0.63) < 0.1
    assert rows["cut to 75%"].recall >= 0.99
    assert rows["30% of the words changed"].recall <= 0.01 and rows["unrelated"].recall <= 0.01


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
    hashes = rng.integers(2**62, size=400, dtype=np.uint64) << np.uint64(1) | val.astype(np.uint64)
    counts = count_leakage(hashes, signatures, Path(), None, None, 0)
    training = SimilarDocuments(signatures[~val])
    expected = (training.find(signatures[val]) >= 0).sum()
    assert counts["near_duplicates"] == {"repeated": int(left_out.sum()), "val_in_train": expected}
    assert 0 < expected < val.sum()


def test_the_tool(tmp_path, capsys, seed):
    (tmp_path / "text.txt").write_text(" ".join(random_words(random.Random(seed), 3000)), encoding="utf-8")
    words = [str(tmp_path / "text.txt"), "--words=50", "--passages=20"]
    bench_duplicates.main(load(DuplicatesBenchConfig, words))
    out = capsys.readouterr().out
    assert "| exact | 1.00 | 100.0% | 100.0% |" in out and "of 20 other passages are false positives" in out
    with pytest.raises(UserError, match=r"60 passages of 50 words.* 2,000.*--passages"):
        bench_duplicates.main(load(DuplicatesBenchConfig, words[:2]))
