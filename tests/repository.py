"""The files that Folio ships, and copies of them. A user's own scripts and config files beside them are not tested."""

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def shipped(root: Path = ROOT) -> list[Path]:
    """The Python files that the section "Files" of the README lists, by folder and name."""
    readme = (root / "README.md").read_text(encoding="utf-8")
    listing = re.search(r"## Files\n+```\n(.*?)```", readme, re.DOTALL)[1]
    paths = set()
    for entry in re.split(r"^(?=\S)", listing, flags=re.MULTILINE):  # a file and its purpose, or a folder and its files
        name, _, content = entry.partition(" ")
        if name.endswith(".py"):
            paths.add(root / name)
        else:
            paths |= {root / name.strip() / file for file in re.findall(r"[\w/]+\.py", content)}
    return sorted(paths)


def copy_repository(folder: Path) -> None:
    """Copy Folio without its tests and documentation."""
    shutil.copytree(ROOT / "folio", folder / "folio", ignore=shutil.ignore_patterns("__pycache__"))
    for path in shipped():
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
