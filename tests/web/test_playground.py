from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from folio import UserError
from folio.checkpoints.snapshots import write_snapshot
from folio.data.tokenizer import CharTokenizer
from folio.decoding.language_model import LanguageModel
from folio.web.questions import TraceProvider
from folio.web.viewed_model import ViewedModel
from tests.support.decoding import random_model
from tests.support.numpy_gpt import FLOAT32_ERROR, NumpyGPT, assert_largest
from tests.support.questions import entries_of, generate, texts_of
from tests.support.tiny_tokenizers import trained
from tests.support.viewed_models import save_random_run

SEED = 5  # of the weights
CHARACTERS = "\n abcdefghijklmnopqr.,é日"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs: a character model whose vocabulary is padded, with a snapshot of step 10; and a BPE model."""
    folder = tmp_path_factory.mktemp("runs")
    save_random_run(folder / "char", CharTokenizer(CHARACTERS, eot=True), SEED, vocab_size=32, block_size=16)
    write_snapshot(folder / "char", 10, dict(early_model().named_parameters()))
    save_random_run(folder / "bpe", trained(), SEED, block_size=16)
    return [folder / "char", folder / "bpe"]


def early_model() -> torch.nn.Module:
    return random_model(SEED + 1, vocab_size=32, block_size=16)


@pytest.fixture(scope="module")
def provider(runs: list[Path]) -> TraceProvider:
    return TraceProvider([ViewedModel(str(run), "best", torch.device("cpu")) for run in runs], "abc")


SETTINGS = [
    {},
    {"temperature": 0},
    {"temperature": 1.5, "top_k": None, "seed": 7},
    {"temperature": 1.2, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3, "seed": 2**63 - 1},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("model, prompt", [(0, "é"), (0, "abc. fed, " * 9), (1, "hello wörld"), (1, "日本" * 20)])
def test_samples_equal_those_of_generate(provider, runs, model, prompt, settings):
    """The same seed gives the same bytes as folio.load(...).generate, also beyond the context."""
    tokens = provider.answer({"kind": "tokens", "text": prompt, "whole": True, "model": model}).facts
    assert tokens["tokens"] == len(tokens["ids"])
    settings = {"max_new_tokens": 50, **settings}
    events = generate(provider, ids=tokens["ids"], model=model, num_samples=3, **settings)
    gpt = LanguageModel.load(runs[model])
    expected = gpt.generate(prompt, num_samples=3, **settings)
    assert [text.encode() for text in texts_of(events)] == [text.encode() for text in expected]
    alone = generate(provider, ids=tokens["ids"], model=model, num_samples=1, **settings)
    assert texts_of(alone) == [gpt.generate(prompt, **settings)] == expected[:1]


def test_snapshots_can_be_sampled(runs):
    """Also after a trace: the weights were then tensors of inference mode, which a sampler cannot use."""
    provider = TraceProvider([ViewedModel(str(runs[0]), "best", torch.device("cpu"))], "")
    provider.answer({"kind": "overview", "ids": [1], "step": 10})
    expected = LanguageModel(early_model(), CharTokenizer(CHARACTERS, eot=True)).generate("abc", num_samples=2)
    ids = LanguageModel.load(runs[0]).encode_prompt("abc").ids
    events = generate(provider, ids=ids, step=10, num_samples=2, max_new_tokens=500)
    assert texts_of(events) == expected != LanguageModel.load(runs[0]).generate("abc", num_samples=2)


@pytest.mark.parametrize("model, longest", [(0, 12), (1, 60)])
def test_ends_of_samples(provider, runs, model, longest):
    """Text held back for a stop string is sent at the end. Each sample ends once, with a reason; the others continue.

    An incomplete character at the end becomes U+FFFD, as in sample.py.
    """
    gpt, reasons = LanguageModel.load(runs[model]), set()
    settings: dict[str, Any] = {"num_samples": 8, "max_new_tokens": longest, "temperature": 2.0, "top_k": None}
    ids, texts = gpt.encode_prompt("a").ids, gpt.generate("a", **settings)
    for stop in (f"{texts[0][-2:]}☃", max(texts, key=len)[5:8], None):
        events = generate(provider, ids=ids, model=model, stop=stop, **settings)
        assert texts_of(events) == gpt.generate("a", stop=stop, **settings)
        for text, (*tokens, ending) in zip(texts, entries_of(events), strict=True):
            length = "max_new_tokens" if len(tokens) == longest else "end of text"
            assert ending[::2] == [None, "stop" if stop and stop in text else length]
            assert all(token is not None for token, *_ in tokens)
            reasons.add(ending[2])
    assert reasons == {"stop", "end of text", "max_new_tokens"}


def test_probabilities_are_the_models_own(provider):
    """Before temperature and filters."""
    viewed = provider.viewed[0]
    events = generate(provider, ids=[3, 4], num_samples=2, max_new_tokens=12, temperature=1.5, top_k=3)
    for *entries, _ in entries_of(events):
        tokens, _, shown, others = zip(*entries, strict=True)
        run = NumpyGPT(viewed.model).run([3, 4, *tokens])
        expected = run.probabilities[1:-1, : viewed.tokenizer.vocab_size]
        error = FLOAT32_ERROR * np.abs(run.logits).max()  # of a logit, which changes a probability by less
        assert len(tokens) == 12 and shown == pytest.approx(expected[range(12), tokens], rel=0, abs=error)
        expected[range(12), tokens] = 0
        assert_largest([[id for id, _ in row] for row in others], expected)
        assert [len(row) for row in others] == [10] * 12
        shown, largest = [[p for _, p in row] for row in others], -np.sort(-expected)[:, :10]
        assert np.abs(np.array(shown) - largest).max() <= error


def test_begun_ids_belong_to_the_text(provider, runs):
    """Characters and stop strings may begin in the last `begun` ids."""
    tokenizer = trained()
    kanji = [tokenizer.encoding.encode_single_token(bytes([b])) for b in "日".encode()]
    events = generate(provider, ids=[1, *kanji[:2]], begun=2, model=1, max_new_tokens=3)
    assert events[0] == {"begun": ["", ""]}  # two thirds of a character
    ids = [5, *kanji, *tokenizer.encode("hel").tolist()]
    events = generate(provider, ids=ids, begun=len(ids) - 1, model=1, max_new_tokens=3)
    assert "".join(events[0]["begun"]) == "日hel"
    gpt = LanguageModel.load(runs[0])
    text = gpt.generate("ab", max_new_tokens=20, temperature=0)
    ids = gpt.encode_prompt("ab" + text[:6]).ids
    events = generate(provider, ids=ids, begun=6, max_new_tokens=14, temperature=0)
    assert "".join(events[0]["begun"]) + texts_of(events)[0] == text
    events = generate(provider, ids=ids, begun=6, max_new_tokens=14, temperature=0, stop=text[4:8])
    assert "".join(events[0]["begun"]) + texts_of(events)[0] == text[: text.index(text[4:8])]
    assert generate(provider, ids=ids, begun=99, max_new_tokens=1)[0] == {"begun": list("ab" + text[:6])}


def test_tokens_before_nan_are_sent(tmp_path):
    """The error came before tokens already sampled if the engine was some steps ahead of the page."""
    for index, steps in ((0, 0), (3 * 16, 3)):  # the first position, and the fourth
        save_random_run(tmp_path / str(steps), CharTokenizer(CHARACTERS), SEED)
        viewed = ViewedModel(str(tmp_path / str(steps)), "best", torch.device("cpu"))
        viewed.model.transformer.wpe.weight.flatten()[index] = torch.nan
        *tokens, last = generate(TraceProvider([viewed], ""), ids=[1])[1:]
        assert len(tokens) == steps and last["error"].startswith("the model computes NaN")


@pytest.mark.parametrize("body, message", [([], "JSON object"), ({}, "ids must"), ({"ids": [1], "stop": ""}, "stop")])
def test_invalid_requests_are_refused_in_one_line(provider, body, message):
    with pytest.raises(UserError, match=rf"^[^\n]*{message}[^\n]*$"):
        provider.sampler(body)
