"""A plain training loop with transformers' GPT-2 or with JAX, to which training.py compares Folio.

    python lab/bench/training_peers.py transformers --n_layer=3 --n_head=4 --n_embd=128 --block_size=128
    python lab/bench/training_peers.py jax --dtype=bfloat16        after pip install jax optax

Each step has a batch of random tokens, the mean loss, clipped gradients, and AdamW. Each line is the time of a step.

Dimensions: B batch, T time, C channels, H heads, V vocabulary.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError  # noqa: E402
from folio.base.packages import is_installed  # noqa: E402
from folio.base.settings import PositiveInt, Probability, Settings, run_script  # noqa: E402

Step = Callable[[np.ndarray], float]  # of tokens (B, T + 1); returns the mean loss


@dataclass(frozen=True)
class PeerConfig(Settings):
    library: tuple[str, ...] = ()  # transformers or jax
    n_layer: PositiveInt = 4
    n_head: PositiveInt = 4
    n_embd: PositiveInt = 128
    block_size: PositiveInt = 64
    batch_size: PositiveInt = 12
    vocab_size: PositiveInt = 65
    dropout: Probability = 0.0  # not with jax
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_iters: PositiveInt = 60

    def problems(self) -> list[tuple[str, str]]:
        """Require a library, and what it can do."""
        if len(self.library) != 1 or self.library[0] not in LIBRARIES:
            return [("library", f"give one of {', '.join(LIBRARIES)}")]
        if self.library == ("jax",) and self.dropout:
            return [("dropout", "the loop with JAX has none; use 0")]
        return []


def main(cfg: PeerConfig) -> None:
    (library,) = cfg.library
    require_packages(library)
    step, rng = LIBRARIES[library][1](cfg), np.random.default_rng(0)
    for _ in range(cfg.max_iters):
        tokens = rng.integers(cfg.vocab_size, size=(cfg.batch_size, cfg.block_size + 1))
        start = time.perf_counter()
        loss = step(tokens)
        print(f"loss {loss:.4f}, time {1000 * (time.perf_counter() - start):.3f}ms", flush=True)


def require_packages(library: str) -> None:
    """Raise UserError if a package that its loop needs is not installed. No requirements file lists those of jax."""
    packages = LIBRARIES[library][0]
    if not all(map(is_installed, packages)):
        raise UserError(f"{library}: its training loop needs pip install {' '.join(packages)}")


def transformers_step(cfg: PeerConfig) -> Step:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = dict(n_layer=cfg.n_layer, n_head=cfg.n_head, n_embd=cfg.n_embd, n_positions=cfg.block_size)
    dropout = dict(embd_pdrop=cfg.dropout, attn_pdrop=cfg.dropout, resid_pdrop=cfg.dropout)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=cfg.vocab_size, use_cache=False, **shape, **dropout)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)

    def step(tokens: np.ndarray) -> float:
        ids = torch.from_numpy(tokens)
        with torch.autocast("cpu", torch.bfloat16, enabled=cfg.dtype == "bfloat16"):
            logits = model(ids[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def jax_step(cfg: PeerConfig) -> Step:
    import jax
    import optax
    from jax import numpy as jnp

    B, T, C, H, V = cfg.batch_size, cfg.block_size, cfg.n_embd, cfg.n_head, cfg.vocab_size
    rng = np.random.default_rng(0)

    def matrix(*shape: int) -> Any:
        return jnp.asarray(rng.normal(0, 0.02, shape), jnp.float32)

    def block() -> dict[str, Any]:
        matrices = {"c_attn": (C, 3 * C), "attn_proj": (C, C), "c_fc": (C, 4 * C), "mlp_proj": (4 * C, C)}
        norms = {name: jnp.ones(C) for name in ("ln_1", "ln_2")}
        return norms | {name: matrix(*shape) for name, shape in matrices.items()}

    def norm(x: Any, weight: Any) -> Any:
        return jax.nn.standardize(x) * weight

    def loss_fn(weights: dict[str, Any], tokens: Any) -> Any:
        weights = jax.tree.map(lambda p: p.astype(cfg.dtype), weights)
        x = weights["wte"][tokens[:, :-1]] + weights["wpe"]  # (B, T, C)
        for h in weights["h"]:
            q, k, v = (norm(x, h["ln_1"]) @ h["c_attn"]).reshape(B, T, 3, H, C // H).transpose(2, 0, 1, 3, 4)
            x += jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(B, T, C) @ h["attn_proj"]
            x += jax.nn.gelu(norm(x, h["ln_2"]) @ h["c_fc"], approximate=False) @ h["mlp_proj"]
        logits = norm(x, weights["ln_f"]) @ weights["wte"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:]).mean()

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, b1=0.9, b2=0.99, weight_decay=0.1))
    blocks = [block() for _ in range(cfg.n_layer)]
    weights = {"wte": matrix(V, C), "wpe": matrix(T, C), "ln_f": jnp.ones(C), "h": blocks}
    moments = optimizer.init(weights)

    @jax.jit
    def update(weights: dict[str, Any], moments: Any, tokens: Any) -> tuple[Any, ...]:
        loss, gradients = jax.value_and_grad(loss_fn)(weights, tokens)
        changes, moments = optimizer.update(gradients, moments, weights)
        return loss, optax.apply_updates(weights, changes), moments

    def step(tokens: np.ndarray) -> float:
        nonlocal weights, moments
        loss, weights, moments = jax.block_until_ready(update(weights, moments, tokens))
        return float(loss)

    return step


LIBRARIES: dict[str, tuple[tuple[str, ...], Callable[[PeerConfig], Step]]] = {  # its packages, and the loop's step
    "transformers": (("transformers",), transformers_step),
    "jax": (("jax", "optax"), jax_step),
}


if __name__ == "__main__":
    run_script(main, PeerConfig)
