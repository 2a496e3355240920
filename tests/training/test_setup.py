"""The setup of a run."""

import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from folio import UserError
from folio.base.settings import COMMAND_LINE
from folio.checkpoints import checkpoint
from folio.machine.runtime import Runtime
from folio.training import setup
from tests.support.processes import run_code
from tests.support.runs import read_metrics, same_tensors
from train import TrainConfig, train


@pytest.mark.parametrize("evaluation, is_limited", [(0.5, False), (30, True)])
def test_a_run_that_evaluates_less_often_is_reported(evaluation, is_limited, monkeypatch, capsys):
    """This was printed whenever evaluations took any time."""
    monkeypatch.setattr(setup, "measure_step", lambda *arguments: 0.1)
    monkeypatch.setattr(setup, "evaluation_seconds", lambda *arguments: evaluation)
    cfg = TrainConfig(minutes=10, eval_interval=100, max_iters=5000).replace({"eval_interval": COMMAND_LINE})
    group = SimpleNamespace(broadcast=lambda value: value)
    loader = SimpleNamespace(runtime=SimpleNamespace(group=group), data=SimpleNamespace(validation_tokens=10**5))
    start, state = SimpleNamespace(resuming=False), SimpleNamespace(model=None, net=None)
    setup.time_budget(cfg, start, state, None, loader, None, time.perf_counter())
    assert ("so the run evaluates every" in capsys.readouterr().out) == is_limited


def test_float16_adapts_its_loss_scale_and_resumes_bitwise_identically(tiny, tmp_path, monkeypatch):
    """Simulates a GPU without bfloat16. The first loss scale is too large and overflows."""
    half = Runtime(torch.device("cpu"), torch.float16, False, "float16")
    monkeypatch.setattr(setup, "resolve_runtime", lambda *args: half)
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**36))
    uninterrupted, resumed = tiny(max_iters=40), tiny(max_iters=40, out_dir=str(tmp_path / "resumed"))
    train(uninterrupted)
    train(tiny(max_iters=20, lr_decay_iters=40, out_dir=resumed.out_dir))
    train(tiny(max_iters=40, init_from="resume", out_dir=resumed.out_dir))
    a, b = checkpoint.load(Path(uninterrupted.out_dir)), checkpoint.load(Path(resumed.out_dir))
    assert same_tensors(a.model, b.model)
    assert a.state["grad_scaler"] == b.state["grad_scaler"] and 1 < a.state["grad_scaler"]["scale"] < 2.0**36
    assert a.state["guard"]["skipped"] == 0
    updates = a.optimizer()["transformer.wte.weight/step"].item()
    assert 20 < updates < 40  # the others only lowered the loss scale
    metrics = read_metrics(uninterrupted.out_dir)
    assert metrics[-1]["loss"] < metrics[0]["loss"]


def test_a_batch_that_needs_twice_the_memory_is_refused(tiny):
    """The forecast was only printed, and the system killed the run."""
    with pytest.raises(UserError, match=r"far too little; use --batch_size="):
        train(tiny(batch_size=2**22, block_size=1024))


COUNT_GRAPHS = """
import sys, torch
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from torch._dynamo.utils import counters
from torch import distributed as dist
from folio.machine.distributed import Group, reshard
from folio.machine.kernels import compile_loss
from folio.machine.runtime import resolve_runtime
from folio.training.setup import wrap
from model import GPTConfig

parallel, group = sys.argv[1], Group()
torch.compile = partial(torch.compile, backend="aot_eager")
if parallel != "one":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = Group(0, 1, dist.group.WORLD)
for recompute in (False, True):
    torch._dynamo.reset()
    counters.clear()
    runtime = replace(resolve_runtime("cpu", "bfloat16", False), compile=True, group=group)
    config = GPTConfig(block_size=16, vocab_size=64, n_layer=2, n_head=2, n_embd=32, position="rotary")
    cfg = SimpleNamespace(parallel="fsdp" if parallel == "fsdp" else "ddp", recompute=recompute, seed=1)
    model, net = wrap(None, config, cfg, runtime)
    loss_fn, idx = compile_loss(net, runtime), torch.zeros(4, 16, dtype=torch.long)
    for _ in range(3):
        model.train()
        loss_fn(idx, idx).backward()
        model.eval()
        with torch.no_grad():
            loss_fn(idx, idx)
        reshard(model)
    if parallel != "fsdp":
        model(idx[:1, :5])  # sampling during training compiles nothing
    print(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))
"""


@pytest.mark.parametrize("parallel, graphs", [("one", 2), ("ddp", 2), ("fsdp", 4)])
def test_compiled_training_has_the_documented_graphs_and_no_breaks(parallel, graphs):
    """One graph in training and one in evaluation, of model and loss; under FSDP, of a block and of the loss.

    With FSDP and activation checkpointing, nothing was compiled; with DDP, the graph broke twice.
    """
    result = run_code(f"sys.argv = ['', {parallel!r}]\n" + COUNT_GRAPHS)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [f"{graphs} 0"] * 2
