import json

import numpy as np
import pytest

from folio import UserError
from folio.tokenizer import CharTokenizer, GPT2Tokenizer, from_json, gpt2_tokenizer


def bpe() -> GPT2Tokenizer:
    """GPT-2's scheme over a tiny table: the 256 bytes and a few merges."""
    return GPT2Tokenizer([bytes([b]) for b in range(256)] + [b"he", b"ll", b"hell", b"hello", b" w"])


@pytest.mark.parametrize("tokenizer", [CharTokenizer.of("hello wörld 日本🎉\n"), bpe()], ids=["char", "gpt2"])
def test_round_trips(tokenizer):
    text = "hello wörld\n日本🎉"
    ids = tokenizer.encode(text)
    assert ids.min() >= 0 and ids.max() < tokenizer.vocab_size
    assert tokenizer.decode(ids) == text
    again = from_json(json.loads(json.dumps(tokenizer.to_json())))
    assert np.array_equal(again.encode(text), ids) and again.hash == tokenizer.hash


def test_characters_are_sorted_by_code_point():
    tokenizer = CharTokenizer.of("banana\n")
    assert tokenizer.characters == "\nabn" and tokenizer.encode("nab").tolist() == [3, 1, 2]
    assert tokenizer.hash != CharTokenizer.of("band\n").hash


def test_an_unknown_character_is_named_with_its_position():
    tokenizer = CharTokenizer.of("abc")
    for strange in ("é", "B", "🎉"):
        with pytest.raises(UserError, match=rf"'{strange}' \(U\+.* at position 2"):
            tokenizer.encode("ab" + strange + "c")


def test_gpt2_merges_and_ends():
    tokenizer = bpe()
    assert tokenizer.encode("hello w").tolist() == [259, 260]
    assert tokenizer.eot == 261 and tokenizer.vocab_size == 262
    assert tokenizer.encode("<|endoftext|>").max() < tokenizer.eot  # text never makes the special token


def test_a_stream_never_shows_half_a_character():
    tokenizer = bpe()
    pieces = list(tokenizer.stream(tokenizer.encode("a🎉b")))
    assert pieces == ["a", "", "", "", "🎉", "b", ""]
    assert list(tokenizer.stream(tokenizer.encode("🎉")[:2])) == ["", "", "\ufffd"]


def test_unknown_kind_is_refused():
    with pytest.raises(UserError, match="unknown kind of tokenizer 'word'"):
        from_json({"kind": "word"})


@pytest.mark.network
def test_gpt2s_own_table():
    tokenizer = gpt2_tokenizer()
    assert tokenizer.encode("hello world").tolist() == [31373, 995]
    assert tokenizer.vocab_size == 50257 and tokenizer.eot == 50256
