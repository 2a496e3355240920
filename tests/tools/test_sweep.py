"""tools/sweep.py: grids, searches, interruptions, failures, and several workers."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

import train
from folio import UserError
from folio.base import settings
from folio.base.files import read_json
from folio.base.settings import ROOT, read_config
from folio.experiments.sweep import runner
from folio.experiments.sweep.trial import read_progress
from prepare import text as prepare_text
from tests.support import processes
from tests.support.runs import assert_same_run, read_metrics
from tests.support.sweeps import parse, small_sweep
from tests.support.waiting import wait_until
from tools import sweep
from train import TrainConfig


@pytest.fixture
def arguments(data_dir, tmp_path) -> list[str]:
    return small_sweep(data_dir, tmp_path / "sweep")


@pytest.fixture
def in_process(monkeypatch):
    """Run trials in this process, which has imported torch. Returns a list of each run's folder name and arguments."""
    started = []

    def run_training(folder, arguments, environment, watch, code):
        started.append((folder.name, arguments))
        options = ["--init_from=resume"] if list(folder.glob("step-*")) else arguments
        try:
            train.train(settings.load(TrainConfig, [*options, f"--out_dir={folder}"]))
        except UserError as error:
            return str(error)
        watch(*read_progress(folder))
        return None

    monkeypatch.setattr(runner, "run_training", run_training)
    return started


def results_of(tmp_path: Path) -> dict:
    return read_json(tmp_path / "sweep" / "results.json")


def states_of(tmp_path: Path) -> dict[int, str]:
    """The state of each trial of a sweep over n_head."""
    return {trial["params"]["n_head"]: trial["state"] for trial in results_of(tmp_path)["trials"]}


@pytest.mark.needs("scipy")
def test_a_grid_runs_every_combination_with_every_seed(arguments, in_process, tmp_path, capsys):
    """--tokens determines the steps. Seeds can be added, and no run is trained again."""
    words = [argument for argument in arguments if "max_iters" not in argument] + ["--tokens=512"]
    for seeds in (1, 2):
        sweep.main(["learning_rate=1e-5,1e-2", "n_layer=1,2", f"--seeds={seeds}", *words])
    folders = [f"trial-{point:03d}-seed-{seed}" for seed in (1337, 1338) for point in range(4)]
    assert [name for name, _ in in_process] == folders
    results = results_of(tmp_path)
    assert len(results["combinations"]) == 4 and {trial["state"] for trial in results["trials"]} == {"finished"}
    best = results["combinations"][0]
    assert best["params"]["learning_rate"] == 1e-2 and best["verdict"] == "best"
    for row in results["combinations"]:  # compared with the runs' own logs
        logs = [read_metrics(str(tmp_path / "sweep" / name)) for name in folders if f"-{row['point']:03d}-" in name]
        lowest = [min(line["val_loss"] for line in log if line["val_loss"]) for log in logs]
        assert row["mean"]["value"] == pytest.approx(np.mean(lowest))
        assert row["tokens"] == 512 and {log[-1]["step"] for log in logs} == {512 // (4 * 16)}
    assert results["importances"]["learning_rate"] > results["importances"]["n_layer"]
    output = capsys.readouterr().out
    assert "| best" in output and "no significant difference" in output and "Cost: 8 runs, 4,096 tokens" in output


def test_a_failed_trial_is_reported_and_the_sweep_continues(arguments, in_process, tmp_path, capsys):
    sweep.main(["n_head=2,3", "--seeds=1", *arguments])
    output = capsys.readouterr().out
    assert "trial 1, seed 1337 (n_head=3): failed: command line: n_head=3: it must divide n_embd=16" in output
    assert states_of(tmp_path) == {2: "finished", 3: "failed"}
    assert "One seed gives no estimate of the variance" in output
    sweep.main(["n_head=2,3", "--seeds=1", *arguments])
    assert len(in_process) == 2
    sweep.main(["n_head=2,3", "--seeds=1", "--retry_failed", *arguments])
    assert [name for name, _ in in_process[2:]] == ["trial-001-seed-1337"]
    assert "failed with seed 1337: command line: n_head=3" in capsys.readouterr().out


@pytest.mark.needs("optuna", "sqlalchemy", "scipy")
def test_unpruned_trials_of_a_search_are_trained_with_all_seeds(arguments, in_process, tmp_path):
    sweep.main(["learning_rate=1e-6..1e-1:log", "--trials=5", "--seeds=2", *arguments])
    trials = results_of(tmp_path)["trials"]
    assert {trial["point"] for trial in trials} == set(range(5))
    assert all(1e-6 <= trial["params"]["learning_rate"] <= 1e-1 for trial in trials)
    by_point = {p: [t for t in trials if t["point"] == p] for p in range(5)}
    assert all(len({t["params"]["learning_rate"] for t in group}) == 1 for group in by_point.values())
    assert all(len(group) == 2 for group in by_point.values() if group[0]["state"] == "finished")
    n_runs = len(in_process)
    sweep.main(["learning_rate=1e-6..1e-1:log", "--trials=6", "--seeds=2", *arguments])
    assert n_runs < len(in_process) <= n_runs + 2


@pytest.mark.needs("optuna", "sqlalchemy", "scipy")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a setting and its values"),
        (["seed=1,2"], "seed cannot be varied.*--seeds"),
        (["n_layer=2..4"], "n_layer.*--trials=40"),
        (["n_head=2,4", "--lerning_rate=1"], "lerning_rate.*did you mean learning_rate"),
        (["n_head=2,4", "--init_from=resume"], "init_from=resume.*repeat the command"),
        (["init_from=scratch,resume"], "init_from=resume.*repeat the command"),
        (["init_from=scratch,latest"], "init_from=latest.*name the run's folder"),
        (["n_head=2,4", "--out_dir=/dev/null/x"], "out_dir=/dev/null/x.*cannot be written.*choose another"),
        (["n_head=2,4", "--overwrite=True"], "overwrite.*remove the sweep's folder"),
        (["n_head=2,4", "--tokens=100"], "--tokens .*leave out --minutes and max_iters"),  # the fixture has --max_iters
        (["--n_head=2,4"], "; write n_head=2,4 without --"),
        (["n_head=2,4", "--out_dir=latest"], "out_dir=latest.*choose another --out_dir"),
        (["n_head=2,4", "--trials=8", "--storage=nothing"], "storage=nothing.*postgresql://"),
        (["n_head=2,4", "--trials=8", "--storage=postgresql://a:secret@localhost:1/b"], "storage=postgresql.*repeat"),
        (["n_head=2,4", "--trials=8", "--storage=sqlite:///a"], "storage=sqlite:///a.*--out_dir"),
        (["n_head=2,4", "--storage=postgresql://a@localhost/b"], "storage=postgresql.*only a search.*--out_dir"),
        (["n_head=2,4", "--dataset=none_such"], "no such data set"),
    ],
)
def test_bad_arguments_are_an_error_in_one_line_before_training(words, message, arguments, in_process):
    with pytest.raises(UserError, match=message) as error:
        sweep.main([*arguments, *words])
    assert "secret" not in str(error.value) and "\n" not in str(error.value)
    assert not in_process


@pytest.mark.needs("optuna", "sqlalchemy", "scipy")
def test_a_study_is_resumed_only_with_the_same_data_and_settings(arguments, in_process, tmp_path, text):
    sweep.main(["n_layer=1", "--seeds=1", *arguments])
    with pytest.raises(UserError, match=r"sweep was started with n_embd=16, not 32: repeat its command"):
        sweep.main(["n_layer=1", "--seeds=1", *arguments, "--n_embd=32"])
    with pytest.raises(UserError, match=r"settings=n_layer=1, not n_layer=1,2"):
        sweep.main(["n_layer=1,2", "--seeds=1", *arguments])
    with pytest.raises(UserError, match=r"sweep was started with search=False, not True"):
        sweep.main(["n_layer=1", "--trials=1", "--seeds=1", *arguments])
    (tmp_path / "verse.txt").write_text(text[:15000], encoding="utf-8")
    prepare_text.main(prepare_text.TextConfig(inputs=(str(tmp_path / "verse.txt"),), data_dir=str(tmp_path)))
    with pytest.raises(UserError, match=r"data=verse \(\w{8}\), not verse \(\w{8}\)"):
        sweep.main(["n_layer=1", "--seeds=1", *arguments, f"--data_dir={tmp_path}"])
    assert len(in_process) == 1


def test_a_folder_with_another_run_is_not_used_as_a_trials(arguments, in_process, tmp_path, capsys):
    """A sweep whose definition was removed used the results of runs with other settings."""
    sweep.main(["n_layer=1", "--seeds=1", *arguments])
    (tmp_path / "sweep" / "sweep.json").unlink()
    sweep.main(["n_layer=1", "--seeds=1", *arguments])
    assert len(in_process) == 1  # the same run, which is finished
    (tmp_path / "sweep" / "sweep.json").unlink()
    with pytest.raises(UserError, match=r"no run has finished.*--retry_failed"):
        sweep.main(["n_layer=1", "--seeds=1", *arguments, "--n_embd=32"])
    assert "failed" in (output := capsys.readouterr().out) and "another run; remove it" in output


def test_a_sweep_in_the_current_folder_has_the_folders_name(arguments, tmp_path, monkeypatch):
    """All sweeps with --out_dir=. had an empty name in a shared database."""
    monkeypatch.chdir(tmp_path)
    assert parse(["n_layer=1", *arguments, "--out_dir=."])[1].name == tmp_path.name


def test_shared_settings_may_be_invalid_without_the_varied_ones(arguments, in_process, tmp_path):
    """n_embd=50 was an error with the default n_head=12, which no trial has."""
    rest = [argument for argument in arguments if not argument.startswith(("--n_embd", "--n_head"))]
    sweep.main(["n_head=3,5", "--n_embd=50", "--seeds=1", *rest])
    assert states_of(tmp_path) == {3: "failed", 5: "finished"}


def test_a_config_file_may_be_edited_while_the_sweep_runs(arguments, in_process, tmp_path, monkeypatch):
    """The remaining trials used the new settings under the old names."""
    config = tmp_path / "mine.py"
    config.write_text("dataset = 'verse'\nmax_iters = 8\n")
    run_training = runner.run_training

    def edit_config(*args):
        config.write_text("dataset = 'verse'\nmax_iters = 4\n")
        return run_training(*args)

    monkeypatch.setattr(runner, "run_training", edit_config)
    rest = [argument for argument in arguments if "max_iters" not in argument and "dataset" not in argument]
    sweep.main([str(config), "n_layer=1", "--seeds=2", *rest])
    assert read_config(tmp_path / "sweep" / "0-mine.py") == {"dataset": "verse", "max_iters": 8}
    assert {trial["tokens"] for trial in results_of(tmp_path)["trials"]} == {8 * 4 * 16}


@pytest.mark.needs("optuna", "sqlalchemy", "scipy")
def test_a_command_with_fewer_seeds_or_trials_trains_only_these(arguments, in_process, tmp_path, monkeypatch):
    """All trials of an earlier, interrupted command were trained, and the progress bar showed -2/1 runs."""
    words = ["learning_rate=1e-3..1e-2", *arguments]
    run_training = runner.run_training

    def interrupt(*args):
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(runner, "run_training", interrupt)
    with pytest.raises(SystemExit):
        sweep.main([*words, "--trials=3", "--seeds=2"])
    monkeypatch.setattr(runner, "run_training", run_training)
    sweep.main([*words, "--trials=1", "--seeds=1"])
    assert [name for name, _ in in_process] == ["trial-000-seed-1337"]
    sweep.main([*words, "--trials=2", "--seeds=1"])
    assert [name for name, _ in in_process[1:]] == ["trial-001-seed-1337"]


def start_sweep(words: list[str], output: Path, script=ROOT / "tools" / "sweep.py", **env) -> processes.BaseProcess:
    return processes.start([script, *words], [os.devnull, output, output], daemon=False, **env)


@pytest.mark.parametrize("kind", ["grid", pytest.param("search", marks=pytest.mark.needs("optuna", "sqlalchemy"))])
def test_a_process_resumes_a_killed_ones_trial_and_ctrl_c_stops_at_a_checkpoint(kind, arguments, tmp_path, monkeypatch):
    """The trial of both processes ends with the same weights as one that is stopped once. It is never finished."""
    words = ["n_layer=1", "--seeds=1", *arguments, "--max_iters=100_000", "--eval_interval=50_000"]
    run_options = words[2:]
    words += ["--trials=1"] if kind == "search" else []
    folder, output = tmp_path / "sweep" / "trial-000-seed-1337", tmp_path / "second"
    first = start_sweep(words, tmp_path / "first")
    wait_until(lambda: first.exitcode is not None or (folder / "trial.json").exists())
    second = start_sweep(words, output)
    wait_until(lambda: read_progress(folder)[0] > 20 and output.stat().st_size, seconds=300)
    os.kill(first.pid, signal.SIGKILL)
    processes.wait(first)
    wait_until(lambda: second.exitcode is not None or b"resuming from" in (folder / "output.txt").read_bytes(), 300)
    resumed = read_progress(folder)[0]
    wait_until(lambda: second.exitcode is not None or read_progress(folder)[0] > resumed + 20, seconds=300)
    os.kill(second.pid, signal.SIGINT)
    assert processes.wait(second) == 130
    assert "stopped after 0 of 1 runs" in output.read_text(encoding="utf-8")
    assert (folder / "output.txt").read_text(encoding="utf-8").count("resuming from") == 1
    steps = [line["step"] for line in read_metrics(str(folder))]  # each was trained once, and the last one is saved
    assert steps == [*range(1, len(steps) + 1)] and (folder / f"step-{len(steps):06d}").exists()

    started, train_step = [], train.train_step
    monkeypatch.setattr(runner, "run_training", lambda folder, *rest: started.append(folder) or "an error")
    with pytest.raises(UserError, match="no run has finished"):
        sweep.main(words)
    assert started == [folder]  # resumed again

    def step_and_stop(state, *rest):
        train_step(state, *rest)
        if state.step == len(steps):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(train, "train_step", step_and_stop)
    train.train(settings.load(TrainConfig, [*run_options, "--seed=1337", f"--out_dir={tmp_path / 'once'}"]))
    assert_same_run(str(folder), str(tmp_path / "once"))


def test_the_page_shows_the_runs_of_a_sweep(arguments, in_process, tmp_path, open_page):
    sweep.main(["learning_rate=1e-5,1e-2", "n_layer=1,2", "--seeds=2", *arguments])
    results = results_of(tmp_path)
    page = open_page((tmp_path / "sweep" / "sweep.html").read_text(encoding="utf-8"))
    lines, settings, bars = (page.locator("figure").nth(i) for i in range(3))
    assert lines.locator(".drawing g > title").count() == 8 and lines.locator(".legend button").count() == 4
    assert len(set(lines.locator(".legend i").evaluate_all("all => all.map(i => i.style.borderBottomColor)"))) == 4
    box = lines.locator(".drawing svg").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 18, box["y"] + 100)  # the last evaluation
    values = dict(row.split("\t")[:2] for row in lines.locator(".values tr").all_inner_texts())
    last = {trial["evaluations"][-1][1] for trial in results["trials"]}
    assert sorted(map(float, values.values())) == pytest.approx(sorted(last), rel=1e-5)  # which are rounded
    assert "512" in lines.locator(".values").inner_text() and any("seed 1338" in name for name in values)
    assert "4 of 4 selected" in settings.locator("[role=status]").inner_text()
    texts = bars.locator(".drawing text").all_text_contents()
    assert texts[::2] == list(results["importances"])
    assert texts[1::2] == [f"{value:.2f}" for value in results["importances"].values()]


# --- several machines -------------------------------------------------------------------------------------------------

POSTGRES = shutil.which("initdb") or next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))), None)


@contextmanager
def postgres(folder: Path):
    """Start a PostgreSQL server and yield its URL. It cannot run as root, so root runs it as the user postgres."""
    programs, user = Path(POSTGRES).resolve().parent, "postgres" if os.getuid() == 0 else None
    folder.mkdir()
    if user:
        shutil.chown(folder, user)
        for parent in folder.parents:
            if parent.stat().st_uid == 0 and parent.is_relative_to("/tmp/pytest-of-root"):
                parent.chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    as_user = {"user": user} if user else {}
    initdb = [programs / "initdb", "--auth=trust", "--username=postgres", "--no-sync", "-D", folder / "data"]
    subprocess.run(initdb, check=True, capture_output=True, cwd=folder, **as_user)
    serve = [programs / "postgres", "-D", folder / "data", "-p", str(port), "-k", folder, "-F"]
    with open(folder.parent / "postgres.log", "w") as log:
        server = subprocess.Popen(serve, stdout=log, stderr=log, cwd=folder, **as_user)
        try:
            yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
        finally:
            server.send_signal(signal.SIGINT)  # fast shutdown, without waiting for clients
            server.wait(30)


WITH_FAST_HEARTBEATS = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from folio.base.settings import run_script
from folio.experiments.sweep import study
from tools.sweep import main
study.HEARTBEAT_SECONDS = 2
run_script(main, needs_output=False)
"""


@pytest.mark.slow
@pytest.mark.skipif(not POSTGRES, reason="needs PostgreSQL: apt install postgresql")
def test_two_workers_share_a_database_and_one_resumes_the_killed_ones_trial(arguments, tmp_path):
    with postgres(tmp_path / "postgres") as url:
        words = ["learning_rate=1e-3..3e-3", "--trials=2", "--seeds=2", *arguments, "--max_iters=6000"]
        words += ["--eval_interval=1000", f"--storage={url}", "--save_interval_minutes=0.02"]
        script = tmp_path / "fast_sweep.py"
        script.write_text(WITH_FAST_HEARTBEATS)
        first, second = (start_sweep(words, tmp_path / name, script, OMP_NUM_THREADS="1") for name in ("1st", "2nd"))
        folders = [tmp_path / "sweep" / f"trial-{point:03d}-seed-1337" for point in range(2)]
        wait_until(lambda: first.exitcode or all(list(folder.glob("step-*")) for folder in folders), seconds=300)
        os.kill(first.pid, signal.SIGKILL)
        processes.wait(first)
        for child in training_processes(tmp_path / "sweep", except_parent=second.pid):
            os.kill(child, signal.SIGKILL)  # as if the machine failed
        assert processes.wait(second) == 0
        trials = results_of(tmp_path)["trials"]
        assert len(trials) == 4 and {trial["state"] for trial in trials} == {"finished"}
        resumed = [f for f in folders if "resuming from" in (f / "output.txt").read_text(encoding="utf-8")]
        assert len(resumed) == 1


def training_processes(folder: Path, except_parent: int) -> list[int]:
    """Return the processes that train in a folder, except the children of one process."""
    facts = [process.info for process in psutil.process_iter(["pid", "ppid", "cmdline"])]
    commands = {fact["pid"]: " ".join(fact["cmdline"] or ()) for fact in facts if fact["ppid"] != except_parent}
    return [pid for pid, command in commands.items() if "train.py" in command and str(folder) in command]


def test_without_optuna_a_grid_runs_and_a_search_is_an_error(arguments, in_process, tmp_path, monkeypatch):
    """The script could not be imported."""
    for name in ("optuna", "sqlalchemy"):
        for module in [module for module in sys.modules if module.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, name, None)  # as if not installed
    monkeypatch.delitem(sys.modules, "folio.experiments.sweep.study", raising=False)
    sweep.main(["n_head=1,2", "--seeds=1", *arguments])
    assert states_of(tmp_path) == {1: "finished", 2: "finished"} and len(in_process) == 2
    missing = r"^--trials: the package optuna is not installed: pip install -r .*requirements-experiments.txt$"
    with pytest.raises(UserError, match=missing):
        sweep.main(["n_head=1,2", "--trials=2", *arguments, f"--out_dir={tmp_path / 'search'}"])
    assert not (tmp_path / "search").exists()
