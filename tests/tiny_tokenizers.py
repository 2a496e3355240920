"""Byte-pair encodings that are small enough to be made by the tests."""

from functools import cache

from folio.tokenizer import BPETokenizer, GPT2Tokenizer

TEXT = "hello wörld\n日本🎉 hello hello  world's <|endoftext|>"


def bpe() -> GPT2Tokenizer:
    """GPT-2's scheme over a tiny table: the 256 bytes and a few merges."""
    return GPT2Tokenizer([bytes([b]) for b in range(256)] + [b"he", b"ll", b"hell", b"hello", b" w"])


@cache
def trained() -> BPETokenizer:
    """A BPE of one's own."""
    return BPETokenizer.train([TEXT, "hello worlds, hello worlds"], 270)
