"""Pieces of music as a corpus: read from MIDI files, split by piece, and transposed for training."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le

from folio import UserError
from folio.base.download import Wheel, fetch
from folio.base.workers import cores, map_in_order
from folio.data import tokenizer as tokenizers
from folio.data.blocks import document_hash
from folio.data.corpus import Documents, Source
from folio.data.prepare import Fraction, PrepareConfig
from folio.data.sources.music import PITCH, EventFormat, PieceError, events_of_file, transpose
from folio.data.tokenizer import MidiTokenizer

SHOWN = 5  # files that a line names; report.json names all
FEW_BYTES = 1 << 18  # of all files; for less, starting other processes takes longer than it saves

MUSIC21 = "music21==10.5.1"  # the wheel whose scores the scripts read; their terms differ (docs/music.md)
MUSIC21_SHA256 = "dc3309498c4c95cebdf8d4f20c868deb6b63bce1d929cad4f51a7ccc982987b1"

Semitones = Annotated[int, Ge(0), Le(24)]


@dataclass(frozen=True)
class MusicConfig(PrepareConfig):
    """Settings that scripts for events have in common."""

    config_file = "config/chorales.py"

    # --- the music ---
    transpose_down: Semitones = 5  # training pieces are also transposed by up to so many semitones; 0: off
    transpose_up: Semitones = 6
    check_leakage: bool | None = False  # True: count n-grams of events that validation shares with training
    tokenizer: str = "midi"  # midi: events as this script makes them; or the folder of a data set or a run with music
    val_fraction: Fraction = 0.1  # share of the pieces for validation

    @property
    def shifts(self) -> range:
        """By how many semitones a training piece is transposed."""
        return range(-self.transpose_down, self.transpose_up + 1)


def music_tokenizer(cfg: MusicConfig, format: EventFormat) -> MidiTokenizer:
    """The tokenizer that cfg.tokenizer names; "midi": of this format. Raises UserError if it is not for music."""
    if cfg.tokenizer == "midi":
        return format.tokenizer()
    name = cfg.tokenizer
    if not Path(name).exists():
        raise UserError(f"tokenizer={name}: use midi, or the folder of a data set or of a run with music")
    loaded = tokenizers.load(Path(name))
    if not isinstance(loaded, MidiTokenizer):
        raise UserError(f"tokenizer={name}: it is for text ({loaded.kind}); use midi, or a run with music")
    return loaded


def music21_wheel() -> Path:
    """music21's wheel, downloaded once. It is read as a zip file. Raises UserError if that fails."""
    return fetch(f"the corpus of {MUSIC21}", MUSIC21_SHA256, [Wheel(MUSIC21, MUSIC21_SHA256)])


# --- pieces -----------------------------------------------------------------------------------------------------------


def read_pieces(
    sources: list[Source], format: EventFormat, num_workers: int | None
) -> tuple[list[str], dict[str, list[str]]]:
    """The text of each MIDI file that can be used; and for each problem, the files that have it, with the reason."""
    workers = num_workers
    if workers is None:
        workers = 0 if sum(source.bytes for source in sources) <= FEW_BYTES else cores()
    pieces: list[str] = []
    problems: dict[str, list[str]] = {"broken": [], "empty": [], "drums only": []}
    for source, result in map_in_order(_read_piece, sources, workers, format):
        if isinstance(result, str):
            pieces.append(result)
        else:
            problem, reason = result
            problems[problem].append(f"{source.name} ({reason})")
    return pieces, problems


def _read_piece(source: Source, format: EventFormat) -> str | tuple[str, str]:
    """The text of a file, or its problem and the reason."""
    try:
        return events_of_file(source.path, format)
    except PieceError as error:
        return error.problem, str(error)


def describe_problems(problems: dict[str, list[str]], total: int, what: str = "files") -> list[str]:
    """A line for each problem that occurred, with some of the files."""
    lines = []
    for problem, files in problems.items():
        if files:
            others = f", and {len(files) - SHOWN:,} others: report.json has all" if len(files) > SHOWN else ""
            lines.append(f"left out {len(files):,} of {total:,} {what} ({problem}): {', '.join(files[:SHOWN])}{others}")
    return lines


def split_pieces(pieces: Sequence[str], fraction: float, same: Callable[[str], str]) -> tuple[list[str], list[str]]:
    """The pieces for validation and for training: this fraction of them, by the smallest hashes.

    Pieces with an equal same(piece) are in the same split. Raises UserError if there are not two different ones.
    """
    keys = [document_hash(same(piece).encode("utf-8", "replace")) for piece in pieces]
    different = sorted(set(keys))
    if not pieces:
        raise UserError("no file has a piece that can be used; there is nothing to learn from")
    if len(different) == 1:
        what = f"all {len(pieces):,} pieces are the same" if len(pieces) > 1 else "there is only one piece"
        raise UserError(f"{what}, and a piece cannot be in both splits; add another")
    count = min(len(different) - 1, max(1, round(fraction * len(different))))
    chosen = set(different[:count])
    val = [piece for piece, key in zip(pieces, keys, strict=True) if key in chosen]
    train = [piece for piece, key in zip(pieces, keys, strict=True) if key not in chosen]
    return val, train


def in_one_key(piece: str) -> str:
    """The piece with pitches relative to its first note, which is the same for the piece in any key."""
    first = int(PITCH.search(piece)[0])
    return PITCH.sub(lambda match: str(int(match[0]) - first), piece)


def versions(piece: str, shifts: Sequence[int], format: EventFormat) -> list[str]:
    """The piece in all keys of `shifts` in which its notes are in the format's range; always as it is."""
    transposed = (transpose(piece, shift, format) for shift in shifts if shift)
    return [piece, *(version for version in transposed if version is not None)]


def music_documents(
    sources: list[Source],
    pieces: list[str],
    problems: dict[str, list[str]],
    format: EventFormat,
    cfg: MusicConfig,
    same: Callable[[str], str] = in_one_key,
) -> Documents:
    """The corpus that `prepare` takes. same: as in split_pieces. Prints what is in it. Raises UserError if it cannot be
    split.
    """
    for line in describe_problems(problems, len(pieces) + sum(map(len, problems.values()))):
        print(line)
    shifts = cfg.shifts
    val, train = split_pieces(pieces, cfg.val_fraction, same)
    keys = f", each in up to {len(shifts)} keys," if len(shifts) > 1 else ""
    print(f"{len(pieces):,} pieces: {len(train):,} for training{keys} and {len(val):,} for validation")
    report: dict[str, Any] = {"pieces": {"train": len(train), "val": len(val)}, "left_out": problems}
    recipe = {"format": asdict(format), "shifts": list(shifts)}
    made = partial(versions, shifts=shifts, format=format)
    return Documents(sources, [*val, *train], range(len(val)), report, made, recipe)
