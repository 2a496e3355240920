"""The setup of a run."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from folio import UserError
from folio.base import settings
from folio.base.settings import COMMAND_LINE
from folio.checkpoints import checkpoint
from folio.machine.distributed import Group, full_tensor
from folio.machine.kernels import adapt, pad_vocabulary
from folio.machine.runtime import Runtime, resolve_runtime
from folio.training import setup
from folio.training.setup import build_optimizer, wrap
from folio.training.start import MODEL_SETTINGS, Start
from folio.training.state import TrainState
from model import GPT, GPTConfig
from tests.support.models import SMALL
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
    data = SimpleNamespace(validation_tokens=10**4, validation={"verse": SimpleNamespace(tokens=10**4)})
    loader = SimpleNamespace(runtime=SimpleNamespace(group=group), data=data)
    state = SimpleNamespace(model=None, net=None, step=0)
    setup.time_budget(cfg, Start(cfg, None), state, None, loader, None, time.perf_counter())
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


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_checkpoint_does_not_contain_the_padding_of_the_vocabulary(parallel, seed, monkeypatch):
    """A run goes from CUDA, where the vocabulary is padded, to a CPU and back."""
    V, group = 50, Group()
    if parallel == "fsdp":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group = Group(0, 1, dist.group.WORLD)
    runtime, config = replace(resolve_runtime("cpu", "float32", False), group=group), GPTConfig(**SMALL)
    cfg = TrainConfig(parallel=parallel, optimizer="muon", seed=seed)

    def state_from(tensors, multiple):
        monkeypatch.setattr(Runtime, "size_multiple", multiple)
        weights, optimizer = ({name: t.clone() for name, t in part.items()} for part in tensors)
        model, net = wrap(GPT.from_tensors(config, weights) if weights else None, config, cfg, runtime)
        guard, scaler = setup.StepGuard(runtime.device, None, None), torch.amp.GradScaler("cpu", enabled=False)
        state = TrainState(model, net, build_optimizer(model, cfg, runtime), scaler, guard)
        if optimizer:
            state.load(state.progress(), optimizer)
        assert len(model.lm_head.weight) == (128 if multiple == 128 else V)
        return state

    def three_steps(state):
        for step in range(3):
            idx = torch.randint(V, (2, 17), generator=torch.Generator().manual_seed(step))
            state.net(idx[:, :-1], idx[:, 1:])[1].backward()
            state.optimizer.step()
            state.optimizer.zero_grad()
        return state.tensors(keep=True, copy=True)

    try:
        new = ({}, {})
        initial = [state_from(new, multiple).tensors(keep=True, copy=True) for multiple in (1, 128)]
        assert same_tensors(initial[0][0], initial[1][0])
        on_cuda = state_from(new, 128)
        saved = three_steps(on_cuda)
        assert {name: t.shape for name, t in saved[0].items()} == {name: t.shape for name, t in initial[0][0].items()}
        assert saved[1]["transformer.wte.weight/exp_avg"].shape == (V, config.n_embd)
        on_cpu = state_from(saved, 1)
        loaded = on_cpu.tensors(keep=True, copy=True)
        back = state_from(loaded, 128)
        for tensors in (loaded, back.tensors(keep=True, copy=True)):
            assert all(same_tensors(a, b) for a, b in zip(tensors, saved, strict=True))
        continued = three_steps(on_cuda)
        assert all(same_tensors(a, b) for a, b in zip(three_steps(back), continued, strict=True))
        assert (full_tensor(back.model.lm_head.weight)[V:] == 0).all()
        for name, weight in three_steps(on_cpu)[0].items():
            torch.testing.assert_close(weight, continued[0][name], atol=1e-4, rtol=1e-3)
    finally:
        if group.gloo:
            dist.destroy_process_group()


class Products(TorchDispatchMode):
    """Records the leading dimensions of the matrices in matmuls: the stride of the dimension that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.leading: list[tuple[str, tuple[int, ...], int]] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if operator.name().split("::")[1].split(".")[0] in ("mm", "addmm", "bmm", "baddbmm"):
            for matrix in [result, *(arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim() > 1)]:
                strides = matrix.stride()[-2:]
                assert 1 in strides
                self.leading.append((operator.name(), tuple(matrix.shape), max(strides)))
        return result


@pytest.mark.parametrize("config", sorted((settings.ROOT / "config").glob("*.py")), ids=lambda path: path.stem)
@pytest.mark.parametrize("vocab_size", [65, 50257])
def test_training_on_cuda_multiplies_matrices_with_aligned_rows(config, vocab_size):
    """Tensor cores need rows of a multiple of 16 bytes. In config/gpt2_124m.py, 31 % of the FLOPs had others."""
    cfg = settings.load(TrainConfig, [str(config)])
    shape = {name: getattr(cfg, name) for name in MODEL_SETTINGS} | {"n_layer": 1, "dropout": 0.0}
    runtime = Runtime(torch.device("cuda"), torch.float32, False, "")
    with torch.device("meta"):
        model, idx = GPT(GPTConfig(vocab_size=vocab_size, **shape)), torch.zeros(cfg.batch_size, cfg.block_size).long()
        pad_vocabulary(model, runtime.size_multiple)
        adapt(model, runtime)
        with Products() as products:
            model(idx, idx)[1].backward()
    assert len(products.leading) >= 3 * 3 * 6  # a block's four matrices, the output matrix; forward and backward
    assert {name for name, shape, leading in products.leading if leading % 8} == set(), products.leading


COUNT_GRAPHS = """
import sys, torch
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters
from torch import distributed as dist
from folio.machine.distributed import Group, reshard
from folio.machine import kernels
from folio.machine.kernels import compile_loss
from folio.machine.runtime import Runtime, resolve_runtime
from folio.training.setup import wrap
from model import GPTConfig

def backend(graph, inputs):
    assert not any(isinstance(value, torch.SymInt) for value in inputs), "a size or stride is a variable"
    return aot_eager(graph, inputs)

Runtime.size_multiple = 128  # pads the vocabulary as on CUDA
parallel, group, aot_eager = sys.argv[1], Group(), lookup_backend("aot_eager")
torch.compile = partial(torch.compile, backend=backend)
if parallel != "one":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = Group(0, 1, dist.group.WORLD)
for recompute, max_logits in ((False, 2**26), (True, 2**14)):
    kernels.MAX_LOGITS_COMPILED = max_logits
    torch._dynamo.reset()
    counters.clear()
    runtime = replace(resolve_runtime("cpu", "bfloat16", False), compile=True, group=group)
    config = GPTConfig(block_size=16, vocab_size=64, n_layer=2, n_head=2, n_embd=32, position="rotary")
    cfg = SimpleNamespace(parallel=parallel.replace("one", "ddp"), recompute=recompute, seed=1)
    model, net = wrap(None, config, cfg, runtime)
    loss_fn, idx = compile_loss(net, runtime), torch.zeros(16, 16, dtype=torch.long)
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
