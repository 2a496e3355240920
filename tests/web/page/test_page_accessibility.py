"""The page with a keyboard and for screen readers, in a browser. axe-core checks every view and stop."""

import json
from collections.abc import Callable

import pytest

from tests.support.numpy_gpt import assert_rounded, entropy
from tests.support.viewed_models import TEXT, TOKENIZERS, build_model, save_run
from tests.support.viewers import Viewer, axe_violations, generate, serving


def test_axe_finds_nothing(new_viewer, char):
    """Neither violations of WCAG nor of best practices. What is around the view has the same colors in each view."""
    viewer, colors, problems = new_viewer(char, reduced_motion="reduce").open("tokens"), ["color-contrast"], []
    stops = [("story", stop) for stop in range(viewer("availableStops().length"))]
    for view, stop in [*stops, *((view, 0) for view in viewer.views() if view != "story")]:
        viewer.show(view, story=stop, text=TEXT[:14], token=9)
        found = axe_violations(viewer, rules={name: {"enabled": False} for name in colors})
        for theme in ("dark", "light"):
            viewer.after(lambda theme=theme: viewer.page.emulate_media(color_scheme=theme))
            found += axe_violations(viewer, "html" if view == "tokens" else "#view", runOnly=colors)
        problems += [(view, stop, violation) for violation in found]
    assert problems == []


@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing_in_samples_of_real_length(width, new_viewer, tmp_path):
    """A sample of many lines was a region that scrolls and cannot have the focus."""
    folder = tmp_path / "run"
    path = save_run(folder, {step: build_model("char", seed=step) for step in (10, 20)}, TOKENIZERS["char"], {})
    lines = [{"step": step, "loss": 3.0, "val_loss": 3.0 if step == 20 else None, "tokens": step} for step in range(21)]
    samples = [{"step": step, "text": "To be, or not to be:\n" * 20} for step in (10, 20)]
    for name, content in (("metrics.jsonl", lines), ("samples.jsonl", samples)):
        (folder / name).write_text("".join(f"{json.dumps(line)}\n" for line in content), encoding="utf-8")
    with serving([path]) as served:
        viewer = new_viewer(served, width=width, reduced_motion="reduce").open("run")
        assert viewer.page.locator("#view .scroll .token-strip").count() == 2
        assert axe_violations(viewer) == []
        viewer.page.close()


@pytest.fixture
def press(char_viewer) -> Callable[..., Viewer]:
    """Return a function that gives an element the focus by the keyboard, and presses keys."""

    def press(selector: str, *keys: str) -> Viewer:
        viewer = char_viewer
        viewer("selector => document.querySelector(selector).focus({focusVisible: true})", selector)
        assert viewer("document.activeElement.matches(':focus-visible')")
        return viewer.press(*keys)

    return press


@pytest.mark.parametrize(
    "state, selector, keys, readout, selected",
    [
        ({"view": "tokens"}, "#view tr[tabindex='0']", "ArrowDown ArrowDown", "", {"token": 7}),
        ({"view": "attention-table"}, "[data-testid=weights] [role=application]", "ArrowUp ArrowRight ArrowRight",
         "query 4 ", {"token": 4}),
        ({"view": "qkv", "head_channel": 2}, "[data-testid=qkv] [role=application]", "ArrowRight ArrowDown",
         "channel 3: ", {"head_channel": 3, "qkv_part": 1}),
        ({"view": "looking-back"}, "#view .token-strip [tabindex='0']", "ArrowLeft ArrowLeft", "3 b attends to",
         {"token": 3}),
        ({"view": "checkpoints", "step": 100}, "#view .drawing[role=application]", "ArrowLeft", "", {"step": 10}),
    ],
)  # fmt: skip
def test_arrows_move_a_cursor_and_enter_selects(state, selector, keys, readout, selected, char_viewer, press):
    before = char_viewer.show(**state, token=5).state(*selected)
    assert press(selector, *keys.split()).state(*selected) == before
    shown = char_viewer.page.locator("#view .readout")
    assert not readout or any(readout in text for text in shown.all_inner_texts())
    assert char_viewer.press("Enter").state(*selected) == [*selected.values()]


def test_rows_of_a_table(char_viewer, press):
    char_viewer.show("tokens", token=5)
    assert char_viewer.page.locator("#view tbody tr[tabindex='0']").count() == 1
    press("#view tr[tabindex='0']", "ArrowDown", "Enter")
    assert char_viewer("document.activeElement.classList.contains('selected')")  # for the next arrow
    assert char_viewer.press("Home", "Enter").state("token") == [0]


def test_cells_of_a_matrix(char_viewer, press):
    """After a key that redraws the view, the cursor was in the first column."""
    char_viewer.show("attention-table", token=5, layer=0, head=1)
    press("[data-testid=weights] [role=application]", "ArrowRight", "ArrowRight", "ArrowUp")
    readout = char_viewer.find("weights").locator(".readout")
    assert readout.get_attribute("aria-live") == "polite"
    assert_rounded(float(readout.inner_text().split(": ")[-1]), char_viewer.run().layer(0).weights[1, 4, 2], 4, 1)
    char_viewer.press("Enter", "ArrowRight")
    assert readout.inner_text().startswith("query 4 ")
    assert char_viewer("document.activeElement.cell") == [4, 3]


def test_the_list_of_tokens_has_an_active_option(char_viewer, press):
    char_viewer.show("tokens", token=3)
    press("#strip", "ArrowRight")
    active = char_viewer.page.locator(f"#{char_viewer.page.locator('#strip').get_attribute('aria-activedescendant')}")
    assert active.get_attribute("role") == "option" and active.get_attribute("aria-selected") == "true"
    assert active.get_attribute("data-testid") == "strip-4" and char_viewer.state("token") == [4]
    char_viewer.show("story", story=3, token=8)
    assert press("#strip", "ArrowLeft").state("token", "story") == [7, 3]


def test_values_of_a_line_chart(char_viewer, press):
    """For keys and for the pointer."""
    char_viewer.show("switches", token=4, layer=0, head=1)
    chart = char_viewer.find("row-entropies")
    values, drawing = chart.locator(".values"), chart.locator(".drawing")
    assert values.get_attribute("aria-live") == "polite"
    assert drawing.get_attribute("aria-label") == chart.locator("h3").inner_text()
    label = drawing.locator("> svg").get_attribute("aria-label")
    assert label.endswith("over query. Lines: divided by √D, not divided.")
    press("[data-testid=row-entropies] .drawing", "ArrowRight", "ArrowRight")
    rows = [char_viewer.run(scale=scale).layer(0).weights[1, 6] for scale in (True, False)]
    shown = dict(row.split("\t")[:2] for row in values.locator("tr").all_inner_texts())
    assert values.inner_text().startswith("query 6") and shown.keys() == {"divided by √D", "not divided"}
    assert [float(shown[name]) for name in ("divided by √D", "not divided")] == pytest.approx(
        [entropy(row) for row in rows], rel=1e-5
    )
    assert char_viewer.state("token") == [4] and char_viewer.press("Enter").state("token") == [6]
    assert char_viewer("document.activeElement.matches('[data-testid=row-entropies] .drawing')")
    char_viewer.press("End")
    assert values.inner_text().startswith(f"query {len(TEXT) - 1}")
    assert char_viewer.press("Home", "Enter").state("token") == [0]
    box = drawing.bounding_box()
    char_viewer.page.mouse.move(box["x"] + 57, box["y"] + 50)  # the left end of the axis
    assert values.inner_text().startswith("query 0") and drawing.locator("circle").count() == 2
    char_viewer.page.mouse.move(0, 0)
    assert values.is_hidden() and not drawing.locator("circle").count()


@pytest.mark.parametrize("view, picture", [("embedding", "vocabulary-map"), ("looking-back", "arcs"), ("loop", "draw")])
def test_tooltips_of_a_drawing(view, picture, char_viewer, press):
    char_viewer.show(view, token=17)
    figure, drawing = char_viewer.find(picture), "svg[role=application]"
    second = figure.locator("title").all_text_contents()[1]
    press(f"[data-testid={picture}] {drawing}", "ArrowRight")
    assert second in figure.locator(".readout").all_inner_texts()
    assert figure.locator(".focused title").text_content() == second
    assert figure.locator(drawing).get_attribute("aria-label")


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


def test_arrows_scroll_tables_without_keys(char_viewer, press):
    """They changed the layer."""
    char_viewer.show("embedding", token=5, layer=0)
    assert press("[data-testid=nearest] .scroll", "ArrowDown", "PageDown").state("layer", "view") == [0, "embedding"]


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


def test_another_view_begins_at_its_heading(new_viewer, char):
    """The focus was lost, and the page stayed where the link was."""
    viewer = new_viewer(char).open("story", story=3)
    rest = f" \N{EN DASH} {viewer('info.models[0].name')} \N{EN DASH} Folio"
    assert viewer.page.title() == f"3. What is the token looking for?{rest}"
    viewer.page.set_viewport_size({"width": 1280, "height": 400})
    for scroll, go in (
        (80, viewer.page.get_by_role("link", name="Look closer").click),
        (600, viewer.page.get_by_role("link", name="One row in numbers").click),
        (600, lambda: viewer.page.keyboard.press("j")),
        (600, viewer.page.go_back),
    ):
        viewer("scroll => window.scrollTo(0, scroll)", scroll)
        heading = viewer.after(go).page.locator("#view h2")
        assert viewer.page.title() == heading.inner_text() + rest
        assert heading.evaluate("heading => document.activeElement === heading")
        below = "heading => heading.getBoundingClientRect().top - byId('top').getBoundingClientRect().bottom"
        assert viewer("scrollY") == 0 and 0 < heading.evaluate(below) < 40


def test_changes_within_a_view_keep_the_focus(new_viewer, char):
    viewer = new_viewer(char).open("looking-back", token=5)
    assert viewer("document.activeElement === document.body")
    viewer.press("ArrowLeft", "ArrowDown", "]", ",")
    assert viewer.state("token", "layer", "head", "step") == [4, 1, 1, 100]
    assert viewer("document.activeElement === document.body")
    viewer.page.locator("#strip").focus()
    assert viewer.press("j").state("view") == ["attention-row"]
    assert viewer("document.activeElement.id") == "strip"


def test_the_keys_of_a_view(new_viewer, char):
    """The page lists the keys that change something in the view."""
    viewer = new_viewer(char).open("tokens")
    keys, footer = viewer.page.locator("#keys"), viewer.page.get_by_role("link", name="This view as HTML")
    for view, places in {"tokens": [], "mlp": ["layer"], "looking-back": ["layer", "head"]}.items():
        viewer.show(view)
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


def test_the_skip_button_moves_to_the_view(char_viewer):
    char_viewer.show("tokens")("document.activeElement.blur()")
    char_viewer.page.locator("#skip").focus()
    char_viewer.press("Enter")
    assert char_viewer("document.activeElement.id") == "view"
