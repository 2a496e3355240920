"""The files of the Folio repository, copies of it, and running commands in them. Scripts and config files that a user
adds are not tested.
"""

import json
import re
import shlex
import shutil
from pathlib import Path

from tests.support.processes import ROOT, run

RUN = """
import json, runpy, sys
for arguments in json.load(sys.stdin):
    sys.argv = arguments
    print(f"<<{arguments[0]}>>")
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as exit:
        if exit.code:
            raise
"""


def shipped(root: Path = ROOT) -> list[Path]:
    """The Python files of the package folio, and the scripts and config files that docs/code/code-tour.md lists."""
    tour = (root / "docs" / "code" / "code-tour.md").read_text(encoding="utf-8")
    listing = re.search(r"## Files\n+```\n(.*?)```", tour, re.DOTALL)[1]
    paths = set()
    for entry in re.split(r"^(?=\S)", listing, flags=re.MULTILINE):  # a file and its purpose, or a folder and its files
        name, _, content = entry.partition(" ")
        if name == "folio/":
            paths |= {*(root / "folio").rglob("*.py")}
        elif name.endswith(".py"):
            paths.add(root / name)
        elif name != "tests/":
            paths |= {root / name / file for file in re.findall(r"[\w/]+\.py", content)}
    return sorted(paths)


def run_commands(commands: list[str], folder: Path) -> dict[str, str]:
    """Run commands "python SCRIPT ..." in a copy of Folio, in one process, which saves most of the time. Returns the
    output of each.
    """
    arguments = [shlex.split(command, comments=True)[1:] for command in commands]
    (folder / "run_all.py").write_text(RUN, encoding="utf-8")
    result = run([folder / "run_all.py"], folder, json.dumps(arguments))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Warning" not in result.stderr, result.stderr
    outputs = re.split(r"^<<\S+\.py>>\n", result.stdout, flags=re.MULTILINE)[1:]
    return dict(zip(commands, outputs, strict=True))


def shell_commands(page: str) -> list[str]:
    """The commands in a page's blocks of a shell, without comments."""
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)).replace("\\\n", " ")
    lines = [line.partition(" # ")[0].strip() for line in blocks.splitlines()]
    return [command for line in lines if line for command in line.split(" && ")]


def copy_repository(folder: Path) -> None:
    """Copy Folio without its tests and documentation."""
    shutil.copytree(ROOT / "folio", folder / "folio", ignore=shutil.ignore_patterns("__pycache__"))
    for path in shipped():
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
