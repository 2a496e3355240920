"""folio/training/planning/measured_law.py: saving, loading, and the range of a law."""

import json
import shutil
from dataclasses import replace

import pytest

from folio import UserError
from folio.data.find_data import find_datasets
from folio.data.windows import Mixture
from folio.training.planning.law import RunSize, ScalingLaw
from folio.training.planning.measured_law import MeasuredLaw

LAW = ScalingLaw(E=1.1, A=60.0, alpha=0.45, B=90.0, beta=0.4)
RUNS = [RunSize(10**5, 10**6, 500, 10**7), RunSize(10**6, 4 * 10**6, 2000, 10**7)]


@pytest.fixture
def data(data_dir, tmp_path) -> Mixture:
    shutil.copytree(data_dir / "verse", tmp_path / "verse")
    return Mixture(find_datasets("verse", str(tmp_path)), block_size=8, seed=1, sampling="epoch")


def test_a_law_is_saved_in_the_folder_of_the_data_and_readable(data, tmp_path):
    assert MeasuredLaw.of(data) is None
    law = MeasuredLaw(data.hash, RUNS, [1.9, 1.7], [LAW, replace(LAW, E=1.0)])
    assert law.save(data) == tmp_path / "verse" / "scaling.json"
    loaded = MeasuredLaw.of(data)
    assert loaded.runs == RUNS and loaded.losses == [1.9, 1.7] and loaded.data_hash == data.hash
    assert loaded.laws[0].parameters == pytest.approx(LAW.parameters)
    saved = json.loads((tmp_path / "verse" / "scaling.json").read_text())
    assert saved["runs"] == [list(run) for run in RUNS] and len(saved["laws"][0]) == 6
    replace(law, data_hash="another").save(data)
    assert MeasuredLaw.of(data) is None


@pytest.mark.parametrize("content", ["", "[]", '{"runs": 1}', '{"runs": [[1, 2]], "laws": [], "losses": []}'])
def test_a_damaged_file_is_an_error_that_says_what_to_do(data, tmp_path, content):
    (tmp_path / "verse" / "scaling.json").write_text(content)
    with pytest.raises(UserError, match="measure again"):
        MeasuredLaw.of(data)


def test_a_law_is_used_near_its_runs():
    law = MeasuredLaw("", RUNS, [1.9, 1.7], [LAW])
    for N, D in ((10**6, 10**8), (8 * 10**6, 10**6)):
        assert law.covers(RunSize(N, D, 2000, 10**7))
    for N, D in ((10**7, 10**7), (10**4, 10**7), (10**6, 10**9), (10**6, 10**5)):
        assert not law.covers(RunSize(N, D, 2000, 10**7))
