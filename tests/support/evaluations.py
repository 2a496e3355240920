"""Small models, measures with given values, and comparisons."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from folio.evaluation.comparison import Design, compare
from folio.evaluation.scores import Coverage, Evaluation, Measure
from model import GPT, GPTConfig
from tests.support.tolerances import logits_error

QUANTILE_ERROR = 2e-7  # relative, of intervals.student_t_975


def model_of(vocab_size: int, std: float = 0.3, block_size: int = 8, position: str = "learned") -> GPT:
    """Random weights, large enough that tokens differ in probability; std=0: all tokens are equally likely."""
    torch.manual_seed(3)
    config = GPTConfig(block_size=block_size, vocab_size=vocab_size, n_layer=2, n_head=2, n_embd=16, position=position)
    model = GPT(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=std)
    return model.eval()


def loss_error(config: GPTConfig, T: int) -> float:
    """How far two computations of a loss differ: in a logit and in a log-sum-exp, with logits of at most 10."""
    return 2 * 10 * logits_error(config, T)


@torch.inference_mode()
def nats_of(hf_model: torch.nn.Module, before: np.ndarray, token: int) -> float:
    """The loss of a token after `before`, computed by transformers."""
    return -float(hf_model(torch.from_numpy(before)[None]).logits[0, -1].log_softmax(-1)[token])


def measure_of(values: list[float], weights: list[float] | None = None, **settings) -> Measure:
    values, weights = (np.array(column, dtype=float) for column in (values, weights or [1.0] * len(values)))
    return Measure("text", "bits per byte", "documents", values, weights, **settings)


def half_width_of(values: np.ndarray, weights: np.ndarray) -> float:
    """Half the width of the interval of a ratio, by the matrices of Bell and McCaffrey 2002. values, weights: (n,)."""
    from scipy import stats

    n, shares = len(values), weights / weights.sum()
    residuals_of = np.eye(n) - shares  # (n, n); times the documents' means, the residuals
    scale = np.diag(shares**2 / (residuals_of @ residuals_of.T).diagonal())
    form = residuals_of.T @ scale @ residuals_of  # the variance as a quadratic form of the means
    means = values / weights
    degrees_of_freedom = np.trace(form) ** 2 / np.trace(form @ form)
    return float(stats.t(degrees_of_freedom).ppf(0.975) * np.sqrt(means @ form @ means))


def compare_models(first: list[Measure], second: list[Measure]) -> list[dict]:
    """The comparison of two checkpoints a and b, given what was measured of each."""
    sides = [[Evaluation("a", first, {"text": Coverage()})], [Evaluation("b", second, {"text": Coverage()})]]
    return compare(sides, Design([["a"], ["b"]]))


def approx_interval(expected: Sequence[float]) -> Any:
    """An interval by Student's t, for a comparison with ==. The error of a bound is that of the quantile, by which the
    half-width is multiplied, however small the bound is; twice as much covers rounding.
    """
    low, high = expected
    return pytest.approx((low, high), rel=0, abs=2 * QUANTILE_ERROR * (high - low) / 2)
