"""The viewer's line charts in a browser: those of reports, in folio/experiments/line_chart.js, with an x to select."""

import json
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from tests.support.viewed_models import TEXT, TOKENIZERS, build_model, save_run
from tests.support.viewers import Viewer, serving
from tests.support.waiting import wait_until


def place_of(viewer: Viewer, picture: str, share: float) -> tuple[float, float]:
    """Window coordinates at a fraction of a chart's width."""
    drawing = viewer.find(picture).locator(".drawing > svg")
    drawing.evaluate("drawing => drawing.scrollIntoView({block: 'center'})")
    box, inner = drawing.bounding_box(), drawing.locator("svg").first
    left, width = (float(inner.get_attribute(name)) for name in ("x", "width"))  # with 4 pixels more at both ends
    return box["x"] + left + 4 + share * (width - 8), box["y"] + 100


def drag(viewer: Viewer, picture: str, start: float, end: float) -> None:
    mouse = viewer.page.mouse
    mouse.move(*place_of(viewer, picture, start))
    mouse.down()
    mouse.move(*place_of(viewer, picture, end), steps=4)
    mouse.up()


def steps_at(viewer: Viewer, picture: str) -> list[str]:
    """The labels of the x axis."""
    labels = viewer.find(picture).locator(".drawing > svg > text[text-anchor=middle]")
    return labels.all_text_contents()[:-1]  # without the name of the axis


def values(viewer: Viewer, picture: str) -> str:
    return viewer.find(picture).locator(".values").inner_text()


def button(viewer: Viewer, picture: str, name: str) -> Any:
    return viewer.find(picture).get_by_role("button", name=name, exact=True)


def test_dragging_zooms_and_a_click_selects(char_viewer):
    """The zoom, a logarithmic axis, and hidden lines stay when the view is drawn again."""
    chart, viewer = "row-entropies", char_viewer.show("switches", token=4, layer=0, head=1)
    all_steps = steps_at(viewer, chart)
    drag(viewer, chart, 0.3, 0.6)
    zoomed = [float(label) for label in steps_at(viewer, chart)]
    assert viewer.state("token") == [4] and 0.28 < min(zoomed) / len(TEXT) and max(zoomed) / len(TEXT) < 0.62
    button(viewer, chart, "log y").click()
    button(viewer, chart, "not divided").click()
    viewer.after(lambda: viewer.page.mouse.click(*place_of(viewer, chart, 0.5)))
    (token,) = viewer.state("token")
    assert 0.4 < token / len(TEXT) < 0.5
    assert [float(label) for label in steps_at(viewer, chart)] == zoomed
    assert button(viewer, chart, "log y").get_attribute("aria-pressed") == "true"
    lines = viewer.find(chart).locator("g > title")
    assert lines.all_text_contents() == ["divided by √D"]
    button(viewer, chart, "not divided").click()
    button(viewer, chart, "log y").click()
    button(viewer, chart, "reset zoom").click()
    assert steps_at(viewer, chart) == all_steps and lines.count() == 2


def test_a_finger_that_scrolls_the_page_selects_nothing(char_viewer):
    viewer = char_viewer.show("switches", token=4, layer=0, head=1)
    drawing, (x, y) = viewer.find("row-entropies").locator(".drawing"), place_of(viewer, "row-entropies", 0.9)
    for kind in ("pointerdown", "pointercancel"):
        options = dict(clientX=x, clientY=y, pointerId=1, button=0, bubbles=True)
        drawing.evaluate(
            """(drawing, [kind, options]) => {
              drawing.setPointerCapture = () => {};
              drawing.dispatchEvent(new PointerEvent(kind, options));
            }""",
            [kind, options],
        )
    assert viewer.wait().state("token") == [4]


def test_step_0_has_a_place_on_the_logarithmic_axis_of_checkpoints(char_viewer):
    viewer = char_viewer.show("checkpoints", step=100, layer=1, head=2)
    assert steps_at(viewer, "losses-by-step")[0] == "0"
    button(viewer, "losses-by-step", "log x").click()
    assert steps_at(viewer, "losses-by-step") == ["0", *(str(step) for step in range(20, 201, 20))]
    button(viewer, "losses-by-step", "log x").click()
    drag(viewer, "losses-by-step", 0.0, 0.5)  # a zoom that begins at 0
    viewer.page.mouse.move(*place_of(viewer, "losses-by-step", 0.01))
    assert values(viewer, "losses-by-step").startswith("step 0: nats per token")
    button(viewer, "losses-by-step", "reset zoom").click()


def test_all_other_heads_are_one_entry_of_the_legend(char_viewer):
    """The selected head is named. Another one can be selected in the view, as once by a click on the legend."""
    viewer = char_viewer.show("checkpoints", layer=1, head=2)
    lines = viewer.find("scores-by-step").locator("g > title")
    assert sorted(lines.all_text_contents()) == [f"{layer}.{head}" for layer in range(2) for head in range(4)]
    assert "head 1.2: " in viewer.find("scores-by-step").locator(".legend").inner_text()
    button(viewer, "scores-by-step", "other heads").click()
    assert 5 <= lines.count() <= 6 and "1.2" in lines.all_text_contents()
    button(viewer, "scores-by-step", "other heads").click()
    assert viewer.press("ArrowUp").state("layer") == [0]


def test_a_saved_chart_has_the_colors_of_its_legend(char_viewer):
    """The colors of a legend were missing in the SVG. Hidden lines, buttons, and values are not in the file."""
    viewer = char_viewer.show("switches", token=4)
    figure = viewer.find("row-entropies")

    def saved() -> ElementTree.Element:
        content = viewer.exported(figure.get_by_role("button", name="SVG"))
        return ElementTree.fromstring(content.replace(b' xmlns="http://www.w3.org/2000/svg"', b""))

    def colors(root: ElementTree.Element) -> set[str]:
        return {rect.get("fill") for rect in root.iter("rect")}

    accent, mark = viewer("""["accent", "mark"].map(name => {
      const node = element("i", {style: {color: `var(--${name})`}});
      document.body.append(node);
      const {color} = getComputedStyle(node);
      node.remove();
      return color;
    })""")
    assert {accent, mark} <= colors(saved()) and "reset zoom" not in "".join(saved().itertext())
    button(viewer, "row-entropies", "not divided").click()
    assert accent in colors(saved()) and mark not in colors(saved())
    assert "not divided" not in "".join(saved().itertext())
    button(viewer, "row-entropies", "not divided").click()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_area_of_a_histogram_ends_at_its_axis(theme, new_viewer, char):
    """Also on a logarithmic axis, which has no 0."""
    viewer = new_viewer(char, color_scheme=theme).open("parameters")
    drawing = viewer.find("histogram").locator(".drawing > svg")
    for _ in range(2):
        areas = drawing.locator("g > path").first.get_attribute("d").split("Z")[:-1]
        clip = drawing.locator("svg").evaluate("svg => +svg.getAttribute('y') + +svg.getAttribute('height')")
        assert areas and all(float(area.partition("V")[2].partition("H")[0]) == clip - 4 for area in areas)
        button(viewer, "histogram", "log y").click()


def test_a_run_that_trains_keeps_the_zoom_and_the_values(new_viewer, tmp_path):
    """Each new line of the metrics replaced the chart, and ended what the reader was doing."""
    folder = tmp_path / "run"
    path = save_run(folder, {step: build_model("char", seed=step) for step in (10, 20)}, TOKENIZERS["char"], {})

    def log(*steps: int) -> None:
        with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            for step in steps:
                line = {"step": step, "loss": 4 - step / 20, "lr": 1e-3, "tokens": step}
                file.write(json.dumps(line | {"val_loss": 3.0 if step == 30 else None}) + "\n")

    log(*range(21))
    with serving([path]) as served:
        viewer = new_viewer(served)
        viewer.page.clock.install()
        viewer.open("run", step=20)
        assert viewer.find("run-loss").locator("line > title").all_text_contents() == [
            "checkpoint of step 10", "checkpoint of step 20"
        ]  # fmt: skip
        drag(viewer, "run-loss", 0.25, 0.75)
        viewer.page.mouse.move(*place_of(viewer, "run-loss", 0.5))
        before = steps_at(viewer, "run-loss")
        assert values(viewer, "run-loss").split()[:2] == ["step", "10"] and before
        chart = viewer.find("run-loss").locator(".line-chart").element_handle()
        log(*range(21, 31))
        legend = viewer.find("run-loss").locator(".legend button")
        wait_until(lambda: viewer.page.clock.run_for(2000) or legend.count() == 2)
        assert chart.evaluate("node => node.isConnected") and steps_at(viewer, "run-loss") == before
        assert values(viewer, "run-loss").split()[:2] == ["step", "10"]
        button(viewer, "run-loss", "reset zoom").click()
        viewer.after(lambda: viewer.page.mouse.click(*place_of(viewer, "run-loss", 0.1)))
        assert viewer.state("step") == [10]  # the nearest checkpoint


def test_the_untrained_loss_of_a_run_does_not_decide_the_axis(new_viewer, tmp_path):
    """The evaluation of step 0 is above the chart, and shown with a dashed line."""
    folder = tmp_path / "run"
    path = save_run(folder, {20: build_model("char", seed=20)}, TOKENIZERS["char"], {})
    with open(folder / "metrics.jsonl", "w", encoding="utf-8") as file:
        for step in range(21):
            loss = None if step == 0 else 9.0 if step == 1 else 2.0
            line = {"step": step, "loss": loss, "tokens": step, "val_loss": 9.0 if step == 0 else None}
            file.write(json.dumps(line | ({"val_loss": 2.5 - step / 100} if step in (10, 20) else {})) + "\n")
    with serving([path]) as served:
        viewer = new_viewer(served).open("run")
        labels = viewer.find("run-loss").locator(".drawing > svg > text[text-anchor=end]").all_text_contents()
        assert 1.9 < min(map(float, labels)) and max(map(float, labels)) < 2.6
        assert viewer.find("run-loss").locator("tspan").text_content() == "↑ up to 9"
        assert viewer.find("run-loss").locator("path[stroke-dasharray='3 4']").count() == 1
        viewer.page.close()
