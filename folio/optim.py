"""Parameter groups, the optimizer, and the learning rate as a function of the step."""

import math

import torch
from torch import nn


def make_optimizer(
    model: nn.Module, learning_rate: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019), fused where the device has that kernel.

    Weights of two and more dimensions decay; biases and norms do not, as in GPT-3's and nanoGPT's training.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = parameters[0].device.type in ("cpu", "cuda", "mps")
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=fused)


def lr_at(
    step: int,
    *,
    schedule: str,
    learning_rate: float,
    min_lr: float,
    warmup_iters: int,
    lr_decay_iters: int,
    wsd_decay_iters: int,
) -> float:
    """The learning rate of step 0, 1, 2, ...

    "constant" is `learning_rate` at every step. The others rise linearly over the first `warmup_iters` steps, are at
    `min_lr` from step `lr_decay_iters` on, and go down between the two: "cosine" along half a cosine (Loshchilov &
    Hutter 2017), "linear" along a line, "wsd" (warmup, stable, decay: Hu et al. 2024, MiniCPM) not before the last
    `wsd_decay_iters` of them, and then along a line.
    """
    if schedule == "constant":
        return learning_rate
    if step < warmup_iters:
        return learning_rate * (step + 1) / (warmup_iters + 1)
    if step >= lr_decay_iters:
        return min_lr
    begin = max(warmup_iters, lr_decay_iters - wsd_decay_iters) if schedule == "wsd" else warmup_iters
    done = max(0.0, (step - begin) / (lr_decay_iters - begin))  # 0 .. 1
    remaining = 0.5 * (1.0 + math.cos(math.pi * done)) if schedule == "cosine" else 1.0 - done
    return min_lr + remaining * (learning_rate - min_lr)


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state as tensors named PARAMETER/KEY, as "transformer.wte.weight/exp_avg"."""
    names = {p: name for name, p in model.named_parameters()}
    return {f"{names[p]}/{key}": value for p, state in optimizer.state.items() for key, value in state.items()}


def load_state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Take up what `state_tensors` gave. Moments move to their parameter's device; step counts are left to torch."""
    places = {id(p): place for place, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    names = {name: places[id(p)] for name, p in model.named_parameters()}
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.rpartition("/")
        state.setdefault(names[name], {})[kind] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
