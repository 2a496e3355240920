"""Parameter groups, AdamW and Muon, and the learning rate as a function of the step."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from folio.distributed import ALONE, Group, distribute_like, gather_like, to_local


def make_optimizer(
    model: nn.Module,
    kind: str,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
    muon_learning_rate: float = 0.0,
    dtype: torch.dtype = torch.float32,
    group: Group = ALONE,
) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019), fused where the device has that kernel; or "muon" for the blocks' matrices.

    Weights of two and more dimensions decay; biases and norms do not, as in GPT-3's and nanoGPT's training. A group's
    rate is that of the step times its "lr_scale". dtype: what Muon computes in. group: of the processes
    that share its work.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = muon_matrices(model) if kind == "muon" else {}
    alike: dict[tuple[int, int], list[Tensor]] = {}  # by rows and columns; queries, keys and values are three matrices
    for name, p in matrices.items():
        alike.setdefault((p.shape[0] // (3 if "c_attn" in name else 1), p.shape[1]), []).append(p)
    taken = {id(p) for p in matrices.values()}
    rest = [p for p in parameters if id(p) not in taken]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": weight_decay, "lr_scale": 1.0},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0, "lr_scale": 1.0},
    ]
    scale = muon_learning_rate / learning_rate if learning_rate else 0.0
    for (rows, _), params in alike.items():
        groups.append({"params": params, "weight_decay": weight_decay, "lr_scale": scale, "rows": rows, "dtype": dtype})
    fused = parameters[0].device.type in ("cpu", "cuda")  # where found_inf is known to be heeded
    settings: dict[str, Any] = {"lr": learning_rate, "betas": betas, "fused": fused}
    return Muon(groups, group, **settings) if matrices else torch.optim.AdamW(groups, **settings)


def muon_matrices(model: nn.Module) -> dict[str, Tensor]:
    """What Muon takes, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad and ".h." in name and p.dim() == 2}


class Muon(torch.optim.AdamW):
    """Muon (Jordan et al. 2024) for groups that have "rows", AdamW for the others.

    A group's matrices, (k * rows, columns) each, count as k matrices, and all of them are orthogonalized together.
    Nesterov momentum, group["momentum"]; weight decay is decoupled; the update of a tall matrix is scaled by
    sqrt(rows / columns). Where `found_inf` is 1, everything stays as it is, and nobody waits to know. Of several
    processes, each orthogonalizes its share of the matrices, gather_like whole where they are spread.
    """

    def __init__(self, groups: list[dict[str, Any]], processes: Group, **settings: Any):
        super().__init__(groups, **settings)
        self.processes = processes
        for group in self.matrices():
            group["momentum"] = 0.95
            for p in group["params"]:
                self.state[p] = {"step": torch.zeros((), device=p.device), "momentum_buffer": torch.zeros_like(p)}
        self.found_inf: Tensor | None = None

    def matrices(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if "rows" in group]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.matrices():
            params, rows, lr, momentum = group["params"], group["rows"], group["lr"], group["momentum"]
            here, columns = [to_local(p) for p in params], params[0].shape[1]
            good = here[0].new_ones(()) if self.found_inf is None else 1 - self.found_inf
            means = [to_local(self.state[p]["momentum_buffer"]) for p in params]
            gradients = torch.cat([to_local(p.grad).flatten() for p in params])  # what is here of all the matrices
            gradients = torch.where(good.bool(), gradients, 0)
            mean = torch.cat([m.flatten() for m in means]).lerp(gradients, (1 - momentum) * good)
            sizes = [p.numel() for p in here]
            towards = gradients.lerp(mean, momentum).to(group["dtype"]).split(sizes)
            stack = torch.cat(
                [gather_like(part.view_as(p), q) for part, p, q in zip(towards, here, params, strict=True)]
            )
            update = self.orthogonalized_by_all(stack.view(-1, rows, columns)).float()  # (n, rows, columns)
            update *= -lr * max(1, rows / columns) ** 0.5 * good
            updates = update.reshape(-1, columns).split([len(p) for p in params])
            torch._foreach_add_([self.state[p]["step"] for p in params], good)
            torch._foreach_copy_(means, [part.view_as(p) for part, p in zip(mean.split(sizes), here, strict=True)])
            torch._foreach_mul_(here, 1 - lr * group["weight_decay"] * good)
            torch._foreach_add_(here, [to_local(distribute_like(p, u)) for p, u in zip(params, updates, strict=True)])
            for p in params:
                p.grad = None  # so that AdamW passes them over
        super().step()

    def orthogonalized_by_all(self, matrices: Tensor) -> Tensor:
        """`orthogonalized`, of which each process does a share; matrices: (n, rows, columns), the same in each."""
        n, (rank, size) = len(matrices), (self.processes.rank, self.processes.size)
        share = -(-n // size)
        mine = matrices[rank * share : (rank + 1) * share]
        idle = mine.new_zeros(share - len(mine), *mine.shape[1:])
        return self.processes.all_gather(orthogonalized(torch.cat([mine, idle]) if len(idle) else mine))[:n]


def orthogonalized(matrices: Tensor) -> Tensor:
    """For each of (n, rows, columns) about the nearest (semi-)orthogonal matrix: singular values between 0.7 and 1.2.

    Five quintic Newton-Schulz iterations with the coefficients of Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon/
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def muon_momentum_at(step: int) -> float:
    """From 0.85 to 0.95 over the first 300 steps, as in modded-nanogpt."""
    return 0.85 + 0.1 * min(1.0, step / 300)


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
    if step < begin:
        return learning_rate
    done = (step - begin) / (lr_decay_iters - begin)  # 0 .. 1
    remaining = 0.5 * (1.0 + math.cos(math.pi * done)) if schedule == "cosine" else 1.0 - done
    return min_lr + remaining * (learning_rate - min_lr)


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as tensors named PARAMETER/KEY, as "transformer.wte.weight/exp_avg"."""
    names = {p: name for name, p in model.named_parameters()}
    return {f"{names[p]}/{key}": value for p, state in optimizer.state.items() for key, value in state.items()}


def load_state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Take up what `state_tensors` gave. Moments move to their parameter's device; step counts are left to torch."""
    places = {id(p): place for place, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    parameters = dict(model.named_parameters())
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.rpartition("/")
        p = parameters[name]
        state.setdefault(places[id(p)], {})[kind] = distribute_like(p, tensor) if tensor.dim() else tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
