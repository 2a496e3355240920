"""LAMBADA and HellaSwag: their questions, and scores of endings against transformers, one ending at a time."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pytest
import torch

from folio.data.tokenizer import ByteTokenizer
from folio.evaluation import benchmarks
from folio.evaluation.benchmarks import MultipleChoice, Score, score_endings
from folio.machine.runtime import Runtime, resolve_runtime
from tests.support.evaluations import model_of, nats_of, replace_fetch
from tools.bench.baselines import transformers_model


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return resolve_runtime("cpu", "float32", False)


@pytest.mark.needs("transformers")
@pytest.mark.architecture("this test, whose reference is transformers' GPT-2: use another one, or skip it")
def test_batched_scores_match_transformers_one_ending_at_a_time(runtime):
    """Other rows of the batch do not change a score; a context that is too long is truncated at its start."""
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


@pytest.mark.network
def test_the_tasks_are_downloaded():
    assert len(benchmarks.lambada_questions()) == 5153 and len(benchmarks.hellaswag_questions()) == 10042
    assert {question.correct for question in benchmarks.hellaswag_questions()} == {0, 1, 2, 3}
