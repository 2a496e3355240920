"""Write the requirements files from the packages in pyproject.toml. Needs Python 3.11.

python lab/requirements.py
python lab/requirements.py --check=True    changes nothing, and fails if a file differs
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError  # noqa: E402
from folio.base.settings import Settings, run_script  # noqa: E402


@dataclass(frozen=True)
class RequirementsConfig(Settings):
    check: bool = False  # True: change nothing, and fail if a file differs


HEADER = "# Written by lab/requirements.py from pyproject.toml."


def requirements_files(project: dict[str, Any]) -> dict[str, str]:
    """Return the content of each requirements file. project: table of pyproject.toml."""
    files = {"requirements.txt": [HEADER, *project["dependencies"]]}
    for extra, packages in project["optional-dependencies"].items():
        lines = [HEADER, "-r requirements.txt"]
        for package in packages:
            extras = re.fullmatch(r"folio\[(.+)\]", package)
            lines += [f"-r requirements-{name}.txt" for name in extras[1].split(",")] if extras else [package]
        files[f"requirements-{extra}.txt"] = lines
    return {name: "\n".join(lines) + "\n" for name, lines in files.items()}


def main(cfg: RequirementsConfig) -> None:
    import tomllib  # Python 3.11

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, content in requirements_files(project).items():
        path = ROOT / name
        if path.exists() and path.read_text(encoding="utf-8") == content:
            continue
        if cfg.check:
            raise UserError(f"{name} differs from pyproject.toml: run python lab/requirements.py")
        path.write_text(content, encoding="utf-8")
        print(name)


if __name__ == "__main__":
    run_script(main, RequirementsConfig, needs_output=False)
