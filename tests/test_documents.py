"""mask_documents: attention that does not cross an end-of-text token, against a loop over single documents."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from folio.machine.data_parallel import DataParallelLoss
from folio.machine.kernels import CompiledAttention, ManualAttention, adapt, compiled_attention
from folio.machine.runtime import Runtime
from model import GPT, POSITIONS, AttentionKernel, GPTConfig

EOT, V, T = 0, 50, 64
CPU = torch.device("cpu")


def documents(seed: int, rows: int = 4) -> Tensor:
    """Token ids (B, T) of documents of 1 to 29 tokens, each of which ends with EOT, unless it was cut."""
    generator = torch.Generator().manual_seed(seed)
    idx = torch.randint(1, V, (rows, T), generator=generator)
    for row in idx:
        lengths = torch.randint(1, 30, (T,), generator=generator).cumsum(0)
        row[lengths[lengths <= T] - 1] = EOT
    return idx


def random_model(position: str, seed: int) -> GPT:
    model = GPT(GPTConfig(block_size=T, vocab_size=V, n_layer=2, n_head=2, n_embd=32, position=position), seed)
    for p in model.parameters():  # GPT's small initial weights would hide differences
        torch.nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(seed + p.numel()))
    model.document_token = EOT
    return model


def one_by_one(model: GPT, idx: Tensor) -> Tensor:
    """The logits (B, T, V) of documents that are computed alone."""
    model.document_token, rows = None, []
    for row in idx:
        begins = sorted({0, *((row[:-1] == EOT).nonzero().flatten() + 1).tolist()})
        parts = [row[begin:end] for begin, end in zip(begins, [*begins[1:], T], strict=True)]
        rows.append(torch.cat([model.logits(part[None])[0] for part in parts]))
    model.document_token = EOT
    return torch.stack(rows)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("kernel", [AttentionKernel, ManualAttention])
def test_documents_do_not_see_each_other(position, kernel, seed):
    model, idx = random_model(position, seed), documents(seed)
    model.kernel = kernel()
    expected = one_by_one(model, idx)
    torch.testing.assert_close(model.logits(idx), expected, atol=2e-4, rtol=1e-4)
    model.document_token = None
    assert (model.logits(idx) - expected).abs().max() > 0.1


@pytest.mark.parametrize("position", POSITIONS)
def test_the_compiled_kernel_computes_the_same(position, seed):
    """Loss and gradients are as close to float32 as those of matmuls in bfloat16."""
    if not compiled_attention.is_available():
        pytest.skip("this CPU has no AVX-512 BF16")
    config = GPTConfig(block_size=T, vocab_size=V, n_layer=2, n_head=2, n_embd=64, position=position)
    runtime, model, idx = Runtime(CPU, torch.bfloat16, False, "", workers=2), GPT(config), documents(seed)
    adapt(model, runtime)
    model.document_token, results = EOT, []
    for kernel in (AttentionKernel, ManualAttention, CompiledAttention):
        model.kernel = kernel()
        with runtime.compute() if kernel != AttentionKernel else nullcontext():
            loss = model(idx, idx.roll(-1, dims=1))[1]
        loss.backward()
        results.append((loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])))
        model.zero_grad()
    (exact_loss, exact), (_, manual), (loss, compiled_gradients) = results
    assert loss == pytest.approx(exact_loss, abs=3e-3)
    errors = [((g - exact).norm() / exact.norm()).item() for g in (manual, compiled_gradients)]
    assert errors[1] < 1.2 * errors[0] < 0.05


def test_workers_confine_attention_too(seed):
    model, idx = random_model("learned", seed), documents(seed)
    runtime = Runtime(CPU, torch.float32, False, "", workers=2)
    targets = idx.roll(-1, dims=1)
    expected = model(idx, targets)[1]
    loss_fn = DataParallelLoss(model, runtime)
    torch.testing.assert_close(loss_fn(idx, targets), expected)
    torch.testing.assert_close(loss_fn.logits(idx), one_by_one(model, idx), atol=2e-4, rtol=1e-4)
