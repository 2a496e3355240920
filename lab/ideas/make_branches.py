"""Make a branch per idea, and print the command that tests it.

    python lab/ideas/make_branches.py

The ideas are the diffs in this folder, and those of docs/code/change-it.md that change training. Each branch idea/NAME
is one commit after the commit that they were written for, idea/base. Your working tree does not change.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError  # noqa: E402
from folio.base.settings import Settings, run_script  # noqa: E402

BASE = "3a09364d198f"  # the commit to which the diffs apply
FOLDER = Path(__file__).resolve().parent
PAGE = "docs/code/change-it.md"
OF_PAGE = ("relu2", "kerple", "rms", "sqrt", "nadam", "lion")  # its changes of training, by their --out_dir=out-NAME
AUTHOR = {"NAME": "Folio", "EMAIL": "folio@localhost", "DATE": "2026-11-29T00:00:00Z"}  # so that commits are the same


@dataclass(frozen=True)
class MakeBranchesConfig(Settings):
    """No settings: the branches are always the same."""


class Change(NamedTuple):
    """A diff of a page and the commands that follow it."""

    diff: str
    commands: list[str]


class Idea(NamedTuple):
    name: str
    diff: str
    options: list[str]  # of train.py


def read_changes(page: str) -> list[Change]:
    """Return the changes of docs/code/change-it.md."""
    changes = []
    for kind, content in re.findall(r"```(diff|sh)\n(.*?)```", page, re.DOTALL):
        if kind == "diff":
            changes.append(Change(content, []))
        else:
            changes[-1].commands.extend(content.splitlines())
    return changes


def read_ideas() -> Iterator[Idea]:
    """Yield the ideas. The page is that of BASE, to which its diffs apply. Raises UserError."""
    for path in sorted(FOLDER.glob("*.diff")):
        yield Idea(path.stem, path.read_text(encoding="utf-8"), [])
    for change in read_changes(git("show", f"{BASE}:{PAGE}")):
        *options, out_dir = change.commands[-1].split()[2:]
        name = out_dir.removeprefix("--out_dir=out-")
        if name in OF_PAGE:
            yield Idea(name, change.diff, [option for option in options if option.startswith("--")])


def git(*arguments: str, content: str | None = None, environment: dict[str, str] | None = None) -> str:
    """Return the output of a Git command, with `content` as its input. Raises UserError."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments],
        input=content,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        encoding="utf-8",
    )
    if done.returncode:
        raise UserError(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout


def commit(idea: Idea) -> str:
    """Write the commit of an idea, with an index of its own. Returns its hash. Raises UserError."""
    environment = {f"GIT_{who}_{key}": value for who in ("AUTHOR", "COMMITTER") for key, value in AUTHOR.items()}
    with tempfile.TemporaryDirectory() as folder:
        environment["GIT_INDEX_FILE"] = str(Path(folder, "index"))
        git("read-tree", BASE, environment=environment)
        git("apply", "--cached", content=idea.diff, environment=environment)
        tree = git("write-tree", environment=environment).strip()
    return git("commit-tree", tree, "-p", BASE, "-m", f"Idea: {idea.name}", environment=environment).strip()


def main(cfg: MakeBranchesConfig) -> None:
    git("branch", "--force", "idea/base", BASE)
    for idea in read_ideas():
        git("branch", "--force", f"idea/{idea.name}", commit(idea))
        arm = " ".join([f"idea/{idea.name}", *idea.options])
        print(f'python tools/ab.py config/shakespeare_char.py --a=idea/base --b="{arm}" --max_iters=600')


if __name__ == "__main__":
    run_script(main, MakeBranchesConfig)
