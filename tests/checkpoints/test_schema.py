"""Types and ranges of the values in state.json."""

import json

import pytest

from folio.base.files import read_json
from folio.checkpoints import checkpoint
from folio.checkpoints.run_folder import CheckpointError
from tests.support.checkpoints import save
from tests.support.runs import SHAPE, blank_part, blank_state, edit_manifest, write_state

DATASET = blank_state(1)["dataset"]
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
    "dataset": [{}, *(DATASET | {"prompt_format": value} for value in ("future", ["chat"], 5))],
    "budget": [{"spent": "1"}],
    "origins": [["x"]],
    "parts": [
        *(None, [], [{"from_step": 0}], [blank_part(1)], [blank_part(0), blank_part(4)]),
        [blank_part(0), blank_part(2), blank_part(1)],
        *([blank_part(0, changes={"seed": change})] for change in (1, [1])),
        *([blank_part(0, resolved=resolved)] for resolved in (CPU | {"compile": "x"}, CPU | {"processes": "2"})),
        *([blank_part(0, **{name: None})] for name in ("exact", "resolved", "versions", "threads", "init_from")),
        *([blank_part(0, **change)] for change in (dict(versions={"torch": 2}), dict(versions={}), dict(threads=0))),
        *([blank_part(0, decisions=decisions)] for decisions in ([], [[0, -5]], None)),
        [blank_part(0, resolved={"device": "cpu"})],
    ],
}


def test_a_missing_value_in_state_json_is_an_error(tmp_path):
    """Many were optional, because older versions did not write them."""
    path = save(tmp_path, 3)
    state = read_json(path / "state.json")
    for name in state.keys() - {"format_version"}:
        write_state(path, {key: value for key, value in state.items() if key != name})
        with pytest.raises(CheckpointError, match=rf"state\.json .*: {name}$"):
            checkpoint.load(tmp_path)
    for name, record in {"guard": state["guard"], "model": SHAPE, "dataset": state["dataset"]}.items():
        for key in record:
            write_state(path, {**state, name: {other: record[other] for other in record if other != key}})
            with pytest.raises(CheckpointError, match=rf"state\.json .*: {name}$"):
                checkpoint.load(tmp_path)


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


def test_numbers_have_the_type_of_their_field(tmp_path):
    """JSON has one type of number. A step of 3.0 was refused, and a loss of 2 stayed an integer."""
    path = save(tmp_path, 3)
    state = read_json(path / "state.json")
    numbers = {"step": 3.0, "best_step": 3.0, "best_val_loss": 2, "parts": [{**state["parts"][0], "threads": 2.0}]}
    write_state(path, {**state, **numbers})
    loaded = checkpoint.load(tmp_path).state
    assert [type(loaded[name]) for name in ("step", "best_step", "best_val_loss")] == [int, int, float]
    assert type(loaded["parts"][0]["threads"]) is int and loaded["dataset"] == state["dataset"]
