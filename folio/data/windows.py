"""Which sequence comes when: the windows that training and validation take from shards, and mixtures of data sets.

Dimensions: B batch, T time (block_size), N shards. Arrays of tokens are int64 numpy arrays. This module does not import
torch.
"""

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from folio.base.randomness import hash64, permute
from folio.data.shards import Dataset, DatasetError, PromptFormat, Shard

SHARE_UNITS = 1 << 20  # of a mixture: shares are whole numbers of these, and the smallest one is 1
Location = tuple[int, int]  # where a window begins: the number of the shard, and the index of the token in it


class Place(NamedTuple):
    """Where a sequence of a mixture begins."""

    dataset: str
    shard: int  # its number in the data set's training shards, of which there are `shards`
    shards: int
    offset: int  # the index of the sequence's first token in the shard


def check_ids(largest: int, vocab_size: int) -> None:
    """Raise DatasetError if a token id is outside the vocabulary."""
    if largest >= vocab_size:
        raise DatasetError(
            f"token id {largest} in the shards is outside the vocabulary of {vocab_size}: "
            f"the shards are damaged, or were made with another tokenizer; prepare the data set again"
        )


class _Windows:
    """Base class of training and validation windows: gathers windows of tokens from a list of shards."""

    def __init__(self, shards: list[Shard], block_size: int, vocab_size: int):
        self.shards, self.block_size, self.vocab_size = shards, block_size, vocab_size
        self.ids = [shard.ids for shard in shards]
        self.lengths = np.array([len(ids) for ids in self.ids])  # (N,)
        self.masked = any(shard.mask is not None for shard in shards)

    def gather(self, locations: list[Location], inside: bool) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, (B, T) each, of the windows at these locations. A target that does not count is -1.

        inside: every window ends inside its shard. Otherwise, inputs and targets after the end of the shard are -1.
        """
        window_length = self.block_size + 1
        ids = np.empty((len(locations), window_length), dtype=np.int64)
        for row, (shard, start) in zip(ids, locations, strict=True):  # one slice per row is faster than one index
            tokens = self.ids[shard][start : start + window_length]
            if inside:
                row[:] = tokens
            else:
                row[: len(tokens)] = tokens
                row[len(tokens) :] = -1
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
    """The endless stream of training sequences, in which sequence i depends only on (seed, i).

    sampling="epoch": in each epoch, every shard is cut at a random offset into n = max(1, (len - T) // T) windows that
    do not overlap. The epoch takes each window once, in a shuffled order. sampling="random": as in nanoGPT, each
    sequence starts anywhere with equal probability, with replacement. A window never crosses the end of a shard. A
    shard with fewer than T + 1 tokens is not used. Raises DatasetError if all shards are that short.
    """

    AHEAD = 4096  # how many sequences to locate at a time; this changes only the speed

    def __init__(self, shards: list[Shard], block_size: int, vocab_size: int, seed: int, sampling: str):
        super().__init__(shards, block_size, vocab_size)
        if sampling not in ("epoch", "random"):
            raise ValueError(f"sampling={sampling!r}: TrainingWindows.locate has no such order")
        self.seed, self.sampling = seed, sampling
        T, lengths = block_size, self.lengths
        if lengths.max() < T + 1:
            raise DatasetError(
                f"the longest shard of the training data has {lengths.max():,} tokens, fewer than block_size + 1 = "
                f"{T + 1:,}: use a smaller --block_size, or more text"
            )
        usable = lengths >= T + 1
        choices = np.maximum(1, (lengths - T) // T) if sampling == "epoch" else lengths - T
        self.counts = np.where(usable, choices, 0)  # windows ("epoch") or possible starts ("random") per shard, (N,)
        self.ends = np.cumsum(self.counts)
        self.per_epoch = int(self.ends[-1])  # sequences per epoch
        self.located: tuple[range, list[Location]] = (range(0), [])  # sequences, and the location of each

    def locate(self, i: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The shard and the index of the first token of each sequence i, (B,) each."""
        i = np.asarray(i, dtype=np.uint64)
        if self.sampling == "random":
            choice = (hash64(self.seed, i) % np.uint64(self.per_epoch)).astype(np.int64)
            shard = np.searchsorted(self.ends, choice, side="right")
            return shard, choice - (self.ends - self.counts)[shard]
        shard, start = np.empty(len(i), dtype=np.int64), np.empty(len(i), dtype=np.int64)
        epochs, positions = np.divmod(i, np.uint64(self.per_epoch))
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            shard[of_epoch], start[of_epoch] = self._locate_in_epoch(epoch, positions[of_epoch])
        return shard, start

    def _locate_in_epoch(self, epoch: np.uint64, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The shard and the index of the first token of the windows at these positions of an epoch, (B,) each."""
        choice = permute(positions, self.per_epoch, hash64(self.seed, epoch)).astype(np.int64)
        shard = np.searchsorted(self.ends, choice, side="right")
        window = choice - (self.ends - self.counts)[shard]  # its number in the shard
        T, n = self.block_size, self.counts[shard]
        offsets = np.minimum(T, self.lengths[shard] - n * T).astype(np.uint64)  # how many offsets are possible
        offset = (hash64(self.seed, epoch, shard) % offsets).astype(np.int64)
        return shard, offset + window * T

    def locations(self, first: int, count: int) -> list[Location]:
        """The locations of sequences first .. first + count - 1."""
        sequences, locations = self.located
        if not (sequences.start <= first and first + count <= sequences.stop):
            sequences = range(first, first + max(count, self.AHEAD))
            shard, start = self.locate(np.arange(sequences.start, sequences.stop))
            locations = list(zip(shard.tolist(), start.tolist(), strict=True))
            self.located = sequences, locations
        return locations[first - sequences.start : first - sequences.start + count]

    def batch(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, (B, T) each, of sequences first .. first + count - 1. A target of -1 does not count."""
        return self.gather(self.locations(first, count), inside=True)


class ValidationWindows(_Windows):
    """Fixed windows, the same at each evaluation. Every token except the first of each shard is a target once.

    max_windows: take only this many windows, evenly spaced.
    """

    def __init__(self, shards: list[Shard], block_size: int, vocab_size: int, max_windows: int | None = None):
        super().__init__(shards, block_size, vocab_size)
        counts = -(-(self.lengths - 1) // block_size)  # windows per shard, (N,)
        self.ends = np.cumsum(counts)
        self.starts = self.ends - counts
        total = int(self.ends[-1])
        if not total:
            raise DatasetError("the validation data has fewer than 2 tokens: use more text")
        selected = min(total, max_windows or total)
        self.chosen = np.arange(selected) * total // selected
        if self.masked and not any((y != -1).any() for _, y in self.batches(1)):
            raise DatasetError(
                "no token of the validation data counts as a target, so there is no validation loss: use more text, "
                "or a larger --eval_iters"
            )

    def batches(self, batch_size: int, rank: int = 0, ranks: int = 1) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Inputs and targets, (batch_size, T) each. After the end of the data, targets are -1 and inputs 0.

        With several ranks, each takes every ranks-th batch. All get the same number; the last batches may be empty.
        """
        for first in range(0, len(self.chosen), ranks * batch_size):
            window = self.chosen[first + rank * batch_size :][:batch_size]
            shard = np.searchsorted(self.ends, window, side="right")
            start = (window - self.starts[shard]) * self.block_size
            x, y = self.gather(list(zip(shard.tolist(), start.tolist(), strict=True)), inside=False)
            padding = np.full((batch_size - len(x), self.block_size), -1)
            yield np.maximum(np.concatenate([x, padding]), 0), np.concatenate([y, padding])


class Mixture:
    """One or more data sets as one endless stream of training sequences, and their validation windows.

    datasets: each with its weight, which is normalized to its share of the sequences. Which data set gives sequence i
    depends only on i: of the first i sequences, the first data set gives floor(i * share), the second data set its
    share of the others, and so on. So each batch is as close to the shares as possible. Raises DatasetError if the
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
        self.validation_tokens = sum(len(windows.chosen) for windows in self.validation.values()) * block_size
        self.vocab_size = first.vocab_size
        self.hash = first.hash if len(datasets) == 1 else self._hash_of_all()

    @property
    def prompt_format(self) -> PromptFormat | None:
        """How its prompts are written: as chats if a data set has chats. None: all data sets are text."""
        formats = {dataset.prompt_format for dataset, _ in self.datasets} - {None}
        return "chat" if "chat" in formats else next(iter(formats), None)

    def _hash_of_all(self) -> str:
        """A hash of the content and the share of each data set."""
        parts = [f"{dataset.hash} {share}" for (dataset, _), share in zip(self.datasets, self.shares, strict=True)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def split_counts(self, i: int | np.ndarray) -> list[Any]:
        """How many of the first i sequences come from each data set."""
        counts, remaining_shares = [], sum(self.shares)
        for share in self.shares:
            counts.append(i * share // remaining_shares)
            i, remaining_shares = i - counts[-1], remaining_shares - share
        return counts

    def batch(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, (B, T) each, of sequences first .. first + count - 1. A target of -1 does not count."""
        if len(self.training) == 1:
            return self.training[0].batch(first, count)
        x, y = np.empty((2, count, self.block_size), dtype=np.int64)
        for windows, rows, begin in self._by_dataset(first, count):
            x[rows], y[rows] = windows.batch(begin, int(rows.sum()))
        return x, y

    def _by_dataset(self, first: int, count: int) -> Iterator[tuple[TrainingWindows, np.ndarray, int]]:
        """For each data set: its windows, which of these sequences it gives, (B,) bool, and the number of the first one
        in its own stream.
        """
        counts = self.split_counts(np.arange(first, first + count + 1))  # (B + 1,) for each data set
        for windows, given in zip(self.training, counts, strict=True):
            yield windows, np.diff(given) == 1, int(given[0])

    def all_tokens(self) -> np.ndarray:
        """The training tokens of all shards, int32. Raises DatasetError for an id outside the vocabulary."""
        tokens = np.concatenate([ids for windows in self.training for ids in windows.ids], dtype=np.int32)
        check_ids(int(tokens.max()), self.vocab_size)
        return tokens

    def starts(self, first: int, count: int) -> np.ndarray:
        """Where sequences first .. first + count - 1 begin in `all_tokens`, (B,)."""
        starts, tokens_before = np.empty(count, dtype=np.int64), 0
        for windows, rows, begin in self._by_dataset(first, count):
            shard_starts = tokens_before + np.cumsum(windows.lengths) - windows.lengths
            locations = windows.locations(begin, int(rows.sum()))
            starts[rows] = [shard_starts[shard] + start for shard, start in locations]
            tokens_before += windows.lengths.sum()
        return starts

    def places(self, first: int, count: int) -> list[Place]:
        """Where sequences first .. first + count - 1 begin."""
        places: dict[int, Place] = {}
        for name, (windows, rows, begin) in zip(self.names, self._by_dataset(first, count), strict=True):
            locations = windows.locations(begin, int(rows.sum()))
            for row, (shard, start) in zip(np.flatnonzero(rows).tolist(), locations, strict=True):
                places[row] = Place(name, shard, len(windows.shards), start)
        return [places[row] for row in range(count)]

    def epochs(self, i: int) -> dict[str, float]:
        """How many epochs of each data set the first i sequences are."""
        counts = zip(self.names, self.training, self.split_counts(i), strict=True)
        return {name: count / windows.per_epoch for name, windows, count in counts}

    def described(self, sequences: int) -> str:
        """One line per data set, for a run of this many sequences."""
        lines = []
        for (dataset, _), weight, windows in zip(self.datasets, self.weights, self.training, strict=True):
            name, tokens = dataset.folder.name, [sum(map(len, split)) for split in (dataset.train, dataset.val)]
            masked = ", of which some do not count" if windows.masked else ""
            share = f"{weight:.1%} of the sequences, " if len(self.weights) > 1 else ""
            lines.append(
                f"{name}: {tokens[0]:,} training and {tokens[1]:,} validation tokens, a vocabulary of "
                f"{dataset.vocab_size:,} ({self.tokenizer.kind}){masked}; "
                f"{share}{self.epochs(sequences)[name]:,.2f} epochs in total"
            )
        return "\n".join(lines)


def parse_mixture(dataset: str) -> list[tuple[str, float]]:
    """Names and weights: "a" is [("a", 1.0)], "a:0.7,b:0.3" is [("a", 0.7), ("b", 0.3)]. Raises DatasetError."""
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
        raise DatasetError(f"dataset={dataset}: the sum of the weights is infinite; write smaller ones")
    if smallest * SHARE_UNITS < total:
        raise DatasetError(
            f"dataset={dataset}: {name} would give less than 1 of {SHARE_UNITS:,} sequences, the smallest share; "
            f"use a larger weight, or leave it out"
        )
    return mixture
