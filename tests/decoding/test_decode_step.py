"""The compiled functions of decode_step.py against torch and NumPy, and its sampler against sampling.py."""

import math
import random

import numpy as np
import pytest
import torch
from numba import njit

from folio.decoding import decode_step
from folio.decoding.cpu_decoder import CPUBatch, CPUDecoder
from folio.decoding.sampling import Sample, Sampling, next_token_probabilities, sample_token, uniforms
from tests.support.decoding import random_model
from tests.support.tolerances import rounding_error

# --- scalar functions -------------------------------------------------------------------------------------------------


@njit
def apply_all(x, exps, gelus, gelus_new):
    for i in range(len(x)):
        exps[i] = decode_step.exp(x[i])
        gelus[i] = decode_step.gelu(x[i])
        gelus_new[i] = decode_step.gelu_new(x[i])


def results_of(x: np.ndarray) -> list[np.ndarray]:
    """exp, gelu, and gelu_new of float32 numbers."""
    results = [np.zeros_like(x) for _ in range(3)]
    apply_all(x, *results)
    return results


def test_exp_and_gelu_match_torch_in_float64():
    x = np.concatenate([np.linspace(-87, 88, 40_001), np.linspace(-6, 6, 40_001), [0.0, -0.0, 1e-30]])
    x = x.astype(np.float32)
    exps, gelus, gelus_new = (torch.from_numpy(result).double() for result in results_of(x))
    exact, u = torch.from_numpy(x).double(), rounding_error(1)
    # exp rounds the last sum of its polynomial, the sum before, and twice the remainder, which are less than 1 / 2.
    assert ((exps / exact.exp() - 1).abs() < 3 * u).all()
    # torch's gelu subtracts from 1, so that its error in float64 is relative to x. These formulas do not, below 0.
    tanh_argument = math.sqrt(2 / math.pi) * (exact + 0.044715 * exact**3)
    normal, tanh = exact / 2 * torch.special.erfc(-exact / math.sqrt(2)), exact * (2 * tanh_argument).sigmoid()
    # An exponent y with k roundings, of x^2 / 2 or of twice the argument of tanh, gives a relative error of k y u. The
    # others: 3 of exp, 2 of t, 20 of the polynomial's coefficients and sums, 4 products and sums.
    for result, expected, kind, exponent, roundings in (
        (gelus, normal, "none", exact**2 / 2, 1),
        (gelus_new, tanh, "tanh", 2 * tanh_argument.abs(), 6),
    ):
        torchs = torch.nn.functional.gelu(exact, approximate=kind)
        assert ((torchs - expected).abs() <= 4 * rounding_error(1, torch.float64) * exact.abs()).all()
        smallest = 2 * torch.finfo(torch.float32).tiny * exact.abs()  # exp is 0 below the smallest normal number
        assert ((result - expected).abs() <= (29 + roundings * exponent) * u * expected.abs() + smallest).all()


def test_exp_and_gelu_of_extreme_numbers():
    x = np.array([-np.inf, -1e30, -88, np.inf, 1e30, np.nan], dtype=np.float32)
    exps, *gelus = results_of(x)
    assert exps[:3].tolist() == [0, 0, 0]
    for result in gelus:
        assert (np.abs(result[1:3]) <= 1e-30 * np.abs(x[1:3])).all()
        assert result[3:5].tolist() == [np.inf, x[4]] and np.isnan(result[5])


# --- sampling ---------------------------------------------------------------------------------------------------------


def sampler(V: int, rows: int, sampling: Sampling, seed: int, vocab_size: int | None = None) -> CPUBatch:
    """A batch whose logits the tests set. Token 0 occurred."""
    decoder = CPUDecoder(random_model(1, vocab_size=V, n_layer=1, n_embd=2), "float32")
    batch = decoder.batch(rows, vocab_size)
    for row in range(rows):
        batch.start(row, Sample([0], row, sampling, seed))
    return batch


def random_sampling(rng: random.Random, V: int) -> Sampling:
    return Sampling(
        repetition_penalty=rng.choice([1.0, 1.3, 0.8]),
        temperature=rng.choice([1.0, 0.7, 1.6, 0]),
        top_k=rng.choice([None, 1, 3, 10, V, V + 7]),
        top_p=rng.choice([None, 0.317, 0.913, 1e-60, 1.0]),  # not sums of a few equal probabilities
        min_p=rng.choice([None, 0.02, 0.3, 1.0]),
    )


@pytest.mark.parametrize("case", range(60))
def test_the_compiled_sampler_matches_sampling_py(case, seed):
    """Four tokens per row from random logits, some with many ties or -inf, and some with vocabularies of more than
    64 * top_k tokens, of which blocks are skipped.
    """
    rng = random.Random(seed + case)
    torch.manual_seed(seed + case)
    V, rows = rng.choice([1, 2, 20, 63, 64, 65, 130, 700, 1999]), rng.randint(1, 4)
    sampling, padding = random_sampling(rng, V), rng.choice([0, 0, min(5, V - 1)])
    key = rng.choice([0, 1337, 2**63 - 1])
    print(V, rows, sampling, padding, key)
    batch = sampler(V, rows, sampling, key, V - padding)
    occurred = torch.zeros(rows, V, dtype=torch.bool)
    occurred[:, 0] = True
    numbers = uniforms(key, range(rows), 0, 4)
    for position in range(4):
        logits = torch.randn(rows, V) * rng.choice([0.5, 3, 20])
        if rng.random() < 0.3:
            logits = logits.round()  # ties
        if rng.random() < 0.3:
            logits[:, : (V - padding) // 2] = -torch.inf
        batch.logits.copy_(logits)
        tokens = batch.sample(list(range(rows)))()
        assert torch.equal(batch.logits, logits)
        logits[:, V - padding :] = -torch.inf
        probabilities = next_token_probabilities(logits, sampling, occurred)
        uniform = numbers[:, position : position + 1]
        expected = sample_token(probabilities, uniform)[:, 0].tolist()
        # Both samplers round the penalized logit, its quotient by the temperature, exp, and the probability.
        largest = 1.3 * logits[logits.isfinite()].abs().max().item() / (sampling.temperature or 1)
        error = 2 * rounding_error(2) * largest + 2 * rounding_error(8)
        for row in range(rows):
            if tokens[row] != expected[row]:  # sums are rounded differently if the number is close to a boundary
                sums = probabilities[row].double().cumsum(-1)
                between = sums[min(tokens[row], expected[row]) : max(tokens[row], expected[row])]
                assert (between - uniform[row] * sums[-1]).abs().max() < error
            occurred[row, tokens[row]] = True


@pytest.mark.parametrize("logit", [math.nan, math.inf, -math.inf])
def test_non_finite_logits_give_an_id_in_the_vocabulary(logit, seed):
    """Otherwise the next step would read memory beyond the embeddings."""
    rng = random.Random(seed)
    for _ in range(30):
        V = rng.choice([1, 20, 130, 1999])
        batch = sampler(V, 2, random_sampling(rng, V), 1)
        batch.logits.normal_(generator=torch.Generator().manual_seed(seed))
        batch.logits[:, rng.randrange(V) :] = logit
        if rng.random() < 0.3:
            batch.logits.fill_(logit)
        assert all(0 <= token < V for token in batch.sample([0, 1])())


def test_only_sampled_rows_consume_random_numbers(seed):
    """The random number of a token depends only on its own row."""
    batch = sampler(50, 3, Sampling(), seed)
    batch.logits.normal_(generator=torch.Generator().manual_seed(seed))
    probabilities = batch.logits.softmax(dim=-1)
    batch.sample([1])
    batch.sample([0, 1])
    tokens = batch.sample([2, 0])()
    numbers = uniforms(seed, range(3), 0, 3)
    expected = [
        sample_token(probabilities[[row]], numbers[[row], [drawn], None]) for row, drawn in enumerate((1, 1, 0))
    ]
    assert tokens == [int(token) for token in expected]
