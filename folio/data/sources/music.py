"""Music as events: conversion between MIDI files and the text of a MidiTokenizer.

The representation is from "This Time with Feeling" (Oore et al. 2018) and the Music Transformer (Huang et al. 2018):
note-on, note-off, time-shift and velocity, as in miditok's MIDILike. symusic reads and writes the files.

Dimensions: N notes of a piece. Times are in steps of the format's grid.
"""

import re
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from folio import UserError
from folio.data.tokenizer import MidiTokenizer

SUFFIXES = (".mid", ".midi")
MAX_GAP = 10  # seconds or beats; longer gaps between events are shortened
PITCH_CLASSES = ("C", "C♯", "D", "E♭", "E", "F", "F♯", "G", "A♭", "A", "B♭", "B")
DEFAULT_VELOCITY = 100  # for formats without velocities, as in miditok
PITCH = re.compile(r"(?<=[nf]_)\d+")  # matches 60 in NoteOn_60 and NoteOff_60


class PieceError(UserError):
    """A piece that cannot be used. problem: the category for the report."""

    def __init__(self, problem: Literal["broken", "empty", "drums only"], reason: str):
        super().__init__(reason)
        self.problem = problem


class Note(NamedTuple):
    """A note, with times in steps."""

    start: int
    end: int
    pitch: int  # MIDI pitch: 60 is middle C
    velocity: int  # 1 to 127


@dataclass(frozen=True)
class EventFormat:
    """The representation of time, pitch and velocity as events. Defaults: the Music Transformer's, for performances."""

    time: Literal["seconds", "beats"] = "seconds"  # beats: score time, independent of the tempo
    steps: int = 100  # time steps per second or beat
    longest_shift: int = 1  # maximum seconds or beats per event; longer times need several events
    velocities: int = 32  # number of levels; 0: no velocity events, all notes are equally loud
    lowest: int = 0  # lowest pitch
    highest: int = 127  # highest pitch
    tempo: float = 60.0  # beats per minute in MIDI files written; with time="seconds", a beat is a second

    @property
    def seconds_per_step(self) -> float:
        return 60 / self.tempo / self.steps

    def tokenizer(self) -> MidiTokenizer:
        """Create the tokenizer with all events of this format, in miditok's order."""
        events = [event for event in _miditok(self).vocab if event.startswith(("Note", "Velocity", "TimeShift"))]
        return MidiTokenizer(events, asdict(self))

    @classmethod
    def of(cls, tokenizer: MidiTokenizer) -> "EventFormat":
        """Return the format of a tokenizer after validation, because its JSON is untrusted. Raises UserError."""
        try:
            format = cls(**tokenizer.format)
            types = {"time": str, "tempo": (int, float)}
            valid_types = all(isinstance(value, types.get(name, int)) for name, value in asdict(format).items())
            bounds = 1 <= format.steps <= 1000 and 1 <= format.longest_shift <= 100 and 0 <= format.velocities <= 127
            pitches = 0 <= format.lowest < format.highest <= 127
            if valid_types and bounds and pitches and 1 <= format.tempo <= 1000 and format.time in ("seconds", "beats"):
                return format
        except TypeError:
            pass
        raise UserError(f"the format of this music tokenizer is damaged: {tokenizer.format}")


@cache
def _miditok(format: EventFormat) -> Any:
    """Create miditok's tokenizer. The first import takes a second."""
    from miditok import MIDILike, TokenizerConfig

    config = TokenizerConfig(
        pitch_range=(format.lowest, format.highest),
        beat_res={(0, format.longest_shift): format.steps},
        programs=[0],  # piano; with all programs, decoding is a hundred times slower
        num_velocities=format.velocities or 1,
        use_velocities=format.velocities > 0,
        use_time_signatures=False,
        use_pitchdrum_tokens=False,
        special_tokens=["PAD"],
    )
    return MIDILike(config)


# --- files to events --------------------------------------------------------------------------------------------------


def read_score(path: Path) -> Any:
    """Read a MIDI file as a symusic.Score. Raises PieceError ("broken")."""
    import symusic

    try:
        content = path.read_bytes()
    except OSError as error:
        raise PieceError("broken", f"it cannot be read: {error.strerror}") from None
    if not content.startswith(b"MThd"):
        raise PieceError("broken", "it is not a MIDI file")
    try:
        score = symusic.Score.from_midi(content)
    except (RuntimeError, ValueError) as error:  # "MiniMidi: Unexpected EOF in MIDI Event! ..." or "Get pitch=200"
        reason = re.split(r"[!.:(\n]", str(error).removeprefix("MiniMidi: "))[0].replace("Invaild", "Invalid")
        raise PieceError("broken", f"it is damaged: {reason.strip()}") from None
    if score.ticks_per_quarter < 1:
        raise PieceError("broken", "it has no ticks per beat")
    return score


def notes_of_score(score: Any, format: EventFormat) -> list[Note]:
    """Return the notes of all tracks except drums, in steps of the format's grid, starting at the first note.

    As on a keyboard, each pitch sounds once at a time: a note ends when its pitch begins again, and only the longest
    of notes that begin together is kept. Pitches outside the format's range are removed. Raises PieceError ("empty",
    "drums only").
    """
    tracks = [track for track in score.tracks if not track.is_drum and len(track.notes)]
    if not tracks:
        drums = any(len(track.notes) for track in score.tracks)
        raise PieceError("drums only", "it has only drums") if drums else PieceError("empty", "it has no notes")
    notes = [track.notes.numpy() for track in tracks]
    begin, pitch, velocity = (np.concatenate([n[name] for n in notes]) for name in ("time", "pitch", "velocity"))
    ticks = np.stack([begin, np.concatenate([_ends(track) for track in tracks])])  # (2, N)
    time = _seconds(score, ticks) if format.time == "seconds" else ticks / score.ticks_per_quarter
    begin, end = np.round(time * format.steps).astype(np.int64)
    keep = (format.lowest <= pitch) & (pitch <= format.highest) & (velocity > 0)
    if not keep.any():
        raise PieceError("empty", f"it has no notes from {format.lowest} to {format.highest}")
    return as_played(begin[keep], end[keep], pitch[keep], velocity[keep], MAX_GAP * format.steps)


def _ends(track: Any) -> np.ndarray:
    """Return the ends of a track's notes in ticks, (N,). The sustain pedal extends notes (Oore et al.)."""
    notes, pedals = track.notes.numpy(), track.pedals.numpy()
    ends = notes["time"].astype(np.int64) + np.maximum(notes["duration"], 0)
    if not len(track.pedals):
        return ends
    order = np.argsort(pedals["time"], kind="stable")
    down = pedals["time"][order].astype(np.int64)
    up = np.maximum.accumulate(down + pedals["duration"][order])
    last = np.searchsorted(down, ends, side="right") - 1  # index of the last pedal press
    return np.where(last >= 0, np.maximum(ends, up[last]), ends)


def _seconds(score: Any, ticks: np.ndarray) -> np.ndarray:
    """Convert ticks to seconds with the tempos of the score. The shape is the same."""
    changes = sorted((tempo.time, 60 / tempo.qpm) for tempo in score.tempos if tempo.qpm > 0)
    changes = dict([(0, 0.5), *changes])  # the default is 120 beats per minute; the last change at a time applies
    times = np.array(list(changes), dtype=np.float64)
    seconds_per_tick = np.array(list(changes.values())) / score.ticks_per_quarter
    elapsed = np.concatenate([[0], np.cumsum(np.diff(times) * seconds_per_tick[:-1])])  # seconds at each change
    segment = np.searchsorted(times, ticks, side="right") - 1
    return elapsed[segment] + (ticks - times[segment]) * seconds_per_tick[segment]


def as_played(begin: np.ndarray, end: np.ndarray, pitch: np.ndarray, velocity: np.ndarray, max_gap: int) -> list[Note]:
    """Convert notes, (N,), to notes as played on one keyboard, sorted, from step 0. Gaps are at most max_gap.

    Each note has at least one step. A note ends when its pitch begins again.
    """
    end = np.maximum(end, begin + 1)
    order = np.lexsort((-end, begin, pitch))
    begin, end, pitch, velocity = begin[order], end[order], pitch[order], velocity[order]
    same_pitch = pitch[1:] == pitch[:-1]
    first = np.concatenate([[True], ~same_pitch | (begin[1:] != begin[:-1])])  # the longest per begin
    begin, end, pitch, velocity = begin[first], end[first], pitch[first], velocity[first]
    next_begin = np.where(pitch[1:] == pitch[:-1], begin[1:], np.iinfo(np.int64).max)
    end[:-1] = np.minimum(end[:-1], next_begin)
    times, index = np.unique(np.concatenate([begin, end]), return_inverse=True)
    shortened = np.concatenate([[0], np.cumsum(np.minimum(np.diff(times), max_gap))])
    begin, end = shortened[index.reshape(2, -1)]
    return sort_notes(Note(*map(int, note)) for note in zip(begin, end, pitch, velocity, strict=True))


def timed_pitches(stream: Any) -> list[tuple[float, float, int]]:
    """Return the begin and end in quarters, and the pitch, of each note of a music21 stream, without grace notes."""
    return [
        (float(note.offset), float(note.offset + note.quarterLength), pitch.midi)
        for note in stream.stripTies().flatten().notes
        for pitch in note.pitches
        if note.quarterLength
    ]


def sort_notes(notes: Iterable[Note]) -> list[Note]:
    """Sort notes by start, and then by pitch."""
    return sorted(notes, key=lambda note: (note.start, note.pitch))


def pitch_name(pitch: int) -> str:
    """Return the name of a MIDI pitch: C4 is middle C, 60."""
    return f"{PITCH_CLASSES[pitch % 12]}{pitch // 12 - 1}"


def highest_voice(notes: Iterable[Note]) -> list[Note]:
    """Return the notes that begin while no higher one sounds: the melody of most music. notes: sorted."""
    voice: list[Note] = []
    sounding: list[Note] = []
    for start, together in groupby(notes, key=lambda note: note.start):
        sounding = [note for note in sounding if note.end > start] + list(together)
        highest = max(sounding, key=lambda note: note.pitch)
        if highest.start == start:
            voice.append(highest)
    return voice


def events_of_notes(notes: list[Note], format: EventFormat) -> str:
    """Return the text of a piece: the names of its events."""
    tokens = _miditok(format).encode(score_of_notes(notes, format), encode_ids=False)
    return " ".join(tokens[0].tokens)


def events_of_file(path: Path, format: EventFormat) -> str:
    """Return the text of a MIDI file. Raises PieceError."""
    return events_of_notes(notes_of_score(read_score(path), format), format)


def transpose(events: str, semitones: int, format: EventFormat) -> str | None:
    """Transpose a piece by a number of semitones. None if a note would be outside the format's range."""
    pitches = {int(pitch) for pitch in PITCH.findall(events)}
    if not all(format.lowest <= pitch + semitones <= format.highest for pitch in pitches):
        return None
    return PITCH.sub(lambda match: str(int(match[0]) + semitones), events)


# --- events to files --------------------------------------------------------------------------------------------------


class PlacedNote(NamedTuple):
    """A note in a text of events, and the positions of its events."""

    note: Note  # its length may be 0
    on: int
    velocity: int | None  # None: the format has no velocities
    off: int | None  # None: the note sounds until the end of the text


def place_notes(events: list[str], format: EventFormat) -> tuple[list[PlacedNote], list[int]]:
    """Return the notes of a list of events, in the order of their note-ons, and the time in steps after each event.

    A model's events may be invalid: a note-off without a note-on is ignored, and so is a note-on without a velocity if
    the format has velocities. Notes of the same pitch end in the order in which they begin. Notes without a note-off
    end at the end of the text.
    """
    meanings = _meanings(format)
    parsed = [meanings.get(event, ("", 0)) for event in events]
    begun: dict[int, tuple[int, int, int]] = {}  # position of the note-on -> time, pitch and velocity
    ended: dict[int, tuple[int, int]] = {}  # position of the note-on -> time and position of the note-off
    sounding: defaultdict[int, deque[int]] = defaultdict(deque)  # pitch -> positions of note-ons
    times, now = [], 0
    for position, ((kind, value), (next_kind, velocity)) in enumerate(pairwise([*parsed, ("", 0)])):
        if kind == "TimeShift":
            now += value
        elif kind == "NoteOn" and (next_kind == "Velocity" or not format.velocities):
            begun[position] = now, value, velocity
            sounding[value].append(position)
        elif kind == "NoteOff" and sounding[value]:
            ended[sounding[value].popleft()] = now, position
        times.append(now)
    notes = []
    for on, (start, pitch, velocity) in begun.items():
        end, off = ended.get(on, (now, None))
        if format.velocities:
            notes.append(PlacedNote(Note(start, end, pitch, velocity), on, on + 1, off))
        else:
            notes.append(PlacedNote(Note(start, end, pitch, DEFAULT_VELOCITY), on, None, off))
    return notes, times


@cache
def _meanings(format: EventFormat) -> dict[str, tuple[str, int]]:
    """Map each event to its kind and its pitch, velocity, or number of steps."""
    pitches, steps = range(format.lowest, format.highest + 1), format.steps
    return {
        **{f"{kind}_{pitch}": (kind, pitch) for kind in ("NoteOn", "NoteOff") for pitch in pitches},
        **{f"Velocity_{velocity}": ("Velocity", velocity) for velocity in range(1, 128) if format.velocities},
        **{
            f"TimeShift_{shift // steps}.{shift % steps}.{steps}": ("TimeShift", shift)
            for shift in range(1, format.longest_shift * steps + 1)
        },
    }


def notes_of_events(events: str, format: EventFormat) -> list[Note]:
    """Return the notes of a text of events, as in place_notes, without notes of length 0."""
    placed, _ = place_notes(events.split(), format)
    return sort_notes(note for note, *_ in placed if note.end > note.start)


def score_of_notes(notes: list[Note], format: EventFormat) -> Any:
    """Convert notes to a symusic.Score with one piano track."""
    import symusic

    score, track = symusic.Score(format.steps), symusic.Track(program=0)
    for note in notes:
        track.notes.append(symusic.Note(note.start, note.end - note.start, note.pitch, note.velocity))
    score.tracks.append(track)
    score.tempos.append(symusic.Tempo(0, format.tempo))
    return score


def write_midi(path: Path, events: str, format: EventFormat) -> list[Note]:
    """Write events as a MIDI file, and return the notes. Raises PieceError ("empty") if there are none, or OSError."""
    notes = notes_of_events(events, format)
    if not notes:
        raise PieceError("empty", "the events have no notes")
    path.write_bytes(score_of_notes(notes, format).dumps_midi())  # dump_midi does not report a full disk
    return notes
