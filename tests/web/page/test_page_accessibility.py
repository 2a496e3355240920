"""The page with a keyboard and for screen readers, in a browser. axe-core checks every view and scene."""

import importlib.resources
from collections.abc import Callable

import pytest

from tests.support.numpy_gpt import NumpyGPT
from tests.support.viewers import Viewer, generate, in_browser

AXE = "axe_playwright_python", "axe.min.js"
SERIOUS = ("serious", "critical")


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(new_viewer, char, scheme):
    pytest.importorskip(AXE[0])
    viewer = new_viewer(char, color_scheme=scheme, reduced_motion="reduce").open("tokens")
    viewer((importlib.resources.files(AXE[0]) / AXE[1]).read_text(encoding="utf-8"))
    problems, scenes = [], viewer("availableScenes().length")
    for view in viewer.views():
        for scene in range(1, 1 + scenes) if view == "story" else [1]:
            viewer.show(view, story=scene, token=17)
            violations = viewer("axe.run(document, {resultTypes: ['violations']}).then(({violations}) => violations)")
            problems += [
                (view, scene, violation["id"], violation["nodes"][0]["html"])
                for violation in violations
                if violation["impact"] in SERIOUS
            ]
    assert problems == []


@pytest.fixture
def press(char_viewer) -> Callable[..., Viewer]:
    """Return a function that gives an element the focus by the keyboard, and presses keys."""

    def press(selector: str, *keys: str) -> Viewer:
        viewer = char_viewer
        viewer("selector => document.querySelector(selector).focus({focusVisible: true})", selector)
        assert viewer("document.activeElement.matches(':focus-visible')")
        return viewer.press(*keys)

    return press


@in_browser
def test_rows_of_a_table(char_viewer, press):
    char_viewer.show("tokens", token=5)
    assert char_viewer.page.locator("#view tbody tr[tabindex='0']").count() == 1
    assert press("#view tr[tabindex='0']", "ArrowDown", "ArrowDown").state("token") == [5]
    assert char_viewer.press("Enter").state("token") == [7]
    assert char_viewer("document.activeElement.classList.contains('selected')")  # for the next arrow
    assert char_viewer.press("Home", "Enter").state("token") == [0]


@in_browser
def test_cells_of_a_matrix(char_viewer, press):
    char_viewer.show("attention-table", token=5, layer=0, head=1)
    run = NumpyGPT(char_viewer.served.provider.models[0].model).run(char_viewer("loadContext().then(c => c.ids)"))
    press("[data-testid=weights] [role=application]", "ArrowUp", "ArrowRight", "ArrowRight")
    readout = char_viewer.find("weights").locator(".readout")
    shown = float(readout.inner_text().split(": ")[-1])
    assert readout.inner_text().startswith("query 4 ") and readout.get_attribute("aria-live") == "polite"
    assert shown == pytest.approx(run.layer(0).weights[1, 4, 2], rel=1e-3)
    assert char_viewer.state("token") == [5] and char_viewer.press("Enter").state("token") == [4]


@in_browser
def test_numbers_of_a_vector(char_viewer, press):
    char_viewer.show("qkv", token=5, head_channel=2)
    press("[data-testid=qkv] [role=application]", "ArrowRight", "ArrowDown")
    assert ", channel 3: " in char_viewer.find("qkv").locator(".readout").inner_text()
    assert char_viewer.press("Enter").state("head_channel", "qkv_part") == [3, 1]


@in_browser
def test_tokens_of_a_text(char_viewer, press):
    char_viewer.show("looking-back", token=9)
    press("#view .token-strip [tabindex='0']", "ArrowLeft", "ArrowLeft")
    assert char_viewer.find("looking-back-readout").inner_text().startswith("7 ")
    assert char_viewer.press(" ").state("token") == [7]


@in_browser
def test_the_list_of_tokens_has_an_active_option(char_viewer, press):
    char_viewer.show("tokens", token=3)
    press("#strip", "ArrowRight")
    active = char_viewer.page.locator(f"#{char_viewer.page.locator('#strip').get_attribute('aria-activedescendant')}")
    assert active.get_attribute("role") == "option" and active.get_attribute("aria-selected") == "true"
    assert active.get_attribute("data-testid") == "strip-4" and char_viewer.state("token") == [4]
    char_viewer.show("story", story=3, token=8)
    assert press("#strip", "ArrowLeft").state("token", "story") == [7, 3]


@in_browser
def test_steps_of_a_curve(char_viewer, press):
    char_viewer.show("checkpoints", step=100)
    char_viewer.page.locator("[data-complete=true]").wait_for()
    press("#view svg[role=application]", "ArrowLeft")
    assert char_viewer.wait().state("step") == [10]


@in_browser
def test_products_of_the_story(char_viewer, press):
    char_viewer.show("story", story=3, token=17)
    press("svg.grid", "ArrowLeft", "ArrowUp")
    text = char_viewer.find("story-query").locator(".detail").inner_text()
    assert "query of 16 " in text and "key of 16 " in text and char_viewer.state("story", "token") == [3, 17]
    assert [node.split("-")[1] for node in char_viewer(
        "Array.from(document.querySelectorAll('#strip .pointed'), node => node.dataset.testid)"
    )] == ["16"]  # fmt: skip


@in_browser
def test_alternatives_of_a_sampled_token(char_viewer, press):
    char_viewer.show("playground", samples=1, max_new_tokens=5)
    generate(char_viewer)
    press(".sample-scroll", "ArrowRight", "ArrowRight", "Enter")
    assert char_viewer("document.activeElement.classList.contains('runner-up')")
    assert char_viewer("playground.pointed.dataset.t") == "1"
    char_viewer.press("Escape")
    assert char_viewer("document.activeElement.className") == "sample-scroll"
    press(".sample-scroll", "ArrowRight", "Enter", "ArrowDown", "Enter")
    char_viewer.page.get_by_text("Branch of sample 1").wait_for()


@in_browser
def test_the_skip_button_moves_to_the_view(char_viewer):
    char_viewer.show("tokens")("document.activeElement.blur()")
    char_viewer.page.locator("#skip").focus()
    char_viewer.press("Enter")
    assert char_viewer("document.activeElement.id") == "view"
