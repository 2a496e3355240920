"""What a terminal shows: progress bars, and texts whose control characters are visible.

Text of a model, of a file's name or of a foreign file may contain sequences that move the cursor, rename the window or
hide what was printed before. A terminal shows them as symbols; files and pipes receive the exact text.
"""

import os
import sys
from typing import Any, TextIO

from tqdm import tqdm

DIRECTIONS = (0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))  # reorder the text around them
CONTROLS = {  # code point -> what is shown; line breaks and tabs stay
    **{code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"},
    0x7F: "\u2421",
    **{code: f"\\x{code:02x}" for code in range(0x80, 0xA0)},
    **{code: f"\\u{code:04x}" for code in DIRECTIONS},
}


class VisibleText:
    """A terminal that shows control characters as symbols."""

    def __init__(self, terminal: TextIO):
        self.terminal = terminal

    def write(self, text: str) -> int:
        self.terminal.write(text.translate(CONTROLS))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)


def visible(stream: TextIO) -> TextIO | VisibleText:
    """The stream itself, or, for a terminal, one that shows control characters as symbols."""
    return VisibleText(stream) if stream.isatty() else stream


def note(text: object, flush: bool = False) -> None:
    """Print a line on standard error, which itself is not wrapped, because progress bars move the cursor."""
    print(text, file=visible(sys.stderr), flush=flush)


def progress_bar(**settings: Any) -> tqdm:
    """tqdm's bar with these settings, disabled if standard error is not a terminal.

    Some containers' terminals report a size of 0 by 0, at which tqdm shows nothing: they are taken for 80 by 24.
    """
    size_is_unknown = sys.stderr.isatty() and 0 in os.get_terminal_size(sys.stderr.fileno())
    size = {"ncols": 80, "nrows": 24} if size_is_unknown else {"dynamic_ncols": True}
    return tqdm(disable=None, **size, **settings)
