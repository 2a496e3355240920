"""Which runs a command shows: those in folders, filtered, sorted and limited; and the settings in which they differ."""

import difflib
import json
import operator
import os
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from folio import UserError
from folio.base.number_format import format_value
from folio.base.settings import COMMAND_LINE, CommaSeparated, NonEmptyStr, PositiveInt, Settings
from folio.experiments.runs import Run
from folio.training.schedule import STEP_COUNTS
from folio.training.start import COMMAND_SETTINGS, UNCOMPARED

OF_RECORDS = {  # settings of when a run evaluates, and of what it writes down
    *("always_save_checkpoint", "async_save", "eval_interval", "keep_last", "log_interval", "sample_tokens"),
    *("save_interval_minutes", "snapshots", "wandb_log", "wandb_project"),
}
UNLISTED = {*UNCOMPARED, *COMMAND_SETTINGS, *OF_RECORDS} - {"seed", "init_from"}
MOST_VALUES = 8  # to list in a message
COLUMNS = {  # what runs are filtered and sorted by, besides their settings
    "name": lambda run: run.name,
    "loss": lambda run: run.best and run.best[0],
    "steps": lambda run: run.step,
    "tokens": lambda run: run.tokens,
    "time": lambda run: run.seconds,
    "state": lambda run: run.status,
    "date": lambda run: run.written and run.written.isoformat(" ", "milliseconds"),
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
    filter: CommaSeparated = ()  # state=failed, n_layer=6, "learning_rate>1e-3", dataset=novel*, or a part of a name
    sort: NonEmptyStr = "date"  # newest first; or name, loss, steps, tokens, time, state, a setting; -loss: descending
    limit: PositiveInt | None = None  # show only the first so many; None: all

    def select(self, folders: list[Path], base: Path | None = None) -> list[Run]:
        """Those of the runs in these folders that are asked for, as read_runs() reads them.

        Raises UserError if there is none.
        """
        runs = read_runs(folders, base)
        conditions = [Condition.of(text, runs) for text in self.filter]
        selected = [run for run in runs if all(matches(run, condition) for condition in conditions)]
        if not selected:
            raise UserError(describe_no_match(conditions, runs))
        return sort_runs(selected, self.sort)[: self.limit]


def read_runs(folders: list[Path], base: Path | None = None) -> list[Run]:
    """The runs in these folders, each once, and called by its path inside `base`; None: inside the folder of all.

    One that is removed meanwhile is left out.
    """
    paths = {os.path.abspath(folder): folder for folder in folders}
    inside, runs = base and os.path.abspath(base), []
    with suppress(ValueError):  # they are on several of Windows' drives
        inside = inside or os.path.commonpath([os.path.dirname(path) for path in paths])
    for path, folder in paths.items():
        name = Path(os.path.relpath(path, inside) if inside else path).as_posix()
        with suppress(UserError):
            runs.append(Run.of(folder, None if name == "." else name))
    return runs


class Condition(NamedTuple):
    """What --filter asks for, such as n_layer>=6."""

    text: str
    column: str
    operator: str
    value: str

    @classmethod
    def of(cls, text: str, runs: list[Run]) -> "Condition":
        """Parse a condition. A word is a part of a name, or a pattern of names. Raises UserError."""
        parsed = re.fullmatch(r"\s*(\w+)\s*(==|!=|<=|>=|=|<|>)\s*(.*?)\s*", text)
        if not parsed and text in {name for run in runs for name in run.config}:
            raise UserError(
                f"filter={text}: add what it should be, as in --filter={text}=VALUE or '--filter={text}>VALUE'"
            )
        if not parsed:
            return cls(text, "name", "=", text if re.search(r"[*?\[]", text) else f"*{text}*")
        check_column("filter", parsed[1], runs)
        return cls(text, *parsed.groups())


def check_column(setting: str, column: str, runs: list[Run]) -> None:
    """Raise UserError unless the runs can be filtered and sorted by it. setting: where it was given."""
    known = [*COLUMNS, *dict.fromkeys(name for run in runs for name in run.config)]
    if column in known:
        return
    close = difflib.get_close_matches(column, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"use {', '.join(COLUMNS)}, or a setting of train.py"
    raise UserError(f"{setting}={column}: these runs have no {column}; {hint}")


def column_value(run: Run, column: str) -> Any:
    """What a run has in a column. None: nothing yet, or a setting that is None or not known."""
    return COLUMNS[column](run) if column in COLUMNS else run.config.get(column)


def matches(run: Run, condition: Condition) -> bool:
    """Whether a run satisfies a condition. Raises UserError if its value cannot be compared so."""
    text, column, symbol, wanted = condition
    compare = OPERATORS[symbol]
    if column not in {**COLUMNS, **run.config}:
        return False  # there is no checkpoint yet, so its settings are not known
    value = column_value(run, column)
    is_order = symbol[0] in "<>"
    if value is None or wanted.lower() == "none":
        return not is_order and compare(value is None, wanted.lower() == "none")
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return compare(value, float(wanted))
        except ValueError:
            raise UserError(f"filter={text}: {column} is a number, and {wanted!r} is not") from None
    if is_order and column != "date":
        raise UserError(f"filter={text}: {column} is not a number; use = or !=")
    if is_order:
        return compare(value, wanted)
    if isinstance(value, bool):
        return compare(str(value).lower(), wanted.lower())
    return compare(fnmatchcase(value, wanted), True)


def describe_no_match(conditions: list[Condition], runs: list[Run]) -> str:
    """Which condition no run satisfies, and what the runs have instead."""
    for condition in conditions:
        if not any(matches(run, condition) for run in runs):
            column = condition.column
            known = [run for run in runs if column in {**COLUMNS, **run.config}]
            values = dict.fromkeys(format_value(column_value(run, column)) for run in known)
            shown = ", ".join([*values][:MOST_VALUES]) + (", ..." if len(values) > MOST_VALUES else "")
            return f"filter={condition.text}: none of {len(runs):,} runs matches; their {column}: {shown}"
    together = ",".join(condition.text for condition in conditions)
    return f"filter={together}: none of {len(runs):,} runs matches all of it"


def sort_runs(runs: list[Run], sort: str) -> list[Run]:
    """The runs sorted by a column, those without a value last. Dates are sorted from the newest. Raises UserError."""
    column = sort.removeprefix("-")
    check_column("sort", column, runs)
    values = {id(run): column_value(run, column) for run in runs}
    known = [run for run in runs if values[id(run)] is not None]

    def key(run: Run) -> tuple[bool, Any]:  # a setting may be text in some runs and a number in others
        value = values[id(run)]
        return (True, value) if isinstance(value, str) else (False, value)

    known.sort(key=key, reverse=sort.startswith("-") != (column == "date"))
    if column == "loss":  # losses on different data do not compare
        order = list(dict.fromkeys(map(data_of, known)))
        known.sort(key=lambda run: order.index(data_of(run)))
    return [*known, *(run for run in runs if values[id(run)] is None)]


def data_of(run: Run) -> str | None:
    """What identifies the data that a run's losses are on; None if there is no checkpoint yet."""
    return run.state.get("dataset", {}).get("hash")


def different_settings(runs: list[Run]) -> list[str]:
    """The settings that differ between the runs whose settings are known, the most telling ones first.

    Those are the data set, what the run started from, and what was set on a command line, in the order of how many
    runs differ from the most common value; then the others. At the end are settings that split the runs as another one
    does, and max_iters; without the other counts of steps if they are in proportion to it, or a time budget chose them.
    """
    runs = [run for run in runs if run.config]
    configs = [run.config for run in runs]
    asked = {name for run in runs for name, origin in run.state.get("origins", {}).items() if origin == COMMAND_LINE}
    first = {"dataset": 2, "init_from": 2, **dict.fromkeys(asked - {"dataset", "init_from"}, 1)}
    deviating: dict[str, int] = {}  # setting -> how many runs do not have the most common value
    following, splits = [], set()
    for name in dict.fromkeys(name for config in configs for name in config if name not in UNLISTED):
        values = [json.dumps(config.get(name)) for config in configs]
        split = tuple(map(values.index, values))
        if len({*split}) == 1 or (name == "init_from" and {*values} <= {'"scratch"', '"resume"'}):
            continue
        if name in STEP_COUNTS and all(is_scaled_by_budget(run, name) for run in runs):
            continue
        if name == "max_iters" or split in splits:
            following.append(name)
        elif name not in STEP_COUNTS or not in_proportion(name, configs):
            splits.add(split)
            deviating[name] = len(values) - Counter(values).most_common(1)[0][1]
    shown = sorted(deviating, key=lambda name: (first.get(name, 0), deviating[name]), reverse=True)
    return [*shown, *following]


def is_scaled_by_budget(run: Run, name: str) -> bool:
    """Whether a time budget chose this count of steps."""
    return bool(run.config.get("minutes")) and run.state.get("origins", {}).get(name) != COMMAND_LINE


def in_proportion(name: str, configs: list[dict[str, Any]]) -> bool:
    """Whether a setting that counts steps is the same share of max_iters in all runs, up to rounding."""
    pairs = [(config.get(name), config.get("max_iters")) for config in configs]
    if not all(isinstance(number, int) for pair in pairs for number in pair):
        return False
    count, max_iters = pairs[0]
    return all(abs(other * max_iters - count * longer) <= max_iters + longer for other, longer in pairs)
