import pytest

from folio import UserError
from folio.base.settings import read_config
from folio.experiments.sweep.sweep_folder import copy_config_files, reserve_folder
from tests.support.sweeps import parse


def test_only_one_process_runs_a_sweep_unless_it_is_shared(tmp_path):
    folder = tmp_path / "new" / "sweep"
    with reserve_folder(folder, is_shared=False):
        assert folder.is_dir()
        with reserve_folder(folder, is_shared=True):
            pass
        with (
            pytest.raises(UserError, match=r"another process .*sweep; wait for it, or choose another"),
            reserve_folder(folder, is_shared=False),
        ):
            pytest.fail("two processes run the sweep")
    with reserve_folder(folder, is_shared=False):
        pass


def test_an_unwritable_folder_is_an_error_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match=r"^out_dir=[^\n]*file.sweep: [^\n]* choose another --out_dir$"),
        reserve_folder(tmp_path / "file" / "sweep", is_shared=False),
    ):
        pytest.fail("the folder was made")


def test_trials_use_a_copy_of_the_config_file(tmp_path, data_dir):
    config = tmp_path / "mine.py"
    config.write_text("dataset = 'verse'\nmax_iters = 8\n")
    _, sweep = parse([str(config), "n_layer=1,2", f"--data_dir={data_dir}", f"--out_dir={tmp_path / 'sweep'}"])
    with reserve_folder(sweep.out_dir, is_shared=False):
        copy = copy_config_files(sweep)
    config.write_text("max_iters = 4\n")
    assert copy.arguments == [str(tmp_path / "sweep" / "0-mine.py"), f"--data_dir={data_dir}"]
    assert read_config(copy.arguments[0]) == {"dataset": "verse", "max_iters": 8}
