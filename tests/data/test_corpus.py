import csv
import gzip
import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from folio.data import corpus
from folio.data.account import Account
from folio.data.blocks import CorpusError, DocumentPart, TextBlock, document_hash
from folio.data.corpus import Corpus, find_cut
from folio.data.inputs import DEFAULT_LIMITS, Position, SizeLimits, find_sources
from tests.support.prepared import corpus_of
from tests.support.tiny_tokenizers import bpe, trained

DOCUMENTS = ["first one", "zweites, größer", "", '日本 "quoted", and\na break', "last\r\n"]
UNIFIED = [*DOCUMENTS[:-1], "last\n"]


def documents_of(corpus: Corpus) -> list[str]:
    return [document for block in corpus.blocks() for document in block.documents(Account())]


def write_texts(folder: Path) -> list[str]:
    for number, text in enumerate(DOCUMENTS):
        (folder / f"{number}.txt").write_bytes(text.encode())
    return [str(folder)]


def write_jsonl(folder: Path, name="x.jsonl", compress=lambda content: content) -> list[str]:
    lines = [json.dumps({"text": text, "other": 5}, ensure_ascii=number % 2) for number, text in enumerate(DOCUMENTS)]
    (folder / name).write_bytes(compress("\n".join(lines).encode()))
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
@pytest.mark.parametrize("block_bytes", [1, 7, 1 << 20])
def test_every_format_gives_the_same_documents(write, block_bytes, tmp_path):
    read = Corpus(find_sources(write(tmp_path), limits=SizeLimits(block=block_bytes)))
    blocks = [(block, list(block.documents(Account()))) for block in read.blocks()]
    texts, pending = [], ""
    for block, documents in blocks:
        if isinstance(block, DocumentPart):
            pending += documents[0]
            documents = [pending] if block.last else []
            pending = "" if block.last else pending
        texts += documents
    assert texts == UNIFIED
    bytes_read = [block.bytes_read for block, _ in blocks]
    assert bytes_read == sorted(bytes_read)
    assert bytes_read[-1] == read.bytes == sum(source.bytes for source in read.sources)


@pytest.mark.skipif(sys.platform != "linux", reason="file names are Unicode on other systems")
@pytest.mark.parametrize("write", [write_texts, write_jsonl, write_csv, write_parquet])
def test_files_whose_names_are_not_utf8_are_read(write, tmp_path):
    """A parquet file with such a name ended in a traceback."""
    write(tmp_path)
    for path in list(tmp_path.iterdir()):
        path.rename(tmp_path / os.fsdecode(os.fsencode(path.stem) + b"\xe9" + os.fsencode(path.suffix)))
    assert documents_of(Corpus(find_sources([str(tmp_path)]))) == UNIFIED


@pytest.mark.parametrize("block_bytes", [1, 3, 1000])
def test_separators_are_matched_from_left_to_right(block_bytes, tmp_path):
    text = "a\n\n\n\nb--\n\n\nc\n\n"
    (tmp_path / "x.txt").write_text(text)
    separated = corpus_of(tmp_path / "x.txt", limits=SizeLimits(block=block_bytes), split_on="\n\n\n")
    assert documents_of(separated) == text.split("\n\n\n")


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gz"])
@pytest.mark.parametrize("block_bytes", [1, 5, 64])
@pytest.mark.parametrize("separator", ["\n", "\n--\n", "aa"])
def test_large_documents_between_separators_are_split_into_parts(separator, block_bytes, compress, tmp_path, seed):
    """The complete document was in memory, and each block read caused another search for a separator."""
    rng = random.Random(seed)
    documents = ["".join(rng.choices("a é\n-日x", k=rng.choice([0, 1, 9, 40, 300]))) for _ in range(40)]
    documents[7] = documents[30] = "é b日" * 200
    text = separator.join(documents) + separator * rng.randrange(2)
    expected = [document.encode() for document in text.split(separator)]
    expected = expected if expected[-1] else expected[:-1]
    path = tmp_path / ("x.txt" if compress is bytes else "x.txt.gz")
    path.write_bytes(compress(text.encode()))
    limits = SizeLimits(block=block_bytes, document=100, word=200)
    contents, pending, position = [], b"", Position()
    for block in corpus_of(path, limits=limits, split_on=separator).blocks():
        if isinstance(block, TextBlock):
            assert not pending
            for content, _, start in block.content:
                assert start == position
                contents.append(content)
                position = position.after(content + separator.encode())
            continue
        assert len(block.content) <= 200 + 2 * block_bytes and block.position == position
        pending, position = pending + block.content, position.after(block.content)
        if block.last:
            assert len(pending) > 100 and block.hash == document_hash(pending)
            contents.append(pending)
            pending, position = b"", position.after(separator.encode())
    # after a text that ends with a part of the separator, the large document begins with the other part
    assert contents == expected and any(content.endswith(documents[7].encode()) for content in contents)


@pytest.mark.parametrize("text", [b"word " * 10_000, b"a" * 50_000, b"\n" * 50_000], ids=["words", "letters", "breaks"])
def test_a_separator_that_does_not_occur_costs_linear_time(text, tmp_path):
    """The time grew with the square of the file's size, and the memory with its size."""
    (tmp_path / "x.txt").write_bytes(text)
    limits = SizeLimits(block=1000, document=3000, word=5000)
    blocks = corpus_of(tmp_path / "x.txt", limits=limits, split_on="XYZ").blocks()
    parts = [next(blocks)]
    with pytest.raises(CorpusError, match='split_on="XYZ" does not occur'):
        parts.extend(blocks)
    parts = [part for part in parts if isinstance(part, DocumentPart)]
    assert b"".join(part.content for part in parts) == text and max(len(part.content) for part in parts) <= 6000
    assert {part.hash for part in parts} == {document_hash(text)} and [part.last for part in parts].count(True) == 1


def test_a_file_is_searched_once_for_places_to_cut(tmp_path, monkeypatch):
    """Each block read caused another search of the text before it."""

    class CountingPattern:
        def finditer(self, content, begin):
            nonlocal searched
            searched += len(content) - begin
            return iter(())

    searched = 0
    monkeypatch.setattr(corpus, "SAFE_CUT", CountingPattern())
    (tmp_path / "x.txt").write_bytes(b"a" * 200_000)
    list(corpus_of(tmp_path / "x.txt", limits=SizeLimits(block=1000)).blocks())
    assert searched < 4 * 200_000  # three times: once for each length of the tail


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("x.jsonl", b'{"text": "a"}\n{"text": "' + b"a" * 2000 + b'"}', r"x\.jsonl:2: .*1,000 bytes; .*\.txt"),
        ("x.csv", b"text\nfine\n" + b"a" * 2000, r"x\.csv:3: .*1,000 bytes; .*\.txt"),
        ("x.csv", b'text\nfine\n"' + b"a\n" * 2000 + b'"\n', r"x\.csv, line \d+: .*is a quote missing"),
    ],
)
def test_a_record_that_is_too_long_for_memory_is_refused(name, content, message, tmp_path):
    """A JSON line or a CSV row without an end was read into memory until the end of the file."""
    limits = SizeLimits(block=100, record=1000, row=1000)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        documents_of(corpus_of(tmp_path / name, limits=limits))


@pytest.mark.parametrize("name, head, record", [("x.jsonl", "", '{{"text": "{0}"}}\n'), ("x.csv", "text\n", '"{0}"\n')])
def test_the_limit_of_a_record_is_not_a_limit_of_the_file(name, head, record, tmp_path):
    text = "\n".join("a" * 400) if name == "x.csv" else "a" * 900
    (tmp_path / name).write_bytes((head + 3 * record.format(text)).encode())
    assert documents_of(corpus_of(tmp_path / name, limits=SizeLimits(block=100, record=1000, row=1000))) == [text] * 3


def test_files_in_folders_and_patterns_are_returned_once_in_order(tmp_path, monkeypatch):
    for name in ("b.txt", "a.md", "sub/c.jsonl.gz", "sub/picture.png", "code.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(gzip.compress(b"{}") if name.endswith(".gz") else b"x")
    monkeypatch.chdir(tmp_path)
    names = [source.path.name for source in find_sources([".", "b.txt", "code.py"]).sources]
    assert names == ["a.md", "b.txt", "c.jsonl.gz", "code.py"]
    assert [source.path.name for source in find_sources(["*.txt", "**/*.gz"]).sources] == ["b.txt", "c.jsonl.gz"]
    assert [source.format for source in find_sources(["code.py"]).sources] == ["text"]
    with pytest.raises(CorpusError, match="no such file"):
        find_sources(["missing*.txt"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(CorpusError, match=r"this folder has no \.txt, "):
        find_sources(["empty"])


# --- cutting ----------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=st.sampled_from("ab1' ,.!\n\r\t\xa0\u3000\u2003\x1f\x85éж日。ा🎉<|>s"), max_size=60))
def test_a_text_cut_in_two_has_the_same_ids(text):
    """For GPT-2's BPE and for a trained one, with any white space and letters around the cut."""
    content = text.encode()
    cut = find_cut(content)
    if cut:
        for tokenizer in (bpe(), trained()):
            parts = [tokenizer.encode(part.decode()) for part in (content[:cut], content[cut:])]
            assert np.concatenate(parts).tolist() == tokenizer.encode(text).tolist()


def test_a_text_without_white_space_is_cut_between_characters():
    content = ("日本" * 10).encode()
    assert find_cut(content) == 0
    for missing in range(3):
        cut = find_cut(content[: len(content) - missing], max_word=20)
        assert cut > 20 and content[:cut].decode()


@pytest.mark.parametrize("block_bytes", [3, 5, 64, 1 << 20])
def test_one_text_is_split_between_two_characters(block_bytes, tmp_path, seed):
    rng = random.Random(seed)
    text = "".join(rng.choice("ab日🎉é \n") for _ in range(333))
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())  # with a byte-order mark
    for fraction in (0.1, 0.5, 0.999):
        blocks = list(corpus_of(tmp_path / "x.txt", limits=SizeLimits(block=block_bytes)).blocks(fraction))
        cut = int(333 * (1 - fraction))
        for split, expected in (("train", text[:cut]), ("val", text[cut:])):
            parts = [block for block in blocks if block.split == split]
            assert b"".join(part.content for part in parts).decode() == expected
            assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("x.txt", b"fine\n" * 300_000 + b"caf\xe9\n", r"x\.txt:300001, byte 3 .*UTF-8.*: .*Latin-1.*iconv"),
        ("x.txt", b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "an image"),
        ("x.txt", "text".encode("utf-16"), "UTF-16"),
        ("x.jsonl", b'{"text": "a"}\n\n{"text": \n', r"x\.jsonl:3: .*not JSON"),
        ("x.jsonl", b'{"text": "a"}\n[1]', r"x\.jsonl:2: .*not an object"),
        ("x.jsonl", b'{"texts": "a", "b": 1}', r"x\.jsonl:1: .*'text', only b, texts; set --field"),
        ("x.jsonl", b'{"text": 5}', r"x\.jsonl:1: .*'text' is int, .*--field"),
        ("x.jsonl", b'{"text": "caf\xe9"}', r"x\.jsonl:1: .*not UTF-8"),
        ("x.csv", b"a,b\n1,2,3\n", r"x\.csv:2: .*3 cells, but 2"),  # it raised a TypeError
        ("x.csv", b"a,b\n1,2\n", r"x\.csv: .*column 'text', only a, b"),
        ("x.csv", b"a,text\n1,2\n3\n", r"x\.csv:3: .*1 cell, but 2"),
        ("x.csv", b'text\n"open\n', r"x\.csv:\d: .*not CSV"),
        ("x.csv", b"text\ncaf\xe9\n", r"x\.csv:2, .* UTF-8"),
        ("x.jsonl", b'{"text": "a", "n": ' + b"1" * 5000 + b"}", r"x\.jsonl:1: .*not JSON"),
        ("x.jsonl", b'{"text": "\\ud800", "n": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", r"x\.jsonl:1: .* not JSON"),
        ("x.parquet", b"PAR1 is not enough", r"x\.parquet .*damaged"),
        ("x.txt.gz", gzip.compress(b"text " * 100_000, mtime=0)[:-20], r"x\.txt\.gz .*damaged"),
        ("x.txt.zst", b"not zstandard", r"x\.txt\.zst .*damaged"),
    ],
)
def test_errors_in_files_give_the_location_and_the_reason(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        documents_of(corpus_of(tmp_path / name))


def test_damaged_metadata_of_a_parquet_file_are_refused(tmp_path):
    """pyarrow ended the process, without a Python exception."""
    parquet.write_table(pyarrow.table({"text": ["some text"] * 3}), tmp_path / "x.parquet")
    content = (tmp_path / "x.parquet").read_bytes()
    optional, required = b"%\x02\x18\x04text", b"%\x00\x18\x04text"  # which the statistics contradict
    assert content.count(optional) == 1
    (tmp_path / "x.parquet").write_bytes(content.replace(optional, required))
    with pytest.raises(CorpusError, match=r"x\.parquet is damaged after row 0: .*; download it again"):
        documents_of(corpus_of(tmp_path / "x.parquet"))
    with pytest.raises(CorpusError, match="is damaged"):
        _ = corpus_of(tmp_path / "x.parquet").text_bytes


@pytest.mark.parametrize("rows", [-3, 0, 2])
def test_a_parquet_file_with_a_wrong_number_of_rows_is_refused(rows, tmp_path):
    """A negative number ended in a ZeroDivisionError."""
    parquet.write_table(pyarrow.table({"text": ["some text"] * 3}), tmp_path / "x.parquet")
    content = (tmp_path / "x.parquet").read_bytes()
    three, row_groups = b"\x16\x06", b"\x19\x1c"  # in Thrift, n >= 0 is written as 2n, and n < 0 as -2n - 1
    assert content.count(three + row_groups) == 1
    wrong = bytes([0x16, 2 * rows if rows >= 0 else -2 * rows - 1])
    (tmp_path / "x.parquet").write_bytes(content.replace(three + row_groups, wrong + row_groups))
    with pytest.raises(CorpusError, match=rf"damaged: its row groups have 3 rows, and the file has {rows}$"):
        corpus_of(tmp_path / "x.parquet")


def test_a_parquet_file_without_the_column_of_text_is_refused(tmp_path):
    parquet.write_table(pyarrow.table({"id": [1], "body": ["a"]}), tmp_path / "x.parquet")
    with pytest.raises(CorpusError, match="column 'text', only id, body; set --field"):
        corpus_of(tmp_path / "x.parquet")
    with pytest.raises(CorpusError, match=r"'id' is int64, .*--field"):
        corpus_of(tmp_path / "x.parquet", field="id")
    assert documents_of(corpus_of(tmp_path / "x.parquet", field="body")) == ["a"]


@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n", b"text\n", b"\n\n"])
def test_a_csv_file_without_rows_has_no_documents(content, tmp_path):
    """A file with only a byte-order mark raised "not enough values to unpack"."""
    (tmp_path / "x.csv").write_bytes(content)
    assert documents_of(corpus_of(tmp_path / "x.csv")) == []


@pytest.mark.parametrize("block_bytes", [1, 3, 1 << 20])
def test_csv_with_every_kind_of_line_end(block_bytes, tmp_path):
    (tmp_path / "x.csv").write_bytes(b'text,n\r\na,1\r\n"b\r\nc",2\rd,3\n"e",4')
    limits = SizeLimits(block=block_bytes)
    assert documents_of(corpus_of(tmp_path / "x.csv", limits=limits)) == ["a", "b\nc", "d", "e"]
    assert documents_of(corpus_of(tmp_path / "x.csv", limits=limits, keep_line_ends=True)) == ["a", "b\r\nc", "d", "e"]


def test_a_csv_file_with_two_columns_of_the_same_name_is_refused(tmp_path):
    """The last one was used without a warning."""
    (tmp_path / "x.csv").write_text("text,n,text\na,1,b\n")
    with pytest.raises(CorpusError, match=r"x\.csv: several columns .*'text'; rename"):
        documents_of(corpus_of(tmp_path / "x.csv"))


def test_the_error_for_a_folder_without_text_files_suggests_a_pattern(tmp_path, monkeypatch):
    """The message did not say how to read a folder of Python files."""
    monkeypatch.chdir(tmp_path)
    for name, content in {
        "src/a.py": b"a",
        "src/b.py": b"\xc3\xa4" * 4000,
        "src/.git/c.c": b"c",
        "src/sub/d.js": b"d",
        "photos[1]/a.jpg": b"\xff\xd8",
        "photos[1]/b.jpg": b"\0" * 9,
        "photos[1]/sub/about.html": b"a",
        "binary/x.jpg": b"\xff\xd8",
    }.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)
    for folder, shown, names in [
        ("src", '2 .py files, use the pattern "src/*.py"', ["a.py", "b.py"]),
        ("src/sub", '.js file, use the pattern "src/sub/*.js"', ["d.js"]),
        ("photos[1]", '.html file, use the pattern "photos[[]1]/**/*.html"', ["about.html"]),
    ]:
        with pytest.raises(CorpusError) as refused:
            find_sources([folder])
        assert shown.replace("/", os.sep) in str(refused.value)
        pattern = str(refused.value).split('"')[1]
        assert [source.path.name for source in find_sources([pattern]).sources] == names
    with pytest.raises(CorpusError, match=r"has no \.txt, ") as refused:
        find_sources(["binary"])
    assert "pattern" not in str(refused.value)


def test_null_in_parquet_is_an_empty_document(tmp_path):
    """It was None, which caused a traceback in tools/evaluate.py."""
    parquet.write_table(pyarrow.table({"text": ["a", None, "b"]}), tmp_path / "x.parquet")
    assert documents_of(corpus_of(tmp_path / "x.parquet")) == ["a", "", "b"]


def test_parquet_with_a_dictionary_is_read_in_blocks_of_decoded_text(tmp_path):
    """A file of 0.4 MB with 800 MB of text was one block, because its footer counts each distinct text once. Its
    tokenization took 13 GB.
    """
    long = [character * 100_000 for character in "abc"]
    texts = [long[k % 3] for k in range(400)] + [None] + [f"{k}" * 50 for k in range(20_000)]
    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=401)
    blocks = list(corpus_of(path).blocks())
    assert [text for block in blocks for text in block.documents(Account())] == [text or "" for text in texts]
    assert max(block.content.nbytes for block in blocks[:-1]) < DEFAULT_LIMITS.block + 500_000
    assert [number for block in blocks for number in block.numbers] == [*range(len(texts))]
    large_strings = pyarrow.table({"text": pyarrow.array(texts, pyarrow.large_string())})
    parquet.write_table(large_strings, path)
    assert documents_of(corpus_of(path)) == [text or "" for text in texts]


def test_errors_in_parquet_files_give_the_location_and_the_reason(tmp_path):
    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table([["a"], ["b"]], names=["text", "text"]), path)
    with pytest.raises(CorpusError, match=r"several columns .*'text'; rename"):  # it raised a KeyError
        corpus_of(path)
    strings = pyarrow.array([b"fine", b"caf\xe9"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": strings}), path)
    with pytest.raises(CorpusError, match=r"x\.parquet, row 1: .* byte 3; "):
        documents_of(corpus_of(path))
    parquet.write_table(pyarrow.table({"text": [f"some text {k}" for k in range(5000)]}), path)
    content = path.read_bytes()
    path.write_bytes(content[:1000] + b"\xff" * 2000 + content[3000:])
    with pytest.raises(CorpusError, match=r"x\.parquet .*after row 0"):
        documents_of(corpus_of(path))


def test_parquet_with_nested_columns_or_without_rows(tmp_path):
    table = pyarrow.table({"a": [{"text": "wrong" * 1000}, {"text": "wrong"}], "text": ["b", "c"]})
    parquet.write_table(table, tmp_path / "nested.parquet", compression="none", use_dictionary=False)
    nested = corpus_of(tmp_path / "nested.parquet")
    assert documents_of(nested) == ["b", "c"]
    assert nested.text_bytes < 500  # the size of the column, not of the nested field with the same name
    parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), tmp_path / "empty.parquet")
    assert documents_of(corpus_of(tmp_path / "empty.parquet")) == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes")
def test_paths_that_are_not_text_files_are_refused(tmp_path, monkeypatch):
    """A pipe was empty when it was read a second time. A name that is too long raised an OSError."""
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(CorpusError, match=r"pipe\.txt is not a file or a folder; .*standard input"):
        find_sources([str(tmp_path / "pipe.txt")])
    with pytest.raises(CorpusError, match=r"^x{200}\.\.\.: no such file"):
        find_sources(["x" * 5000])
    (tmp_path / "broken.txt").symlink_to("nowhere")
    with pytest.raises(CorpusError, match=r"broken\.txt: no such file"):
        find_sources([str(tmp_path / "broken.txt")])
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(CorpusError, match=r"folder\.txt: this folder has no \.txt, "):
        find_sources([str(tmp_path / "folder.txt")])
    (tmp_path / "a.txt").write_text("a")
    assert [source.path.name for source in find_sources([str(tmp_path)]).sources] == ["a.txt"]

    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", denied)  # chmod does not stop root
    with pytest.raises(CorpusError, match=r"folder\.txt cannot be read: Permission denied"):
        find_sources([str(tmp_path / "folder.txt")])
