"""Windows of tokens for training and validation, their order, and mixtures of data sets.

Dimensions: B batch, T time (block_size), N shards. Arrays of tokens are int64 numpy arrays. This module does not import
torch.
"""

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from folio.base.randomness import hash64, permute
from folio.data.shards import Dataset, DatasetError, PromptFormat, Shard

SHARE_UNITS = 1 << 20  # shares in a mixture are integer multiples of 1 / SHARE_UNITS
Location = tuple[int, int]  # start of a window: index of the shard, and offset of the token in it


class Place(NamedTuple):
    """The position of a sequence in a mixture."""

    dataset: str
    shard: int  # index of the training shard
    shards: int  # number of training shards of the data set
    offset: int  # index of the first token in the shard


def check_ids(largest: int, vocab_size: int) -> None:
    """Raise DatasetError if a token id is outside the vocabulary."""
    if largest >= vocab_size:
        raise DatasetError(
            f"token id {largest} in the shards is outside the vocabulary of {vocab_size}: "
            f"the shards are damaged, or were made with another tokenizer; prepare the data set again"
        )


class _Windows:
    """Base class of training and validation windows."""

    def __init__(self, shards: list[Shard], block_size: int, vocab_size: int):
        self.shards, self.block_size, self.vocab_size = shards, block_size, vocab_size
        self.ids = [shard.ids for shard in shards]
        self.lengths = np.array([len(ids) for ids in self.ids])  # (N,)
        self.masked = any(shard.mask is not None for shard in shards)

    def gather(self, locations: list[Location], pad: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs and targets, (B, T) each, at these locations. Masked targets are -1.

        pad: fill inputs and targets after the end of a shard with -1; False: every window must end inside its shard.
        """
        window_length = self.block_size + 1
        ids = np.empty((len(locations), window_length), dtype=np.int64)
        for row, (shard, start) in zip(ids, locations, strict=True):  # a slice per row is faster than an index array
            tokens = self.ids[shard][start : start + window_length]
            if pad:
                row[: len(tokens)] = tokens
                row[len(tokens) :] = -1
            else:
                row[:] = tokens
        check_ids(ids.max(initial=0), self.vocab_size)
        x, y = ids[:, :-1], ids[:, 1:]
        if self.masked:
            y = y.copy()
            for row, (shard, start) in zip(y, locations, strict=True):
                mask = self.shards[shard].mask
                if mask is not None:
                    counts = mask[start + 1 : start + 1 + len(row)]
                    row[: len(counts)][counts == 0] = -1
        return x, y


class TrainingWindows(_Windows):
    """An infinite stream of training sequences, in which sequence i depends only on (seed, i).

    sampling="epoch": in each epoch, every shard is divided from a random offset into n = max(1, (len - T) // T) windows
    that do not overlap, and each window is used once, in random order. sampling="random": as in nanoGPT, sequences
    start at random positions, with replacement. Windows do not cross the end of a shard. Shards with fewer than T + 1
    tokens are not used. Raises DatasetError if all shards are shorter.
    """

    LOCATE_AHEAD = 4096  # sequences located at a time, which affects only speed

    def __init__(self, shards: list[Shard], block_size: int, vocab_size: int, seed: int, sampling: str):
        super().__init__(shards, block_size, vocab_size)
        if sampling not in ("epoch", "random"):
            raise ValueError(f"sampling={sampling!r}: it must be epoch or random")
        self.seed, self.sampling = seed, sampling
        T, lengths = block_size, self.lengths
        if lengths.max() < T + 1:
            raise DatasetError(
                f"the longest training shard has {lengths.max():,} tokens, fewer than block_size + 1 = "
                f"{T + 1:,}: use a smaller --block_size, or more text"
            )
        usable = lengths >= T + 1
        counts = np.maximum(1, (lengths - T) // T) if sampling == "epoch" else lengths - T
        self.counts = np.where(usable, counts, 0)  # windows ("epoch") or possible starts ("random") per shard, (N,)
        self.ends = np.cumsum(self.counts)
        self.per_epoch = int(self.ends[-1])  # sequences per epoch
        self.located: tuple[range, list[Location]] = (range(0), [])  # sequences and their locations

    def locate(self, i: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the shard and the offset of the first token of each sequence i, (B,) each."""
        i = np.asarray(i, dtype=np.uint64)
        if self.sampling == "random":
            position = (hash64(self.seed, i) % np.uint64(self.per_epoch)).astype(np.int64)
            shard = np.searchsorted(self.ends, position, side="right")
            return shard, position - (self.ends - self.counts)[shard]
        shard, start = np.empty(len(i), dtype=np.int64), np.empty(len(i), dtype=np.int64)
        epochs, positions = np.divmod(i, np.uint64(self.per_epoch))
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            shard[rows], start[rows] = self._locate_in_epoch(epoch, positions[rows])
        return shard, start

    def _locate_in_epoch(self, epoch: np.uint64, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the shard and the offset of the first token at these positions in an epoch, (B,) each."""
        index = permute(positions, self.per_epoch, hash64(self.seed, epoch)).astype(np.int64)
        shard = np.searchsorted(self.ends, index, side="right")
        window = index - (self.ends - self.counts)[shard]  # index in the shard
        T, n = self.block_size, self.counts[shard]
        offsets = np.minimum(T, self.lengths[shard] - n * T).astype(np.uint64)  # number of possible offsets
        offset = (hash64(self.seed, epoch, shard) % offsets).astype(np.int64)
        return shard, offset + window * T

    def locations(self, first: int, count: int) -> list[Location]:
        """Return the locations of sequences first .. first + count - 1."""
        sequences, locations = self.located
        if not (sequences.start <= first and first + count <= sequences.stop):
            sequences = range(first, first + max(count, self.LOCATE_AHEAD))
            shard, start = self.locate(np.arange(sequences.start, sequences.stop))
            locations = list(zip(shard.tolist(), start.tolist(), strict=True))
            self.located = sequences, locations
        return locations[first - sequences.start : first - sequences.start + count]

    def batch(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets, (B, T) each, of sequences first .. first + count - 1. Masked targets are -1."""
        return self.gather(self.locations(first, count), pad=False)


class ValidationWindows(_Windows):
    """Fixed windows for evaluation. Every token except the first of each shard is a target exactly once.

    max_windows: maximum number of windows, which are evenly spaced.
    """

    def __init__(self, shards: list[Shard], block_size: int, vocab_size: int, max_windows: int | None = None):
        super().__init__(shards, block_size, vocab_size)
        counts = -(-(self.lengths - 1) // block_size)  # windows per shard, (N,)
        self.ends = np.cumsum(counts)
        self.starts = self.ends - counts
        total = int(self.ends[-1])
        if not total:
            raise DatasetError("the validation data has fewer than 2 tokens: use more text")
        count = min(total, max_windows or total)
        self.selected = np.arange(count) * total // count
        if self.masked and not any((y != -1).any() for _, y in self.batches(1)):
            raise DatasetError(
                "no token of the validation data counts as a target, so there is no validation loss: use more text, "
                "or a larger --eval_iters"
            )

    def batches(self, batch_size: int, rank: int = 0, ranks: int = 1) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield inputs and targets, (batch_size, T) each. After the end of the data, inputs are 0 and targets -1.

        Each rank gets every ranks-th batch. All ranks get the same number of batches; the last ones may be empty.
        """
        for first in range(0, len(self.selected), ranks * batch_size):
            window = self.selected[first + rank * batch_size :][:batch_size]
            shard = np.searchsorted(self.ends, window, side="right")
            start = (window - self.starts[shard]) * self.block_size
            x, y = self.gather(list(zip(shard.tolist(), start.tolist(), strict=True)), pad=True)
            padding = np.full((batch_size - len(x), self.block_size), -1)
            yield np.maximum(np.concatenate([x, padding]), 0), np.concatenate([y, padding])


class Mixture:
    """An infinite stream of training sequences from one or more data sets, and their validation windows.

    datasets: each data set and its weight. Weights are normalized to shares of the sequences. The data set of sequence
    i depends only on i: the first i sequences include floor(i * share) from the first data set, the second one's share
    of the others, and so on, so that each batch is as close to the shares as possible. Raises DatasetError if the
    tokenizers differ.
    """

    def __init__(
        self,
        datasets: list[tuple[Dataset, float]],
        block_size: int,
        seed: int,
        sampling: str,
        max_val_windows: int | None = None,
    ):
        first, total = datasets[0][0], sum(weight for _, weight in datasets)
        self.block_size, self.tokenizer, self.datasets = block_size, first.load_tokenizer(), datasets
        self.names = [dataset.folder.name for dataset, _ in datasets]
        if len(set(self.names)) < len(self.names):
            raise DatasetError(f"a mixture needs data sets with different names: {', '.join(self.names)}")
        for dataset, _ in datasets[1:]:
            if (other := dataset.load_tokenizer()).hash != self.tokenizer.hash:
                raise DatasetError(
                    f"{dataset.folder} was made with another tokenizer ({other.kind}, {other.vocab_size:,} tokens) "
                    f"than {first.folder} ({self.tokenizer.kind}, {self.tokenizer.vocab_size:,} tokens), so they "
                    f"cannot be mixed; prepare it again with --tokenizer={first.folder}"
                )
        self.weights = [weight / total for _, weight in datasets]
        self.shares = [max(1, round(weight * SHARE_UNITS)) for weight in self.weights]  # integers, for exact results
        self.training = [TrainingWindows(d.train, block_size, d.vocab_size, seed, sampling) for d, _ in datasets]
        self.validation = {
            d.folder.name: ValidationWindows(d.val, block_size, d.vocab_size, max_val_windows) for d, _ in datasets
        }
        self.masked = any(windows.masked for windows in self.training)
        self.training_tokens = int(sum(windows.lengths.sum() for windows in self.training))
        self.validation_tokens = sum(len(windows.selected) for windows in self.validation.values()) * block_size
        self.vocab_size = first.vocab_size
        self.hash = first.hash if len(datasets) == 1 else self._combined_hash()

    @property
    def prompt_format(self) -> PromptFormat | None:
        """The format of prompts: chat if any data set has chats; None: all data sets are plain text."""
        formats = {dataset.prompt_format for dataset, _ in self.datasets} - {None}
        return "chat" if "chat" in formats else next(iter(formats), None)

    def _combined_hash(self) -> str:
        """Return a hash of the content and the share of each data set."""
        parts = [f"{dataset.hash} {share}" for (dataset, _), share in zip(self.datasets, self.shares, strict=True)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def split_counts(self, i: int | np.ndarray) -> list[Any]:
        """Return the number of sequences from each data set among the first i."""
        counts, remaining_shares = [], sum(self.shares)
        for share in self.shares:
            counts.append(i * share // remaining_shares)
            i, remaining_shares = i - counts[-1], remaining_shares - share
        return counts

    def batch(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets, (B, T) each, of sequences first .. first + count - 1. Masked targets are -1."""
        if len(self.training) == 1:
            return self.training[0].batch(first, count)
        x, y = np.empty((2, count, self.block_size), dtype=np.int64)
        for windows, rows, begin in self._by_dataset(first, count):
            x[rows], y[rows] = windows.batch(begin, int(rows.sum()))
        return x, y

    def _by_dataset(self, first: int, count: int) -> Iterator[tuple[TrainingWindows, np.ndarray, int]]:
        """Yield the windows of each data set, the rows of its sequences, (B,) bool, and the index of the first one.

        The index is relative to the data set's own stream.
        """
        counts = self.split_counts(np.arange(first, first + count + 1))  # (B + 1,) for each data set
        for windows, dataset_counts in zip(self.training, counts, strict=True):
            yield windows, np.diff(dataset_counts) == 1, int(dataset_counts[0])

    def token_pieces(self, size: int = 2**24) -> Iterator[np.ndarray]:
        """Yield the training tokens of all shards in order, up to `size` at a time, in the shards' dtype.

        Raises DatasetError for an id outside the vocabulary.
        """
        for ids in (ids for windows in self.training for ids in windows.ids):
            for begin in range(0, len(ids), size):
                piece = np.array(ids[begin : begin + size])
                check_ids(int(piece.max()), self.vocab_size)
                yield piece

    def starts(self, first: int, count: int) -> np.ndarray:
        """Return the start of sequences first .. first + count - 1 among the tokens of `token_pieces`, (B,)."""
        starts, tokens_before = np.empty(count, dtype=np.int64), 0
        for windows, rows, begin in self._by_dataset(first, count):
            shard_starts = tokens_before + np.cumsum(windows.lengths) - windows.lengths
            locations = windows.locations(begin, int(rows.sum()))
            starts[rows] = [shard_starts[shard] + start for shard, start in locations]
            tokens_before += windows.lengths.sum()
        return starts

    def places(self, first: int, count: int) -> list[Place]:
        """Return the positions of sequences first .. first + count - 1."""
        places: dict[int, Place] = {}
        for name, (windows, rows, begin) in zip(self.names, self._by_dataset(first, count), strict=True):
            locations = windows.locations(begin, int(rows.sum()))
            for row, (shard, start) in zip(np.flatnonzero(rows).tolist(), locations, strict=True):
                places[row] = Place(name, shard, len(windows.shards), start)
        return [places[row] for row in range(count)]

    def epochs(self, i: int) -> dict[str, float]:
        """Return the number of epochs of each data set in the first i sequences."""
        counts = zip(self.names, self.training, self.split_counts(i), strict=True)
        return {name: count / windows.per_epoch for name, windows, count in counts}

    def describe(self, sequences: int) -> str:
        """Describe each data set in one line, for a run of this number of sequences."""
        lines = []
        for (dataset, _), weight, windows in zip(self.datasets, self.weights, self.training, strict=True):
            name, tokens = dataset.folder.name, [sum(map(len, split)) for split in (dataset.train, dataset.val)]
            masked = ", some of them masked" if windows.masked else ""
            share = f"{weight:.1%} of the sequences, " if len(self.weights) > 1 else ""
            lines.append(
                f"{name}: {tokens[0]:,} training and {tokens[1]:,} validation tokens, a vocabulary of "
                f"{dataset.vocab_size:,} ({self.tokenizer.kind}){masked}; "
                f"{share}{self.epochs(sequences)[name]:,.2f} epochs in total"
            )
        return "\n".join(lines)


def parse_mixture(dataset: str) -> list[tuple[str, float]]:
    """Parse names and weights: "a" is [("a", 1.0)], "a:0.7,b:0.3" is [("a", 0.7), ("b", 0.3)]. Raises DatasetError."""
    mixture = []
    for part in dataset.split(","):
        name, colon, weight = part.strip().rpartition(":")
        try:
            mixture.append((name, float(weight)) if colon else (weight, 1.0))
        except ValueError:  # the colon belongs to a path on Windows
            mixture.append((part.strip(), 1.0))
    if any(not name or not 0 < weight < float("inf") for name, weight in mixture):
        raise DatasetError(f"dataset={dataset}: write NAME, or several as NAME:WEIGHT,NAME:WEIGHT with weights above 0")
    total, (name, smallest) = sum(weight for _, weight in mixture), min(mixture, key=lambda item: item[1])
    if total == float("inf"):
        raise DatasetError(f"dataset={dataset}: the sum of the weights is infinite; use smaller weights")
    if smallest * SHARE_UNITS < total:
        raise DatasetError(
            f"dataset={dataset}: {name} would have less than 1 of {SHARE_UNITS:,} sequences, the minimum share; "
            f"use a larger weight, or remove it"
        )
    return mixture
