"""Repeated text: hashes against words split one character at a time, and near duplicates against exact similarities and
an exhaustive search. test_prepare.py tests the report on a data set.
"""

import random
from pathlib import Path

import numpy as np
import pytest

from folio.data import leakage
from folio.data.leakage import (
    BANDS,
    BOUNDARY,
    NO_WORDS,
    PERMUTATIONS,
    SIMILARITY,
    HashFilter,
    KeySet,
    ShardText,
    compare_splits,
    compute_signatures,
    count_duplicates,
    count_near_duplicates,
    find_similar,
    ngrams_within_documents,
    word_hashes,
)
from folio.data.shards import ShardWriter
from folio.data.tokenizer import CharTokenizer
from lab.bench.duplicates import change, jaccard, measure
from tests.support.tolerances import binomial_range, normal_limit

# --- words and n-grams ------------------------------------------------------------------------------------------------

CHARACTERS = [*"abXYZ019", *" .,;\n-_", *"éÉßẞЖжΣςσỆệᲐა中日カ한", "\u2019", "\u201c", "\u2013", "\u00a0", "«", "🎉"]


def is_separator(character: str) -> bool:
    """Whether a character is ASCII or Latin-1 punctuation, or a typographic quote or dash."""
    if character.isascii():
        return not character.isalnum()
    return 0x80 <= ord(character) < 0xC0 or 0x2000 <= ord(character) < 0x2040


def split_words(text: str) -> list[str]:
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


def test_equal_words_have_equal_hashes(seed):
    rng, hash_by_word = random.Random(seed), {}
    texts = ["".join(rng.choices(CHARACTERS, k=rng.randrange(60))) for _ in range(300)]
    # only ASCII was folded: a Russian text in upper case had no words in common with the same text in lower case
    texts += ["Мороз и солнце; день чудесный", "Ὠδή στη χαρά της άνοιξης", "Trăm năm trong cõi người", "été"]
    texts += [text.upper() for text in texts[-4:]]
    for text in ["", " ?!", "…", "to be \u2013 or NOT\u2019", *texts]:
        words, hashes = split_words(text), word_hashes(text.encode())
        assert len(words) == len(hashes), text
        for word, word_hash in zip(words, hashes.tolist(), strict=True):
            assert hash_by_word.setdefault(word, word_hash) == word_hash
    assert len(set(hash_by_word.values())) == len(hash_by_word)
    assert len(word_hashes(b"\xe2")) == 1  # an incomplete character


def mix(hashes: np.ndarray) -> np.ndarray:
    hashes = (hashes ^ (hashes >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return hashes ^ (hashes >> np.uint64(32))


def test_no_ngram_crosses_the_end_of_a_document():
    documents = [b"a b c d", b"", b"e f", b"g h i"]
    words = word_hashes(BOUNDARY.join(documents))
    assert len(word_hashes(BOUNDARY)) == 1
    for short, expected in ((False, [0, 1, 9]), (True, [0, 1, 6, 9])):
        hashes, starts = ngrams_within_documents(words, 3, short)
        by_document = [ngrams_within_documents(word_hashes(document), 3, short)[0] for document in documents]
        assert hashes.tolist() == np.concatenate(by_document).tolist() and starts.tolist() == expected
    assert len(ngrams_within_documents(words[:2], 3)[0]) == 0


@pytest.mark.parametrize("n", [1, 2, 5, 13])
def test_the_hash_of_an_ngram_is_a_mixed_polynomial(n, seed):
    """Also for fewer words, so that signatures remain the same."""
    rng = np.random.default_rng(seed)
    for size in (0, 1, n - 1, n, 40, 500):
        words = rng.integers(2**63, size=4, dtype=np.uint64)[rng.integers(4, size=size)]
        for short in (False, True):
            hashes, starts = ngrams_within_documents(words, n, short=short)
            assert starts.tolist() == (list(range(size - n + 1)) or [0] * (short and size > 0))
            ngrams = [words[start : start + n].tolist() for start in starts]
            powers = [
                [word * 0x9E3779B97F4A7C15 ** (len(ngram) - 1 - k) for k, word in enumerate(ngram)] for ngram in ngrams
            ]
            assert hashes.tolist() == mix(np.array([sum(values) % 2**64 for values in powers], np.uint64)).tolist()


@pytest.mark.parametrize("size", [0, 1, 1000, 100_000])
def test_a_filter_contains_its_hashes_and_few_others(size, seed):
    rng = np.random.default_rng(seed)
    hashes, others = (rng.integers(2**64, size=n, dtype=np.uint64) for n in (size, 1000))
    queries = rng.permutation(np.concatenate([hashes, hashes[:10], others]))
    expected, results = np.flatnonzero(np.isin(queries, hashes)), HashFilter(hashes).find(queries)
    assert np.isin(expected, results).all()
    # 2 of at least 32 bits per hash are set, so both bits of another hash with probability 1 / 16**2
    assert len(results) - len(expected) <= binomial_range(1000, 1 / 256)[-1]


# --- duplicates -------------------------------------------------------------------------------------------------------


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


def test_duplicates_are_counted(seed):
    rng = np.random.default_rng(seed)
    keys, val = rng.integers(40, size=60), rng.random(60) < 0.3
    hashes = keys.astype(np.uint64) << np.uint64(1) | val.astype(np.uint64)
    expected = {"repeated": 60 - len({*keys.tolist()}), "val_in_train": int(np.isin(keys[val], keys[~val]).sum())}
    assert count_duplicates(hashes) == expected


# --- near duplicates --------------------------------------------------------------------------------------------------


def random_words(rng: random.Random, count: int) -> list[str]:
    """Words with frequencies as in a natural text."""
    return [f"w{int(rng.paretovariate(0.7))}" for _ in range(count)]


@pytest.mark.parametrize("words", [80, 400])
def test_planted_copies_are_found_and_others_are_not(words, seed):
    """At least 95 % of copies with 5 % of the words changed, and at most 1 % of unrelated documents."""
    rng = random.Random(seed)
    passages = [random_words(rng, words) for _ in range(600)]
    rows = {row.kind: row for row in measure(passages[:300], passages[300:], random_words(rng, 5000), rng)}
    # In 12 seeds, 99.9 % of the copies with 5 % of the words changed were found, 8 % with the strict limit, and no
    # unrelated one: the limits are more than 6 standard deviations of a share of 300 copies away.
    assert rows["exact"].recall == 1 and rows["exact"].similarity == 1
    assert rows["1% of the words changed"].recall == 1 and rows["5% of the words changed"].recall >= 0.95
    assert rows["5% of the words changed"].strict_recall < 0.3  # its similarity is about 0.95**5 / (2 - 0.95**5)
    assert abs(rows["5% of the words changed"].similarity - 0.63) < 0.1
    assert rows["cut to 75%"].recall >= 0.99
    assert rows["30% of the words changed"].recall <= 0.01 and rows["unrelated"].recall <= 0.01


def test_signatures_estimate_the_similarity(seed):
    rng = random.Random(seed)
    errors = []
    for share in [0.01, 0.03, 0.1, 0.2] * 50:
        first = random_words(rng, 200)
        second = change(first, share, random_words(rng, 500), rng)
        exact = jaccard(first, second)
        a, b = compute_signatures([" ".join(words).encode() for words in (first, second)])
        errors.append(((a == b).mean() - exact) / max(0.01, (exact * (1 - exact) / PERMUTATIONS) ** 0.5))
    # At most 0 and 1 are expected, with standard errors of 1 / sqrt(200) and 1 / sqrt(400).
    assert abs(np.mean(errors)) < normal_limit(2) / 200**0.5
    assert np.std(errors) < 1 + normal_limit(2) / 400**0.5


def test_short_documents():
    a, b, empty, c, points = compute_signatures([b"Two words!", b"two  words", b"", b"two birds", b"..."])
    assert (a == b).all() and (a != c).mean() > 0.9
    assert (empty == NO_WORDS).all() and (points == NO_WORDS).all()
    assert find_similar(np.array([empty, points])).tolist() == [-1, -1]
    assert len(compute_signatures([])) == 0 and (compute_signatures([b""]) == NO_WORDS).all()


def test_signatures_are_independent_of_the_other_documents_of_a_block(seed):
    rng = random.Random(seed)
    contents = [" ".join(random_words(rng, rng.choice([0, 1, 2, 4, 5, 6, 100]))).encode() for _ in range(60)]
    together = compute_signatures(contents)
    assert np.array_equal(together, np.concatenate([compute_signatures([content]) for content in contents]))
    long = b" ".join(b"%d" % rng.randrange(10**6) for _ in range(200_000))  # more than 1 MiB
    assert np.array_equal(*compute_signatures([long, long[: 1 << 20]]))


def related_signatures(rng: np.random.Generator, count: int) -> np.ndarray:
    """Random signatures, most of which share some values with a previous one, (count, P)."""
    signatures = rng.integers(2**32 - 1, size=(count, PERMUTATIONS), dtype=np.uint32)
    for k in range(1, count):
        shared = rng.random(PERMUTATIONS) < rng.choice([0, 0.3, 0.45, 0.6, 0.8, 1])
        signatures[k, shared] = signatures[rng.integers(k), shared]
    return signatures


def share_a_band(first: np.ndarray, second: np.ndarray) -> bool:
    return bool((first == second).reshape(BANDS, -1).all(axis=1).any())


def test_find_returns_the_first_similar_document_with_an_equal_band(seed):
    """Or an earlier similar one, of which a different band has the same slot of the hash table by chance."""
    rng = np.random.default_rng(seed)
    signatures = related_signatures(rng, 400)
    for k in range(0, 400, 5):
        similar = np.flatnonzero((signatures[:k] == signatures[k]).mean(axis=1) >= SIMILARITY)
        must_find = [number for number in similar.tolist() if share_a_band(signatures[number], signatures[k])]
        found = find_similar(signatures[: k + 1], known=k)[k]
        assert found in similar and found <= min(must_find, default=k) if found >= 0 else not must_find
    assert (find_similar(signatures, known=400) == -1).all() and not len(find_similar(signatures[:0]))


def similar_to(signature: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, bool]:
    """The indices of the similar ones of other signatures, and whether one of them shares a band."""
    numbers = np.flatnonzero((others == signature).mean(axis=1) >= SIMILARITY)
    return numbers, any(share_a_band(others[number], signature) for number in numbers)


def test_each_removed_document_is_similar_to_a_previous_one(seed):
    rng = np.random.default_rng(seed)
    signatures = related_signatures(rng, 400)
    first = find_similar(signatures)
    is_removed = first >= 0
    unique = signatures[~is_removed]
    assert not is_removed[first[is_removed]].any()
    assert ((signatures[is_removed] == signatures[first[is_removed]]).mean(axis=1) >= SIMILARITY).all()
    assert not any(similar_to(signature, unique[:k])[1] for k, signature in enumerate(unique))
    val = rng.random(400) < 0.2
    similar = [similar_to(signature, signatures[~val]) for signature in signatures[val]]
    must_find, may_find = sum(shares for _, shares in similar), sum(len(numbers) > 0 for numbers, _ in similar)
    counts = count_near_duplicates(np.concatenate([signatures[~val], signatures[val]]), val)
    # A similar document without an equal band is found if different bands have the same slot of a hash table.
    assert 0 < must_find <= counts["val_in_train"] <= may_find < val.sum()
    assert counts["repeated"] == is_removed.sum()


# --- shared text ------------------------------------------------------------------------------------------------------


def ngrams_of(text: str) -> list[tuple[str, ...]]:
    words = text.split()
    return [tuple(words[i : i + 13]) for i in range(len(words) - 12)]


def read_in_ranges(
    folder: Path, tokenizer: CharTokenizer, documents: list[np.ndarray], val: np.ndarray, shard_tokens: int
) -> tuple[dict[str, int], np.ndarray]:
    """Write documents, and return what compare_splits returns."""
    shards = {}
    for split in ("train", "val"):
        with ShardWriter(folder, split, tokenizer.vocab_size, shard_tokens) as writer:
            for ids, is_val in zip(documents, val, strict=True):
                if is_val == (split == "val"):
                    writer.write(ids)
            shards[split] = writer.finish()
    return compare_splits(ShardText(folder, shards, tokenizer), np.array([*map(len, documents)]), val, True, 0)


@pytest.mark.parametrize("eot", [False, True])
@pytest.mark.parametrize("shard_tokens", [150, 100_000])
def test_documents_are_read_from_the_shards(eot, shard_tokens, tmp_path, monkeypatch, seed):
    """The counts are independent of the ends of shards and ranges, and no n-gram crosses an end-of-text token.

    N-grams in two shards were not counted, without an end-of-text token all documents were one, and with such tokens in
    a document, as after each answer of a chat, it was counted as several.
    """
    monkeypatch.setattr(leakage, "RANGE_TOKENS", 1000)  # the documents are shorter
    rng = random.Random(seed)
    tokenizer = CharTokenizer("abcd ", eot)
    texts = [" ".join(rng.choices(["a", "ab", "c", "dd"], k=rng.choice([1, 4, 20, 120]))) for _ in range(120)]
    texts = [[text, " ".join(rng.choices(["a", "b"], k=20))] if eot else [text] for text in texts]
    val = np.array([rng.random() < 0.2 for _ in texts])
    end = [tokenizer.eot] * eot
    documents = [np.concatenate([np.append(tokenizer.encode(part), end) for part in text]) for text in texts]
    counts, signatures = read_in_ranges(tmp_path, tokenizer, documents, val, shard_tokens)

    by_split = [[text for text, is_val in zip(texts, val, strict=True) if is_val == wanted] for wanted in (0, 1)]
    contents = ["".join(text).encode() for split in by_split for text in split]
    assert np.array_equal(signatures, compute_signatures(contents))
    windows = {ngram for text in by_split[0] for part in text for ngram in ngrams_of(part)}
    covered = [
        [{i + k for i, ngram in enumerate(ngrams_of(part)) if ngram in windows for k in range(13)} for part in text]
        for text in by_split[1]
    ]
    assert counts == {
        "words": sum(len(part.split()) for text in by_split[1] for part in text),
        "words_in_overlap": sum(len(words) for parts in covered for words in parts),
        "documents_with_overlap": sum(any(parts) for parts in covered),
    }


def test_a_long_document_is_read_in_parts(tmp_path, monkeypatch):
    """It has the signature of its first part."""
    monkeypatch.setattr(leakage, "RANGE_TOKENS", 8)
    tokenizer = CharTokenizer("abcdefgh ", eot=True)
    texts = ["a b", "a b c d e f g h a b", "a b", "h g f e d c b a"] * 2
    documents = [np.append(tokenizer.encode(text), tokenizer.eot) for text in texts]
    _, signatures = read_in_ranges(tmp_path, tokenizer, documents, np.arange(8) >= 4, 100)
    assert np.array_equal(signatures, compute_signatures([text[:8].encode() for text in texts]))
