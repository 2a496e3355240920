import gzip
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from scipy import stats

from folio import UserError
from folio.base.settings import load
from folio.checkpoints import foreign
from folio.checkpoints.checkpoint import Checkpoint
from folio.data.corpus import Corpus, find_sources
from folio.data.shards import Shard
from folio.data.tokenizer import ByteTokenizer, CharTokenizer
from folio.evaluation import benchmarks, text_loss
from folio.evaluation.benchmarks import MultipleChoice, Score, score_endings
from folio.evaluation.comparison import Design, choose_design, compare
from folio.evaluation.scores import Evaluation, Measure, Reading, halvings, read_characters
from folio.evaluation.text_loss import (
    Stream,
    corpus_stream,
    measure_positions,
    measure_text,
    shard_streams,
    token_losses,
)
from folio.machine.runtime import Runtime, resolve_runtime
from model import GPT, GPTConfig
from prepare import text as prepare_text
from tests.support.tiny_tokenizers import TEXT, bpe
from tools import evaluate
from tools.bench.baselines import transformers_model
from tools.evaluate import EvaluateConfig
from train import train


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return resolve_runtime("cpu", "float32", False)


def run_tool(*words: str) -> None:
    """Run the tool with these arguments."""
    evaluate.main(load(EvaluateConfig, list(words)))


def model_of(vocab_size: int, std: float = 0.3, block_size: int = 8, position: str = "learned") -> GPT:
    """Random weights, large enough that tokens differ in probability; std=0: all tokens are equally likely."""
    torch.manual_seed(3)
    config = GPTConfig(block_size=block_size, vocab_size=vocab_size, n_layer=2, n_head=2, n_embd=16, position=position)
    model = GPT(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=std)
    return model.eval()


@torch.inference_mode()
def nats_of(theirs: torch.nn.Module, before: np.ndarray, token: int) -> float:
    """The loss of a token after others, by transformers."""
    return -float(theirs(torch.from_numpy(before)[None]).logits[0, -1].log_softmax(-1)[token])


def compare_models(first: list[Measure], second: list[Measure]) -> list[dict]:
    """The comparison of two checkpoints a and b, given what was measured of each."""
    sides = [[Evaluation("a", first, {"text": Reading()})], [Evaluation("b", second, {"text": Reading()})]]
    return compare(sides, Design([["a"], ["b"]]))


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.architecture("this test, whose reference is transformers' GPT-2: use another one, or skip it")
@pytest.mark.parametrize("stride", [8, 5, 3, 1])
@pytest.mark.parametrize("n", [2, 8, 9, 10, 31])
def test_losses_are_those_of_transformers(n, stride, runtime, seed):
    """Each token is predicted in the first context that contains it."""
    model = model_of(20)
    theirs = transformers_model(model)
    ids = np.random.default_rng(seed).integers(20, size=n)
    losses = token_losses(model, ids, runtime, stride)
    for j in range(1, n):
        begin = next(b for b in range(0, n, stride) if b + 8 >= j)
        assert losses[j - 1] == pytest.approx(nats_of(theirs, ids[begin:j], ids[j]), abs=1e-4)


@pytest.mark.parametrize("n", [1, 2, 7])
def test_a_long_context_takes_no_memory_for_a_short_text(n, runtime):
    """The text was padded to block_size, which a model without learned positions may have of any size."""
    ids = np.arange(n)
    short, long = (model_of(20, block_size=size, position="alibi") for size in (8, 10**12))
    expected = token_losses(short, ids, runtime, stride=8)
    assert token_losses(long, ids, runtime, stride=10**12) == pytest.approx(expected, abs=1e-5)


def test_the_loss_is_the_one_that_training_prints(tiny, capsys):
    cfg = tiny(max_iters=12, eval_interval=12, eval_iters=None)
    loss = train(cfg).best_val_loss
    run_tool(cfg.out_dir, "--dtype=float32")
    row = next(line for line in capsys.readouterr().out.splitlines() if "loss, nats per token" in line)
    assert f"| verse, validation | loss, nats per token | {loss:.4f} |" in row and "blocks of 1,024 bytes" in row


def test_bits_per_byte_count_the_predicted_bytes(runtime, tmp_path):
    """All 257 tokens are equally likely; each document ends with a token that is not a byte."""
    documents = ["One.", "Two documents.", "Größe."] * 10
    (tmp_path / "text.txt").write_text("\n\n".join(documents), encoding="utf-8")
    corpus = Corpus(find_sources([str(tmp_path / "text.txt")]), split_on="\n\n")
    tokenizer = ByteTokenizer()
    streams = [corpus_stream(corpus, tokenizer)]
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
    (tmp_path / "text.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    corpus = Corpus(find_sources([str(tmp_path / "text.txt")]), split_on="\n")
    measures = []
    for tokenizer in (CharTokenizer.of("\n".join(words)), bpe()):
        streams = [corpus_stream(corpus, tokenizer)]
        measures.append(measure_text(model_of(tokenizer.vocab_size), tokenizer, runtime, "text", streams, 8))
    assert [len(measure.values) for per_tokenizer in measures for measure in per_tokenizer] == [60] * 6
    (comparison,) = compare_models(*measures)
    assert comparison["measure"] == "bits per byte"  # they have different tokens
    assert measures[0][2].weights.sum() == len("\n".join(words))  # the separator repositions the end-of-text token


def test_a_document_in_parts_is_one_document(tmp_path):
    """A text larger than a block of the corpus had an end-of-text token in its middle."""
    text = "hello world\n" * 120_000  # 1.4 MB
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    corpus, tokenizer = Corpus(find_sources([str(tmp_path / "text.txt")])), ByteTokenizer()
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


# --- losses by position -----------------------------------------------------------------------------------------------


def stream_of(ids: np.ndarray, counted: np.ndarray | None = None) -> Stream:
    zeros = np.zeros(len(ids), np.int64)
    return Stream(ids, np.ones(len(ids), bool) if counted is None else counted, zeros, zeros)


@torch.inference_mode()
def prefix_losses(model: GPT, window: np.ndarray) -> np.ndarray:
    """The loss of each token of a window but the first, (N,), each from a forward pass over the tokens before it."""
    ids = torch.from_numpy(window)
    losses = [F.cross_entropy(model(ids[None, :p])[0][0], ids[p : p + 1]) for p in range(1, len(ids))]
    return np.array(losses, dtype=float)


@pytest.mark.parametrize("position, block_size", [("rotary", 8), ("alibi", 100), ("learned", 40), ("learned", 90)])
def test_losses_by_position_are_those_of_prefixes(position, block_size, runtime, seed, monkeypatch):
    """Windows of 71 tokens: two of a first shard, none of a second one, and one of a third."""
    monkeypatch.setattr(text_loss, "BATCH_TOKENS", 2 * 70)  # two windows per batch
    model = model_of(20, block_size=block_size, position=position)
    shards = [np.random.default_rng(seed).integers(20, size=n) for n in (150, 70, 71)]
    measured = measure_positions(model, runtime, "text", [stream_of(ids) for ids in shards], 70)
    reach = min(70, block_size) if position == "learned" else 70
    windows = [shards[0][:71], shards[0][71:142], shards[2]]
    expected = np.array([prefix_losses(model, window[: reach + 1]) for window in windows])  # (3, reach)
    curve = measured.curve()
    assert curve[:reach] == pytest.approx(expected.mean(axis=0), abs=1e-4) and curve[reach:] == [None] * (70 - reach)
    rows = measured.rows()
    assert [(row["first"], row["last"]) for row in rows] == [(1, 17), (18, 35), (36, 70)]
    for row in rows:
        if row["last"] > reach:
            assert (row["value"], row["low"], row["high"], row["n"]) == (None, None, None, 0)
            continue
        means = expected[:, row["first"] - 1 : row["last"]].mean(axis=1)
        interval = stats.ttest_1samp(means, 0).confidence_interval()
        assert (row["value"], row["low"], row["high"]) == pytest.approx((means.mean(), *interval), abs=1e-4)
        assert row["n"] == 3 and row["over"] == "windows" and row["block_size"] == block_size


def test_losses_by_position_leave_out_masked_tokens(runtime, seed):
    """The mean is over the tokens that count. In a range, a window without such a token is not a sample."""
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
    assert curve[4] == pytest.approx(expected[0, 4], abs=1e-4) and curve[6] is None
    samples_of = {(1, 16): [0, 1, 3], (17, 32): [0, 1, 3], (33, 64): [0, 1, 2, 3]}
    for row, ((first, last), samples) in zip(measured.rows(), samples_of.items(), strict=True):
        positions = slice(first - 1, last)
        weights = windows[samples, 1:][:, positions]
        totals, n_tokens = (weights * expected[samples, positions]).sum(axis=1), weights.sum(axis=1)
        mean, n = totals.sum() / n_tokens.sum(), len(samples)
        standard_error = math.sqrt(((totals - mean * n_tokens) ** 2).sum() / (n * (n - 1))) / n_tokens.mean()
        half_width = stats.t(n - 1).ppf(0.975) * standard_error
        assert row["n"] == n and row["value"] == pytest.approx(mean, abs=1e-4)
        assert (row["high"] - row["low"]) / 2 == pytest.approx(half_width, abs=1e-4)
    counted[:] = False
    measured = measure_positions(model, runtime, "text", [stream_of(ids, counted)], 64)
    assert [row["value"] for row in measured.rows()] == [None] * 3 and measured.curve() == [None] * 64


def test_ranges_of_positions():
    assert halvings(512) == [(1, 16), (17, 32), (33, 64), (65, 128), (129, 256), (257, 512)]
    assert halvings(31) == [(1, 31)] and halvings(1) == [(1, 1)]
    for context in range(1, 400):
        ranges = halvings(context)
        assert [p for first, last in ranges for p in range(first, last + 1)] == list(range(1, context + 1))
        assert ranges[0][1] < 32 and all(last // 2 == first - 1 for first, last in ranges[1:])


def test_a_text_of_two_windows_is_long_enough(runtime):
    model, ids = model_of(20), np.zeros(42, np.int64)
    assert measure_positions(model, runtime, "text", [stream_of(ids)], 20).rows()[0]["n"] == 0  # 8 learned positions
    for streams in ([stream_of(ids[1:])], [stream_of(ids[:21]), stream_of(ids[:20])]):
        with pytest.raises(UserError, match=r"^text has 41 tokens, and --context=20 needs 2 windows of 21: "):
            measure_positions(model, runtime, "text", streams, 20)


def test_the_command_with_context(tiny, tmp_path, text, data_dir, capsys):
    """Three models on the same windows, whatever their block_size, and one that reads other tokens."""
    names = {"learned": ("learned", 32), "rotary": ("rotary", 16), "alibi": ("alibi", 64)}
    for name, (position, block_size) in names.items():
        run = dict(position=position, block_size=block_size, out_dir=str(tmp_path / name))
        train(tiny(max_iters=2, warmup_iters=1, **run))
    prepare_text.main(
        prepare_text.TextConfig(inputs=(str(data_dir / "verse.txt"),), tokenizer="byte", data_dir=str(tmp_path))
    )
    train(tiny(max_iters=2, warmup_iters=1, data_dir=str(tmp_path), out_dir=str(tmp_path / "bytes")))
    new = tmp_path / "new.txt"
    new.write_text(text[:600] + "é", encoding="utf-8")
    capsys.readouterr()
    runs = [str(tmp_path / name) for name in ("alibi", "learned", "rotary", "bytes")]
    given = [str(tmp_path / "al*"), ",".join(runs[1:])]  # patterns and commas
    run_tool(*given, f"--text={new}", "--on_unknown=skip", "--context=64", f"--json={tmp_path / 'results.json'}")
    output = capsys.readouterr()
    tables = [table for table in output.out.split("\n\n") if table.startswith("|")]
    cells = [[[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()] for table in tables]
    assert [table[0][1:] for table in cells] == [runs[:3], runs[3:]]
    assert cells[0][2] == ["block_size in training", "64", "32", "16"]
    assert [line[0] for line in cells[0][3:6]] == ["1 to 16", "17 to 32", "33 to 64"]
    assert cells[0][5][2] == "none" and "none" not in cells[0][3] + cells[0][4] + cells[0][5][:2] + cells[0][5][3:]
    results = json.loads((tmp_path / "results.json").read_text())
    rows, curves = results["results"], results["curves"]
    assert [(row["run"], row["last"]) for row in rows] == [(run, last) for run in runs for last in (16, 32, 64)]
    assert [curve["run"] for curve in curves] == runs and curves[1]["losses"][32:] == [None] * 32
    for i, curve in enumerate(curves):
        for line, row in zip(cells[i // 3][3:6], rows[3 * i : 3 * i + 3], strict=True):
            value = "none"
            if row["value"] is not None:
                assert row["n"] == 9
                assert row["value"] == pytest.approx(np.mean(curve["losses"][row["first"] - 1 : row["last"]]))
                value = f"{row['value']:.4f} ± {(row['high'] - row['low']) / 2:.4f}"
            assert line[1 + i % 3] == value
    # what the normal path says about the text
    assert output.err.count("probes of 32 tokens occur in the training data of") == 4
    matched = [f"{row['probes_matched']} of {row['probes']}" for row in rows[::3]]
    assert cells[0][6][1:] + cells[1][6][1:] == matched
    assert [f"{run} left out 1 of the 601 characters" in output.out for run in runs] == [True] * 3 + [False]


def test_contexts_longer_than_in_training(tiny, data_dir, tmp_path):
    """--block_size was limited to that of the training run for all models."""
    cfg = tiny(max_iters=2, warmup_iters=1, position="rotary", block_size=16)
    train(cfg)
    run_tool(cfg.out_dir, "--block_size=50", "--dtype=float32", f"--json={tmp_path / 'results.json'}")
    saved = foreign.load(cfg.out_dir)
    ids = torch.from_numpy(np.fromfile(data_dir / "verse" / "val.bin", "<u2").astype(np.int64))
    model, total = saved.build().eval(), 0.0
    for begin in range(0, len(ids) - 1, 50):
        context = ids[begin : begin + 51]
        with torch.inference_mode():
            logits = model.logits(context[None, :-1])
        total += float(F.cross_entropy(logits[0], context[1:], reduction="sum"))
    value = json.loads((tmp_path / "results.json").read_text())["results"][0]["value"]
    assert value == pytest.approx(total / (len(ids) - 1), abs=1e-5)


# --- intervals --------------------------------------------------------------------------------------------------------


def measure_of(values: list[float], weights: list[float] | None = None, **settings) -> Measure:
    values, weights = (np.array(column, dtype=float) for column in (values, weights or [1.0] * len(values)))
    return Measure("text", "bits per byte", "documents", values, weights, **settings)


def test_an_interval_by_hand():
    """Mean 4, standard deviation 2, standard error 2 / sqrt(3); Student's t of two degrees of freedom is 4.3027."""
    row = measure_of([2, 4, 6]).row()
    assert (row["value"], row["low"], row["high"]) == pytest.approx((4, 4 - 4.9683, 4 + 4.9683), abs=1e-4)
    row = measure_of([2, 4, 6], transform=math.exp).row()
    assert row["low"] == pytest.approx(math.exp(4 - 4.9683), abs=1e-4)
    row = measure_of([2]).row()
    assert row["low"] is None and "unknown" in evaluate.format_table([{"run": "a", **row}])


def test_equal_weights_give_the_ordinary_paired_test(seed):
    rng = np.random.default_rng(seed)
    a = rng.normal(3, 1, 50)
    b = a + rng.normal(0.1, 0.3, 50)
    (comparison,) = compare_models([measure_of(a)], [measure_of(b)])
    expected = stats.ttest_rel(b, a)
    assert comparison["p"] == pytest.approx(expected.pvalue)
    assert (comparison["low"], comparison["high"]) == pytest.approx(tuple(expected.confidence_interval()))


def test_intervals_contain_the_true_value_in_95_percent_of_cases(seed):
    """Documents of very different lengths and different means; about 95 % of the intervals contain the true value."""
    rng = np.random.default_rng(seed)
    hits = 0
    for _ in range(400):
        weights = rng.integers(1, 60, 100).astype(float)
        row = measure_of(list(weights * rng.normal(2.0, 0.5, 100)), list(weights)).row()
        hits += row["low"] < 2.0 < row["high"]
    assert 360 <= hits <= 396


# --- comparisons ------------------------------------------------------------------------------------------------------


def test_a_comparison_names_the_better_checkpoint_or_none():
    """Only one seed was compared, and the sentence read as if it were about the settings."""
    same, worse, noise = measure_of([2, 3, 2, 3]), measure_of([2.5, 3.6, 2.5, 3.5]), measure_of([2.5, 2.4, 2.1, 3])
    sentence = compare_models([same], [worse])[0]["sentence"]
    assert "on this text, the checkpoint a is better than b: b minus a is +0.5250" in sentence
    assert "This is about these two checkpoints, not about their settings" in sentence
    assert "the checkpoint b is better than a: b minus a is -0.5250" in compare_models([worse], [same])[0]["sentence"]
    sentence = compare_models([same], [noise])[0]["sentence"]
    assert "the checkpoints a and b do not differ significantly" in sentence and "not about their settings" in sentence
    high = measure_of([1, 1, 1, 0, 1, 1, 1, 1], better="higher")
    low = measure_of([0, 0, 0, 0, 0, 0, 0, 1], better="higher")
    assert "a is better than b" in compare_models([high], [low])[0]["sentence"]
    identical = compare_models([same], [same])[0]
    assert identical["p"] == 1 and identical["difference"] == 0
    # every document by the same amount
    shifted = compare_models([measure_of([1, 2, 3])], [measure_of([2, 3, 4])])[0]
    assert shifted["p"] == 0 and shifted["low"] == shifted["high"] == 1
    with pytest.raises(UserError, match="not measured on the same documents"):
        compare_models([same], [measure_of([1, 2])])


def run_of(rng: np.random.Generator, difficulty: np.ndarray, seed_effect: float) -> Evaluation:
    """A simulated run: the loss of each document is its difficulty, plus the effect of the seed, plus noise."""
    losses = difficulty + seed_effect + rng.normal(0, 0.05, len(difficulty))
    return Evaluation("run", [measure_of(losses)], {"text": Reading()})


@pytest.mark.parametrize("paired", [True, False])
def test_equal_settings_seldom_differ_and_a_real_difference_is_found(paired, seed):
    """Runs that differ only in their seed: between settings, about 5 % of the comparisons report a difference. Between
    two checkpoints, most do, because the seed's effect is real on every document.
    """
    rng = np.random.default_rng(seed)
    between_settings = between_checkpoints = real_differences = 0
    for _ in range(300):
        difficulty = rng.normal(2, 0.5, 100)
        effects = rng.normal(0, 0.1, (2, 4))
        if paired:
            effects[1] += effects[0]  # what the runs with one seed have in common
        sides = [[run_of(rng, difficulty, effect) for effect in side] for side in effects]
        better = [run_of(rng, difficulty, effect - 1) for effect in effects[1]]
        design = Design([["run"] * 4] * 2, paired)
        between_settings += "are better" in compare(sides, design)[0]["sentence"]
        real_differences += (
            "the settings of B are better than those of A" in compare([sides[0], better], design)[0]["sentence"]
        )
        checkpoints = [side[:1] for side in sides]
        between_checkpoints += "is better" in compare(checkpoints, Design([["a"], ["b"]]))[0]["sentence"]
    assert 1 <= between_settings <= 40  # 15 expected
    assert real_differences >= 290 and between_checkpoints >= 200


def test_a_comparison_of_settings_is_over_runs():
    """Each run is one sample: its value on the whole text."""

    def side(*losses: float) -> list[Evaluation]:
        return [Evaluation("run", [measure_of([loss, loss + 1])], {"text": Reading()}) for loss in losses]

    first, second = side(1.0, 1.1, 1.2), side(2.0, 2.1, 2.3)
    values = [[measure.ratio for run in runs for measure in run.measures] for runs in (first, second)]
    for paired, expected, name in (
        (True, stats.ttest_rel(*values[::-1]), "paired t-test"),
        (False, stats.ttest_ind(*values[::-1], equal_var=False), "Welch's t-test"),
    ):
        (comparison,) = compare([first, second], Design([["run"] * 3] * 2, paired))
        assert comparison["p"] == pytest.approx(expected.pvalue)
        assert (comparison["low"], comparison["high"]) == pytest.approx(tuple(expected.confidence_interval()))
        assert comparison["over"] == "runs" and comparison["n"] == 6
        assert (
            "the settings of A are better than those of B: the mean of B minus that of A is 2.6333 - 1.6000 = +1.0333 ±"
        )
        assert f"3 + 3 runs, {name})." in comparison["sentence"] and "checkpoint" not in comparison["sentence"]
    (comparison,) = compare([side(1.0, 1.1), side(1.1, 1.3)], Design([["run"] * 2] * 2, True))
    assert "the settings of A and B cannot be told apart with 2 + 2 runs" in comparison["sentence"]
    assert comparison["high"] - comparison["low"] > 1  # t of one degree of freedom is 12.7


@pytest.fixture
def recorded_settings(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict]:
    """The training settings that checkpoints record, by the name of the run. A test fills it in."""
    settings: dict[str, dict] = {}
    monkeypatch.setattr(foreign, "load", lambda run, _: Checkpoint(Path(run), {}, None, settings[run]))
    return settings


def design_of(*sides: str) -> Design:
    return choose_design(evaluate.choose_sides(EvaluateConfig(runs=("compare", *sides))), "best")


def test_runs_with_the_same_seeds_are_paired(recorded_settings):
    for i, seed in enumerate((1, 2, 3, 3, 1, 2), start=1):
        settings = {"seed": seed, "out_dir": f"r{i}", "learning_rate": 0.1 if i < 4 else 0.2, "n_layer": 2}
        recorded_settings[f"r{i}"] = {"config": settings}
    recorded_settings["gpt2"] = recorded_settings["gpt2-medium"] = {"model": {}}
    design = design_of("r1,r2,r3", "r4,r5,r6")
    assert design.paired and design.sides == [["r1", "r2", "r3"], ["r5", "r6", "r4"]]
    assert design.lines[:3] == [
        "A: r1, r2, r3",
        "B: r5, r6, r4",
        "Settings that differ: learning_rate 0.1 (A) and 0.2 (B).",
    ]
    assert "both sides have the seeds 1, 2, 3" in design.lines[3]
    design = design_of("r1,r2,r3", "r5,r6")
    assert not design.paired and "different seeds (1, 2, 3; 1, 2)" in design.lines[3]
    assert not design_of("r1,r2", "r4,r5").paired and "(1, 2; 3, 1)" in design_of("r1,r2", "r4,r5").lines[3]
    assert "not every run records its seed" in design_of("r1,r2", "gpt2,gpt2-medium").lines[3]
    assert "unknown, because" in design_of("r1,r2", "gpt2,gpt2-medium").lines[2]
    recorded_settings["r5"]["config"]["n_layer"] = 3
    line = design_of("r1,r2,r3", "r4,r5,r6").lines[2]
    assert "n_layer 2 (A) and 2, 3 (B)" in line and "The runs of one side differ in n_layer" in line
    with pytest.raises(
        UserError, match=r"^r3 and r4 have the same seed, so they are not independent: .* its own --seed"
    ):
        design_of("r3,r4", "r1,r2")
    with pytest.raises(UserError, match="gpt2 and gpt2 have the same seed"):
        design_of("gpt2,gpt2", "r1,r2")


def test_sides_that_cannot_be_compared_are_an_error(tmp_path, monkeypatch):
    with pytest.raises(
        UserError, match=r"the sides have 2 and 1 runs; give one run per side to compare two checkpoints"
    ):
        design_of("a,b", "c")
    with pytest.raises(UserError, match="compare takes two sides, and 3 were given"):
        design_of("a", "b", "c")
    monkeypatch.chdir(tmp_path)
    for name in ("out-b", "out-a", "out,c"):
        (tmp_path / name).mkdir()
    (tmp_path / "out-a.log").touch()
    sides = evaluate.choose_sides(EvaluateConfig(runs=("compare", "out-*, gpt2", "r1,r2,r3")))
    assert sides == [["out-a", "out-b", "gpt2"], ["r1", "r2", "r3"]]
    assert evaluate.choose_sides(EvaluateConfig(runs=("compare", "out-a", "out,c"))) == [["out-a"], ["out,c"]]
    for sides in (("out-a,out-b", "r1,./out-b"), ("out-b", "out-b"), ("out-*", "out-b,r1")):
        with pytest.raises(UserError, match="out-b is on both sides; give each side runs of its own"):
            design_of(*sides)
    with pytest.raises(UserError, match=r"^run\*: no folder matches this pattern$"):
        design_of("run*", "out-*")


def test_different_validation_sets_are_an_error():
    """Two data sets with the same number of blocks were compared as if they were one text."""
    sides = [
        [Evaluation(name, [measure_of([1, 2, 3])], {f"{name}, validation": Reading(bytes=size)})]
        for name, size in (("a", 300), ("b", 301))
    ]
    with pytest.raises(
        UserError, match=r"a and b were evaluated on different texts \(a, validation and b, validation\)"
    ):
        compare(sides, Design([["a"], ["b"]]))


# --- characters that are left out -------------------------------------------------------------------------------------


def test_characters_that_were_left_out_are_counted(tiny, tmp_path, capsys):
    """With --on_unknown=skip, a tenth of a text vanished without a number."""
    cfg = tiny(max_iters=2, warmup_iters=1)
    train(cfg)
    text, results = tmp_path / "new.txt", tmp_path / "results.json"
    text.write_text("the king shall love é\n" * 19 + "the king shall lov3 é\n", encoding="utf-8")
    run_tool(cfg.out_dir, f"--text={text}", "--on_unknown=skip", f"--json={results}")
    out = capsys.readouterr().out
    expected = (
        f"{cfg.out_dir} left out 21 of the 440 characters of {text} (4.77%), because they are not in its vocabulary"
    )
    assert f"{expected}: 'é' '3'\n" in out
    row = json.loads(results.read_text())["results"][0]
    assert (row["characters"], row["left_out"]) == (440, 21)


def test_models_that_read_different_characters_get_no_verdict(seed):
    """Bits per byte over different characters are not the same quantity."""
    rng = np.random.default_rng(seed)
    sides = []
    for name, tokenizer in (("a", CharTokenizer("abc")), ("b", CharTokenizer("abcd")), ("c", CharTokenizer("cab"))):
        reading = read_characters(["abcabc", "abd", "xyz"], tokenizer)
        sides.append([Evaluation(name, [measure_of(rng.normal(2, 1, 3))], {"text": reading})])
    assert sides[0][0].readings["text"].unknown == {"d": 1, "x": 1, "y": 1, "z": 1}
    (comparison,) = compare(sides[:2], Design([["a"], ["b"]]))
    assert "no verdict, because the models left out different characters" in comparison["sentence"]
    assert comparison["p"] is None and comparison["difference"] == pytest.approx(
        sides[1][0].measures[0].ratio - sides[0][0].measures[0].ratio
    )
    for runs in (sides[0] * 2, sides[2] * 2):  # several runs per side
        (comparison,) = compare([sides[1] * 2, runs], Design([["b"] * 2, ["a"] * 2]))
        assert "no verdict" in comparison["sentence"]
    (comparison,) = compare([sides[0], sides[2]], Design([["a"], ["c"]]))
    assert "no verdict" not in comparison["sentence"]  # both left out the same characters
    assert "different characters" not in comparison["sentence"]


@pytest.mark.parametrize("runs", [1, 3])
def test_a_few_different_characters_do_not_prevent_a_verdict(runs):
    """One character of a novel that only one model knew, and there was no verdict."""
    texts = ["abc" * 1000, "d" * 3, "e" * 2]  # 3,005 characters

    def side(name: str, characters: str, shift: float) -> list[Evaluation]:
        reading = read_characters(texts, CharTokenizer(characters))
        return [Evaluation(name, [measure_of([1 + shift, 1.1 + shift])], {"text": reading})] * runs

    design = Design([["a"] * runs, ["b"] * runs])
    (comparison,) = compare([side("a", "abcd", 0), side("b", "abce", 1)], design)
    counts = ", ".join(["a: 2"] * runs + ["b: 3"] * runs)
    assert comparison["p"] < 0.05 and comparison["low"] == pytest.approx(1) and "than" in comparison["sentence"]
    assert comparison["sentence"].endswith(
        f" The models left out a few different characters ({counts} of 3,005), which is less than 0.1% of the text."
    )
    texts.append("x")  # 4 of 3,006 characters are more than that
    (comparison,) = compare([side("a", "abcd", 0), side("b", "abce", 1)], design)
    assert "no verdict" in comparison["sentence"] and comparison["p"] is None
    texts[0] *= 2
    longer = [replace(evaluation, measures=[measure_of([1, 2, 3])]) for evaluation in side("a", "abcd", 0)]
    (comparison,) = compare([longer, side("b", "abce", 1)], design)  # different numbers of blocks
    assert ("no verdict" in comparison["sentence"]) == (runs == 1)


def test_blocks_of_a_text_are_the_same_with_characters_that_are_left_out(runtime, tmp_path):
    """They began later and later for the model that had left out more, so the models' blocks did not match."""
    (tmp_path / "text.txt").write_text(("hello" * 40 + "é" * 8) * 200, encoding="utf-8")
    corpus = Corpus(find_sources([str(tmp_path / "text.txt")]))
    sizes = []
    for characters in ("helo", "helo" + "é"):
        tokenizer = CharTokenizer(characters)
        tokenizer.on_unknown = "skip"
        streams = [corpus_stream(corpus, tokenizer)]
        bits = measure_text(model_of(tokenizer.vocab_size), tokenizer, runtime, "text", streams, 8)[2]
        sizes.append(bits.weights)
    without, complete = sizes
    assert complete.sum() == 200 * 216 - 1 and without.sum() == 200 * 200 - 1
    assert len(complete) == len(without) == 43
    difference = complete - without  # each block has 4 or 5 times the 16 bytes that were left out
    assert (difference[1:-1] >= 3 * 16).all() and (difference <= 5 * 16).all()


# --- training data ----------------------------------------------------------------------------------------------------


def test_a_text_that_was_trained_on_is_reported(tiny, tmp_path, text, data_dir, capsys):
    """Its loss was printed like that of any other text."""
    cfg = tiny(max_iters=2, warmup_iters=1)
    train(cfg)
    results, new = tmp_path / "results.json", tmp_path / "new.txt"
    new.write_text(text[:3000][::-1], encoding="utf-8")

    def lines_and_row(*words: str) -> tuple[list[str], dict]:
        """What is printed about the training data, and a row of the results."""
        capsys.readouterr()
        run_tool(cfg.out_dir, *words, f"--json={results}")
        output = capsys.readouterr()
        row = json.loads(results.read_text())["results"][0]
        mark = f"({row['probes_matched']} of {row['probes']} probes are in its training data) |"
        assert (mark in output.out) == bool(row["probes_matched"])
        return [line for line in output.err.splitlines() if "probes of 32" in line or "check" in line], row

    (line,), row = lines_and_row(f"--text={data_dir / 'verse.txt'}")
    matches = row["probes_matched"]
    assert 17 <= matches <= 19 and row["probes"] == 20  # a tenth is for validation
    assert line.endswith(
        f"verse.txt: {matches} of 20 probes of 32 tokens occur in the training data of {cfg.out_dir}: it was trained "
        f"on this text, so its values here say little about new text"
    )
    lines, row = lines_and_row(f"--text={new}")
    assert lines == [] and (row["probes"], row["probes_matched"]) == (20, 0)
    for words in ([], ["--dataset=verse"]):  # its own validation set
        lines, row = lines_and_row(*words)
        assert lines == [] and row["probes"] is None
    part = tmp_path / "part.txt"
    part.write_text(text[:5000], encoding="utf-8")
    settings = dict(tokenizer=cfg.out_dir, data_dir=str(tmp_path))
    prepare_text.main(prepare_text.TextConfig(inputs=(str(part),), **settings))
    (line,), row = lines_and_row("--dataset=part", f"--data_dir={tmp_path}")
    assert line.startswith("part, validation: ") and row["probes_matched"] == row["probes"]
    new.write_text("the king", encoding="utf-8")
    (line,), row = lines_and_row(f"--text={new}")
    assert "could not check" in line and line.endswith("no document has more than 32 tokens")


def test_training_data_that_is_missing_or_changed_is_reported(tiny, tmp_path, text, data_dir, capsys):
    shutil.copytree(data_dir, tmp_path / "data")
    cfg = tiny(max_iters=2, warmup_iters=1, data_dir=str(tmp_path / "data"), dataset="verse")
    train(cfg)
    moved = (tmp_path / "data").rename(tmp_path / "moved")
    source = moved / "verse.txt"

    def printed(*words: str) -> str:
        capsys.readouterr()
        run_tool(cfg.out_dir, f"--text={source}", *words)
        return capsys.readouterr().err

    expected = f"verse.txt: could not check whether {cfg.out_dir} was trained on this text: its training data, "
    assert f"{expected}{tmp_path / 'data' / 'verse'}, does not exist; set --data_dir\n" in printed()
    assert "it was trained on this text" in printed(f"--data_dir={moved}")
    part = tmp_path / "part.txt"
    part.write_text(text[:9000], encoding="utf-8")
    prepare_text.main(prepare_text.TextConfig(inputs=(str(part),), name="verse", data_dir=str(tmp_path / "data")))
    assert f"{expected}verse, has been prepared again since then\n" in printed()


def test_what_a_finetuned_model_was_trained_on_before_is_not_known(tiny, tmp_path, text, capsys):
    train(tiny(max_iters=2, warmup_iters=1))
    cfg = tiny(max_iters=2, warmup_iters=1, init_from=tiny().out_dir, out_dir=str(tmp_path / "fine"))
    train(cfg)
    new = tmp_path / "new.txt"
    new.write_text(text[:3000][::-1], encoding="utf-8")
    run_tool(cfg.out_dir, f"--text={new}")
    assert f"could not check whether {tiny().out_dir} was trained on it, from which" in capsys.readouterr().err


# --- tasks ------------------------------------------------------------------------------------------------------------


@pytest.mark.architecture("this test, whose reference is transformers' GPT-2: use another one, or skip it")
def test_endings_are_scored_as_one_by_one(runtime):
    """The other rows of a batch do not change a score; a context that is too long loses its beginning."""
    model, tokenizer = model_of(257), ByteTokenizer()
    theirs = transformers_model(model)
    questions = [
        MultipleChoice("ab", [" c", " defg"], 1),
        MultipleChoice("a much longer context", [" ending", " e"], 0),
    ]
    scores = score_endings(model, tokenizer, runtime, "task", questions)
    for question, ending_scores in zip(questions, scores, strict=True):
        for ending, score in zip(question.endings, ending_scores, strict=True):
            ids = tokenizer.encode(question.context + ending).astype(np.int64)[-9:]
            positions = range(len(ids) - len(ending), len(ids))
            assert score.nats == pytest.approx(sum(nats_of(theirs, ids[:i], ids[i]) for i in positions), abs=1e-3)
            likeliest = [int(theirs(torch.from_numpy(ids[:i])[None]).logits[0, -1].argmax()) for i in positions]
            assert score.greedy == (likeliest == ids[list(positions)].tolist())


def test_the_likeliest_ending_is_greedy(runtime):
    model, tokenizer = model_of(257), ByteTokenizer()
    context = "ab"
    with torch.inference_mode():
        best = int(model(torch.tensor([list(context.encode())]))[0][0, -1, :128].argmax())
        model.lm_head.weight[128:] = 0  # only ASCII can be the likeliest
        best = int(model(torch.tensor([list(context.encode())]))[0][0, -1].argmax())
    question = MultipleChoice(context, [chr(best), chr(best ^ 1)], 0)
    (scores,) = score_endings(model, tokenizer, runtime, "task", [question])
    assert [score.greedy for score in scores] == [True, False]


def replace_fetch(monkeypatch: pytest.MonkeyPatch, folder: Path, files: dict[str, bytes]) -> None:
    """Let `fetch` return only these files, given by the first four digits of their sha256."""

    def fetch(name: str, digest: str, sources: list) -> Path:
        if digest[:4] not in files:
            raise UserError(f"{name} could not be fetched")
        (folder / digest).write_bytes(files[digest[:4]])
        return folder / digest

    monkeypatch.setattr(benchmarks, "fetch", fetch)


def test_lambada(monkeypatch, tmp_path, runtime, capsys):
    questions = [MultipleChoice("he said hello to the", [" world"], 0), MultipleChoice("the\nnew", [" hello"], 0)]
    openai_file = "\n".join(json.dumps({"text": q.context + q.endings[0]}) for q in questions).encode()
    requests = [{"request": {"context": q.context, "continuation": q.endings[0]}, "idx": 0} for q in questions]
    olmo_file = gzip.compress("\n".join(map(json.dumps, requests)).encode())
    replace_fetch(monkeypatch, tmp_path, {"4aa8": openai_file})
    assert benchmarks.lambada_questions() == questions
    replace_fetch(monkeypatch, tmp_path, {"b990": olmo_file})
    assert benchmarks.lambada_questions() == questions
    assert "with white space collapsed" in capsys.readouterr().err
    tokenizer = ByteTokenizer()
    scores = score_endings(model_of(257, std=0), tokenizer, runtime, "lambada", questions)
    accuracy, loss, perplexity = benchmarks.lambada(questions, scores)
    assert accuracy.ratio == 0 and accuracy.better == "higher"
    assert loss.values == pytest.approx(np.log(257) * np.array([6, 6]))  # six bytes each
    assert perplexity.row()["value"] == pytest.approx(257**6)


def test_hellaswag(monkeypatch, tmp_path):
    row = {
        "activity_label": "Baking",
        "ctx_a": "A cook [header] kneads.",
        "ctx_b": "he [title] then",
        "endings": ["sleeps.", "bakes  it [step] well.", "x.", "y."],
        "label": "1",
    }
    sink = pa.BufferOutputStream()
    rows = pa.Table.from_pylist([row, {**row, "label": "2"}])
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    replace_fetch(monkeypatch, tmp_path, {"5d21": sink.getvalue().to_pybytes()})
    questions = benchmarks.hellaswag_questions()
    assert questions[0].context == "Baking: A cook kneads. He. then" and questions[0].correct == 1
    assert questions[0].endings == [" sleeps.", " bakes it well.", " x.", " y."]
    scores = [[Score(5, False), Score(6, False), Score(4, False), Score(9, False)]] * 2
    acc, normed = benchmarks.hellaswag(questions, scores)
    assert acc.values.tolist() == [0, 1]  # the third ending has the highest total likelihood
    assert normed.values.tolist() == [1, 0]  # the second has the highest likelihood per byte


def test_a_task_counts_the_characters_that_are_left_out(tiny, monkeypatch, tmp_path, capsys):
    cfg = tiny(max_iters=2, warmup_iters=1)
    train(cfg)
    passages = ["The king said é to his love", "Swear", "fair no3 crown"]
    replace_fetch(monkeypatch, tmp_path, {"4aa8": "\n".join(json.dumps({"text": t}) for t in passages[::2]).encode()})
    copy = shutil.copytree(cfg.out_dir, f"{cfg.out_dir}-copy")
    run_tool("compare", cfg.out_dir, copy, "--tasks=lambada", "--limit=1")
    out = capsys.readouterr().out
    assert f"{cfg.out_dir} left out 1 of the 27 characters of lambada (3.70%)" in out
    assert "lambada, accuracy: on this text, the checkpoints" in out and "| 1 passages |" in out


@pytest.mark.network
def test_the_tasks_are_downloaded():
    assert len(benchmarks.lambada_questions()) == 5153 and len(benchmarks.hellaswag_questions()) == 10042
    assert {question.correct for question in benchmarks.hellaswag_questions()} == {0, 1, 2, 3}


# --- command ----------------------------------------------------------------------------------------------------------


def test_the_command(tiny, tmp_path, capsys):
    cfg = tiny(max_iters=12, eval_interval=6)
    train(cfg)
    text = tmp_path / "new.txt"
    text.write_text("the king shall love\n\n" * 30 + "his crown and swear", encoding="utf-8")
    capsys.readouterr()
    words = ["--text", str(text), "--split_on=\\n\\n", "--stride", "4", f"--json={tmp_path / 'results.json'}"]
    copy = shutil.copytree(cfg.out_dir, f"{cfg.out_dir}-copy")
    run_tool("compare", cfg.out_dir, copy, *words)
    out = capsys.readouterr().out
    assert "31 documents |" in out and "do not differ significantly" in out
    output = json.loads((tmp_path / "results.json").read_text())
    assert len(output["results"]) == 6 and output["comparisons"][0]["p"] == 1
    assert output["results"][0]["low"] < output["results"][0]["value"] < output["results"][0]["high"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--stride=33"], r"^--stride=33: it must not exceed the context of 32 tokens"),
        (["--block_size=64"], r": --block_size=64 is more than the model's 32 positions; use --block_size=32 or less"),
        (["--text=none.txt"], r"none\.txt"),
        (["--text={short}"], "fewer than 2 tokens"),
        (["--text={strange}", "--on_unknown=skip", "--context=2"], r"strange\.txt has 4 tokens, and --context=2 "),
        (["--text={strange}"], r"the character 'é'"),
        (["--dataset=other", "--data_dir={folder}"], "was prepared with a different tokenizer"),
    ],
)
def test_bad_input_is_an_error(words, message, tiny, tmp_path, data_dir):
    cfg = tiny(max_iters=2, warmup_iters=1)
    train(cfg)
    short, strange = tmp_path / "short.txt", tmp_path / "strange.txt"
    short.write_text("a", encoding="utf-8")
    strange.write_text("the é", encoding="utf-8")
    inputs = (str(data_dir / "verse.txt"),)
    prepare_text.main(prepare_text.TextConfig(inputs=inputs, name="other", tokenizer="byte", data_dir=str(tmp_path)))
    with pytest.raises(UserError, match=message):
        run_tool(cfg.out_dir, *(word.format(short=short, strange=strange, folder=tmp_path) for word in words))


@pytest.mark.parametrize(
    "words, message",
    [
        ([], r"^runs: name a run, or: compare RUN RUN$"),
        (["out", "--stride=0"], r"^command line: stride=0: it must be at least 1, or None$"),
        (["out", "--split_on="], r"split_on=: it must not be empty"),
        (
            ["out", "--tasks=lambada,copa"],
            r"tasks=lambada,copa: copa is not a task; the tasks are lambada, hellaswag, pairs, music$",
        ),
        (["out", "--tasks", "lambada,hellaswag", "--text=a.txt"], "give only one of them"),
        (["out", "--tasks", "lambada", "hellaswag"], "hellaswag is a task; separate tasks by commas: --tasks=lambada,"),
        (["out", "--limit=3"], "limit=3: it is the number of questions per task, and no --tasks are given"),
        (["out", "--context=0"], r"context=0: it must be at least 1, or None$"),
        (["out", "--context=9", "--tasks=lambada"], "context=9: it cannot be combined with --tasks, --stride, --block"),
        (["out", "--context=9", "--stride=4"], "context=9: it cannot be combined"),
        (["out", "--context=9", "--block_size=4"], "context=9: it cannot be combined"),
        (["compare", "a", "b", "--context=9"], "context=9: it cannot be combined"),
        (["out", "--texts=a.txt"], "texts is not a setting; did you mean text?"),
    ],
)
def test_bad_settings_are_an_error(words, message):
    with pytest.raises(UserError, match=message):
        run_tool(*words)


@pytest.mark.architecture("folio/checkpoints/foreign.py, which reads GPT-2's weights only")
def test_a_model_without_a_recorded_data_set_needs_a_text(tmp_path, capsys):
    from folio.checkpoints.export_formats import write_hugging_face
    from tests.support.exports import checkpoint_of

    write_hugging_face(checkpoint_of(bpe(), True), tmp_path / "hf")
    with pytest.raises(UserError, match="give a --dataset or a --text"):
        run_tool(str(tmp_path / "hf"))
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    run_tool(str(tmp_path / "hf"), f"--text={tmp_path / 'text.txt'}")
    assert "its checkpoint does not record the training data" in capsys.readouterr().err
