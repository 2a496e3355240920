"""The output and errors of tools/compare.py."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from folio import UserError
from folio.base.files import read_json
from folio.base.settings import load
from tests.support.benchmark_tasks import LAST_WORDS, write_task
from tests.support.terminals import terminal
from tools import compare
from tools.compare import CompareConfig
from train import train

pytestmark = pytest.mark.needs("scipy")


@pytest.fixture
def compared(tmp_path, capsys) -> Callable[..., tuple[str, dict]]:
    """A function that runs the tool. Returns its output, and the content of --json."""

    def run_tool(*words: str) -> tuple[str, dict]:
        capsys.readouterr()
        compare.main(load(CompareConfig, [*words, f"--json={tmp_path / 'results.json'}"]))
        return capsys.readouterr().out, read_json(tmp_path / "results.json")

    return run_tool


def test_two_checkpoints(run, tmp_path, compared):
    text, copy = tmp_path / "new.txt", shutil.copytree(run, f"{run}-copy")
    text.write_text("the king shall love\n\n" * 30 + "his crown and swear", encoding="utf-8")
    out, output = compared(run, copy, "--text", str(text), "--split_on=\\n\\n", "--stride", "4")
    assert "31 documents |" in out and "do not differ significantly" in out
    assert len(output["results"]) == 6 and output["comparisons"][0]["p"] == 1
    assert output["results"][0]["low"] < output["results"][0]["value"] < output["results"][0]["high"]


def test_a_terminal_shows_an_aligned_table_and_wrapped_lines(run, monkeypatch):
    monkeypatch.chdir(Path(run).parent)
    shutil.copytree(run, "copy")
    with terminal(80) as lines:
        compare.main(load(CompareConfig, [Path(run).name, "copy"]))
    assert not any(line.startswith("|") for line in lines) and any(line.startswith("──") for line in lines)
    assert max(map(len, lines)) <= 80


@pytest.mark.needs("lm_eval")
def test_two_checkpoints_on_a_benchmark(run, tmp_path, compared):
    """The characters that are left out are counted."""
    copy = shutil.copytree(run, f"{run}-copy")
    rows = [{"text": "The king said é to his", "endings": ["love"], "gold": 0}] * 2
    task = write_task(tmp_path, "words", LAST_WORDS, rows=rows)
    out, output = compared(run, copy, f"--tasks={task}", "--limit=1")
    assert f"{run} left out 1 of the 27 characters of words (3.70%)" in out
    assert "words, acc: on this text, the checkpoints" in out and "| 1 examples |" in out
    assert [row["run"] for row in output["benchmarks"]] == [run, copy]


def test_two_settings(tiny, tmp_path, compared):
    """Two runs per side with the same seeds in a different order: they are paired by seed."""
    runs = {}
    for position in ("learned", "none"):
        for seed in (1, 2):
            runs[position, seed] = str(tmp_path / f"{position}-{seed}")
            train(tiny(max_iters=4, warmup_iters=1, position=position, seed=seed, out_dir=runs[position, seed]))
    out, output = compared(str(tmp_path / "learned-*"), f"{runs['none', 2]},{runs['none', 1]}")
    lines = out.splitlines()
    sides = [[runs[position, seed] for seed in (1, 2)] for position in ("learned", "none")]
    assert lines[-6] == f"A: {', '.join(sides[0])}" and lines[-5] == f"B: {', '.join(sides[1])}"
    assert lines[-4] == "Settings that differ: position learned (A) and none (B)." and "paired t-test" in lines[-3]
    assert [*output] == ["results", "sides", "comparisons"] and output["sides"] == sides
    assert [row["sentence"] for row in output["comparisons"]] == lines[-2:]
    values = {row["run"]: row["value"] for row in output["results"] if row["measure"] == "loss, nats per token"}
    difference = sum(values[run] for run in sides[1]) / 2 - sum(values[run] for run in sides[0]) / 2
    assert output["comparisons"][0]["difference"] == pytest.approx(difference)
    assert output["comparisons"][0]["over"] == "runs" and output["comparisons"][0]["n"] == 4


@pytest.mark.parametrize(
    "words, message",
    [
        (["a", "b", "c"], r"two sides.* 3 .*tools/compare\.py"),
        (["a", "b", "--tasks=music"], r"tasks=music.*tools/evaluate\.py"),
        (["a", "b", "--tasks", "hellaswag", "pairs"], "pairs.*--tasks=pairs,"),
    ],
)
def test_bad_settings_are_an_error(words, message, compared):
    with pytest.raises(UserError, match=message):
        compared(*words)
