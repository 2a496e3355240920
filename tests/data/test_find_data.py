from pathlib import Path

import pytest

from folio.base import commands
from folio.data import find_data, shards
from folio.data.find_data import find_datasets, open_mixture
from folio.data.shards import DatasetError, data_root
from tests.support.repository import ROOT


def test_data_sets_are_beside_train_py_by_default(tmp_path):
    assert data_root(None) == ROOT / "data"
    assert data_root(str(tmp_path)) == tmp_path


def test_a_mixture_is_opened_by_name(data_dir):
    ((dataset, weight),) = find_datasets("verse:0.7", str(data_dir))
    assert dataset.folder == data_dir / "verse" and weight == 0.7
    data = open_mixture("verse", str(data_dir), block_size=32, seed=1, sampling="epoch", max_val_windows=3)
    assert data.names == ["verse"] and data.block_size == 32 and data.validation_tokens == 3 * 32


@pytest.mark.parametrize("name", ["mine", "mine/"])
def test_a_missing_data_set_is_prepared_by_the_script_with_its_name(name, other_project, capfd):
    """The script proposed to train on the data set, in the middle of a training."""
    script = other_project / "data" / "mine" / "prepare.py"  # a folder without data, as nanoGPT has it
    script.parent.mkdir(parents=True)
    script.write_text("raise SystemExit('this must not run')")
    ((dataset, _),) = find_datasets(name, None)
    assert dataset.folder == other_project / "data" / "mine" and len(dataset.train[0]) == 1890
    out = capfd.readouterr().out
    assert out.startswith("mine is not prepared yet; running prepare/mine.py\n")
    assert "1,890 training and 210 validation tokens" in out and "train.py" not in out


def test_only_the_projects_own_scripts_are_run(tmp_path):
    """A data set given by a path once ran the Python file beside it."""
    (tmp_path / "other.py").write_text("raise SystemExit('this must not run')")
    with pytest.raises(DatasetError, match="there is no such data set"):
        find_datasets(str(tmp_path / "other"), None)


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """The working directory, taken for Folio's folder: with data sets, texts, and scripts that prepare data sets."""
    for module in (commands, find_data, shards):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    for file in ("data/ready/meta.json", "data/nano/train.bin", "elsewhere/far/train.bin", "data/own/prepare.py"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    for file in ("prepare/mine.py", "prepare/text.py", "data/own/input.txt", "my novel.txt", "data/poems/a.txt"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    return tmp_path


@pytest.mark.parametrize(
    "name, remedy",
    [
        ("data/ready", "use its name, or an absolute path: set --dataset=ready"),
        ("{root}/data/nano/train.bin", "it is a file of a data set; set --dataset=nano"),
        ("data/nano/train.bin", "it is a file of a data set; set --dataset=nano"),
        ("data/mine/", "use its name, or an absolute path: set --dataset=mine"),
        ("elsewhere/far", "use its name, or an absolute path: set --dataset={root}/elsewhere/far"),
        ("own", "it is not prepared yet; for --dataset=own, run its script first: python data/own/prepare.py"),
        ("data/own/", "it is not prepared yet; for --dataset=own, run its script first: python data/own/prepare.py"),
        (
            "my novel.txt",
            "it is not a data set; for '--dataset=my novel', prepare it first: python prepare/text.py 'my novel.txt'",
        ),
        (
            "{root}/data/own/input.txt",
            "it is not a data set; for --dataset=input, prepare it first: python prepare/text.py data/own/input.txt",
        ),
        (
            "poems",
            "it is not a data set; for --dataset=poems-tokens, prepare it first: python prepare/text.py data/poems "
            "--name=poems-tokens",
        ),
        (
            "prose",
            "there is no such data set (prepared data sets: nano, ready); "
            "to prepare a text: python prepare/text.py FILE --name=prose",
        ),
        (
            "text",
            "there is no such data set (prepared data sets: nano, ready); "
            "to prepare a text: python prepare/text.py FILE --name=text",
        ),
        (
            "raedy",
            "there is no such data set (did you mean ready); "
            "to prepare a text: python prepare/text.py FILE --name=raedy",
        ),
        (
            "x" * 300,
            "there is no such data set (prepared data sets: nano, ready); "
            f"to prepare a text: python prepare/text.py FILE --name={'x' * 300}",
        ),
    ],
)
def test_a_data_set_that_is_missing_says_what_helps(name, remedy, project):
    """The error began with the absolute path of a folder, and did not know text files and nanoGPT's paths."""
    name = name.format(root=project)
    with pytest.raises(DatasetError) as error:
        find_datasets(name, None)
    assert str(error.value) == f"dataset={name}: {remedy.format(root=project)}"


def test_the_commands_of_a_missing_data_set_keep_the_folder_of_the_data_sets(project):
    for name in ("novel.txt", "prose"):
        Path("novel.txt").touch()
        with pytest.raises(DatasetError, match=r"python prepare/text\.py .* '--data_dir=my data'$"):
            find_datasets(name, "my data")


def test_a_script_that_fails_is_reported(other_project):
    with pytest.raises(DatasetError, match=r"prepare/broken\.py failed; fix the error above"):
        find_datasets("broken", None)


def test_torchrun_does_not_prepare_a_data_set(tmp_path, monkeypatch):
    """Each process would start the script."""
    for name, value in dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="here").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        DatasetError, match=r"prepare it before the processes start: python prepare/shakespeare_char\.py"
    ):
        find_datasets("shakespeare_char", str(tmp_path))
