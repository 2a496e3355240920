"""The frozen code of an experiment's arms."""

import pytest

from folio import UserError
from folio.base.settings import ConfigError
from folio.experiments.sweep import arms
from folio.experiments.sweep.arms import changes, freeze, open_arms, parse_arm
from tests.support.projects import git, loss_of, write_project


@pytest.fixture
def project(tmp_path, monkeypatch):
    project = write_project(tmp_path / "project")
    monkeypatch.setattr(arms, "ROOT", project)
    return project


def test_an_arm_names_code_then_options():
    assert parse_arm("my-idea --activation=relu2 --n_layer=4") == ("my-idea", ("--activation=relu2", "--n_layer=4"))
    assert parse_arm("--n_layer=4") == ("", ("--n_layer=4",))
    for wrong in ("two branches", "--n_layer=4 branch", '"'):
        with pytest.raises(ConfigError, match=r"name one branch|No closing quotation"):
            parse_arm(wrong)


def test_a_copy_has_the_files_of_its_commit_and_stays_as_it_was(project, tmp_path):
    store = tmp_path / "store"
    idea = freeze("idea --dropout=0.1", store)
    assert loss_of(idea.folder) == 1.9 and idea.options == ("--dropout=0.1",) and len(idea.commit) == 40
    (project / "train.py").write_text("loss = 1.5\n")  # uncommitted
    (project / "layers.py").write_text("")  # untracked
    not_read = ("docs/figure.py", "lab/bench.py", "tools/mine.py")  # whose changes hid that of model.py in a list
    for path in ("novel.txt", "other/ledger.jsonl", "other/code/copy.py", *not_read):  # not code, outputs
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text("")
    (project / "ideas").mkdir()
    (project / "ideas" / "big.bin").write_text("ignored")
    tree = freeze(".", store)
    assert tree.commit.endswith("-dirty")
    assert sorted(path.name for path in tree.folder.rglob("*") if path.is_file()) == [
        "layers.py", "mine.py", "model.py", "train.py",
    ]  # fmt: skip
    (project / "train.py").write_text("loss = 1.4\n")
    assert loss_of(tree.folder) == 1.5
    found, diff = changes(freeze("HEAD", store), tree)
    assert [str(change) for change in found] == ["layers.py +0 -0", "train.py +1 -1"]
    assert "-loss = 2.0\n+loss = 1.5\n" in diff


def test_equal_code_under_two_names_has_one_copy(project, tmp_path):
    first, second = (freeze(name, tmp_path / "store") for name in ("main", "."))
    assert first.hash == second.hash and first.folder == second.folder
    assert freeze("--n_layer=2", tmp_path / "store", first).folder == first.folder


def test_a_folder_without_git_is_an_arm_without_its_data_and_runs(project, tmp_path):
    folder = tmp_path / "copy"
    for name in (
        "train.py",
        "model.py",
        "data/text.bin",
        ".venv/x.py",
        "env/pyvenv.cfg",
        "env/lib.py",
        "out/last.json",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("loss = 3\n")
    (folder / "out" / "step-000001").mkdir()
    arm = freeze(str(folder), tmp_path / "store")
    assert sorted(path.name for path in arm.folder.rglob("*") if path.is_file()) == ["model.py", "train.py"]
    assert arm.commit is None


@pytest.mark.parametrize("name", ["no-such-branch", "config"])
def test_unknown_code_is_an_error(name, project, tmp_path):
    with pytest.raises(UserError, match=f"^{name} is neither a commit of this project nor a folder with train.py"):
        freeze(name, tmp_path / "store")


def test_a_sweep_keeps_the_code_with_which_it_began(project, tmp_path):
    folder = tmp_path / "sweep"
    first = open_arms(["main", "idea"], folder)
    (project / "train.py").write_text("loss = 7\n")
    git(project, "commit", "-am", "later")
    assert open_arms(["main", "idea"], folder) == first
    (first["main"].folder / "train.py").write_text("loss = 0\n")
    with pytest.raises(UserError, match="copy of main was changed"):
        open_arms(["main", "idea"], folder)
    (folder / "arms.json").write_text("[")
    with pytest.raises(UserError, match=r"arms\.json is damaged"):
        open_arms(["main", "idea"], folder)
