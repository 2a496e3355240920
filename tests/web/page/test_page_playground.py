"""The playground in a browser, compared with LanguageModel.generate and NumPy."""

import itertools
import threading

import numpy as np
import pytest

from folio.decoding.scheduler import Scheduler
from tests.support.numpy_gpt import NumpyGPT
from tests.support.viewers import check_sample, generate, language_model
from tests.support.waiting import wait_until

PROMPT = "To be"


def test_samples_equal_generate_and_settings_are_in_the_link(new_viewer, served, seed):
    viewer = new_viewer(served).open("playground", text=PROMPT)
    settings = dict(temperature=1.3, top_k=40, top_p=0.95, min_p=0.001, repetition_penalty=1.1)
    settings |= dict(seed=seed, max_new_tokens=25)
    for name, value in {"samples": 3, **settings}.items():
        viewer.find(f"setting-{name}").fill(str(value))
    texts = generate(viewer)
    assert texts == language_model(viewer).generate(PROMPT, num_samples=3, **settings)
    assert len({*texts}) == 3 and "tokens/s" in viewer.find("speed").inner_text()
    other = new_viewer(served).follow(viewer.page.url)
    for name, value in {"samples": 3, **settings}.items():
        assert float(other.find(f"setting-{name}").input_value()) == value
    assert generate(other) == texts
    check_sample(viewer, PROMPT, "Sample 2")


def test_branches_of_a_sample(new_viewer, servers, seed):
    """A branch equals what sample.py generates after the changed text."""
    viewer = new_viewer(servers("char")).open("playground", text=PROMPT, samples=2, max_new_tokens=20, seed=seed)
    before = generate(viewer)
    T = next(t for t in range(6, 20) if before[1][t].isprintable())  # the pointer cannot reach an invisible token
    viewer.find("sample").nth(1).locator(f"[data-t='{T}']").hover()
    menu = viewer.find("runners-up")
    menu.wait_for()
    shown = menu.locator("button").evaluate_all("nodes => nodes.map(node => Number(node.dataset.testid.slice(10)))")
    gpt = language_model(viewer)
    ids = gpt.tokenizer.encode(PROMPT + before[1][: T + 1]).tolist()
    probabilities = NumpyGPT(gpt.model).run(ids[:-1]).probabilities[-1]
    order = [token for token in np.argsort(-probabilities, kind="stable").tolist() if token != ids[-1]]
    assert shown == order[: len(shown)] and len(shown) >= 5
    menu.locator("button").nth(2).click()
    wait_until(lambda: viewer("playground.samples.length === 3 && playground.running.size === 0"))
    texts = viewer.find("sample-text").evaluate_all("nodes => nodes.map(node => node.textContent)")
    begun = gpt.tokenizer.decode([*ids[len(PROMPT) : -1], order[2]])
    assert texts[:2] == before  # the branch is beside its sample
    assert texts[2] == begun + gpt.generate(PROMPT + begun, num_samples=1, max_new_tokens=20, seed=seed)[0]
    viewer.find("take").nth(2).click()
    wait_until(lambda: viewer("shownText") == PROMPT + texts[2])


@pytest.mark.parametrize("leave", [False, True])
def test_generating_stops(leave, new_viewer, servers, monkeypatch):
    """By the button, and when another view is opened. Tokens after the first 60 are slow until then."""
    step, steps, stopped = Scheduler.step, itertools.count(1), threading.Event()

    def wait_and_step(scheduler: Scheduler) -> object:
        if next(steps) > 60:
            stopped.wait(0.1)
        return step(scheduler)

    monkeypatch.setattr(Scheduler, "step", wait_and_step)
    viewer = new_viewer(servers("char")).open("playground", text=PROMPT, max_new_tokens=4000)
    stop = viewer.find("stop")
    assert stop.is_disabled()
    viewer.find("generate").click()
    viewer.page.locator("[data-t='30']").first.wait_for()
    viewer.press("k") if leave else stop.click()
    wait_until(lambda: viewer("playground.running.size === 0"))
    stopped.set()
    if leave:
        viewer.press("j")
    assert stop.is_disabled() and "stopped" in viewer.find("sample").first.inner_text()
    counts = viewer("playground.samples.map(sample => sample.tokens.length)")
    assert len(counts) == 3 and 30 < min(counts) and max(counts) < 4000
    (engine,) = viewer.served.provider.engines.values.values()
    wait_until(lambda: engine.active == 0)
    assert viewer("playground.samples.map(sample => sample.tokens.length)") == counts


def test_stop_strings_and_invalid_settings(new_viewer, servers, seed):
    settings = dict(stop="e", seed=seed, temperature=5, max_new_tokens=200)
    viewer = new_viewer(servers("char")).open("playground", text=PROMPT, **settings)
    texts = generate(viewer)
    assert texts == language_model(viewer).generate(PROMPT, num_samples=3, **settings)
    viewer.find("setting-top_p").fill("3")
    viewer.find("generate").click()
    wait_until(lambda: "top_p" in viewer.find("playground-error").inner_text())
    assert len(viewer.problems) == 1 and "400" in viewer.problems.pop()  # the browser reports the status
    viewer.find("setting-top_p").fill("1")
    assert generate(viewer) == texts and not viewer.find("playground-error").inner_text()
