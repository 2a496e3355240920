"""lab/ideas/make_branches.py: the diffs apply to their commit, and become branches."""

import re
import subprocess

import pytest

from folio.base.settings import ROOT
from lab.ideas import make_branches
from lab.ideas.make_branches import BASE, OF_PAGE, MakeBranchesConfig

HAS_BASE = subprocess.run(["git", "-C", ROOT, "cat-file", "-e", BASE], capture_output=True).returncode == 0
pytestmark = pytest.mark.skipif(not HAS_BASE, reason="the history does not reach back far enough")


def test_each_idea_becomes_a_branch_and_a_command(tmp_path, monkeypatch, capsys):
    subprocess.run(["git", "clone", "--quiet", "--no-checkout", ROOT, tmp_path / "clone"], check=True)
    monkeypatch.setattr(make_branches, "ROOT", tmp_path / "clone")
    make_branches.main(MakeBranchesConfig())
    commands = capsys.readouterr().out.splitlines()
    names = re.findall(r'--b="idea/([\w-]+)', "\n".join(commands))
    assert len(names) == len(commands) and set(OF_PAGE) < set(names) and {"qk-norm", "null-rename"} < set(names)
    assert '--b="idea/relu2 --activation=relu2" --max_iters=600' in "\n".join(commands)
    for name in names:
        changed = make_branches.git("diff", "--name-only", "idea/base", f"idea/{name}").split()
        assert changed and all(path == "model.py" or path.startswith("folio/") for path in changed)
    before = make_branches.git("branch", "--list", "idea/*", "--format=%(refname) %(objectname)")
    make_branches.main(MakeBranchesConfig())
    assert make_branches.git("branch", "--list", "idea/*", "--format=%(refname) %(objectname)") == before
