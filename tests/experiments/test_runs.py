import errno
import json
import os
import random
import re
import shutil
import signal
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
from filelock import FileLock

import train as train_script
from folio import UserError
from folio.base import settings
from folio.checkpoints import checkpoint
from folio.checkpoints.find_runs import runs_under
from folio.experiments import runs
from folio.experiments.report_page import report_page
from folio.experiments.runs import Run, is_logged
from folio.training.session import TrainingError
from tests.support.charts import charts_in, lines_in
from tests.support.processes import start, wait
from tests.support.runs import edit_state, write_run
from tests.support.terminals import terminal
from tests.support.torchrun import train_command
from tests.support.waiting import wait_until
from tools import report
from tools.runs import RunsConfig, main, shorten
from train import TrainConfig, train


def listed(capsys, *arguments: str) -> str:
    """Run tools/runs.py, and return its output."""
    capsys.readouterr()
    main(settings.load(RunsConfig, [*arguments]))
    return capsys.readouterr().out


# --- status -----------------------------------------------------------------------------------------------------------


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


def test_a_run_that_received_a_signal_is_stopped_until_it_is_resumed(tiny, monkeypatch):
    train_step = train_script.train_step

    def step_and_signal(state, *arguments):
        train_step(state, *arguments)
        if state.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(train_script, "train_step", step_and_signal)
    train(cfg := tiny())
    run = Run.of(Path(cfg.out_dir))
    assert (run.status, run.step, run.best) == ("stopped", 3, None)
    train(tiny(init_from="resume"))
    assert Run.of(Path(cfg.out_dir)).status == "finished"


def test_a_run_that_ends_in_an_error_has_failed_even_after_it_was_finished(tiny):
    diverging = dict(learning_rate=1e30, grad_clip=0.0, lr_schedule="constant")
    with pytest.raises(TrainingError):
        train(cfg := tiny(**diverging, eval_interval=1))
    run = Run.of(Path(cfg.out_dir))
    assert (run.status, run.best, run.config) == ("failed", None, {})
    train(tiny(overwrite=True))
    with pytest.raises(TrainingError):
        train(tiny(**diverging, init_from="resume", max_iters=100))
    run = Run.of(Path(cfg.out_dir))  # its last checkpoint records the end of the finished run
    assert (run.status, run.max_iters) == ("failed", 12) and run.step > 12


def test_checkpoints_of_an_overwritten_run_are_ignored(tiny, monkeypatch):
    """Until a run with --overwrite=True saves its first checkpoint, the folder has those of the previous run."""
    train(cfg := tiny())
    seen, folder, train_step = [], Path(cfg.out_dir), train_script.train_step
    monkeypatch.setattr(train_script, "train_step", lambda *a: (train_step(*a), seen.append(Run.of(folder))))
    train(tiny(overwrite=True, n_layer=1, max_iters=20, eval_interval=20))
    assert [run.status for run in seen] == ["running"] * 20 and all(run.config == {} for run in seen)
    assert [run.step for run in seen[:3]] == [0, 1, 2] and seen[-1].best is None
    assert Run.of(folder).config["n_layer"] == 1


def test_a_checkpoint_saved_while_the_folder_is_read_does_not_hide_the_settings(tmp_path, monkeypatch):
    """The newest checkpoint had an evaluation that was logged after metrics.jsonl was read."""
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


def test_a_training_run_is_running_and_a_killed_run_has_failed(tiny, tmp_path, capsys):
    small = dict(eval_interval=50, eval_iters=1, batch_size=2, block_size=8, n_layer=1, n_head=1, n_embd=8)
    cfg = tiny(max_iters=100_000, sample_tokens=0, **small)
    folder, output = Path(cfg.out_dir), tmp_path / "output"
    process = start(train_command(cfg), [os.devnull, output, output], tmp_path)

    def has_settings() -> bool:
        assert process.exitcode is None, output.read_text()
        if not (folder.exists() and runs_under(tmp_path)):
            return False
        run = Run.of(folder)
        assert run.status == "running"
        return bool(run.lines and run.config)

    try:
        wait_until(has_settings)
        for _ in range(200):  # while checkpoints are written and removed
            run = Run.of(folder)
            assert run.status == "running" and run.config["n_embd"] == 8 and run.best
        assert " running\n1 run: 1 running" in listed(capsys, str(tmp_path))
    finally:
        process.kill()
        wait(process)
    assert Run.of(folder).status == "failed" and "Traceback" not in output.read_text()


def test_a_starting_run_has_only_a_lock(tmp_path):
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / ".lock"):
        assert runs_under(tmp_path) == [tmp_path / "out"]
        run = Run.of(tmp_path / "out")
        assert (run.status, run.step, run.best, run.tokens, run.seconds) == ("running", 0, None, None, None)
    assert runs_under(tmp_path) == []
    with pytest.raises(UserError, match="is not a run's folder"):
        Run.of(tmp_path / "out")


@pytest.mark.skipif(sys.platform == "win32", reason="its file systems have locks")
def test_without_file_locks_the_status_is_unknown(tmp_path, monkeypatch):
    import fcntl

    def no_locks(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    folder = write_run(tmp_path / "out", {1: 2.0})
    assert Run.of(folder).status == "finished"  # and has removed its lock file
    (folder / ".lock").touch()
    assert Run.of(folder).status == "unknown"


def test_damaged_files_are_ignored(tiny, tmp_path, seed, capsys):
    """Another process may be writing the files, or the disk may have been full."""
    train(tiny(snapshots=2))
    rng = random.Random(seed)
    junk = [b"", b"\n", b"{", b"[]\n", b"null\n", b'{"step": 3}\n', b"\xff\xfe\x00"]
    junk += [b'{"step": 1, "tokens": 1, "loss": "x"}\n']
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
    run_folders = runs_under(tmp_path / "copies")
    for folder in run_folders:
        run = Run.of(folder)
        assert run.status in ("finished", "failed") and len(run.lines) <= 13 and len(run.samples) <= 3
        run.best, run.seconds, run.tokens, run.max_iters, run.parameters()
    printed = listed(capsys, str(tmp_path / "copies"), f"--json={tmp_path / 'runs.json'}")
    assert run_folders and f"\n{len(run_folders)} runs: " in printed


def test_a_checkpoint_belongs_to_a_run_with_damaged_lines():
    """After a bit flip in one line of metrics.jsonl, the checkpoints were attributed to another run."""
    state = {"step": 4, "best_step": 2, "best_val_loss": 1.0}
    assert is_logged(state, [{"step": 4, "val_loss": 1.5}]) and is_logged(state, [{"step": 2, "val_loss": 1.0}])
    assert not is_logged(state, [{"step": 2, "val_loss": 3.0}, {"step": 4, "val_loss": None}])
    damaged = {"step": 3, "best_step": 2}  # was a KeyError
    assert not is_logged(damaged, [{"step": 2, "val_loss": 1.0}])


def test_evaluations_begin_after_a_change_of_the_text_that_they_measure(tmp_path):
    """The evaluation at the step of the change measured the text before, on which a lower loss may be easy."""
    folder = write_run(tmp_path / "run", {2: 0.1, 4: 0.2, 6: 0.9, 8: 0.8})
    (path,) = folder.glob("step-*")
    parts = [{"from_step": 0, "max_val_tokens": 64}, {"from_step": 4, "max_val_tokens": None}]
    edit_state(path, lambda state: state.update(parts=[{**state["parts"][0], **part} for part in parts]))
    assert Run.of(folder).evaluations() == [(0.9, 6), (0.8, 8)] and Run.of(folder).best == (0.8, 8)


# --- files ------------------------------------------------------------------------------------------------------------


def test_only_the_metrics_and_the_checkpoints_states_are_opened(tmp_path, monkeypatch):
    """Hundreds of runs must be listed in a second."""
    folder = write_run(tmp_path / "out", {n: 3 - n / 100 for n in range(100)})
    (folder / "samples.jsonl").write_text("")
    shutil.copytree(folder / "step-000099", folder / "step-000050")
    opened = []
    read_bytes, read_text = Path.read_bytes, Path.read_text
    monkeypatch.setattr(Path, "read_bytes", lambda path: opened.append(path.name) or read_bytes(path))
    monkeypatch.setattr(Path, "read_text", lambda path, **kw: opened.append(path.name) or read_text(path, **kw))
    run = Run.of(folder)
    assert (run.best, run.step, run.seconds) == ((2.01, 99), 99, pytest.approx(198))
    assert Counter(opened) == {"last.json": 1, "metrics.jsonl": 1, "manifest.json": 3, "state.json": 3}


# --- table ------------------------------------------------------------------------------------------------------------


def test_the_table_shows_different_settings_the_best_loss_and_the_state(four, capsys):
    head, under, *rows, summary = listed(capsys, "--columns=learning_rate,dataset,n_layer").splitlines()
    assert head.split() == ["learning_", "n_"]
    assert under.split() == "name rate dataset layer loss steps tokens time state".split()
    assert [row.split()[0] for row in rows] == ["d", "sweep-x/c", "sweep-x/b", "a"]
    assert rows[1].split() == "sweep-x/c 0.003 letters 6 1.7500 at 4 8 800 16.0 s finished".split()
    assert rows[2].split() == "sweep-x/b 0.01 novel 6 1.5000 at 4 4 of 8 400 8.0 s stopped".split()
    assert rows[0].split() == "d 2 200 4.0 s failed".split()
    assert summary == "4 runs: 1 failed, 2 finished, 1 stopped"
    printed = listed(capsys, "--columns=bias,date")
    assert "bias" in printed.splitlines()[0] and "2023-11-14" in printed
    assert " seed " not in listed(capsys) and " seed " in listed(capsys, "--sort=seed")


def test_a_terminal_shows_the_curve_of_the_validation_losses(tmp_path, monkeypatch, capsys):
    """It is not in the table of a pipe, and not in that of a terminal where it does not fit."""
    write_run(tmp_path / "a", {0: 9.0, 1: 3.0, 2: 2.0, 3: 1.0})
    for columns, is_shown in ((80, True), (40, False)):
        monkeypatch.setenv("COLUMNS", str(columns))
        with terminal(columns) as lines:
            main(settings.load(RunsConfig, [str(tmp_path)]))
        assert ("█▅▁" in lines[1]) == is_shown and "also different" not in "".join(lines)
    assert "curve" not in listed(capsys, str(tmp_path))
    assert "█▅▁" in listed(capsys, str(tmp_path), "--columns=curve")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--filter=n_lyer=6"], "filter=n_lyer.*did you mean n_layer"),
        (["--sort=los"], "sort=los.*did you mean loss"),
        (["--columns=n_layers"], "columns=n_layers.*did you mean n_layer"),
        (["--filter=quux>3"], "filter=quux.*use name, loss, steps, tokens, time, state, "),
        (["--filter=n_layer=six"], "filter=n_layer=six.*number"),
        (["--filter=n_layer"], "filter=n_layer.*--filter=n_layer=VALUE"),
        (["--filter=dataset<novel"], "filter=dataset<novel.*use = or !="),
        (["--filter=n_layer>6"], "filter=n_layer>6.* 4 runs.*n_layer: 2, 6"),
        (["--filter=zzz"], "filter=zzz.* 4 runs.*name: a, d, sweep-x/b, sweep-x/c"),
        (["--filter=n_layer=2,loss<2"], "filter=n_layer=2,loss<2.* 4 runs.*all"),
        (["nothing"], "nothing: no such folder"),
        (["a/step-000008"], "step-000008: there are no runs in this folder; train one: python train.py config/"),
        (["out-*"], r"out-\*: no folder matches this pattern"),
        (["--json=a"], "json=a cannot be written"),
    ],
)
def test_bad_arguments_are_an_error_in_one_line(four, arguments, message):
    with pytest.raises(UserError, match=message) as error:
        main(settings.load(RunsConfig, arguments))
    assert "\n" not in str(error.value)


def test_a_table_of_many_different_runs_is_readable(tmp_path, seed, monkeypatch, capsys):
    """A row has at most 120 characters, and every different setting is in a column or in the line below the table."""
    rng = random.Random(seed)
    varied = ["n_layer", "n_head", "dropout", "batch_size", "weight_decay", "beta2", "dataset"]
    changed = {"seed", "learning_rate"}
    for number in range(30):
        settings = {"seed": number % 3, "learning_rate": rng.choice([1e-4, 0.00123456789, 3e-3])}
        for name in rng.sample(varied, 2):
            settings[name] = f"/a/long/path/to/data/{number % 4}" if name == "dataset" else number % 5 + 1
        changed |= settings.keys()
        settings |= dict(max_iters=rng.randrange(1000, 1010), out_dir=f"{number}", keep_last=number)
        settings |= dict(eval_interval=number, wsd_decay_iters=settings["max_iters"] // 5)
        name = f"a-long-name-of-a-sweep/trial-{number:03}-with-a-comment-seed-{number % 3}"
        write_run(tmp_path / name, {1: 2.0, 2: 1.5}, **{**asdict(TrainConfig()), **settings})
    monkeypatch.setenv("COLUMNS", "120")
    *lines, omitted, summary = listed(capsys, str(tmp_path)).splitlines()
    heads, rows = {part for line in lines[:-30] for part in line.split()}, lines[-30:]
    assert max(map(len, lines)) <= 120 and summary == "30 runs: 30 finished"
    assert len({row.split()[0] for row in rows}) == 30 and "trial-" in rows[0]
    assert omitted.startswith("also different: ") and "--columns=" in omitted
    listed_names = set(re.findall(r"\w+", omitted.partition(" (")[0])) - {"also", "different", "and", "more"}
    in_columns = {name for name in changed if {*re.findall("[^_]+_?", name)} <= heads}
    assert in_columns | listed_names == changed and in_columns


@pytest.mark.parametrize("length", [4, 5, 48])
def test_a_long_name_is_shortened_to_the_length(length):
    """A name that is a character longer makes the table wider than the terminal."""
    name, path = "abcdefghij" * 5, "runs/" * 10 + "seed=1"
    for text in (name, path):
        assert len(shorten(text, length)) == length and shorten(text[:length], length) == text[:length]
    assert shorten(name, 5) == "ab…ij" and shorten(path, 7) == "…seed=1"


def test_losses_on_different_data_are_sorted_separately(tmp_path, capsys):
    for name, loss, data in (("a", 1.0, "x"), ("b", 1.5, "y"), ("c", 2.0, "x"), ("d", 1.2, "y")):
        write_run(tmp_path / name, {1: loss}, dataset=data)
        edit_state(tmp_path / name / "step-000001", lambda state, data=data: state["dataset"].update(hash=data))
    lines = listed(capsys, str(tmp_path), "--sort=loss").splitlines()
    assert [line[0] for line in lines[1:5]] == ["a", "c", "d", "b"] or [line[0] for line in lines[2:6]] == [*"acdb"]
    assert any("losses on different text" in line for line in lines)
    assert "different text" not in listed(capsys, str(tmp_path / "a"), str(tmp_path / "c"), "--sort=loss")


def test_json_contains_every_run_with_all_settings(four, tmp_path, capsys):
    listed(capsys, "--json=runs.json", "--sort=loss")
    rows = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert [row["name"] for row in rows] == ["sweep-x/b", "sweep-x/c", "a", "d"]
    first = dict(name="sweep-x/b", folder=os.path.join("sweep-x", "b"), state="stopped", loss=1.5, best_step=4, steps=4)
    assert rows[0].items() >= {**first, "max_iters": 8, "tokens": 400, "seconds": 8.0}.items()
    assert rows[0]["settings"]["learning_rate"] == 0.01 and rows[0]["date"].startswith("2023-11-14")
    assert rows[3]["loss"] is None and rows[3]["settings"] == {}


def test_the_report_takes_the_same_selection(four, tmp_path):
    report.main(settings.load(report.ReportConfig, [".", "--filter=state=finished", "--output=page.html"]))
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<title>Folio: sweep-x/c, a</title>" in page
    report.main(settings.load(report.ReportConfig, ["sweep-x", "--limit=1"]))
    assert "<title>Folio: b</title>" in (tmp_path / "sweep-x" / "report.html").read_text(encoding="utf-8")
    with pytest.raises(UserError, match=r"n_layer=3.* 2 runs.*n_layer: 6"):
        report.main(settings.load(report.ReportConfig, ["sweep-x", "--filter=n_layer=3"]))


def test_a_report_of_many_runs_has_a_collapsed_section_per_run(tmp_path):
    """A page of 30 runs had a column and three headings per run."""
    runs = [Run.of(write_run(tmp_path / f"{n:02}", {1: 2.0, 40: 1.0 + n}, n_layer=n)) for n in range(30)]
    page = report_page(runs, max_points=30 * 2 * 10)  # two panels have values
    assert "<title>Folio: 30 runs</title>" in page and page.count("<details><summary>17</summary>") == 1
    assert "<th>run</th><th>n_layer</th>" in page and "up to 10 evenly spaced steps" in page
    groups = charts_in(page)["curves"]["groups"]
    assert len(groups) == 30 and all(len(group["lines"]) == 3 for group in groups)
    loss = lines_in(page)["05"]
    assert loss["x"][:3] == [0, 5, 10] and len(loss["x"]) <= 10
