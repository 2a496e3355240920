"""Tunes in ABC notation: reduction to the music, removal of repetitions, and splits."""

import gzip
import random
import zipfile
from pathlib import Path

import pytest

from folio import UserError
from folio.base.files import read_json
from folio.data.sources.tunes import TuneError, decode, reduce_tune, remove_duplicates, split_tunes
from prepare import tunes as prepare_tunes
from prepare.tunes import TunesConfig
from tests.support.hub import fake_wheel
from tests.support.music import mutated, pieces_of, tune

TUNE = """X: 12
T: The Rover's Farewell
% a comment
N: "very slow"
Z:A. Transcriber
M: 6/8
L: 1/8
K: E Minor % one sharp
P:A
B |E>GE\tGEG|B>AB  e``2f|\\
w: words of the song
K:G
g>fe d2 :|  % the end

Remarks that follow an empty line.
"""
REDUCED = "X:1\nM:6/8\nL:1/8\nK:E Minor\nB |E>GE GEG|B>AB e2f|\nK:G\ng>fe d2 :|\n"


def test_a_tune_is_reduced_to_its_music():
    assert reduce_tune(TUNE) == REDUCED == reduce_tune(REDUCED)


@pytest.mark.parametrize(
    "header, expected",
    [("", "none\nL:1/8"), ("M:2/4\n", "2/4\nL:1/16"), ("M:3/4\n", "3/4\nL:1/8"), ("M:C\n", "C\nL:1/8")],
)
def test_the_default_note_length_follows_the_standard(header, expected):
    assert reduce_tune(f"X:1\n{header}K:G\nABc") == f"X:1\nM:{expected}\nK:G\nABc\n"


def test_a_line_may_begin_with_a_note_and_a_repeat():
    assert reduce_tune("X:1\nK:G\n|:ABc\nd:|\nA::B:|\n").endswith("K:G\n|:ABc\nd:|\nA::B:|\n")


@pytest.mark.parametrize(
    "text, message",
    [
        ("X:1\nABc", "no key"),
        ("X:1\nK:G\nz4|", "no notes"),
        ("X:1\nK:G\n\nABc", "no notes"),
        ("X:1\nK:G\nK:A", "no notes"),
        ("X:1\nK:G\nV:1\nABc", "several voices"),
        ("X:1\nK:G\nABc♯", "characters"),
        ("X:1\nK:G\nAB\0c", "characters"),
    ],
)
def test_a_tune_that_cannot_be_used_has_a_reason(text, message):
    with pytest.raises(TuneError, match=message):
        reduce_tune(text)


def test_files_with_several_tunes_in_several_encodings():
    text = f"% a collection\n{TUNE}\nX:7\nT:Žluťoučký\nK:G\nABc\n"
    for content in (text.encode(), b"\xef\xbb\xbf" + text.encode(), text.replace("\n", "\r\n").encode()):
        assert [(number, reduce_tune(tune)) for number, tune in split_tunes(decode(content))] == [
            ("X: 12", REDUCED),
            ("X:7", "X:1\nM:none\nL:1/8\nK:G\nABc\n"),
        ]
    assert decode("T:Müller".encode("latin-1")) == "T:Müller"


def test_tunes_that_differ_only_in_white_space_are_duplicates():
    assert remove_duplicates(["A B\nc", "d", "AB c", "d\n"]) == ["A B\nc", "d"]


def prepared(tmp_path: Path, *inputs: str, **settings) -> Path:
    cfg = TunesConfig(inputs=inputs, data_dir=str(tmp_path / "data"), num_workers=0, **settings)
    prepare_tunes.main(cfg)
    return tmp_path / "data" / (cfg.name or "tunes")


def test_each_tune_is_a_document_in_one_split(tmp_path, monkeypatch, capsys):
    rng = random.Random(7)
    expected = [tune(rng) for _ in range(40)]
    files = {
        "a/1.abc": "\n".join([*expected[:30], expected[3]]),
        "b/2.abc": "\n".join([*expected[30:], "X:9\nK:G\nV:1\nA"]),
    }
    wheel = fake_wheel(tmp_path / "music21.whl", files | {"a/1.txt": tune(rng), "b/3.abc": "no tune"})
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("music21/other.abc", tune(rng))
    monkeypatch.setattr(prepare_tunes, "music21_wheel", lambda: wheel)
    folder = prepared(tmp_path)
    val, train = pieces_of(folder, "val"), pieces_of(folder, "train")
    assert sorted(val + train) == sorted(expected) and len(val) == 4
    assert read_json(folder / "report.json")["left_out"] == {
        "broken": [],
        "no tune": ["b/3.abc (it has no line X:)"],
        "not usable": ["b/2.abc X:9 (it has several voices)"],
    }
    printed = capsys.readouterr().out
    assert "40 tunes: 36 for training and 4 for validation; repetitions left out: 1" in printed
    assert "left out 1 of 43 tunes and files (not usable): b/2.abc X:9 (it has several voices)" in printed


def test_user_files(tmp_path):
    rng = random.Random(8)
    (tmp_path / "mine").mkdir()
    for k in range(10):
        (tmp_path / "mine" / f"{k}.abc").write_text(tune(rng))
    (tmp_path / "mine" / "notes.txt").write_text("ignored")
    folder = prepared(tmp_path, str(tmp_path / "mine"), name="mine", val_fraction=0.2)
    assert [len(pieces_of(folder, split)) for split in ("val", "train")] == [2, 8]


def test_a_tune_with_a_huge_number_is_skipped(tmp_path, capsys):
    """A meter with 5,000 digits, which Python does not convert to an integer, caused a traceback."""
    rng = random.Random(10)
    tunes = [tune(rng) for _ in range(10)]
    digits = "1" * 5000
    hostile = [f"X:{digits}\nM:{digits}/4\nK:G\nAB\n", f"X:2\nM:4/{digits}\nK:G\nAB\n"]
    (tmp_path / "all.abc").write_text("\n".join([*hostile, *tunes]))
    folder = prepared(tmp_path, str(tmp_path / "all.abc"), name="mine")
    assert sum(read_json(folder / "report.json")["documents"].values()) == 10
    line = next(line for line in capsys.readouterr().out.splitlines() if "left out 2 of 12" in line)
    assert "(its meter, M:, has a number of more than 9 digits)" in line and len(line) < 500 + 2 * len(str(tmp_path))


def test_an_unreadable_file_is_skipped(tmp_path, capsys):
    rng, content = random.Random(9), gzip.compress(TUNE.encode(), mtime=0)
    (tmp_path / "cut.abc.gz").write_bytes(content[: len(content) // 2])
    (tmp_path / "all.abc").write_text("\n".join(tune(rng) for _ in range(10)))
    folder = prepared(tmp_path, str(tmp_path / "cut.abc.gz"), str(tmp_path / "all.abc"), name="mine")
    assert sum(read_json(folder / "report.json")["documents"].values()) == 10
    assert f"left out 1 of 11 tunes and files (broken): {tmp_path / 'cut.abc.gz'} is damaged" in capsys.readouterr().out


def test_the_name_of_a_tune_contains_only_its_number():
    """It is printed, and a damaged file may contain terminal escape codes."""
    assert [name for name, _ in split_tunes("X: 12\nK:C\nX:\x1b[2J\nK:C\n")] == ["X: 12", "X:"]


def test_files_without_tunes_are_one_line(tmp_path):
    (tmp_path / "a.abc").write_text("no tune")
    with pytest.raises(UserError, match="no file has a piece that can be used") as error:
        prepared(tmp_path, str(tmp_path / "a.abc"))
    assert "\n" not in str(error.value)


def test_2000_damaged_files_are_counted_and_never_crash(tmp_path, seed):
    rng = random.Random(seed)
    (tmp_path / "many").mkdir()
    for k in range(2000):
        (tmp_path / "many" / f"{k}.abc").write_bytes(mutated(f"{TUNE}\n{tune(rng)}".encode(), rng))
    folder = prepared(tmp_path, str(tmp_path / "many"), name="many")
    report = read_json(folder / "report.json")
    contents = [path.read_bytes() for path in (tmp_path / "many").glob("*.abc")]
    total = sum(len(list(split_tunes(decode(content)))) for content in contents if b"\0" not in content)
    assert len(report["left_out"]["broken"]) == sum(b"\0" in content for content in contents)
    used = sum(report["documents"].values()) + report["repetitions"]
    assert used + len(report["left_out"]["not usable"]) == total
    assert report["left_out"]["no tune"]
    account, files = report["account"], {problem: len(names) for problem, names in report["left_out"].items()}
    assert account["files"]["file (broken)"] == files["broken"] and account["files"]["in"] == 2000
    assert account["files"]["file (no tune)"] == files["no tune"]
    assert account["characters"]["in"] == sum(len(decode(content)) for content in contents if b"\0" not in content)
    assert account["characters"]["used"] > account["characters"]["in"] / 4  # report.json is written if the sum is right
    assert account["tunes"]["in"] == total and account["tunes"]["not usable"] == files["not usable"]
