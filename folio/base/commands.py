"""Command lines for messages."""

import os
import shlex
from pathlib import Path

from folio.base.settings import ROOT

STARTED_BY_TRAINING = "FOLIO_STARTED_BY_TRAINING"  # environment variable that turns off suggestions


def command(script: str, *arguments: str) -> str:
    """The command line that runs a script of the project, such as "train.py", from the working directory."""
    return shlex.join(["python", short_path(ROOT / script), *arguments])


def short_path(path: Path) -> str:
    """`path` relative to the working directory if it is inside it, otherwise absolute."""
    path = Path(os.path.abspath(path))
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
