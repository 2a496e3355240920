"""Command lines in messages, which must work in a shell from the working directory."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from folio.base import commands
from folio.base.commands import command, short_path


@pytest.mark.parametrize("folder, shown", [(".", "my tool.py"), ("tools", None), ("..", "a project/my tool.py")])
def test_a_suggested_command_runs_in_the_working_directory(folder, shown, tmp_path, monkeypatch):
    """From the project's folder, a subfolder, and its parent."""
    project = tmp_path / "a project"
    (project / "tools").mkdir(parents=True)
    (project / "my tool.py").write_text("import sys; print(sys.argv[1:])")
    monkeypatch.setattr(commands, "ROOT", project)
    monkeypatch.chdir(project / folder)
    arguments = ["--name=it's", "two words", "$HOME", "--é=*"]
    python, *words = shlex.split(command("my tool.py", *arguments))
    assert python == "python" and words[0] == (shown or str(project / "my tool.py"))
    result = subprocess.run([sys.executable, "-X", "utf8", *words], capture_output=True, encoding="utf-8", check=True)
    assert result.stdout.strip() == str(arguments)


def test_a_path_is_relative_only_inside_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path / "runs")
    for path, shown in (
        ("out", "out"),
        ("./a/../out", "out"),
        (tmp_path / "runs" / "sweep" / "1", str(Path("sweep", "1"))),
        (tmp_path / "runs-2", str(tmp_path / "runs-2")),  # has the same prefix
        ("../other", str(tmp_path / "other")),
    ):
        assert short_path(Path(path)) == shown
