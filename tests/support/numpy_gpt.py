"""GPT-2's forward pass in NumPy, written from the papers: an independent reference for model.py and
folio/decoding/trace.py.

Dimensions: T time, C channels, H heads, D head size, V vocabulary, L layers.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from model import GPT, GPTConfig
from tests.support.tolerances import network_operations, rounding_error

Array = np.ndarray

# Relative error in float32 of what is compared with NumPy's float64: the models have at most 3 layers, 64 channels, and
# texts of 150 tokens.
FLOAT32_ERROR = rounding_error(network_operations(GPTConfig(n_layer=3, n_head=1, n_embd=64), T=150))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_new(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


# --- positions --------------------------------------------------------------------------------------------------------


def sinusoids(T: int, C: int) -> Array:
    """The position encodings of Vaswani et al. 2017, divided by sqrt(C): (T, C)."""
    angle = [[t / 10000 ** ((c - c % 2) / C) for c in range(C)] for t in range(T)]
    return np.where(np.arange(C) % 2, np.cos(angle), np.sin(angle)) / math.sqrt(C)


def rotated(x: Array) -> Array:
    """Queries or keys (H, T, D), with channels i and i + D / 2 rotated as a complex number (Su et al. 2021)."""
    _, T, D = x.shape
    planes = x[..., : D // 2] + 1j * x[..., D // 2 :]
    planes = planes * np.exp(1j * np.outer(np.arange(T), 10000.0 ** (-2 * np.arange(D // 2) / D)))
    return np.concatenate([planes.real, planes.imag], axis=-1)


def t5_bucket(distance: Array) -> Array:
    """16 buckets of one distance, then 16 whose ends grow by the 16th root of 8, up to 128 (Raffel et al. 2020)."""
    ends = 16 * 8 ** (np.arange(1, 16) / 16)
    return np.where(distance < 16, distance, 16 + np.searchsorted(ends, distance, side="right"))


def alibi_slopes(H: int) -> list[float]:
    """The slopes in the code of Press et al. 2022."""
    if math.log2(H).is_integer():
        return [2 ** (-8 * h / H) for h in range(1, H + 1)]
    power = 2 ** math.floor(math.log2(H))
    return alibi_slopes(power) + alibi_slopes(2 * power)[::2][: H - power]


# --- the network ------------------------------------------------------------------------------------------------------


@dataclass
class NumpyLayer:
    """The activations of a layer. Names and shapes match folio.decoding.trace.LayerTrace and Heads."""

    ln_1: Array
    qkv: Array
    q: Array
    k: Array
    v: Array
    scores: Array
    bias: Array | None
    weights: Array
    z: Array
    head_outputs: Array  # the contribution of each head to the residual stream, without c_proj's bias: (H, T, C)
    attention: Array
    ln_2: Array
    preactivation: Array
    hidden: Array
    mlp: Array


class NumpyGPT:
    """A GPT with a copy of the model's current weights. mask, scale, heads_off, mlps_off: as in Switches."""

    def __init__(self, model: GPT, dtype: type = np.float64, mask="before", scale=True, heads_off=(), mlps_off=()):
        self.config, self.dtype = model.config, dtype
        parameters = {name.removeprefix("transformer."): p for name, p in model.named_parameters()}
        self.parameters = {name: p.detach().numpy().astype(dtype) for name, p in parameters.items()}
        self.mask, self.scale, self.heads_off, self.mlps_off = mask, scale, heads_off, mlps_off

    def run(self, ids: list[int]) -> "NumpyRun":
        return NumpyRun(self, np.array(ids))

    def linear(self, name: str, x: Array) -> Array:
        return x @ self.parameters[f"{name}.weight"].T + self.parameters.get(f"{name}.bias", 0)

    def norm(self, name: str, x: Array) -> Array:
        deviation = np.sqrt(((x - x.mean(-1, keepdims=True)) ** 2).mean(-1, keepdims=True) + 1e-5)
        normed = (x - x.mean(-1, keepdims=True)) / deviation
        return normed * self.parameters[f"{name}.weight"] + self.parameters.get(f"{name}.bias", 0)

    def positions(self, places: Array) -> Array:
        """The embeddings of positions (T,): (T, C)."""
        if self.config.position == "learned":
            return self.parameters["wpe.weight"][places]
        if self.config.position == "sinusoidal":
            return sinusoids(len(places), self.config.n_embd).astype(self.dtype)[places]
        return np.zeros((len(places), self.config.n_embd), self.dtype)

    def bias(self, T: int) -> Array | None:
        """The position method's bias of the scores, (H, T, T); None if it has none."""
        distance = np.abs(np.arange(T)[:, None] - np.arange(T))
        if self.config.position == "relative":
            return self.parameters["relative_bias.weight"][t5_bucket(distance)].transpose(2, 0, 1)
        if self.config.position == "alibi":
            return -np.array(alibi_slopes(self.config.n_head), self.dtype)[:, None, None] * distance
        return None

    def layer(self, index: int, x: Array, hidden_keys: Array) -> NumpyLayer:
        """The activations of a layer for its input (T, C). hidden_keys (T, T): of each query."""
        (T, C), H, name = x.shape, self.config.n_head, f"h.{index}"
        ln_1 = self.norm(f"{name}.ln_1", x)
        qkv = self.linear(f"{name}.attn.c_attn", ln_1)
        q, k, v = (part.reshape(T, H, C // H).transpose(1, 0, 2) for part in np.split(qkv, 3, axis=-1))
        if self.config.position == "rotary":
            q, k = rotated(q), rotated(k)
        scores = q @ k.transpose(0, 2, 1) / (math.sqrt(C // H) if self.scale else 1)
        bias = self.bias(T)
        biased = scores if bias is None else scores + bias
        weights = softmax(np.where(hidden_keys, -np.inf, biased) if self.mask == "before" else biased)
        if self.mask == "after":
            weights = np.where(hidden_keys, 0, weights)
        z = weights @ v
        for layer, head in self.heads_off:
            if layer == index:
                z[head] = 0
        by_head = np.split(self.parameters[f"{name}.attn.c_proj.weight"], H, axis=1)  # of (C, D)
        head_outputs = np.stack([z[h] @ by_head[h].T for h in range(H)])
        attention = head_outputs.sum(0) + self.parameters.get(f"{name}.attn.c_proj.bias", 0)
        ln_2 = self.norm(f"{name}.ln_2", x + attention)
        preactivation = self.linear(f"{name}.mlp.c_fc", ln_2)
        hidden = {"gelu": gelu, "gelu_new": gelu_new}[self.config.activation](preactivation)
        mlp = 0 * x if index in self.mlps_off else self.linear(f"{name}.mlp.c_proj", hidden)
        arrays = (ln_1, qkv, q, k, v, scores, bias, weights, z, head_outputs, attention, ln_2, preactivation, hidden)
        return NumpyLayer(*arrays, mlp)


class NumpyRun:
    """A forward pass over ids (T,). stream (2L + 1, T, C): as in folio.decoding.trace.Trace."""

    def __init__(self, gpt: NumpyGPT, ids: Array):
        self.gpt, self.ids = gpt, ids
        token, T = gpt.config.document_token, len(ids)
        starts = [max([0, *(t + 1 for t in range(query) if ids[t] == token)]) for query in range(T)]  # of documents
        queries, keys = np.arange(T)[:, None], np.arange(T)
        self.hidden_keys = (keys > queries) | (keys < np.array(starts)[:, None])  # (T, T)
        self.embeddings, self.positions = gpt.parameters["wte.weight"][ids], gpt.positions(keys - starts)
        states = [self.embeddings + self.positions]
        for index in range(gpt.config.n_layer):
            layer = gpt.layer(index, states[-1], self.hidden_keys)
            states.append(states[-1] + layer.attention)
            states.append(states[-1] + layer.mlp)
        self.stream = np.stack(states)

    def layer(self, index: int) -> NumpyLayer:
        return self.gpt.layer(index, self.stream[2 * index], self.hidden_keys)

    def biased_scores(self, layer: int, head: int) -> Array:
        """A head's scores with the position method's bias: (T, T)."""
        scores, bias = self.layer(layer).scores[head], self.layer(layer).bias
        return scores if bias is None else scores + bias[head]

    def masked_scores(self, layer: int, head: int) -> Array:
        """The argument of a head's softmax: (T, T)."""
        scores = self.biased_scores(layer, head)
        return np.where(self.hidden_keys, -np.inf, scores) if self.gpt.mask == "before" else scores

    def logits_of(self, states: Array) -> Array:
        """Logits (..., V) of states of the residual stream (..., C)."""
        return self.gpt.norm("ln_f", states) @ self.gpt.parameters["wte.weight"].T

    @cached_property
    def logits(self) -> Array:
        return self.logits_of(self.stream[-1])  # (T, V)

    @cached_property
    def probabilities(self) -> Array:
        return softmax(self.logits)

    @cached_property
    def losses(self) -> Array:
        """The loss of each token except the first, in nats: (T - 1,)."""
        return -np.log(self.probabilities[np.arange(len(self.ids) - 1), self.ids[1:]])

    @cached_property
    def ranks(self) -> Array:
        """The number of tokens more likely than each token except the first: (T - 1,)."""
        target_logits = self.logits[np.arange(len(self.ids) - 1), self.ids[1:]]
        return (self.logits[:-1] > target_logits[:, None]).sum(-1)

    @cached_property
    def entropies(self) -> Array:
        return entropy(self.probabilities)  # (T,)


def entropy(probabilities: Array) -> Array:
    """The entropy of distributions (..., N), in nats: (...)."""
    logs = np.log(probabilities, where=probabilities > 0, out=np.zeros_like(probabilities))
    return -(probabilities * logs).sum(-1)


def assert_same_ranks(actual: object, run: NumpyRun) -> None:
    """Assert equal ranks. Tokens whose logits differ by no more than their errors may be in either order."""
    tolerance = 2 * FLOAT32_ERROR * np.abs(run.logits).max()
    logits, target_logits = run.logits[:-1], run.logits[np.arange(len(run.ids) - 1), run.ids[1:]][:, None]
    lowest = (logits > target_logits + tolerance).sum(-1)
    highest = (logits > target_logits - tolerance).sum(-1) - 1  # without the target
    actual = np.asarray(actual)
    assert actual.shape == run.ranks.shape and (lowest <= actual).all() and (actual <= highest).all()


def assert_largest(indices: object, values: Array) -> None:
    """Assert that the indices (..., k) are those of the k largest values (..., N), the largest first.

    Values that differ by no more than their errors may be in either order.
    """
    indices = np.asarray(indices)
    assert (np.diff(np.sort(indices)) > 0).all()  # distinct
    assert_same(np.take_along_axis(values, indices, axis=-1), -np.sort(-values)[..., : indices.shape[-1]])


def assert_same(actual: object, expected: object, tolerance: float = FLOAT32_ERROR) -> None:
    """Assert that values differ by at most tolerance times the largest one; infinities and NaNs must match."""
    actual, expected = np.asarray(actual, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    finite = np.abs(expected[np.isfinite(expected)])
    largest = finite.max() if finite.size else 0.0
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * max(largest, 1e-30))


def assert_rounded(shown: object, expected: object, digits: int, largest: float) -> None:
    """Assert numbers that a page rounds to some digits. largest: of the numbers that they were computed from."""
    shown, expected = np.asarray(shown), np.asarray(expected)
    rounding = 0.5 * 10.0 ** (1 - digits) * np.abs(expected)
    assert (np.abs(shown - expected) <= rounding + FLOAT32_ERROR * largest).all()
