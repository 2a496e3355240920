"""Tunes in ABC notation: reduction to the music, removal of repetitions, and splits."""

import gzip
import random
from pathlib import Path

import pytest

from folio import UserError
from folio.data.sources.tunes import TuneError, decode, reduce_tune, remove_duplicates, split_tunes
from prepare import tunes as prepare_tunes
from prepare.tunes import TunesConfig
from tests.support.hub import fake_wheel
from tests.support.music import mutated, pieces_of, tune
from tests.support.prepared import read_report

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


@pytest.mark.parametrize(
    "text, reduced",
    [
        (TUNE, REDUCED),
        (REDUCED, REDUCED),
        # the default length of a note follows the standard
        ("X:1\nK:G\nABc", "X:1\nM:none\nL:1/8\nK:G\nABc\n"),
        ("X:1\nM:2/4\nK:G\nABc", "X:1\nM:2/4\nL:1/16\nK:G\nABc\n"),
        ("X:1\nM:3/4\nK:G\nABc", "X:1\nM:3/4\nL:1/8\nK:G\nABc\n"),
        ("X:1\nM:C\nK:G\nABc", "X:1\nM:C\nL:1/8\nK:G\nABc\n"),
        # a line may begin with a note and a repeat
        ("X:1\nK:G\n|:ABc\nd:|\nA::B:|\n", "X:1\nM:none\nL:1/8\nK:G\n|:ABc\nd:|\nA::B:|\n"),
    ],
)
def test_a_tune_is_reduced_to_its_music(text, reduced):
    assert reduce_tune(text) == reduced


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
        "corpus/a/1.abc": "\n".join([*expected[:30], expected[3]]),
        "corpus/b/2.abc": "\n".join([*expected[30:], "X:9\nK:G\nV:1\nA"]),
        "corpus/b/3.abc": "no tune",
        "corpus/a/1.txt": tune(rng),
        "other.abc": tune(rng),
    }
    wheel = fake_wheel(tmp_path / "music21.whl", files, root="music21/")
    monkeypatch.setattr(prepare_tunes, "music21_wheel", lambda: wheel)
    folder = prepared(tmp_path)
    val, train = pieces_of(folder, "val"), pieces_of(folder, "train")
    assert sorted(val + train) == sorted(expected) and len(val) == 4
    assert read_report(folder)["left_out"] == {
        "broken": [],
        "no tune": ["b/3.abc (it has no line X:)"],
        "not usable": ["b/2.abc X:9 (it has several voices)"],
    }
    printed = capsys.readouterr().out
    assert "40 tunes: 36 for training and 4 for validation; repetitions left out: 1" in printed
    assert "left out 1 of 43 tunes and files (not usable): b/2.abc X:9 (it has several voices)" in printed


@pytest.fixture
def tunes_file(tmp_path) -> Path:
    """A file of ten tunes."""
    rng = random.Random(8)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "all.abc").write_text("\n".join(tune(rng) for _ in range(10)))
    return tmp_path / "mine" / "all.abc"


def test_user_files(tunes_file, tmp_path):
    (tunes_file.parent / "one.abc").write_text(tune(random.Random(9)))
    (tunes_file.parent / "notes.txt").write_text("ignored")
    folder = prepared(tmp_path, str(tunes_file.parent), name="mine", val_fraction=0.2)
    assert [len(pieces_of(folder, split)) for split in ("val", "train")] == [2, 9]


def test_a_tune_with_a_huge_number_is_skipped(tunes_file, tmp_path, capsys):
    """A meter with 5,000 digits, which Python does not convert to an integer, caused a traceback."""
    digits = "1" * 5000
    (tmp_path / "huge.abc").write_text(f"X:{digits}\nM:{digits}/4\nK:G\nAB\n\nX:2\nM:4/{digits}\nK:G\nAB\n")
    folder = prepared(tmp_path, str(tmp_path / "huge.abc"), str(tunes_file), name="mine")
    assert sum(read_report(folder)["documents"].values()) == 10
    line = next(line for line in capsys.readouterr().out.splitlines() if "left out 2 of 12" in line)
    assert "(its meter, M:, has a number of more than 9 digits)" in line and len(line) < 500 + 2 * len(str(tmp_path))


def test_an_unreadable_file_is_skipped(tunes_file, tmp_path, capsys):
    content = gzip.compress(TUNE.encode(), mtime=0)
    (tmp_path / "cut.abc.gz").write_bytes(content[: len(content) // 2])
    folder = prepared(tmp_path, str(tmp_path / "cut.abc.gz"), str(tunes_file), name="mine")
    assert sum(read_report(folder)["documents"].values()) == 10
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
    contents = [mutated(f"{TUNE}\n{tune(rng)}".encode(), rng) for _ in range(2000)]
    for k, content in enumerate(contents):
        (tmp_path / "many" / f"{k}.abc").write_bytes(content)
    report = read_report(prepared(tmp_path, str(tmp_path / "many"), name="many"))
    texts = [decode(content) for content in contents if b"\0" not in content]
    total = sum(len(list(split_tunes(text))) for text in texts)
    account, left_out = report["account"], {problem: len(names) for problem, names in report["left_out"].items()}
    assert left_out["no tune"] and left_out["broken"] == 2000 - len(texts)
    assert sum(report["documents"].values()) + report["repetitions"] + left_out["not usable"] == total
    for problem in ("broken", "no tune"):
        assert account["files"][f"file ({problem})"] == left_out[problem]
    assert account["files"]["in"] == 2000
    assert account["characters"]["in"] == sum(map(len, texts))
    assert account["characters"]["used"] > account["characters"]["in"] / 4  # report.json is written if the sum is right
    assert account["tunes"]["in"] == total and account["tunes"]["not usable"] == left_out["not usable"]
