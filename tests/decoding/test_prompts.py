"""Encoding of prompts."""

import pytest

from folio import UserError
from folio.data.tokenizer import CharTokenizer
from folio.decoding.prompts import default_prompt, encode_prompt, prompt_warnings
from model import GPTConfig
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
        (line,) = prompt_warnings(prompt, "aéß\nbé", "the prompt", tokenizer, GPTConfig(block_size=6), on_unknown)
        assert line.startswith("left out" if on_unknown == "skip" else "replaced")
        assert line.endswith("2 of 6 characters of the prompt, not in the vocabulary: 'é'")
    assert encode_prompt(tokenizer, "é", "skip").ids == default_prompt(tokenizer)
    with pytest.raises(UserError, match="é"):
        encode_prompt(tokenizer, "aé")


def test_a_long_prompt_is_truncated_or_reported():
    tokenizer = CharTokenizer("\nab")
    prompt = encode_prompt(tokenizer, "abab")
    assert prompt.truncate(3, tokenizer) == ([1, 2, 1], "aba", 0)
    assert prompt.truncate(4, tokenizer) == prompt.truncate(None, tokenizer) == prompt
    assert prompt_warnings(prompt, "abab", "x", tokenizer, GPTConfig(block_size=4), "error") == []
    (line,) = prompt_warnings(prompt, "abab", "x", tokenizer, GPTConfig(block_size=3), "error")
    assert line == "x has 4 tokens, but the model uses only the last 3"


def test_a_prompt_of_several_documents_is_reported_if_attention_is_confined_to_one():
    tokenizer = CharTokenizer("ab", eot=True)
    config = GPTConfig(block_size=3, vocab_size=tokenizer.vocab_size, document_token=tokenizer.eot)
    for text, documents in (("a", 0), ("ab<|endoftext|>", 0), ("ab<|endoftext|>b", 2), ("<|endoftext|>" * 2, 2)):
        lines = prompt_warnings(encode_prompt(tokenizer, text), text, "x", tokenizer, config, "error")
        assert [f"the last of the {documents} documents in x" in line for line in lines] == [True] * (documents > 0)
