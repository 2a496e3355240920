"""The page with a keyboard and for screen readers, in a browser. axe-core checks every view and scene."""

from collections.abc import Callable

import pytest

from tests.support.numpy_gpt import NumpyGPT, entropy
from tests.support.viewed_models import TEXT
from tests.support.viewers import Viewer, axe_violations, generate, in_browser

SCENES = {"values": 5, "guess": 7}


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(new_viewer, char, scheme):
    """Neither violations of WCAG nor of best practices."""
    viewer = new_viewer(char, color_scheme=scheme, reduced_motion="reduce").open("tokens")
    scenes, problems = viewer("availableScenes().length"), []
    for view in viewer.views():
        for scene in range(1, 1 + scenes) if view == "story" else [1]:
            viewer.show(view, story=scene, token=17)
            problems += [(view, scene, violation) for violation in axe_violations(viewer)]
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
    assert press("#view svg[role=application]", "ArrowLeft").state("step") == [100]
    assert char_viewer.press("Enter").wait().state("step") == [10]


def entropies(viewer: Viewer, query: int) -> list[str]:
    """The rounded entropies of a query's attention weights, with and without the division by √D."""
    ids, model = viewer("loadContext().then(c => c.ids)"), viewer.served.provider.models[0].model
    weights = [NumpyGPT(model, scale=scale).run(ids).layer(0).weights[1, query] for scale in (True, False)]
    return [f"{entropy(row):.4g}" for row in weights]


@in_browser
def test_values_of_a_line_chart(char_viewer, press):
    """For keys and for the pointer."""
    char_viewer.show("switches", token=4, layer=0, head=1)
    chart = char_viewer.find("row-entropies")
    readout, drawing = chart.locator(".readout"), chart.locator("svg")
    press("[data-testid=row-entropies] svg", "ArrowRight", "ArrowRight")
    divided, plain = entropies(char_viewer, 6)
    assert readout.inner_text() == f"query 6:  divided by √D {divided}   not divided {plain}"
    assert char_viewer.state("token") == [4] and char_viewer.press("Enter").state("token") == [6]
    assert char_viewer.press("End")("document.activeElement.cell") == [0, len(TEXT) - 1]
    box = drawing.bounding_box()
    char_viewer.page.mouse.move(box["x"] + 57, box["y"] + 50)  # the left end of the axis
    assert readout.inner_text().startswith("query 0:") and drawing.locator("circle").count() == 2
    char_viewer.page.mouse.move(0, 0)
    assert readout.inner_text() == "" and not drawing.locator("circle").count()


@in_browser
def test_a_cursor_stays_in_its_cell(char_viewer, press):
    """After a key that redraws the view, the cursor was in the first column."""
    char_viewer.show("attention-table", token=5)
    press("[data-testid=weights] [role=application]", "ArrowRight", "ArrowRight", "ArrowUp", "Enter", "ArrowRight")
    assert char_viewer.find("weights").locator(".readout").inner_text().startswith("query 4 ")
    assert char_viewer("document.activeElement.cell") == [4, 3]


@in_browser
@pytest.mark.parametrize(
    "view, picture",
    [("embedding", "vocabulary-map"), ("looking-back", "arcs"), ("loop", "draw"),
     ("story-values", "story-path"), ("story-guess", "story-guess")],
)  # fmt: skip
def test_tooltips_of_a_drawing(view, picture, char_viewer, press):
    name, _, scene = view.partition("-") if view.startswith("story") else (view, "", "")
    char_viewer.show(name, token=17, story=SCENES.get(scene, 1))
    tips = f"Array.from(document.querySelectorAll('[data-testid={picture}] title'), tip => tip.textContent)"
    second = char_viewer(tips)[1]
    press(f"[data-testid={picture}] svg[role=application]", "ArrowRight")
    assert second in char_viewer.find(picture).locator(".readout").all_inner_texts()
    assert char_viewer.find(picture).locator(".focused title").text_content() == second
    assert char_viewer.find(picture).locator("svg[role=application]").get_attribute("aria-label")


@in_browser
def test_grids(char_viewer, press):
    """Arrows up and down move by a row. A grid of buttons is one tab stop."""
    for view, table in (("tokens", "table"), ("stream", "[data-testid=lens-window] table"), ("switches", ".parts")):
        char_viewer.show(view, token=5)
        assert char_viewer.page.locator(f"#view {table}").first.get_attribute("role") == "grid"
    assert char_viewer.page.locator(".parts [tabindex='0']").count() == 1
    press(".parts [tabindex='0']", "ArrowRight", "ArrowDown", "Enter", "ArrowDown")
    assert char_viewer.state("heads_off") == ["1.1"]
    assert char_viewer("document.activeElement.dataset.testid") == "switch-head-1-1"  # there is no row below
    char_viewer.show("all-heads", heads_off="", layer=0, head=0)
    press(".head-grid [tabindex='0']", "ArrowDown", "ArrowRight")
    assert char_viewer("document.activeElement.dataset.testid") == "head-1-1"


@in_browser
def test_arrows_scroll_tables_without_keys(char_viewer, press):
    """They changed the layer."""
    char_viewer.show("embedding", token=5, layer=0)
    assert press("[data-testid=nearest] .scroll", "ArrowDown", "PageDown").state("layer", "view") == [0, "embedding"]


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
def test_another_view_begins_at_its_heading(new_viewer, char):
    """The focus was lost, and the page stayed where the link was."""
    viewer = new_viewer(char).open("story", story=3)
    rest = f" \N{EN DASH} {viewer('info.models[0].name')} \N{EN DASH} Folio"
    assert viewer.page.title() == f"3. What is the token looking for?{rest}"
    viewer.page.set_viewport_size({"width": 1280, "height": 400})
    for scroll, go in (
        (80, viewer.page.get_by_role("link", name="Look closer").click),
        (600, viewer.page.get_by_role("link", name="One row in numbers").click),
        (600, lambda: viewer.page.keyboard.press("PageDown")),
        (600, viewer.page.go_back),
    ):
        viewer("scroll => window.scrollTo(0, scroll)", scroll)
        drawn = viewer("drawing")
        go()
        heading = viewer.wait(drawn).page.locator("#view h2")
        assert viewer.page.title() == heading.inner_text() + rest
        assert heading.evaluate("heading => document.activeElement === heading")
        below = "heading => heading.getBoundingClientRect().top - byId('top').getBoundingClientRect().bottom"
        assert viewer("scrollY") == 0 and 0 < heading.evaluate(below) < 40


@in_browser
def test_changes_within_a_view_keep_the_focus(new_viewer, char):
    viewer = new_viewer(char).open("looking-back", token=5)
    assert viewer("document.activeElement === document.body")
    viewer.press("ArrowLeft", "ArrowDown", "]", ",")
    assert viewer.state("token", "layer", "head", "step") == [4, 1, 1, 100]
    assert viewer("document.activeElement === document.body")
    viewer.page.locator("#strip").focus()
    assert viewer.press("PageDown").state("view") == ["attention-row"]
    assert viewer("document.activeElement.id") == "strip"


@in_browser
def test_the_keys_of_a_view(new_viewer, char):
    """The page lists the keys that change something in the view."""
    viewer = new_viewer(char)
    keys, footer = viewer.page.locator("#keys"), viewer.page.get_by_role("link", name="This view as HTML")
    for view, places in {"tokens": [], "mlp": ["layer"], "looking-back": ["layer", "head"]}.items():
        viewer.open(view)
        listed = [name for name in ("layer", "head") if f" {name}" in keys.inner_text()]
        assert listed == places and "← → token" in keys.inner_text() and "checkpoint" in keys.inner_text()
        for key, name in {"ArrowDown": "layer", "]": "head"}.items():
            before = viewer.page.locator("#view").inner_text()
            viewer.press(key)
            assert (viewer.page.locator("#view").inner_text() != before) == (name in places)
    viewer.page.set_viewport_size({"width": 390, "height": 800})
    assert keys.is_hidden() and footer.is_visible()
    viewer.page.set_viewport_size({"width": 1280, "height": 800})
    assert keys.is_visible() and viewer.show("story").page.locator("#keys").is_hidden() and footer.is_visible()


@in_browser
def test_the_skip_button_moves_to_the_view(char_viewer):
    char_viewer.show("tokens")("document.activeElement.blur()")
    char_viewer.page.locator("#skip").focus()
    char_viewer.press("Enter")
    assert char_viewer("document.activeElement.id") == "view"
