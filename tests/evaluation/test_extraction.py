"""Reproduction of training data, against token-by-token decoding and brute-force searches."""

import string
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from folio.data.shards import Shard
from folio.data.tokenizer import CharTokenizer
from folio.decoding.language_model import GenerationConfig, LanguageModel
from folio.evaluation.extraction import (
    cut_passages,
    describe_reproduction,
    longest_spans,
    prefix_rows,
    share_row,
    span_lengths,
    span_rows,
    summarize,
    tokens_reproduced,
    without_overlap,
)
from folio.evaluation.intervals import share_interval
from folio.evaluation.memorization import TrainingIndex, TrainingSearch
from folio.machine.runtime import resolve_runtime
from tests.support.datasets import dataset_of
from tests.support.decoding import random_model
from tests.support.evaluations import half_width_of

CHARACTERS = CharTokenizer.of(set(string.ascii_letters), eot=False)  # 52 tokens


# --- texts ------------------------------------------------------------------------------------------------------------


def test_passages_do_not_cross_the_end_of_a_document_or_shard():
    ids = np.array([9, 1, 2, 3, 4, 5, 9, 9, 6, 7, 8, 9, 1])
    shards = [Shard(ids), Shard(np.array([3, 4]))]
    passages = [p.tolist() for p in cut_passages(shards, 9, 3)]
    assert passages == [[1, 2, 3], [4, 5], [6, 7, 8], [1], [3, 4]]
    assert [p.tolist() for p in cut_passages(shards, 9, 3, drop_last=True)] == [[1, 2, 3], [6, 7, 8]]
    assert [p.tolist() for p in cut_passages(shards, None, 8)] == [[9, 1, 2, 3, 4, 5, 9, 9], [6, 7, 8, 9, 1], [3, 4]]


def test_places_without_overlap():
    assert without_overlap(np.array([30, 0, 5, 9, 10, 19, 21, 40]), 10) == [0, 10, 21, 40]
    assert without_overlap(np.zeros(0, np.int64), 10) == []


def test_lengths_of_spans():
    assert span_lengths(8, 200) == [16, 32, 64, 128]
    assert span_lengths(7, 16) == [8, 16]
    assert span_lengths(16, 64, span=20) == [20, 32, 64]
    assert span_lengths(200, 200) == [200]
    assert span_lengths(200, 200, span=50) == [50]


# --- spans ------------------------------------------------------------------------------------------------------------


def test_tokens_in_spans_match_a_brute_force_search(seed):
    rng = np.random.default_rng(seed)
    training = rng.integers(1, 4, size=400).astype("<u2")
    index = TrainingIndex([dataset_of(training)], None)
    texts = [rng.integers(1, 4, size=n) for n in (30, 7, 50, 0)]
    texts[2][10:35] = training[100:125]
    windows = {length: {tuple(training[i : i + length]) for i in range(401 - length)} for length in (4, 6, 20)}
    for row in span_rows(index, "samples", "samples", texts, [4, 6, 20]):
        covered = 0
        for text in texts:
            starts = [i for i in range(len(text)) if tuple(text[i : i + row["span"]]) in windows[row["span"]]]
            covered += len({i + k for i in starts for k in range(row["span"])})
        assert row["value"] == pytest.approx(covered / 87) and row["n"] == 3 and row["over"] == "samples"
        assert row["low"] <= row["value"] <= row["high"]
    assert covered >= 25


def test_the_longest_spans_and_their_places(seed):
    rng = np.random.default_rng(seed)
    ids = [rng.integers(1, 52, size=3000).astype("<u2") for _ in range(2)]
    ids[1][500:540] = ids[0][700:740]
    dataset = dataset_of(*ids, val=(rng.integers(1, 52, size=300).astype("<u2"),))
    samples = [rng.integers(1, 52, size=100) for _ in range(4)]
    samples[1][20:60] = ids[1][500:540]  # two places
    samples[2][50:80] = ids[1][900:930]
    samples[1][[19, 60]] = samples[2][[49, 80]] = 0  # not in the training data
    samples[3] = samples[2].copy()  # the same spans again
    longest = longest_spans(TrainingSearch([dataset], CHARACTERS), samples)
    assert len(longest) == 10 and len({span["text"] for span in longest}) == 10
    first, second, third = longest[:3]
    assert first.items() >= dict(sample=1, start=20, tokens=40, count=2, shard=0, offset=700).items()
    assert first["text"] == CHARACTERS.decode(samples[1][20:60])
    assert second.items() >= dict(sample=2, start=50, tokens=30, count=1, shard=1, offset=900).items()
    assert third["tokens"] < 20


@pytest.mark.needs("scipy")
def test_intervals_of_shares():
    """A share of 0 has Wilson's interval, whose width is not 0."""
    tokens, none = np.full(200, 50), np.zeros(200, int)
    one, half = np.array([50, *none[1:]]), np.array([25, *none[1:]])
    for values, weights, successes in ((none, tokens, 0), (one, tokens, 1), (np.arange(50, 250),) * 2 + (200,)):
        row = share_row("samples", "tokens", "samples", values, weights)
        low, high = share_interval(successes, 200)
        assert (row["value"], row["low"], row["high"]) == (successes / 200, low, high)
    row = share_row("samples", "tokens", "samples", half, tokens)
    assert row["low"] == 0 and row["high"] == pytest.approx(0.0025 + half_width_of(half, tokens))  # Student's t, cut


# --- completions of prefixes ------------------------------------------------------------------------------------------


def test_one_forward_pass_matches_greedy_decoding(seed):
    """Passages begin with the model's own completion and then differ from it."""
    gpt = random_model(seed, block_size=40, vocab_size=64)  # 12 ids are padding
    model = LanguageModel(gpt, CHARACTERS, "cpu", "float32")
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(52, size=(9, 20))
    greedy = GenerationConfig(temperature=0.0, max_new_tokens=20)
    (batch,) = model.batches([(prefix, 0) for prefix in prefixes.tolist()], greedy)
    completions = np.array([step.tokens for step in batch.steps]).T  # (9, 20)
    passages, expected = np.concatenate([prefixes, completions], axis=1), np.array([0, 1, 5, 19, 20, 20, 0, 10, 15])
    for passage, at in zip(passages, expected, strict=True):
        if at < 20:
            passage[20 + at] = (passage[20 + at] + 1 + rng.integers(51)) % 52
    assert tokens_reproduced(model, passages).tolist() == expected.tolist()


class Copier:
    """Predicts the last token of a row correctly if the row is a memorized passage, and wrongly otherwise."""

    def __init__(self, block_size: int):
        self.config = SimpleNamespace(block_size=block_size)
        self.transformer = SimpleNamespace(wte=SimpleNamespace(weight=torch.zeros(1)))
        self.memorized: list[np.ndarray] = []

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        last = {passage[:-1].tobytes(): passage[-1] for passage in self.memorized}
        wrong = np.full(ids.shape[1], 52)
        predicted = [np.append(row[1:], last[row.tobytes()]) if row.tobytes() in last else wrong for row in ids.numpy()]
        return torch.nn.functional.one_hot(torch.from_numpy(np.stack(predicted)), 53).float()


@pytest.mark.parametrize("block_size, P", [(128, 50), (100, 50), (99, 49), (60, 30)])
def test_passages_are_counted_by_their_occurrences(block_size, P, seed):
    rng = np.random.default_rng(seed)
    passages = rng.integers(52, size=(12, 2 * P))
    times = [1, 1, 1, 2, 2, 3, 9, 10, 12, 99, 100, 120]
    documents = [passage for passage, n in zip(passages, times, strict=True) for _ in range(n)]
    rng.shuffle(documents)
    eot = 60
    ids = np.concatenate([np.append(document, eot) for document in documents]).astype("<u2")
    new = np.append(rng.integers(52, size=3 * (2 * P) + 5), eot)  # three passages
    dataset = dataset_of(ids, val=(np.concatenate([new, passages[0], [eot]]).astype("<u2"),))
    stub = Copier(block_size)
    stub.memorized = [passages[i].astype(np.int64) for i in (2, 4, 5, 8, 9, 10, 11)]
    tokenizer = SimpleNamespace(eot=eot, vocab_size=61, decode=lambda ids: "")
    model = SimpleNamespace(model=stub, tokenizer=tokenizer, runtime=resolve_runtime("cpu", "float32", False))
    search = TrainingSearch([dataset], tokenizer)
    rows = prefix_rows(model, search)
    assert [(row["occurrences"], row["n"], round(row["value"] * row["n"])) for row in rows] == [
        ([0, 0], 3, 0),  # passages[0] is in the training data
        ([1, 1], 3, 1),
        ([2, 9], 4, 2),
        ([10, 99], 3, 2),
        ([100, None], 2, 2),
    ]
    assert {row["prefix"] for row in rows} == {P}
    assert rows[1]["tokens_before_error"]["value"] == pytest.approx(P / 3)
    # one of the two held-out passages is in the training data
    assert [row["n"] for row in prefix_rows(model, search, max_passages=2)] == [1, 2, 2, 2, 2]
    short = dataset_of(np.tile(np.append(passages[0][:40], eot), 9).astype("<u2"), val=(ids[:30],))
    assert prefix_rows(model, TrainingSearch([short], tokenizer)) == []


def test_report_when_documents_are_too_short_for_prefixes():
    row = {"measure": "", "value": 0.0, "low": 0.0, "high": 0.1, "n": 3, "over": "samples", "span": 8}
    facts = dict(run="out", datasets=["a"], searched=9, complete=True, samples=3, max_new_tokens=8, temperature=1.0)
    facts |= dict(seed=1, chance=5, longest=[], passages=[], block_size=128, empty_samples=0, masked=False)
    facts["spans"] = [{**row, "of": "samples"}, {**row, "of": "held-out text"}]
    assert "\n\nNo document is long enough" in describe_reproduction(facts)


def share_of(source: str, value: float, half_width: float, n: int = 1000, **fields: object) -> dict:
    return {"of": source, "value": value, "low": value - half_width, "high": value + half_width, "n": n, **fields}


def test_the_summary_compares_with_validation_text():
    """The report had only tables, in which common phrases look like copied text."""
    held_out = {16: share_of("held-out text", 0.09, 0.01), 32: share_of("held-out text", 0.005, 0.002)}
    passages = [share_of("held-out text", 0.0, 0, 800)]
    passages += [share_of("training data", 0.01, 0), share_of("training data", 0.5, 0, 6)]
    copied = {16: share_of("samples", 0.3, 0.01), 32: share_of("samples", 0.2, 0.01)}
    line = summarize("out", copied, held_out, passages)
    assert line.startswith("out copies more than ") and line.endswith("exactly, and 0 of 800 validation passages.")
    assert "20.00% of the tokens of its samples are in spans of 32 or more" in line and "0.50% of the val" in line
    assert "13 of 1,006 training passages" in line
    phrases = {16: share_of("samples", 0.13, 0.01), 32: share_of("samples", 0.006, 0.002)}  # more, but short
    line = summarize("out", phrases, held_out, passages[1:])
    assert line.startswith("out may copy more than ") and line.endswith("training passages exactly.")
    one = {n: {**row, "low": None, "high": None} for n, row in copied.items()}
    assert summarize("out", one, held_out, []).startswith("out may copy more than ")
    assert summarize("out", held_out, held_out, []).startswith("out does not copy more than ")
    common = {16: share_of("held-out text", 0.5, 0.01), 32: share_of("held-out text", 0.3, 0.01)}  # repetitive text
    assert "20.00% of the tokens of its samples are in spans of 32 or more" in summarize("out", copied, common, [])
