import pytest

from folio import UserError
from folio.base.settings import read_config
from folio.experiments.sweep.sweep_folder import reserve_folder, with_copied_files
from tests.support.sweeps import parse


def test_one_process_at_a_time_runs_a_sweep_unless_machines_share_it(tmp_path):
    folder = tmp_path / "new" / "sweep"
    with reserve_folder(folder, is_shared=False):
        assert folder.is_dir()
        with reserve_folder(folder, is_shared=True):
            pass
        with (
            pytest.raises(
                UserError, match=r"another process runs the sweep in .*sweep; wait for it, or choose another"
            ),
            reserve_folder(folder, is_shared=False),
        ):
            pytest.fail("two processes run the sweep")
    with reserve_folder(folder, is_shared=False):
        pass


def test_a_folder_that_cannot_be_written_is_an_error_of_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(
            UserError, match=r"^out_dir=[^\n]*file.sweep: it cannot be written [^\n]* choose another --out_dir$"
        ),
        reserve_folder(tmp_path / "file" / "sweep", is_shared=False),
    ):
        pytest.fail("the folder was made")


def test_trials_read_a_copy_of_the_config_file(tmp_path, data_dir):
    config = tmp_path / "mine.py"
    config.write_text("dataset = 'verse'\nmax_iters = 8\n")
    _, sweep = parse([str(config), "n_layer=1,2", f"--data_dir={data_dir}", f"--out_dir={tmp_path / 'sweep'}"])
    with reserve_folder(sweep.out_dir, is_shared=False):
        copied = with_copied_files(sweep)
    config.write_text("max_iters = 4\n")
    assert copied.arguments == [str(tmp_path / "sweep" / "0-mine.py"), f"--data_dir={data_dir}"]
    assert read_config(copied.arguments[0]) == {"dataset": "verse", "max_iters": 8}
