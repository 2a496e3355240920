"""Progress bars in the terminal."""

import os
import sys
from typing import Any

from tqdm import tqdm


def progress_bar(**settings: Any) -> tqdm:
    """tqdm's bar with these settings, disabled if standard error is not a terminal.

    Some containers' terminals report a size of 0 by 0, at which tqdm shows nothing: they are taken for 80 by 24.
    """
    size_is_unknown = sys.stderr.isatty() and 0 in os.get_terminal_size(sys.stderr.fileno())
    size = {"ncols": 80, "nrows": 24} if size_is_unknown else {"dynamic_ncols": True}
    return tqdm(disable=None, **size, **settings)
