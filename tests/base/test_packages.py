"""folio/base/packages.py and tools/requirements.py: optional packages, and what a command says without one."""

import re
import sys
from pathlib import Path

import pytest

from folio import UserError
from folio.base import packages
from folio.base.packages import describe_missing, require
from folio.data.tokenizer import MidiTokenizer
from folio.decoding.output_files import output_paths
from tests.support.processes import ROOT
from tools import compare, evaluate, requirements, sweep
from tools.compare import CompareConfig
from tools.evaluate import EvaluateConfig
from tools.requirements import RequirementsConfig, requirements_files

FILES = sorted(path.name for path in ROOT.glob("requirements*.txt"))


def test_the_requirements_files_are_those_of_pyproject_toml():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert FILES == sorted(requirements_files(project))
    requirements.main(RequirementsConfig(check=True))


def test_a_file_that_differs_is_written_or_reported(tmp_path, monkeypatch):
    pytest.importorskip("tomllib")
    monkeypatch.setattr(requirements, "ROOT", tmp_path)
    extras = '[project.optional-dependencies]\na = ["b>=1"]\ndev = ["folio[a]", "c"]\n'
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["torch"]\n' + extras)
    with pytest.raises(UserError, match=r"^requirements.txt differs .*: run python tools/requirements.py$"):
        requirements.main(RequirementsConfig(check=True))
    requirements.main(RequirementsConfig())
    requirements.main(RequirementsConfig(check=True))
    lines = (tmp_path / "requirements-dev.txt").read_text().splitlines()
    assert lines[1:] == ["-r requirements.txt", "-r requirements-a.txt", "c"]


def test_a_package_is_in_one_file():
    names = [
        name
        for file in FILES
        for name in re.findall(r"^[\w-]+", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
        if not name.startswith("-")
    ]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("module", "file"),
    [
        ("torch", "requirements.txt"),
        ("annotated_types", "requirements.txt"),
        ("sacrebleu.metrics", "requirements-tasks.txt"),
        ("rouge_score", "requirements-tasks.txt"),
        ("pytest", "requirements-dev.txt"),
    ],
)
def test_a_missing_package_is_named_with_its_file(module, file, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    package = module.partition(".")[0]
    assert describe_missing(module) == f"the package {package} is not installed: pip install -r {file}"
    monkeypatch.chdir(tmp_path)
    assert describe_missing(module).endswith(file) and (tmp_path / describe_missing(module).split()[-1]).exists()


@pytest.mark.parametrize("module", [None, "", "a_users_module"])
def test_other_modules_are_not_ours_to_install(module):
    assert describe_missing(module) is None


def test_what_a_feature_needs_is_checked_before_it_starts(monkeypatch):
    require("--to=x", "json", "re")
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.chdir(packages.ROOT)
    with pytest.raises(UserError, match=r"^--to=x: the package gguf .*: pip install -r requirements-export.txt$"):
        require("--to=x", "gguf")


MIDI = MidiTokenizer(["NoteOn_60", "TimeShift_1.0.4"], {})
COMMANDS = {  # that need an optional package at their end
    "compare": ("scipy", "experiments", lambda: compare.main(CompareConfig(sides=("a", "b")))),
    "sweep": ("optuna", "experiments", lambda: sweep.main(["config/shakespeare_char.py", "n_head=1..2", "--trials=2"])),
    "pairs": ("sacrebleu", "tasks", lambda: evaluate.main(EvaluateConfig(runs=("a",), tasks="pairs"))),
    "music": ("music21", "music", lambda: evaluate.main(EvaluateConfig(runs=("a",), tasks="music"))),
    "save": ("symusic", "music", lambda: output_paths(Path("a.mid"), 1, MIDI)),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_missing_package_is_reported_before_the_work_and_not_after_it(name, monkeypatch):
    """Runs were measured, answers and music generated, and whole sweeps trained, and then lost to a missing package."""
    package, extra, command = COMMANDS[name]
    monkeypatch.setitem(sys.modules, package, None)
    missing = rf"the package {package} is not installed: pip install -r .*requirements-{extra}\.txt$"
    with pytest.raises(UserError, match=missing):  # and not that there is no run
        command()
