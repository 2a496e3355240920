"""The output and errors of tools/compare.py."""

import json
import shutil

import pytest

from folio import UserError
from folio.base.settings import load
from tests.support.evaluations import replace_fetch
from tools import compare
from tools.compare import CompareConfig
from train import train


def run_tool(*words: str) -> None:
    """Run the tool with these arguments."""
    compare.main(load(CompareConfig, list(words)))


@pytest.mark.needs("scipy")
def test_two_checkpoints(tiny, tmp_path, capsys):
    cfg = tiny(max_iters=12, eval_interval=6)
    train(cfg)
    text = tmp_path / "new.txt"
    text.write_text("the king shall love\n\n" * 30 + "his crown and swear", encoding="utf-8")
    capsys.readouterr()
    words = ["--text", str(text), "--split_on=\\n\\n", "--stride", "4", f"--json={tmp_path / 'results.json'}"]
    copy = shutil.copytree(cfg.out_dir, f"{cfg.out_dir}-copy")
    run_tool(cfg.out_dir, copy, *words)
    out = capsys.readouterr().out
    assert "31 documents |" in out and "do not differ significantly" in out
    output = json.loads((tmp_path / "results.json").read_text())
    assert len(output["results"]) == 6 and output["comparisons"][0]["p"] == 1
    assert output["results"][0]["low"] < output["results"][0]["value"] < output["results"][0]["high"]


@pytest.mark.needs("scipy")
def test_two_settings(tiny, tmp_path, capsys):
    """Two runs per side with the same seeds in a different order: they are paired by seed."""
    runs = {}
    for position in ("learned", "none"):
        for seed in (1, 2):
            runs[position, seed] = str(tmp_path / f"{position}-{seed}")
            train(tiny(max_iters=4, warmup_iters=1, position=position, seed=seed, out_dir=runs[position, seed]))
    capsys.readouterr()
    first, second = str(tmp_path / "learned-*"), f"{runs['none', 2]},{runs['none', 1]}"
    run_tool(first, second, f"--json={tmp_path / 'results.json'}")
    lines = capsys.readouterr().out.splitlines()
    sides = [[runs[position, seed] for seed in (1, 2)] for position in ("learned", "none")]
    assert lines[-6] == f"A: {', '.join(sides[0])}" and lines[-5] == f"B: {', '.join(sides[1])}"
    assert lines[-4] == "Settings that differ: position learned (A) and none (B)." and "paired t-test" in lines[-3]
    output = json.loads((tmp_path / "results.json").read_text())
    assert [*output] == ["results", "sides", "comparisons"] and output["sides"] == sides
    assert [row["sentence"] for row in output["comparisons"]] == lines[-2:]
    values = {row["run"]: row["value"] for row in output["results"] if row["measure"] == "loss, nats per token"}
    difference = sum(values[run] for run in sides[1]) / 2 - sum(values[run] for run in sides[0]) / 2
    assert output["comparisons"][0]["difference"] == pytest.approx(difference)
    assert output["comparisons"][0]["over"] == "runs" and output["comparisons"][0]["n"] == 4


@pytest.mark.needs("scipy")
def test_a_task_counts_the_characters_that_are_left_out(tiny, monkeypatch, tmp_path, capsys):
    cfg = tiny(max_iters=2, warmup_iters=1)
    train(cfg)
    passages = ["The king said é to his love", "Swear", "fair no3 crown"]
    replace_fetch(monkeypatch, tmp_path, {"4aa8": "\n".join(json.dumps({"text": t}) for t in passages[::2]).encode()})
    copy = shutil.copytree(cfg.out_dir, f"{cfg.out_dir}-copy")
    run_tool(cfg.out_dir, copy, "--tasks=lambada", "--limit=1")
    out = capsys.readouterr().out
    assert f"{cfg.out_dir} left out 1 of the 27 characters of lambada (3.70%)" in out
    assert "lambada, accuracy: on this text, the checkpoints" in out and "| 1 passages |" in out


@pytest.mark.needs("scipy")
@pytest.mark.parametrize(
    "words, message",
    [
        (["a", "b", "c"], r"two sides.* 3 .*tools/compare\.py"),
        (["a", "b", "--context=9"], "context is not a setting"),
        (["a", "b", "--tasks=music"], r"tasks=music.*tools/evaluate\.py"),
        (["a", "b", "--tasks", "lambada", "hellaswag"], "hellaswag.*--tasks=lambada,"),
    ],
)
def test_bad_settings_are_an_error(words, message):
    with pytest.raises(UserError, match=message):
        run_tool(*words)
