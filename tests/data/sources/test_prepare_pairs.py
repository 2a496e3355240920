"""Preparing a data set of pairs from tables and objects."""

import gzip
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from folio import UserError
from folio.data.inputs import SizeLimits, find_sources
from folio.data.sources.prepare_pairs import select_validation
from tests.support.prepared import assert_same_data_set, content, interrupted_after, prepare_pairs, read_pairs

QUESTIONS = [(f"What is {k}, twice?", f"It is {2 * k}.") for k in range(20)]
EXPECTED = sorted((question, f" {answer}") for question, answer in QUESTIONS)
CSV = "".join(f'"{question}",{answer}\n' for question, answer in QUESTIONS)
TABLES = {
    "a.tsv": "".join(f"{question}\t{answer}\n" for question, answer in QUESTIONS),
    "a.csv": CSV,
    "b.csv": "Question,Answer\n" + CSV,
    "c.tsv": "number\tcompletion\tprompt\n" + "".join(f"{n}\t{a}\t{q}\n" for n, (q, a) in enumerate(QUESTIONS)),
    "c.tsv.csv": CSV,  # it was split at tabs
    "d.tsv": "".join(f"{n}\t{q}\t{n + 7}\t{a}\n" for n, (q, a) in enumerate(QUESTIONS)),  # as of Tatoeba
    "anki.txt": "#separator:tab\n#html:true\n#tags column:3\n" + "".join(f"{q}\t{a}\tx y\n" for q, a in QUESTIONS),
    "more.txt": "#separator:Semicolon\n" + "".join(f"{q};{a}\n" for q, a in QUESTIONS),
    "a.tsv.gz": "".join(f"{question}\t{answer}\r\n\r\n" for question, answer in QUESTIONS),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_two_columns(tmp_path, name):
    """The error for a .tsv file said to fix the JSON."""
    content = TABLES[name].encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    folder = prepare_pairs(tmp_path / name, name="x")
    assert read_pairs(folder) == EXPECTED
    meta = (folder / "meta.json").stat().st_mtime_ns
    prepare_pairs(tmp_path / name, name="x")
    assert (folder / "meta.json").stat().st_mtime_ns == meta  # not prepared again


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", "x", r"a\.txt is text without records; use JSON .*, tables"),
        ("a.csv", "a,b,c\n1,2,3\n", r"a\.csv: it has 3 columns; .*prompt and completion"),
        ("a.csv", "question,reply\na,b\n", r"a\.csv: its first row, question, reply, may be a header or a pair; begin"),
        ("a.tsv", "#html\ta\n#css\n", r"a\.tsv:2: .* 1 cell"),  # the first row was taken for one of Anki's lines
    ],
)
def test_other_tables_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        prepare_pairs(tmp_path / name)


def test_a_table_in_the_folder_of_the_data_set_is_not_replaced(tmp_path):
    """--overwrite=True, which an error message suggests, deleted it."""
    (tmp_path / "a").mkdir()
    table = tmp_path / "a" / "a.csv"
    table.write_text(CSV)
    with pytest.raises(UserError, match="would replace; set another --name"):
        prepare_pairs(table, data_dir=str(tmp_path), overwrite=True)
    assert table.read_text() == CSV


def test_the_path_of_a_table_does_not_change_the_data_set(tmp_path, monkeypatch, capsys):
    """The same command in another folder prepared another data set."""
    (tmp_path / "a.csv").write_text(CSV)
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "a.csv", Path("a.csv")):
        prepare_pairs(path)
    assert "is already prepared" in capsys.readouterr().out


def test_an_interrupted_preparation_is_resumed_for_the_same_pairs_only(tmp_path, monkeypatch, capsys):
    """Shards of other pairs must not be mixed with the new ones."""
    path = tmp_path / "a.csv"
    path.write_text(CSV)
    monkeypatch.setattr("folio.data.sources.pairs.find_sources", partial(find_sources, limits=SizeLimits(block=100)))
    straight = prepare_pairs(path, name="straight", shard_tokens=100)
    for name in ("same", "other"):
        with interrupted_after(4, monkeypatch):
            prepare_pairs(path, name=name, shard_tokens=100)
    assert_same_data_set(prepare_pairs(path, name="same", shard_tokens=100), straight)
    assert len(content(straight)) > 8
    assert "resuming after" in capsys.readouterr().out
    path.write_text(CSV.replace("It is", "It's "))
    other = prepare_pairs(path, name="other", shard_tokens=100)
    assert "resuming after" not in capsys.readouterr().out
    assert read_pairs(other) == [(question, answer.replace("It is", "It's ")) for question, answer in EXPECTED]


def test_a_pair_that_cannot_be_encoded_is_located_in_its_table(tmp_path):
    (tmp_path / "a.csv").write_text(CSV)
    (tmp_path / "b.tsv").write_text("What is 1?\tIt is 2.\nWhat is π?\tIt is 3.\n", encoding="utf-8")
    plain = prepare_pairs(tmp_path / "a.csv", tokenizer="char")
    with pytest.raises(UserError, match=r"b\.tsv:2: the character 'π'.*--on_unknown=skip"):
        prepare_pairs(tmp_path / "b.tsv", tokenizer=str(plain))


def test_groups_are_in_one_split_near_the_fraction(seed):
    rng = np.random.default_rng(seed)
    groups = rng.integers(0, 2**64, 100, dtype=np.uint64)[rng.integers(0, 100, 5000)]
    val = select_validation(groups.tolist(), 0.1)
    train = np.setdiff1d(np.arange(5000), val)
    assert not {*groups[val].tolist()} & {*groups[train].tolist()}
    _, sizes = np.unique(groups, return_counts=True)
    assert abs(len(val) - 500) <= sizes.max() / 2  # one of two numbers that differ by a group is as near
    assert select_validation([5, 5, 7], 0.999).tolist() == [0, 1] and select_validation([5, 7], 1e-9).tolist() == [0]
