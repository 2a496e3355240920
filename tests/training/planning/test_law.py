"""folio/training/planning/law.py: against the formulas of the papers, and on losses from a known law."""

import math

import numpy as np
import pytest

from folio.training.planning.law import FIRST_STEPS, WEIGHTS_PER_TOKEN, Prior, RunSize, ScalingLaw, fit

LAW = ScalingLaw(E=1.1, A=60.0, alpha=0.45, B=90.0, beta=0.4)
COUPLED = ScalingLaw(E=0.9, A=30.0, alpha=0.4, B=5000.0, beta=0.66, s=0.5)
VAGUE = Prior((0.0, 4.0, 0.4, 4.5, 0.4, 1.0), (1.0, 2.0, 0.2, 2.0, 0.2, 1e-3))


def expected_loss(law: ScalingLaw, N: float, D: float, S: float, U: float) -> float:
    """Muennighoff et al. 2023, equation 5, for the tokens only, with an R* that depends on the weights per token."""
    scale = max(3, 15.39 / (1 + 4 * N / U))
    N, D = min(N, WEIGHTS_PER_TOKEN * U), D * S / (S + FIRST_STEPS)
    tokens = min(D, U)
    tokens += tokens * scale * (1 - math.exp(-max(0.0, D / U - 1) / scale))
    return law.E + (law.A / N**law.alpha + law.B / tokens**law.beta) ** law.s


@pytest.mark.parametrize(
    "run", [(10**5, 10**6, 500, 10**7), (10**6, 10**8, 2000, 10**6), (10**9, 10**6, 50, 10**6), (10**7, 10**9, 1, 50)]
)
@pytest.mark.parametrize("law", [LAW, COUPLED])
def test_losses_are_those_of_the_papers(law, run):
    assert law.losses([RunSize(*run)]) == pytest.approx([expected_loss(law, *run)], rel=1e-9)


def test_without_repetition_the_law_is_chinchillas():
    assert LAW.losses([RunSize(10**5, 10**7, 10**9, 10**9)]) == pytest.approx([1.1 + 60 / 1e5**0.45 + 90 / 1e7**0.4])


@pytest.mark.parametrize("bytes_per_token", [1.0, 2.6])
def test_a_prior_per_token_is_the_prior_per_byte(bytes_per_token):
    per_token = ScalingLaw.from_parameters(Prior(tuple(COUPLED.parameters), (1.0,) * 6).per_token(bytes_per_token).mean)
    in_bytes = RunSize(10**6, 10**7, 10**9, 10**9)
    in_tokens = in_bytes._replace(tokens=round(10**7 / bytes_per_token))
    expected = [bytes_per_token * loss for loss in COUPLED.losses([in_bytes])]
    assert per_token.losses([in_tokens]) == pytest.approx(expected, rel=1e-6)


SIZES = [
    RunSize(N, D, D // 2048, 10**9)
    for N in (30_000, 100_000, 300_000, 1_000_000)
    for D in (300_000, 1_000_000, 4_000_000, 20_000_000)
]


def measured_losses(seed: int, error: float) -> list[float]:
    rng = np.random.default_rng(seed)
    return [loss * math.exp(error * rng.standard_normal()) for loss in LAW.losses(SIZES)]


def test_a_fit_finds_the_law(seed):
    """Forecasts are right ten times beyond the measured sizes and lengths."""
    best, *samples = fit(SIZES, measured_losses(seed, 0.0), VAGUE, samples=50)
    far = [RunSize(N, D, D // 4096, 10**9) for N, D in ((10**6, 2 * 10**8), (10**7, 2 * 10**7), (10**7, 2 * 10**8))]
    assert best.losses(far) == pytest.approx(LAW.losses(far), rel=0.01)
    spread = np.sort([law.losses(far) for law in samples], axis=0)
    assert (spread[2] < 1.005 * np.array(LAW.losses(far))).all()
    assert (spread[-3] > 0.995 * np.array(LAW.losses(far))).all()


def test_one_bad_run_changes_a_fit_little(seed):
    losses, run = measured_losses(seed, 0.002), RunSize(3 * 10**6, 6 * 10**7, 10**4, 10**9)
    losses[5] *= 1.3
    best = fit(SIZES, losses, VAGUE, samples=1)[0]
    assert best.losses([run]) == pytest.approx(LAW.losses([run]), rel=0.02)


def test_a_run_that_says_nothing_new_leaves_the_prior():
    prior = Prior(tuple(LAW.parameters), (0.1, 0.1, 0.01, 0.1, 0.01, 0.01))
    best = fit(SIZES[:1], LAW.losses(SIZES[:1]), prior, samples=1)[0]
    assert best.parameters == pytest.approx(LAW.parameters, abs=1e-3)


def test_fits_are_repeatable(seed):
    losses = measured_losses(seed, 0.003)
    assert fit(SIZES, losses, VAGUE, samples=3) == fit(SIZES, losses, VAGUE, samples=3)
