import csv
import gzip
import json
import random
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from tiny_tokenizers import bpe, trained

from folio import corpus
from folio.corpus import END, Corpus, CorpusError, Field, Part, find_sources, place_to_cut

DOCUMENTS = ["first one", "zweites, größer", "", '日本 "quoted", and\na break', "last\r\n"]


def documents(found: Corpus) -> list[str]:
    return [document for block in found.blocks() for document in block.documents()]


def write_texts(folder: Path) -> list[str]:
    for number, text in enumerate(DOCUMENTS):
        (folder / f"{number}.txt").write_bytes(text.encode())
    return [str(folder)]


def write_jsonl(folder: Path, name="x.jsonl", pack=lambda content: content) -> list[str]:
    lines = [json.dumps({"text": text, "other": 5}, ensure_ascii=number % 2) for number, text in enumerate(DOCUMENTS)]
    (folder / name).write_bytes(pack("\n".join(lines).encode()))
    return [str(folder / name)]


def write_csv(folder: Path) -> list[str]:
    with open(folder / "x.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["id", "text"], *enumerate(DOCUMENTS)])
    return [str(folder / "x.csv")]


def write_parquet(folder: Path) -> list[str]:
    for number, part in enumerate((DOCUMENTS[:2], DOCUMENTS[2:])):
        table = pyarrow.table({"id": range(len(part)), "text": part})
        parquet.write_table(table, folder / f"{number}.parquet", row_group_size=1)
    return [str(folder / "*.parquet")]


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, codec="zstd", asbytes=True)


@pytest.mark.parametrize(
    "write",
    [
        write_texts,
        write_jsonl,
        lambda folder: write_jsonl(folder, "x.jsonl.gz", gzip.compress),
        lambda folder: write_jsonl(folder, "x.jsonl.zst", zstd),
        write_csv,
        write_parquet,
    ],
    ids=["txt", "jsonl", "jsonl.gz", "jsonl.zst", "csv", "parquet"],
)
@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_documents_come_out_as_they_went_in(write, block, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK_BYTES", block)
    found = Corpus(find_sources(write(tmp_path)))
    parts = [(block, list(block.documents())) for block in found.blocks()]
    texts, held = [], ""
    for block, pieces in parts:
        if isinstance(block, Part):
            held += pieces[0]
            pieces = [held] if block.last else []
            held = "" if block.last else held
        texts += pieces
    assert texts == DOCUMENTS
    reads = [block.read for block, _ in parts]
    assert reads == sorted(reads) and reads[-1] == found.bytes == sum(source.bytes for source in found.sources)


@pytest.mark.parametrize("block", [1, 3, 1000])
def test_separators_divide_from_left_to_right(block, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK_BYTES", block)
    text = "a\n\n\n\nb--\n\n\nc\n\n"
    (tmp_path / "x.txt").write_text(text)
    assert documents(Corpus(find_sources([str(tmp_path / "x.txt")]), split_on="\n\n\n")) == text.split("\n\n\n")


def test_folders_patterns_and_files_are_taken_once_in_order(tmp_path, monkeypatch):
    for name in ("b.txt", "a.md", "sub/c.jsonl.gz", "sub/picture.png", "code.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path)
    names = [source.path.name for source in find_sources([".", "b.txt", "code.py"])]
    assert names == ["a.md", "b.txt", "c.jsonl.gz", "code.py"]
    assert [source.path.name for source in find_sources(["*.txt", "**/*.gz"])] == ["b.txt", "c.jsonl.gz"]
    assert [source.kind for source in find_sources(["code.py"])] == ["text"]
    with pytest.raises(CorpusError, match="there is no such file"):
        find_sources(["missing*.txt"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(CorpusError, match="no files of text"):
        find_sources(["empty"])


# --- cutting ----------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.sampled_from("ab1' ,.!\n\r\t\xa0\u3000\u2003\x1f\x85éж日。ा🎉<|>s"), max_size=60))
def test_a_text_cut_in_two_gives_the_ids_of_the_whole(text):
    """For GPT-2's BPE and for one of one's own, whatever white space and letters stand around the cut."""
    content = text.encode()
    cut = place_to_cut(content)
    if cut:
        for tokenizer in (bpe(), trained()):
            parts = [tokenizer.encode(part.decode()) for part in (content[:cut], content[cut:])]
            assert np.concatenate(parts).tolist() == tokenizer.encode(text).tolist()


def test_a_text_without_white_space_is_cut_between_characters(monkeypatch):
    content = ("日本" * 10).encode()
    assert place_to_cut(content) == 0
    monkeypatch.setattr(corpus, "LONGEST_WORD", 20)
    for cut_off in range(3):
        cut = place_to_cut(content[: len(content) - cut_off])
        assert cut > 20 and content[:cut].decode()


@pytest.mark.parametrize("block", [3, 5, 64, 1 << 20])
def test_one_text_is_divided_at_a_character_near_its_end(block, tmp_path, monkeypatch, seed):
    rng = random.Random(seed)
    text = "".join(rng.choice("ab日🎉é \n") for _ in range(333))
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())  # with the mark of Windows' editors
    monkeypatch.setattr(corpus, "BLOCK_BYTES", block)
    for fraction in (0.1, 0.5, 0.999):
        blocks = list(Corpus(find_sources([str(tmp_path / "x.txt")])).blocks(fraction))
        cut = int(333 * (1 - fraction))
        for split, expected in (("train", text[:cut]), ("val", text[cut:])):
            parts = [block for block in blocks if block.split == split]
            assert b"".join(part.content for part in parts).decode() == expected
            assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("x.txt", "café\n".encode("latin-1") * 5, r"x\.txt is not UTF-8 text at byte 3: it looks like Latin-1.*iconv"),
        ("x.txt", b"fine\n" * 300_000 + b"caf\xe9", r"at byte 1,500,003: it looks like Latin-1"),
        ("x.txt", b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "byte 0: it looks like a binary file"),
        ("x.txt", "text".encode("utf-16"), "it looks like UTF-16"),
        ("x.jsonl", b'{"text": "a"}\n\n{"text": \n', r"x\.jsonl:3: this line is not JSON"),
        ("x.jsonl", b'{"text": "a"}\n[1]', r"x\.jsonl:2: it is no object"),
        ("x.jsonl", b'{"texts": "a", "b": 1}', r"x\.jsonl:1: there is no field 'text', only b, texts; say --field"),
        ("x.jsonl", b'{"text": 5}', r"x\.jsonl:1: the field 'text' is int, not text"),
        ("x.jsonl", b'{"text": "caf\xe9"}', r"x\.jsonl:1: this line is not UTF-8"),
        ("x.jsonl", b"[" * 100_000, r"x\.jsonl:1: this line is not JSON"),
        ("x.csv", b"a,b\n1,2\n", r"x\.csv: there is no column 'text', only a, b"),
        ("x.csv", b"a,text\n1,2\n3\n", r"x\.csv:3: this row ends before the column 'text'"),
        ("x.csv", b'text\n"open\n', r"x\.csv:\d: this is not CSV"),
        ("x.csv", b"text\ncaf\xe9\n", r"x\.csv, line 2, is not UTF-8"),
        ("x.parquet", b"PAR1 is not enough", r"x\.parquet is not a parquet file, or damaged"),
        ("x.txt.gz", gzip.compress(b"text " * 100_000)[:-20], r"x\.txt\.gz is damaged or cut off"),
        ("x.txt.zst", b"not zstandard", r"x\.txt\.zst is damaged or cut off"),
    ],
)
def test_bad_files_are_named_with_the_place_and_the_reason(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        documents(Corpus(find_sources([str(tmp_path / name)])))


def test_a_parquet_file_without_such_a_column_of_text(tmp_path):
    parquet.write_table(pyarrow.table({"id": [1], "body": ["a"]}), tmp_path / "x.parquet")
    with pytest.raises(CorpusError, match="there is no column 'text', only id, body; say --field=NAME"):
        Corpus(find_sources([str(tmp_path / "x.parquet")]))
    with pytest.raises(CorpusError, match="the column 'id' is int64, not text"):
        Corpus(find_sources([str(tmp_path / "x.parquet")]), field="id")
    assert documents(Corpus(find_sources([str(tmp_path / "x.parquet")]), field="body")) == ["a"]


def test_a_field_is_a_document():
    assert Field("a")({"a": "text"}) == "text" and END is None
