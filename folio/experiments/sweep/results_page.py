"""The page of a sweep: a summary, a table of results, loss curves, parallel coordinates, and importances."""

from collections.abc import Sequence
from html import escape
from typing import Any

from folio.base.number_format import format_value
from folio.experiments.charts import (
    Axis,
    Line,
    LineGroup,
    Panel,
    bar_chart,
    line_chart,
    page_with_charts,
    parallel_chart,
)
from folio.experiments.static_page import summary, table
from folio.experiments.sweep.outcome import Outcome
from folio.experiments.sweep.results import Row, conclusion, heads, label
from folio.experiments.sweep.space import Dimension, Values

MAX_CURVES = 20  # number of combinations, from the best
MAX_LABEL_CHARACTERS = 40  # per legend entry
UNBROKEN = "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}"  # prevents a line break between a value and its interval


def sweep_page(
    title: str, space: Sequence[Dimension], rows: Sequence[Row], outcomes: Sequence[Outcome],
    importances: dict[str, float], notes: Sequence[str],
) -> str:  # fmt: skip
    """Return the page as HTML."""
    names = [dimension.name for dimension in space]
    sentence = conclusion(rows).replace(" ± ", UNBROKEN)
    parts = [
        summary(sentence),
        table(heads(names), [[cell.replace(" ± ", UNBROKEN) for cell in row.cells(names)] for row in rows]),
        "".join(f"<p>{escape(note)}</p>" for note in notes if note != sentence),
    ]
    if any(outcome.evaluations for outcome in outcomes):
        parts.append(curves(rows, outcomes))
    if any(row.mean for row in rows):
        parts.append(parallel_coordinates(space, rows))
    if importances:
        parts.append(bar_chart("importance", "Importance of each setting", importances))
    return page_with_charts(title, parts)


def curves(rows: Sequence[Row], outcomes: Sequence[Outcome]) -> str:
    """Return a chart of validation loss over tokens, a color per combination; pruned runs are dotted."""
    shown = [row for row in rows if any(o.evaluations for o in outcomes if o.point == row.point)][:MAX_CURVES]
    groups = []
    for row in shown:
        lines = [curve(row, outcome) for outcome in outcomes if outcome.point == row.point and outcome.evaluations]
        groups.append(LineGroup(label(row) if len(label(row)) <= MAX_LABEL_CHARACTERS else f"trial {row.point}", lines))
    title = "Validation loss over tokens, one line per seed"
    if len(shown) == MAX_CURVES < len(rows):
        title += f" (the {MAX_CURVES} best)"
    return line_chart("curves", title, "tokens", [Panel("nats per token", 400)], groups)


def curve(row: Row, outcome: Outcome) -> Line:
    x, y = zip(*outcome.evaluations, strict=True)
    name, dash = f"{label(row)}, seed {outcome.seed}", "solid"
    if outcome.state == "pruned":
        name, dash = f"{name}, pruned", "dotted"
    return Line(name, x, y, dash=dash, points=True)


def parallel_coordinates(space: Sequence[Dimension], rows: Sequence[Row]) -> str:
    """Return a chart with a line per combination through its settings and mean loss."""
    shown = [row for row in rows if row.mean]
    axes = [axis(dimension, [row.params[dimension.name] for row in shown]) for dimension in space]
    axes.append(Axis("validation loss", [row.mean.value for row in shown]))
    return parallel_chart("settings", "Settings and mean loss", [label(row) for row in shown], axes)


def axis(dimension: Dimension, values: Sequence[Any]) -> Axis:
    """Return a setting's axis: evenly spaced values of a list, or the numbers of a range."""
    if isinstance(dimension, Values):
        indices = [dimension.values.index(value) for value in values]
        return Axis(dimension.name, indices, [format_value(value) for value in dimension.values])
    return Axis(dimension.name, values, bounds=(dimension.low, dimension.high), log=dimension.log)
