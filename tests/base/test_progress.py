import os
import subprocess
import sys
import time

import pytest

from tests.support.processes import ROOT

CODE = "from folio.base.progress import progress_bar\nfor _ in progress_bar(iterable=range(3), desc='steps'): pass"


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


HOSTILE = "\x1b]0;title\x07\x1b[2J\rX\x9b1A\x7f\u202egnp.exe\ttab é"
SHOWN = "␛]0;title␇␛[2J␍X\\x9b1A␡\\u202egnp.exe\ttab é"


def in_terminal(code: str) -> str:
    """What a program writes to a terminal."""
    import pty

    parent, child = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=child, stderr=child)
    os.close(child)
    written = b""
    while True:
        try:
            part = os.read(parent, 1 << 16)
        except OSError:  # the program has ended
            break
        if not part:
            break
        written += part
    process.wait()
    os.close(parent)
    return written.decode()


CODE_OF_A_SCRIPT = f"""
import sys
from folio import UserError
from folio.base.settings import run_script
from folio.base.progress import note

def main(arguments):
    print({HOSTILE!r})
    note({HOSTILE!r})
    raise UserError({HOSTILE!r})

sys.argv = ["x"]
run_script(main)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_shows_control_characters_as_symbols():
    """A model's text, a file's name or an error could rename the window, and hide what was printed before."""
    assert in_terminal(CODE_OF_A_SCRIPT) == f"{SHOWN}\r\n{SHOWN}\r\nerror: {SHOWN}\r\n"


def test_files_and_pipes_receive_the_exact_text():
    done = subprocess.run([sys.executable, "-c", CODE_OF_A_SCRIPT], cwd=ROOT, capture_output=True)
    assert done.stdout.decode() == f"{HOSTILE}\n" and done.stderr.decode() == f"{HOSTILE}\nerror: {HOSTILE}\n"
