"""The lines that a run prints about its data, its length, its losses, and its end."""

import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

import train as train_script
from folio.base import settings
from folio.checkpoints import run_folder
from folio.data.shards import open_dataset
from folio.training.describe import format_losses
from folio.training.guard import StepGuard
from folio.training.session import TrainingError
from prepare import pairs as pairs_script
from prepare import text as prepare_text
from tests.support.runs import read_metrics, run_with_losses
from tests.support.simulated import SimulatedMachine
from train import TrainConfig, train


def test_overfitting_is_reported(tiny, monkeypatch, capsys):
    """The validation loss rose by 1.19, but nothing was printed except a sample of the last, worst model."""
    out = run_with_losses(tiny, monkeypatch, capsys, [4.7, 4.54, 4.56, 4.6, 5.73])
    rise = "the validation loss has risen by 1.1900 since step 2, from 4.5400 to 5.7300: the model overfits"
    before_the_end, at_the_end = out.split("finished: 5 of 5 steps")
    assert ", val 4.5400, " in out
    assert "val 4.5600 (0.0200 above the best, of step 2)" in out
    assert "step 4: the validation loss has risen by 0.0600 since step 2" in before_the_end
    assert before_the_end.count("the model overfits") == 1
    assert rise in at_the_end and "sample.py takes the best checkpoint, of step 2" in at_the_end
    assert "sample from the model at step 5 (sample.py takes the best checkpoint, of step 2):" in at_the_end


def test_a_validation_set_of_one_document_is_reported(tiny, tmp_path, capsys):
    """One of several files was for validation; its loss of 1.76 beside 0.85 in training looked like overfitting."""
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(f"file {number}\n" * 100, encoding="utf-8")
    inputs = tuple(str(tmp_path / f"{number}.txt") for number in range(6))
    cfg = prepare_text.TextConfig(inputs=inputs, name="files", data_dir=str(tmp_path), tokenizer="byte")
    prepare_text.main(cfg)
    capsys.readouterr()
    train(tiny(dataset="files", data_dir=str(tmp_path), max_iters=1, warmup_iters=0))
    out = capsys.readouterr().out
    assert out.count("the validation set is only") == 1
    assert "files: the validation set is only 1 document, 701 tokens, which" in out
    train(tiny(max_iters=1, warmup_iters=0, out_dir=str(tmp_path / "verse")))  # the tail of one text
    assert "the validation set is only" not in capsys.readouterr().out


def test_a_run_whose_training_loss_rises_too_does_not_overfit(tiny, monkeypatch, capsys):
    """A run with a learning rate of 3 was reported to overfit, with more text as the remedy."""
    out = run_with_losses(tiny, monkeypatch, capsys, [2.7, 2.54, 2.56, 3.73])
    loss = read_metrics(tiny().out_dir)[-1]["loss"]
    reason = f"from 2.5400 to 3.7300: the training loss is {loss:.4f}, so the learning rate is probably too high"
    assert reason in out and "overfits" not in out


@pytest.mark.parametrize("val_losses", [[4.7, 4.6, 4.5], [4.7, 4.6, 4.7], [4.5, 4.501, 4.502], [4.5, 4.8, 4.9, 4.4]])
def test_a_run_that_ends_at_or_near_its_best_does_not_overfit(tiny, monkeypatch, capsys, val_losses):
    out = run_with_losses(tiny, monkeypatch, capsys, val_losses)
    assert "the validation loss has risen" not in out.split("finished:")[1]
    assert f"sample from the model at step {len(val_losses)}" in out


def test_a_rise_after_the_learning_rate_was_raised_is_not_reported_as_overfitting(tiny, monkeypatch, capsys):
    """An extended run raises its learning rate, so its losses rise at first. This was reported as overfitting."""
    values = iter([3.0, 2.5, 2.0, 2.1, 2.2, 2.3, 2.4, 2.5, 2.6, 2.7, 2.8])
    monkeypatch.setattr(train_script, "evaluate", lambda *args: {"val_loss": next(values)})
    settings = dict(eval_interval=2, learning_rate=1e-6, warmup_iters=0, min_lr=0.0)
    train(tiny(**settings, max_iters=4))
    train(tiny(**settings, max_iters=20, init_from="resume"))
    out = capsys.readouterr().out
    assert "it increases, so" in out and "0.3000 above the best, of step 4" in out
    assert "step 10: the validation loss has risen" not in out  # the rate is still higher than at step 4
    assert "step 16: the validation loss has risen" in out


# --- before the first step --------------------------------------------------------------------------------------------


def test_too_many_epochs_are_reported_before_the_run(tiny, capsys):
    """18,581 tokens in sequences of 32 are 579 sequences per epoch; a step reads 4."""
    message = "after about 40, repetition no longer lowers the loss"
    train(tiny(max_iters=8))
    assert message not in capsys.readouterr().out
    with pytest.raises(TrainingError):  # ends at once
        train(tiny(max_iters=10_000, out_dir=tiny().out_dir + "2", learning_rate=1e30, grad_clip=0, eval_interval=1))
    out = capsys.readouterr().out
    assert message in out and "verse will be repeated for 69 epochs" in out


def test_pairs_that_are_longer_than_the_context_are_reported(tiny, tmp_path, capsys):
    """Their answers did not see their prompts, and nothing said so. A pair of block_size + 1 tokens fits."""

    def prepare(name: str, prompts: list[int], key: str = "prompt") -> None:
        lines = [{"prompt": f"{k % 10}" * n, "completion": "y"} for k, n in enumerate(prompts)]
        if key == "messages":  # User: ..., a blank line, Assistant: y, and an end-of-text token: n + 21 tokens
            lines = [
                {"messages": [{"role": "user", "content": p["prompt"]}, {"role": "assistant", "content": "y"}]}
                for p in lines
            ]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        pairs_script.main(
            pairs_script.PairsConfig(
                inputs=(str(tmp_path / f"{name}.jsonl"),), tokenizer="byte", data_dir=str(tmp_path), val_fraction=0.1
            )
        )

    prepare("fit", [31, 5, 31, 8, 9] * 9)
    prepare("long", [200, 5, 32, 8, 9] * 9)
    prepare("chat", [200, 5, 32, 8, 9] * 9, "messages")
    settings = dict(data_dir=str(tmp_path), max_iters=1, overwrite=True, eval_iters=None)
    capsys.readouterr()
    train(tiny(dataset="fit", **settings))
    out = capsys.readouterr().out
    assert "longer than block_size" not in out and "have no targets" not in out
    for name, unit, prompts, needed in (("long", "pairs", "prompts", 201), ("chat", "turns", "messages", 220)):
        data = open_dataset(tmp_path / name)
        lengths = np.diff(np.flatnonzero(np.concatenate([[256], data.train[0].ids]) == 256))
        train(tiny(dataset=name, **settings))
        out = capsys.readouterr().out
        assert f"{name}: {(lengths > 33).sum()} of {len(lengths)} {unit} are longer than block_size=32" in out
        assert f"do not see all of their {prompts}; set --block_size={needed}," in out
        assert re.search(rf"{name}: [\d,]+ of {len(data.train[0]) - 32:,} possible windows have no targets", out)
        train(tiny(dataset=name, **settings, block_size=needed))
        assert "longer than block_size" not in capsys.readouterr().out


def test_a_rise_without_a_training_loss_has_no_reason_but_a_line(tiny, monkeypatch, capsys):
    """If no recent step has targets, there is no loss to compare the validation loss with."""
    monkeypatch.setattr(StepGuard, "last_loss", None)
    out = run_with_losses(tiny, monkeypatch, capsys, [4.7, 4.54, 4.56, 4.6, 5.73])
    assert "from 4.5400 to 5.7300: the last steps had no targets" in out


def test_a_vocabulary_that_is_too_large_for_the_text_is_reported_before_the_run(tiny, data_dir, tmp_path, capsys):
    source, data = str(data_dir / "verse.txt"), dict(data_dir=str(tmp_path), dataset="bpe", max_iters=1)
    cfg = prepare_text.TextConfig(inputs=(source,), name="bpe", tokenizer="bpe", vocab_size=300, data_dir=str(tmp_path))
    prepare_text.main(cfg)
    capsys.readouterr()
    train(tiny(**data))
    assert "the vocabulary of 300 is large for " in capsys.readouterr().out
    train(tiny(**data, init_from=tiny().out_dir, out_dir=str(tmp_path / "finetuned")))
    train(tiny(max_iters=1, out_dir=str(tmp_path / "characters")))
    assert "is large for" not in capsys.readouterr().out


def test_a_learning_rate_that_affects_only_part_of_the_model_is_reported(tiny, capsys):
    """In a recipe with Muon, --learning_rate affects only embeddings, norms and biases."""
    message = "learning_rate=0.002 is AdamW's, for embeddings, norms and biases"
    for args, is_reported in (
        (["--optimizer=muon"], True),
        (["--optimizer=muon", "--muon_learning_rate=0.02"], False),
        ([], False),
    ):
        cfg = settings.load(TrainConfig, ["--learning_rate=2e-3", *args])
        train(tiny(max_iters=1, overwrite=True).replace(cfg.origins, optimizer=cfg.optimizer, learning_rate=2e-3))
        assert (message in capsys.readouterr().out) == is_reported


def test_the_nearest_multiple_of_total_batch_tokens_is_printed(tiny, capsys):
    train(tiny(max_iters=1, total_batch_tokens=500))
    assert "4 micro-batches = 512 tokens (the nearest to total_batch_tokens=500)" in capsys.readouterr().out
    train(tiny(max_iters=1, total_batch_tokens=512, overwrite=True))
    assert "nearest" not in capsys.readouterr().out


def test_a_run_that_ends_before_its_warmup_is_reported(tiny, capsys):
    train(tiny(max_iters=5, warmup_iters=100))
    assert "warmup_iters=100: the run of 5 steps ends before its warmup does" in capsys.readouterr().out
    assert [line["lr"] for line in read_metrics(tiny().out_dir)] == pytest.approx([3e-3 * n / 101 for n in range(1, 6)])


# --- the end ----------------------------------------------------------------------------------------------------------


def run_command(args: list[str], monkeypatch, capsys) -> str:
    """The output of `python train.py ARGS`, which runs in this process to save time."""
    monkeypatch.setattr(sys, "argv", ["train.py", *args])
    train_script.main(settings.load(TrainConfig, args))
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "args, config",
    [
        (["--max_iters=4"], ""),
        (["--minutes=0.08", "--max_iters=100"], ""),
        ([], "minutes = 0.08\nmax_iters = 100\nwarmup_iters = 3\n"),
        (["--max_iters=9", "--patience=1", "--learning_rate=0", "--eval_interval=1"], ""),
        ([], "max_iters = 9\npatience = 1\nlearning_rate = 0\neval_interval = 1\n"),
        (["--max_iters=4", "--overwrite=True", "--init_from=scratch"], "max_iters = 6\nwsd_decay_iters = 3\n"),
        (["--minutes=0.08", "--max_iters=100000", "--warmup_iters=5000", "--lr_decay_iters=100000"], ""),
    ],
)
def test_the_printed_command_to_continue_trains_further(tiny, tmp_path, args, config, monkeypatch, capsys):
    """After --minutes, it was refused or trained no step. After patience, it trained no step either."""
    SimulatedMachine(monkeypatch, lambda step: 0.1, lambda step: 0.1)
    monkeypatch.chdir(tmp_path)
    Path("x.py").write_text(config)
    cfg = tiny(eval_iters=1, sample_tokens=0)
    names = "n_layer n_head n_embd block_size batch_size eval_iters sample_tokens dataset data_dir dtype out_dir"
    small = [f"--{name}={getattr(cfg, name)}" for name in names.split()]
    first_output = run_command(["x.py", *small, *args], monkeypatch, capsys)
    (command,) = [line.split(":", 1)[1] for line in first_output.splitlines() if line.startswith("continue:")]
    step = run_folder.last_state(Path(cfg.out_dir))["step"]
    program, script, *continue_args = shlex.split(command)
    assert (program, script) == ("python", "train.py")
    second_output = run_command(continue_args, monkeypatch, capsys)
    assert run_folder.last_state(Path(cfg.out_dir))["step"] > step
    assert len(read_metrics(cfg.out_dir)) > 1 and "before its warmup does" not in second_output


def test_a_run_with_more_steps_than_max_iters_is_reported(tiny, capsys):
    train(tiny(max_iters=4))
    capsys.readouterr()
    train(tiny(max_iters=3, init_from="resume"))
    out = capsys.readouterr().out
    assert "nothing to train: 4 steps are done, more than max_iters=3" in out and "sample from the model" not in out


def test_the_losses_of_several_data_sets_are_printed_after_their_mean():
    losses = {"val_loss": 2.5, "val_loss/verse": 2.0, "val_loss/prose": 3.00004}
    assert format_losses(losses) == " (verse 2.0000, prose 3.0000)" and format_losses({"val_loss": 2.5}) == ""
