"""Measures of pieces, against manual counts and brute force, and tools/evaluate.py --tasks=music."""

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import sample
from folio import UserError
from folio.base.settings import load
from folio.data.shards import Shard, open_dataset
from folio.data.sources.music import EventFormat, Note
from folio.evaluation import music_measures
from folio.evaluation.memorization import TrainingIndex
from folio.evaluation.music_measures import (
    Piece,
    Share,
    count_valid_events,
    distance,
    durations,
    longest_copied,
    measure_pieces,
    melodic_intervals,
    notes_in_key,
    parse_events,
    parse_tune,
    split_pieces,
)
from prepare import tunes as prepare_tunes
from prepare.tunes import TunesConfig
from sample import SampleConfig
from tests.support.datasets import dataset_of
from tests.support.music import tune
from tests.support.tolerances import binomial_range, normal_limit
from tools import evaluate
from tools.evaluate import EvaluateConfig
from train import train

pytestmark = pytest.mark.needs("miditok", "symusic", "music21")

SCORE = EventFormat("beats", steps=4, longest_shift=4, velocities=0, lowest=30, highest=90)
TUNE = "X:1\nM:2/4\nL:1/8\nK:D\nA|d2 f>e|(3dcB A2|dfa|=f2 d2:|\nA|B2 [dF]2|d4|ABc|]\n"


def test_a_parsed_tune_has_bars_a_key_and_notes():
    """The bars dfa and ABc are too short, but ABc is at a double bar. The two A are upbeats."""
    piece = parse_tune(TUNE)
    assert piece.parses and piece.meter == Share(4, 5)  # d2 f>e, (3dcB A2, dfa, B2 [dF]2, d4
    assert piece.key == {1, 2, 4, 6, 7, 9, 11}  # D major
    assert notes_in_key(piece) == Share(20, 21)  # without =f
    assert list(melodic_intervals(piece).elements())[:2] == [5, 5]
    assert durations(piece)[1 / 3] == 3 and durations(piece)[0.75] == durations(piece)[0.25] == 1


def test_only_bars_at_a_repeat_may_be_incomplete():
    """music21 would split a bar that is too long into a valid bar and a remainder, which takes minutes for the last."""
    head = "X:1\nM:2/4\nL:1/8\nK:G\n"
    assert parse_tune(f"{head}A|B4|B2B:|\nA|B4|B3|]\n").meter == Share(2, 2)
    assert parse_tune(f"{head}A|B4|cdefga|B4|B4|\n").meter == Share(2, 3)
    assert parse_tune(f"{head}A|B4|cdef\nBcde|B4|B4|\n").meter == Share(3, 3)
    assert parse_tune(f"{head}A|B4|cgg2BcBcGBfcce2gAcB2222G|B4|B4|\n").meter == Share(2, 3)


@pytest.mark.parametrize("text", ["", "ROMEO:\nIs the day so young?", "X:1\nK:G\n", "X:1\nM:7/0\nK:G\nA2/0|"])
def test_invalid_tunes_do_not_parse(text):
    piece = parse_tune(text)
    assert not piece.parses and not piece.notes


def test_parsed_events_have_a_meter_and_a_share_of_valid_events():
    events = "NoteOn_60 NoteOn_64 TimeShift_0.2.4 NoteOff_64 NoteOn_65 NoteOff_70 NoteOn_60 TimeShift_0.2.4 NoteOff_60"
    piece = parse_events(events, SCORE)
    assert piece.parses and piece.valid_events == Share(7, 9) and piece.meter == Share(2, 4)
    assert parse_events("TimeShift_1.0.4", SCORE) == Piece(False, steps=4, valid_events=Share(1, 1))
    assert parse_events("", SCORE) == Piece(False, steps=4)
    format = EventFormat()  # velocities belong to note-ons
    assert count_valid_events("NoteOn_60 Velocity_79 TimeShift_0.1.100 NoteOff_60", format) == Share(4, 4)
    assert count_valid_events("NoteOn_60 TimeShift_0.1.100 Velocity_79 NoteOff_60", format) == Share(2, 4)


def piece(*notes: tuple[int, int, int]) -> Piece:
    return Piece(True, [Note(*note, 100) for note in notes], steps=4)


def test_intervals_are_those_of_the_highest_voice():
    music = piece((0, 4, 50), (0, 4, 60), (4, 8, 52), (4, 6, 64), (6, 8, 63), (7, 9, 50), (8, 9, 51))
    assert melodic_intervals(music) == Counter({4: 1, -1: 1, -12: 1})
    assert durations(music) == Counter({1.0: 3, 0.5: 3, 0.25: 1})


def test_without_a_key_the_best_major_scale_is_used(seed):
    rng = random.Random(seed)
    tonic = rng.randrange(12)
    scale = [48 + tonic + step for step in (0, 2, 4, 5, 7, 9, 11)]
    notes = [(k, k + 1, pitch) for k, pitch in enumerate([*scale, *scale, 48 + tonic + 1])]
    assert notes_in_key(piece(*notes)) == Share(14, 15)


def test_shares_are_over_all_pieces_and_pieces_are_the_samples():
    pieces = [Piece(True, meter=Share(count, total)) for count, total in ((9, 10), (1, 2), (30, 30), (0, 0))]
    measures = {measure.name: measure.row() for measure in measure_pieces("x", [*pieces, Piece(False)], "bars")}
    assert measures["bars"]["value"] == pytest.approx(40 / 42)
    assert measures["parses"]["value"] == 0.8 and measures["parses"]["n"] == 5
    assert measures["parses"]["low"] < 0.8 < measures["parses"]["high"]
    assert measures.keys() == {"parses", "bars"}  # no piece has notes or events


def test_the_distance_is_half_the_sum_of_absolute_differences():
    """Identical pieces have no sampling error."""
    first, second = [Counter(a=3, b=1)] * 5, [Counter(a=1, b=1, c=2)] * 7
    assert distance(first, second) == pytest.approx([(0.5 + 0 + 0.5) / 2] * 3)
    assert distance(first, first) == (0, 0, 0) and distance([Counter(a=1)], [Counter(b=5)]) == (1, 1, 1)
    with pytest.raises(ValueError, match="no values"):
        distance([Counter()], first)


def test_a_distance_is_corrected_for_sampling_error(seed):
    """The uncorrected distance of samples is biased upward."""
    rng = np.random.default_rng(seed)
    corrected, uncorrected = [], []
    for _ in range(20):
        sides = [[Counter(rng.integers(0, 10, 10).tolist()) for _ in range(30)] for _ in range(2)]
        sums = [np.array([sum(piece[value] for piece in side) for value in range(10)]) / 300 for side in sides]
        uncorrected.append(np.abs(sums[0] - sums[1]).sum() / 2)
        corrected.append(distance(*sides)[0])
    # The ratio is 0.59, and varies by 0.05. (Both numbers are positive, so that it is not 0.)
    assert np.mean(corrected) < (0.59 + 0.05 * normal_limit()) * np.mean(uncorrected)


def test_the_interval_of_a_distance_contains_the_true_distance(seed):
    """At least 90 % of the intervals from samples of two known distributions contain their distance."""
    rng = np.random.default_rng(seed)
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    hits = 0
    for _ in range(100):
        sides = [[Counter(rng.choice(3, size=10, p=side).tolist()) for _ in range(100)] for side in (p, q)]
        value, low, high = distance(*sides)
        hits += low <= 0.3 <= high
        assert low <= value <= high
    assert hits >= binomial_range(100, 0.9)[0]


def test_the_longest_copied_passage_is_found(seed):
    rng = np.random.default_rng(seed)
    training = rng.integers(0, 3, 500).astype(np.uint16)
    index = TrainingIndex([dataset_of(training)], eot=3)
    for _ in range(5):
        ids = rng.integers(0, 3, 60)
        text, content = "".join(map(str, ids)), "".join(map(str, training))
        brute = max(end - start for start in range(60) for end in range(start, 61) if text[start:end] in content)
        assert longest_copied(index, ids) == Share(brute, 60)
    assert longest_copied(index, training[100:180]) == Share(80, 80)
    assert longest_copied(index, training[:0]) == Share(0, 0)


def test_end_of_text_tokens_separate_pieces():
    shards = [Shard(np.array(ids)) for ids in ([1, 2, 9, 3], [4, 9, 9, 5])]
    assert [piece.tolist() for piece in split_pieces(shards, 9)] == [[1, 2], [3, 4], [5]]
    assert [piece.tolist() for piece in split_pieces(shards, 9, limit=2)] == [[1, 2], [5]]


# --- tools/evaluate.py ------------------------------------------------------------------------------------------------


@pytest.fixture
def tunes_run(tiny, tmp_path) -> str:
    """The folder of a short run on 60 random tunes, which are in tmp_path / "all.abc"."""
    (tmp_path / "all.abc").write_text("\n".join(tune(random.Random(k)) for k in range(60)))
    data = str(tmp_path / "data")
    prepare_tunes.main(TunesConfig(inputs=(str(tmp_path / "all.abc"),), data_dir=data, num_workers=0))
    cfg = tiny(dataset="all", data_dir=data, out_dir=str(tmp_path / "out-all"))
    train(cfg)
    return cfg.out_dir


def evaluated(*words: str, folder: Path) -> dict[tuple[str, str], float]:
    """Run tools/evaluate.py --tasks=music, and return its values by source and measure."""
    evaluate.main(load(EvaluateConfig, [*words, "--tasks=music", f"--json={folder / 'results.json'}"]))
    rows = json.loads((folder / "results.json").read_text())["results"]
    return {(row["of"], row["measure"]): row["value"] for row in rows}


def test_samples_of_a_model_of_events_are_evaluated(music_run, tmp_path):
    values = evaluated(music_run, "--limit=5", f"--answers={tmp_path / 'pieces.jsonl'}", folder=tmp_path)
    assert values["held out", "parses"] == values["held out", "events that make sense"] == 1
    assert 0 < values["generated", "events that make sense"] < 1
    assert values["training", "distance of durations"] == 0  # all notes have the same duration
    pieces = [json.loads(line)["piece"] for line in (tmp_path / "pieces.jsonl").read_text().splitlines()]
    sampler = sample.load_sampler(SampleConfig(out_dir=music_run))
    shares = [count_valid_events(piece, EventFormat.of(sampler.tokenizer)) for piece in pieces]
    sense = sum(share.count for share in shares) / sum(share.total for share in shares)
    assert values["generated", "events that make sense"] == pytest.approx(sense)
    settings = dict(temperature=1.0, top_k=None, max_new_tokens=100, num_samples=5)
    assert [piece[:200] for piece in pieces] == [text[:200] for text in sampler.generate("", **settings)]


def test_copies_of_training_pieces_are_found(tunes_run, tmp_path, monkeypatch):
    """A model that generates training tunes gets their values, and all of its pieces are copied."""
    dataset = open_dataset(tmp_path / "data" / "all")
    held_out = dataset.load_tokenizer().decode(np.concatenate([shard.ids for shard in dataset.val]))
    tunes = [f"{text.strip()}\n" for text in (tmp_path / "all.abc").read_text().split("\n\n") if text]
    copies = [text for text in tunes if text not in held_out]
    assert 0 < len(copies) < 60
    monkeypatch.setattr(music_measures, "generate_pieces", lambda *_: copies)
    values = evaluated(tunes_run, folder=tmp_path)
    assert values["generated", "pieces that are mostly one copied passage"] == 1
    assert values["held out", "pieces that are mostly one copied passage"] == 0
    assert values["generated", "parses"] == 1
    for measure in ("distance of intervals", "distance of durations"):
        assert values["generated", measure] == values["training", measure]
    monkeypatch.setattr(music_measures, "generate_pieces", lambda *_: ["", "K:K:K:"])  # which do not parse
    values = evaluated(tunes_run, folder=tmp_path)
    assert values["generated", "parses"] == 0 and ("generated", "notes in key") not in values
    assert ("generated", "distance of intervals") not in values


def test_a_model_of_text_is_not_evaluated_on_music(run, tmp_path):
    with pytest.raises(UserError, match="does not generate"):
        evaluated(str(run), folder=tmp_path)
