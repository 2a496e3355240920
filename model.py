"""The GPT-2 network in one file that needs only torch.

    python model.py        parameters and FLOPs per token of GPT-2 (small to xl) and GPT-3 175B, by part

Dimensions: B batch, T time, S keys, C channels, H heads, D head size (C / H), V vocabulary, L layers.
Parameter names are GPT-2's; matrices are stored as nn.Linear's (out, in), OpenAI's as (in, out).
"""

import hashlib
import math
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

ACTIVATIONS = {  # by their names in transformers
    "gelu_new": partial(F.gelu, approximate="tanh"),  # GPT-2's, an approximation of "gelu"
    "gelu": F.gelu,  # Hendrycks & Gimpel 2016; nanoGPT's
}
POSITIONS = ("learned", "sinusoidal", "rotary", "relative", "alibi", "none")  # ways to tell where a token is


@dataclass(frozen=True)
class GPTConfig:
    block_size: int = 1024  # context in tokens, as trained
    vocab_size: int = 50257  # token ids are 0 to vocab_size - 1
    n_layer: int = 12
    n_head: int = 12  # must divide n_embd
    n_embd: int = 768
    bias: bool = True  # biases in the linear layers and norms, as in GPT-2
    activation: str = "gelu_new"  # one of ACTIVATIONS
    position: str = "learned"  # one of POSITIONS
    dropout: float = 0.0  # probability of zeroing an element; the default of the next three
    embd_pdrop: float | None = None  # after the sum of token and position embeddings
    attn_pdrop: float | None = None  # on the attention weights
    resid_pdrop: float | None = None  # on the output of attention and of the MLP

    def __post_init__(self) -> None:
        sizes = (self.block_size, self.vocab_size, self.n_layer, self.n_head, self.n_embd)
        if not all(isinstance(size, int) and size > 0 for size in sizes) or self.n_embd % self.n_head:
            raise ValueError(f"sizes must be integers above 0, and n_head must divide n_embd: {self}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"the activation {self.activation!r} is not one of {', '.join(ACTIVATIONS)}")
        if self.position not in POSITIONS:
            raise ValueError(f"the position method {self.position!r} is not one of {', '.join(POSITIONS)}")
        if self.position == "rotary" and self.n_embd // self.n_head % 2:
            raise ValueError(f"rotary positions need an even head size, n_embd / n_head: {self}")

    @property
    def biases_scores(self) -> bool:
        """Whether the position method adds a number to each score of attention."""
        return self.position in ("relative", "alibi")

    @property
    def can_slide(self) -> bool:
        """Whether attention uses distances instead of positions, so that a full context can slide over cached keys.

        A model without positions ("none") counts the tokens since the start, and fails if the first ones are dropped.
        """
        return self.biases_scores or self.position == "rotary"

    def pdrop(self, place: str) -> float:
        """Dropout probability at "embd", "attn" or "resid"."""
        own = getattr(self, f"{place}_pdrop")
        return self.dropout if own is None else own

    def flops_per_token(self) -> dict[str, int]:
        """Training FLOPs per token (forward and backward) at full context, by part, as PaLM counts them (appendix B).

        6 per matrix weight, including the output matrix, and 12 C T per layer for attention's two products, of which
        the causal half is not subtracted. Biases, norms and embedding lookups are not counted.
        """
        matrices = {"attention": 4, "MLP": 8}  # in units of C * C per layer
        parts = {name: 6 * n * self.n_layer * self.n_embd**2 for name, n in matrices.items()}
        parts["attention"] += 12 * self.n_layer * self.n_embd * self.block_size
        parts["embeddings"] = 6 * self.vocab_size * self.n_embd
        return {**parts, "total": sum(parts.values())}


# --- positions --------------------------------------------------------------------------------------------------------
#
# A method adds a vector to the token embeddings (learned, sinusoidal), rotates queries and keys (rotary), or adds a
# number to the scores of attention (relative, alibi). With "none", only the causal mask distinguishes positions (Haviv
# et al. 2022). "learned" is GPT-2's trainable table, wpe.


def angles(positions: Tensor, size: int) -> Tensor:
    """The angles p / 10000^(2i / size) of positions p, for i = 0 ... size / 2 - 1: (..., size / 2)."""
    return positions.unsqueeze(-1) / 10000 ** (torch.arange(0, size, 2, device=positions.device) / size)


def sinusoids(positions: Tensor, n_embd: int) -> Tensor:
    """PE / sqrt(C), for PE(p, 2i) = sin(p / 10000^(2i / C)), PE(p, 2i + 1) = cos(p / 10000^(2i / C)). Returns (..., C).

    Vaswani et al. 2017 multiply the token embeddings by sqrt(C) instead; the first norm gives the same for both.
    """
    a = angles(positions, n_embd)
    return torch.stack([a.sin(), a.cos()], dim=-1).flatten(-2)[..., :n_embd] / math.sqrt(n_embd)


Rotation = tuple[Tensor, Tensor]  # cosines and sines


def rotary(positions: Tensor, head_size: int) -> Rotation:
    """The cosines and sines for `rotate`: (1, T, D) each, or (B, 1, 1, D) if the rows differ."""
    a = angles(positions, head_size).unsqueeze(-3)
    return torch.cat([a.cos(), a.cos()], dim=-1), torch.cat([-a.sin(), a.sin()], dim=-1)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate queries or keys x (B, H, T, D) by their angles, channels i and i + D / 2 as a plane (Su et al. 2021).

    The product of a rotated query and a rotated key depends on their positions only through the distance. The order of
    the channels is GPT-NeoX's.
    """
    cos, sin = rotation
    return (x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin).type_as(x)


RELATIVE_BUCKETS = 32


def relative_bucket(distance: Tensor) -> Tensor:
    """The bucket of a distance in tokens, of 32 that have a learned bias per head (T5, Raffel et al. 2020).

    The first 16 buckets hold one distance each; the others get exponentially wider, up to a distance of 128; the last
    one also holds all larger distances.
    """
    buckets, exact, farthest = RELATIVE_BUCKETS, RELATIVE_BUCKETS // 2, 128
    log_distance = torch.log(distance.clamp(min=exact) / exact) / math.log(farthest / exact)  # 0 to 1
    log_bucket = exact + (log_distance * (buckets - exact)).long()
    return torch.where(distance < exact, distance.clamp(min=0), log_bucket.clamp(max=buckets - 1))


def alibi_slopes(n_head: int, device: torch.device) -> Tensor:
    """m_h = 2^(-8h / H) for h = 1 ... H, so that a key at a distance d is penalized by m_h d (Press et al. 2022): (H,).

    If H is not a power of two, the formula uses the next smaller one, P, for H: the first P heads have h = 1 ... P, and
    the others h = 0.5, 1.5, ...
    """
    power = 2 ** int(math.log2(n_head))
    h = torch.cat([torch.arange(1, power + 1, device=device), torch.arange(n_head - power, device=device) + 0.5])
    return 2 ** (-8 * h / power)


# --- attention --------------------------------------------------------------------------------------------------------


class Attention:
    """Causal attention over the sequence itself, and the seam for other ways to compute attention.

    Each layer calls attend(layer, q, k, v, mask). A subclass may use other kernels (folio/machine/kernels.py) or keep
    the keys and values of earlier tokens (folio/decoding/kv_cache.py).
    """

    def positions(self, idx: Tensor) -> tuple[Tensor, Tensor]:
        """The positions of the tokens `idx` (B, T), and those of the S keys that they may attend to.

        Called once per forward pass. Returns (T,) and (S,), or (B, 1) and (B, S) if the rows differ.
        """
        positions = torch.arange(idx.shape[1], device=idx.device)
        return positions, positions

    def __call__(self, layer: "CausalSelfAttention", q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """softmax(q k^T / sqrt(D) + mask) v. q, k, v, result: (B, H, T, D). mask: of GPT.attention_mask."""
        dropout_p = layer.attn_dropout.p if layer.training else 0.0
        if mask is not None:
            mask = mask.to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal=mask is None)


class CausalSelfAttention(nn.Module):
    """Masked multi-head attention ("Attention Is All You Need", Vaswani et al. 2017, section 3.2)."""

    def __init__(self, config: GPTConfig, index: int):
        super().__init__()
        self.index, self.n_head = index, config.n_head
        self.attn_dropout = nn.Dropout(config.pdrop("attn"))
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.pdrop("resid"))

    def forward(self, x: Tensor, rotation: Rotation | None, mask: Tensor | None, attend: Attention) -> Tensor:
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        y = attend(self, q, k, v, mask)  # (B, H, T, D)
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.dropout(self.c_proj(y))


class MLP(nn.Module):
    """Two linear layers with an activation between them; the inner one is four times as wide."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.pdrop("resid"))

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.c_fc(x))  # (B, T, 4C)
        return self.dropout(self.c_proj(x))  # (B, T, C)


class Block(nn.Module):
    """A pre-norm residual block."""

    def __init__(self, config: GPTConfig, index: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config, index)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotation: Rotation | None, mask: Tensor | None, attend: Attention) -> Tensor:
        x = x + self.attn(self.ln_1(x), rotation, mask, attend)
        x = x + self.mlp(self.ln_2(x))
        return x


# --- loss -------------------------------------------------------------------------------------------------------------

LOGITS_AT_ONCE = 2**26  # 1,335 tokens of GPT-2's vocabulary, 256 MiB in float32


def cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The sum over N tokens of -log softmax(x weight^T)[target], in nats; a target of -1 is not counted.

    x: (N, C). weight: (V, C). targets: (N,).
    """
    if len(targets) * len(weight) > LOGITS_AT_ONCE:
        return ChunkedCrossEntropy.apply(x, weight, targets, torch.is_grad_enabled())
    return F.cross_entropy(F.linear(x, weight), targets, ignore_index=-1, reduction="sum")


class ChunkedCrossEntropy(torch.autograd.Function):
    """`cross_entropy` for a large vocabulary, whose logits (N, V) would be a step's largest tensor.

    Loss and gradients of a chunk of tokens are computed together, so that its logits are needed only once. The idea is
    that of Liger Kernel (Hsu et al. 2024) and Cut Cross-Entropy (Wijmans et al. 2024).
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, needs_gradients: bool) -> Tensor:
        chunks = -(-len(targets) * len(weight) // LOGITS_AT_ONCE)
        total, grads_x, grad_weight = torch.zeros((), device=x.device), [], None
        for x_n, targets_n in zip(x.chunk(chunks), targets.chunk(chunks), strict=True):  # (n, C), (n,)
            loss, grad_x, part = ChunkedCrossEntropy.of_chunk(x_n, weight, targets_n, needs_gradients)
            total += loss
            if needs_gradients:
                grads_x.append(grad_x)
                grad_weight = part.float() if grad_weight is None else grad_weight.add_(part)
        if needs_gradients:
            ctx.save_for_backward(torch.cat(grads_x).type_as(x), grad_weight.type_as(weight))
        return total

    @staticmethod
    def of_chunk(x: Tensor, weight: Tensor, targets: Tensor, needs_gradients: bool) -> tuple[Tensor, ...]:
        """The sum of the losses, and its gradients with respect to x (n, C) and weight (V, C)."""
        logits = F.linear(x, weight)  # (n, V)
        log_p = logits.log_softmax(dim=-1, dtype=torch.float)
        loss = F.nll_loss(log_p, targets, ignore_index=-1, reduction="sum")
        if not needs_gradients:
            return loss, None, None
        target, counted = targets.clamp(min=0)[:, None], (targets != -1)[:, None]  # (n, 1) each
        p_minus_one_hot = log_p.exp_().scatter_add_(1, target, -torch.ones_like(log_p[:, :1])).mul_(counted)
        grad_logits = p_minus_one_hot.to(logits.dtype)  # (n, V)
        return loss, grad_logits @ weight, grad_logits.T @ x

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * grad, grad_weight * grad, None, None


# --- the network ------------------------------------------------------------------------------------------------------


def position_table(config: GPTConfig) -> dict[str, nn.Embedding]:
    """The trainable table of the position method, by its name in GPT.transformer; most methods have none."""
    if config.position == "learned":
        return {"wpe": nn.Embedding(config.block_size, config.n_embd)}
    if config.position == "relative":
        return {"relative_bias": nn.Embedding(RELATIVE_BUCKETS, config.n_head)}
    return {}


class _SkipInit(TorchFunctionMode):
    """Skips the initialization that modules do themselves. On the meta device it would import torch's compiler."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"]
        return function(*args, **(kwargs or {}))


class GPT(nn.Module):
    """GPT-2 ("Language Models are Unsupervised Multitask Learners", Radford et al. 2019).

    Initial weights follow from `seed` and each parameter's name (see initial_value). Under `torch.device("meta")`
    nothing is allocated or initialized; checkpoints are loaded and large models are counted that way.
    """

    def __init__(self, config: GPTConfig, seed: int = 1337):
        super().__init__()
        self.config = config
        self.attend = Attention()  # how forward computes attention unless it is told otherwise
        with _SkipInit():
            self.transformer = nn.ModuleDict(
                dict(
                    wte=nn.Embedding(config.vocab_size, config.n_embd),
                    **position_table(config),
                    drop=nn.Dropout(config.pdrop("embd")),
                    h=nn.ModuleList(Block(config, index) for index in range(config.n_layer)),
                    ln_f=nn.LayerNorm(config.n_embd, bias=config.bias),
                )
            )
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.tie_weights()
        if not self.lm_head.weight.is_meta:
            self.init_weights(seed)

    def tie_weights(self) -> None:
        """Use the token-embedding table as the output matrix (Press & Wolf 2017)."""
        self.lm_head.weight = self.transformer.wte.weight

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        for name, p in self.named_parameters():
            p.copy_(self.initial_value(name, p.shape, seed))

    def initial_value(self, name: str, shape: torch.Size, seed: int) -> Tensor:
        """GPT-2's initial values: N(0, 0.02), projections into the residual stream / sqrt(2 L), biases 0, gains 1.

        Each tensor has its own generator, seeded from `seed` and the parameter's name. Its values do not depend on the
        order, the device or the other parameters.
        """
        if name.endswith("bias"):
            return torch.zeros(shape)
        if len(shape) == 1:
            return torch.ones(shape)
        std = 0.02 / math.sqrt(2 * self.config.n_layer) if name.endswith("c_proj.weight") else 0.02
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.empty(shape).normal_(0.0, std, generator=generator)

    def embed(self, idx: Tensor, positions: Tensor) -> Tensor:
        """Embeddings of the tokens idx (B, T), plus those of their positions if the method adds any: (B, T, C)."""
        x = self.transformer.wte(idx)
        if self.config.position == "learned":
            return x + self.transformer.wpe(positions)
        if self.config.position == "sinusoidal":
            return x + sinusoids(positions, self.config.n_embd).type_as(x)
        return x

    def attention_mask(self, query_positions: Tensor, key_positions: Tensor) -> Tensor | None:
        """What is added to the scores of attention: a bias or 0, and -inf for keys after the query.

        query_positions, key_positions: of Attention.positions. Returns (B or 1, H or 1, T, S); None if it is the plain
        causal mask, for queries that are the last T of the keys.
        """
        if query_positions.dim() == 1 and not self.config.biases_scores:
            return None
        queries, keys = torch.atleast_2d(query_positions), torch.atleast_2d(key_positions)
        distance = queries[:, None, :, None] - keys[:, None, None, :]  # (B or 1, 1, T, S)
        if self.config.position == "relative":
            bias = self.transformer.relative_bias(relative_bucket(distance[:, 0])).movedim(-1, 1).contiguous()
        elif self.config.position == "alibi":
            bias = -alibi_slopes(self.config.n_head, distance.device)[:, None, None] * distance
        else:
            bias = torch.zeros_like(distance, dtype=torch.float)
        return bias.masked_fill(distance < 0, -math.inf)

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, attend: Attention | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The logits of the last position (B, 1, V) and None; with targets, None and the mean cross-entropy in nats.

        idx: (B, T) token ids; T <= block_size if positions are learned. targets: (B, T) next ids; -1 is not counted,
        and the mean over no targets is 0. attend: how the layers attend, such as a KVCache that holds the tokens before
        `idx`.
        """
        x = self.hidden_states(idx, attend)
        if targets is None:
            return self.lm_head(x[:, -1:]), None
        total = cross_entropy(x.flatten(0, 1), self.lm_head.weight, targets.flatten())
        return None, total / (targets != -1).sum().clamp(min=1)

    def logits(self, idx: Tensor, attend: Attention | None = None) -> Tensor:
        """The logits of all positions, (B, T, V)."""
        return self.lm_head(self.hidden_states(idx, attend))

    def hidden_states(self, idx: Tensor, attend: Attention | None = None) -> Tensor:
        """What the output matrix multiplies to get logits: the last norm's output, (B, T, C)."""
        config = self.config
        if config.position == "learned" and idx.shape[1] > config.block_size:
            raise ValueError(f"a sequence of {idx.shape[1]} tokens is longer than block_size={config.block_size}")
        attend = attend or self.attend
        positions, key_positions = attend.positions(idx)  # (T,), (S,); or (B, 1), (B, S) if the rows differ
        rotation = rotary(positions, config.n_embd // config.n_head) if config.position == "rotary" else None
        mask = self.attention_mask(positions, key_positions)
        x = self.transformer.drop(self.embed(idx, positions))  # (B, T, C)
        for block in self.transformer.h:
            x = block(x, rotation, mask, attend)
        return self.transformer.ln_f(x)

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None) -> Tensor:
        """Append max_new_tokens sampled ids to idx (B, T), recomputing everything for each; call eval() first.

        This is the definition, for readers and tests. folio.decoding.generate caches keys and values.
        """
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.config.block_size :])[0][:, -1] / temperature  # (B, V)
            if top_k is not None:
                kth_largest = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < kth_largest, -math.inf)
            next_id = torch.multinomial(logits.softmax(dim=-1), num_samples=1)  # (B, 1)
            idx = torch.cat([idx, next_id], dim=1)
        return idx

    def crop_block_size(self, block_size: int) -> None:
        """Change the context. Of a learned table, only the first `block_size` positions are kept.

        Raises ValueError if it has fewer.
        """
        if self.config.position == "learned":
            if block_size > self.config.block_size:
                raise ValueError(f"block_size={block_size} is more than the model's {self.config.block_size} positions")
            first_positions = self.transformer.wpe.weight[:block_size].clone()
            self.transformer.wpe = nn.Embedding.from_pretrained(first_positions, freeze=False)
        self.config = replace(self.config, block_size=block_size)

    @classmethod
    def from_tensors(cls, config: GPTConfig, tensors: dict[str, Tensor]) -> "GPT":
        """A model whose parameters are these tensors, by name and without a copy; a tied weight is named once.

        Raises KeyError, ValueError, or RuntimeError (of load_state_dict) if names or shapes do not fit `config`.
        """
        if len({name.split(".")[2] for name in tensors if ".h." in name}) != config.n_layer:  # before a layer is built
            raise ValueError(f"these are not the weights of {config.n_layer} layers")
        with torch.device("meta"):
            model = cls(config)
        tensors = {**tensors, "lm_head.weight": tensors["transformer.wte.weight"]}
        model.load_state_dict(tensors, assign=True)
        model.tie_weights()
        return model

    def num_params(self) -> dict[str, int]:
        """Number of parameters by part, and their "total". The tied output matrix is counted once, as "embeddings".

        "attention" and "MLP" count their matrices; "biases" counts the biases of both.
        """
        parts = dict.fromkeys(("embeddings", "positions", "attention", "MLP", "biases", "norms"), 0)
        for name, p in self.named_parameters():
            if ".ln_" in name:
                parts["norms"] += p.numel()
            elif name.endswith("bias"):
                parts["biases"] += p.numel()
            elif ".attn." in name:
                parts["attention"] += p.numel()
            elif ".mlp." in name:
                parts["MLP"] += p.numel()
            else:
                parts["embeddings" if "wte" in name else "positions"] += p.numel()
        return {**parts, "total": sum(parts.values())}


SHAPES = {  # GPT-2: table 2 of Radford et al. 2019; GPT-3: table 2.1 of Brown et al. 2020
    "gpt2": GPTConfig(n_layer=12, n_head=12, n_embd=768),
    "gpt2-medium": GPTConfig(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": GPTConfig(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": GPTConfig(n_layer=48, n_head=25, n_embd=1600),
    "gpt3-175b": GPTConfig(n_layer=96, n_head=96, n_embd=12288, block_size=2048),
}


def main() -> None:
    for title in ("parameters", "training FLOPs per token"):
        print(title)
        rows = {}
        for name, config in SHAPES.items():
            with torch.device("meta"):
                model = GPT(config)
            rows[name] = model.num_params() if title == "parameters" else model.config.flops_per_token()
        parts = list(next(iter(rows.values())))
        print(f"  {'':12}" + "".join(f"{part:>19}" for part in parts))
        for name, row in rows.items():
            print(f"  {name:12}" + "".join(f"{row[part]:>19,}" for part in parts))


if __name__ == "__main__":
    main()
