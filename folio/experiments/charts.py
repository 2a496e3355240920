"""Charts for a page: figures with JSON data, which chart.js draws in the browser, lines by line_chart.js."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from folio.base.files import finite
from folio.experiments.static_page import FOLDER, page

CHART_STYLE = FOLDER / "chart.css"  # rules of line charts, also those of the viewer, and of other charts
SCRIPTS = ("elements.js", "drawings.js", "line_chart.js", "samples.js", "chart.js")  # chart.js draws the figures
LIVE_SCRIPT = "live.js"  # updates a page from its server
Dash = Literal["solid", "dashed", "dotted"]


@dataclass(frozen=True)
class Panel:
    """One of the stacked plots that share their x axis."""

    title: str
    height: int = 300  # pixels
    from_zero: bool = False  # True: the y axis begins at 0, unless it is logarithmic
    clip: bool = False  # True: neither the first nor the highest 5% of the points of a line decide the y axis


@dataclass(frozen=True)
class Line:
    """A curve. Values that are not finite are gaps."""

    name: str  # full name, shown with the values under the pointer
    x: Sequence[float]  # ascending; in a group with columns, indices of them
    y: Sequence[float]
    panel: int = 0
    width: float = 1.5  # pixels
    dash: Dash = "solid"
    points: bool = False  # draw a marker at each point
    smooth: bool = False  # the reader can smooth it


@dataclass(frozen=True)
class Mark:
    """A vertical line through all panels."""

    x: float  # in a group with columns, an index of them
    dash: Dash


@dataclass(frozen=True)
class LineGroup:
    """Lines and marks of one color that one legend entry shows and hides."""

    name: str
    lines: Sequence[Line]
    marks: Sequence[Mark] = ()
    columns: Sequence[Sequence[float]] = ()  # values on each x axis of a chart with several axes
    about: str = ""  # can be searched, too


@dataclass(frozen=True)
class Axis:
    """An axis of parallel coordinates with one value per row: a number, or the index of a category."""

    name: str
    values: Sequence[float]
    categories: Sequence[str] = ()  # evenly spaced; empty: a numeric axis
    bounds: tuple[float, float] | None = None  # of a numeric axis; None: minimum and maximum
    log: bool = False


def page_with_charts(title: str, parts: Iterable[str], is_live: bool = False) -> str:
    """Return static_page.page with the scripts and the style sheet of the charts."""
    names = (*SCRIPTS, LIVE_SCRIPT) if is_live else SCRIPTS
    script = "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in names)
    return page(title, parts, CHART_STYLE.read_text(encoding="utf-8"), script, is_live)


def line_chart(
    name: str,
    title: str,
    x: str | Sequence[str],
    panels: Sequence[Panel],
    groups: Sequence[LineGroup],
    note: str = "",
    log_x: bool = False,
) -> str:
    """Return a line chart.

    name: of the SVG file. x: title of the x axis, or of each one that the reader can choose. note: shown below the
    title. log_x: whether the x axis begins logarithmic.
    """
    return figure("lines", name=name, title=title, note=note, x=x, panels=panels, groups=groups, logX=log_x)


def bar_chart(name: str, title: str, bars: dict[str, float]) -> str:
    return figure("bars", name=name, title=title, bars=list(bars.items()))


def parallel_chart(name: str, title: str, rows: Sequence[str], axes: Sequence[Axis]) -> str:
    """Return a chart with a line per row through its values, colored by the value on the last axis. rows: names."""
    note = "Drag along an axis to select lines; a click on the axis removes its selection."
    return figure("parallel", name=name, title=title, note=note, rows=rows, axes=axes)


def figure(kind: str, **chart: Any) -> str:
    """Return a chart as HTML. "<" is escaped in the JSON, because a name may contain "</script>"."""
    content = json.dumps({"kind": kind, **chart}, default=as_json, allow_nan=False, separators=(",", ":"))
    content = content.replace("<", "\\u003c")
    return f"<figure class='chart'><script type='application/json'>{content}</script></figure>"


def as_json(part: Any) -> dict[str, Any]:
    """Convert a part of a chart to JSON, with None for NaN and infinity."""
    return finite(vars(part))
