"""Finding and recognizing the files of a corpus: a row per kind of input in docs/use/data.md."""

import gzip
import json
import lzma
import os
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from folio import UserError
from folio.data.account import describe
from folio.data.blocks import encode
from folio.data.inputs import CorpusError, Position, find_sources
from folio.data.tokenizer import ByteTokenizer
from tests.support.prepared import corpus_of

LINES = "".join(json.dumps({"text": f"text {k}"}) + "\n" for k in range(3))
ARRAY = json.dumps([{"text": f"text {k}"} for k in range(3)], indent=1)
TEXTS = [f"text {k}" for k in range(3)]
SKIPPABLE = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"  # a frame of zstd
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


def documents_of(*paths: Path, **settings) -> list[str]:
    corpus = corpus_of(*paths, **settings)
    documents = list(corpus.documents())
    return ["".join(documents)] if corpus.is_one_text else documents  # a single text is read in parts


def said_of(*paths: Path, **settings) -> str:
    """What preparation says about files."""
    corpus = corpus_of(*paths, **settings)
    account = corpus.account()
    for block in corpus.blocks():
        account.add(block.account)
        account.add(encode(block, ByteTokenizer(), 256, masked=False).account)
    return "\n".join([*corpus.notes, *describe(account, corpus.split_on)])


@pytest.mark.parametrize(
    "name, content, format, documents",
    [
        ("x.txt", b"a b", "text", ["a b"]),
        ("x", b"a b", "text", ["a b"]),
        ("x.py", b"print()", "text", ["print()"]),
        ("x.txt", b"", "text", [""]),
        ("x.txt", b"\xef\xbb\xbfa", "text", ["a"]),
        ("x.txt", b"a\r\nb\rc\n", "text", ["a\nb\nc\n"]),
        (
            "x.srt",
            b"1\n00:00:01,000 --> 00:00:02,000\n- Hi\n\n2\n00:00:03,000 --> 00:00:04,000\nHo\n",
            "subtitles",
            ["- Hi\nHo\n"],
        ),
        ("x.vtt", b"WEBVTT\n\nNOTE none\n\n00:01.000 --> 00:02.000\n- Hi\nHo\n", "subtitles", ["- Hi\nHo\n"]),
        ("x.vtt", b"WEBVTT\n00:01.000 --> 00:02.000\n- Hi\nHo\n", "subtitles", ["- Hi\nHo\n"]),
        ("x.srt", b"1\n00:00:01 --> 00:00:02\nHi\n\nNOTE it\n", "subtitles", ["Hi\nNOTE it\n"]),
        ("x.txt", b"WEBVTT is a format.\n\nNOTE it.\n", "text", ["WEBVTT is a format.\n\nNOTE it.\n"]),
        ("x.md", b'{"a": 1}\nis JSON.\n', "text", ['{"a": 1}\nis JSON.\n']),
        ("x.txt", b"WEBVTT\n\n00:01.000 --> 00:02.000\n- Hi\nHo\n", "subtitles", ["- Hi\nHo\n"]),
        ("x.jsonl", LINES.encode(), "jsonl", TEXTS),
        ("x.ndjson", LINES.replace("\n", "\r\n").encode(), "jsonl", TEXTS),
        ("x.json", LINES.encode(), "jsonl", TEXTS),
        ("x.txt", LINES.encode(), "jsonl", TEXTS),
        ("x", b"\n\n" + LINES.encode(), "jsonl", TEXTS),
        ("x.json", ARRAY.encode(), "json", TEXTS),
        ("x.jsonl", ARRAY.encode(), "json", TEXTS),
        ("x.json", b" [ ] ", "json", []),
        ("c4-train.00000-of-01024.json.gz", gzip.compress(LINES.encode(), mtime=0), "jsonl", TEXTS),
        ("x.gz", gzip.compress(b"a ", mtime=0) + gzip.compress(b"b", mtime=0), "text", ["a b"]),
        ("x.txt.xz", lzma.compress(b"a b"), "text", ["a b"]),
        ("x.zst", SKIPPABLE + pyarrow.compress(b"a b", codec="zstd", asbytes=True), "text", ["a b"]),
        ("x.txt.zst", pyarrow.compress(b"a b", codec="zstd", asbytes=True), "text", ["a b"]),
        ("x.bin", gzip.compress(LINES.encode(), mtime=0), "jsonl", TEXTS),
        ("x.csv", b"id,text\n1,a\n2,b\n", "csv", ["a", "b"]),
        ("x.txt", b"[Chorus]\nla\n", "text", ["[Chorus]\nla\n"]),
        ("x.md", b"{curly}\n", "text", ["{curly}\n"]),
        ("x.txt", b"BZh and Rar! are words\n", "text", ["BZh and Rar! are words\n"]),
    ],
)
def test_a_file_is_recognized_by_its_content(name, content, format, documents, tmp_path):
    (tmp_path / name).write_bytes(content)
    assert [source.format for source in find_sources([str(tmp_path / name)]).sources] == [format]
    assert documents_of(tmp_path / name) == documents


def test_an_explicit_format_is_used(tmp_path):
    """A format was detected against the setting."""
    (tmp_path / "x.jsonl").write_text(LINES)
    assert documents_of(tmp_path / "x.jsonl", format="text") == [LINES]
    parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "x.txt")
    assert documents_of(tmp_path / "x.txt") == TEXTS
    with pytest.raises(CorpusError, match="zero byte"):
        documents_of(tmp_path / "x.txt", format="text")


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("x.txt", "text".encode("utf-16"), r"UTF-16 text; .*iconv -f UTF-16 "),
        ("x.txt", "Привет".encode("utf-16"), r"UTF-16 text; .*iconv -f UTF-16 "),
        ("x.csv", "Имя\tДля\r\n".encode("utf-16"), r"UTF-16 text; "),
        ("x.txt", "text".encode("utf-32"), r"UTF-32 text; "),
        ("x.txt", "Привет мир, как дела\r\n".encode("utf-16-le"), r"looks like UTF-16LE; "),
        ("x.txt", "a “quote”".encode("cp1252"), r"old encoding, perhaps CP1252; .*iconv -f cp1252"),
        ("x.txt", "some café, é\n".encode()[:-2], r"it ends within a character"),
        ("x.doc", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", r"an old Office document"),
        ("x.txt.gz", gzip.compress(POINTER, mtime=0), r"x\.txt\.gz is a Git LFS pointer"),
        ("x.txt", b"\xef\xbb\xbf" + POINTER, r"Git LFS pointer"),
        ("x.json", b'["a", "b"]', r"this JSON is not a list of objects"),
        ("x.txt", "some text".encode("utf-16-le"), r"looks like UTF-16LE; .*iconv -f UTF-16LE"),
        ("x.txt", "some text".encode("utf-16-be"), r"looks like UTF-16BE; .*iconv -f UTF-16BE"),
        ("x.txt", "some text".encode("utf-32-le"), r"looks like UTF-32LE; .*iconv -f UTF-32LE"),
        ("x.txt", b"text\n" * 9 + b"a\0b", r"x\.txt:10, byte 1 .*zero byte"),
        ("x.txt", b"name" + bytes(253) + b"ustar" + bytes(250), r"a tar archive; unpack"),
        ("x.tar.gz", gzip.compress(b"name" + bytes(253) + b"ustar" + bytes(250), mtime=0), r"a tar archive; unpack"),
        ("x.txt", b"PK\x03\x04 and so on", r"zip archive"),
        ("x.txt", b"%PDF-1.7\n", r"a PDF file; extract"),
        ("x.txt", b"{\\rtf1 text}", r"an RTF document"),
        ("x.txt", POINTER, r"Git LFS pointer"),
        ("x.jsonl", POINTER, r"Git LFS pointer"),
        ("x.csv", POINTER, r"Git LFS pointer"),
        ("x.parquet", POINTER, r"Git LFS pointer"),
        ("x.jsonl.gz", POINTER, r"Git LFS pointer"),
        ("x.txt.gz", b"plain text", r"not compressed with gzip"),
        ("x.txt.xz", lzma.compress(b"text " * 1000)[:-20], r"damaged or truncated"),
        ("x.json", b'{\n "data": [1]\n}\n', r"this JSON is not a list of objects; write one object per line"),
        ("x.json", b'{\n "text": "a"\n}\n{\n "text": "b"\n}\n', r"neither an object per line nor an array; use jq -c"),
        ("x.json", b'[{"text": "a"}', r"ends within its JSON array"),
        ("x.json", b'[{"text": "a"}] and', r"text after its JSON array"),
        ("x.json", b'[{"text": "a"}, 5]', r"record 1: this is not an object"),
    ],
)
def test_what_is_not_text_is_named(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        documents_of(tmp_path / name)
    assert "\n" not in str(error.value)


def test_a_pattern_does_not_follow_links_in_circles(tmp_path):
    """Two links to their own folder made "src/**/*.py" search without end."""
    (tmp_path / "src" / "node_modules").mkdir(parents=True)
    for name in ("a.py", "node_modules/b.py"):
        (tmp_path / "src" / name).write_text("text")
    (tmp_path / "src" / "self").symlink_to(".")
    (tmp_path / "src" / "again").symlink_to("../src")
    (tmp_path / "src" / "none.py").symlink_to("nowhere")
    assert [source.path for source in find_sources([str(tmp_path / "**" / "*.py")]).sources] == [tmp_path / "src/a.py"]
    assert said_of(tmp_path / "src" / "*") == "left out: 3 folders that match a pattern, 1 broken link"


def test_what_is_left_out_of_a_folder_is_said(tmp_path):
    """A folder of subtitles and a README trained on the README. Hidden files were read."""
    folder = tmp_path / "folder"
    for name in ("a.txt", "b.TXT", "code.py", "more.py", "none", ".hidden.txt", "._a.txt", "one.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text('{\n "a": 1\n}\n' if name == "one.json" else name)
    for name in ("__MACOSX", "node_modules", ".ipynb_checkpoints", "sub", "sub/.git"):
        (folder / name).mkdir(parents=True)
        (folder / name / "x.txt").write_text(name)
    (folder / "link").symlink_to(tmp_path)
    (folder / "broken.txt").symlink_to("nowhere")
    assert documents_of(folder) == ["a.txt", "b.TXT", "sub"]
    assert said_of(folder, folder / "a.txt") == (
        "left out: 2 .py files, 2 hidden files, 2 hidden folders, 1 .json file without records, 1 __MACOSX folder, "
        "1 broken link, 1 linked folder, 1 node_modules folder, 2 other kinds (report.json)"
    )


def test_a_pattern_says_which_folders_it_matches(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("a.txt", "sub/b.txt"):
        (tmp_path / name).write_text(name)
    assert documents_of(tmp_path / "*") == ["a.txt"]
    assert said_of(tmp_path / "*") == "left out: 1 folder that matches a pattern"
    assert documents_of(tmp_path / "**" / "*.txt") == ["a.txt", "sub/b.txt"]


@pytest.mark.parametrize(
    "text, said",
    [
        ("a\r\nb\rc", "line ends: 2 \\r and \\r\\n are now \\n; --keep_line_ends=True keeps them"),
        ("a<|endoftext|>b", "<|endoftext|> occurs 1 time as text; to end documents there: --split_on='<|endoftext|>'"),
        ("plain\n", ""),
    ],
)
def test_what_is_changed_in_a_text_is_said(text, said, tmp_path):
    (tmp_path / "x.txt").write_bytes(text.encode())
    assert said_of(tmp_path / "x.txt") == said


def test_line_ends_are_kept_if_asked(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"a\r\nb\rc")
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "a\r\nb\rc"}))
    assert documents_of(tmp_path / "x.txt", keep_line_ends=True) == ["a\r\nb\rc"]
    assert documents_of(tmp_path / "x.jsonl", keep_line_ends=True) == ["a\r\nb\rc"]
    assert documents_of(tmp_path / "x.jsonl") == ["a\nb\nc"]


def test_a_separator_that_never_occurs_shows_what_was_found(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"one\r\n\r\ntwo\r\n***\r\nthree\r\n***\r\nfour\r\n***\r\n")
    with pytest.raises(CorpusError, match=r'split_on="---" does not occur .*"\\n\*\*\*\\n" 3 times'):
        documents_of(tmp_path / "x.txt", split_on="---")
    assert documents_of(tmp_path / "x.txt", split_on="\n\n") == ["one", "two\n***\nthree\n***\nfour\n***\n"]


def test_positions_count_lines_and_bytes():
    position = Position().after(b"ab\nc")
    assert position == (2, 1) and str(position) == "2, byte 1 of the line"
    assert position.after(b"de") == (2, 3) and str(position.after(b"\n")) == "3"


@pytest.mark.skipif(os.name == "nt", reason="Windows forbids such names")
def test_names_of_files_may_have_line_ends(tmp_path):
    (tmp_path / "a\nb.jsonl").write_text('{"text": 5}')
    with pytest.raises(UserError) as error:
        documents_of(tmp_path / "a\nb.jsonl")
    assert "\n" not in str(error.value)
