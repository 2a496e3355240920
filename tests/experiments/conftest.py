"""A folder of different runs, for tests of selections and lists."""

import json
from pathlib import Path

import pytest

from tests.support.runs import line_of, set_date, write_run


@pytest.fixture
def four(tmp_path, monkeypatch) -> Path:
    """Four runs, in the order of their dates, in the working directory."""
    a, b = dict(n_layer=2, learning_rate=1e-3, dataset="novel"), dict(n_layer=6, learning_rate=1e-2, dataset="novel")
    c = dict(n_layer=6, learning_rate=3e-3, dataset="letters")
    write_run(tmp_path / "a", {4: 2.5, 8: 2.0}, **a, bias=False, dropout=None)
    write_run(tmp_path / "sweep-x" / "b", {4: 1.5}, "SIGINT", **b, bias=False, max_iters=8)
    write_run(tmp_path / "sweep-x" / "c", {4: 1.75, 8: 1.8}, **c, bias=True)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "metrics.jsonl").write_text(json.dumps(line_of(2)) + "\n")
    for number, name in enumerate(["a", "sweep-x/b", "sweep-x/c", "d"]):
        set_date(tmp_path / name, 1000 * number)
    monkeypatch.chdir(tmp_path)
    return tmp_path
