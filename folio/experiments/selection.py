"""Select runs: filter, sort and limit them; and find the settings in which they differ."""

import difflib
import json
import operator
import os
import re
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from folio import UserError
from folio.base.number_format import counted, format_value
from folio.base.settings import COMMAND_LINE, CommaSeparated, NonEmptyStr, PositiveInt, Settings
from folio.base.terminal import sparkline
from folio.experiments.runs import Run
from folio.training.schedule import STEP_COUNTS

MAX_VALUES = 8  # values listed in a message
MAX_CURVE = 10  # characters of the curve of the validation losses
COLUMNS = {  # columns to filter and sort by, in addition to settings
    "name": lambda run: run.name,
    "loss": lambda run: run.best and run.best[0],
    "steps": lambda run: run.step,
    "tokens": lambda run: run.tokens,
    "time": lambda run: run.seconds,
    "state": lambda run: run.status,
    "date": lambda run: run.written and run.written.isoformat(" ", "milliseconds"),
    "curve": lambda run: sparkline([loss for loss, _ in run.trained_evaluations()], MAX_CURVE) or None,
}
OPERATORS = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class Selection(Settings):
    # --- selection ---
    filter: CommaSeparated = ()  # state=failed, n_layer=6, "learning_rate>1e-3", dataset=novel*, or part of a name
    sort: NonEmptyStr = "date"  # newest first; or name, loss, steps, tokens, time, state, a setting; -loss: descending
    limit: PositiveInt | None = None  # show only the first `limit` runs; None: all

    def select(self, folders: list[Path], base: Path | None = None) -> list[Run]:
        """Read the runs in the folders and select by the settings. base: as in read_runs.

        Raises UserError if no run matches.
        """
        runs = read_runs(folders, base)
        conditions = [Condition.of(text, runs) for text in self.filter]
        selected = [run for run in runs if all(matches(run, condition) for condition in conditions)]
        if not selected:
            raise UserError(describe_no_match(conditions, runs))
        return sort_runs(selected, self.sort)[: self.limit]


def read_runs(folders: list[Path], base: Path | None = None) -> list[Run]:
    """Read the runs in the folders, without duplicates. Runs that are removed meanwhile are left out.

    base: directory that the runs' names are relative to; None: their common parent.
    """
    paths = {os.path.abspath(folder): folder for folder in folders}
    parent, runs = base and os.path.abspath(base), []
    with suppress(ValueError):  # on Windows, they may be on several drives
        parent = parent or os.path.commonpath([os.path.dirname(path) for path in paths])
    for path, folder in paths.items():
        name = Path(os.path.relpath(path, parent) if parent else path).as_posix()
        with suppress(UserError):
            runs.append(Run.of(folder, None if name == "." else name))
    return runs


class Condition(NamedTuple):
    """A condition of --filter, such as n_layer>=6."""

    text: str
    column: str
    operator: str
    value: str

    @classmethod
    def of(cls, text: str, runs: list[Run]) -> "Condition":
        """Parse a condition. A word without an operator is part of a name, or a pattern. Raises UserError."""
        parsed = re.fullmatch(r"\s*(\w+)\s*(==|!=|<=|>=|=|<|>)\s*(.*?)\s*", text)
        if not parsed and text in {name for run in runs for name in run.config}:
            raise UserError(
                f"filter={text}: add an operator and a value, as in --filter={text}=VALUE or '--filter={text}>VALUE'"
            )
        if not parsed:
            return cls(text, "name", "=", text if re.search(r"[*?\[]", text) else f"*{text}*")
        check_column("filter", parsed[1], runs)
        return cls(text, *parsed.groups())


def check_column(setting: str, column: str, runs: list[Run]) -> None:
    """Raise UserError if `column` is unknown. setting: the option that names it."""
    known = [*COLUMNS, *dict.fromkeys(name for run in runs for name in run.config)]
    if column in known:
        return
    close = difflib.get_close_matches(column, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"use {', '.join(COLUMNS)}, or a setting of train.py"
    raise UserError(f"{setting}={column}: these runs have no {column}; {hint}")


def column_value(run: Run, column: str) -> Any:
    """Return a run's value in a column. None: no value yet, or a setting that is None or unknown."""
    return COLUMNS[column](run) if column in COLUMNS else run.config.get(column)


def matches(run: Run, condition: Condition) -> bool:
    """Return whether a run satisfies a condition. Raises UserError if the values are not comparable."""
    text, column, symbol, expected = condition
    compare = OPERATORS[symbol]
    if column not in {**COLUMNS, **run.config}:
        return False  # without a checkpoint, the settings are unknown
    value = column_value(run, column)
    is_order = symbol[0] in "<>"
    if value is None or expected.lower() == "none":
        return not is_order and compare(value is None, expected.lower() == "none")
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return compare(value, float(expected))
        except ValueError:
            raise UserError(f"filter={text}: {column} is a number, but {expected!r} is not") from None
    if is_order and column != "date":
        raise UserError(f"filter={text}: {column} is not a number; use = or !=")
    if is_order:
        return compare(value, expected)
    if isinstance(value, bool):
        return compare(str(value).lower(), expected.lower())
    return compare(fnmatchcase(value, expected), True)


def describe_no_match(conditions: list[Condition], runs: list[Run]) -> str:
    """Return an error message with the condition that no run satisfies, and the runs' values."""
    for condition in conditions:
        if not any(matches(run, condition) for run in runs):
            column = condition.column
            known = [run for run in runs if column in {**COLUMNS, **run.config}]
            values = dict.fromkeys(format_value(column_value(run, column)) for run in known)
            shown = ", ".join([*values][:MAX_VALUES]) + (", ..." if len(values) > MAX_VALUES else "")
            return f"filter={condition.text}: no match among {counted(len(runs), 'run')}; values of {column}: {shown}"
    combined = ",".join(condition.text for condition in conditions)
    return f"filter={combined}: none of {counted(len(runs), 'run')} matches all conditions"


def sort_runs(runs: list[Run], sort: str) -> list[Run]:
    """Sort runs by a column; runs without a value are last, and dates are in descending order. Raises UserError."""
    column = sort.removeprefix("-")
    check_column("sort", column, runs)
    values = {id(run): column_value(run, column) for run in runs}
    known = [run for run in runs if values[id(run)] is not None]

    def key(run: Run) -> tuple[bool, Any]:  # a setting may be a string in some runs and a number in others
        value = values[id(run)]
        return (True, value) if isinstance(value, str) else (False, value)

    known.sort(key=key, reverse=sort.startswith("-") != (column == "date"))
    if column == "loss":  # losses on different text are not comparable
        order = list(dict.fromkeys(run.evaluated_text for run in known))
        known.sort(key=lambda run: order.index(run.evaluated_text))
    return [*known, *(run for run in runs if values[id(run)] is None)]


def different_settings(runs: list[Run], unlisted: Collection[str] = ()) -> list[str]:
    """Return the settings that differ between the runs with known settings, the most informative first.

    First are the data set and init_from, then settings from a command line, then the others, each by the number of runs
    that differ from the most common value. Last are max_iters, and settings that split the runs as another one does.
    Other step counts are left out if they are proportional to max_iters, or a time budget chose them. unlisted: other
    settings to leave out.
    """
    runs = [run for run in runs if run.config]
    configs = [run.config for run in runs]
    explicit = {name for run in runs for name, origin in run.state.get("origins", {}).items() if origin == COMMAND_LINE}
    priorities = {**dict.fromkeys(explicit, 1), "dataset": 2, "init_from": 2}
    deviating: dict[str, int] = {}  # setting -> number of runs without the most common value
    trailing, splits = [], set()
    for name in dict.fromkeys(name for config in configs for name in config if name not in unlisted):
        values = [json.dumps(config.get(name)) for config in configs]
        split = tuple(map(values.index, values))
        if len({*split}) == 1 or (name == "init_from" and {*values} <= {'"scratch"', '"resume"'}):
            continue
        if name in STEP_COUNTS and all(is_scaled_by_budget(run, name) for run in runs):
            continue
        if name == "max_iters" or split in splits:
            trailing.append(name)
        elif name not in STEP_COUNTS or not is_proportional(name, configs):
            splits.add(split)
            deviating[name] = len(values) - Counter(values).most_common(1)[0][1]
    shown = sorted(deviating, key=lambda name: (priorities.get(name, 0), deviating[name]), reverse=True)
    return [*shown, *trailing]


def is_scaled_by_budget(run: Run, name: str) -> bool:
    """Return whether a time budget chose this step count."""
    return bool(run.config.get("minutes")) and run.state.get("origins", {}).get(name) != COMMAND_LINE


def is_proportional(name: str, configs: list[dict[str, Any]]) -> bool:
    """Return whether a step count is the same fraction of max_iters in all runs, up to rounding."""
    pairs = [(config.get(name), config.get("max_iters")) for config in configs]
    if not all(isinstance(number, int) for pair in pairs for number in pair):
        return False
    count, max_iters = pairs[0]
    return all(abs(c * max_iters - count * n) <= max_iters + n for c, n in pairs)
