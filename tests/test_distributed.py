"""Several processes on this machine, joined by gloo: started by torchrun as a user starts them."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from test_train import assert_same_end, logged

from folio import UserError, checkpoint, distributed
from folio.distributed import Group
from folio.loader import BatchLoader
from folio.optim import Muon
from folio.runtime import Runtime
from folio.shards import Shard, open_dataset
from folio.windows import Mixture, ValidationWindows
from train import TrainConfig, train

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
LONG = dict(batch_size=2, gradient_accumulation_steps=4, max_iters=200, warmup_iters=20, learning_rate=1e-3)
LONG |= dict(muon_learning_rate=0.01, eval_interval=100, eval_iters=None, dropout=0.0, sample_tokens=0)


def command(cfg: TrainConfig) -> list[str]:
    device = "cpu" if cfg.device == "auto" else cfg.device
    return [str(ROOT / "train.py"), *[f"--{name}={value}" for name, value in asdict(cfg).items()], f"--device={device}"]


def start(cfg: TrainConfig, *options: str) -> subprocess.Popen:
    """torchrun, as a process group of its own; what it prints goes to out_dir.log."""
    Path(cfg.out_dir).parent.mkdir(parents=True, exist_ok=True)
    with open(f"{cfg.out_dir}.log", "ab") as log:
        told = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        return subprocess.Popen([*TORCHRUN, *options, *command(cfg)], **told)


def output(cfg: TrainConfig) -> str:
    return Path(f"{cfg.out_dir}.log").read_text(encoding="utf-8")


def run(processes: int, cfg: TrainConfig, *options: str) -> str:
    process = start(cfg, "--standalone", f"--nproc_per_node={processes}", *options)
    assert process.wait(timeout=300) == 0, output(cfg)
    assert "Warning" not in output(cfg), output(cfg)
    return output(cfg)


def wait_for_step(cfg: TrainConfig, step: int) -> None:
    log = Path(cfg.out_dir, "metrics.jsonl")
    deadline = time.monotonic() + 120
    while not log.exists() or len(log.read_bytes().splitlines()) < step:
        assert time.monotonic() < deadline, output(cfg)
        time.sleep(0.02)


def workers(agent: subprocess.Popen) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()]


def largest_difference(first: TrainConfig, second: TrainConfig, *keys: str) -> float:
    pairs = list(zip(logged(first.out_dir), logged(second.out_dir), strict=True))
    assert len(pairs) == first.max_iters
    return max(abs(a[key] - b[key]) for a, b in pairs for key in keys if a[key] is not None)


# --- the same run ---------------------------------------------------------------------------------------------------


def test_two_processes_compute_what_one_does(tiny, tmp_path):
    """Over 200 steps in float32 the losses agree to 1e-5, and so does what is saved."""
    one = tiny(**LONG)
    train(one)
    for mode in ("ddp", "fsdp"):
        two = tiny(**LONG, parallel=mode, out_dir=str(tmp_path / mode))
        told = run(2, two)
        assert "2 processes, the first on cpu" in told and "each process computes 2 x 2 of the sequences" in told
        assert largest_difference(one, two, "loss", "val_loss") < 1e-5
        a, b = checkpoint.load(Path(one.out_dir)), checkpoint.load(Path(two.out_dir))
        assert a.model.keys() == b.model.keys() and a.optimizer().keys() == b.optimizer().keys()
        for name, tensor in a.model.items():
            torch.testing.assert_close(b.model[name], tensor, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer, bound", [("adamw", 1e-5), ("muon", 1e-5)])
def test_the_number_of_processes_does_not_matter(tiny, tmp_path, optimizer, bound):
    """Also where a step cannot be shared out evenly: 8 sequences on 3 processes."""
    one = tiny(**LONG, optimizer=optimizer)
    train(one)
    for processes in (2, 3, 4):
        for mode in ("ddp", "fsdp"):
            many = tiny(
                **LONG, optimizer=optimizer, parallel=mode, out_dir=str(tmp_path / f"{mode}{processes}{optimizer}")
            )
            run(processes, many)
            found = largest_difference(one, many, "loss", "val_loss")
            print(f"{optimizer}, {processes} processes, {mode}: {found:.1e}")
            assert found < bound


def test_any_number_of_processes_goes_on_with_any_checkpoint(tiny, tmp_path):
    """One process, then two with the weights spread, then two with copies, then one again."""
    settings = dict(
        LONG, max_iters=40, lr_decay_iters=40, warmup_iters=5, eval_interval=10, optimizer="muon", recompute=True
    )
    straight = tiny(**settings)
    train(straight)
    settings["out_dir"] = str(tmp_path / "parts")
    train(tiny(**{**settings, "max_iters": 10}))
    run(2, tiny(**{**settings, "max_iters": 20}, parallel="fsdp", init_from="resume"))
    run(2, tiny(**{**settings, "max_iters": 30}, init_from="resume"))
    train(tiny(**settings, init_from="resume"))
    assert largest_difference(straight, tiny(**settings), "loss", "val_loss") < 1e-5
    state = checkpoint.load(Path(settings["out_dir"])).state
    assert state["next_sequence"] == 40 * 8 and [resume["step"] for resume in state["resumes"]] == [10, 20, 30]
    assert state["resumes"][0]["changes"]["parallel"] == ["ddp", "fsdp"] and not state["resumes"][0]["exact"]


def test_unequal_masks_weigh_the_same_in_two_processes(tiny, masked_dir, tmp_path):
    """Each process counts the targets of its own sequences; 3 sequences, so that one of them runs an empty one too."""
    settings = dict(LONG, data_dir=masked_dir, batch_size=3, gradient_accumulation_steps=1, max_iters=20)
    settings |= dict(warmup_iters=2, eval_interval=10)
    one, two = tiny(**settings), tiny(**settings, out_dir=str(tmp_path / "two"))
    train(one)
    assert "of which some do not count" in run(2, two)
    assert largest_difference(one, two, "loss", "val_loss", "grad_norm") < 1e-5


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_compiled_in_two_processes(tiny, tmp_path, mode):
    settings = dict(LONG, max_iters=20, warmup_iters=2, eval_interval=10, parallel=mode, recompute=mode == "fsdp")
    eager, compiled = (tiny(**settings, compile=c, out_dir=str(tmp_path / str(c))) for c in (False, True))
    run(2, eager)
    run(2, compiled)
    assert largest_difference(eager, compiled, "loss", "val_loss") < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_process_on_each_gpu(tiny, tmp_path, mode):
    """By nccl, as many as there are: the curve of one process, and a checkpoint that a CPU goes on with."""
    settings = dict(LONG, max_iters=40, eval_interval=20, compile=False, dtype="float32")
    alone = tiny(**settings, device="cuda", out_dir=str(tmp_path / "alone"))
    train(alone)
    cfg = tiny(**settings, device="cuda", parallel=mode)
    run(torch.cuda.device_count(), cfg)
    assert largest_difference(alone, cfg, "loss", "val_loss") < 1e-4
    train(tiny(**{**settings, "max_iters": 45}, device="cpu", init_from="resume"))


# --- lost workers, signals, errors ------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers in Linux's /proc")
def test_a_lost_worker_is_started_again_and_changes_no_bit(tiny, tmp_path):
    settings = dict(LONG, max_iters=600, lr_decay_iters=600, eval_interval=50, eval_iters=1, dropout=0.1)
    straight = tiny(**settings, out_dir=str(tmp_path / "straight"))
    killed = tiny(**settings, out_dir=str(tmp_path / "killed"))
    run(2, straight)
    agent = start(killed, "--standalone", "--nproc_per_node=2", "--max-restarts=1")
    wait_for_step(killed, 120)
    os.kill(workers(agent)[1], signal.SIGKILL)
    assert agent.wait(timeout=300) == 0, output(killed)
    assert "resuming from" in output(killed) and "rank 0 of 2, step " in output(killed)
    assert_same_end(straight.out_dir, killed.out_dir)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers in Linux's /proc")
def test_a_signal_to_one_process_saves_and_stops_all(tiny):
    cfg = tiny(**{**LONG, "max_iters": 100_000, "eval_interval": 100_000})
    agent = start(cfg, "--standalone", "--nproc_per_node=2")
    wait_for_step(cfg, 20)
    os.kill(workers(agent)[1], signal.SIGTERM)
    assert agent.wait(timeout=60) == 0
    state = checkpoint.load(Path(cfg.out_dir)).state
    assert state["stopped_by"] == "SIGTERM" and f"saved after step {state['step']}" in output(cfg)


def rendezvous() -> list[str]:
    """torchrun's options for one or two machines, which are both this one, with one process each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return [
        "--nnodes=1:2",
        "--nproc_per_node=1",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{port}",
        "--rdzv-id=verse",
        "--rdzv-conf=last_call_timeout=3",
    ]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers in Linux's /proc")
def test_a_machine_is_lost(tiny, tmp_path):
    """Two torchruns with one rendezvous, of which the second is killed with its worker: the first goes on alone."""
    settings = dict(LONG, max_iters=600, lr_decay_iters=600, eval_interval=50, eval_iters=1)
    straight = tiny(**settings, out_dir=str(tmp_path / "straight"))
    train(straight)
    cfg = tiny(**settings, out_dir=str(tmp_path / "lost"))
    options = rendezvous()
    first = start(cfg, *options)
    time.sleep(1)
    second = start(cfg, *options)
    wait_for_step(cfg, 120)
    assert "2 processes" in output(cfg)
    second.send_signal(signal.SIGSTOP)  # so that it starts no other worker while its own is killed
    for pid in [*workers(second), second.pid]:
        os.kill(pid, signal.SIGKILL)
    second.wait()
    assert first.wait(timeout=300) == 0, output(cfg)
    assert "resuming from" in output(cfg)
    assert largest_difference(straight, cfg, "loss", "val_loss") < 1e-5


@pytest.mark.slow
def test_a_machine_is_added(tiny, tmp_path, monkeypatch):
    """torchrun ends its workers with SIGTERM and starts them anew with those that have come: a save in between."""
    settings = dict(LONG, max_iters=3000, lr_decay_iters=3000, eval_interval=3000, eval_iters=1)
    straight = tiny(**settings, out_dir=str(tmp_path / "straight"))
    train(straight)
    cfg = tiny(**settings, out_dir=str(tmp_path / "added"))
    options = rendezvous()
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # docs/scaling.md
    first = start(cfg, *options)
    wait_for_step(cfg, 120)
    second = start(cfg, *options)
    assert first.wait(timeout=300) == 0 and second.wait(timeout=300) == 0, output(cfg)
    assert "2 processes" in output(cfg) and "resuming from" in output(cfg)
    (resume,) = checkpoint.load(Path(cfg.out_dir)).state["resumes"]
    assert resume["after"] == "SIGTERM" and resume["step"] >= 120
    assert largest_difference(straight, cfg, "loss") < 1e-4


def test_what_fails_each_time_is_not_tried_again(tiny):
    cfg = tiny(max_iters=5)
    train(cfg)  # and now its folder is taken
    agent = start(cfg, "--standalone", "--nproc_per_node=2", "--max-restarts=3")
    assert agent.wait(timeout=120) != 0
    told = output(cfg)
    assert "holds the checkpoints of an earlier run" in told and 1 <= told.count("error: ") <= 2
    assert checkpoint.last_state(Path(cfg.out_dir))["step"] == 5


def test_a_restart_is_known_by_its_id(monkeypatch):
    assert not distributed.restarted(None)
    for name, value in dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="here").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job7")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert distributed.restarted("job7") and not distributed.restarted("job6") and not distributed.restarted(None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert not distributed.restarted("none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert distributed.restarted("none")


def test_over_a_damaged_checkpoint_torchrun_can_begin_again(tiny):
    """--overwrite=True was refused there: to know a restart, the whole checkpoint was loaded."""
    cfg = tiny(max_iters=3)
    train(cfg)
    (Path(cfg.out_dir) / "step-000003" / "model.safetensors").write_bytes(b"")
    run(1, tiny(max_iters=2, overwrite=True))
    assert checkpoint.load(Path(cfg.out_dir)).state["step"] == 2


@pytest.mark.parametrize("shape", [(8, 4), (4, 8)])
def test_what_is_gathered_is_contiguous(monkeypatch, seed, shape):
    """Muon gathered transposed matrices, which gloo copies and NCCL refuses: on GPUs it ended at once."""
    torch.manual_seed(seed)
    gathered = []

    def strict(parts, part):
        assert part.is_contiguous() and all(one.is_contiguous() for one in parts)
        gathered.append(part)
        for one in parts:
            one.copy_(part)

    monkeypatch.setattr(distributed.dist, "all_gather", strict)
    group = Group(rank=1, size=2, gloo="stands for a group")
    weight = torch.nn.Parameter(torch.randn(shape))
    muon = Muon([{"params": [weight], "lr": 1.0, "weight_decay": 0.0, "rows": shape[0], "dtype": torch.float32}], group)
    weight.grad = torch.randn(shape)
    muon.step()
    assert len(gathered) == 1


@pytest.mark.slow
def test_two_processes_keep_one_budget(tiny):
    """Each has a clock of its own, and all take the decisions of the first."""
    told = run(2, tiny(minutes=0.3, max_iters=100, eval_interval=20, sample_tokens=0, dropout=0.0))
    state = checkpoint.load(Path(tiny().out_dir)).state
    assert state["step"] == state["decisions"][-1][1] == logged(tiny().out_dir)[-1]["step"] and "minutes, at" in told
    assert 0.8 * 18 < state["budget"]["spent"] < 1.5 * 18  # the machine is not ours


def test_what_cannot_work_with_several_processes_is_refused(tiny, monkeypatch):
    with pytest.raises(UserError, match="parallel=fsdp: start it with torchrun"):
        train(tiny(parallel="fsdp"))
    for name, value in dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="here").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="prepare it before the processes start"):
        train(tiny(dataset="shakespeare_char"))


# --- who reads what ---------------------------------------------------------------------------------------------------


def loader_of(rank: int, size: int, data: Mixture, batch_size: int, accumulation: int, resident: bool) -> BatchLoader:
    runtime = Runtime(torch.device("cpu"), torch.float32, False, "", Group(rank, size))
    return BatchLoader(data, runtime, batch_size, accumulation, resident)


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_the_ranks_together_read_each_window_once(data_dir, size, resident):
    """An epoch in steps of 12 sequences, shared by so many: each sequence once, in order, and the weights sum to 1."""
    data = Mixture([(open_dataset(data_dir / "verse"), 1.0)], 32, 1337, "epoch")
    loaders = [loader_of(rank, size, data, 4, 3, resident) for rank in range(size)]
    assert len({(loader.count, loader.rows) for loader in loaders}) == 1 and loaders[0].rows <= 4
    assert (
        sum(loader.mine for loader in loaders) == 12
        and max(f.mine for f in loaders) - min(f.mine for f in loaders) <= 1
    )
    per_epoch = data.training[0].per_epoch // 12 * 12
    for first in range(0, per_epoch, 12):
        expected, targets = data.batch(first, 12)
        read, counted, weight = [], 0, 0.0
        for loader in loaders:
            for x, y, share in loader.micro_batches(first):
                assert x.shape == y.shape == (loader.rows, 32)
                whole = (y != -1).all(dim=1)
                assert ((y != -1).any(dim=1) == whole).all() and share == pytest.approx(whole.sum().item() / 12)
                read.append(torch.stack([x[whole], y[whole]]))
                counted, weight = counted + int(whole.sum()), weight + share
        assert counted == 12 and weight == pytest.approx(1)
        assert torch.equal(torch.cat(read, dim=1), torch.from_numpy(np.stack([expected, targets])))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_ranks_share_out_the_validation_windows(ranks):
    shards = [Shard(np.arange(n, dtype="<u2")) for n in (300, 70, 9)]
    windows = ValidationWindows(shards, 8, 300)
    alone = list(windows.batches(4))
    shared = [list(windows.batches(4, rank, ranks)) for rank in range(ranks)]
    assert len({len(batches) for batches in shared}) == 1
    in_turn = [batch for of_round in zip(*shared, strict=True) for batch in of_round]
    for (x, y), (mine, counted) in zip(alone, in_turn, strict=False):
        assert np.array_equal(x, mine) and np.array_equal(y, counted)
    assert all((y == -1).all() for _, y in in_turn[len(alone) :])
