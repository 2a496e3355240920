import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from folio.base.files import read_json, write_json
from folio.data import shards as shards_module
from folio.data.shards import DatasetError, Shard, ShardWriter, count_documents, open_dataset, pair_lengths
from folio.data.tokenizer import CharTokenizer
from prepare import text as prepare_text
from tests.support.disk import assert_durable, record_disk
from tests.support.processes import ROOT


@pytest.fixture
def folder(data_dir: Path, tmp_path: Path) -> Path:
    """A copy of the data set, for the tests to damage."""
    return Path(shutil.copytree(data_dir / "verse", tmp_path / "verse"))


def write(folder: Path, pieces: list[np.ndarray], vocab_size: int, shard_tokens: int = 1000) -> list[dict]:
    with ShardWriter(folder, "train", vocab_size, shard_tokens) as writer:
        for ids in pieces:
            writer.write(ids)
        return writer.finish()


# --- files ------------------------------------------------------------------------------------------------------------


def test_shards_contain_the_text(data_dir, text):
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
def test_an_id_outside_the_vocabulary_is_not_written(tmp_path, ids):
    """numpy wraps silently: 70,000 as uint16 is 4,464."""
    with pytest.raises(DatasetError, match="outside the vocabulary of 10"):
        write(tmp_path, [np.array([1, 2]), np.array(ids)], 10)
    assert not list(tmp_path.glob("*.bin"))


def test_tokens_are_synced_before_a_shard_is_renamed_and_a_state_is_returned(tmp_path, monkeypatch):
    calls = record_disk(monkeypatch)
    with ShardWriter(tmp_path, "train", 9, shard_tokens=4, masked=True) as writer:
        writer.write(np.arange(6), np.ones(6))
        for name in ("train_000000.bin", "train_000000_mask.bin"):
            assert_durable(calls, tmp_path / name)
        calls.clear()
        assert writer.state()["open"] == 2
        assert {path.name for _, path, _ in calls} == {".train.part", ".train_mask.part"}


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1 << 16, "<u2"), ((1 << 16) + 1, "<u4"), (70_001, "<u4")])
def test_large_vocabularies_use_uint32(tmp_path, vocab_size, dtype):
    write(tmp_path, [np.array([1, vocab_size - 1])], vocab_size)
    assert np.fromfile(tmp_path / "train.bin", dtype=dtype).tolist() == [1, vocab_size - 1]


def test_a_writer_resumes_from_its_state(tmp_path):
    """Data written after the state was saved, to the current file or as full shards, is written again."""
    ids, mask = np.arange(95), np.arange(95) % 3 > 0
    for folder in ("straight", "resumed"):
        (tmp_path / folder).mkdir()
    with ShardWriter(tmp_path / "straight", "val", 100, 30, masked=True) as writer:
        writer.write(ids, mask)
        expected = writer.finish()
    assert [entry["tokens"] for entry in expected] == [30, 30, 30, 5]
    with ShardWriter(tmp_path / "resumed", "val", 100, 30, masked=True) as writer:
        writer.write(ids[:40], mask[:40])
        state = writer.state()
        writer.write(ids[40:95], mask[40:95])
    assert state["open"] == 10 and len(state["shards"]) == 1
    with ShardWriter(tmp_path / "resumed", "val", 100, 30, masked=True, state=state) as writer:
        assert writer.tokens == 40
        writer.write(ids[40:], mask[40:])
        assert writer.finish() == expected
    files = {path.name: path.read_bytes() for path in (tmp_path / "resumed").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "straight").iterdir()} and len(files) == 8


def test_the_sha256_of_a_large_data_set_is_not_checked(folder, monkeypatch):
    """Checking 10,000 shards of 64 MiB would take 15 minutes."""
    monkeypatch.setattr(shards_module, "VERIFY_BYTES", 10_000)
    flip_a_bit(folder / "train.bin")
    assert len(open_dataset(folder).train) == 1


def nanogpt_folder(folder: Path, meta: bytes | None) -> Path:
    folder.mkdir()
    np.array([0, 1, 2, 1] * 10, dtype=np.uint16).tofile(folder / "train.bin")
    np.array([2, 1, 0] * 4, dtype=np.uint16).tofile(folder / "val.bin")
    if meta is not None:
        (folder / "meta.pkl").write_bytes(meta)
    return folder


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_nanogpt_folder_with_characters(tmp_path, protocol):
    characters = "\nab"
    meta = dict(vocab_size=3, itos=dict(enumerate(characters)), stoi={c: i for i, c in enumerate(characters)})
    if protocol == 0:  # text opcodes, which Python has not written by default since 2008
        with pytest.raises(DatasetError, match="not plain data"):
            open_dataset(nanogpt_folder(tmp_path / "d", pickle.dumps(meta, protocol)))
        return
    data = open_dataset(nanogpt_folder(tmp_path / "d", pickle.dumps(meta, protocol)))
    assert data.vocab_size == 3 and data.load_tokenizer().decode(data.train[0].ids[:4]) == "\naba"


def test_a_nanogpt_folder_without_meta_pkl_has_gpt2_tokens(tmp_path):
    data = open_dataset(nanogpt_folder(tmp_path / "d", None))
    assert data.vocab_size == 50257 and data.tokenizer is None


class Bomb:
    def __reduce__(self):
        return os.system, ("echo this must not run",)


NOT_PLAIN = [
    pickle.dumps({"itos": Bomb()}),
    pickle.dumps({"a": 1}),
    pickle.dumps("text"),
    b"nonsense",
    b"\x80\x04",
    b"\x80\x04}r\xff\xff\xff\x7f.",  # a memo of two billion entries, which needs 16 GiB
    b"\x80\x04}}K\x01s.",  # a dict as a key
    b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff}.",  # a frame longer than any file
]


@pytest.mark.parametrize("meta", NOT_PLAIN)
def test_a_meta_pkl_with_other_objects_is_not_opened(tmp_path, meta, capfd):
    with pytest.raises(DatasetError, match=r"meta\.pkl"):
        open_dataset(nanogpt_folder(tmp_path / "d", meta))
    assert capfd.readouterr().out == ""


LETTERS = {0: "a", 1: "b"}


@pytest.mark.parametrize(
    "table, message",
    [
        ({"itos": {0: "a", 1: "bc"}}, r"itos .* id 1 to 'bc'.*prepare/text\.py"),
        ({"itos": {0: "", 1: "a"}}, "itos .* id 0 to ''"),
        ({"itos": {0: "<|endoftext|>", 1: "a"}}, r"itos .* id 0 to '<\|endoftext\|>'"),
        ({"itos": {0: "a", 1: 7}}, "itos .* id 1 to 7,"),
        ({"itos": {0: "a", 1: {}}}, "itos .* id 1 to a dict,"),
        ({"itos": {0: "a", 2: "b"}}, "no dict itos"),
        ({"itos": {}}, "no dict itos"),
        ({"itos": {0: "a", 1: "a"}}, "itos maps two ids to 'a'"),
        ({"itos": LETTERS, "stoi": {"a": 0, "c": 1}}, "stoi and itos"),
        ({"itos": LETTERS, "stoi": {"a": 0}}, "stoi and itos"),
        ({"itos": LETTERS, "stoi": 5}, "stoi and itos"),
        ({"itos": LETTERS, "stoi": {"a": 1, "b": 0}}, "itos .* id 0 to 'a', but stoi"),
        ({"itos": LETTERS, "vocab_size": 1}, "vocab_size is 1, .* 2 characters"),
        ({"itos": LETTERS, "vocab_size": "2"}, "vocab_size is '2', .* 2 characters"),
    ],
)
def test_a_meta_pkl_without_a_valid_table_of_characters_is_refused(tmp_path, table, message):
    """The entry "bc" was split into the characters "b" and "c", or the vocabulary caused a traceback. A stoi that
    contradicts itos was not detected.
    """
    with pytest.raises(DatasetError, match=message) as refused:
        open_dataset(nanogpt_folder(tmp_path / "d", pickle.dumps(table)))
    assert len(str(refused.value).splitlines()) == 1 and "meta.pkl" in str(refused.value)


def test_a_deeply_nested_meta_pkl_is_refused(tmp_path):
    nested = b"}K\x00" * 100_000 + b"}" + b"s" * 100_000
    with pytest.raises(DatasetError, match="nested too deeply"):
        open_dataset(nanogpt_folder(tmp_path / "d", b"\x80\x04}\x8c\x04itos" + nested + b"s."))


def test_meta_pkl_may_list_its_ids_in_any_order(tmp_path):
    table = {"itos": {2: "<|endoftext|>", 1: "b", 0: "a"}}  # stoi is optional
    tokenizer = open_dataset(nanogpt_folder(tmp_path / "d", pickle.dumps(table))).load_tokenizer()
    assert tokenizer.characters == "ab" and tokenizer.eot == 2


def test_a_huge_meta_pkl_is_not_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(shards_module, "PLAIN_BYTES", 10)
    with pytest.raises(DatasetError, match="the limit for this file is 10"):
        open_dataset(nanogpt_folder(tmp_path / "d", pickle.dumps({"itos": {}})))


def llmc_shard(path: Path, ids: np.ndarray, magic: int = 20240520, count: int | None = None) -> None:
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, 1, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + ids.astype("<u2").tobytes())


def test_llmc_shards_are_read(tmp_path):
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
        (dict(magic=1), "wrong magic: .* 1,"),
        (dict(count=99), "header .* 99 tokens"),
    ],
)
def test_damaged_llmc_shards_are_refused(tmp_path, shard, message):
    llmc_shard(tmp_path / "x_train_1.bin", np.arange(100), **shard)
    llmc_shard(tmp_path / "x_val_0.bin", np.arange(100))
    with pytest.raises(DatasetError, match=message):
        open_dataset(tmp_path)
    (tmp_path / "x_train_1.bin").write_bytes(b"short")
    with pytest.raises(DatasetError, match="is truncated"):
        open_dataset(tmp_path)


@pytest.mark.parametrize("target", ["gone", os.devnull, "."])
def test_an_llmc_shard_that_is_not_a_file_is_refused(target, tmp_path):
    """A folder or a broken link caused a traceback, and a FIFO blocked forever."""
    for name in ("x_train_1.bin", "x_val_0.bin"):
        llmc_shard(tmp_path / name, np.arange(100))
    (tmp_path / "x_train_2.bin").symlink_to(target)
    with pytest.raises(DatasetError, match=r"x_train_2\.bin is not a file"):
        open_dataset(tmp_path)


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "meta.pkl"])
def test_a_nanogpt_entry_that_is_not_a_file_is_refused(name, tmp_path):
    folder = nanogpt_folder(tmp_path / "d", pickle.dumps({"itos": LETTERS}))
    (folder / name).unlink()
    (folder / name).symlink_to(os.devnull)
    with pytest.raises(DatasetError, match=r"not a (regular )?file"):
        open_dataset(folder)


@pytest.mark.parametrize("name", ["train.bin", "meta.json", "tokenizer.json"])
def test_an_entry_of_a_data_set_that_is_not_a_file_is_refused(name, folder):
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(DatasetError, match=r"not a (regular )?file"):
        open_dataset(folder)


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda f: truncate(f / "train.bin", 0), r"train\.bin is empty"),
        (lambda f: truncate(f / "train.bin", 1000), r"train\.bin is truncated .* 500"),
        (lambda f: truncate(f / "train.bin", 1001), "not a multiple of 2"),
        (lambda f: (f / "val.bin").unlink(), r"val\.bin is missing"),
        (lambda f: flip_a_bit(f / "val.bin"), "sha256"),
        (lambda f: (f / "meta.json").write_text("{"), r"not a valid meta\.json"),
        (lambda f: write_json(f / "meta.json", {"format_version": 99}), "format version 99 is not 2"),
        (lambda f: [path.unlink() for path in f.iterdir()], "is not a data set"),
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer"),
        (lambda f: write_json(f / "tokenizer.json", {"kind": "byte"}), r"tokenizer\.json is not the tokenizer"),
    ],
)
def test_a_damaged_data_set_is_refused_with_the_reason(folder, damage, message):
    damage(folder)
    with pytest.raises(DatasetError, match=message):
        open_dataset(folder)


def test_an_llmc_shard_without_a_complete_header_is_refused_with_its_size(tmp_path):
    """The message for a file of 3 bytes was "it has 0 bytes"."""
    for split in ("train", "val"):
        (tmp_path / f"x_{split}_000.bin").write_bytes(b"abc")
    with pytest.raises(DatasetError, match="truncated: it has 3 bytes"):
        open_dataset(tmp_path)


def test_one_token_is_not_tokens(tmp_path):
    """Messages said "1 tokens", "1 entries", and "1 bytes"."""
    folder = nanogpt_folder(tmp_path / "d", None)
    (folder / "train_mask.bin").write_bytes(bytes(1))
    with pytest.raises(DatasetError, match="has 1 entry, but train"):
        open_dataset(folder)
    (folder / "train_mask.bin").unlink()
    (folder / "train.bin").write_bytes(bytes(1))
    with pytest.raises(DatasetError, match="truncated: it has 1 byte, not a multiple"):
        open_dataset(folder)
    write(tmp_path, [np.arange(1)], 10)
    with pytest.raises(DatasetError, match="it has 1 token, but meta"):
        shards_module._map_checked(tmp_path / "train.bin", np.dtype("<u2"), 2, None)


@pytest.mark.parametrize("at_once", [1, 3, 1 << 20])
def test_lengths_of_pairs(monkeypatch, at_once):
    """With an end-of-text token (9) after each completion, and without: then, masked text ends a pair. A pair may be in
    two shards; an incomplete one does not count, and neither does an end-of-text token in a prompt.
    """
    monkeypatch.setattr(shards_module, "READ_AT_ONCE", at_once)
    pairs = [([1, 9], [3, 9]), ([], [4, 5, 9]), ([1, 2, 3, 4], [9]), ([1], [9]), ([5, 5], [1])]  # prompt, completion
    ids = np.array([i for pair in pairs for text in pair for i in text], dtype="<u2")
    mask = np.array([n for prompt, completion in pairs for n in [0] * len(prompt) + [1] * len(completion)], np.uint8)
    for cut in range(1, len(ids)):
        data = [Shard(ids[:cut], mask[:cut]), Shard(ids[cut:], mask[cut:])]
        assert pair_lengths(data, 9).tolist() == [4, 3, 5, 2]
    assert pair_lengths([Shard(ids, mask)], None).tolist() == [7, 5, 2]  # without a token, the empty prompt is not seen
    assert pair_lengths([Shard(ids, mask), Shard(ids)], 9).tolist() == pair_lengths([Shard(ids)], 9).tolist() == []


def test_masks_of_nanogpt_and_llmc_shards(tmp_path):
    folder = nanogpt_folder(tmp_path / "d", None)
    (folder / "train_mask.bin").write_bytes(bytes([0, 1] * 20))
    data = open_dataset(folder)
    assert data.train[0].mask.tolist() == [0, 1] * 20 and data.val[0].mask is None
    llmc_shard(tmp_path / "x_train_1.bin", np.arange(100))
    llmc_shard(tmp_path / "x_val_1.bin", np.arange(100))
    (tmp_path / "x_val_1_mask.bin").write_bytes(bytes([1] * 99))
    with pytest.raises(DatasetError, match=r"x_val_1_mask\.bin has 99 entries, but x_val_1\.bin has 100 tokens"):
        open_dataset(tmp_path)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such limit")
def test_there_may_be_more_shards_than_open_files(data_dir, tmp_path):
    """Mapped shards stay open, and most systems allow 1,024 open files by default. It was a traceback."""
    text = str(data_dir / "verse.txt")
    prepare_text.main(prepare_text.TextConfig(inputs=(text,), name="many", data_dir=str(tmp_path), shard_tokens=100))
    program = """
import resource, sys
from folio import UserError
from folio.data.shards import open_dataset
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[2])))
try:
    print(len(open_dataset(Path(sys.argv[1])).train))
except UserError as error:
    print(error)
"""
    for hard, expected in (("400", "186"), ("100", "more shards than the limit of 100 open files")):
        words = [sys.executable, "-c", program, str(tmp_path / "many"), hard]
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
        assert expected in done.stdout, done.stderr


def test_documents_are_counted_up_to_a_few():
    shards = [Shard(np.array([1, 2, 9, 3, 9])), Shard(np.array([9])), Shard(np.array([4, 5]))]
    assert count_documents(shards, 9) == 3 and count_documents(shards, None) == count_documents(shards, 7) == 0
    assert count_documents([Shard(np.full(100, 9)), *shards], 9) == 5
