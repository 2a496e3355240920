import math

import numpy as np
import pytest
import torch
from torch import Tensor

from folio.decoding.trace import Heads, Switches, Trace, forward_hooks, head_scores, repeated_random_ids
from model import ACTIVATIONS, GPT, POSITIONS, GPTConfig
from tests.support.decoding import random_model
from tests.support.numpy_gpt import NumpyGPT, NumpyRun, assert_largest, assert_same, assert_same_ranks
from tests.support.tolerances import network_operations, rounding_error

T = 70  # more than CHUNK


def traced(seed: int, switches: Switches | None = None, **settings) -> tuple[Trace, NumpyRun]:
    """Trace a random model over T random ids, and run the same in NumPy."""
    model = random_model(seed, **{"block_size": T, "n_layer": 3, "n_head": 3, "n_embd": 24, **settings})
    model.requires_grad_(False)
    ids = torch.randint(20, (T,))
    switches = switches or Switches()
    return Trace(model, ids, switches), NumpyGPT(model, **vars(switches)).run(ids.tolist())


def assert_same_run(trace: Trace, run: NumpyRun) -> None:
    """Compare all values of the trace with NumPy."""
    assert_same(trace.stream, run.stream)
    assert_same(trace.logits(trace.stream[-1]), run.logits)
    for index in range(trace.model.config.n_layer):
        ours, theirs = trace.layer(index), run.layer(index)
        for name in ("ln_1", "qkv", "attention", "ln_2", "preactivation", "hidden", "mlp"):
            assert_same(getattr(ours, name), getattr(theirs, name))
        for name, values in ours.heads._asdict().items():
            if values is None:
                assert getattr(theirs, name) is None
            else:
                assert_same(values, getattr(theirs, name))
        assert_same(trace.head_outputs(index, token=5), theirs.head_outputs[:, 5])


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        *(dict(position=position, document_token=token) for position in POSITIONS for token in (None, 7)),
        *(dict(activation=activation, bias=bias) for activation in ACTIVATIONS for bias in (True, False)),
    ],
    ids=str,
)
def test_a_trace_equals_the_model_and_numpy(settings, seed):
    trace, run = traced(seed, **settings)
    assert_same_run(trace, run)
    assert_same(trace.logits(trace.stream[-1]), trace.model.logits(trace.ids[None])[0])
    for index in range(3):
        assert not trace.layer(index).heads.weights.triu(1).any()  # exactly 0


def test_on_heads_is_called_once_per_layer_and_layers_are_recomputed(seed):
    calls: list[tuple[int, Heads]] = []
    model = random_model(seed, n_layer=4)
    trace = Trace(model, torch.arange(8), on_heads=lambda layer, heads: calls.append((layer, heads)))
    assert [layer for layer, _ in calls] == [0, 1, 2, 3]
    for index, heads in calls:
        assert torch.equal(trace.layer(index).heads.weights, heads.weights)
    assert len(calls) == 4
    newest = trace.layer(3)
    assert trace.layer(3) is newest
    trace.layer(0)
    assert trace.layer(3) is not newest


# --- switches ---------------------------------------------------------------------------------------------------------

CHANGES = [
    Switches(mask="after"),
    Switches(mask="off"),
    Switches(scale=False),
    Switches(heads_off=((0, 1), (2, 0), (2, 2))),
    Switches(mlps_off=(0, 2)),
    Switches("off", False, ((1, 0),), (1,)),
]


@pytest.mark.parametrize(
    "position, switches",
    [("learned", switches) for switches in CHANGES]
    + [(position, switches) for position in ("rotary", "relative", "alibi") for switches in (CHANGES[0], CHANGES[-1])],
    ids=str,
)
def test_switches_equal_those_of_numpy(position, switches, seed):
    trace, run = traced(seed, switches, position=position)
    assert_same_run(trace, run)
    plain = Trace(trace.model, trace.ids)
    error = 2 * rounding_error(network_operations(trace.model.config, T))
    assert (trace.stream[-1] - plain.stream[-1]).abs().max() > error * plain.stream[-1].abs().max()
    sums = trace.layer(0).heads.weights.sum(-1)
    is_distribution = torch.allclose(sums, torch.ones(()), atol=rounding_error(2 * T))
    assert is_distribution == (switches.mask != "after")  # zeroed after the softmax, the rows sum to less than 1


# --- predictions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 64, 65, T])
def test_predictions_equal_numpy(length, seed):
    model = random_model(seed, block_size=T)
    ids = torch.randint(20, (length,))
    predictions, run = Trace(model, ids).predictions, NumpyGPT(model).run(ids.tolist())
    assert_same(predictions.loss, run.losses)
    assert_same_ranks(predictions.rank, run)
    assert_same(predictions.entropy, run.entropies)
    assert_largest(predictions.best[:, None], run.probabilities)
    assert_same(predictions.best_probability, run.probabilities.max(-1))


def test_the_logit_lens_equals_numpy(seed):
    trace, run = traced(seed)
    lens = trace.lens(trace.stream[:, 7], k=4)
    logits = run.logits_of(run.stream[:, 7])
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert lens.ids.shape[-1] == 4
    assert_largest(lens.ids, probabilities)
    assert_same(lens.probabilities, np.take_along_axis(probabilities, np.asarray(lens.ids), axis=-1))
    assert trace.lens(trace.stream[0, 0], k=100).ids.shape == (20,)  # the whole vocabulary


def test_logit_effects_sum_to_the_logits(seed):
    """Embeddings, heads, biases, and MLPs sum to the final state; the rest is the final norm's bias."""
    trace, _ = traced(seed)
    token, model = 9, trace.model
    parts = [trace.stream[0, token][None]]
    for index, block in enumerate(model.transformer.h):
        parts += [trace.head_outputs(index, token), block.attn.c_proj.bias[None], trace.layer(index).mlp[token][None]]
    effects = trace.logit_effect(torch.cat(parts), token)
    rest = model.lm_head(model.transformer.ln_f.bias)
    assert_same(effects.sum(0) + rest, trace.logits(trace.stream[-1, token]))


# --- side effects -----------------------------------------------------------------------------------------------------


def hooks(model: GPT) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def interrupt(layer: int, heads: Heads) -> None:
    raise KeyboardInterrupt


def test_a_trace_does_not_change_the_model(seed):
    """Also if an exception ends it."""
    model = random_model(seed)
    before = {name: p.clone() for name, p in model.named_parameters()}
    attend, ids = model.kernel, torch.arange(8)
    logits = model(ids[None])[0]
    trace = Trace(model, ids, Switches("off", False, ((0, 0),), (0, 1)))
    trace.layer(1), trace.head_outputs(0, 3), trace.predictions, trace.lens(trace.stream, 3)
    with pytest.raises(KeyboardInterrupt):
        Trace(model, ids, Switches(mlps_off=(1,)), interrupt)
    with pytest.raises(ZeroDivisionError), forward_hooks({model.lm_head: lambda x, y: None}):
        raise ZeroDivisionError
    assert not hooks(model) and model.kernel is attend
    assert all(torch.equal(before[name], p) and p.requires_grad for name, p in model.named_parameters())
    assert torch.equal(model(ids[None])[0], logits)


# --- head scores ------------------------------------------------------------------------------------------------------


def test_head_scores_are_means_over_queries(seed):
    """Compare with loops over queries and keys."""
    generator = np.random.default_rng(seed)
    ids = generator.integers(6, size=30)
    weights = generator.random((2, 30, 30)) * np.tri(30)
    weights /= weights.sum(-1, keepdims=True)
    scores = head_scores(torch.from_numpy(weights), torch.from_numpy(ids))
    prefix = [[k for k in range(1, t + 1) if ids[k - 1] == ids[t]] for t in range(30)]
    for h, w in enumerate(weights):
        queries = range(1, 30)
        expected = {
            "previous": np.mean([w[t, t - 1] for t in queries]),
            "first": np.mean([w[t, 0] for t in queries]),
            "itself": np.mean([w[t, t] for t in queries]),
            "prefix": np.mean([w[t, keys].sum() for t, keys in enumerate(prefix) if keys]),
            "entropy": np.mean([-sum(p * math.log(p) for p in w[t] if p) for t in queries]),
            "distance": np.mean([sum((t - k) * w[t, k] for k in range(t)) for t in queries]),
            "offset": np.argmax([sum(w[t, t - d] for t in queries if t >= d) for d in range(30)]),
        }
        assert {name: score[h].item() for name, score in scores.items()} == pytest.approx(expected)


def test_head_scores_of_short_texts_are_finite():
    for ids in ([3], [3, 4]):
        scores = head_scores(torch.ones(2, len(ids), len(ids)).tril(), torch.tensor(ids))
        assert all(score.isfinite().all() for score in scores.values())


def test_repeated_random_ids_repeat():
    ids = repeated_random_ids(50, 64)
    assert len(ids) == 64 and torch.equal(ids[:32], ids[32:]) and 0 <= ids.min() and ids.max() < 50
    assert torch.equal(ids, repeated_random_ids(50, 64)) and not torch.equal(ids, repeated_random_ids(50, 64, seed=1))


N = 128
PARTS = {"token": slice(0, N), "position": slice(N, 2 * N), "previous": slice(2 * N, 3 * N)}
SHARPNESS = 40.0  # the score of a matching key; others have 0


def planted_model() -> GPT:
    """A model with hand-written weights that copies: after the second A of "A B ... A", it predicts B.

    The residual stream has three parts of N channels with one-hot vectors: the token, its position, and (after layer 0)
    the previous token. Head 0 of layer 0 is a previous-token head: its query is the position t, its key its own
    position plus 1; they match for the key t - 1. It copies that token to the third part. Head 1 of layer 1 is an
    induction head: its query is the token, its key the token before the key; they match for keys that follow an earlier
    occurrence of the token. It adds the token at the key to the first part, so that the output matrix, which is the
    embedding table, predicts it. All other heads have score 0 for every key: uniform weights, and an output of 0.
    """
    model = GPT(GPTConfig(block_size=N, vocab_size=N, n_layer=2, n_head=3, n_embd=3 * N)).requires_grad_(False)
    transformer = model.transformer
    for p in model.parameters():
        p.zero_()
    for norm in [transformer.ln_f, *(norm for block in transformer.h for norm in (block.ln_1, block.ln_2))]:
        norm.weight.fill_(1.0)
    transformer.wte.weight[:, PARTS["token"]] = torch.eye(N)
    transformer.wpe.weight[:, PARTS["position"]] = torch.eye(N)

    one_hot = torch.eye(N)
    next_position = one_hot.roll(1, dims=0)  # maps position t to t + 1
    not_first = torch.zeros(N, N)
    not_first[:, 0] = -1.0  # the first token has no previous one, so that its head attends to itself
    plant(model, 0, 0, {"position": one_hot}, {"position": next_position}, {"token": one_hot}, to="previous")
    key = {"previous": one_hot, "position": not_first}
    plant(model, 1, 1, {"token": one_hot}, key, {"token": one_hot}, to="token", strength=20.0)
    transformer.ln_f.weight.fill_(20.0)
    return model.eval()


def plant(
    model: GPT,
    layer: int,
    head: int,
    query: dict[str, Tensor],
    key: dict[str, Tensor],
    value: dict[str, Tensor],
    to: str,
    strength: float = 1.0,
) -> None:
    """Set the weights of a head. query, key, value: matrices (N, N) by the part of the stream that they read. to: the
    part that the head writes.
    """
    # Every state has `ones` ones among zeros, so that the norm is the same affine function: (x - mean) / deviation.
    ones, C = layer + 2, 3 * N
    mean = ones / C
    deviation = math.sqrt(mean - mean**2 + 1e-5)
    attn = model.transformer.h[layer].attn
    weight, bias = attn.c_attn.weight.view(3, 3, N, C), attn.c_attn.bias.view(3, 3, N)  # q, k, v; heads
    sharp = math.sqrt(SHARPNESS * math.sqrt(N))  # scores are q k / sqrt(D)
    for n, (parts, size) in enumerate([(query, sharp), (key, sharp), (value, 1.0)]):
        for part, matrix in parts.items():
            weight[n, head, :, PARTS[part]] = size * deviation * matrix
        bias[n, head] = weight[n, head].sum(-1) * mean / deviation
    attn.c_proj.weight[PARTS[to], head * N : (head + 1) * N] = strength * torch.eye(N)


def planted_weights(ids: Tensor) -> Tensor:
    """The attention weights of planted_model(), (layers, heads, T, T): each query's keys with the highest score share
    them equally.
    """
    T = len(ids)
    is_highest = torch.ones(2, 3, T, T).tril()  # of most heads, all keys: they have the same score
    is_highest[0, 0] = torch.eye(T)[(torch.arange(T) - 1).clamp(min=0)]
    for t in range(1, T):
        follows = [k for k in range(1, t + 1) if ids[k - 1] == ids[t]]
        is_highest[1, 1, t] = 0
        is_highest[1, 1, t, follows or range(1, t + 1)] = 1
    return is_highest / is_highest.sum(-1, keepdim=True)


def test_scores_identify_the_planted_heads():
    model, ids, heads_by_layer = planted_model(), repeated_random_ids(N, N), {}
    Trace(model, ids, on_heads=lambda layer, heads: heads_by_layer.update({layer: heads}))
    error = 2 * SHARPNESS * rounding_error(network_operations(model.config, N))  # of a difference of attention scores
    for name, planted in (("previous", [0, 0]), ("prefix", [1, 1])):
        scores = torch.stack([head_scores(heads_by_layer[layer].weights, ids)[name] for layer in (0, 1)])
        expected = torch.stack([head_scores(weights, ids)[name] for weights in planted_weights(ids)])
        torch.testing.assert_close(scores, expected, rtol=0.0, atol=error)
        assert (expected == 1).nonzero().tolist() == [planted]


def test_the_planted_induction_head_copies(seed):
    """A repeated random permutation is predicted from the second token of the repetition on."""
    torch.manual_seed(seed)
    ids = torch.randperm(N)[: N // 2].repeat(2)
    loss = Trace(planted_model(), ids).predictions.loss  # of the tokens 1 to N - 1
    assert not loss[N // 2 :].any()  # all other logits are lower by hundreds, so their probabilities are 0 in float32
    # Without a match, the head copies the mean of all tokens. The current one, which the stream also holds, then has a
    # larger logit than the next one: by 20, the weight of the last norm, over the deviation of the state, which is the
    # largest if 1 + 20 is in one channel, and two others have 1.
    without = Trace(planted_model(), ids, Switches(heads_off=((0, 0),))).predictions.loss
    assert min(loss[: N // 2 - 1].min(), without[N // 2 :].min()) > 20 / math.sqrt((21**2 + 2) / (3 * N))
