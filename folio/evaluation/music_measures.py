"""Compare generated with held-out music: validity, meter, key, intervals, durations, and copied training data.

Each measure is a function of pieces, and is applied to generated and held-out pieces alike, because a value for
generated pieces is meaningful only relative to the value for real music.

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
from folio.checkpoints.checkpoint import Checkpoint
from folio.checkpoints.training_data import open_training_data
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
from folio.evaluation.answers import generate_texts
from folio.evaluation.memorization import TrainingIndex, evenly_spaced
from folio.evaluation.scores import Coverage, Evaluation, Measure

TUNE_STEPS = 48  # time steps per quarter note in tunes: 1/16 of a quarter note, and triplets of it
MAJOR = (0, 2, 4, 5, 7, 9, 11)  # the pitch classes of a major scale above its tonic
PIECES = 200  # number of generated pieces, and maximum number of held-out and training pieces
RESAMPLES = 1000  # of the bootstrap
BATCH_SIZE = 64  # maximum number of pieces generated at once


class Share(NamedTuple):
    """How many elements of a piece have a property, out of those to which it applies."""

    count: int
    total: int


EMPTY = Share(0, 0)


@dataclass(frozen=True)
class Piece:
    """The measured properties of one piece. A piece that does not parse has no notes."""

    parses: bool
    notes: Sequence[Note] = ()  # sorted by sort_notes
    steps: int = TUNE_STEPS  # time steps per quarter note
    meter: Share = EMPTY  # tunes: bars as long as the meter; events: notes that begin on a beat
    key: frozenset[int] | None = None  # pitch classes of the key signature; None: there is none
    valid_events: Share = EMPTY


# --- parsing ----------------------------------------------------------------------------------------------------------


def parse_events(events: str, format: EventFormat) -> Piece:
    """Read a piece of events. It parses if it has notes, and symusic can open its MIDI file."""
    valid_events = count_valid_events(events, format)
    try:
        with tempfile.TemporaryDirectory() as folder:
            notes = write_midi(Path(folder, "piece.mid"), events, format)
            read_score(Path(folder, "piece.mid"))
    except PieceError:
        return Piece(False, steps=format.steps, valid_events=valid_events)
    on_beat = sum(note.start % format.steps == 0 for note in notes)
    meter = Share(on_beat, len(notes)) if format.time == "beats" else EMPTY
    return Piece(True, notes, format.steps, meter, valid_events=valid_events)


def count_valid_events(events: str, format: EventFormat) -> Share:
    """Count valid events: a note-on of a silent pitch (followed by its velocity, if the format has velocities), a
    note-off of a sounding pitch, a time-shift, and the velocity of a note-on.
    """
    names, sounding, n_valid = events.split(), set(), 0
    for previous, name, following in zip(["", *names], names, [*names[1:], ""], strict=False):
        kind, _, value = name.partition("_")
        if kind == "NoteOn":
            n_valid += value not in sounding and (not format.velocities or following.startswith("Velocity_"))
            sounding.add(value)
        elif kind == "NoteOff":
            n_valid += value in sounding
            sounding.discard(value)
        else:
            n_valid += kind == "TimeShift" or previous.startswith("NoteOn_")
    return Share(n_valid, len(names))


def parse_tune(tune: str) -> Piece:
    """Read a tune in ABC notation with music21.

    Only bars between two plain bar lines are compared with the meter, because the first and last bar, and bars at a
    repeat or a double bar, may be incomplete. A bar of several times the meter is valid, because a line break replaces
    the bar line in many tunes. music21's `reBar` is disabled: it splits bars that are too long, gives the remainder a
    new meter, and takes minutes for a note of a few hundred beats.
    """
    from music21 import converter, key, meter, stream

    try:
        # music21 warns about unknown fields
        with redirect_stderr(io.StringIO()), patch("music21.abcFormat.translate.reBar"):
            score = converter.parse(tune, format="abc")
        part = score.parts[0]
        notes = [
            Note(round(begin * TUNE_STEPS), round(end * TUNE_STEPS), pitch, DEFAULT_VELOCITY)
            for begin, end, pitch in timed_pitches(part)
        ]
        measures = list(part.getElementsByClass(stream.Measure))
        has_meter = bool(part.recurse().getElementsByClass(meter.TimeSignature))
        inner = [bar for bar, *barlines in _with_barlines(measures) if has_meter and not any(barlines)]
        meter_share = Share(
            sum(bar.duration.quarterLength % bar.barDuration.quarterLength == 0 for bar in inner), len(inner)
        )
        signature = part.recurse().getElementsByClass(key.KeySignature).first()
        classes = None if signature is None else frozenset((7 * signature.sharps + step) % 12 for step in MAJOR)
    except Exception:  # music21 raises many types for text that is not ABC
        return Piece(False)
    return Piece(bool(notes), sort_notes(notes), TUNE_STEPS, meter_share, classes)


def _with_barlines(measures: Sequence) -> list[tuple]:
    """Return each inner bar with the special bar lines on both sides, its own and its neighbors'; None: a plain one."""
    triples = zip(measures, measures[1:], measures[2:], strict=False)
    return [
        (bar, left.rightBarline, bar.leftBarline, bar.rightBarline, right.leftBarline) for left, bar, right in triples
    ]


# --- measures ---------------------------------------------------------------------------------------------------------


def measure_pieces(source: str, pieces: Sequence[Piece], meter: str) -> list[Measure]:
    """Return shares over all pieces, which are the samples of the confidence intervals. Empty shares are left out.

    meter: the name of the share `Piece.meter`, such as "notes on a beat".
    """
    counted = {
        "parses": [Share(int(piece.parses), 1) for piece in pieces],
        meter: [piece.meter for piece in pieces],
        "notes in key": [notes_in_key(piece) for piece in pieces],
        "events that make sense": [piece.valid_events for piece in pieces],
    }
    return [measure for name, shares in counted.items() for measure in measure_shares(source, name, shares)]


def measure_copied(source: str, copied: Sequence[Share]) -> list[Measure]:
    """Measure how much pieces copy. copied: longest_copied of each piece."""
    lengths = [Share(piece.count, 1) for piece in copied]
    mostly_copied = [Share(int(2 * piece.count > piece.total), 1) for piece in copied]
    shares = {"longest copied passage, tokens": lengths, "pieces that are mostly one copied passage": mostly_copied}
    return [measure for name, values in shares.items() for measure in measure_shares(source, name, values)]


def longest_row(source: str, copied: Sequence[Share]) -> dict[str, Any]:
    """Return a result row with the longest passage that any piece copies."""
    return table_row(source, "longest copied passage of all, tokens", max(piece.count for piece in copied), len(copied))


def table_row(
    source: str, name: str, value: float, n: int, low: float | None = None, high: float | None = None
) -> dict[str, Any]:
    """Return a result row for a value that is not a ratio of sums over pieces. low, high: its interval, if known."""
    return {"of": source, "measure": name, "value": value, "low": low, "high": high, "n": n, "over": "pieces"}


def measure_shares(source: str, name: str, shares: Sequence[Share]) -> list[Measure]:
    """Return one share over all pieces, or an empty list if its total is 0."""
    values, weights = np.array(shares, dtype=np.float64).reshape(-1, 2).T  # (P,) each
    measure = Measure(source, name, "pieces", values, weights, better="higher", is_share=True)
    return [measure] if weights.sum() else []


def notes_in_key(piece: Piece) -> Share:
    """Count the notes in the piece's key; without a key, in the major scale that contains the most notes."""
    classes = Counter(note.pitch % 12 for note in piece.notes)
    keys = [piece.key] if piece.key else [{(tonic + step) % 12 for step in MAJOR} for tonic in range(12)]
    return Share(max(sum(classes[c] for c in key) for key in keys), len(piece.notes))


def melodic_intervals(piece: Piece) -> Counter[int]:
    """Count the intervals of the highest voice, in semitones."""
    return Counter(after.pitch - before.pitch for before, after in itertools.pairwise(highest_voice(piece.notes)))


def durations(piece: Piece) -> Counter[float]:
    """Count the durations of notes, in quarter notes."""
    return Counter((note.end - note.start) / piece.steps for note in piece.notes)


def distance_rows(sets: dict[str, Sequence[Piece]], held_out: Sequence[Piece]) -> list[dict[str, Any]]:
    """Return result rows with the distances of intervals and durations between each set of pieces and held-out pieces.

    Sets without notes have no rows.
    """
    rows = []
    for name, values in {"intervals": melodic_intervals, "durations": durations}.items():
        for source, pieces in sets.items():
            if any(map(values, pieces)):
                value, low, high = distance([values(piece) for piece in pieces], [values(piece) for piece in held_out])
                rows.append(table_row(source, f"distance of {name}", value, len(pieces), low, high))
    return rows


def distance(first: Sequence[Counter], second: Sequence[Counter]) -> tuple[float, float, float]:
    """Return the total variation distance of two distributions, and the bounds of its 95 % interval.

    Each distribution is summed over pieces. The distance is 0 if they are equal, and 1 if they are disjoint.

    The distance of two samples is biased upward, because even samples of the same distribution differ. The bootstrap
    over pieces (Efron and Tibshirani 1993, section 10.2) estimates this bias and gives the basic interval. Near 0, some
    bias remains: compare the distance with that of training to held-out pieces.
    Raises ValueError if one side has no values.
    """
    values = sorted(set().union(*first, *second))
    rng = np.random.default_rng(0)
    distributions = []
    for pieces in (first, second):
        counts = np.array([[piece[value] for value in values] for piece in pieces], dtype=np.float64)  # (P, V)
        if not counts.sum():
            raise ValueError("one side has no values")
        weights = rng.multinomial(len(pieces), np.full(len(pieces), 1 / len(pieces)), size=RESAMPLES)  # (R, P)
        sums = np.vstack([counts.sum(axis=0), weights @ counts])  # (1 + R, V)
        distributions.append(sums / np.maximum(sums.sum(axis=1, keepdims=True), 1))
    observed, *resampled = np.abs(distributions[0] - distributions[1]).sum(axis=1) / 2  # (1 + R,)
    low, high = np.quantile(resampled, [0.025, 0.975])
    value, low, high = (max(0.0, float(2 * observed - x)) for x in (np.mean(resampled), high, low))
    return value, low, high


def longest_copied(index: TrainingIndex, ids: np.ndarray) -> Share:
    """Return the tokens of the longest passage of a piece, (T,), in the training data, out of the piece's tokens."""
    return Share(int(index.longest(ids).max()) if len(ids) else 0, len(ids))


# --- pieces -----------------------------------------------------------------------------------------------------------


def split_pieces(shards: Sequence[Shard], eot: int, limit: int | None = None) -> list[np.ndarray]:
    """Return the tokens of the pieces in shards, (n,) each. limit: select up to `limit` pieces, evenly spaced."""
    ids = np.concatenate([shard.ids for shard in shards])  # (n,); a shard may end in a piece
    pieces = [piece[piece != eot] for piece in np.split(ids, np.flatnonzero(ids == eot))]
    pieces = [piece for piece in pieces if len(piece)]
    return evenly_spaced(pieces, limit or len(pieces))


def generate_pieces(model: LanguageModel, count: int, max_new_tokens: int, temperature: float) -> list[str]:
    """Generate pieces of up to `max_new_tokens` without a prompt. Piece k equals sample k of sample.py."""
    config = GenerationConfig(temperature=temperature, top_k=None, max_new_tokens=max_new_tokens, batch_size=BATCH_SIZE)
    start = model.encode_prompt("").ids
    return generate_texts(model, [(start, k) for k in range(count)], config, "generating", "piece")


# --- evaluation -------------------------------------------------------------------------------------------------------


def evaluate_music(
    evaluation: Evaluation,
    model: LanguageModel,
    saved: Checkpoint,
    data_dir: str | None = None,
    limit: int = PIECES,
    temperature: float = 1.0,
) -> None:
    """Add the measures of pieces that the model generates and, for comparison, of held-out pieces.

    data_dir: as in open_training_data. Raises UserError if the model was not trained on music.
    """
    tokenizer = model.tokenizer
    parse, meter = parse_tune, "bars as long as the meter"
    if isinstance(tokenizer, MidiTokenizer):
        parse, meter = partial(parse_events, format=EventFormat.of(tokenizer)), "notes on a beat"
    if tokenizer.eot is None:
        raise UserError(f"{saved.path} does not generate pieces of music: its tokenizer has no end-of-text token")
    training = open_training_data(saved, data_dir)
    held_out = [tokenizer.decode(ids) for data in training for ids in split_pieces(data.val, tokenizer.eot, limit)]
    trained_on = [tokenizer.decode(ids) for data in training for ids in split_pieces(data.train, tokenizer.eot, limit)]
    real = [parse(text) for text in held_out]
    if not any(piece.parses for piece in real):
        raise UserError(f"{saved.path} does not generate music: no held-out document parses as ABC notation")
    max_new_tokens = 2 * max(len(tokenizer.encode(text, "skip")) for text in held_out)
    texts = generate_pieces(model, limit, max_new_tokens, temperature)
    pieces, index = [parse(text) for text in texts], TrainingIndex(training, tokenizer.eot)
    for name, set_texts, set_pieces in (("generated", texts, pieces), ("held out", held_out, real)):
        evaluation.coverage[name] = Coverage()
        copied = [longest_copied(index, tokenizer.encode(text, "skip")) for text in set_texts]
        evaluation.measures += [*measure_pieces(name, set_pieces, meter), *measure_copied(name, copied)]
        evaluation.more_rows.append(longest_row(name, copied))
    names = [measure.name for measure in evaluation.measures]
    evaluation.measures.sort(key=lambda measure: names.index(measure.name))  # generated next to held out
    evaluation.coverage["training"] = Coverage()
    sets = {"generated": pieces, "training": [parse(text) for text in trained_on]}
    evaluation.more_rows += distance_rows(sets, real)
    evaluation.answers += [{"run": evaluation.run, "of": "generated", "piece": text} for text in texts]
