"""Types and ranges of the values in state.json."""

import json

import pytest

from folio.base.files import read_json
from folio.checkpoints import checkpoint
from folio.checkpoints.run_folder import CheckpointError
from tests.support.checkpoints import save
from tests.support.runs import blank_part, edit_manifest

CPU = dict(device="cpu", dtype="float32", compile=False)

INVALID = {
    "step": [-1, True],
    "next_sequence": [10**30],
    "best_val_loss": [float("nan"), 10**400, None],
    "best_step": [7],
    "guard": [
        {"moments": float("inf")},
        {"moments": [[0.0, float("inf"), 0.0], [0.0, 0.0, 0.0]]},
        {"moments": [[1e308, 0.0, 0.0], [0.0, 0.0, 0.0]]},
    ],
    "grad_scaler": [{"scale": 0}],
    "model": [{"n_layer": 10**30}, {"dropout": float("nan")}],
    "dataset": [{}],
    "budget": [{"spent": "1"}],
    "origins": [["x"]],
    "parts": [
        *(None, [], [{"from_step": 0}], [blank_part(1)], [blank_part(0), blank_part(4)]),
        [blank_part(0), blank_part(2), blank_part(1)],
        *([blank_part(0, changes={"seed": change})] for change in (1, [1])),
        *([blank_part(0, resolved=resolved)] for resolved in (CPU | {"compile": "x"}, CPU | {"processes": "2"})),
        *([blank_part(0, **{name: None})] for name in ("exact", "resolved")),
        *([blank_part(0, **change)] for change in (dict(versions={"torch": 2}), dict(threads=0))),
        [blank_part(0, decisions=[[0, -5]])],
        [blank_part(0, resolved={"device": "cpu"})],
    ],
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_value_in_state_json_is_an_error(tmp_path, name):
    """With a matching manifest, it ended in a traceback, or the run trained from a negative step."""
    path = save(tmp_path, 3)
    state = read_json(path / "state.json")
    for value in INVALID[name]:
        (path / "state.json").write_text(json.dumps({**state, name: value}))  # NaN, too
        edit_manifest(path)
        with pytest.raises(CheckpointError, match=rf"state\.json .*: (best_step|{name})$"):
            checkpoint.load(tmp_path)
            pytest.fail(f"{value!r} is accepted")
