"""Searches a run's training data: for the spans of a text that occur there, and for a few passages of it.

For spans of any length, the training tokens are sorted into a suffix array (Manber and Myers 1990; by libdivsufsort),
in which a binary search finds the longest match of any text. OLMoTrace (Liu et al. 2025) shows such spans for a model
of trillions of tokens. Spans that are no longer than chance gives are left out.

Dimensions: T time, N indexed tokens, V vocabulary.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from folio import UserError
from folio.base.progress import note
from folio.checkpoints.checkpoint import Checkpoint
from folio.data.shards import Dataset, data_root, has_data, open_dataset
from folio.data.tokenizer import EOT_TEXT, Tokenizer
from folio.data.windows import Mixture, check_ids, parse_mixture
from folio.evaluation.scores import Reading
from folio.evaluation.texts import EvaluatedText

MAX_INDEXED_TOKENS = 20_000_000  # at the start of the data sets: up to 1 GB while they are sorted, 0.2 GB then
HELD_OUT, HELD_OUT_PIECE = 4096, 256  # tokens of validation text to compare with, in pieces of this length
CHANCE = 0.01  # probability that a random text has a span longer than TrainingIndex.chance
EXACT_LENGTHS = 16  # up to which the expected matches of a random text are summed; they are bounded beyond
CONTEXT_TOKENS = 60  # of training data to show before and after a span
BLOCK = 1 << 16  # tokens to compute with at a time

PROBES = 20  # passages of a text
PROBE_TOKENS = 32  # length of each of them
SEARCHED_TOKENS = 50_000_000  # at the start of each data set


# --- the training data of a run ---------------------------------------------------------------------------------------


def open_training_data(saved: Checkpoint, data_dir: str | None) -> list[Dataset]:
    """The data sets of `open_training_mixture`."""
    return [dataset for dataset, _ in open_training_mixture(saved, data_dir).datasets]


def open_training_mixture(saved: Checkpoint, data_dir: str | None) -> Mixture:
    """The data that a checkpoint was trained on. Raises UserError if it is not available or has changed.

    data_dir: the folder of data sets to look in if it is not where it was in training. A missing one is not prepared.
    """
    config = saved.state.get("config", {})
    if not {"dataset", "data_dir"} <= config.keys():
        raise UserError("its checkpoint does not record the training data")
    datasets = []
    for name, weight in parse_mixture(config["dataset"]):
        folders = [data_root(place) / name for place in (config["data_dir"], data_dir)]
        folder = next((folder for folder in folders if has_data(folder)), None)
        if not folder and data_dir:
            raise UserError(f"its training data is neither {folders[0]} nor {folders[1]}; set --data_dir")
        if not folder:
            raise UserError(f"its training data, {folders[0]}, does not exist; set --data_dir")
        datasets.append((open_dataset(folder), weight))
    mixture = Mixture(datasets, config["block_size"], config["seed"], config["sampling"])
    if mixture.hash != saved.state["dataset"]["hash"]:
        raise UserError(f"its training data, {config['dataset']}, has been prepared again since then")
    return mixture


def first_tokens(datasets: list[Dataset], limit: int) -> tuple[list[tuple[int, int, np.ndarray]], bool]:
    """The training tokens at the start of each data set, at most `limit`: the numbers of the data set and of the shard,
    and the ids (n,) of each shard. Also whether these are all that there are.
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


# --- any span of a text -----------------------------------------------------------------------------------------------


class Occurrences(NamedTuple):
    """Where a span occurs in the training data."""

    count: int
    dataset: int  # the first occurrence: the number of the data set, of its shard, and of the token in it
    shard: int
    offset: int


class TrainingIndex:
    """The training tokens, sorted so that spans of any text are found in them.

    A span lies within one shard and one document: it contains no end-of-text token. Where documents end without such a
    token, as in a text of characters, it may continue in the next one, as the windows of training do.

    searched: the tokens indexed. complete: whether they are all that there are. If not, they are those at the start of
    each data set, MAX_INDEXED_TOKENS // len(datasets) of each.
    """

    def __init__(self, datasets: list[Dataset], eot: int | None):
        """eot: the end-of-text token. Raises DatasetError for a token outside the vocabulary."""
        from pydivsufsort import divsufsort  # nothing else needs it

        parts, self.complete = first_tokens(datasets, MAX_INDEXED_TOKENS // len(datasets))
        self.parts = [(dataset, shard) for dataset, shard, _ in parts]  # numbers
        arrays = [ids for _, _, ids in parts]
        lengths = [len(ids) for ids in arrays]
        self.searched = sum(lengths)
        self.starts = np.cumsum([0, *lengths]) + np.arange(len(arrays) + 1)  # of each part; a 0 is after each

        vocab_size = max(dataset.vocab_size for dataset in datasets)
        counts = np.zeros(vocab_size, np.int64)
        for ids in arrays:
            for _, block in blocks(ids):
                check_ids(int(block.max()), vocab_size)
                counts += np.bincount(block, minlength=vocab_size)
        if eot is not None:
            counts[eot] = 0
        # A token's code: 1, 2, ... for those that occur; 0 for the others, the end-of-text token, and ends of shards.
        occurs = counts > 0
        self.code_of = (np.cumsum(occurs) * occurs).astype(np.min_scalar_type(int(occurs.sum())))  # (V,)
        self.id_of = np.append(-1, np.flatnonzero(occurs))  # by code
        codes = np.zeros(self.starts[-1], self.code_of.dtype)
        for ids, start in zip(arrays, self.starts, strict=False):
            for at, block in blocks(ids):
                codes[start + at : start + at + len(block)] = self.code_of[block]
        suffixes = divsufsort(codes)  # the positions in `codes`, in the order of what begins there
        self.suffixes = memoryview(suffixes.view(f"i{suffixes.itemsize}"))  # gives Python's integers, which are faster
        frequencies = np.concatenate([[0], counts[occurs]]) / max(counts.sum(), 1)  # by code
        self.expected, self.largest_frequency = expected_matches(codes, frequencies), float(frequencies.max())
        big_endian = codes.astype(codes.dtype.newbyteorder(">"))  # so that bytes compare as codes do
        self.content = big_endian.tobytes()
        self.codes = np.frombuffer(self.content, big_endian.dtype)

    def longest(self, ids: np.ndarray) -> np.ndarray:
        """The length of the longest span from each position of a text, (T,), that occurs in the data: (T,)."""
        text = self._encode(ids)
        absent = np.flatnonzero(text == 0)
        ends = np.append(absent, len(text))[np.searchsorted(absent, np.arange(len(text)))]  # the next 0 or the end
        lengths = np.zeros(len(text), np.int64)
        for start, end in enumerate(ends):
            rest = text[start:end]
            at = bisect_left(self.suffixes, rest.tobytes(), key=self._prefixes(len(rest)))
            neighbors = self.suffixes[max(at - 1, 0) : at + 1]  # the longest match is one of them
            lengths[start] = max(common_prefix(rest, self.codes[suffix : suffix + len(rest)]) for suffix in neighbors)
        return lengths

    def find(self, ids: np.ndarray) -> Occurrences | None:
        """Where a span of token ids, (T,), occurs. None if it does not."""
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

    def different_spans(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """All different spans of so many tokens: where each occurs first, in `codes`, and how often, (S,) each.

        Equal spans are next to each other in the suffix array.
        """
        zeros = np.cumsum(np.append(0, self.codes == 0), dtype=np.int32)
        is_span = np.zeros(len(self.codes), bool)
        is_span[: max(len(self.codes) - length + 1, 0)] = zeros[length:] == zeros[:-length]  # no document ends in it
        order = np.asarray(self.suffixes)
        order = order[is_span[order]]
        same = np.arange(1, len(order))  # ranks of the spans that are equal to the one before, up to a depth
        for depth in range(length):
            same = same[self.codes[order[same] + depth] == self.codes[order[same - 1] + depth]]
        starts = np.delete(np.arange(len(order)), same)
        counts = np.diff(np.append(starts, len(order)))
        return np.minimum.reduceat(order, starts) if len(order) else order, counts

    def ids_at(self, place: int, length: int) -> np.ndarray:
        """The token ids of the span at a place in `codes`, (length,)."""
        return self.id_of[self.codes[place : place + length]]

    def chance(self, tokens: int) -> int:
        """The length that no span of a random text of so many tokens exceeds, with a probability of 1 - CHANCE.

        The tokens of a random text are independent, with the frequencies p of the training data. A span of L tokens
        that starts at a given token equals the training tokens at j with the probability p[x_j] ... p[x_j+L-1], so
        that a text of T tokens is expected to have at most

            T * E_L   matches of length L, where   E_L = sum over j of p[x_j] * ... * p[x_j+L-1],

        and the probability of any is not larger. For training tokens that are independent too, E_L is N * c**L, with
        the collision probability c = sum of p**2, and the length is log(T * N / CHANCE) / log(1 / c). Runs, such as
        the spaces of an indentation, make it longer. Beyond EXACT_LENGTHS, E_L <= E_L-1 * max(p).
        """
        within = np.flatnonzero(tokens * self.expected <= CHANCE)
        if len(within):
            return min(int(within[0]), tokens)
        if self.largest_frequency == 1:
            return tokens
        excess = math.log(tokens * self.expected[-1] / CHANCE) / -math.log(self.largest_frequency)
        return min(EXACT_LENGTHS + math.ceil(excess) - 1, tokens)

    def _encode(self, ids: np.ndarray) -> np.ndarray:
        """The codes of token ids, (T,) each."""
        ids = np.asarray(ids, np.int64)
        known = ids < len(self.code_of)
        return np.where(known, self.code_of[np.where(known, ids, 0)], 0).astype(self.codes.dtype)

    def _prefixes(self, length: int) -> Callable[[int], bytes]:
        """The function from a position to the bytes of so many codes from there."""
        content, width = self.content, self.codes.itemsize
        return lambda position: content[position * width : (position + length) * width]


def blocks(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """An array in blocks, and where each begins."""
    return ((start, array[start : start + BLOCK]) for start in range(0, len(array), BLOCK))


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """The number of elements at the beginning that are the same. b must not be longer than a."""
    different = np.flatnonzero(a[: len(b)] != b)
    return int(different[0]) if len(different) else len(b)


def expected_matches(codes: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """E_L of TrainingIndex.chance for L = 1, ..., EXACT_LENGTHS. codes: (N,). frequencies: of each code."""
    sums = np.zeros(EXACT_LENGTHS)
    for start in range(0, len(codes), BLOCK):
        single = frequencies[codes[start : start + BLOCK + EXACT_LENGTHS - 1]]
        single = np.pad(single, (0, EXACT_LENGTHS - 1))
        product = np.ones(min(BLOCK, len(codes) - start))
        for i in range(EXACT_LENGTHS):
            product *= single[i : i + len(product)]
            sums[i] += product.sum()
    return sums


def maximal_spans(lengths: np.ndarray) -> list[tuple[int, int]]:
    """The spans (start, end) that are not a part of a longer one, in order. lengths: of TrainingIndex.longest, (T,)."""
    ends = np.arange(len(lengths)) + lengths  # do not decrease
    starts = np.flatnonzero((lengths > 0) & (ends > np.append(0, ends[:-1])))
    return [(int(start), int(ends[start])) for start in starts]


def covering_lengths(lengths: np.ndarray) -> np.ndarray:
    """The length of the longest span that covers each token: (T,). lengths: of TrainingIndex.longest, (T,)."""
    covering = np.zeros(len(lengths), np.int64)
    for start, end in sorted(maximal_spans(lengths), key=lambda span: span[1] - span[0]):
        covering[start:end] = end - start
    return covering


def held_out_lengths(index: TrainingIndex, datasets: list[Dataset]) -> np.ndarray:
    """The length of the longest span that covers each token of some validation text: (n,).

    Common phrases occur in any text. These lengths are what they give in text that the model was not trained on.
    """
    covering = [np.zeros(0, np.int64)]
    for dataset in datasets:
        ids = max((shard.ids for shard in dataset.val), key=len)
        pieces = max(HELD_OUT // HELD_OUT_PIECE // len(datasets), 1)
        for start in np.linspace(0, max(len(ids) - HELD_OUT_PIECE, 0), pieces).astype(int):
            covering.append(covering_lengths(index.longest(ids[start : start + HELD_OUT_PIECE])))
    return np.concatenate(covering)


class TrainingSearch:
    """Facts about the spans of texts that occur in the training data."""

    def __init__(self, datasets: list[Dataset], tokenizer: Tokenizer):
        """Raises DatasetError for a token outside the vocabulary."""
        self.datasets, self.tokenizer = datasets, tokenizer
        self.index = TrainingIndex(datasets, tokenizer.eot)
        lengths = held_out_lengths(self.index, datasets)
        self.held_out = np.percentile(lengths, [50, 99], method="lower").tolist()  # the median and a long one

    def search(self, ids: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
        """The facts about the spans of a text, (T,), that are longer than chance gives, and TrainingIndex.longest."""
        longest, chance = self.index.longest(ids), self.index.chance(len(ids))
        facts = {
            "spans": [self.place(ids, start, end) for start, end in maximal_spans(longest) if end - start > chance],
            "chance": chance,
            "datasets": [dataset.folder.name for dataset in self.datasets],
            "searched": self.index.searched,
            "complete": self.index.complete,
            "held_out": self.held_out,
        }
        return facts, longest

    def to_json(self) -> dict[str, Any]:
        """What folio/web/browser/memorized.js needs besides the index's codes and suffixes."""
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

    def place(self, ids: np.ndarray, start: int, end: int) -> dict[str, Any]:
        """The facts about a span of a text, (T,), that occurs in the training data."""
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
            "before": self._text(tokens[max(offset - CONTEXT_TOKENS, 0) : offset]),
            "text": self._text(ids[start:end]),
            "after": self._text(tokens[after : after + CONTEXT_TOKENS]),
        }

    def _text(self, ids: np.ndarray) -> str:
        """The text of tokens, with the name of the end-of-text token."""
        pieces = np.split(ids, np.flatnonzero(ids == self.tokenizer.eot))  # the token itself has no text
        return EOT_TEXT.join(map(self.tokenizer.decode, pieces))


# --- a few passages of a text, called probes --------------------------------------------------------------------------


def search_training_data(text: EvaluatedText, run: str, saved: Checkpoint, data_dir: str | None) -> Reading:
    """Look up passages of a text in the run's training data, unless it is the validation set of that data.

    Prints a line if any are found, or if the text could not be looked up. Returns the text's reading with the counts.
    """
    try:
        training = open_training_data(saved, data_dir)
        if text.dataset and text.dataset.hash in [dataset.hash for dataset in training]:
            return text.reading
        ids, document = (np.concatenate([getattr(s, name) for s in text.streams]) for name in ("ids", "document"))
        if not (probes := choose_probes(ids, document)):
            raise UserError(f"no document has more than {PROBE_TOKENS} tokens")
    except UserError as error:
        note(f"{text.name}: could not check whether {run} was trained on this text: {error}")
        return text.reading
    matches, complete = count_matches(probes, training)
    where = f"the training data of {run}"
    if not complete:
        where = f"the first {SEARCHED_TOKENS // 10**6} million tokens of {where}, which is all that was searched"
    if matches:
        how_much = "this text" if 2 * matches > len(probes) else "parts of this text, or on the same passages elsewhere"
        line = f"{matches} of {len(probes)} probes of {PROBE_TOKENS} tokens occur in {where}: it was trained on "
        line += f"{how_much}, so its values here say little about new text"
        note(f"{text.name}: {line}")
    elif not complete:
        note(f"{text.name}: no probe of {PROBE_TOKENS} tokens occurs in {where}")
    elif (base := saved.state["config"]["init_from"]) not in ("scratch", "resume"):
        line = f"could not check whether {base} was trained on it, from which {run} started"
        note(f"{text.name}: {line}")
    return replace(text.reading, probes=len(probes), probes_matched=matches)


def choose_probes(ids: np.ndarray, document: np.ndarray) -> list[np.ndarray]:
    """Evenly spaced passages of a text, (PROBE_TOKENS,) each. None crosses the end of a document.

    ids: the tokens of the text, (n,). document: the number of the document that each of them belongs to, (n,).
    """
    # one token more must be in the document, because its last one is the end of text or a separator
    starts = np.flatnonzero(document[:-PROBE_TOKENS] == document[PROBE_TOKENS:])
    n = min(PROBES, math.ceil(len(starts) / PROBE_TOKENS))
    chosen = starts[np.linspace(0, len(starts) - 1, n).astype(int)] if n else []
    return [ids[start : start + PROBE_TOKENS] for start in chosen]


def count_matches(probes: list[np.ndarray], datasets: list[Dataset], limit: int = SEARCHED_TOKENS) -> tuple[int, bool]:
    """How many of the probes occur in the training shards, and whether all shards were searched to their ends.

    A search of bytes, because for a few probes it takes less time and memory than the index. limit: tokens at the start
    of each data set to search.
    """
    parts, complete = first_tokens(datasets, limit)
    missing = probes
    for _, _, ids in parts:
        content = ids.tobytes()
        missing = [probe for probe in missing if not occurs(probe.astype(ids.dtype), content)]
    return len(probes) - len(missing), complete


def occurs(probe: np.ndarray, content: bytes) -> bool:
    """Whether the tokens `probe`, (n,), occur one after another in `content`, the bytes of tokens of the same dtype."""
    at = content.find(probe.tobytes())
    while at > 0 and at % probe.itemsize:  # this match begins in the middle of a token
        at = content.find(probe.tobytes(), at + 1)
    return at >= 0
