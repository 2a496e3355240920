"""Encoding of prompts."""

import pytest

from folio import UserError
from folio.data.tokenizer import CharTokenizer
from folio.decoding.prompts import default_prompt, encode_prompt, prompt_warnings
from tests.support.tiny_tokenizers import bpe


def test_the_default_prompt_is_a_line_break_or_the_end_of_text():
    assert default_prompt(CharTokenizer("\nab")) == [0] and default_prompt(CharTokenizer("ab\n")) == [2]
    assert default_prompt(CharTokenizer("ab")) == [0] and default_prompt(bpe()) == [261]


def test_unknown_characters_are_left_out_or_replaced():
    tokenizer = CharTokenizer("\nabß\ufffd")
    for on_unknown, ids, text in (
        ("skip", [1, 3, 0, 2], "aß\nb"),
        ("replace", [1, 4, 3, 0, 2, 4], "a\ufffdß\nb\ufffd"),
    ):
        prompt = encode_prompt(tokenizer, "aéß\nbé", on_unknown)
        assert prompt == (ids, text, 2)
        (line,) = prompt_warnings(prompt, "aéß\nbé", "the prompt", tokenizer, 6)
        assert line.endswith("2 of 6 characters of the prompt, not in the vocabulary: 'é'")
    assert encode_prompt(tokenizer, "é", "skip").ids == default_prompt(tokenizer)
    with pytest.raises(UserError, match="é"):
        encode_prompt(tokenizer, "aé")


def test_a_long_prompt_is_truncated_or_reported():
    tokenizer = CharTokenizer("\nab")
    prompt = encode_prompt(tokenizer, "abab")
    assert prompt.truncate(3, tokenizer) == ([1, 2, 1], "aba", 0)
    assert prompt.truncate(4, tokenizer) == prompt.truncate(None, tokenizer) == prompt
    assert prompt_warnings(prompt, "abab", "x", tokenizer, 4) == []
    (line,) = prompt_warnings(prompt, "abab", "x", tokenizer, 3)
    assert line == "x has 4 tokens, but the model uses only the last 3"
