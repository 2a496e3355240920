"""Music as events: MIDI files to the text of a MidiTokenizer and back.

The representation is that of "This Time with Feeling" (Oore et al. 2018) and the Music Transformer (Huang et al. 2018):
note-on, note-off, time-shift and velocity, as MIDILike of miditok writes it. symusic reads and writes the files.

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
LONGEST_GAP = 10  # seconds or beats; when nothing changes for longer, the rest of the time is left out
KEYS = ("C", "C♯", "D", "E♭", "E", "F", "F♯", "G", "A♭", "A", "B♭", "B")  # of an octave
DEFAULT_VELOCITY = 100  # of notes in a format without velocities, as in miditok
PITCH = re.compile(r"(?<=[nf]_)\d+")  # of NoteOn_60 and NoteOff_60


class PieceError(UserError):
    """A piece that cannot be used. problem: the kind of problem, for the report."""

    def __init__(self, problem: Literal["broken", "empty", "drums only"], reason: str):
        super().__init__(reason)
        self.problem = problem


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

    @property
    def seconds_per_step(self) -> float:
        return 60 / self.tempo / self.steps

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
        programs=[0],  # a piano; with all programs, decoding takes a hundred times as long
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
    """The notes of all tracks except drums, in steps of the format's grid, from the first note on.

    Each key of the instrument sounds once at a time: a note ends when its pitch begins again, and of notes that begin
    together the longest counts. Pitches out of the format's range are left out. Raises PieceError ("empty", "drums
    only").
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
    end = np.maximum(end, begin + 1)
    order = np.lexsort((-end, begin, pitch))
    begin, end, pitch, velocity = begin[order], end[order], pitch[order], velocity[order]
    same_pitch = pitch[1:] == pitch[:-1]
    first = np.concatenate([[True], ~same_pitch | (begin[1:] != begin[:-1])])  # of those that begin together
    begin, end, pitch, velocity = begin[first], end[first], pitch[first], velocity[first]
    next_begin = np.where(pitch[1:] == pitch[:-1], begin[1:], np.iinfo(np.int64).max)
    end[:-1] = np.minimum(end[:-1], next_begin)
    times, index = np.unique(np.concatenate([begin, end]), return_inverse=True)
    shortened = np.concatenate([[0], np.cumsum(np.minimum(np.diff(times), longest_gap))])
    begin, end = shortened[index.reshape(2, -1)]
    return in_order(Note(*map(int, note)) for note in zip(begin, end, pitch, velocity, strict=True))


def timed_pitches(stream: Any) -> list[tuple[float, float, int]]:
    """Begin and end in quarters, and pitch, of each note of a music21.stream.Stream, without grace notes."""
    return [
        (float(note.offset), float(note.offset + note.quarterLength), pitch.midi)
        for note in stream.stripTies().flatten().notes
        for pitch in note.pitches
        if note.quarterLength
    ]


def in_order(notes: Iterable[Note]) -> list[Note]:
    """The notes by their start, and then by their pitch."""
    return sorted(notes, key=lambda note: (note.start, note.pitch))


def pitch_name(pitch: int) -> str:
    """The name of a MIDI pitch: C4 is the middle C, 60."""
    return f"{KEYS[pitch % 12]}{pitch // 12 - 1}"


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


class PlacedNote(NamedTuple):
    """A note in a text of events, and the places of its events there."""

    note: Note  # of no length, if no time has passed
    on: int
    velocity: int | None  # None: the format has no velocities
    off: int | None  # None: the note is still sounding at the end of the text


def place_notes(events: list[str], format: EventFormat) -> tuple[list[PlacedNote], list[int]]:
    """The notes that events write, in the order of their note-ons, and the time after each event, in steps.

    A model's events need not make sense: a note-off without its note-on has no effect, and neither has a note-on
    without a velocity, if the format has velocities. Of notes of the same pitch, the first one ends first. Notes that
    are still sounding at the end stop there.
    """
    meanings = _meanings(format)
    parsed = [meanings.get(event, ("", 0)) for event in events]
    begun: dict[int, tuple[int, int, int]] = {}  # the time, pitch and velocity by the place of the note-on
    ended: dict[int, tuple[int, int]] = {}  # the time and the place of the note-off
    sounding: defaultdict[int, deque[int]] = defaultdict(deque)  # the places of note-ons by pitch
    times, now = [], 0
    for place, ((kind, value), (following, velocity)) in enumerate(pairwise([*parsed, ("", 0)])):
        if kind == "TimeShift":
            now += value
        elif kind == "NoteOn" and (following == "Velocity" or not format.velocities):
            begun[place] = now, value, velocity
            sounding[value].append(place)
        elif kind == "NoteOff" and sounding[value]:
            ended[sounding[value].popleft()] = now, place
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
    """The kind of each event, and its pitch, velocity, or steps of time."""
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
    """The notes that events write, as in place_notes, without those of no length."""
    placed, _ = place_notes(events.split(), format)
    return in_order(note for note, *_ in placed if note.end > note.start)


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
    """Write events as a MIDI file, and return the notes. Raises PieceError ("empty") if there are none, and OSError."""
    notes = notes_of_events(events, format)
    if not notes:
        raise PieceError("empty", "the events have no notes")
    path.write_bytes(score_of_notes(notes, format).dumps_midi())  # dump_midi does not notice a full disk
    return notes
