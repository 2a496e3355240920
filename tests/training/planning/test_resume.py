"""Resumed, finetuned and overwritten runs, and their settings, through train()."""

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch

from folio import UserError, load
from folio.base import settings
from folio.checkpoints import checkpoint, run_folder
from folio.data.shards import open_dataset
from folio.data.sources.pairs import validation_pairs
from folio.data.windows import WINDOWS_VERSION
from folio.decoding.decoders import make_decoder
from folio.decoding.sampling import Sampling
from folio.decoding.scheduler import generate
from folio.experiments.replay import History
from folio.experiments.runs import Run, planned_steps
from folio.machine.runtime import resolve_runtime
from folio.training.planning import auto_size, choice
from folio.training.planning.budget import evaluation_seconds
from folio.training.planning.resolve import versions
from folio.training.planning.resume import resume_run
from folio.training.session import TrainingError
from model import GPT
from prepare import pairs as prepare_pairs
from tests.support.runs import assert_same_run, edit_state, read_metrics, same_tensors
from tests.support.simulated import SimulatedMachine, assert_on_time
from train import TrainConfig, main, train

# --- the folder of a run ----------------------------------------------------------------------------------------------


def test_an_earlier_run_is_overwritten_only_with_overwrite(tiny):
    train(tiny())
    before = checkpoint.load(Path(tiny().out_dir))
    with pytest.raises(UserError, match=r"--init_from=resume.*--overwrite=True"):
        train(tiny(seed=2))
    assert same_tensors(checkpoint.load(before.path).model, before.model)
    train(tiny(seed=2, max_iters=6, overwrite=True))
    assert run_folder.last_state(Path(tiny().out_dir))["step"] == 6
    assert [line["step"] for line in read_metrics(tiny().out_dir)] == [*range(1, 7)]


@pytest.mark.architecture("this test, whose settings make GPT-2 diverge")
def test_an_overwritten_run_is_removed_only_after_the_new_run_has_saved(tiny, monkeypatch):
    """It was removed before the new run had started, and was lost if that failed."""
    SimulatedMachine(monkeypatch, lambda step: 1.0, lambda step: 0.0, trains=True)
    train(tiny(max_iters=5))
    with pytest.raises(UserError, match=r"minutes=1e-05: .*--minutes="):
        train(tiny(overwrite=True, minutes=1e-5))
    with pytest.raises(TrainingError):
        train(tiny(overwrite=True, learning_rate=1e30, grad_clip=0.0, eval_interval=1, lr_schedule="constant"))
    assert checkpoint.load(Path(tiny().out_dir)).state["step"] == 5
    train(tiny(overwrite=True, max_iters=3))
    assert [path.name for path in Path(tiny().out_dir).glob("step-*")] == ["step-000003"]


# --- resuming ---------------------------------------------------------------------------------------------------------


def test_settings_that_define_a_run_cannot_change_on_resume(tiny):
    train(tiny(max_iters=3))
    changes = [dict(n_layer=3), dict(block_size=16, seed=5), dict(sampling="random"), dict(optimizer="muon")]
    for change in [*changes, dict(bias=True), dict(activation="gelu"), dict(position="rotary")]:
        with pytest.raises(UserError) as error:
            train(tiny(init_from="resume", max_iters=6, **change))
        assert all(name in str(error.value) for name in change)
    with pytest.raises(UserError, match="holds no checkpoint"):
        train(tiny(init_from="resume", out_dir="nowhere"))
    assert run_folder.last_state(Path(tiny().out_dir))["step"] == 3


def test_another_context_is_refused_as_such_in_a_run_with_total_batch_tokens(tiny):
    """The error was about the sequences of a step, began with ": a step of", and advised another --batch_size."""
    train(tiny(max_iters=1, total_batch_tokens=256))
    with pytest.raises(UserError, match="cannot be resumed with other settings: block_size: 32 before, 16 now"):
        train(tiny(max_iters=2, total_batch_tokens=256, block_size=16, init_from="resume"))


def test_settings_that_change_on_resume_are_printed_and_recorded(tiny, capsys):
    train(tiny(max_iters=3))
    train(tiny(max_iters=6, learning_rate=1e-3, init_from="resume"))
    assert "learning_rate 0.001 (was 0.003)" in capsys.readouterr().out
    train(tiny(max_iters=9, learning_rate=1e-3, init_from="resume", batch_size=2, gradient_accumulation_steps=2))
    assert "not bitwise identical" in capsys.readouterr().out
    new, first, second = checkpoint.load(Path(tiny().out_dir)).state["parts"]
    machine = dict(resolved={"device": "cpu", "dtype": "float32", "compile": False}, versions=versions())
    machine |= dict(threads=torch.get_num_threads(), windows=WINDOWS_VERSION, max_val_tokens=4 * 4 * 32)
    start = dict(from_step=0, init_from="scratch", after=None, changes={}, exact=True, decisions=[[0, 3]])
    assert new == machine | start
    resumed = dict(from_step=3, init_from="resume", after="its end", exact=True, decisions=[[0, 6]])
    assert first == machine | resumed | {"changes": {"max_iters": [3, 6], "learning_rate": [0.003, 0.001]}}
    assert second["from_step"] == 6 and not second["exact"] and second["changes"]["batch_size"] == [4, 2]
    with pytest.raises(UserError, match=r"^batch_size=8: a step of .* has 4 sequences"):
        train(tiny(init_from="resume", batch_size=8))


# --- the text of the validation loss ----------------------------------------------------------------------------------


def test_another_micro_batch_evaluates_the_same_text(tiny, capsys):
    """The subset was eval_iters * batch_size windows of the resumed run, so a loss on other text was the best one."""
    train(tiny(max_iters=6))
    before = checkpoint.load(Path(tiny().out_dir)).state
    changes = dict(init_from="resume", batch_size=1, gradient_accumulation_steps=4)
    for _ in range(2):  # the second time from a run with this micro-batch
        capsys.readouterr()
        train(tiny(**changes, eval_only=True))
        assert "(512 tokens)" in capsys.readouterr().out
        train(tiny(**changes, max_iters=7))
    after = checkpoint.load(Path(tiny().out_dir)).state
    assert after["best_step"] in (before["best_step"], 7) and after["parts"][-1]["max_val_tokens"] == 4 * 4 * 32


def test_only_a_run_that_continues_says_that_its_losses_are_on_other_text(tiny, capsys):
    train(tiny(max_iters=1))
    train(tiny(init_from="resume", eval_only=True, eval_iters=1))
    assert "other text" not in capsys.readouterr().out


def test_losses_on_other_text_are_not_compared(tiny, capsys):
    """A loss on fewer windows remained the best one forever, and was a reason for rollbacks."""
    cfg = tiny(max_iters=6, eval_interval=3, keep_last=1)
    train(cfg)
    ckpt, best = checkpoint.load(Path(cfg.out_dir)), (Path(cfg.out_dir) / "best.json").read_text()
    for line in read_metrics(cfg.out_dir):
        assert line["val_loss"] is None or line["val_loss"] >= ckpt.state["best_val_loss"]
    edit_state(ckpt.path, lambda state: state.update(best_val_loss=0.01))  # of easy text
    capsys.readouterr()
    train(tiny(max_iters=6, eval_iters=99, init_from="resume"))  # nothing to train
    assert (Path(cfg.out_dir) / "best.json").read_text() == best
    longer = tiny(max_iters=12, eval_interval=3, eval_iters=99, init_from="resume", patience=9)
    train(longer)
    out = capsys.readouterr().out
    assert "is measured on other text than before (2,064 tokens)" in out and "rolled back" not in out
    state = checkpoint.load(Path(cfg.out_dir)).state
    losses = {line["step"]: line["val_loss"] for line in read_metrics(cfg.out_dir) if line["val_loss"] is not None}
    after = {step: loss for step, loss in losses.items() if step > 6}
    assert state["best_val_loss"] == min(after.values()) and after[state["best_step"]] == state["best_val_loss"]
    run = Run.of(Path(cfg.out_dir))
    assert run.best == (state["best_val_loss"], state["best_step"]) and len(run.evaluations()) == len(after)
    assert checkpoint.load(Path(cfg.out_dir), "best").state["step"] == state["best_step"]
    capsys.readouterr()
    train(tiny(max_iters=13, eval_iters=99, init_from="resume"))  # the same text
    assert "other text" not in capsys.readouterr().out


def test_a_longer_run_does_not_repeat_a_warmup_that_is_over(tiny):
    """Its warmup started again, at a hundredth of the learning rate."""
    train(tiny(max_iters=5, warmup_iters=2))
    train(tiny(max_iters=100, warmup_iters=40, eval_interval=1000, init_from="resume"))
    schedule = TrainConfig(learning_rate=3e-3, warmup_iters=2, max_iters=100)
    rates = [line["lr"] for line in read_metrics(tiny().out_dir)]
    assert rates[5] == schedule.schedule(schedule.step_counts, {}).learning_rate_at(5)


def test_a_longer_run_does_not_repeat_a_warmup_of_its_config_file(run_file, at_step):
    """The file's warmup_iters was scaled with --max_iters, so the warmup started again."""
    Path("y.py").write_text("max_iters = 40\nwarmup_iters = 4\n")
    run_file("x.py", "y.py", "--out_dir=a", "--max_iters=8")
    at_step(10, signal.raise_signal, signal.SIGINT)
    run_file("x.py", "y.py", "--out_dir=a", "--init_from=resume", "--max_iters=400", "--eval_interval=400")
    assert [line["lr"] for line in read_metrics("a")][8:] == [3e-3] * 3


def test_a_run_can_be_resumed_with_only_its_folder(run_file, tmp_path, capsys):
    """It failed for settings that the checkpoint has."""
    first = run_file("x.py", "--out_dir=a", "--dropout=0.1", "--max_iters=4", "--lr_decay_iters=6")
    run_file("x.py", "--out_dir=b", "--dropout=0.1", "--max_iters=4", "--lr_decay_iters=6")
    assert run_file("--init_from=resume", "--out_dir=a") == first
    assert "nothing to train: 4 of 4 steps" in capsys.readouterr().out
    longer = {**first, "init_from": "resume", "max_iters": 6, "wsd_decay_iters": 3}
    assert run_file("--init_from=resume", "--out_dir=a", "--max_iters=6") == longer
    assert run_file("x.py", "--init_from=resume", "--out_dir=b")["max_iters"] == 6  # the file's
    assert_same_run("a", "b")
    with pytest.raises(UserError, match=r"n_layer=3: the checkpoint .* has n_layer=2"):
        run_file("--init_from=resume", "--out_dir=a", "--n_layer=3", "--max_iters=8")


def test_step_counts_of_the_file_are_scaled_and_those_of_the_command_line_are_not(run_file, capsys):
    run_file("x.py", "--out_dir=a")
    longer = run_file("--init_from=resume", "--out_dir=a", "--max_iters=12")
    assert longer["wsd_decay_iters"] == 6 and "wsd_decay_iters 6 (was 3)" in capsys.readouterr().out
    assert run_file("--init_from=resume", "--out_dir=a", "--max_iters=18")["wsd_decay_iters"] == 9
    run_file("x.py", "--out_dir=b", "--wsd_decay_iters=2")
    assert run_file("--init_from=resume", "--out_dir=b", "--max_iters=12")["wsd_decay_iters"] == 2


def test_a_config_file_does_not_undo_changes_of_the_original_command_line(run_file, capsys):
    """The file sets 2 layers and batches of 4. The run has 3 layers and batches of 2 x 4."""
    changes = ["--n_layer=3", "--n_head=1", "--batch_size=2", "--gradient_accumulation_steps=4", "--seed=7"]
    run_file("x.py", "--out_dir=a", *changes)
    resumed = run_file("x.py", "--out_dir=a", "--init_from=resume", "--max_iters=8", "--learning_rate=1e-4")
    assert [resumed[name] for name in ("n_layer", "n_head", "batch_size", "seed")] == [3, 1, 2, 7]
    assert resumed["max_iters"] == 8 and resumed["learning_rate"] == 1e-4 and resumed["wsd_decay_iters"] == 4
    out = capsys.readouterr().out
    assert "a/step-000006: batch_size=2 (not 4), n_layer=3 (not 2), n_head=1 (not 2)" in out
    assert "max_iters 8 (was 6)" in out


def test_min_lr_is_compared_with_the_learning_rate_of_the_checkpoint(run_file):
    """--min_lr=1e-3 was compared with the default learning rate of 6e-4; the run's is 3e-3."""
    run_file("x.py", "--out_dir=a")
    resume = ["--init_from=resume", "--out_dir=a", "--max_iters=8"]
    assert run_file(*resume, "--min_lr=1e-3")["min_lr"] == 1e-3
    for change in (["--min_lr=4e-3"], ["--min_lr=2e-3", "--learning_rate=1e-3"], ["--learning_rate=5e-4"]):
        with pytest.raises(UserError, match=r"min_lr=0\.00\d: .*at most learning_rate"):
            run_file(*resume, *change)


def test_errors_of_a_resumed_run_name_only_settings_that_were_set(run_file):
    """--n_embd=32 on a run with one head said that the default n_head=12 must divide it."""
    run_file("x.py", "--out_dir=a", "--n_head=1", "--batch_size=4", "--gradient_accumulation_steps=2")
    Path("y.py").write_text("n_head = 7\nn_embd = 35\ngradient_accumulation_steps = 1\n")
    resumes = [[*files, "--init_from=resume", "--out_dir=a"] for files in ([], ["x.py", "y.py"])]
    for args, rule in (
        (["--n_embd=64"], "has n_embd=32; leave the setting out$"),
        (["--n_head=5"], "has n_head=1"),
        (["--n_head=5", "--n_embd=64"], "has n_embd=32"),
        (["--batch_size=3"], "a/step-000006 has 8 sequences, .* to one of 1, 2, 4, "),
        (["--gradient_accumulation_steps=3"], "has 8 sequences"),
        (["--batch_size=3", "--gradient_accumulation_steps=2"], "has 8 sequences"),
        (["--total_batch_tokens=512"], "has 8 sequences"),
        (["--compile=reduce-overhead"], "steps of one micro-batch per process"),
    ):
        named = "(command line: )?" + "(, |: .*)".join(word.removeprefix("--") for word in args)
        for resume in resumes:
            with pytest.raises(UserError, match=f"^{named}: .*{rule}"):
                run_file(*resume, "--max_iters=8", *args)
    for max_iters, resume in enumerate(resumes, start=7):
        run_file(*resume, f"--max_iters={max_iters}", "--n_embd=32", "--n_head=1")


@pytest.mark.parametrize("changed", ["--batch_size=2", "--gradient_accumulation_steps=4"])
def test_a_resumed_run_keeps_its_sequences_per_step(run_file, changed):
    """--batch_size=2 instead of 4 was refused, unless the accumulation was doubled by hand."""
    run_file("x.py", "--out_dir=a", "--total_batch_tokens=300")  # 8 sequences
    resumed = run_file("--init_from=resume", "--out_dir=a", "--max_iters=7", changed)
    assert resumed["batch_size"] == 2 and resumed["gradient_accumulation_steps"] == 4
    assert resumed["total_batch_tokens"] is None  # the accumulation turns it off


def test_a_config_file_does_not_change_the_data_or_the_recorded_origins(run_file, data_dir, tmp_path, capsys):
    """The file's data set was opened, which is an error. Settings of the command line were recorded as the file's."""
    copy = str(shutil.copytree(data_dir / "verse", tmp_path / "copy"))
    run_file("x.py", "--out_dir=a", f"--dataset={copy}", "--seed=7")
    Path("y.py").write_text("seed = 1\ndataset = 'verse'\nmax_iters = 9\n")
    assert run_file("y.py", "--out_dir=a", "--init_from=resume")["dataset"] == copy
    assert f"dataset={copy} (not verse), seed=7 (not 1)" in capsys.readouterr().out
    origins = checkpoint.load(Path("a")).state["origins"]
    assert [origins[name] for name in ("seed", "dataset", "max_iters")] == ["command line"] * 2 + ["y.py:3"]


@pytest.fixture
def resume_budget(run_file):
    """A function that returns the settings and the output of a resumed run with a time budget from x.py."""
    with open("x.py", "a") as file:
        file.write("\nminutes = 5.0\n")
    run_file("x.py", "--out_dir=a", "--minutes=None")
    edit_last_state("a", lambda state: state["config"].update(minutes=5.0))
    edit_last_state("a", lambda state: state["parts"][-1].update(decisions=[[0, 9]]))  # it was stopped

    def resume(*args: str, restarted: bool = False) -> tuple[TrainConfig, str]:
        user_cfg = settings.load(TrainConfig, ["--out_dir=a", "--init_from=resume", *args])
        draft = resume_run(user_cfg, checkpoint.load(Path("a")), restarted, [])
        return draft.cfg, "\n".join(draft.lines)

    return resume


@pytest.mark.parametrize(
    "args, file",
    [
        (["--max_iters=9"], ""),
        (["--minutes=0.05"], ""),
        (["--minutes=0.05", "--max_iters=9", "--warmup_iters=2"], ""),
        ([], "minutes = 0.05\n"),
        (["--max_iters=9"], "minutes = 0.05\n"),
        (["--size=auto", "--minutes=0.1"], "learning_rate = 1e-5\noptimizer = 'adamw'\nmax_iters = 7\n"),
        (["--size=auto", "--minutes=1000"], "max_iters = 7\ndropout = 0.3\n"),
        (["--total_batch_tokens=300"], ""),
        (["--batch_size=2", "--gradient_accumulation_steps=3", "--block_size=16", "--overwrite=True"], ""),
        (["--lr_schedule=constant", "--decay_lr=False", "--learning_rate=0", "--patience=9"], "min_lr = 0.0\n"),
        (["--optimizer=muon", "--muon_learning_rate=0.01", "--eval_iters=2", "--n_head=1"], "n_head = 2\n"),
        (["--init_from=base", "--block_size=16", "--warmup_iters=3"], "n_layer = 7\nwarmup_iters = 1\n"),
    ],
)
def test_the_command_that_started_a_run_resumes_it(run_file, at_step, args, file, monkeypatch):
    """With --size=auto and --minutes, the same minutes were refused, because the recorded ones excluded the choice.

    With --size=auto and a config file, the file's learning rate replaced the chosen one.
    """
    run_file("x.py", "--out_dir=base", "--max_iters=1")
    estimate = evaluation_seconds(4 * 4 * 32, 4 * 32, step_seconds=0.05)  # if it is exact, nothing is planned again
    SimulatedMachine(monkeypatch, lambda step: 0.05, lambda step: estimate)
    monkeypatch.setattr(choice, "CHANNELS", (32, 64))  # of size=auto
    monkeypatch.setattr(auto_size, "MIN_TURN_STEPS", 1)
    monkeypatch.setattr(auto_size, "TURN_STEPS", 1)
    monkeypatch.setattr(auto_size, "MAX_SHARE", 0.0)  # no complete runs before it
    Path("y.py").write_text(file)
    at_step(3, signal.raise_signal, signal.SIGINT)
    first = run_file("x.py", "y.py", "--out_dir=a", *args)
    planned = planned_steps(run_folder.last_state(Path("a")))
    assert run_folder.last_state(Path("a"))["step"] == 4 < planned
    at_step(6 if planned > 50 else -1, signal.raise_signal, signal.SIGINT)
    resumed = run_file("x.py", "y.py", "--out_dir=a", *args, "--init_from=resume")
    state = run_folder.last_state(Path("a"))
    assert state["step"] in (7, planned_steps(state)) and state["parts"][-1]["changes"] == {}
    assert {**resumed, "init_from": first["init_from"], "overwrite": first["overwrite"]} == first
    assert planned_steps(state) == planned


@pytest.mark.parametrize("first", ["--max_iters=12", "--minutes=0.2"])
@pytest.mark.parametrize("stopped", [True, False])
def test_a_run_is_trained_for_more_minutes(run_file, at_step, first, stopped, monkeypatch, capsys):
    """--init_from=resume --minutes=2 was refused, with a number of steps as the remedy."""
    machine = SimulatedMachine(monkeypatch, lambda step: 0.5, lambda step: 0.1)
    at_step(5 if stopped else -1, signal.raise_signal, signal.SIGINT)
    run_file("x.py", "--out_dir=a", first)
    before = run_folder.last_state(Path("a"))
    resume, begin = ["--init_from=resume", "--out_dir=a"], machine.now
    at_step(before["step"] + 20, signal.raise_signal, signal.SIGINT)
    capsys.readouterr()
    config = run_file(*resume, "--minutes=1")
    stopped_at = run_folder.last_state(Path("a"))
    assert stopped_at["step"] == before["step"] + 21 < config["max_iters"]
    assert "1 more minute, at 500.0 ms per step" in capsys.readouterr().out
    assert config["minutes"] == 1 and stopped_at["parts"][-1]["changes"].keys() >= {"minutes", "max_iters"}
    run_file(*resume, "--minutes=1")  # the same minutes, which are not used up
    assert_on_time(machine.now - begin, 1.0, step_seconds=0.5, evaluation_seconds=0.1)
    begin = machine.now
    capsys.readouterr()
    run_file(*resume)
    assert "nothing to train" in capsys.readouterr().out
    run_file(*resume, "--minutes=1", "--eval_interval=30")  # they are used up, so it is one more
    state = run_folder.last_state(Path("a"))
    assert_on_time(machine.now - begin, 1.0, step_seconds=0.5, evaluation_seconds=0.1)
    assert state["config"]["eval_interval"] == 30
    lines = [json.loads(line) for line in Path("a", "metrics.jsonl").read_text().splitlines()]
    rates = {line["step"]: line["lr"] for line in lines}
    for part in History.of(Path("a"), TrainConfig).parts:  # the record of each part gives its learning rates
        schedule = part.cfg.schedule(part.cfg.step_counts, part.record)
        steps = range(part.begin + 1, int(min(part.end, state["step"])) + 1)
        assert [rates[step] for step in steps] == [schedule.learning_rate_at(step - 1) for step in steps]


def test_a_restart_adds_no_minutes(resume_budget):
    edit_last_state("a", lambda state: state["parts"][-1].update(decisions=[[0, 6]]))  # its minutes are used up
    for restarted in (True, False):
        user_cfg = settings.load(TrainConfig, ["--out_dir=a", "--init_from=resume", "--minutes=5"])
        assert resume_run(user_cfg, checkpoint.load(Path("a")), restarted, []).adds_minutes != restarted


def test_max_iters_also_ends_the_time_budget_of_a_config_file(resume_budget):
    """It was ignored while time was left, and later it was an error that suggested --max_iters.

    A restart keeps the budget: torchrun repeats the command, in which --max_iters is the length of the recipe that
    x.py's minutes scale.
    """
    assert resume_budget("x.py")[0].minutes == 5
    cfg, _ = resume_budget("x.py", "--max_iters=12")
    assert cfg.minutes is None and (cfg.max_iters, cfg.wsd_decay_iters) == (12, 6)
    assert resume_budget("x.py", "--max_iters=12", "--minutes=5")[0].minutes == 5
    assert resume_budget("x.py", "--max_iters=12", restarted=True)[0].minutes == 5
    assert resume_budget("--max_iters=12", restarted=True)[0].minutes is None
    edit_last_state("a", lambda state: state["config"].update(minutes=None))  # the budget has ended
    assert resume_budget("x.py", "--max_iters=12")[0].minutes is None
    cfg, out = resume_budget("x.py")
    assert cfg.minutes is None and "minutes=None (not 5.0)" in out


def test_step_counts_that_a_time_budget_ignores_are_named(resume_budget):
    """They were silently ignored."""
    cfg, out = resume_budget("--eval_interval=1", "--lr_decay_iters=2", "--minutes=5")
    assert cfg.eval_interval is None and "ignored: lr_decay_iters=2, eval_interval=1" in out
    assert "ignored" not in resume_budget("x.py")[1]


def test_print_config_shows_the_settings_of_the_run_to_resume(run_file, capsys):
    """It showed the defaults."""
    run_file("x.py", "--out_dir=a")
    main(settings.load(TrainConfig, ["--out_dir=a", "--init_from=resume", "--print_config", "--patience=3"]))
    out = capsys.readouterr().out.splitlines()
    assert "n_layer = 2" in out and "dataset = 'verse'" in out and "patience = 3" in out


def test_print_config_shows_the_shape_of_the_weights_to_finetune(run_file, capsys):
    """It showed the config file's shape, or the default, not that of the model that is trained."""
    run_file("x.py", "--out_dir=a")
    Path("y.py").write_text("n_layer = 5\n")
    words = ["y.py", "--dataset=verse", "--init_from=a", "--out_dir=a", "--print_config"]
    capsys.readouterr()
    main(settings.load(TrainConfig, words))
    first, *out = capsys.readouterr().out.splitlines()
    assert first.endswith("n_layer=2 (not 5)") and {"n_layer = 2", "n_embd = 32", "block_size = 32"} <= {*out}
    with pytest.raises(UserError, match="n_layer=3: the checkpoint"):
        main(settings.load(TrainConfig, [*words, "--n_layer=3"]))


@pytest.mark.parametrize("print_config", [True, False])
def test_ignored_settings_of_a_config_file_are_printed_also_before_an_error(run_file, capsys, print_config):
    """They were lost if the settings of the command line did not fit the checkpoint."""
    run_file("x.py", "--out_dir=a", "--seed=7")
    Path("y.py").write_text("seed = 1\nmax_iters = 9\n")
    words = ["y.py", "--out_dir=a", "--init_from=resume", "--batch_size=3", f"--print_config={print_config}"]
    capsys.readouterr()
    with pytest.raises(UserError, match="batch_size=3"):
        main(settings.load(TrainConfig, words))
    assert "a/step-000006: seed=7 (not 1)" in capsys.readouterr().out


def test_the_schedule_of_an_extended_run_is_printed(run_file, capsys):
    """The learning rate rose tenfold, but nothing was printed."""
    run_file("x.py", "--out_dir=a", "--lr_schedule=cosine", "--warmup_iters=0")
    capsys.readouterr()
    run_file("--out_dir=a", "--init_from=resume", "--max_iters=12")
    rates = [line["lr"] for line in read_metrics("a")]
    out = capsys.readouterr().out
    expected = (
        f"learning rate: {rates[5]:.3g} at the last step, {rates[6]:.3g} at the next one, {rates[11]:.3g} at step 12"
    )
    assert rates[6] > 1.5 * rates[5] and f"{expected} (cosine); it increases" in out


def test_damaged_settings_of_a_checkpoint_are_an_error_in_one_line(tiny):
    train(tiny(max_iters=2))
    for value in ("two", -1, [1], None):
        edit_last_state(tiny().out_dir, lambda state, value=value: state["config"].update(n_layer=value))
        with pytest.raises(UserError, match=r"state\.json is damaged: .*n_layer="):
            train(tiny(init_from="resume", max_iters=4))


# --- finetuning -------------------------------------------------------------------------------------------------------


def test_finetuning_uses_the_weights_and_shape_of_the_checkpoint(tiny, tmp_path, capsys):
    first = tiny(max_iters=30, eval_interval=30)
    before = train(first).best_val_loss
    finetune = dict(init_from=first.out_dir, out_dir=str(tmp_path / "new"), max_iters=6, learning_rate=0.0)
    default_shape = {name: getattr(TrainConfig, name) for name in ("n_layer", "n_head", "n_embd", "block_size")}
    after = train(tiny(**finetune, **default_shape)).best_val_loss
    assert after == before  # at a learning rate of 0
    assert checkpoint.load(tmp_path / "new").state["config"]["n_layer"] == 2
    with pytest.raises(UserError, match=r"n_layer=3: the checkpoint .* has n_layer=2"):
        train(tiny(**finetune, n_layer=3, overwrite=True))
    train(tiny(**{**finetune, **default_shape, "init_from": "resume", "max_iters": 8}))  # resuming also uses its shape
    with pytest.raises(UserError, match=r"init_from=gone: .* scratch, resume, gpt2"):
        train(tiny(**{**finetune, "init_from": "gone"}))
    train(tiny(**finetune, block_size=16, overwrite=True))
    assert checkpoint.load(tmp_path / "new").state["model"]["block_size"] == 16
    assert "block_size 16: the first 16 of the 32 trained positions are used" in capsys.readouterr().out


def test_a_character_model_is_finetuned_on_pairs(tiny, tmp_path, data_dir, capsys):
    """Its tokenizer has no end-of-text token: pairs were not separated, and the model's answers were garbage."""
    base = tiny(max_iters=30)
    train(base)
    before = {path: path.read_bytes() for path in Path(base.out_dir).rglob("*") if path.is_file()}
    lines = [json.dumps({"prompt": f"the {word} ", "completion": "swear"}) for word in "sword vow fair night".split()]
    (tmp_path / "vows.jsonl").write_text("\n".join(lines * 6))
    settings = dict(inputs=(str(tmp_path / "vows.jsonl"),), tokenizer=base.out_dir, data_dir=str(tmp_path))
    prepare_pairs.main(prepare_pairs.PairsConfig(**settings))
    out = capsys.readouterr().out
    assert f"the tokenizer of {base.out_dir} has no end-of-text token; it is added, with the id 43" in out
    assert re.search(r"finetune .* --max_iters=10 ", out)  # the recipe's 2,700 steps were 21,600 epochs of such a text
    dataset = open_dataset(tmp_path / "vows")
    assert dataset.load_tokenizer().eot == 43 and [pair.completion for pair in validation_pairs(dataset)]

    new = dict(dataset="vows", data_dir=str(tmp_path), init_from=base.out_dir, out_dir=str(tmp_path / "new"))
    train(tiny(**new, max_iters=1, learning_rate=0.0, min_lr=0.0))
    loaded, old = checkpoint.load(tmp_path / "new"), checkpoint.load(Path(base.out_dir), "best")
    runtime, sampling = resolve_runtime("cpu", "float32", False), Sampling(temperature=0.0)
    decoders = [make_decoder(saved.build(), runtime) for saved in (loaded, old)]
    steps = [generate(decoder, [[1, 2, 3]], max_new_tokens=9, sampling=sampling, vocab_size=43) for decoder in decoders]
    assert all(torch.equal(a.logits[:, :43], b.logits) for a, b in zip(*steps, strict=True))
    assert all(torch.equal(loaded.model[name][: len(tensor)], tensor) for name, tensor in old.model.items())
    table = loaded.model["transformer.wte.weight"]
    fresh = GPT(loaded.config(), base.seed).transformer.wte.weight
    assert table.shape == (44, 32) and torch.equal(table[43], fresh[43])

    train(tiny(**new, overwrite=True, max_iters=80, learning_rate=1e-2, dropout=0.0))
    assert load(str(tmp_path / "new")).generate("the vow ", max_new_tokens=50, temperature=0.0) == "swear"
    train(tiny(**{**new, "init_from": "resume"}, max_iters=82, learning_rate=1e-2, dropout=0.0))
    assert before == {path: path.read_bytes() for path in Path(base.out_dir).rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"another tokenizer.*--tokenizer="):  # data without the token
        train(tiny(init_from=str(tmp_path / "new"), out_dir=str(tmp_path / "other")))
    with pytest.raises(UserError, match=r"another tokenizer.*--tokenizer="):
        train(tiny(**{**new, "init_from": "resume", "out_dir": base.out_dir}, max_iters=40))


def test_a_new_run_from_the_weights_of_a_run_is_reported(tiny, tmp_path, capsys):
    """--init_from=out-x, meant to continue out-x, silently started a new run in out/."""
    train(tiny(max_iters=2))
    capsys.readouterr()
    train(tiny(max_iters=1, init_from=tiny().out_dir, out_dir=str(tmp_path / "new")))
    out = capsys.readouterr().out
    assert f"a new run in {tmp_path / 'new'}, from the weights of {tiny().out_dir}/step-000002" in out
    assert f"(to continue the run in {tiny().out_dir} instead: --init_from=resume --out_dir={tiny().out_dir})" in out


@pytest.fixture
def finetune(run_file, data_dir):
    """A function that trains a new run from a run of x.py, which has the options `first`, and returns its settings."""

    def finetune(*args: str, first: tuple[str, ...] = ()) -> dict:
        if not Path("first").exists():
            run_file("x.py", "--out_dir=first", "--max_iters=2", *first)
        data = ["--dataset=verse", f"--data_dir={data_dir}", "--sample_tokens=0"]
        return run_file(*args, "--init_from=first", "--out_dir=new", "--batch_size=2", *data)

    return finetune


def test_a_shape_on_the_command_line_is_refused_even_if_it_is_the_default(finetune):
    """--n_layer=12 and --block_size=1024 are the defaults, and were ignored for a checkpoint with another shape."""
    for name, value in (("n_layer", 12), ("block_size", 1024)):
        with pytest.raises(UserError, match=rf"^{name}={value}: the checkpoint .* has {name}="):
            finetune(f"--{name}={value}")
    assert finetune("--max_iters=2")["n_layer"] == 2


def test_a_config_files_shape_is_replaced_by_the_checkpoints(finetune, capsys):
    """A config file with another shape could not be used for finetuning."""
    Path("y.py").write_text("n_layer = 5\nn_head = 3\nn_embd = 48\nblock_size = 64\nmax_iters = 2\n")
    assert finetune("y.py")["n_layer"] == 2
    assert "block_size=32 (not 64), n_layer=2 (not 5), n_head=2 (not 3), n_embd=32 (not 48)" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"n_layer=3: the checkpoint .*; n_head=1: the checkpoint .*; leave"):
        finetune("y.py", "--n_layer=3", "--n_head=1", "--overwrite")


def test_the_position_encoding_is_that_of_the_checkpoint(finetune, capsys):
    Path("y.py").write_text("position = 'rotary'\nmax_iters = 2\n")
    assert finetune("y.py", first=("--position=alibi",))["position"] == "alibi"
    assert "position=alibi (not rotary)" in capsys.readouterr().out
    for position in ("rotary", "learned"):
        with pytest.raises(UserError, match=rf"^position={position}: the checkpoint .* has position=alibi; leave the"):
            finetune("y.py", f"--position={position}", "--overwrite")


def test_a_longer_context_is_possible_without_learned_positions(tiny, tmp_path, capsys):
    learned, rotary = tiny(max_iters=2, out_dir=str(tmp_path / "learned")), tiny(max_iters=2, position="rotary")
    new = dict(max_iters=2, out_dir=str(tmp_path / "new"), overwrite=True)
    train(learned)
    with pytest.raises(UserError, match=r"^block_size=64: the checkpoint .* has block_size=32"):
        train(tiny(**new, init_from=learned.out_dir, block_size=64))
    train(rotary)
    for block_size in (64, 16):
        train(tiny(**new, init_from=rotary.out_dir, block_size=block_size))
        model = checkpoint.load(tmp_path / "new").build()
        assert (model.config.block_size, model.config.position) == (block_size, "rotary")
        out = capsys.readouterr().out
        assert f"block_size {block_size}: the model was trained with 32" in out and "trained positions" not in out
    with pytest.raises(UserError, match="block_size: 16 before, 64 now"):
        train(tiny(**{**new, "init_from": "resume", "overwrite": False}, position="rotary", block_size=64))


def edit_last_state(out_dir: str, edit) -> None:
    edit_state(checkpoint.load(Path(out_dir)).path, edit)


@pytest.mark.parametrize("init_from", ["resume", "finetune"])
def test_a_model_with_an_unknown_setting_is_an_error_in_one_line(tiny, tmp_path, init_from):
    """A checkpoint of a newer version ended in a TypeError, or ValueError when finetuning."""
    train(tiny(max_iters=2))
    for unknown in ({"position": "rope"}, {"position": ["rope"]}, {"position": "learned", "rope": True}):
        edit_last_state(tiny().out_dir, lambda state, unknown=unknown: state["model"].update(unknown))
        with pytest.raises(UserError, match=r"do not fit state\.json, or model\.py: .*rope"):
            train(continued(tiny, tmp_path, init_from))


def continued(tiny, tmp_path: Path, init_from: str, **changes) -> TrainConfig:
    """The settings of a run that resumes the run of tiny(), or finetunes it."""
    if init_from == "resume":
        return tiny(init_from="resume", max_iters=4, **changes)
    return tiny(init_from=tiny().out_dir, out_dir=str(tmp_path / "new"), **changes)


@pytest.mark.parametrize("init_from", ["resume", "finetune"])
def test_a_checkpoint_without_the_setting_position_has_learned_positions(tiny, tmp_path, init_from):
    """Older versions did not have this setting."""
    train(tiny(max_iters=2))
    edit_last_state(tiny().out_dir, lambda state: [state[part].pop("position") for part in ("model", "config")])
    with pytest.raises(UserError, match=r"position=rotary: the checkpoint .* has position=learned"):
        train(continued(tiny, tmp_path, init_from, position="rotary"))
    cfg = continued(tiny, tmp_path, init_from)
    train(cfg)
    assert checkpoint.load(Path(cfg.out_dir)).state["model"]["position"] == "learned"


def test_a_setting_that_a_checkpoint_lacks_had_its_default(tiny):
    """The new value was used, so that a resumed run could change its number of sequences per step."""
    train(tiny(max_iters=2))
    edit_last_state(tiny().out_dir, lambda state: state["config"].pop("total_batch_tokens"))
    with pytest.raises(UserError, match=r"^batch_size=4, total_batch_tokens=512: a step of .* has 4 sequences"):
        train(tiny(init_from="resume", max_iters=4, total_batch_tokens=16 * 32, gradient_accumulation_steps=None))
