"""Charts of a page: each is a figure with its data as JSON, which chart.js draws in the browser."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from folio.experiments.static_page import page

FOLDER = Path(__file__).resolve().parent
Dash = Literal["solid", "dashed", "dotted"]


@dataclass(frozen=True)
class Panel:
    """One of the axes below each other that share their x axis."""

    title: str
    height: int = 300  # pixels
    from_zero: bool = False  # whether its y axis begins at 0; such an axis is never logarithmic


@dataclass(frozen=True)
class Line:
    """A curve. Values that are not finite are gaps."""

    name: str  # in full, for the values under the pointer
    x: Sequence[float]  # ascending
    y: Sequence[float]
    panel: int = 0
    width: float = 1.5  # pixels
    dash: Dash = "solid"
    points: bool = False  # whether each point has a marker


@dataclass(frozen=True)
class Mark:
    """A vertical line through all panels."""

    x: float
    dash: Dash


@dataclass(frozen=True)
class LineGroup:
    """The lines and marks that one entry of the legend shows and hides. They have one color."""

    name: str
    lines: Sequence[Line]
    marks: Sequence[Mark] = ()


@dataclass(frozen=True)
class Axis:
    """An axis of parallel coordinates, with a value for each row: a number, or the index of a category."""

    name: str
    values: Sequence[float]
    categories: Sequence[str] = ()  # at equal distances; none: an axis of numbers
    bounds: tuple[float, float] | None = None  # of the numbers; None: the smallest and the largest of them
    log: bool = False


def page_with_charts(title: str, parts: Iterable[str]) -> str:
    """static_page.page with the script and the style sheet that the charts need."""
    style, script = ((FOLDER / name).read_text(encoding="utf-8") for name in ("chart.css", "chart.js"))
    return page(title, parts, style, script)


def line_chart(
    name: str, title: str, x: str, panels: Sequence[Panel], groups: Sequence[LineGroup], note: str = ""
) -> str:
    """Lines over x. name: of the SVG file. x: title of the x axis. note: shown below the title."""
    return figure("lines", name=name, title=title, note=note, x=x, panels=panels, groups=groups)


def bar_chart(name: str, title: str, bars: dict[str, float]) -> str:
    return figure("bars", name=name, title=title, bars=list(bars.items()))


def parallel_chart(name: str, title: str, rows: Sequence[str], axes: Sequence[Axis]) -> str:
    """A line per row through its value on each axis, colored by its value on the last one. rows: their names."""
    note = "Drag along an axis to select lines; a click on the axis removes its selection."
    return figure("parallel", name=name, title=title, note=note, rows=rows, axes=axes)


def figure(kind: str, **chart: Any) -> str:
    """A chart as HTML. A name may contain "</script>", so there is no "<" in the JSON."""
    content = json.dumps({"kind": kind, **chart}, default=as_json, allow_nan=False, separators=(",", ":"))
    content = content.replace("<", "\\u003c")
    return f"<figure class='chart'><script type='application/json'>{content}</script></figure>"


def as_json(part: Any) -> dict[str, Any]:
    """A part of a chart as JSON, which has no NaN and no infinity."""
    if isinstance(part, Line):
        return {**vars(part), "y": [value if math.isfinite(value) else None for value in part.y]}
    return vars(part)
