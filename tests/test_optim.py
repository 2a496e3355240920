import itertools
import math
from itertools import pairwise

import pytest
import torch

from folio.optim import (
    Muon,
    load_state_tensors,
    lr_at,
    make_optimizer,
    muon_momentum_at,
    orthogonalize,
    state_tensors,
)
from model import GPT, GPTConfig

CONFIG = GPTConfig(block_size=8, vocab_size=20, n_layer=1, n_head=2, n_embd=16, bias=True)
BASE = dict(learning_rate=1.0, min_lr=0.1, warmup_iters=10, lr_decay_iters=110, wsd_decay_iters=20)


def optimizer_of(model: torch.nn.Module) -> torch.optim.AdamW:
    return make_optimizer(model, "adamw", 1e-2, (0.9, 0.95), 0.1)


def steps(model: GPT, optimizer: torch.optim.Optimizer, n: int) -> None:
    idx = torch.arange(16).view(2, 8)
    for _ in range(n):
        model(idx, idx + 1)[1].backward()
        optimizer.step()
        optimizer.zero_grad()


def test_matrices_decay_and_vectors_do_not():
    model = GPT(CONFIG)
    decayed, plain = (set(map(id, group["params"])) for group in optimizer_of(model).param_groups)
    for name, p in model.named_parameters():
        assert (id(p) in decayed) == (p.dim() == 2) != (id(p) in plain), name


def test_steps_equal_adamw_by_hand():
    """The algorithm of Loshchilov & Hutter 2019, in float64."""
    model = GPT(CONFIG).double()
    optimizer = optimizer_of(model)
    idx = torch.arange(16).view(2, 8)
    by_hand = {name: p.detach().clone() for name, p in model.named_parameters()}
    m = {name: torch.zeros_like(p) for name, p in by_hand.items()}
    v = {name: torch.zeros_like(p) for name, p in by_hand.items()}
    for t in range(1, 4):
        model(idx, idx + 1)[1].backward()
        for name, p in model.named_parameters():
            m[name] = 0.9 * m[name] + 0.1 * p.grad
            v[name] = 0.95 * v[name] + 0.05 * p.grad**2
            step = m[name] / (1 - 0.9**t) / ((v[name] / (1 - 0.95**t)).sqrt() + 1e-8)
            decay = 0.1 if p.dim() == 2 else 0.0
            by_hand[name] = by_hand[name] * (1 - 1e-2 * decay) - 1e-2 * step
        optimizer.step()
        optimizer.zero_grad()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), by_hand[name])


def test_state_comes_back_by_name():
    first, second = GPT(CONFIG), GPT(CONFIG)
    before, after = optimizer_of(first), optimizer_of(second)
    steps(first, before, 3)
    second.load_state_dict(first.state_dict())
    load_state_tensors(second, after, {name: tensor.clone() for name, tensor in state_tensors(first, before).items()})
    steps(first, before, 2)
    steps(second, after, 2)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert "transformer.wte.weight/exp_avg" in state_tensors(first, before)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_schedules_rise_and_reach_their_end(schedule):
    rates = [lr_at(step, schedule=schedule, **BASE) for step in range(130)]
    assert rates[:10] == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert rates[10] == 1.0 and rates[110:] == [0.1] * 20
    assert all(a >= b for a, b in pairwise(rates[10:]))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_schedules_of_any_counts(schedule):
    """A decay of no steps divided by zero: --lr_schedule=wsd --max_iters=4."""
    for warmup, decay, wsd in itertools.product(range(7), range(1, 7), range(7)):
        settings = dict(learning_rate=1.0, min_lr=0.1, warmup_iters=warmup, lr_decay_iters=decay, wsd_decay_iters=wsd)
        rates = [lr_at(step, schedule=schedule, **settings) for step in range(8)]
        assert all(0 < rate <= 1 for rate in rates) and (schedule == "constant" or warmup > decay or rates[-1] == 0.1)


def test_schedules_at_their_middles():
    middle = dict(step=60, **BASE)
    assert lr_at(schedule="linear", **middle) == pytest.approx(0.55)
    assert lr_at(schedule="cosine", **middle) == pytest.approx(0.55)
    quarter = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))
    assert lr_at(35, schedule="cosine", **BASE) == pytest.approx(quarter)
    assert lr_at(89, schedule="wsd", **BASE) == 1.0
    assert lr_at(100, schedule="wsd", **BASE) == pytest.approx(0.55)
    assert {lr_at(step, schedule="constant", **BASE) for step in range(200)} == {1.0}


def test_only_where_the_flag_is_heeded_the_optimizer_is_fused():
    """On Apple's GPUs it was fused too, where nothing says that a bad step's flag keeps it from the weights."""
    with torch.device("meta"):
        elsewhere = GPT(CONFIG)
    assert not optimizer_of(elsewhere).defaults["fused"] and optimizer_of(GPT(CONFIG)).defaults["fused"]


# --- Muon -------------------------------------------------------------------------------------------------------------


def muon_of(model: torch.nn.Module, dtype: torch.dtype = torch.bfloat16) -> Muon:
    return make_optimizer(model, "muon", 1e-2, (0.9, 0.95), 0.1, muon_learning_rate=0.02, dtype=dtype)


def test_muon_equals_torchs_matrix_by_matrix(seed):
    """Queries, keys and values are three matrices; the rest of the model is AdamW's, to the bit."""
    torch.manual_seed(seed)
    config = GPTConfig(block_size=8, vocab_size=20, n_layer=2, n_head=2, n_embd=16, bias=True)
    model, plain = GPT(config), GPT(config)
    ours, adamw = muon_of(model), optimizer_of(plain)
    for group in ours.matrices():
        group["lr"] = 0.02
    pieces = {}
    for name, p in model.named_parameters():
        if ".h." in name and p.dim() == 2:
            parts = p.detach().clone().chunk(3 if "c_attn" in name else 1)
            pieces[name] = [torch.nn.Parameter(part.clone()) for part in parts]
    theirs = torch.optim.Muon([p for parts in pieces.values() for p in parts], lr=0.02, weight_decay=0.1)
    for _ in range(4):
        gradients = {name: torch.randn_like(p) for name, p in model.named_parameters()}
        for (name, p), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            p.grad, other.grad = gradients[name].clone(), gradients[name].clone()
            for part, gradient in zip(
                pieces.get(name, []), gradients[name].chunk(len(pieces.get(name, [0]))), strict=False
            ):
                part.grad = gradient.clone()
        for optimizer in (ours, adamw, theirs):
            optimizer.step()
    for (name, p), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        if name in pieces:
            expected = torch.cat([part.detach() for part in pieces[name]])
            moved = (expected - GPT(config).get_parameter(name)).abs().max()
            assert (p - expected).abs().max() < 0.03 * moved, name  # bfloat16, in another order
        else:
            assert torch.equal(p, other), name


def test_what_is_orthogonalize_has_singular_values_near_one(seed):
    torch.manual_seed(seed)
    for rows, columns in ((16, 16), (64, 16), (16, 64)):
        matrices = torch.randn(3, rows, columns) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
        found = orthogonalize(matrices)
        assert found.shape == matrices.shape
        wanted_u, wanted_s, wanted_vh = torch.linalg.svd(matrices, full_matrices=False)
        large = wanted_s > 0.1 * wanted_s[:, :1]  # what is much smaller is not there yet after five iterations
        values = (wanted_u.mT @ found @ wanted_vh.mT).diagonal(dim1=1, dim2=2)
        assert ((values > 0.6) & (values < 1.25))[large].all()
    assert orthogonalize(torch.zeros(1, 4, 4)).eq(0).all()


def test_a_bad_step_leaves_muon_as_it_was():
    model = GPT(CONFIG)
    optimizer = muon_of(model, torch.float32)
    steps(model, optimizer, 2)
    before = [p.detach().clone() for p in model.parameters()]
    moments = {name: tensor.clone() for name, tensor in state_tensors(model, optimizer).items()}
    for p in model.parameters():
        p.grad = torch.full_like(p, math.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert all(torch.equal(moments[name], tensor) for name, tensor in state_tensors(model, optimizer).items())


def test_muons_state_comes_back_by_name():
    first, second = GPT(CONFIG), GPT(CONFIG)
    before, after = muon_of(first), muon_of(second)
    steps(first, before, 3)
    second.load_state_dict(first.state_dict())
    saved = {name: tensor.clone() for name, tensor in state_tensors(first, before).items()}
    assert "transformer.h.0.attn.c_attn.weight/momentum_buffer" in saved
    assert "transformer.wte.weight/exp_avg" in saved
    load_state_tensors(second, after, saved)
    steps(first, before, 2)
    steps(second, after, 2)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_the_momentum_rises():
    assert [muon_momentum_at(step) for step in (0, 150, 300, 5000)] == pytest.approx([0.85, 0.9, 0.95, 0.95])
