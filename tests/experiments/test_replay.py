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

import tools.replay as replay_script
from folio import UserError
from folio.base import settings, stop_signals
from folio.base.files import locked
from folio.checkpoints import checkpoint, run_folder
from folio.data.windows import Mixture
from folio.experiments.replay import merge_parts
from folio.machine.runtime import Runtime
from folio.training import setup
from folio.training.setup import open_data
from model import GPT
from prepare import text as prepare_text
from tests.support.processes import run, wait
from tests.support.replays import SMALLEST, remove_checkpoints, replay
from tests.support.runs import blank_part, edit_state, read_metrics, write_as_version_1
from tests.support.simulated import SimulatedMachine
from tests.support.torchrun import ROOT, run_ranks, start_script_ranks
from tools.replay import ReplayConfig, main
from train import TrainConfig, train


def mean_of_tokens(facts: dict) -> float:
    losses = [loss for sequence in facts["sequences"] for loss in sequence["losses"] if loss is not None]
    return math.fsum(losses) / max(1, len(losses))  # a step without a target has a loss of zero


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


@pytest.mark.parametrize("optimizer, workers", [("adamw", 1), ("muon", 1), ("muon", 2)])
def test_replayed_steps_are_bitwise_identical_to_the_log(tiny, capsys, optimizer, workers):
    """From step 0 and from a checkpoint, with dropout and accumulation."""
    cfg = tiny(gradient_accumulation_steps=2, batch_size=3, optimizer=optimizer, workers=workers)
    train(cfg)
    logged = {line["step"]: line for line in read_metrics(cfg.out_dir)}
    for step, start in ((1, 0), (6, 0), (7, 6), (12, 6)):
        capsys.readouterr()
        facts = replay(cfg, step)
        assert facts["replayed_from"] == ("the checkpoint of step 6" if start else "step 0, random weights")
        assert (facts["loss"], facts["grad_norm"]) == (logged[step]["loss"], logged[step]["grad_norm"])
        assert facts["bitwise"] is True and facts["equal_before"] == [*range(start + 1, step)]
        assert mean_of_tokens(facts) == pytest.approx(facts["loss"], abs=1e-6)
        rates = {group["optimizer"]: group["learning_rate"] for group in facts["learning_rates"]}
        assert rates["AdamW"] == logged[step]["lr"]
        if optimizer == "muon":
            assert rates["Muon"] == pytest.approx(logged[step]["lr"] * cfg.muon_learning_rate / cfg.learning_rate)
        out = capsys.readouterr().out
        assert f"replaying {step - start} step" in out and "at the run's" in out
        assert "nats per token; bitwise identical to the logged loss" in out
        assert facts["clip_factor"] == pytest.approx(min(1, cfg.grad_clip / facts["grad_norm"]), rel=1e-5)


def test_other_dtype_position_sampling_and_checkpointing(tiny):
    """bfloat16, attention with a learned bias, random sequences, and activation checkpointing."""
    cfg = tiny(dtype="bfloat16", position="relative", sampling="random", recompute=True)
    train(cfg)
    facts = replay(cfg, 9)
    assert facts["bitwise"] and facts["equal_before"] == [7, 8]
    assert mean_of_tokens(facts) == pytest.approx(facts["loss"], abs=1e-6)


def test_float16_scales_the_loss_and_skips_overflows(tiny, poison, monkeypatch):
    """Gradients are reported without the loss scale. An overflow only lowers the scale."""
    half = Runtime(torch.device("cpu"), torch.float16, False, "float16")
    for script in (setup, replay_script):
        monkeypatch.setattr(script, "resolve_runtime", lambda *args: half)
    cfg = tiny(max_iters=8, eval_interval=4)
    poison(cfg, 4 * 4, 1e6)
    train(cfg)
    overflowed, others = replay(cfg, 5), replay(cfg, 6)
    assert overflowed["bitwise"] and others["bitwise"] and others["skipped"] is None
    assert re.fullmatch(r"its gradient overflowed float16 at the loss scale 65,?536, .*", overflowed["skipped"])
    assert all(p["update_norm"] == 0 for p in overflowed["parameters"])
    norms = [p["gradient_norm"] for p in others["parameters"]]
    assert math.hypot(*norms) == pytest.approx(others["grad_norm"], rel=1e-3) and others["grad_norm"] < 100


def test_losses_gradients_and_updates_match_an_independent_pass(tiny, text):
    """The reference is one pass over the whole step, and the checkpoints before and after it."""
    cfg = tiny(gradient_accumulation_steps=2, dropout=0.0, eval_interval=1, keep_last=12, grad_clip=0.01)
    train(cfg)
    facts, training = replay(cfg, 8), text[: int(0.9 * len(text))]
    before, after = (checkpoint.load(Path(cfg.out_dir, f"step-{step:06d}")) for step in (7, 8))
    sequences = facts["sequences"]
    assert [sequence["number"] for sequence in sequences] == [*range(7 * 8, 8 * 8)]
    for sequence in sequences:
        offset = sequence["offset"]
        assert sequence["text"] == training[offset : offset + cfg.block_size + 1] and sequence["shards"] == 1
    ids = torch.tensor([before.tokenizer.encode(sequence["text"]).tolist() for sequence in sequences])
    assert ids.tolist() == [sequence["ids"] for sequence in sequences]

    model = before.build()
    log_p = model.logits(ids[:, :-1]).log_softmax(dim=-1)
    expected = -log_p.gather(2, ids[:, 1:, None])[..., 0]  # (B, T)
    torch.testing.assert_close(torch.tensor([s["losses"] for s in sequences]), expected.detach(), rtol=0, atol=2e-6)
    assert [s["loss"] for s in sequences] == pytest.approx(expected.mean(dim=1).tolist(), abs=1e-6)
    chosen = torch.tensor([s["guesses"] for s in sequences])
    torch.testing.assert_close(log_p.gather(2, chosen[..., None])[..., 0], log_p.max(dim=-1).values, rtol=0, atol=1e-5)
    guess_p = torch.tensor([s["guess_probabilities"] for s in sequences])
    torch.testing.assert_close(guess_p, log_p.max(dim=-1).values.exp(), rtol=0, atol=1e-5)

    model(ids[:, :-1], targets=ids[:, 1:])[1].backward()
    parameters = {p["name"]: p for p in facts["parameters"]}
    assert parameters.keys() == {name for name, _ in model.named_parameters()}
    for name, p in model.named_parameters():
        change = (after.model[name] - before.model[name]).norm().item()
        assert parameters[name]["gradient_norm"] == pytest.approx(p.grad.norm().item(), rel=1e-4, abs=1e-7)
        assert parameters[name]["update_norm"] == pytest.approx(change, rel=1e-6)
        assert parameters[name]["weight_norm"] == pytest.approx(before.model[name].norm().item(), rel=1e-6)
        assert parameters[name]["relative_update"] == pytest.approx(change / before.model[name].norm().item(), rel=1e-5)
    assert math.hypot(*(p["gradient_norm"] for p in facts["parameters"])) == pytest.approx(facts["grad_norm"], rel=1e-5)
    assert facts["clip_factor"] == pytest.approx(0.01 / facts["grad_norm"], rel=1e-3)


def test_a_step_between_logged_ones(tiny, capsys):
    cfg = tiny(log_interval=5, eval_interval=6)
    train(cfg)
    facts = replay(cfg, 4)
    assert facts["bitwise"] is None and facts["equal_before"] == [1]
    facts = replay(cfg, 12 - 1)
    assert facts["equal_before"] == [10] and facts["logged_loss"] is None
    out = capsys.readouterr().out
    assert "step 11 was not logged" in out and "the only logged step replayed before it is bitwise identical" in out


def test_masked_targets_have_no_loss(tiny, masked_dir):
    cfg = tiny(data_dir=masked_dir, gradient_accumulation_steps=2, max_iters=4, eval_interval=4)
    train(cfg)
    facts = replay(cfg, 4)
    mask = np.fromfile(Path(masked_dir, "verse", "train_mask.bin"), np.uint8)
    for sequence in facts["sequences"]:
        counts = mask[sequence["offset"] + 1 : sequence["offset"] + 1 + cfg.block_size]
        assert [loss is not None for loss in sequence["losses"]] == counts.astype(bool).tolist()
        assert (sequence["loss"] is not None) == counts.any()
    assert facts["bitwise"] and mean_of_tokens(facts) == pytest.approx(facts["loss"], abs=1e-6)


def test_sequences_of_a_mixture_come_from_their_data_sets(tiny, mixed_dir, text):
    cfg = tiny(dataset="verse:0.7,prose:0.3", data_dir=mixed_dir, max_iters=3, eval_interval=3)
    train(cfg)
    facts = replay(cfg, 3)
    prose = "The king and the sword.\n" * 300
    texts = {"verse": text, "prose": "".join(c for c in prose if c in text)}
    for sequence in facts["sequences"]:
        offset = sequence["offset"]
        assert sequence["text"] == texts[sequence["dataset"]][offset : offset + cfg.block_size + 1]
    assert facts["bitwise"] and {sequence["dataset"] for sequence in facts["sequences"]} == {"verse", "prose"}


def test_skipped_steps_have_a_reason(tiny, poison, capsys):
    cfg = tiny(max_iters=112, eval_interval=200, skip_spikes=20.0, log_interval=50, **SMALLEST)
    poison(cfg, 108, 1e4)
    train(cfg)
    facts = replay(cfg, 109)
    assert facts["equal_before"] == [1, 50, 100]
    number = r"[\d,.]+"
    assert re.match(
        rf"its gradient norm is {number} standard deviations above the mean of {number} \(", facts["skipped"]
    )
    assert all(p["update_norm"] == 0 for p in facts["parameters"])
    facts = replay(cfg, 110)
    assert facts["skipped"] is None and all(p["update_norm"] > 0 for p in facts["parameters"])
    assert "skipped:       yes: its gradient norm is" in capsys.readouterr().out


def test_a_step_that_is_not_finite(tiny, poison):
    """The run stopped at step 8, which is recorded only in skipped/."""
    cfg = tiny(max_bad_steps=1, **SMALLEST)
    poison(cfg, 7, math.nan)
    with pytest.raises(UserError, match="stopped at step 8: the gradient is not finite"):
        train(cfg)
    facts = replay(cfg, 8)
    assert facts["skipped"] == "its gradient norm is nan" and facts["bitwise"]
    assert facts["grad_norm"] == "nan" and facts["logged_grad_norm"] is None and math.isfinite(facts["loss"])
    assert all(p["gradient_norm"] == "nan" and p["update_norm"] == 0 for p in facts["parameters"])
    with pytest.raises(UserError, match=r"step=9: the last step of .* is 8"):
        replay(cfg, 9)


# --- settings, checkpoint and runtime of a step -----------------------------------------------------------------------


def test_a_run_that_was_resumed_with_other_settings(tiny):
    """Steps are replayed with their settings, even if only the last checkpoint is left, in both formats."""
    cfg = tiny(max_iters=4, lr_decay_iters=12, sampling="random")
    train(cfg)
    changes = dict(
        sampling="random",
        learning_rate=1e-3,
        dropout=0.3,
        batch_size=2,
        gradient_accumulation_steps=2,
        weight_decay=0.0,
    )
    train(tiny(max_iters=8, init_from="resume", **changes))
    train(tiny(max_iters=8, init_from="resume", **changes, patience=9))  # nothing to train
    train(tiny(max_iters=12, init_from="resume", **{**changes, "grad_clip": 0.1}))
    assert replay(cfg, 10)["replayed_from"] == "the checkpoint of step 8"
    remove_checkpoints(cfg, *(int(path.name[5:]) for path in run_folder.directories(Path(cfg.out_dir))[:-1]))
    for version, step in ((2, 3), (2, 4), (2, 5), (2, 9), (2, 12), (1, 10)):
        if version == 1:
            write_as_version_1(Path(cfg.out_dir))
        facts = replay(cfg, step)
        assert facts["bitwise"] and facts["equal_before"] == [*range(1, step)], step
        assert facts["replayed_from"] == "step 0, random weights"


def test_a_run_with_a_time_budget(tiny, monkeypatch, capsys):
    """Learning rates depend on decisions about the run's length."""
    recipe = dict(max_iters=100, eval_interval=20, lr_schedule="wsd", wsd_decay_iters=50, warmup_iters=5, keep_last=9)
    recipe["sampling"] = "random"  # version 1 had another order in epochs
    cfg = tiny(**recipe, **SMALLEST, minutes=0.5, sample_tokens=0)
    with monkeypatch.context() as patch:
        SimulatedMachine(patch, lambda step: 0.5 if step < 20 else 1.5, lambda step: 0.1, trains=True)
        train(cfg)
    state = checkpoint.load(Path(cfg.out_dir)).state
    assert len(state["parts"][-1]["decisions"]) > 1
    last = state["step"]
    assert replay(cfg, last)["bitwise"]
    train(tiny(**{**recipe, "max_iters": last + 3}, **SMALLEST, init_from="resume", minutes=None, sample_tokens=0))
    assert replay(cfg, last)["bitwise"] and replay(cfg, last + 2)["bitwise"]
    remove_checkpoints(cfg, *(int(path.name[5:]) for path in run_folder.directories(Path(cfg.out_dir))[:-1]))
    assert replay(cfg, last)["bitwise"]
    write_as_version_1(Path(cfg.out_dir))
    capsys.readouterr()
    facts = replay(cfg, last)
    assert facts["bitwise"] is False and "the logged learning rate is" in facts["remarks"][-1]
    assert f"planned length of the run before step {last:,} is not recorded" in capsys.readouterr().out


def test_a_run_with_another_order_is_refused(tiny):
    """Other sequences would be replayed."""
    cfg = tiny(max_iters=3)
    train(cfg)
    write_as_version_1(Path(cfg.out_dir))
    with pytest.raises(UserError, match=r'cannot be replayed: .*sampling="epoch" with one phase per epoch'):
        replay(cfg, 2)


def test_a_run_that_used_windows_without_targets_is_refused(tiny, masked_dir):
    cfg = tiny(data_dir=masked_dir, max_iters=3)
    train(cfg)
    for path in run_folder.directories(Path(cfg.out_dir)):
        edit_state(path, lambda state: [part.pop("without_targets") for part in state["parts"]])
    with pytest.raises(UserError, match=r"cannot be replayed: .*windows without targets"):
        replay(cfg, 2)


def test_a_step_without_targets_is_not_replayed(tiny, masked_dir, monkeypatch):
    """It has no loss to compare, and no gradients. Later steps are replayed through it."""
    batch = Mixture.batch

    def without_step_2(self, first, count):
        x, y = batch(self, first, count)
        return x, np.where(np.isin(np.arange(first, first + count), range(4, 8))[:, None], -1, y)

    monkeypatch.setattr(Mixture, "batch", without_step_2)
    cfg = tiny(data_dir=masked_dir, max_iters=3, eval_interval=3)
    train(cfg)
    with pytest.raises(UserError, match="step=2: it has no targets"):
        replay(cfg, 2)
    facts = replay(cfg, 3)
    assert facts["bitwise"] and facts["equal_before"] == [1, 2]


def test_a_finetuned_run(tiny, tmp_path, capsys):
    """Step 0 has the base's weights, even after the run was resumed, when init_from is "resume"."""
    train(tiny(out_dir=str(tmp_path / "base")))
    cfg = tiny(out_dir=str(tmp_path / "fine"), init_from=str(tmp_path / "base"), max_iters=6, eval_interval=3)
    train(cfg)
    train(tiny(out_dir=cfg.out_dir, init_from="resume", max_iters=9))
    remove_checkpoints(cfg, 6)
    assert checkpoint.load(Path(cfg.out_dir)).state["parts"][0]["init_from"] == str(tmp_path / "base")
    facts = replay(cfg, 7)
    assert facts["bitwise"] and facts["replayed_from"] == f"step 0, the weights of {tmp_path / 'base'}"
    train(tiny(out_dir=str(tmp_path / "base"), init_from="resume", max_iters=14))
    facts = replay(cfg, 2)
    assert facts["bitwise"] is False and facts["different_before"] == [1]
    assert "from which it started, may have changed" in facts["remarks"][-1]
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(UserError, match="no checkpoint before this step, and the weights that it started from cannot"):
        replay(cfg, 2)


def test_each_part_is_replayed_with_its_number_of_threads(tiny, monkeypatch, capsys):
    """The number of threads affects rounding."""
    train(tiny(max_iters=2))
    train(tiny(max_iters=4, init_from="resume"))
    threads = torch.get_num_threads()
    remove_checkpoints(tiny(), 2)
    last = Path(tiny().out_dir, "step-000004")
    assert [part["threads"] for part in run_folder.read_state(last)["parts"]] == [threads, threads]
    edit_state(last, lambda state: state["parts"][1].update(threads=threads + 1))
    thread_counts: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(torch, "set_num_threads", thread_counts.append)
        assert replay(tiny(), 4)["bitwise"]
    assert thread_counts[-2:] == [threads, threads + 1]


def test_consecutive_parts_with_equal_settings_are_merged():
    """Otherwise, a run that was killed a hundred times would be set up a hundred times."""
    other_seed = blank_part(6, threads=2, changes={"seed": [1, 2]})
    records = [blank_part(0), blank_part(3), blank_part(5, threads=2), other_seed]
    parts = merge_parts(records, {"seed": 2}, TrainConfig)
    expected = [(0, 5, 1, 1), (5, 6, 1, 2), (6, math.inf, 2, 2)]
    assert [(part.begin, part.end, part.cfg.seed, part.record["threads"]) for part in parts] == expected


def test_a_different_dtype_is_given_as_the_reason(tiny, capsys):
    train(tiny())
    facts = replay(tiny(), 12, dtype="bfloat16")
    assert facts["bitwise"] is False and facts["loss"] == pytest.approx(facts["logged_loss"], abs=0.05)
    reason = "it was trained with dtype=float32, not bfloat16"
    assert facts["remarks"] == ["the first step that differs from the log is 7", f"the likely reason: {reason}"]
    out = capsys.readouterr().out
    assert f"it may not be bitwise identical: {reason}" in out and "the logged loss is" in out


def test_a_damaged_checkpoint_is_skipped(tiny, capsys):
    cfg = tiny(eval_interval=3, keep_last=9)
    train(cfg)
    file = Path(cfg.out_dir, "step-000006", "model.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    facts = replay(cfg, 8)
    assert facts["bitwise"] and facts["replayed_from"] == "the checkpoint of step 3"
    assert "model.safetensors has changed since it was written" in capsys.readouterr().err
    Path(cfg.out_dir, "step-000003", "manifest.json").unlink()
    assert replay(cfg, 8)["replayed_from"] == "step 0, random weights"
    assert "step-000003 was removed; replaying from an earlier step" in capsys.readouterr().err


def test_a_checkpoint_of_abandoned_steps_is_skipped(tiny, tmp_path):
    """The run was resumed from step 3 with another learning rate, while the old checkpoint of step 4 remains."""
    cfg = tiny(eval_interval=1, keep_last=9, max_iters=4, lr_decay_iters=12)
    train(cfg)
    abandoned = Path(cfg.out_dir, "step-000004")
    abandoned.rename(tmp_path / "abandoned")
    train(tiny(eval_interval=5, keep_last=9, lr_decay_iters=12, max_iters=9, init_from="resume", learning_rate=1e-4))
    (tmp_path / "abandoned").rename(abandoned)
    facts = replay(cfg, 5)
    assert facts["bitwise"] and facts["replayed_from"] == "the checkpoint of step 3"


def test_a_missing_step_or_run_is_an_error(tiny, tmp_path, monkeypatch):
    cfg = tiny(max_iters=2, eval_interval=2)
    train(cfg)
    (tmp_path / "empty").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "metrics.jsonl").write_text('{"step": 0}\n')
    monkeypatch.chdir(tmp_path)
    for name, step, message in (
        ("out", 3, r"step=3: the last step of out is 2; choose one up to it"),
        ("out/step-000002", 1, r"is one checkpoint; name the run: .*out$"),
        ("gpt2", 1, r"gpt2 contains only weights"),
        ("empty", 1, r"empty holds no checkpoint: try out"),
        ("missing", 1, r"missing holds no checkpoint"),
        ("*", 1, r"\* matches \d folders; name one run: "),
        ("new", 1, r"new has no checkpoint yet; wait"),
    ):
        with pytest.raises(UserError, match=message):
            main(ReplayConfig(run=(name,), step=step))


# --- several processes ------------------------------------------------------------------------------------------------


def replay_by_ranks(processes: int, cfg: TrainConfig, step: int) -> tuple[dict, str]:
    """Replay a step in several processes. Returns the content of --json, and the output."""
    log, path = Path(f"{cfg.out_dir}-{step}.log"), Path(cfg.out_dir).with_suffix(".json")
    words = [ROOT / "tools" / "replay.py", cfg.out_dir, f"--step={step}", f"--json={path}"]
    ranks = start_script_ranks(processes, words, str(log))
    assert [wait(rank) for rank in ranks] == [0] * processes, log.read_text(encoding="utf-8")
    return json.loads(path.read_text(encoding="utf-8")), log.read_text(encoding="utf-8")


def check_two_processes(cfg: TrainConfig) -> None:
    run_ranks(2, cfg)
    facts, out = replay_by_ranks(2, cfg, 8)
    assert "Warning" not in out and out.count("bitwise identical to the logged loss") == 1  # only from rank 0
    assert facts["bitwise"] and facts["equal_before"] == [7]
    sequences = cfg.accumulation * cfg.batch_size
    assert [s["number"] for s in facts["sequences"]] == [*range(7 * sequences, 8 * sequences)]
    assert mean_of_tokens(facts) == pytest.approx(facts["loss"], abs=1e-6)
    norms = [p["gradient_norm"] for p in facts["parameters"]]
    assert math.hypot(*norms) == pytest.approx(facts["grad_norm"], rel=1e-5)

    single = replay(cfg, 8)
    assert single["loss"] == pytest.approx(facts["loss"], abs=1e-5)
    assert [p["gradient_norm"] for p in single["parameters"]] == pytest.approx(norms, rel=1e-3)
    tokens = [[loss for s in report["sequences"] for loss in s["losses"]] for report in (facts, single)]
    assert tokens[0] == pytest.approx(tokens[1], abs=1e-4)
    if not single["bitwise"]:
        assert "trained by 2 processes, not 1" in single["remarks"][-1] and "(use torchrun" in single["remarks"][-1]


def test_several_processes_replay_the_whole_step(tiny):
    """Seven sequences on two processes: one computes four, the other three and one of padding."""
    check_two_processes(tiny(batch_size=1, gradient_accumulation_steps=7, dropout=0.0))


@pytest.mark.parametrize("optimizer", ["muon", pytest.param("adamw", marks=pytest.mark.slow)])
def test_several_processes_with_fsdp_replay_the_whole_step(tiny, optimizer):
    check_two_processes(
        tiny(batch_size=1, gradient_accumulation_steps=7, dropout=0.0, parallel="fsdp", optimizer=optimizer)
    )


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_replay_writes_only_its_page_and_ignores_the_lock(tiny):
    cfg = tiny()
    train(cfg)
    folder = Path(cfg.out_dir)
    with locked(folder / ".lock", "busy"), open(folder / "metrics.jsonl", "a") as log:
        log.write('{"step": 13, "lo')  # another process is writing this line
        log.flush()
        files = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}
        assert replay(cfg, 9)["bitwise"]
        (folder / "replay-9.html").unlink()
        after = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}
        assert after == files


def test_ctrl_c_ends_with_one_line(tiny, monkeypatch):
    train(tiny())
    step = replay_script.train_step

    def interrupted(state, *args):
        if state.step == 3:
            raise KeyboardInterrupt
        step(state, *args)

    monkeypatch.setattr(replay_script, "train_step", interrupted)
    with pytest.raises(KeyboardInterrupt) as stop:
        replay(tiny(), 5)
    assert stop_signals.describe(stop.value) == "stopped by SIGINT; nothing was written"
    assert not list(Path(tiny().out_dir).glob("*.html"))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--step=3"], r"name one run.*python tools/replay\.py out-shakespeare-char --step=1200"),
        (["out"], "step: .*python tools/replay"),
        (["out", "--step=0"], "step=0.*at least 1"),
        (["out", "more", "--step=3"], "name one run"),
    ],
)
def test_bad_arguments_are_an_error_in_one_line(arguments, message):
    with pytest.raises(UserError, match=message) as error:
        settings.load(ReplayConfig, arguments)
    assert "\n" not in str(error.value)


def test_an_unwritable_output_is_an_error(tiny, tmp_path, capsys):
    """The report is printed anyway, because a replay may take a long time."""
    train(tiny(max_iters=1))
    (tmp_path / "file").touch()
    for name in ("output", "json"):
        capsys.readouterr()
        with pytest.raises(UserError, match=rf"{name}=.* cannot be written .*choose another --{name}"):
            main(ReplayConfig(run=(tiny().out_dir,), step=1, **{name: str(tmp_path / "file" / "x")}))
        assert "bitwise identical to the logged loss" in capsys.readouterr().out


def test_missing_or_changed_data_is_an_error(tiny, data_dir, tmp_path):
    shutil.copytree(data_dir / "verse", tmp_path / "data" / "verse")
    train(tiny(data_dir=str(tmp_path / "data"), max_iters=2))
    (tmp_path / "data").rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"out cannot be replayed: its training data, .*verse, does not exist"):
        replay(tiny(), 2)
    assert replay(tiny(), 2, data_dir=str(tmp_path / "moved"))["bitwise"]
    source = tmp_path / "verse.txt"
    source.write_text("other words\n" * 100)
    prepare_text.main(prepare_text.TextConfig(inputs=(str(source),), data_dir=str(tmp_path / "data")))
    with pytest.raises(UserError, match=r"out cannot be replayed: .*verse, has been prepared again since then"):
        replay(tiny(), 2)


def test_a_closed_pipe_does_not_prevent_writing_the_page(tiny):
    """`| head` ended the tool at its first line of output, before it wrote the page."""
    train(tiny(max_iters=2))
    command = f"{ROOT / 'tools' / 'replay.py'} {tiny().out_dir} --step=2"
    result = run(["-c", command]) if os.name == "nt" else run(command.split())
    assert result.returncode == 0 and result.stdout.count("replay-2.html") == 1
