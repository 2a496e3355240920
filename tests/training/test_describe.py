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
from prepare.text import TextConfig
from tests.support.runs import read_metrics, run_with_losses, set_losses
from tests.support.simulated import SimulatedMachine
from train import TrainConfig, train

OVERFITTING = [4.7, 4.54, 4.56, 4.6, 5.73]


def test_overfitting_is_reported(tiny, monkeypatch, capsys):
    """The validation loss rose by 1.19, but nothing was printed except a sample of the last, worst model."""
    out = run_with_losses(tiny, monkeypatch, capsys, OVERFITTING)
    before_the_end, at_the_end = out.split("finished: 5 of 5 steps")
    assert ", val 4.5400, " in out
    assert "val 4.5600 (0.0200 above the best, of step 2)" in out
    assert "step 4: the validation loss has risen by 0.0600 since step 2" in before_the_end
    assert before_the_end.count("the model overfits") == 1
    assert "risen by 1.1900 since step 2, from 4.5400 to 5.7300: the model overfits" in at_the_end
    assert at_the_end.count("sample.py takes the best checkpoint, of step 2") == 2  # also above the sample


def test_a_validation_set_of_one_document_is_reported(tiny, tmp_path, capsys):
    """One of several files was for validation; its loss of 1.76 beside 0.85 in training looked like overfitting."""
    inputs = tuple(str(tmp_path / f"{number}.txt") for number in range(6))
    for number, path in enumerate(inputs):
        Path(path).write_text(f"file {number}\n" * 100, encoding="utf-8")
    prepare_text.main(TextConfig(inputs=inputs, name="files", data_dir=str(tmp_path), tokenizer="byte"))
    capsys.readouterr()
    train(tiny(dataset="files", data_dir=str(tmp_path), max_iters=1, warmup_iters=0))
    train(tiny(max_iters=1, warmup_iters=0, out_dir=str(tmp_path / "verse")))  # the tail of one text
    reports = re.findall("(.*): the validation set is only (.*), which", capsys.readouterr().out)
    assert reports == [("files", "1 document, 701 tokens")]


def test_a_run_whose_training_loss_rises_too_does_not_overfit(tiny, monkeypatch, capsys):
    """A run with a learning rate of 3 was reported to overfit, with more text as the remedy."""
    out = run_with_losses(tiny, monkeypatch, capsys, [2.7, 2.54, 2.56, 3.73])
    loss = read_metrics(tiny().out_dir)[-1]["loss"]
    assert f"from 2.5400 to 3.7300: the training loss is {loss:.4f}, so the learning rate is" in out
    assert "overfits" not in out


def test_a_rise_without_a_training_loss_has_no_reason_but_a_line(tiny, monkeypatch, capsys):
    """If no recent step has targets, there is no loss to compare the validation loss with."""
    monkeypatch.setattr(StepGuard, "last_loss", None)
    out = run_with_losses(tiny, monkeypatch, capsys, OVERFITTING)
    assert "from 4.5400 to 5.7300: the last steps had no targets" in out


@pytest.mark.parametrize("val_losses", [[4.7, 4.6, 4.5], [4.7, 4.6, 4.7], [4.5, 4.501, 4.502], [4.5, 4.8, 4.9, 4.4]])
def test_a_run_that_ends_at_or_near_its_best_does_not_overfit(tiny, monkeypatch, capsys, val_losses):
    out = run_with_losses(tiny, monkeypatch, capsys, val_losses)
    assert "the validation loss has risen" not in out.split("finished:")[1]
    assert f"sample from the model at step {len(val_losses)}" in out


def test_a_rise_after_the_learning_rate_was_raised_is_not_reported_as_overfitting(tiny, monkeypatch, capsys):
    """An extended run raises its learning rate, so its losses rise at first. This was reported as overfitting."""
    set_losses(monkeypatch, 3.0, 2.5, 2.0, 2.1, 2.2, 2.3, 2.4, 2.5, 2.6, 2.7, 2.8)
    settings = dict(eval_interval=2, learning_rate=1e-6, warmup_iters=0, min_lr=0.0)
    train(tiny(**settings, max_iters=4))
    train(tiny(**settings, max_iters=20, init_from="resume"))
    out = capsys.readouterr().out
    assert "it increases, so" in out and "0.3000 above the best, of step 4" in out
    assert "step 10: the validation loss has risen" not in out  # the rate is still higher than at step 4
    assert "step 16: the validation loss has risen" in out


def test_a_rise_after_only_muons_rate_was_raised_is_not_reported_as_overfitting(tiny, monkeypatch, capsys):
    """Only AdamW's rate was compared and printed. The other way round, rounding of Muon's rate is not a rise."""
    set_losses(monkeypatch, 3.0, 2.5, 2.0, 2.1, 2.2, 2.3, 2.4)
    settings = dict(eval_interval=2, optimizer="muon", lr_schedule="constant", warmup_iters=0)
    train(tiny(**settings, max_iters=4, muon_learning_rate=1e-3))
    train(tiny(**settings, max_iters=8, muon_learning_rate=3e-3, init_from="resume"))
    out = capsys.readouterr().out
    assert "; Muon's: 0.001 at the last step, 0.003 at the next one, " in out and "(constant); it increases, so" in out
    assert "the validation loss has risen" not in out
    train(tiny(**settings, max_iters=12, muon_learning_rate=3e-3, learning_rate=2.7e-3, init_from="resume"))
    out = capsys.readouterr().out
    assert "it increases" not in out and "step 10: the validation loss has risen" in out


# --- before the first step --------------------------------------------------------------------------------------------


def test_too_many_epochs_are_reported_before_the_run(tiny, capsys):
    """18,581 tokens in sequences of 32 are 579 sequences per epoch; a step reads 4."""
    train(tiny(max_iters=8))
    with pytest.raises(TrainingError):  # ends at once
        train(tiny(max_iters=10_000, out_dir=tiny().out_dir + "2", learning_rate=1e30, grad_clip=0, eval_interval=1))
    assert re.findall("verse will be repeated for (.*) epochs", capsys.readouterr().out) == ["69"]


def test_pairs_that_are_longer_than_the_context_are_reported(tiny, tmp_path, capsys):
    """Their answers did not see their prompts, and nothing said so. A pair of block_size + 1 tokens fits."""

    def pair(prompt: str) -> dict:
        return {"prompt": prompt, "completion": "y"}

    def chat(prompt: str) -> dict:  # User: ..., a blank line, Assistant: y, and an end-of-text token: n + 21 tokens
        return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": "y"}]}

    def train_on(name: str, block_size: int) -> str:
        settings = dict(dataset=name, data_dir=str(tmp_path), max_iters=1, overwrite=True, eval_iters=None)
        capsys.readouterr()
        train(tiny(**settings, block_size=block_size))
        return capsys.readouterr().out

    for name, record, longest in (("fit", pair, 31), ("long", pair, 200), ("chat", chat, 200)):
        lines = [json.dumps(record(f"{k % 10}" * n)) for k, n in enumerate([longest, 5, min(longest, 32), 8, 9] * 9)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        settings = dict(inputs=(str(tmp_path / f"{name}.jsonl"),), tokenizer="byte", data_dir=str(tmp_path))
        pairs_script.main(pairs_script.PairsConfig(**settings, val_fraction=0.1))
    out = train_on("fit", 32)
    assert "longer than block_size" not in out and "have no targets" not in out
    for name, unit, prompts, needed in (("long", "pairs", "prompts", 201), ("chat", "turns", "messages", 220)):
        ids = open_dataset(tmp_path / name).train[0].ids
        lengths, out = np.diff(np.flatnonzero(np.concatenate([[256], ids]) == 256)), train_on(name, 32)
        assert f"{name}: {(lengths > 33).sum()} of {len(lengths)} {unit} are longer than block_size=32" in out
        assert f"do not see all of their {prompts}; set --block_size={needed}," in out
        assert re.search(rf"{name}: [\d,]+ of {len(ids) - 32:,} possible windows have no targets", out)
        assert "longer than block_size" not in train_on(name, needed)


def test_a_vocabulary_that_is_too_large_for_the_text_is_reported_before_the_run(tiny, data_dir, tmp_path, capsys):
    cfg = TextConfig(inputs=(str(data_dir / "verse.txt"),), name="bpe", tokenizer="bpe", vocab_size=300)
    prepare_text.main(cfg.replace(data_dir=str(tmp_path)))
    capsys.readouterr()
    settings = dict(data_dir=str(tmp_path), dataset="bpe", max_iters=1)
    train(tiny(**settings))
    assert "the vocabulary of 300 is large for " in capsys.readouterr().out
    train(tiny(**settings, init_from=tiny().out_dir, out_dir=str(tmp_path / "finetuned")))
    train(tiny(max_iters=1, out_dir=str(tmp_path / "characters")))
    assert "is large for" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "args, is_reported",
    [(["--optimizer=muon"], True), (["--optimizer=muon", "--muon_learning_rate=0.02"], False), ([], False)],
)
def test_a_learning_rate_that_affects_only_part_of_the_model_is_reported(tiny, capsys, args, is_reported):
    """In a recipe with Muon, --learning_rate affects only embeddings, norms and biases."""
    cfg = settings.load(TrainConfig, ["--learning_rate=2e-3", *args])
    train(tiny(max_iters=1).replace(cfg.origins, optimizer=cfg.optimizer, learning_rate=2e-3))
    assert ("learning_rate=0.002 is AdamW's" in capsys.readouterr().out) == is_reported


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
def test_the_printed_command_to_continue_trains_further(run_file, args, config, monkeypatch, capsys):
    """After --minutes, it was refused or trained no step. After patience, it trained no step either."""
    SimulatedMachine(monkeypatch, lambda step: 0.1, lambda step: 0.1)
    Path("y.py").write_text(config)

    def run_command(*args: str) -> str:
        monkeypatch.setattr(sys, "argv", ["train.py", *args])
        train_script.main(settings.load(TrainConfig, list(args)))
        return capsys.readouterr().out

    first_output = run_command("x.py", "y.py", "--out_dir=out", *args)
    step = run_folder.last_state(Path("out"))["step"]
    (command,) = re.findall("^continue:(.*)", first_output, re.MULTILINE)
    program, script, *continue_args = shlex.split(command)
    assert (program, script) == ("python", "train.py")
    assert "before its warmup does" not in run_command(*continue_args)
    assert run_folder.last_state(Path("out"))["step"] > step
    assert len(read_metrics("out")) > 1


def test_a_run_with_more_steps_than_max_iters_is_reported(tiny, capsys):
    train(tiny(max_iters=4))
    capsys.readouterr()
    train(tiny(max_iters=3, init_from="resume"))
    out = capsys.readouterr().out
    assert "nothing to train: 4 steps are done, more than max_iters=3" in out and "sample from the model" not in out


def test_the_losses_of_several_data_sets_are_printed_after_their_mean():
    losses = {"val_loss": 2.5, "val_loss/verse": 2.0, "val_loss/prose": 3.00004}
    assert format_losses(losses) == " (verse 2.0000, prose 3.0000)" and format_losses({"val_loss": 2.5}) == ""
