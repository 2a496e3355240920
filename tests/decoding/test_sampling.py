"""Filters against transformers, and statistical tests of sampling."""

import pytest
import torch

from folio.decoding.sampling import (
    Sampling,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    next_token_probabilities,
    sample_token,
    uniforms,
)
from tests.support.decoding import GREEDY
from tests.support.tolerances import binomial_range, chi_square_limit, rounding_error


def test_model_generate_samples_the_filtered_distribution(model, seed):
    torch.manual_seed(seed)
    prompt = torch.tensor([[1, 2, 3]])
    logits = model.eval()(prompt)[0][0, -1]
    expected = next_token_probabilities(logits, Sampling(temperature=0.7, top_k=3))
    counts = torch.bincount(model.generate(prompt.expand(4000, -1), 1, 0.7, 3)[:, -1], minlength=len(logits))
    for count, probability in zip(counts.tolist(), expected.tolist(), strict=True):
        assert count in binomial_range(4000, probability, comparisons=3)  # the others are 0


# --- filters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7, top_k=5),
        Sampling(temperature=1.3, top_p=0.8),
        Sampling(temperature=0.5, top_k=9, top_p=0.6),
        Sampling(temperature=1.5, min_p=0.1),
        Sampling(repetition_penalty=1.3),
        Sampling(repetition_penalty=1.3, temperature=0.9, top_k=20, top_p=0.9, min_p=0.05),
    ],
)
def test_probabilities_match_transformers(sampling, seed):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    logits, context = torch.randn(4, 30) * 3, torch.randint(30, (4, 6))
    processors = transformers.LogitsProcessorList()
    processors.append(transformers.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors.append(transformers.TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(transformers.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p:
        processors.append(transformers.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        processors.append(transformers.MinPLogitsWarper(sampling.min_p))
    occurred = torch.zeros(4, 30, dtype=torch.bool).scatter(1, context, True)
    expected = processors(context, logits.clone()).softmax(-1)
    # Logits are at most about 15 and scaled, so that a probability is off by as many roundings; and those of a softmax.
    tolerance = dict(rtol=rounding_error(4 * 15 + 30), atol=0)
    torch.testing.assert_close(next_token_probabilities(logits, sampling, occurred), expected, **tolerance)


def test_filters_keep_the_expected_number_of_tokens():
    """A top_p that underflows to 0 in float32 kept no token, and sampling crashed."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert keep_top_k(logits, 2).isfinite().tolist() == [True, True, False, False]
    assert keep_top_k(logits, 99).isfinite().all()
    for p, tokens in ((1e-60, 1), (0.01, 1), (0.5, 1), (0.51, 2), (0.9, 3), (1.0, 4)):
        assert keep_top_p(logits, p).isfinite().sum() == tokens
    for p, tokens in ((0.05, 4), (0.2, 3), (0.5, 2), (1.0, 1)):
        assert keep_min_p(logits, p).isfinite().sum() == tokens
    for sampling in (GREEDY, Sampling(top_k=1)):
        assert next_token_probabilities(logits, sampling).tolist() == [1, 0, 0, 0]


# --- sampling a token -------------------------------------------------------------------------------------------------


def test_sampled_tokens_follow_the_distribution(seed):
    """A chi-square test of 20,000 samples. Tokens that are filtered out are never sampled."""
    sampling = Sampling(temperature=0.8, top_k=6)
    probabilities = next_token_probabilities(torch.linspace(-1, 1, 12), sampling)
    tokens = sample_token(probabilities.expand(20_000, -1), uniforms(seed, range(20_000), 3, 1))[:, 0]
    counts, expected = torch.bincount(tokens, minlength=12), 20_000 * probabilities
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < chi_square_limit(5)


def test_the_first_and_the_last_possible_token_can_be_sampled():
    probabilities = torch.tensor([[0.0, 0.25, 0.5, 0.25, 0.0]]).expand(4, -1)
    numbers = torch.tensor([0.0, 0.25, 0.7499, 1 - 2**-53], dtype=torch.float64)[:, None]
    assert sample_token(probabilities, numbers).flatten().tolist() == [1, 2, 2, 3]


def test_random_numbers_depend_on_seed_sample_and_position_alone(seed):
    """They are uniform and distinct."""
    numbers = uniforms(seed, range(100), 0, 100)
    assert torch.equal(numbers[7:9, 20:50], uniforms(seed, [7, 8], 20, 30))
    assert numbers.min() >= 0 and numbers.max() < 1 and len(numbers.unique()) == 10_000
    assert not torch.equal(numbers, uniforms(seed + 1, range(100), 0, 100))
    counts = torch.histc(numbers, bins=10, min=0, max=1)
    assert ((counts - 1000) ** 2 / 1000).sum() < chi_square_limit(9)
