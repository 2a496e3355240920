import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from folio import UserError
from folio.checkpoints.build_model import model_from_tensors
from folio.data.shards import Shard
from folio.data.tokenizer import CharTokenizer
from folio.web import html_export
from folio.web.html_file import pack_weights, unpack_weights
from folio.web.questions import TraceProvider
from folio.web.viewed_model import ViewedModel
from tests.support.decoding import random_model
from tests.support.numpy_gpt import FLOAT32_ERROR, NumpyGPT
from tests.support.questions import read
from tests.support.viewed_models import TEXT, TOKENIZERS, build_model, save_random_run, save_run

pytestmark = pytest.mark.architecture("tests/support/numpy_gpt.py, which computes what model.py does")


def test_losses_of_the_first_tokens(seed):
    """With a mask and a new context every block_size tokens."""
    model, random = random_model(seed), np.random.default_rng(seed)
    stored = model_from_tensors(
        model.config, unpack_weights(pack_weights(dict(model.named_parameters()), "int8"))
    ).eval()
    ids, mask = random.integers(0, 20, 50), random.integers(0, 2, 50)
    tokenizer = CharTokenizer("abcdefghijklmnopqrst")
    dataset = SimpleNamespace(folder=Path("some/data"), load_tokenizer=lambda: tokenizer, val=[Shard(ids, mask)])
    measured = html_export.measure_losses(dataset, model.train(), stored.train(), 30, 10)  # dropout must be off
    for name, gpt in (("before", model), ("after", stored)):
        losses = []
        for start in range(0, 29, 8):
            window = ids[start : min(start + 9, 30)]
            run = NumpyGPT(gpt).run(window[:-1].tolist())
            probabilities, logits = run.probabilities, run.logits
            window_losses = -np.log(probabilities[range(len(window) - 1), window[1:]])
            losses += [x for x, counts in zip(window_losses, mask[start + 1 : start + 9], strict=False) if counts]
        error = FLOAT32_ERROR * np.abs(logits).max()  # of a logit and a log-sum-exp
        assert measured[name] == pytest.approx(np.mean(losses), abs=2 * error)
    with pytest.raises(UserError, match=r"^some/data has no tokens for validation"):
        dataset.val = [Shard(ids, 0 * mask)]
        html_export.measure_losses(dataset, model, stored)
    assert measured["tokens"] == mask[1:30].sum() and measured["of"] == "data"
    line = html_export.describe_losses({"of": "x", "tokens": 1234, "before": 1.25, "after": 1.2512}, "int8")
    assert line == "loss on 1,234 validation tokens of x: 1.2500 nats per token, 1.2512 as stored in int8 (+0.0012)"


HEADER = {
    "storage": {"dtype": "int8", "bytes": 3_000_000},
    "index": {"end": 5_500_000},
    "losses": [{"of": "x", "tokens": 1234, "before": 1.25, "after": 1.2512}],
    "languages": {"pairs": [["en", "de"], ["de", "en"]]},
    "traced": False,
}


def test_describe_file(tmp_path):
    (tmp_path / "model.html").write_bytes(bytes(4_200_000))
    assert list(html_export.describe_file(tmp_path / "model.html", HEADER)) == [
        f"{tmp_path / 'model.html'}: 4.2 MB, 3.0 MB of weights in int8",
        "the index of the training data takes 2.5 MB",
        "loss on 1,234 validation tokens of x: 1.2500 nats per token, 1.2512 as stored in int8 (+0.0012)",
        "it translates between de, en",
        "the model has more than 20,000,000 parameters, so the file only generates",
        f"open it in a browser: {(tmp_path / 'model.html').as_uri()}",
    ]
    plain = HEADER | {"index": None, "losses": [], "languages": None, "traced": True}
    assert len(list(html_export.describe_file(tmp_path / "model.html", plain))) == 2


def test_an_initial_text_that_is_too_long_is_refused(tmp_path):
    tokenizer = CharTokenizer("ab")
    save_random_run(tmp_path / "run", tokenizer, 3, block_size=8, n_layer=1, n_head=1, n_embd=4)
    viewed = ViewedModel(str(tmp_path / "run"), "best", torch.device("cpu"))
    assert html_export.first_text(viewed, "ab", None) == "ab"
    with pytest.raises(UserError, match=r"text: .* the limit is 100,000$"):
        html_export.first_text(viewed, "a" * 100_001, None)


def test_the_training_is_recorded(tmp_path):
    models = {step: build_model("char", seed=step) for step in range(0, 1000, 50)}
    run = save_run(tmp_path / "run", {950: models.pop(950)}, TOKENIZERS["char"], models)
    viewed = ViewedModel(run, "best", torch.device("cpu"))
    record = html_export.record_training(viewed, 10 * TEXT)
    assert record["ids"] == TOKENIZERS["char"].encode(10 * TEXT)[:48].tolist()  # the context
    assert record["steps"][::7] == [0, 950] and len(record["steps"]) == 8
    for step, losses, best in zip(record["steps"], record["losses"], record["best"], strict=True):
        reference = NumpyGPT(viewed.model_at(step)).run(record["ids"])
        error = 2 * FLOAT32_ERROR * np.abs(reference.logits).max()  # of a logit and a log-sum-exp
        assert losses == pytest.approx(reference.losses.tolist(), rel=0.0005, abs=error)  # of 4 digits
        assert best == reference.probabilities[:-1].argmax(-1).tolist()
    token, first = record["token"], record["first"]
    assert (first, token) == (35, 46)  # "question.To be", because the comma after it is the last token
    provider = TraceProvider([viewed], "")
    for index, step in enumerate(record["steps"]):
        question = {"ids": record["ids"], "step": step, "token": token}
        _, machine = read(provider.answer({"kind": "machine", "first": first, **question}).to_bytes())
        for name in ("weights", "earlier"):
            np.testing.assert_allclose(record[name][index], machine[name], rtol=0, atol=0.51e-4)
        _, states = read(provider.answer({"kind": "token", **question}).to_bytes())
        assert record["guess_ids"][index] == states["lens_ids"][-1, :3].tolist()
        assert record["guess_probabilities"][index] == pytest.approx(states["lens_probabilities"][-1, :3], rel=0.0005)
    assert html_export.record_training(viewed, "a") is None
    models[0].transformer.wpe.weight[47] = math.nan  # of the last token, which has no loss
    diverged = save_run(tmp_path / "diverged", {950: viewed.model}, TOKENIZERS["char"], models)
    assert html_export.record_training(ViewedModel(diverged, "best", viewed.device), 10 * TEXT) is None
    one_checkpoint = save_run(tmp_path / "one", {100: viewed.model}, TOKENIZERS["char"], {})
    assert html_export.record_training(ViewedModel(one_checkpoint, "best", viewed.device), TEXT) is None


def test_the_record_of_the_training_is_small(tmp_path):
    """A model with GPT-2's vocabulary and 6 layers of 8 heads, a long text, and long losses."""
    model = random_model(1, vocab_size=50_000, block_size=300, n_layer=6, n_head=8, n_embd=16)
    ids = torch.arange(50_000 - html_export.RECORDED_TOKENS, 50_000)
    record = html_export.record_step(model, ids, len(ids) - 2, len(ids) - 1 - html_export.RECORDED_KEYS)
    assert np.shape(record["weights"]) == (6, 8, html_export.RECORDED_KEYS)
    assert html_export.RECORDED_STEPS * len(json.dumps(record, separators=(",", ":"))) <= 100_000
