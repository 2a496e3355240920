import pytest

from folio import UserError
from folio.experiments.sweep.sweep_folder import checked_definition
from tests.support.sweeps import parse, small_sweep


def test_a_folder_has_the_definition_of_its_first_sweep(data_dir, tmp_path):
    """The definition is written only if the block succeeds, so that a bad command does not reserve the folder."""
    words = ["n_head=1,2", *small_sweep(data_dir, tmp_path / "sweep")]
    _, sweep = parse(words)
    with pytest.raises(ZeroDivisionError), checked_definition(sweep):
        _ = 1 / 0
    assert not (tmp_path / "sweep" / "sweep.json").exists()
    for _ in range(2):
        with checked_definition(sweep):
            pass
    _, other = parse([*words, "--n_embd=32"])
    with pytest.raises(UserError, match=r"n_embd=16, not 32.*repeat its command"), checked_definition(other):
        pytest.fail("the folder has two definitions")
    (tmp_path / "sweep" / "sweep.json").write_text("[")
    with pytest.raises(UserError, match=r"sweep\.json is damaged.*remove it to resume"), checked_definition(sweep):
        pytest.fail("the definition is damaged")
