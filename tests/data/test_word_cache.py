"""Token ids from the word cache, against tiktoken on the complete text."""

import itertools
import random
from unittest.mock import Mock

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from folio.data import word_cache
from folio.data.tokenizer import EOT_TEXT, GPT2Tokenizer
from folio.data.word_cache import WordCache

CHARACTERS = "abcst'mdlvreXZ019      \n\n\n\t\r\v\f\x1c\0._-<|>[]&;éßЖñ中日。カ한🎉\U0001d4b3"
CHARACTERS += "\u0085\u00a0\u1680\u2003\u2028\u202f\u3000\u200b\u2019\u0301\u0660"
PARTS = [*CHARACTERS, " the", "the", "it's", "we'll", EOT_TEXT]


@pytest.fixture(scope="module")
def tokenizer() -> GPT2Tokenizer:
    pieces = ["the", " the", "th", " t", "'s", "'ll", "\n\n", "  ", " 中", "é", "ll", "er", "ab", "...", EOT_TEXT]
    white = [b"\xc2\xa0", b"\xc2\xa0\n", b"\xe2\x80", b"\xe2\x80\xa8", b"\xe2\x80\xa8\n"]
    ranks = [bytes([b]) for b in range(256)] + [piece.encode() for piece in pieces if len(piece) < 9]
    return GPT2Tokenizer(ranks + white)


@pytest.fixture
def cache(tokenizer) -> WordCache:
    return WordCache(tokenizer.encoding, EOT_TEXT)


@pytest.fixture
def recorded(cache, monkeypatch) -> list[tuple[int, int]]:
    """Receives the begin and the end of each word that tiktoken encodes."""
    recorded, encode_missing = [], cache._encode_missing

    def encode_and_record(content, missing):
        recorded.extend((begin, end) for begin, end, _ in missing.tolist())
        return encode_missing(content, missing)

    monkeypatch.setattr(cache, "_encode_missing", encode_and_record)
    return recorded


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(rng.sample(PARTS, rng.randrange(2, len(PARTS))), k=rng.randrange(60)))


@pytest.mark.parametrize("free", [100, word_cache.SLOTS // 2])
def test_ids_match_tiktoken(free, tokenizer, cache, seed):
    """Also if the cache becomes full."""
    rng = random.Random(seed)
    cache.n_words[0] = word_cache.SLOTS // 2 - free
    for _ in range(200):
        texts = [random_text(rng) for _ in range(rng.randrange(12))]
        ids = cache.encode([text.encode() for text in texts])
        assert [i.tolist() for i in ids] == [tokenizer.encode(text).tolist() for text in texts], texts
    added = np.count_nonzero(cache.table[:, 1])
    assert added == cache.n_words[0] - word_cache.SLOTS // 2 + free
    assert added == 100 if free == 100 else added > 1000


def test_words_end_at_non_ascii_white_space(tokenizer, cache):
    """A non-breaking space and a line break were one word, as at the end of a text."""
    characters = ["a", "1", ".", "'", " ", "\n", "\u00a0", "\u2028", "é"]
    texts = ["".join(letters) for letters in itertools.product(characters, repeat=3)]
    encoded = cache.encode([text.encode() for text in texts])
    for text, ids in zip(texts, encoded, strict=True):
        assert ids.tolist() == tokenizer.encode(text).tolist(), text


def test_texts_are_cut_where_words_end(cache, recorded, seed):
    """With a full cache without words, tiktoken encodes every word."""
    rng, words = random.Random(seed), pre_tokenizers.ByteLevel(add_prefix_space=False)
    cache.n_words[0] = word_cache.SLOTS // 2
    for _ in range(200):
        text = random_text(rng)
        recorded.clear()
        cache.encode([text.encode()])
        assert sum(end - begin for begin, end in recorded) == len(text.encode())
        ends = {0, *(len(text[:end].encode()) for _, (_, end) in words.pre_tokenize_str(text))}
        assert set(itertools.chain(*recorded)) <= ends, text


def test_a_word_is_encoded_once(tokenizer, cache, recorded):
    """Also if it is repeated before tiktoken has encoded it, unless it is too long for the table."""
    long = "abcdefghijklmnop"
    text = f"the cat the cat {long} {long} abcdefgh abcdefgh"  # abcdefgh has 7 ids, which do not fit
    for missing in (
        ["the", " cat", " the", f" {long}", f" {long}", " abcdefgh"],
        [f" {long}", f" {long}", " abcdefgh"],
    ):
        recorded.clear()
        assert cache.encode([text.encode()])[0].tolist() == tokenizer.encode(text).tolist()
        assert [text[begin:end] for begin, end in recorded] == missing


def test_an_error_while_words_are_encoded_leaves_the_cache_intact(tokenizer, cache, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(cache, "_encode_missing", Mock(side_effect=KeyboardInterrupt))
        cache.encode([b"the cat sat on the mat"])
    for text in ("on the mat", "sat", "a cat sat on the mat"):
        assert cache.encode([text.encode()])[0].tolist() == tokenizer.encode(text).tolist()


def test_a_large_text_uses_the_cache(tokenizer, monkeypatch):
    monkeypatch.setattr("folio.data.tokenizer.CACHE_WORDS_AFTER", 10)
    texts = ["the theory", "", "ab\ud800 the", "the" + " " * 150_000 + "the"]
    fresh = GPT2Tokenizer(tokenizer.ranks)
    for batch in (texts[:1], texts[:3], texts[:3], texts):
        assert [ids.tolist() for ids in fresh.encode_all(batch)] == [tokenizer.encode(text).tolist() for text in batch]
    assert fresh.word_cache.n_words[0]
