"""folio/experiments/scaling_page.py: the page of tools/scaling.py in a browser."""

import pytest

from folio.experiments.scaling_page import conclusion, describe_time, scaling_page
from folio.training.planning.choice import rank_shapes
from folio.training.planning.law import RunSize, ScalingLaw
from folio.training.planning.measured_law import MeasuredLaw
from folio.training.planning.shapes import Shape

LAW = ScalingLaw(E=1.1, A=25.0, alpha=0.38, B=250.0, beta=0.45)
OTHER = ScalingLaw(E=1.15, A=25.0, alpha=0.38, B=250.0, beta=0.45)
RUNS = [RunSize(N, D, D // 2048, 10**7) for N in (10**5, 10**6) for D in (10**6, 4 * 10**6)]


@pytest.fixture
def answers() -> dict:
    def step_seconds(shape: Shape, n_tokens: int) -> float:
        return n_tokens / 1e5

    return {m: rank_shapes([LAW, OTHER], step_seconds, 60 * float(m), 10**7, 65) for m in ("1", "30")}


@pytest.fixture
def page(answers) -> str:
    law = MeasuredLaw("", RUNS, LAW.losses(RUNS), [LAW, OTHER])
    runs, times = [["2 x 64", "1.0M", "2.0153", "9,000"]], [["1", "1.7"], ["30", "1.5"]]
    return scaling_page("<verse>", law, runs, ["minutes", "loss"], times, answers)


def test_the_page_has_the_law_the_answers_and_the_runs(page):
    assert "&lt;verse&gt;" in page and str(LAW) in page and "<td>2 x 64</td><td>1.0M</td><td>2.0153</td>" in page
    assert page.count("<figure class='chart'>") == 2
    assert "up to 1,000,000 weights and 4,000,000 tokens. The law extrapolates" in page


def test_the_page_begins_with_the_expected_losses(page, answers):
    first, second = (f"{candidates[0].forecast.loss:.3f}" for candidates in answers.values())
    times = f"{first} after 1 minute, {second} after 30 minutes of training"
    assert conclusion(answers) == f"Expected validation loss of the best model: {times}."
    assert page.index("<p class='summary'>") < page.index("<table>")
    assert describe_time("0.5") == "0.5 minutes"


@pytest.mark.browser
def test_the_charts_are_drawn(page, open_page):
    opened = open_page(page)
    figures = opened.locator("figure.chart svg")
    assert figures.count() >= 2
    pressed = opened.get_by_role("button", name="log x", pressed=True)
    assert pressed.count() == 2  # with a linear axis, all measured runs were in the first 3% of the width
    assert "30 minutes" in opened.content() and "1,000,000 weights, measured" in opened.content()
