"""Run the README's commands in a copy of the repository, with overrides that make them small."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT, copy_repository, shipped

SMALL = (
    "--n_layer=1 --n_head=1 --n_embd=16 --block_size=16 --batch_size=2 --max_iters=3 --warmup_iters=1 --eval_iters=1"
)
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    for line in block.splitlines()
    if line.startswith(("python ", "torchrun ")) and "pytest" not in line
]


@pytest.fixture
def repo_copy(tmp_path: Path, text: str) -> Path:
    copy_repository(tmp_path)
    for name in ("novel.txt", "letters.txt"):
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def run_python(args: list[str], folder: Path) -> str:
    """Standard output of Python with these arguments."""
    result = subprocess.run([sys.executable, *args], cwd=folder, capture_output=True, text=True, encoding="utf-8")
    assert result.returncode == 0, f"{args}\n{result.stdout}\n{result.stderr}"
    assert "Warning" not in result.stderr, result.stderr
    return result.stdout


def run_small(command: str, folder: Path) -> str:
    """Standard output of a command of the README, run with a tiny model."""
    program, *args = shlex.split(command, comments=True)
    if program == "torchrun":  # two processes instead of eight, and a data set that exists
        args = ["-m", "torch.distributed.run", *args, "--dataset=novel", "--total_batch_tokens=None", *SMALL.split()]
        return run_python([arg.replace("nproc_per_node=8", "nproc_per_node=2") for arg in args], folder)
    assert program == "python"
    if args[0] == "train.py":
        args += SMALL.split()
    elif args == ["prepare/shakespeare_char.py"]:  # the tests run offline
        args = ["prepare/text.py", "novel.txt", "--name=shakespeare_char"]
    elif args[0] == "sample.py":
        args += ["--max_new_tokens=5"]
    return run_python(args, folder)


def test_commands(repo_copy):
    assert len(COMMANDS) >= 8
    run_small("python prepare/shakespeare_char.py", repo_copy)
    outputs = [run_small(command, repo_copy) for command in COMMANDS]
    first_run = next(i for i, command in enumerate(COMMANDS) if command.startswith("python train.py"))
    lines = outputs[first_run].splitlines()
    proposed = [line.split(":", 1)[1] for line in lines if line.startswith(("sample:", "continue:"))]
    assert len(proposed) == 2 and "--init_from=resume" in proposed[1]
    assert any(command.startswith("torchrun ") for command in COMMANDS)
    assert not list(repo_copy.glob("*.html")) and (repo_copy / "out-shakespeare-char" / "report.html").exists()
    for command in proposed:  # the commands that the run prints at its end
        run_python(shlex.split(command)[1:], repo_copy)


@pytest.mark.parametrize(
    "file", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_linked_files_exist(file):
    for target in re.findall(r"\]\((?!http)([^)#]+)", (ROOT / file).read_text(encoding="utf-8")):
        assert (ROOT / file).parent.joinpath(target).exists(), target


def test_readme_lists_every_module_and_page():
    """Files of other folders may be a user's own; those of Folio are only tested if they are listed."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    unlisted = {*(ROOT / "folio").glob("[a-z]*.py")} - {*shipped()}
    assert not unlisted, "list them under Files in README.md"
    for page in (ROOT / "docs").glob("*.md"):
        assert f"(docs/{page.name})" in readme, f"link docs/{page.name} under Documentation in README.md"
    missing = [path for path in shipped() if not path.is_file()]
    assert not missing, "README.md lists files that do not exist"
