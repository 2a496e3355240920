"""Windows of tokens for training and validation, their order, and mixtures of data sets.

Dimensions: B batch, T time (block_size), N shards. Arrays of tokens are int64 numpy arrays. This module does not import
torch.
"""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from folio.base.number_format import counted
from folio.base.randomness import hash64, permute
from folio.data.shards import READ_AT_ONCE, Dataset, DatasetError, PromptFormat, Shard

WINDOWS_VERSION = 2  # of the training order "epoch" and of the validation windows; recorded in runs
SHARE_UNITS = 1 << 20  # shares in a mixture are integer multiples of 1 / SHARE_UNITS
TARGETS_PER_GAP = 200  # an epoch leaves out at most one target in 200 to shift the phase of its windows
MEAN_GAP = 4  # tokens between two segments of a long shard
MIN_SEGMENTS = 32  # of a shard that is too short for gaps of MEAN_GAP
VALIDATION_SEGMENT = 32  # mean number of validation windows of one phase
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


def useful_starts(shard: Shard, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where the windows of a shard start that have a target: ranges of tokens, begins and ends, (R,) each.

    Without a mask, a window can start anywhere, so there is one range. The ranges are empty if the shard is too short.
    """
    T, end = block_size, max(0, len(shard) - block_size)  # a window has T + 1 tokens
    if shard.mask is None or not end:
        return np.array([0]), np.array([end])
    # Target p is in the windows that start in p - T .. p - 1. Between targets that are more than T apart, windows have
    # none. The first token of a shard is only an input.
    before, after, last = [], [], -T  # targets on both sides of such a gap, and the last target so far (at first, none)
    for first in range(0, len(shard), READ_AT_ONCE):
        targets = first + np.flatnonzero(shard.mask[first : first + READ_AT_ONCE])
        targets = np.concatenate([[last], targets[targets > 0]])
        gaps = np.flatnonzero(np.diff(targets) > T)
        before.append(targets[gaps])
        after.append(targets[gaps + 1])
        last = targets[-1]
    begins, ends = np.concatenate(after) - T, np.concatenate([*before, [last]])[1:]
    return np.maximum(begins, 0), np.minimum(ends, end)


class _Windows:
    """Base class of training and validation windows."""

    def __init__(self, shards: list[Shard], block_size: int, vocab_size: int):
        self.shards, self.block_size, self.vocab_size = shards, block_size, vocab_size
        self.ids = [shard.ids for shard in shards]
        self.lengths = np.array([len(ids) for ids in self.ids])  # (N,)
        self.masked = any(shard.mask is not None for shard in shards)

    def gather(self, locations: list[Location], lengths: Sequence[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs and targets, (B, T) each, at these locations. Masked targets are -1.

        lengths: the number of targets in each window; after them, inputs and targets are -1. None: T.
        """
        ids = np.full((len(locations), self.block_size + 1), -1, dtype=np.int64)
        lengths = lengths or [self.block_size] * len(locations)
        for row, (shard, start), length in zip(ids, locations, lengths, strict=True):
            row[: length + 1] = self.ids[shard][start : start + length + 1]  # faster than an index array
        check_ids(ids.max(initial=0), self.vocab_size)
        x, y = ids[:, :-1], ids[:, 1:]  # every position predicts the next token: T predictions from T + 1 tokens
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

    sampling="epoch": in each epoch, every shard is divided from a random offset into n windows that do not overlap, and
    each window is used once, in random order. Without gaps, all of them would have the same phase: in text whose period
    divides T, such as a table, position p of every window would hold the same column, and the model would learn the
    columns of the epoch's positions. Therefore small random gaps, which differ in each epoch, shift the phase from
    segment to segment of the shard. sampling="random": as in nanoGPT, sequences start at random positions, with
    replacement. Windows do not cross the end of a shard. Shards with fewer than T + 1 tokens are not used.

    Windows without targets, all of whose text is masked, do not occur in either order: it is the order of a shard that
    has only the other starts (see `useful_starts`). So each target is still in at most one window per epoch.

    Raises DatasetError if all shards are too short, or have no targets.
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
                f"the longest training shard has {counted(int(lengths.max()), 'token')}, fewer than block_size + 1 = "
                f"{T + 1:,}: use a smaller --block_size, or more text"
            )
        ranges = [useful_starts(shard, T) for shard in shards]
        starts = np.array([int((end - begin).sum()) for begin, end in ranges])  # useful ones per shard, (N,)
        if not starts.any():
            raise DatasetError("no token of the training data counts as a target, so there is nothing to learn")
        self.useful = int(starts.sum())
        self.without_targets = int(np.maximum(0, lengths - T).sum()) - self.useful  # other starts, which are not drawn
        # If only the useful starts are numbered, through all shards: the number at the end of each range, and what to
        # add to a number in the range for its offset in the shard, (R,) each; the first number of each shard, (N,).
        begins, ends = (np.concatenate(bounds) for bounds in zip(*ranges, strict=True))
        self.range_ends = np.cumsum(ends - begins)
        self.range_shifts = ends - self.range_ends
        self.first_numbers = np.cumsum(starts) - starts
        windows = np.maximum(1, starts * TARGETS_PER_GAP // ((TARGETS_PER_GAP + 1) * T))
        counts = windows if sampling == "epoch" else starts
        self.counts = np.where(starts > 0, counts, 0)  # windows ("epoch") or useful starts ("random") per shard, (N,)
        # Per shard, (N,): the tokens in all gaps, the number of segments, and that of possible offsets.
        unused = starts + T - windows * T  # for the offset, the gaps, and the end
        self.gaps = np.clip(windows * T // TARGETS_PER_GAP, 0, np.maximum(0, unused - 1))
        self.segments = np.clip(self.gaps // MEAN_GAP, np.minimum(windows, MIN_SEGMENTS), windows)
        self.offsets = np.clip(unused - self.gaps, 1, T)
        self.ends = np.cumsum(self.counts)
        self.per_epoch = int(self.ends[-1])  # sequences per epoch
        self.located: tuple[range, list[Location]] = (range(0), [])  # sequences and their locations

    def locate(self, i: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the shard and the offset of the first token of each sequence i, (B,) each."""
        i = np.asarray(i, dtype=np.uint64)
        if self.sampling == "random":
            position = (hash64(self.seed, i) % np.uint64(self.per_epoch)).astype(np.int64)
            shard = np.searchsorted(self.ends, position, side="right")
            return shard, self._useful_start(shard, position - (self.ends - self.counts)[shard])
        shard, start = np.empty(len(i), dtype=np.int64), np.empty(len(i), dtype=np.int64)
        epochs, positions = np.divmod(i, np.uint64(self.per_epoch))
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            shard[rows], start[rows] = self._locate_in_epoch(epoch, positions[rows])
        return shard, start

    def _locate_in_epoch(self, epoch: np.uint64, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the shard and the offset of the first token at these positions in an epoch, (B,) each."""
        # The order of an epoch is a permutation of its windows. It is a function that is computed for single positions,
        # not a shuffled list, so that any sequence can be found, and a run resumed, without the ones before.
        index = permute(positions, self.per_epoch, hash64(self.seed, epoch)).astype(np.int64)
        shard = np.searchsorted(self.ends, index, side="right")
        window = index - (self.ends - self.counts)[shard]  # index in the shard
        count, segments, gaps = self.counts[shard], self.segments[shard], self.gaps[shard]

        def draw(n: np.ndarray, *parts: np.ndarray | int) -> np.ndarray:
            """Random integers in [0, n), fixed by the seed, the epoch, the shard and `parts`."""
            return (hash64(self.seed, epoch, shard, *parts) % n.astype(np.uint64)).astype(np.int64)

        # A token at the beginning of a window is predicted from few tokens, one at the end from many. Another offset in
        # each epoch moves all windows, so that each token is learned with contexts of different lengths.
        offset = draw(self.offsets[shard])
        segment = (window * segments + draw(count, 1)) // count  # 0 to `segments`; the first and the last are shorter
        # The gaps before segment s have (s + u) / (segments + 1) of the tokens of all gaps, with a random u in [0, 1).
        gap = (segment * (gaps + 1) + draw(gaps + 1, 2, segment)) // (segments + 1)
        return shard, self._useful_start(shard, offset + window * self.block_size + gap)

    def _useful_start(self, shard: np.ndarray, n: np.ndarray) -> np.ndarray:
        """Return the offset of useful start n, from 0, in each shard. shard, n: (B,) each, as the result."""
        number = n + self.first_numbers[shard]
        return number + self.range_shifts[np.searchsorted(self.range_ends, number, side="right")]

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
        return self.gather(self.locations(first, count))


def divide(targets: int, block_size: int, shard: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide a shard into windows for evaluation. Returns the first token and the last target of each, (windows,) each.

    The shard is divided into segments of random lengths, fixed by its number, and each segment into windows of T
    targets, the last of which may be shorter. So the windows have many phases, as in training: with a single one, the
    loss on text whose period divides T would be that of one column at each position.
    """
    segments = max(1, targets // (VALIDATION_SEGMENT * block_size))
    inner = np.arange(1, segments)
    u = (hash64(shard, inner) % np.uint64(max(1, targets))).astype(np.int64)
    bounds = [0, *((inner * targets + u) // segments).tolist(), targets]
    starts = [np.arange(begin, end, block_size) for begin, end in pairwise(bounds)]
    stops = [np.minimum(start + block_size, end) for start, end in zip(starts, bounds[1:], strict=True)]
    return np.concatenate(starts), np.concatenate(stops)


class ValidationWindows(_Windows):
    """Fixed windows for evaluation. Every token except the first of each shard is a target exactly once.

    They are the same at each evaluation: random ones would add noise to the loss, which can be larger than the progress
    between two evaluations. See `divide` for the windows of a shard.

    max_tokens: the number of tokens to measure, in whole windows that are evenly spaced; None: all. `tokens` is the
    number of targets that are measured, masked ones included.
    """

    def __init__(self, shards: list[Shard], block_size: int, vocab_size: int, max_tokens: int | None = None):
        super().__init__(shards, block_size, vocab_size)
        targets = np.maximum(0, self.lengths - 1)
        windows = [divide(int(count), block_size, number) for number, count in enumerate(targets)]
        shard = np.repeat(np.arange(len(shards)), [len(start) for start, _ in windows])  # (windows,), as the next two
        start, stop = (np.concatenate(values) for values in zip(*windows, strict=True))
        if not len(shard):
            raise DatasetError("the validation data has fewer than 2 tokens: use more text")
        count = len(shard) if max_tokens is None else min(len(shard), max(1, max_tokens // block_size))
        selected = np.arange(count) * len(shard) // count
        self.is_limited = count < len(shard)
        self.locations = list(zip(shard[selected].tolist(), start[selected].tolist(), strict=True))
        self.window_lengths = (stop - start)[selected].tolist()
        self.tokens = sum(self.window_lengths)
        if self.masked and not any((y != -1).any() for _, y in self.batches(1)):
            raise DatasetError(
                "no token of the validation data counts as a target, so there is no validation loss: use more text, "
                "or a larger --eval_iters"
            )

    def batches(self, batch_size: int, rank: int = 0, ranks: int = 1) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield inputs and targets, (batch_size, T) each. After the end of a window, inputs are 0 and targets -1.

        Each rank gets every ranks-th batch. All ranks get the same number of batches; the last ones may be empty.
        """
        for first in range(0, len(self.locations), ranks * batch_size):
            rows = slice(first + rank * batch_size, first + (rank + 1) * batch_size)
            x, y = self.gather(self.locations[rows], self.window_lengths[rows])
            padding = np.full((batch_size - len(x), self.block_size), -1)
            yield np.maximum(np.concatenate([x, padding]), 0), np.concatenate([y, padding])


class Mixture:
    """An infinite stream of training sequences from one or more data sets, and their validation windows.

    datasets: each data set and its weight. Weights are normalized to shares of the sequences. The data set of sequence
    i depends only on i: the first i sequences include floor(i * share) from the first data set, the second one's share
    of the others, and so on, so that each batch is as close to the shares as possible. max_val_tokens: of each data
    set, see ValidationWindows. Raises DatasetError if the tokenizers differ.
    """

    def __init__(
        self,
        datasets: list[tuple[Dataset, float]],
        block_size: int,
        seed: int,
        sampling: str,
        max_val_tokens: int | None = None,
    ):
        first, total = datasets[0][0], sum(weight for _, weight in datasets)
        self.block_size, self.datasets = block_size, datasets
        self.tokenizer, *others = (dataset.load_tokenizer() for dataset, _ in datasets)
        self.names = [dataset.folder.name for dataset, _ in datasets]
        if len(set(self.names)) < len(self.names):
            raise DatasetError(f"a mixture needs data sets with different names: {', '.join(self.names)}")
        for (dataset, _), other in zip(datasets[1:], others, strict=True):
            if other.hash != self.tokenizer.hash:
                tokens, first_tokens = (counted(t.vocab_size, "token") for t in (other, self.tokenizer))
                raise DatasetError(
                    f"{dataset.folder} was made with another tokenizer ({other.kind}, {tokens}) than {first.folder} "
                    f"({self.tokenizer.kind}, {first_tokens}), so they cannot be mixed; prepare it again with "
                    f"--tokenizer={first.folder}"
                )
        if any(other.keep_line_ends for other in others):  # the model learns them from this data set
            self.tokenizer = self.tokenizer.with_keep_line_ends(True)
        self.weights = [weight / total for _, weight in datasets]
        self.shares = [max(1, round(weight * SHARE_UNITS)) for weight in self.weights]  # integers, for exact results
        self.training = [TrainingWindows(d.train, block_size, d.vocab_size, seed, sampling) for d, _ in datasets]
        self.limit_validation(max_val_tokens)
        self.masked = any(windows.masked for windows in self.training)
        self.without_targets = sum(windows.without_targets for windows in self.training)  # starts that are not drawn
        self.training_tokens = int(sum(windows.lengths.sum() for windows in self.training))
        self.vocab_size = first.vocab_size
        self.hash = first.hash if len(datasets) == 1 else self._combined_hash()

    def limit_validation(self, max_tokens: int | None) -> None:
        """Choose the validation windows. max_tokens: of each data set, see ValidationWindows."""
        self.validation = {
            dataset.folder.name: ValidationWindows(dataset.val, self.block_size, dataset.vocab_size, max_tokens)
            for dataset, _ in self.datasets
        }
        is_limited = any(windows.is_limited for windows in self.validation.values())
        self.max_val_tokens = max_tokens if is_limited else None

    @property
    def validation_tokens(self) -> int:
        """The number of targets of an evaluation."""
        return sum(windows.tokens for windows in self.validation.values())

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
            validation = self.validation[name]
            measured = f" ({validation.tokens:,} of them are evaluated)" if validation.is_limited else ""
            lines.append(
                f"{name}: {tokens[0]:,} training and {tokens[1]:,} validation tokens{measured}, a vocabulary of "
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
