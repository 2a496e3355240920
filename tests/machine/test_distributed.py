"""Several processes on this machine that communicate with gloo, started by torchrun where a test is about it."""

import math
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from folio import UserError
from folio.base.settings import COMMAND_LINE
from folio.checkpoints import checkpoint, run_folder
from folio.data.shards import Shard
from folio.data.windows import ValidationWindows
from folio.machine import distributed
from folio.machine.distributed import Group, SharedFlags
from folio.machine.kernels import adapt
from folio.machine.runtime import resolve_runtime
from model import GPT, GPTConfig
from tests.support.processes import wait
from tests.support.runs import assert_same_losses, assert_same_run, read_metrics
from tests.support.simulated_gpu import SimulatedGPU
from tests.support.tolerances import gradients_error
from tests.support.torchrun import (
    LONG_RUN,
    free_port,
    output,
    run_ranks,
    run_torchrun,
    start_ranks,
    start_torchrun,
    wait_for_step,
    worker_ids,
)
from tests.support.waiting import wait_until
from train import TrainConfig, train

# --- the same losses as in one process --------------------------------------------------------------------------------


def test_two_processes_compute_what_one_does(tiny, tmp_path):
    settings = dict(LONG_RUN, max_iters=10, warmup_iters=2, eval_interval=5, n_layer=1, position="relative")
    one = tiny(**settings)
    train(one)
    for mode in ("ddp", "fsdp"):
        two = tiny(**settings, parallel=mode, out_dir=str(tmp_path / mode))
        out = run_ranks(2, two)
        assert "2 processes, the first on cpu" in out and "each process computes 2 x 2 of the sequences" in out
        assert_same_losses(one, two)
        a, b = checkpoint.load(Path(one.out_dir)), checkpoint.load(Path(two.out_dir))
        assert a.model.keys() == b.model.keys() and a.optimizer().keys() == b.optimizer().keys()
        # AdamW may move a weight whose gradient is all error in another direction, by the learning rate per step.
        undecided = gradients_error(a.config(), 8, 32)  # share of such weights
        for name, tensor in a.model.items():
            error = one.max_iters * one.learning_rate * math.sqrt(undecided * tensor.numel())
            assert (b.model[name] - tensor).norm() < error, name


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_number_of_processes_does_not_change_the_losses(tiny, tmp_path, optimizer):
    """Not even if a step's sequences cannot be divided equally: 8 sequences on 3 processes."""
    one = tiny(**LONG_RUN, optimizer=optimizer)
    train(one)
    for processes in (2, 3, 4):
        for mode in ("ddp", "fsdp"):
            several = replace(one, parallel=mode, out_dir=str(tmp_path / f"{mode}{processes}"))
            run_torchrun(processes, several)
            assert_same_losses(one, several)


def test_any_number_of_processes_can_resume_any_checkpoint(tiny, tmp_path):
    """One process, then two with FSDP, then two with DDP, then one again."""
    settings = dict(LONG_RUN, max_iters=20, lr_decay_iters=20, warmup_iters=5, eval_interval=5)
    settings |= dict(optimizer="muon", recompute=True, position="rotary")
    uninterrupted = tiny(**settings)
    train(uninterrupted)
    resumed = replace(uninterrupted, out_dir=str(tmp_path / "resumed"), init_from="resume")
    train(replace(resumed, max_iters=5, init_from="scratch"))
    run_ranks(2, replace(resumed, max_iters=10, parallel="fsdp"))
    run_ranks(2, replace(resumed, max_iters=15))
    train(resumed)
    assert_same_losses(uninterrupted, resumed)
    state = checkpoint.load(Path(resumed.out_dir)).state
    assert state["next_sequence"] == 20 * 8 and [part["from_step"] for part in state["parts"]] == [0, 5, 10, 15]
    assert [part["resolved"].get("processes") for part in state["parts"]] == [None, 2, 2, None]
    assert state["parts"][1]["changes"]["parallel"] == ["ddp", "fsdp"] and not state["parts"][1]["exact"]


def test_masked_targets_have_equal_weight_in_two_processes(tiny, masked_dir, tmp_path):
    """Each process counts the targets of its sequences. With 3 sequences, one process also computes an empty one."""
    settings = dict(LONG_RUN, data_dir=masked_dir, batch_size=3, gradient_accumulation_steps=1, max_iters=20)
    settings |= dict(warmup_iters=2, eval_interval=10)
    one, two = tiny(**settings), tiny(**settings, out_dir=str(tmp_path / "two"))
    train(one)
    assert "some of them masked" in run_ranks(2, two)
    assert_same_losses(one, two, "grad_norm")


def test_fsdp_in_bfloat16_does_not_round_the_angles_of_rotary_positions(process_group, seed):
    """FSDP cast the inputs of each block, including the angles. Without FSDP, the logits are bitwise identical."""
    torch.manual_seed(seed)
    config, device = GPTConfig(64, 50, 2, 2, 32, position="rotary"), torch.device("cpu")
    model, runtime = GPT(config), resolve_runtime("cpu", "bfloat16", False)
    with torch.device("meta"):
        sharded = GPT(config)
    for variant in (model, sharded):
        adapt(variant, runtime)
    distributed.shard(sharded, sharded.transformer.h, Group(), device, runtime.dtype, compile=False)
    distributed.fill_shards(sharded, lambda name: model.get_parameter(name).detach())
    idx = torch.randint(50, (2, 64))
    with runtime.autocast(), torch.no_grad():
        assert torch.equal(sharded.logits(idx), model.logits(idx))


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_compiled_training_in_two_processes(tiny, tmp_path, mode):
    settings = dict(LONG_RUN, max_iters=20, warmup_iters=2, eval_interval=10, parallel=mode, recompute=mode == "fsdp")
    eager, compiled = (tiny(**settings, compile=c, out_dir=str(tmp_path / str(c))) for c in (False, True))
    run_torchrun(2, eager)
    run_torchrun(2, compiled)
    assert_same_losses(eager, compiled)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_one_process_per_gpu(tiny, tmp_path, mode):
    """With nccl, on all GPUs: the losses of one process, and a checkpoint that a CPU can resume."""
    settings = dict(LONG_RUN, max_iters=40, eval_interval=20, compile=False, dtype="float32")
    one = tiny(**settings, device="cuda", out_dir=str(tmp_path / "one"))
    train(one)
    several = tiny(**settings, device="cuda", parallel=mode)
    run_torchrun(torch.cuda.device_count(), several)
    assert_same_losses(one, several)
    resumed = tiny(**{**settings, "max_iters": 45}, device="cpu", init_from="resume")
    train(resumed.replace({"parallel": COMMAND_LINE}))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_several_processes_together_evaluate_each_validation_window_once(ranks):
    shards = [Shard(np.arange(n, dtype="<u2")) for n in (300, 70, 9)]
    windows = ValidationWindows(shards, 8, 300)
    expected = list(windows.batches(4))  # of a single process
    by_rank = [list(windows.batches(4, rank, ranks)) for rank in range(ranks)]
    assert len({len(batches) for batches in by_rank}) == 1
    in_order = [batch for step in zip(*by_rank, strict=True) for batch in step]
    for (expected_x, expected_y), (x, y) in zip(expected, in_order, strict=False):
        assert np.array_equal(expected_x, x) and np.array_equal(expected_y, y)
    assert all((y == -1).all() for _, y in in_order[len(expected) :])  # padding


# --- failed processes, signals, restarts ------------------------------------------------------------------------------


@pytest.fixture
def uninterrupted(tiny, tmp_path) -> TrainConfig:
    """A run in two processes, which another one is to repeat."""
    settings = dict(LONG_RUN, n_layer=1, max_iters=50, lr_decay_iters=50, eval_interval=10, eval_iters=1, dropout=0.1)
    cfg = tiny(**settings, out_dir=str(tmp_path / "uninterrupted"))
    run_ranks(2, cfg)
    return cfg


def test_restarted_processes_continue_bitwise_identically(uninterrupted, tmp_path):
    """Like torchrun, the test restarts them with the same command and id, and a higher count."""
    killed = replace(uninterrupted, out_dir=str(tmp_path / "killed"))
    ranks = start_ranks(2, killed, TORCHELASTIC_RUN_ID="job", TORCHELASTIC_RESTART_COUNT="0")
    wait_for_step(killed, 25)  # the save at step 20 has waited for the one at step 10
    for rank in reversed(ranks):
        rank.kill()
        wait(rank)
    ranks = start_ranks(2, killed, TORCHELASTIC_RUN_ID="job", TORCHELASTIC_RESTART_COUNT="1")
    assert [wait(rank) for rank in ranks] == [0, 0], output(killed)
    assert "resuming from" in output(killed)
    assert_same_run(uninterrupted.out_dir, killed.out_dir)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers in Linux's /proc")
def test_torchrun_restarts_a_process_that_was_killed(uninterrupted, tmp_path):
    killed = replace(uninterrupted, out_dir=str(tmp_path / "killed"))
    torchrun = start_torchrun(killed, "--standalone", "--nproc_per_node=2", "--max-restarts=1")
    wait_for_step(killed, 25)
    os.kill(worker_ids(torchrun)[1], signal.SIGKILL)
    assert torchrun.wait(timeout=300) == 0, output(killed)
    assert "resuming from" in output(killed) and "rank 0 of 2, step " in output(killed)
    assert_same_run(uninterrupted.out_dir, killed.out_dir)


def test_a_flag_is_agreed_to_once_and_one_step_later(process_group):
    """A process still raises its flag in the step in which it is agreed to. It must not be agreed to again."""
    flags = SharedFlags(process_group)
    agreed = [flags.agree(*step) for step in ((0, 0), (0, 1), (0, 1), (0, 0), (0, 0))]
    assert agreed == [[0, 0], [0, 0], [0, 1], [0, 0], [0, 0]]


def rendezvous_options() -> list[str]:
    """torchrun's options for one or two nodes with one process each, both on this machine."""
    place = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-conf=last_call_timeout=3"]
    return ["--nnodes=1:2", "--nproc_per_node=1", "--max-restarts=3", "--rdzv-id=verse", *place]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers in Linux's /proc")
def test_a_run_continues_after_a_node_failure(tiny, tmp_path):
    """The second of two nodes is killed: torchrun and its worker. The first continues alone."""
    settings = dict(LONG_RUN, max_iters=600, lr_decay_iters=600, eval_interval=50, eval_iters=1)
    alone, cfg = tiny(**settings), tiny(**settings, out_dir=str(tmp_path / "failure"))
    train(alone)
    options = rendezvous_options()
    first = start_torchrun(cfg, *options)
    time.sleep(1)
    second = start_torchrun(cfg, *options)
    wait_for_step(cfg, 120)
    assert "2 processes" in output(cfg)
    second.send_signal(signal.SIGSTOP)  # otherwise it could restart its worker before it is killed
    for pid in [*worker_ids(second), second.pid]:
        os.kill(pid, signal.SIGKILL)
    second.wait()
    assert first.wait(timeout=300) == 0, output(cfg)
    assert "resuming from" in output(cfg)
    assert_same_losses(alone, cfg)


@pytest.mark.slow
def test_a_node_can_join_a_run(tiny, tmp_path, monkeypatch):
    """torchrun stops its worker, which saves on SIGTERM, and restarts it together with the new node's worker."""
    settings = dict(LONG_RUN, max_iters=3000, lr_decay_iters=3000, eval_interval=3000, eval_iters=1)
    alone, cfg = tiny(**settings), tiny(**settings, out_dir=str(tmp_path / "joined"))
    train(alone)
    options = rendezvous_options()
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # docs/use/scaling.md
    first = start_torchrun(cfg, *options)
    wait_for_step(cfg, 120)
    second = start_torchrun(cfg, *options)
    assert first.wait(timeout=300) == 0 and second.wait(timeout=300) == 0, output(cfg)
    assert "2 processes" in output(cfg) and "resuming from" in output(cfg)
    first_part, second_part = checkpoint.load(Path(cfg.out_dir)).state["parts"]
    assert first_part["init_from"] == "scratch" and second_part["init_from"] == "resume"
    assert second_part["after"] == "SIGTERM" and second_part["from_step"] >= 120
    assert_same_losses(alone, cfg)


def test_torchrun_does_not_restart_after_a_user_error(tiny):
    cfg = tiny(max_iters=5)
    train(cfg)  # a new run in this folder is then a UserError
    torchrun = start_torchrun(cfg, "--standalone", "--nproc_per_node=1", "--max-restarts=3")
    assert torchrun.wait(timeout=300) != 0
    out = output(cfg)
    assert "--overwrite=True" in out and out.count("error: ") == 1
    assert run_folder.last_state(Path(cfg.out_dir))["step"] == 5


def set_torchrun(monkeypatch: pytest.MonkeyPatch, run_id: str = "none", restarts: int = 0) -> None:
    """Set the variables that torchrun sets for the first of two processes."""
    variables = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="here", MASTER_PORT="29")
    variables |= dict(TORCHELASTIC_RUN_ID=run_id, TORCHELASTIC_RESTART_COUNT=str(restarts))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_a_restart_is_recognized_by_the_run_id(monkeypatch):
    assert not distributed.is_restart(None)
    set_torchrun(monkeypatch, "job7")
    assert distributed.is_restart("job7") and not distributed.is_restart("job6") and not distributed.is_restart(None)
    set_torchrun(monkeypatch, "none", restarts=0)
    assert not distributed.is_restart("none")
    set_torchrun(monkeypatch, "none", restarts=1)
    assert distributed.is_restart("none")


def test_torchrun_can_overwrite_a_damaged_checkpoint(tiny, monkeypatch):
    """--overwrite=True failed, because the checkpoint was loaded to find out whether this was a restart."""
    cfg = tiny(max_iters=3)
    train(cfg)
    (Path(cfg.out_dir) / "step-000003" / "model.safetensors").write_bytes(b"")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job7")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    run_ranks(1, tiny(max_iters=2, overwrite=True))
    assert checkpoint.load(Path(cfg.out_dir)).state["step"] == 2


@pytest.mark.slow
def test_two_processes_share_one_time_budget(tiny):
    """Each process has its own clock, and all follow the decisions of rank 0."""
    out = run_torchrun(2, tiny(minutes=0.3, max_iters=100, eval_interval=20, sample_tokens=0, dropout=0.0))
    state = checkpoint.load(Path(tiny().out_dir)).state
    last_step = read_metrics(tiny().out_dir)[-1]["step"]
    assert state["step"] == state["parts"][-1]["decisions"][-1][1] == last_step and "minutes, at" in out


def test_settings_that_cannot_work_with_several_processes_are_errors(tiny, monkeypatch):
    with pytest.raises(UserError, match=r"parallel=fsdp: .*torchrun"):
        train(tiny(parallel="fsdp"))
    set_torchrun(monkeypatch)
    with pytest.raises(UserError, match="prepare it before"):
        train(tiny(dataset="shakespeare_char"))


def test_two_processes_on_one_gpu_are_refused(monkeypatch):
    """`CUDA_VISIBLE_DEVICES=0 torchrun --nproc_per_node=2` put both ranks on one GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    store = dist.HashStore()
    for uuid in ("a", "b"):  # a scheduler shows each process its GPU as cuda:0
        with SimulatedGPU(get_device_properties=SimpleNamespace(uuid=uuid)):
            distributed.claim_gpu(store, torch.device("cuda:0"))
    with (
        SimulatedGPU(get_device_properties=SimpleNamespace(uuid="a")),
        pytest.raises(UserError, match=r"device=cuda:1: two processes .*CUDA_VISIBLE_DEVICES=0.*--nproc_per_node"),
    ):
        distributed.claim_gpu(store, torch.device("cuda:1"))


def test_a_torch_without_nccl_needs_gloo(monkeypatch):
    """On Windows, the error named no remedy."""
    set_torchrun(monkeypatch)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with SimulatedGPU(), pytest.raises(UserError, match=r"backend=nccl: .*--backend=gloo"):
        distributed.init_process_group(torch.device("cuda:0"), "nccl")


def test_a_process_that_waits_for_others_says_so(monkeypatch):
    """It waited for minutes without a word."""
    lines = []
    monkeypatch.setattr(distributed, "PATIENCE", 0.0)
    monkeypatch.setattr(distributed, "note", lambda line, flush: lines.append(line))
    set_torchrun(monkeypatch)
    with distributed.announced_wait(1, 2):
        wait_until(lambda: lines)
    assert lines == ["rank 1 waits for the other processes; WORLD_SIZE=2 must start, and meet at here:29"]
