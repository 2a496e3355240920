"""Music as events: MIDI files to the text of a MidiTokenizer and back.

The representation is that of "This Time with Feeling" (Oore et al. 2018) and the Music Transformer (Huang et al. 2018):
note-on, note-off, time-shift and velocity, as MIDILike of miditok writes it. symusic reads and writes the files.

Dimensions: N notes of a piece. Times are in steps of the format's grid.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from folio import UserError
from folio.tokenizer import MidiTokenizer

SUFFIXES = (".mid", ".midi")
LONGEST_GAP = 10  # seconds or beats; when nothing changes for longer, the rest of the time is left out
PITCH = re.compile(r"(?<=[nf]_)\d+")  # of NoteOn_60 and NoteOff_60


class PieceError(UserError):
    """A piece that cannot be used. problem: the kind of problem, for the report."""

    def __init__(self, problem: Literal["broken", "empty", "drums only"], reason: str):
        super().__init__(problem, reason)
        self.problem, self.reason = problem, reason

    def __str__(self) -> str:
        return self.reason


class Note(NamedTuple):
    """A note, with times in steps."""

    start: int
    end: int
    pitch: int  # MIDI's: 60 is the middle C
    velocity: int  # 1 to 127


@dataclass(frozen=True)
class EventFormat:
    """How time, pitch and velocity become events. The default is the Music Transformer's, for performances."""

    time: Literal["seconds", "beats"] = "seconds"  # beats: the times as written, without the tempo
    steps: int = 100  # of time, per second or beat
    longest_shift: int = 1  # seconds or beats; a longer time takes several events
    velocities: int = 32  # levels; 0: all notes are equally loud, and there are no velocity events
    lowest: int = 0  # pitches that have events, both included
    highest: int = 127
    tempo: float = 60.0  # beats per minute of the files that are written; with time="seconds", a beat is a second

    def tokenizer(self) -> MidiTokenizer:
        """The tokenizer with all events of this format, in miditok's order."""
        events = [event for event in _miditok(self).vocab if event.startswith(("Note", "Velocity", "TimeShift"))]
        return MidiTokenizer(events, asdict(self))

    @classmethod
    def of(cls, tokenizer: MidiTokenizer) -> "EventFormat":
        """The format of a tokenizer, whose JSON may come from a stranger. Raises UserError."""
        try:
            format = cls(**tokenizer.format)
            types = {"time": str, "tempo": (int, float)}
            right = all(isinstance(value, types.get(name, int)) for name, value in asdict(format).items())
            bounds = 1 <= format.steps <= 1000 and 1 <= format.longest_shift <= 100 and 0 <= format.velocities <= 127
            pitches = 0 <= format.lowest < format.highest <= 127
            if right and bounds and pitches and 1 <= format.tempo <= 1000 and format.time in ("seconds", "beats"):
                return format
        except TypeError:
            pass
        raise UserError(f"the format of this music tokenizer is damaged: {tokenizer.format}")


@cache
def _miditok(format: EventFormat) -> Any:
    """miditok's tokenizer. Its first import takes a second."""
    from miditok import MIDILike, TokenizerConfig

    config = TokenizerConfig(
        pitch_range=(format.lowest, format.highest),
        beat_res={(0, format.longest_shift): format.steps},
        num_velocities=format.velocities or 1,
        use_velocities=format.velocities > 0,
        use_time_signatures=False,
        use_pitchdrum_tokens=False,
        special_tokens=["PAD"],
    )
    return MIDILike(config)


# --- files to events --------------------------------------------------------------------------------------------------


def read_score(path: Path) -> Any:
    """The symusic.Score of a MIDI file. Raises PieceError ("broken")."""
    import symusic

    try:
        score = symusic.Score.from_midi(path.read_bytes())
    except OSError as error:
        raise PieceError("broken", f"it cannot be read: {error.strerror}") from None
    except (RuntimeError, ValueError) as error:  # such as "MiniMidi: Unexpected EOF in MIDI Event! ..."
        reason = re.search(r"MiniMidi: ([^!.:(]*)", str(error))
        known = reason and "midi file" not in reason[1]
        raise PieceError("broken", reason[1].strip() if known else "it is not a MIDI file") from None
    if score.ticks_per_quarter < 1:
        raise PieceError("broken", "it has no ticks per beat")
    return score


def notes_of_score(score: Any, format: EventFormat) -> list[Note]:
    """The notes of all tracks except drums, in steps of the format's grid, from the first note on.

    Each key of the instrument sounds once at a time: a note ends when its pitch begins again, and of notes that begin
    together the longest counts. Pitches out of the format's range are left out. Raises PieceError ("empty", "drums
    only").
    """
    tracks = [track for track in score.tracks if not track.is_drum and len(track.notes)]
    if not tracks:
        drums = any(len(track.notes) for track in score.tracks)
        raise PieceError("drums only", "it has only drums") if drums else PieceError("empty", "it has no notes")
    names = ("time", "pitch", "velocity")
    ticks, pitch, velocity = (np.concatenate([track.notes.numpy()[name] for track in tracks]) for name in names)  # (N,)
    ticks = np.stack([ticks, np.concatenate([_ends(track) for track in tracks])])  # (2, N), of begin and end
    time = _seconds(score, ticks) if format.time == "seconds" else ticks / score.ticks_per_quarter
    begin, end = np.round(time * format.steps).astype(np.int64)
    keep = (format.lowest <= pitch) & (pitch <= format.highest) & (velocity > 0)
    if not keep.any():
        raise PieceError("empty", f"it has no notes from {format.lowest} to {format.highest}")
    return as_played(begin[keep], end[keep], pitch[keep], velocity[keep], LONGEST_GAP * format.steps)


def _ends(track: Any) -> np.ndarray:
    """When the notes of a track end, in ticks (N,): if the sustain pedal is down, when it is released (Oore et al.)."""
    notes, pedals = track.notes.numpy(), track.pedals.numpy()
    ends = notes["time"].astype(np.int64) + np.maximum(notes["duration"], 0)
    if not len(track.pedals):
        return ends
    order = np.argsort(pedals["time"], kind="stable")
    down = pedals["time"][order].astype(np.int64)
    up = np.maximum.accumulate(down + pedals["duration"][order])
    last = np.searchsorted(down, ends, side="right") - 1  # the pedal's last press
    return np.where(last >= 0, np.maximum(ends, up[last]), ends)


def _seconds(score: Any, ticks: np.ndarray) -> np.ndarray:
    """Ticks in seconds, by the tempos of the score. Same shape."""
    changes = sorted((tempo.time, 60 / tempo.qpm) for tempo in score.tempos if tempo.qpm > 0)
    changes = dict([(0, 0.5), *changes])  # MIDI's default is 120 beats per minute; the last change at a time counts
    at = np.array(list(changes), dtype=np.float64)
    seconds_per_tick = np.array(list(changes.values())) / score.ticks_per_quarter
    elapsed = np.concatenate([[0], np.cumsum(np.diff(at) * seconds_per_tick[:-1])])  # at each change
    segment = np.searchsorted(at, ticks, side="right") - 1
    return elapsed[segment] + (ticks - at[segment]) * seconds_per_tick[segment]


def as_played(
    begin: np.ndarray, end: np.ndarray, pitch: np.ndarray, velocity: np.ndarray, longest_gap: int
) -> list[Note]:
    """Notes (N,) as one player of a keyboard plays them, in_order, from step 0. Gaps are at most longest_gap.

    Each note has at least one step.
    """
    times, index = np.unique(np.concatenate([begin, end]), return_inverse=True)
    shortened = np.concatenate([[0], np.cumsum(np.minimum(np.diff(times), longest_gap))])
    begin, end = shortened[index.reshape(2, -1)]
    end = np.maximum(end, begin + 1)
    order = np.lexsort((-end, begin, pitch))
    begin, end, pitch, velocity = begin[order], end[order], pitch[order], velocity[order]
    same_pitch = pitch[1:] == pitch[:-1]
    first = np.concatenate([[True], ~same_pitch | (begin[1:] != begin[:-1])])  # of those that begin together
    begin, end, pitch, velocity = begin[first], end[first], pitch[first], velocity[first]
    next_begin = np.where(pitch[1:] == pitch[:-1], begin[1:], np.iinfo(np.int64).max)
    end[:-1] = np.minimum(end[:-1], next_begin)
    return in_order(Note(*map(int, note)) for note in zip(begin, end, pitch, velocity, strict=True))


def in_order(notes: Iterable[Note]) -> list[Note]:
    """The notes by their start, and then by their pitch."""
    return sorted(notes, key=lambda note: (note.start, note.pitch))


def highest_voice(notes: Iterable[Note]) -> list[Note]:
    """The notes that begin while no higher one sounds: the melody of most music. notes: in_order."""
    voice: list[Note] = []
    sounding: list[Note] = []
    for start, together in groupby(notes, key=lambda note: note.start):
        sounding = [note for note in sounding if note.end > start] + list(together)
        highest = max(sounding, key=lambda note: note.pitch)
        if highest.start == start:
            voice.append(highest)
    return voice


def events_of_notes(notes: list[Note], format: EventFormat) -> str:
    """The text of a piece: the names of its events."""
    tokens = _miditok(format).encode(score_of_notes(notes, format), encode_ids=False)
    return " ".join(tokens[0].tokens)


def events_of_file(path: Path, format: EventFormat) -> str:
    """The text of a MIDI file. Raises PieceError."""
    return events_of_notes(notes_of_score(read_score(path), format), format)


def transpose(events: str, semitones: int, format: EventFormat) -> str | None:
    """The same piece, so much higher. None if a note would be out of the format's range."""
    pitches = {int(pitch) for pitch in PITCH.findall(events)}
    if not all(format.lowest <= pitch + semitones <= format.highest for pitch in pitches):
        return None
    return PITCH.sub(lambda match: str(int(match[0]) + semitones), events)


# --- events to files --------------------------------------------------------------------------------------------------


def notes_of_events(events: str, format: EventFormat) -> list[Note]:
    """The notes that events write. Notes that are still sounding at the end stop there.

    A model's events need not make sense: a note-off without its note-on has no effect, and neither has a note-on
    without a velocity, if the format has velocities.
    """
    from miditok import TokSequence

    names = [event for event in events.split() if event in _miditok(format).vocab]
    sounding: Counter[str] = Counter()
    for name in names:
        kind, _, pitch = name.partition("_")
        if kind == "NoteOn":
            sounding[pitch] += 1
        elif kind == "NoteOff" and sounding[pitch]:
            sounding[pitch] -= 1
    names += [f"NoteOff_{pitch}" for pitch in sounding.elements()]
    score = _miditok(format).decode([TokSequence(tokens=names)])
    notes = (note for track in score.tracks for note in track.notes if note.duration > 0)
    return in_order(Note(note.start, note.end, note.pitch, note.velocity) for note in notes)


def score_of_notes(notes: list[Note], format: EventFormat) -> Any:
    """The notes as a symusic.Score with one track, for a piano."""
    import symusic

    score, track = symusic.Score(format.steps), symusic.Track(program=0)
    for note in notes:
        track.notes.append(symusic.Note(note.start, note.end - note.start, note.pitch, note.velocity))
    score.tracks.append(track)
    score.tempos.append(symusic.Tempo(0, format.tempo))
    return score


def write_midi(path: Path, events: str, format: EventFormat) -> list[Note]:
    """Write events as a MIDI file, and return the notes. Raises PieceError ("empty") if there are none."""
    notes = notes_of_events(events, format)
    if not notes:
        raise PieceError("empty", "the events have no notes")
    score_of_notes(notes, format).dump_midi(path)
    return notes
