"""The ids of texts by a cache of words, against those of tiktoken for the whole text."""

import random

import numpy as np
import pytest

from folio import word_cache
from folio.tokenizer import EOT_TEXT, GPT2Tokenizer
from folio.word_cache import WordCache

CHARACTERS = [
    *"abcst'mdlvreXZ019",
    *"''''''",
    *"      \n\n\n\t\r\v\f\x1c\0",
    *"._-<|>[]&;",
    *"éßЖñ中日。カ한",
    *"\u0085\u00a0\u1680\u2003\u2028\u202f\u3000\u200b\u2019\u0301\u0660",
    "🎉",
    "\U0001d4b3",
    *[" the", "the", "it's", "we'll", EOT_TEXT],
]


@pytest.fixture(scope="module")
def tokenizer() -> GPT2Tokenizer:
    pieces = ["the", " the", "th", " t", "'s", "'ll", "\n\n", "  ", " 中", "é", "ll", "er", "ab", "...", EOT_TEXT]
    return GPT2Tokenizer([bytes([b]) for b in range(256)] + [piece.encode() for piece in pieces if len(piece) < 9])


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(rng.sample(CHARACTERS, rng.randrange(2, len(CHARACTERS))), k=rng.randrange(60)))


def test_ids_are_those_of_the_whole_text(tokenizer, seed):
    rng, cache = random.Random(seed), WordCache(tokenizer.encoding, EOT_TEXT)
    for _ in range(300):
        texts = [random_text(rng) for _ in range(rng.randrange(12))]
        ids = cache.encode([text.encode() for text in texts])
        assert [i.tolist() for i in ids] == [tokenizer.encode(text).tolist() for text in texts], texts
    assert cache.n_words > 1000


def test_a_full_cache_gives_the_same_ids(tokenizer, monkeypatch, seed):
    rng, cache = random.Random(seed), WordCache(tokenizer.encoding, EOT_TEXT)
    cache.n_words = word_cache.SLOTS // 2 - 100
    for _ in range(100):
        text = random_text(rng)
        assert cache.encode([text.encode()])[0].tolist() == tokenizer.encode(text).tolist(), text
    assert cache.n_words == word_cache.SLOTS // 2 and np.count_nonzero(cache.table[:, 1]) == 100


def test_a_large_text_uses_the_cache(tokenizer, monkeypatch):
    monkeypatch.setattr("folio.tokenizer.CACHE_WORDS_AFTER", 10)
    texts = ["the theory", "", "ab\ud800 the", "the" + " " * 150_000 + "the"]
    fresh = GPT2Tokenizer(tokenizer.ranks)
    for chosen in (texts[:1], texts[:3], texts[:3], texts):
        assert [ids.tolist() for ids in fresh.encode_all(chosen)] == [tokenizer.encode(t).tolist() for t in chosen]
    assert fresh.word_cache.n_words
