"""Output for people: on a terminal, lines wrap at words, tables are aligned, and losses are a small curve.

Files, pipes, and terminals without capabilities (TERM=dumb) receive the exact lines. No colors are used, so NO_COLOR
changes nothing.
"""

import math
import os
import re
import sys
import unicodedata
from collections.abc import Sequence
from itertools import zip_longest
from typing import TextIO

from folio.base.number_format import aligned_table

BLOCKS = "▁▂▃▄▅▆▇█"
GAP = "  "  # between columns
MAX_WORD = 20  # characters; a longer word, such as a path, is broken in the cell of a table that is too wide
# A command, up to punctuation before a space, and options that belong together are never broken: the terminal itself
# continues them on the next row, and what is copied from there has no line break.
PROGRAM = r"(?:python (?:[^ ]*\.py|'[^']*\.py'|-)|torchrun -|pip install)"
COMMAND = rf"""[("'`]?{PROGRAM}(?:'[^']*'|"[^"]*"|[,;:.)](?! |$)|[^,;:.)'"])*"""
OPTIONS = r"--[^ ]+(?: --[^ ]+)+"
UNIT = re.compile(rf"( *)((?:{COMMAND}|{OPTIONS})?[^ ]*)")


def terminal_width(stream: TextIO) -> int | None:
    """The width of a terminal in characters, 80 if it does not report one; None for a file, a pipe or TERM=dumb."""
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):  # it has no descriptor
        return 80


def say(*lines: str, indent: int = 2) -> None:
    """Print lines to standard output, wrapped on a terminal. indent: of the continuation lines."""
    print("\n".join(fit(line, sys.stdout, indent) for line in lines), flush=True)


def fit(text: str, stream: TextIO, indent: int = 2) -> str:
    """Wrap a text for a terminal. Returns it unchanged for another stream."""
    width = terminal_width(stream)
    return text if width is None else wrap(text, width, indent)


def wrap(text: str, width: int, indent: int = 2) -> str:
    """Break lines longer than `width` between words. A word or a command that is longer stays in one piece."""
    lines: list[str] = []
    for line in text.split("\n"):
        begin = len(lines)
        for gap, unit in UNIT.findall(line) if display_width(line) > width else [("", line)]:
            if len(lines) > begin and (not unit or display_width(lines[-1] + gap + unit) <= width):
                lines[-1] += gap + unit if unit else ""
            else:
                lines.append(" " * indent + unit if len(lines) > begin else gap + unit)
    return "\n".join(lines)


def one_line(text: str, width: int) -> str:
    """A text on one line of at most `width` characters, with single spaces for line breaks."""
    text, shown = " ".join(text.split()), ""
    if display_width(text) <= width:
        return text
    for character in text:
        if display_width(shown + character) >= width:
            break
        shown += character
    return f"{shown.rstrip()}…"


def display_width(text: str) -> int:
    """The cells of a terminal that a text takes: two for a wide East Asian character, none for a combining one."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(map(bool, map(unicodedata.combining, text)))


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve of one character per value, from ▁, the lowest, to █. Empty without values.

    Of more than `width` values, it shows evenly spaced ones, with the first and the last. Values that are not finite
    are shown as a dot.
    """
    count = min(width, len(values))
    if len(values) > count > 1:
        values = [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]
    values = values[-count:] if count else []
    finite = [value for value in values if math.isfinite(value)]
    low, span = (min(finite), max(finite) - min(finite)) if finite else (0.0, 0.0)
    return "".join(
        BLOCKS[round(7 * (value - low) / span) if span else 0] if math.isfinite(value) else "·" for value in values
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> str:
    """A table with aligned columns. width: that of the terminal; None: aligned Markdown.

    Cells wrap between words to fit. If this is not enough, each row becomes a paragraph with a line per column.
    """
    if width is None:
        return aligned_table(head, rows)
    cells_by_column = list(zip(head, *rows, strict=True))
    widths = [max(1, *map(display_width, cells)) for cells in cells_by_column]
    words = [max(map(display_width, " ".join(cells).split() or [""])) for cells in cells_by_column]
    words = [min(size, MAX_WORD) for size in words]
    if sum(words) + len(GAP) * (len(words) - 1) > width:
        pairs = [[f"{name}: {cell}" for name, cell in zip(head, row, strict=True)] for row in rows]
        return "\n\n".join("\n".join(wrap(pair, width) for pair in row) for row in pairs)
    while sum(widths) + len(GAP) * (len(widths) - 1) > width:
        _, widest = max((size, i) for i, size in enumerate(widths) if size > words[i])
        widths[widest] -= 1
    lines = []
    for cells in (head, ["─" * size for size in widths], *rows):
        wrapped = [cell_lines(cell, size) for cell, size in zip(cells, widths, strict=True)]
        for parts in zip_longest(*wrapped, fillvalue=""):
            padded = [part + " " * (size - display_width(part)) for part, size in zip(parts, widths, strict=True)]
            lines.append(GAP.join(padded).rstrip())
    return "\n".join(lines)


def cell_lines(cell: str, width: int) -> list[str]:
    """The lines of a cell of this width."""
    lines = wrap(cell, width, indent=0).split("\n")
    return [line[i : i + width] for line in lines for i in range(0, max(1, len(line)), width)]
