"""The ledger: a line of JSON per experiment, and what the experiments so far teach about the next one.

Lines are only appended. Of several lines with the same id, the last one counts, so that ledgers of several machines
can be merged by concatenation.
"""

import json
import os
import socket
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from folio.base.number_format import counted, format_seconds
from folio.base.terminal import table
from folio.evaluation.sequential import LUCK, Spread, kept, kept_p, lord_levels, pooled_spread

FILE = "ledger.jsonl"
TESTED = ("better", "worse", "no difference", "undecided")  # verdicts of complete experiments


def read(root: Path) -> list[dict[str, Any]]:
    """Return the last line of each experiment, in the order in which they began."""
    path = root / FILE
    if not path.exists():
        return []
    entries: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
            entries[entry["id"]] = entry
        except (ValueError, LookupError, TypeError):  # the last line of a process that was killed
            continue
    return sorted(entries.values(), key=lambda entry: (entry["began"], entry["id"]))


def append(root: Path, entry: dict[str, Any]) -> None:
    """Append a line, in one write, so that lines of several processes do not mix. Raises OSError."""
    with open(root / FILE, "ab+", buffering=0) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        is_complete = file.read(1) in (b"", b"\n")  # the last line, unless its process was killed
        line = f"{as_line(entry)}\n".encode()
        file.write(line if is_complete else b"\n" + line)


def as_line(entry: dict[str, Any]) -> str:
    """Return an experiment's line of the ledger."""
    return json.dumps(entry, allow_nan=False)


def new_entry(name: str, began: str, **fields: Any) -> dict[str, Any]:
    """Return the line of an experiment that begins. fields: those that are known, of the ones below."""
    known = {
        "id": f"{name} {began}",
        "name": name,  # of the folder
        "began": began,
        "note": "",
        "config": "",  # name of the config file
        "budget": "",
        "recipe": None,  # identifies the settings, budget and data
        "a": None,  # name, commit, hash of the files, and options of an arm
        "b": None,
        "files": [],  # that differ, with the numbers of lines
        "seed": None,  # of the first pair
        "host": socket.gethostname(),
        "verdict": "unfinished",
        "reason": None,  # of a failure
        "seconds": None,  # of training
        "unit": None,  # of the losses
        "losses": [],  # lowest validation losses of A and B, by pair
        "difference": None,  # B - A, with an interval that is valid however often one looks
        "low": None,
        "high": None,
        "speed_ratio": None,  # B's tokens per second, divided by A's
        "models": [],  # parameters, FLOPs per token, tokens per second, and peak memory in bytes of A and B
    }
    return {**known, **fields}


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def differences(entry: dict[str, Any]) -> np.ndarray:
    """Return B's loss minus A's of each pair of an experiment: (N,)."""
    return np.array([b - a for a, b in entry["losses"]])


def spread_for(entries: Sequence[dict[str, Any]], recipe: str) -> Spread | None:
    """Return the spread of the paired differences of the experiments with this recipe and budget, if there are any."""
    return pooled_spread([differences(e) for e in entries if e["recipe"] == recipe and e["verdict"] in TESTED])


def level_for(entries: Sequence[dict[str, Any]], began: str) -> float:
    """Return the level of the p-value at which the idea of an experiment that began at this time is kept."""
    return lord_levels([kept_p(differences(e)) for e in entries if e["verdict"] in TESTED and e["began"] < began])[-1]


def are_kept(entries: Sequence[dict[str, Any]]) -> list[bool]:
    """Return whether each experiment's idea is kept: better, by a test that bounds the share of luck among all kept."""
    p_values = [kept_p(differences(e)) if e["verdict"] in TESTED else None for e in entries]
    tested = [p for p in p_values if p is not None]
    results = iter(kept(tested))
    return [p is not None and next(results) for p in p_values]


def summary(entries: Sequence[dict[str, Any]]) -> str:
    """Return a sentence on all ideas: how many are better, how many are kept, and how many of them may be luck."""
    better = sum(entry["verdict"] == "better" for entry in entries)
    n_kept = sum(are_kept(entries))
    return (
        f"better: {better}, kept: {n_kept} of {counted(len(entries), 'idea')}; at most {LUCK:.0%} of the kept are "
        f"expected to be luck"
    )


def best_lines(entries: Sequence[dict[str, Any]]) -> list[str]:
    """Return, for each recipe, the lowest mean loss of an idea as selected, and as measured again with new seeds."""
    lines = []
    for recipe in dict.fromkeys(entry["recipe"] for entry in entries if entry["recipe"]):
        tested = [e for e in entries if e["recipe"] == recipe and e["verdict"] in TESTED and e["losses"]]
        if len(tested) < 2:
            continue
        best = min(tested, key=mean_loss)
        again = [e for e in tested if code_of(e["b"]) == code_of(best["b"]) and e["began"] > best["began"]]
        line = f"Lowest loss with {best['config']}: {mean_loss(best):.4f} ({best['name']}), as selected"
        if again:
            line += f"; {mean_loss(again[-1]):.4f} measured again with new seeds."
        else:
            line += "; selecting it makes this too low. Repeat its command with --new to measure it with new seeds."
        lines.append(line)
    return lines


def code_of(arm: dict[str, Any]) -> tuple[str, list[str]]:
    """Return what identifies an arm's code and settings."""
    return arm["hash"], list(arm["options"])


def mean_loss(entry: dict[str, Any]) -> float:
    """Return B's mean loss."""
    return float(np.mean([b for _, b in entry["losses"]]))


HEADS = ("idea", "what", "recipe", "budget", "pairs", "B - A", "interval", "verdict", "kept", "speed", "time")


def rows(entries: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the cells of a table row per experiment; see HEADS."""
    return [
        [
            entry["name"],
            entry["note"] or entry["b"]["name"],
            entry["config"],
            entry["budget"],
            str(len(entry["losses"])) if entry["losses"] else "",
            "" if entry["difference"] is None else f"{entry['difference']:+.4f}",
            "" if entry["low"] is None else f"{entry['low']:+.4f} to {entry['high']:+.4f}",
            f"{entry['verdict']}: {entry['reason']}" if entry["reason"] else entry["verdict"],
            "kept" if is_kept else "",
            f"{entry['speed_ratio']:.2f}" if entry["speed_ratio"] else "",
            format_seconds(entry["seconds"]) if entry["seconds"] else "",
        ]
        for entry, is_kept in zip(entries, are_kept(entries), strict=True)
    ]


def format_table(entries: Sequence[dict[str, Any]], width: int | None = None) -> str:
    """Format the table. width: of the terminal; None: Markdown."""
    return table(HEADS, rows(entries), width)
