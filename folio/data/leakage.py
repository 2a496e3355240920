"""Repeated text in a data set: duplicates, near duplicates, and n-grams shared by validation and training.

Near duplicates are detected with MinHash signatures and locality-sensitive hashing. The similarity of two documents is
the Jaccard index of their shingles, which are n-grams of words (Broder 1997, "On the resemblance and containment of
documents"). Lee et al. 2021, "Deduplicating Training Data Makes Language Models Better", use the same method. Shared
n-grams are the measure of GPT-3 (Brown et al. 2020, appendix C).

Case and punctuation are ignored. Case is folded for characters up to U+1FFF (Latin, Greek, Cyrillic, Armenian,
Georgian) whose folded form has the same number of bytes (not ß, which becomes ss).

Dimensions: N bytes of a text, W words, G n-grams, D documents, P permutations of a signature.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from folio.base.workers import map_in_order
from folio.data.account import Account
from folio.data.blocks import CorpusBlock, DocumentPart, document_hash, hash_with_targets, plain_text
from folio.data.shards import Shards, token_dtype
from folio.data.tokenizer import Tokenizer
from folio.data.word_cache import TEXT_STEP
from folio.machine import compiled
from folio.machine.compiled import addresses

OVERLAP = 13  # words of an n-gram shared by validation and training
RANGE_TOKENS = 1 << 20  # tokens processed at once; n-grams across the parts of longer documents are not counted
BOUNDARY = b" \xff "  # between documents, and for end-of-text: a word that does not occur in UTF-8
EOT, END = b"\xff", b"\xfe"  # end-of-text tokens and ends of documents in the text of a range of tokens
FILTER_BITS = 32  # minimum number of bits per hash in HashFilter

SHINGLE = 5  # words
SIGNED_BYTES = 1 << 20  # bytes of a document that its signature covers, from the beginning
NO_WORDS = np.uint32(2**32 - 1)  # every value in the signature of a document without words
SIMILARITY = 0.5  # minimum for near duplicates; two texts that differ in about 8 % of the words have 0.5
PERMUTATIONS = 128  # the standard error of an estimated similarity is at most 0.044
BANDS = 32  # of 4 values each: documents with a similarity of 0.5 share a band with a probability of 87 %
MAX_CHAIN = 100  # documents compared per band, newest first; 1,000 documents take 3 ms if all share a band

COPY_BYTES = 16  # as in folio/data/text_step.py

# --- words and n-grams ------------------------------------------------------------------------------------------------


def word_hashes(content: bytes | np.ndarray) -> np.ndarray:
    """Return the hash of each word of a text in UTF-8, (W,) uint64.

    A word is a run of letters and digits. Each Chinese, Japanese, or Korean character is a word. The hash is a mixed
    polynomial of the bytes.
    """
    data = np.frombuffer(content, np.uint8)
    hashes = np.empty(len(data) + 1, np.uint64)
    return hashes[: compiled.function(TEXT_STEP, "hash_words", 3)(*addresses(data), len(data), *addresses(hashes))]


def ngrams_within_documents(words: np.ndarray, n: int, short: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return the hash and the first word of each n-gram of words (W,) between two boundaries, (G,) each.

    short: fewer than n words between two boundaries are an n-gram, too.
    """
    hashes, starts = np.empty(len(words), np.uint64), np.empty(len(words), np.int64)
    hash_ngrams = compiled.function(TEXT_STEP, "hash_ngrams", 6)
    count = hash_ngrams(*addresses(words), len(words), n, short, *addresses(hashes, starts))
    return hashes[:count], starts[:count]


# --- duplicates -------------------------------------------------------------------------------------------------------


def content_keys(hashes: np.ndarray) -> np.ndarray:
    """Return the upper 63 bits of document hashes, which identify duplicates. The lowest bit may be the split."""
    return hashes >> np.uint64(1)


class KeySet:
    """A set of uint64 values, such as content keys, stored in sorted arrays of decreasing size."""

    def __init__(self, keys: np.ndarray | None = None):
        self.levels: list[np.ndarray] = []
        if keys is not None:
            self.add(keys)

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

    hashes: hashes of all documents, (D,), where the lowest bit is 1 for validation.
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
    document = np.cumsum(words == word_hashes(BOUNDARY))  # index of each word's document, (W,)
    counts = np.bincount(document[starts], minlength=len(contents))  # shingles per document, (D,)
    ends, signatures = np.append(0, np.cumsum(counts)), np.empty((len(contents), PERMUTATIONS), np.uint32)
    for first in range(0, len(contents), 1000):  # to_rows takes 5 kB per document
        offsets = ends[first : first + 1001]
        hashes = shingles[offsets[0] : offsets[-1]]
        matrix = RMinHash.digest_matrix_from_flat_token_hashes(hashes, offsets - offsets[0], PERMUTATIONS, 1)
        signatures[first : first + 1000] = matrix.to_rows()
    return signatures


def find_similar(signatures: np.ndarray, known: int | None = None) -> np.ndarray:
    """Return the index of the first similar document for each of the documents (D, P), or -1.

    A document is compared with the previous documents that have no similar one, or only with the first `known`
    documents, whose own result is -1.

    For each band of a signature, a hash table contains the newest document with that band, and a chain links it to
    older ones. Memory: at most 640 bytes per document. (Rensa's tables take 3 kB.)
    """
    n, bits = len(signatures), max(10, (len(signatures) - 1).bit_length()) + 1
    older = np.empty((n, BANDS), np.int32)  # previous document in each chain
    newest = np.full((BANDS, 1 << bits), -1, np.int32)  # by band and slot
    slots, results = np.empty(BANDS, np.int64), np.empty(n, np.int64)
    sizes = n, PERMUTATIONS, BANDS, MAX_CHAIN, math.ceil(SIMILARITY * PERMUTATIONS), bits
    mode = (0, True) if known is None else (known, False)
    arrays = addresses(np.ascontiguousarray(signatures), older, newest, slots, results)
    compiled.function(TEXT_STEP, "find_similar", 13)(*arrays, *sizes, *mode)
    return results


def sign_documents(block: CorpusBlock, masked: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the content keys and the signatures of the documents of a block, (D,) and (D, P), except empty ones.

    masked: documents with other targets have other keys.
    """
    documents = [document or "" for document in block.documents(Account())]
    documents = [document for document in documents if plain_text(document)]
    contents = [plain_text(document).encode("utf-8", "replace") for document in documents]
    hashes = [block.hash if isinstance(block, DocumentPart) else document_hash(content) for content in contents]
    if masked:
        hashes = hash_with_targets(documents, contents)
    return content_keys(np.array(hashes, np.uint64)), compute_signatures(contents)


def near_duplicates(signed_blocks: Iterable[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Return the content keys of documents that are similar to a previous document that is not, in order, (K,).

    signed_blocks: the results of sign_documents. A document in parts has the signature of its first part.
    """
    known, new_keys, new_signatures = KeySet(), [np.array([], np.uint64)], [compute_signatures([])]
    for keys, signatures in signed_blocks:
        is_new = ~known.add(keys)
        new_keys.append(keys[is_new])
        new_signatures.append(signatures[is_new])
    return np.concatenate(new_keys)[find_similar(np.concatenate(new_signatures)) >= 0]


def count_near_duplicates(signatures: np.ndarray, val: np.ndarray) -> dict[str, int]:
    """Return the number of near duplicates, and of validation documents with a near duplicate in training.

    signatures: signatures of the training documents in order, and then of those for validation, (D, P). val: whether
    each document, in the order of the input, is for validation, (D,).
    """
    in_order = np.empty_like(signatures)
    in_order[np.argsort(val, kind="stable")] = signatures
    training = int((~val).sum())
    val_in_train = find_similar(signatures, known=training)[training:] >= 0
    return {"repeated": int((find_similar(in_order) >= 0).sum()), "val_in_train": int(val_in_train.sum())}


# --- text shared by validation and training ---------------------------------------------------------------------------


class TokenRange(NamedTuple):
    """Consecutive documents of a split. A document with more than RANGE_TOKENS tokens is divided into several."""

    split: str
    first: int  # index of its first token in the split
    lengths: np.ndarray  # (D,) tokens per document
    begins: np.ndarray  # (D,) bool, False for the later parts of a divided document


def token_ranges(split: str, lengths: np.ndarray) -> Iterator[TokenRange]:
    """Yield the documents that begin in each RANGE_TOKENS tokens. lengths: tokens per document, (D,)."""
    parts = np.maximum(1, -(-lengths // RANGE_TOKENS))  # per document
    last = np.cumsum(parts) - 1
    tokens, begins = np.full(parts.sum(), RANGE_TOKENS), np.zeros(parts.sum(), bool)
    tokens[last], begins[last + 1 - parts] = lengths - (parts - 1) * RANGE_TOKENS, True
    starts = np.cumsum(tokens) - tokens
    for indices in np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(starts // RANGE_TOKENS)) + 1):
        yield TokenRange(split, int(starts[indices[0]]), tokens[indices], begins[indices])


class ShardText:
    """Decodes the documents in the shards of a folder. shards: the entries of meta.json."""

    def __init__(self, folder: Path, shards: Shards, tokenizer: Tokenizer):
        self.folder, self.shards, self.dtype = folder, shards, token_dtype(tokenizer.vocab_size)
        pieces = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)] + [END]
        if tokenizer.eot is not None:
            pieces[tokenizer.eot] = EOT
        self.end = len(pieces) - 1
        self.content = np.frombuffer(b"".join([*pieces, bytes(COPY_BYTES)]), np.uint8)
        self.starts = np.cumsum([0, *map(len, pieces)])

    def read(self, documents: TokenRange) -> bytes:
        """Return the text of documents, with END between them."""
        ids = self._read_ids(documents)
        if len(documents.lengths) > 1:
            ids = np.insert(ids, np.cumsum(documents.lengths)[:-1], self.end)
        join_tokens = compiled.function(TEXT_STEP, "join_tokens", 5)
        pieces = *addresses(ids), len(ids), *addresses(self.starts, self.content)
        text = np.empty(join_tokens(*pieces, 0) + COPY_BYTES, np.uint8)
        return text[: join_tokens(*pieces, *addresses(text))].tobytes()

    def _read_ids(self, documents: TokenRange) -> np.ndarray:
        """Read tokens, which may be in several shards, (N,) int32."""
        ids, first, count = [np.array([], self.dtype)], documents.first, int(documents.lengths.sum())
        for entry in self.shards[documents.split]:
            if 0 <= first < entry["tokens"] and count:
                path, offset = self.folder / entry["file"], first * self.dtype.itemsize
                ids.append(np.fromfile(path, self.dtype, min(count, entry["tokens"] - first), offset=offset))
                first, count = first + len(ids[-1]), count - len(ids[-1])
            first -= entry["tokens"]
        return np.concatenate(ids, dtype=np.int32, casting="unsafe")


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


def words_of_range(content: bytes) -> np.ndarray:
    """Return the hash of each word of a range of documents, (W,)."""
    return word_hashes(content.replace(EOT, BOUNDARY).replace(END, BOUNDARY))


def compare_range(
    documents: TokenRange, text: ShardText, ngram_filter: HashFilter, signed: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the distinct hashes of training n-grams that pass the filter, (S,), and, if `signed`, the signatures of
    the documents that begin in the range, (D, P).
    """
    content, hashes = text.read(documents), np.array([], np.uint64)
    if documents.split == "train":  # the filter has all n-grams of validation
        ngrams, _ = ngrams_within_documents(words_of_range(content), OVERLAP)
        hashes = np.unique(ngrams[ngram_filter.find(ngrams)])
    if not signed:
        return hashes, None
    contents = content.replace(EOT, b"").split(END)
    return hashes, compute_signatures(list(itertools.compress(contents, documents.begins)))


def compare_splits(
    text: ShardText, lengths: np.ndarray, val: np.ndarray, signed: bool, workers: int
) -> tuple[dict[str, int], np.ndarray | None]:
    """Return how much validation text occurs in the training text (count_overlap).

    If `signed`, also return the signatures of the training documents and then of those for validation, (D, P).

    lengths: tokens of all documents in order, (D,). val: whether each is for validation, (D,). Memory: about 40 bytes
    per validation word.
    """
    val_ranges, val_words, numbers, first = list(token_ranges("val", lengths[val])), [], [], -1
    for documents in val_ranges:
        content = text.read(documents)
        val_words.append(words_of_range(content))
        number = first + np.cumsum(documents.begins)
        numbers.append(np.repeat(number, [part.count(EOT) + 1 for part in content.split(END)]))
        first = int(number[-1])
    ngram_filter = HashFilter(np.concatenate([ngrams_within_documents(words, OVERLAP)[0] for words in val_words]))
    shared, signatures = KeySet(), []
    # Validation is signed here, too: a process in which Rensa has started threads cannot fork worker processes.
    ranges = itertools.chain(token_ranges("train", lengths[~val]), val_ranges if signed else [])
    arguments = text, ngram_filter, signed
    for documents, (hashes, signatures_of_range) in map_in_order(compare_range, ranges, workers, *arguments):
        signatures.append(signatures_of_range)
        if documents.split == "train":
            shared.add(hashes)
    return count_overlap(val_words, numbers, shared), np.concatenate(signatures) if signed else None


def count_overlap(words_by_range: list[np.ndarray], numbers: list[np.ndarray], shared: KeySet) -> dict[str, int]:
    """Return the number of words, of words in shared n-grams, and of documents with shared n-grams (Brown et al. 2020).

    words_by_range: the words of validation, (W,) per range. numbers: the number of the document between two boundaries.
    shared: hashes of n-grams of OVERLAP words in training.
    """
    words_in_overlap, n_words, documents = 0, 0, set()
    for words, numbers_of_range in zip(words_by_range, numbers, strict=True):
        is_boundary = words == word_hashes(BOUNDARY)
        ngrams, starts = ngrams_within_documents(words, OVERLAP)
        starts = starts[shared.contains(ngrams)]
        covered = np.zeros(len(words) + 1, np.int64)  # +1 where an n-gram begins, -1 after its end
        np.add.at(covered, starts, 1)
        np.add.at(covered, starts + OVERLAP, -1)
        words_in_overlap += int((np.cumsum(covered)[:-1] > 0).sum())
        n_words += int((~is_boundary).sum())
        documents.update(numbers_of_range[np.cumsum(is_boundary)[starts]].tolist())
    return {"words": n_words, "words_in_overlap": words_in_overlap, "documents_with_overlap": len(documents)}
