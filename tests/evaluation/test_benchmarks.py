"""LAMBADA, HellaSwag and questions of the same forms; scores of endings against transformers, one ending at a time."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pytest
import torch

from folio import UserError
from folio.data.tokenizer import ByteTokenizer
from folio.evaluation import benchmarks
from folio.evaluation.benchmarks import MultipleChoice, Score, read_questions, score_endings
from folio.machine.runtime import Runtime, resolve_runtime
from lab.bench.baselines import transformers_model
from tests.support.evaluations import loss_error, model_of, nats_of, replace_fetch


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return resolve_runtime("cpu", "float32", False)


@pytest.mark.needs("transformers")
@pytest.mark.architecture("this test, whose reference is transformers' GPT-2: use another one, or skip it")
def test_batched_scores_match_transformers_one_ending_at_a_time(runtime):
    """Other rows of the batch do not change a score; a context that is too long is truncated at its start."""
    model, tokenizer = model_of(257), ByteTokenizer()
    theirs = transformers_model(model)
    questions = [MultipleChoice("ab", [" c", " defg"], 1)]
    questions += [MultipleChoice("a much longer context", [" ending", " e"], 0)]
    scores = score_endings(model, tokenizer, runtime, "task", questions)
    for question, ending_scores in zip(questions, scores, strict=True):
        for ending, score in zip(question.endings, ending_scores, strict=True):
            ids = tokenizer.encode(question.context + ending).astype(np.int64)[-9:]
            positions = range(len(ids) - len(ending), len(ids))
            nats = sum(nats_of(theirs, ids[:i], ids[i]) for i in positions)
            assert score.nats == pytest.approx(nats, abs=len(positions) * loss_error(model.config, 8))
            likeliest = [int(theirs(torch.from_numpy(ids[:i])[None]).logits[0, -1].argmax()) for i in positions]
            assert score.greedy == (likeliest == ids[list(positions)].tolist())


def test_the_likeliest_ending_is_greedy(runtime):
    model, tokenizer = model_of(257), ByteTokenizer()
    with torch.inference_mode():
        model.lm_head.weight[128:] = 0  # only ASCII can be the likeliest
        best = int(model(torch.tensor([[*b"ab"]]))[0][0, -1].argmax())
    question = MultipleChoice("ab", [chr(best), chr(best ^ 1)], 0)
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
    accuracy, loss, perplexity = benchmarks.lambada("lambada", questions, scores)
    assert accuracy.ratio == 0 and accuracy.better == "higher"
    assert loss.values == pytest.approx(np.log(257) * np.array([6, 6]))  # six bytes each
    assert perplexity.row()["value"] == pytest.approx(257**6)


def test_hellaswag(monkeypatch, tmp_path):
    row = {"activity_label": "Baking", "ctx_a": "A cook [header] kneads.", "ctx_b": "he [title] then"}
    row |= {"endings": ["sleeps.", "bakes  it [step] well.", "x.", "y."], "label": "1"}
    sink = pa.BufferOutputStream()
    rows = pa.Table.from_pylist([row, {**row, "label": "2"}])
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    replace_fetch(monkeypatch, tmp_path, {"5d21": sink.getvalue().to_pybytes()})
    questions = benchmarks.hellaswag_questions()
    assert questions[0].context == "Baking: A cook kneads. He. then" and questions[0].correct == 1
    assert questions[0].endings == [" sleeps.", " bakes it well.", " x.", " y."]
    scores = [[Score(5, False), Score(6, False), Score(4, False), Score(9, False)]] * 2
    acc, normed = benchmarks.hellaswag("hellaswag", questions, scores)
    assert acc.values.tolist() == [0, 1]  # the third ending has the highest total likelihood
    assert normed.values.tolist() == [1, 0]  # the second has the highest likelihood per byte


# --- files ------------------------------------------------------------------------------------------------------------


def test_passages_are_read_from_a_file(tmp_path):
    """Line breaks in a passage are part of it; white space after the last word is not."""
    path = tmp_path / "own.jsonl"
    path.write_text('{"text": "The king\\nlost his crown", "by": 1}\n\n{"text": "é e \\n"}\n', encoding="utf-8")
    expected = [MultipleChoice("The king\nlost his", [" crown"], 0), MultipleChoice("é", [" e"], 0)]
    assert read_questions("lambada", str(path)) == expected


def test_scenes_are_read_from_a_file(tmp_path):
    """Scenes may have different numbers of endings; the original fields take precedence, as in the download."""
    original = {"activity_label": "Baking", "ctx_a": "A cook [header] kneads.", "ctx_b": "he", "ctx": "other"}
    rows = [
        {"ctx": "The king", "endings": ["sleeps [step] now.", "rides"], "label": 1},
        {**original, "endings": ["a", "b", "c"], "label": "2"},
        {"activity_label": "Baking", "ctx": "A cook", "endings": ["a", "b", "c", "d", "e"], "label": 0},
    ]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    questions = read_questions("hellaswag", str(tmp_path / "own.jsonl"))
    assert questions == [
        MultipleChoice("The king", [" sleeps now.", " rides"], 1),
        MultipleChoice("Baking: A cook kneads. He", [" a", " b", " c"], 2),
        MultipleChoice("Baking: A cook", [" a", " b", " c", " d", " e"], 0),
    ]
    scores = [[Score(nats, False) for nats in costs] for costs in ([12, 7], [3, 2, 1], [3, 2, 1, 5, 4])]
    acc, normed = benchmarks.hellaswag("own", questions, scores)
    assert acc.source == "own" and acc.values.tolist() == [1, 1, 0]
    assert normed.values.tolist() == [0, 1, 0]  # 12 / 12 is less than 7 / 6


SCENE = {"ctx": "The king", "endings": ["a", "b"], "label": 0}


@pytest.mark.parametrize(
    "task, row, message",
    [
        ("lambada", {"passage": "a b"}, r'text is missing.*write \{"text"'),
        ("lambada", {"text": " word "}, "fewer than two words"),
        ("hellaswag", {**SCENE, "ctx": None}, r'ctx is missing, or not text: write \{"ctx"'),
        ("hellaswag", {**SCENE, "ctx": "[header] "}, "ctx has no text"),
        ("hellaswag", {**SCENE, "ctx_a": "The king"}, "ctx_b is missing"),
        ("hellaswag", {**SCENE, "activity_label": 3}, "activity_label is .*not text"),
        ("hellaswag", {**SCENE, "endings": "ab"}, "endings is not a list of texts"),
        ("hellaswag", {**SCENE, "endings": ["a", " "]}, "endings is not a list of texts"),
        ("hellaswag", {**SCENE, "endings": ["a"]}, "endings has 1 of the 2"),
        *(("hellaswag", {**SCENE, "label": label}, "label .*from 0 to 1") for label in (2, -1, True, "")),
        ("hellaswag", {"ctx": "a", "endings": ["a", "b"]}, "label .*from 0 to 1"),
        ("lambada", "a b", "not an object"),
    ],
)
def test_a_malformed_line_is_an_error_that_names_it(task, row, message, tmp_path):
    first = {"text": "a b", **SCENE}
    (tmp_path / "own.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps(row)}\n", encoding="utf-8")
    with pytest.raises(UserError, match=rf"own\.jsonl:2: .*{message}") as error:
        read_questions(task, str(tmp_path / "own.jsonl"))
    assert "\n" not in str(error.value)


def test_a_file_without_questions_is_an_error(tmp_path):
    path = tmp_path / "own.jsonl"
    with pytest.raises(UserError, match="own"):
        read_questions("lambada", str(path))
    for content, message in (("\n", "has no questions"), ('{"text"', r":1: .*not JSON")):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(UserError, match=message):
            read_questions("lambada", str(path))


@pytest.mark.network
def test_the_tasks_are_downloaded():
    assert len(benchmarks.lambada_questions()) == 5153 and len(benchmarks.hellaswag_questions()) == 10042
    assert {question.correct for question in benchmarks.hellaswag_questions()} == {0, 1, 2, 3}
