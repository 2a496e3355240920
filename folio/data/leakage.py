"""Repeated text in a data set: equal documents, near duplicates, and n-grams that validation shares with training.

Near duplicates are found by MinHash signatures and locality-sensitive hashing. The similarity of two documents is the
Jaccard index of their shingles: the n-grams of words that both have, of those that any of them has (Broder 1997, "On
the resemblance and containment of documents"). Lee et al. 2021, "Deduplicating Training Data Makes Language Models
Better", find near duplicates of training data in the same way. Shared n-grams are the measure of GPT-3 (Brown et al.
2020, appendix C).

Case and punctuation do not count. Case is folded for characters up to U+1FFF (Latin, Greek, Cyrillic, Armenian,
Georgian) where the folded character has as many bytes (not ß, which becomes ss).

Dimensions: N bytes of a text, W words, G n-grams, D documents, P permutations of a signature.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from folio.base.workers import map_in_order
from folio.data.shards import Shards, token_dtype
from folio.data.tokenizer import Tokenizer
from folio.data.word_cache import TEXT_STEP
from folio.machine import compiled
from folio.machine.compiled import addresses

OVERLAP = 13  # words of an n-gram that validation should not share with training
BLOCK_TOKENS = 1 << 20  # to look at together; an n-gram that crosses the end of such a block is not seen
BOUNDARY = b" \xff "  # between documents: a word that UTF-8 does not contain
FILTER_BITS = 32  # per hash of a set, at least, which tell most other hashes from it

SHINGLE = 5  # words
SIGNED_BYTES = 1 << 20  # of a document, from its beginning
NO_WORDS = np.uint32(2**32 - 1)  # all values of the signature of a document without words
SIMILARITY = 0.5  # of near duplicates, at least; 0.5 is that of two texts of which about 8 % of the words differ
PERMUTATIONS = 128  # the standard error of an estimated similarity is at most 0.044
BANDS = 32  # of 4 values each: documents with a similarity of 0.5 have an equal band with a probability of 87 %
LONGEST_CHAIN = 100  # documents per band to compare with, the newest ones; 1,000 take 3 ms if all have a band in common

COPIED = 16  # bytes; this and the next line as in folio/data/text_step.py
MULTIPLIER, MIXER = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


def count_leakage(
    hashes: np.ndarray,
    signatures: np.ndarray | None,
    folder: Path,
    shards: Shards | None,
    tokenizer: Tokenizer,
    workers: int,
) -> dict[str, Any]:
    """Check train against val, by the names of report.json: equal documents, near duplicates, and shared n-grams.

    hashes: of all documents in their order, (D,), of which the lowest bit is 1 for validation. signatures: of the same
    documents, (D, P); None: near duplicates are not counted. shards: those in `folder`; None: n-grams are not counted.
    """
    near: dict[str, int | None] = {"repeated": None, "val_in_train": None}
    if signatures is not None:
        near = count_near_duplicates(signatures, (hashes & np.uint64(1)).astype(bool))
    return {
        "duplicates": count_duplicates(hashes),
        "near_duplicates": near,
        "ngram_overlap": None if shards is None else ngram_overlap(folder, shards, tokenizer, workers),
    }


# --- words and n-grams ------------------------------------------------------------------------------------------------


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


# --- equal documents --------------------------------------------------------------------------------------------------


def content_keys(hashes: np.ndarray) -> np.ndarray:
    """The upper 63 bits of document hashes, which identify duplicates. A record keeps the split in the lowest bit."""
    return hashes >> np.uint64(1)


class KeySet:
    """A set of uint64, such as content keys, in sorted arrays of growing size."""

    def __init__(self) -> None:
        self.levels: list[np.ndarray] = []

    def add(self, keys: np.ndarray) -> np.ndarray:
        """Add keys, (D,). Returns which of them were in the set or earlier in this array, (D,) bool."""
        known = np.ones(len(keys), dtype=bool)
        unique, first = np.unique(keys, return_index=True)
        is_new = ~self.contains(unique)
        known[first[is_new]] = False
        if is_new.any():
            self.levels.append(unique[is_new])
        while len(self.levels) > 1 and len(self.levels[-2]) <= 2 * len(self.levels[-1]):
            self.levels[-2:] = [np.sort(np.concatenate(self.levels[-2:]))]
        return known

    def contains(self, keys: np.ndarray) -> np.ndarray:
        """Which of the keys (D,) are in the set: (D,) bool."""
        found = np.zeros(len(keys), dtype=bool)
        for level in self.levels:
            found |= level[np.searchsorted(level, keys).clip(max=len(level) - 1)] == keys
        return found


def count_duplicates(hashes: np.ndarray) -> dict[str, int]:
    """How many documents repeat another one, and how many for validation are also in training.

    hashes: as in count_leakage, (D,).
    """
    hashes = np.sort(hashes)
    keys, val = content_keys(hashes), (hashes & np.uint64(1)).astype(bool)
    repeated = (keys[1:] == keys[:-1]).sum()
    in_both = np.intersect1d(np.unique(keys[~val]), np.unique(keys[val]), assume_unique=True)
    return {"repeated": int(repeated), "val_in_train": int(np.isin(keys[val], in_both).sum())}


# --- near duplicates --------------------------------------------------------------------------------------------------


def signatures_of(contents: Sequence[bytes]) -> np.ndarray:
    """The MinHash signatures of documents in UTF-8: (D, P) uint32.

    A document with fewer words than a shingle is one shingle. Of a document, the first SIGNED_BYTES count.
    """
    from rensa import RMinHash  # nothing else needs it

    words = word_hashes(BOUNDARY.join(content[:SIGNED_BYTES] for content in contents))
    shingles, starts = ngrams_within_documents(words, SHINGLE, short=True)
    number = np.cumsum(words == BOUNDARY_WORD)  # of the document of each word
    counts = np.bincount(number[starts], minlength=len(contents))  # (D,)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(shingles, np.append(0, np.cumsum(counts)), PERMUTATIONS, 1)
    return np.array(matrix.to_rows(), np.uint32).reshape(len(contents), PERMUTATIONS)


class SimilarDocuments:
    """The signatures of documents, in which those that are similar to another one are found.

    For each band of a signature, a hash table has the newest document with that band, from which a chain leads to the
    older ones. All of it takes at most 2 kB per document. (Rensa's own tables take 3 kB, and cannot be made from saved
    signatures, as resuming needs.)
    """

    def __init__(self, signatures: np.ndarray | None = None, expected: int = 0):
        """signatures: of the first documents, (D, P). expected: how many documents to make room for."""
        signatures = np.zeros((0, PERMUTATIONS), np.uint32) if signatures is None else signatures
        self.count = len(signatures)
        self._allocate(signatures, max(self.count, expected))

    def _allocate(self, signatures: np.ndarray, documents: int) -> None:
        """Make room for at least `documents` documents, and add those with these signatures."""
        capacity = max(1024, 1 << (documents - 1).bit_length())
        self.signatures = np.zeros((capacity, PERMUTATIONS), np.uint32)
        self.signatures[: len(signatures)] = signatures
        self.older = np.full((capacity, BANDS), -1, np.int32)  # the document before it in each chain
        self.shift = np.uint64(64 - capacity.bit_length())  # 2 * capacity is a power of 2
        self.newest = np.full((BANDS, 2 * capacity), -1, np.int32)  # by band and slot
        link_documents = compiled.function(TEXT_STEP, "link_documents", 6)
        slots = self._slots(signatures)
        link_documents(*addresses(slots), len(signatures), BANDS, *addresses(self.older, self.newest), capacity)

    def _slots(self, signatures: np.ndarray) -> np.ndarray:
        """The slot of each band of signatures (D, P) in the hash tables: (D, BANDS)."""
        bands = signatures.reshape(len(signatures), BANDS, PERMUTATIONS // BANDS)
        hashes = np.zeros(bands.shape[:2], np.uint64)
        for k in range(bands.shape[2]):
            hashes = hashes * MULTIPLIER + bands[:, :, k] + MIXER
        return (mix(hashes) >> self.shift).astype(np.int64)

    def find(self, signatures: np.ndarray) -> np.ndarray:
        """For each of the signatures (D, P), the number of the first document that is found to be similar, or -1."""
        found = np.empty(len(signatures), np.int64)
        self._find(np.ascontiguousarray(signatures), found, adds=False)
        return found

    def add_new(self, signatures: np.ndarray) -> np.ndarray:
        """Add the documents that are not similar to one before, (D, P). Returns which are similar, (D,) bool."""
        found, done = np.empty(len(signatures), np.int64), 0
        signatures = np.ascontiguousarray(signatures)
        while done < len(signatures):
            if self.count == len(self.signatures):
                self._allocate(self.signatures, self.count + 1)
            looked_up = self._find(signatures[done:], found[done:], adds=True)
            self.count += int((found[done : done + looked_up] < 0).sum())
            done += looked_up
        return found >= 0

    def _find(self, signatures: np.ndarray, found: np.ndarray, adds: bool) -> int:
        """`find`, and add the documents that are not similar to one until the tables are full. Returns of how many."""
        find_documents = compiled.function(TEXT_STEP, "find_documents", 14)
        slots = self._slots(signatures)
        tables = addresses(self.signatures, self.older, self.newest)
        new = *addresses(signatures, slots), len(signatures)
        sizes = PERMUTATIONS, BANDS, LONGEST_CHAIN, math.ceil(SIMILARITY * PERMUTATIONS)
        return find_documents(*new, *sizes, *tables, len(self.signatures), self.count, adds, *addresses(found))


def count_near_duplicates(signatures: np.ndarray, val: np.ndarray) -> dict[str, int]:
    """How many documents nearly repeat one before, and how many for validation have a near duplicate in training.

    signatures: (D, P), in the order of the documents. val: (D,) whether a document is for validation.
    """
    repeated = SimilarDocuments(expected=len(signatures)).add_new(signatures)
    training = SimilarDocuments(signatures[~val])
    val_in_train = (training.find(signatures[val]) >= 0).sum()
    return {"repeated": int(repeated.sum()), "val_in_train": int(val_in_train)}


# --- n-grams that validation shares with training ---------------------------------------------------------------------


class TokenRange(NamedTuple):
    """A part of a shard."""

    path: Path
    first: int  # token
    count: int


class TokenText:
    """The bytes of any tokens, with BOUNDARY for the end-of-text token."""

    def __init__(self, tokenizer: Tokenizer):
        self.dtype = token_dtype(tokenizer.vocab_size)
        pieces = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        if tokenizer.eot is not None:
            pieces[tokenizer.eot] = BOUNDARY
        self.content = np.frombuffer(b"".join([*pieces, bytes(COPIED)]), np.uint8)
        self.starts = np.cumsum([0, *map(len, pieces)])

    def words(self, tokens: TokenRange) -> np.ndarray:
        """The hash of each word, (W,)."""
        offset = tokens.first * self.dtype.itemsize
        ids = np.fromfile(tokens.path, self.dtype, tokens.count, offset=offset).astype(np.int32)
        join_tokens = compiled.function(TEXT_STEP, "join_tokens", 5)
        pieces = *addresses(ids), len(ids), *addresses(self.starts, self.content)
        text = np.empty(join_tokens(*pieces, 0) + COPIED, np.uint8)
        return word_hashes(text[: join_tokens(*pieces, *addresses(text))])


def token_ranges(folder: Path, shards: Sequence[dict[str, Any]]) -> Iterator[TokenRange]:
    """The shards in blocks of at most BLOCK_TOKENS. shards: as in meta.json."""
    for entry in shards:
        for first in range(0, entry["tokens"], BLOCK_TOKENS):
            yield TokenRange(folder / entry["file"], first, min(BLOCK_TOKENS, entry["tokens"] - first))


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


def occurring(tokens: TokenRange, text: TokenText, wanted: HashFilter) -> np.ndarray:
    """The n-grams of a part of a shard that may be among the wanted ones: their hashes, each once."""
    ngrams, _ = ngrams_within_documents(text.words(tokens), OVERLAP)
    return np.unique(ngrams[wanted.find(ngrams)])


def ngram_overlap(folder: Path, shards: Shards, tokenizer: Tokenizer, workers: int) -> dict[str, int]:
    """How much of the validation text occurs in the training text, in n-grams of OVERLAP words (Brown et al. 2020).

    Returns the number of words of validation, how many of them are in such an n-gram, and how many documents have one.
    Memory: about 40 bytes per word of validation.
    """
    text = TokenText(tokenizer)
    ranges = {split: list(token_ranges(folder, entries)) for split, entries in shards.items()}
    blocks = [text.words(tokens) for tokens in ranges["val"]]
    wanted = HashFilter(np.concatenate([ngrams_within_documents(words, OVERLAP)[0] for words in blocks]))
    shared = KeySet()
    for _, hashes in map_in_order(occurring, ranges["train"], workers, text, wanted):
        shared.add(hashes)
    words_in_overlap, n_words, document, documents = 0, 0, 0, set()
    for words in blocks:
        is_boundary = words == BOUNDARY_WORD
        ngrams, starts = ngrams_within_documents(words, OVERLAP)
        starts = starts[shared.contains(ngrams)]
        covered = np.zeros(len(words) + 1, np.int64)  # +1 where an n-gram begins, -1 after its end
        np.add.at(covered, starts, 1)
        np.add.at(covered, starts + OVERLAP, -1)
        words_in_overlap += int((np.cumsum(covered)[:-1] > 0).sum())
        n_words += int((~is_boundary).sum())
        documents.update((document + np.cumsum(is_boundary)[starts]).tolist())
        document += int(is_boundary.sum())
    return {"words": n_words, "words_in_overlap": words_in_overlap, "documents_with_overlap": len(documents)}
