"""Music as a corpus: reads MIDI files, splits the pieces, and transposes them for training."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le

from folio import UserError
from folio.base.download import Wheel, fetch
from folio.base.terminal import say
from folio.base.workers import cores, map_in_order
from folio.data import tokenizer as tokenizers
from folio.data.account import Account
from folio.data.blocks import document_hash
from folio.data.corpus import Documents
from folio.data.inputs import Inputs, Source
from folio.data.prepare import Fraction, PrepareConfig
from folio.data.sources.music import PITCH, EventFormat, PieceError, events_of_file, transpose
from folio.data.tokenizer import MidiTokenizer

MAX_SHOWN = 5  # files per printed line; report.json lists all
SMALL_MUSIC = 1 << 18  # bytes of all files; for less, starting other processes takes longer than it saves

MUSIC21 = "music21==10.5.1"  # the wheel that contains the scores; their terms differ (docs/use/music.md)
MUSIC21_SHA256 = "dc3309498c4c95cebdf8d4f20c868deb6b63bce1d929cad4f51a7ccc982987b1"

Semitones = Annotated[int, Ge(0), Le(24)]


@dataclass(frozen=True)
class MusicConfig(PrepareConfig):
    """Settings of all scripts for music events."""

    config_file = "config/chorales.py"

    # --- the music ---
    transpose_down: Semitones = 5  # maximum semitones by which training pieces are also transposed; 0: off
    transpose_up: Semitones = 6  # see transpose_down
    check_leakage: bool | None = False  # True: count n-grams of events shared by validation and training
    tokenizer: str = "midi"  # midi: events in this script's format; or the folder of a data set or a run with music
    val_fraction: Fraction = 0.1  # share of the pieces for validation

    @property
    def shifts(self) -> range:
        """Semitones by which training pieces are transposed."""
        return range(-self.transpose_down, self.transpose_up + 1)


def music_tokenizer(cfg: MusicConfig, format: EventFormat) -> MidiTokenizer:
    """Return the tokenizer cfg.tokenizer; "midi": the one of this format. Raises UserError if it is not for music."""
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
    """Return the path of music21's wheel, a zip file, downloading it on first use. Raises UserError if that fails."""
    return fetch(f"the corpus of {MUSIC21}", MUSIC21_SHA256, [Wheel(MUSIC21, MUSIC21_SHA256)])


# --- pieces -----------------------------------------------------------------------------------------------------------


def read_pieces(
    sources: list[Source], format: EventFormat, num_workers: int | None
) -> tuple[list[str], dict[str, list[str]]]:
    """Return the text of each valid MIDI file, and the other files by problem, with the reason."""
    workers = num_workers
    if workers is None:
        workers = 0 if sum(source.bytes for source in sources) <= SMALL_MUSIC else cores()
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
    """Return the text of a file, or its problem and the reason."""
    try:
        return events_of_file(source.path, format)
    except PieceError as error:
        return error.problem, str(error)


def describe_problems(problems: dict[str, list[str]], total: int, what: str = "files") -> list[str]:
    """Return a line for each problem that occurred, with some of the files."""
    lines = []
    for problem, files in problems.items():
        if files:
            shown = ", ".join(files[:MAX_SHOWN])
            others = f", and {len(files) - MAX_SHOWN:,} others: see report.json" if len(files) > MAX_SHOWN else ""
            lines.append(f"left out {len(files):,} of {total:,} {what} ({problem}): {shown}{others}")
    return lines


def count_files(problems: dict[str, list[str]]) -> dict[str, int]:
    """Return the numbers of files that are not used, by the reason, for the account."""
    return {f"file ({problem})": len(files) for problem, files in problems.items()}


def split_pieces(pieces: Sequence[str], fraction: float, key: Callable[[str], str]) -> tuple[list[str], list[str]]:
    """Return the pieces for validation, which are this fraction with the smallest hashes, and those for training.

    Pieces with the same key are in the same split. Raises UserError if there are fewer than two different keys.
    """
    keys = [document_hash(key(piece).encode("utf-8", "replace")) for piece in pieces]
    unique_keys = sorted(set(keys))
    if not pieces:
        raise UserError("no file has a piece that can be used; use other files")
    if len(unique_keys) == 1:
        problem = f"all {len(pieces):,} pieces are the same" if len(pieces) > 1 else "there is only one piece"
        raise UserError(f"{problem}, and a piece cannot be in both splits; add another")
    count = min(len(unique_keys) - 1, max(1, round(fraction * len(unique_keys))))
    val_keys = set(unique_keys[:count])
    val = [piece for piece, piece_key in zip(pieces, keys, strict=True) if piece_key in val_keys]
    train = [piece for piece, piece_key in zip(pieces, keys, strict=True) if piece_key not in val_keys]
    return val, train


def relative_pitches(piece: str) -> str:
    """Return the piece with pitches relative to its first note, which does not depend on the key."""
    first = int(PITCH.search(piece)[0])
    return PITCH.sub(lambda match: str(int(match[0]) - first), piece)


def transpositions(piece: str, shifts: Sequence[int], format: EventFormat) -> list[str]:
    """Return the piece, and its transpositions by `shifts` semitones whose notes are in the format's range."""
    transposed = (transpose(piece, shift, format) for shift in shifts if shift)
    return [piece, *(result for result in transposed if result is not None)]


def music_documents(
    inputs: Inputs,
    pieces: list[str],
    problems: dict[str, list[str]],
    format: EventFormat,
    cfg: MusicConfig,
    key: Callable[[str], str] = relative_pitches,
    account: Account | None = None,
) -> Documents:
    """Return the corpus for `prepare`, and print a summary.

    key: see split_pieces. account: what was read; None: files, each with one piece, and those in `problems`.

    Raises UserError if the pieces cannot be split.
    """
    for line in describe_problems(problems, len(pieces) + sum(map(len, problems.values()))):
        say(line)
    shifts = cfg.shifts
    val, train = split_pieces(pieces, cfg.val_fraction, key)
    keys = f", each in up to {len(shifts)} keys," if len(shifts) > 1 else ""
    say(f"{len(pieces):,} pieces: {len(train):,} for training{keys} and {len(val):,} for validation")
    report: dict[str, Any] = {"pieces": {"train": len(train), "val": len(val)}, "left_out": problems}
    recipe = {"format": asdict(format), "shifts": list(shifts)}
    augment = partial(transpositions, shifts=shifts, format=format)
    account = account or inputs.account({"read as midi": len(pieces), **count_files(problems)})
    return Documents(inputs, [*val, *train], range(len(val)), report, augment, recipe, account=account)
