import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel

from folio.kernels import CPUDropout, ManualAttention, attention_weights
from model import ACTIVATIONS, GPT, SHAPES, Attention, CausalSelfAttention, GPTConfig, main

SMALL = dict(block_size=16, vocab_size=50, n_layer=2, n_head=4, n_embd=32)


def tokens(B: int, T: int, V: int = 50) -> torch.Tensor:
    return torch.randint(V, (B, T))


def test_activations_are_those_of_transformers():
    from transformers.activations import ACT2FN

    x = torch.linspace(-5, 5, 101)
    for name, activation in ACTIVATIONS.items():
        torch.testing.assert_close(activation(x), ACT2FN[name](x))
    with pytest.raises(ValueError, match=r"'swish' is not one of gelu_new, gelu$"):
        GPTConfig(activation="swish")


def test_bfloat16_on_a_cpu_is_attended_to_as_elsewhere(seed):
    """There attention is written out, which is faster."""
    torch.manual_seed(seed)
    layer = CausalSelfAttention(GPTConfig(n_embd=32, n_head=2, attn_pdrop=0.5), index=0)
    x, positions, manual = torch.randn(2, 16, 32), torch.arange(16), ManualAttention()
    expected = layer.eval()(x, positions, Attention())
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer(x, positions, manual).float(), expected, atol=0.02, rtol=0.02)
        assert not torch.equal(layer.train()(x, positions, manual), layer(x, positions, manual))  # dropout


def test_attention_equals_the_fused_kernel(seed):
    torch.manual_seed(seed)
    q, k, v = torch.randn(3, 2, 4, 16, 8)
    weights = attention_weights(q, k)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(weights @ v, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 16))
    assert (weights.triu(diagonal=1) == 0).all()


def test_no_gradient_flows_from_a_position_to_later_ones(seed):
    torch.manual_seed(seed)
    model, idx = GPT(GPTConfig(**SMALL)), tokens(1, 16)
    for t in (0, 7, 15):
        logits, _ = model(idx, idx)
        (gradient,) = torch.autograd.grad(logits[0, t].square().sum(), model.transformer.wpe.weight)
        reached = gradient.abs().sum(dim=1) > 0  # (T,): the positions that logits at t depend on
        assert reached.tolist() == [position <= t for position in range(16)]


def test_loss_at_the_start_is_that_of_guessing(seed):
    torch.manual_seed(seed)
    _, loss = GPT(GPTConfig(**SMALL))(tokens(8, 16), tokens(8, 16))
    assert abs(loss.item() - math.log(50)) < 0.05


def test_parity_with_transformers(seed):
    torch.manual_seed(seed)
    sizes = dict(n_layer=2, n_head=4, n_embd=32, vocab_size=50, n_positions=16)
    theirs = GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)).eval()
    for parameter in theirs.parameters():  # biases and gains too, which start at 0 and 1
        torch.nn.init.normal_(parameter, std=0.3)
    matrices = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # theirs are (in, out)
    tensors = {name: p.detach().T if name.endswith(matrices) else p.detach() for name, p in theirs.named_parameters()}
    ours = GPT.from_tensors(GPTConfig(**SMALL, bias=True), tensors)
    idx = tokens(3, 16)
    expected = theirs(idx, labels=idx)
    logits, _ = ours(idx, idx)
    torch.testing.assert_close(logits, expected.logits, atol=1e-4, rtol=1e-4)
    _, loss = ours(idx[:, :-1], idx[:, 1:])
    torch.testing.assert_close(loss, expected.loss, atol=1e-4, rtol=1e-4)
    last, nothing = ours(idx)
    torch.testing.assert_close(last, expected.logits[:, -1:], atol=1e-4, rtol=1e-4)
    assert nothing is None


@pytest.mark.parametrize(
    "name, total",
    [("gpt2", 124439808), ("gpt2-medium", 354823168), ("gpt2-large", 774030080), ("gpt2-xl", 1557611200)],
)
def test_parameter_counts_are_gpt2s(name, total):
    with torch.device("meta"):
        model = GPT(SHAPES[name])
    parts = model.num_params()
    assert parts.pop("total") == total == sum(parts.values()) == sum(p.numel() for p in model.parameters())


def test_attention_matrices_of_gpt3():
    with torch.device("meta"):
        model = GPT(SHAPES["gpt3-175b"])
    assert model.num_params()["attention"] == 57_982_058_496


def test_flops_are_what_torch_counts():
    config = GPTConfig(**SMALL, bias=False)
    model, idx = GPT(config), tokens(2, 16)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(idx, idx)[1].backward()
    assert counter.get_total_flops() == idx.numel() * model.config.flops_per_token()["total"]


def test_initial_values_follow_from_seed_and_name_alone():
    shallow, deep = GPT(GPTConfig(**SMALL), seed=1), GPT(GPTConfig(**{**SMALL, "n_layer": 4}), seed=1)
    other = GPT(GPTConfig(**SMALL), seed=2)
    name = "transformer.h.1.attn.c_attn.weight"
    assert torch.equal(shallow.get_parameter(name), deep.get_parameter(name))
    assert not torch.equal(shallow.get_parameter(name), other.get_parameter(name))
    scaled = shallow.get_parameter("transformer.h.1.mlp.c_proj.weight").std().item()
    assert scaled == pytest.approx(0.02 / math.sqrt(2 * 2), rel=0.1)


def test_embeddings_are_tied_also_after_loading():
    model = GPT(GPTConfig(**SMALL))
    again = GPT.from_tensors(model.config, dict(model.named_parameters()))
    assert again.lm_head.weight is again.transformer.wte.weight
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_crop_block_size_keeps_the_first_positions(seed):
    torch.manual_seed(seed)
    model, idx = GPT(GPTConfig(**SMALL)), tokens(2, 8)
    before, _ = model(idx, idx)
    model.crop_block_size(8)
    assert torch.equal(model(idx, idx)[0], before)
    assert model.transformer.wpe.weight.requires_grad
    with pytest.raises(ValueError, match="more than the model's 8 positions"):
        model.crop_block_size(9)
    with pytest.raises(ValueError, match="longer than block_size=8"):
        model(tokens(1, 9))


def test_targets_of_minus_one_do_not_count(seed):
    torch.manual_seed(seed)
    model, idx, targets = GPT(GPTConfig(**SMALL)), tokens(1, 16), tokens(1, 16)
    hidden = targets.clone()
    hidden[:, 8:] = -1
    torch.testing.assert_close(model(idx, hidden)[1], model(idx[:, :8], targets[:, :8])[1])


@pytest.mark.parametrize("place", ["embd_pdrop", "attn_pdrop", "resid_pdrop"])
def test_each_dropout_follows_unless_set_apart(place):
    idx = tokens(1, 16)
    off = dict(embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
    for p, differs in ((None, True), (0.0, False)):
        model = GPT(GPTConfig(**SMALL, dropout=0.5, **{**off, place: p}))
        assert torch.equal(model(idx, idx)[0], model(idx, idx)[0]) != differs
        model.eval()
        assert torch.equal(model(idx, idx)[0], model(idx, idx)[0])


def test_the_table_shows_the_counts(capsys):
    main()
    out = capsys.readouterr().out
    for total in ("124,439,808", "354,823,168", "774,030,080", "1,557,611,200", "57,982,058,496"):
        assert total in out


@pytest.mark.parametrize("p", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_is_that_of_torch(p, dtype, seed):
    """Each element goes with probability p, whatever its neighbours do; the same seed, the same; none in evaluation."""
    torch.manual_seed(seed)
    layer, x = CPUDropout(p), torch.ones(501, 403, dtype=dtype, requires_grad=True)
    y = layer(x)
    y.float().sum().backward()
    gone = (y == 0).double()
    n = gone.numel()
    assert abs(gone.mean() - p) < 5 * math.sqrt(p * (1 - p) / n)
    for shift in (1, 2, 3, 4):  # one draw serves four
        both = (gone.flatten()[shift:] * gone.flatten()[:-shift]).mean()
        assert abs(both - p * p) < 5 * math.sqrt(3 * p * p * (1 - p * p) / n)
    kept = torch.tensor(1 / (1 - p)).to(dtype).float()
    assert set(y.float().unique().tolist()) == {0.0, kept.item()}
    assert torch.equal(x.grad, y)
    torch.manual_seed(seed)
    assert torch.equal(layer(x), y)
    assert layer.eval()(x) is x or torch.equal(layer(x), x)


def test_building_and_loading_a_model_leaves_the_compiler_alone():
    """A sampler waited for a second longer while torch._dynamo was imported, to fill shapes that hold no values."""
    code = (
        "import sys, torch; from model import GPT, GPTConfig; c = GPTConfig(8, 9, 1, 1, 4); "
        "GPT.from_tensors(c, dict(GPT(c).named_parameters())); assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)
