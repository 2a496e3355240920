"""folio/training/planning/law.py: against the formulas of the papers, and on losses from a known law."""

import math

import numpy as np
import pytest
import torch

from folio.training.planning.law import ERROR, FIRST_STEPS, WEIGHTS_PER_TOKEN, Prior, RunSize, ScalingLaw, fit
from tests.support.tolerances import rounding_error

LAW = ScalingLaw(E=1.1, A=60.0, alpha=0.45, B=90.0, beta=0.4)
COUPLED = ScalingLaw(E=0.9, A=30.0, alpha=0.4, B=5000.0, beta=0.66, s=0.5)
FLOAT64_ERROR = 2 * rounding_error(20, torch.float64)
VAGUE = Prior((0.0, 4.0, 0.4, 4.5, 0.4, 1.0), (1.0, 2.0, 0.2, 2.0, 0.2, 1e-3))


def expected_loss(law: ScalingLaw, N: float, D: float, S: float, U: float) -> float:
    """Muennighoff et al. 2023, equation 5, for the tokens only, with an R* that depends on the weights per token."""
    scale = max(3, 15.39 / (1 + 4 * N / U))
    N, D = min(N, WEIGHTS_PER_TOKEN * U), D * S / (S + FIRST_STEPS)
    tokens = min(D, U)
    tokens += tokens * scale * (1 - math.exp(-max(0.0, D / U - 1) / scale))
    return law.E + (law.A / N**law.alpha + law.B / tokens**law.beta) ** law.s


@pytest.mark.parametrize("law", [LAW, COUPLED])
def test_losses_are_those_of_the_papers(law):
    runs = [(10**5, 10**6, 500, 10**7), (10**6, 10**8, 2000, 10**6), (10**9, 10**6, 50, 10**6), (10**7, 10**9, 1, 50)]
    expected = [expected_loss(law, *run) for run in runs]
    # a sum of powers: 20 operations, whose errors the exponents, less than 1, do not increase
    assert law.losses([RunSize(*run) for run in runs]) == pytest.approx(expected, rel=FLOAT64_ERROR)


def test_without_repetition_the_law_is_chinchillas():
    expected = 1.1 + 60 / 1e5**0.45 + 90 / 1e7**0.4
    steps = 10**18  # so that FIRST_STEPS of them change less than a rounding
    assert LAW.losses([RunSize(10**5, 10**7, steps, 10**9)]) == pytest.approx([expected], rel=FLOAT64_ERROR)


@pytest.mark.parametrize("bytes_per_token", [1.0, 2.5])
def test_a_prior_per_token_is_the_prior_per_byte(bytes_per_token):
    per_token = ScalingLaw.from_parameters(Prior(tuple(COUPLED.parameters), (1.0,) * 6).per_token(bytes_per_token).mean)
    in_bytes = RunSize(10**6, 10**7, 10**9, 10**9)
    in_tokens = in_bytes._replace(tokens=10**7 / bytes_per_token)
    expected = [bytes_per_token * loss for loss in COUPLED.losses([in_bytes])]
    # the logarithms of A and B, up to 9, are rounded, and with them the numbers themselves by 9 roundings
    assert per_token.losses([in_tokens]) == pytest.approx(expected, rel=9 * FLOAT64_ERROR)


SIZES = [
    RunSize(N, D, D // 2048, 10**9)
    for N in (30_000, 100_000, 300_000, 1_000_000)
    for D in (300_000, 1_000_000, 4_000_000, 20_000_000)
]


def test_a_fit_finds_the_law():
    """Forecasts are right ten times beyond the measured sizes and lengths.

    At the measured ones, the fit's errors, in units of ERROR, are at most as improbable as the law under the prior.
    A decade beyond, a straight line through points that span one and a half has 2.3 times their error; there are two.
    """
    best, *samples = fit(SIZES, LAW.losses(SIZES), VAGUE, samples=50)
    far = [RunSize(N, D, D // 4096, 10**9) for N, D in ((10**6, 2 * 10**8), (10**7, 2 * 10**7), (10**7, 2 * 10**8))]
    z = (np.array(LAW.parameters) - VAGUE.mean) / VAGUE.std
    assert best.losses(far) == pytest.approx(LAW.losses(far), rel=2 * 2.3 * ERROR * np.linalg.norm(z))
    spread, expected = np.sort([law.losses(far) for law in samples], axis=0), np.array(LAW.losses(far))
    assert (spread[2] < (1 + ERROR / 2) * expected).all() and (spread[-3] > (1 - ERROR / 2) * expected).all()


def test_one_bad_run_changes_a_fit_little(seed):
    """Huber's loss counts it like an error of ERROR. The others have a fifth of that, of which 16 average out."""
    rng, run = np.random.default_rng(seed), RunSize(3 * 10**6, 6 * 10**7, 10**4, 10**9)
    losses = np.array(LAW.losses(SIZES)) * np.exp(ERROR / 5 * rng.standard_normal(len(SIZES)))
    losses[5] *= 1.3
    first, again = (fit(SIZES, losses, VAGUE, samples=1) for _ in range(2))
    assert first == again and first[0].losses([run]) == pytest.approx(LAW.losses([run]), rel=2 * ERROR)


def test_a_run_that_says_nothing_new_leaves_the_prior():
    """L-BFGS stops at gradients of 1e-7, in standard deviations, of which the prior has a curvature of 1."""
    prior = Prior(tuple(LAW.parameters), (0.1, 0.1, 0.01, 0.1, 0.01, 0.01))
    (best,) = fit(SIZES[:1], LAW.losses(SIZES[:1]), prior, samples=0)
    assert best.parameters == pytest.approx(LAW.parameters, rel=0, abs=1e-7 * max(prior.std))
