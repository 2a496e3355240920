"""lab/requirements.py: the requirements files are those of pyproject.toml."""

import pytest

from folio import UserError
from folio.base.packages import packages_in
from lab import requirements
from lab.requirements import RequirementsConfig, requirements_files
from tests.support.processes import ROOT


def test_the_requirements_files_are_those_of_pyproject_toml():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    files = sorted(path.name for path in ROOT.glob("requirements*.txt"))
    assert files == sorted(requirements_files(project))
    requirements.main(RequirementsConfig(check=True))
    names = [name for file in files for name in packages_in(ROOT / file)]
    assert len(names) == len(set(names))  # a package is in one file


def test_a_file_that_differs_is_written_or_reported(tmp_path, monkeypatch):
    pytest.importorskip("tomllib")
    monkeypatch.setattr(requirements, "ROOT", tmp_path)
    extras = '[project.optional-dependencies]\na = ["b>=1"]\ndev = ["folio[a]", "c"]\n'
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["torch"]\n' + extras)
    with pytest.raises(UserError, match=r"^requirements.txt differs .*: run python lab/requirements.py$"):
        requirements.main(RequirementsConfig(check=True))
    requirements.main(RequirementsConfig())
    requirements.main(RequirementsConfig(check=True))
    lines = (tmp_path / "requirements-dev.txt").read_text().splitlines()
    assert lines[1:] == ["-r requirements.txt", "-r requirements-a.txt", "c"]
