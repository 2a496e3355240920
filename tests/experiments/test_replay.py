"""Replayed steps, against the run's log and independent forward and backward passes."""

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import tools.replay as replay_script
from folio import UserError
from folio.base import settings, stop_signals
from folio.base.files import locked
from folio.checkpoints import checkpoint, run_folder
from folio.data.windows import Mixture
from folio.experiments.replay import merge_parts
from folio.machine.runtime import Runtime
from folio.training.loader import BatchLoader
from folio.training.planning import resolve
from folio.training.planning.data import open_data
from model import GPT
from prepare import text as prepare_text
from tests.support import processes
from tests.support.replays import SMALLEST, remove_older_checkpoints, replay
from tests.support.runs import blank_part, edit_state, read_metrics
from tests.support.simulated import SimulatedMachine
from tests.support.simulated_gpu import SimulatedGPU
from tests.support.tolerances import (
    gradients_error,
    largest_logit,
    logits_error,
    network_tensors,
    norm_error,
    rounding_error,
    within,
)
from tests.support.torchrun import ROOT, run_ranks, start_script_ranks
from tools.replay import ReplayConfig, main
from train import TrainConfig, train


def assert_consistent(facts: dict) -> None:
    """Assert that the loss is the mean of the tokens' losses, and the gradient norm is that of the parameters' norms.

    The step has the same losses of tokens and gradients, so only sums are rounded. The square root of the sum of
    squares halves its error, but both norms have one.
    """
    losses = [loss for sequence in facts["sequences"] for loss in sequence["losses"] if loss is not None]
    sum_error = rounding_error(len(losses) + 3, values=1)  # with the division, the weight, and the sum of micro-batches
    assert math.fsum(losses) / len(losses) == pytest.approx(facts["loss"], rel=sum_error)
    parameters = facts["parameters"]
    operations = max(math.prod(p["shape"]) for p in parameters) + len(parameters) + 2  # square root, unscaling
    norm = math.hypot(*(p["gradient_norm"] for p in parameters))
    assert norm == pytest.approx(facts["grad_norm"], rel=rounding_error(operations, values=len(parameters)))


@pytest.fixture
def poison(monkeypatch) -> Callable[[TrainConfig, int, float], None]:
    """Return a function that makes one sequence of a run multiply the gradient by a factor."""

    def poison_sequence(cfg: TrainConfig, number: int, factor: float) -> None:
        poisoned, forward = torch.from_numpy(open_data(cfg).batch(number, 1)[0]), GPT.forward

        def poisoned_forward(self, idx, *args, **kwargs):
            logits, loss = forward(self, idx, *args, **kwargs)
            if loss is not None and loss.requires_grad and (idx == poisoned).all(dim=1).any():
                loss.register_hook(lambda gradient: gradient * factor)
            return logits, loss

        monkeypatch.setattr(GPT, "forward", poisoned_forward)

    return poison_sequence


# --- exactness --------------------------------------------------------------------------------------------------------


def test_a_replay_on_a_gpu_keeps_tokens_in_its_memory_as_training_does(tiny, monkeypatch):
    """It copied each batch from the host."""
    is_resident, init = [], BatchLoader.__init__

    def record(self, data, runtime, shape):
        is_resident.append(shape.is_resident)
        init(self, data, runtime, shape)

    monkeypatch.setattr(BatchLoader, "__init__", record)
    with SimulatedGPU():
        train(cfg := tiny(device="cuda", max_iters=2, batch_size=400, sample_tokens=0))  # reads more than the data
        assert replay(cfg.out_dir, 2)["bitwise"] is True
    assert is_resident == [True, True]


@pytest.mark.parametrize(
    "settings",
    [
        dict(optimizer="adamw"),
        dict(optimizer="muon", workers=2),
        dict(optimizer="muon", dtype="bfloat16", position="relative", sampling="random", recompute=True),
    ],
)
def test_replayed_steps_are_bitwise_identical_to_the_log(tiny, capsys, settings):
    """From step 0 and from a checkpoint, with dropout and accumulation."""
    train(cfg := tiny(gradient_accumulation_steps=2, batch_size=3, **settings))
    logged = {line["step"]: line for line in read_metrics(cfg.out_dir)}
    for step, start in ((1, 0), (6, 0), (7, 6), (12, 6)):
        capsys.readouterr()
        facts = replay(cfg.out_dir, step)
        assert facts["replayed_from"] == ("the checkpoint of step 6" if start else "step 0, random weights")
        assert (facts["loss"], facts["grad_norm"]) == (logged[step]["loss"], logged[step]["grad_norm"])
        assert facts["bitwise"] is True and facts["equal_before"] == [*range(start + 1, step)]
        assert_consistent(facts)
        rates = {group["optimizer"]: group["learning_rate"] for group in facts["learning_rates"]}
        assert rates["AdamW"] == logged[step]["lr"]
        if cfg.optimizer == "muon":
            assert rates["Muon"] == pytest.approx(logged[step]["lr"] * cfg.muon_learning_rate / cfg.learning_rate)
        out = capsys.readouterr().out
        assert f"replaying {step - start} step" in out and "at the run's" in out
        assert "nats per token; bitwise identical to the logged loss" in out
        assert facts["clip_factor"] == min(1, cfg.grad_clip / (facts["grad_norm"] + 1e-6))  # as torch computes it


def test_float16_scales_the_loss_and_skips_overflows(tiny, poison, monkeypatch):
    """Gradients are reported without the loss scale. An overflow only lowers the scale."""
    half = Runtime(torch.device("cpu"), torch.float16, False, "float16")
    for script in (resolve, replay_script):
        monkeypatch.setattr(script, "resolve_runtime", lambda *args: half)
    cfg = tiny(max_iters=8, eval_interval=4)
    poison(cfg, 4 * 4, 1e6)
    train(cfg)
    overflowed, others = replay(cfg.out_dir, 5), replay(cfg.out_dir, 6)
    assert overflowed["bitwise"] and others["bitwise"] and others["skipped"] is None
    assert re.fullmatch(r"its gradient overflowed float16 at the loss scale 65,?536, .*", overflowed["skipped"])
    assert all(p["update_norm"] == 0 for p in overflowed["parameters"])
    assert_consistent(others)
    assert others["grad_norm"] < 100


def test_losses_gradients_and_updates_match_an_independent_pass(tiny, text):
    """The reference is one pass over the whole step, and the checkpoints before and after it."""
    train(cfg := tiny(gradient_accumulation_steps=2, dropout=0.0, eval_interval=1, keep_last=12, grad_clip=0.01))
    facts, training = replay(cfg.out_dir, 8), text[: int(0.9 * len(text))]
    before, after = (checkpoint.load(Path(cfg.out_dir, f"step-{step:06d}")) for step in (7, 8))
    sequences = facts["sequences"]
    assert [sequence["number"] for sequence in sequences] == [*range(7 * 8, 8 * 8)]
    for sequence in sequences:
        offset = sequence["offset"]
        assert sequence["text"] == training[offset : offset + cfg.block_size + 1] and sequence["shards"] == 1
    ids = torch.tensor([before.tokenizer.encode(sequence["text"]).tolist() for sequence in sequences])
    assert ids.tolist() == [sequence["ids"] for sequence in sequences]

    model = before.build()
    logits = model.logits(ids[:, :-1])
    log_p = logits.log_softmax(dim=-1)
    # A loss is the difference of a logit and the logarithm of a sum, which may have the error of the largest logit.
    limit = within(logits, 2 * logits_error(model.config, cfg.block_size))
    expected = -log_p.gather(2, ids[:, 1:, None])[..., 0]  # (B, T)
    assert_close(torch.tensor([s["losses"] for s in sequences]), expected.detach(), **limit)
    assert_close(torch.tensor([s["loss"] for s in sequences]), expected.detach().mean(dim=1), **limit)
    guesses = torch.tensor([s["guesses"] for s in sequences])
    best = log_p.max(dim=-1).values
    assert_close(log_p.gather(2, guesses[..., None])[..., 0], best, **limit)
    # p changes by p times the error of its logarithm
    assert_close(torch.tensor([s["guess_probabilities"] for s in sequences]), best.exp(), **limit)

    model(ids[:, :-1], targets=ids[:, 1:])[1].backward()
    parameters = {p["name"]: p for p in facts["parameters"]}
    assert parameters.keys() == {name for name, _ in model.named_parameters()}
    for name, p in model.named_parameters():
        change = (after.model[name] - before.model[name]).norm().item()
        weights = before.model[name].norm().item()
        error = gradients_error(model.config, *ids[:, 1:].shape) + rounding_error(p.numel(), values=1)
        assert parameters[name]["gradient_norm"] == pytest.approx(p.grad.norm().item(), rel=error)
        assert parameters[name]["update_norm"] == change
        assert parameters[name]["weight_norm"] == weights
        assert parameters[name]["relative_update"] == change / weights
    assert_consistent(facts)
    assert facts["clip_factor"] == 0.01 / (facts["grad_norm"] + 1e-6)


def test_masked_targets_have_no_loss(tiny, masked_dir):
    train(cfg := tiny(data_dir=masked_dir, gradient_accumulation_steps=2, max_iters=4, eval_interval=4))
    facts = replay(cfg.out_dir, 4)
    mask = np.fromfile(Path(masked_dir, "verse", "train_mask.bin"), np.uint8)
    for sequence in facts["sequences"]:
        counts = mask[sequence["offset"] + 1 : sequence["offset"] + 1 + cfg.block_size]
        assert [loss is not None for loss in sequence["losses"]] == counts.astype(bool).tolist()
        assert (sequence["loss"] is not None) == counts.any()
    assert facts["bitwise"]
    assert_consistent(facts)


def test_sequences_of_a_mixture_come_from_their_data_sets(tiny, mixed_dir, text):
    train(cfg := tiny(dataset="verse:0.7,prose:0.3", data_dir=mixed_dir, max_iters=3, eval_interval=3))
    facts = replay(cfg.out_dir, 3)
    prose = "The king and the sword.\n" * 300
    texts = {"verse": text, "prose": "".join(c for c in prose if c in text)}
    for sequence in facts["sequences"]:
        offset = sequence["offset"]
        assert sequence["text"] == texts[sequence["dataset"]][offset : offset + cfg.block_size + 1]
    assert facts["bitwise"] and {sequence["dataset"] for sequence in facts["sequences"]} == {"verse", "prose"}


def test_skipped_steps_have_a_reason(tiny, poison, capsys):
    """The steps are between logged ones."""
    cfg = tiny(max_iters=112, eval_interval=200, skip_spikes=20.0, log_interval=50, **SMALLEST)
    poison(cfg, 108, 1e4)
    train(cfg)
    facts = replay(cfg.out_dir, 109)
    assert facts["equal_before"] == [1, 50, 100]
    above = r"its gradient norm is [\d,.]+ standard deviations above the mean of [\d,.]+ \("
    assert re.match(above, facts["skipped"])
    assert all(p["update_norm"] == 0 for p in facts["parameters"])
    facts = replay(cfg.out_dir, 110)
    assert facts["skipped"] is None and all(p["update_norm"] > 0 for p in facts["parameters"])
    assert facts["bitwise"] is None and facts["logged_loss"] is None
    out = capsys.readouterr().out
    assert "skipped:       yes: its gradient norm is" in out and "step 110 was not logged" in out
    assert "the 3 logged steps replayed before it are bitwise identical to the log" in out


def test_a_step_that_is_not_finite(tiny, poison):
    """The run stopped at step 8, which is recorded only in skipped/."""
    cfg = tiny(max_bad_steps=1, **SMALLEST)
    poison(cfg, 7, math.nan)
    with pytest.raises(UserError, match="stopped at step 8: the gradient is not finite"):
        train(cfg)
    facts = replay(cfg.out_dir, 8)
    assert facts["skipped"] == "its gradient norm is nan" and facts["bitwise"]
    assert facts["grad_norm"] == "nan" and facts["logged_grad_norm"] is None and math.isfinite(facts["loss"])
    assert all(p["gradient_norm"] == "nan" and p["update_norm"] == 0 for p in facts["parameters"])
    with pytest.raises(UserError, match=r"step=9: the last step of .* is 8"):
        replay(cfg.out_dir, 9)


# --- settings, checkpoint and runtime of a step -----------------------------------------------------------------------


def test_a_run_that_was_resumed_with_other_settings(tiny):
    """Steps are replayed with their settings, even if only the last checkpoint is left."""
    train(cfg := tiny(max_iters=4, lr_decay_iters=12))
    changes = dict(learning_rate=1e-3, dropout=0.3, weight_decay=0.0)
    changes |= dict(init_from="resume", batch_size=2, gradient_accumulation_steps=2)
    train(tiny(max_iters=8, **changes))
    train(tiny(max_iters=8, **changes, patience=9))  # nothing to train
    train(tiny(max_iters=12, **changes, grad_clip=0.1))
    assert replay(cfg.out_dir, 10)["replayed_from"] == "the checkpoint of step 8"
    remove_older_checkpoints(cfg.out_dir)
    for step in (3, 4, 5, 9, 12):
        facts = replay(cfg.out_dir, step)
        assert facts["bitwise"] and facts["equal_before"] == [*range(1, step)], step
        assert facts["replayed_from"] == "step 0, random weights"


def test_a_run_with_a_time_budget(tiny, monkeypatch):
    """Learning rates depend on decisions about the run's length."""
    recipe = dict(max_iters=100, eval_interval=20, lr_schedule="wsd", wsd_decay_iters=50, warmup_iters=5, keep_last=9)
    recipe |= dict(sample_tokens=0, **SMALLEST)
    cfg = tiny(**recipe, minutes=0.5)
    with monkeypatch.context() as patch:
        SimulatedMachine(patch, lambda step: 0.5 if step < 20 else 1.5, lambda step: 0.1, trains=True)
        train(cfg)
    state = checkpoint.load(Path(cfg.out_dir)).state
    assert len(state["parts"][-1]["decisions"]) > 1
    last = state["step"]
    assert replay(cfg.out_dir, last)["bitwise"]
    train(tiny(**{**recipe, "max_iters": last + 3}, init_from="resume", minutes=None))
    assert replay(cfg.out_dir, last)["bitwise"] and replay(cfg.out_dir, last + 2)["bitwise"]
    remove_older_checkpoints(cfg.out_dir)
    assert replay(cfg.out_dir, last)["bitwise"]


def test_a_run_with_another_order_of_sequences_is_refused(tiny, masked_dir):
    train(cfg := tiny(data_dir=masked_dir, max_iters=3))
    for path in run_folder.directories(Path(cfg.out_dir)):
        edit_state(path, lambda state: [part.pop("without_targets") for part in state["parts"]])
    with pytest.raises(UserError, match=r"cannot be replayed: .*windows without targets"):
        replay(cfg.out_dir, 2)
    for path in run_folder.directories(Path(cfg.out_dir)):
        edit_state(path, lambda state: [part.pop("windows") for part in state["parts"]])
    with pytest.raises(UserError, match=r'cannot be replayed: .*sampling="epoch" with one phase per epoch'):
        replay(cfg.out_dir, 2)


def test_a_step_without_targets_is_not_replayed(tiny, masked_dir, monkeypatch):
    """It has no loss to compare, and no gradients. Later steps are replayed through it."""
    batch = Mixture.batch

    def without_step_2(self, first, count):
        x, y = batch(self, first, count)
        return x, np.where(np.isin(np.arange(first, first + count), range(4, 8))[:, None], -1, y)

    monkeypatch.setattr(Mixture, "batch", without_step_2)
    train(cfg := tiny(data_dir=masked_dir, max_iters=3, eval_interval=3))
    with pytest.raises(UserError, match="step=2: it has no targets"):
        replay(cfg.out_dir, 2)
    facts = replay(cfg.out_dir, 3)
    assert facts["bitwise"] and facts["equal_before"] == [1, 2]


def test_a_finetuned_run(tiny, tmp_path):
    """Step 0 has the base's weights, even after the run was resumed, when init_from is "resume"."""
    base, fine = str(tmp_path / "base"), str(tmp_path / "fine")
    train(tiny(out_dir=base))
    train(tiny(out_dir=fine, init_from=base, max_iters=6, eval_interval=3))
    train(tiny(out_dir=fine, init_from="resume", max_iters=9))
    remove_older_checkpoints(fine)
    assert checkpoint.load(Path(fine)).state["parts"][0]["init_from"] == base
    facts = replay(fine, 7)
    assert facts["bitwise"] and facts["replayed_from"] == f"step 0, the weights of {base}"
    train(tiny(out_dir=base, init_from="resume", max_iters=14))
    facts = replay(fine, 2)
    assert facts["bitwise"] is False and facts["different_before"] == [1]
    assert "from which it started, may have changed" in facts["remarks"][-1]
    shutil.rmtree(base)
    with pytest.raises(UserError, match="no checkpoint before this step, and the weights that it started from cannot"):
        replay(fine, 2)


def test_each_part_is_replayed_with_its_number_of_threads(tiny, monkeypatch):
    """The number of threads affects rounding."""
    train(cfg := tiny(max_iters=2))
    train(tiny(max_iters=4, init_from="resume"))
    remove_older_checkpoints(cfg.out_dir)
    last, threads = Path(cfg.out_dir, "step-000004"), torch.get_num_threads()
    assert [part["threads"] for part in run_folder.read_state(last)["parts"]] == [threads, threads]
    edit_state(last, lambda state: state["parts"][1].update(threads=threads + 1))
    thread_counts: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(torch, "set_num_threads", thread_counts.append)
        assert replay(cfg.out_dir, 4)["bitwise"]
    assert thread_counts[-2:] == [threads, threads + 1]


def test_consecutive_parts_with_equal_settings_are_merged():
    """Otherwise, a run that was killed a hundred times would be set up a hundred times."""
    other_seed = blank_part(6, threads=2, changes={"seed": [1, 2]})
    records = [blank_part(0), blank_part(3), blank_part(5, threads=2), other_seed]
    parts = merge_parts(records, {"seed": 2}, TrainConfig)
    expected = [(0, 5, 1, 1), (5, 6, 1, 2), (6, math.inf, 2, 2)]
    assert [(part.begin, part.end, part.cfg.seed, part.record["threads"]) for part in parts] == expected


def test_a_different_dtype_is_given_as_the_reason(run, capsys):
    facts, same = replay(run, 20, dtype="bfloat16"), replay(run, 20)
    assert [s["ids"] for s in facts["sequences"]] == [s["ids"] for s in same["sequences"]]
    assert facts["bitwise"] is False and facts["loss"] != same["loss"] == facts["logged_loss"]
    model = checkpoint.load(Path(run)).build()
    error = norm_error(network_tensors(model.config), torch.bfloat16) * largest_logit(model)
    assert facts["loss"] == pytest.approx(same["loss"], rel=0, abs=error)
    reason = "it was trained with dtype=float32, not bfloat16"
    assert facts["remarks"] == ["the first step that differs from the log is 19", f"the likely reason: {reason}"]
    out = capsys.readouterr().out
    assert f"it may not be bitwise identical: {reason}" in out and "the logged loss is" in out


def test_a_damaged_checkpoint_is_skipped(tiny, capsys):
    train(cfg := tiny(eval_interval=3, keep_last=9))
    file = Path(cfg.out_dir, "step-000006", "model.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    facts = replay(cfg.out_dir, 8)
    assert facts["bitwise"] and facts["replayed_from"] == "the checkpoint of step 3"
    assert "model.safetensors has changed since it was written" in capsys.readouterr().err
    Path(cfg.out_dir, "step-000003", "manifest.json").unlink()
    assert replay(cfg.out_dir, 8)["replayed_from"] == "step 0, random weights"
    assert "step-000003 was removed; using an earlier checkpoint" in capsys.readouterr().err


def test_a_checkpoint_of_abandoned_steps_is_skipped(tiny, tmp_path):
    """The run was resumed from step 3 with another learning rate, while the old checkpoint of step 4 remains."""
    settings = dict(keep_last=9, lr_decay_iters=12)
    train(cfg := tiny(**settings, eval_interval=1, max_iters=4))
    abandoned = Path(cfg.out_dir, "step-000004")
    abandoned.rename(tmp_path / "abandoned")
    train(tiny(**settings, eval_interval=5, max_iters=9, init_from="resume", learning_rate=1e-4))
    (tmp_path / "abandoned").rename(abandoned)
    facts = replay(cfg.out_dir, 5)
    assert facts["bitwise"] and facts["replayed_from"] == "the checkpoint of step 3"


def test_a_missing_step_or_run_is_an_error(run, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "metrics.jsonl").write_text('{"step": 0}\n')
    monkeypatch.chdir(tmp_path)
    for arguments, message in (
        (["--step=3"], r"name one run.*python tools/replay\.py"),
        (["out"], "step: .*python tools/replay"),
        (["out", "--step=21"], r"step=21: .* 20; choose one up to it"),
        (["out/step-000018", "--step=1"], r"step-000018 .*name the run: .*out$"),
        (["gpt2", "--step=1"], r"gpt2 contains only weights"),
        (["empty", "--step=1"], r"empty .*: try out"),
        (["missing", "--step=1"], r"missing holds no checkpoint"),
        (["*", "--step=1"], r"\* matches \d folders; name one run: "),
        (["new", "--step=1"], r"new has no checkpoint yet; wait"),
    ):
        with pytest.raises(UserError, match=message):
            main(settings.load(ReplayConfig, arguments))


# --- several processes ------------------------------------------------------------------------------------------------


def replay_by_ranks(count: int, cfg: TrainConfig, step: int) -> tuple[dict, str]:
    """Replay a step in several processes. Returns the content of --json, and the output."""
    log, path = Path(f"{cfg.out_dir}-{step}.log"), Path(cfg.out_dir).with_suffix(".json")
    words = [ROOT / "tools" / "replay.py", cfg.out_dir, f"--step={step}", f"--json={path}"]
    ranks = start_script_ranks(count, words, str(log))
    assert [processes.wait(rank) for rank in ranks] == [0] * count, log.read_text(encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8")), log.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        dict(parallel="fsdp", optimizer="muon"),
        pytest.param(dict(parallel="fsdp", optimizer="adamw"), marks=pytest.mark.slow),
    ],
)
def test_several_processes_replay_the_whole_step(tiny, tmp_path, settings):
    """Seven sequences on two processes: one computes four, the other three and one of padding.

    Two processes replay all steps. Then one process replays the last step, from the checkpoint before it.
    """
    sizes = dict(batch_size=1, gradient_accumulation_steps=7, dropout=0.0, max_iters=8, eval_interval=7)
    run_ranks(2, cfg := tiny(**sizes, **settings))
    before = Path(cfg.out_dir, "step-000007")
    before.rename(tmp_path / "before")
    facts, out = replay_by_ranks(2, cfg, 8)
    assert "Warning" not in out and out.count("bitwise identical to the logged loss") == 1  # only from rank 0
    assert facts["bitwise"] and facts["equal_before"] == [*range(1, 8)]
    assert [s["number"] for s in facts["sequences"]] == [*range(7 * 7, 8 * 7)]
    assert_consistent(facts)

    (tmp_path / "before").rename(before)
    single = replay(cfg.out_dir, 8)
    tokens = [torch.tensor([s["losses"] for s in report["sequences"]]) for report in (facts, single)]
    model = checkpoint.load(before).build()
    logits = model.logits(torch.tensor([s["ids"] for s in single["sequences"]])[:, :-1])
    assert_close(*tokens, **within(logits, 2 * logits_error(model.config, cfg.block_size)))
    for name, p in model.named_parameters():
        norms = [q["gradient_norm"] for report in (facts, single) for q in report["parameters"] if q["name"] == name]
        error = gradients_error(model.config, *tokens[1].shape) + rounding_error(p.numel(), values=1)
        assert norms[0] == pytest.approx(norms[1], rel=error)
    if not single["bitwise"]:
        assert "trained by 2 processes, not 1" in single["remarks"][-1] and "(use torchrun" in single["remarks"][-1]


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_replay_writes_only_its_page_and_ignores_the_lock(run):
    folder = Path(run)
    with locked(folder / ".lock", "busy"), open(folder / "metrics.jsonl", "a") as log:
        log.write('{"step": 21, "lo')  # another process is writing this line
        log.flush()
        files = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}
        assert replay(run, 19)["bitwise"]
        (folder / "replay-19.html").unlink()
        after = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}
        assert after == files


def test_ctrl_c_ends_with_one_line(run, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(replay_script, "train_step", interrupted)
    with pytest.raises(KeyboardInterrupt) as stop:
        replay(run, 20)
    assert stop_signals.describe(stop.value) == "stopped by SIGINT; nothing was written"
    assert not list(Path(run).glob("*.html"))


@pytest.mark.parametrize("name", ["output", "json"])
def test_an_unwritable_output_is_an_error(name, run, tmp_path, capsys):
    """The report is printed anyway, because a replay may take a long time."""
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=rf"{name}=.* cannot be written .*choose another --{name}"):
        main(ReplayConfig(run=(run,), step=19, **{name: str(tmp_path / "file" / "x")}))
    assert "bitwise identical to the logged loss" in capsys.readouterr().out


def test_missing_or_changed_data_is_an_error(tiny, data_dir, tmp_path, capsys):
    shutil.copytree(data_dir / "verse", tmp_path / "data" / "verse")
    train(cfg := tiny(data_dir=str(tmp_path / "data"), max_iters=1))
    (tmp_path / "data").rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"out cannot be replayed: its training data, .*verse, does not exist"):
        replay(cfg.out_dir, 1)
    assert replay(cfg.out_dir, 1, data_dir=str(tmp_path / "moved"))["bitwise"]
    assert "the run's speed is unknown" in capsys.readouterr().out
    source = tmp_path / "verse.txt"
    source.write_text("other words\n" * 100)
    prepare_text.main(prepare_text.TextConfig(inputs=(str(source),), data_dir=str(tmp_path / "data")))
    with pytest.raises(UserError, match=r"out cannot be replayed: .*verse, has been prepared again since then"):
        replay(cfg.out_dir, 1)


def test_a_closed_pipe_does_not_prevent_writing_the_page(run):
    """`| head` ended the tool at its first line of output, before it wrote the page."""
    command = f"{ROOT / 'tools' / 'replay.py'} {run} --step=19"
    result = processes.run(["-c", command]) if os.name == "nt" else processes.run(command.split())
    assert result.returncode == 0 and result.stdout.count("replay-19.html") == 1
