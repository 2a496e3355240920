"""GPT-2's network in one file that needs only torch, and after it, five other position methods.

    python model.py        parameters and FLOPs per token of GPT-2 (small to xl) and GPT-3 175B, by part

Dimensions: B batch, T time, S keys, C channels, H heads, D head size (C / H), V vocabulary, L layers.
Parameter names are GPT-2's; matrices are stored as nn.Linear's (out, in), OpenAI's as (in, out).
"""

import hashlib
import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

Rotation = tuple[Tensor, Tensor]  # cosines and sines, of rotary positions
ACTIVATIONS = {  # by their names in transformers
    "gelu_new": partial(F.gelu, approximate="tanh"),  # GPT-2's, an approximation of "gelu"
    "gelu": F.gelu,  # Hendrycks & Gimpel 2016; nanoGPT's
}


@dataclass(frozen=True)
class GPTConfig:
    block_size: int = 1024  # context in tokens, as trained
    vocab_size: int = 50257  # token ids are in [0, vocab_size)
    n_layer: int = 12
    n_head: int = 12  # must divide n_embd
    n_embd: int = 768
    bias: bool = True  # biases in the linear layers and norms, as in GPT-2
    activation: str = "gelu_new"  # one of ACTIVATIONS
    position: str = "learned"  # one of POSITIONS
    document_token: int | None = None  # ends a document, to which attention is confined; None: no such limit
    # train.py seeds dropout at each step, so that a resumed run drops the same elements as one that was not stopped.
    dropout: float = 0.0  # probability of zeroing an element; default of the next three
    embd_pdrop: float | None = None  # after the sum of token and position embeddings
    attn_pdrop: float | None = None  # on the attention weights
    resid_pdrop: float | None = None  # on the output of attention and of the MLP

    def __post_init__(self) -> None:
        check(self)

    def pdrop(self, place: str) -> float:
        """Dropout probability at "embd", "attn" or "resid"."""
        pdrop = getattr(self, f"{place}_pdrop")
        return self.dropout if pdrop is None else pdrop

    def flops_per_token(self) -> dict[str, int]:
        """Training FLOPs per token at full context, by part, counted as in PaLM (appendix B): 6 per weight of a matrix
        (2 in the forward pass, 4 in the backward pass), and 12 C T per layer for q k^T and weights v, causal or not.
        """
        L, C = self.n_layer, self.n_embd
        parts = {"attention": 6 * L * 4 * C**2 + 12 * L * C * self.block_size, "MLP": 6 * L * 8 * C**2}
        parts["embeddings"] = 6 * self.vocab_size * C
        return {**parts, "total": sum(parts.values())}


class CausalSelfAttention(nn.Module):
    """Masked multi-head attention ("Attention Is All You Need", Vaswani et al. 2017, section 3.2)."""

    def __init__(self, config: GPTConfig, index: int):
        super().__init__()
        self.index, self.n_head = index, config.n_head
        self.attn_dropout = nn.Dropout(config.pdrop("attn"))
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)  # q, k, v of all heads in one matmul
        self.c_proj = Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.pdrop("resid"))

    def forward(self, x: Tensor, kernel: "AttentionKernel", mask: "Mask", rotation: Rotation | None) -> Tensor:
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        if rotation is not None:  # only if positions are rotary
            q, k = rotate(q, rotation), rotate(k, rotation)
        y = kernel(self, q, k, v, mask)  # (B, H, T, D)
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.dropout(self.c_proj(y))


class AttentionKernel:
    """Attention by its definition. Subclasses compute the same result faster (folio/machine/kernels.py, which also
    chooses the one for training), or keep the keys and values of earlier tokens (folio/decoding/kv_cache.py).
    """

    masks_documents = True  # whether there may be several documents in a row

    def __call__(self, layer: CausalSelfAttention, q: Tensor, k: Tensor, v: Tensor, mask: "Mask") -> Tensor:
        """Return softmax(q k^T / sqrt(D) + mask) v, with dropout of the weights. q, k, v, result: (B, H, T, D)."""
        # The dot product of two random vectors grows with sqrt(D). If scores were that large, softmax would give nearly
        # all weight to one key, and its gradient would be nearly 0. Dividing q takes less time than dividing scores.
        scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)  # (B, H, T, S)
        weights = (scores + mask.tensor(q)).softmax(dim=-1)  # each row sums to 1
        return layer.attn_dropout(weights) @ v

    def begin_forward(self, idx: Tensor) -> tuple[Tensor, Tensor]:
        """Begin a forward pass over the tokens idx (B, T). Returns their positions and those of the S keys: (T,) and
        (S,), or (B, 1) and (B, S) if they differ between rows.
        """
        positions = torch.arange(idx.shape[1], device=idx.device)
        return positions, positions


@dataclass
class Mask:
    """What is added to the attention scores, in all layers of a forward pass: -inf hides a key from a query.

    biases: the position method's, with -inf for keys after the query, (B or 1, H or 1, T, S). None: as in GPT-2, which
    only hides later keys. first_keys: the first key of each query's document, (B, T). None: no earlier key is hidden.
    """

    biases: Tensor | None = None
    first_keys: Tensor | None = None

    def tensor(self, q: Tensor) -> Tensor:
        """The mask as one tensor that can be added to the scores of queries q (B, H, T, D)."""
        mask, T = self.biases, q.shape[-2]
        if mask is None:  # exp(-inf) is 0, so a hidden key gets no weight, and the weights of the others sum to 1
            mask = q.new_full((T, T), -math.inf).triu(diagonal=1)
        if self.first_keys is not None:
            keys = torch.arange(T, device=q.device)
            mask = mask.masked_fill(keys < self.first_keys[:, None, :, None], -math.inf)
        return mask.to(q.dtype)


class MLP(nn.Module):
    """Two linear layers with an activation in between; the hidden dimension is 4C."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.pdrop("resid"))

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.c_fc(x))  # (B, T, 4C)
        return self.dropout(self.c_proj(x))  # (B, T, C)


class Block(nn.Module):
    """A pre-norm residual block: the norms are inside the branches, so that gradients reach all layers undiminished
    along x, the residual stream.
    """

    def __init__(self, config: GPTConfig, index: int):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config, index)
        self.ln_2 = LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, kernel: AttentionKernel, mask: Mask, rotation: Rotation | None) -> Tensor:
        x = x + self.attn(self.ln_1(x), kernel, mask, rotation)
        x = x + self.mlp(self.ln_2(x))
        return x


class PositionEncoding:
    """How a model knows the order of tokens. The base class is "none": only the mask shows it (Haviv et al. 2022).

    A method changes one of three things: the embeddings, the queries and keys, or the attention scores. It may have a
    trainable table, GPT.transformer[table_name], of shape table_shape().
    """

    table_name: str | None = None
    biases_scores = False
    can_slide = False  # whether it depends on distances only, so that the oldest tokens can be dropped
    head_multiple = 1  # the head size must be a multiple of this

    def __init__(self, config: GPTConfig):
        self.config = config

    def embeddings(self, positions: Tensor, table: Tensor | None) -> Tensor | None:
        """Position embeddings (..., C), which are added to the token embeddings; None: not used."""

    def rotation(self, positions: Tensor) -> Rotation | None:
        """The rotation of queries and keys (see `rotate`); None: not used."""

    def bias(self, distance: Tensor, table: Tensor | None) -> Tensor:
        """Bias of the attention scores, (B or 1, H or 1, T, S). distance: (B or 1, 1, T, S), from query back to key."""
        return torch.zeros_like(distance, dtype=torch.float)


class LearnedPositions(PositionEncoding):
    """GPT-2's trainable table: row p is added to the embedding of the token at position p."""

    table_name = "wpe"

    def table_shape(self) -> tuple[int, int]:
        return self.config.block_size, self.config.n_embd

    def embeddings(self, positions: Tensor, table: Tensor) -> Tensor:
        return F.embedding(positions, table)


def cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum over N tokens of -log softmax(x weight^T)[target], in nats. Targets of -1 are ignored.

    x: (N, C). weight: (V, C). targets: (N,). folio/machine/kernels.py has a version for large vocabularies.
    """
    return F.cross_entropy(F.linear(x, weight), targets, ignore_index=-1, reduction="sum")


class GPT(nn.Module):
    """GPT-2 ("Language Models are Unsupervised Multitask Learners", Radford et al. 2019).

    Initial weights depend only on `seed` and each parameter's name. Under `torch.device("meta")`, nothing is allocated
    or initialized; this is how checkpoints are loaded and parameters counted.
    """

    def __init__(self, config: GPTConfig, seed: int = 1337):
        super().__init__()
        self.config = config
        self.kernel, self.cross_entropy = AttentionKernel(), cross_entropy  # folio/machine/kernels.py has faster ones
        self.position_encoding = encoding = POSITIONS[config.position](config)
        self.transformer = nn.ModuleDict()
        self.transformer.wte = Embedding(config.vocab_size, config.n_embd)
        if encoding.table_name:  # such as wpe of LearnedPositions
            self.transformer[encoding.table_name] = Embedding(*encoding.table_shape())
        self.transformer.drop = nn.Dropout(config.pdrop("embd"))
        self.transformer.h = nn.ModuleList(Block(config, index) for index in range(config.n_layer))
        self.transformer.ln_f = LayerNorm(config.n_embd, bias=config.bias)
        self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False)
        self.tie_weights()
        for name, p in self.named_parameters():
            if not p.is_meta:
                p.data.copy_(self.initial_value(name, p.shape, seed))

    def tie_weights(self) -> None:
        """Use the token embeddings as the output matrix, too (Press & Wolf 2017): in both, similar tokens need similar
        vectors. Two separate matrices would give GPT-2 124M 31% more parameters.
        """
        self.lm_head.weight = self.transformer.wte.weight

    def initial_value(self, name: str, shape: torch.Size, seed: int) -> Tensor:
        """GPT-2's initial values: biases 0, norms 1, matrices N(0, 0.02), except for the projections c_proj.

        Each parameter has its own generator, seeded with `seed` and its name, so that its values do not depend on the
        order, the device or the other parameters.
        """
        if name.endswith("bias"):
            return torch.zeros(shape)
        if len(shape) == 1:
            return torch.ones(shape)
        # The outputs of 2 L projections add up in the residual stream. The variance of a sum of independent terms is
        # the sum of theirs, so each is divided by 2 L: in a new model of any depth, the stream has about the same size.
        std = 0.02 / math.sqrt(2 * self.config.n_layer) if name.endswith("c_proj.weight") else 0.02
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.empty(shape).normal_(0.0, std, generator=generator)

    def embed(self, idx: Tensor, positions: Tensor) -> Tensor:
        """Token embeddings of idx (B, T), plus position embeddings if the encoding has any: (B, T, C)."""
        x = self.transformer.wte(idx)
        position_embeddings = self.position_encoding.embeddings(positions, position_table(self))
        return x if position_embeddings is None else x + position_embeddings.type_as(x)

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, kernel: AttentionKernel | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the logits of the last position (B, 1, V) and None; with targets, None and the loss in nats per token.

        idx: (B, T) token ids; T <= block_size if positions are learned. targets: (B, T) next ids; -1 is ignored, and
        the loss is 0 if all are -1. kernel: the attention kernel, such as a KVCache with the tokens before `idx`.
        """
        x = self.hidden_states(idx, kernel)
        if targets is None:
            return self.lm_head(x[:, -1:]), None
        total = self.cross_entropy(x.flatten(0, 1), self.lm_head.weight, targets.flatten())
        return None, total / (targets != -1).sum().clamp(min=1)

    def logits(self, idx: Tensor, kernel: AttentionKernel | None = None) -> Tensor:
        """Return the logits of all positions, (B, T, V)."""
        return self.lm_head(self.hidden_states(idx, kernel))

    def hidden_states(self, idx: Tensor, kernel: AttentionKernel | None = None) -> Tensor:
        """Return the output of the final norm, from which the output matrix computes logits: (B, T, C)."""
        if self.config.position == "learned" and idx.shape[1] > self.config.block_size:
            raise ValueError(f"a sequence of {idx.shape[1]} tokens is longer than block_size={self.config.block_size}")
        kernel = kernel or self.kernel
        positions, mask, rotation = begin_attention(self, kernel, idx)
        x = self.transformer.drop(self.embed(idx, positions))  # (B, T, C)
        for block in self.transformer.h:
            x = block(x, kernel, mask, rotation)
        return self.transformer.ln_f(x)

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None) -> Tensor:
        """Append max_new_tokens sampled ids to idx (B, T). Call eval() first. For readers and tests: it recomputes the
        whole context for each token. folio/decoding keeps the keys and values, and has its own random numbers.
        """
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.config.block_size :])[0][:, -1] / temperature  # (B, V)
            if top_k is not None:
                kth_largest = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < kth_largest, -math.inf)
            next_id = torch.multinomial(logits.softmax(dim=-1), num_samples=1)  # (B, 1)
            idx = torch.cat([idx, next_id], dim=1)
        return idx

    def num_params(self) -> dict[str, int]:
        """Number of parameters by part, and the "total". "embeddings" is also the output matrix."""
        parts = dict.fromkeys(("embeddings", "positions", "attention", "MLP", "biases", "norms"), 0)
        kinds = {".ln_": "norms", ".bias": "biases", ".attn.": "attention", ".mlp.": "MLP", ".wte.": "embeddings"}
        for name, p in self.named_parameters():
            parts[next((part for kind, part in kinds.items() if kind in name), "positions")] += p.numel()
        parts["embeddings"] = self.config.vocab_size * self.config.n_embd  # without padding (kernels.pad_vocabulary)
        return {**parts, "total": sum(parts.values())}


# --- other position methods -------------------------------------------------------------------------------------------


def angles(positions: Tensor, size: int) -> Tensor:
    """The angles p / 10000^(2i / size) of positions p, for i = 0 ... size / 2 - 1: (..., size / 2)."""
    return positions.unsqueeze(-1) / 10000 ** (torch.arange(0, size, 2, device=positions.device) / size)


def sinusoids(positions: Tensor, n_embd: int) -> Tensor:
    """PE / sqrt(C), where PE(p, 2i) = sin(p / 10000^(2i / C)) and PE(p, 2i + 1) = cos(p / 10000^(2i / C)): (..., C).
    Vaswani et al. 2017 multiply the token embeddings by sqrt(C) instead, which is equivalent because of the first norm.
    """
    a = angles(positions, n_embd)
    return torch.stack([a.sin(), a.cos()], dim=-1).flatten(-2)[..., :n_embd] / math.sqrt(n_embd)


class SinusoidalPositions(PositionEncoding):
    """Adds `sinusoids` to the embeddings."""

    def embeddings(self, positions: Tensor, table: None) -> Tensor:
        return sinusoids(positions, self.config.n_embd)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate queries or keys x (B, H, T, D) by their angles; channels i and i + D / 2 form a plane (Su et al. 2021).

    The channel order is GPT-NeoX's. A dot product depends only on the angle between two vectors, here the difference of
    two rotations. So that of a query and a key depends only on their distance, wherever they are in the text.
    """
    cos, sin = rotation
    return (x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin).type_as(x)


class RotaryPositions(PositionEncoding):
    """Rotates queries and keys by angles proportional to their positions."""

    can_slide, head_multiple = True, 2

    def rotation(self, positions: Tensor) -> Rotation:
        """Cosines and sines for `rotate`: (1, T, D) each, or (B, 1, 1, D) if the rows differ."""
        a = angles(positions, self.config.n_embd // self.config.n_head).unsqueeze(-3)
        return torch.cat([a.cos(), a.cos()], dim=-1), torch.cat([-a.sin(), a.sin()], dim=-1)


def relative_bucket(distance: Tensor) -> Tensor:
    """T5's bucket of a distance in tokens, 0 to 31 (Raffel et al. 2020). The first 16 buckets hold one distance each,
    the others exponentially growing ranges up to 128. The last one also holds all larger distances.
    """
    log_distance = torch.log(distance.clamp(min=16) / 16) / math.log(128 / 16)  # 0 to 1
    log_bucket = 16 + (log_distance * 16).long()
    return torch.where(distance < 16, distance.clamp(min=0), log_bucket.clamp(max=31))


class RelativePositions(PositionEncoding):
    """Adds a learned bias per head and distance bucket to the attention scores."""

    table_name, biases_scores, can_slide = "relative_bias", True, True

    def table_shape(self) -> tuple[int, int]:
        return 32, self.config.n_head

    def bias(self, distance: Tensor, table: Tensor) -> Tensor:
        return F.embedding(relative_bucket(distance[:, 0]), table).movedim(-1, 1).contiguous()


def alibi_slopes(n_head: int, device: torch.device) -> Tensor:
    """ALiBi's slopes m_h = 2^(-8h / H) for h = 1 ... H (Press et al. 2022): (H,). If H is not a power of two, the
    formula uses the next smaller one, P: the first P heads have h = 1 ... P, the others h = 0.5, 1.5, ...
    """
    power = 2 ** int(math.log2(n_head))
    h = torch.cat([torch.arange(1, power + 1, device=device), torch.arange(n_head - power, device=device) + 0.5])
    return 2 ** (-8 * h / power)


class ALiBiPositions(PositionEncoding):
    """Subtracts m_h times the distance from the attention scores of head h (see alibi_slopes)."""

    biases_scores, can_slide = True, True

    def bias(self, distance: Tensor, table: None) -> Tensor:
        return -alibi_slopes(self.config.n_head, distance.device)[:, None, None] * distance


POSITIONS: dict[str, type[PositionEncoding]] = {
    "learned": LearnedPositions,
    "sinusoidal": SinusoidalPositions,
    "rotary": RotaryPositions,
    "relative": RelativePositions,
    "alibi": ALiBiPositions,
    "none": PositionEncoding,
}

# --- what a forward pass attends to -----------------------------------------------------------------------------------


def begin_attention(model: GPT, kernel: AttentionKernel, idx: Tensor) -> tuple[Tensor, Mask, Rotation | None]:
    """Begin a forward pass over the tokens idx (B, T). Returns what all layers share, the mask and the rotation, after
    the tokens' positions in their documents: (T,), or (B, T) if they differ between rows.
    """
    positions, key_positions = kernel.begin_forward(idx)
    rotation, biases = model.position_encoding.rotation(positions), score_biases(model, positions, key_positions)
    token, first_keys = model.config.document_token, None
    if token is not None and kernel.masks_documents:
        first_keys = document_starts(idx, token)
        positions = positions - first_keys
    return positions, Mask(biases, first_keys), rotation


def score_biases(model: GPT, query_positions: Tensor, key_positions: Tensor) -> Tensor | None:
    """Mask.biases for the positions that AttentionKernel.begin_forward returned."""
    encoding = model.position_encoding
    if query_positions.dim() == 1 and not encoding.biases_scores:
        return None
    queries, keys = torch.atleast_2d(query_positions), torch.atleast_2d(key_positions)
    distance = queries[:, None, :, None] - keys[:, None, None, :]  # (B or 1, 1, T, S)
    return encoding.bias(distance, position_table(model)).masked_fill(distance < 0, -math.inf)


def position_table(model: GPT) -> Tensor | None:
    """The trainable table of the position encoding, if it has one."""
    name = model.position_encoding.table_name
    return model.transformer[name].weight if name else None


def document_starts(idx: Tensor, document_token: int) -> Tensor:
    """The index of the first token of each token's document, (B, T). A document token belongs to what it ends."""
    ends = torch.arange(1, idx.shape[1] + 1, device=idx.device)  # of a document, if it ended at this token
    last_ends = torch.where(idx == document_token, ends, 0).cummax(dim=1).values
    return F.pad(last_ends[:, :-1], (1, 0))


# --- layers without torch's default initialization --------------------------------------------------------------------


class Linear(nn.Linear):
    def reset_parameters(self) -> None: ...  # left uninitialized, see GPT.initial_value


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None: ...


class LayerNorm(nn.LayerNorm):
    def reset_parameters(self) -> None: ...


# --- sizes ------------------------------------------------------------------------------------------------------------


def check(config: GPTConfig) -> None:
    """Raise ValueError if no model can have this configuration."""
    sizes = (config.block_size, config.vocab_size, config.n_layer, config.n_head, config.n_embd)
    if not all(isinstance(size, int) and size > 0 for size in sizes) or config.n_embd % config.n_head:
        raise ValueError(f"sizes must be integers above 0, and n_head must divide n_embd: {config}")
    if config.activation not in ACTIVATIONS:
        raise ValueError(f"the activation {config.activation!r} is not one of {', '.join(ACTIVATIONS)}")
    if config.position not in [*POSITIONS]:  # a list: the value may be unhashable
        raise ValueError(f"the position encoding {config.position!r} is not one of {', '.join(POSITIONS)}")
    if config.n_embd // config.n_head % POSITIONS[config.position].head_multiple:
        raise ValueError(f"{config.position} positions need an even head size, n_embd / n_head: {config}")
    token = config.document_token
    if token is not None and not (type(token) is int and 0 <= token < config.vocab_size):
        raise ValueError(f"document_token={token!r}: it must be a token id, below vocab_size={config.vocab_size}")


SHAPES = {  # GPT-2: table 2 of Radford et al. 2019; GPT-3: table 2.1 of Brown et al. 2020
    "gpt2": GPTConfig(n_layer=12, n_head=12, n_embd=768),
    "gpt2-medium": GPTConfig(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": GPTConfig(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": GPTConfig(n_layer=48, n_head=25, n_embd=1600),
    "gpt3-175b": GPTConfig(n_layer=96, n_head=96, n_embd=12288, block_size=2048),
}


def main() -> None:
    with torch.device("meta"):
        models = {name: GPT(config) for name, config in SHAPES.items()}
    counts = {"parameters": GPT.num_params, "training FLOPs per token": lambda model: model.config.flops_per_token()}
    for title, count in counts.items():
        parts = count(models["gpt2"])
        print(f"{title}\n  {'':12}" + "".join(f"{part:>19}" for part in parts))
        for name, model in models.items():
            print(f"  {name:12}" + "".join(f"{number:>19,}" for number in count(model).values()))


if __name__ == "__main__":
    main()
