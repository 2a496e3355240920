import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from folio import dataset
from folio.dataset import (
    Dataset,
    DatasetError,
    Mixture,
    Shard,
    ShardWriter,
    TrainingWindows,
    ValidationWindows,
    open_dataset,
    parse_mixture,
    permute,
)
from folio.files import read_json, write_json
from folio.tokenizer import CharTokenizer
from prepare import text as prepare_text

T = 8


@pytest.fixture
def folder(data_dir: Path, tmp_path: Path) -> Path:
    """A copy of the data set, to be damaged."""
    return Path(shutil.copytree(data_dir / "verse", tmp_path / "verse"))


def shards(*lengths: int) -> list[Shard]:
    """Shards in which each token of all is another id."""
    ends = np.cumsum(lengths)
    return [Shard(np.arange(end - length, end, dtype="<u2")) for end, length in zip(ends, lengths, strict=True)]


def write(folder: Path, pieces: list[np.ndarray], vocab_size: int, shard_tokens: int = 1000) -> list[dict]:
    with ShardWriter(folder, "train", vocab_size, shard_tokens) as writer:
        for ids in pieces:
            writer.write(ids)
        return writer.finish()


# --- files ------------------------------------------------------------------------------------------------------------


def test_what_is_written_is_what_is_read(data_dir, text):
    data = open_dataset(data_dir / "verse")
    tokenizer = data.load_tokenizer()
    (train,), (val,) = data.train, data.val
    assert tokenizer.decode(np.concatenate([train.ids, val.ids])) == text
    assert len(train) == int(len(text) * 0.9)
    assert train.ids.dtype == np.dtype("<u2") and isinstance(train.ids.base, np.memmap)  # mapped, not copied
    meta = read_json(data_dir / "verse" / "meta.json")
    assert meta["source"]["bytes"] == len(text.encode()) and meta["splits"]["train"][0]["tokens"] == len(train)


def test_nanogpt_can_read_our_shards(data_dir, text):
    raw = np.memmap(data_dir / "verse" / "train.bin", dtype=np.uint16, mode="r")
    assert CharTokenizer.of(text).decode(raw) == text[: len(raw)]


@pytest.mark.parametrize("ids", [[3, 10], [-1, 3]])
def test_an_id_that_does_not_fit_is_not_written(tmp_path, ids):
    """numpy would wrap silently: 70,000 as uint16 is 4,464."""
    with pytest.raises(DatasetError, match="does not fit a vocabulary of 10"):
        write(tmp_path, [np.array([1, 2]), np.array(ids)], 10)
    assert not list(tmp_path.glob("*.bin"))


def test_large_vocabularies_take_uint32(tmp_path):
    write(tmp_path, [np.array([1, 70_000])], 70_001)
    assert np.fromfile(tmp_path / "train.bin", dtype="<u4").tolist() == [1, 70_000]


def test_a_writer_goes_on_from_its_state(tmp_path):
    """Whatever was written after the state, in the open file or as whole shards, is written again and the same."""
    ids, mask = np.arange(95), np.arange(95) % 3 > 0
    for folder in ("straight", "cut"):
        (tmp_path / folder).mkdir()
    with ShardWriter(tmp_path / "straight", "val", 100, 30, masked=True) as writer:
        writer.write(ids, mask)
        expected = writer.finish()
    assert [entry["tokens"] for entry in expected] == [30, 30, 30, 5]
    with ShardWriter(tmp_path / "cut", "val", 100, 30, masked=True) as writer:
        writer.write(ids[:40], mask[:40])
        state = writer.state()
        writer.write(ids[40:95], mask[40:95])
    assert state["open"] == 10 and len(state["shards"]) == 1
    with ShardWriter(tmp_path / "cut", "val", 100, 30, masked=True, state=state) as writer:
        assert writer.tokens == 40
        writer.write(ids[40:], mask[40:])
        assert writer.finish() == expected
    files = {path.name: path.read_bytes() for path in (tmp_path / "cut").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "straight").iterdir()} and len(files) == 8


def test_small_data_sets_are_checked_at_every_open_and_large_ones_not_read(folder, monkeypatch):
    """10,000 shards of 64 MiB would take a quarter of an hour."""
    monkeypatch.setattr(dataset, "VERIFY_BYTES", 10_000)
    flip(folder / "train.bin")
    assert len(open_dataset(folder).train) == 1


def nanogpt_folder(folder: Path, meta: bytes | None) -> Path:
    folder.mkdir()
    np.array([0, 1, 2, 1] * 10, dtype=np.uint16).tofile(folder / "train.bin")
    np.array([2, 1, 0] * 4, dtype=np.uint16).tofile(folder / "val.bin")
    if meta is not None:
        (folder / "meta.pkl").write_bytes(meta)
    return folder


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_nanogpt_folder_with_characters(tmp_path, protocol):
    characters = "\nab"
    meta = dict(vocab_size=3, itos=dict(enumerate(characters)), stoi={c: i for i, c in enumerate(characters)})
    if protocol == 0:  # text opcodes; Python has not written them by default since 2008
        with pytest.raises(DatasetError, match="not plain data"):
            open_dataset(nanogpt_folder(tmp_path / "d", pickle.dumps(meta, protocol)))
        return
    data = open_dataset(nanogpt_folder(tmp_path / "d", pickle.dumps(meta, protocol)))
    assert data.vocab_size == 3 and data.load_tokenizer().decode(data.train[0].ids[:4]) == "\naba"


def test_nanogpt_folder_without_meta_is_gpt2(tmp_path):
    data = open_dataset(nanogpt_folder(tmp_path / "d", None))
    assert data.vocab_size == 50257 and data.made_with is None


class Bomb:
    def __reduce__(self):
        return os.system, ("echo this must not run",)


STRANGE = [
    pickle.dumps({"itos": Bomb()}),
    pickle.dumps({"a": 1}),
    pickle.dumps("text"),
    b"nonsense",
    b"\x80\x04",
    b"\x80\x04}r\xff\xff\xff\x7f.",  # a memo of two billion entries, which takes 16 GiB
    b"\x80\x04}}K\x01s.",  # a table by tables
    b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff}.",  # a frame longer than any file
]


@pytest.mark.parametrize("meta", STRANGE)
def test_a_strange_meta_pkl_is_not_opened(tmp_path, meta, capfd):
    with pytest.raises(DatasetError, match=r"meta\.pkl"):
        open_dataset(nanogpt_folder(tmp_path / "d", meta))
    assert capfd.readouterr().out == ""


LETTERS = {0: "a", 1: "b"}


@pytest.mark.parametrize(
    "table, message",
    [
        ({"itos": {0: "a", 1: "bc"}}, "itos gives the id 1 to 'bc', and Folio reads only tables of single characters"),
        ({"itos": {0: "the ", 1: "cat"}}, "itos gives the id 0 to 'the '"),
        ({"itos": {0: "", 1: "a"}}, "itos gives the id 0 to ''"),
        ({"itos": {0: "<|endoftext|>", 1: "a"}}, r"itos gives the id 0 to '<\|endoftext\|>'"),
        ({"itos": {0: "a", 1: 7}}, "itos gives the id 1 to 7, and"),
        ({"itos": {0: "a", 1: {}}}, "itos gives the id 1 to a dict, and"),
        ({"itos": {0: "a", 2: "b"}}, "no table itos of the characters by id, from 0 without a gap"),
        ({"itos": {}}, "no table itos of the characters by id"),
        ({"itos": {"a": 0}}, "no table itos of the characters by id"),
        ({"itos": {0: "a", 1: "a"}}, "itos gives two ids to 'a'"),
        ({"itos": LETTERS, "stoi": {"a": 0, "c": 1}}, "stoi and itos do not hold the same characters"),
        ({"itos": LETTERS, "stoi": {"a": 0}}, "stoi and itos do not hold the same characters"),
        ({"itos": LETTERS, "stoi": 5}, "stoi and itos do not hold the same characters"),
        ({"itos": LETTERS, "stoi": {"a": 1, "b": 0}}, "itos gives 'a' the id 0, and stoi another"),
        ({"itos": LETTERS, "vocab_size": 1}, "vocab_size is 1, and itos holds 2 characters"),
        ({"itos": LETTERS, "vocab_size": "2"}, "vocab_size is '2', and itos holds 2 characters"),
    ],
)
def test_a_meta_pkl_that_is_no_table_of_characters_is_refused(tmp_path, table, message):
    """Entries of several characters were joined and taken apart again: "bc" became the characters "b" and "c", or the
    vocabulary a traceback; a stoi that contradicts itos was not looked at.
    """
    with pytest.raises(DatasetError, match=message) as refused:
        open_dataset(nanogpt_folder(tmp_path / "d", pickle.dumps(table)))
    assert len(str(refused.value).splitlines()) == 1 and "meta.pkl" in str(refused.value)


def test_a_deep_meta_pkl_is_refused(tmp_path):
    nested = b"}K\x00" * 100_000 + b"}" + b"s" * 100_000
    with pytest.raises(DatasetError, match=r"meta\.pkl: itos gives the id 0 to a dict"):
        open_dataset(nanogpt_folder(tmp_path / "d", b"\x80\x04}\x8c\x04itos" + nested + b"s."))


def test_meta_pkl_may_list_its_ids_in_any_order(tmp_path):
    table = {"itos": {2: "<|endoftext|>", 1: "b", 0: "a"}}  # without stoi, which follows from it
    made = open_dataset(nanogpt_folder(tmp_path / "d", pickle.dumps(table))).load_tokenizer()
    assert made.characters == "ab" and made.eot == 2


def test_a_huge_meta_pkl_is_not_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "PLAIN_BYTES", 10)
    with pytest.raises(DatasetError, match="larger than 10 bytes"):
        open_dataset(nanogpt_folder(tmp_path / "d", pickle.dumps({"itos": {}})))


def llmc_shard(path: Path, ids: np.ndarray, magic: int = 20240520, count: int | None = None) -> None:
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, 1, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + ids.astype("<u2").tobytes())


def test_llmc_shards(tmp_path):
    first, second, val = np.arange(100), np.arange(100, 150), np.arange(30)
    llmc_shard(tmp_path / "fineweb_train_000001.bin", first)
    llmc_shard(tmp_path / "fineweb_train_000002.bin", second)
    llmc_shard(tmp_path / "fineweb_val_000000.bin", val)
    data = open_dataset(tmp_path)
    assert np.array_equal(np.concatenate([shard.ids for shard in data.train]), np.arange(150))
    assert np.array_equal(data.val[0].ids, val)
    assert data.vocab_size == 50257


@pytest.mark.parametrize(
    "shard, message",
    [
        (dict(magic=1), "wrong magic: it begins with 1"),
        (dict(count=99), "speaks of 99 tokens"),
    ],
)
def test_bad_llmc_shards(tmp_path, shard, message):
    llmc_shard(tmp_path / "x_train_1.bin", np.arange(100), **shard)
    llmc_shard(tmp_path / "x_val_0.bin", np.arange(100))
    with pytest.raises(DatasetError, match=message):
        open_dataset(tmp_path)
    (tmp_path / "x_train_1.bin").write_bytes(b"short")
    with pytest.raises(DatasetError, match="cut off"):
        open_dataset(tmp_path)


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda f: cut(f / "train.bin", 0), r"train\.bin is empty"),
        (lambda f: cut(f / "train.bin", 1000), r"train\.bin is truncated or another file: it has 500"),
        (lambda f: cut(f / "train.bin", 1001), "not a whole number of uint16 tokens"),
        (lambda f: (f / "val.bin").unlink(), r"val\.bin is missing"),
        (lambda f: flip(f / "val.bin"), "has changed since it was written: its sha256"),
        (lambda f: (f / "meta.json").write_text("{"), r"meta\.json"),
        (lambda f: write_json(f / "meta.json", {"format_version": 99}), "format version 99 is not 2"),
        (lambda f: [path.unlink() for path in f.iterdir()], "is not a data set"),
        (lambda f: (f / "tokenizer.json").unlink(), "holds no tokenizer"),
        (lambda f: write_json(f / "tokenizer.json", {"kind": "byte"}), "is not the tokenizer that meta.json speaks of"),
    ],
)
def test_damage_is_told(folder, damage, message):
    damage(folder)
    with pytest.raises(DatasetError, match=message):
        open_dataset(folder)


# --- sequences --------------------------------------------------------------------------------------------------------


def test_permute_is_a_permutation_for_every_key(seed):
    rng = np.random.default_rng(seed)
    for n in (1, 2, 3, 4, 5, 16, 17, 1000, 1025, *rng.integers(1, 5000, 10).tolist()):
        key = rng.integers(2**63, dtype=np.uint64)
        places = permute(np.arange(n, dtype=np.uint64), n, np.array([key]))
        assert sorted(places.tolist()) == list(range(n))


def test_permute_shuffles(seed):
    """Over many keys, each element comes to each place about equally often."""
    n, keys = 7, np.random.default_rng(seed).integers(2**63, size=3500, dtype=np.uint64)
    orders = np.array([permute(np.arange(n, dtype=np.uint64), n, keys[[k]]) for k in range(len(keys))]).astype(int)
    for i in range(n):
        counts = np.bincount(orders[:, i], minlength=n)
        chi_square = ((counts - 500) ** 2 / 500).sum()
        assert chi_square < 40  # 6 degrees of freedom: beyond this in fewer than 1 of 1,000,000


@pytest.mark.parametrize("lengths", [(100,), (T + 1,), (2 * T,), (2 * T - 1, 50, 3, 77)])
def test_an_epoch_has_each_window_once(lengths, seed):
    data = shards(*lengths)
    windows = TrainingWindows(data, T, 1000, seed, "epoch")
    assert windows.per_epoch == sum(max(1, (n - T) // T) for n in lengths if n > T)
    orders = []
    for epoch in range(4):
        x, y = windows.batch(epoch * windows.per_epoch, windows.per_epoch)
        assert np.array_equal(x[:, 1:], y[:, :-1]) and (np.diff(x) == 1).all()  # no window crosses a shard
        tokens = y.ravel().tolist()
        assert len(set(tokens)) == len(tokens)  # none overlap
        orders.append(x[:, 0].tolist())
    if windows.per_epoch > 3:
        assert len({tuple(order) for order in orders}) > 1


def test_every_phase_comes(seed):
    windows = TrainingWindows(shards(4 * T), T, 1000, seed, "epoch")
    starts, _ = windows.batch(0, 600)
    assert set((starts[:, 0] % T).tolist()) == set(range(T))


@pytest.mark.parametrize("sampling", ["epoch", "random"])
def test_sequence_i_does_not_depend_on_the_batch(sampling, seed):
    windows = TrainingWindows(shards(300, 200), T, 1000, seed, sampling)
    whole, _ = windows.batch(0, 128)
    parts = np.concatenate([windows.batch(first, 8)[0] for first in range(0, 128, 8)])
    alone = np.concatenate([windows.batch(i, 1)[0] for i in range(128)])
    assert np.array_equal(whole, parts) and np.array_equal(whole, alone)
    other, _ = TrainingWindows(shards(300, 200), T, 1000, seed + 1, sampling).batch(0, 128)
    assert not np.array_equal(whole, other)


def test_random_sampling_draws_any_start(seed):
    windows = TrainingWindows(shards(T + 3, 5, T + 2), T, 1000, seed, "random")
    x, y = windows.batch(0, 5000)
    counts = np.bincount(x[:, 0])
    assert np.flatnonzero(counts).tolist() == [0, 1, 2, 16, 17]  # T tokens and a target from each, in its shard
    assert counts[[0, 1, 2, 16, 17]].min() > 800 and np.array_equal(y, x + 1)


@pytest.mark.parametrize("lengths", [(100,), (T,), (2,), (50, 1, 17)])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_validation_predicts_every_token_once(lengths, batch_size):
    data = shards(*lengths)
    targets = []
    for x, y in ValidationWindows(data, T, 1000).batches(batch_size):
        assert x.shape == y.shape == (batch_size, T) and x.min() >= 0
        targets += y[y != -1].tolist()
        assert np.array_equal(x[y != -1], y[y != -1] - 1)
    assert targets == [token for shard in data for token in shard.ids[1:].tolist()]


def test_capped_validation_is_spread_and_fixed():
    windows = ValidationWindows(shards(10 * T + 1), T, 1000, max_windows=4)
    first = [x[0, 0].item() // T for x, _ in windows.batches(1)]
    assert first == [0, 2, 5, 7] == [x[0, 0].item() // T for x, _ in windows.batches(1)]


def test_an_id_outside_the_vocabulary_is_found_at_first_use():
    with pytest.raises(DatasetError, match="token id 99 in the shards is outside the vocabulary of 50"):
        TrainingWindows([Shard(np.full(100, 99, dtype="<u2"))], T, 50, 1, "epoch").batch(0, 4)


def test_too_little_text():
    with pytest.raises(DatasetError, match=r"fewer than block_size \+ 1 = 9"):
        TrainingWindows(shards(T), T, 1000, 1, "epoch")
    with pytest.raises(DatasetError, match="fewer than 2 tokens"):
        ValidationWindows(shards(1), T, 1000)


def test_ten_thousand_shards_cost_no_more_a_step_than_one():
    class Counted(np.ndarray):
        def __getitem__(self, at):
            reads.append(at)
            return super().__getitem__(at)

    many = [Shard(np.arange(100, dtype="<u2").view(Counted)) for _ in range(10_000)]
    windows, reads = TrainingWindows(many, T, 1000, 1, "epoch"), []
    windows.batch(0, 16)
    reads.clear()
    windows.batch(16, 16)
    assert len(reads) == 16


# --- masks ------------------------------------------------------------------------------------------------------------


def test_targets_that_do_not_count_are_minus_one(seed):
    rng, data = np.random.default_rng(seed), shards(100, 77, 50)
    data[:2] = [Shard(shard.ids, rng.integers(2, size=len(shard)).astype(np.uint8)) for shard in data[:2]]
    counts = np.concatenate([data[0].mask, data[1].mask, np.ones(50)])  # by id, as ids are places here
    x, y = TrainingWindows(data, T, 1000, seed, "epoch").batch(0, 60)
    assert np.array_equal(y, np.where(counts[x + 1] > 0, x + 1, -1))
    targets = np.concatenate([y[y != -1] for _, y in ValidationWindows(data, T, 1000).batches(5)])
    assert sorted(targets.tolist()) == [i for i in np.flatnonzero(counts) if i not in (0, 100, 177)]


def test_mask_files_beside_foreign_shards(tmp_path):
    folder = nanogpt_folder(tmp_path / "d", None)
    (folder / "train_mask.bin").write_bytes(bytes([0, 1] * 20))
    data = open_dataset(folder)
    assert data.train[0].mask.tolist() == [0, 1] * 20 and data.val[0].mask is None
    llmc_shard(tmp_path / "x_train_1.bin", np.arange(100))
    llmc_shard(tmp_path / "x_val_1.bin", np.arange(100))
    (tmp_path / "x_val_1_mask.bin").write_bytes(bytes([1] * 99))
    with pytest.raises(DatasetError, match=r"x_val_1_mask\.bin has 99 entries for the 100 tokens"):
        open_dataset(tmp_path)


# --- mixtures ---------------------------------------------------------------------------------------------------------


def sets(*lengths: int, weights: tuple[float, ...]) -> list[tuple[Dataset, float]]:
    """Data sets of one tokenizer, in which each token of all is another id."""
    made_with = CharTokenizer("".join(map(chr, range(1, 5000))))
    return [
        (Dataset(Path(f"set{k}"), [s], [Shard(s.ids[:20])], 4999, f"hash{k}", made_with), weight)
        for k, (s, weight) in enumerate(zip(shards(*lengths), weights, strict=True))
    ]


@pytest.mark.parametrize("weights", [(0.7, 0.3), (1, 1), (5, 2, 1), (1e-3, 1)])
def test_each_set_has_its_share_at_any_moment(weights, seed):
    data = Mixture(sets(*[400] * len(weights), weights=weights), T, seed, "epoch")
    x, _ = data.batch(0, 3000)
    which = x[:, 0] // 400
    for n in (1, 10, 100, 3000):
        given = np.bincount(which[:n], minlength=len(weights))
        assert np.abs(given - n * np.array(weights) / sum(weights)).max() <= len(weights)
        assert data.division(n) == given.tolist()
    for k in range(len(weights)):  # each set's sequences are those of the set alone, in order
        alone = TrainingWindows([data.datasets[k][0].train[0]], T, 4999, seed, "epoch")
        expected, _ = alone.batch(0, int((which == k).sum()))
        assert np.array_equal(x[which == k], expected)
    assert data.epochs(3000) == pytest.approx(
        {f"set{k}": (which == k).sum() / data.training[k].per_epoch for k in range(len(weights))}
    )


def test_sequence_i_of_a_mixture_does_not_depend_on_the_batch(seed):
    data = Mixture(sets(300, 400, 500, weights=(3, 2, 1)), T, seed, "epoch")
    whole, _ = data.batch(0, 96)
    parts = np.concatenate([data.batch(first, 6)[0] for first in range(0, 96, 6)])
    far = 10**12 + 7
    assert np.array_equal(whole, parts) and np.array_equal(data.batch(far, 5)[0][3:], data.batch(far + 3, 2)[0])


def test_a_mixture_of_one_is_the_set_itself(seed):
    ((dataset, _),) = sets(300, weights=(1,))
    data = Mixture([(dataset, 0.3)], T, seed, "epoch")
    assert np.array_equal(data.batch(5, 50)[0], TrainingWindows(dataset.train, T, 4999, seed, "epoch").batch(5, 50)[0])
    assert data.hash == dataset.hash and data.weights == [1.0]


def test_only_sets_of_one_tokenizer_mix():
    (a, _), (b, _) = sets(100, 100, weights=(1, 1))
    other = Dataset(Path("other"), b.train, b.val, 3, "hash", CharTokenizer("abc"))
    with pytest.raises(
        DatasetError, match=r"other was made with another tokenizer \(char, 3 .* than set0 \(char, 4,999"
    ):
        Mixture([(a, 1), (other, 1)], T, 1, "epoch")
    with pytest.raises(DatasetError, match="takes each data set once"):
        Mixture([(a, 1), (a, 1)], T, 1, "epoch")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("a", [("a", 1.0)]),
        ("a:0.7,b:0.3", [("a", 0.7), ("b", 0.3)]),
        ("a, b:2", [("a", 1.0), ("b", 2.0)]),
        (r"C:\data\a", [(r"C:\data\a", 1.0)]),
        (r"C:\data\a:0.5,/data/b:1", [(r"C:\data\a", 0.5), ("/data/b", 1.0)]),
    ],
)
def test_mixtures_are_written_with_weights(text, expected):
    assert parse_mixture(text) == expected


@pytest.mark.parametrize("text", ["", "a,,b", "a:0", "a:-1", "a:inf", "a:nan", ":1"])
def test_mixtures_that_mean_nothing_are_refused(text):
    with pytest.raises(DatasetError, match="NAME:WEIGHT"):
        parse_mixture(text)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such limit")
def test_there_may_be_more_shards_than_open_files(data_dir, tmp_path):
    """A mapped shard stays open, and 1,024 files is what most systems allow at first: it was a traceback."""
    text = str(data_dir / "verse.txt")
    prepare_text.main(prepare_text.TextConfig(inputs=(text,), name="many", data_dir=str(tmp_path), shard_tokens=100))
    program = """
import resource, sys
from folio import UserError
from folio.dataset import open_dataset
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[2])))
try:
    print(len(open_dataset(Path(sys.argv[1])).train))
except UserError as error:
    print(error)
"""
    for hard, told in (("400", "186"), ("100", "more shards than the 100 files that a process may open here")):
        words = [sys.executable, "-c", program, str(tmp_path / "many"), hard]
        found = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
        assert told in found.stdout, found.stderr
