"""Which sequence comes when: the windows that training and validation take from shards, and mixtures of data sets.

Dimensions: B batch, T time (block_size). Token arrays are int64 numpy; nothing here needs torch.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from folio.randomness import hash64, permute
from folio.shards import Dataset, DatasetError, Shard


def check_ids(largest: int, vocab_size: int) -> None:
    """Raise DatasetError where a token id does not fit the vocabulary."""
    if largest >= vocab_size:
        raise DatasetError(
            f"token id {largest} in the shards is outside the vocabulary of {vocab_size}: "
            f"the shards are damaged, or were made with another tokenizer; prepare the data set again"
        )


class _Windows:
    """What training and validation share: gathering windows of tokens out of a list of shards."""

    def __init__(self, shards: list[Shard], block_size: int, vocab_size: int):
        self.shards, self.block_size, self.vocab_size = shards, block_size, vocab_size
        self.ids = [shard.ids for shard in shards]
        self.lengths = np.array([len(ids) for ids in self.ids])
        self.masked = any(shard.mask is not None for shard in shards)

    def gather(self, places: list[tuple[int, int]], inside: bool) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, (B, T) each, from these (shard, first token). Targets that do not count are -1.

        inside: no window goes past its shard's end; else inputs and targets there are -1.
        """
        n = self.block_size + 1
        ids = np.empty((len(places), n), dtype=np.int64)
        for row, (s, at) in zip(ids, places, strict=True):  # a slice a row is quicker than one index of all elements
            found = self.ids[s][at : at + n]
            if inside:
                row[:] = found
            else:
                row[: len(found)], row[len(found) :] = found, -1
        check_ids(ids.max(initial=0), self.vocab_size)
        x, y = ids[:, :-1], ids[:, 1:]
        if self.masked:
            y = y.copy()
            for row, (s, at) in zip(y, places, strict=True):
                mask = self.shards[s].mask
                if mask is not None:
                    counted = mask[at + 1 : at + 1 + len(row)]
                    row[: len(counted)][counted == 0] = -1
        return x, y


class TrainingWindows(_Windows):
    """The endless stream of training sequences, in which sequence i follows from (seed, i) alone.

    sampling="epoch": each epoch cuts every shard, from a phase drawn anew, into n = max(1, (len - T) // T) windows
    that do not overlap, and takes them all once in a shuffled order. sampling="random": nanoGPT's draws, any start with
    equal probability, with replacement. A window never crosses a shard; a shard of fewer than T + 1 tokens is not used.
    Raises DatasetError when no shard is that long.
    """

    AHEAD = 4096  # sequences that are located at a time; it changes the speed and nothing else

    def __init__(self, shards: list[Shard], block_size: int, vocab_size: int, seed: int, sampling: str):
        super().__init__(shards, block_size, vocab_size)
        self.seed, self.sampling = seed, sampling
        T, lengths = block_size, self.lengths
        if lengths.max() < T + 1:
            raise DatasetError(
                f"the training data has {lengths.max():,} tokens in its longest shard, fewer than block_size + 1 = "
                f"{T + 1:,}: take a smaller --block_size, or more text"
            )
        usable = lengths >= T + 1
        choices = np.maximum(1, (lengths - T) // T) if sampling == "epoch" else lengths - T
        self.counts = np.where(usable, choices, 0)  # windows, or starts, a shard
        self.ends = np.cumsum(self.counts)
        self.per_epoch = int(self.ends[-1])  # sequences an epoch
        self.located: tuple[range, list[tuple[int, int]]] = (range(0), [])  # sequences, and the place of each

    def locate(self, i: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Shard and first token of each sequence number, (B,) each."""
        i = np.asarray(i, dtype=np.uint64)
        if self.sampling == "random":
            choice = (hash64(self.seed, i) % np.uint64(self.per_epoch)).astype(np.int64)
            shard = np.searchsorted(self.ends, choice, side="right")
            return shard, choice - (self.ends - self.counts)[shard]
        shard, start = np.empty(len(i), dtype=np.int64), np.empty(len(i), dtype=np.int64)
        epochs, places = np.divmod(i, np.uint64(self.per_epoch))
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            choice = permute(places[of_epoch], self.per_epoch, hash64(self.seed, epoch)).astype(np.int64)
            found = np.searchsorted(self.ends, choice, side="right")
            nth = choice - (self.ends - self.counts)[found]  # which window of its shard
            T, n = self.block_size, self.counts[found]
            phases = np.minimum(T, self.lengths[found] - n * T).astype(np.uint64)
            phase = (hash64(self.seed, epoch, found) % phases).astype(np.int64)
            shard[of_epoch], start[of_epoch] = found, phase + nth * T
        return shard, start

    def places(self, first: int, count: int) -> list[tuple[int, int]]:
        """Shard and first token of sequences first .. first + count - 1."""
        known, places = self.located
        if not (known.start <= first and first + count <= known.stop):
            known = range(first, first + max(count, self.AHEAD))
            shard, start = self.locate(np.arange(known.start, known.stop))
            self.located = known, places = known, list(zip(shard.tolist(), start.tolist(), strict=True))
        return places[first - known.start : first - known.start + count]

    def batch(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Sequences first .. first + count - 1: inputs and targets, (B, T) each; -1 is a target that does not count."""
        return self.gather(self.places(first, count), inside=True)


class ValidationWindows(_Windows):
    """Fixed windows, the same at each evaluation, in which every token but a shard's first is predicted once.

    With max_windows, that many of them, spread evenly.
    """

    def __init__(self, shards: list[Shard], block_size: int, vocab_size: int, max_windows: int | None = None):
        super().__init__(shards, block_size, vocab_size)
        counts = -(-(self.lengths - 1) // block_size)
        self.ends = np.cumsum(counts)
        self.starts = self.ends - counts
        total = int(self.ends[-1])
        if not total:
            raise DatasetError("the validation data has fewer than 2 tokens: take more text")
        taken = min(total, max_windows or total)
        self.chosen = np.arange(taken) * total // taken
        if self.masked and not any((y != -1).any() for _, y in self.batches(1)):
            raise DatasetError(
                "no token of the validation data counts as a target, so there is no validation loss: take more text, "
                "or more --eval_iters"
            )

    def batches(self, batch_size: int, rank: int = 0, ranks: int = 1) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Inputs and targets, (batch_size, T) each. Where the data ends, targets are -1 and inputs 0.

        Of several ranks each takes every `ranks`-th batch, as many as the others, the last of which may be empty.
        """
        for first in range(0, len(self.chosen), ranks * batch_size):
            window = self.chosen[first + rank * batch_size :][:batch_size]
            shard = np.searchsorted(self.ends, window, side="right")
            start = (window - self.starts[shard]) * self.block_size
            x, y = self.gather(list(zip(shard.tolist(), start.tolist(), strict=True)), inside=False)
            rest = np.full((batch_size - len(x), self.block_size), -1)
            yield np.maximum(np.concatenate([x, rest]), 0), np.concatenate([y, rest])


class Mixture:
    """One or more data sets as one endless stream of training sequences, and their validation windows.

    Each set has its share, and sequence i follows from i alone: of the first i sequences, the first set gives
    floor(i * share); of the others, the second set its share of them; and so on. So each batch holds the sets as evenly
    as it can. Raises DatasetError for sets of different tokenizers.
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
            raise DatasetError(f"a mixture takes each data set once, under a name of its own: {', '.join(self.names)}")
        for dataset, _ in datasets[1:]:
            if (other := dataset.load_tokenizer()).hash != self.tokenizer.hash:
                raise DatasetError(
                    f"{dataset.folder} was made with another tokenizer ({other.kind}, {other.vocab_size:,} tokens) "
                    f"than {first.folder} ({self.tokenizer.kind}, {self.tokenizer.vocab_size:,} tokens), so they "
                    f"cannot be mixed; prepare it again with --tokenizer={first.folder}"
                )
        self.weights = [weight / total for _, weight in datasets]
        self.shares = [max(1, round(weight * (1 << 20))) for weight in self.weights]
        self.training = [TrainingWindows(d.train, block_size, d.vocab_size, seed, sampling) for d, _ in datasets]
        self.validation = {
            d.folder.name: ValidationWindows(d.val, block_size, d.vocab_size, max_val_windows) for d, _ in datasets
        }
        self.masked = any(windows.masked for windows in self.training)
        self.training_tokens = int(sum(windows.lengths.sum() for windows in self.training))
        self.validation_tokens = sum(len(windows.chosen) for windows in self.validation.values()) * block_size
        self.vocab_size = first.vocab_size
        parts = [f"{dataset.hash} {share}" for (dataset, _), share in zip(datasets, self.shares, strict=True)]
        self.hash = first.hash if len(datasets) == 1 else hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def division(self, i: int | np.ndarray) -> list[Any]:
        """How many of the first i sequences each set gives."""
        counts, rest = [], sum(self.shares)
        for share in self.shares:
            counts.append(i * share // rest)
            i, rest = i - counts[-1], rest - share
        return counts

    def batch(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Sequences first .. first + count - 1: inputs and targets, (B, T) each; -1 is a target that does not count."""
        if len(self.training) == 1:
            return self.training[0].batch(first, count)
        x, y = np.empty((2, count, self.block_size), dtype=np.int64)
        for windows, rows, begin in self.shared_out(first, count):
            x[rows], y[rows] = windows.batch(begin, int(rows.sum()))
        return x, y

    def shared_out(self, first: int, count: int) -> Iterator[tuple[TrainingWindows, np.ndarray, int]]:
        """Each set, which of these sequences it gives, (B,) of bool, and the number of the first in its own stream."""
        for windows, given in zip(self.training, self.division(np.arange(first, first + count + 1)), strict=True):
            yield windows, np.diff(given) == 1, int(given[0])

    def all_tokens(self) -> np.ndarray:
        """The training tokens of all sets, shard after shard, int32. Raises DatasetError for one that is no token."""
        tokens = np.concatenate([ids for windows in self.training for ids in windows.ids], dtype=np.int32)
        check_ids(int(tokens.max()), self.vocab_size)
        return tokens

    def starts(self, first: int, count: int) -> np.ndarray:
        """Where sequences first .. first + count - 1 begin in `all_tokens`, (B,)."""
        starts, before = np.empty(count, dtype=np.int64), 0
        for windows, rows, begin in self.shared_out(first, count):
            shards = before + np.cumsum(windows.lengths) - windows.lengths  # where each begins
            starts[rows] = [shards[s] + at for s, at in windows.places(begin, int(rows.sum()))]
            before += windows.lengths.sum()
        return starts

    def epochs(self, i: int) -> dict[str, float]:
        """How often each set has been gone through after i sequences."""
        given = zip(self.names, self.training, self.division(i), strict=True)
        return {name: n / windows.per_epoch for name, windows, n in given}

    def described(self, sequences: int) -> str:
        """A line a set, for a run of so many sequences."""
        lines = []
        for (dataset, _), weight, windows in zip(self.datasets, self.weights, self.training, strict=True):
            name, tokens = dataset.folder.name, [sum(map(len, split)) for split in (dataset.train, dataset.val)]
            lines.append(
                f"{name}: {tokens[0]:,} training and {tokens[1]:,} validation tokens, a vocabulary of "
                f"{dataset.vocab_size:,} ({self.tokenizer.kind}){', of which some do not count' * windows.masked}; "
                f"{f'{weight:.1%} of the sequences, ' * (len(self.weights) > 1)}"
                f"{self.epochs(sequences)[name]:,.2f} epochs in all"
            )
        return "\n".join(lines)


def parse_mixture(dataset: str) -> list[tuple[str, float]]:
    """Names and weights: "a" is [("a", 1.0)], "a:0.7,b:0.3" both with theirs. Raises DatasetError."""
    found = []
    for part in dataset.split(","):
        name, colon, weight = part.strip().rpartition(":")
        try:
            found.append((name, float(weight)) if colon else (weight, 1.0))
        except ValueError:  # the colon of a path on Windows
            found.append((part.strip(), 1.0))
    if any(not name or not 0 < weight < float("inf") for name, weight in found):
        raise DatasetError(f"dataset={dataset}: write NAME, or several as NAME:WEIGHT,NAME:WEIGHT with weights above 0")
    return found
