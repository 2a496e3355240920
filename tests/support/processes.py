"""Run the project's scripts in processes of their own. They start quickly, because they are forked from a process that
has imported torch; in a new one, the import takes one to three seconds.
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

    files: for standard input, output and errors; the last two are appended to. daemon: it cannot start processes with
    multiprocessing. env: variables besides those of this process.
    """
    arguments = ([str(word) for word in words], [str(file) for file in files], str(cwd), {**os.environ, **env})
    if sys.platform != "win32":
        PROCESSES.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp"])  # what a training run imports
    process = PROCESSES.Process(target=_run_script, args=arguments, daemon=daemon)
    process.start()
    atexit.register(lambda: process.is_alive() and process.kill())  # multiprocessing would wait for it
    return process


def wait(process: BaseProcess, timeout: float = 300) -> int:
    """Wait for a process to end, and return its exit status. It is killed after `timeout` seconds."""
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode


def run(words: list, cwd: Path = ROOT, stdin: str = "", **env: str) -> CompletedProcess[str]:
    """Run `python WORDS` in the folder cwd to its end."""
    with tempfile.TemporaryDirectory() as folder:
        given, stdout, stderr = files = [Path(folder, name) for name in ("stdin", "stdout", "stderr")]
        given.write_text(stdin, encoding="utf-8")
        status = wait(start(words, files, cwd, daemon=False, **env))
        return CompletedProcess(words, status, stdout.read_text(encoding="utf-8"), stderr.read_text(encoding="utf-8"))


def run_in_turn(commands: list[list], **env: str) -> CompletedProcess[str]:
    """Run several `python WORDS` in one process, which imports what they need once, up to the first that fails."""
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
    """Run Python code that may import the project and its tests."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{code}", encoding="utf-8")
        return run([script], **env)


def _run_script(words: list[str], files: list[str], cwd: str, env: dict[str, str]) -> None:
    """What `python WORDS` does, in a forked process, which has not imported anything of the project."""
    for number, path in enumerate(files):
        os.dup2(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY if number else os.O_RDONLY), number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  (as long as the process lives)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = words
    sys.path = [str(Path(words[0]).parent), *(path for path in sys.path if Path(path) not in (ROOT, ROOT / "tests"))]
    runpy.run_path(words[0], run_name="__main__")
