"""MIDI files as a data set of events: note-on, note-off, time-shift and velocity, as in the Music Transformer.

    python prepare/midi.py performances/
    python prepare/midi.py "songs/**/*.mid" --name=songs --time=beats --steps=4 --velocities=0
    python prepare/midi.py mine/ --tokenizer=out-performances

The inputs are .mid and .midi files, folders, or patterns. All tracks of a file except drums are one piano piece. Each
piece is in one split, and training pieces are also transposed.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio.base import settings  # noqa: E402
from folio.checkpoints.find_runs import find_run  # noqa: E402
from folio.data.inputs import find_sources  # noqa: E402
from folio.data.prepare import default_name, prepare  # noqa: E402
from folio.data.sources.music import SUFFIXES, EventFormat  # noqa: E402
from folio.data.sources.music_corpus import MusicConfig, music_documents, music_tokenizer, read_pieces  # noqa: E402

Steps = Annotated[int, Ge(1), Le(1000)]


@dataclass(frozen=True)
class MidiConfig(MusicConfig):
    # --- the music ---
    inputs: tuple[str, ...] = ()  # .mid and .midi files, folders of them, or patterns
    time: Literal["seconds", "beats"] = "seconds"  # unit: seconds for performances, in any tempo; beats for scores
    steps: Steps | None = None  # time steps per second or beat; None: 100 per second, or 12 per beat
    velocities: Annotated[int, Ge(0), Le(127)] = 32  # levels of loudness; 0: all equal, and 2 events per note, not 3

    def problems(self) -> list[tuple[str, str]]:
        problems = super().problems()
        if not self.inputs:
            problems.append(("inputs", "name a .mid file, a folder, or a pattern"))
        if self.tokenizer != "midi" and event_format(self) != EventFormat():
            problems.append(("tokenizer", "it defines time, steps, and velocities; remove these settings"))
        return problems


def event_format(cfg: MidiConfig) -> EventFormat:
    """Return the format that the settings describe."""
    if cfg.time == "seconds":
        return EventFormat(steps=cfg.steps or 100, velocities=cfg.velocities)
    return EventFormat("beats", cfg.steps or 12, longest_shift=4, velocities=cfg.velocities, tempo=120.0)


def main(cfg: MidiConfig) -> None:
    settings.check(cfg)
    cfg = cfg.replace(tokenizer=find_run(cfg.tokenizer))
    tokenizer = music_tokenizer(cfg, event_format(cfg))
    format = EventFormat.of(tokenizer)
    inputs = find_sources(cfg.inputs, suffixes=SUFFIXES, kind="midi")
    name = cfg.name or default_name(cfg.inputs)
    pieces, problems = read_pieces(inputs.sources, format, cfg.num_workers)
    corpus = music_documents(inputs, pieces, problems, format, cfg)
    prepare(cfg, corpus, name, tokenizer)


if __name__ == "__main__":
    settings.run_script(main, MidiConfig, needs_output=False)
