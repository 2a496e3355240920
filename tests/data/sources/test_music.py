"""Conversion between MIDI files and events, against symusic's conversion to seconds and a simple player of events."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

symusic = pytest.importorskip("symusic")

from folio import UserError
from folio.data import tokenizer
from folio.data.sources.music import (
    EventFormat,
    Note,
    PieceError,
    events_of_file,
    events_of_notes,
    notes_of_events,
    notes_of_score,
    place_notes,
    read_score,
    sort_notes,
    transpose,
    write_midi,
)
from folio.data.tokenizer import EncodingError, MidiTokenizer
from tests.support.music import SCORE, write

PERFORMANCE = EventFormat()


def random_notes(rng: random.Random, count: int, velocities: list[int], low: int = 30, high: int = 90) -> list[Note]:
    """Random notes, in which each pitch sounds once at a time."""
    notes, free = [], dict.fromkeys(range(low, high + 1), 0)
    time = 0
    for _ in range(count):
        pitch = rng.randint(low, high)
        start = max(time, free[pitch])
        end = start + rng.choice([1, 2, 3, 4, 8, 30])
        free[pitch] = end
        notes.append(Note(start, end, pitch, rng.choice(velocities)))
        time += rng.choice([0, 0, 1, 2, 4])
    first = min(note.start for note in notes)
    return sort_notes(note._replace(start=note.start - first, end=note.end - first) for note in notes)


def play(events: str, steps: int) -> list[Note]:
    """Return the notes of valid events."""
    time, sounding, played = 0, {}, []
    names = events.split()
    for name, next_name in zip(names, [*names[1:], ""], strict=True):
        kind, value = name.split("_")
        if kind == "TimeShift":
            units, fraction, resolution = map(int, value.split("."))
            assert resolution == steps
            time += units * steps + fraction
        elif kind == "NoteOn":
            velocity = int(next_name.split("_")[1]) if next_name.startswith("Velocity") else 100
            assert int(value) not in sounding
            sounding[int(value)] = (time, velocity)
        elif kind == "NoteOff":
            start, velocity = sounding.pop(int(value))
            played.append(Note(start, time, int(value), velocity))
    assert not sounding
    return sort_notes(played)


def test_the_default_events_match_the_music_transformer():
    """Section 2.1 of Huang et al. 2018: 128 note-ons, 128 note-offs, 100 time-shifts of 10 ms, and 32 velocities."""
    events = PERFORMANCE.tokenizer().events
    kinds = Counter(event.partition("_")[0] for event in events)
    assert kinds == dict(NoteOn=128, NoteOff=128, Velocity=32, TimeShift=100)
    assert "TimeShift_0.1.100" in events  # 1/100 of a beat at 60 beats per minute


@pytest.mark.parametrize("format", [PERFORMANCE, SCORE], ids=["seconds", "beats"])
def test_notes_to_events_and_back(format, tmp_path, seed):
    levels = [int(event.split("_")[1]) for event in format.tokenizer().events if event.startswith("Velocity")] or [100]
    notes = random_notes(random.Random(seed), 1000, levels, format.lowest, format.highest)
    events = events_of_notes(notes, format)
    assert play(events, format.steps) == notes == notes_of_events(events, format)
    encoding = format.tokenizer()
    assert encoding.decode(encoding.encode(events)).split() == events.split()
    assert write_midi(tmp_path / "piece.mid", events, format) == notes
    assert notes_of_score(read_score(tmp_path / "piece.mid"), format) == notes


def test_times_in_seconds_follow_all_tempos(tmp_path, seed):
    """Against symusic's conversion of ticks to seconds."""
    rng = random.Random(seed)
    score, track, time = symusic.Score(96), symusic.Track(), 0
    for k in range(100):
        track.notes.append(symusic.Note(time, rng.randint(10, 200), 30 + k % 50, 64))
        time += rng.randint(1, 300)
    score.tracks.append(track)
    for tick in rng.sample(range(time), 20):
        score.tempos.append(symusic.Tempo(tick, rng.uniform(30, 200)))
    score.dump_midi(tmp_path / "a.mid")
    read = read_score(tmp_path / "a.mid")
    expected = read.to("second").tracks[0].notes.numpy()["time"]
    starts = [note.start / 100 for note in notes_of_score(read, PERFORMANCE)]
    # A start is rounded to 1/100 s, and symusic's are float32, with times below 1000 s: an error of at most 2**-15.
    assert np.abs(starts - expected).max() <= 0.005 + 2**-15


BEAT = 480
PIECES = {  # tracks of notes in ticks, the last of which may be drums, and notes in sixteenths
    "all tracks except drums are one piece from its first note": (
        [[(960, 480, 60, 80)], [(1440, 480, 64, 70)], [(0, 480, 36, 90)]],
        [(0, 4, 60, 80), (4, 8, 64, 70)],
    ),
    "each pitch sounds once at a time, and 95 is outside the range": (
        [[(0, 480, 60, 80), (240, 480, 62, 1)], [(0, 960, 60, 70), (480, 480, 62, 2), (960, 10, 95, 9)], []],
        [(0, 8, 60, 70), (2, 4, 62, 1), (4, 8, 62, 2)],
    ),
    # a damaged file with a time of 2^27 ticks would have millions of events
    "long silences are shortened": (
        [[(0, BEAT, 60, 80), (1 << 27, BEAT, 62, 80)], []],
        [(0, 4, 60, 80), (44, 48, 62, 80)],
    ),
    # the first note is cut at beat 9, and its original end at beat 20 must not divide the gap
    "the original end of a shortened note is no event": (
        [[(0, 20 * BEAT, 60, 80), (9 * BEAT, 12 * BEAT, 60, 80)], []],
        [(0, 36, 60, 80), (36, 36 + 40, 60, 80)],
    ),
}


@pytest.mark.parametrize("tracks, notes", PIECES.values(), ids=PIECES)
def test_notes_of_a_file(tracks, notes, tmp_path):
    path = write(tmp_path / "a.mid", *tracks, drums=(len(tracks) - 1,))
    assert notes_of_score(read_score(path), SCORE) == notes


def test_the_sustain_pedal_extends_notes(tmp_path):
    score, track = symusic.Score(480), symusic.Track()
    for start, pitch in ((0, 60), (480, 61), (1440, 62)):
        track.notes.append(symusic.Note(start, 120, pitch, 64))
    for time, value in ((60, 127), (960, 0)):
        track.controls.append(symusic.ControlChange(time, 64, value))
    score.tracks.append(track)
    score.dump_midi(tmp_path / "a.mid")
    notes = notes_of_score(read_score(tmp_path / "a.mid"), SCORE)
    assert [(note.start, note.end) for note in notes] == [(0, 8), (4, 8), (12, 13)]


def test_the_pedal_that_is_released_last_counts():
    """A short press during a long one must not end it."""
    score, track = symusic.Score(480), symusic.Track()
    track.notes.append(symusic.Note(240, 120, 60, 64))
    track.pedals.append(symusic.Pedal(0, 960))
    track.pedals.append(symusic.Pedal(120, 60))
    score.tracks.append(track)
    assert [note[:2] for note in notes_of_score(score, SCORE)] == [(0, 6)]  # from 0.5 to 2 beats


@pytest.mark.parametrize("format", [PERFORMANCE, SCORE], ids=["seconds", "beats"])
def test_writing_and_reading_any_score_gives_the_same_events(format, tmp_path, seed):
    """With overlapping and repeated notes, pedals, drums, tempo changes, and long silences."""
    rng = random.Random(seed)
    for _ in range(30):
        score = symusic.Score(rng.choice([24, 480, 960]))
        for number in range(rng.randint(1, 3)):
            track = symusic.Track(program=number, is_drum=number == 2)
            for _ in range(rng.randint(1, 60)):
                length, pitch = rng.choice([1, 5, 100, 3000, 100_000]), rng.randint(25, 95)
                track.notes.append(symusic.Note(rng.randrange(5000), length, pitch, rng.randint(1, 127)))
            for _ in range(rng.choice([0, 20])):
                track.controls.append(symusic.ControlChange(rng.randrange(6000), 64, rng.choice([0, 127])))
            score.tracks.append(track)
        for _ in range(rng.randint(0, 4)):
            score.tempos.append(symusic.Tempo(rng.randrange(5000), rng.uniform(20, 300)))
        score.tracks[0].notes.append(symusic.Note(0, 100, 60, 64))  # inside the range
        score.dump_midi(tmp_path / "a.mid")
        events = events_of_file(tmp_path / "a.mid", format)
        write_midi(tmp_path / "b.mid", events, format)
        assert events_of_file(tmp_path / "b.mid", format) == events


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_is_an_error():
    with pytest.raises(OSError, match="No space left"):
        write_midi(Path("/dev/full"), "NoteOn_60 TimeShift_1.0.4", SCORE)


def test_invalid_events_of_a_model_are_ignored():
    events = "NoteOff_60 NoteOn_60 TimeShift_0.1.100 NoteOn_64 Velocity_7 ROMEO TimeShift_1.0.100 NoteOn_65 Velocity_3"
    assert notes_of_events(f"{events} NoteOn_66", PERFORMANCE) == [Note(1, 101, 64, 7)]


@pytest.mark.parametrize("format", [PERFORMANCE, SCORE, EventFormat(velocities=0, highest=60)])
def test_events_in_any_order_are_decoded_as_in_miditok(format, seed):
    """Each note-on has a velocity here, because miditok uses any number after a note-on as its velocity."""
    miditok = pytest.importorskip("miditok")
    config = miditok.TokenizerConfig(
        pitch_range=(format.lowest, format.highest),
        beat_res={(0, format.longest_shift): format.steps},
        num_velocities=format.velocities or 1,
        use_velocities=format.velocities > 0,
        use_time_signatures=False,
        use_pitchdrum_tokens=False,
    )
    rng = random.Random(seed)
    pitches = rng.sample(range(format.lowest, format.highest + 1), 4)  # few, so that some sound twice
    shifts = [event for event in format.tokenizer().events if event.startswith("TimeShift")]
    events = []
    for _ in range(300):
        kind = rng.choice(["NoteOn", "NoteOff", "TimeShift"])
        events.append(rng.choice(shifts) if kind == "TimeShift" else f"{kind}_{rng.choice(pitches)}")
        if kind == "NoteOn" and format.velocities:
            events.append(f"Velocity_{rng.randint(1, 127)}")
    ended = events + [f"NoteOff_{pitch}" for pitch in pitches] * len(events)
    decoded = miditok.MIDILike(config).decode([miditok.TokSequence(tokens=ended)]).tracks[0].notes
    expected = sorted((note.start, note.end, note.pitch, note.velocity) for note in decoded if note.duration)
    assert sorted(notes_of_events(" ".join(events), format)) == expected
    placed, times = place_notes(events, format)
    assert sorted(tuple(note) for note, *_ in placed if note.end > note.start) == expected
    for note, on, velocity, off in placed:
        assert events[on] == f"NoteOn_{note.pitch}" and times[on] == note.start
        assert velocity is None if not format.velocities else events[velocity] == f"Velocity_{note.velocity}"
        assert note.end == (times[-1] if off is None else times[off])
        assert off is None or events[off] == f"NoteOff_{note.pitch}"
    assert [on for _, on, _, _ in placed] == [i for i, event in enumerate(events) if event.startswith("NoteOn")]
    assert sum(off is None for *_, off in placed) < len(placed)


@pytest.mark.parametrize("format", [PERFORMANCE, SCORE])
def test_a_note_on_without_a_velocity_is_ignored(format):
    """miditok uses the pitch of the next event as the velocity."""
    placed, times = place_notes("NoteOn_60 NoteOn_64 NoteOff_60 Velocity_9 <|endoftext|> NoteOn_62".split(), format)
    pitches = [note.pitch for note, *_ in placed]
    assert pitches == ([] if format.velocities else [60, 64, 62]) and times == [0] * 6
    assert place_notes([], format) == ([], [])


def test_transposing():
    notes = [Note(0, 4, 31, 100), Note(2, 8, 88, 100)]
    events = events_of_notes(notes, SCORE)
    for semitones in (-1, 2):
        moved = [note._replace(pitch=note.pitch + semitones) for note in notes]
        assert transpose(events, semitones, SCORE).split() == events_of_notes(moved, SCORE).split()
    assert transpose(events, -2, SCORE) is None and transpose(events, 3, SCORE) is None


@pytest.mark.parametrize(
    "content, problem, message",
    [
        (b"hello", "broken", "not a MIDI file"),
        (b"MThd\0\0\0\6\0\1\0\1\0\0MTrk\0\0\0\4\0\xff\x2f\0", "broken", "no ticks per beat"),
        (b"MThd\0\0\0\6\0\1\0\1\0\x60MTrk\0\0\0\4\0\xff\x2f\0", "empty", "no notes"),
        (b"MThd\0\0\0\6\0\1\0\1\0\x60MTrk\0\0\0\4\0\x99\x24", "broken", "damaged: Invalid chunk length"),
        (b"MThd\0\0\0\6\0\1\0\1\0\x60MTrk\0\0\0\4\0\x90\xc8\x40", "broken", "damaged: Get pitch=200$"),
        (b"MThd\0\0\0\6\0\7\0\0\0\x60", "broken", "damaged: Invalid midi format$"),
        (b"MThd\0\0\0\6\0\1\0\0\xe7\x28", "broken", "damaged: Division type is not ticks per quarter$"),
    ],
)
def test_the_error_for_an_unusable_piece_is_one_line(content, problem, message, tmp_path):
    (tmp_path / "a.mid").write_bytes(content)
    with pytest.raises(PieceError, match=message) as error:
        events_of_file(tmp_path / "a.mid", SCORE)
    assert error.value.problem == problem and "\n" not in str(error.value)


def test_drums_only_and_a_missing_file_are_reported(tmp_path):
    write(tmp_path / "drums.mid", [(0, 480, 36, 90)], drums=(0,))
    for name, problem in (("drums.mid", "drums only"), ("missing.mid", "broken")):
        with pytest.raises(PieceError) as error:
            events_of_file(tmp_path / name, SCORE)
        assert error.value.problem == problem


def test_the_tokenizer_contains_the_format_for_writing_midi():
    encoding = SCORE.tokenizer()
    restored = tokenizer.from_json(encoding.to_json())
    assert isinstance(restored, MidiTokenizer) and restored.hash == encoding.hash
    assert EventFormat.of(restored) == SCORE and restored.eot == restored.vocab_size - 1 == len(restored.events)


@pytest.mark.parametrize(
    "change",
    [{"steps": 10**9}, {"steps": "4"}, {"tempo": 0.0}, {"lowest": 91}, {"highest": 128}, {"time": "bars"}, {"more": 1}],
)
def test_a_damaged_format_is_refused(change):
    encoding = SCORE.tokenizer()
    with pytest.raises(UserError, match="format of this music tokenizer"):
        EventFormat.of(MidiTokenizer(encoding.events, {**encoding.format, **change}))
    for events in ([], ["a", "a"], ["a b"], [""]):
        with pytest.raises(UserError, match="not a tokenizer"):
            tokenizer.from_json({"kind": "midi", "events": events, "format": {}})


def test_text_is_not_encoded_as_music():
    with pytest.raises(EncodingError, match=r"at byte 11 .*'ROMEO:' .* MIDI file$"):
        SCORE.tokenizer().encode("NoteOn_60  ROMEO: Is")
