"""Run the README's commands in a copy of the repository, with overrides that make them small."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser as torchrun_options

from folio.base.settings import load
from tests.support.music import write_pieces
from tests.support.repository import ROOT, copy_repository, run_commands, shipped
from train import TrainConfig

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


def with_tiny_model(command: str) -> str:
    """A command of the README with options that make it fast."""
    if "--size=auto" in command:
        return f"{command.replace('--minutes=30', '--minutes=0.03')} --eval_iters=1"
    if "--init_from=out-" in command:
        return f"{command} --batch_size=2 --max_iters=3 --eval_iters=1"
    if command.startswith("python train.py"):
        return f"{command.partition('#')[0]} {SMALL}"
    if command.startswith("python sample.py"):
        return f"{command} --max_new_tokens={500 if '--save' in command else 5}"
    if "memorized.py" in command:
        return f"{command} --samples=3 --max_new_tokens=20"
    return command


@pytest.mark.needs("babel", "num2words", "miditok", "symusic")
def test_commands(repo_copy):
    commands = [with_tiny_model(command) for command in COMMANDS if command.startswith("python ")]
    write_pieces(repo_copy / "pieces", 4)
    data = [  # small data sets that need no network
        "python prepare/text.py novel.txt --name=shakespeare_char",
        "python prepare/translation.py --pairs=100 --held_out=20",
        "python prepare/midi.py pieces --name=chorales",
    ]
    outputs = run_commands([*data, *commands], repo_copy)
    first_run = next(command for command in commands if command.startswith("python train.py config"))
    lines = outputs[first_run].splitlines()
    suggested = [line.split(":", 1)[1] for line in lines if line.startswith(("sample:", "continue:"))]
    assert len(commands) >= 8 and len(suggested) == 2 and "--init_from=resume" in suggested[1]
    assert [path.name for path in repo_copy.glob("*.html")] == ["model.html"]
    assert (repo_copy / "out-shakespeare-char" / "report.html").exists()
    run_commands(suggested, repo_copy)  # the commands that the run prints at its end


@pytest.mark.slow
def test_torchrun(repo_copy):
    """With two processes instead of eight, and a data set that exists."""
    command = torchrun_command()
    run_commands(["python prepare/text.py novel.txt"], repo_copy)
    args = shlex.split(command.replace("nproc_per_node=8", "nproc_per_node=2"))[1:]
    args += ["--dataset=novel", "--total_batch_tokens=None", *SMALL.split()]
    process = [sys.executable, "-m", "torch.distributed.run", *args]
    result = subprocess.run(process, cwd=repo_copy, capture_output=True, encoding="utf-8")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Warning" not in result.stderr, result.stderr


def test_torchrun_and_train_accept_the_options_of_the_command():
    options = torchrun_options().parse_args(shlex.split(torchrun_command())[1:])
    assert options.training_script == "train.py"
    assert load(TrainConfig, options.training_script_args).origins


def torchrun_command() -> str:
    (command,) = [command for command in COMMANDS if command.startswith("torchrun ")]
    return command.partition("#")[0]


@pytest.mark.parametrize(
    "file", ["README.md", "CONTRIBUTING.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
)
def test_linked_files_exist(file):
    for target in re.findall(r"\]\((?!http)([^)#]+)", (ROOT / file).read_text(encoding="utf-8")):
        assert (ROOT / file).parent.joinpath(target).exists(), target


def test_tests_that_the_docs_name_exist():
    named = {
        name for page in (ROOT / "docs").rglob("*.md") for name in re.findall(r"::(test_\w+)`", page.read_text("utf-8"))
    }
    existing = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text("utf-8"))
    }
    assert named and named <= existing, named - existing


def test_readme_lists_every_module_and_page():
    """Files are tested only if they are listed, because others may belong to a user."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    unlisted = {*(ROOT / "folio").glob("[a-z]*.py")} - {*shipped()}
    assert not unlisted, "list them under Files in README.md"
    for page in (ROOT / "docs").rglob("*.md"):
        assert f"({page.relative_to(ROOT)})" in readme, f"link {page.name} under Documentation in README.md"
    missing = [path for path in shipped() if not path.is_file()]
    assert not missing, "README.md lists files that do not exist"
