"""A page about runs: a summary, a table of results, curves, plans, resumes, samples, and settings."""

import json
from collections.abc import Collection
from html import escape
from typing import Any

import numpy as np

from folio.base.number_format import counted, format_seconds
from folio.checkpoints.schema import PartRecord
from folio.experiments.charts import Line, LineGroup, Mark, Panel, figure, line_chart, page_with_charts
from folio.experiments.runs import Run, describe_not_held_out
from folio.experiments.selection import different_settings
from folio.experiments.static_page import details, summary, table

LOSS = "loss (nats per token)"
PANELS = {  # title -> (key in metrics.jsonl, factor, height in pixels)
    LOSS: ("loss", 1.0, 340),
    "learning rate": ("lr", 1.0, 120),
    "gradient norm": ("grad_norm", 1.0, 120),
    "tokens per second": ("tokens_per_second", 1.0, 120),
    "peak memory (GiB)": ("peak_memory", 2.0**-30, 120),
    "skipped steps": ("skipped", 1.0, 120),
}
NOISY = ("loss", "grad_norm", "tokens_per_second")  # can be smoothed
TIME_UNITS = {"s": 1, "min": 60, "h": 3600, "days": 86400}  # seconds
MAX_POINTS = 300_000  # of all curves, which browsers can draw
MAX_OPEN_RUNS = 8  # with more runs, their sections are collapsed
MAX_TITLE_NAMES = 4  # with more runs, the title has only their number


def report_page(
    runs: list[Run], unlisted: Collection[str] = (), max_points: int = MAX_POINTS, is_live: bool = False
) -> str:
    """Return the page as HTML.

    unlisted: settings that are not in the table of different ones. is_live: the page updates itself from its server.
    """
    collapsed = len(runs) > MAX_OPEN_RUNS
    title = "Folio: " + (f"{len(runs)} runs" if len(runs) > MAX_TITLE_NAMES else ", ".join(run.name for run in runs))
    parts = [summary(conclusion(runs)), results_table(runs)]
    ordered = sorted(runs, key=lambda run: run.name) if is_live else runs  # colors stay when the ranking changes
    parts += [curves(ordered, unlisted, max_points), samples_figure(ordered), settings_table(runs, unlisted)]
    for run in runs:
        sections = [plan_section(run), resumes_section(run), settings_section(run)]
        parts += [details(run.name, "\n".join(sections))] if collapsed and any(sections) else sections
    return page_with_charts(title, parts, is_live)


def conclusion(runs: list[Run]) -> str:
    """Return which run is the best, by how much, and which ones may have been trained on their validation text."""
    sentence, note = comparison(runs), describe_not_held_out(runs)
    return f"{sentence} {note}." if note else sentence


def comparison(runs: list[Run]) -> str:
    """Return a sentence: which run is the best, and by how much."""
    if len({run.evaluated_text for run in runs} - {None}) > 1:
        known = [run for run in runs if run.evaluated_text]
        hashes = {run.state["dataset"]["hash"] for run in known}
        names = ", ".join(dict.fromkeys(str(run.config.get("dataset")) for run in known))
        different = f"use different data ({names})" if len(hashes) > 1 else "evaluate different parts of their data"
        if len(hashes) == 1 and len({run.is_held_out for run in known}) > 1:
            different = "do not all hold out their validation text"
        return f"The runs {different}, so their losses are not comparable."
    ranked = sorted((run for run in runs if run.best), key=lambda run: run.best)
    if not ranked:
        steps = counted(max(run.step for run in runs), "step")
        return f"No validation loss yet, after {steps}."
    loss, step = ranked[0].best
    result = f"{loss:.4f} at step {step:,}"
    if len(runs) == 1:
        totals = runs[0].totals()
        seconds, speed = totals["seconds"], totals["tokens_per_second"]
        cost = f"; {format_seconds(seconds)} of training at {speed:,.0f} tokens/s" if seconds else ""
        return f"Lowest validation loss {result} of {totals['steps']:,}{cost}."
    if len(ranked) == 1:
        return f"Only {ranked[0].name} of {len(runs)} runs has a validation loss: {result}."
    second, distance = ranked[1].name, ranked[1].best[0] - loss
    return f"The best of {len(runs)} runs is {ranked[0].name}: validation loss {result}, {distance:.4f} below {second}."


def results_table(runs: list[Run]) -> str:
    """Return a table with a row per run. Unknown values are blank, and columns without values are left out."""
    rows = []
    for run in runs:
        totals, parameters, evaluations = run.totals(), run.parameters(), run.trained_evaluations()
        seconds, speed, skipped = totals["seconds"], totals["tokens_per_second"], run.lines[-1]["skipped"]
        losses = [min(evaluations), evaluations[-1]] if evaluations else []
        best, last = [f"{loss:.4f} at step {step:,}" for loss, step in losses] or ["none yet", "none yet"]
        rows.append(
            {
                "run": run.name,
                "parameters": f"{parameters:,}" if parameters else "",
                "steps": f"{totals['steps']:,}",
                "tokens": f"{totals['tokens']:,}",
                "time of the steps": format_seconds(seconds) if seconds else "",
                "state": run.status if run.status != "finished" else "",
                "tokens/s": f"{speed:,.0f}" if speed else "",
                "best validation loss": best,
                "last validation loss": last,
                "skipped steps": f"{skipped:,}" if skipped else "",
            }
        )
    heads = [head for head in rows[0] if any(row[head] for row in rows)]
    return table(heads, [[row[head] for head in heads] for row in rows])


def settings_table(runs: list[Run], unlisted: Collection[str]) -> str:
    """Return a table of the settings that differ, with a row per setting, or per run if there are more runs."""
    names = different_settings(runs, unlisted)
    if not names:
        return ""
    rows = [
        [name, *(json.dumps(run.config[name]) if name in run.config else "" for run in runs)]  # "": unknown
        for name in names
    ]
    if "max_iters" in names:  # a signal, a time budget or patience may end a run earlier
        if any(is_rescaled(run) for run in runs):
            rows.append(["steps planned", *(f"{run.max_iters:,}" if run.max_iters else "" for run in runs)])
        rows.append(["steps completed", *(f"{run.step:,}" for run in runs)])
    head = ["setting", *(run.name for run in runs)]
    if len(runs) > len(rows):
        head, *rows = map(list, zip(["run", *head[1:]], *rows, strict=True))
    return "<h2>Settings that differ</h2>\n" + table(head, rows)


def is_rescaled(run: Run) -> bool:
    """Return whether a time budget changed the planned number of steps."""
    return run.max_iters != run.config.get("max_iters")


def plan_section(run: Run) -> str:
    """Return a table that compares the forecast of tools/plan.py with measured values, if there is a forecast."""
    if not run.plan:
        return ""
    rows = []
    for name, value in run.totals().items():
        planned = run.plan.get(name)
        if isinstance(planned, int | float) and planned and value:
            rows.append([name, f"{planned:,.0f}", f"{value:,.0f}", f"{value / planned:.2f}"])
    note = f"{run.plan['by']}; memory is in bytes, and the plan excludes the memory of the process itself"
    heading = f"<h2>{escape(run.name)}: the plan</h2><p>{escape(note)}</p>\n"
    return heading + table(["", "planned", "measured", "measured / planned"], rows)


def resumes_section(run: Run) -> str:
    """Return a table of the steps at which the run was resumed or rolled back, if any."""
    rows = [
        [f"{part['from_step']:,}", part["after"] or "", changes_of(part), "yes" if part["exact"] else "no"]
        for part in run.parts[1:]
    ]
    if not rows:
        return ""
    heading = f"<h2>{escape(run.name)}: where it was resumed</h2>\n"
    return heading + table(["step", "stopped by", "changed settings: [before, after]", "bitwise identical"], rows)


def changes_of(part: PartRecord) -> str:
    """Return what a part of a run changed: settings, or the sequences and learning rates of a rollback."""
    if "skipped_sequences" not in part:
        return json.dumps(part["changes"])
    begin, end = part["skipped_sequences"]
    return f"sequences {begin:,} to {end - 1:,} skipped, learning rates times {part['lr_factor']:g}"


def samples_figure(runs: list[Run]) -> str:
    """Return the samples of the evaluations, with their validation losses, side by side: of all runs or of one."""
    sampled = []
    for run in runs:
        losses = {step: loss for loss, step in run.evaluations()}
        samples = [(sample["step"], sample["text"], losses.get(sample["step"])) for sample in run.samples]
        sampled.append({"name": run.name, "samples": sorted(samples)})
    if not any(run["samples"] for run in sampled):
        return ""
    return figure("samples", name="samples", title="Samples", runs=sampled)


def settings_section(run: Run) -> str:
    """Return the run's environment and all its settings, if they are known."""
    environment = {**run.parts[-1]["versions"], **run.parts[-1]["resolved"]} if run.parts else {}
    sections = []
    settings = {}
    for name, value in run.state.get("config", {}).items():
        settings[name] = value
        if name == "max_iters":
            if is_rescaled(run):
                settings["(steps planned)"] = run.max_iters
            settings["(steps completed)"] = run.step
    for heading, values in (("environment", environment), ("all settings", settings)):
        rows = [[name, json.dumps(value)] for name, value in values.items()]
        if rows:
            sections.append(details(f"{run.name}: {heading}", table([heading, "value"], rows)))
    return "\n".join(sections)


def curves(runs: list[Run], unlisted: Collection[str], max_points: int) -> str:
    """Return the chart of curves, with a note if it does not show every step. max_points: of all curves."""
    shown = {title: panel for title, panel in PANELS.items() if panel[0] == "loss" or is_logged(panel[0], runs)}
    max_points //= len(runs) * len(shown)
    lines = max(len(run.lines) for run in runs)
    note = f"<p>Curves show up to {max_points:,} evenly spaced steps.</p>" if lines > max_points else ""
    panels = [
        Panel(title, height, from_zero=key == "skipped", clip=title == LOSS)
        for title, (key, _, height) in shown.items()
    ]
    unit = time_unit(max(run.seconds or 0.0 for run in runs))
    axes = ["step", "tokens", *([f"time of the steps ({unit})"] if unit else [])]
    different = different_settings(runs, unlisted)
    groups = []
    for run in runs:
        about = ", ".join(f"{name}={run.config[name]}" for name in different if name in run.config)
        groups.append(run_curves(run, [*shown.values()], max_points, unit, about))
    return note + line_chart("curves", "Curves", axes, panels, groups, legend(runs))


def time_unit(seconds: float) -> str:
    """Return the largest unit of which there are at least two; empty if no time is known."""
    units = [unit for unit, size in TIME_UNITS.items() if seconds >= 2 * size]
    return units[-1] if units else "s" if seconds else ""


def is_logged(key: str, runs: list[Run]) -> bool:
    """Return whether any run has logged a number other than zero."""
    return any(line[key] for run in runs for line in run.lines)


def legend(runs: list[Run]) -> str:
    text = "Loss: thin in training, thick with points in validation"
    text += ", dotted before a rollback." if any(run.abandoned for run in runs) else "."
    text += " The first point does not decide the axis."
    if any(run.parts[1:] for run in runs):
        text += " Vertical lines: resumed or rolled back, dashed after a kill."
    return text


class AxisColumns:
    """The values of logged lines on each x axis: the step, the tokens, and the time of the steps."""

    def __init__(self, unit: str):
        self.unit = TIME_UNITS.get(unit)
        self.steps: list[float] = []
        self.tokens: list[float] = []
        self.times: list[float] = []

    @property
    def all(self) -> list[list[float]]:
        return [self.steps, self.tokens, *([self.times] if self.unit else [])]

    def add(self, lines: list[dict[str, Any]], times: list[float]) -> int:
        """Add lines of metrics.jsonl, and return the index of the first one. times: seconds."""
        begin = len(self.steps)
        self.steps += [line["step"] for line in lines]
        self.tokens += [line["tokens"] for line in lines]
        self.times += [float(f"{time / self.unit:.6g}") for time in times] if self.unit else []
        return begin

    def add_mark(self, step: int, end: int) -> int:
        """Add a step between those of the first `end` rows, and return its index."""
        for column in (self.tokens, self.times)[: 1 + bool(self.unit)]:
            column.append(float(f"{np.interp(step, self.steps[:end], column[:end]):.6g}"))
        self.steps.append(step)
        return len(self.steps) - 1


def run_curves(run: Run, panels: list[tuple[str, float, int]], max_points: int, unit: str, about: str) -> LineGroup:
    """Return the curves of a run, with marks at the steps at which it was resumed. panels: values of PANELS."""
    lines, columns, times = [], AxisColumns(unit), run.times()
    columns.add(run.lines, times)
    for panel, (key, factor, _) in enumerate(panels):
        logged = [i for i, line in enumerate(run.lines) if line[key] is not None]
        logged = logged[:: -(-len(logged) // max_points) or 1]
        y = [run.lines[i][key] * factor for i in logged]
        lines.append(Line(run.name, logged, y, panel, width=1, smooth=key in NOISY))
    row_of = {line["step"]: i for i, line in enumerate(run.lines)}
    x, y = [row_of[step] for _, step in run.evaluations()], [loss for loss, _ in run.evaluations()]
    lines.append(Line(f"{run.name}: validation", x, y, width=3, points=True))
    for abandoned in run.abandoned.values():
        before = next((i for i, line in enumerate(run.lines) if line["step"] >= abandoned[0]["step"]), len(times)) - 1
        start, tokens = (times[before], run.lines[before]["tokens"]) if before >= 0 else (0.0, 0)
        begin = columns.add(abandoned, [start + time for time in run.times(abandoned, tokens)])
        for key in ("loss", "val_loss"):
            logged = [i for i, line in enumerate(abandoned) if line[key] is not None]
            x, y = [begin + i for i in logged], [abandoned[i][key] for i in logged]
            name = f"{run.name}: {'validation' if key == 'val_loss' else 'training'} before a rollback"
            lines.append(Line(name, x, y, width=3 if key == "val_loss" else 1, dash="dotted", points=key == "val_loss"))
    marks = [
        Mark(columns.add_mark(part["from_step"], len(run.lines)), "dashed" if part["after"] == "a kill" else "dotted")
        for part in run.parts[1:]
    ]
    return LineGroup(run.name, lines, marks, columns.all, about)
