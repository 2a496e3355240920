"""Measurement of one model on texts and tasks, with the settings of tools/evaluate.py and tools/compare.py."""

import json

import pytest
import torch
import torch.nn.functional as F

from folio import UserError
from folio.checkpoints import foreign
from folio.decoding.quantize import round_trip
from folio.evaluation.answers import EXACT
from folio.evaluation.measurement import MeasurementConfig, evaluate_model, load_model, name_problems, write_results
from folio.evaluation.scores import LOSS
from folio.machine import data_parallel
from tests.support.benchmark_tasks import LAST_WORDS, write_task
from tests.support.evaluations import loss_error

CPU = dict(device="cpu", dtype="float32")


def test_texts_are_measured_in_contexts_of_the_given_length(run, tmp_path):
    text = "the king shall love his crown and swear by fair"
    (tmp_path / "new.txt").write_text(text, encoding="utf-8")
    cfg = MeasurementConfig(text=str(tmp_path / "new.txt"), block_size=len(text), **CPU)
    with pytest.raises(UserError, match=r"block_size=47.*--block_size=32"):
        evaluate_model(run, cfg)
    evaluation = evaluate_model(run, cfg.replace(block_size=16))
    assert [measure.name for measure in evaluation.measures] == [LOSS, "perplexity", "bits per byte"]
    saved = foreign.load(run)
    assert saved.tokenizer.eot is None
    ids, model, total = torch.tensor(saved.tokenizer.encode(text).tolist()), saved.build().eval(), 0.0
    for begin in range(0, len(ids) - 1, 16):
        context = ids[begin : begin + 17]
        with torch.inference_mode():
            total += float(F.cross_entropy(model.logits(context[None, :-1])[0], context[1:], reduction="sum"))
    assert evaluation.measures[0].ratio == pytest.approx(total / (len(ids) - 1), abs=loss_error(model.config, 16))
    by_position = evaluate_model(run, cfg.replace(block_size=None), context=20)
    assert not by_position.measures and by_position.positions[0].counted.shape == (len(ids) // 21, 20)


def test_quantization_prints_the_change_of_the_loss(run, capsys):
    cfg = MeasurementConfig(dtype="int4", device="cpu")
    loaded = load_model(run, cfg)
    weight = loaded.unquantized.transformer.wte.weight
    assert torch.equal(loaded.model.transformer.wte.weight, round_trip(weight, "int4"))
    losses = [evaluate_model(run, MeasurementConfig(device="cpu", dtype=dtype)).measures[0].ratio
              for dtype in ("float32", "int4")]  # fmt: skip
    change = f"change the loss by {losses[1] - losses[0]:+.4f} nats from {losses[0]:.4f}\n"
    assert f"verse, validation: weights in int4 {change}" in capsys.readouterr().err


def test_workers_measure_texts_but_not_tasks(run, set_threads, monkeypatch):
    set_threads(2)
    monkeypatch.setattr(data_parallel, "MIN_ELEMENTS", 1)
    for tasks, workers in ((None, 2), ("hellaswag", 1)):
        assert load_model(run, MeasurementConfig(tasks=tasks)).runtime.workers == workers


@pytest.mark.needs("lm_eval", "sacrebleu", "rouge_score")
def test_tasks_are_measured_in_the_given_order(run, tmp_path):
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "the king", "completion": " and"}) + "\n")
    words = [{"text": "The king and his", "endings": ["love"], "gold": 0}] * 2
    task = write_task(tmp_path, "words", LAST_WORDS, rows=words)
    pairs = str(tmp_path / "pairs.jsonl")
    source = f"pairs of {pairs}"
    for tasks, sources in ((f"{task},pairs", ["words", source]), (f"pairs, {task}", [source, "words"])):
        evaluation = evaluate_model(run, MeasurementConfig(tasks=tasks, pairs=pairs, limit=1, **CPU))
        assert [*evaluation.coverage] == sources
        measured = {(measure.source, measure.name): len(measure.values) for measure in evaluation.measures}
        assert measured["words", "acc"] == measured[source, EXACT] == 1
    cfg = MeasurementConfig(answers=str(tmp_path / "answers.jsonl"), json=str(tmp_path / "results.json"))
    write_results(cfg, [evaluation], {"results": []})
    (row,) = map(json.loads, (tmp_path / "answers.jsonl").read_text().splitlines())
    assert (row["run"], row["of"], row["completion"]) == (run, source, " and") and "answer" in row
    assert json.loads((tmp_path / "results.json").read_text()) == {"results": []}


def test_a_task_among_the_runs_is_an_error():
    assert name_problems("runs", ["out", "gpt2"]) == []
    assert name_problems("runs", ["out", "pairs"])[0][1].startswith("pairs is a task")
