"""The viewer in Firefox, compared with NumPy and LanguageModel.generate after one weight was changed."""

import pytest

from tests.support.firefox import FIREFOX, Firefox, firefox
from tests.support.numpy_gpt import NumpyGPT
from tests.support.stops import check_cells, random_cells, show_stop
from tests.support.viewers import Place, Served, Viewer, check_sample, checks, language_model
from tests.support.waiting import wait_until

PROMPT = "To be"


class FirefoxViewer(Viewer):
    """Without Playwright's elements."""

    def __init__(self, browser: Firefox, served: Served):
        self.page, self.served, self.problems = browser, served, browser.errors


@pytest.mark.browser
@pytest.mark.skipif(FIREFOX is None, reason="Firefox is not installed")
def test_numbers(servers, seed):
    place = Place()
    with servers("bpe").perturbed(seed) as model, firefox() as browser:
        viewer = FirefoxViewer(browser, servers("bpe")).open("tokens")
        run = NumpyGPT(model).run(viewer.column("tokens", "id"))
        for view, check in checks.items():
            check(viewer.show(view, neuron=7, **vars(place)), run, place)
        for stop in ("machine", "query", "neuron"):
            check_cells(show_stop(viewer, stop, token=place.token), random_cells(viewer, seed), run, run)
        viewer.show("playground", text=PROMPT, samples=2, max_new_tokens=20, seed=1337)
        viewer("document.querySelector('[data-testid=generate]').click()")
        wait_until(lambda: viewer("playground.samples.length === 2 && playground.running.size === 0"))
        texts = viewer("playground.samples.map(({text}) => text.textContent)")
        assert texts == language_model(viewer).generate(PROMPT, num_samples=2, max_new_tokens=20, seed=1337)
        check_sample(viewer, PROMPT, "Sample 2")
    assert [error for error in viewer.problems if "favicon.ico" not in error] == []  # the page has no icon
