import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CODE = "from folio.progress import progress_bar\nfor _ in progress_bar(iterable=range(3), desc='steps'): pass"


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("rows, columns", [(0, 0), (24, 0), (24, 60)])
def test_the_bar_is_visible_in_a_terminal_of_any_size(rows, columns):
    """In a terminal that reports a size of 0 by 0, the bar vanished."""
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, check=True)
    os.close(theirs)
    shown, deadline = b"", time.monotonic() + 30
    while b"3/3" not in shown and time.monotonic() < deadline:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # everything has been read
            break
    os.close(ours)
    assert b"steps: 100%" in shown and b"3/3" in shown


def test_without_a_terminal_there_is_no_bar():
    result = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == result.stderr == ""
