"""Show runs on a page: one HTML file that opens offline.

    python tools/report.py out-shakespeare-char
    python tools/report.py out-a out-b out-c --output=compared.html
    python tools/report.py "out-*"                                     all folders that match the pattern

The page starts with a table of the runs, the lowest validation loss first. It shows the loss and validation loss,
learning rate, gradient norm, speed, memory and skipped steps, with a vertical line wherever a run was resumed (dashed
after a kill); the forecast of tools/plan.py --save and the measured values; the samples of each evaluation; the
settings that differ between the runs; all settings and the environment of each run.
"""

import json
import math
import sys
from dataclasses import dataclass
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from folio import UserError, checkpoint  # noqa: E402
from folio.comparison import find_runs  # noqa: E402
from folio.configurator import Settings, run_script  # noqa: E402
from folio.files import read_json  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402

PANELS = {  # title -> (key in metrics.jsonl, factor)
    "loss (nats per token)": ("loss", 1.0),
    "learning rate": ("lr", 1.0),
    "gradient norm": ("grad_norm", 1.0),
    "tokens per second": ("tokens_per_second", 1.0),
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
class ReportConfig(Settings):
    # --- files ---
    runs: tuple[str, ...] = ()  # folders of runs, or quoted patterns: "out-*"
    output: str | None = None  # file of the page; None: report.html in the first run's folder

    def problems(self) -> list[tuple[str, str]]:
        """There is a run."""
        example = "python tools/report.py out-shakespeare-char"
        return [] if self.runs else [("runs", f"name at least one run's folder, as in {example}")]


@dataclass(frozen=True)
class Run:
    """The content of a run's folder."""

    name: str
    lines: list[dict[str, Any]]  # metrics.jsonl; the line of step 0 holds only an evaluation
    samples: list[dict[str, Any]]  # samples.jsonl
    state: dict[str, Any]  # state.json of the last checkpoint; empty without one
    plan: dict[str, Any]  # plan.json; empty without one

    @classmethod
    def of(cls, folder: Path) -> "Run":
        """Read a run's folder. Raises UserError unless metrics.jsonl has at least one line."""
        try:
            lines, samples = (
                [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]
                for name in ("metrics.jsonl", "samples.jsonl")
            )
            plan = read_json(folder / "plan.json") if (folder / "plan.json").exists() else {}
        except (OSError, ValueError) as error:
            raise UserError(f"{folder} is not a run's folder, or is damaged ({error})") from None
        if not lines:
            raise UserError(f"{folder}: the run has not logged a step yet")
        if not checkpoint.exists(folder):
            return cls(folder.name, lines, samples, {}, plan)
        saved = checkpoint.load(folder)
        return cls(folder.name, lines, samples, {**saved.state, "config": saved.settings()}, plan)

    def measured(self) -> dict[str, float | None]:
        """The measured values of what a plan forecasts, up to the last logged step. Seconds are those of steps only."""
        last = self.lines[-1]
        tokens_before = [0, *(line["tokens"] for line in self.lines[:-1])]
        timed_tokens, seconds = 0, 0.0
        for line, before in zip(self.lines, tokens_before, strict=True):
            if line["tokens_per_second"]:
                timed_tokens += line["tokens"] - before
                seconds += (line["tokens"] - before) / line["tokens_per_second"]
        return {
            "steps": last["step"],
            "tokens": last["tokens"],
            "tokens_per_second": timed_tokens / seconds if seconds else None,
            "seconds": last["tokens"] * seconds / timed_tokens if timed_tokens else None,
            "memory": max(line["peak_memory"] or 0 for line in self.lines) or None,
        }

    def evaluations(self) -> list[tuple[float, int]]:
        """The validation loss of each evaluation, and its step."""
        return [(line["val_loss"], line["step"]) for line in self.lines if line["val_loss"] is not None]

    def trained_evaluations(self) -> list[tuple[float, int]]:
        """Those after a step of training, which have a checkpoint."""
        return [(loss, step) for loss, step in self.evaluations() if step]

    def best_val_loss(self) -> float:
        """Infinity before the first evaluation of a trained model."""
        return min(self.trained_evaluations(), default=(math.inf, 0))[0]

    def parameters(self) -> int | None:
        """The number of the model's parameters; None if there is no checkpoint, or the model is not one of Folio's."""
        try:
            with torch.device("meta"):
                return GPT(GPTConfig(**self.state["model"])).num_params()["total"]
        except (LookupError, TypeError, ValueError):
            return None


def report(runs: list[Run]) -> str:
    """The page."""
    title = escape("Folio: " + ", ".join(run.name for run in runs))
    parts = [
        f"<!doctype html><meta charset='utf-8'><title>{title}</title><style>{STYLE}</style>",
        f"<h1>{title}</h1>",
        summary(runs),
        curves(runs),
        different_settings(runs),
    ]
    for run in runs:
        parts += [plan_section(run), resumes_section(run), samples_section(run), settings_section(run)]
    return "\n".join(part for part in parts if part)


def summary(runs: list[Run]) -> str:
    """A table with a row per run, the lowest validation loss first. A blank cell is not known."""
    rows = []
    for run in sorted(runs, key=Run.best_val_loss):
        measured, parameters, evaluations = run.measured(), run.parameters(), run.trained_evaluations()
        seconds, speed = measured["seconds"], measured["tokens_per_second"]
        losses = [min(evaluations), evaluations[-1]] if evaluations else []
        rows.append(
            [
                run.name,
                f"{parameters:,}" if parameters else "",
                f"{measured['steps']:,}",
                f"{measured['tokens']:,}",
                format_seconds(seconds) if seconds else "",
                f"{speed:,.0f}" if speed else "",
                *([f"{loss:.4f} at step {step:,}" for loss, step in losses] or ["none yet", "none yet"]),
                str(run.lines[-1]["skipped"]),
            ]
        )
    heads = ["run", "parameters", "steps", "tokens", "time of the steps", "tokens/s"]
    return table([*heads, "best validation loss", "last validation loss", "skipped steps"], rows)


def format_seconds(seconds: float) -> str:
    """8.2 s, 2 min 20 s, or 3 h 05 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60:02} min"


def different_settings(runs: list[Run]) -> str:
    """The settings that differ between the runs, or nothing."""
    configs = [run.state.get("config", {}) for run in runs]
    names = dict.fromkeys(name for config in configs for name in config)
    rows = []
    for name in names:
        values = [json.dumps(config.get(name)) for config in configs]
        if len(set(values)) > 1:
            rows.append([name, *values])
    if not rows:
        return ""
    return "<h2>Settings that differ</h2>\n" + table(["setting", *(run.name for run in runs)], rows)


def plan_section(run: Run) -> str:
    """The forecast of tools/plan.py next to the measured values, or nothing."""
    if not run.plan:
        return ""
    rows = []
    for name, value in run.measured().items():
        planned = run.plan.get(name)
        if planned and value:
            rows.append([name, f"{planned:,.0f}", f"{value:,.0f}", f"{value / planned:.2f}"])
    note = f"{run.plan['by']}; memory is in bytes, and the plan leaves out what the process itself takes"
    heading = f"<h2>{escape(run.name)}: the plan</h2><p>{escape(note)}</p>\n"
    return heading + table(["", "planned", "measured", "measured / planned"], rows)


def resumes_section(run: Run) -> str:
    """Where the run was resumed, or nothing."""
    resumes = run.state.get("resumes")
    if not resumes:
        return ""
    rows = [
        [f"{resume['step']:,}", resume["after"], json.dumps(resume["changes"]), "yes" if resume["exact"] else "no"]
        for resume in resumes
    ]
    heading = f"<h2>{escape(run.name)}: where it was resumed</h2>\n"
    return heading + table(["step", "stopped by", "changed settings: [before, after]", "bitwise identical"], rows)


def samples_section(run: Run) -> str:
    """The samples of each evaluation, the latest first."""
    texts = "".join(
        f"<h4>step {sample['step']:,}</h4><pre>{escape(sample['text'])}</pre>" for sample in reversed(run.samples)
    )
    return details(f"{run.name}: samples", texts)


def settings_section(run: Run) -> str:
    """The run's environment and all its settings."""
    environment = {**run.state.get("versions", {}), **run.state.get("resolved", {})}
    sections = []
    for heading, values in (("environment", environment), ("all settings", run.state.get("config", {}))):
        rows = [[name, json.dumps(value)] for name, value in values.items()]
        sections.append(details(f"{run.name}: {heading}", table([heading, "value"], rows)))
    return "\n".join(sections)


def details(heading: str, content: str) -> str:
    """Content that is shown when its heading is clicked."""
    return f"<details><summary>{escape(heading)}</summary>{content}</details>"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>"]
    lines += [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    return f"<table>{''.join(lines)}</table>"


def curves(runs: list[Run]) -> str:
    """The panels as HTML that contains plotly's script."""
    from plotly.graph_objects import Figure, Scatter
    from plotly.subplots import make_subplots

    figure: Figure = make_subplots(
        rows=len(PANELS), cols=1, shared_xaxes=True, vertical_spacing=0.03, subplot_titles=list(PANELS),
        row_heights=[3.0] + [1.0] * (len(PANELS) - 1),
    )  # fmt: skip
    for run, color in zip(runs, cycle(COLORS), strict=False):
        for row, (key, factor) in enumerate(PANELS.values(), start=1):
            logged = [line for line in run.lines if line[key] is not None]
            x, y = [line["step"] for line in logged], [line[key] * factor for line in logged]
            style = {"color": color, "width": 1}
            group = {"name": run.name, "legendgroup": run.name, "showlegend": row == 1}
            figure.add_trace(Scatter(x=x, y=y, mode="lines", line=style, **group), row, 1)
        x, y = [step for _, step in run.evaluations()], [loss for loss, _ in run.evaluations()]
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


def main(cfg: ReportConfig) -> None:
    folders = [Path(folder) for name in cfg.runs for folder in find_runs(name)]
    page = report([Run.of(folder) for folder in folders])
    output = Path(cfg.output) if cfg.output else folders[0] / "report.html"
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"output={output} cannot be written ({error}); choose another --output") from None
    print(f"{output}: {len(page) / 2**20:.1f} MiB; open it in a browser")


if __name__ == "__main__":
    run_script(main, ReportConfig)
