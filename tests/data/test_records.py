"""Records of JSON, tables, and parquet files: a row per kind in docs/use/data.md."""

import json

import pyarrow
import pytest
from pyarrow import parquet

from folio.data.account import describe
from folio.data.inputs import CorpusError, find_sources
from tests.support.prepared import corpus_of

TABLES = {  # name, content, texts of the column "text", what is said
    "commas": ("x.csv", "id,text\n1,a\n2,b\n", ["a", "b"], "unused fields: id"),
    "semicolons": ("x.csv", "id;text\n1;a, b\n2;c\n", ["a, b", "c"], "cells are separated by semicolons"),
    "tabs": ("x.csv", "id\ttext\n1\ta, b\n", ["a, b"], "cells are separated by tabs"),
    "bars": ("x.csv", "id|text\n1|a, b\n", ["a, b"], "cells are separated by vertical bars"),
    "sep": ("x.csv", "sep=;\nid;text\n1;a\n", ["a"], "cells are separated by semicolons"),
    "decimal commas": ("x.csv", "n;text\n1,5;a\n2,5;b\n", ["a", "b"], "separated by semicolons"),
    "quoted": ("x.csv", 'id,text\n1,"a, ""b""\nc"\n', ['a, "b"\nc'], "unused fields: id"),
    "one column": ("x.csv", "text\na\n\nb\n", ["a", "b"], ""),
    "pandas index": ("x.csv", ",text\n0,a\n", ["a"], "unused fields: (without a name)"),
    "Windows": ("x.csv", 'id,text\r\n1,"a\r\nb"\r\n', ["a\nb"], "line ends: 1 "),
    "pandas' tabs": ("x.tsv", 'id\ttext\n1\t"a\tb"\n2\tc\n', ["a\tb", "c"], "unused fields: id"),
    "pandas' quotes": ("x.tsv", 'id\ttext\n1\t"say ""hi"""\n', ['say "hi"'], ""),
    "Excel's tabs": ("x.tsv", 'id\ttext\n1\t"a, b"\n2\tc\n', ["a, b", "c"], ""),
    "all quoted": ("x.tsv", '"id"\t"text"\n"1"\t"a"\n', ["a"], ""),
    "literal quotes": ("x.tsv", 'id\ttext\n1\t"Yes," he said.\n2\t"no"\n', ['"Yes," he said.', '"no"'], ""),
    "a quoted row over two lines": ("x.tsv", 'id\ttext\n1\t"a\nb"\n2\tc\n', ["a\nb", "c"], ""),
    "a quotation over two rows": ("x.tsv", 'id\ttext\n1\t"Where?\n2\the said."\n', ['"Where?', 'he said."'], ""),
    "quotes within cells": ("x.tsv", 'id\ttext\n1\t5" wide\n2\t"yes, sir"\n', ['5" wide', '"yes, sir"'], ""),
    "quoted below the header": ("x.tsv", 'id\ttext\n1\t"a"\n2\t"b, c"\n', ["a", "b, c"], ""),
    "one column of an unknown kind": ("x.dat", 'text\n"a, b"\nc\n', ["a, b", "c"], ""),
    "commas in each row": ("x.csv", "text;a (b, c)\nd;1,5\ne;2,5\n", ["d", "e"], "separated by semicolons"),
    "trailing delimiters": ("x.csv", "id,text,,\n1,a,,\n", ["a"], "unused fields: column 3, column 4, id"),
    "empty cells": ("x.csv", 'text\n""\na\n" "\n\n', ["", "a", " "], ""),
    "sep in quotes": ("x.csv", '"SEP=;"\r\n"id";"text"\r\n1;"a, b"\r\n', ["a, b"], "semicolons"),
    "a header like Anki's": ("x.csv", "#tags,text\na,b\n", ["b"], "unused fields: #tags"),
    "Anki": ("x.csv", "#separator:tab\n#html:true\n#columns:id\ttext\nid\ttext\n1\ta, b\n", ["a, b"], "by tabs"),
    "a dot in a name": ("x.csv", "text,a.b\nc,d\n", ["c"], "unused fields: a.b"),
    "literal cells": ("x.tsv", 'id\ttext\n1\t"no"\n2\tyes, sir\n', ['"no"', "yes, sir"], ""),
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
    "content, message",
    [
        ("id,text\n1,a, b\n", r"x\.csv:2: this row has 3 cells, but 2 .*quote"),
        ("id,text\n1,a\nb\n", r"x\.csv:3: this row has 1 cell, but 2"),
        ("id,text,\n1,a,,\n", r"x\.csv:2: this row has 4 cells, but 3"),
        ('text\n"a"b\n', r"x\.csv:2: this is not CSV"),
        ("text,text\na,b\n", r"several columns have the name 'text'"),
        ("Text\na\n", r"no column 'text', only Text; set --field"),
    ],
)
def test_rows_that_would_lose_text_are_refused(content, message, tmp_path):
    """A cell with an unquoted comma lost its text after the comma."""
    (tmp_path / "x.csv").write_text(content)
    with pytest.raises(CorpusError, match=message):
        read(tmp_path / "x.csv")


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_json_says_what_it_does_not_use(suffix, tmp_path):
    records = [{"text": "a", "url": "u", "meta": {"n": 1}}, {"text": None, "more": ["m"]}, {"text": "\ud800b"}]
    content = "".join(f"{json.dumps(record)}\n" for record in records) if suffix == "jsonl" else json.dumps(records)
    (tmp_path / f"x.{suffix}").write_text(content)
    documents, said = read(tmp_path / f"x.{suffix}")
    assert documents == ["a", "", "?b"]
    assert said == "unused fields: meta, more, url\nchanged: 1 lone surrogate (now ?)"


def test_two_values_of_one_name_are_refused(tmp_path):
    """The first was dropped."""
    (tmp_path / "x.jsonl").write_text('{"text": "a", "text": "b"}\n')
    with pytest.raises(CorpusError, match=r"x\.jsonl:1: the name 'text' occurs twice"):
        read(tmp_path / "x.jsonl")


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


KINDS = {
    "string": pyarrow.string(),
    "large_string": pyarrow.large_string(),
    "string_view": pyarrow.string_view(),
    "binary": pyarrow.binary(),
    "large_binary": pyarrow.large_binary(),
    "dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_parquet_columns_of_every_kind_of_text(kind, tmp_path):
    """Columns of dictionaries, views, and binary text were refused."""
    texts = ["a", None, "é\r\nb", "a"]
    column = (
        pyarrow.array(texts, pyarrow.string()).cast(KINDS[kind])
        if kind != "dictionary"
        else (pyarrow.array(texts).dictionary_encode())
    )
    parquet.write_table(pyarrow.table({"id": range(4), "text": column}), tmp_path / "x.parquet")
    documents, said = read(tmp_path / "x.parquet")
    assert documents == ["a", "", "é\nb", "a"]
    assert said == "unused fields: id\nline ends: 1 \\r in fields are now \\n; --keep_line_ends=True keeps them"


def test_notes_name_how_a_file_is_read(tmp_path):
    (tmp_path / "log.txt").write_text('{"text": "a"}\n')
    (note,) = find_sources([str(tmp_path / "log.txt")]).notes
    assert note.endswith("log.txt is read as JSON lines, because of its content; if not: --format=text")
