"""sample.py with models of music: MIDI prompts, MIDI output, and tunes."""

import itertools
from pathlib import Path

import pytest

symusic = pytest.importorskip("symusic")

from folio import UserError
from folio.base.settings import ConfigError, load
from folio.data.sources.music import EventFormat, events_of_file, notes_of_events
from sample import SampleConfig, Sampler
from tests.support.sampling import sample_text

FORMAT = EventFormat("beats", steps=4, longest_shift=4, tempo=120.0)


def test_a_piece_is_saved_as_midi_that_begins_with_the_prompt(music_run, tmp_path, capsys):
    prompt, saved = tmp_path / "pieces" / "1.mid", tmp_path / "new.mid"
    events = events_of_file(prompt, FORMAT).split()[:40]
    line = sample_text(music_run, start=f"FILE:{prompt}", start_tokens=40, save=str(saved), max_new_tokens=100)
    score = symusic.Score(saved)
    assert line.startswith(f"{saved}: {score.note_num()} notes, ") and line.count("\n") == 1
    expected = notes_of_events(" ".join(events), FORMAT)
    saved_notes = notes_of_events(events_of_file(saved, FORMAT), FORMAT)
    ended = [note for note in expected if f"NoteOff_{note.pitch}" in events]
    assert ended and set(ended) <= set(saved_notes)
    printed = sample_text(music_run, start=f"FILE:{prompt}", start_tokens=40, max_new_tokens=100).split()
    assert printed[:40] == events and len(printed) > 40
    assert notes_of_events(" ".join(printed), FORMAT) == notes_of_events(events_of_file(saved, FORMAT), FORMAT)
    assert "to save a MIDI file instead: --save=piece.mid" in capsys.readouterr().err


def test_only_pieces_with_notes_are_saved(music_run, tmp_path, monkeypatch):
    """When memory ran out, files of prompts alone were saved, and the command could not be repeated, because they
    existed. Ctrl-C saves what was generated.
    """
    start, saved = "NoteOn_60 Velocity_63 TimeShift_1.0.4", tmp_path / "a.mid"
    with pytest.raises(UserError, match=r"no piece has a note; set a larger --max_new_tokens"):
        sample_text(music_run, start="TimeShift_1.0.4", save=str(saved), max_new_tokens=1, num_samples=2)
    steps = Sampler._steps
    for n_tokens, error, raised, line in (
        (0, MemoryError, UserError, "memory ran out"),
        (10, KeyboardInterrupt, KeyboardInterrupt, "^$"),
    ):

        def stopped(*arguments, n_tokens=n_tokens, error=error):
            yield from itertools.islice(steps(*arguments), n_tokens)
            raise error

        assert not list(tmp_path.glob("*.mid"))
        monkeypatch.setattr(Sampler, "_steps", stopped)
        with pytest.raises(raised, match=line):
            sample_text(music_run, start=start, save=str(saved))
    assert notes_of_events(events_of_file(saved, FORMAT), FORMAT)[0].pitch == 60


def test_several_pieces_are_numbered_and_do_not_overwrite_files(music_run, tmp_path):
    start = "NoteOn_60 Velocity_63 TimeShift_1.0.4"
    lines = sample_text(music_run, start=start, save=str(tmp_path / "new.mid"), num_samples=3, batch_size=2)
    files = [tmp_path / f"new-{k}.mid" for k in (1, 2, 3)]
    assert all(symusic.Score(path).note_num() for path in files) and lines.count("\n") == 3
    with pytest.raises(UserError, match=r"new-1\.mid already exists"):
        sample_text(music_run, start=start, save=str(tmp_path / "new.mid"), num_samples=2)


def test_a_text_is_saved(run, tmp_path):
    assert sample_text(run, start="The", save=str(tmp_path / "a.txt")) == f"{tmp_path / 'a.txt'}: 43 characters\n"
    assert Path(tmp_path / "a.txt").read_text() == sample_text(run, start="The").removesuffix("\n")
    assert sample_text(run, start="The king shall", start_tokens=5) == sample_text(run, start="The k")
    with pytest.raises(ConfigError, match=r"save=a\.mid: .* prompts, interactive,? or logprobs"):
        load(SampleConfig, ["--save=a.mid", "--interactive=True"])
