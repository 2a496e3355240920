"""Preparing a data set of pairs from tables and objects."""

import gzip
from functools import partial

import numpy as np
import pytest

from folio import UserError
from folio.data.inputs import SizeLimits, find_sources
from folio.data.shards import open_dataset
from folio.data.sources.pairs import split_pairs
from folio.data.sources.prepare_pairs import select_validation
from folio.data.tokenizer import ByteTokenizer
from prepare import pairs as prepare_pairs
from prepare.pairs import PairsConfig
from tests.support.prepared import content, interrupted_after

QUESTIONS = [(f"What is {k}, twice?", f"It is {2 * k}.") for k in range(20)]
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
    settings = dict(tokenizer="byte", data_dir=str(tmp_path), name="x")
    prepare_pairs.main(PairsConfig(inputs=(str(tmp_path / name),), **settings))
    dataset = open_dataset(tmp_path / "x")
    pairs = [*split_pairs(dataset.train, ByteTokenizer()), *split_pairs(dataset.val, ByteTokenizer())]
    assert sorted(pairs) == sorted((question, f" {answer}") for question, answer in QUESTIONS)
    meta = (tmp_path / "x" / "meta.json").stat().st_mtime_ns
    prepare_pairs.main(PairsConfig(inputs=(str(tmp_path / name),), **settings))
    assert (tmp_path / "x" / "meta.json").stat().st_mtime_ns == meta  # not prepared again


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", "x", r"a\.txt is text without records; use JSON .*, tables"),
        ("a.csv", "a,b,c\n1,2,3\n", r"a\.csv: it has 3 columns; .*prompt and completion"),
        ("a.csv", "question,reply\na,b\n", r"a\.csv: its first row, question, reply, may be a header or a pair; begin"),
        ("a.tsv", "#html\ta\n#css\n", r"a\.tsv:2: .* 1 cell"),  # the first row was taken for one of Anki's lines
        ("a.tsv", "a\tb\nonly one\n", r"a\.tsv:2: .* 1 cell, but 2 "),
        ("a.csv", 'a,"b\n', r"a\.csv:1: .*not CSV"),
    ],
)
def test_other_tables_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        prepare_pairs.main(PairsConfig(inputs=(str(tmp_path / name),), tokenizer="byte", data_dir=str(tmp_path)))


def test_a_table_in_the_folder_of_the_data_set_is_not_replaced(tmp_path):
    """--overwrite=True, which an error message suggests, deleted it."""
    (tmp_path / "a").mkdir()
    table = tmp_path / "a" / "a.csv"
    table.write_text(CSV)
    cfg = PairsConfig(inputs=(str(table),), tokenizer="byte", data_dir=str(tmp_path), overwrite=True)
    with pytest.raises(UserError, match="would replace; set another --name"):
        prepare_pairs.main(cfg)
    assert table.read_text() == CSV


def test_the_path_of_a_table_does_not_change_the_data_set(tmp_path, monkeypatch, capsys):
    """The same command in another folder prepared another data set."""
    (tmp_path / "a.csv").write_text(CSV)
    monkeypatch.chdir(tmp_path)
    for path in (str(tmp_path / "a.csv"), "a.csv"):
        prepare_pairs.main(PairsConfig(inputs=(path,), tokenizer="byte", data_dir=str(tmp_path)))
    assert "is already prepared" in capsys.readouterr().out


def test_an_interrupted_preparation_is_resumed_for_the_same_pairs_only(tmp_path, monkeypatch, capsys):
    """Shards of other pairs must not be mixed with the new ones."""
    (tmp_path / "a.csv").write_text(CSV)
    monkeypatch.setattr("folio.data.sources.pairs.find_sources", partial(find_sources, limits=SizeLimits(block=100)))
    settings = dict(inputs=(str(tmp_path / "a.csv"),), tokenizer="byte", data_dir=str(tmp_path), shard_tokens=100)
    prepare_pairs.main(PairsConfig(name="straight", **settings))
    with interrupted_after(4, monkeypatch):
        prepare_pairs.main(PairsConfig(name="same", **settings))
    prepare_pairs.main(PairsConfig(name="same", **settings))
    assert "resuming after" in capsys.readouterr().out
    assert content(tmp_path / "same") == content(tmp_path / "straight") and len(content(tmp_path / "same")) > 8
    with interrupted_after(4, monkeypatch):
        prepare_pairs.main(PairsConfig(name="other", **settings))
    (tmp_path / "a.csv").write_text(CSV.replace("It is", "It's "))
    prepare_pairs.main(PairsConfig(name="other", **settings))
    assert "resuming after" not in capsys.readouterr().out
    shards = [shard for split in ("train", "val") for shard in getattr(open_dataset(tmp_path / "other"), split)]
    pairs = [*split_pairs(shards, ByteTokenizer())]
    assert sorted(pairs) == sorted((question, answer.replace("It is", " It's ")) for question, answer in QUESTIONS)


def test_a_pair_that_cannot_be_encoded_is_located_in_its_table(tmp_path):
    (tmp_path / "a.csv").write_text(CSV)
    settings = dict(data_dir=str(tmp_path), name="plain", tokenizer="char")
    prepare_pairs.main(PairsConfig(inputs=(str(tmp_path / "a.csv"),), **settings))
    (tmp_path / "b.tsv").write_text("What is 1?\tIt is 2.\nWhat is π?\tIt is 3.\n", encoding="utf-8")
    settings = dict(data_dir=str(tmp_path), tokenizer=str(tmp_path / "plain"))
    with pytest.raises(UserError, match=r"b\.tsv:2: the character 'π'.*--on_unknown=skip"):
        prepare_pairs.main(PairsConfig(inputs=(str(tmp_path / "b.tsv"),), **settings))


def test_groups_are_in_one_split_near_the_fraction(seed):
    rng = np.random.default_rng(seed)
    groups = rng.integers(0, 2**64, 100, dtype=np.uint64)[rng.integers(0, 100, 5000)]
    val = select_validation(groups.tolist(), 0.1)
    train = np.setdiff1d(np.arange(5000), val)
    assert not {*groups[val].tolist()} & {*groups[train].tolist()}
    _, sizes = np.unique(groups, return_counts=True)
    assert abs(len(val) - 500) <= sizes.max() / 2  # one of two numbers that differ by a group is as near
    assert select_validation([5, 5, 7], 0.999).tolist() == [0, 1] and select_validation([5, 7], 1e-9).tolist() == [0]
