"""Hashes of words and n-grams, against words that are cut one character at a time."""

import random

import numpy as np
import pytest

from folio.data.ngrams import BOUNDARY, BOUNDARY_WORD, HashFilter, HashSet, mix, ngrams_within_documents, word_hashes

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
def test_a_set_finds_its_hashes(size, seed):
    rng = np.random.default_rng(seed)
    hashes, others = (rng.integers(2**64, size=n, dtype=np.uint64) for n in (size, 1000))
    looked_up = rng.permutation(np.concatenate([hashes, hashes[:10], others]))
    expected, likely = np.flatnonzero(np.isin(looked_up, hashes)), HashFilter(hashes).find(looked_up)
    assert HashSet(hashes).find(looked_up).tolist() == expected.tolist()
    assert np.isin(expected, likely).all() and len(likely) <= len(expected) + 100


def test_mixing():
    upper = mix(np.arange(1, 20_001, dtype=np.uint64)) >> np.uint64(32)  # all 32 upper bits follow from the lower ones
    assert len(np.unique(upper)) > 19_990
