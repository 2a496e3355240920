import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from folio.base.files import read_json, write_json
from folio.data import shards as shards_module
from folio.data.shards import DatasetError, Shard, ShardWriter, count_documents, open_dataset, pair_lengths
from folio.data.tokenizer import CharTokenizer
from prepare import text as prepare_text
from tests.support.disk import assert_durable, record_disk
from tests.support.prepared import content
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


def test_shards_contain_the_text(data_dir, text):
    data = open_dataset(data_dir / "verse")
    (train,), (val,) = data.train, data.val
    decode = CharTokenizer.of(text).decode
    assert decode(np.memmap(data_dir / "verse" / "train.bin", dtype=np.uint16)) == text[: len(train)]  # as in nanoGPT
    assert data.load_tokenizer().decode(np.concatenate([train.ids, val.ids])) == text
    assert len(train) == int(len(text) * 0.9)
    assert train.ids.dtype == np.dtype("<u2") and isinstance(train.ids.base, np.memmap)  # mapped, not copied
    meta = read_json(data_dir / "verse" / "meta.json")
    assert meta["source"]["bytes"] == len(text.encode())
    assert meta["splits"]["train"][0]["tokens"] == len(train)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(10, "<u2"), (1 << 16, "<u2"), ((1 << 16) + 1, "<u4")])
def test_ids_of_the_vocabulary_are_written_and_no_others(tmp_path, vocab_size, dtype):
    """numpy wraps silently: 70,000 as uint16 is 4,464."""
    for outside in (vocab_size, -1):
        with pytest.raises(DatasetError, match=f"outside the vocabulary of {vocab_size}"):
            write(tmp_path, [np.array([1, 2]), np.array([3, outside])], vocab_size)
        assert not list(tmp_path.glob("*.bin"))
    write(tmp_path, [np.array([1, vocab_size - 1])], vocab_size)
    assert np.fromfile(tmp_path / "train.bin", dtype=dtype).tolist() == [1, vocab_size - 1]


def test_tokens_are_synced_before_a_shard_is_renamed_and_a_state_is_returned(tmp_path, monkeypatch):
    calls = record_disk(monkeypatch)
    with ShardWriter(tmp_path, "train", 9, shard_tokens=4, masked=True) as writer:
        writer.write(np.arange(6), np.ones(6))
        for name in ("train_000000.bin", "train_000000_mask.bin"):
            assert_durable(calls, tmp_path / name)
        calls.clear()
        assert writer.state()["open"] == 2
        assert {path.name for _, path, _ in calls} == {".train.part", ".train_mask.part"}


def test_a_writer_resumes_from_its_state(tmp_path):
    """Data written after the state was saved, to the current file or as full shards, is written again."""
    ids, mask = np.arange(95), np.arange(95) % 3 > 0
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    straight.mkdir()
    resumed.mkdir()
    with ShardWriter(straight, "val", 100, 30, masked=True) as writer:
        writer.write(ids, mask)
        expected = writer.finish()
    assert [entry["tokens"] for entry in expected] == [30, 30, 30, 5]
    with ShardWriter(resumed, "val", 100, 30, masked=True) as writer:
        writer.write(ids[:40], mask[:40])
        state = writer.state()
        writer.write(ids[40:95], mask[40:95])
    assert state["open"] == 10 and len(state["shards"]) == 1
    with ShardWriter(resumed, "val", 100, 30, masked=True, state=state) as writer:
        assert writer.tokens == 40
        writer.write(ids[40:], mask[40:])
        assert writer.finish() == expected
    assert content(resumed) == content(straight)
    assert len(list(resumed.iterdir())) == len(list(straight.iterdir())) == 8


def test_the_sha256_of_a_large_data_set_is_not_checked(folder, monkeypatch):
    """Checking 10,000 shards of 64 MiB would take 15 minutes."""
    monkeypatch.setattr(shards_module, "VERIFY_BYTES", 10_000)
    flip_a_bit(folder / "train.bin")
    assert len(open_dataset(folder).train) == 1


@pytest.fixture
def nanogpt_folder(tmp_path) -> Callable[..., Path]:
    """A function that writes a data set as nanoGPT does. table: the content of meta.pkl, pickled if it is no bytes."""

    def write(table: Any = None, protocol: int = pickle.DEFAULT_PROTOCOL) -> Path:
        folder = tmp_path / "d"
        folder.mkdir()
        np.array([0, 1, 2, 1] * 10, dtype=np.uint16).tofile(folder / "train.bin")
        np.array([2, 1, 0] * 4, dtype=np.uint16).tofile(folder / "val.bin")
        if table is not None:
            content = table if isinstance(table, bytes) else pickle.dumps(table, protocol)
            (folder / "meta.pkl").write_bytes(content)
        return folder

    return write


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_nanogpt_folder_with_characters(nanogpt_folder, protocol):
    itos = dict(enumerate("\nab"))
    folder = nanogpt_folder(dict(vocab_size=3, itos=itos, stoi={c: i for i, c in itos.items()}), protocol)
    if protocol == 0:  # text opcodes, which Python has not written by default since 2008
        with pytest.raises(DatasetError, match="not plain data"):
            open_dataset(folder)
        return
    data = open_dataset(folder)
    assert data.vocab_size == 3
    assert data.load_tokenizer().decode(data.train[0].ids[:4]) == "\naba"


def test_meta_pkl_may_list_its_ids_in_any_order(nanogpt_folder):
    tokenizer = open_dataset(nanogpt_folder({"itos": {2: "<|endoftext|>", 1: "b", 0: "a"}})).load_tokenizer()
    assert tokenizer.characters == "ab"
    assert tokenizer.eot == 2


class Bomb:
    def __reduce__(self):
        return os.system, ("echo this must not run",)


LETTERS = {0: "a", 1: "b"}


@pytest.mark.parametrize(
    "table, message",
    [
        ({"itos": Bomb()}, r"meta\.pkl"),
        ({"a": 1}, r"meta\.pkl"),
        ("text", r"meta\.pkl"),
        (b"nonsense", r"meta\.pkl"),
        (b"\x80\x04", r"meta\.pkl"),
        (b"\x80\x04}r\xff\xff\xff\x7f.", r"meta\.pkl"),  # a memo of two billion entries, which needs 16 GiB
        (b"\x80\x04}}K\x01s.", r"meta\.pkl"),  # a dict as a key
        (b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff}.", r"meta\.pkl"),  # a frame longer than any file
        (b"\x80\x04}\x8c\x04itos" + b"}K\x00" * 100_000 + b"}" + b"s" * 100_000 + b"s.", "nested too deeply"),
        ({"itos": {0: "a", 1: "bc"}}, r"itos .* id 1 to 'bc'.*prepare/text\.py"),  # split into "b" and "c"
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
def test_a_meta_pkl_without_a_valid_table_of_characters_is_refused(nanogpt_folder, table, message, capfd):
    """It caused a traceback. A stoi that contradicts itos was not detected."""
    with pytest.raises(DatasetError, match=message) as refused:
        open_dataset(nanogpt_folder(table))
    assert len(str(refused.value).splitlines()) == 1 and "meta.pkl" in str(refused.value)
    assert capfd.readouterr().out == ""


def test_a_huge_meta_pkl_is_not_opened(nanogpt_folder, monkeypatch):
    monkeypatch.setattr(shards_module, "PLAIN_BYTES", 10)
    with pytest.raises(DatasetError, match="the limit for this file is 10"):
        open_dataset(nanogpt_folder({"itos": {}}))


def llmc_shard(path: Path, ids: np.ndarray, magic: int = 20240520, count: int | None = None) -> None:
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, 1, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + ids.astype("<u2").tobytes())


def test_llmc_shards_are_read(tmp_path):
    llmc_shard(tmp_path / "fineweb_train_000001.bin", np.arange(100))
    llmc_shard(tmp_path / "fineweb_train_000002.bin", np.arange(100, 150))
    llmc_shard(tmp_path / "fineweb_val_000000.bin", np.arange(30))
    data = open_dataset(tmp_path)
    assert np.array_equal(np.concatenate([shard.ids for shard in data.train]), np.arange(150))
    assert np.array_equal(data.val[0].ids, np.arange(30))
    assert data.vocab_size == 50257
    (tmp_path / "fineweb_val_000000_mask.bin").write_bytes(bytes([1] * 29))
    with pytest.raises(DatasetError, match=r"val_000000_mask\.bin has 29 entries, but \w+\.bin has 30 tokens"):
        open_dataset(tmp_path)


def test_a_nanogpt_folder_without_meta_pkl_has_gpt2_tokens(nanogpt_folder):
    folder = nanogpt_folder()
    (folder / "train_mask.bin").write_bytes(bytes([0, 1] * 20))
    data = open_dataset(folder)
    assert data.vocab_size == 50257
    assert data.tokenizer is None
    assert data.train[0].mask.tolist() == [0, 1] * 20
    assert data.val[0].mask is None


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda path: llmc_shard(path, np.arange(100), magic=1), "wrong magic: .* 1,"),
        (lambda path: llmc_shard(path, np.arange(100), count=99), "header .* 99 tokens"),
        (lambda path: path.write_bytes(b"abc"), "truncated: it has 3 bytes"),  # it said "0 bytes"
        # a folder or a broken link caused a traceback, and a FIFO blocked forever
        *(
            (lambda path, target=target: path.symlink_to(target), r"x_train_2\.bin is not a file")
            for target in ("gone", os.devnull, ".")
        ),
    ],
)
def test_damaged_llmc_shards_are_refused(tmp_path, damage, message):
    llmc_shard(tmp_path / "x_train_1.bin", np.arange(100))
    llmc_shard(tmp_path / "x_val_0.bin", np.arange(100))
    damage(tmp_path / "x_train_2.bin")
    with pytest.raises(DatasetError, match=message):
        open_dataset(tmp_path)


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "meta.pkl"])
def test_a_nanogpt_entry_that_is_not_a_file_is_refused(name, nanogpt_folder):
    folder = nanogpt_folder({"itos": LETTERS})
    (folder / name).unlink()
    (folder / name).symlink_to(os.devnull)
    with pytest.raises(DatasetError, match=r"not a (regular )?file"):
        open_dataset(folder)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda f: (f / "train.bin").write_bytes(b""), r"train\.bin is empty"),
        (lambda f: (f / "train.bin").write_bytes(bytes(1000)), r"train\.bin is truncated .* 500"),
        (lambda f: (f / "train.bin").write_bytes(bytes(1001)), "not a multiple of 2"),
        (lambda f: (f / "val.bin").unlink(), r"val\.bin is missing"),
        (lambda f: flip_a_bit(f / "val.bin"), "sha256"),
        (lambda f: (f / "meta.json").write_text("{"), r"not a valid meta\.json"),
        (lambda f: [path.unlink() for path in f.iterdir()], "is not a data set"),
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer"),
        (lambda f: write_json(f / "tokenizer.json", {"kind": "byte"}), r"tokenizer\.json is not the tokenizer"),
        (lambda f: replace_by_folder(f / "train.bin"), "not a file"),
        (lambda f: replace_by_folder(f / "meta.json"), "not a (regular )?file"),
        (lambda f: replace_by_folder(f / "tokenizer.json"), "not a (regular )?file"),
    ],
)
def test_a_damaged_data_set_is_refused_with_the_reason(folder, damage, message):
    damage(folder)
    with pytest.raises(DatasetError, match=message):
        open_dataset(folder)


@pytest.mark.parametrize("version", [1, 3, "2", True, None, "missing"])
def test_another_format_version_is_an_error(folder, version):
    """Without a version, meta.json was called invalid; True was accepted as 1."""
    meta = read_json(folder / "meta.json")
    del meta["format_version"]
    write_json(folder / "meta.json", meta if version == "missing" else {**meta, "format_version": version})
    with pytest.raises(
        DatasetError, match=r"version is .*, and only 2 is supported; prepare the data set again"
    ) as error:
        open_dataset(folder)
    assert str(version) in str(error.value)


def test_one_token_is_not_tokens(tmp_path, nanogpt_folder):
    """Messages said "1 tokens", "1 entries", and "1 bytes"."""
    folder = nanogpt_folder()
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
