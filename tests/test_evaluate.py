import gzip
import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from scipy import stats
from tiny_tokenizers import TEXT, bpe

from folio import UserError
from folio.corpus import Corpus, find_sources
from folio.runtime import Runtime, resolve_runtime
from folio.shards import Shard
from folio.tokenizer import ByteTokenizer, CharTokenizer
from model import GPT, GPTConfig
from prepare import text as prepare_text
from tools import evaluate
from tools.bench_baselines import transformers_model
from tools.evaluate import Measure, Question, Score, compare, corpus_stream, measure_text, shard_streams, token_losses
from train import train


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return resolve_runtime("cpu", "float32", False)


def model_of(vocab_size: int, std: float = 0.3, block_size: int = 8) -> GPT:
    """Random weights, large enough that tokens differ in probability; std=0: all tokens are equally likely."""
    torch.manual_seed(3)
    model = GPT(GPTConfig(block_size=block_size, vocab_size=vocab_size, n_layer=2, n_head=2, n_embd=16))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=std)
    return model.eval()


@torch.inference_mode()
def nats_of(theirs: torch.nn.Module, before: np.ndarray, token: int) -> float:
    """The loss of a token after others, by transformers."""
    return -float(theirs(torch.from_numpy(before)[None]).logits[0, -1].log_softmax(-1)[token])


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


def test_the_loss_is_the_one_that_training_prints(tiny, capsys):
    cfg = tiny(max_iters=12, eval_interval=12, eval_iters=None)
    loss = train(cfg).best_val_loss
    evaluate.main([cfg.out_dir, "--dtype=float32"])
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
    (comparison,) = compare("a", "b", *measures)
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
    assert [stream.document.tolist() for stream in streams] == [[0, 0, 0, 1, 1, 1, 1], [3, 3, 4, 4, 4, 4, 5]]
    loss = measure_text(model_of(257, std=0), ByteTokenizer(), runtime, "text", streams, stride=8)[0]
    assert loss.weights.sum() == 6 + 4 and loss.ratio == pytest.approx(math.log(257))


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
    (comparison,) = compare("a", "b", [measure_of(a)], [measure_of(b)])
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


def test_a_comparison_names_the_better_model_or_none():
    same, worse, noise = measure_of([2, 3, 2, 3]), measure_of([2.5, 3.6, 2.5, 3.5]), measure_of([2.5, 2.4, 2.1, 3])
    assert "a is better than b: b minus a is +0.5250" in compare("a", "b", [same], [worse])[0]["sentence"]
    assert "b is better than a: b minus a is -0.5250" in compare("a", "b", [worse], [same])[0]["sentence"]
    assert "a and b do not differ significantly" in compare("a", "b", [same], [noise])[0]["sentence"]
    high = measure_of([1, 1, 1, 0, 1, 1, 1, 1], better="higher")
    low = measure_of([0, 0, 0, 0, 0, 0, 0, 1], better="higher")
    assert "a is better than b" in compare("a", "b", [high], [low])[0]["sentence"]
    identical = compare("a", "b", [same], [same])[0]
    assert identical["p"] == 1 and identical["difference"] == 0
    # every document by the same amount
    shifted = compare("a", "b", [measure_of([1, 2, 3])], [measure_of([2, 3, 4])])[0]
    assert shifted["p"] == 0 and shifted["low"] == shifted["high"] == 1
    with pytest.raises(UserError, match="not measured on the same documents"):
        compare("a", "b", [same], [measure_of([1, 2])])


# --- tasks ------------------------------------------------------------------------------------------------------------


@pytest.mark.architecture("this test, whose reference is transformers' GPT-2: use another one, or skip it")
def test_endings_are_scored_as_one_by_one(runtime):
    """The other rows of a batch do not change a score; a context that is too long loses its beginning."""
    model, tokenizer = model_of(257), ByteTokenizer()
    theirs = transformers_model(model)
    questions = [Question("ab", [" c", " defg"], 1), Question("a much longer context", [" ending", " e"], 0)]
    scores = evaluate.score_endings(model, tokenizer, runtime, "task", questions)
    for question, ending_scores in zip(questions, scores, strict=True):
        for ending, score in zip(question.endings, ending_scores, strict=True):
            ids = tokenizer.encode(question.context + ending).astype(np.int64)[-9:]
            positions = range(len(ids) - len(ending), len(ids))
            assert score.nats == pytest.approx(sum(nats_of(theirs, ids[:i], ids[i]) for i in positions), abs=1e-3)
            likeliest = [int(theirs(torch.from_numpy(ids[:i])[None]).logits[0, -1].argmax()) for i in positions]
            assert score.greedy == (likeliest == ids[list(positions)].tolist()) and score.bytes == len(ending)


def test_the_likeliest_ending_is_greedy(runtime):
    model, tokenizer = model_of(257), ByteTokenizer()
    context = "ab"
    with torch.inference_mode():
        best = int(model(torch.tensor([list(context.encode())]))[0][0, -1, :128].argmax())
        model.lm_head.weight[128:] = 0  # only ASCII can be the likeliest
        best = int(model(torch.tensor([list(context.encode())]))[0][0, -1].argmax())
    question = Question(context, [chr(best), chr(best ^ 1)], 0)
    (scores,) = evaluate.score_endings(model, tokenizer, runtime, "task", [question])
    assert [score.greedy for score in scores] == [True, False]


def replace_fetch(monkeypatch: pytest.MonkeyPatch, folder: Path, files: dict[str, bytes]) -> None:
    """Let `fetch` return only these files, given by the first four digits of their sha256."""

    def fetch(name: str, digest: str, sources: list) -> Path:
        if digest[:4] not in files:
            raise UserError(f"{name} could not be fetched")
        (folder / digest).write_bytes(files[digest[:4]])
        return folder / digest

    monkeypatch.setattr(evaluate, "fetch", fetch)


def test_lambada(monkeypatch, tmp_path, runtime, capsys):
    questions = [Question("he said hello to the", [" world"], 0), Question("the\nnew", [" hello"], 0)]
    openai_file = "\n".join(json.dumps({"text": q.context + q.endings[0]}) for q in questions).encode()
    requests = [{"request": {"context": q.context, "continuation": q.endings[0]}, "idx": 0} for q in questions]
    olmo_file = gzip.compress("\n".join(map(json.dumps, requests)).encode())
    replace_fetch(monkeypatch, tmp_path, {"4aa8": openai_file})
    assert evaluate.lambada_questions() == questions
    replace_fetch(monkeypatch, tmp_path, {"b990": olmo_file})
    assert evaluate.lambada_questions() == questions
    assert "with white space collapsed" in capsys.readouterr().err
    tokenizer = ByteTokenizer()
    accuracy, loss, perplexity = evaluate.lambada(model_of(257, std=0), tokenizer, runtime, None)
    assert accuracy.ratio == 0 and accuracy.better == "higher"
    assert loss.values == pytest.approx(np.log(257) * np.array([6, 6]))  # six bytes each
    assert perplexity.row()["value"] == pytest.approx(257**6)
    assert len(evaluate.lambada(model_of(257, std=0), tokenizer, runtime, 1)[0].values) == 1


def test_hellaswag(monkeypatch, tmp_path, runtime):
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
    questions = evaluate.hellaswag_questions()
    assert questions[0].context == "Baking: A cook kneads. He. then" and questions[0].correct == 1
    assert questions[0].endings == [" sleeps.", " bakes it well.", " x.", " y."]
    scores = [[Score(5, False, 10), Score(6, False, 30), Score(4, False, 3), Score(9, False, 3)]] * 2
    monkeypatch.setattr(evaluate, "score_endings", lambda *_: scores)
    acc, normed = evaluate.hellaswag(model_of(257), ByteTokenizer(), runtime, None)
    assert acc.values.tolist() == [0, 1]  # the third ending has the highest total likelihood
    assert normed.values.tolist() == [1, 0]  # the second has the highest likelihood per byte


@pytest.mark.network
def test_the_tasks_are_downloaded():
    assert len(evaluate.lambada_questions()) == 5153 and len(evaluate.hellaswag_questions()) == 10042
    assert {question.correct for question in evaluate.hellaswag_questions()} == {0, 1, 2, 3}


# --- command ----------------------------------------------------------------------------------------------------------


def test_the_command(tiny, tmp_path, capsys):
    cfg = tiny(max_iters=12, eval_interval=6)
    train(cfg)
    text = tmp_path / "new.txt"
    text.write_text("the king shall love\n\n" * 30 + "his crown and swear", encoding="utf-8")
    capsys.readouterr()
    words = [f"--text={text}", "--split_on=\\n\\n", "--stride=4", f"--json={tmp_path / 'results.json'}"]
    evaluate.main(["compare", cfg.out_dir, cfg.out_dir, *words])
    out = capsys.readouterr().out
    assert "31 documents |" in out and "do not differ significantly" in out
    output = json.loads((tmp_path / "results.json").read_text())
    assert len(output["results"]) == 6 and output["comparisons"][0]["p"] == 1
    assert output["results"][0]["low"] < output["results"][0]["value"] < output["results"][0]["high"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--stride=33"], r"--stride=33: it must not exceed the context of 32 tokens"),
        (["--stride=0"], r"--stride=0: it must be at least 1"),
        (["--block_size=64"], r"--block_size=64 is more than the model's 32 positions"),
        (["--tasks", "lambada", "--text=a.txt"], "give only one of them"),
        (["--text=none.txt"], r"none\.txt"),
        (["--text={short}"], "fewer than 2 tokens"),
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
        evaluate.main([cfg.out_dir, *(word.format(short=short, strange=strange, folder=tmp_path) for word in words)])


@pytest.mark.architecture("folio/convert.py, which reads GPT-2's weights only")
def test_a_model_without_a_recorded_data_set_needs_a_text(tmp_path):
    from test_export import checkpoint_of

    from folio.export_formats import write_hugging_face

    write_hugging_face(checkpoint_of(bpe(), True), tmp_path / "hf")
    with pytest.raises(UserError, match="give a --dataset or a --text"):
        evaluate.main([str(tmp_path / "hf")])
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    evaluate.main([str(tmp_path / "hf"), f"--text={tmp_path / 'text.txt'}"])
