"""Types and ranges of the values in state.json."""

import json

import pytest

from folio.base.files import read_json
from folio.checkpoints import checkpoint
from folio.checkpoints.run_folder import CheckpointError
from tests.support.checkpoints import save
from tests.support.runs import blank_part, edit_manifest

INVALID = [
    ("step", -1),
    ("step", True),
    ("next_sequence", 10**30),
    ("best_val_loss", float("nan")),
    ("best_val_loss", 10**400),
    ("best_val_loss", None),
    ("best_step", 7),
    ("guard", {"moments": float("inf")}),
    ("guard", {"moments": [[0.0, float("inf"), 0.0], [0.0, 0.0, 0.0]]}),
    ("guard", {"moments": [[1e308, 0.0, 0.0], [0.0, 0.0, 0.0]]}),
    ("grad_scaler", {"scale": 0}),
    ("model", {"n_layer": 10**30}),
    ("model", {"dropout": float("nan")}),
    ("dataset", {}),
    ("parts", None),
    ("parts", []),
    ("parts", [{"from_step": 0}]),
    ("parts", [blank_part(1)]),
    ("parts", [blank_part(0), blank_part(4)]),
    ("parts", [blank_part(0), blank_part(2), blank_part(1)]),
    ("parts", [blank_part(0, changes={"seed": 1})]),
    ("parts", [blank_part(0, changes={"seed": [1]})]),
    ("parts", [blank_part(0, exact=None)]),
    ("parts", [blank_part(0, versions={"torch": 2})]),
    ("parts", [blank_part(0, threads=0)]),
    ("parts", [blank_part(0, decisions=[[0, -5]])]),
    ("parts", [blank_part(0, resolved={"device": "cpu", "dtype": "float32", "compile": "x"})]),
    ("parts", [blank_part(0, resolved={"device": "cpu"})]),
    ("parts", [blank_part(0, resolved={"device": "cpu", "dtype": "float32", "compile": False, "processes": "2"})]),
    ("budget", {"spent": "1"}),
    ("origins", ["x"]),
]


@pytest.mark.parametrize("name, value", INVALID)
def test_an_invalid_value_in_state_json_is_an_error(tmp_path, name, value):
    """With a matching manifest, it ended in a traceback, or the run trained from a negative step."""
    path = save(tmp_path, 3)
    state = {**read_json(path / "state.json"), name: value}
    (path / "state.json").write_text(json.dumps(state))
    edit_manifest(path)
    with pytest.raises(CheckpointError, match=r"state\.json .*: (best_step|" + name + ")$"):
        checkpoint.load(tmp_path)
