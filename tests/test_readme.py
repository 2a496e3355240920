"""Run the commands of the README and of the first hour in a copy of the repository, with small models."""

import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.repository import ROOT, copy_repository, run_commands, shell_commands
from tests.support.servers import start_server

SMALL = (
    "--n_layer=1 --n_head=1 --n_embd=16 --block_size=16 --batch_size=2 --max_iters=3 --warmup_iters=1 --eval_iters=1"
)


def read_commands(page: str) -> list[str]:
    """The commands in a page that run one of Folio's scripts."""
    commands = shell_commands((ROOT / page).read_text(encoding="utf-8"))
    return [command for command in commands if re.match(r"python \S+\.py|torchrun ", command)]


README, FIRST_HOUR = read_commands("README.md"), read_commands("docs/first-hour.md")


@pytest.fixture
def repo_copy(tmp_path: Path, text: str) -> Path:
    copy_repository(tmp_path)
    (tmp_path / "novel.txt").write_text(text[:4000], encoding="utf-8")
    return tmp_path


def with_tiny_model(command: str) -> str:
    """A command with options that make it fast."""
    if "--size=auto" in command:
        return command.replace("--minutes=30", "--minutes=1")  # the text is small, so the run ends earlier
    if command.startswith("python train.py"):
        return f"{command} {SMALL}"
    if command.startswith("python sample.py"):
        return f"{command} --max_new_tokens=5"
    if "memorized.py" in command:
        return f"{command} --samples=3 --max_new_tokens=20"
    return command


@pytest.mark.needs("transformers", "scipy")
def test_commands(repo_copy):
    all_commands = [*README, *(command for command in FIRST_HOUR if command not in README)]
    viewed = [command for command in all_commands if "tools/view.py" in command]
    elsewhere = ("tools/view.py", "tools/ab.py")  # the latter is tested in tests/tools/test_ab.py
    others = [c for c in all_commands if c.startswith("python ") and not any(name in c for name in elsewhere)]
    commands = [*map(with_tiny_model, others)]
    outputs = run_commands(["python prepare/text.py novel.txt --name=shakespeare_char", *commands], repo_copy)
    first_run = next(command for command in commands if command.startswith("python train.py config"))
    lines = outputs[first_run].splitlines()
    suggested = [line.split(":", 1)[1] for line in lines if line.startswith(("sample:", "continue:"))]
    assert len(commands) >= 15 and len(suggested) == 2 and "--init_from=resume" in suggested[1]
    assert [path.name for path in repo_copy.glob("*.html")] == ["model.html"]
    assert (repo_copy / "out-shakespeare-char" / "report.html").exists()
    run_commands(suggested, repo_copy)  # the commands that the run prints at its end
    assert len(viewed) >= 2
    for number, command in enumerate(viewed):
        (repo_copy / f"view-{number}").mkdir()
        words = shlex.split(f"{command} --open=False --port=0")[1:]
        process, port = start_server(words, repo_copy / f"view-{number}", cwd=repo_copy)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}") as answer:
            assert "<title>" in answer.read().decode()
        os.kill(process.pid, signal.SIGINT)
        assert processes.wait(process) in (0, 130)


@pytest.mark.slow
def test_torchrun(repo_copy):
    """With two processes instead of eight, and a data set that exists."""
    (command,) = [command for command in README if command.startswith("torchrun ")]
    run_commands(["python prepare/text.py novel.txt"], repo_copy)
    args = shlex.split(command.replace("nproc_per_node=8", "nproc_per_node=2"))[1:]
    args += ["--dataset=novel", "--total_batch_tokens=None", *SMALL.split()]
    process = [sys.executable, "-m", "torch.distributed.run", *args]
    result = subprocess.run(process, cwd=repo_copy, capture_output=True, encoding="utf-8")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Warning" not in result.stderr, result.stderr
