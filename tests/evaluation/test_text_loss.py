"""Losses of texts and by position, against transformers and a forward pass per token."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

stats = pytest.importorskip("scipy.stats")

from folio import UserError
from folio.data.corpus import Corpus
from folio.data.inputs import find_sources
from folio.data.shards import Shard
from folio.data.tokenizer import ByteTokenizer, CharTokenizer
from folio.evaluation.text_loss import (
    Stream,
    corpus_stream,
    measure_positions,
    measure_text,
    shard_streams,
    token_losses,
)
from folio.machine.runtime import Runtime, resolve_runtime
from lab.bench.baselines import transformers_model
from model import GPT
from tests.support.evaluations import compare_models, half_width_of, loss_error, model_of, nats_of
from tests.support.tiny_tokenizers import bpe


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return resolve_runtime("cpu", "float32", False)


def corpus_with(folder: Path, text: str, split_on: str | None = None) -> Corpus:
    """The documents of a file with this text."""
    (folder / "text.txt").write_text(text, encoding="utf-8")
    return Corpus(find_sources([str(folder / "text.txt")]), split_on=split_on)


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.architecture("this test, whose reference is transformers' GPT-2: use another one, or skip it")
@pytest.mark.parametrize("stride", [8, 5, 3, 1])
@pytest.mark.parametrize("n", [2, 8, 9, 10, 31])
def test_losses_match_transformers(n, stride, runtime, seed):
    """Each token is predicted in the first context that contains it."""
    model = model_of(20)
    theirs = transformers_model(model)
    ids = np.random.default_rng(seed).integers(20, size=n)
    losses = token_losses(model, ids, runtime, stride)
    for j in range(1, n):
        begin = next(b for b in range(0, n, stride) if b + 8 >= j)
        assert losses[j - 1] == pytest.approx(nats_of(theirs, ids[begin:j], ids[j]), abs=loss_error(model.config, n))


def test_workers_measure_the_same_losses(runtime, set_threads, seed):
    set_threads(2)
    model, workers = model_of(20), replace(runtime, workers=3)
    for n in (2, 9, 8000):  # fewer windows than workers, and several batches
        ids = np.random.default_rng(seed).integers(20, size=n)
        expected = token_losses(model, ids, runtime, stride=5)
        assert token_losses(model, ids, workers, stride=5) == pytest.approx(expected, abs=loss_error(model.config, 8))
    streams = [stream_of(ids)]
    positions = [measure_positions(model, each, "text", streams, 7).nats for each in (runtime, workers)]
    assert positions[0] == pytest.approx(positions[1], abs=loss_error(model.config, 8))


@pytest.mark.parametrize("n", [1, 2, 7])
def test_a_short_text_is_not_padded_to_a_long_context(n, runtime):
    """The text was padded to block_size, which is unlimited for a model without learned positions."""
    ids = np.arange(n)
    short, long = (model_of(20, block_size=size, position="alibi") for size in (8, 10**12))
    expected = token_losses(short, ids, runtime, stride=8)
    assert token_losses(long, ids, runtime, stride=10**12) == pytest.approx(expected, abs=loss_error(short.config, 8))


def test_bits_per_byte_count_the_predicted_bytes(runtime, tmp_path):
    """All 257 tokens are equally likely; each document ends with a token that is not a byte."""
    documents = ["One.", "Two documents.", "Größe."] * 10
    tokenizer = ByteTokenizer()
    streams = [corpus_stream(corpus_with(tmp_path, "\n\n".join(documents), "\n\n"), tokenizer)]
    measures = measure_text(model_of(257, std=0), tokenizer, runtime, "text", streams, stride=8)
    loss, perplexity, bits = (measure.row() for measure in measures)
    size = sum(len(text.encode()) for text in documents)
    assert loss["value"] == pytest.approx(math.log(257)) and perplexity["value"] == pytest.approx(257)
    assert loss["n"] == 30 and loss["over"] == "documents"
    assert loss["low"] == pytest.approx(loss["high"])  # each document has the same mean
    assert bits["value"] == pytest.approx(math.log2(257) * (size + 30 - 1) / (size - 1))  # the first is not predicted
    assert bits["low"] < bits["value"] < bits["high"]


def test_documents_are_the_same_for_all_tokenizers(runtime, tmp_path):
    words = ["hello world", "the hello", "world the world hello"] * 20
    corpus, measures = corpus_with(tmp_path, "\n".join(words) + "\n", split_on="\n"), []
    for tokenizer in (CharTokenizer.of("\n".join(words)), bpe()):
        streams = [corpus_stream(corpus, tokenizer)]
        measures.append(measure_text(model_of(tokenizer.vocab_size), tokenizer, runtime, "text", streams, 8))
    assert [len(measure.values) for per_tokenizer in measures for measure in per_tokenizer] == [60] * 6
    (comparison,) = compare_models(*measures)
    assert comparison["measure"] == "bits per byte"  # they have different tokens
    assert measures[0][2].weights.sum() == len("\n".join(words))  # bits per byte count the separators as well


def test_a_document_in_parts_is_one_document(tmp_path):
    """A text larger than a block of the corpus had an end-of-text token in its middle."""
    text = "hello world\n" * 120_000  # 1.4 MB
    corpus, tokenizer = corpus_with(tmp_path, text), ByteTokenizer()
    assert len(list(corpus.blocks())) > 1
    stream = corpus_stream(corpus, tokenizer)
    assert tokenizer.decode(stream.ids) == text
    assert (stream.ids == tokenizer.eot).nonzero()[0].tolist() == [len(text)] and not stream.document.any()


def test_documents_of_shards_end_at_the_end_of_text_token(runtime):
    eot, mask = 256, np.array([0, 1, 1, 0, 1, 0, 1], np.uint8)
    shards = [Shard(np.array([1, 2, eot, 3, 4, 5, eot])), Shard(np.array([6, eot, 7, 8, 9, eot, 5]), mask)]
    streams = shard_streams(shards, ByteTokenizer())
    assert [stream.document.tolist() for stream in streams] == [[0, 0, 0, 1, 1, 1, 1], [2, 2, 3, 3, 3, 3, 4]]
    loss = measure_text(model_of(257, std=0), ByteTokenizer(), runtime, "text", streams, stride=8)[0]
    assert loss.weights.sum() == 6 + 4 and loss.ratio == pytest.approx(math.log(257))


def test_left_out_characters_do_not_shift_blocks(runtime, tmp_path):
    """Left-out characters shifted the blocks, so the blocks of two models did not match."""
    corpus, sizes = corpus_with(tmp_path, ("hello" * 40 + "é" * 8) * 200), []
    for characters in ("helo", "helo" + "é"):
        tokenizer = CharTokenizer(characters)
        streams = [corpus_stream(corpus, tokenizer, "skip")]
        bits = measure_text(model_of(tokenizer.vocab_size), tokenizer, runtime, "text", streams, 8)[2]
        sizes.append(bits.weights)
    without, complete = sizes
    assert complete.sum() == 200 * 216 - 1 and without.sum() == 200 * 200 - 1
    assert len(complete) == len(without) == 43
    difference = complete - without  # each block has 4 or 5 times the 16 bytes that were left out
    assert (difference[1:-1] >= 3 * 16).all() and (difference <= 5 * 16).all()


# --- losses by position -----------------------------------------------------------------------------------------------


def test_few_documents_are_divided_into_blocks(runtime):
    """12 documents were divided into blocks, as if they were one document."""
    tokenizer, rng = ByteTokenizer(), np.random.default_rng(0)
    for n, unit, parts_of in ((1, "blocks of 1,024 bytes", 1), (4, "blocks of 1,024 bytes", 4), (5, "documents", None)):
        shards = [Shard(np.append(rng.integers(256, size=1500), tokenizer.eot)) for _ in range(n)]
        streams = shard_streams(shards, tokenizer)
        loss = measure_text(model_of(257, std=0), tokenizer, runtime, "text", streams, stride=8)[0]
        losses = measure_positions(model_of(257, position="alibi"), runtime, "text", streams, 100)
        windows = losses.measures[0]
        assert (loss.unit, loss.parts_of, windows.parts_of) == (unit, parts_of, parts_of)
        assert windows.unit == ("documents" if n == 5 else "windows")
        assert len(windows.values) == (5 if n == 5 else 14 * n)
        assert (windows.warning() is None) == (loss.warning() is None) == (n == 5)


def test_windows_of_a_document_are_one_sample(runtime):
    """The windows of a document are alike, so intervals over windows were too narrow."""
    model = model_of(20, position="alibi")
    documents = [np.random.default_rng(k).integers(20, size=71) for k in range(5)]
    once, twice = ([np.tile(ids, times) for ids in documents] for times in (1, 2))
    rows = []
    for texts in (once, twice):
        streams = [stream_of(ids)._replace(document=np.full(len(ids), k)) for k, ids in enumerate(texts)]
        rows.append(measure_positions(model, runtime, "text", streams, 70).rows())
    tolerance = 3.5 * loss_error(model.config, 70)  # 2.5 deviations
    for row, copies in zip(*rows, strict=True):
        assert row["n"] == copies["n"] == 5 and row["over"] == "documents"
        assert (copies["low"], copies["high"]) == pytest.approx((row["low"], row["high"]), abs=tolerance)


def stream_of(ids: np.ndarray, counted: np.ndarray | None = None) -> Stream:
    zeros = np.zeros(len(ids), np.int64)
    return Stream(ids, np.ones(len(ids), bool) if counted is None else counted, zeros, zeros)


@torch.inference_mode()
def prefix_losses(model: GPT, window: np.ndarray) -> np.ndarray:
    """Return the loss of each token of a window except the first, (N,), each by a forward pass over its prefix."""
    ids = torch.from_numpy(window)
    losses = [F.cross_entropy(model(ids[None, :p])[0][0], ids[p : p + 1]) for p in range(1, len(ids))]
    return np.array(losses, dtype=float)


@pytest.mark.parametrize("position, block_size", [("rotary", 8), ("alibi", 100), ("learned", 40), ("learned", 90)])
def test_losses_by_position_match_prefixes(position, block_size, runtime, seed):
    """Windows of 71 tokens: two of a first shard, none of a second one, and one of a third."""
    model = model_of(20, block_size=block_size, position=position)
    shards = [np.random.default_rng(seed).integers(20, size=n) for n in (150, 70, 71)]
    streams = [stream_of(ids) for ids in shards]
    measured = measure_positions(model, runtime, "text", streams, 70, batch_tokens=2 * 70)  # two windows per batch
    reach = min(70, block_size) if position == "learned" else 70
    windows = [shards[0][:71], shards[0][71:142], shards[2]]
    expected = np.array([prefix_losses(model, window[: reach + 1]) for window in windows])  # (3, reach)
    curve = measured.curve()
    tolerance = loss_error(model.config, reach)
    assert curve[:reach] == pytest.approx(expected.mean(axis=0), abs=tolerance)
    assert curve[reach:] == [None] * (70 - reach)
    rows = measured.rows()
    assert [(row["first"], row["last"]) for row in rows] == [(1, 17), (18, 35), (36, 70)]
    for row in rows:
        if row["last"] > reach:
            assert (row["value"], row["low"], row["high"], row["n"]) == (None, None, None, 0)
            continue
        means = expected[:, row["first"] - 1 : row["last"]].mean(axis=1)
        interval = stats.ttest_1samp(means, 0).confidence_interval()
        assert row["value"] == pytest.approx(means.mean(), abs=tolerance)
        # The interval is the mean plus and minus 2.5 standard deviations, which are off by as much as the values.
        assert (row["low"], row["high"]) == pytest.approx(tuple(interval), abs=3.5 * tolerance)
        assert row["n"] == 3 and row["over"] == "windows" and row["block_size"] == block_size


def test_losses_by_position_leave_out_masked_tokens(runtime, seed):
    """The mean is over unmasked tokens. A window without any in a range is not a sample of the range."""
    rng = np.random.default_rng(seed)
    ids, counted = rng.integers(20, size=4 * 65), rng.random(4 * 65) < 0.5
    windows = counted.reshape(4, 65)
    windows[:, 0] = True  # not predicted
    windows[1:, 5] = False
    windows[0, 5] = True
    windows[:, 7] = False
    windows[2, 1:33] = False
    model = model_of(20, position="rotary")
    measured = measure_positions(model, runtime, "text", [stream_of(ids, counted)], 64)
    expected = np.array([prefix_losses(model, window) for window in ids.reshape(4, 65)])  # (4, 64)
    curve = measured.curve()
    tolerance = loss_error(model.config, 64)
    assert curve[4] == pytest.approx(expected[0, 4], abs=tolerance) and curve[6] is None
    for row, (first, last) in zip(measured.rows(), [(1, 16), (17, 32), (33, 64)], strict=True):
        positions = slice(first - 1, last)
        samples = windows[:, 1:][:, positions].any(axis=1).nonzero()[0]
        weights = windows[samples, 1:][:, positions]
        totals, n_tokens = (weights * expected[samples, positions]).sum(axis=1), weights.sum(axis=1)
        mean, n = totals.sum() / n_tokens.sum(), len(samples)
        half_width = half_width_of(totals, n_tokens)
        assert row["n"] == n and row["value"] == pytest.approx(mean, abs=tolerance)
        assert (row["high"] - row["low"]) / 2 == pytest.approx(half_width, abs=3.5 * tolerance)  # 2.5 deviations
    counted[:] = False
    measured = measure_positions(model, runtime, "text", [stream_of(ids, counted)], 64)
    assert [row["value"] for row in measured.rows()] == [None] * 3 and measured.curve() == [None] * 64


def test_a_text_of_two_windows_is_long_enough(runtime):
    """The message said "1 tokens"."""
    model, ids = model_of(20), np.zeros(42, np.int64)
    assert measure_positions(model, runtime, "text", [stream_of(ids)], 20).rows()[0]["n"] == 0  # 8 learned positions
    for parts, count in ([ids[1:]], "41 tokens"), ([ids[:21], ids[:20]], "41 tokens"), ([ids[:1]], "1 token"):
        with pytest.raises(UserError, match=rf"^text has {count}, .*--context=20.*2 windows of 21"):
            measure_positions(model, runtime, "text", [*map(stream_of, parts)], 20)
