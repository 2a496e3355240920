"""How generated music compares with held-out music: whether it parses, its meter, its key, its intervals and durations,
and what it copies from the training data.

Each measure is a function of pieces, so that generated and held-out pieces go through the same code: a share of a
generated set means nothing without that of real music.

Dimensions: P pieces, n tokens, V different values, R resamples.
"""

import io
import itertools
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from folio import UserError
from folio.base.progress import progress_bar
from folio.checkpoints.checkpoint import Checkpoint
from folio.data.shards import Shard
from folio.data.sources.music import (
    DEFAULT_VELOCITY,
    EventFormat,
    Note,
    PieceError,
    highest_voice,
    read_score,
    sort_notes,
    timed_pitches,
    write_midi,
)
from folio.data.tokenizer import MidiTokenizer
from folio.decoding.language_model import GenerationConfig, LanguageModel
from folio.evaluation.memorization import TrainingIndex, open_training_data
from folio.evaluation.scores import Evaluation, Measure, Reading

TUNE_STEPS = 48  # per quarter, the unit of time in a tune's notes: 1/16 of a quarter, and triplets of it
MAJOR = (0, 2, 4, 5, 7, 9, 11)  # the pitch classes of a major scale above its tonic
PIECES = 200  # to generate, and at most to compare them with
RESAMPLES = 1000
BATCH_SIZE = 64  # pieces generated at a time, if memory holds as many


class Share(NamedTuple):
    """How many of a piece's parts have a property, of those that could have it."""

    count: int
    total: int


NOTHING = Share(0, 0)


@dataclass(frozen=True)
class Piece:
    """What is measured of one piece. A piece that does not parse has no notes."""

    parses: bool
    notes: Sequence[Note] = ()  # sort_notes
    steps: int = TUNE_STEPS  # of time per quarter
    meter: Share = NOTHING  # of a tune: bars that add up to its meter; of events: notes that begin on a beat
    key: frozenset[int] | None = None  # the pitch classes of the key that it states; None: it states none
    sense: Share = NOTHING  # of events: those that make sense


# --- reading pieces ---------------------------------------------------------------------------------------------------


def piece_of_events(events: str, format: EventFormat) -> Piece:
    """A piece of events. It parses if symusic opens the MIDI file that is written for it, and it has notes."""
    sense = events_that_make_sense(events, format)
    try:
        with tempfile.TemporaryDirectory() as folder:
            notes = write_midi(Path(folder, "piece.mid"), events, format)
            read_score(Path(folder, "piece.mid"))
    except PieceError:
        return Piece(False, steps=format.steps, sense=sense)
    on_beat = sum(note.start % format.steps == 0 for note in notes)
    meter = Share(on_beat, len(notes)) if format.time == "beats" else NOTHING
    return Piece(True, notes, format.steps, meter, sense=sense)


def events_that_make_sense(events: str, format: EventFormat) -> Share:
    """How many events make sense: a note-on of a silent pitch (with its velocity, if the format has them), a note-off
    of a sounding one, a time-shift, and the velocity of a note-on.
    """
    names, sounding, good = events.split(), set(), 0
    for before, name, after in zip(["", *names], names, [*names[1:], ""], strict=False):
        kind, _, value = name.partition("_")
        if kind == "NoteOn":
            good += value not in sounding and (not format.velocities or after.startswith("Velocity_"))
            sounding.add(value)
        elif kind == "NoteOff":
            good += value in sounding
            sounding.discard(value)
        else:
            good += kind == "TimeShift" or before.startswith("NoteOn_")
    return Share(good, len(names))


def piece_of_tune(tune: str) -> Piece:
    """A tune in ABC notation, read by music21.

    Only bars between two plain bar lines are compared with the meter: the first and the last bar, and those at a repeat
    or a double bar, may be divided between its two sides. A bar that lasts several times the meter is right, because a
    line break stands for a bar line in many tunes. music21's `reBar` is off: it divides bars that are too long, gives
    the rest a meter of its own, and takes minutes for a note of some hundred beats.
    """
    from music21 import converter, key, meter, stream

    try:
        # music21 warns of fields that it does not know
        with redirect_stderr(io.StringIO()), patch("music21.abcFormat.translate.reBar"):
            score = converter.parse(tune, format="abc")
        part = score.parts[0]
        notes = [
            Note(round(begin * TUNE_STEPS), round(end * TUNE_STEPS), pitch, DEFAULT_VELOCITY)
            for begin, end, pitch in timed_pitches(part)
        ]
        measures = list(part.getElementsByClass(stream.Measure))
        has_meter = bool(part.recurse().getElementsByClass(meter.TimeSignature))
        inner = [bar for bar, *lines in _with_lines(measures) if has_meter and not any(lines)]
        meter_share = Share(
            sum(bar.duration.quarterLength % bar.barDuration.quarterLength == 0 for bar in inner), len(inner)
        )
        signature = part.recurse().getElementsByClass(key.KeySignature).first()
        classes = None if signature is None else frozenset((7 * signature.sharps + step) % 12 for step in MAJOR)
    except Exception:  # music21 raises many kinds for what is not ABC
        return Piece(False)
    return Piece(bool(notes), sort_notes(notes), TUNE_STEPS, meter_share, classes)


def _with_lines(measures: Sequence) -> list[tuple]:
    """Each bar between two others, with the bar lines around it that are not plain: those of its neighbors, too."""
    triples = zip(measures, measures[1:], measures[2:], strict=False)
    return [
        (bar, left.rightBarline, bar.leftBarline, bar.rightBarline, right.leftBarline) for left, bar, right in triples
    ]


# --- measures ---------------------------------------------------------------------------------------------------------


def measure_pieces(source: str, pieces: Sequence[Piece], meter: str) -> list[Measure]:
    """Shares over all pieces, which are the samples of the intervals. A share of nothing is left out.

    meter: what a piece's `meter` counts, such as "notes on a beat".
    """
    counted = {
        "parses": [Share(int(piece.parses), 1) for piece in pieces],
        meter: [piece.meter for piece in pieces],
        "notes in key": [in_key(piece) for piece in pieces],
        "events that make sense": [piece.sense for piece in pieces],
    }
    return [measure for name, shares in counted.items() for measure in measure_shares(source, name, shares)]


def measure_copied(source: str, copied: Sequence[Share]) -> list[Measure]:
    """How much pieces copy, from longest_copied of each."""
    lengths = [Share(piece.count, 1) for piece in copied]
    most = [Share(int(2 * piece.count > piece.total), 1) for piece in copied]
    shares = {"longest copied passage, tokens": lengths, "pieces that are mostly one copied passage": most}
    return [measure for name, of_pieces in shares.items() for measure in measure_shares(source, name, of_pieces)]


def longest_row(source: str, copied: Sequence[Share]) -> dict[str, Any]:
    """A row of evaluation's table: the longest passage that any piece copies."""
    return table_row(source, "longest copied passage of all, tokens", max(piece.count for piece in copied), len(copied))


def table_row(
    source: str, name: str, value: float, n: int, low: float | None = None, high: float | None = None
) -> dict[str, Any]:
    """A row of evaluation's table for what is not a ratio of sums over pieces. low, high: its interval, if known."""
    return {"of": source, "measure": name, "value": value, "low": low, "high": high, "n": n, "over": "pieces"}


def measure_shares(source: str, name: str, shares: Sequence[Share]) -> list[Measure]:
    """One share over all pieces, or nothing if there is nothing to count."""
    values, weights = np.array(shares, dtype=np.float64).reshape(-1, 2).T  # (P,) each
    measure = Measure(source, name, "pieces", values, weights, better="higher", is_share=True)
    return [measure] if weights.sum() else []


def in_key(piece: Piece) -> Share:
    """The notes of the piece that are in its key; without one, in the major scale that has the most of them."""
    classes = Counter(note.pitch % 12 for note in piece.notes)
    keys = [piece.key] if piece.key else [{(tonic + step) % 12 for step in MAJOR} for tonic in range(12)]
    return Share(max(sum(classes[c] for c in key) for key in keys), len(piece.notes))


def intervals(piece: Piece) -> Counter[int]:
    """The steps of the highest voice, in semitones."""
    return Counter(after.pitch - before.pitch for before, after in itertools.pairwise(highest_voice(piece.notes)))


def durations(piece: Piece) -> Counter[float]:
    """How long notes are, in quarters."""
    return Counter((note.end - note.start) / piece.steps for note in piece.notes)


def distance_rows(sets: dict[str, Sequence[Piece]], held_out: Sequence[Piece]) -> list[dict[str, Any]]:
    """Rows of evaluation's table: how far the intervals and durations of sets of pieces, by their names, are from those
    of held-out pieces. Sets without notes have no rows.
    """
    rows = []
    for name, values in {"intervals": intervals, "durations": durations}.items():
        for source, pieces in sets.items():
            if any(map(values, pieces)):
                value, low, high = distance([values(piece) for piece in pieces], [values(piece) for piece in held_out])
                rows.append(table_row(source, f"distance of {name}", value, len(pieces), low, high))
    return rows


class Distance(NamedTuple):
    """A distance with its 95 % interval."""

    value: float
    low: float
    high: float


def distance(first: Sequence[Counter], second: Sequence[Counter], seed: int = 0) -> Distance:
    """The total variation distance of two distributions, each summed over pieces: 0 if equal, 1 if disjoint.

    Two samples of one distribution differ, so the distance of the samples is too large. The bootstrap over pieces
    (Efron and Tibshirani 1993, section 10.2) estimates by how much, and gives the basic interval. Near 0, a part of the
    error remains: compare the distance with that of training to held-out pieces.
    Raises ValueError if one side has no values.
    """
    values = sorted(set().union(*first, *second))
    rng = np.random.default_rng(seed)
    distributions = []
    for pieces in (first, second):
        counts = np.array([[piece[value] for value in values] for piece in pieces], dtype=np.float64)  # (P, V)
        if not counts.sum():
            raise ValueError("there is nothing to compare")
        weights = rng.multinomial(len(pieces), np.full(len(pieces), 1 / len(pieces)), size=RESAMPLES)  # (R, P)
        sums = np.vstack([counts.sum(axis=0), weights @ counts])  # (1 + R, V)
        distributions.append(sums / np.maximum(sums.sum(axis=1, keepdims=True), 1))
    of_samples, *resampled = np.abs(distributions[0] - distributions[1]).sum(axis=1) / 2  # (1 + R,)
    low, high = np.quantile(resampled, [0.025, 0.975])
    return Distance(*(max(0.0, float(2 * of_samples - x)) for x in (np.mean(resampled), high, low)))


def longest_copied(index: TrainingIndex, ids: np.ndarray) -> Share:
    """The longest passage of a piece, (T,), that is in the training data: its tokens, of all tokens of the piece."""
    return Share(int(index.longest(ids).max()) if len(ids) else 0, len(ids))


# --- pieces to measure ------------------------------------------------------------------------------------------------


def pieces_of(shards: Sequence[Shard], eot: int, limit: int | None = None) -> list[np.ndarray]:
    """The tokens of the pieces in shards, (n,) each. With a limit, so many of them, evenly spaced."""
    ids = np.concatenate([shard.ids for shard in shards])  # (n,); a shard may end in a piece
    pieces = [piece[piece != eot] for piece in np.split(ids, np.flatnonzero(ids == eot))]
    pieces = [piece for piece in pieces if len(piece)]
    return [pieces[i] for i in np.linspace(0, len(pieces) - 1, min(limit or len(pieces), len(pieces))).astype(int)]


def generate_pieces(model: LanguageModel, count: int, most: int, temperature: float) -> list[str]:
    """Pieces from their beginnings to their ends, or to at most so many tokens. Piece k is sample k of sample.py."""
    config = GenerationConfig(temperature=temperature, top_k=None, max_new_tokens=most, batch_size=BATCH_SIZE)
    start = model.encode_prompt("").ids
    texts = model.complete(((start, k) for k in range(count)), count, config)
    return list(progress_bar(iterable=texts, total=count, unit="piece", desc="generating"))


# --- what evaluations report ------------------------------------------------------------------------------------------


def evaluate_music(
    evaluation: Evaluation,
    model: LanguageModel,
    saved: Checkpoint,
    data_dir: str | None = None,
    limit: int = PIECES,
    temperature: float = 1.0,
) -> None:
    """Add what is measured of pieces that the model generates and, as the scale, of held-out pieces.

    data_dir: as in open_training_data. Raises UserError if the model was not trained on music.
    """
    tokenizer = model.tokenizer
    read, meter = piece_of_tune, "bars as long as the meter"
    if isinstance(tokenizer, MidiTokenizer):
        read, meter = partial(piece_of_events, format=EventFormat.of(tokenizer)), "notes on a beat"
    if tokenizer.eot is None:
        raise UserError(f"{saved.path} does not generate pieces of music: its tokenizer has no end-of-text token")
    training = open_training_data(saved, data_dir)
    held_out = [tokenizer.decode(ids) for of in training for ids in pieces_of(of.val, tokenizer.eot, limit)]
    trained_on = [tokenizer.decode(ids) for of in training for ids in pieces_of(of.train, tokenizer.eot, limit)]
    real = [read(text) for text in held_out]
    if not any(piece.parses for piece in real):
        raise UserError(f"{saved.path} does not generate music: no held-out document parses as ABC notation")
    most = 2 * max(len(tokenizer.encode(text)) for text in held_out)
    texts = generate_pieces(model, limit, most, temperature)
    pieces, index = [read(text) for text in texts], TrainingIndex(training, tokenizer.eot)
    for name, written, measured in (("generated", texts, pieces), ("held out", held_out, real)):
        evaluation.readings[name] = Reading()
        copied = [longest_copied(index, tokenizer.encode(text)) for text in written]
        evaluation.measures += [*measure_pieces(name, measured, meter), *measure_copied(name, copied)]
        evaluation.more_rows.append(longest_row(name, copied))
    names = [measure.name for measure in evaluation.measures]
    evaluation.measures.sort(key=lambda measure: names.index(measure.name))  # generated and held out side by side
    evaluation.readings["training"] = Reading()
    sets = {"generated": pieces, "training": [read(text) for text in trained_on]}
    evaluation.more_rows += distance_rows(sets, real)
    evaluation.answers += [{"run": evaluation.run, "of": "generated", "piece": text} for text in texts]
