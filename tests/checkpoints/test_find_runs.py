"""Finding the runs under a folder, and the name "latest"."""

import os
import re
from pathlib import Path

import pytest
import torch
from filelock import FileLock

import train as train_script
from folio import UserError, load
from folio.base import settings
from folio.checkpoints import run_folder
from folio.checkpoints.find_runs import expand_runs, find_run, runs_under
from folio.evaluation.comparison import choose_sides
from folio.web.viewed_model import ViewedModel
from prepare import text as prepare_text
from sample import SampleConfig
from sample import main as sample
from tests.support.runs import set_date, write_run
from tools import export, report
from tools.runs import RunsConfig, main
from tools.sweep import main as run_sweep
from train import TrainConfig, train


def test_runs_are_found_at_any_depth_and_only_once(tmp_path):
    """Hidden folders, data sets and checkpoints are skipped, and cycles of links end."""
    out, trial = write_run(tmp_path / "out", {1: 2.0}), write_run(tmp_path / "sweep" / "a" / "trial-1", {1: 2.0})
    write_run(tmp_path / ".hidden" / "out", {1: 2.0})
    write_run(tmp_path / "out" / "step-000001" / "inside", {1: 2.0})
    nested = write_run(tmp_path / "out" / "nested", {1: 2.0})
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "meta.json").write_text("{}")
    write_run(tmp_path / "data" / "out", {1: 2.0})
    elsewhere = write_run(tmp_path.parent / f"{tmp_path.name}-elsewhere" / "big", {1: 2.0})
    for link, target in ("0-out", out), ("circle", tmp_path), ("linked", elsewhere.parent), ("nowhere", "nothing"):
        (tmp_path / link).symlink_to(target)
    (tmp_path / "itself").symlink_to(tmp_path / "itself")
    assert runs_under(tmp_path) == [tmp_path / "linked" / "big", nested.parent, nested, trial]
    assert runs_under(out) == [out, nested] and runs_under(tmp_path / "missing") == []


# --- latest -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def two(tiny, tmp_path, monkeypatch, capsys) -> Path:
    """The folder of the newer of two trained runs in the working directory, "old" and "sweep-x/new"."""
    monkeypatch.chdir(tmp_path)
    for name, n_layer in ("old", 2), (os.path.join("sweep-x", "new"), 1):
        train(tiny(out_dir=name, n_layer=n_layer, max_iters=4, eval_interval=2))
    set_date(tmp_path / "old", 0)
    capsys.readouterr()
    return Path("sweep-x") / "new"


def test_latest_is_the_most_recently_written_run(two, tmp_path, capsys):
    assert find_run("latest") == str(two) and capsys.readouterr().err == f"latest: {two}\n"
    set_date(two, -1000)
    (two / "report.html").write_text("not written by the run")
    assert find_run("latest") == "old" and find_run("old") == "old"
    (tmp_path / "latest").touch()
    assert find_run("latest") == "old"
    (tmp_path / "latest").unlink()
    set_date(write_run(tmp_path / "latest", {1: 2.0}), -2000)
    assert find_run("latest") == "latest"


def test_without_a_run_latest_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "starting").mkdir()
    with FileLock(tmp_path / "starting" / ".lock"), pytest.raises(UserError, match=r"^latest: .*no run"):
        find_run("latest")


def test_latest_samples_exports_and_evaluates(two, tiny, tmp_path, capsys):
    expected = load(two, device="cpu").generate("the", max_new_tokens=5, temperature=0.0)
    assert load("latest", device="cpu").generate("the", max_new_tokens=5, temperature=0.0) == expected
    for setting in "--out_dir=latest", "--init_from=latest":
        options = ["--start=the", "--max_new_tokens=5", "--temperature=0", "--device=cpu", setting]
        sample(settings.load(SampleConfig, options))
        captured = capsys.readouterr()
        assert captured.out == f"the{expected}\n" and f"checkpoint {two}" in captured.err
    assert expand_runs(["old,latest"]) == ["old", str(two)] and expand_runs(["latest"]) == [str(two)]
    with pytest.raises(UserError, match="is on both sides"):
        choose_sides(["latest", str(two)])
    export.main(settings.load(export.ExportConfig, ["--to=nanogpt", "latest", "exported"]))
    assert (tmp_path / "exported" / "ckpt.pt").exists()
    assert ViewedModel("latest", "best", torch.device("cpu")).name == str(two)
    report.main(settings.load(report.ReportConfig, ["latest"]))
    assert "<title>Folio: new</title>" in (two / "report.html").read_text(encoding="utf-8")
    main(settings.load(RunsConfig, ["latest"]))
    assert "\nnew " in capsys.readouterr().out


def test_latest_resumes_and_finetunes(two, tiny, data_dir, capsys):
    """The command to continue the run, and the checkpoint, name its folder, because "latest" will change."""
    train_script.main(settings.load(TrainConfig, ["--init_from=resume", "--out_dir=latest", "--max_iters=6"]))
    assert run_folder.last_state(two)["step"] == 6 and f"--out_dir={two}" in capsys.readouterr().out
    cfg = tiny(out_dir="fine", init_from="latest", n_layer=1, max_iters=2)
    train_script.main(cfg)
    assert run_folder.last_state(Path("fine"))["config"]["init_from"] == str(two)
    assert f"from the weights of {two}" in capsys.readouterr().out


def test_latest_cannot_be_the_name_of_a_new_run_or_the_start_of_trials(two, tmp_path):
    with pytest.raises(UserError, match="--init_from=latest: "):
        run_sweep(["--init_from=latest", "--dataset=verse", "learning_rate=1e-3,3e-3"])
    with pytest.raises(UserError, match="out_dir=latest: "):
        settings.load(TrainConfig, ["--out_dir=latest", "--dataset=verse"])
    (tmp_path / "latest").mkdir()
    assert settings.load(TrainConfig, ["--out_dir=latest", "--dataset=verse"]).out_dir == "latest"


def test_latest_is_an_error_under_torchrun(two, monkeypatch):
    """Processes and restarts could resolve it differently, because another run may have written in between."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")
    for options in ["--init_from=resume", "--out_dir=latest"], ["--init_from=latest", "--dataset=verse"]:
        with pytest.raises(UserError, match=rf"=latest: .*torchrun.*--\w+={re.escape(str(two))}"):
            train_script.main(settings.load(TrainConfig, options))


def test_the_tokenizer_of_the_latest_run_prepares_a_text(two, tmp_path, text, capsys):
    (tmp_path / "more.txt").write_text(text[:5000])
    options = ["more.txt", "--tokenizer=latest", "--data_dir=data", "--on_unknown=skip"]
    prepare_text.main(settings.load(prepare_text.TextConfig, options))
    assert f"--init_from={two}" in capsys.readouterr().out
