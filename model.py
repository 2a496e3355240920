"""The GPT-2 network, all of it, in one file that needs only torch.

    python model.py        parameters and FLOPs a token of GPT-2 (small to xl) and GPT-3 175B, by part

Dimensions: B batch, T time, C channels, H heads, D head size (C / H), V vocabulary, L layers.
Parameter names are GPT-2's; matrices are nn.Linear's (out, in), where OpenAI's are stored (in, out).
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

ACTIVATIONS = {  # by the names that transformers has for them
    "gelu_new": partial(F.gelu, approximate="tanh"),  # GPT-2's approximation of the next
    "gelu": F.gelu,  # Hendrycks & Gimpel 2016; nanoGPT's
}


@dataclass(frozen=True)
class GPTConfig:
    block_size: int = 1024  # longest context, in tokens: rows of the position table
    vocab_size: int = 50257  # token ids run from 0 to vocab_size - 1
    n_layer: int = 12
    n_head: int = 12  # must divide n_embd
    n_embd: int = 768
    bias: bool = True  # biases in the linear layers and norms, as in GPT-2
    activation: str = "gelu_new"  # GPT-2's; others in ACTIVATIONS
    dropout: float = 0.0  # probability of zeroing; the three places below follow it unless set apart
    embd_pdrop: float | None = None  # after the sum of token and position embeddings
    attn_pdrop: float | None = None  # on the attention weights
    resid_pdrop: float | None = None  # on what each half of a block adds to the residual stream

    def __post_init__(self) -> None:
        sizes = (self.block_size, self.vocab_size, self.n_layer, self.n_head, self.n_embd)
        if not all(isinstance(size, int) and size > 0 for size in sizes) or self.n_embd % self.n_head:
            raise ValueError(f"sizes must be whole numbers above 0, and n_head must divide n_embd: {self}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"the activation {self.activation!r} is not one of {', '.join(ACTIVATIONS)}")

    def pdrop(self, place: str) -> float:
        """Dropout probability at "embd", "attn" or "resid"."""
        own = getattr(self, f"{place}_pdrop")
        return self.dropout if own is None else own

    def flops_per_token(self) -> dict[str, int]:
        """Training FLOPs a token (forward and backward) at full context, by part, as PaLM counts them (appendix B).

        6 a matrix weight, the output matrix's among them, and 12 C T a layer for scores and weighted sums without
        allowance for the causal half. Biases, norms and look-ups are left out.
        """
        matrices = {"attention": 4, "MLP": 8}  # in units of C * C a layer
        parts = {name: 6 * n * self.n_layer * self.n_embd**2 for name, n in matrices.items()}
        parts["attention"] += 12 * self.n_layer * self.n_embd * self.block_size
        parts["embeddings"] = 6 * self.vocab_size * self.n_embd
        return {**parts, "total": sum(parts.values())}


class Dropout(nn.Dropout):
    """nn.Dropout. On a CPU, where torch draws one number after another, a draw serves four elements, 16 bits each."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or not (self.training and self.p):
            return super().forward(x)
        draws = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        kept = draws.view(torch.int16)[: x.numel()] >= round(self.p * 2**16) - 2**15
        return x * (kept.view(torch.uint8).to(x.dtype) / (1 - self.p)).view_as(x)  # bool itself is slow to convert


def attention(q: Tensor, k: Tensor, v: Tensor, dropout: nn.Module | None = None) -> tuple[Tensor, Tensor]:
    """Causal attention written out; scaled_dot_product_attention computes the same y without keeping the weights.

    q, k, v: (B, H, T, D). Returns y (B, H, T, D) and the weights (B, H, T, T), each row of which sums to 1.
    "Attention Is All You Need" (Vaswani et al. 2017), section 3.2.1, with the decoder's mask.
    """
    T, D = q.shape[-2:]
    future = q.new_full((T, T), -math.inf).triu(diagonal=1)
    weights = ((q / math.sqrt(D)) @ k.transpose(-2, -1) + future).softmax(dim=-1)  # (B, H, T, T)
    return (dropout(weights) if dropout else weights) @ v, weights


class KVCache:
    """The keys and values of what has been read, so that a new token costs one token: `kv` is (L, 2, B, H, T, D).

    Row b has read `lengths[b]` tokens, at positions 0 and on; what lies behind is never looked at. With `reach` set,
    the next token goes where the device says (`at`, (B,), the last position of each row), so that a captured CUDA graph
    can do it again: each row is then offered the first `reach` positions, of which a mask lets through the filled ones.
    """

    reach: int | None = None

    def __init__(self, config: GPTConfig, rows: int, dtype: torch.dtype, device: torch.device):
        D = config.n_embd // config.n_head
        shape = (config.n_layer, 2, rows, config.n_head, config.block_size, D)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self.rows = torch.arange(rows, device=device)
        self.at = torch.zeros_like(self.rows)  # kept up only while rows differ, or with `reach`
        self.set_lengths([0] * rows)

    def set_lengths(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.at.copy_(torch.tensor(lengths) - 1)  # in place: graphs that were captured go on reading it

    def begin(self, T: int) -> Tensor | slice:
        """Make ready for T more tokens in each row; returns their positions. T > 1 only into rows that are empty."""
        first, last = min(self.lengths), max(self.lengths)
        self.causal, self.mask = T > 1, None
        self.lengths = [length + T for length in self.lengths]
        reach = self.reach or last + T
        self.filled = self.kv.narrow(4, 0, reach).flatten(0, 1).unbind()  # 2 L views, of all layers in one call
        if first == last and not self.reach:
            self.new = self.kv.narrow(4, first, T).unbind()
            return slice(first, last + T)
        self.at.add_(1)
        self.mask = (torch.arange(reach, device=self.kv.device) <= self.at[:, None])[:, None, None]  # (B, 1, 1, T)
        return self.at[:, None]

    def update(self, layer: int, new: Tensor) -> tuple[Tensor, Tensor]:
        """Put in a layer's new keys and values, (2, B, H, T, D); returns all its keys and all its values so far."""
        if self.mask is None:
            self.new[layer].copy_(new)
        else:
            self.kv[layer][:, self.rows, :, self.at] = new[:, :, :, 0].transpose(0, 1).to(self.kv.dtype)
        return self.filled[2 * layer], self.filled[2 * layer + 1]


class CausalSelfAttention(nn.Module):
    """Masked multi-head attention: each position looks at itself and what came before."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.layer, self.n_head = layer, config.n_head
        self.attn_dropout = Dropout(config.pdrop("attn"))
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = Dropout(config.pdrop("resid"))

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)  # (3, B, H, T, D)
        if cache is None:
            q, k, v = qkv  # each (B, H, T, D)
            dropout_p = self.attn_dropout.p if self.training else 0.0
            if x.device.type == "cpu" and (q.dtype == torch.bfloat16 or dropout_p):  # there torch's own is slower
                y, _ = attention(q, k, v, self.attn_dropout)
            else:
                y = F.scaled_dot_product_attention(q, k, v, None, dropout_p, True)
        else:
            k, v = cache.update(self.layer, qkv[1:])  # each (B, H, all that was read, D)
            q = qkv[0].to(k.dtype)
            y = F.scaled_dot_product_attention(q, k, v, cache.mask, 0.0, cache.causal).to(x.dtype)
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.dropout(self.c_proj(y))


class MLP(nn.Module):
    """Two matrices with an activation between them, four times as wide inside."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = Dropout(config.pdrop("resid"))

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.c_fc(x))  # (B, T, 4C)
        return self.dropout(self.c_proj(x))  # (B, T, C)


class Block(nn.Module):
    """A pre-norm residual block."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache)
        x = x + self.mlp(self.ln_2(x))
        return x


class _WithoutInit(TorchFunctionMode):
    """Leaves out what modules fill themselves with; for shapes without values that would import torch's compiler."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"]
        return function(*args, **(kwargs or {}))


class GPT(nn.Module):
    """GPT-2 ("Language Models are Unsupervised Multitask Learners", Radford et al. 2019).

    Weights follow from `seed` and each parameter's name (see initial_value). Under `torch.device("meta")` nothing is
    allocated or initialised, which is how checkpoints are loaded and large models are counted.
    """

    def __init__(self, config: GPTConfig, seed: int = 1337):
        super().__init__()
        self.config = config
        with _WithoutInit():
            self.transformer = nn.ModuleDict(
                dict(
                    wte=nn.Embedding(config.vocab_size, config.n_embd),
                    wpe=nn.Embedding(config.block_size, config.n_embd),
                    drop=Dropout(config.pdrop("embd")),
                    h=nn.ModuleList(Block(config, layer) for layer in range(config.n_layer)),
                    ln_f=nn.LayerNorm(config.n_embd, bias=config.bias),
                )
            )
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.tie_weights()
        if not self.lm_head.weight.is_meta:
            self.init_weights(seed)

    def tie_weights(self) -> None:
        """Make the output matrix the token-embedding table itself (Press & Wolf 2017)."""
        self.lm_head.weight = self.transformer.wte.weight

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        for name, p in self.named_parameters():
            p.copy_(self.initial_value(name, p.shape, seed))

    def initial_value(self, name: str, shape: torch.Size, seed: int) -> Tensor:
        """GPT-2's initial values: N(0, 0.02), projections into the residual stream / sqrt(2 L), biases 0, gains 1.

        Each tensor has a generator of its own, made from `seed` and the parameter's name, so that its values do not
        depend on the order, on the device, or on which other parameters there are.
        """
        if name.endswith("bias"):
            return torch.zeros(shape)
        if len(shape) == 1:
            return torch.ones(shape)
        std = 0.02 / math.sqrt(2 * self.config.n_layer) if name.endswith("c_proj.weight") else 0.02
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.empty(shape).normal_(0.0, std, generator=generator)

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, cache: KVCache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits and, where there are targets, the mean cross-entropy in nats.

        idx: (B, T) token ids, T <= block_size. targets: (B, T) ids that should come next; -1 does not count, and where
        none does, the mean is 0. cache: what the rows have read before, which takes in `idx`.
        Returns logits (B, T, V) and the loss; without targets, the logits of the last position (B, 1, V) and None.
        """
        T = idx.shape[1]
        if T > self.config.block_size:
            raise ValueError(f"a sequence of {T} tokens is longer than block_size={self.config.block_size}")
        at = slice(T) if cache is None else cache.begin(T)
        positions = self.transformer.wpe.weight[at]  # (T, C), or (B, 1, C) where rows have read unequally much
        x = self.transformer.drop(self.transformer.wte(idx) + positions)  # (B, T, C)
        if torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type) == torch.bfloat16:
            x = x.bfloat16()  # the residual stream too
        for block in self.transformer.h:
            x = block(x, cache)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, -1:]), None
        logits = self.lm_head(x)  # (B, T, V)
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
        return logits, total / (targets != -1).sum().clamp(min=1)

    def new_cache(self, rows: int, dtype: torch.dtype) -> KVCache:
        """An empty cache for so many rows, in the dtype that attention is to be computed in."""
        return KVCache(self.config, rows, dtype, self.transformer.wte.weight.device)

    def crop_block_size(self, block_size: int) -> None:
        """Keep the first `block_size` positions, for work on shorter text. Raises ValueError if there are fewer."""
        if block_size > self.config.block_size:
            raise ValueError(f"block_size={block_size} is more than the {self.config.block_size} positions there are")
        self.config = replace(self.config, block_size=block_size)
        kept = self.transformer.wpe.weight[:block_size].clone()
        self.transformer.wpe = nn.Embedding.from_pretrained(kept, freeze=False)

    @classmethod
    def from_tensors(cls, config: GPTConfig, tensors: dict[str, Tensor]) -> "GPT":
        """A model made of these tensors by parameter name, none of them copied; a tied weight is named once.

        Raises KeyError, ValueError, or RuntimeError as load_state_dict does, where names or shapes do not fit `config`.
        """
        if sum(name.endswith("ln_1.weight") for name in tensors) != config.n_layer:  # before any number is built
            raise ValueError(f"these are not the weights of {config.n_layer} layers")
        with torch.device("meta"):
            model = cls(config)
        tensors = {**tensors, "lm_head.weight": tensors["transformer.wte.weight"]}
        model.load_state_dict(tensors, assign=True)
        model.tie_weights()
        return model

    def num_params(self) -> dict[str, int]:
        """Parameters by part, and their "total". The tied output matrix is counted once, with the embeddings.

        "attention" and "MLP" are their matrices; "biases" are the biases of both.
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
                parts["positions" if "wpe" in name else "embeddings"] += p.numel()
        return {**parts, "total": sum(parts.values())}


SHAPES = {  # GPT-2: table 2 of Radford et al. 2019; GPT-3: table 2.1 of Brown et al. 2020
    "gpt2": GPTConfig(n_layer=12, n_head=12, n_embd=768),
    "gpt2-medium": GPTConfig(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": GPTConfig(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": GPTConfig(n_layer=48, n_head=25, n_embd=1600),
    "gpt3-175b": GPTConfig(n_layer=96, n_head=96, n_embd=12288, block_size=2048),
}


def main() -> None:
    for title in ("parameters", "training FLOPs a token"):
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
