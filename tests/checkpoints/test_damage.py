"""A run folder with one damaged file: every command loads the right checkpoint, or names the file in an error."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import train as train_script
from folio import UserError, load
from folio.base.files import read_json
from folio.checkpoints import checkpoint, run_folder
from folio.checkpoints.snapshots import find_snapshots
from folio.experiments.runs import Run
from folio.web.viewed_model import ViewedModel
from tests.support.disk import flip_bit
from tools import evaluate, report
from tools.runs import RunsConfig
from tools.runs import main as list_runs
from train import train

LOSSES = [3.0, 2.5, 2.0, 2.6, 2.7, 2.8]  # before the first step and after each
BEST, BEFORE_LAST, LAST = "step-000002", "step-000004", "step-000005"
OTHER = {BEST: LAST, LAST: BEST, "last.json": "best.json", "best.json": "last.json"}
OTHER |= {"metrics.jsonl": "samples.jsonl", "samples.jsonl": "metrics.jsonl"}
PARTS = ["model.safetensors", "optimizer.safetensors", "tokenizer.json", "state.json", "manifest.json"]
SNAPSHOT, OTHER_SNAPSHOT = "snapshots/step-000001.safetensors", "snapshots/step-000000.safetensors"
FILES = ["last.json", "best.json", "metrics.jsonl", "samples.jsonl", SNAPSHOT]
FILES += [f"{step}/{part}" for step in (BEST, LAST) for part in PARTS]
DAMAGES = ["emptied", "cut", "flipped", "exchanged", "removed"]


@pytest.fixture
def run(tiny, monkeypatch) -> Callable:
    """Train to a step, with validation losses that rise after step 2. Keyword arguments are settings."""

    def train_to(step: int, **settings) -> None:
        cfg = tiny(max_iters=step, lr_decay_iters=9, eval_interval=1, snapshots=3, learning_rate=1e-3, **settings)
        remaining = iter(LOSSES if cfg.init_from == "scratch" else [2.9] * 9)
        monkeypatch.setattr(train_script, "evaluate", lambda *args: {"val_loss": next(remaining)})
        train(cfg)

    return train_to


def damage(out: Path, name: str, how: str, rng: random.Random) -> None:
    file = out / name
    content = file.read_bytes()
    if how == "removed":
        file.unlink()
    elif how == "exchanged":
        other = OTHER_SNAPSHOT if name == SNAPSHOT else OTHER.get(name)
        other = out / (other or f"{OTHER[file.parent.name]}/{file.name}")
        file.write_bytes(other.read_bytes())
        other.write_bytes(content)
    else:
        file.write_bytes({"emptied": b"", "cut": content[: len(content) // 2], "flipped": flip_bit(content, rng)}[how])


def loadable(out: Path, *, optimizer: bool) -> list[str]:
    """The names of the checkpoints that can be loaded, oldest first."""
    names = []
    for path in run_folder.directories(out):
        try:
            checkpoint.load(path, optimizer=optimizer)
            names.append(path.name)
        except UserError as error:
            assert path.name in str(error)
    return names


def try_commands(out: Path, run: Callable, capsys: pytest.CaptureFixture) -> None:
    """Read the folder with each command, then resume the run and check the result."""
    usable, resumable = loadable(out, optimizer=False), loadable(out, optimizer=True)
    best = BEST if BEST in usable else usable[-1]
    assert load(str(out)).path.name == best
    assert checkpoint.load(out).path.name == resumable[-1]
    try:
        report.main(report.ReportConfig(runs=(str(out),), output=str(out.parent / "report.html")))
    except UserError as error:
        assert "metrics.jsonl" in str(error) and not Run.of(out).lines
    assert Run.of(out).max_iters == 5
    list_runs(RunsConfig(folders=(str(out),)))
    evaluate.main(evaluate.EvaluateConfig(runs=(str(out),), device="cpu", dtype="float32"))
    assert f"{best}: cpu" in capsys.readouterr().err
    viewed = ViewedModel(str(out), "best", torch.device("cpu"))
    assert viewed.step == int(best.removeprefix("step-"))
    viewed.progress(0)
    for step, path in viewed.checkpoints().items():
        try:
            viewed.model_at(step)
        except UserError as error:
            assert path.name in str(error) and (path.name == Path(SNAPSHOT).name or path.name not in usable)
    run(7, out_dir=str(out), init_from="resume")
    assert checkpoint.load(out).state["step"] == 7 and read_json(out / "last.json")["checkpoint"] == "step-000007"
    assert Run.of(out).lines[-1]["step"] == 7
    if best == BEST:
        assert load(str(out)).path.name == BEST and read_json(out / "best.json")["checkpoint"] == BEST


@pytest.mark.parametrize("cases", [8, pytest.param(75, marks=pytest.mark.slow)])
def test_the_right_checkpoint_is_loaded_if_a_file_is_damaged(run, tmp_path, cases, seed, capsys):
    """With a damaged best.json, sample.py loaded the last checkpoint, and the next save removed the best one.

    The long version damages every file in every way: python -m pytest -m slow tests/checkpoints/test_damage.py
    """
    rng = random.Random(seed)
    undamaged = tmp_path / "undamaged"
    run(5, out_dir=str(undamaged))
    assert sorted(path.name for path in undamaged.glob("step-*")) == [BEST, BEFORE_LAST, LAST]
    assert len(find_snapshots(undamaged)) == 3
    damages = [(name, how) for name in FILES for how in DAMAGES]
    for name, how in [("best.json", rng.choice(DAMAGES)), *rng.sample(damages, cases)]:
        print(name, how)
        out = tmp_path / "out"
        shutil.copytree(undamaged, out)
        damage(out, name, how, rng)
        try_commands(out, run, capsys)
        shutil.rmtree(out)
