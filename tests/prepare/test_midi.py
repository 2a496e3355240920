"""MIDI files as a data set: splits, transposition, and unusable files."""

import random
from pathlib import Path

import pytest

from folio import UserError
from folio.base.settings import ConfigError, load
from folio.data.shards import open_dataset
from folio.data.sources.music import (
    EventFormat,
    Note,
    PieceError,
    events_of_file,
    events_of_notes,
    notes_of_events,
    sort_notes,
)
from prepare import chorales, midi
from prepare.chorales import ChoralesConfig
from prepare.midi import MidiConfig
from tests.support.hub import fake_wheel
from tests.support.music import mutated, pieces_of, write, write_pieces
from tests.support.prepared import assert_same_data_set, content, read_report


@pytest.fixture
def pieces(tmp_path) -> str:
    """A folder of 5 MIDI files, two of which are one piece in two keys."""
    write_pieces(tmp_path / "pieces", 4)
    return str(tmp_path / "pieces")


def prepared(tmp_path: Path, *inputs: str, **settings) -> Path:
    cfg = MidiConfig(inputs=inputs, **{"data_dir": str(tmp_path / "data"), "num_workers": 0, **settings})
    midi.main(cfg)
    return tmp_path / "data" / (cfg.name or "pieces")


BEATS = dict(time="beats", steps=4, velocities=0)


def test_pieces_are_split_and_only_training_is_transposed(tmp_path, capsys):
    write_pieces(tmp_path / "pieces", 10)
    folder = prepared(tmp_path, str(tmp_path / "pieces"), val_fraction=0.3, **BEATS)
    format = EventFormat.of(open_dataset(folder).load_tokenizer())
    originals = [events_of_file(path, format).split() for path in sorted((tmp_path / "pieces").glob("*.mid"))]
    val = [piece.split() for piece in pieces_of(folder, "val")]
    assert len(val) in (3, 4) and all(piece in originals for piece in val)  # 4: with both copies of the repeated piece
    train = [notes_of_events(piece, format) for piece in pieces_of(folder, "train")]
    expected = [
        [note._replace(pitch=note.pitch + shift) for note in notes_of_events(" ".join(piece), format)]
        for piece in originals
        if piece not in val
        for shift in [0, *range(-5, 0), *range(1, 7)]
    ]
    assert sorted(train) == sorted(expected)
    assert read_report(folder)["pieces"] == {"train": 11 - len(val), "val": len(val)}
    assert f"11 pieces: {11 - len(val)} for training, each in up to 12 keys, and" in capsys.readouterr().out


def test_repeating_the_command_prepares_nothing_and_other_settings_are_refused(pieces, tmp_path, capsys):
    meta = prepared(tmp_path, pieces, **BEATS) / "meta.json"
    before = meta.stat().st_mtime_ns
    prepared(tmp_path, pieces, **BEATS)
    assert "is already prepared" in capsys.readouterr().out
    assert meta.stat().st_mtime_ns == before
    with pytest.raises(UserError, match="contains another data set"):
        prepared(tmp_path, pieces, transpose_up=0, **BEATS)


def test_the_result_does_not_depend_on_the_number_of_processes(pieces, tmp_path):
    assert_same_data_set(prepared(tmp_path, pieces, num_workers=2), prepared(tmp_path, pieces, name="alone"))


def test_the_tokenizer_of_another_data_set_can_be_used(pieces, tmp_path):
    first = prepared(tmp_path, pieces, name="first", **BEATS)
    second = prepared(tmp_path, pieces, name="second", tokenizer=str(first))
    assert content(second) == content(first)


def test_unusable_files_are_reported(pieces, tmp_path, capsys):
    folder = Path(pieces)
    (folder / "hello.mid").write_text("hello")
    (folder / "notes.txt").write_text("not a MIDI file, and ignored in a folder")
    write(folder / "drums.mid", [(0, 480, 36, 90)], drums=(0,))
    write(folder / "empty.midi")
    left_out = read_report(prepared(tmp_path, pieces))["left_out"]
    printed = capsys.readouterr().out
    for problem, name, reason in (
        ("broken", "hello.mid", "it is not a MIDI file"),
        ("empty", "empty.midi", "it has no notes"),
        ("drums only", "drums.mid", "it has only drums"),
    ):
        assert left_out[problem] == [f"{folder / name} ({reason})"]
        assert f"left out 1 of 8 files ({problem}): {folder / name} ({reason})" in printed
    assert len(left_out) == 3


@pytest.mark.needs("miditok", "symusic", "music21")
@pytest.mark.parametrize(
    "pieces, damaged, message",
    [
        (0, 0, r"no \.mid, \.midi"),
        (0, 1, "no file has a piece"),
        (1, 0, "only one piece"),
        (2, 0, "all 2 pieces are the same"),
    ],
)
def test_too_few_pieces_are_refused(pieces, damaged, message, tmp_path):
    (tmp_path / "pieces").mkdir()
    for number in range(pieces):
        write(tmp_path / "pieces" / f"{number}.mid", [(0, 480, 60, 64), (480, 480, 62, 64)])
    for number in range(damaged):
        (tmp_path / "pieces" / f"damaged{number}.mid").write_text("hello")
    with pytest.raises(UserError, match=message) as error:
        prepared(tmp_path, str(tmp_path / "pieces"))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "data" / "pieces").exists()


def test_a_tokenizer_of_text_is_refused(data_dir, tmp_path):
    for name, message in ((str(data_dir / "verse"), "for text"), ("char", "use midi, or the folder")):
        with pytest.raises(UserError, match=message):
            prepared(tmp_path, "a.mid", tokenizer=name)
    with pytest.raises(ConfigError, match=r"name a \.mid file"):
        load(MidiConfig, [])


@pytest.mark.parametrize("setting", ["--time=beats", "--steps=24", "--velocities=0"])
def test_settings_that_a_tokenizer_defines_are_refused(setting):
    with pytest.raises(ConfigError, match=r"tokenizer=out-a: .*time, steps, and velocities"):
        load(MidiConfig, ["a.mid", "--tokenizer=out-a", setting])
    load(MidiConfig, ["a.mid", setting])


def test_2000_damaged_files_are_counted_and_never_crash(tmp_path, seed, capsys):
    rng = random.Random(seed)
    write_pieces(tmp_path / "pieces", 2)
    original = (tmp_path / "pieces" / "0.mid").read_bytes()
    for k in range(2000):
        (tmp_path / "pieces" / f"damaged{k:04d}.mid").write_bytes(mutated(original, rng))
    report = read_report(prepared(tmp_path, str(tmp_path / "pieces"), transpose_down=0, transpose_up=0))
    assert "see report.json" in capsys.readouterr().out
    left_out = [entry.partition(" (")[0] for files in report["left_out"].values() for entry in files]
    assert len(left_out) + sum(report["pieces"].values()) == 2003
    assert report["left_out"]["broken"]  # such as truncated ones, a sixth of them
    unusable = set()
    for path in (tmp_path / "pieces").glob("*.mid"):
        try:
            events_of_file(path, EventFormat())
        except PieceError:
            unusable.add(str(path))
    assert sorted(left_out) == sorted(unusable)


# --- chorales ---------------------------------------------------------------------------------------------------------

HALF, QUARTER, EIGHTH = 20160, 10080, 5040  # durations in music21's files, which have 10,080 divisions per quarter


def music_xml(*parts: list[tuple[str, int, str]]) -> str:
    """A MusicXML score. Each note of a part is a step and octave or "rest", a duration, and additional elements."""
    names = "".join(f'<score-part id="P{n}"><part-name>{n}</part-name></score-part>' for n in range(len(parts)))
    start = "<divisions>10080</divisions><time><beats>4</beats><beat-type>4</beat-type></time>"
    shown = ""
    for number, part in enumerate(parts):
        notes = ""
        for name, duration, other in part:
            pitch = f"<pitch><step>{name[0]}</step><octave>{name[-1]}</octave></pitch>"
            notes += f"<note>{'<rest/>' if name == 'rest' else pitch}<duration>{duration}</duration>{other}</note>"
        measure = f'<measure number="1"><attributes>{start}</attributes>{notes}</measure>'
        shown += f'<part id="P{number}">{measure}</part>'
    return f'<score-partwise version="3.0"><part-list>{names}</part-list>{shown}</score-partwise>'


TIED = [f'<tie type="{end}"/><notations><tied type="{end}"/></notations>' for end in ("start", "stop")]
CHORALE = [
    [("C5", QUARTER, ""), ("D5", EIGHTH, ""), ("E5", EIGHTH, ""), ("C5", HALF, "")],
    [("G4", QUARTER, TIED[0]), ("G4", QUARTER, TIED[1]), ("rest", HALF, "")],
    [("E4", HALF, ""), ("E4", HALF, "")],
    [("E4", QUARTER, ""), ("C3", QUARTER, ""), ("C3", HALF, "")],
]
NOTES_OF_CHORALE = [  # in sixteenths; the tenor and the bass begin together on E4
    *[(0, 8, 64), (0, 8, 67), (0, 4, 72)],
    *[(4, 8, 48), (4, 6, 74), (6, 8, 76)],
    *[(8, 16, 48), (8, 16, 64), (8, 16, 72)],
]


@pytest.mark.needs("miditok", "symusic", "music21")
def test_a_chorale_is_read_on_a_grid_of_sixteenths():
    notes = chorales.notes_of_chorale(music_xml(*CHORALE).encode())
    assert [note[:3] for note in notes] == NOTES_OF_CHORALE
    assert chorales.notes_of_chorale(music_xml(*CHORALE, CHORALE[3]).encode()) is None


@pytest.fixture
def music21_wheel(tmp_path, monkeypatch) -> None:
    """A wheel of two chorales, and of other scores."""
    high = [(name.replace("C5", "F5"), *rest) for name, *rest in CHORALE[0]]
    files = {
        "bach/bwv1.mxl": music_xml(*CHORALE),
        "bach/bwv2.xml": music_xml(high, *CHORALE[1:]),
        "bach/bwv3.mxl": music_xml(*CHORALE[:2]),
        "bach/other.xml": music_xml(*CHORALE),
        "bach/bwv4.krn": "not read",
    }
    wheel = fake_wheel(tmp_path / "music21.whl", files)
    monkeypatch.setattr(chorales, "music21_wheel", lambda: wheel)


@pytest.mark.needs("miditok", "symusic", "music21")
def test_chorales_become_a_data_set(music21_wheel, tmp_path, capsys):
    cfg = ChoralesConfig(data_dir=str(tmp_path / "data"), num_workers=0, transpose_down=1, transpose_up=2)
    chorales.main(cfg)
    assert "2 chorales of 4 parts; 1 scores have another number" in capsys.readouterr().out
    folder = tmp_path / "data" / "chorales"
    format = EventFormat.of(open_dataset(folder).load_tokenizer())
    assert (format.lowest, format.highest, format.steps) == (48 - 1, 77 + 2, 4)
    val, train = pieces_of(folder, "val"), pieces_of(folder, "train")
    assert (len(val), len(train)) == (1, 4)
    notes = [[note[:3] for note in notes_of_events(piece, format)] for piece in (*val, train[0])]
    assert NOTES_OF_CHORALE in notes


def test_a_tokenizer_with_another_grid_is_refused(pieces, music21_wheel, tmp_path):
    """A sixteenth would have the length of one of its steps."""
    folder = prepared(tmp_path, pieces)
    with pytest.raises(UserError, match=r"1/100 second.* 1/4 beat; use midi"):
        chorales.main(ChoralesConfig(data_dir=str(tmp_path / "data"), num_workers=0, tokenizer=str(folder)))


@pytest.mark.needs("miditok", "symusic", "music21")
def test_chorales_with_the_same_melody_are_in_one_split():
    """A held-out chorale had 74 % of its events in common with a training chorale, a variant of the same setting."""
    format = EventFormat("beats", 4, longest_shift=4, velocities=0)
    pitches = [60, 62, 62, 64, 65, 67, 69, 71, 72, 74, 60]
    rising = [Note(4 * k, 4 * k + 4, pitch, 100) for k, pitch in enumerate(pitches)]
    high = [note._replace(pitch=note.pitch + 3) for note in rising]
    with_bass = sort_notes([*high, *(note._replace(pitch=note.pitch - 20) for note in rising)])
    other = [*rising[:5], rising[5]._replace(pitch=66), *rising[6:]]
    keys = [chorales.melody(events_of_notes(notes, format), format) for notes in (rising, with_bass, other)]
    assert keys[0] == keys[1] == str([2, 2, 1, 2, 2, 2, 1, 2]) != keys[2]
