from pathlib import Path

import pytest

from folio import find_data
from folio.find_data import find_datasets, open_mixture
from folio.shards import DatasetError, data_root


def test_data_sets_are_beside_train_py_by_default(tmp_path):
    assert data_root(None) == Path(find_data.__file__).resolve().parent.parent / "data"
    assert data_root(str(tmp_path)) == tmp_path


def test_a_mixture_is_opened_by_name(data_dir):
    ((dataset, weight),) = find_datasets("verse:0.7", str(data_dir))
    assert dataset.folder == data_dir / "verse" and weight == 0.7
    data = open_mixture("verse", str(data_dir), block_size=32, seed=1, sampling="epoch", max_val_windows=3)
    assert data.names == ["verse"] and data.block_size == 32 and data.validation_tokens == 3 * 32


def test_a_missing_data_set_is_prepared_by_the_script_with_its_name(other_project):
    ((dataset, _),) = find_datasets("mine", None)
    assert dataset.folder == other_project / "data" / "mine" and len(dataset.train[0]) == 1890


def test_only_the_projects_own_scripts_are_run(tmp_path):
    """A data set given by a path once ran the Python file beside it."""
    (tmp_path / "other.py").write_text("raise SystemExit('this must not run')")
    with pytest.raises(DatasetError, match="does not exist, and there is no prepare/"):
        find_datasets(str(tmp_path / "other"), None)


def test_a_missing_data_set_says_what_to_do(data_dir, other_project):
    with pytest.raises(DatasetError, match="prepared data sets: verse; to use your own text: python prepare"):
        find_datasets("prose", str(data_dir))
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
