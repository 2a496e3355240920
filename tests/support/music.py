"""Pieces of music that tests write, as MIDI files and as tunes."""

import random
from pathlib import Path

import numpy as np
import pytest

from folio.data.shards import open_dataset
from folio.data.sources.music import (
    EventFormat,
)

SCORE = EventFormat("beats", steps=4, longest_shift=4, velocities=0, lowest=30, highest=90, tempo=80.0)


def write(path: Path, *tracks: list[tuple[int, int, int, int]], tpq: int = 480, drums: tuple[int, ...] = ()) -> Path:
    """A MIDI file of notes (start, duration, pitch, velocity) in ticks. drums: the numbers of tracks with drums."""
    symusic = pytest.importorskip("symusic")
    score = symusic.Score(tpq)
    for number, notes in enumerate(tracks):
        track = symusic.Track(program=number, is_drum=number in drums)
        for note in notes:
            track.notes.append(symusic.Note(*note))
        score.tracks.append(track)
    score.dump_midi(path)
    return path


def write_pieces(folder: Path, count: int) -> None:
    """MIDI files of 30 random notes each, and one that repeats the first a semitone higher."""
    rng = random.Random(7)
    folder.mkdir()
    for k in range(count):
        notes = [(240 * n, 240, rng.randint(50, 80), 64) for n in range(30)]
        write(folder / f"{k}.mid", notes)
        if k == 0:
            write(folder / "again.mid", [(time, length, pitch + 1, loud) for time, length, pitch, loud in notes])


def pieces_of(folder: Path, split: str) -> list[str]:
    """The text of each document in a split."""
    data = open_dataset(folder)
    tokenizer = data.load_tokenizer()
    ids = np.concatenate([shard.ids for shard in getattr(data, split)])
    return [tokenizer.decode(part) for part in np.split(ids, np.flatnonzero(ids == tokenizer.eot) + 1)[:-1]]


def mutated(content: bytes, rng: random.Random) -> bytes:
    """A damaged copy: truncated, with bits or bytes changed, removed or inserted, or with a damaged header."""
    damaged = bytearray(content)
    at = rng.randrange(len(damaged))
    kind = rng.randrange(6)
    if kind == 0:
        return content[:at]
    if kind == 1:
        for _ in range(rng.choice([1, 3, 10, 100])):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    elif kind == 2:
        del damaged[at : at + rng.randrange(1, 20)]
    elif kind == 3:
        damaged[at:at] = rng.randbytes(rng.randrange(1, 20))
    elif kind == 4:
        for _ in range(3):
            damaged[rng.randrange(min(len(damaged), 40))] = rng.randrange(256)
    else:  # many of these can still be read as MIDI files
        for _ in range(rng.choice([1, 3])):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(7)
    return bytes(damaged)


def tune(rng: random.Random) -> str:
    return "X:1\nM:2/4\nL:1/8\nK:G\n" + "".join(rng.choices("ABcdefgG2|", k=40)) + "A|\n"
