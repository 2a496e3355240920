"""The README's commands, typed as they stand in a copy of the tree, with small overrides."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
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
def clone(tmp_path: Path, text: str) -> Path:
    for name in ("folio", "prepare", "config", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("model.py", "train.py", "sample.py"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("novel.txt", "letters.txt"):
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def run(words: list[str], folder: Path) -> str:
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


def typed(command: str, folder: Path) -> str:
    program, *words = shlex.split(command, comments=True)
    if program == "torchrun":  # on two processes, and on text that is here
        words = ["-m", "torch.distributed.run", *words, "--dataset=novel", "--total_batch_tokens=None", *SMALL.split()]
        return run([word.replace("nproc_per_node=8", "nproc_per_node=2") for word in words], folder)
    assert program == "python"
    if words[0] == "train.py":
        words += SMALL.split()
    elif words == ["prepare/shakespeare_char.py"]:  # the tests have no network
        words = ["prepare/text.py", "novel.txt", "--name=shakespeare_char"]
    elif words[0] == "sample.py":
        words += ["--max_new_tokens=5"]
    return run(words, folder)


def test_commands(clone):
    assert len(COMMANDS) >= 8
    typed("python prepare/shakespeare_char.py", clone)
    said = [typed(command, clone) for command in COMMANDS]
    first = next(out for out, command in zip(said, COMMANDS, strict=True) if command.startswith("python train.py"))
    proposed = [line.split(":", 1)[1] for line in first.splitlines() if line.startswith(("sample:", "continue:"))]
    assert len(proposed) == 2 and "--init_from=resume" in proposed[1]
    assert any(command.startswith("torchrun ") for command in COMMANDS)
    assert not list(clone.glob("*.html")) and (clone / "out-shakespeare-char" / "report.html").exists()
    for command in proposed:  # what the run itself says to type next
        run(shlex.split(command)[1:], clone)


@pytest.mark.parametrize(
    "file", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(file):
    for target in re.findall(r"\]\((?!http)([^)#]+)", (ROOT / file).read_text(encoding="utf-8")):
        assert (ROOT / file).parent.joinpath(target).exists(), target


def test_every_file_is_in_the_tree():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    paths = [*ROOT.glob("*.py"), *(ROOT / "folio").glob("[a-z]*.py"), *(ROOT / "docs").glob("*.md")]
    for path in [
        *paths,
        *(ROOT / "prepare").glob("*.py"),
        *(ROOT / "config").glob("*.py"),
        *(ROOT / "tools").glob("*.py"),
    ]:
        assert re.search(rf"\b{re.escape(path.name)}\b", readme), path.name
