"""Small byte-level BPE tokenizers."""

from functools import cache

from folio.data.tokenizer import BPETokenizer, GPT2Tokenizer

TEXT = "hello wörld\n日本🎉 hello hello  world's <|endoftext|>"


def bpe() -> GPT2Tokenizer:
    """A GPT-2 tokenizer with a tiny vocabulary: the 256 bytes and a few merges."""
    return GPT2Tokenizer([bytes([b]) for b in range(256)] + [b"he", b"ll", b"hell", b"hello", b" w"])


@cache
def trained() -> BPETokenizer:
    """A BPE trained on a short text."""
    return BPETokenizer.train([TEXT, "hello worlds, hello worlds"], 270)
