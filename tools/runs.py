"""List the runs under a folder: their settings, progress, and losses.

    python tools/runs.py                                         under the current folder, the newest first
    python tools/runs.py sweep-x --sort=loss --limit=10          the ten best
    python tools/runs.py --filter=state=finished --filter="learning_rate>1e-3,dataset=novel"
    python tools/runs.py --columns=dropout,date --json=runs.json

A row shows the settings that differ between the listed runs, up to the width of the terminal; the lowest validation
loss and its step; steps, tokens, and the time of the steps; and the state: running, finished, stopped (by Ctrl-C or
another signal, and saved), or failed (ended by an error or a kill). Running processes are not disturbed.
tools/report.py takes the same --filter, --sort and --limit.
"""

import math
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError  # noqa: E402
from folio.base.files import write_json  # noqa: E402
from folio.base.number_format import format_seconds, format_tokens, format_value  # noqa: E402
from folio.base.roles import UNLISTED, names_with  # noqa: E402
from folio.base.settings import CommaSeparated, run_script  # noqa: E402
from folio.base.terminal import say, terminal_width  # noqa: E402
from folio.checkpoints.find_runs import find_runs, no_runs, runs_under  # noqa: E402
from folio.experiments.runs import Run, describe_not_held_out  # noqa: E402
from folio.experiments.selection import (  # noqa: E402
    COLUMNS,
    Selection,
    check_column,
    column_value,
    different_settings,
)
from train import TrainConfig  # noqa: E402

WIDTH = 120  # characters per line without a terminal
GAP = "  "  # between columns
MAX_NAME_CHARACTERS, MAX_VALUE_CHARACTERS = 48, 20  # longer ones are shortened
MAX_LISTED_SETTINGS = 8  # below the table
FIRST, LAST = ("name",), ("loss", "steps", "tokens", "time", "state")  # columns around the settings
LEFT_ALIGNED = ("name", "state", "date", "curve")  # columns


@dataclass(frozen=True)
class RunsConfig(Selection):
    # --- files ---
    folders: tuple[str, ...] = ()  # FOLDER ...: to search recursively; default: the current one
    # --- output ---
    columns: CommaSeparated = ()  # settings to show, date, curve; default: different settings, up to the width
    json: str | None = None  # also write the runs, with all their settings, to this file


def main(cfg: RunsConfig) -> None:
    folders = [Path(folder) for name in cfg.folders or (".",) for folder in find_runs(name)]
    run_folders = [run for folder in folders for run in runs_under(folder) or no_runs(folder)]
    runs = cfg.select(run_folders, base=folders[0] if len(folders) == 1 else None)
    for column in cfg.columns:
        check_column("columns", column, runs)
    sort_column = cfg.sort.removeprefix("-")
    names = [sort_column] if cfg.is_set("sort") and sort_column not in (*FIRST, *LAST) else []
    unlisted = (*names_with(TrainConfig, UNLISTED), "max_iters")  # shown by "steps"
    if terminal_width(sys.stdout) and any(column_value(run, "curve") for run in runs):
        names.append("curve")
    names += cfg.columns or different_settings(runs, unlisted)
    width = math.inf if cfg.columns else shutil.get_terminal_size((WIDTH, 0)).columns
    print("\n".join(format_runs(runs, list(dict.fromkeys(names)), width)))
    if len({run.evaluated_text for run in runs if run.state}) > 1:
        sorted_by = ", so the runs on each text are sorted separately" if sort_column == "loss" else ""
        say(f"losses on different text are not comparable{sorted_by}")
    if note := describe_not_held_out(runs):
        say(note)
    total = "" if len(runs) == len(run_folders) else f" of {len(run_folders):,}"
    states = ", ".join(f"{n:,} {state}" for state, n in Counter(run.status for run in runs).items())
    say(f"{len(runs):,}{total} {'run' if len(run_folders) == 1 else 'runs'}: {states}")
    if cfg.json:
        try:
            write_json(Path(cfg.json), {"runs": [row_of(run) for run in runs]})
        except OSError as error:
            raise UserError(f"json={cfg.json} cannot be written ({error}); choose another --json") from None


def row_of(run: Run) -> dict[str, Any]:
    """Return a run as JSON. null: unknown."""
    loss, best_step = run.best or (None, None)
    return {
        "name": run.name,
        "folder": str(run.folder),
        "state": run.status,
        "date": column_value(run, "date"),
        "loss": loss,
        "best_step": best_step,
        "steps": run.step,
        "max_iters": run.max_iters,
        "tokens": run.tokens,
        "seconds": run.seconds,
        "settings": run.config,
    }


class Column(NamedTuple):
    """A column of the table: a head of several lines, and the cells."""

    head: list[str]
    cells: list[str]
    left: bool  # left-aligned

    @property
    def width(self) -> int:
        return max(map(len, [*self.head, *self.cells]))

    @classmethod
    def of(cls, name: str, runs: list[Run]) -> "Column":
        head = re.findall(r"[^_]+_?", name)  # one line per word, because values are shorter than names
        return cls(head, [cell_of(run, name) for run in runs], name in LEFT_ALIGNED)

    def lines(self, height: int) -> list[str]:
        """Return the lines of the head, padded to `height`, and the cells, padded to the same width."""
        lines = [""] * (height - len(self.head)) + self.head + self.cells
        return [line.ljust(self.width) if self.left else line.rjust(self.width) for line in lines]


def format_runs(runs: list[Run], settings: list[str], width: float) -> Iterator[str]:
    """Yield the lines of a table with a row per run, and a line about settings that do not fit into `width`."""
    first, last = ([Column.of(name, runs) for name in names] for names in (FIRST, LAST))
    space = width - sum(column.width + len(GAP) for column in (*first, *last)) + len(GAP)
    shown, omitted = [], []
    for name in settings:
        column = Column.of(name, runs)
        if column.width + len(GAP) <= space:
            shown.append(column)
            space -= column.width + len(GAP)
        elif name != "curve":
            omitted.append(name)
    columns = [*first, *shown, *last]
    height = max(len(column.head) for column in columns)
    for cells in zip(*(column.lines(height) for column in columns), strict=True):
        yield GAP.join(cells).rstrip()
    if omitted:
        more = f" and {len(omitted) - MAX_LISTED_SETTINGS} more" if len(omitted) > MAX_LISTED_SETTINGS else ""
        yield f"also different: {', '.join(omitted[:MAX_LISTED_SETTINGS])}{more} (--columns={omitted[0]} shows it)"


def cell_of(run: Run, column: str) -> str:
    """Return a run's cell in a column; empty without a value."""
    value = column_value(run, column)
    if column in COLUMNS and value is None:
        return ""
    match column:
        case "name":
            return shorten(value, MAX_NAME_CHARACTERS)
        case "loss":
            return f"{value:.4f} at {run.best[1]:,}"
        case "steps":
            return f"{value:,}" if run.max_iters in (value, None) else f"{value:,} of {run.max_iters:,}"
        case "tokens":
            return format_tokens(value)
        case "time":
            return format_seconds(value)
        case "date":
            return value[:16]
    return shorten(format_value(value), MAX_VALUE_CHARACTERS) if column in {**COLUMNS, **run.config} else ""


def shorten(text: str, length: int) -> str:
    """Shorten a text to `length` characters by removing its middle, or the beginning of a path."""
    if len(text) <= length:
        return text
    head = 0 if "/" in text else (length - 1) // 2
    return f"{text[:head]}…{text[head + 1 - length :]}"


if __name__ == "__main__":
    run_script(main, RunsConfig)
