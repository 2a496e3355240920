"""The output and errors of tools/memorized.py."""

import json
import random
import re
import shutil
import string
from functools import partial

import numpy as np
import pytest
import torch

from folio import UserError
from folio.base.settings import load
from folio.checkpoints import foreign
from folio.checkpoints.export_formats import write_hugging_face
from folio.decoding.language_model import LanguageModel
from folio.decoding.quantize import round_trip
from folio.evaluation import memorization
from prepare import text as prepare_text
from tests.support.exports import checkpoint_of
from tests.support.tiny_tokenizers import bpe
from tools import memorized
from tools.memorized import MemorizedConfig
from train import TrainConfig, train


def run_tool(*words: str) -> None:
    memorized.main(load(MemorizedConfig, list(words)))


@pytest.fixture
def memorizer(tmp_path) -> TrainConfig:
    """Train a model on a passage of 68 characters that occurs 60 times among words of 20 random letters."""
    rng = random.Random(3)
    words = ["".join(rng.choices(string.ascii_lowercase, k=20)) for _ in range(220)]
    passage = "".join(rng.sample(string.ascii_uppercase + string.digits + string.punctuation, k=68))
    body = words[:200] + [passage] * 60
    rng.shuffle(body)
    source = tmp_path / "planted.txt"
    source.write_text("".join(body + words[200:]), encoding="utf-8")
    prepare_text.main(prepare_text.TextConfig(inputs=(str(source),), data_dir=str(tmp_path), val_fraction=0.04))
    cfg = TrainConfig(
        n_layer=2, n_head=4, n_embd=64, block_size=64, batch_size=8, max_iters=100, warmup_iters=10, dropout=0.0,
        learning_rate=1e-2, eval_interval=100, log_interval=100, dataset="planted", data_dir=str(tmp_path),
        out_dir=str(tmp_path / "out"), dtype="float32", always_save_checkpoint=True,
    )  # fmt: skip
    train(cfg)
    return cfg


def test_a_model_reproduces_a_frequent_passage(memorizer, tmp_path, capsys):
    """The passage occurs 60 times; words of random letters occur once, or never. Validation has only a few pieces."""
    capsys.readouterr()
    results = tmp_path / "results.json"
    words = ["--samples=40", "--max_new_tokens=128", "--span=40", "--checkpoint=last", f"--json={results}"]
    run_tool(memorizer.out_dir, *words)
    out = capsys.readouterr().out
    (facts,) = json.loads(results.read_text())["memorized"]
    rows = {tuple(row["occurrences"]): row for row in facts["passages"]}
    assert rows[10, 99]["value"] == 1 and rows[0, 0]["value"] == 0 and rows[1, 1]["high"] < rows[10, 99]["low"]
    assert rows[0, 0]["prefix"] == 32 and "first 32 tokens, because the context has 64 tokens" in out
    spans = {(row["of"], row["span"]): row for row in facts["spans"]}
    assert spans["samples", 40]["low"] > 0 and spans["held-out text", 40]["value"] == 0
    assert spans["samples", 40]["n"] == 40 and facts["complete"] and facts["datasets"] == ["planted"]
    assert len(facts["longest"]) == 10 and facts["longest"][0]["count"] >= 1
    text = (tmp_path / "planted.txt").read_text()
    for span in facts["longest"]:
        assert text[span["offset"] :].startswith(span["text"]) and len(span["text"]) == span["tokens"]
    assert out.startswith(f"{memorizer.out_dir} may copy more than text that it was not trained on: ")
    assert "| 40 or more | " in out and re.search(r"\| 10 to 99 \| [12] \| 100\.00 % \(.* to 100\.00\) \| 32\.0", out)
    run_tool(memorizer.out_dir, *words)  # the same samples
    assert capsys.readouterr().out == out


SHORT = ("--samples=3", "--max_new_tokens=20")


def test_passages_are_scored_with_quantized_weights(run, monkeypatch):
    """Passages were scored with the checkpoint's weights instead of those of --dtype=int4."""
    models = []

    def record_model(model: LanguageModel, passages: np.ndarray) -> np.ndarray:
        models.append(model.model)
        return np.zeros(len(passages), np.int64)

    monkeypatch.setattr("folio.evaluation.extraction.tokens_reproduced", record_model)
    run_tool(run, "--dtype=int4", *SHORT)
    saved = foreign.load(run).model["transformer.wte.weight"]
    assert models and torch.equal(models[0].lm_head.weight, round_trip(saved, "int4"))


def test_a_partial_search_is_reported(run, monkeypatch, capsys):
    small_index = partial(memorization.TrainingIndex, max_tokens=5000)
    monkeypatch.setattr(memorization, "TrainingIndex", small_index)
    run_tool(run, *SHORT)
    out = capsys.readouterr().out
    assert "Searched: the first 5,000 training tokens of verse; the rest was not searched" in out
    assert "unknown" not in out and "masked" not in out and "empty" not in out


def test_masked_training_tokens_are_reported(tiny, masked_dir, capsys):
    """Most samples of a model of pairs were empty, so the shares were over a few tokens, without a message."""
    train(cfg := tiny(max_iters=2, warmup_iters=1, data_dir=masked_dir))
    capsys.readouterr()
    run_tool(cfg.out_dir, *SHORT)
    assert "Some training tokens, such as prompts, were masked" in capsys.readouterr().out


def test_the_training_data_must_exist_and_that_of_a_finetuned_models_base_is_not_searched(
    tiny, tmp_path, data_dir, capsys
):
    """test_held_out.py tests data that was prepared again."""
    shutil.copytree(data_dir, tmp_path / "data")
    settings = dict(max_iters=2, warmup_iters=1, data_dir=str(tmp_path / "data"))
    train(cfg := tiny(**settings))
    train(fine := tiny(**settings, init_from=cfg.out_dir, out_dir=str(tmp_path / "fine")))
    run_tool(fine.out_dir, *SHORT)
    out = capsys.readouterr().out
    assert f"The training data of {cfg.out_dir}, from which {fine.out_dir} started, is" in out
    (tmp_path / "data").rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"/step-000002: its training data, .*verse, does not exist; set --data_dir"):
        run_tool(cfg.out_dir)


@pytest.mark.needs("transformers")
@pytest.mark.architecture("folio/checkpoints/foreign.py, which reads GPT-2's weights only")
def test_weights_without_recorded_data_are_an_error(tmp_path):
    write_hugging_face(checkpoint_of(bpe(), True), tmp_path / "hf")
    with pytest.raises(UserError, match="hf: its checkpoint does not record the training data"):
        run_tool(str(tmp_path / "hf"))


def test_bad_settings_are_an_error():
    with pytest.raises(UserError, match=r"^runs: .*python tools/memorized\.py"):
        run_tool()
    with pytest.raises(UserError, match=r"span=300.*200 tokens; set a smaller --span"):
        run_tool("out", "--span=300")
