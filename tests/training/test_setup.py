"""The setup of a run."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters

from folio.base import settings
from folio.checkpoints import checkpoint
from folio.checkpoints.build_model import model_from_tensors
from folio.machine import kernels
from folio.machine.distributed import Group, full_tensor, reshard
from folio.machine.kernels import adapt, pad_vocabulary
from folio.machine.runtime import Runtime, resolve_runtime
from folio.training.planning import resolve
from folio.training.setup import OpenRun, new_state, wrap
from model import GPT, GPTConfig
from tests.support.models import SMALL
from tests.support.operators import MATMULS, OperatorRecorder
from tests.support.runs import read_metrics, same_tensors
from tests.support.tolerances import gradients_error
from train import TrainConfig, train


def test_float16_adapts_its_loss_scale_and_resumes_bitwise_identically(tiny, tmp_path, monkeypatch):
    """Simulates a GPU without bfloat16. The first loss scale is too large and overflows."""
    half = Runtime(torch.device("cpu"), torch.float16, False, "float16")
    monkeypatch.setattr(resolve, "resolve_runtime", lambda *args: half)
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**30))
    uninterrupted = tiny(max_iters=30, n_layer=1, eval_interval=30)
    resumed = replace(uninterrupted, out_dir=str(tmp_path / "resumed"))
    train(uninterrupted)
    train(replace(resumed, max_iters=15, lr_decay_iters=30))
    train(replace(resumed, init_from="resume"))
    a, b = (checkpoint.load(Path(cfg.out_dir)) for cfg in (uninterrupted, resumed))
    assert same_tensors(a.model, b.model)
    assert a.state["grad_scaler"] == b.state["grad_scaler"] and 1 < a.state["grad_scaler"]["scale"] < 2.0**30
    assert a.state["guard"]["skipped"] == 0
    updates = a.optimizer()["transformer.wte.weight/step"].item()
    skipped = 30 - updates  # each of these steps only halved the loss scale, which does not increase in so few steps
    assert skipped == math.log2(2.0**30 / a.state["grad_scaler"]["scale"]) > 0
    metrics = read_metrics(uninterrupted.out_dir)
    assert metrics[-1]["loss"] < metrics[0]["loss"]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_checkpoint_does_not_contain_the_padding_of_the_vocabulary(parallel, process_group, seed, monkeypatch):
    """A run goes from CUDA, where the vocabulary is padded, to a CPU and back."""
    V, group, config = 50, process_group if parallel == "fsdp" else Group(), GPTConfig(**SMALL)
    runtime = replace(resolve_runtime("cpu", "float32", False), group=group)
    cfg = TrainConfig(parallel=parallel, optimizer="muon", seed=seed)

    def state_from(tensors, multiple):
        monkeypatch.setattr(Runtime, "size_multiple", multiple)
        weights, optimizer = ({name: t.clone() for name, t in part.items()} for part in tensors)
        model, net = wrap(model_from_tensors(config, weights) if weights else None, config, cfg, runtime)
        state = new_state(OpenRun(model, net, None, SimpleNamespace(runtime=runtime)), cfg)
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

    new = ({}, {})
    (initial, _), (padded, _) = (state_from(new, multiple).tensors(keep=True, copy=True) for multiple in (1, 128))
    assert same_tensors(initial, padded)
    on_cuda = state_from(new, 128)
    saved = three_steps(on_cuda)
    assert {name: t.shape for name, t in saved[0].items()} == {name: t.shape for name, t in initial.items()}
    assert saved[1]["transformer.wte.weight/exp_avg"].shape == (V, config.n_embd)
    on_cpu = state_from(saved, 1)
    loaded = on_cpu.tensors(keep=True, copy=True)
    back = state_from(loaded, 128)
    for tensors in (loaded, back.tensors(keep=True, copy=True)):
        assert all(same_tensors(a, b) for a, b in zip(tensors, saved, strict=True))
    continued = three_steps(on_cuda)
    assert all(same_tensors(a, b) for a, b in zip(three_steps(back), continued, strict=True))
    assert (full_tensor(back.model.lm_head.weight)[V:] == 0).all()
    # Gradients differ by their rounding. AdamW may move weights whose gradients are all error in another direction.
    undecided = gradients_error(config, 2, 16)  # share of such weights; the others have this relative error
    for name, weight in three_steps(on_cpu)[0].items():
        error = 3 * max(cfg.learning_rate, cfg.muon_learning_rate) * math.sqrt(undecided * weight.numel())
        assert (weight - continued[0][name]).norm() < error, name


@pytest.mark.parametrize("config", sorted((settings.ROOT / "config").glob("*.py")), ids=lambda path: path.stem)
@pytest.mark.parametrize("vocab_size", [65, 50257])
def test_training_on_cuda_multiplies_matrices_with_aligned_rows(config, vocab_size):
    """Tensor cores need rows of a multiple of 16 bytes. In config/gpt2_124m.py, 31 % of the FLOPs had others."""
    cfg = settings.load(TrainConfig, [str(config)])
    shape = {name: getattr(cfg, name) for name in checkpoint.MODEL_SETTINGS} | {"n_layer": 1, "dropout": 0.0}
    runtime = Runtime(torch.device("cuda"), torch.float32, False, "")
    leading = []  # operator, shape, and the stride of the dimension that is not contiguous, of each matrix in a matmul

    def record(name, args, result):
        if name in MATMULS:
            for matrix in [result, *(arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim() > 1)]:
                assert 1 in matrix.stride()[-2:]
                leading.append((name, tuple(matrix.shape), max(matrix.stride()[-2:])))

    with torch.device("meta"):
        model, idx = GPT(GPTConfig(vocab_size=vocab_size, **shape)), torch.zeros(cfg.batch_size, cfg.block_size).long()
        pad_vocabulary(model, runtime.size_multiple)
        adapt(model, runtime)
        with OperatorRecorder(record):
            model(idx, idx)[1].backward()
    assert len(leading) >= 3 * 3 * 6  # a block's four matrices, the output matrix; forward and backward
    assert [matrix for matrix in leading if matrix[-1] % 8] == []


@pytest.mark.filterwarnings("ignore")  # from torch
@pytest.mark.parametrize(
    "parallel, recompute, graphs", [("one", False, 2), ("ddp", True, 2), ("fsdp", False, 4), ("fsdp", True, 4)]
)
def test_compiled_training_has_the_documented_graphs_and_no_breaks(
    parallel, recompute, graphs, process_group, monkeypatch
):
    """One graph in training and one in evaluation, of model and loss; under FSDP, of a block and of the loss.

    With FSDP and activation checkpointing, nothing was compiled; with DDP, the graph broke twice.
    """

    def backend(graph, inputs):
        assert not any(isinstance(value, torch.SymInt) for value in inputs), "a size or stride is a variable"
        return aot_eager(graph, inputs)

    aot_eager = lookup_backend("aot_eager")
    monkeypatch.setattr(Runtime, "size_multiple", 128)  # pads the vocabulary as on CUDA
    monkeypatch.setattr(kernels, "MAX_LOGITS_COMPILED", 2**14 if recompute else 2**26)  # several chunks or one
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch.compiler.reset()
    counters.clear()
    runtime = replace(resolve_runtime("cpu", "bfloat16", False), compile=True)
    if parallel != "one":
        runtime = replace(runtime, group=process_group)
    layers = 2 if parallel == "fsdp" else 1  # blocks have the same graph
    config = GPTConfig(block_size=16, vocab_size=64, n_layer=layers, n_head=2, n_embd=32, position="rotary")
    model, net = wrap(None, config, TrainConfig(parallel=parallel.replace("one", "ddp"), recompute=recompute), runtime)
    loss_fn, idx = kernels.compile_loss(net, runtime), torch.zeros(16, 16, dtype=torch.long)
    for _ in range(3):
        model.train()
        loss_fn(idx, idx).backward()
        model.eval()
        with torch.no_grad():
            loss_fn(idx, idx)
        reshard(model)
    if parallel != "fsdp":
        model(idx[:1, :5])  # sampling during training compiles nothing
    assert counters["stats"]["unique_graphs"] == graphs and not counters["graph_break"]
