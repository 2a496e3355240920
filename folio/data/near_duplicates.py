"""Documents that are nearly the same, by MinHash signatures of their words and locality-sensitive hashing.

The similarity of two documents is the Jaccard index of their shingles: the n-grams of words that both have, of those
that any of them has (Broder 1997, "On the resemblance and containment of documents"). Lee et al. 2021, "Deduplicating
Training Data Makes Language Models Better", find near duplicates of training data in the same way.

Dimensions: D documents, P permutations of a signature.
"""

from collections.abc import Sequence

import numpy as np

from folio.data.minhash import BANDS, PERMUTATIONS
from folio.data.ngrams import (
    BOUNDARY,
    BOUNDARY_WORD,
    MIXER,
    MULTIPLIER,
    mix,
    ngrams_within_documents,
    word_hashes,
)
from folio.data.text_kernels import TEXT_STEP
from folio.machine import compiled
from folio.machine.compiled import addresses

SHINGLE = 5  # words
SIGNED_BYTES = 1 << 20  # of a document, from its beginning
NO_WORDS = np.uint32(2**32 - 1)  # all values of the signature of a document without words


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
        """Make room for so many documents, or more, and add those with these signatures."""
        capacity = max(1024, 1 << (documents - 1).bit_length())
        self.signatures = np.zeros((capacity, PERMUTATIONS), np.uint32)
        self.signatures[: len(signatures)] = signatures
        self.older = np.full((capacity, BANDS), -1, np.int32)  # the document before it in each chain
        self.shift = np.uint64(64 - capacity.bit_length())  # 2 * capacity is a power of 2
        self.newest = np.full((BANDS, 2 * capacity), -1, np.int32)  # by band and slot
        link_documents = compiled.function(TEXT_STEP, "link_documents", 5)
        slots = self._slots(signatures)
        link_documents(*addresses(slots), len(signatures), *addresses(self.older, self.newest), capacity)

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
        find_documents = compiled.function(TEXT_STEP, "find_documents", 10)
        slots = self._slots(signatures)
        tables = addresses(self.signatures, self.older, self.newest)
        new = *addresses(signatures, slots), len(signatures)
        return find_documents(*new, *tables, len(self.signatures), self.count, adds, *addresses(found))


def count_near_duplicates(signatures: np.ndarray, val: np.ndarray) -> dict[str, int]:
    """How many documents nearly repeat one before, and how many for validation have a near duplicate in training.

    signatures: (D, P), in the order of the documents. val: (D,) whether a document is for validation.
    """
    repeated = SimilarDocuments(expected=len(signatures)).add_new(signatures)
    training = SimilarDocuments(signatures[~val])
    val_in_train = (training.find(signatures[val]) >= 0).sum()
    return {"repeated": int(repeated.sum()), "val_in_train": int(val_in_train)}
