import pytest

from folio import UserError
from folio.experiments.sweep.sweep_folder import reserve_folder


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
