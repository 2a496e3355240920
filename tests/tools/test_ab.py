"""tools/ab.py: experiments whose runs are written without training, and one that trains."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from folio import UserError
from folio.base.settings import ROOT
from folio.experiments.ideas import ledger, paired_runs
from folio.experiments.sweep import arms, definition, runner
from tests.support.projects import git, write_project, writer
from tests.support.sweeps import SMALL
from tools import ab

NOISE = [0.0, 0.003, -0.002, 0.001, 0.002, -0.003, 0.0, 0.001]  # of B, by seed


@pytest.fixture
def project(tmp_path, monkeypatch):
    project = write_project(tmp_path / "project")
    for module in (arms, definition):
        monkeypatch.setattr(module, "ROOT", project)
    monkeypatch.chdir(project)
    monkeypatch.setattr(paired_runs, "count", lambda arm, state: {"parameters": 10, "flops_per_token": 60.0})
    return project


@pytest.fixture
def command(project, data_dir, monkeypatch):
    """Return a function that runs the command, and returns its exit status and the last line of the ledger."""
    set_training(monkeypatch, writer(lambda seed, loss: NOISE[seed % 8] * (loss < 2)))
    words = [str(project / "config" / "mine.py"), "--dataset=verse", f"--data_dir={data_dir}", "--device=cpu"]

    def run(*more: str) -> tuple[int, dict]:
        with pytest.raises(SystemExit) as exit:
            ab.main([*words, *more])
        return exit.value.code, ledger.read(Path("ideas"))[-1]

    return run


def set_training(monkeypatch, run_training):
    for module in (runner, paired_runs):
        monkeypatch.setattr(module, "run_training", run_training)


def test_a_better_idea_stops_as_soon_as_it_is_known(command, project, capsys):
    status, entry = command("--b=idea", "--note=less loss")
    assert status == 0 and entry["verdict"] == "better" and entry["note"] == "less loss"
    assert 2 <= len(entry["losses"]) < 8 and entry["high"] < 0
    assert entry["files"] == [{"path": "train.py", "added": 1, "removed": 1}]
    output = capsys.readouterr().out
    assert "train.py +1 -1" in output and "A: 10 parameters" in output and "better, after" in output
    assert not list(Path("ideas").rglob("trial-*/**/*.safetensors"))  # those of decided pairs are removed
    order = [line[0] for line in output.splitlines() if line.startswith(("A, seed", "B, seed"))]
    assert order[:4] == ["A", "B", "B", "A"]
    ab.main(["--ledger"])
    assert "better: 1" in capsys.readouterr().out and "less loss" in Path("ideas/ledger.html").read_text()


def test_with_json_the_result_is_all_of_standard_output(command, capsys):
    """A line about --max_iters, printed while the settings are read, was before it, and it had 90 lines."""
    _, entry = command("--b=idea", "--json", "--max_iters=4")
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == entry and line == Path("ideas/ledger.jsonl").read_text().splitlines()[-1]


def test_the_same_command_shows_the_same_verdict_without_training(command, monkeypatch):
    _, first = command("--b=idea")
    set_training(monkeypatch, lambda *_: pytest.fail("trained again"))
    assert command("--b=idea")[1] == first


def test_a_worse_idea_no_difference_and_undecided(command, project, monkeypatch):
    assert command("--a=idea", "--b=main")[0] == 10
    assert command("--b=idea", "--smallest=0.5", "--new")[1]["verdict"] == "better"  # known, though it is small
    set_training(monkeypatch, writer(lambda seed, loss: (0.1 + NOISE[seed % 8]) * (loss < 2)))
    status, entry = command("--b=idea", "--smallest=0.05", "--new")
    assert (status, entry["verdict"]) == (11, "no difference")
    set_training(monkeypatch, writer(lambda seed, loss: (-1) ** seed * (loss < 2)))
    status, entry = command("--b=idea", "--max_seeds=3", "--new")
    assert (status, entry["verdict"], len(entry["losses"])) == (12, "undecided", 3)
    assert len(command("--b=idea", "--max_seeds=4")[1]["losses"]) == 4  # the same experiment goes on


def test_a_better_idea_is_confirmed_until_it_is_kept(command, capsys):
    """More pairs are not a new experiment, and a p-value that is small enough stops them."""
    first = command("--b=idea")[1]
    assert "not kept" in capsys.readouterr().out
    status, entry = command("--b=idea", "--confirm")
    assert status == 0 and entry["name"] == first["name"] and entry["losses"][:2] == first["losses"][:2]
    assert len(entry["losses"]) == 4 and "\nkept: at most 10%" in capsys.readouterr().out  # of the looks, the first
    assert ledger.are_kept(ledger.read(Path("ideas"))) == [True]


def test_equal_weights_are_identical_and_equal_code_is_an_error(command, project):
    (project / "model.py").write_text("# a comment\n")
    status, entry = command()
    assert (status, entry["verdict"], len(entry["losses"])) == (11, "identical", 1)
    assert command()[1]["verdict"] == "identical"
    git(project, "checkout", "model.py")
    with pytest.raises(UserError, match="the same code and settings"):
        command()


def test_new_experiments_have_new_seeds_and_know_the_spread_of_earlier_ones(command, project):
    first = command("--b=idea")[1]
    (project / "train.py").write_text("loss = 1.8\n")
    second = command()[1]
    assert second["recipe"] == first["recipe"] and second["seed"] == first["seed"] + 16
    record = json.loads((Path("ideas") / second["name"] / "experiment.json").read_text())
    assert record["spread"][1] == len(first["losses"]) - 1
    other_budget = command("--b=idea", "--max_iters=9")[1]
    assert other_budget["recipe"] != first["recipe"] and other_budget["seed"] == first["seed"]


def test_experiments_that_begin_at_the_same_time_have_different_seeds(command, project):
    """The second one took the same seeds, because the first one was not in the ledger yet."""
    first = command("--b=idea")[1]
    Path("ideas/ledger.jsonl").unlink()
    (project / "train.py").write_text("loss = 1.8\n")
    assert command()[1]["seed"] == first["seed"] + 16


def test_the_code_is_frozen_when_the_experiment_begins(command, project, monkeypatch, capsys):
    (project / "train.py").write_text("loss = 1.5\n")
    fake = runner.run_training

    def edit(*args):
        (project / "train.py").write_text("loss = 9\n")
        return fake(*args)

    set_training(monkeypatch, edit)
    entry = command("--max_seeds=2")[1]
    assert entry["losses"][0][1] == pytest.approx(1.5, abs=0.01)
    (project / "train.py").write_text("loss = 1.4\n")
    assert command("--max_seeds=2")[1]["name"] != entry["name"]  # other code: another experiment


@pytest.mark.parametrize("at", ["warm-up", "trial"])
def test_what_fails_becomes_a_line_of_the_ledger_and_is_retried(at, command, monkeypatch):
    fake = runner.run_training
    set_training(monkeypatch, lambda folder, *rest: "out of memory" if at in folder.name else fake(folder, *rest))
    status, entry = command("--b=idea")
    assert (status, entry["verdict"]) == (2, "failed") and "out of memory" in entry["reason"]
    set_training(monkeypatch, fake)
    assert command("--b=idea")[1]["verdict"] == "better"
    assert len(ledger.read(Path("ideas"))) == 1


def test_a_signal_stops_it_and_the_same_command_resumes_it(command, project, monkeypatch, capsys):
    fake, trained = runner.run_training, []

    def interrupt(folder, *rest):
        trained.append(folder.name)
        if len(trained) == 5:  # after two warm-ups and a pair
            os.kill(os.getpid(), signal.SIGINT)
            return None
        return fake(folder, *rest)

    set_training(monkeypatch, interrupt)
    status, entry = command("--b=idea")
    assert (status, entry["verdict"]) == (130, "unfinished") and "stopped after 2 of 16 runs" in capsys.readouterr().out
    git(project, "checkout", "idea")
    (project / "train.py").write_text("loss = 1\n")
    git(project, "commit", "-am", "the branch goes on")
    git(project, "checkout", "main")
    status, entry = command("--b=idea")
    assert status == 0 and "with the code as it was when it began" in capsys.readouterr().out
    assert entry["losses"][-1][1] == pytest.approx(1.9, abs=0.01) and len(ledger.read(Path("ideas"))) == 1


def test_other_validation_text_gives_no_verdict(command, monkeypatch):
    monkeypatch.setattr("folio.experiments.ideas.paired_test.units", lambda *_: "the texts differ")
    status, entry = command("--b=idea")
    assert (status, entry["verdict"], entry["reason"]) == (2, "failed", "the texts differ")


def test_a_working_tree_that_cannot_be_imported_is_a_line_of_the_ledger(project, monkeypatch):
    monkeypatch.setitem(sys.modules, "folio.experiments.ideas.compare_code", None)  # as for a broken model.py
    with pytest.raises(UserError, match="the working tree cannot be imported"):
        ab.main(["config/mine.py", "--note=broken"])
    (entry,) = ledger.read(Path("ideas"))
    assert entry["verdict"] == "failed" and entry["note"] == "broken"


def test_a_damaged_last_line_of_the_ledger_does_not_damage_others(command):
    """It was readable, but the next line was appended to the damaged one, and lost."""
    _, entry = command("--b=idea")
    with open("ideas/ledger.jsonl", "a") as file:
        file.write('{"id": "002')
    assert ledger.read(Path("ideas")) == [entry]
    ledger.append(Path("ideas"), {**entry, "note": "later"})
    ledger.append(Path("ideas"), {**entry, "id": "002", "began": "9"})
    assert [(e["id"], e["note"]) for e in ledger.read(Path("ideas"))] == [(entry["id"], "later"), ("002", "")]


@pytest.mark.slow
def test_two_settings_are_compared_by_real_runs(data_dir, tmp_path):
    """B has a learning rate of almost 0. The result is one JSON document on standard output."""
    words = [*SMALL.split(), f"--data_dir={data_dir}", f"--out_dir={tmp_path / 'ideas'}", "--json", "--max_seeds=3"]
    script = [sys.executable, ROOT / "tools" / "ab.py", "config/shakespeare_char.py"]
    done = subprocess.run(
        [*script, *words, "--b=--learning_rate=1e-9 --muon_learning_rate=1e-9"], capture_output=True, text=True
    )
    assert done.returncode == 10, done.stderr
    entry = json.loads(done.stdout)
    assert entry["verdict"] == "worse"
    assert entry["models"][0]["parameters"] > 0 and entry["models"][0]["flops_per_token"] > 0
