"""Traces of a forward pass: all intermediate values, and statistics of the attention heads.

A trace needs no code in model.py: a custom attention kernel records attention, and forward hooks record the rest. It
is computed for one sequence, without dropout.

Dimensions: T time, S keys, C channels, H heads, D head size, V vocabulary, L layers.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import GPT, AttentionKernel, Block, CausalSelfAttention, Mask, begin_attention

CHUNK = 64  # tokens whose logits are computed at once


@dataclass(frozen=True)
class Switches:
    """Interventions in the forward pass. The defaults change nothing."""

    # What a token may not see, the future and other documents: -inf before the softmax, 0 after it, or no mask.
    mask: Literal["before", "after", "off"] = "before"
    scale: bool = True  # False: do not divide scores by sqrt(D)
    heads_off: tuple[tuple[int, int], ...] = ()  # (layer, head) whose output is set to 0
    mlps_off: tuple[int, ...] = ()  # layers whose MLP output is set to 0


class Heads(NamedTuple):
    """Intermediate values of the attention heads of a layer."""

    q: Tensor  # (H, T, D), after the rotation if positions are rotary
    k: Tensor  # (H, T, D), also rotated
    v: Tensor  # (H, T, D)
    scores: Tensor  # q k^T / sqrt(D), (H, T, T)
    bias: Tensor | None  # added to the scores by the position method, (H, T, T)
    weights: Tensor  # softmax(scores + bias + mask), (H, T, T)
    z: Tensor  # weights v, (H, T, D)


class TracingAttention(AttentionKernel):
    """The definition with the switches, which calls record(layer index, Heads) in each layer."""

    def __init__(self, switches: Switches, record: Callable[[int, Heads], None]):
        self.switches, self.record = switches, record

    def __call__(self, layer: CausalSelfAttention, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """See AttentionKernel. The batch size must be 1."""
        q, k, v = q[0], k[0], v[0]
        scores = q @ k.transpose(-2, -1)  # (H, T, T)
        if self.switches.scale:
            scores = scores / math.sqrt(q.shape[-1])
        keys = torch.arange(scores.shape[-1], device=q.device)
        future = keys > keys[:, None]  # (T, T)
        hidden = future
        if mask.first_keys is not None:  # also keys of earlier documents
            hidden = future | (keys < mask.first_keys[0, :, None])
        bias = None
        if mask.biases is not None:  # future keys get the bias of the same distance, for mask="off"
            bias = torch.where(future, mask.biases[0].transpose(-2, -1), mask.biases[0]).expand_as(scores)
        biased = scores if bias is None else scores + bias
        if self.switches.mask == "before":
            biased = biased.masked_fill(hidden, -math.inf)
        weights = biased.softmax(dim=-1)
        if self.switches.mask == "after":
            weights = weights.masked_fill(hidden, 0.0)
        z = weights.to(v.dtype) @ v
        for index, head in self.switches.heads_off:
            if index == layer.index:
                z[head] = 0.0
        self.record(layer.index, Heads(q, k, v, scores, bias, weights, z))
        return z[None]


@dataclass(frozen=True)
class LayerTrace:
    """Intermediate values of one block, (T, C) unless noted."""

    ln_1: Tensor  # the input of attention
    qkv: Tensor  # queries, keys and values before the split into heads and the rotation, (T, 3C)
    heads: Heads
    attention: Tensor  # output of attention
    ln_2: Tensor  # the input of the MLP
    preactivation: Tensor  # (T, 4C)
    hidden: Tensor  # activation(preactivation), (T, 4C)
    mlp: Tensor  # output of the MLP


class Lens(NamedTuple):
    """Next-token predictions from states of the residual stream."""

    ids: Tensor  # most likely tokens, (..., k)
    probabilities: Tensor  # (..., k)
    target_probability: Tensor | None  # (...)
    target_rank: Tensor | None  # number of more likely tokens (...)


@dataclass
class Trace:
    """A forward pass of a model over the tokens ids (T,).

    model: in eval mode; in float32 for full precision. Only the residual stream is stored; `layer` recomputes the
    values of a layer. on_heads(layer, heads) is called once per layer during the forward pass.
    """

    model: GPT
    ids: Tensor
    switches: Switches = field(default_factory=Switches)
    on_heads: Callable[[int, Heads], None] = lambda layer, heads: None

    @torch.no_grad()
    def __post_init__(self) -> None:
        transformer = self.model.transformer
        states: list[Tensor] = []
        norms = [norm for block in transformer.h for norm in (block.ln_1, block.ln_2)] + [transformer.ln_f]
        with self._mlps_off(), forward_hooks({norm: lambda x, y: states.append(x) for norm in norms}):
            self.model(self.ids[None], kernel=TracingAttention(self.switches, self.on_heads))
        self.stream = torch.stack(states)  # (2L + 1, T, C): input of each attention and MLP, and the final state
        self._newest: tuple[int, LayerTrace] | None = None  # cache of `layer`

    @contextmanager
    def _mlps_off(self) -> Iterator[None]:
        """Set the output of the MLPs in switches.mlps_off to 0 inside the context."""
        with ExitStack() as stack:
            for layer in self.switches.mlps_off:
                mlp = self.model.transformer.h[layer].mlp
                stack.enter_context(mlp.register_forward_hook(lambda module, x, y: torch.zeros_like(y)))
            yield

    @cached_property
    def positions(self) -> Tensor:
        """The position of each token in its document (T,)."""
        positions, _, _ = begin_attention(self.model, TracingAttention(self.switches, self.on_heads), self.ids[None])
        return positions.expand(1, -1)[0]

    # --- one layer ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def layer(self, index: int) -> LayerTrace:
        """Return the values of a layer. Caches only the last one, because scores and weights are (H, T, T)."""
        if self._newest and self._newest[0] == index:
            return self._newest[1]
        block: Block = self.model.transformer.h[index]
        outputs: dict[nn.Module, Tensor] = {}
        heads: list[Heads] = []
        modules = (block.ln_1, block.attn.c_attn, block.attn, block.ln_2, block.mlp.c_fc, block.mlp)
        kernel = TracingAttention(self.switches, lambda layer, traced: heads.append(traced))

        def record(module: nn.Module) -> Callable[[Tensor, Tensor], None]:
            return lambda x, y: outputs.update({module: y})

        with self._mlps_off(), forward_hooks({module: record(module) for module in modules}):
            _, mask, rotation = begin_attention(self.model, kernel, self.ids[None])
            block(self.stream[2 * index][None], kernel, mask, rotation)
        ln_1, qkv, attention, ln_2, preactivation, mlp = (outputs[module] for module in modules)
        hidden = block.mlp.activation(preactivation)
        traced = LayerTrace(ln_1, qkv, heads[0], attention, ln_2, preactivation, hidden, mlp)
        self._newest = index, traced
        return traced

    @torch.no_grad()
    def masked_scores(self, index: int, token: int) -> Tensor:
        """Return the arguments of the softmax for a token's query, (H, T): scores with bias and mask."""
        heads, T = self.layer(index).heads, len(self.ids)
        scores = heads.scores[:, token] if heads.bias is None else heads.scores[:, token] + heads.bias[:, token]
        if self.switches.mask != "before":
            return scores
        keys = torch.arange(T, device=scores.device)
        return scores.masked_fill((keys > token) | (keys < token - self.positions[token]), -math.inf)

    @torch.no_grad()
    def head_outputs(self, index: int, token: int) -> Tensor:
        """Return what each head adds to the residual stream of a token, (H, C), without c_proj's bias."""
        z = self.layer(index).heads.z[:, token]  # (H, D)
        by_head = self.model.transformer.h[index].attn.c_proj.weight.unflatten(1, z.shape)  # (C, H, D)
        return torch.einsum("chd,hd->hc", by_head, z)

    @torch.no_grad()
    def separate_heads(self, index: int, token: int) -> Tensor:
        """Return a token's queries, keys and values, (3, H, D), computed with one matrix per head.

        Equal to `qkv`, which is computed with one matrix for all heads; before the rotation.
        """
        projection, x = self.model.transformer.h[index].attn.c_attn, self.layer(index).ln_1[token]
        matrices = projection.weight.chunk(3 * self.model.config.n_head)  # (D, C) each
        biases = [None] * len(matrices) if projection.bias is None else projection.bias.chunk(len(matrices))
        parts = [F.linear(x, matrix, bias) for matrix, bias in zip(matrices, biases, strict=True)]
        return torch.stack(parts).unflatten(0, (3, -1))

    # --- predictions --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of states of the residual stream: (..., C) to (..., V)."""
        return self.model.lm_head(self.model.transformer.ln_f(states))

    @torch.no_grad()
    def lens(self, states: Tensor, k: int, target: int | None = None) -> Lens:
        """Logit lens (nostalgebraist 2020): the k most likely next tokens after states (..., C).

        target: a token whose probability and rank to return, too.
        """
        log_probabilities = self.logits(states).log_softmax(dim=-1)
        top = log_probabilities.topk(min(k, log_probabilities.shape[-1]))
        if target is None:
            return Lens(top.indices, top.values.exp(), None, None)
        target_logs = log_probabilities[..., target]
        rank = (log_probabilities > target_logs[..., None]).sum(-1)
        return Lens(top.indices, top.values.exp(), target_logs.exp(), rank)

    @torch.no_grad()
    def logit_effect(self, added: Tensor, token: int) -> Tensor:
        """Direct effect on a token's logits, (..., V), of vectors (..., C) added to its residual stream.

        Direct logit attribution: the final norm uses the token's own mean and standard deviation.
        """
        final, norm = self.stream[-1, token], self.model.transformer.ln_f
        deviation = torch.sqrt(final.var(unbiased=False) + norm.eps)
        return self.model.lm_head((added - added.mean(-1, keepdim=True)) / deviation * norm.weight)

    @cached_property
    def predictions(self) -> "Predictions":
        """Loss, rank and entropy of each prediction."""
        parts = []
        for first in range(0, len(self.ids), CHUNK):
            log_probabilities = self.logits(self.stream[-1, first : first + CHUNK]).log_softmax(dim=-1)  # (CHUNK, V)
            entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
            best = log_probabilities.max(dim=-1)
            targets = self.ids[first + 1 : first + CHUNK + 1]
            target_logs = log_probabilities[: len(targets)].gather(-1, targets[:, None])  # (CHUNK, 1)
            rank = (log_probabilities[: len(targets)] > target_logs).sum(-1)
            parts.append((-target_logs[:, 0], rank, entropy, best.indices, best.values.exp()))
        return Predictions(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


class Predictions(NamedTuple):
    """Predictions after each token. The last token has no target."""

    loss: Tensor  # of the next token, in nats (T - 1,)
    rank: Tensor  # number of tokens more likely than the next token (T - 1,)
    entropy: Tensor  # of the distribution, in nats (T,)
    best: Tensor  # most likely token (T,)
    best_probability: Tensor  # (T,)


@contextmanager
def forward_hooks(callbacks: dict[nn.Module, Callable[[Tensor, Tensor], None]]) -> Iterator[None]:
    """Call callbacks[module](x, y) after each y = module(x), with tensors without the batch dimension."""

    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        callbacks[module](inputs[0][0], output[0])

    with ExitStack() as stack:
        for module in callbacks:
            stack.enter_context(module.register_forward_hook(hook))
        yield


# --- head scores ------------------------------------------------------------------------------------------------------

HEAD_SCORES = ("previous", "first", "itself", "prefix", "entropy", "distance", "offset")


def head_scores(weights: Tensor, ids: Tensor) -> dict[str, Tensor]:
    """Statistics of attention weights (H, T, T) over the tokens ids (T,): means (H,) over the queries from 1 on.

    previous, first, itself: weight of the previous token, of the first token, and of the query's own token.
    prefix: prefix-matching score, the weight of tokens after an earlier occurrence of the query's token, averaged over
        queries that have one. High for induction heads (Olsson et al. 2022, "In-context Learning and Induction Heads").
    entropy: of a query's weights, in nats. distance: mean distance of the keys, in tokens.
    offset: the distance with the largest total weight, in tokens: 1 for a previous-token head.
    """
    T = len(ids)
    queries, keys = torch.arange(T, device=ids.device)[:, None], torch.arange(T, device=ids.device)
    after_match = torch.zeros(T, T, dtype=torch.bool, device=ids.device)
    after_match[:, 1:] = (ids[:, None] == ids[:-1]) & (keys[1:] <= queries)
    matched = after_match.any(-1)
    by_query = {
        "previous": weights.diagonal(-1, dim1=1, dim2=2),
        "first": weights[:, 1:, 0],
        "itself": weights.diagonal(dim1=1, dim2=2)[:, 1:],
        "prefix": (weights * after_match).sum(-1)[:, matched],
        "entropy": -torch.special.xlogy(weights, weights).sum(-1)[:, 1:],
        "distance": (weights * (queries - keys)).sum(-1)[:, 1:],
    }  # each (H, queries)
    scores = {name: values.mean(-1) if values.shape[-1] else values.sum(-1) for name, values in by_query.items()}
    by_distance = [weights[:, 1:].diagonal(1 - distance, dim1=1, dim2=2).sum(-1) for distance in range(T)]
    return {**scores, "offset": torch.stack(by_distance).argmax(0).to(weights)}


def repeated_random_ids(vocab_size: int, length: int, seed: int = 0) -> Tensor:
    """Return random ids (length,) whose second half repeats the first, to detect induction heads."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.randint(vocab_size, (length // 2,), generator=generator)
    return half.repeat(2)
