import re
from pathlib import Path

import pytest

from folio.base import commands
from folio.data import find_data, shards
from folio.data.find_data import find_datasets
from folio.data.shards import DatasetError, data_root
from folio.data.windows import Mixture
from tests.support.repository import ROOT


def test_data_sets_are_in_data_by_default(tmp_path):
    assert data_root(None) == ROOT / "data"
    assert data_root(str(tmp_path)) == tmp_path


def test_a_mixture_is_opened_by_name(data_dir):
    ((dataset, weight),) = find_datasets("verse:0.7", str(data_dir))
    assert dataset.folder == data_dir / "verse" and weight == 0.7
    data = Mixture(
        find_datasets("verse", str(data_dir)), block_size=32, seed=1, sampling="epoch", max_val_tokens=3 * 32
    )
    assert data.names == ["verse"] and data.block_size == 32 and data.validation_tokens == 3 * 32


@pytest.mark.parametrize("name", ["mine", "mine/"])
def test_a_missing_data_set_is_prepared_by_the_script_with_its_name(name, other_project, capfd):
    """During training, the script printed the command for training on the data set."""
    script = other_project / "data" / "mine" / "prepare.py"  # a folder without data, as in nanoGPT
    script.parent.mkdir(parents=True)
    script.write_text("raise SystemExit('this must not run')")
    ((dataset, _),) = find_datasets(name, None)
    assert dataset.folder == other_project / "data" / "mine" and len(dataset.train[0]) == 1890
    out = capfd.readouterr().out
    assert out.startswith("mine is not prepared yet; running prepare/mine.py\n")
    assert "1,890 training and 210 validation tokens" in out and "train.py" not in out


def test_only_the_projects_own_scripts_are_run(tmp_path):
    """A data set given by a path ran the Python file next to it."""
    (tmp_path / "other.py").write_text("raise SystemExit('this must not run')")
    with pytest.raises(DatasetError, match="no such data set"):
        find_datasets(str(tmp_path / "other"), None)


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A working directory in place of the repository, with data sets, texts, and prepare scripts."""
    for module in (commands, find_data, shards):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    files = ["data/ready/meta.json", "data/nano/train.bin", "data/own/prepare.py", "data/own/input.txt"]
    files += ["prepare/mine.py", "prepare/text.py", "elsewhere/far/train.bin", "my novel.txt", "data/poems/a.txt"]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    return tmp_path


@pytest.mark.parametrize(
    "name, beginning, remedy",
    [
        ("data/ready", "", "absolute path: set --dataset=ready"),
        ("data/mine/", "", "absolute path: set --dataset=mine"),
        ("elsewhere/far", "", "absolute path: set --dataset={root}/elsewhere/far"),
        ("{root}/data/nano/train.bin", "", "set --dataset=nano"),
        ("data/nano/train.bin", "", "set --dataset=nano"),
        ("own", "for --dataset=own, run its script", "python data/own/prepare.py"),
        ("data/own/", "for --dataset=own, run its script", "python data/own/prepare.py"),
        ("my novel.txt", "for '--dataset=my novel'", "python prepare/text.py 'my novel.txt'"),
        ("{root}/data/own/input.txt", "for --dataset=input", "python prepare/text.py data/own/input.txt"),
        ("poems", "for --dataset=poems-tokens", "python prepare/text.py data/poems --name=poems-tokens"),
        ("prose", "(prepared data sets: nano, ready)", "python prepare/text.py FILE --name=prose"),
        ("text", "(prepared data sets: nano, ready)", "python prepare/text.py FILE --name=text"),
        ("raedy", "(did you mean ready)", "python prepare/text.py FILE --name=raedy"),
        ("x" * 300, "(prepared data sets: nano, ready)", f"python prepare/text.py FILE --name={'x' * 300}"),
    ],
)
def test_the_error_for_a_missing_data_set_gives_the_remedy(name, beginning, remedy, project):
    """The error began with the absolute path of a folder, and had no advice for text files and nanoGPT's paths."""
    name = name.format(root=project)
    with pytest.raises(DatasetError, match=f"^dataset={re.escape(name)}: ") as error:
        find_datasets(name, None)
    assert beginning in str(error.value)
    assert str(error.value).endswith(remedy.format(root=project))


def test_the_commands_for_a_missing_data_set_include_data_dir(project):
    for name in ("novel.txt", "prose"):
        Path("novel.txt").touch()
        with pytest.raises(DatasetError, match=r"python prepare/text\.py .* '--data_dir=my data'$"):
            find_datasets(name, "my data")


def test_a_script_that_fails_is_reported(other_project):
    with pytest.raises(DatasetError, match=r"prepare/broken\.py failed"):
        find_datasets("broken", None)


def test_torchrun_does_not_prepare_a_data_set(tmp_path, monkeypatch):
    """Every process would run the script."""
    for name, value in dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="here").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DatasetError, match=r"before the processes start: python prepare/shakespeare_char\.py"):
        find_datasets("shakespeare_char", str(tmp_path))
