import random

import pytest

from folio.data.tokenizer import CharTokenizer
from folio.decoding.text_stream import TextStream
from tests.support.tiny_tokenizers import bpe


@pytest.mark.parametrize("stop", ["\n\n", "aab", "x", "🎉", None])
def test_text_ends_before_the_stop_string_and_has_only_whole_characters(stop):
    text = "caaab\n \n\nmore 🎉 aab"
    stream, pieces = TextStream(bpe(), stop), []
    for token in bpe().encode(text).tolist():
        pieces.append(stream.push(token))
        if stream.ended:
            break
    pieces.append(stream.push(None))
    assert "".join(pieces) == (text.split(stop)[0] if stop else text) and stream.push(5) == ""
    assert not any("\ufffd" in piece for piece in pieces)


def test_stop_strings_that_overlap_themselves(seed):
    """The text ends before the first match. Only text that may be the beginning of a stop string is held back."""
    rng = random.Random(seed)
    for _ in range(300):
        text = "".join(rng.choices("ab", k=rng.randint(0, 30)))
        stop = "".join(rng.choices("ab", k=rng.randint(1, 6)))
        stream, shown, pushed = TextStream(CharTokenizer("ab"), stop), "", ""
        for character in text:
            shown, pushed = shown + stream.push("ab".index(character)), pushed + character
            assert pushed.split(stop)[0].startswith(shown)
            assert stream.ended or len(pushed) - len(shown) < len(stop)
        assert shown + stream.push(None) == text.split(stop)[0]


def test_the_stop_string_that_is_complete_first_ends_the_text(seed):
    """For any split of the text into tokens."""
    rng, tokens = random.Random(seed), bpe()
    for _ in range(300):
        text = "".join(rng.choices("helo w", k=rng.randint(0, 30)))
        stops = ["".join(rng.choices("helo w", k=rng.randint(1, 3))) for _ in range(rng.randint(1, 4))]
        ends = [n for n in range(1, len(text) + 1) if text[:n].endswith(tuple(stops))]
        matches = [stop for stop in stops if ends and text[: ends[0]].endswith(stop)]
        expected = text[: ends[0] - max(map(len, matches))] if ends else text
        for ids in (tokens.encode(text).tolist(), [*text.encode()]):
            stream = TextStream(tokens, stops)
            assert "".join(stream.push(token) for token in [*ids, None]) == expected, (text, stops)


def test_the_stop_string_that_is_complete_first_in_a_token_ends_the_text():
    """Not the one that begins first: the result must be the same as with a token per character."""
    tokens = bpe()
    assert tokens.encode("hello").tolist() == [tokens.ranks.index(b"hello")]
    for ids in (tokens.encode("hello").tolist(), [*b"hello"]):
        stream = TextStream(tokens, ["hello", "l"])
        assert "".join(stream.push(token) for token in ids) == "he", ids


@pytest.mark.parametrize(
    "count, expected", [(6, ["a", "", "", "", "🎉", "b", ""]), (3, ["a", "", "", "\ufffd"])], ids=["whole", "cut"]
)
def test_a_character_is_returned_when_its_last_byte_arrives(count, expected):
    """An incomplete character at the end becomes a replacement character."""
    stream = TextStream(bpe())
    assert [stream.push(token) for token in [*bpe().encode("a🎉b")[:count].tolist(), None]] == expected
