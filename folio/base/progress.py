"""Terminal output: progress bars, and text with visible control characters.

Generated text, file names and foreign files may contain escape sequences that move the cursor, rename the window or
hide earlier output. On a terminal, control characters appear as symbols; files and pipes receive the exact text.
"""

import os
import sys
from typing import Any, TextIO

from tqdm import tqdm

from folio.base.terminal import fit

BIDI_CONTROLS = (0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))  # reorder the text around them
CONTROLS = {  # code point -> replacement; line breaks and tabs stay
    **{code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"},
    0x7F: "\u2421",
    **{code: f"\\x{code:02x}" for code in range(0x80, 0xA0)},
    **{code: f"\\u{code:04x}" for code in BIDI_CONTROLS},
}


class ControlCharacterFilter:
    """A terminal stream that replaces control characters by symbols."""

    def __init__(self, terminal: TextIO):
        self.terminal = terminal

    def write(self, text: str) -> int:
        self.terminal.write(text.translate(CONTROLS))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)


def filter_controls(stream: TextIO) -> TextIO | ControlCharacterFilter:
    """Wrap a terminal so that control characters appear as symbols. Returns any other stream unchanged."""
    return ControlCharacterFilter(stream) if stream.isatty() else stream


def note(text: object, flush: bool = False) -> None:
    """Print a line to standard error.

    sys.stderr itself is not filtered, because progress bars move the cursor.
    """
    print(fit(str(text), sys.stderr), file=filter_controls(sys.stderr), flush=flush)


def progress_bar(**settings: Any) -> tqdm:
    """A tqdm bar, disabled if standard error is not a terminal.

    Terminals of some containers report a size of 0 by 0, at which tqdm shows nothing; 80 by 24 is assumed then.
    """
    size_is_unknown = sys.stderr.isatty() and 0 in os.get_terminal_size(sys.stderr.fileno())
    size = {"ncols": 80, "nrows": 24} if size_is_unknown else {"dynamic_ncols": True}
    return tqdm(disable=None, **size, **settings)
