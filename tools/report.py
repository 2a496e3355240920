"""Runs as a page that one can look at: one HTML file that opens offline.

    python tools/report.py out-shakespeare-char
    python tools/report.py out-a out-b out-c --output=compared.html

Shows loss and validation loss, learning rate, gradient norm, speed, memory and skipped steps, with a line wherever a
run was continued (dashed after a kill); what tools/plan.py had said, beside what came to pass; what the model wrote at
each evaluation; the settings in which the runs differ, and each run's settings and environment in full.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError, checkpoint  # noqa: E402
from folio.configurator import run_script  # noqa: E402
from folio.files import read_json  # noqa: E402

PANELS = {  # title -> the key in metrics.jsonl, and what it is multiplied by
    "loss (nats a token)": ("loss", 1.0),
    "learning rate": ("lr", 1.0),
    "gradient norm": ("grad_norm", 1.0),
    "tokens a second": ("tokens_per_second", 1.0),
    "peak memory (GiB)": ("peak_memory", 2.0**-30),
    "skipped steps": ("skipped", 1.0),
}
COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: .5em 0 }
td, th { border: 1px solid #ccc; padding: .15em .6em; text-align: left }
th { background: #f3f3f3; font-weight: 600 }
pre { background: #f7f7f7; padding: .6em; white-space: pre-wrap }
summary { cursor: pointer; font-weight: 600; margin: .6em 0 }
"""


@dataclass(frozen=True)
class Run:
    """What a run's folder tells: metrics.jsonl, samples.jsonl, and state.json of its last checkpoint, if it has one."""

    name: str
    lines: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    state: dict[str, Any]
    plan: dict[str, Any]  # plan.json, if there is one

    @classmethod
    def of(cls, folder: Path) -> "Run":
        """Raises UserError if there is no metrics.jsonl with a line in it."""
        try:
            lines, samples = (
                [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]
                for name in ("metrics.jsonl", "samples.jsonl")
            )
            plan = read_json(folder / "plan.json") if (folder / "plan.json").exists() else {}
        except (OSError, ValueError) as error:
            raise UserError(f"{folder} is not a run's folder, or damaged ({error})") from None
        if not lines:
            raise UserError(f"{folder}: the run has not logged a step yet")
        state = checkpoint.load(folder).state if checkpoint.exists(folder) else {}
        return cls(folder.name, lines, samples, state, plan)

    def happened(self) -> dict[str, float | None]:
        """What became of the figures of a plan, up to the last step that was logged. Seconds are those of steps."""
        last, timed = self.lines[-1], [line for line in self.lines if line["tokens_per_second"]]
        before = [0, *(line["tokens"] for line in self.lines)]
        tokens = {line["step"]: line["tokens"] - first for line, first in zip(self.lines, before, strict=False)}
        seconds = sum(tokens[line["step"]] / line["tokens_per_second"] for line in timed)
        timed_tokens = sum(tokens[line["step"]] for line in timed)
        return {
            "steps": last["step"],
            "tokens": last["tokens"],
            "tokens_per_second": timed_tokens / seconds if seconds else None,
            "seconds": last["tokens"] * seconds / timed_tokens if timed_tokens else None,
            "memory": max(line["peak_memory"] or 0 for line in self.lines) or None,
        }


def report(runs: list[Run]) -> str:
    """The page."""
    title = "Folio: " + ", ".join(run.name for run in runs)
    rows = []
    for run in runs:
        measured = [line["val_loss"] for line in run.lines if line["val_loss"] is not None]
        best = f"{min(measured):.4f}" if measured else "none yet"
        last = run.lines[-1]
        rows.append([run.name, f"{last['step']:,}", f"{last['tokens']:,}", best, str(last["skipped"])])
    parts = [
        f"<!doctype html><meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}</style>",
        f"<h1>{escape(title)}</h1>",
        table(["run", "steps", "tokens", "best validation loss", "skipped steps"], rows),
        curves(runs),
    ]
    configs = [run.state.get("config", {}) for run in runs]
    names = list(dict.fromkeys(name for config in configs for name in config))
    different = [name for name in names if len({json.dumps(config.get(name)) for config in configs}) > 1]
    if len(runs) > 1 and different:
        parts.append("<h2>Settings that differ</h2>")
        values = [[name, *(json.dumps(config.get(name)) for config in configs)] for name in different]
        parts.append(table(["setting", *(run.name for run in runs)], values))
    for run in runs:
        if run.plan:
            happened = run.happened()
            rows = [
                [name, f"{run.plan[name]:,.0f}", f"{happened[name]:,.0f}", f"{happened[name] / run.plan[name]:.2f}"]
                for name in happened
                if run.plan.get(name) and happened[name]
            ]
            told = f"{run.plan['by']}; memory in bytes, and planned without what the process itself takes"
            parts.append(f"<h2>{escape(run.name)}: the plan</h2><p>{escape(told)}</p>")
            parts.append(table(["", "planned", "happened", "happened / planned"], rows))
        if resumes := run.state.get("resumes"):
            parts.append(f"<h2>{escape(run.name)}: where it was continued</h2>")
            told = [
                [f"{r['step']:,}", r["after"], json.dumps(r["changes"]), "yes" if r["exact"] else "no"] for r in resumes
            ]
            parts.append(table(["step", "stopped by", "changed settings: [then, now]", "to the bit"], told))
        texts = "".join(f"<h4>step {s['step']:,}</h4><pre>{escape(s['text'])}</pre>" for s in reversed(run.samples))
        parts.append(f"<details><summary>{escape(run.name)}: what it wrote</summary>{texts}</details>")
        environment = {**run.state.get("versions", {}), **run.state.get("resolved", {})}
        for heading, values in (("environment", environment), ("all settings", run.state.get("config", {}))):
            shown = table([heading, "value"], [[name, json.dumps(value)] for name, value in values.items()])
            parts.append(f"<details><summary>{escape(run.name)}: {heading}</summary>{shown}</details>")
    return "\n".join(parts)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>"]
    lines += [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    return f"<table>{''.join(lines)}</table>"


def curves(runs: list[Run]) -> str:
    """The panels as a piece of HTML, plotly's script in it."""
    from plotly.graph_objects import Figure, Scatter
    from plotly.subplots import make_subplots

    figure: Figure = make_subplots(
        rows=len(PANELS), cols=1, shared_xaxes=True, vertical_spacing=0.03, subplot_titles=list(PANELS),
        row_heights=[3.0] + [1.0] * (len(PANELS) - 1),
    )  # fmt: skip
    for run, color in zip(runs, cycle(COLORS), strict=False):
        for row, (key, scale) in enumerate(PANELS.values(), start=1):
            points = [(line["step"], line[key] * scale) for line in run.lines if line[key] is not None]
            group = {"name": run.name, "legendgroup": run.name, "showlegend": row == 1}
            style = {"color": color, "width": 1}
            figure.add_trace(
                Scatter(x=[x for x, _ in points], y=[y for _, y in points], mode="lines", line=style, **group), row, 1
            )
        evaluated = [(line["step"], line["val_loss"]) for line in run.lines if line["val_loss"] is not None]
        x, y = [x for x, _ in evaluated], [y for _, y in evaluated]
        style = {"color": color, "width": 3}
        group = {"name": f"{run.name}: validation", "legendgroup": run.name}
        figure.add_trace(Scatter(x=x, y=y, mode="lines+markers", line=style, **group), 1, 1)
        for resume in run.state.get("resumes", []):
            dash = "dash" if resume["after"] == "a kill" else "dot"
            figure.add_vline(x=resume["step"], line={"color": color, "width": 1, "dash": dash})
    figure.update_xaxes(title_text="step", row=len(PANELS), col=1)
    figure.update_yaxes(rangemode="tozero", row=len(PANELS), col=1)
    figure.update_layout(legend={"orientation": "h", "y": 1.06})
    figure.update_layout(height=1250, template="plotly_white", margin={"l": 60, "r": 20, "t": 40, "b": 40})
    return figure.to_html(full_html=False, include_plotlyjs=True)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", nargs="+", type=Path, help="folder of a run")
    parser.add_argument("--output", type=Path, help="the page; report.html in the first run's folder otherwise")
    given = parser.parse_args(argv)
    page = report([Run.of(folder) for folder in given.out_dir])
    output = given.output or given.out_dir[0] / "report.html"
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"output={output}: it cannot be written ({error}); choose another --output") from None
    print(f"{output}: {len(page) / 2**20:.1f} MiB; open it in a browser")


if __name__ == "__main__":
    run_script(main)
