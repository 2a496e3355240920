"""Searches of the training data, against a byte search of each shard."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from folio import UserError
from folio.data.shards import Dataset, DatasetError, Shard
from folio.data.tokenizer import ByteTokenizer, MidiTokenizer
from folio.evaluation import memorization
from folio.evaluation.memorization import (
    CONTEXT_TOKENS,
    TrainingIndex,
    covering_lengths,
    find_overlap,
    held_out_lengths,
    maximal_spans,
)
from folio.web.questions import TraceProvider
from folio.web.viewed_model import ViewedModel
from tests.support.datasets import VOCAB, dataset_of, random_case
from tests.support.tolerances import binomial_range, rounding_error
from train import train


def occurrences(span: np.ndarray, datasets: list[Dataset], eot: int | None) -> Iterator[tuple[int, int, int]]:
    """Yield the data set, shard and token where a span of tokens occurs, by a search of bytes."""
    if eot in span.tolist():
        return
    for number, dataset in enumerate(datasets):
        for shard_number, shard in enumerate(dataset.train):
            width, content, offset = shard.ids.itemsize, shard.ids.tobytes(), -1
            pattern = span.astype(shard.ids.dtype).tobytes()
            while (offset := content.find(pattern, offset + 1)) >= 0:
                if offset % width == 0:
                    yield number, shard_number, offset // width


def naive_longest(text: np.ndarray, datasets: list[Dataset], eot: int | None) -> list[int]:
    """Return the length of the longest span from each position that occurs in the data."""

    def longest(start: int) -> int:
        length = 0
        while start + length < len(text) and any(occurrences(text[start : start + length + 1], datasets, eot)):
            length += 1
        return length

    return [longest(start) for start in range(len(text))]


def test_spans_and_occurrences_match_a_byte_search(seed):
    rng = np.random.default_rng(seed)
    for _ in range(100):
        datasets, text, eot = random_case(rng)
        index = TrainingIndex(datasets, eot)
        lengths = index.longest(text)
        assert lengths.tolist() == naive_longest(text, datasets, eot)
        for start, end in [*maximal_spans(lengths), *rng.integers(len(text) + 1, size=(5, 2)).tolist()]:
            expected = list(occurrences(text[start:end], datasets, eot)) if start < end else []
            assert index.find(text[start:end]) == ((len(expected), *expected[0]) if expected else None)


def test_no_other_span_contains_a_maximal_span(seed):
    rng = np.random.default_rng(seed)
    for _ in range(50):
        datasets, text, eot = random_case(rng)
        lengths = TrainingIndex(datasets, eot).longest(text)
        spans = [(start, start + int(length)) for start, length in enumerate(lengths) if length]
        maximal = [s for s in spans if not any(o != s and o[0] <= s[0] and s[1] <= o[1] for o in spans)]
        assert maximal_spans(lengths) == maximal
        covering = [max((end - start for start, end in spans if start <= t < end), default=0) for t in range(len(text))]
        assert covering_lengths(lengths).tolist() == covering
    assert maximal_spans(np.zeros(0, np.int64)) == [] and covering_lengths(np.zeros(3, np.int64)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("length", [1, 2, 5, 100])
def test_unique_spans_match_all_windows(length, seed):
    rng = np.random.default_rng(seed)
    for _ in range(50):
        datasets, _, eot = random_case(rng)
        index = TrainingIndex(datasets, eot)
        expected: dict[tuple[int, ...], list[int]] = {}
        shards = [shard.ids for dataset in datasets for shard in dataset.train]
        for ids, start in zip(shards, index.starts, strict=False):
            for at in range(len(ids) - length + 1):
                if eot not in (window := ids[at : at + length].tolist()):
                    expected.setdefault(tuple(window), []).append(int(start) + at)
        unique = np.stack(index.unique_spans(length), axis=1)
        spans = {tuple(index.ids_at(first, length)): (first, n) for first, n in unique}
        assert spans == {window: (positions[0], len(positions)) for window, positions in expected.items()}


@pytest.mark.parametrize("n_tokens", [255, 256, 65_535, 65_536])
def test_tokens_differ_where_their_codes_need_another_byte(n_tokens):
    ids = np.arange(n_tokens).astype("<u4")
    index = TrainingIndex([dataset_of(ids)], None)
    text = np.array([0, n_tokens - 3, n_tokens - 2, n_tokens - 1, n_tokens, 5, 6, 0])
    assert index.longest(text).tolist() == [1, 3, 2, 1, 0, 2, 1, 1]
    assert index.find(text[1:4]) == (1, 0, 0, n_tokens - 3)


def corpus_with_runs(rng: np.random.Generator) -> np.ndarray:
    """300,000 tokens with about the frequencies of letters, in lines that begin with 16 copies of token 0."""
    frequencies = 1 / np.arange(3, 30)
    ids = rng.choice(27, size=(1500, 200), p=frequencies / frequencies.sum())
    ids[:, :16] = 0
    return ids.ravel().astype("<u2")


@pytest.mark.parametrize("runs", [False, True], ids=["independent", "runs"])
def test_random_text_has_no_span_beyond_chance(runs, seed):
    """At most 1 % of texts exceed the bound. Without runs, it follows from the collision probability, and is tight."""
    rng = np.random.default_rng(seed)
    corpus = corpus_with_runs(rng)
    if not runs:
        corpus = rng.permutation(corpus)
    index = TrainingIndex([dataset_of(corpus)], None)
    texts = rng.choice(corpus, size=(200, 100))
    longest = np.array([index.longest(text).max() for text in texts])
    chance = index.chance(100)
    assert (longest > chance).sum() <= binomial_range(200, memorization.CHANCE)[-1]
    probability = np.bincount(corpus) / len(corpus)
    collision = (probability**2).sum()
    independent = math.log(100 * len(corpus) / memorization.CHANCE) / math.log(1 / collision)
    if runs:
        assert chance > independent + 2
    else:
        assert (longest > chance - 3).any()
        assert chance == math.ceil(independent) - 1 or abs(independent - round(independent)) < 0.1


def test_expected_matches_are_the_sums_of_all_products(seed):
    rng = np.random.default_rng(seed)
    corpora = [rng.integers(1, 5, size=n).astype("<u2") for n in (1, 6, 40, 23)]
    index = TrainingIndex([dataset_of(*corpora)], 3)
    counts = np.bincount(np.concatenate(corpora), minlength=5)
    counts[3] = 0
    p = counts / max(counts.sum(), 1)
    error = 2 * rounding_error(2 * 16 + 70, torch.float64)  # shares, products of up to 16, and sums of up to 70
    for length, expected in enumerate(index.expected, 1):
        windows = [c[i : i + length] for c in corpora for i in range(len(c) - length + 1)]
        assert expected == pytest.approx(sum(p[window].prod() for window in windows), rel=error, abs=0)
    frequencies = np.append(0, p[index.id_of[1:]])  # by code
    in_blocks = memorization.expected_matches(index.codes, frequencies, block_tokens=7)
    assert in_blocks == pytest.approx(index.expected, rel=error, abs=0)


def test_chance_of_corpora_in_which_long_matches_are_likely():
    same = TrainingIndex([dataset_of(np.full(100, 5, "<u2"))], None)
    assert same.chance(30) == 30  # a text of this token matches anywhere
    coins = TrainingIndex([dataset_of(np.tile(np.array([1, 2], "<u2"), 500))], None)
    assert coins.chance(100) == math.floor(math.log2(100 * 1000 / 0.01))  # 1,000 * 2**-L windows, less than one off
    assert coins.chance(10) == 10
    nothing = TrainingIndex([dataset_of(np.full(100, 5, "<u2"))], 5)  # only ends of documents
    assert nothing.chance(30) == 0 and nothing.longest(np.array([5, 6])).tolist() == [0, 0]


def test_the_number_of_indexed_tokens_is_limited(seed):
    ids = np.random.default_rng(seed).integers(60_000, size=3000).astype("<u2")
    datasets = [dataset_of(ids[:1000], ids[1000:2000]), dataset_of(ids[2000:])]
    index = TrainingIndex(datasets, None)
    assert (index.searched, index.complete) == (3000, True)
    index = TrainingIndex(datasets, None, max_tokens=2400)
    assert (index.searched, index.complete) == (2200, False)
    assert index.find(ids[1190:1200]) and not index.find(ids[1195:1205]) and index.find(ids[2990:])
    with pytest.raises(DatasetError, match=str(VOCAB)):  # outside the vocabulary
        TrainingIndex([dataset_of(np.array([1, VOCAB], "<u4"))], None)


def test_held_out_lengths(seed):
    rng = np.random.default_rng(seed)
    ids = rng.integers(1000, size=20_000).astype("<u2")
    copied, new = dataset_of(ids, val=(ids[:5000],)), dataset_of(ids, val=(rng.integers(1000, 2000, 5000), ids[:9]))
    index = TrainingIndex([copied], None)
    assert held_out_lengths(index, [copied]).tolist() == [256] * 4096
    assert held_out_lengths(index, [new]).tolist() == [0] * 4096
    assert sorted(held_out_lengths(index, [new, copied])) == [0] * 2048 + [256] * 2048
    assert held_out_lengths(index, [dataset_of(ids, val=(ids[:9],))]).max() == 9


# --- overlap ----------------------------------------------------------------------------------------------------------


def test_the_characters_of_long_spans_are_counted(seed):
    """Characters of several bytes count once; spans below MIN_QUOTE characters are common phrases."""
    rng, tokenizer = np.random.default_rng(seed), ByteTokenizer()
    training = "".join(rng.choice([*"abcdefghij日é"], 4000))
    index = TrainingIndex([dataset_of(tokenizer.encode(training).astype("<u2"))], tokenizer.eot)
    quote, short = training[500:540], training[1000 : 1000 + memorization.MIN_QUOTE - 1]
    text = f"ZéZ{quote}Z日Z{short}ZZ{quote[:33]}"  # Z, which is not in training, ends each match
    overlap = find_overlap(index, tokenizer, tokenizer.encode(text))
    assert (overlap.characters, overlap.in_training) == (len(text), 40 + 33)
    assert (overlap.searched, overlap.complete) == (len(training.encode()), True)
    repeated = TrainingIndex([dataset_of(np.full(5000, 97, "<u2"))], tokenizer.eot)
    assert find_overlap(repeated, tokenizer, np.full(50, 97)).in_training == 0  # not longer than chance


def test_an_event_of_music_is_a_character(seed):
    tokenizer = MidiTokenizer([f"NoteOn_{pitch}" for pitch in range(100)], {})
    ids = np.random.default_rng(seed).integers(100, size=3000)
    index = TrainingIndex([dataset_of(ids.astype("<u2"))], tokenizer.eot)
    text = np.array([tokenizer.eot, *ids[70:110], tokenizer.eot, *ids[10:41]])
    assert find_overlap(index, tokenizer, text)[:2] == (71, 40)


# --- probes -----------------------------------------------------------------------------------------------------------


def choose_probes(*documents: np.ndarray) -> list[np.ndarray]:
    """Choose the probes of a text of these documents."""
    numbers = [np.full(len(document), i) for i, document in enumerate(documents)]
    return memorization.choose_probes(np.concatenate(documents), np.concatenate(numbers))


def test_probes_are_evenly_spaced_and_within_a_document():
    probes = choose_probes(np.arange(1000))
    assert len(probes) == 20 and all((np.diff(probe) == 1).all() and len(probe) == 32 for probe in probes)
    starts = [int(probe[0]) for probe in probes]
    assert starts[0] == 0 and starts[-1] == 1000 - 33 and {*np.diff(starts)} <= {50, 51}
    documents = [np.arange(100 * i, 100 * i + n) for i, n in enumerate((5, 40, 32, 33, 70))]
    probes = choose_probes(*documents)
    assert {probe[0] // 100 for probe in probes} <= {1, 3, 4}
    assert all(probe[0] // 100 == probe[-1] // 100 for probe in probes)
    assert len(choose_probes(np.arange(33))) == 1
    assert choose_probes(np.arange(32)) == []
    assert choose_probes(np.arange(2), np.arange(20)) == []


def test_the_probe_search_covers_all_shards_up_to_a_limit(seed):
    ids = np.random.default_rng(seed).integers(60_000, size=3000).astype("<u2")
    probes = [ids[start : start + 32].astype(np.int64) for start in (0, 1900, 2900)]
    shards = dataset_of(ids[:1000], ids[1000:2000].astype("<u4"), ids[2000:])
    count = partial(memorization.count_matches, probes)
    assert count([shards]) == (3, True)
    assert count([dataset_of(ids[:50]), dataset_of(ids[2800:])]) == (2, True)
    assert count([shards], limit=2500) == (2, False)
    assert count([dataset_of(ids[:50]), shards], limit=2500) == (2, False)  # the limit is per data set
    assert count([shards], limit=1931) == (1, False)  # the limit is inside a probe
    for dtype in ("<u2", "<u4"):  # a match begins at a token
        tokens = ids.astype(dtype)
        shifted = np.frombuffer(b"\0" + tokens.tobytes() + b"\0" * (tokens.itemsize - 1), dtype)
        assert count([dataset_of(shifted)]) == (0, True)
        assert count([dataset_of(np.concatenate([shifted, tokens]))]) == (3, True)


# --- the viewer's answer ----------------------------------------------------------------------------------------------


@pytest.fixture
def viewed(tiny, tmp_path) -> ViewedModel:
    cfg = tiny(max_iters=2)
    train(cfg)
    return ViewedModel(cfg.out_dir, "last", torch.device("cpu"))


def test_the_answer_about_a_text(viewed, text, monkeypatch):
    """A quote of the training data, between characters that rarely occur there."""
    provider = TraceProvider([viewed, viewed], "")
    tokenizer, training = viewed.tokenizer, text[: int(0.9 * len(text))]
    start = 5000
    ids = tokenizer.encode("OOO" + training[start : start + 25] + "RRRR").tolist()
    assert len(ids) == viewed.limit
    monkeypatch.setattr(memorization, "TrainingIndex", build := Mock(side_effect=TrainingIndex))
    facts, tensors = provider.answer({"kind": "memorized", "ids": ids})
    assert provider.answer({"kind": "memorized", "ids": ids, "model": 1}).facts == facts
    assert build.call_count == 1  # of two models with the same data
    assert facts["searched"] == len(training) and facts["complete"] and facts["datasets"] == ["verse"]
    assert facts["reason"] is None and 3 < facts["chance"] < 25
    datasets = [Dataset(Path(), [Shard(tokenizer.encode(training).astype("<u2"))], [], VOCAB, "", None)]
    longest = naive_longest(np.array(ids), datasets, None)
    assert tensors["longest"].tolist() == longest
    assert tensors["covering"].tolist() == covering_lengths(np.array(longest)).tolist()
    (span,) = [span for span in facts["spans"] if span["start"] <= 3 and span["end"] >= 28]
    quote, at = span["text"], training.find(span["text"])
    assert training[start : start + 25] in quote and tokenizer.decode(ids[span["start"] : span["end"]]) == quote
    assert (span["dataset"], span["shard"], span["shards"], span["offset"]) == ("verse", 0, 1, at)
    assert span["count"] == sum(training.startswith(quote, i) for i in range(len(training)))
    assert span["before"] == training[at - CONTEXT_TOKENS : at]
    assert span["after"] == training[at + len(quote) :][:CONTEXT_TOKENS]
    assert all(span["end"] - span["start"] > facts["chance"] for span in facts["spans"])
    json.dumps(facts, allow_nan=False)
    with pytest.raises(UserError, match="at least one"):
        provider.answer({"kind": "memorized"})


def test_the_answer_about_the_overlap(viewed, text, monkeypatch):
    """The loss of a text of the training data was shown as if it were new."""
    provider = TraceProvider([viewed], "")
    quote, length = text[5000:], viewed.limit
    assert length == memorization.MIN_QUOTE  # the smallest text that counts
    for shown, expected in ((quote[:length], length), (quote[:length][::-1], 0)):
        facts, tensors = provider.answer({"kind": "overlap", "ids": viewed.tokenizer.encode(shown).tolist()})
        assert (facts["characters"], facts["in_training"], facts["reason"]) == (length, expected, None)
        assert facts["init_from"] == "scratch" and facts["complete"] and not tensors
    monkeypatch.setattr("folio.web.questions.OVERLAP_TOKENS", 1000)
    facts, _ = TraceProvider([viewed], "").answer({"kind": "overlap", "ids": [1]})
    assert (facts["searched"], facts["complete"]) == (1000, False)
    with pytest.raises(UserError, match="at least one"):
        provider.answer({"kind": "overlap"})


def test_the_reason_for_not_searching(viewed, data_dir, tmp_path):
    question, state = {"kind": "memorized", "ids": [1, 2, 3]}, viewed.checkpoint.state
    moved = {**state, "config": {**state["config"], "data_dir": str(tmp_path / "nowhere")}}
    changed = {**state, "dataset": {"hash": "another", "parts": {}}}
    foreign = {"model": state["model"]}
    for state, reason in ((moved, "does not exist"), (changed, "prepared again"), (foreign, "does not record")):
        viewed.checkpoint = replace(viewed.checkpoint, state=state)
        for kind in ("memorized", "overlap"):
            facts, tensors = TraceProvider([viewed], "").answer({**question, "kind": kind})
            assert facts.keys() == {"reason"} and reason in facts["reason"] and not tensors
    viewed.checkpoint = replace(viewed.checkpoint, state=moved)
    assert TraceProvider([viewed], "", str(data_dir)).answer(dict(question)).facts["reason"] is None
