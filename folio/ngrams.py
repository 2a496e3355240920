"""The words of a text and their n-grams as 64-bit hashes, and the n-grams that validation shares with training.

Case and punctuation do not count, as in the measure of GPT-3 (Brown et al. 2020, appendix C).

Dimensions: N bytes of a text, W words, G n-grams.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from folio import compiled
from folio.compiled import addresses
from folio.tokenizer import Tokenizer
from folio.workers import map_in_order

OVERLAP = 13  # words of an n-gram that validation should not share with training
BLOCK_TOKENS = 1 << 20  # to look at together; an n-gram that crosses the end of such a block is not seen
BOUNDARY = b" \xff "  # between documents: a word that UTF-8 does not contain

MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # these two as in folio/text_step.py
MIXER = np.uint64(0xD6E8FEB86659FD93)
FILTER_BITS = 24  # of a hash, which tell most n-grams from the wanted ones


def word_hashes(content: bytes | np.ndarray) -> np.ndarray:
    """The hash of each word of a text in UTF-8: (W,) uint64.

    Words are runs of ASCII letters and digits and of other characters; of those of Chinese, Japanese, and Korean, each
    is a word. The hash is a polynomial in the bytes, mixed.
    """
    data = np.frombuffer(content, np.uint8)
    hashes = np.empty(len(data), np.uint64)
    return hashes[: compiled.function("hash_words", "text_step", 3)(*addresses(data), len(data), *addresses(hashes))]


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


BOUNDARY_WORD = mix(np.array([0xFF + 1], np.uint64))[0]  # word_hashes(BOUNDARY)[0]


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
        self.starts = np.cumsum([0, *map(len, pieces)])

    def words(self, tokens: TokenRange) -> np.ndarray:
        """The hash of each word, (W,)."""
        offset = tokens.first * tokens.dtype.itemsize
        ids = np.fromfile(tokens.path, tokens.dtype, tokens.count, offset=offset).astype(np.int32)
        text = np.empty((self.starts[ids + 1] - self.starts[ids]).sum(), np.uint8)
        join_tokens = compiled.function("join_tokens", "text_step", 5)
        join_tokens(*addresses(ids), len(ids), *addresses(self.starts, self.content, text))
        return word_hashes(text)


def token_ranges(folder: Path, shards: Sequence[dict[str, Any]], dtype: np.dtype) -> Iterator[TokenRange]:
    """The shards in blocks of at most BLOCK_TOKENS. shards: as in meta.json."""
    for entry in shards:
        for first in range(0, entry["tokens"], BLOCK_TOKENS):
            yield TokenRange(folder / entry["file"], dtype, first, min(BLOCK_TOKENS, entry["tokens"] - first))


class HashSet:
    """A set of hashes that few of the hashes to look up are in: (S,) uint64."""

    def __init__(self, hashes: np.ndarray):
        self.sorted = np.sort(hashes)
        self.filter = np.zeros(1 << FILTER_BITS, bool)
        self.filter[hashes >> np.uint64(64 - FILTER_BITS)] = True

    def find(self, hashes: np.ndarray) -> np.ndarray:
        """The places of those that are in the set."""
        places = np.flatnonzero(self.filter[hashes >> np.uint64(64 - FILTER_BITS)])
        likely = hashes[places]
        return places[self.sorted[np.searchsorted(self.sorted, likely).clip(max=len(self.sorted) - 1)] == likely]


def occurring(tokens: TokenRange, text: TokenText, wanted: HashSet) -> np.ndarray:
    """The n-grams of a part of a shard that are among the wanted ones: their hashes."""
    ngrams, _ = ngrams_within_documents(text.words(tokens), OVERLAP)
    return ngrams[wanted.find(ngrams)]


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
    wanted = HashSet(np.concatenate([ngrams_within_documents(words, OVERLAP)[0] for words in blocks]))
    of_blocks = [hashes for _, hashes in map_in_order(occurring, ranges["train"], workers, text, wanted)]
    shared = HashSet(np.concatenate(of_blocks))
    words_in_overlap, n_words, document, documents = 0, 0, 0, set()
    for words in blocks:
        is_boundary = words == BOUNDARY_WORD
        ngrams, starts = ngrams_within_documents(words, OVERLAP)
        starts = starts[shared.find(ngrams)]
        covered = np.zeros(len(words) + 1, np.int64)  # +1 where an n-gram begins, -1 after its end
        np.add.at(covered, starts, 1)
        np.add.at(covered, starts + OVERLAP, -1)
        words_in_overlap += int((np.cumsum(covered)[:-1] > 0).sum())
        n_words += int((~is_boundary).sum())
        documents.update((document + np.cumsum(is_boundary)[starts]).tolist())
        document += int(is_boundary.sum())
    return {"words": n_words, "words_in_overlap": words_in_overlap, "documents_with_overlap": len(documents)}
