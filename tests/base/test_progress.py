import os
import struct
import subprocess
import sys
from contextlib import suppress

import pytest

from tests.support.processes import ROOT

CODE = "from folio.base.progress import progress_bar\nfor _ in progress_bar(iterable=range(3), desc='steps'): pass"


def in_terminal(code: str, rows: int = 24, columns: int = 80) -> str:
    """The output of a program in a terminal of this size."""
    import fcntl
    import pty
    import termios

    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=child, stdout=child, stderr=child)
    os.close(child)
    output = b""
    with suppress(OSError):  # at the end of the program
        while part := os.read(parent, 1 << 16):
            output += part
    assert process.wait() in (0, 2)
    os.close(parent)
    return output.decode()


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("rows, columns", [(0, 0), (24, 0), (24, 60)])
def test_the_bar_is_visible_in_a_terminal_of_any_size(rows, columns):
    """In a terminal that reports a size of 0 by 0, the bar was invisible."""
    output = in_terminal(CODE, rows, columns)
    assert "steps: 100%" in output and "3/3" in output


def test_without_a_terminal_there_is_no_bar():
    result = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == result.stderr == ""


HOSTILE = "\x1b]0;title\x07\x1b[2J\rX\x9b1A\x7f\u202egnp.exe\ttab é"
SHOWN = "␛]0;title␇␛[2J␍X\\x9b1A␡\\u202egnp.exe\ttab é"


SCRIPT = f"""
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
    """Generated text, a file name or an error could rename the window and hide earlier output."""
    assert in_terminal(SCRIPT) == f"{SHOWN}\r\n{SHOWN}\r\nerror: {SHOWN}\r\n"


def test_files_and_pipes_receive_the_exact_text():
    result = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True)
    assert result.stdout.decode() == f"{HOSTILE}\n" and result.stderr.decode() == f"{HOSTILE}\nerror: {HOSTILE}\n"
