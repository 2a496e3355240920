"""The page of a sweep: the table of results, loss curves, parallel coordinates, and the importance of each setting."""

from collections.abc import Sequence
from html import escape
from itertools import cycle
from typing import Any

import numpy as np

from folio.base.number_format import format_value
from folio.experiments.static_page import COLORS, figures, page, table
from folio.experiments.sweep.results import Row, heads, label
from folio.experiments.sweep.space import Dimension, Values
from folio.experiments.sweep.study import Outcome

MOST_CURVES = 20  # combinations, the best ones
LONGEST_NAME = 40  # characters of a line in the legend
UNBROKEN = "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}"  # a value stays in one line with its interval


def sweep_page(
    title: str, space: Sequence[Dimension], rows: Sequence[Row], outcomes: Sequence[Outcome],
    importances: dict[str, float], notes: Sequence[str],
) -> str:  # fmt: skip
    """The page as HTML, with plotly's script in it."""
    names = [dimension.name for dimension in space]
    drawn = []
    if any(outcome.evaluations for outcome in outcomes):
        drawn.append(curves(rows, outcomes))
    if any(row.mean for row in rows):
        drawn.append(parallel_coordinates(space, rows))
    if importances:
        drawn.append(importance_bars(importances))
    return page(
        title,
        [
            table(heads(names), [[cell.replace(" ± ", UNBROKEN) for cell in row.cells(names)] for row in rows]),
            "".join(f"<p>{escape(note)}</p>" for note in notes),
            figures(*drawn),
        ],
    )


def curves(rows: Sequence[Row], outcomes: Sequence[Outcome]) -> Any:
    """The validation loss of each run over its tokens; a color for each combination, dotted if it was pruned."""
    from plotly.graph_objects import Figure, Scatter

    figure = Figure()
    shown = [row for row in rows if any(o.evaluations for o in outcomes if o.point == row.point)][:MOST_CURVES]
    for row, color in zip(shown, cycle(COLORS), strict=False):
        of_row = [outcome for outcome in outcomes if outcome.point == row.point and outcome.evaluations]
        name = label(row) if len(label(row)) <= LONGEST_NAME else f"trial {row.point}"
        for number, outcome in enumerate(of_row):
            x, y = zip(*outcome.evaluations, strict=True)
            dash = "dot" if outcome.state == "pruned" else "solid"
            figure.add_trace(
                Scatter(
                    x=x, y=y, mode="lines+markers", line={"color": color, "width": 1.5, "dash": dash},
                    marker={"size": 4}, name=escape(name), legendgroup=str(row.point), showlegend=number == 0,
                    hovertemplate=f"{escape(label(row))}<br>seed {outcome.seed}<br>"
                    "%{x:,} tokens<br>loss %{y:.4f}<extra></extra>",
                )
            )  # fmt: skip
    heading = "Validation loss over tokens, a line per seed"
    if len(shown) == MOST_CURVES < len(rows):
        heading += f" (the {MOST_CURVES} best)"
    return styled(figure, heading, 480).update_xaxes(title_text="tokens").update_yaxes(title_text="nats per token")


def parallel_coordinates(space: Sequence[Dimension], rows: Sequence[Row]) -> Any:
    """A line for each combination through its settings and its mean loss."""
    from plotly.graph_objects import Figure, Parcoords

    shown = [row for row in rows if row.mean]
    losses = [row.mean.value for row in shown]
    axes = [axis(dimension, [row.params[dimension.name] for row in shown]) for dimension in space]
    axes.append({"label": "validation loss", "values": losses})
    line = {"color": losses, "colorscale": "Viridis", "showscale": True}
    figure = Figure(Parcoords(dimensions=axes, line=line))
    return styled(figure, "Settings and mean loss (drag along an axis to select)", 420, top=90)


def axis(dimension: Dimension, values: Sequence[Any]) -> dict[str, Any]:
    """An axis of the parallel coordinates: a list's values at equal distances, or the numbers of a range."""
    if isinstance(dimension, Values):
        ticks = [format_value(value) for value in dimension.values]
        return {
            "label": dimension.name,
            "values": [dimension.values.index(value) for value in values],
            "tickvals": list(range(len(ticks))),
            "ticktext": ticks,
        }
    bounds = [dimension.low, dimension.high]
    if not dimension.log:
        return {"label": dimension.name, "values": values, "range": bounds}
    ticks = np.geomspace(*bounds, 5)
    return {
        "label": dimension.name,
        "values": np.log(values),
        "range": np.log(bounds),
        "tickvals": np.log(ticks),
        "ticktext": [f"{tick:.2g}" for tick in ticks],
    }


def importance_bars(importances: dict[str, float]) -> Any:
    from plotly.graph_objects import Bar, Figure

    names = list(importances)[::-1]
    figure = Figure(Bar(x=[importances[name] for name in names], y=names, orientation="h"))
    heading = "Importance of each setting: its share in the variance of the loss (functional ANOVA)"
    return styled(figure, heading, 140 + 40 * len(names))


def styled(figure: Any, heading: str, height: int, top: int = 60) -> Any:
    return figure.update_layout(
        title=heading, height=height, template="plotly_white", margin={"l": 70, "r": 20, "t": top, "b": 50}
    )
