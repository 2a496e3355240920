"""Search a run's training data for all spans of a text, with a suffix array, or for a few of its passages.

A binary search in the suffix array of the training tokens (Manber and Myers 1990; built by libdivsufsort) finds the
longest match of any text. OLMoTrace (Liu et al. 2025) shows such spans for a model trained on trillions of tokens.
Spans that are likely to match by chance are left out.

Dimensions: T time, N indexed tokens, V vocabulary.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from folio import UserError
from folio.base.progress import note
from folio.checkpoints.checkpoint import Checkpoint
from folio.checkpoints.training_data import open_training_data, prepared_again, trained_on
from folio.data.shards import Dataset
from folio.data.tokenizer import Tokenizer
from folio.data.windows import check_ids, parse_mixture
from folio.evaluation.scores import Coverage
from folio.evaluation.texts import EvaluatedText

MAX_INDEXED_TOKENS = 20_000_000  # from the start of the data sets; up to 1 GB during sorting, 0.2 GB afterwards
HELD_OUT_TOKENS = 4096  # of validation text, for comparison
HELD_OUT_PIECE_TOKENS = 256
CHANCE = 0.01  # probability that a random text has a span longer than TrainingIndex.chance
EXACT_LENGTHS = 16  # span lengths with exact expected matches of random text; longer ones are bounded
CONTEXT_TOKENS = 60  # training tokens to show before and after a span
BLOCK_TOKENS = 1 << 16  # tokens processed at once

OVERLAP_TOKENS = 5_000_000  # from the start of the data sets; indexed for overlaps, in half a second
MIN_QUOTE = 32  # characters, or events of music, in a span that is more than a common phrase

MAX_SHORT_TOKENS = 4096  # tokens to search of a text whose documents are too short for probes

MAX_PROBES = 20  # probes per text
PROBE_TOKENS = 32
MAX_SEARCHED_TOKENS = 50_000_000  # from the start of each data set


# --- training data ----------------------------------------------------------------------------------------------------


def first_tokens(datasets: list[Dataset], limit: int) -> tuple[list[tuple[int, int, np.ndarray]], bool]:
    """Return up to `limit` training tokens from the start of each data set, and whether these are all of them.

    The tokens are a list of (data set number, shard number, ids (n,)).
    """
    parts, complete = [], True
    for number, dataset in enumerate(datasets):
        remaining = limit
        for shard_number, shard in enumerate(dataset.train):
            ids = shard.ids[:remaining]
            remaining -= len(ids)
            complete = complete and len(ids) == len(shard)
            if len(ids):
                parts.append((number, shard_number, ids))
    return parts, complete


# --- suffix array -----------------------------------------------------------------------------------------------------


class Occurrences(NamedTuple):
    """Where a span occurs in the training data."""

    count: int
    dataset: int  # numbers of the data set, its shard, and the token in it, of the first occurrence
    shard: int
    offset: int


class TrainingIndex:
    """A suffix array of the training tokens, which finds spans of any text.

    A span is within one shard and one document, so it contains no end-of-text token. Without end-of-text tokens, as in
    a character-level data set, a span may cross document boundaries, as training windows do.

    searched: number of indexed tokens. complete: False if there are more; then the index has the first
    max_tokens // len(datasets) tokens of each data set.
    """

    def __init__(self, datasets: list[Dataset], eot: int | None, max_tokens: int = MAX_INDEXED_TOKENS):
        """eot: the end-of-text token. Raises DatasetError for a token outside the vocabulary."""
        from pydivsufsort import divsufsort  # only used here

        parts, self.complete = first_tokens(datasets, max_tokens // len(datasets))
        self.parts = [(dataset, shard) for dataset, shard, _ in parts]  # numbers
        arrays = [ids for _, _, ids in parts]
        lengths = [len(ids) for ids in arrays]
        self.searched = sum(lengths)
        self.starts = np.cumsum([0, *lengths]) + np.arange(len(arrays) + 1)  # of each part; a 0 follows each

        vocab_size = max(dataset.vocab_size for dataset in datasets)
        counts = np.zeros(vocab_size, np.int64)
        for ids in arrays:
            for _, block in blocks(ids):
                check_ids(int(block.max()), vocab_size)
                counts += np.bincount(block, minlength=vocab_size)
        if eot is not None:
            counts[eot] = 0
        # Codes are 1, 2, ... for tokens that occur, and 0 for other tokens, end of text, and ends of shards.
        occurs = counts > 0
        self.code_of = (np.cumsum(occurs) * occurs).astype(np.min_scalar_type(int(occurs.sum())))  # (V,)
        self.id_of = np.append(-1, np.flatnonzero(occurs))  # by code
        codes = np.zeros(self.starts[-1], self.code_of.dtype)
        for ids, start in zip(arrays, self.starts, strict=False):
            for offset, block in blocks(ids):
                codes[start + offset : start + offset + len(block)] = self.code_of[block]
        suffixes = divsufsort(codes)  # positions in `codes`, sorted by their suffixes
        self.suffixes = memoryview(suffixes.view(f"i{suffixes.itemsize}"))  # returns Python integers, which are faster
        frequencies = np.concatenate([[0], counts[occurs]]) / max(counts.sum(), 1)  # by code
        self.expected, self.largest_frequency = expected_matches(codes, frequencies), float(frequencies.max())
        big_endian = codes.astype(codes.dtype.newbyteorder(">"))  # bytes then compare in the order of codes
        self.content = big_endian.tobytes()
        self.codes = np.frombuffer(self.content, big_endian.dtype)

    def longest(self, ids: np.ndarray) -> np.ndarray:
        """Return the length of the longest span from each position of a text, (T,), that occurs in the data: (T,)."""
        text = self._encode(ids)
        absent = np.flatnonzero(text == 0)
        ends = np.append(absent, len(text))[np.searchsorted(absent, np.arange(len(text)))]  # the next 0 or the end
        lengths = np.zeros(len(text), np.int64)
        for start, end in enumerate(ends):
            rest = text[start:end]
            rank = bisect_left(self.suffixes, rest.tobytes(), key=self._prefixes(len(rest)))
            neighbors = self.suffixes[max(rank - 1, 0) : rank + 1]  # the longest match is one of them
            lengths[start] = max(common_prefix(rest, self.codes[suffix : suffix + len(rest)]) for suffix in neighbors)
        return lengths

    def find(self, ids: np.ndarray) -> Occurrences | None:
        """Return where a span of token ids, (T,), occurs, or None."""
        codes = self._encode(ids)
        if not len(codes) or not codes.all():
            return None
        content, prefix = codes.tobytes(), self._prefixes(len(codes))
        first = bisect_left(self.suffixes, content, key=prefix)
        end = bisect_right(self.suffixes, content, first, key=prefix)
        if first == end:
            return None
        position = int(np.min(self.suffixes[first:end]))
        part = int(np.searchsorted(self.starts, position, side="right")) - 1
        return Occurrences(end - first, *self.parts[part], position - int(self.starts[part]))

    def unique_spans(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the first position in `codes` and the count of each unique span of `length` tokens, (S,) each.

        Equal spans are next to each other in the suffix array.
        """
        zeros = np.cumsum(np.append(0, self.codes == 0), dtype=np.int32)
        is_span = np.zeros(len(self.codes), bool)
        is_span[: max(len(self.codes) - length + 1, 0)] = zeros[length:] == zeros[:-length]  # no document ends in it
        order = np.asarray(self.suffixes)
        order = order[is_span[order]]
        same = np.arange(1, len(order))  # ranks of the spans that equal the previous one, up to a depth
        for depth in range(length):
            same = same[self.codes[order[same] + depth] == self.codes[order[same - 1] + depth]]
        starts = np.delete(np.arange(len(order)), same)
        counts = np.diff(np.append(starts, len(order)))
        return np.minimum.reduceat(order, starts) if len(order) else order, counts

    def ids_at(self, position: int, length: int) -> np.ndarray:
        """Return the token ids of the span at a position in `codes`: (length,)."""
        return self.id_of[self.codes[position : position + length]]

    def chance(self, tokens: int) -> int:
        """Return the length that no matching span of `tokens` random tokens exceeds, with probability 1 - CHANCE.

        The tokens of a random text are independent, with the frequencies p of the training data. A span of L tokens
        at a given position equals the training tokens at j with probability p[x_j] ... p[x_j+L-1]. So the expected
        number of matches of length L in a text of T tokens is at most

            T * E_L,   where   E_L = sum over j of p[x_j] * ... * p[x_j+L-1],

        which also bounds the probability of a match. If training tokens are independent too, E_L = N * c**L with the
        collision probability c = sum of p**2, and the length is log(T * N / CHANCE) / log(1 / c). Repeated tokens,
        such as indentation, make it longer. Beyond EXACT_LENGTHS, E_L <= E_L-1 * max(p).
        """
        unlikely = np.flatnonzero(tokens * self.expected <= CHANCE)  # indices of E_L, from L = 1
        if len(unlikely):
            return min(int(unlikely[0]), tokens)
        if self.largest_frequency == 1:
            return tokens
        excess = math.log(tokens * self.expected[-1] / CHANCE) / -math.log(self.largest_frequency)
        return min(EXACT_LENGTHS + math.ceil(excess) - 1, tokens)

    def _encode(self, ids: np.ndarray) -> np.ndarray:
        """Return the codes of token ids, (T,) each."""
        ids = np.asarray(ids, np.int64)
        known = ids < len(self.code_of)
        return np.where(known, self.code_of[np.where(known, ids, 0)], 0).astype(self.codes.dtype)

    def _prefixes(self, length: int) -> Callable[[int], bytes]:
        """Return a function from a position to the bytes of the next `length` codes."""
        content, width = self.content, self.codes.itemsize
        return lambda position: content[position * width : (position + length) * width]


def blocks(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the start and the contents of each block of an array."""
    return ((start, array[start : start + BLOCK_TOKENS]) for start in range(0, len(array), BLOCK_TOKENS))


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix. b must not be longer than a."""
    different = np.flatnonzero(a[: len(b)] != b)
    return int(different[0]) if len(different) else len(b)


def expected_matches(codes: np.ndarray, frequencies: np.ndarray, block_tokens: int = BLOCK_TOKENS) -> np.ndarray:
    """Return E_L of TrainingIndex.chance for L = 1, ..., EXACT_LENGTHS. codes: (N,). frequencies: by code."""
    sums = np.zeros(EXACT_LENGTHS)
    for start in range(0, len(codes), block_tokens):
        single = frequencies[codes[start : start + block_tokens + EXACT_LENGTHS - 1]]
        single = np.pad(single, (0, EXACT_LENGTHS - 1))
        product = np.ones(min(block_tokens, len(codes) - start))
        for i in range(EXACT_LENGTHS):
            product *= single[i : i + len(product)]
            sums[i] += product.sum()
    return sums


def maximal_spans(lengths: np.ndarray) -> list[tuple[int, int]]:
    """Return spans (start, end) not contained in a longer one, in order. lengths: from TrainingIndex.longest, (T,)."""
    ends = np.arange(len(lengths)) + lengths  # do not decrease
    starts = np.flatnonzero((lengths > 0) & (ends > np.append(0, ends[:-1])))
    return [(int(start), int(ends[start])) for start in starts]


def covering_lengths(lengths: np.ndarray) -> np.ndarray:
    """Return the length of the longest span that covers each token. lengths: from TrainingIndex.longest, (T,)."""
    covering = np.zeros(len(lengths), np.int64)
    for start, end in sorted(maximal_spans(lengths), key=lambda span: span[1] - span[0]):
        covering[start:end] = end - start
    return covering


def held_out_lengths(index: TrainingIndex, datasets: list[Dataset]) -> np.ndarray:
    """Return the length of the longest span that covers each token of some validation text: (n,).

    This is the baseline for text that the model was not trained on, since common phrases occur in any text.
    """
    covering = [np.zeros(0, np.int64)]
    for dataset in datasets:
        ids = max((shard.ids for shard in dataset.val), key=len)
        pieces = max(HELD_OUT_TOKENS // HELD_OUT_PIECE_TOKENS // len(datasets), 1)
        for start in np.linspace(0, max(len(ids) - HELD_OUT_PIECE_TOKENS, 0), pieces).astype(int):
            covering.append(covering_lengths(index.longest(ids[start : start + HELD_OUT_PIECE_TOKENS])))
    return np.concatenate(covering)


class TrainingSearch:
    """Search for the spans of texts in the training data, with their occurrences and context."""

    def __init__(self, datasets: list[Dataset], tokenizer: Tokenizer):
        """Raises DatasetError for a token outside the vocabulary."""
        self.datasets, self.tokenizer = datasets, tokenizer
        self.index = TrainingIndex(datasets, tokenizer.eot)
        lengths = held_out_lengths(self.index, datasets)
        self.held_out = np.percentile(lengths, [50, 99], method="lower").tolist()  # median and 99th percentile

    def search(self, ids: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
        """Return the spans of a text, (T,), that are longer than chance, as JSON, and TrainingIndex.longest."""
        longest, chance = self.index.longest(ids), self.index.chance(len(ids))
        facts = {
            "spans": [
                self.describe_span(ids, start, end) for start, end in maximal_spans(longest) if end - start > chance
            ],
            "chance": chance,
            "datasets": [dataset.folder.name for dataset in self.datasets],
            "searched": self.index.searched,
            "complete": self.index.complete,
            "held_out": self.held_out,
        }
        return facts, longest

    def to_json(self) -> dict[str, Any]:
        """Return the fields that folio/web/browser/memorized.js needs besides the index's codes and suffixes."""
        index = self.index
        return {
            "datasets": [dataset.folder.name for dataset in self.datasets],
            "shards": [len(dataset.train) for dataset in self.datasets],
            "parts": index.parts,
            "starts": index.starts.tolist(),
            "id_of": index.id_of.tolist(),
            "searched": index.searched,
            "complete": index.complete,
            "held_out": self.held_out,
            "expected": index.expected.tolist(),
            "largest_frequency": index.largest_frequency,
        }

    def describe_span(self, ids: np.ndarray, start: int, end: int) -> dict[str, Any]:
        """Return the occurrences and context of a span of a text, (T,), as JSON."""
        count, dataset, shard, offset = self.index.find(ids[start:end])
        tokens, after = self.datasets[dataset].train[shard].ids, offset + end - start
        return {
            "start": start,
            "end": end,
            "count": count,
            "dataset": self.datasets[dataset].folder.name,
            "shard": shard,
            "shards": len(self.datasets[dataset].train),
            "offset": offset,
            "before": self.tokenizer.decode_prompt(tokens[max(offset - CONTEXT_TOKENS, 0) : offset]),
            "text": self.tokenizer.decode_prompt(ids[start:end]),
            "after": self.tokenizer.decode_prompt(tokens[after : after + CONTEXT_TOKENS]),
        }


# --- overlap: how much of a text is quoted ----------------------------------------------------------------------------


class Overlap(NamedTuple):
    """How much of a text occurs in the training data, in spans of MIN_QUOTE characters that are longer than chance.

    In music, every event counts as a character.
    """

    characters: int
    in_training: int  # of the characters
    searched: int  # number of indexed tokens
    complete: bool  # False: there are more training tokens


def find_overlap(index: TrainingIndex, tokenizer: Tokenizer, ids: np.ndarray) -> Overlap:
    """Find how much of a text, (T,), occurs in the training data."""
    sizes = character_counts(tokenizer, ids)
    chance, is_quoted = index.chance(len(ids)), np.zeros(len(ids), bool)
    for start, end in maximal_spans(index.longest(ids)):
        if end - start > chance and sizes[start:end].sum() >= MIN_QUOTE:
            is_quoted[start:end] = True
    return Overlap(int(sizes.sum()), int(sizes[is_quoted].sum()), index.searched, index.complete)


def character_counts(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    """Return the number of characters that begin in each token, (T,). An event of music is one character."""
    if tokenizer.kind == "midi":
        return (ids != tokenizer.eot).astype(np.int64)
    contents = [tokenizer.token_bytes(int(token)) for token in ids]
    return np.array([sum(byte & 0xC0 != 0x80 for byte in content) for content in contents], np.int64)


# --- probes: a few passages of a text ---------------------------------------------------------------------------------


def search_training_data(text: EvaluatedText, run: str, saved: Checkpoint, data_dir: str | None) -> Coverage:
    """Search for passages of a text in the run's training data, except in that from which it was split for validation.

    Prints a line if any occur there, or if the search is not possible. Returns the text's coverage with the results.
    """
    is_own = text.dataset is not None and trained_on(saved, text.dataset)
    again = text.dataset is not None and prepared_again(saved, text.dataset)
    coverage = replace(text.coverage, prepared_again=again)
    if is_own and len(parse_mixture(saved.state["dataset"]["folder"])) == 1:
        return coverage
    try:
        training = open_training_data(saved, data_dir)
        datasets = [dataset for dataset in training if not text.dataset or dataset.hash != text.dataset.hash]
        ids, document = (np.concatenate([getattr(s, name) for s in text.streams]) for name in ("ids", "document"))
        if text.are_pairs:
            probes = evenly_spaced(np.split(ids, np.flatnonzero(np.diff(document)) + 1), MAX_PROBES)
        else:
            probes = choose_probes(ids, document)
        if not probes:
            quoted = search_short_documents(text.name, ids, run, saved, datasets)
            return replace(coverage, prepared_again=again and is_own, quoted=quoted)
    except UserError as error:
        note(f"{text.name}: could not check whether {run} was trained on this text: {error}")
        return coverage
    matches, complete = count_matches(probes, datasets)
    searched, unit = f"the training data of {run}", "pairs" if text.are_pairs else f"probes of {PROBE_TOKENS} tokens"
    if not complete:
        searched = f"the first {MAX_SEARCHED_TOKENS // 10**6} million tokens of {searched} (the rest was not searched)"
    if matches:
        extent = "this text" if 2 * matches > len(probes) else "parts of this text, or on the same passages elsewhere"
        line = f"{matches} of {len(probes)} {unit} occur in {searched}: it was trained on "
        line += f"{extent}, so its results do not generalize to new text"
        note(f"{text.name}: {line}")
    elif not complete:
        note(f"{text.name}: none of {len(probes)} {unit} occurs in {searched}")
    elif not is_own and (base := saved.state["config"]["init_from"]) not in ("scratch", "resume"):
        line = f"could not check whether {base}, from which {run} started, was trained on it"
        note(f"{text.name}: {line}")
    return replace(coverage, prepared_again=again and is_own, probes=len(probes), probes_matched=matches)


def search_short_documents(
    name: str, ids: np.ndarray, run: str, saved: Checkpoint, datasets: list[Dataset]
) -> tuple[int, int]:
    """Search for a text without a probe, (n,), in training data. Returns how many of how many characters occur there.

    Only its first MAX_SHORT_TOKENS tokens are searched. Prints a line if any occur. Raises UserError if the text is
    too short.
    """
    index = TrainingIndex(datasets, saved.tokenizer.eot, OVERLAP_TOKENS)
    overlap = find_overlap(index, saved.tokenizer, ids[:MAX_SHORT_TOKENS])
    if overlap.characters < MIN_QUOTE:
        raise UserError(f"it has fewer than {MIN_QUOTE} characters")
    searched = "" if overlap.complete else f"the first {overlap.searched:,} tokens of "
    if overlap.in_training:
        line = f"{overlap.in_training:,} of {overlap.characters:,} characters occur in {searched}the training data of"
        note(f"{name}: {line} {run}, so its results do not generalize to new text")
    elif searched:
        note(f"{name}: no passage occurs in {searched}the training data of {run} (the rest was not searched)")
    return overlap.in_training, overlap.characters


def evenly_spaced(items: Sequence[Any], max_items: int) -> list[Any]:
    """Select up to `max_items` evenly spaced items."""
    return [items[i] for i in np.linspace(0, len(items) - 1, min(max_items, len(items))).astype(int)]


def choose_probes(ids: np.ndarray, document: np.ndarray) -> list[np.ndarray]:
    """Choose evenly spaced passages of a text, (PROBE_TOKENS,) each, that do not cross the end of a document.

    ids: the tokens of the text, (n,). document: the document number of each token, (n,).
    """
    # The document must have one more token, because its last one is the end of text or a separator.
    starts = np.flatnonzero(document[:-PROBE_TOKENS] == document[PROBE_TOKENS:])
    n = min(MAX_PROBES, math.ceil(len(starts) / PROBE_TOKENS))
    return [ids[start : start + PROBE_TOKENS] for start in evenly_spaced(starts, n)]


def count_matches(
    probes: list[np.ndarray], datasets: list[Dataset], limit: int = MAX_SEARCHED_TOKENS
) -> tuple[int, bool]:
    """Return the number of probes that occur in the training shards, and whether the search was complete.

    It searches bytes, because for a few probes this takes less time and memory than the index. limit: number of tokens
    to search from the start of each data set.
    """
    parts, complete = first_tokens(datasets, limit)
    missing = probes
    for _, _, ids in parts:
        content = ids.tobytes()
        missing = [probe for probe in missing if not occurs(probe.astype(ids.dtype), content)]
    return len(probes) - len(missing), complete


def occurs(probe: np.ndarray, content: bytes) -> bool:
    """Return whether `content`, the bytes of tokens of probe's dtype, contains the tokens `probe`, (n,)."""
    offset = content.find(probe.tobytes())
    while offset > 0 and offset % probe.itemsize:  # this match begins in the middle of a token
        offset = content.find(probe.tobytes(), offset + 1)
    return offset >= 0
