"""Documents that are nearly the same, by MinHash signatures of their words and locality-sensitive hashing.

The similarity of two documents is the Jaccard index of their shingles: the n-grams of words that both have, of those
that any of them has (Broder 1997, "On the resemblance and containment of documents"). Lee et al. 2021, "Deduplicating
Training Data Makes Language Models Better", find near duplicates of training data in the same way.

Dimensions: D documents, P permutations of a signature.
"""

from collections.abc import Sequence

import numpy as np

from folio import compiled
from folio.compiled import addresses
from folio.ngrams import (
    BOUNDARY,
    BOUNDARY_WORD,
    MIXER,
    MULTIPLIER,
    mix,
    ngram_hashes,
    ngrams_within_documents,
    word_hashes,
)

SHINGLE = 5  # words
SIMILARITY = 0.5  # of near duplicates, at least; 0.5 is that of two texts of which about 8 % of the words differ
PERMUTATIONS = 128  # the standard error of an estimated similarity is at most 0.044
BANDS = 32  # of 4 values each: documents with a similarity of 0.5 have an equal band with a probability of 87 %
SIGNED_BYTES = 1 << 20  # of a document, from its beginning
ALL_BANDS = np.arange(BANDS)
LONGEST_CHAIN = 100  # documents per band to compare with, the newest ones; 1,000 take 3 ms if all have a band in common
NO_WORDS = np.uint32(2**32 - 1)  # all values of the signature of a document without words


def signatures_of(contents: Sequence[bytes]) -> np.ndarray:
    """The MinHash signatures of documents in UTF-8: (D, P) uint32.

    A document with fewer words than a shingle is one shingle. Of a document, the first SIGNED_BYTES count.
    """
    from rensa import RMinHash  # nothing else needs it

    words = word_hashes(BOUNDARY.join(content[:SIGNED_BYTES] for content in contents))
    shingles, starts = ngrams_within_documents(words, SHINGLE)
    number = np.append(0, np.cumsum(words == BOUNDARY_WORD))  # of the document of each word
    counts = np.bincount(number[starts], minlength=len(contents))  # (D,)
    n_words = np.bincount(number[1:][words != BOUNDARY_WORD], minlength=len(contents))
    short = np.flatnonzero((0 < n_words) & (n_words < SHINGLE))
    firsts = np.searchsorted(number[1:], short) + (short > 0)  # the first word of each of them
    of_short = [ngram_hashes(words[k : k + n], n) for k, n in zip(firsts, n_words[short], strict=True)]
    shingles = np.insert(shingles, np.cumsum(counts)[short], np.concatenate([shingles[:0], *of_short]))
    counts[short] = 1
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(shingles, np.append(0, np.cumsum(counts)), PERMUTATIONS, 1)
    return np.array(matrix.to_rows(), np.uint32).reshape(len(contents), PERMUTATIONS)


class SimilarDocuments:
    """The signatures of documents, in which those that are similar to another one are found.

    For each band of a signature, a hash table has the newest document with that band, from which a chain leads to the
    older ones. All of it takes at most 2 kB per document. (Rensa's own tables take 3 kB, and cannot be made from saved
    signatures, as resuming needs.)
    """

    def __init__(self, signatures: np.ndarray | None = None):
        """signatures: of the first documents, (D, P)."""
        signatures = np.zeros((0, PERMUTATIONS), np.uint32) if signatures is None else signatures
        self.count = len(signatures)
        self._allocate(signatures, self.count)

    def _allocate(self, signatures: np.ndarray, documents: int) -> None:
        """Make room for so many documents, or more, and add those with these signatures."""
        capacity = max(1024, 1 << (documents - 1).bit_length())
        self.signatures = np.zeros((capacity, PERMUTATIONS), np.uint32)
        self.signatures[: len(signatures)] = signatures
        self.older = np.full((capacity, BANDS), -1, np.int32)  # the document before it in each chain
        self.shift = np.uint64(64 - capacity.bit_length())  # 2 * capacity is a power of 2
        self.newest = np.full((BANDS, 2 * capacity), -1, np.int32)  # by band and slot
        slots = self._slots(signatures)  # (D, BANDS)
        for band in range(BANDS):
            order = np.argsort(slots[:, band], kind="stable")
            of_slot = slots[order, band]
            has_older = np.flatnonzero(of_slot[1:] == of_slot[:-1]) + 1
            self.older[order[has_older], band] = order[has_older - 1]
            is_newest = np.append(of_slot[1:] != of_slot[:-1], True)[: len(order)]
            self.newest[band, of_slot[is_newest]] = order[is_newest]

    def _slots(self, signatures: np.ndarray) -> np.ndarray:
        """The slot of each band of signatures (D, P) in the hash tables: (D, BANDS)."""
        bands = signatures.reshape(len(signatures), BANDS, PERMUTATIONS // BANDS)
        hashes = np.zeros(bands.shape[:2], np.uint64)
        for k in range(bands.shape[2]):
            hashes = hashes * MULTIPLIER + bands[:, :, k] + MIXER
        return (mix(hashes) >> self.shift).astype(np.int64)

    def find(self, signature: np.ndarray) -> int | None:
        """The number of the first document that is found to be similar to a signature (P,), or None."""
        return self._find(signature, self._slots(signature[None])[0])

    def _find(self, signature: np.ndarray, slots: np.ndarray) -> int | None:
        """`find`, given the slot of each band, (BANDS,)."""
        if (signature == NO_WORDS).all():
            return None
        find_similar = compiled.function("find_similar", "text_step", 6)
        arrays = (np.ascontiguousarray(signature), slots, self.signatures, self.older, self.newest)
        number = find_similar(*addresses(*arrays), len(self.signatures))
        return number if number >= 0 else None

    def _add(self, signature: np.ndarray, slots: np.ndarray) -> None:
        """Add a document, given the slot of each band of its signature, (BANDS,)."""
        self.signatures[self.count] = signature
        self.older[self.count] = self.newest[ALL_BANDS, slots]
        self.newest[ALL_BANDS, slots] = self.count
        self.count += 1

    def add_new(self, signatures: np.ndarray) -> np.ndarray:
        """Add the documents that are not similar to one before, (D, P). Returns which are similar, (D,) bool."""
        slots, similar = self._slots(signatures), np.zeros(len(signatures), bool)
        for k, of_document in enumerate(signatures):
            similar[k] = self._find(of_document, slots[k]) is not None
            if not similar[k]:
                if self.count == len(self.signatures):
                    self._allocate(self.signatures, self.count + 1)
                    slots = self._slots(signatures)
                self._add(of_document, slots[k])
        return similar


def count_near_duplicates(signatures: np.ndarray, val: np.ndarray) -> dict[str, int]:
    """How many documents nearly repeat one before, and how many for validation have a near duplicate in training.

    signatures: (D, P), in the order of the documents. val: (D,) whether a document is for validation.
    """
    repeated = SimilarDocuments().add_new(signatures)
    training = SimilarDocuments(signatures[~val])
    val_in_train = sum(training.find(of_document) is not None for of_document in signatures[val])
    return {"repeated": int(repeated.sum()), "val_in_train": val_in_train}
