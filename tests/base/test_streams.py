"""Standard streams that are closed, full, or without a reader."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from folio.base.settings import ROOT

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="uses a shell's redirections")

SCRIPT = f"""
import subprocess, sys
from pathlib import Path
sys.path[:0] = [{str(ROOT)!r}]
from folio.base.settings import run_script

def main(arguments):
    input = sys.stdin.read()
    with open("result", "w") as result:
        print("printed", flush="flush" in arguments)
        print("problem", file=sys.stderr)
        subprocess.run([sys.executable, "-c", "print('of a child')"])
        result.write("complete")

run_script(main, needs_output="needs_output" in sys.argv)
"""


def run(folder: Path, redirection: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "script.py", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("redirection", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_empty(redirection, tmp_path):
    """Every script ended with a traceback. With descriptor 1 closed, a file could get it, and a child wrote into it."""
    result = run(tmp_path, redirection, "needs_output")
    assert result.returncode == 0 and (tmp_path / "result").read_text() == "complete"
    assert result.stdout in ("", "printed\nof a child\n", "of a child\nprinted\n")
    assert result.stderr in ("", "problem\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
@pytest.mark.parametrize("words", [[], ["flush"]])
def test_a_full_disk_is_one_line(words, tmp_path):
    result = run(tmp_path, ">/dev/full", "needs_output", *words)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last == "error: standard output cannot be written (No space left on device)"
    assert "Traceback" not in result.stderr and "Exception ignored" not in result.stderr


def run_without_reader(folder: Path, *words: str) -> tuple[int, str]:
    (folder / "script.py").write_text(SCRIPT)
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = subprocess.run(
            [sys.executable, "script.py", *words], cwd=folder, stdout=writer, stderr=subprocess.PIPE, text=True
        )
    finally:
        os.close(writer)
    return result.returncode, result.stderr


def test_a_script_without_a_reader_ends_quietly(tmp_path):
    """As in `sample.py | head`."""
    assert run_without_reader(tmp_path, "needs_output", "flush") == (1, "")


@pytest.mark.parametrize("redirection", ["1>/dev/full", "2>/dev/full", ">/dev/full 2>/dev/full"])
def test_a_script_whose_result_is_in_files_continues_on_a_full_disk(redirection, tmp_path):
    """A training run whose log could not be written ended without saving."""
    result = run(tmp_path, redirection, "flush")
    assert result.returncode == 0 and (tmp_path / "result").read_text() == "complete"
    if redirection == "1>/dev/full":
        failure = "standard output cannot be written (No space left on device); continuing without it"
        assert result.stderr == f"{failure}\nproblem\n"


def test_a_script_whose_result_is_in_files_continues_without_a_reader(tmp_path):
    """A training run ended without saving when the `tee` that read its output ended."""
    status, errors = run_without_reader(tmp_path, "flush")
    assert status == 0 and (tmp_path / "result").read_text() == "complete"
    assert errors == "standard output cannot be written (Broken pipe); continuing without it\nproblem\n"
