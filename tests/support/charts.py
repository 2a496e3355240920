"""The data of the charts in a page."""

import json
import re
from typing import Any


def charts_in(html: str) -> dict[str, dict[str, Any]]:
    """The charts by name."""
    scripts = re.findall(r"<script type='application/json'>(.*?)</script>", html, re.DOTALL)
    return {chart["name"]: chart for chart in map(json.loads, scripts)}


def lines_in(html: str, name: str = "curves", axis: int = 0) -> dict[str, dict[str, Any]]:
    """The lines of a chart by name. If several panels have a line of this name, the one in the first panel.

    axis: of a chart with several x axes.
    """
    lines: dict[str, dict[str, Any]] = {}
    for group in charts_in(html)[name]["groups"]:
        for line in group["lines"]:
            x = [group["columns"][axis][i] for i in line["x"]] if group["columns"] else line["x"]
            lines.setdefault(line["name"], {**line, "x": x})
    return lines


def ticks_of(page: Any, anchor: str) -> list[tuple[float, float]]:
    """The ticks of the first panel's x axis ("middle") or y axis ("end") as (number, pixels right or up)."""
    texts = page.locator(f"figure .drawing > svg > text[text-anchor={anchor}]")
    script = "all => all.map(t => [t.firstChild.textContent, ...['x', 'y'].map(a => +t.getAttribute(a))])"
    ticks: list[tuple[float, float]] = []
    for text, x, y in texts.evaluate_all(script):
        pixels = x if anchor == "middle" else -y
        if ticks and pixels <= ticks[-1][1]:
            break  # the next panel begins
        ticks.append((float(text.replace(",", "").replace("k", "e3").replace("M", "e6")), pixels))
    return ticks
