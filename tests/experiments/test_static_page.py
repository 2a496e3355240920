"""Parts of a self-contained page, read by Python's HTML parser, and the look that all pages share."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from folio.experiments.charts import LineGroup, Panel, line_chart, page_with_charts
from folio.experiments.static_page import BASE_STYLE, COLORS, details, hash_source, page, table, write
from tests.support.processes import ROOT

HOSTILE = "<script>alert('x')</script> & \"é\""


class Elements(HTMLParser):
    """The text of each element, and the names of all elements."""

    def __init__(self, html: str):
        super().__init__()
        self.names, self.texts = [""], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)

    def handle_data(self, data):
        self.texts.append((self.names[-1], data))


def test_text_is_never_html():
    """A run's name is arbitrary."""
    html = page(HOSTILE, ["", table([HOSTILE], [[HOSTILE], ["2"]]), details(HOSTILE, "<p>inside</p>")], "", "draw()")
    elements = Elements(html)
    assert elements.names.count("script") == 1 and elements.names.count("tr") == 3
    assert elements.names[1] == "html"
    script = next(text for name, text in elements.texts if name == "script")
    assert script.endswith("draw()") and f"script-src {hash_source(script)}" in html
    shown = {name: text for name, text in elements.texts if text == HOSTILE}
    assert shown.keys() == {"title", "h1", "th", "td", "summary"}
    assert ("p", "inside") in elements.texts
    assert "://" not in html  # no network requests


def test_columns_of_numbers_are_aligned_to_the_right():
    """Empty cells do not matter, and a column with one text is text."""
    html = table(["a", "b", "c"], [["x", "1.5", "-2"], ["y", "", "none"]])
    assert html.count("<td class='text'>") == 4 and "<th>b</th>" in html and "<td>1.5</td>" in html
    assert "<td class='text'>-2</td>" in html
    assert table(["a"], []) == "<div class='scroll'><table><tr><th>a</th></tr></table></div>"


# --- the look of all pages --------------------------------------------------------------------------------------------


def sources() -> list[Path]:
    return sorted(path for kind in ("py", "js", "css", "html") for path in (ROOT / "folio").rglob(f"*.{kind}"))


def test_a_page_has_the_shared_style_sheet_its_language_and_its_width():
    html = page("a", [], "own {}", "draw()")
    assert f"{BASE_STYLE.read_text(encoding='utf-8')}own {{}}</style>" in html and COLORS.read_text("utf-8") in html
    assert "<html lang='en'>" in html and "<meta name='viewport' content='width=device-width, initial-scale=1'>" in html


def test_no_other_module_writes_a_page():
    """All pages are made by static_page.py, or are the viewer's; tests/web/test_viewer.py tests that one."""
    scripts = [*(ROOT / "tools").rglob("*.py"), *ROOT.glob("*.py")]
    writers = {path.name for path in (*sources(), *scripts) if "<html" in path.read_text(encoding="utf-8")}
    assert writers == {"static_page.py", "page.html"}


def test_colors_are_written_in_two_files():
    """Replayed steps had a scale of their own, and charts other colors than the viewer."""
    transparent = r"\(0, 0, 0, 0\)"  # of an element without a background
    color = re.compile(rf"(?<!\w)#(?:[0-9a-f]{{3,4}}){{1,2}}\b|\b(?:rgba?|hsl)(?!{transparent})\([\d ]", re.IGNORECASE)
    found = {path: color.findall(path.read_text(encoding="utf-8")) for path in sources()}
    assert found[BASE_STYLE] and found[COLORS]
    assert not {path.name: colors for path, colors in found.items() if colors and path not in (BASE_STYLE, COLORS)}


def test_each_used_variable_is_defined():
    defined = {*re.findall(r"(--[\w-]+):", BASE_STYLE.read_text(encoding="utf-8"))}
    used = {name for path in sources() for name in re.findall(r"var\((--[\w-]+)\)", path.read_text(encoding="utf-8"))}
    assert used <= defined and {f"--line-{i}" for i in range(6)} <= defined


def example() -> str:
    wide = table([f"column {i}" for i in range(20)], [["long text " * 9] * 20])
    chart = line_chart("curves", "Curves", "step", [Panel("loss")], [LineGroup("a", [])])
    return page_with_charts("A title " + "x" * 99, [wide, "<p>text</p>", chart, details("more", wide)])


@pytest.mark.parametrize("width", [360, 390, 1400])
def test_only_tables_and_charts_scroll_sideways(width, open_page):
    opened = open_page(example(), width)
    opened.locator("summary").click()
    assert opened.evaluate("document.documentElement.scrollWidth") == width
    assert opened.locator(".scroll").first.evaluate("node => node.scrollWidth > node.clientWidth")


def test_dark_mode_is_for_screens(open_page):
    """Paper is white. Colors from the palette are drawn again."""
    opened = open_page(example(), color_scheme="dark")
    script = "[getComputedStyle(document.body).backgroundColor, css(colorOf('sequential', 0)).replaceAll(',', ', ')]"
    assert opened.evaluate(script) == ["rgb(26, 26, 26)"] * 2
    opened.evaluate("dispatchEvent(new Event('beforeprint'))")
    opened.emulate_media(media="print", color_scheme="dark")
    assert opened.evaluate(script) == ["rgb(255, 255, 255)"] * 2
    opened.emulate_media(media="screen", color_scheme="light")
    opened.evaluate("dispatchEvent(new Event('afterprint'))")
    assert opened.evaluate(script) == ["rgb(255, 255, 255)"] * 2


def test_a_name_that_is_not_utf_8_is_written_with_an_escape(tmp_path):
    """The pages of sweeps and of scaling in such a folder ended in a traceback; only two other pages escaped names."""
    write(tmp_path / "page.html", page("run-\udce9", [], "", ""))
    assert "<title>run-\\udce9</title>" in (tmp_path / "page.html").read_text(encoding="utf-8")
