import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model import ACTIVATIONS, GPT, SHAPES, GPTConfig, main
from tests.support.models import SMALL, tokens
from tests.support.tolerances import logits_error, normal_limit, rounding_error, within


def test_activations_match_transformers():
    ACT2FN = pytest.importorskip("transformers.activations").ACT2FN
    x = torch.linspace(-5, 5, 101)
    names = [name for name in ACTIVATIONS if name in ACT2FN]
    error = 2 * rounding_error(12) * x.abs()  # 12 operations; the last ones are x times a factor of at most 1
    assert {"gelu_new", "gelu"} <= {*names}
    for name in names:
        assert ((ACTIVATIONS[name](x) - ACT2FN[name](x)).abs() <= error).all()
    with pytest.raises(ValueError, match=f"'swish' is not one of {', '.join(ACTIVATIONS)}$"):
        GPTConfig(activation="swish")


@pytest.mark.architecture("model.py: GPT.initial_value")
def test_the_loss_of_a_new_model_is_that_of_a_uniform_distribution(seed):
    torch.manual_seed(seed)
    _, loss = GPT(GPTConfig(**SMALL))(tokens(8, 16), tokens(8, 16))
    # A logit is a sum of C products of a normalized channel and a weight of std 0.02. A loss is log(50), plus about
    # half of the logits' variance, minus the target's logit, which is independent of the others.
    variance = SMALL["n_embd"] * 0.02**2
    assert abs(loss.item() - math.log(50)) < variance + normal_limit() * math.sqrt(variance / (8 * 16))


@pytest.mark.architecture("this test, whose reference is transformers' GPT-2: use another one, or skip it")
def test_logits_and_loss_match_transformers(seed):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    sizes = dict(n_layer=2, n_head=4, n_embd=32, vocab_size=50, n_positions=16)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)
    ).eval()
    for parameter in theirs.parameters():  # also biases and norm weights, which are initially 0 and 1
        torch.nn.init.normal_(parameter, std=0.3)
    matrices = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # their shape is (in, out)
    tensors = {name: p.detach().T if name.endswith(matrices) else p.detach() for name, p in theirs.named_parameters()}
    ours = GPT(GPTConfig(**SMALL, bias=True))
    ours.load_state_dict({**tensors, "lm_head.weight": tensors["transformer.wte.weight"]})
    idx = tokens(3, 16)
    expected = theirs(idx, labels=idx)
    tolerance = within(expected.logits, logits_error(ours.config, 16))
    torch.testing.assert_close(ours.logits(idx), expected.logits, **tolerance)
    _, loss = ours(idx[:, :-1], idx[:, 1:])
    torch.testing.assert_close(loss, expected.loss, rtol=0, atol=2 * tolerance["atol"])  # log-sum-exp, too
    last, no_loss = ours(idx)
    torch.testing.assert_close(last, expected.logits[:, -1:], **tolerance)
    assert no_loss is None


@pytest.mark.architecture("this test, which has the counts of OpenAI's models; or in GPT.num_params")
def test_parameter_counts_match_gpt2(capsys):
    main()
    printed = capsys.readouterr().out
    totals = {"gpt2": 124439808, "gpt2-medium": 354823168, "gpt2-large": 774030080, "gpt2-xl": 1557611200}
    for name, total in totals.items():
        with torch.device("meta"):
            model = GPT(SHAPES[name])
        parts = model.num_params()
        assert parts.pop("total") == total == sum(parts.values()) == sum(p.numel() for p in model.parameters())
        assert f"{total:,}" in printed
    assert "57,982,058,496" in printed  # attention of GPT-3


@pytest.mark.architecture("model.py: GPTConfig.flops_per_token")
def test_flops_match_torchs_counter():
    config = GPTConfig(**SMALL, bias=False)
    model, idx = GPT(config), tokens(2, 16)
    with FlopCounterMode(display=False) as counter:
        model(idx, idx)[1].backward()
    assert counter.get_total_flops() == idx.numel() * model.config.flops_per_token()["total"]


def test_initial_values_depend_on_seed_and_name_alone():
    shallow, deep = GPT(GPTConfig(**SMALL), seed=1), GPT(GPTConfig(**{**SMALL, "n_layer": 4}), seed=1)
    other_seed = GPT(GPTConfig(**SMALL), seed=2)
    name = "transformer.h.1.attn.c_attn.weight"
    assert torch.equal(shallow.get_parameter(name), deep.get_parameter(name))
    assert not torch.equal(shallow.get_parameter(name), other_seed.get_parameter(name))
    weight = shallow.get_parameter("transformer.h.1.mlp.c_proj.weight")
    error = normal_limit() / math.sqrt(2 * weight.numel())  # the relative standard error of a standard deviation
    assert weight.std().item() == pytest.approx(0.02 / math.sqrt(2 * 2), rel=error)


def test_targets_of_minus_one_are_ignored(seed):
    torch.manual_seed(seed)
    model, idx, targets = GPT(GPTConfig(**SMALL)), tokens(1, 16), tokens(1, 16)
    masked = targets.clone()
    masked[:, 8:] = -1
    tolerance = within(model.logits(idx), 2 * logits_error(model.config, 16))  # of a logit, and of log-sum-exp
    torch.testing.assert_close(model(idx, masked)[1], model(idx[:, :8], targets[:, :8])[1], **tolerance)


@pytest.mark.parametrize("setting", ["embd_pdrop", "attn_pdrop", "resid_pdrop"])
def test_each_dropout_defaults_to_the_common_one(setting):
    idx = tokens(1, 16)
    off = dict(embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
    for p, differs in ((None, True), (0.0, False)):
        model = GPT(GPTConfig(**SMALL, dropout=0.5, **{**off, setting: p}))
        assert torch.equal(model.logits(idx), model.logits(idx)) != differs
        model.eval()
        assert torch.equal(model.logits(idx), model.logits(idx))
