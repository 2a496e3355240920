"""The words of a text and their n-grams as 64-bit hashes, and the n-grams that validation shares with training.

Case and punctuation do not count, as in the measure of GPT-3 (Brown et al. 2020, appendix C). Case is
folded for characters up to U+1FFF (Latin, Greek, Cyrillic, Armenian, Georgian) where the folded character has as many
bytes (not ß, which becomes ss).

Dimensions: N bytes of a text, W words, G n-grams.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from folio.base.workers import map_in_order
from folio.data.text_kernels import TEXT_STEP
from folio.data.tokenizer import Tokenizer
from folio.machine import compiled
from folio.machine.compiled import addresses

OVERLAP = 13  # words of an n-gram that validation should not share with training
BLOCK_TOKENS = 1 << 20  # to look at together; an n-gram that crosses the end of such a block is not seen
BOUNDARY = b" \xff "  # between documents: a word that UTF-8 does not contain

COPIED = 16  # bytes; this and the next two as in folio/data/text_step.py
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
MIXER = np.uint64(0xD6E8FEB86659FD93)
FILTER_BITS = 32  # per hash of a set, at least, which tell most other hashes from it


def word_hashes(content: bytes | np.ndarray) -> np.ndarray:
    """The hash of each word of a text in UTF-8: (W,) uint64.

    Words are runs of ASCII letters and digits and of other characters; of those of Chinese, Japanese, and Korean, each
    is a word. The hash is a polynomial in the bytes, mixed.
    """
    data = np.frombuffer(content, np.uint8)
    hashes = np.empty(len(data) + 1, np.uint64)
    return hashes[: compiled.function(TEXT_STEP, "hash_words", 3)(*addresses(data), len(data), *addresses(hashes))]


def mix(hashes: np.ndarray) -> np.ndarray:
    """Hashes of which every bit depends on all bits of the given ones."""
    hashes = (hashes ^ (hashes >> np.uint64(32))) * MIXER
    return hashes ^ (hashes >> np.uint64(32))


def ngrams_within_documents(words: np.ndarray, n: int, short: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The hash of each n-gram of words (W,) between two boundaries, and the word that it begins with: (G,) each.

    short: fewer words than n between two boundaries are an n-gram, too.
    """
    hashes, starts = np.empty(len(words), np.uint64), np.empty(len(words), np.int64)
    hash_ngrams = compiled.function(TEXT_STEP, "hash_ngrams", 6)
    count = hash_ngrams(*addresses(words), len(words), n, short, *addresses(hashes, starts))
    return hashes[:count], starts[:count]


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
        self.content = np.frombuffer(b"".join([*pieces, bytes(COPIED)]), np.uint8)
        self.starts = np.cumsum([0, *map(len, pieces)])

    def words(self, tokens: TokenRange) -> np.ndarray:
        """The hash of each word, (W,)."""
        offset = tokens.first * tokens.dtype.itemsize
        ids = np.fromfile(tokens.path, tokens.dtype, tokens.count, offset=offset).astype(np.int32)
        join_tokens = compiled.function(TEXT_STEP, "join_tokens", 5)
        pieces = *addresses(ids), len(ids), *addresses(self.starts, self.content)
        text = np.empty(join_tokens(*pieces, 0) + COPIED, np.uint8)
        return word_hashes(text[: join_tokens(*pieces, *addresses(text))])


def token_ranges(folder: Path, shards: Sequence[dict[str, Any]], dtype: np.dtype) -> Iterator[TokenRange]:
    """The shards in blocks of at most BLOCK_TOKENS. shards: as in meta.json."""
    for entry in shards:
        for first in range(0, entry["tokens"], BLOCK_TOKENS):
            yield TokenRange(folder / entry["file"], dtype, first, min(BLOCK_TOKENS, entry["tokens"] - first))


class HashFilter:
    """Bits that tell most other hashes from those of a set, (S,) uint64."""

    def __init__(self, hashes: np.ndarray):
        bits = (FILTER_BITS * len(hashes) + 64).bit_length()  # as a power of 2
        self.shift = 64 - bits
        self.filter = np.zeros(1 << bits - 6, np.uint64)
        add_to_filter = compiled.function(TEXT_STEP, "add_to_filter", 4)
        add_to_filter(*addresses(hashes), len(hashes), *addresses(self.filter), self.shift)
        compiled.function(TEXT_STEP, "find_in_filter", 5)  # before other processes need it

    def find(self, hashes: np.ndarray) -> np.ndarray:
        """The places of those that may be in the set."""
        places = np.empty(len(hashes), np.int64)
        find_in_filter = compiled.function(TEXT_STEP, "find_in_filter", 5)
        look_up = *addresses(hashes), len(hashes), *addresses(self.filter), self.shift, *addresses(places)
        return places[: find_in_filter(*look_up)]


class HashSet(HashFilter):
    """A set of hashes that few of the hashes to look up are in: (S,) uint64."""

    def __init__(self, hashes: np.ndarray):
        super().__init__(hashes)
        self.sorted = np.sort(hashes)

    def find(self, hashes: np.ndarray) -> np.ndarray:
        """The places of those that are in the set."""
        places = super().find(hashes)
        likely = hashes[places]
        return places[self.sorted[np.searchsorted(self.sorted, likely).clip(max=len(self.sorted) - 1)] == likely]


def occurring(tokens: TokenRange, text: TokenText, wanted: HashFilter) -> np.ndarray:
    """The n-grams of a part of a shard that may be among the wanted ones: their hashes, each once."""
    ngrams, _ = ngrams_within_documents(text.words(tokens), OVERLAP)
    return np.unique(ngrams[wanted.find(ngrams)])


def ngram_overlap(
    folder: Path, shards: dict[str, list[dict[str, Any]]], dtype: np.dtype, tokenizer: Tokenizer, workers: int
) -> dict[str, int]:
    """How much of the validation text occurs in the training text, in n-grams of OVERLAP words (Brown et al. 2020).

    shards: of each split, as in meta.json. Returns the number of words of validation, how many of them are in such an
    n-gram, and how many documents have one. Memory: about 40 bytes per word of validation.
    """
    text = TokenText(tokenizer)
    ranges = {split: list(token_ranges(folder, entries, dtype)) for split, entries in shards.items()}
    blocks = [text.words(tokens) for tokens in ranges["val"]]
    wanted = HashFilter(np.concatenate([ngrams_within_documents(words, OVERLAP)[0] for words in blocks]))
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
