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
from tools.evaluate import Measure, Question, Score, compare, divided, on_text, stream_of, token_losses
from train import train


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return resolve_runtime("cpu", "float32", False)


def model_of(vocab_size: int, std: float = 0.3, block_size: int = 8) -> GPT:
    """Random weights, far enough apart that the model has opinions; std=0: all tokens are equally likely."""
    torch.manual_seed(3)
    model = GPT(GPTConfig(block_size=block_size, vocab_size=vocab_size, n_layer=2, n_head=2, n_embd=16))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=std)
    return model.eval()


@torch.inference_mode()
def nats_of(theirs: torch.nn.Module, before: np.ndarray, token: int) -> float:
    """What transformers says of a token behind others."""
    return -float(theirs(torch.from_numpy(before)[None]).logits[0, -1].log_softmax(-1)[token])


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [8, 5, 3, 1])
@pytest.mark.parametrize("n", [2, 8, 9, 10, 31])
def test_losses_are_those_of_transformers(n, stride, runtime, seed):
    """Each token is predicted in the first context that holds it."""
    model = model_of(20)
    theirs = transformers_model(model)
    ids = np.random.default_rng(seed).integers(20, size=n)
    found = token_losses(model, ids, runtime, stride)
    for j in range(1, n):
        begin = next(b for b in range(0, n, stride) if b + 8 >= j)
        assert found[j - 1] == pytest.approx(nats_of(theirs, ids[begin:j], ids[j]), abs=1e-4)


def test_it_is_the_loss_that_training_prints(tiny, capsys):
    cfg = tiny(max_iters=12, eval_interval=12, eval_iters=None)
    loss = train(cfg)
    evaluate.main([cfg.out_dir, "--dtype=float32"])
    row = next(line for line in capsys.readouterr().out.splitlines() if "loss, nats a token" in line)
    assert f"| verse, validation | loss, nats a token | {loss:.4f} |" in row and "blocks of 1,024 bytes" in row


def test_bits_are_of_the_bytes_that_were_predicted(runtime, tmp_path):
    """All 257 tokens are equally likely; each document ends with a token that is no byte."""
    documents = ["One.", "Two documents.", "Größe."] * 10
    (tmp_path / "text.txt").write_text("\n\n".join(documents), encoding="utf-8")
    corpus = Corpus(find_sources([str(tmp_path / "text.txt")]), split_on="\n\n")
    made = ByteTokenizer()
    measures = on_text(model_of(257, std=0), made, runtime, "text", [stream_of(corpus, made)], stride=8)
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
    for made in (CharTokenizer.of("\n".join(words)), bpe()):
        measures.append(on_text(model_of(made.vocab_size), made, runtime, "text", [stream_of(corpus, made)], 8))
    assert [len(measure.values) for one in measures for measure in one] == [60] * 6
    (comparison,) = compare("a", "b", *measures)
    assert comparison["measure"] == "bits per byte"  # a token is another one for each
    assert measures[0][2].weights.sum() == len("\n".join(words))  # the separator stands for the end that it lacks


def test_a_document_in_parts_is_one_document(tmp_path):
    """A text larger than a block of the corpus once had an end of text in its middle."""
    whole = "hello world\n" * 120_000  # 1.4 MB
    (tmp_path / "text.txt").write_text(whole, encoding="utf-8")
    corpus, made = Corpus(find_sources([str(tmp_path / "text.txt")])), ByteTokenizer()
    assert len(list(corpus.blocks())) > 1
    stream = stream_of(corpus, made)
    assert made.decode(stream.ids) == whole
    assert (stream.ids == made.eot).nonzero()[0].tolist() == [len(whole)] and not stream.document.any()


def test_documents_of_shards_end_at_the_end_of_text(runtime):
    eot, mask = 256, np.array([0, 1, 1, 0, 1, 0, 1], np.uint8)
    shards = [Shard(np.array([1, 2, eot, 3, 4, 5, eot])), Shard(np.array([6, eot, 7, 8, 9, eot, 5]), mask)]
    streams = divided(shards, ByteTokenizer())
    assert [stream.document.tolist() for stream in streams] == [[0, 0, 0, 1, 1, 1, 1], [3, 3, 4, 4, 4, 4, 5]]
    loss = on_text(model_of(257, std=0), ByteTokenizer(), runtime, "text", streams, stride=8)[0]
    assert loss.weights.sum() == 6 + 4 and loss.ratio == pytest.approx(math.log(257))


# --- intervals --------------------------------------------------------------------------------------------------------


def of(values: list[float], weights: list[float] | None = None, **settings) -> Measure:
    made = np.array(values, dtype=float), np.array(weights or [1.0] * len(values), dtype=float)
    return Measure("text", "bits per byte", "documents", *made, **settings)


def test_an_interval_by_hand():
    """Mean 4, standard deviation 2, standard error 2 / sqrt(3); Student's t of two degrees of freedom is 4.3027."""
    row = of([2, 4, 6]).row()
    assert (row["value"], row["low"], row["high"]) == pytest.approx((4, 4 - 4.9683, 4 + 4.9683), abs=1e-4)
    row = of([2, 4, 6], show=math.exp).row()
    assert row["low"] == pytest.approx(math.exp(4 - 4.9683), abs=1e-4)
    assert of([2]).row()["low"] is None and "unknown" in evaluate.table([{"run": "a", **of([2]).row()}])


def test_with_equal_weights_it_is_the_usual_paired_test(seed):
    rng = np.random.default_rng(seed)
    a = rng.normal(3, 1, 50)
    b = a + rng.normal(0.1, 0.3, 50)
    (found,) = compare("a", "b", [of(a)], [of(b)])
    usual = stats.ttest_rel(b, a)
    assert found["p"] == pytest.approx(usual.pvalue)
    assert (found["low"], found["high"]) == pytest.approx(tuple(usual.confidence_interval()))


def test_intervals_hold_what_they_should(seed):
    """Documents of very different lengths, each with a mean of its own; some 95 % of the intervals hold the truth."""
    rng = np.random.default_rng(seed)
    held = 0
    for _ in range(400):
        weights = rng.integers(1, 60, 100).astype(float)
        row = of(list(weights * rng.normal(2.0, 0.5, 100)), list(weights)).row()
        held += row["low"] < 2.0 < row["high"]
    assert 360 <= held <= 396


def test_a_comparison_says_which_is_better_or_that_it_cannot_tell():
    same, worse, noise = of([2, 3, 2, 3]), of([2.5, 3.6, 2.5, 3.5]), of([2.5, 2.4, 2.1, 3])
    assert "a is better than b: b less a is +0.5250" in compare("a", "b", [same], [worse])[0]["sentence"]
    assert "b is better than a: b less a is -0.5250" in compare("a", "b", [worse], [same])[0]["sentence"]
    assert "a and b cannot be told apart" in compare("a", "b", [same], [noise])[0]["sentence"]
    higher = of([1, 1, 1, 0, 1, 1, 1, 1], better="higher"), of([0, 0, 0, 0, 0, 0, 0, 1], better="higher")
    assert "a is better than b" in compare("a", "b", [higher[0]], [higher[1]])[0]["sentence"]
    identical = compare("a", "b", [same], [same])[0]
    assert identical["p"] == 1 and identical["difference"] == 0
    shifted = compare("a", "b", [of([1, 2, 3])], [of([2, 3, 4])])[0]  # by the same everywhere
    assert shifted["p"] == 0 and shifted["low"] == shifted["high"] == 1
    with pytest.raises(UserError, match="not measured on the same documents"):
        compare("a", "b", [same], [of([1, 2])])


# --- tasks ------------------------------------------------------------------------------------------------------------


def test_endings_are_scored_as_one_by_one(runtime):
    """Whatever stands beside them in a batch, and where the context is too long."""
    model, made = model_of(257), ByteTokenizer()
    theirs = transformers_model(model)
    questions = [Question("ab", [" c", " defg"], 1), Question("a much longer context", [" ending", " e"], 0)]
    scores = evaluate.answers(model, made, runtime, "task", questions)
    for question, found in zip(questions, scores, strict=True):
        for ending, score in zip(question.endings, found, strict=True):
            ids = made.encode(question.context + ending).astype(np.int64)[-9:]
            places = range(len(ids) - len(ending), len(ids))
            assert score.nats == pytest.approx(sum(nats_of(theirs, ids[:i], ids[i]) for i in places), abs=1e-3)
            likeliest = [int(theirs(torch.from_numpy(ids[:i])[None]).logits[0, -1].argmax()) for i in places]
            assert score.greedy == (likeliest == ids[list(places)].tolist()) and score.bytes == len(ending)


def test_what_is_the_likeliest_is_greedy(runtime):
    model, made = model_of(257), ByteTokenizer()
    context = "ab"
    with torch.inference_mode():
        best = int(model(torch.tensor([list(context.encode())]))[0][0, -1, :128].argmax())
        model.lm_head.weight[128:] = 0  # nothing but ASCII
        best = int(model(torch.tensor([list(context.encode())]))[0][0, -1].argmax())
    (found,) = evaluate.answers(model, made, runtime, "task", [Question(context, [chr(best), chr(best ^ 1)], 0)])
    assert [score.greedy for score in found] == [True, False]


def local(monkeypatch: pytest.MonkeyPatch, folder: Path, files: dict[str, bytes]) -> None:
    """Have `fetch` find these files, by the beginnings of their sha256, and no others."""

    def fetch(name: str, digest: str, sources: list) -> Path:
        if digest[:4] not in files:
            raise UserError(f"{name} could not be fetched")
        (folder / digest).write_bytes(files[digest[:4]])
        return folder / digest

    monkeypatch.setattr(evaluate, "fetch", fetch)


def test_lambada(monkeypatch, tmp_path, runtime, capsys):
    wanted = [Question("he said hello to the", [" world"], 0), Question("the\nnew", [" hello"], 0)]
    whole = "\n".join(json.dumps({"text": q.context + q.endings[0]}) for q in wanted).encode()
    asked = [{"request": {"context": q.context, "continuation": q.endings[0]}, "idx": 0} for q in wanted]
    packed = gzip.compress("\n".join(map(json.dumps, asked)).encode())
    local(monkeypatch, tmp_path, {"4aa8": whole})
    assert evaluate.lambada_questions() == wanted
    local(monkeypatch, tmp_path, {"b990": packed})
    assert evaluate.lambada_questions() == wanted
    assert "with white space collapsed" in capsys.readouterr().err
    made = ByteTokenizer()
    accuracy, loss, perplexity = evaluate.lambada(model_of(257, std=0), made, runtime, None)
    assert accuracy.ratio == 0 and accuracy.better == "higher"
    assert loss.values == pytest.approx(np.log(257) * np.array([6, 6]))  # of six bytes each
    assert perplexity.row()["value"] == pytest.approx(257**6)
    assert len(evaluate.lambada(model_of(257, std=0), made, runtime, 1)[0].values) == 1


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
    local(monkeypatch, tmp_path, {"5d21": sink.getvalue().to_pybytes()})
    questions = evaluate.hellaswag_questions()
    assert questions[0].context == "Baking: A cook kneads. He. then" and questions[0].right == 1
    assert questions[0].endings == [" sleeps.", " bakes it well.", " x.", " y."]
    scores = [[Score(5, False, 10), Score(6, False, 30), Score(4, False, 3), Score(9, False, 3)]] * 2
    monkeypatch.setattr(evaluate, "answers", lambda *_: scores)
    acc, normed = evaluate.hellaswag(model_of(257), ByteTokenizer(), runtime, None)
    assert acc.values.tolist() == [0, 1]  # the third is the likeliest in all
    assert normed.values.tolist() == [1, 0]  # the second is so a byte


@pytest.mark.network
def test_the_tasks_are_fetched():
    assert len(evaluate.lambada_questions()) == 5153 and len(evaluate.hellaswag_questions()) == 10042
    right = [question.right for question in evaluate.hellaswag_questions()]
    assert sorted(set(right)) == [0, 1, 2, 3]


# --- command ----------------------------------------------------------------------------------------------------------


def test_the_command(tiny, tmp_path, capsys):
    cfg = tiny(max_iters=12, eval_interval=6)
    train(cfg)
    text = tmp_path / "new.txt"
    text.write_text("the king shall love\n\n" * 30 + "his crown and swear", encoding="utf-8")
    capsys.readouterr()
    words = [f"--text={text}", "--split_on=\\n\\n", "--stride=4", f"--json={tmp_path / 'found.json'}"]
    evaluate.main(["compare", cfg.out_dir, cfg.out_dir, *words])
    out = capsys.readouterr().out
    assert "31 documents |" in out and "cannot be told apart" in out
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["results"]) == 6 and found["comparisons"][0]["p"] == 1
    assert found["results"][0]["low"] < found["results"][0]["value"] < found["results"][0]["high"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--stride=33"], r"--stride=33: it must not be longer than the context, 32"),
        (["--stride=0"], r"--stride=0: it must be at least 1"),
        (["--block_size=64"], r"--block_size=64 is more than the 32 positions"),
        (["--tasks", "lambada", "--text=a.txt"], "give only one of them"),
        (["--text=none.txt"], r"none\.txt"),
        (["--text={short}"], "fewer than 2 tokens"),
        (["--text={strange}"], r"the character 'é'"),
        (["--dataset=other", "--data_dir={folder}"], "was made with another tokenizer"),
    ],
)
def test_bad_input_is_told(words, message, tiny, tmp_path, data_dir):
    cfg = tiny(max_iters=2, warmup_iters=1)
    train(cfg)
    short, strange = tmp_path / "short.txt", tmp_path / "strange.txt"
    short.write_text("a", encoding="utf-8")
    strange.write_text("the é", encoding="utf-8")
    inputs = (str(data_dir / "verse.txt"),)
    prepare_text.main(prepare_text.TextConfig(inputs=inputs, name="other", tokenizer="byte", data_dir=str(tmp_path)))
    with pytest.raises(UserError, match=message):
        evaluate.main([cfg.out_dir, *(word.format(short=short, strange=strange, folder=tmp_path) for word in words)])


def test_a_model_of_unknown_data_asks_for_a_text(tmp_path):
    from test_export import checkpoint_of

    from folio.export_formats import write_hugging_face

    write_hugging_face(checkpoint_of(bpe(), True), tmp_path / "hf")
    with pytest.raises(UserError, match="name a --dataset or a --text"):
        evaluate.main([str(tmp_path / "hf")])
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    evaluate.main([str(tmp_path / "hf"), f"--text={tmp_path / 'text.txt'}"])
