import hashlib
import json
import math
import os
import pickle
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import sample
import train as train_script
from folio import UserError, checkpoint, configurator, convert, find_data
from folio.budget import Budget, evaluation_seconds, with_time_budget
from folio.configurator import COMMAND_LINE, ROOT
from folio.find_data import find_datasets
from folio.kernels import compile_loss
from folio.metrics import Metrics
from folio.runtime import Runtime, resolve_runtime
from folio.schedule import STEP_COUNTS, Schedule, StepCounts
from folio.session import TrainingError
from folio.shards import DatasetError, Shard
from folio.windows import Mixture, ValidationWindows
from model import GPT, GPTConfig
from prepare import text as prepare_text
from train import TrainConfig, mean_loss, train


def logged(out_dir: str) -> list[dict]:
    return [json.loads(line) for line in Path(out_dir, "metrics.jsonl").read_text().splitlines()]


def losses(out_dir: str) -> list[tuple]:
    return [(line["step"], line["loss"], line["val_loss"], line["lr"], line["grad_norm"]) for line in logged(out_dir)]


def assert_same_end(first: str, second: str) -> None:
    """Weights, moments, place in the data and logged losses of two runs are the same to the bit."""
    a, b = checkpoint.load(Path(first)), checkpoint.load(Path(second))
    assert a.state["step"] == b.state["step"] and a.state["next_sequence"] == b.state["next_sequence"]
    for mine, other in ((a.model, b.model), (a.optimizer(), b.optimizer())):
        assert mine.keys() == other.keys() and mine
        for name in mine:
            assert torch.equal(mine[name], other[name]), name
    assert losses(first) == losses(second)


def test_a_run_learns_and_leaves_its_record(tiny, text, capsys):
    cfg = tiny(max_iters=60, eval_interval=20, log_interval=5)
    best = train(cfg).best_val_loss
    record = logged(cfg.out_dir)
    assert [line["step"] for line in record] == [1, *range(5, 61, 5)]
    assert [line["step"] for line in record if line["val_loss"] is not None] == [20, 40, 60]
    assert abs(record[0]["loss"] - np.log(len(set(text)))) < 0.2 and best < 3.0
    assert best == min(line["val_loss"] for line in record if line["val_loss"] is not None)
    assert record[-1]["tokens"] == 60 * 4 * 32 and record[-1]["tokens_per_second"] > 0 and record[-1]["peak_memory"] > 0
    samples = [json.loads(line) for line in Path(cfg.out_dir, "samples.jsonl").read_text().splitlines()]
    assert [(sample["step"], len(sample["text"])) for sample in samples] == [(20, 200), (40, 200), (60, 200)]
    saved = checkpoint.load(Path(cfg.out_dir), "best")
    assert saved.state["best_val_loss"] == best and saved.state["config"]["n_layer"] == 2
    out = capsys.readouterr().out
    assert "step 1/60: loss 3." in out and f"best validation loss {best:.4f}" in out


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_stopping_and_going_on_changes_no_bit(tiny, tmp_path, optimizer):
    tiny = partial(tiny, optimizer=optimizer)
    straight, parts = tiny(), tiny(out_dir=str(tmp_path / "parts"))
    train(straight)
    # the rate depends on max_iters, so the first part is told where the whole ends
    train(tiny(out_dir=parts.out_dir, max_iters=5, lr_decay_iters=12))
    train(tiny(out_dir=parts.out_dir, max_iters=9, lr_decay_iters=12, init_from="resume"))
    train(tiny(out_dir=parts.out_dir, init_from="resume"))
    mine = [(line["step"], line["loss"]) for line in logged(straight.out_dir)]
    assert mine == [(line["step"], line["loss"]) for line in logged(parts.out_dir)]
    a, b = checkpoint.load(Path(straight.out_dir)), checkpoint.load(Path(parts.out_dir))
    assert all(torch.equal(a.model[name], b.model[name]) for name in a.model)
    assert all(torch.equal(a.optimizer()[name], b.optimizer()[name]) for name in a.optimizer())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_run_goes_on_to_the_bit(tiny, tmp_path, monkeypatch, number):
    straight, stopped = tiny(), tiny(out_dir=str(tmp_path / "stopped"))
    train(straight)
    log = Metrics.log

    def interrupted(self, line):
        log(self, line)
        if line["step"] == 7:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Metrics, "log", interrupted)
    train(stopped)
    monkeypatch.undo()
    assert checkpoint.last_state(Path(stopped.out_dir))["step"] == 8  # the next step
    assert checkpoint.load(Path(stopped.out_dir)).state["stopped_by"] == signal.Signals(number).name
    train(tiny(out_dir=stopped.out_dir, init_from="resume"))
    assert_same_end(straight.out_dir, stopped.out_dir)


def test_numbers_that_are_read_a_step_late_are_the_same(tiny, tmp_path, monkeypatch):
    at_once, late = (tiny(max_iters=13, log_interval=2, out_dir=str(tmp_path / name)) for name in "ab")
    train(at_once)
    monkeypatch.setattr(Runtime, "runs_ahead", True)
    train(late)
    assert losses(at_once.out_dir) == losses(late.out_dir)
    assert [line["step"] for line in logged(late.out_dir)] == [1, 2, 4, 6, 8, 10, 12, 13]


def test_evaluations_do_not_shift_training(tiny, tmp_path):
    often, seldom = tiny(eval_interval=2), tiny(eval_interval=100, out_dir=str(tmp_path / "seldom"))
    train(often)
    train(seldom)
    a, b = checkpoint.load(Path(often.out_dir)), checkpoint.load(Path(seldom.out_dir))
    assert all(torch.equal(a.model[name], b.model[name]) for name in a.model)


def test_accumulation_is_one_large_batch(tiny, tmp_path):
    whole = tiny(batch_size=8, dropout=0.0, eval_iters=None)
    parts = tiny(batch_size=2, total_batch_tokens=8 * 32, dropout=0.0, eval_iters=None, out_dir=str(tmp_path / "parts"))
    train(whole)
    train(parts)
    a, b = checkpoint.load(Path(whole.out_dir)), checkpoint.load(Path(parts.out_dir))
    assert a.state["next_sequence"] == b.state["next_sequence"] == 12 * 8
    for name in a.model:
        torch.testing.assert_close(a.model[name], b.model[name], atol=1e-4, rtol=1e-3)
    for one, other in zip(losses(whole.out_dir), losses(parts.out_dir), strict=True):
        assert one[1] == pytest.approx(other[1], rel=1e-4)
        assert one[4] == pytest.approx(other[4], rel=1e-3)


def test_one_by_eight_is_eight_by_one_with_unequal_masks(tiny, masked_dir, tmp_path, capsys):
    """Each counted target of the step weighs the same, in whichever micro-batch it is, and one without any adds 0."""
    runs = {}
    for B, accumulation in ((8, 1), (1, 8), (2, 4)):
        out = str(tmp_path / f"{B}x{accumulation}")
        same = dict(data_dir=masked_dir, dropout=0.0, out_dir=out, max_iters=8, eval_iters=None)
        train(tiny(**same, batch_size=B, gradient_accumulation_steps=accumulation))
        runs[B] = losses(out)
    assert "of which some do not count" in capsys.readouterr().out
    windows = Mixture(find_datasets("verse", masked_dir), 32, 1337, "epoch")
    _, y = windows.batch(0, 64)
    counted = (y != -1).sum(axis=1)
    assert counted.min() == 0 and len(set(counted.tolist())) > 3
    for B in (1, 2):
        for mine, other in zip(runs[B], runs[8], strict=True):
            assert [n or 0 for n in mine] == pytest.approx([n or 0 for n in other], rel=2e-4)


def test_the_loss_is_that_of_the_counted_targets(tiny, masked_dir):
    """Against torch's own cross-entropy over the chosen logits; and what is not chosen has exactly no gradient."""
    data = Mixture(find_datasets("verse", masked_dir), 32, 1337, "epoch")
    x, y = map(torch.from_numpy, data.batch(0, 32))  # so many that some target counts, whatever the seed
    model = GPT(GPTConfig(block_size=32, vocab_size=data.vocab_size, n_layer=1, n_head=1, n_embd=16), 1)
    logits, loss = model(x, y)
    logits.retain_grad()
    loss.backward()
    chosen = y != -1
    assert loss.item() == pytest.approx(nn.functional.cross_entropy(logits[chosen], y[chosen]).item(), rel=1e-6)
    assert (logits.grad[~chosen] == 0).all() and (logits.grad[chosen] != 0).any(dim=-1).all()
    model.zero_grad()
    _, nothing = model(x, torch.full_like(y, -1))
    nothing.backward()
    assert nothing.item() == 0 and all((p.grad == 0).all() for p in model.parameters())


def test_a_step_without_any_target_that_counts_changes_nothing_but_decay(tiny, masked_dir):
    folder = Path(masked_dir, "verse")
    meta = json.loads((folder / "meta.json").read_text())
    empty = bytes(meta["splits"]["train"][0]["tokens"])
    (folder / "train_mask.bin").write_bytes(empty)
    meta["splits"]["train"][0]["mask_sha256"] = hashlib.sha256(empty).hexdigest()
    (folder / "meta.json").write_text(json.dumps(meta))
    train(tiny(data_dir=masked_dir, max_iters=3))
    assert [line[1] for line in losses(tiny().out_dir)] == [0.0, 0.0, 0.0]


@pytest.fixture
def mixed_dir(data_dir, tmp_path) -> str:
    """Two data sets of one tokenizer, "verse" and "prose", and one of another, "bytes"."""
    shutil.copytree(data_dir / "verse", tmp_path / "mixed" / "verse")
    source = tmp_path / "prose.txt"
    source.write_text("The king and the sword.\n" * 300)
    for name, made_with in (("prose", str(data_dir / "verse")), ("bytes", "byte")):
        cfg = prepare_text.TextConfig(
            inputs=(str(source),), name=name, tokenizer=made_with, data_dir=str(tmp_path / "mixed"), on_unknown="skip"
        )
        prepare_text.main(cfg)
    return str(tmp_path / "mixed")


def test_a_mixture_trains_resumes_and_tells_its_epochs(tiny, mixed_dir, tmp_path, capsys):
    mixed = dict(dataset="verse:0.7,prose:0.3", data_dir=mixed_dir)
    straight, split = str(tmp_path / "straight"), str(tmp_path / "split")
    train(tiny(**mixed, out_dir=straight))
    out = capsys.readouterr().out
    assert "verse: 18,581 training" in out and "70.0% of the sequences" in out and "30.0% of the sequences" in out
    assert "trained for " in out and " epochs of prose (verse " in out
    train(tiny(**mixed, out_dir=split, max_iters=6, lr_decay_iters=12))
    train(tiny(**mixed, out_dir=split, lr_decay_iters=12, init_from="resume"))
    a, b = checkpoint.load(Path(straight)), checkpoint.load(Path(split))
    assert all(torch.equal(t, b.model[name]) for name, t in a.model.items())
    last = logged(straight)[-1]
    assert last["val_loss"] == pytest.approx(0.7 * last["val_loss/verse"] + 0.3 * last["val_loss/prose"])
    assert last["epochs/prose"] == pytest.approx(15 / ((6480 - 32) // 32))
    for other in ("verse:0.5,prose:0.5", "verse"):
        with pytest.raises(UserError, match="is not this run's original data"):
            train(tiny(**{**mixed, "dataset": other}, out_dir=split, init_from="resume", max_iters=20))
    with pytest.raises(UserError, match=r"bytes was made with another tokenizer \(byte, 257 tokens\) than .*verse"):
        train(tiny(dataset="verse,bytes", data_dir=mixed_dir, out_dir=str(tmp_path / "new")))


def test_the_validation_loss_is_that_of_every_token(seed):
    """At any batch size it is the mean over all tokens, not over batches."""
    data = [Shard(np.random.default_rng(seed).integers(20, size=203).astype("<u2"))]
    model = GPT(GPTConfig(block_size=8, vocab_size=20, n_layer=1, n_head=1, n_embd=8), seed)
    runtime = resolve_runtime("cpu", "float32", False)
    total = 0.0
    for start in range(0, 202, 8):
        row = torch.from_numpy(data[0].ids[None, start : start + 9].astype(int))
        total += model(row[:, :-1], row[:, 1:])[1].item() * (row.shape[1] - 1)
    expected = total / 202
    loss_fn = compile_loss(model, runtime)
    for batch_size in (1, 3, 26, 100):
        assert mean_loss(loss_fn, ValidationWindows(data, 8, 20), runtime, batch_size) == pytest.approx(
            expected, rel=1e-5
        )


def test_an_earlier_run_is_not_overwritten_unasked(tiny):
    train(tiny())
    before = checkpoint.load(Path(tiny().out_dir))
    with pytest.raises(UserError, match=r"--init_from=resume.*--overwrite=True"):
        train(tiny(seed=2))
    assert all(torch.equal(t, before.model[name]) for name, t in checkpoint.load(before.path).model.items())
    train(tiny(seed=2, max_iters=6, overwrite=True))
    assert checkpoint.last_state(Path(tiny().out_dir))["step"] == 6
    assert [line["step"] for line in logged(tiny().out_dir)] == [*range(1, 7)]


def test_a_run_does_not_go_on_as_another(tiny):
    train(tiny(max_iters=3))
    with pytest.raises(UserError, match=r"n_layer=3: the checkpoint .* has n_layer=2"):
        train(tiny(init_from="resume", n_layer=3))
    with pytest.raises(UserError, match="block_size: 32 before, 16 now; seed: 1337 before, 5 now"):
        train(tiny(init_from="resume", block_size=16, seed=5))
    with pytest.raises(UserError, match="holds no checkpoint"):
        train(tiny(init_from="resume", out_dir="nowhere"))


@pytest.mark.parametrize(
    "change", [dict(sampling="random"), dict(optimizer="muon"), dict(seed=2), dict(bias=True), dict(activation="gelu")]
)
def test_what_defines_a_run_does_not_change_in_it(tiny, change):
    train(tiny(max_iters=3))
    with pytest.raises(UserError, match=next(iter(change))):
        train(tiny(init_from="resume", max_iters=6, **change))
    assert checkpoint.last_state(Path(tiny().out_dir))["step"] == 3


def test_finetuning_takes_the_weights_and_their_shape(tiny, tmp_path, capsys):
    first = tiny(max_iters=30, eval_interval=30)
    before = train(first).best_val_loss
    new = dict(init_from=first.out_dir, out_dir=str(tmp_path / "new"), max_iters=6, learning_rate=1e-5)
    default = {name: getattr(train_script.TrainConfig, name) for name in ("n_layer", "n_head", "n_embd", "block_size")}
    after = train(tiny(**new, **default)).best_val_loss
    assert after == pytest.approx(before, abs=0.05)
    assert checkpoint.load(tmp_path / "new").state["config"]["n_layer"] == 2
    with pytest.raises(UserError, match=r"n_layer=3: the checkpoint .* has n_layer=2"):
        train(tiny(**new, n_layer=3))
    train(tiny(**{**new, **default, "init_from": "resume", "max_iters": 8}))  # and so does going on with it
    with pytest.raises(UserError, match="init_from=gone: it is not scratch, resume, gpt2"):
        train(tiny(**{**new, "init_from": "gone"}))
    train(tiny(**new, block_size=16, overwrite=True))
    assert checkpoint.load(tmp_path / "new").state["model"]["block_size"] == 16
    assert "block_size 16: the first 16 of the 32 trained positions are used" in capsys.readouterr().out


def test_another_tokenizer_is_refused(tiny, tmp_path):
    train(tiny(max_iters=3))
    other = nanogpt_folder(tmp_path / "other")
    with pytest.raises(UserError, match=r"another tokenizer \(char, 4\d tokens\) than .*\(char, 3 tokens\)"):
        train(tiny(init_from=tiny().out_dir, out_dir="new", dataset=str(other)))


def nanogpt_folder(folder: Path) -> Path:
    folder.mkdir()
    np.tile(np.array([0, 1, 2, 1], dtype=np.uint16), 100).tofile(folder / "train.bin")
    np.tile(np.array([0, 1, 2, 1], dtype=np.uint16), 20).tofile(folder / "val.bin")
    characters = "\nab"
    meta = dict(vocab_size=3, itos=dict(enumerate(characters)), stoi={c: i for i, c in enumerate(characters)})
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return folder


def test_a_data_folder_of_nanogpt_trains_and_samples(tiny, tmp_path, capsys):
    cfg = tiny(dataset=str(nanogpt_folder(tmp_path / "theirs")), max_iters=150, learning_rate=1e-2, dropout=0.0)
    assert train(cfg).best_val_loss < 0.5
    capsys.readouterr()
    sample.main(sample.SampleConfig(out_dir=cfg.out_dir, start="\na", max_new_tokens=6, temperature=0.0))
    assert capsys.readouterr().out == "\naba\naba\n\n"[: 2 + 6] + "\n"


def test_a_diverged_run_stops_and_saves_nothing_of_it(tiny):
    cfg = tiny(max_iters=200, eval_interval=1, grad_clip=0.0, learning_rate=1e30, lr_schedule="constant")
    with pytest.raises(TrainingError, match=r"the validation loss is nan.*smaller --learning_rate"):
        train(cfg)
    assert not checkpoint.exists(Path(cfg.out_dir))


@pytest.fixture
def poisoned(monkeypatch):
    """Training in which the gradients of some steps are not finite, as a faulty GPU or an overflow makes them."""

    def poison(steps: range, value: float = float("nan")) -> None:
        clip, taken = nn.utils.clip_grad_norm_, iter(range(1, 1000))

        def clip_poisoned(parameters, *args):
            parameters = list(parameters)
            if next(taken) in steps:
                parameters[3].grad[0] = value
            return clip(parameters, *args)

        monkeypatch.setattr(nn.utils, "clip_grad_norm_", clip_poisoned)

    return poison


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_gradient_reaches_nothing(tiny, poisoned, value):
    poisoned(range(5, 6), value)
    first = tiny(max_iters=5, lr_decay_iters=12, save_interval_minutes=None, eval_interval=4, keep_last=5)
    train(first)
    before, after = (checkpoint.load(Path(first.out_dir, f"step-{step:06d}")) for step in (4, 5))
    assert all(torch.equal(before.model[name], after.model[name]) for name in before.model)
    assert all(torch.equal(before.optimizer()[name], after.optimizer()[name]) for name in before.optimizer())
    assert after.state["guard"]["skipped"] == 1 and after.state["next_sequence"] == 5 * 4
    assert [line["skipped"] for line in logged(first.out_dir)] == [0, 0, 0, 0, 1]
    record = json.loads(Path(first.out_dir, "skipped", "step-000005.json").read_text(encoding="utf-8"))
    assert record["sequences"] == [16, 19] and len(record["text"]) == 4 and len(record["text"][0]) == 32
    assert [step["step"] for step in record["before"]] == [1, 2, 3, 4]
    train(tiny(init_from="resume"))
    assert checkpoint.load(Path(first.out_dir)).state["guard"] == {**after.state["guard"], "in_a_row": 0}


def test_many_bad_steps_in_a_row_stop_the_run(tiny, poisoned):
    poisoned(range(7, 100))
    with pytest.raises(TrainingError, match=r"stopped at step 10: the gradient is not finite.*--dtype=float32"):
        train(tiny(max_bad_steps=4))
    assert checkpoint.last_state(Path(tiny().out_dir))["step"] == 6
    assert all(tensor.isfinite().all() for tensor in checkpoint.load(Path(tiny().out_dir)).model.values())
    assert TrainingError.exit_code == 1


def test_weights_that_are_not_finite_are_told(tiny, monkeypatch):
    train(tiny(max_iters=3))
    init = GPT.from_tensors.__func__

    def broken(cls, config, tensors):
        tensors["transformer.ln_f.weight"][0] = float("nan")
        return init(cls, config, tensors)

    monkeypatch.setattr(GPT, "from_tensors", classmethod(broken))
    with pytest.raises(TrainingError, match="the weights are not finite"):
        train(tiny(init_from="resume", max_bad_steps=2))
    assert checkpoint.last_state(Path(tiny().out_dir))["step"] == 3


def test_a_damaged_shard_stops_the_run_before_it_learns_from_it(tiny, data_dir, tmp_path):
    folder = shutil.copytree(data_dir / "verse", tmp_path / "verse")
    ids = np.fromfile(folder / "train.bin", dtype="<u2")
    ids[:] = np.where(np.arange(len(ids)) % 1000 == 0, 60_000, ids)
    ids.tofile(folder / "train.bin")
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    meta["splits"]["train"][0]["sha256"] = hashlib.sha256(ids.tobytes()).hexdigest()
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    with pytest.raises(UserError, match="token id 60000 in the shards is outside the vocabulary"):
        train(tiny(dataset=str(folder), max_iters=100))


def test_spikes_are_skipped_if_asked(tiny, poisoned):
    poisoned(range(110, 112), 1e4)
    train(tiny(max_iters=115, eval_interval=200, skip_spikes=20.0, log_interval=50))
    assert sorted(path.name for path in Path(tiny().out_dir, "skipped").iterdir()) == [
        "step-000110.json",
        "step-000111.json",
    ]
    assert logged(tiny().out_dir)[-1]["skipped"] == 2
    record = json.loads(Path(tiny().out_dir, "skipped", "step-000110.json").read_text(encoding="utf-8"))
    assert [step["step"] for step in record["before"]] == list(range(60, 110))


def test_sigusr1_saves_and_goes_on(tiny, monkeypatch):
    saved, save, log = [], checkpoint.save, Metrics.log

    def asked(self, line):
        log(self, line)
        if line["step"] == 3:
            os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr(Metrics, "log", asked)
    monkeypatch.setattr(checkpoint, "save", lambda out, step, *a, **k: saved.append(step) or save(out, step, *a, **k))
    train(tiny(eval_interval=100))
    assert saved == [4, 12]


def test_time_saves_too(tiny, monkeypatch):
    saved, save = [], checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda out, step, *a, **k: saved.append(step) or save(out, step, *a, **k))
    train(tiny(eval_interval=100, save_interval_minutes=1e-9, max_iters=4, always_save_checkpoint=False))
    assert saved == [1, 2, 3, 4]


def test_what_changes_in_a_run_is_told_and_recorded(tiny, capsys):
    train(tiny(max_iters=3))
    train(tiny(max_iters=6, learning_rate=1e-3, init_from="resume"))
    assert "learning_rate 0.001 (was 0.003)" in capsys.readouterr().out
    train(tiny(max_iters=9, learning_rate=1e-3, init_from="resume", batch_size=2, gradient_accumulation_steps=2))
    assert "not bitwise identical" in capsys.readouterr().out
    first, second = checkpoint.load(Path(tiny().out_dir)).state["resumes"]
    assert first == {
        "step": 3,
        "after": "its end",
        "changes": {"max_iters": [3, 6], "learning_rate": [0.003, 0.001]},
        "exact": True,
    }
    assert second["step"] == 6 and not second["exact"] and second["changes"]["batch_size"] == [4, 2]
    with pytest.raises(UserError, match="batch_size \\* gradient_accumulation_steps: 4 before, 8 now"):
        train(tiny(init_from="resume", batch_size=8))


@pytest.fixture
def small_disk(tmp_path: Path):
    """A disk of 1,500 KiB; a checkpoint of the tiny model takes some 340. Needs root on Linux."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(folder)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no small disk can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_does_not_end_a_run(tiny, small_disk, monkeypatch, capsys):
    """It is told, training goes on, and saves again when there is room."""
    ballast, evaluate = small_disk / "ballast", train_script.evaluate

    def fill(*args):
        if evaluations[0] == 1:
            ballast.write_bytes(bytes(900_000))
        if evaluations[0] == 3:
            ballast.unlink()
        evaluations[0] += 1
        return evaluate(*args)

    evaluations = [0]
    monkeypatch.setattr(train_script, "evaluate", fill)
    out_dir = small_disk / "out"
    train(tiny(out_dir=str(out_dir), max_iters=10, eval_interval=2, keep_last=1, async_save=False))
    out = capsys.readouterr().out
    assert [step for step in (2, 4, 6, 8, 10) if f"step {step} could not be saved" in out] == [4, 6]
    assert checkpoint.load(out_dir).state["step"] == 10
    assert not list(out_dir.glob(".*"))


def test_patience_holds_on_a_full_disk(tiny, monkeypatch):
    """An evaluation that could not be saved was not counted, and the run went on to max_iters."""
    save = checkpoint.save

    def full(out_dir, step, *args):
        if step > 2:
            raise OSError(28, "No space left on device")
        return save(out_dir, step, *args)

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(TrainingError, match="step 8 could not be saved"):
        train(tiny(max_iters=50, eval_interval=2, learning_rate=0.0, min_lr=0.0, patience=3))


@pytest.mark.parametrize("async_save", [True, False])
def test_checkpoints_are_written_behind_the_run(tiny, monkeypatch, async_save):
    """The first is held up until three steps later, where the run does not wait; the one after it waits for it."""
    save, log = checkpoint.save, Metrics.log
    later, order = threading.Event(), []

    def held_up(out_dir, step, *args):
        order.append(f"begin {step}")
        if step == 4:
            later.wait(timeout=30 if async_save else 0.2)
        path = save(out_dir, step, *args)
        order.append(f"end {step}")
        return path

    def logged_step(self, line):
        log(self, line)
        order.append(line["step"])
        if line["step"] == 7:
            later.set()

    monkeypatch.setattr(checkpoint, "save", held_up)
    monkeypatch.setattr(Metrics, "log", logged_step)
    train(tiny(max_iters=8, eval_interval=4, async_save=async_save))
    assert (order.index("end 4") > order.index(7)) == async_save
    assert order.index("end 4") < order.index("begin 8") < order.index("end 8")
    a, b = (checkpoint.load(Path(tiny().out_dir, f"step-00000{step}")) for step in (4, 8))
    assert not torch.equal(a.model["transformer.wte.weight"], b.model["transformer.wte.weight"])


def test_a_last_step_that_cannot_be_saved_is_an_error(tiny, small_disk):
    out_dir = small_disk / "out"
    train(tiny(out_dir=str(out_dir), max_iters=2, warmup_iters=0))
    (small_disk / "ballast").write_bytes(bytes(900_000))
    with pytest.raises(TrainingError, match=r"step 4 could not be saved .*; the checkpoints before it are unchanged"):
        train(tiny(out_dir=str(out_dir), max_iters=4, warmup_iters=0, init_from="resume"))
    assert checkpoint.load(out_dir).state["step"] == 2


def test_a_folder_that_cannot_be_written_is_told_at_the_start(tiny, small_disk, tmp_path):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(UserError, match=r"out_dir=.*cannot be written .*; choose another --out_dir"):
        train(tiny(out_dir=str(small_disk / "out")))
    (tmp_path / "file").write_text("")
    for impossible in (tmp_path / "file" / "out", tmp_path / ("x" * 300)):
        with pytest.raises(UserError, match=r"out_dir=.*cannot be written"):
            train(tiny(out_dir=str(impossible)))


def test_patience_ends_a_run_that_does_not_improve(tiny):
    cfg = tiny(max_iters=50, eval_interval=2, learning_rate=0.0, min_lr=0.0, patience=3, always_save_checkpoint=False)
    train(cfg)
    assert checkpoint.last_state(Path(cfg.out_dir))["step"] == 8  # the first is the best, then three without
    assert checkpoint.load(Path(cfg.out_dir), "best").state["step"] == 2


def test_only_better_ones_are_saved_if_asked(tiny, monkeypatch):
    saved = []
    save = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda out, step, *a, **k: saved.append(step) or save(out, step, *a, **k))
    train(tiny(max_iters=9, eval_interval=2, learning_rate=0.0, min_lr=0.0, always_save_checkpoint=False))
    assert saved == [2, 9]  # and the last step
    saved.clear()
    train(tiny(max_iters=9, eval_interval=2, learning_rate=0.0, min_lr=0.0, overwrite=True))
    assert saved == [2, 4, 6, 8, 9]


def test_eval_only_says_the_loss_and_touches_nothing(tiny, capsys):
    best = train(tiny()).best_val_loss
    files = {path: path.stat().st_mtime_ns for path in Path(tiny().out_dir).rglob("*")}
    again = train(tiny(eval_only=True, init_from="resume")).best_val_loss
    assert again == logged(tiny().out_dir)[-1]["val_loss"] >= best
    assert files == {path: path.stat().st_mtime_ns for path in Path(tiny().out_dir).rglob("*")}


def test_a_missing_data_set_is_prepared_by_the_script_of_its_name(tiny, tmp_path, monkeypatch):
    (tmp_path / "prepare").mkdir()
    source = Path(ROOT, "prepare", "shakespeare_char.py").read_text(encoding="utf-8")
    root = f"Path({str(ROOT)!r})"
    source = source.replace("Path(__file__).resolve().parent.parent", root)
    text = tmp_path / "text.txt"
    text.write_text("some words of my own\n" * 100, encoding="utf-8")
    source = source.replace("str(tiny_shakespeare())", repr(str(text))).replace('"shakespeare_char"', "'mine'")
    (tmp_path / "prepare" / "mine.py").write_text(source, encoding="utf-8")
    monkeypatch.setattr(find_data, "ROOT", tmp_path)
    train(tiny(dataset="mine", data_dir=None, max_iters=3))
    assert (tmp_path / "data" / "mine" / "meta.json").exists()


def test_all_settings_are_printed_before_any_work(tiny, capsys):
    train_script.main(tiny(print_config=True, dataset="prose"))
    out = capsys.readouterr().out.splitlines()
    assert "n_layer = 2" in out and "dataset = 'prose'" in out and len(out) == len(fields(tiny()))
    assert not Path(tiny().out_dir).exists()


def test_only_the_projects_own_scripts_are_run(tiny, tmp_path):
    """A data set given by a path once ran the Python file beside it."""
    (tmp_path / "other.py").write_text("raise SystemExit('this must not run')")
    with pytest.raises(UserError, match="there is no"):
        train(tiny(dataset=str(tmp_path / "other")))


def test_a_missing_data_set_says_what_to_do(tiny, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="prepared data sets: verse; to use your own text: python prepare"):
        train(tiny(dataset="prose"))
    (tmp_path / "prepare").mkdir()
    (tmp_path / "prepare" / "broken.py").write_text("raise SystemExit(1)")
    monkeypatch.setattr(find_data, "ROOT", tmp_path)
    with pytest.raises(UserError, match=r"prepare/broken\.py failed"):
        train(tiny(dataset="broken"))


def test_wandb_offline_goes_on_in_its_run(tiny):
    train(tiny(wandb_log=True, max_iters=3))
    first = checkpoint.load(Path(tiny().out_dir)).state["wandb_id"]
    train(tiny(wandb_log=True, max_iters=6, init_from="resume"))
    assert first and checkpoint.load(Path(tiny().out_dir)).state["wandb_id"] == first
    assert list(Path(tiny().out_dir, "wandb").glob(f"offline-run-*-{first}"))


def test_bfloat16_on_a_cpu(tiny):
    assert train(tiny(dtype="bfloat16", max_iters=30)).best_val_loss < 3.2


def test_float16_finds_its_loss_scale_and_keeps_it(tiny, tmp_path, monkeypatch):
    """What a GPU without bfloat16 does, in the CPU's float16: a scale that overflows at first, and exact resuming."""
    half = Runtime(torch.device("cpu"), torch.float16, False, "float16")
    monkeypatch.setattr(train_script, "resolve_runtime", lambda *args: half)
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**36))
    straight, parts = tiny(max_iters=40), tiny(max_iters=40, out_dir=str(tmp_path / "parts"))
    train(straight)
    train(tiny(max_iters=20, lr_decay_iters=40, out_dir=parts.out_dir))
    train(tiny(max_iters=40, init_from="resume", out_dir=parts.out_dir))
    a, b = checkpoint.load(Path(straight.out_dir)), checkpoint.load(Path(parts.out_dir))
    assert all(torch.equal(a.model[name], b.model[name]) for name in a.model)
    assert a.state["grad_scaler"] == b.state["grad_scaler"] and 1 < a.state["grad_scaler"]["scale"] < 2.0**36
    assert a.state["guard"]["skipped"] == 0
    taken = a.optimizer()["transformer.wte.weight/step"].item()
    assert 20 < taken < 40  # some were passed over while the scale came down
    assert logged(straight.out_dir)[-1]["loss"] < logged(straight.out_dir)[0]["loss"]


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("mode", [True, "reduce-overhead"])
def test_compiled_on_a_cpu(tiny, tmp_path, mode):
    eager = train(tiny(dropout=0.0)).best_val_loss
    compiled = train(tiny(dropout=0.0, compile=mode, out_dir=str(tmp_path / "compiled")))
    assert compiled.best_val_loss == pytest.approx(eager, abs=1e-3)


@pytest.mark.gpu
def test_captured_graphs_on_a_gpu(tiny, tmp_path):
    eager = train(tiny(device="cuda", dropout=0.0)).best_val_loss
    captured = tiny(device="cuda", dropout=0.0, compile="reduce-overhead", out_dir=str(tmp_path / "captured"))
    assert train(captured).best_val_loss == pytest.approx(eager, abs=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_on_a_gpu(tiny, dtype, monkeypatch):
    cfg = tiny(device="cuda", dtype=dtype, max_iters=60)
    assert train(cfg).best_val_loss < 3.0
    train(tiny(device="cuda", dtype=dtype, max_iters=70, init_from="resume"))
    assert checkpoint.last_state(Path(cfg.out_dir))["step"] == 70


@pytest.mark.gpu
def test_a_gpu_repeats_itself_when_deterministic(tiny, tmp_path):
    settings = dict(device="cuda", dtype="bfloat16", compile=False, deterministic=True)
    straight, parts = tiny(**settings), tiny(**settings, out_dir=str(tmp_path / "parts"))
    train(straight)
    train(tiny(**settings, out_dir=parts.out_dir, max_iters=6, lr_decay_iters=12))
    train(tiny(**settings, out_dir=parts.out_dir, init_from="resume"))
    assert_same_end(straight.out_dir, parts.out_dir)


# --- a budget in minutes ----------------------------------------------------------------------------------------------


def counts_in(cfg: TrainConfig, seconds: float, step_seconds: float, val_tokens: int = 0, origins: dict | None = None):
    """The counts of steps that fit into so many seconds."""
    evaluation = evaluation_seconds(val_tokens, cfg.step_tokens, step_seconds)
    return with_time_budget(cfg.step_counts, cfg.minutes, seconds, step_seconds, evaluation, origins or {})


def test_minutes_stretch_the_recipe():
    recipe = TrainConfig(block_size=10, batch_size=2, max_iters=1000, warmup_iters=50, eval_interval=500, minutes=1)
    recipe = replace(recipe, lr_schedule="wsd", wsd_decay_iters=700)
    found = counts_in(recipe, 61, step_seconds=0.1)
    counts = (found.max_iters, found.warmup_iters, found.wsd_decay_iters, found.eval_interval, found.lr_decay_iters)
    assert counts == (600, 30, 420, 300, None)
    assert counts_in(recipe, 61, step_seconds=0.1, val_tokens=6000).max_iters == 400  # 2 evaluations of 10 s
    given = dict(eval_interval=COMMAND_LINE)  # an evaluation of 10 s every 500 steps
    assert counts_in(recipe, 71.01, 0.1, 6000, given).max_iters == 500
    assert counts_in(replace(recipe, warmup_iters=0), 61, 0.1).warmup_iters == 0
    odd = counts_in(recipe, 57.95, step_seconds=0.1)  # rounded down, there would be a third evaluation
    assert (odd.max_iters, odd.eval_interval) == (569, 285)
    with pytest.raises(UserError, match="minutes=1: it is too short: a step takes 30 s and an evaluation 0 s here"):
        counts_in(recipe, 20, step_seconds=30)


def test_a_run_of_some_minutes_is_a_run_like_any(tiny, monkeypatch, tmp_path, capsys):
    """What was measured leaves no trace: the same counts, given by hand, come to the same; and it resumes as it was."""
    tries = []

    def short(*args):
        tries.append(measured(*args))
        return 0.2

    monkeypatch.setattr(Budget, "max_iters", lambda self, step, schedule: schedule.max_iters)  # nothing changes
    measured = train_script.measure_step
    monkeypatch.setattr(train_script, "measure_step", short)
    budget = tiny(minutes=0.1, optimizer="muon", out_dir=str(tmp_path / "budget"), eval_interval=4)
    train(budget)
    told = capsys.readouterr().out
    config = checkpoint.load(Path(budget.out_dir)).state["config"]
    counts = {name: config[name] for name in STEP_COUNTS}
    assert 3 <= counts["max_iters"] < 12 and f"max_iters {counts['max_iters']}" in told
    assert len(tries) == 1 and 0 < tries[0] < 1
    by_hand = replace(budget, minutes=None, **counts, out_dir=str(tmp_path / "by hand"))
    train(by_hand)
    assert_same_end(budget.out_dir, by_hand.out_dir)
    shutil.rmtree(budget.out_dir)
    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "log", lambda self, line: line["step"] == 2 and os.kill(os.getpid(), signal.SIGINT))
        patch.setattr(train_script, "measure_step", lambda *args: 0.2)
        patch.setattr(train_script, "with_time_budget", lambda *args: StepCounts(**counts))
        train(budget)
    assert checkpoint.last_state(Path(budget.out_dir))["step"] == 3
    train(replace(budget, init_from="resume"))
    assert len(tries) == 1 and checkpoint.last_state(Path(budget.out_dir))["step"] == counts["max_iters"]
    ends = [checkpoint.load(Path(cfg.out_dir)).model for cfg in (budget, by_hand)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


class Machine:
    """A clock that the test controls: a step and an evaluation take as long as it says, and nothing else takes time.

    ahead: as on a GPU, a step takes no time of the host, which waits for the device where it reads its numbers.
    """

    def __init__(self, monkeypatch, step_seconds, evaluation_seconds, ahead: bool = False):
        """step_seconds: a function of the step; evaluation_seconds: of the step, too."""
        self.now = self.device = 0.0  # what the host's clock says; when the device will have done all it has been given
        self.steps = 0
        self.finished: dict[tuple, float] = {}  # by guard and step
        train_step, evaluate, read = train_script.train_step, train_script.evaluate, train_script.StepGuard.read

        def timed_step(state, *args):
            train_step(state, *args)
            self.device = max(self.device, self.now) + step_seconds(self.steps)
            self.finished[state.guard, state.step] = self.device
            self.now = self.now if ahead else self.device
            self.steps += 1

        def timed_read(guard, step):
            self.now = max(self.now, self.finished[guard, step])
            return read(guard, step)

        def timed_evaluation(*args):
            self.now = self.device = max(self.now, self.device) + evaluation_seconds(self.steps)
            return evaluate(*args)

        monkeypatch.setattr(train_script, "train_step", timed_step)
        monkeypatch.setattr(train_script, "evaluate", timed_evaluation)
        monkeypatch.setattr(train_script.StepGuard, "read", timed_read)
        monkeypatch.setattr(train_script.time, "perf_counter", lambda: self.now)
        if ahead:
            monkeypatch.setattr(Runtime, "runs_ahead", True)


SLOW_MACHINES = {
    "a steady machine": (lambda step: 0.1, lambda step: 0.5),
    "three times slower in the middle": (lambda step: 0.1 if step < 150 else 0.3, lambda step: 0.5),
    "three times slower at once": (lambda step: 0.1 if step < 40 else 0.3, lambda step: 0.5 if step < 40 else 1.5),
    "twice as fast in the middle": (lambda step: 0.1 if step < 100 else 0.05, lambda step: 0.5),
    "a stall of five seconds": (lambda step: 5.0 if step == 100 else 0.1, lambda step: 0.5),
    "evaluations that take much longer than planned": (lambda step: 0.1, lambda step: 2.0),
}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", SLOW_MACHINES)
def test_a_budget_holds_whatever_the_machine_does(tiny, monkeypatch, name, ahead):
    """--minutes=2 took over 6 where the machine slowed down after its first two seconds, the only ones that counted."""
    machine = Machine(monkeypatch, *SLOW_MACHINES[name], ahead)
    recipe = dict(max_iters=100, eval_interval=20, lr_schedule="wsd", wsd_decay_iters=50, warmup_iters=5)
    cfg = tiny(**recipe, minutes=1, optimizer="muon", sample_tokens=0, log_interval=7 if ahead else 1)
    train(cfg)
    assert 0.9 * 60 < machine.now < 1.1 * 60
    state = checkpoint.load(Path(cfg.out_dir)).state
    decisions, record = state["decisions"], logged(cfg.out_dir)
    assert decisions[0][0] == 0 and len(decisions) < 12 and state["step"] == decisions[-1][1]
    evaluated = [line["step"] for line in record if line["val_loss"] is not None]
    assert 4 <= len(evaluated) <= 7  # as many as in the recipe
    rates = [line["lr"] for line in record]
    assert max(rates) == cfg.learning_rate and rates[-1] == pytest.approx(cfg.learning_rate / 10, rel=0.2)
    counts = StepCounts(**{name: state["config"][name] for name in STEP_COUNTS})
    schedule = Schedule(counts, "wsd", cfg.learning_rate, cfg.min_lr, decisions)
    if name == "a steady machine":
        assert all(abs(max_iters / decisions[0][1] - 1) < 0.05 for _, max_iters in decisions)
    assert rates == [schedule.learning_rate_at(line["step"] - 1) for line in record]


def test_decisions_after_a_kill_are_taken_again(tiny, monkeypatch):
    """The plan comes back with the checkpoint; what was decided after it is decided anew, and `resumes` says so."""
    Machine(monkeypatch, lambda step: 0.1 if step < 60 else 0.4, lambda step: 0.5)
    settings = dict(max_iters=100, eval_interval=10, minutes=0.5, sample_tokens=0)
    decide, decided = Schedule.decide, []

    def killed_after_it(self, step, max_iters):
        at_evaluation = self.evaluates(step)
        decide(self, step, max_iters)
        if not at_evaluation:  # where it would be saved
            decided.append(step)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Schedule, "decide", killed_after_it)
        with pytest.raises(KeyboardInterrupt):
            train(tiny(**settings))
    before = checkpoint.load(Path(tiny().out_dir)).state
    assert before["config"]["eval_interval"] == 26 and 0 < before["step"] < decided[0]
    assert all(step <= before["step"] for step, _ in before["decisions"])
    assert before["stopped_by"] is None and before["budget"]["spent"] > 0
    train(tiny(**settings, init_from="resume"))
    after = checkpoint.load(Path(tiny().out_dir)).state
    assert after["decisions"][: len(before["decisions"])] == before["decisions"]
    (resume,) = after["resumes"]
    assert not resume["exact"] and f"decided again after step {before['step']:,}" in resume["decisions"]
    assert before["budget"]["spent"] < after["budget"]["spent"] < 1.1 * 30


def test_a_budget_counts_what_a_restart_takes_and_the_last_sample(tiny, monkeypatch):
    """A resumed run kept its plan, whatever its start took; and the last sample of 300 tokens took no time."""
    machine = Machine(monkeypatch, lambda step: 0.1, lambda step: 0.5)
    sample_text = train_script.sample_text

    def slow_sample(model, tokenizer, runtime, seed, tokens):
        machine.now += 0.02 * tokens
        return sample_text(model, tokenizer, runtime, seed, 1)

    monkeypatch.setattr(train_script, "sample_text", slow_sample)
    settings = dict(max_iters=100, eval_interval=25, minutes=1, sample_tokens=50)
    log = Metrics.log
    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "log", lambda self, line: line["step"] == 120 and os.kill(os.getpid(), signal.SIGINT))
        train(tiny(**settings))
    spent = checkpoint.load(Path(tiny().out_dir)).state["budget"]["spent"]
    began, find = machine.now, train_script.open_data

    def slow_start(cfg):
        machine.now += 20.0
        return find(cfg)

    monkeypatch.setattr(train_script, "open_data", slow_start)
    monkeypatch.setattr(Metrics, "log", log)
    train(tiny(**settings, init_from="resume"))
    assert 0.9 * 60 < spent + machine.now - began < 1.1 * 60


def test_a_budget_that_is_used_up_ends_the_run(tiny, monkeypatch):
    """At least one more step was taken, however long it would take."""
    machine = Machine(monkeypatch, lambda step: 1.0 if step < 30 else 20.0, lambda step: 0.0)
    train(tiny(max_iters=100, eval_interval=100, minutes=1, sample_tokens=0))
    assert machine.now <= 60 + 20
    state = checkpoint.load(Path(tiny().out_dir)).state
    assert state["step"] == state["decisions"][-1][1] and logged(tiny().out_dir)[-1]["val_loss"] is not None


def test_what_is_decided_while_a_checkpoint_is_written_is_not_in_it(tiny, monkeypatch):
    """The writing thread got the list itself, which the loop went on appending to."""
    Machine(monkeypatch, lambda step: 0.1 if step < 60 else 0.4, lambda step: 0.5)
    decided, save, decide = threading.Event(), checkpoint.save, Schedule.decide

    def slow_save(out_dir, step, model, optimizer, tokenizer, state, *args):
        decided.clear()  # what the evaluation before this save has decided belongs into it
        decided.wait(timeout=0.5)
        assert all(begin <= step for begin, _ in state["decisions"])
        return save(out_dir, step, model, optimizer, tokenizer, state, *args)

    def decide_and_tell(self, step, max_iters):
        decide(self, step, max_iters)
        decided.set()

    monkeypatch.setattr(checkpoint, "save", slow_save)
    monkeypatch.setattr(Schedule, "decide", decide_and_tell)
    train(tiny(max_iters=100, eval_interval=30, minutes=0.5, sample_tokens=0))


# --- the counts of steps ----------------------------------------------------------------------------------------------


def test_a_shorter_run_of_a_config_file_is_the_same_recipe(tmp_path, monkeypatch, capsys):
    """`--max_iters=10` ended in "warmup must end before max_iters", for nanoGPT's own config files, too."""
    monkeypatch.chdir(tmp_path)
    Path("x.py").write_text("max_iters = 5000\nlr_decay_iters = 5000\nwarmup_iters = 100\neval_interval = 250\n")

    def counts(*words: str) -> tuple:
        cfg = configurator.load(TrainConfig, ["x.py", *words])
        return cfg.max_iters, cfg.lr_decay_iters, cfg.warmup_iters, cfg.eval_interval, cfg.wsd_decay_iters

    assert counts() == (5000, 5000, 100, 250, None) and capsys.readouterr().out == ""
    assert counts("--max_iters=30") == (30, 30, 1, 2, None)
    assert capsys.readouterr().out == (
        "max_iters=30 instead of the config file's 5,000, and in proportion: warmup_iters=1 (was 100), "
        "lr_decay_iters=30 (was 5,000), eval_interval=2 (was 250)\n"
    )
    assert counts("--max_iters=10000") == (10000, 10000, 200, 500, None)
    assert counts("--max_iters=30", "--eval_interval=7", "--wsd_decay_iters=3") == (30, 30, 1, 7, 3)
    Path("y.py").write_text("max_iters = 40\n")
    assert counts("--max_iters=30", "y.py") == (40, 5000, 100, 250, None)  # the file comes last


@pytest.mark.parametrize("max_iters", [1, 2, 5, 30, 1000, 600_000])
def test_counts_that_nobody_set_follow_the_length(max_iters):
    cfg = TrainConfig(max_iters=max_iters)
    warmup, evaluations = cfg.step_counts.warmup_steps, cfg.step_counts.evaluations
    assert warmup <= max_iters / 20 and warmup <= 2000
    assert evaluations >= min(10, max_iters) / 2 and (max_iters < 20 or evaluations >= 10)


def test_a_warmup_that_outlasts_the_run_is_a_line(tiny, capsys):
    train(tiny(max_iters=5, warmup_iters=100))
    assert "warmup_iters=100: the run of 5 steps ends before its warmup does" in capsys.readouterr().out
    assert [line["lr"] for line in logged(tiny().out_dir)] == pytest.approx([3e-3 * n / 101 for n in range(1, 6)])


def test_a_warmup_that_is_over_stays_over(tiny):
    """A longer run would have gone back into its warmup, at a hundredth of the rate."""
    train(tiny(max_iters=5, warmup_iters=2))
    train(tiny(max_iters=500, warmup_iters=200, eval_interval=1000, init_from="resume", patience=1))
    rates = [line["lr"] for line in logged(tiny().out_dir)]
    assert rates[5] == pytest.approx(3e-3, rel=0.01)


def test_a_warmup_of_a_config_file_that_is_over_stays_over(tiny, tmp_path, monkeypatch):
    """Stretched to --max_iters, it began again at the step at which the run had ended."""
    monkeypatch.chdir(tmp_path)
    Path("x.py").write_text("max_iters = 40\nwarmup_iters = 4\nlearning_rate = 1e-3\n")
    small = "n_layer n_head n_embd block_size batch_size dataset data_dir dtype out_dir eval_iters".split()
    words = ["x.py", *[f"--{name}={getattr(tiny(), name)}" for name in small], "--log_interval=1", "--sample_tokens=0"]
    train(configurator.load(TrainConfig, [*words, "--max_iters=8"]))
    more = ["--init_from=resume", "--max_iters=400", "--eval_interval=400", "--patience=1"]
    log = Metrics.log

    def stopped_soon(self, line):
        log(self, line)
        if line["step"] == 10:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Metrics, "log", stopped_soon)
    train(configurator.load(TrainConfig, [*words, *more]))
    assert [line["lr"] > 9e-4 for line in logged(tiny().out_dir)][8:] == [True] * 3


def test_the_recipes_curve_has_nine_points():
    cfg = configurator.load(TrainConfig, ["config/shakespeare_char.py"])
    assert cfg.step_counts.evaluations >= 8 and cfg.eval_iters is None


# --- what a user types next -------------------------------------------------------------------------------------------


def typed(words: list[str], monkeypatch, capsys) -> str:
    """What `python train.py WORDS` prints, in this process: it starts in no time."""
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    train_script.main(configurator.load(TrainConfig, words))
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "words, config",
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
def test_the_command_to_continue_runs_and_trains(tiny, tmp_path, words, config, monkeypatch, capsys):
    """After --minutes it was refused, or trained nothing, as it did after patience."""
    monkeypatch.chdir(tmp_path)
    Path("x.py").write_text(config)
    cfg = tiny(eval_iters=1, sample_tokens=0)
    small = "n_layer n_head n_embd block_size batch_size eval_iters sample_tokens dataset data_dir dtype out_dir"
    given = ["x.py", *[f"--{name}={getattr(cfg, name)}" for name in small.split()], *words]
    first = typed(given, monkeypatch, capsys)
    (command,) = [line.split(":", 1)[1] for line in first.splitlines() if line.startswith("continue:")]
    step = checkpoint.last_state(Path(cfg.out_dir))["step"]
    program, script, *rest = shlex.split(command)
    assert (program, script) == ("python", "train.py")
    second = typed(rest, monkeypatch, capsys)
    assert checkpoint.last_state(Path(cfg.out_dir))["step"] > step
    assert len(logged(cfg.out_dir)) > 1 and "before its warmup does" not in second


def test_a_default_that_is_asked_for_by_name_is_heard(tiny, tmp_path):
    """--n_layer=12 and --block_size=1024 are the defaults, and were ignored over a checkpoint of another shape."""
    train(tiny(max_iters=3))
    same = [f"--data_dir={tiny().data_dir}", "--dataset=verse", f"--out_dir={tmp_path / 'new'}"]
    for init_from, asked in ((tiny().out_dir, "n_layer=12"), (tiny().out_dir, "block_size=1024")):
        cfg = configurator.load(TrainConfig, [*same, f"--init_from={init_from}", f"--{asked}"])
        with pytest.raises(UserError, match=rf"{asked}: the checkpoint .* has {asked.split('=')[0]}="):
            train(cfg)
    cfg = configurator.load(TrainConfig, [*same, f"--init_from={tiny().out_dir}", "--max_iters=2", "--batch_size=2"])
    train(cfg)
    assert checkpoint.load(tmp_path / "new").state["model"]["n_layer"] == 2


def test_two_runs_in_one_folder_are_refused(tiny, tmp_path):
    """Both started; one of them crashed, and the other lost its metrics."""
    from filelock import FileLock

    out_dir = tmp_path / "out"
    out_dir.mkdir()
    with FileLock(out_dir / ".lock"), pytest.raises(UserError, match=r"out_dir=.*out: another run is writing there"):
        train(tiny())
    assert not (out_dir / "metrics.jsonl").exists()
    train(tiny(max_iters=2))
    with FileLock(out_dir / ".lock"):
        train(tiny(eval_only=True, init_from="resume"))  # it writes nothing
    (out_dir / ".lock").unlink(missing_ok=True)
    assert not (out_dir / ".lock").exists()
    with pytest.raises(UserError, match="there is no"):
        train(tiny(dataset="gone", out_dir=str(tmp_path / "unused")))
    assert not (tmp_path / "unused").exists()


def test_the_run_that_is_overwritten_stays_until_there_is_another(tiny):
    """It was removed before the new run had started, and what cannot start left nothing."""
    train(tiny(max_iters=5))
    with pytest.raises(UserError, match="minutes=1e-05: it is too short"):
        train(tiny(overwrite=True, minutes=1e-5))
    with pytest.raises(TrainingError):
        train(tiny(overwrite=True, learning_rate=1e30, grad_clip=0.0, eval_interval=1, lr_schedule="constant"))
    assert checkpoint.load(Path(tiny().out_dir)).state["step"] == 5
    train(tiny(overwrite=True, max_iters=3))
    assert [path.name for path in Path(tiny().out_dir).glob("step-*")] == ["step-000003"]


def test_a_shape_that_a_config_file_sets_is_no_obstacle_to_finetuning(tiny, tmp_path, monkeypatch, capsys):
    """It had to be left out, one setting at a time, of a file where it stands for another use."""
    train(tiny(max_iters=2))
    monkeypatch.chdir(tmp_path)
    Path("x.py").write_text("n_layer = 5\nn_head = 3\nn_embd = 48\nblock_size = 64\nmax_iters = 2\nbatch_size = 2\n")
    words = ["x.py", f"--data_dir={tiny().data_dir}", "--dataset=verse", "--out_dir=new", "--sample_tokens=0"]
    train(configurator.load(TrainConfig, [*words, f"--init_from={tiny().out_dir}"]))
    told = "block_size=32 (not 64), n_layer=2 (not 5), n_head=2 (not 3), n_embd=32 (not 48)"
    assert told in capsys.readouterr().out and checkpoint.load(Path("new")).state["config"]["n_layer"] == 2
    cfg = configurator.load(TrainConfig, [*words, f"--init_from={tiny().out_dir}", "--n_layer=3", "--n_head=1"])
    with pytest.raises(UserError, match=r"n_layer=3: the checkpoint .*; n_head=1: the checkpoint .*; leave"):
        train(replace_keeping_origins(cfg, overwrite=True))


def replace_keeping_origins(cfg: TrainConfig, **changes) -> TrainConfig:
    changed = replace(cfg, **changes)
    object.__setattr__(changed, "origins", cfg.origins)
    return changed


def test_a_run_that_is_past_its_length_says_so(tiny, capsys):
    train(tiny(max_iters=4))
    train(tiny(max_iters=3, init_from="resume"))
    assert "nothing to train: 4 of 3 steps are done; give a larger --max_iters" in capsys.readouterr().out


@pytest.mark.parametrize("setting", ["out_dir", "init_from", "dataset"])
def test_an_empty_name_is_refused(tiny, setting):
    """--out_dir=$UNSET wrote the checkpoints into the current folder."""
    with pytest.raises(UserError, match=rf"{setting}=: it must not be empty"):
        train(tiny(**{setting: ""}))


@pytest.mark.parametrize("setting", ["n_embd", "batch_size", "gradient_accumulation_steps", "max_iters"])
def test_numbers_of_any_size_end_at_once(tiny, setting):
    """They ended in a traceback or, as every batch size below them was tried, not at all."""
    with pytest.raises(UserError):
        train(tiny(**{setting: 10**23}))
    with pytest.raises(UserError):
        train(tiny(block_size=1024, **{"batch_size" if setting == "max_iters" else setting: 10**13}))


def test_what_takes_twice_the_memory_is_refused(tiny):
    """It was only said, and the system killed the run."""
    with pytest.raises(UserError, match=r"far too little; use --batch_size="):
        train(tiny(batch_size=2**22, block_size=1024))


def test_without_a_login_wandb_is_one_line(tiny, monkeypatch):
    import wandb

    def refuse(**settings):
        raise wandb.errors.UsageError("No API key configured.\nUse `wandb login`")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(UserError, match=r"wandb cannot start \(No API key configured\.\); use wandb login, WANDB"):
        train(tiny(wandb_log=True))


@pytest.mark.parametrize(
    "words, counts",
    [
        (["--minutes=1", "--eval_interval=50"], dict(eval_interval=50, warmup_iters=None)),
        (["--minutes=1", "--warmup_iters=7"], dict(eval_interval=60, warmup_iters=7)),
        (["--minutes=1", "--max_iters=1000", "--warmup_iters=50"], dict(eval_interval=60, warmup_iters=30)),
        (["x.py", "--minutes=1", "--eval_interval=50"], dict(eval_interval=50, warmup_iters=12)),
        (["x.py", "--minutes=1", "--max_iters=1000"], dict(eval_interval=240, warmup_iters=12)),
    ],
)
def test_what_is_given_stays_under_minutes(tmp_path, monkeypatch, words, counts):
    """A count on the command line was stretched with the default max_iters of 600,000: --eval_interval=50 became 1."""
    monkeypatch.chdir(tmp_path)
    Path("x.py").write_text("max_iters = 500\nwarmup_iters = 10\neval_interval = 200\n")
    cfg = configurator.load(TrainConfig, words)
    found = counts_in(cfg, 601, step_seconds=1.0, origins=cfg.origins)
    assert found.max_iters == 600 and {name: getattr(found, name) for name in counts} == counts


# --- nothing optional ends a run --------------------------------------------------------------------------------------


def test_samples_draw_no_padding(tiny, monkeypatch):
    """An imported model has rows for ids that no token has; a sample drew them, before the checkpoint was saved."""
    train(tiny(max_iters=2, eval_interval=2))
    folder = checkpoint.load(Path(tiny().out_dir)).path
    start = checkpoint.load(folder)
    V = start.tokenizer.vocab_size
    table = torch.cat([start.model["transformer.wte.weight"], torch.randn(500, 32)])  # far likelier than the others
    padded = replace(
        start,
        model={**start.model, "transformer.wte.weight": table},
        state={"model": {**start.state["model"], "vocab_size": V + 500}},
    )
    monkeypatch.setattr(convert, "load", lambda path: padded)
    (Path(tiny().out_dir).parent / "padded").mkdir()
    cfg = tiny(init_from=str(Path(tiny().out_dir).parent / "padded"), out_dir=str(folder.parent.parent / "tuned"))
    train(cfg)
    samples = [json.loads(line) for line in Path(cfg.out_dir, "samples.jsonl").read_text().splitlines()]
    assert [len(sample["text"]) for sample in samples] == [200, 200]


def test_what_is_optional_does_not_end_a_run(tiny, monkeypatch, capsys):
    """A sample that failed took the run with it, and the checkpoint that had not been saved yet."""

    def broken(*args, **kwargs):
        assert checkpoint.exists(Path(tiny().out_dir))  # what is saved comes first
        raise RuntimeError("no sample today")

    monkeypatch.setattr(train_script, "generate", broken)
    train(tiny(async_save=False))
    assert checkpoint.load(Path(tiny().out_dir)).state["step"] == 12
    out = capsys.readouterr().out
    assert (
        "step 6: no sample (RuntimeError: no sample today); training continues" in out
        and "no sample (RuntimeError: no" in out
    )


# --- the device -------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_overwritten_is_not_read_later(seed):
    """A captured CUDA graph writes each loss into the same memory; an evaluation kept them to read them at its end."""
    data = [Shard(np.random.default_rng(seed).integers(20, size=203).astype("<u2"))]
    model = GPT(GPTConfig(block_size=8, vocab_size=20, n_layer=1, n_head=1, n_embd=8), seed)
    runtime, replayed = resolve_runtime("cpu", "float32", False), torch.zeros(())
    plain = compile_loss(model, runtime)
    expected = mean_loss(plain, ValidationWindows(data, 8, 20), runtime, 3)
    assert mean_loss(lambda x, y: replayed.copy_(plain(x, y)), ValidationWindows(data, 8, 20), runtime, 3) == expected


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_where_no_flag_is_heeded_the_host_skips_the_step(tiny, poisoned, monkeypatch, optimizer):
    """As on Apple's GPUs: what a bad gradient would have changed is unchanged, and the optimizer sees no flag."""
    poisoned(range(5, 6))
    monkeypatch.setattr(Runtime, "skips_on_device", False)
    cfg = tiny(max_iters=5, save_interval_minutes=None, eval_interval=4, keep_last=5, optimizer=optimizer)
    train(cfg)
    before, after = (checkpoint.load(Path(cfg.out_dir, f"step-{step:06d}")) for step in (4, 5))
    assert all(torch.equal(before.model[name], after.model[name]) for name in before.model)
    assert all(torch.equal(before.optimizer()[name], after.optimizer()[name]) for name in before.optimizer())
    assert [line["skipped"] for line in logged(cfg.out_dir)] == [0, 0, 0, 0, 1]


def test_validation_without_a_target_that_counts_is_refused(tiny, masked_dir):
    """It raised IndexError at the first evaluation."""
    folder = Path(masked_dir, "verse")
    meta = json.loads((folder / "meta.json").read_text())
    empty = bytes(meta["splits"]["val"][0]["tokens"])
    (folder / "val_mask.bin").write_bytes(empty)
    meta["splits"]["val"][0]["mask_sha256"] = hashlib.sha256(empty).hexdigest()
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(DatasetError, match="no token of the validation data counts as a target"):
        train(tiny(data_dir=masked_dir))


def test_a_gradient_that_overflows_at_every_scale_stops_the_run(tiny, monkeypatch):
    """Under float16 it was taken for a scale that is still too large, forever."""
    half = Runtime(torch.device("cpu"), torch.float16, False, "float16")
    monkeypatch.setattr(train_script, "resolve_runtime", lambda *args: half)
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=4.0))
    forward = GPT.forward

    def steep(self, *args, **kwargs):
        logits, loss = forward(self, *args, **kwargs)
        if self.training:
            loss.register_hook(lambda gradient: gradient * math.inf)
        return logits, loss

    monkeypatch.setattr(GPT, "forward", steep)
    with pytest.raises(TrainingError, match="the gradient is not finite"):
        train(tiny(max_iters=50, max_bad_steps=3))
