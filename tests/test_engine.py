"""The engine of a model in one HTML file, against model.py and folio.generate."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from decoding import random_model
from engine import Engine, engine_in_chromium, in_browser

from model import POSITIONS

STORAGES = ("float32", "float16", "int8")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with engine_in_chromium("gpt.js") as engine:
        yield engine


def logits_of(model, ids: list[int]) -> np.ndarray:
    """(T, V)."""
    ids = torch.tensor([ids])
    return model(ids, ids)[0][0].detach().numpy()


@in_browser
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("simd", [True, False], ids=["wasm", "plain"])
def test_logits_are_those_of_model_py(simd, position, engine, seed):
    """After a prefill of one length, and after each step."""
    settings = itertools.cycle([dict(activation="gelu", bias=True), dict(activation="gelu_new", bias=False)])
    for storage, n_embd in itertools.product(STORAGES, (12, 32)):
        model = random_model(seed, block_size=40, n_embd=n_embd, position=position, **next(settings))
        stored = engine.load(model, storage, simd)
        ids = torch.randint(20, (40,)).tolist()
        expected = logits_of(stored, ids)
        actual = engine("(gpt.first = gpt.newCache(), finish(gpt.prefill(gpt.first, ids)))", ids=ids[:21])
        for t in range(20, 40):
            assert np.abs(actual - expected[t]).max() <= 1e-4
            if t < 39:
                actual = engine("finish(gpt.step([gpt.first], [id]))", id=ids[t + 1])


@in_browser
def test_gelu_is_exact_to_float32(engine):
    x = np.linspace(-14, 14, 20001)
    ours = engine("Float64Array.from(x, ACTIVATIONS.gelu)", x=x)
    expected = [0.5 * value * math.erfc(-value / math.sqrt(2)) for value in x]
    np.testing.assert_allclose(ours, expected, rtol=2e-8, atol=0)
    ours = engine("Float64Array.from(x, ACTIVATIONS.gelu_new)", x=x)
    expected = torch.nn.functional.gelu(torch.tensor(x), approximate="tanh")
    np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-14)


@in_browser
def test_its_parts_are_those_of_a_forward_pass(engine, seed):
    """For more tokens than are computed together, and a vocabulary smaller than the MLP."""
    for position in ("learned", "sinusoidal"):
        model = random_model(seed, block_size=40, position=position)
        engine.load(model, simd=False)
        x, ids = torch.randn(37, 16), torch.randint(20, (37,))
        transformer, block = model.transformer, model.transformer.h[1]
        with torch.no_grad():
            expected = {
                "gpt.linear(x, 'transformer.h.1.mlp.c_fc', 37)": block.mlp.c_fc(x),
                "gpt.linear(x, 'lm_head', 37)": model.lm_head(x),
                "gpt.layerNorm(x, 'transformer.ln_f', 37)": transformer.ln_f(x),
                "gpt.activation(x)": block.mlp.activation(x),
                "gpt.embed(ids, positions)": model.embed(ids, torch.arange(37).flip(0)),
                "gpt.param('transformer.h.0.ln_1.bias').data": transformer.h[0].ln_1.bias,
            }
        for expression, value in expected.items():
            ours = engine(expression, x=x, ids=ids.tolist(), positions=list(range(36, -1, -1)))
            np.testing.assert_allclose(ours, value.detach().flatten(), rtol=1e-5, atol=1e-5)
