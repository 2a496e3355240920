"""Bach's four-part chorales as events on a grid of sixteenths, all voices together.

    python prepare/chorales.py

The scores are in music21's wheel on PyPI, which is downloaded once (20 MB), verified by its hash, and parsed by the
music21 library. Their terms are in docs/use/music.md: do not distribute them or the data set.
"""

import io
import itertools
import sys
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError  # noqa: E402
from folio.base import settings  # noqa: E402
from folio.base.progress import progress_bar  # noqa: E402
from folio.base.workers import cores, map_in_order  # noqa: E402
from folio.checkpoints.find_runs import find_run  # noqa: E402
from folio.data.account import IN  # noqa: E402
from folio.data.builder import Dedup  # noqa: E402
from folio.data.inputs import Inputs, Source  # noqa: E402
from folio.data.prepare import prepare  # noqa: E402
from folio.data.sources.music import (  # noqa: E402
    DEFAULT_VELOCITY,
    EventFormat,
    Note,
    as_played,
    events_of_notes,
    highest_voice,
    notes_of_events,
    timed_pitches,
)
from folio.data.sources.music_corpus import (  # noqa: E402
    MUSIC21,
    MusicConfig,
    music21_wheel,
    music_documents,
    music_tokenizer,
)

STEPS = 4  # time steps per beat: sixteenths
TEMPO = 80.0  # beats per minute in generated MIDI files
VOICES = 4
MELODY_STEPS = 8


@dataclass(frozen=True)
class ChoralesConfig(MusicConfig):
    name: str = "chorales"  # folder under data_dir
    dedup: Dedup = True  # False: keep exact duplicates


def score_names(wheel: zipfile.ZipFile) -> list[str]:
    """Return the sorted names of Bach's chorales in music21's wheel: MusicXML, or MusicXML in a zip file."""
    folder = "music21/corpus/bach/bwv"
    return sorted(n for n in wheel.namelist() if n.startswith(folder) and n.endswith((".mxl", ".xml")))


def music_xml(content: bytes) -> bytes:
    """Return the MusicXML in a file, which may be a zip file that also has a folder META-INF."""
    if not content.startswith(b"PK"):
        return content
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        (score,) = [n for n in archive.namelist() if n.endswith((".xml", ".musicxml")) and "META-INF" not in n]
        return archive.read(score)


def notes_of_chorale(content: bytes) -> list[Note] | None:
    """Return the notes of a MusicXML score in sixteenths, as played on one keyboard. None unless it has four parts.

    Repeats are not expanded, and grace notes are skipped.
    """
    from music21 import converter

    score = converter.parseData(content.decode("utf-8"), format="musicxml")
    if len(score.parts) != VOICES:
        return None
    begin, end, pitch = np.array(timed_pitches(score)).T  # (N,) each
    begin, end = (np.round(times * STEPS).astype(np.int64) for times in (begin, end))
    velocity = np.full(len(begin), DEFAULT_VELOCITY)
    return as_played(begin, end, pitch.astype(np.int64), velocity, max_gap=int(end.max()))


def melody(piece: str, format: EventFormat) -> str:
    """Return the first intervals of the highest voice, which identify a melody in any key.

    Bach set many melodies several times, and some settings occur twice with small differences.
    """
    pitches = [note.pitch for note in highest_voice(notes_of_events(piece, format))]
    steps = [after - before for before, after in itertools.pairwise(pitches) if after != before]
    return str(steps[:MELODY_STEPS])


def main(cfg: ChoralesConfig) -> None:
    settings.check(cfg)
    cfg = cfg.replace(tokenizer=find_run(cfg.tokenizer))
    path = music21_wheel()
    chorales, n_skipped = [], 0
    with zipfile.ZipFile(path) as wheel:
        names = score_names(wheel)
        scores = [music_xml(wheel.read(name)) for name in names]
    workers = cores() if cfg.num_workers is None else cfg.num_workers
    results = map_in_order(notes_of_chorale, scores, workers)
    for _, notes in progress_bar(iterable=results, total=len(names), leave=False):
        if notes is None:
            n_skipped += 1
        else:
            chorales.append(notes)
    print(f"{len(chorales)} chorales of {VOICES} parts; {n_skipped} scores have another number of parts")
    pitches = [note.pitch for notes in chorales for note in notes]
    lowest, highest = min(pitches) - cfg.transpose_down, max(pitches) + cfg.transpose_up
    format = EventFormat("beats", STEPS, longest_shift=4, velocities=0, lowest=lowest, highest=highest, tempo=TEMPO)
    tokenizer = music_tokenizer(cfg, format)
    format = EventFormat.of(tokenizer)
    if (format.time, format.steps) != ("beats", STEPS):
        raise UserError(
            f"tokenizer={cfg.tokenizer}: its time step is 1/{format.steps} {format.time.removesuffix('s')}, but the "
            f"chorales need 1/{STEPS} beat; use midi, or the folder of a run on chorales"
        )
    texts = [events_of_notes(notes, format) for notes in chorales]
    inputs = Inputs([Source(path, "wheel", MUSIC21)])
    account = inputs.account()
    account["scores"].update({IN: len(names), "used": len(texts), "without four parts": n_skipped})
    corpus = music_documents(inputs, texts, {}, format, cfg, partial(melody, format=format), account)
    prepare(cfg, corpus, cfg.name, tokenizer)


if __name__ == "__main__":
    settings.run_script(main, ChoralesConfig, needs_output=False)
