"""Short forms of numbers for tables and messages, and tables."""

from collections.abc import Sequence
from typing import Any


def format_value(value: Any) -> str:
    """A value as text. A float is exact if 10 digits suffice, otherwise rounded to four."""
    if not isinstance(value, float):
        return str(value)
    text = f"{value:.10g}"
    return text if float(text) == value else f"{value:.4g}"


def counted(n: float, noun: str, plural: str | None = None) -> str:
    """A number and a noun: 1 minute, 2,000 steps. plural: None: the noun with an s."""
    number = f"{n:,}" if isinstance(n, int) else f"{n:g}"
    return f"{number} {noun if n == 1 else plural or f'{noun}s'}"


def format_tokens(tokens: int) -> str:
    """500, 11.1k, 11.1M, 11.1B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if tokens >= size:
            return f"{tokens / size:.1f}{letter}"
    return str(tokens)


def format_seconds(seconds: float) -> str:
    """8.2 s, 2 min 20 s, or 3 h 05 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60:02} min"


def aligned_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are aligned with spaces, for the terminal."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )
