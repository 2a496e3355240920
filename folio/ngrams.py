"""The words of a text and their n-grams as 64-bit hashes, and the n-grams that validation shares with training.

Case and punctuation do not count, as in the measure of GPT-3 (Brown et al. 2020, appendix C).

Dimensions: N bytes of a text, W words, G n-grams.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from folio.tokenizer import Tokenizer
from folio.workers import map_in_order

OVERLAP = 13  # words of an n-gram that validation should not share with training
BLOCK_TOKENS = 1 << 20  # to look at together; an n-gram that crosses the end of such a block is not seen
BOUNDARY = b" \xff "  # between documents: a word that UTF-8 does not contain

LOWER = np.array([byte + 32 if ord("A") <= byte <= ord("Z") else byte for byte in range(256)], np.uint8)
IN_WORD = np.array([byte >= 128 or chr(byte).isalnum() for byte in range(256)])

MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, so that it has an inverse modulo 2**64
INVERSE = np.uint64(pow(int(MULTIPLIER), -1, 2**64))
MIXER = np.uint64(0xD6E8FEB86659FD93)


def word_hashes(content: bytes) -> np.ndarray:
    """The hash of each word of a text in UTF-8: (W,) uint64.

    Words are runs of ASCII letters and digits and of other characters; of those of Chinese, Japanese, and Korean, each
    is a word. The hash is a polynomial in the bytes, from the differences of its sums over all bytes before.
    """
    data = LOWER[np.frombuffer(content, np.uint8)]  # (N,)
    starts, ends = word_bounds(data)
    powers, inverses = powers_of(MULTIPLIER, len(data)), powers_of(INVERSE, len(data))
    sums = np.zeros(len(data) + 1, np.uint64)
    np.cumsum((data + np.uint64(1)) * powers, out=sums[1:])
    return mix((sums[ends] - sums[starts]) * inverses[starts])


def word_bounds(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each word begins and ends in bytes of UTF-8, (N,): (W,) each."""
    in_word = IN_WORD[data]
    latin_signs = np.flatnonzero(data == 0xC2)  # U+0080 to U+00BF, such as the non-breaking space
    quotes_and_dashes = np.flatnonzero((data[:-1] == 0xE2) & (data[1:] == 0x80))  # U+2000 to U+203F
    for signs, length in ((latin_signs, 2), (quotes_and_dashes, 3)):
        for k in range(length):
            in_word[np.minimum(signs + k, len(data) - 1)] = False
    follows = np.append(False, in_word[:-1])[: len(data)]  # whether the byte before is in a word
    is_start = in_word & (~follows | ((data >= 0xE3) & (data < 0xF0)))
    starts = np.flatnonzero(is_start)
    breaks = np.append(np.flatnonzero(is_start | ~in_word), len(data))
    return starts, breaks[np.searchsorted(breaks, starts, side="right")]


def powers_of(base: np.uint64, count: int) -> np.ndarray:
    """base**0, base**1, ... modulo 2**64: (count,)."""
    return np.cumprod(np.append(np.uint64(1), np.full(max(count - 1, 0), base)), dtype=np.uint64)[:count]


def mix(hashes: np.ndarray) -> np.ndarray:
    """Hashes of which every bit depends on all bits of the given ones."""
    hashes = (hashes ^ (hashes >> np.uint64(32))) * MIXER
    return hashes ^ (hashes >> np.uint64(32))


def ngram_hashes(words: np.ndarray, n: int) -> np.ndarray:
    """The hash of each n-gram of consecutive words (W,): (G,) uint64 with G = W - n + 1, or none."""
    count = max(len(words) - n + 1, 0)
    hashes = np.zeros(count, np.uint64)
    for k in range(n):
        hashes = hashes * MULTIPLIER + words[k : k + count]
    return mix(hashes)


def ngrams_within_documents(words: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The hash of each n-gram of words (W,) between two boundaries, and the word that it begins with: (G,) each."""
    boundaries = np.append(0, np.cumsum(words == BOUNDARY_WORD))
    starts = np.flatnonzero(boundaries[: max(len(words) - n + 1, 0)] == boundaries[n:])
    return ngram_hashes(words, n)[starts], starts


BOUNDARY_WORD = word_hashes(BOUNDARY)[0]


# --- what validation shares with training -----------------------------------------------------------------------------


class TokenRange(NamedTuple):
    """A part of a shard."""

    path: Path
    dtype: np.dtype
    first: int  # token
    count: int


class TokenText:
    """The bytes of any tokens, with BOUNDARY for the end-of-text token."""

    def __init__(self, tokenizer: Tokenizer):
        pieces = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        if tokenizer.eot is not None:
            pieces[tokenizer.eot] = BOUNDARY
        self.content = np.frombuffer(b"".join(pieces), np.uint8)
        self.lengths = np.array([len(piece) for piece in pieces])
        self.starts = np.cumsum(self.lengths) - self.lengths

    def words(self, tokens: TokenRange) -> np.ndarray:
        """The hash of each word, (W,)."""
        offset = tokens.first * tokens.dtype.itemsize
        ids = np.fromfile(tokens.path, tokens.dtype, tokens.count, offset=offset)
        lengths = self.lengths[ids]
        ends = np.cumsum(lengths)
        inside = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)  # of each token
        return word_hashes(self.content[np.repeat(self.starts[ids], lengths) + inside].tobytes())


def token_ranges(folder: Path, shards: Sequence[dict[str, Any]], dtype: np.dtype) -> Iterator[TokenRange]:
    """The shards in blocks of at most BLOCK_TOKENS. shards: as in meta.json."""
    for entry in shards:
        for first in range(0, entry["tokens"], BLOCK_TOKENS):
            yield TokenRange(folder / entry["file"], dtype, first, min(BLOCK_TOKENS, entry["tokens"] - first))


def occurring(tokens: TokenRange, text: TokenText, wanted: np.ndarray) -> np.ndarray:
    """The n-grams of a part of a shard that are among the wanted ones, which are sorted: their hashes."""
    ngrams = np.sort(ngrams_within_documents(text.words(tokens), OVERLAP)[0])  # sorted ones are found faster
    return ngrams[wanted[np.searchsorted(wanted, ngrams).clip(max=len(wanted) - 1)] == ngrams]


def ngram_overlap(
    folder: Path, shards: dict[str, list[dict[str, Any]]], dtype: np.dtype, tokenizer: Tokenizer, workers: int
) -> dict[str, int]:
    """How much of the validation text occurs in the training text, in n-grams of OVERLAP words (Brown et al. 2020).

    shards: of each split, as in meta.json. Returns the number of words of validation, how many of them are in such an
    n-gram, and how many documents have one. Memory: about 30 bytes per word of validation.
    """
    text = TokenText(tokenizer)
    ranges = {split: list(token_ranges(folder, entries, dtype)) for split, entries in shards.items()}
    blocks = [text.words(tokens) for tokens in ranges["val"]]
    wanted = np.unique(np.concatenate([ngrams_within_documents(words, OVERLAP)[0] for words in blocks]))
    shared = wanted[:0]
    if len(wanted):
        of_blocks = [hashes for _, hashes in map_in_order(occurring, ranges["train"], workers, text, wanted)]
        shared = np.unique(np.concatenate(of_blocks))
    words_in_overlap, n_words, document, documents = 0, 0, 0, set()
    for words in blocks:
        is_boundary = words == BOUNDARY_WORD
        ngrams, starts = ngrams_within_documents(words, OVERLAP)
        starts = starts[np.isin(ngrams, shared)]
        covered = np.zeros(len(words) + 1, np.int64)  # +1 where an n-gram begins, -1 after its end
        np.add.at(covered, starts, 1)
        np.add.at(covered, starts + OVERLAP, -1)
        words_in_overlap += int((np.cumsum(covered)[:-1] > 0).sum())
        n_words += int((~is_boundary).sum())
        documents.update((document + np.cumsum(is_boundary)[starts]).tolist())
        document += int(is_boundary.sum())
    return {"words": n_words, "words_in_overlap": words_in_overlap, "documents_with_overlap": len(documents)}
