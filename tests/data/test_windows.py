from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from folio.data import windows as windows_module
from folio.data.shards import Dataset, DatasetError, Shard
from folio.data.tokenizer import CharTokenizer
from folio.data.windows import (
    TARGETS_PER_GAP,
    VALIDATION_SEGMENT,
    Mixture,
    TrainingWindows,
    ValidationWindows,
    parse_mixture,
    useful_starts,
)
from tests.support.tolerances import binomial_range

T = 8


def shards(*lengths: int) -> list[Shard]:
    """Shards of distinct token ids."""
    ends = np.cumsum(lengths)
    return [Shard(np.arange(end - length, end, dtype="<u2")) for end, length in zip(ends, lengths, strict=True)]


def starts_of(windows: TrainingWindows, epoch: int) -> np.ndarray:
    """The first tokens of the windows of an epoch, in order of the text. For one shard."""
    begin = epoch * windows.per_epoch
    return np.sort(windows.locate(np.arange(begin, begin + windows.per_epoch))[1])


@pytest.mark.parametrize("lengths", [(100,), (T + 1,), (2 * T,), (2 * T - 1, 50, 3, 77), (9000, 1000)])
def test_each_window_occurs_once_per_epoch(lengths, seed):
    windows = TrainingWindows(shards(*lengths), T, 50_000, seed, "epoch")
    assert windows.per_epoch == sum(max(1, (n - T) * 200 // (201 * T)) for n in lengths if n > T)
    orders = set()
    for epoch in range(4):
        x, y = windows.batch(epoch * windows.per_epoch, windows.per_epoch)
        assert np.array_equal(x[:, 1:], y[:, :-1])
        assert (np.diff(x) == 1).all()  # no window crosses a shard
        assert len(set(y.ravel().tolist())) == y.size  # none overlap
        orders.add(tuple(x[:, 0].tolist()))
    assert len(orders) > 1 or windows.per_epoch <= 3


@pytest.mark.parametrize("length", [1000, 20_000, 65_000])
@pytest.mark.parametrize("size", [8, 64, 200, 256])
def test_the_gaps_of_an_epoch_have_at_most_one_target_in_200(length, size, seed):
    windows = TrainingWindows(shards(length), size, 65_536, seed, "epoch")
    places = set()
    for epoch in range(3):
        gaps = np.diff(starts_of(windows, epoch)) - size
        assert 0 <= gaps.min() and gaps.sum() <= windows.per_epoch * size / 200
        places.add(tuple(gaps))
    unused = length - 1 - windows.per_epoch * size
    assert unused < 2 * 1.005 * size + length / 200 + 1
    assert len(places) == 3 or length < 65_000  # the gaps differ between epochs


@pytest.mark.parametrize("size", [16, 64, 100, 128, 200, 256])
def test_windows_of_an_epoch_have_every_phase_of_periodic_text(size, seed):
    """An epoch had one phase. On lines of 32 bytes with block_size=64, position p of every window was the same column
    until the next epoch, which the model learned instead of the text: a validation loss of 3.392 instead of 1.032.
    """
    windows = TrainingWindows([Shard(np.zeros(500_000, dtype="<u2"))], size, 65_536, seed, "epoch")
    starts = windows.locate(np.arange(windows.per_epoch))[1]
    # The gap before each of 621 segments is a random one of 4 numbers. So only one of period / 4 segments can have a
    # given phase, and has it with probability 1 / 4. For a period of 64, these are 38 segments. 3 times the share of a
    # phase is 29 of them, which their number exceeds with probability 5e-12, and a smaller one for shorter periods.
    for period in range(2, 65):
        assert np.bincount(starts % period, minlength=period).max() <= 3 * len(starts) / period
    # The probability that 32 random phases are in 7 of the 32 is at most 32! / 7! / 25! * (7 / 32)**32 = 3e-15.
    for first in range(0, len(starts) - 32, 32):  # batches
        assert len(set((starts[first : first + 32] % 32).tolist())) >= 8


def test_epochs_use_every_offset(seed):
    windows = TrainingWindows(shards(4 * T), T, 1000, seed, "epoch")
    starts, _ = windows.batch(0, 600)
    assert set((starts[:, 0] % T).tolist()) == set(range(T))


@pytest.mark.parametrize("kind", ["epoch", "random", "mixture"])
def test_sequence_i_does_not_depend_on_the_batch(kind, seed):
    def windows_of(seed: int) -> TrainingWindows | Mixture:
        if kind == "mixture":
            return Mixture(sets(300, 400, 500, weights=(3, 2, 1)), T, seed, "epoch")
        return TrainingWindows(shards(300, 200), T, 1000, seed, kind)

    windows, late = windows_of(seed), 10**12 + 7
    all_at_once, _ = windows.batch(0, 96)
    for size in (1, 6):
        parts = [windows.batch(first, size)[0] for first in range(0, 96, size)]
        assert np.array_equal(all_at_once, np.concatenate(parts))
    assert np.array_equal(windows.batch(late, 5)[0][3:], windows.batch(late + 3, 2)[0])
    assert not np.array_equal(all_at_once, windows_of(seed + 1).batch(0, 96)[0])


def test_random_sampling_starts_anywhere(seed):
    windows = TrainingWindows(shards(T + 3, 5, T + 2), T, 1000, seed, "random")
    x, y = windows.batch(0, 5000)
    counts = np.bincount(x[:, 0])
    assert np.flatnonzero(counts).tolist() == [0, 1, 2, 16, 17]  # each leaves T + 1 tokens in its shard
    assert all(count in binomial_range(5000, 1 / 5, comparisons=5) for count in counts[counts > 0])
    assert np.array_equal(y, x + 1)


def test_the_order_without_masks_is_that_of_windows_version_2():
    """Runs are resumed and replayed with it. The places were recorded before windows without targets were left out."""
    places = {
        "epoch": [(0, 268), (2, 166), (2, 118), (2, 78), (2, 150), (0, 220), (2, 6), (2, 70), (0, 252), (2, 18)],
        "random": [(0, 59), (2, 92), (0, 29), (0, 56), (0, 141), (0, 220), (2, 57), (0, 222), (2, 5), (2, 168)],
    }
    for sampling, expected in places.items():
        assert TrainingWindows(shards(300, 5, 200), T, 1000, 1337, sampling).locations(50, 10) == expected


@pytest.mark.parametrize("lengths", [(100,), (T,), (2,), (50, 1, 17), (3000, 1000)])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_every_token_is_a_validation_target_once(lengths, batch_size):
    data = shards(*lengths)
    targets, windows = [], ValidationWindows(data, T, 5000)
    assert windows.tokens == sum(lengths) - len(lengths) and not windows.is_limited
    for x, y in windows.batches(batch_size):
        assert x.shape == y.shape == (batch_size, T) and x.min() >= 0
        targets += y[y != -1].tolist()
        assert np.array_equal(x[y != -1], y[y != -1] - 1)
    assert targets == [token for shard in data for token in shard.ids[1:].tolist()]


def test_limited_validation_windows_are_evenly_spaced_and_fixed():
    windows = ValidationWindows(shards(10 * T + 1), T, 1000, max_tokens=4 * T)
    first = [x[0, 0].item() // T for x, _ in windows.batches(1)]
    assert first == [0, 2, 5, 7] == [x[0, 0].item() // T for x, _ in windows.batches(1)]
    assert windows.tokens == 4 * T and windows.is_limited


def test_validation_windows_have_many_phases():
    """They had one, so a model that had learned the phase of its last epoch could have a loss that was far too low."""
    windows, segments = ValidationWindows(shards(60_000), 64, 65_536), 60_000 // (VALIDATION_SEGMENT * 64)
    starts = np.array([start for _, start in windows.locations])
    begins = starts[1:][np.diff(starts) != 64]  # of the segments after the first, at random places
    for period in (2, 32, 64):
        counts = np.bincount(begins % period, minlength=period)
        assert {*counts.tolist()} <= {*binomial_range(len(begins), 1 / period, comparisons=2 + 32 + 64)}
    assert len(starts) <= 60_000 // 64 + segments  # only the last window of a segment is short


def test_all_training_tokens_come_in_pieces():
    data = Mixture(sets(30, 41, weights=(1, 1)), T, 7, "epoch")
    pieces = list(data.token_pieces(size=16))
    assert [len(piece) for piece in pieces] == [16, 14, 16, 16, 9]
    assert pieces[0].dtype == np.uint16
    tokens = np.concatenate(pieces)
    for start, x in zip(data.starts(0, 6), data.batch(0, 6)[0], strict=True):
        assert tokens[start : start + T].tolist() == x.tolist()


def test_unusable_data_is_refused():
    outside = [Shard(np.full(100, 99, dtype="<u2"))]
    masked = [Shard(shard.ids, np.zeros(len(shard), np.uint8)) for shard in shards(100, 50)]
    with pytest.raises(DatasetError, match="token id 99 in the shards is outside the vocabulary of 50"):
        TrainingWindows(outside, T, 50, 1, "epoch").batch(0, 4)
    with pytest.raises(DatasetError, match="token id 99 in the shards is outside the vocabulary of 50"):
        damaged = Dataset(Path("a"), outside, shards(20), 50, "a", CharTokenizer("ab"))
        list(Mixture([(damaged, 1)], T, 1, "epoch").token_pieces())
    with pytest.raises(DatasetError, match=r"fewer than block_size \+ 1 = 9"):
        TrainingWindows(shards(T), T, 1000, 1, "epoch")
    with pytest.raises(DatasetError, match="fewer than 2 tokens"):
        ValidationWindows(shards(1), T, 1000)
    with pytest.raises(DatasetError, match="no token of the training data counts as a target"):
        TrainingWindows(masked, T, 1000, 1, "epoch")
    TrainingWindows([*masked, shards(50)[0]], T, 1000, 1, "epoch")
    with pytest.raises(ValueError, match="sampling='sorted'"):  # it was a mixture of the two orders
        TrainingWindows(shards(100), T, 1000, 1, "sorted")


def test_the_reads_per_step_do_not_depend_on_the_number_of_shards():
    class CountingArray(np.ndarray):
        def __getitem__(self, index):
            reads.append(index)
            return super().__getitem__(index)

    many = [Shard(np.arange(100, dtype="<u2").view(CountingArray)) for _ in range(10_000)]
    windows, reads = TrainingWindows(many, T, 1000, 1, "epoch"), []
    windows.batch(0, 16)
    reads.clear()
    windows.batch(16, 16)
    assert len(reads) == 16


def test_masked_targets_are_minus_one(seed):
    rng, data = np.random.default_rng(seed), shards(100, 77, 50)
    data[:2] = [Shard(shard.ids, rng.integers(2, size=len(shard)).astype(np.uint8)) for shard in data[:2]]
    counts = np.concatenate([data[0].mask, data[1].mask, np.ones(50)])  # indexed by token id
    x, y = TrainingWindows(data, T, 1000, seed, "epoch").batch(0, 60)
    assert np.array_equal(y, np.where(counts[x + 1] > 0, x + 1, -1))
    targets = np.concatenate([y[y != -1] for _, y in ValidationWindows(data, T, 1000).batches(5)])
    assert sorted(targets.tolist()) == [i for i in np.flatnonzero(counts) if i not in (0, 100, 177)]


def masked_shards(*lengths: int, seed: int, share: float = 0.03, run: int = 3) -> list[Shard]:
    """Shards of distinct token ids with a few runs of targets, at random places."""
    rng = np.random.default_rng(seed)
    starts = [rng.random(length) < share for length in lengths]
    masks = [np.convolve(start, np.ones(run))[: len(start)].clip(max=1).astype(np.uint8) for start in starts]
    return [Shard(shard.ids, mask) for shard, mask in zip(shards(*lengths), masks, strict=True)]


@pytest.mark.parametrize("at_once", [1, 7, 1 << 20])
@pytest.mark.parametrize("size", [1, 2, 8, 30])
def test_useful_starts_are_those_of_windows_with_targets(monkeypatch, at_once, size, seed):
    """Against a test of each window. The mask is read in pieces."""
    monkeypatch.setattr(windows_module, "READ_AT_ONCE", at_once)
    data = [*masked_shards(200, 90, size + 1, size, 1, seed=seed), *shards(50), Shard(np.arange(60), np.zeros(60))]
    for shard in [*data, Shard(np.arange(60), np.eye(60)[0]), Shard(np.arange(60), np.eye(60)[59])]:
        begins, ends = useful_starts(shard, size)
        mask = np.ones(len(shard)) if shard.mask is None else shard.mask
        expected = [start for start in range(len(shard) - size) if mask[start + 1 : start + 1 + size].any()]
        assert [start for begin, end in zip(begins, ends, strict=True) for start in range(begin, end)] == expected


@pytest.mark.parametrize("sampling", ["epoch", "random"])
def test_windows_without_targets_are_not_drawn(sampling, seed):
    """A window in a prompt that is longer than it had only masked text, and a batch of such windows had a loss of 0."""
    data = masked_shards(3000, 40, 700, seed=seed)
    windows = TrainingWindows(data, T, 5000, seed, sampling)
    x, y = windows.batch(0, 3 * windows.per_epoch)
    assert (y != -1).any(axis=1).all()
    starts = [shard.mask[start + 1 : start + 1 + T].any() for shard in data for start in range(len(shard) - T)]
    useful = sum(starts)
    assert windows.without_targets == len(starts) - useful > 0
    assert (np.diff(x) == 1).all()
    assert set(x[:, 0]) <= {int(i) for shard in data for i in shard.ids[: len(shard) - T]}
    if sampling == "random":
        return
    # Each target is used at most once. A start in a gap, before the first or after the last window leaves out at most
    # one: by TARGETS_PER_GAP, these are 1 in 201 starts and, as windows are whole, fewer than 2 T per shard.
    targets, left_out = sum(int(shard.mask[1:].sum()) for shard in data), useful / (TARGETS_PER_GAP + 1) + 3 * 2 * T
    for epoch in np.split(y, 3):
        used = epoch[epoch != -1]
        assert len(set(used.tolist())) == len(used) >= targets - left_out
    parts = np.concatenate([windows.batch(first, 1)[0] for first in range(50)])
    assert np.array_equal(parts, x[:50])


@pytest.mark.parametrize("sampling", ["epoch", "random"])
def test_masks_without_long_masked_text_do_not_change_the_order(sampling, seed):
    """So runs on pairs that fit are resumed with the order that they began with."""
    plain, T_apart = shards(400, 90), [(np.arange(n) % T == T - 1).astype(np.uint8) for n in (400, 90)]
    masked = [Shard(shard.ids, mask) for shard, mask in zip(plain, T_apart, strict=True)]
    one, other = (TrainingWindows(data, T, 1000, seed, sampling) for data in (plain, masked))
    assert other.without_targets == 0 and one.locations(0, 300) == other.locations(0, 300)


def sets(*lengths: int, weights: tuple[float, ...]) -> list[tuple[Dataset, float]]:
    """Data sets of distinct token ids with the same tokenizer."""
    tokenizer = CharTokenizer("".join(map(chr, range(1, 5000))))
    return [
        (Dataset(Path(f"set{k}"), [s], [Shard(s.ids[:20])], 4999, f"hash{k}", tokenizer), weight)
        for k, (s, weight) in enumerate(zip(shards(*lengths), weights, strict=True))
    ]


def test_a_mixture_keeps_line_ends_if_one_of_its_data_sets_does():
    """The tokenizer was the first data set's, so prompts lost the line ends that the model learned from another."""
    plain, kept = CharTokenizer("ab"), CharTokenizer("ab").with_keep_line_ends(True)
    for tokenizers, expected in (((plain, plain), False), ((plain, kept), True), ((kept, plain), True)):
        (first, weight), (second, _) = sets(30, 40, weights=(1, 1))
        both = zip((first, second), tokenizers, strict=True)
        mixed = [(replace(dataset, tokenizer=tokenizer), weight) for dataset, tokenizer in both]
        assert Mixture(mixed, T, 1, "epoch").tokenizer.keep_line_ends == expected
    assert not plain.keep_line_ends


@pytest.mark.parametrize("weights", [(0.3,), (0.7, 0.3), (1, 1), (5, 2, 1), (1e-3, 1)])
def test_each_data_set_has_its_share_of_the_first_n_sequences(weights, seed):
    data = Mixture(sets(*[400] * len(weights), weights=weights), T, seed, "epoch")
    x, _ = data.batch(0, 3000)
    which = x[:, 0] // 400  # data set of each sequence
    for n in (1, 10, 100, 3000):
        counts = np.bincount(which[:n], minlength=len(weights))
        assert np.abs(counts - n * np.array(weights) / sum(weights)).max() <= len(weights)
        assert data.split_counts(n) == counts.tolist()
    for k, (dataset, _) in enumerate(data.datasets):
        rows, windows = which == k, TrainingWindows(dataset.train, T, 4999, seed, "epoch")
        assert np.array_equal(x[rows], windows.batch(0, int(rows.sum()))[0])  # in the order without a mixture
        assert data.epochs(3000)[f"set{k}"] == rows.sum() / windows.per_epoch
    assert (data.hash == data.datasets[0][0].hash) == (len(weights) == 1)
    assert data.weights == [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize("sampling", ["epoch", "random"])
def test_places_are_the_positions_of_sequences_in_a_mixture(sampling, seed):
    (one, _), (two, _) = sets(300, 400, weights=(1, 1))
    two = replace(two, train=[Shard(two.train[0].ids[:150]), Shard(two.train[0].ids[150:])])
    data, shards_of = Mixture([(one, 3), (two, 2)], T, seed, sampling), {"set0": one.train, "set1": two.train}
    places, first_tokens = data.places(1000, 60), data.batch(1000, 60)[0][:, 0].tolist()
    assert [shards_of[place.dataset][place.shard].ids[place.offset] for place in places] == first_tokens
    assert {place[:2] for place in places} == {("set0", 0), ("set1", 0), ("set1", 1)}
    assert all(place.shards == len(shards_of[place.dataset]) for place in places)


def test_only_data_sets_with_the_same_tokenizer_and_different_names_can_be_mixed():
    (a, _), (b, _) = sets(100, 100, weights=(1, 1))
    other = Dataset(Path("other"), b.train, b.val, 3, "hash", CharTokenizer("abc"))
    with pytest.raises(DatasetError, match=r"other .*\(char, 3 .* than set0 \(char, 4,999.*--tokenizer=set0"):
        Mixture([(a, 1), (other, 1)], T, 1, "epoch")
    with pytest.raises(DatasetError, match="different names: set0, set0"):
        Mixture([(a, 1), (a, 1)], T, 1, "epoch")


NAMES = st.text("ab \\./", min_size=1).map(str.strip)


@given(st.lists(st.tuples(NAMES, st.floats(1e-2, 1e2) | st.none()), min_size=1, max_size=5))
@example([(r"C:\data\a", None)])
@example([(r"C:\data\a", 0.5), ("/data/b", 1.0)])
def test_a_mixture_is_names_and_weights(parts):
    text = ", ".join(name if weight is None else f"{name}:{weight}" for name, weight in parts)
    if all(name for name, _ in parts):
        assert parse_mixture(text) == [(name, weight or 1.0) for name, weight in parts]
    else:
        with pytest.raises(DatasetError, match="NAME:WEIGHT"):
            parse_mixture(text)


@pytest.mark.parametrize(
    "text, message",
    [
        ("a:1e308,b:1e308", "weights is infinite; use smaller"),  # all shares were 0, and a run reported a loss of 0
        ("a:1,b:0.95e-6", "b .*less than 1 of 1,048,576.*larger weight"),  # 1e-9 had the effect of 2^-20
        ("a:0.95e-6,b:1", "a .*less than 1"),
        *((text, "NAME:WEIGHT") for text in ("", "a:0", "a:-1", "a:inf", "a:nan")),
    ],
)
def test_weights_without_a_share_are_refused(text, message):
    with pytest.raises(DatasetError, match=message):
        parse_mixture(text)


@pytest.mark.parametrize("weights", [(1, 2**20 - 1), (1e-9,), (1e307, 1e307)])
def test_the_minimum_share_is_accepted(weights):
    parts = list(zip("ab", weights, strict=False))
    assert parse_mixture(",".join(f"{name}:{weight}" for name, weight in parts)) == parts
