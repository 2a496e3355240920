"""Runs the project's scripts in separate processes. They start quickly, because they are forked from a process that has
imported torch, which takes one to three seconds.
"""

import atexit
import multiprocessing
import os
import runpy
import sys
import tempfile
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess

ROOT = Path(__file__).resolve().parent.parent.parent
PROCESSES = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")


def start(words: list, files: list, cwd: Path = ROOT, daemon: bool = True, **env: str) -> BaseProcess:
    """Start `python WORDS` in the folder cwd.

    files: for standard input, output and error; output is appended. daemon: such a process cannot start others with
    multiprocessing. env: additional environment variables.
    """
    arguments = ([str(word) for word in words], [str(file) for file in files], str(cwd), {**os.environ, **env})
    if sys.platform != "win32":
        PROCESSES.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp"])  # imports of a training run
    process = PROCESSES.Process(target=_run_script, args=arguments, daemon=daemon)
    process.start()
    atexit.register(lambda: process.is_alive() and process.kill())  # multiprocessing would wait for it
    return process


def wait(process: BaseProcess, timeout: float = 300) -> int:
    """Wait for a process to end, and return its exit status. Kills it after `timeout` seconds."""
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode


def run(words: list, cwd: Path = ROOT, stdin: str = "", **env: str) -> CompletedProcess[str]:
    """Run `python WORDS` in the folder cwd, and wait for its end."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdin", "stdout", "stderr")]
        files[0].write_text(stdin, encoding="utf-8")
        status = wait(start(words, files, cwd, daemon=False, **env))
        return CompletedProcess(words, status, *(file.read_text(encoding="utf-8") for file in files[1:]))


def run_in_turn(commands: list[list], **env: str) -> CompletedProcess[str]:
    """Run several `python WORDS` in one process, to share imports, until one fails."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "in_turn.py")
        script.write_text(
            "import runpy, sys\n"
            f"for sys.argv in {[[str(word) for word in words] for words in commands]!r}:\n"
            "    runpy.run_path(sys.argv[0], run_name='__main__')\n",
            encoding="utf-8",
        )
        return run([script], **env)


def run_code(code: str, **env: str) -> CompletedProcess[str]:
    """Run Python code, which may import the project and its tests."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{code}", encoding="utf-8")
        return run([script], **env)


def _run_script(words: list[str], files: list[str], cwd: str, env: dict[str, str]) -> None:
    """Run `python WORDS` in a forked process, which has not imported any module of the project."""
    for number, path in enumerate(files):
        os.dup2(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY if number else os.O_RDONLY), number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  (open until the process exits)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = words
    sys.path = [str(Path(words[0]).parent), *(path for path in sys.path if Path(path) not in (ROOT, ROOT / "tests"))]
    runpy.run_path(words[0], run_name="__main__")
