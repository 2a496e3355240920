"""folio/training/planning/shapes.py: the family of models, and the batch of a run."""

from dataclasses import asdict
from itertools import pairwise

import pytest
import torch

from folio.base import settings
from folio.training.planning.shapes import CHANNELS, MIN_STEPS, Shape, step_tokens
from model import GPT, SHAPES, GPTConfig
from train import TrainConfig


@pytest.mark.parametrize("channels", CHANNELS)
def test_a_shape_is_a_model_that_train_accepts(channels):
    shape = Shape.of(channels)
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=100, bias=False, **asdict(shape)))
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "wpe" not in name)
    assert shape.matrix_weights(100) == matrices
    assert shape.matrix_weights(50_257) == shape.matrix_weights(8192)  # the rest makes no model better
    for tokens in (1, 10**6, 10**9):
        cfg = TrainConfig(dataset="x", **shape.settings(tokens, step_tokens(tokens), 0.1))
        settings.check(cfg)
        assert cfg.max_iters * cfg.step_tokens <= max(tokens, cfg.step_tokens) and cfg.wsd_decay_iters <= cfg.max_iters


def test_a_larger_shape_has_more_of_everything():
    for small, large in pairwise(map(Shape.of, CHANNELS)):
        assert small.n_layer <= large.n_layer and small.block_size <= large.block_size
        assert small.matrix_weights(50) < large.matrix_weights(50)
        assert small.flops_per_token(50) < large.flops_per_token(50)


def test_large_shapes_are_gpt2s():
    for channels, name in ((768, "gpt2"), (1024, "gpt2-medium"), (1280, "gpt2-large")):
        shape, config = Shape.of(channels), SHAPES[name]
        sizes = (shape.n_layer, shape.n_head, shape.n_embd)
        assert sizes == (config.n_layer, config.n_head, config.n_embd) and shape.block_size <= config.block_size


def test_the_tokens_per_step_grow_with_the_run():
    assert step_tokens(2 * 10**6) == step_tokens(10**7) == 4096
    assert [step_tokens(tokens) for tokens in (1, MIN_STEPS, 2 * MIN_STEPS, 64 * MIN_STEPS)] == [1, 1, 2, 64]
    counts = [step_tokens(10**n) for n in range(6, 13)]
    assert counts == sorted(counts) and 2**17 <= step_tokens(10**10) <= 2**19


def test_a_short_run_has_a_short_context():
    contexts = [Shape.of(1024).for_tokens(n).block_size for n in (10**4, 3 * 10**7, 4 * 10**7, 2 * 10**8, 10**10)]
    assert contexts == [128, 128, 256, 512, 1024]
    assert Shape.of(96).for_tokens(10**8).block_size == 96 and Shape.of(32).for_tokens(1).block_size == 32


def test_dropout_is_for_many_epochs_of_a_text_that_is_small_for_the_model():
    assert [Shape.of(32).dropout(n, 50_000) for n in (500_000, 2_000_000)] == [0.0, 0.0]
    assert [Shape.of(64).dropout(n, 50_000) for n in (500_000, 2_000_000)] == [0.0, 0.1]
    assert Shape.of(64).dropout(10**8, 10**7) == 0.0
