"""Finding and recognizing the files of a corpus: a row per kind of input in docs/use/data.md."""

import gzip
import json
import lzma
import os
import re
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
        ("x", b"a b", "text", ["a b"]),
        ("x.py", b"print()", "text", ["print()"]),
        ("x.vtt", b"WEBVTT\n00:01.000 --> 00:02.000\n- Hi\nHo\n", "subtitles", ["- Hi\nHo\n"]),
        ("x.srt", b"1\n00:00:01 --> 00:00:02\nHi\n\nNOTE it\n", "subtitles", ["Hi\nNOTE it\n"]),
        ("x.txt", b"WEBVTT is a format.\n\nNOTE it.\n", "text", ["WEBVTT is a format.\n\nNOTE it.\n"]),
        ("x.txt", b"WEBVTT\n\n00:01.000 --> 00:02.000\n- Hi\nHo\n", "subtitles", ["- Hi\nHo\n"]),
        ("x.md", b'{"a": 1}\nis JSON.\n', "text", ['{"a": 1}\nis JSON.\n']),
        ("x.txt", LINES.encode(), "jsonl", TEXTS),
        ("x", b"\n\n" + LINES.encode(), "jsonl", TEXTS),
        ("x.json", b" [ ] ", "json", []),
        ("c4-train.00000-of-01024.json.gz", gzip.compress(LINES.encode(), mtime=0), "jsonl", TEXTS),
        ("x.gz", gzip.compress(b"a ", mtime=0) + gzip.compress(b"b", mtime=0), "text", ["a b"]),
        ("x.zst", SKIPPABLE + pyarrow.compress(b"a b", codec="zstd", asbytes=True), "text", ["a b"]),
        ("x.xz", lzma.compress(b"a ") + bytes(8) + lzma.compress(b"b") + bytes(4), "text", ["a b"]),
        ("x.bin", gzip.compress(LINES.encode(), mtime=0), "jsonl", TEXTS),
        ("x.txt", b"[Chorus]\nla\n", "text", ["[Chorus]\nla\n"]),
        ("x.md", b"{curly}\n", "text", ["{curly}\n"]),
        ("x.txt", b"BZh and Rar! are words\n", "text", ["BZh and Rar! are words\n"]),
    ],
)
def test_a_file_is_recognized_by_its_content(name, content, format, documents, tmp_path):
    """test_account.py has files whose content is that of their names."""
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


TAR = b"name" + bytes(253) + b"ustar" + bytes(250)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("x.txt", b"fine\n" * 300_000 + b"caf\xe9\n", r"x\.txt:300001, byte 3 .*Latin-1.*iconv"),
        ("x.txt", "a “quote”".encode("cp1252"), r"old encoding, perhaps CP1252; .*iconv -f cp1252"),
        ("x.txt", "some café, é\n".encode()[:-2], r"it ends within a character"),
        ("x.txt", b"text\n" * 9 + b"a\0b", r"x\.txt:10, byte 1 .*zero byte"),
        ("x.txt", b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "an image"),
        ("x.doc", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", r"an old Office document"),
        ("x.txt", TAR, r"a tar archive; unpack"),
        ("x.tar.gz", gzip.compress(TAR, mtime=0), r"a tar archive; unpack"),
        ("x.txt", b"PK\x03\x04 and so on", r"zip archive"),
        ("x.txt", b"%PDF-1.7\n", r"a PDF file; extract"),
        ("x.txt", b"{\\rtf1 text}", r"an RTF document"),
        *((name, POINTER, "Git LFS pointer") for name in ("x.txt", "x.jsonl", "x.csv", "x.parquet", "x.jsonl.gz")),
        ("x.txt.gz", gzip.compress(POINTER, mtime=0), r"x\.txt\.gz is a Git LFS pointer"),
        ("x.txt", b"\xef\xbb\xbf" + POINTER, r"Git LFS pointer"),
        ("x.parquet", b"PAR1 is not enough", r"x\.parquet .*damaged"),
        ("x.txt.gz", b"plain text", r"not compressed with gzip"),
        ("x.txt.gz", gzip.compress(b"text " * 100_000, mtime=0)[:-20], r"x\.txt\.gz .*damaged"),
        ("x.txt.zst", b"not zstandard", r"x\.txt\.zst .*damaged"),
        ("x.txt.xz", lzma.compress(b"text " * 1000)[:-20], r"damaged"),
        # what follows a stream of xz was ignored
        ("x.txt.xz", lzma.compress(b"text") + b"garbage", "damaged"),
        ("x.txt.xz", lzma.compress(b"text") + lzma.compress(b"more")[:-4], "damaged"),
    ],
)
def test_what_is_not_text_is_named(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        documents_of(tmp_path / name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-le", "utf-16-be", "utf-32-le"])
@pytest.mark.parametrize(
    "name, text", [("x.txt", "some text"), ("x.csv", "Имя\tДля\r\n"), ("x.txt", "Привет мир, как\r\n")]
)
def test_text_in_an_encoding_of_unicode_is_named(name, text, encoding, tmp_path):
    (tmp_path / name).write_bytes(text.encode(encoding))
    shown = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")
    with pytest.raises(UserError, match=rf"{shown}.*iconv -f {shown} "):
        documents_of(tmp_path / name)


def test_files_in_folders_and_patterns_are_returned_once_in_order(tmp_path, monkeypatch):
    for name in ("b.txt", "a.md", "sub/c.txt", "sub/picture.png", "code.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    assert documents_of(Path("."), "b.txt", "code.py") == ["a.md", "b.txt", "sub/c.txt", "code.py"]
    assert documents_of(Path("*.txt"), Path("**/c.*")) == ["b.txt", "sub/c.txt"]
    assert documents_of(Path("**/*.txt")) == ["b.txt", "sub/c.txt"]
    assert said_of(Path("*")) == "left out: 1 folder that matches a pattern"


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


@pytest.mark.parametrize(
    "folder, pattern, names",
    [
        ("src", "src/*.py", ["a.py", "b.py"]),
        ("src/sub", "src/sub/*.js", ["d.js"]),
        ("photos[1]", "photos[[]1]/**/*.html", ["about.html"]),
        ("binary", None, []),
    ],
)
def test_the_error_for_a_folder_without_text_files_suggests_a_pattern(folder, pattern, names, tmp_path, monkeypatch):
    """The message did not say how to read a folder of Python files."""
    monkeypatch.chdir(tmp_path)
    texts = ("src/a.py", "src/b.py", "src/.git/c.c", "src/sub/d.js", "photos[1]/sub/about.html")
    for name in (*texts, "photos[1]/a.jpg", "photos[1]/b.jpg", "binary/x.jpg"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(b"\xc3\xa4" * 4000 if name in texts else b"\xff\xd8\0")
    with pytest.raises(CorpusError, match=r"has no \.txt, ") as refused:
        find_sources([folder])
    shown = re.findall('use the pattern "(.*)"', str(refused.value))
    assert shown == ([pattern.replace("/", os.sep)] if pattern else [])
    assert [source.path.name for source in find_sources(shown).sources] == names


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes")
def test_paths_that_are_not_text_files_are_refused(tmp_path, monkeypatch):
    """A pipe was empty when it was read a second time. A name that is too long raised an OSError."""
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "broken.txt").symlink_to("nowhere")
    (tmp_path / "folder.txt").mkdir()
    for name, message in (
        ("pipe.txt", r"pipe\.txt is not a file or a folder; .*standard input"),
        ("x" * 5000, r"x{200}\.\.\.: no such file"),
        ("broken.txt", r"broken\.txt: no such file"),
        ("missing*.txt", "no such file"),
        ("folder.txt", r"folder\.txt: this folder has no \.txt, "),
    ):
        with pytest.raises(CorpusError, match=message):
            find_sources([str(tmp_path / name) if len(name) < 5000 else name])
    (tmp_path / "a.txt").write_text("a")
    assert documents_of(tmp_path) == ["a"]

    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", denied)  # chmod does not stop root
    with pytest.raises(CorpusError, match=r"folder\.txt cannot be read: Permission denied"):
        find_sources([str(tmp_path / "folder.txt")])


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
    (tmp_path / "x.csv").write_bytes(b'text\r\n"a\r\nb\rc"\r')
    for path in tmp_path.iterdir():
        assert documents_of(path, keep_line_ends=True) == ["a\r\nb\rc"]
        assert documents_of(path) == ["a\nb\nc"]


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
