"""Records of JSON, tables, and parquet files: a row per kind in docs/use/data.md."""

import json

import pyarrow
import pytest
from pyarrow import parquet

from folio.data.account import describe
from folio.data.inputs import CorpusError, SizeLimits, find_sources
from tests.support.prepared import corpus_of

LONG = "a line\n" * 20_000
TABLES = {  # name, content, texts of the column "text", what is said; test_account.py has the regular tables
    "semicolons": ("x.csv", "id;text\n1;a, b\n2;c\n", ["a, b", "c"], "cells are separated by semicolons"),
    "bars": ("x.csv", "id|text\n1|a, b\n", ["a, b"], "cells are separated by vertical bars"),
    "decimal commas": ("x.csv", "n;text\n1,5;a\n2,5;b\n", ["a", "b"], "separated by semicolons"),
    "commas in each row": ("x.csv", "text;a (b, c)\nd;1,5\ne;2,5\n", ["d", "e"], "separated by semicolons"),
    "blank lines": ("x.csv", "text\na\n\nb\n", ["a", "b"], ""),
    "only a byte-order mark": ("x.csv", "\ufeff", [], ""),  # "not enough values to unpack"
    "only blank lines": ("x.csv", "\ufeff\n\n", [], ""),
    "pandas index": ("x.csv", ",text\n0,a\n", ["a"], "unused fields: (without a name)"),
    "all quoted": ("x.tsv", '"id"\t"text"\n"1"\t"a"\n', ["a"], ""),
    "literal quotes": ("x.tsv", 'id\ttext\n1\t"Yes," he said.\n2\t"no"\n', ['"Yes," he said.', '"no"'], ""),
    "a quoted row over two lines": ("x.tsv", 'id\ttext\n1\t"a\nb"\n2\tc\n', ["a\nb", "c"], ""),
    "a quotation over two rows": ("x.tsv", 'id\ttext\n1\t"Where?\n2\the said."\n', ['"Where?', 'he said."'], ""),
    "quotes within cells": ("x.tsv", 'id\ttext\n1\t5" wide\n2\t"yes, sir"\n', ['5" wide', '"yes, sir"'], ""),
    "literal cells": ("x.tsv", 'id\ttext\n1\t"no"\n2\tyes, sir\n', ['"no"', "yes, sir"], ""),
    "quoted below the header": ("x.tsv", 'id\ttext\n1\t"a"\n2\t"b, c"\n', ["a", "b, c"], ""),
    "one column of an unknown kind": ("x.dat", 'text\n"a, b"\nc\n', ["a, b", "c"], ""),
    "trailing delimiters": ("x.csv", "id,text,,\n1,a,,\n", ["a"], "unused fields: column 3, column 4, id"),
    "sep in quotes": ("x.csv", '"SEP=;"\r\n"id";"text"\r\n1;"a, b"\r\n', ["a, b"], "semicolons"),
    "a header like Anki's": ("x.csv", "#tags,text\na,b\n", ["b"], "unused fields: #tags"),
    "Anki": ("x.csv", "#separator:tab\n#html:true\n#columns:id\ttext\nid\ttext\n1\ta, b\n", ["a, b"], "by tabs"),
    "a dot in a name": ("x.csv", "text,a.b\nc,d\n", ["c"], "unused fields: a.b"),
    # rows were divided at other line breaks of Unicode, and an incomplete row of the head had fewer cells
    "line breaks of Unicode": ("x.csv", "text;other\na\f, b\u2028;c\n", ["a\f, b\u2028"], "semicolons"),
    "a row longer than the head": ("x.csv", 'text;other\n"' + LONG + '";c\n', [LONG], "semicolons"),
}


def read(path, **settings) -> tuple[list[str], str]:
    """The documents, and what is said about the file."""
    corpus = corpus_of(path, **settings)
    account = corpus.account()
    documents = list(corpus.documents(account))
    return documents, "\n".join([*corpus.notes, *describe(account)])


@pytest.mark.parametrize("kind", TABLES)
def test_tables(kind, tmp_path):
    """A CSV file with another delimiter was refused, and quotes of .tsv files were part of the text."""
    name, content, texts, said = TABLES[kind]
    (tmp_path / name).write_bytes(content.encode())
    documents, lines = read(tmp_path / name, format="csv")
    assert documents == texts
    assert said in lines


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("x.csv", b"id,text\n1,a, b\n", r"x\.csv:2: .* 3 cells, but 2 .*quote"),
        ("x.csv", b"id,text\n1,a\nb\n", r"x\.csv:3: .* 1 cell, but 2"),
        ("x.csv", b"id,text,\n1,a,,\n", r"x\.csv:2: .* 4 cells, but 3"),
        ("x.csv", b"a,b\n1,2,3\n", r"x\.csv:2: .*3 cells, but 2"),  # it raised a TypeError
        ("x.csv", b'text\n"a"b\n', r"x\.csv:2: .*not CSV"),
        ("x.csv", b'text\n"open\n', r"x\.csv:\d: .*not CSV"),
        ("x.csv", b"text,n,text\na,1,b\n", r"x\.csv: several columns .*'text'; rename"),  # the last one was used
        ("x.csv", b"Text\na\n", r"no column 'text', only Text; set --field"),
        ("x.csv", b"text\ncaf\xe9\n", r"x\.csv:2, .* UTF-8"),
        # the quote was the delimiter, which newer versions of the csv module refuse
        ("x.csv", b'sep="\ntext"a\nb"c\n', "no column 'text'"),
        # messages had the line ends of names
        ("x.csv", b'"a\nb",c\n1,2\n', "only a b, c"),
        ("x.jsonl", b'{"text": "a"}\n\n{"text": \n', r"x\.jsonl:3: .*not JSON"),
        ("x.jsonl", b'{"text": "a"}\n[1]', r"x\.jsonl:2: .*not an object"),
        ("x.jsonl", b'{"texts": "a", "b": 1}', r"x\.jsonl:1: .*'text', only b, texts; set --field"),
        ("x.jsonl", b'{"text": 5}', r"x\.jsonl:1: .*'text' is int, .*--field"),
        ("x.jsonl", b'{"text": "a", "text": "b"}\n', r"x\.jsonl:1: .*'text' occurs twice"),  # the last one was used
        ("x.jsonl", b'{"text": "caf\xe9"}', r"x\.jsonl:1: .*not UTF-8"),
        # one of the two values was lost
        ("x.jsonl", rb'{"text": "a", "?": 1, "\ud800": 2}', r"x\.jsonl:1: .*'\?' occurs twice"),
        ("x.json", rb'[{"text": "a", "n": {"?": 1, "\ud800": 2}}]', r"record 0: .*'\?' occurs twice"),
        # json.loads accepts encoded surrogates, which became question marks that were not counted
        ("x.jsonl", b'{"text": "a\xed\xa0\x80"}\n{"text": "b"}', "not UTF-8"),
        ("x.jsonl", b'{"text": "a", "n": ' + b"1" * 5000 + b"}", r"x\.jsonl:1: .*not JSON"),
        # a RecursionError
        ("x.jsonl", b'{"text": "\\ud800", "n": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", r"x\.jsonl:1: .* not JSON"),
        ("x.json", b'[{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]", "record 0: .* not JSON"),
        ("x.json", b'["a", "b"]', "this JSON is not a list of objects"),
        ("x.json", b'{\n "data": [1]\n}\n', "this JSON is not a list of objects; write one object per line"),
        ("x.json", b'{\n "text": "a"\n}\n{\n "text": "b"\n}\n', "neither an object per line nor an array; use jq -c"),
        ("x.json", b'[{"text": "a"}', "ends within its JSON array"),
        ("x.json", b'[{"text": "a"}] and', "text after its JSON array"),
        ("x.json", b'[{"text": "a"}, 5]', "record 1: this is not an object"),
        # the account did not add up: U+2028 was a separator, and a part of a character at the end was ignored
        ("x.json", '[{"text": "a"},\u2028{"text": "b"}]'.encode(), r"x\.json"),
        ("x.json", '[{"text": "a"}]\u2028'.encode(), r"x\.json"),
        ("x.json", b'[{"text": "a"}]\xe6', "not UTF-8"),
    ],
)
def test_records_that_would_lose_text_are_refused(name, content, message, tmp_path):
    """A cell with an unquoted comma lost its text after the comma."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=message) as error:
        read(tmp_path / name)
    assert "\n" not in str(error.value)


SMALL_RECORDS = SizeLimits(block=100, record=1000, row=1000)


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
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        read(tmp_path / name, limits=SMALL_RECORDS)


@pytest.mark.parametrize("name, head, record", [("x.jsonl", "", '{{"text": "{0}"}}\n'), ("x.csv", "text\n", '"{0}"\n')])
def test_the_limit_of_a_record_is_not_a_limit_of_the_file(name, head, record, tmp_path):
    text = "\n".join("a" * 400) if name == "x.csv" else "a" * 900
    (tmp_path / name).write_bytes((head + 3 * record.format(text)).encode())
    assert read(tmp_path / name, limits=SMALL_RECORDS)[0] == [text] * 3


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_json_says_what_it_does_not_use(suffix, tmp_path):
    records = [{"text": "a", "url": "u", "meta": {"n": 1}}, {"text": None, "more": ["m"]}, {"text": "\ud800b"}]
    content = "".join(f"{json.dumps(record)}\n" for record in records) if suffix == "jsonl" else json.dumps(records)
    (tmp_path / f"x.{suffix}").write_text(content)
    documents, said = read(tmp_path / f"x.{suffix}")
    assert documents == ["a", "", "?b"]
    assert said == "unused fields: meta, more, url\nchanged: 1 lone surrogate (now ?)"


@pytest.mark.parametrize("name", ["in", "documents", "used"])
def test_an_unused_field_may_have_the_name_of_a_category(name, tmp_path):
    """The values of a field "in" were taken for the number of all: "2 unused fields were read, but 4 were used"."""
    records = [{name: "x", "more": "y", "other": "z", "text": text} for text in "ab"]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "x.csv").write_text(f"{name},more,other,text\nx,y,z,a\nx,y,z,b\n")
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "x.parquet")
    for path in tmp_path.iterdir():
        corpus = corpus_of(path)
        account = corpus.account()
        assert list(corpus.documents(account)) == ["a", "b"]
        account.check()
        assert [*describe(account)] == [f"unused fields: {', '.join(sorted([name, 'more', 'other']))}"]


@pytest.mark.parametrize(
    "old, new, message",
    [
        # 3 rows, and the list of their groups, in Thrift's compact protocol, where n >= 0 is 2n, and n < 0 is -2n - 1.
        # A negative number ended in a ZeroDivisionError, and rows were left out without a word.
        *(
            (b"\x16\x06\x19\x1c", bytes([0x16, code, 0x19, 0x1C]), f"damaged: .* 3 rows, and the file has {rows}$")
            for rows, code in ((-3, 5), (0, 0), (2, 4), (4, 8))
        ),
        # "optional" is "required", which the statistics contradict: pyarrow ended the process, without an exception
        (b"%\x02\x18\x04text", b"%\x00\x18\x04text", r"x\.parquet is damaged after row 0: .*; download it again"),
        (b"other", b"othe\xff", "is not a parquet file, or damaged"),  # a UnicodeDecodeError
    ],
)
def test_a_parquet_file_with_a_damaged_footer_is_refused(old, new, message, tmp_path):
    table = pyarrow.table({"text": ["some text"] * 3, "other": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "x.parquet", store_schema=False)
    content = (tmp_path / "x.parquet").read_bytes()
    assert old in content
    (tmp_path / "x.parquet").write_bytes(content.replace(old, new))
    with pytest.raises(CorpusError, match=message):
        read(tmp_path / "x.parquet")
    with pytest.raises(CorpusError, match="damaged"):
        _ = corpus_of(tmp_path / "x.parquet").text_bytes


def test_errors_in_parquet_files_give_the_location_and_the_reason(tmp_path):
    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table([["a"], ["b"]], names=["text", "text"]), path)
    with pytest.raises(CorpusError, match=r"several columns .*'text'; rename"):  # it raised a KeyError
        read(path)
    strings = pyarrow.array([b"fine", b"caf\xe9"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": strings}), path)
    with pytest.raises(CorpusError, match=r"x\.parquet, row 1: .* byte 3; "):
        read(path)
    parquet.write_table(pyarrow.table({"text": [f"some text {k}" for k in range(5000)]}), path)
    content = path.read_bytes()
    path.write_bytes(content[:1000] + b"\xff" * 2000 + content[3000:])
    with pytest.raises(CorpusError, match=r"x\.parquet .*after row 0"):
        read(path)
    parquet.write_table(pyarrow.table({"id": [1], "body": ["a"]}), path)
    with pytest.raises(CorpusError, match="column 'text', only id, body; set --field"):
        read(path)
    with pytest.raises(CorpusError, match=r"'id' is int64, .*--field"):
        read(path, field="id")
    assert read(path, field="body") == (["a"], "unused fields: id")


def test_the_size_of_a_parquet_file_is_that_of_its_column_of_text(tmp_path):
    """Not of a nested field with the same name."""
    table = pyarrow.table({"a": [{"text": "wrong" * 1000}, {"text": "wrong"}], "text": ["b", "c"]})
    parquet.write_table(table, tmp_path / "x.parquet", compression="none", use_dictionary=False)
    assert read(tmp_path / "x.parquet")[0] == ["b", "c"]
    assert corpus_of(tmp_path / "x.parquet").text_bytes < 500


def test_notes_name_how_a_file_is_read(tmp_path):
    (tmp_path / "log.txt").write_text('{"text": "a"}\n')
    (note,) = find_sources([str(tmp_path / "log.txt")]).notes
    assert note.endswith("log.txt is read as JSON lines, because of its content; if not: --format=text")
