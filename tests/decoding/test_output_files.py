"""Files of generated text."""

from pathlib import Path

import pytest

from folio import UserError
from folio.data.sources.music import events_of_file
from folio.data.tokenizer import ByteTokenizer, MidiTokenizer
from folio.decoding.output_files import output_paths, save_text
from tests.support.music import SCORE


def test_several_texts_have_numbered_files(tmp_path):
    path, numbered = tmp_path / "a.b.txt", [tmp_path / f"a.b-{number}.txt" for number in (1, 2, 3)]
    assert output_paths(path, 3, ByteTokenizer()) == numbered
    numbered[1].write_text("mine")
    with pytest.raises(UserError, match=r"^save=.*a\.b\.txt: .*a\.b-2\.txt already exists; remove it"):
        output_paths(path, 3, ByteTokenizer())
    assert output_paths(path, 1, ByteTokenizer()) == [path]


@pytest.mark.parametrize(
    "name, tokenizer, message",
    [
        ("x.mid", ByteTokenizer(), r".* use \.txt"),
        ("x.txt", MidiTokenizer(["NoteOn_60"], {}), r".* use \.mid"),
        ("gone/x.txt", ByteTokenizer(), "the folder .*gone does not exist; create it"),
    ],
)
def test_an_unsuitable_output_path_is_an_error(name, tokenizer, message, tmp_path):
    with pytest.raises(UserError, match=rf"^save=\S*: {message}"):
        output_paths(tmp_path / name, 1, tokenizer)


def test_a_text_is_saved_as_it_is(tmp_path):
    path = tmp_path / "x.txt"
    assert save_text(path, "é\n日本", ByteTokenizer()) == f"{path}: 4 characters"
    assert path.read_text(encoding="utf-8") == "é\n日本"
    tune = "X:1\nM:2/4\nL:1/8\nK:G\nABcd|"
    assert save_text(tmp_path / "x.abc", tune, ByteTokenizer()).endswith(f": {len(tune)} characters")
    assert "which are not a tune in ABC notation" in save_text(tmp_path / "x.abc", "no tune", ByteTokenizer())
    with pytest.raises(UserError, match=r"x\.txt cannot be written"):
        save_text(Path(path, "x.txt"), "a", ByteTokenizer())


def test_music_is_saved_as_midi(tmp_path):
    """Two notes of a beat each, at 80 beats per minute."""
    pytest.importorskip("miditok")
    events = "NoteOn_60 TimeShift_1.0.4 NoteOff_60 NoteOn_62 TimeShift_1.0.4 NoteOff_62"
    line = save_text(tmp_path / "x.mid", events, SCORE.tokenizer())
    assert line == f"{tmp_path / 'x.mid'}: 2 notes, 1.5 s"
    assert events_of_file(tmp_path / "x.mid", SCORE) == events
    assert "was not written: " in save_text(tmp_path / "y.mid", "TimeShift_1.0.4", SCORE.tokenizer())
    assert not (tmp_path / "y.mid").exists()
