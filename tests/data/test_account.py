"""Conservation: each character of an input is in a document, or is counted. Independent parsers say what is in it.

The parsers are Python's json and gzip, pyarrow's tables, and for CSV a regular expression of RFC 4180.
"""

import gzip
import io
import json
import lzma
import os
import random
import re
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import dropwhile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from pyarrow import parquet

from folio import UserError
from folio.base.files import read_json
from folio.data.account import Account
from folio.data.blocks import DocumentPart, encode
from folio.data.corpus import Corpus
from folio.data.inputs import SizeLimits, Source, find_sources
from folio.data.prepare import prepare
from folio.data.sources.bitext import read_aligned, translation_columns, translation_pair
from folio.data.sources.pairs import pair_corpus
from folio.data.tokenizer import ByteTokenizer
from prepare import summaries
from tests.support.prepared import config, corpus_of, read_back

MUTATIONS = 2000
BLOCKS = (1, 2, 3, 7, 64, 1 << 20)  # sizes in bytes, so that each boundary occurs
BOM = b"\xef\xbb\xbf"


@dataclass
class Content:
    """What is in an input, according to an independent parser: its documents, and counts by unit and category."""

    documents: list[str]
    counts: dict[str, Counter[str]] = field(default_factory=dict)


class Refused(ValueError):
    """The independent parser does not accept the file."""


# --- what Folio reads -------------------------------------------------------------------------------------------------


def read(corpus: Corpus) -> tuple[list[str], dict[str, dict[str, int]]]:
    """The documents in the token ids of all blocks, of which parts are joined, and the account."""
    account, documents, pending, bytes_read = corpus.account(), [], "", 0
    for block in corpus.blocks():
        encoded = encode(block, ByteTokenizer(), 256, masked=False)
        account.add(block.account)
        account.add(encoded.account)
        assert encoded.lengths.sum() == len(encoded.ids)
        assert block.bytes_read >= bytes_read
        bytes_read = block.bytes_read
        for ids in np.split(encoded.ids, np.cumsum(encoded.lengths))[:-1]:
            pending += bytes(ids[ids != 256].astype(np.uint8)).decode()
            if not isinstance(block, DocumentPart) or block.last:
                documents.append(pending)
                pending = ""
    assert not pending
    if any(documents) and corpus.sources[-1].compression != "xz":  # its last bytes are read after the text
        assert bytes_read == corpus.bytes
    counts = account.to_json()
    counts.pop("documents", None)
    assert counts.pop("document bytes", {"in": 0})["in"] == sum(len(text.encode()) for text in documents)
    Account(counts).check()
    return documents, counts


def unified(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def assert_counts(counts: dict[str, dict[str, int]], expected: Content) -> None:
    for unit, categories in expected.counts.items():
        assert counts.get(unit, {}) == dict(+categories), unit


def check(path: Path, expected: Content, block: int = 1 << 20, **settings: Any) -> None:
    """Assert that Folio finds the same documents and counts in a file as the independent parser."""
    corpus = corpus_of(path, limits=SizeLimits(block=block, document=4 * block, word=8 * block), **settings)
    documents, counts = read(corpus)
    assert documents == expected.documents
    assert_counts(counts, expected)


# --- what independent parsers read ------------------------------------------------------------------------------------


def decoded(content: bytes) -> str:
    """The text of a file without a byte-order mark."""
    text = content.decode("utf-8")
    if "\0" in text:
        raise Refused("zero byte")
    return text.removeprefix("\ufeff")


def of_text(content: bytes, separator: str | None = None, keep: bool = False) -> Content:
    raw = decoded(content)
    text = raw if keep else unified(raw)
    documents = text.split(separator) if separator else [text]
    if separator and len(documents) == 1:
        raise Refused("the separator does not occur")
    separators = (len(documents) - 1) * len((separator or "").encode())
    if separator and not documents[-1]:
        documents.pop()
    counts = Counter({"in": len(content), "text": sum(len(document.encode()) for document in documents)})
    counts["line ends"] = 0 if keep else raw.count("\r\n")
    counts["byte-order marks"] = len(BOM) * content.startswith(BOM)
    counts["separators"] = separators
    return Content(documents, {"bytes": counts})


def of_subtitles(content: bytes) -> Content:
    """Blocks of lines, which are notes, or a number or a name, times, and text."""
    text, space = unified(decoded(content)), " \t\v\f"
    time = r"[ \t]*([0-9]+:)?[0-9]+:[0-9]{2}([,.:][0-9]+)?[ \t]*-->.*"
    document, is_text, has_notes = "", True, text.startswith("WEBVTT")
    for block in re.split(rf"\n(?:[{space}]*\n)+", f"\n\n{text}\n\n"):
        lines = [line for line in block.split("\n") if line.strip(space)]
        is_note = bool(lines) and bool(re.match(r"(WEBVTT|NOTE|STYLE|REGION)\b", lines[0], re.ASCII)) and has_notes
        is_time = [re.fullmatch(time, line) is not None for line in [*lines, ""]]
        for number, line in enumerate(lines):
            is_name = is_time[number + 1] and (number == 0 or re.fullmatch(rf"[{space}]*[0-9]+[{space}]*", line))
            is_note = is_note and not is_time[number]
            is_text = not (is_note or is_time[number] or is_name)
            document += f"{line}\n" if is_text else ""
    has_end = text.endswith("\n") or not text.rpartition("\n")[2].strip(space)
    return Content([document if has_end or not is_text else document.removesuffix("\n")])


def strings(value: Any) -> Iterator[str]:
    """Each string in a JSON value, except names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings(item)


def replaced(text: str) -> str:
    """The text with a question mark for each lone surrogate, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def of_records(records: list[Any], bytes: Counter[str]) -> Content:
    """The texts of records, and the counts of their characters and of other fields."""
    if not all(isinstance(r, dict) and isinstance(r.get("text", 0), str | None) for r in records):
        raise Refused("not text")
    records = [unique([(replaced(name), value) for name, value in record.items()]) for record in records]
    documents = [replaced(unified(record["text"] or "")) for record in records]
    characters = Counter({"in": sum(len(text) for record in records for text in strings(record))})
    characters["line ends"] = sum(text.count("\r\n") for record in records for text in strings(record))
    characters["used"] = sum(map(len, documents))
    others = [{name: value for name, value in record.items() if name != "text"} for record in records]
    characters["unused"] = sum(len(unified(text)) for record in others for text in strings(record))
    counts = {
        "bytes": bytes,
        "characters": characters,
        "records": Counter({"in": len(records), "documents": len(records)}),
        "unused fields": Counter(name for record in records for name in record if name != "text"),
        "line ends": Counter({r"\r in fields": sum(t.count("\r") for r in records for t in strings(r))}),
    }
    return Content(documents, counts)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise Refused("a name occurs twice")
    return dict(pairs)


def of_json_lines(content: bytes) -> Content:
    lines = re.split(rb"\r\n|\r|\n", content.removeprefix(BOM))
    line_ends = len(content.removeprefix(BOM)) - sum(map(len, lines))
    used = [line for line in lines if line.strip()]
    records = [json.loads(decoded(line), object_pairs_hook=unique) for line in used]
    counts = Counter({"in": len(content), "records": sum(map(len, used)), "line ends of records": line_ends})
    counts["blank lines"] = sum(len(line) for line in lines if not line.strip())
    counts["byte-order marks"] = len(BOM) * content.startswith(BOM)
    return of_records(records, counts)


def of_json_array(content: bytes) -> Content:
    text = decoded(content)
    records = json.loads(text, object_pairs_hook=unique)
    if not isinstance(records, list):
        raise Refused("not an array")
    content_read = of_records(records, Counter())
    del content_read.counts["bytes"]  # json does not say where a record begins
    return content_read


def rfc4180(text: str, delimiter: str, quoted: bool) -> Iterator[list[str]]:
    """Yield the rows of a table, where a quote within a cell that does not begin with one is text."""
    d = re.escape(delimiter)
    plain = rf"(?!\")[^{d}\r\n]*" if quoted else rf"[^{d}\r\n]*"
    cell = re.compile(rf'(?:"(?P<quoted>(?:[^"]|"")*)"|(?P<plain>{plain}))(?P<end>{d}|\r\n|\r|\n|\Z)')
    if not quoted:
        cell = re.compile(rf"(?P<quoted>\b\B)?(?P<plain>{plain})(?P<end>{d}|\r\n|\r|\n|\Z)")
    row: list[str] = []
    position = 0
    while position < len(text) or row:
        match = cell.match(text, position)
        if match is None:
            raise Refused("not CSV")
        row.append(match["plain"] if match["quoted"] is None else match["quoted"].replace('""', '"'))
        position = match.end()
        if match["end"] != delimiter:
            yield [] if row == [""] and match["quoted"] is None else row  # a blank line
            row = []


def of_table(content: bytes, delimiter: str = ",", quoted: bool = True) -> Content:
    rows = list(rfc4180(decoded(content), delimiter, quoted))
    if rows and rows[0] in ([f"sep={delimiter}"], ["sep=", ""]):
        rows.pop(0)
    rows = list(dropwhile(lambda row: not "".join(row).strip(), filter(None, rows)))
    rows = [row for row in rows if len(row) in (2, len(rows[0])) or row[0].strip()]  # white space is a blank line
    header, *cells = rows or [[]]
    if len(set(header)) < len(header) or any(len(row) != len(header) for row in cells):
        raise Refused("another number of cells")
    if header and "text" not in header:
        raise Refused("no text")
    content_read = of_records([dict(zip(header, row, strict=True)) for row in cells], Counter())
    del content_read.counts["bytes"]
    return content_read


def of_parquet(content: bytes) -> Content:
    columns = parquet.read_schema(io.BytesIO(content)).names
    if columns.count("text") != 1:
        raise Refused("no text")
    table = parquet.read_table(io.BytesIO(content), columns=["text"])
    rows = table.num_rows
    texts = [t.decode() if isinstance(t, bytes) else t or "" for t in table.column("text").to_pylist()]
    characters = Counter({"in": sum(map(len, texts)), "used": sum(len(unified(text)) for text in texts)})
    characters["line ends"] = sum(text.count("\r\n") for text in texts)
    counts = {
        "characters": characters,
        "records": Counter({"in": rows, "documents": rows}),
        "unused fields": Counter({name: rows for name in columns if name != "text"}),
        "line ends": Counter({r"\r in fields": sum(text.count("\r") for text in texts)}),
    }
    return Content([unified(text) for text in texts], counts)


# --- files of every format --------------------------------------------------------------------------------------------

ALPHABET = "ab ,;|\t\n\r\"'\\é日🎉:-<>[]{}=1\u2028\x0b\x0c\x85\ufeff"
texts = st.text(st.sampled_from(ALPHABET), max_size=10)
blocks = st.sampled_from(BLOCKS)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
names = texts.filter(lambda name: name != "text")
records = st.builds(
    lambda text, others: {**others, "text": text}, texts | st.none(), st.dictionaries(names, values, max_size=2)
)
line_ends = st.sampled_from(["\n", "\r\n", "\r"])
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pyarrow.compress(content, codec="zstd", asbytes=True),
}
compressions = st.sampled_from(list(COMPRESS))
marks = st.sampled_from([b"", b"", BOM])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inputs")


def saved(folder: Path, name: str, content: bytes, suffix: str = "") -> Path:
    path = folder / f"{name}{suffix}"
    path.write_bytes(COMPRESS[suffix](content))
    return path


@given(st.lists(texts, max_size=6), line_ends, marks, blocks, compressions, st.data())
def test_each_byte_of_a_text_is_in_a_document_or_counted(folder, lines, line_end, mark, block, suffix, data):
    content = mark + line_end.join(lines).encode()
    keep = data.draw(st.booleans())
    separator = data.draw(st.sampled_from([None, "\n", "\n\n", "a", "ab", " \n"]))
    path = saved(folder, data.draw(st.sampled_from(["x.txt", "x.md", "x"])), content, suffix)
    settings = dict(format="text", split_on=separator, keep_line_ends=keep)
    try:
        expected = of_text(content, separator, keep)
    except Refused:
        with pytest.raises(UserError, match="split_on"):
            check(path, Content([]), block, **settings)
        return
    check(path, expected, block, **settings)


TIMES = """00:01:02,345 --> 00:01:04,000
01:02.345 --> 01:04.000 align:start
1:00:01,000-->1:00:02,000
0:01.5 --> 0:02
00:00:03:000 --> 00:00:04:000"""
times = st.sampled_from(TIMES.splitlines())
spoken = st.text(st.sampled_from("ab é日.,:-5"), min_size=1, max_size=8).filter(lambda text: text.strip(" 5"))
cues = st.tuples(st.sampled_from(["", "1\n", "27\n", "name\n"]), times, st.lists(spoken, min_size=1, max_size=3))


@given(st.lists(cues, min_size=1, max_size=4), st.booleans(), line_ends, marks, blocks, compressions)
def test_each_byte_of_subtitles_is_text_or_counted(folder, cues, is_vtt, line_end, mark, block, suffix):
    parts = [("notes in subtitles", "WEBVTT - title\n"), ("blank lines", "\n")] * is_vtt
    for name, time, lines in cues:
        parts += [("numbers of subtitles", name), ("times", f"{time}\n"), *(("text", f"{line}\n") for line in lines)]
        parts += [("blank lines", "\n")]
    parts += [("notes in subtitles", "NOTE a\nb --> c\n"), ("blank lines", "\n")] * is_vtt
    text = "".join(part for _, part in parts)
    counts = Counter({"byte-order marks": len(mark), "line ends": text.count("\n") * (len(line_end) - 1)})
    for category, part in parts:
        counts[category] += len(part.encode())
    content = mark + text.replace("\n", line_end).encode()
    counts["in"] = len(content)
    path = saved(folder, f"x.{'vtt' if is_vtt else 'srt'}", content, suffix)
    spoken = "".join(part for category, part in parts if category == "text")
    check(path, Content([spoken], {"bytes": counts}), block)


@given(st.lists(st.tuples(records, st.booleans()), max_size=5), marks, blocks, compressions, st.data())
def test_each_character_of_json_lines_is_in_a_document_or_counted(folder, records, mark, block, suffix, data):
    line_end = data.draw(st.sampled_from(["\n", "\r\n", "\n\n", "\n \t\n"]))
    lines = [json.dumps(record, ensure_ascii=escaped) for record, escaped in records]
    content = mark + (line_end.join(lines) + data.draw(st.sampled_from(["", line_end]))).encode()
    path = saved(folder, data.draw(st.sampled_from(["x.jsonl", "x.ndjson", "x.json"])), content, suffix)
    check(path, of_json_lines(content), block)


@given(st.lists(records, max_size=5), marks, blocks, compressions, st.data())
def test_each_character_of_a_json_array_is_in_a_document_or_counted(folder, records, mark, block, suffix, data):
    indent, escaped = data.draw(st.sampled_from([None, 0, 2])), data.draw(st.booleans())
    text = json.dumps(records, indent=indent, ensure_ascii=escaped) + data.draw(st.sampled_from(["", "\n"]))
    path = saved(folder, data.draw(st.sampled_from(["x.json", "x.jsonl"])), mark + text.encode(), suffix)
    check(path, of_json_array(mark + text.encode()), block)


def table(rows: list[list[str]], delimiter: str, line_end: str, quote: str = "", quote_all: bool = False) -> bytes:
    """Write a table. quote: additional characters because of which a cell is quoted."""
    special = re.compile(f'[{re.escape(delimiter)}\r\n"{quote}]')

    def written(cell: str) -> str:
        return '"' + cell.replace('"', '""') + '"' if quote_all or special.search(cell) else cell

    return line_end.join(delimiter.join(map(written, row)) for row in rows).encode()


cells = st.lists(st.tuples(texts, texts).map(list), max_size=5)


@given(cells, st.sampled_from(",;\t|"), line_ends, marks, blocks, compressions, st.data())
def test_each_character_of_a_table_is_in_a_document_or_counted(
    folder, rows, delimiter, line_end, mark, block, suffix, data
):
    """All delimiters, with and without Excel's first line, sep=; and with every way to quote."""
    # A table of one column does not say its delimiter: the default one is quoted in it, others are text.
    one_column = [["text"]] if delimiter in ",\t" else []
    header = data.draw(st.sampled_from([["text", "other"], ["other", "text"], *one_column]))
    first = data.draw(st.sampled_from([b"", f"sep={delimiter}{line_end}".encode()])) if len(header) > 1 else b""
    rows = [header, *(row[: len(header)] for row in rows)]
    content = mark + first + table(rows, delimiter, line_end, quote_all=data.draw(st.booleans()))
    path = saved(folder, "x.tsv" if delimiter == "\t" else "x.csv", content, suffix)
    assume(delimiter != "\t" or b'"' not in content or not is_table_of_unquoted_cells(content))
    check(path, of_table(content, delimiter), block)


def is_table_of_unquoted_cells(content: bytes) -> bool:
    """Whether all rows have the same number of cells if quotes are text; then they are taken for text."""
    return len({len(row) for row in rfc4180(decoded(content), "\t", quoted=False) if row}) == 1


@given(cells, line_ends, marks, blocks)
def test_quotes_of_an_unquoted_tsv_are_text(folder, rows, line_end, mark, block):
    rows = [[re.sub(r"[\t\r\n]", "", cell) for cell in row] for row in rows]
    rows = [row for row in rows if not any(cell.startswith('"') for cell in row)] + [['"a" is quoted', '1" b']]
    content = mark + line_end.join("\t".join(row) for row in [["text", "other"], *rows]).encode()
    check(saved(folder, "x.tsv", content), of_table(content, "\t", quoted=False), block)


@given(cells, marks, blocks)
def test_each_character_of_excels_tsv_is_in_a_document_or_counted(folder, rows, mark, block):
    """Excel quotes cells with a comma, also in .tsv files. With tabs in each line of a cell, the lines may be rows."""
    rows = [[cell.replace("\t", "") if re.search("[\r\n]", cell) else cell for cell in row] for row in rows]
    content = mark + table([["text", "other"], *rows], "\t", "\r\n", quote=",")
    check(saved(folder, "x.tsv", content), of_table(content, "\t"), block)


TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "dictionary")


parquet_settings = st.fixed_dictionaries(
    dict(
        row_group_size=st.sampled_from([1, 3, 1000]),
        compression=st.sampled_from(["none", "zstd"]),
        use_dictionary=st.booleans(),
    )
)


@given(st.lists(texts | st.none(), max_size=40), st.sampled_from(TYPES), blocks, parquet_settings)
@example(["a", None, "b"], "string", 1 << 20, {})  # None caused a traceback in tools/evaluate.py
def test_each_character_of_parquet_is_in_a_document_or_counted(folder, lines, kind, block, settings):
    """Columns of dictionaries, views, and binary text were refused."""
    if kind == "dictionary":
        values = pyarrow.array(lines, "string").dictionary_encode()
    else:
        encoded = [None if line is None else line.encode() for line in lines] if "binary" in kind else lines
        values = pyarrow.array(encoded, getattr(pyarrow, kind)())
    columns = {"id": list(range(len(lines))), "text": values, "nested": [{"a": ["b"]}] * len(lines)}
    parquet.write_table(pyarrow.table(columns), folder / "x.parquet", **settings)
    check(folder / "x.parquet", of_parquet((folder / "x.parquet").read_bytes()), block)


# --- damaged files ----------------------------------------------------------------------------------------------------


def of_source(source: Source, content: bytes) -> Content:
    """What an independent parser reads in a file whose format is known."""
    if source.format == "csv":
        return of_table(content, source.delimiter, source.quoted)
    parsers = dict(text=of_text, jsonl=of_json_lines, json=of_json_array, parquet=of_parquet, subtitles=of_subtitles)
    return parsers[source.format](content)


def mutated(content: bytes, rng: random.Random) -> bytes:
    """A copy that is truncated, or with bytes changed, inserted, deleted, or repeated, or with lines swapped."""
    damaged, place = bytearray(content), rng.randrange(len(content))
    kind = rng.randrange(7)
    if kind == 0:
        return content[:place]
    if kind == 1:
        for _ in range(rng.choice([1, 3, 10])):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    elif kind == 2:
        damaged[place] ^= 1 << rng.randrange(8)
    elif kind == 3:
        del damaged[place : place + rng.randrange(1, 20)]
    elif kind == 4:
        parts = [rng.randbytes(rng.randrange(1, 5)), *(c.encode() for c in ALPHABET), BOM, b"\0", b"\xed\xa0\x80"]
        damaged[place:place] = rng.choice(parts)
    elif kind == 5:
        damaged[place:place] = content[rng.randrange(len(content)) :][: rng.randrange(1, 50)]
    else:
        lines = content.splitlines(keepends=True)
        rng.shuffle(lines)
        return b"".join(lines)
    return bytes(damaged)


LINES = ["first, one", 'a "quoted" one', "größer; 日本", "", "two\nlines", "🎉 | last", "tab\there", "\r\n"]


def valid_files() -> dict[str, bytes]:
    """A small file of each format, by name."""
    rows = [["other", "text"], *([str(number), line] for number, line in enumerate(LINES))]
    plain = [[cell.replace("\t", " ").replace("\n", " ").strip("\r ") for cell in row] for row in rows]
    records = [{"text": line, "other": {"a": [line, number]}} for number, line in enumerate(LINES)]
    subtitles = [
        f"{number}\n00:00:0{number},000 --> 00:00:0{number},500\n{line}x\n" for number, line in enumerate(LINES)
    ]
    files = {
        "x.txt": "\r\n".join(LINES).encode(),
        "x.srt": "\n".join(subtitles).encode(),
        "x.vtt": "\n".join(["WEBVTT\n", *subtitles]).encode(),
        "x.jsonl": "\n".join(json.dumps(record, ensure_ascii=False) for record in records).encode(),
        "x.json": json.dumps(records, indent=1).encode(),
        "comma.csv": BOM + table(rows, ",", "\r\n"),
        "semicolon.csv": table(rows, ";", "\n", quote_all=True),
        "sep.csv": b"sep=|\r\n" + table(rows, "|", "\r\n"),
        "pandas.tsv": table(rows, "\t", "\n"),
        "excel.tsv": table(rows, "\t", "\r\n", quote=","),
        "literal.tsv": "\n".join("\t".join(row) for row in plain).encode(),
    }
    for kind in ("string", "binary", "dictionary"):
        file = io.BytesIO()
        values = pyarrow.array(LINES, "binary" if kind == "binary" else "string")
        values = values.dictionary_encode() if kind == "dictionary" else values
        parquet.write_table(pyarrow.table({"text": values, "id": range(len(LINES))}), file, row_group_size=3)
        files[f"{kind}.parquet"] = file.getvalue()
    compressed = zip(("x.jsonl", "comma.csv", "x.txt"), (".gz", ".xz", ".zst"), strict=True)
    return files | {f"{name}{suffix}": COMPRESS[suffix](files[name]) for name, suffix in compressed}


def check_damaged(path: Path, content: bytes, block: int) -> str:
    """Assert that a damaged file is refused in one line, or read as by an independent parser. Returns which."""
    path.write_bytes(content)
    try:
        corpus = corpus_of(path, limits=SizeLimits(block=block))
        documents, counts = read(corpus)
    except UserError as error:
        assert str(error) and "\n" not in str(error) and str(path.parent) in str(error), error
        return "refused"
    (source,) = corpus.sources
    if source.compression:
        content = DECOMPRESS[path.suffix](content)  # raises an error if the file is damaged
    if source.format != "parquet":
        assert counts.get("bytes", {"in": 0})["in"] == len(content)
    try:
        expected = of_source(source, content)
    except (ValueError, RecursionError, pyarrow.ArrowException, OSError):
        return "read, but not by the independent parser"
    assert documents == expected.documents
    assert_counts(counts, expected)
    return "read"


DECOMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.decompress,
    ".xz": lzma.decompress,
    ".zst": lambda content: pyarrow.CompressedInputStream(io.BytesIO(content), "zstd").read(),
}


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", valid_files())
def test_a_damaged_file_is_refused_or_read_without_a_silent_change(name, times, tmp_path, seed):
    content, rng = valid_files()[name], random.Random(seed)
    assert check_damaged(tmp_path / name, content, 7) == "read"
    count = times * MUTATIONS // len(valid_files())
    outcomes = [check_damaged(tmp_path / name, mutated(content, rng), rng.choice(BLOCKS)) for _ in range(count)]
    assert "refused" in outcomes


@pytest.mark.skipif(sys.platform != "linux", reason="file names are Unicode on other systems")
@pytest.mark.parametrize("name", valid_files())
def test_files_whose_names_are_not_utf8_are_read(name, tmp_path):
    """A parquet file with such a name ended in a traceback."""
    path = tmp_path / os.fsdecode(b"\xe9" + name.encode())
    path.write_bytes(valid_files()[name])
    assert check_damaged(path, valid_files()[name], 7) == "read"


# --- several files ----------------------------------------------------------------------------------------------------


LEFT_OUT = {
    ".hidden": "hidden file",
    ".git/config": "hidden folder",
    "__MACOSX/._x.txt": "__MACOSX folder",
    "node_modules/a.md": "node_modules folder",
    "picture.png": ".png file",
    "a.py": ".py file",
    "b.py": ".py file",
    "one.json": ".json file without records",
}


def test_each_file_of_a_folder_is_in_the_shards_or_counted(tmp_path):
    """All formats in one folder, beside files that are left out, prepared as a data set."""
    folder, documents, size = tmp_path / "in", [], 0
    for name in LEFT_OUT:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "unused",\n "of": "one object"}')
    for name, content in valid_files().items():
        path = folder / name
        path.write_bytes(content)
        (source,) = corpus_of(path).sources
        content = DECOMPRESS.get(path.suffix, bytes)(content)
        documents += of_source(source, content).documents
        size += 0 if source.format == "parquet" else len(content)
    corpus = corpus_of(folder)
    assert corpus.bytes == sum(map(len, valid_files().values()))
    data = prepare(config(tmp_path, val_fraction=0.3), corpus, "a")
    train, val = read_back(data, "train"), read_back(data, "val")
    assert sorted(train + val) == sorted(filter(None, documents))
    account = read_json(data / "report.json")["account"]
    assert account["bytes"]["in"] == size
    files = account["files"]
    assert sum(n for name, n in files.items() if name.startswith("read as ")) == len(valid_files())
    assert files.pop("in") == len(valid_files()) + len(LEFT_OUT)
    assert {name: n for name, n in files.items() if not name.startswith("read as ")} == Counter(LEFT_OUT.values())
    sizes = dict(train=len(train), val=len(val), empty=documents.count(""))
    assert account["documents"] == {"in": len(documents), **sizes}
    sizes = {name: sum(len(text.encode()) for text in texts) for name, texts in (("train", train), ("val", val))}
    assert account["document bytes"] == {"in": sum(sizes.values()), **sizes}


# --- pairs ------------------------------------------------------------------------------------------------------------

words = st.text(st.sampled_from("ab é日.,🎉"), max_size=6)
word_pairs = st.lists(st.tuples(words, words), min_size=1, max_size=6)


def of_pairs(corpus: Corpus) -> tuple[list[Any], dict[str, dict[str, int]]]:
    account = corpus.account()
    documents = list(corpus.documents(account))
    account.check()
    return documents, account.to_json()


PAIR_RECORDS: dict[str, Callable[[str, str, str], dict[str, Any]]] = {
    "completion": lambda a, b, c: {"prompt": a, "completion": b, "topic": c},
    "alpaca": lambda a, b, c: {"instruction": a, "input": c, "output": b, "id": 5},
    "messages": lambda *texts: {
        "messages": [{"role": r, "content": texts[n]} for r, n in (("system", 2), ("user", 0), ("assistant", 1))]
    },
    "sharegpt": lambda a, b, c: {
        "conversations": [{"from": "human", "value": a}, {"from": "gpt", "value": b}],
        "source": {"name": [c]},
    },
}


@given(
    st.sampled_from(list(PAIR_RECORDS)), word_pairs, words, st.sampled_from(["x.jsonl", "x.json", "x.parquet"]), blocks
)
def test_each_text_of_a_pair_is_in_its_document_or_counted(folder, kind, pairs, third, name, block):
    records = [PAIR_RECORDS[kind](prompt, completion, third) for prompt, completion in pairs]
    if name == "x.parquet":
        parquet.write_table(pyarrow.Table.from_pylist(records), folder / name)
    else:
        lines = "\n".join(map(json.dumps, records)) if name == "x.jsonl" else json.dumps(records)
        (folder / name).write_text(lines)
    inputs = find_sources([str(folder / name)], limits=SizeLimits(block=block))
    try:
        documents, counts = of_pairs(pair_corpus(inputs))
    except UserError as error:
        assert not all(completion.strip() for _, completion in pairs), error
        return
    assert counts.get("characters", {"in": 0})["in"] == sum(len(text) for r in records for text in strings(r))
    used = 0
    for record, (prompt, completion), document in zip(records, pairs, documents, strict=True):
        if document is None:
            assert not completion.strip()
            continue
        used += sum(map(len, strings(record))) - (0 if "input" in record or "messages" in record else len(third))
        text = "".join(text or "" for text, _ in document)
        assert all(part.strip() in text for part in (prompt, completion))
        assert third.strip() in text or {"topic", "source"} & counts["unused fields"].keys()
    assert counts.get("characters", {}).get("used", 0) == used


TABLES: dict[str, Callable[[int, str, str], list[str]]] = {
    "two columns": lambda number, en, de: [en, de],
    "header": lambda number, en, de: [de, str(number), en],
    "tatoeba": lambda number, en, de: [str(number), en, str(number + 7), de],
    "anki": lambda number, en, de: [en, de, f"CC-BY 2.0 (France) Attribution: tatoeba.org #{number}"],
}


JSON_LINES: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "json": lambda en, de: {"en": en, "de": de, "note": ["n"]},
    "nested json": lambda en, de: {"translation": {"en": en, "de": de, "note": ["n"]}, "id": "i"},
}


@pytest.mark.needs("babel")
@given(st.sampled_from([*TABLES, *JSON_LINES]), word_pairs, st.sampled_from(["x.tsv", "x.csv"]), blocks, line_ends)
def test_each_text_of_a_translation_is_in_its_pair_or_counted(folder, kind, pairs, name, block, line_end):
    if kind in JSON_LINES:
        name, rows = "x.jsonl", [JSON_LINES[kind](*texts) for texts in pairs]
        (folder / name).write_text("\n".join(map(json.dumps, rows)))
    else:
        rows = [TABLES[kind](number, *texts) for number, texts in enumerate(pairs)]
        header = [["German", "key", "English"]] * (kind == "header")
        (folder / name).write_bytes(table(header + rows, "\t" if name == "x.tsv" else ",", line_end))
    inputs = find_sources([str(folder / name)], limits=SizeLimits(block=block))
    columns = partial(translation_columns, ("en", "de"))
    documents, counts = of_pairs(Corpus(inputs, partial(translation_pair, ("en", "de")), name_columns=columns))
    used = []
    for texts, document in zip(pairs, documents, strict=True):
        en, de = (text.strip() for text in texts)
        if en and de:
            assert (document["prompt"], document["completion"]) == (f"en: {en} | de:", f" {de}")
            used += [en, de]
        else:
            assert document is None
    check_characters(counts, used, rows)
    if kind in JSON_LINES:
        assert counts["unused fields"]["note" if kind == "json" else "translation.note"] == len(pairs)


def check_characters(counts: dict[str, dict[str, int]], used: list[str], records: list[Any]) -> None:
    characters = counts.get("characters", {})
    left_out = counts.get("left out of records", {}).items()
    trimmed = sum(n for reason, n in left_out if reason.startswith("character of "))
    assert characters.get("used", 0) == sum(map(len, used))
    assert characters.get("left out of used fields", 0) == trimmed
    assert characters.get("in", 0) == sum(len(text) for record in records for text in strings(record))


@given(word_pairs, line_ends, marks, blocks)
def test_each_line_of_aligned_files_is_in_a_pair(folder, pairs, line_end, mark, block):
    account, sources = Account(), []
    for number, name in enumerate(("x.en", "x.de")):
        (folder / name).write_bytes(mark + "".join(pair[number] + line_end for pair in pairs).encode())
        sources += find_sources([str(folder / name)], limits=SizeLimits(block=block)).sources
    assert list(read_aligned(*sources, account)) == pairs
    account.check()
    texts = sum(len(text.encode()) for pair in pairs for text in pair)
    assert account["bytes"]["text"] == texts
    assert account["bytes"]["in"] == texts + 2 * (len(mark) + len(line_end) * len(pairs))


@given(word_pairs, st.integers(1, 8), blocks)
def test_each_text_of_a_summary_is_in_its_pair_or_counted(folder, pairs, length, block):
    records = [{"article": document, "highlights": text, "id": "i"} for document, text in pairs]
    (folder / "x.jsonl").write_text("\n".join(map(json.dumps, records)))
    inputs = find_sources([str(folder / "x.jsonl")], limits=SizeLimits(block=block))
    documents, counts = of_pairs(Corpus(inputs, partial(summaries.summary_pair, length)))
    used = []
    for (document, text), pair in zip(pairs, documents, strict=True):
        if not document.strip() or not text.strip():
            assert pair is None
            continue
        used += [pair["prompt"].removesuffix("\n\nTL;DR:"), pair["completion"].removeprefix(" ")]
        assert document.strip().startswith(used[-2]) and len(used[-2]) <= length and used[-1] == text.strip()
    check_characters(counts, used, records)


# --- large files ------------------------------------------------------------------------------------------------------


def large_files() -> dict[str, bytes]:
    """Half a megabyte of each text format."""
    record = json.dumps({"text": "a few words " * 4})
    return {
        "x.txt": b"a few words\n" * 42_000,
        "x.srt": b"1\n00:00:01,000 --> 00:00:02,000\na few words\n\n" * 12_000,
        "x.jsonl": f"{record}\n".encode() * 9_000,
        "x.json": f"[{', '.join([record] * 9_000)}]".encode(),
        "x.csv": b"text,other\n" + b'"a few\nwords",other\n' * 26_000,
        "x.tsv": b"text\tother\n" + b"a few words\tother\n" * 30_000,
        "x.txt.gz": gzip.compress(b"a few words\n" * 42_000),
    }


@pytest.mark.parametrize("name", large_files())
def test_only_a_few_blocks_of_a_large_file_are_in_memory(name, tmp_path):
    """A file of subtitles was read as a whole."""
    (tmp_path / name).write_bytes(large_files()[name])
    corpus = corpus_of(tmp_path / name, limits=SizeLimits(block=4_000))
    tracemalloc.start()
    size = sum(len(text) for item in corpus.blocks() for text in item.documents(Account()))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 250_000 and size > 120_000


# --- regressions ------------------------------------------------------------------------------------------------------


def documents_of(path: Path, content: bytes, block: int = 1 << 20) -> list[str]:
    path.write_bytes(content)
    return read(corpus_of(path, limits=SizeLimits(block=block)))[0]


def test_blocks_of_a_json_array_may_end_anywhere(tmp_path):
    """A valid file was refused if a block ended after a comma, or within a last record longer than a block."""
    content = json.dumps([{"text": "a"}, {"text": "b" * 100}], indent=1).encode()
    for block in range(1, len(content)):
        assert documents_of(tmp_path / "x.json", content, block) == ["a", "b" * 100]


def test_a_json_array_costs_linear_time(tmp_path, monkeypatch):
    """Many small records, and one of many blocks."""
    parsed = 0

    class Decoder(json.JSONDecoder):
        def raw_decode(self, s, idx=0):
            nonlocal parsed
            end = len(s)  # if it is incomplete
            try:
                value, end = super().raw_decode(s, idx)
            finally:
                parsed += end - idx
            return value, end

    monkeypatch.setattr(json, "JSONDecoder", Decoder)
    texts = [*map(str, range(20_000)), "a" * 5_000_000, "b"]
    content = json.dumps([{"text": text} for text in texts]).encode()
    assert documents_of(tmp_path / "x.json", content, block=100_000) == texts
    assert parsed < 6 * len(content)
