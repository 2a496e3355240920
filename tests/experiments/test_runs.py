import errno
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from filelock import FileLock

import train as train_script
from folio import UserError, load
from folio.base import settings
from folio.base.files import is_locked
from folio.checkpoints import checkpoint, run_folder
from folio.checkpoints.find_runs import expand_runs, resolve, runs_under
from folio.evaluation.comparison import choose_sides
from folio.experiments import runs
from folio.experiments.runs import Run, is_logged
from folio.experiments.selection import Selection, different_settings
from folio.training.session import TrainingError
from folio.web.viewed_model import ViewedModel
from prepare import text as prepare_text
from sample import SampleConfig
from sample import main as sample
from tests.support.processes import ROOT, start, wait
from tests.support.runs import blank_state, edit_state, write_state
from tools import export, report
from tools.runs import RunsConfig, main
from tools.sweep import parse_sweep
from train import TrainConfig, train

SHAPE = dict(block_size=8, vocab_size=10, n_layer=2, n_head=1, n_embd=4)


def write_run(folder: Path, losses: dict[int, float], stopped_by: str | None = "its end", **settings) -> Path:
    """A run as train.py leaves it, without weights. losses: the validation loss after each step; the last is saved."""
    best_step = min(losses, key=losses.get)
    state = blank_state(max(losses), best_step=best_step, best_val_loss=losses[best_step], stopped_by=stopped_by)
    state |= dict(model=SHAPE, config={**SHAPE, "max_iters": max(losses), "seed": 1, **settings})
    saved = folder / f"step-{max(losses):06d}"
    saved.mkdir(parents=True)
    write_state(saved, state)
    (folder / "last.json").write_text(json.dumps({"checkpoint": saved.name}))
    steps = [line_of(step, losses.get(step)) for step in range(max(losses) + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    return folder


def line_of(step: int, val_loss: float | None = None) -> dict:
    """A line of metrics.jsonl: 100 tokens per step, 50 per second."""
    return {"step": step, "tokens": 100 * step, "loss": 2.0, "val_loss": val_loss, "tokens_per_second": 50.0}


def set_date(folder: Path, seconds: int) -> None:
    """When a run last wrote something, in seconds after some day."""
    for path in folder.iterdir():
        os.utime(path, (1_700_000_000 + seconds,) * 2)


def listed(capsys, *arguments: str) -> str:
    """What tools/runs.py prints with these arguments."""
    capsys.readouterr()
    main(settings.load(RunsConfig, [*arguments]))
    return capsys.readouterr().out


# --- a run ------------------------------------------------------------------------------------------------------------


def test_a_finished_run_is_read_without_its_weights_and_samples(tiny):
    train(tiny())
    folder = Path(tiny().out_dir)
    saved = checkpoint.load(folder)
    for path in [*folder.glob("step-*/*.safetensors"), folder / "samples.jsonl"]:
        path.unlink()
    run = Run.of(folder)
    assert (run.status, run.name, run.step, run.max_iters) == ("finished", "out", 12, 12)
    assert run.best == (saved.state["best_val_loss"], saved.state["best_step"])
    assert run.tokens == saved.state["next_sequence"] * 32 and run.config == saved.settings()
    rates = [line["tokens_per_second"] for line in run.lines[2:]]
    assert run.seconds == pytest.approx(12 * 4 * 32 * sum(1 / rate for rate in rates) / len(rates))
    assert run.samples == [] and run.parameters() == saved.build().num_params()["total"]
    shutil.rmtree(folder / "step-000012")
    assert Run.of(folder).status == "failed" and Run.of(folder).step == 12  # the checkpoint of step 6 is left


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_a_signal_stopped_is_stopped_until_it_is_resumed_and_finished(tiny, monkeypatch, number):
    train_step = train_script.train_step

    def step_and_signal(state, *arguments):
        train_step(state, *arguments)
        if state.step == 3:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(train_script, "train_step", step_and_signal)
    train(tiny())
    run = Run.of(Path(tiny().out_dir))
    assert (run.status, run.step, run.best) == ("stopped", 3, None)
    train(tiny(init_from="resume"))
    assert Run.of(Path(tiny().out_dir)).status == "finished"


def test_a_run_that_ends_in_an_error_has_failed_also_after_it_was_finished(tiny):
    with pytest.raises(TrainingError):
        train(tiny(learning_rate=1e30, grad_clip=0.0, eval_interval=1, lr_schedule="constant"))
    run = Run.of(Path(tiny().out_dir))
    assert (run.status, run.best, run.config) == ("failed", None, {})
    train(tiny(overwrite=True))
    with pytest.raises(TrainingError):
        train(tiny(init_from="resume", max_iters=100, learning_rate=1e30, grad_clip=0.0, lr_schedule="constant"))
    run = Run.of(Path(tiny().out_dir))  # whose last checkpoint says that the run had ended
    assert (run.status, run.max_iters) == ("failed", 12) and run.step > 12


def test_the_checkpoint_of_a_run_that_is_being_replaced_does_not_describe_the_new_one(tiny, monkeypatch):
    """Until a run with --overwrite=True saves its first checkpoint, the folder has those of the run before."""
    train(tiny())
    seen = []
    train_step = train_script.train_step
    monkeypatch.setattr(train_script, "train_step", lambda *a: (train_step(*a), seen.append(Run.of(folder))))
    folder = Path(tiny().out_dir)
    train(tiny(overwrite=True, n_layer=1, max_iters=20, eval_interval=20))
    assert [run.status for run in seen] == ["running"] * 20 and all(run.config == {} for run in seen)
    assert [run.step for run in seen[:3]] == [0, 1, 2] and seen[-1].best is None
    assert Run.of(folder).config["n_layer"] == 1


def test_a_run_that_saves_between_two_files_being_read_has_its_settings(tmp_path, monkeypatch):
    """Its newest checkpoint could have an evaluation that was logged after metrics.jsonl was read."""
    folder, losses = tmp_path / "out", {1: 2.0}

    def then_save(read):
        def read_and_save(path):
            content = read(path)
            losses[len(losses) + 1] = 2.0 - len(losses) / 10
            shutil.rmtree(folder)
            write_run(folder, losses)
            return content

        return read_and_save

    write_run(folder, losses)
    for name in ("read_state", "read_metrics"):
        monkeypatch.setattr(runs, name, then_save(getattr(runs, name)))
    for _ in range(3):
        assert Run.of(folder).config["seed"] == 1


def test_a_process_that_trains_is_running_and_one_that_was_killed_has_failed(tiny, data_dir, tmp_path, capsys):
    cfg = dict(max_iters=100_000, eval_interval=50, eval_iters=1, log_interval=1, batch_size=2, block_size=8)
    cfg |= dict(n_layer=1, n_head=1, n_embd=8, dataset="verse", data_dir=data_dir, out_dir=tmp_path / "out")
    cfg |= dict(sample_tokens=0, device="cpu", dtype="float32")
    files = [os.devnull, tmp_path / "output", tmp_path / "output"]
    process = start([ROOT / "train.py", *(f"--{name}={value}" for name, value in cfg.items())], files, tmp_path)
    try:
        seen = set()
        for _ in range(3000):
            if (tmp_path / "out").exists() and runs_under(tmp_path):
                run = Run.of(tmp_path / "out")
                assert run.status == "running"
                seen.add((bool(run.lines), bool(run.config)))
                if (True, True) in seen:
                    break
            time.sleep(0.02)
        assert (True, True) in seen, (tmp_path / "output").read_text()
        for _ in range(200):  # while checkpoints are written and removed
            run = Run.of(tmp_path / "out")
            assert run.status == "running" and run.config["n_embd"] == 8 and run.best
        assert " running\n1 run: 1 running" in listed(capsys, str(tmp_path))
    finally:
        process.kill()
        wait(process)
    assert Run.of(tmp_path / "out").status == "failed" and "Traceback" not in (tmp_path / "output").read_text()


def test_a_run_is_starting_when_it_has_only_the_lock(tmp_path):
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / ".lock"):
        assert runs_under(tmp_path) == [tmp_path / "out"]
        run = Run.of(tmp_path / "out")
        assert (run.status, run.step, run.best, run.tokens, run.seconds) == ("running", 0, None, None, None)
    assert runs_under(tmp_path) == []
    with pytest.raises(UserError, match="is not a run's folder"):
        Run.of(tmp_path / "out")


def test_a_lock_is_tested_without_waiting_and_without_a_trace(tmp_path):
    path = tmp_path / ".lock"
    assert is_locked(path) is False and not path.exists()
    with FileLock(path) as lock:
        assert is_locked(path) is True
        lock.release()
        assert is_locked(path) is False
        lock.acquire(timeout=0)


@pytest.mark.skipif(sys.platform == "win32", reason="its file systems have locks")
def test_without_locks_nobody_knows_whether_a_run_is_running(tmp_path, monkeypatch):
    import fcntl

    def no_locks(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    folder = write_run(tmp_path / "out", {1: 2.0})
    assert Run.of(folder).status == "finished"  # and has removed its lock file
    (folder / ".lock").touch()
    assert Run.of(folder).status == "unknown"


def test_damaged_files_are_left_out_and_nothing_fails(tiny, tmp_path, seed, capsys):
    """Another process may be writing any of them, and a disk may have been full."""
    train(tiny(snapshots=2))
    rng = random.Random(seed)
    junk = [
        b"",
        b"\n",
        b"{",
        b"[]\n",
        b"null\n",
        b'{"step": 3}\n',
        b"\xff\xfe\x00",
        b'{"step": 1, "tokens": 1, "loss": "x"}\n',
    ]
    for number in range(60):
        folder = shutil.copytree(tiny().out_dir, tmp_path / "copies" / str(number))
        files = sorted(path for path in folder.rglob("*.json*") if path.is_file())
        for path in rng.sample(files, rng.randint(1, 4)):
            content = path.read_bytes()
            cut = rng.randrange(len(content) + 1)
            damaged = [content[:cut], content[:cut] + rng.choice(junk) + content[cut:], rng.choice(junk)]
            path.unlink()
            if rng.random() < 0.8:
                path.write_bytes(rng.choice(damaged))
        if rng.random() < 0.2:
            shutil.rmtree(folder / "step-000012")
    found = runs_under(tmp_path / "copies")
    for folder in found:
        run = Run.of(folder)
        assert run.status in ("finished", "failed") and len(run.lines) <= 13 and len(run.samples) <= 3
        run.best, run.seconds, run.tokens, run.max_iters, run.parameters()
    assert len(found) > 30 and f"\n{len(found)} runs: " in listed(capsys, str(tmp_path / "copies"))
    main(RunsConfig(folders=(str(tmp_path / "copies"),), json=str(tmp_path / "runs.json")))


def test_a_damaged_state_is_not_logged():
    """One without its best loss, as a random test of damaged files made it, was a KeyError."""
    assert not is_logged({"step": 3, "best_step": 2}, [{"step": 2, "val_loss": 1.0}])


def test_a_damaged_line_of_the_best_evaluation_leaves_the_run_what_it_is():
    """A flipped bit in one line of metrics.jsonl made the checkpoints those of another run."""
    state = {"step": 4, "best_step": 2, "best_val_loss": 1.0}
    assert is_logged(state, [{"step": 4, "val_loss": 1.5}]) and is_logged(state, [{"step": 2, "val_loss": 1.0}])
    assert not is_logged(state, [{"step": 2, "val_loss": 3.0}, {"step": 4, "val_loss": None}])


# --- finding runs -----------------------------------------------------------------------------------------------------


def test_runs_are_found_at_any_depth_once_each(tmp_path):
    """Not in hidden folders, data sets, and checkpoints, and not in circles."""
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


def test_of_a_run_only_the_numbers_and_one_state_are_opened(tmp_path, monkeypatch):
    """So that hundreds of runs are listed in a second."""
    folder = write_run(tmp_path / "out", {n: 3 - n / 100 for n in range(100)})
    (folder / "samples.jsonl").write_text("")
    shutil.copytree(folder / "step-000099", folder / "step-000050")
    opened = []
    read_bytes, read_text = Path.read_bytes, Path.read_text
    monkeypatch.setattr(Path, "read_bytes", lambda path: opened.append(path.name) or read_bytes(path))
    monkeypatch.setattr(Path, "read_text", lambda path, **kw: opened.append(path.name) or read_text(path, **kw))
    run = Run.of(folder)
    assert (run.best, run.step, run.seconds) == ((2.01, 99), 99, pytest.approx(198))
    assert sorted(opened) == ["last.json", "manifest.json", "metrics.jsonl", "state.json"]


# --- the table --------------------------------------------------------------------------------------------------------


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


def names(*arguments: str) -> list[str]:
    """The last parts of the selected runs' names."""
    cfg = settings.load(RunsConfig, [*arguments])
    return [run.name[-1] for run in cfg.select(runs_under(Path()), Path())]


def test_the_table_shows_what_differs_the_best_loss_and_the_state(four, capsys):
    head, under, *rows, summary = listed(capsys, "--columns=learning_rate,dataset,n_layer").splitlines()
    assert head.split() == ["learning_", "n_"]
    assert under.split() == "name rate dataset layer loss steps tokens time state".split()
    assert [row.split()[0] for row in rows] == ["d", "sweep-x/c", "sweep-x/b", "a"]
    assert rows[1].split() == "sweep-x/c 0.003 letters 6 1.7500 at 4 8 800 16.0 s finished".split()
    assert rows[2].split() == "sweep-x/b 0.01 novel 6 1.5000 at 4 4 of 8 400 8.0 s stopped".split()
    assert rows[0].split() == "d 2 200 4.0 s failed".split()
    assert summary == "4 runs: 1 failed, 2 finished, 1 stopped"
    assert "bias" in listed(capsys, "--columns=bias,date").splitlines()[0]
    assert "2023-11-14" in listed(capsys, "--columns=bias,date")


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ([], "dcba"),
        (["--sort=date"], "dcba"),
        (["--sort=-date"], "abcd"),
        (["--sort=loss"], "bcad"),
        (["--sort=-loss"], "acbd"),
        (["--sort=loss", "--limit=2"], "bc"),
        (["--sort=name"], "adbc"),
        (["--sort=tokens"], "dbac"),
        (["--sort=-time", "--filter=state=finished"], "ac"),
        (["--sort=learning_rate"], "acbd"),
        (["--sort=dataset"], "cabd"),
        (["--filter=n_layer=6"], "cb"),
        (["--filter=n_layer!=6"], "a"),
        (["--filter=learning_rate>1e-3"], "cb"),
        (["--filter=learning_rate>=0.001,learning_rate<0.01"], "ca"),
        (["--filter=n_layer==6", "--filter=dataset=nov*"], "b"),
        (["--filter=dataset!=novel"], "c"),
        (["--filter=bias=true"], "c"),
        (["--filter=dropout=None"], "a"),
        (["--filter=loss=None"], "d"),
        (["--filter=loss<1.8"], "cb"),
        (["--filter=sweep-x"], "cb"),
        (["--filter=sweep-?/b"], "b"),
        (["--filter=date>2023-11-14 22:20"], "dcb"),
        (["--filter=time<=8"], "db"),
    ],
)
def test_runs_are_filtered_sorted_and_limited(four, arguments, expected):
    assert "".join(names(*arguments)) == expected


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--filter=n_lyer=6"], "filter=n_lyer: these runs have no n_lyer; did you mean n_layer?"),
        (["--sort=los"], "sort=los: these runs have no los; did you mean loss?"),
        (["--columns=n_layers"], "columns=n_layers: these runs have no n_layers; did you mean n_layer?"),
        (["--filter=quux>3"], "filter=quux: these runs have no quux; use name, loss, steps, tokens, time, state, "),
        (["--filter=n_layer=six"], "filter=n_layer=six: n_layer is a number, and 'six' is not"),
        (["--filter=dataset<novel"], "filter=dataset<novel: dataset is not a number; use = or !="),
        (["--filter=state=done"], "filter=state=done: none of 4 runs matches; their state: finished, failed, stopped"),
        (["--filter=n_layer>6"], "filter=n_layer>6: none of 4 runs matches; their n_layer: 2, 6"),
        (["--filter=zzz"], "filter=zzz: none of 4 runs matches; their name: a, d, sweep-x/b, sweep-x/c"),
        (["--filter=n_layer=2,loss<2"], "filter=n_layer=2,loss<2: none of 4 runs matches all of it"),
        (["nothing"], "nothing: there is no such folder"),
        (["a/step-000008"], "step-000008: there are no runs in this folder; train one: python train.py config/"),
        (["out-*"], "out-*: no folder matches this pattern"),
        (["--json=a"], "json=a cannot be written"),
    ],
)  # fmt: skip
def test_mistakes_get_one_line(four, arguments, message):
    with pytest.raises(UserError) as error:
        main(settings.load(RunsConfig, arguments))
    assert str(error.value).startswith(message) or message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_table_of_many_different_runs_is_readable(tmp_path, seed, monkeypatch, capsys):
    """A row has at most 120 characters, and every setting that differs is in a column or in the line below."""
    rng = random.Random(seed)
    common = {name: getattr(TrainConfig(), name) for name in TrainConfig.__dataclass_fields__}
    changed = set()
    for number in range(30):
        settings = {"seed": number % 3, "learning_rate": rng.choice([1e-4, 0.00123456789, 3e-3])}
        for name in rng.sample(["n_layer", "n_head", "dropout", "batch_size", "weight_decay", "beta2", "dataset"], 2):
            settings[name] = f"/a/long/path/to/data/{number % 4}" if name == "dataset" else number % 5 + 1
        changed |= settings.keys()
        max_iters = rng.randrange(1000, 1010)
        settings |= dict(out_dir=f"{number}", keep_last=number, eval_interval=number, wsd_decay_iters=max_iters // 5)
        name = f"a-long-name-of-a-sweep/trial-{number:03}-with-a-comment-seed-{number % 3}"
        write_run(tmp_path / name, {1: 2.0, 2: 1.5}, **{**common, **settings, "max_iters": max_iters})
    monkeypatch.setenv("COLUMNS", "120")
    lines = listed(capsys, str(tmp_path)).splitlines()
    rows, left_out, summary = lines[-32:-2], lines[-2], lines[-1]
    assert max(map(len, lines[:-2])) <= 120 and summary == "30 runs: 30 finished"
    assert len({row.split()[0] for row in rows}) == 30 and "trial-" in rows[0]
    heads = {part for line in lines[:-32] for part in line.split()}
    assert left_out.startswith("also different: ") and "--columns=" in left_out
    named = set(re.findall(r"\w+", left_out.partition(" (")[0])) - {"also", "different", "and", "more"}
    in_columns = {
        name for name in changed if {f"{part}_" for part in name.split("_")[:-1]} | {name.split("_")[-1]} <= heads
    }
    assert in_columns | named == changed and in_columns


def test_a_column_for_what_was_sorted_by(four, capsys):
    assert " seed " not in listed(capsys) and " seed " in listed(capsys, "--sort=seed")


def test_what_a_person_set_comes_first_and_counts_of_a_time_budget_are_left_out(tmp_path):
    """The data set and the learning rate that was asked for came after eval_interval, which --minutes had scaled."""
    asked = {"learning_rate": "command line", "minutes": "command line"}
    for n in range(4):
        counts = dict(minutes=1.0, max_iters=100 + n, eval_interval=10 + 3 * n, warmup_iters=n)
        settings = dict(beta2=0.9 + 0.01 * n, learning_rate=0.1 if n else 0.2, dataset="b" if n == 3 else "a", **counts)
        write_run(tmp_path / f"{n}", {1: 2.0}, **settings)
        edit_state(tmp_path / f"{n}" / "step-000001", lambda state: state.update(origins=asked))
    found = [Run.of(tmp_path / f"{n}") for n in range(4)]
    assert different_settings(found) == ["dataset", "learning_rate", "beta2"]


def test_losses_on_different_data_are_not_in_one_ranking(tmp_path, capsys):
    for name, loss, data in (("a", 1.0, "x"), ("b", 1.5, "y"), ("c", 2.0, "x"), ("d", 1.2, "y")):
        write_run(tmp_path / name, {1: loss}, dataset=data)
        edit_state(tmp_path / name / "step-000001", lambda state, data=data: state["dataset"].update(hash=data))
    main(RunsConfig(folders=(str(tmp_path),), sort="loss"))
    lines = capsys.readouterr().out.splitlines()
    assert [line[0] for line in lines[1:5]] == ["a", "c", "d", "b"] or [line[0] for line in lines[2:6]] == [*"acdb"]
    assert "losses on different data cannot be compared, so the runs on each data set are sorted separately" in lines
    main(RunsConfig(folders=(str(tmp_path / "a"), str(tmp_path / "c")), sort="loss"))
    assert "cannot be compared" not in capsys.readouterr().out


def test_which_settings_differ(tmp_path):
    """Not those of the records; first those that many runs have changed; a resumed run is like one from scratch."""
    settings = [dict(n_layer=n % 3, n_head=n % 3, bias=n == 0, keep_last=n, out_dir=f"{n}") for n in range(6)]
    settings[3]["init_from"], settings[4]["init_from"] = "scratch", "resume"
    for n, of_run in enumerate(settings):
        steps = 100 * (n + 1)
        counts = dict(max_iters=steps, warmup_iters=round(steps / 30), lr_decay_iters=None if n else 50)
        write_run(tmp_path / f"{n}", {1: 2.0}, **{"init_from": "scratch", **counts, **of_run})
    found = [Run.of(tmp_path / f"{n}") for n in range(6)]
    assert different_settings(found) == ["n_layer", "bias", "n_head", "max_iters", "lr_decay_iters"]
    edit_state(tmp_path / "5" / "step-000001", lambda state: state["config"].update(init_from="out-novel"))
    assert "init_from" in different_settings([Run.of(tmp_path / f"{n}") for n in range(6)])
    assert different_settings(found[:1]) == []


def test_json_holds_every_run_with_all_settings(four, tmp_path, capsys):
    listed(capsys, "--json=runs.json", "--sort=loss")
    rows = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert [row["name"] for row in rows] == ["sweep-x/b", "sweep-x/c", "a", "d"]
    first = dict(name="sweep-x/b", folder=os.path.join("sweep-x", "b"), state="stopped", loss=1.5, best_step=4, steps=4)
    assert rows[0].items() >= {**first, "max_iters": 8, "tokens": 400, "seconds": 8.0}.items()
    assert rows[0]["settings"]["learning_rate"] == 0.01 and rows[0]["date"].startswith("2023-11-14")
    assert rows[3]["loss"] is None and rows[3]["settings"] == {}


def test_an_option_that_is_a_list_can_be_given_several_times():
    cfg = settings.load(Selection, ["--filter=a, b", "--filter", "c=1"])
    assert cfg.filter == ("a", "b", "c=1") and settings.load(Selection, []).filter == ()
    assert re.search(r"--filter= +state=failed", settings.help_text(Selection))


def test_the_report_takes_the_same_selection(four, tmp_path, capsys):
    cfg = settings.load(report.ReportConfig, [".", "--filter=state=finished", "--output=page.html"])
    report.main(cfg)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<title>Folio: sweep-x/c, a</title>" in page
    report.main(settings.load(report.ReportConfig, ["sweep-x", "--limit=1"]))
    assert "<title>Folio: b</title>" in (tmp_path / "sweep-x" / "report.html").read_text(encoding="utf-8")
    with pytest.raises(UserError, match="none of 2 runs matches; their n_layer: 6"):
        report.main(settings.load(report.ReportConfig, ["sweep-x", "--filter=n_layer=3"]))


def test_a_report_of_many_runs_has_one_closed_part_per_run(tmp_path, monkeypatch):
    """A page of 30 runs had a column per run, and three headings for each."""
    for n in range(30):
        write_run(tmp_path / f"{n:02}", {1: 2.0, 40: 1.0 + n}, n_layer=n)
    monkeypatch.setattr(report, "MOST_POINTS", 30 * 6 * 10)
    report.main(report.ReportConfig(runs=(str(tmp_path),)))
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<title>Folio: 30 runs</title>" in page and page.count("<details><summary>17</summary>") == 1
    assert "<th>run</th><th>n_layer</th>" in page and "Curves of more than 10 logged steps" in page
    traces = json.loads(re.search(r'Plotly.newPlot\(\s*"[^"]+",\s*(\[.*?\]),\s*\{"', page, re.DOTALL)[1])
    assert len(traces) == 30 * 7 and sum(trace["showlegend"] for trace in traces) == 30
    assert len({trace["line"]["color"] for trace in traces}) == 30
    losses = [trace for trace in traces if trace["name"] == "05" and trace["showlegend"]]
    assert losses[0]["x"][:3] == [0, 5, 10] and len(losses[0]["x"]) <= 10


# --- latest -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def two(tiny, tmp_path, monkeypatch, capsys) -> Path:
    """Two trained runs in the working directory, of which sweep-x/new was written to last."""
    monkeypatch.chdir(tmp_path)
    for name, n_layer in ("old", 2), (os.path.join("sweep-x", "new"), 1):
        train(tiny(out_dir=name, n_layer=n_layer, max_iters=4, eval_interval=2))
    set_date(tmp_path / "old", 0)
    capsys.readouterr()
    return Path("sweep-x") / "new"


def test_latest_is_the_run_that_was_written_to_last(two, tmp_path, capsys):
    assert resolve("latest") == str(two) and capsys.readouterr().err == f"latest: {two}\n"
    set_date(two, -1000)
    (two / "report.html").write_text("not by the run")
    assert resolve("latest") == "old" and resolve("old") == "old"
    (tmp_path / "latest").touch()
    assert resolve("latest") == "old"
    (tmp_path / "latest").unlink()
    set_date(write_run(tmp_path / "latest", {1: 2.0}), -2000)
    assert resolve("latest") == "latest"


def test_without_a_run_latest_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "starting").mkdir()
    with (
        FileLock(tmp_path / "starting" / ".lock"),
        pytest.raises(UserError, match=r"^latest: there is no run under .*"),
    ):
        resolve("latest")


def test_latest_samples_exports_and_evaluates(two, tiny, tmp_path, capsys):
    expected = load(two, device="cpu").generate("the", max_new_tokens=5, temperature=0.0)
    assert load("latest", device="cpu").generate("the", max_new_tokens=5, temperature=0.0) == expected
    for setting in "--out_dir=latest", "--init_from=latest":
        options = ["--start=the", "--max_new_tokens=5", "--temperature=0", "--device=cpu", setting]
        sample(settings.load(SampleConfig, options))
        captured = capsys.readouterr()
        assert captured.out == f"the{expected}\n" and f"by {two}" in captured.err
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
    """The line that continues the run, and the checkpoint, name its folder: latest will soon be another run."""
    train_script.main(settings.load(TrainConfig, ["--init_from=resume", "--out_dir=latest", "--max_iters=6"]))
    assert run_folder.last_state(two)["step"] == 6 and f"--out_dir={two}" in capsys.readouterr().out
    cfg = tiny(out_dir="fine", init_from="latest", n_layer=1, max_iters=2)
    train_script.main(cfg)
    assert run_folder.last_state(Path("fine"))["config"]["init_from"] == str(two)
    assert f"from the weights of {two}" in capsys.readouterr().out


def test_a_new_run_is_not_called_latest(two, tmp_path):
    with pytest.raises(UserError, match=r"out_dir=latest: it names the run that was written to last; resume that with"):
        settings.load(TrainConfig, ["--out_dir=latest", "--dataset=verse"])
    (tmp_path / "latest").mkdir()
    assert settings.load(TrainConfig, ["--out_dir=latest", "--dataset=verse"]).out_dir == "latest"


def test_torchrun_does_not_guess_what_latest_is(two, monkeypatch):
    """Each process, and each restart, would look again, and another run may have written since."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")
    for options in ["--init_from=resume", "--out_dir=latest"], ["--init_from=latest", "--dataset=verse"]:
        with pytest.raises(
            UserError, match=rf"=latest: under torchrun, name the run's folder: --\w+={re.escape(str(two))}"
        ):
            train_script.main(settings.load(TrainConfig, options))


def test_a_sweep_does_not_start_its_trials_from_the_latest_of_them(two):
    with pytest.raises(UserError, match="--init_from=latest: name the run's folder"):
        parse_sweep(["--init_from=latest", "--dataset=verse", "learning_rate=1e-3,3e-3"])


def test_the_tokenizer_of_the_latest_run_prepares_a_text(two, tmp_path, text, capsys):
    (tmp_path / "more.txt").write_text(text[:5000])
    options = ["more.txt", "--tokenizer=latest", "--data_dir=data", "--on_unknown=skip"]
    prepare_text.main(settings.load(prepare_text.TextConfig, options))
    assert f"--init_from={two}" in capsys.readouterr().out
