"""Repeated text in a data set: duplicates, near duplicates, and n-grams shared by validation and training.

Near duplicates are detected with MinHash signatures and locality-sensitive hashing. The similarity of two documents is
the Jaccard index of their shingles, which are n-grams of words (Broder 1997, "On the resemblance and containment of
documents"). Lee et al. 2021, "Deduplicating Training Data Makes Language Models Better", use the same method. Shared
n-grams are the measure of GPT-3 (Brown et al. 2020, appendix C).

Case and punctuation are ignored. Case is folded for characters up to U+1FFF (Latin, Greek, Cyrillic, Armenian,
Georgian) whose folded form has the same number of bytes (not ß, which becomes ss).

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

OVERLAP = 13  # words of an n-gram shared by validation and training
BLOCK_TOKENS = 1 << 20  # tokens processed at once; n-grams across the end of a block are not counted
BOUNDARY = b" \xff "  # between documents: a word that does not occur in UTF-8
FILTER_BITS = 32  # minimum number of bits per hash in HashFilter

SHINGLE = 5  # words
SIGNED_BYTES = 1 << 20  # bytes of a document that its signature covers, from the beginning
NO_WORDS = np.uint32(2**32 - 1)  # every value in the signature of a document without words
SIMILARITY = 0.5  # minimum for near duplicates; two texts that differ in about 8 % of the words have 0.5
PERMUTATIONS = 128  # the standard error of an estimated similarity is at most 0.044
BANDS = 32  # of 4 values each: documents with a similarity of 0.5 share a band with a probability of 87 %
MAX_CHAIN = 100  # documents compared per band, newest first; 1,000 documents take 3 ms if all share a band

COPY_BYTES = 16  # this and the next line are the same in folio/data/text_step.py
MULTIPLIER, MIXER = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


def count_leakage(
    hashes: np.ndarray,
    signatures: np.ndarray | None,
    folder: Path,
    shards: Shards | None,
    tokenizer: Tokenizer,
    workers: int,
) -> dict[str, Any]:
    """Count duplicates, near duplicates, and shared n-grams of training and validation, as entries of report.json.

    hashes: hashes of all documents in order, (D,), where the lowest bit is 1 for validation. signatures: signatures of
    the same documents, (D, P); None: near duplicates are not counted. shards: the shards in `folder`; None: n-grams are
    not counted.
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
    """Return the hash of each word of a text in UTF-8, (W,) uint64.

    A word is a run of letters and digits. Each Chinese, Japanese, or Korean character is a word. The hash is a mixed
    polynomial of the bytes.
    """
    data = np.frombuffer(content, np.uint8)
    hashes = np.empty(len(data) + 1, np.uint64)
    return hashes[: compiled.function(TEXT_STEP, "hash_words", 3)(*addresses(data), len(data), *addresses(hashes))]


def mix(hashes: np.ndarray) -> np.ndarray:
    """Mix the bits of hashes, so that every bit depends on all bits of the input."""
    hashes = (hashes ^ (hashes >> np.uint64(32))) * MIXER
    return hashes ^ (hashes >> np.uint64(32))


def ngrams_within_documents(words: np.ndarray, n: int, short: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return the hash and the first word of each n-gram of words (W,) between two boundaries, (G,) each.

    short: fewer than n words between two boundaries are an n-gram, too.
    """
    hashes, starts = np.empty(len(words), np.uint64), np.empty(len(words), np.int64)
    hash_ngrams = compiled.function(TEXT_STEP, "hash_ngrams", 6)
    count = hash_ngrams(*addresses(words), len(words), n, short, *addresses(hashes, starts))
    return hashes[:count], starts[:count]


BOUNDARY_WORD = mix(np.array([0xFF + 1], np.uint64))[0]  # word_hashes(BOUNDARY)[0]


# --- duplicates -------------------------------------------------------------------------------------------------------


def content_keys(hashes: np.ndarray) -> np.ndarray:
    """Return the upper 63 bits of document hashes, which identify duplicates. The lowest bit may be the split."""
    return hashes >> np.uint64(1)


class KeySet:
    """A set of uint64 values, such as content keys, stored in sorted arrays of decreasing size."""

    def __init__(self) -> None:
        self.levels: list[np.ndarray] = []

    def add(self, keys: np.ndarray) -> np.ndarray:
        """Add keys, (D,). Returns whether each was in the set or earlier in the array, (D,) bool."""
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
        """Return whether each of the keys (D,) is in the set, (D,) bool."""
        is_known = np.zeros(len(keys), dtype=bool)
        for level in self.levels:
            is_known |= level[np.searchsorted(level, keys).clip(max=len(level) - 1)] == keys
        return is_known


def count_duplicates(hashes: np.ndarray) -> dict[str, int]:
    """Return the number of duplicates, and of validation documents that are also in training.

    hashes: see count_leakage, (D,).
    """
    hashes = np.sort(hashes)
    keys, val = content_keys(hashes), (hashes & np.uint64(1)).astype(bool)
    repeated = (keys[1:] == keys[:-1]).sum()
    in_both = np.intersect1d(np.unique(keys[~val]), np.unique(keys[val]), assume_unique=True)
    return {"repeated": int(repeated), "val_in_train": int(np.isin(keys[val], in_both).sum())}


# --- near duplicates --------------------------------------------------------------------------------------------------


def compute_signatures(contents: Sequence[bytes]) -> np.ndarray:
    """Compute the MinHash signatures of documents in UTF-8, (D, P) uint32.

    A document with fewer words than a shingle is one shingle. Only the first SIGNED_BYTES bytes of a document are used.
    """
    from rensa import RMinHash

    words = word_hashes(BOUNDARY.join(content[:SIGNED_BYTES] for content in contents))
    shingles, starts = ngrams_within_documents(words, SHINGLE, short=True)
    document = np.cumsum(words == BOUNDARY_WORD)  # index of each word's document, (W,)
    counts = np.bincount(document[starts], minlength=len(contents))  # shingles per document, (D,)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(shingles, np.append(0, np.cumsum(counts)), PERMUTATIONS, 1)
    return np.array(matrix.to_rows(), np.uint32).reshape(len(contents), PERMUTATIONS)


class SimilarDocuments:
    """An index of document signatures for finding similar documents.

    For each band of a signature, a hash table contains the newest document with that band, and a chain links it to
    older ones. Memory: at most 2 kB per document. (Rensa's tables take 3 kB and cannot be restored from saved
    signatures, which is necessary to resume.)
    """

    def __init__(self, signatures: np.ndarray | None = None, expected: int = 0):
        """signatures: signatures of initial documents, (D, P). expected: documents to allocate memory for."""
        signatures = np.zeros((0, PERMUTATIONS), np.uint32) if signatures is None else signatures
        self.count = len(signatures)
        self._allocate(signatures, max(self.count, expected))

    def _allocate(self, signatures: np.ndarray, documents: int) -> None:
        """Allocate tables for at least this number of documents, and add documents with these signatures."""
        capacity = max(1024, 1 << (documents - 1).bit_length())
        self.signatures = np.zeros((capacity, PERMUTATIONS), np.uint32)
        self.signatures[: len(signatures)] = signatures
        self.older = np.full((capacity, BANDS), -1, np.int32)  # previous document in each chain
        self.shift = np.uint64(64 - capacity.bit_length())  # 2 * capacity is a power of 2
        self.newest = np.full((BANDS, 2 * capacity), -1, np.int32)  # by band and slot
        link_documents = compiled.function(TEXT_STEP, "link_documents", 6)
        slots = self._slots(signatures)
        link_documents(*addresses(slots), len(signatures), BANDS, *addresses(self.older, self.newest), capacity)

    def _slots(self, signatures: np.ndarray) -> np.ndarray:
        """Return the slot of each band of signatures (D, P) in the hash tables, (D, BANDS)."""
        bands = signatures.reshape(len(signatures), BANDS, PERMUTATIONS // BANDS)
        hashes = np.zeros(bands.shape[:2], np.uint64)
        for k in range(bands.shape[2]):
            hashes = hashes * MULTIPLIER + bands[:, :, k] + MIXER
        return (mix(hashes) >> self.shift).astype(np.int64)

    def find(self, signatures: np.ndarray) -> np.ndarray:
        """Return the index of the first similar document for each of the signatures (D, P), or -1."""
        results = np.empty(len(signatures), np.int64)
        self._find(np.ascontiguousarray(signatures), results, add=False)
        return results

    def add_new(self, signatures: np.ndarray) -> np.ndarray:
        """Add documents (D, P) that are not similar to a previous one. Returns whether each is similar, (D,) bool."""
        results, done = np.empty(len(signatures), np.int64), 0
        signatures = np.ascontiguousarray(signatures)
        while done < len(signatures):
            if self.count == len(self.signatures):
                self._allocate(self.signatures, self.count + 1)
            processed = self._find(signatures[done:], results[done:], add=True)
            self.count += int((results[done : done + processed] < 0).sum())
            done += processed
        return results >= 0

    def _find(self, signatures: np.ndarray, results: np.ndarray, add: bool) -> int:
        """Write the results of `find`, and optionally add documents without a similar one until the tables are full.

        Returns the number of documents processed.
        """
        find_documents = compiled.function(TEXT_STEP, "find_documents", 14)
        slots = self._slots(signatures)
        tables = addresses(self.signatures, self.older, self.newest)
        new = *addresses(signatures, slots), len(signatures)
        sizes = PERMUTATIONS, BANDS, MAX_CHAIN, math.ceil(SIMILARITY * PERMUTATIONS)
        return find_documents(*new, *sizes, *tables, len(self.signatures), self.count, add, *addresses(results))


def count_near_duplicates(signatures: np.ndarray, val: np.ndarray) -> dict[str, int]:
    """Return the number of near duplicates, and of validation documents with a near duplicate in training.

    signatures: signatures of all documents in order, (D, P). val: whether each is for validation, (D,).
    """
    repeated = SimilarDocuments(expected=len(signatures)).add_new(signatures)
    training = SimilarDocuments(signatures[~val])
    val_in_train = (training.find(signatures[val]) >= 0).sum()
    return {"repeated": int(repeated.sum()), "val_in_train": int(val_in_train)}


# --- n-grams shared by validation and training ------------------------------------------------------------------------


class TokenRange(NamedTuple):
    """A range of tokens in a shard."""

    path: Path
    first: int
    count: int


class TokenText:
    """Decodes tokens to bytes, with BOUNDARY for the end-of-text token."""

    def __init__(self, tokenizer: Tokenizer):
        self.dtype = token_dtype(tokenizer.vocab_size)
        pieces = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        if tokenizer.eot is not None:
            pieces[tokenizer.eot] = BOUNDARY
        self.content = np.frombuffer(b"".join([*pieces, bytes(COPY_BYTES)]), np.uint8)
        self.starts = np.cumsum([0, *map(len, pieces)])

    def words(self, tokens: TokenRange) -> np.ndarray:
        """Return the hash of each word, (W,)."""
        offset = tokens.first * self.dtype.itemsize
        ids = np.fromfile(tokens.path, self.dtype, tokens.count, offset=offset).astype(np.int32)
        join_tokens = compiled.function(TEXT_STEP, "join_tokens", 5)
        pieces = *addresses(ids), len(ids), *addresses(self.starts, self.content)
        text = np.empty(join_tokens(*pieces, 0) + COPY_BYTES, np.uint8)
        return word_hashes(text[: join_tokens(*pieces, *addresses(text))])


def token_ranges(folder: Path, shards: Sequence[dict[str, Any]]) -> Iterator[TokenRange]:
    """Yield ranges of at most BLOCK_TOKENS tokens. shards: the entries of meta.json."""
    for entry in shards:
        for first in range(0, entry["tokens"], BLOCK_TOKENS):
            yield TokenRange(folder / entry["file"], first, min(BLOCK_TOKENS, entry["tokens"] - first))


class HashFilter:
    """A Bloom filter of a set of hashes, (S,) uint64."""

    def __init__(self, hashes: np.ndarray):
        bits = (FILTER_BITS * len(hashes) + 64).bit_length()  # the filter has 2 ** bits bits
        self.shift = 64 - bits
        self.filter = np.zeros(1 << bits - 6, np.uint64)
        add_to_filter = compiled.function(TEXT_STEP, "add_to_filter", 4)
        add_to_filter(*addresses(hashes), len(hashes), *addresses(self.filter), self.shift)
        compiled.function(TEXT_STEP, "find_in_filter", 5)  # compiled before worker processes need it

    def find(self, hashes: np.ndarray) -> np.ndarray:
        """Return the indices of the hashes that may be in the set."""
        indices = np.empty(len(hashes), np.int64)
        find_in_filter = compiled.function(TEXT_STEP, "find_in_filter", 5)
        look_up = *addresses(hashes), len(hashes), *addresses(self.filter), self.shift, *addresses(indices)
        return indices[: find_in_filter(*look_up)]


def matching_ngrams(tokens: TokenRange, text: TokenText, ngram_filter: HashFilter) -> np.ndarray:
    """Return the distinct hashes of the n-grams in a range of tokens that pass the filter."""
    ngrams, _ = ngrams_within_documents(text.words(tokens), OVERLAP)
    return np.unique(ngrams[ngram_filter.find(ngrams)])


def ngram_overlap(folder: Path, shards: Shards, tokenizer: Tokenizer, workers: int) -> dict[str, int]:
    """Measure how much validation text occurs in the training text, in n-grams of OVERLAP words (Brown et al. 2020).

    Returns the number of validation words, of words in shared n-grams, and of documents with shared n-grams. Memory:
    about 40 bytes per validation word.
    """
    text = TokenText(tokenizer)
    ranges = {split: list(token_ranges(folder, entries)) for split, entries in shards.items()}
    blocks = [text.words(tokens) for tokens in ranges["val"]]
    ngram_filter = HashFilter(np.concatenate([ngrams_within_documents(words, OVERLAP)[0] for words in blocks]))
    shared = KeySet()
    for _, hashes in map_in_order(matching_ngrams, ranges["train"], workers, text, ngram_filter):
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
