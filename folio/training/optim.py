"""Optimizers: parameter groups, AdamW, Muon, and the decays of learning rates (schedule.py)."""

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from folio.machine.data_parallel import worker_threads
from folio.machine.distributed import SINGLE_PROCESS, Group, distribute_like, gather_like, to_local
from folio.machine.kernels import pad_rows


class LearningRates(NamedTuple):
    """The learning rates of a step."""

    learning_rate: float
    muon_learning_rate: float  # of Muon's matrices

    def exceed(self, before: "LearningRates", factor: float = 1 + 1e-9) -> bool:
        """Whether one of them is larger than before, by this factor. The default only ignores rounding."""
        return any(rate > factor * rate_before for rate, rate_before in zip(self, before, strict=True))


def make_optimizer(
    model: nn.Module,
    kind: str,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
    dtype: torch.dtype = torch.float32,
    group: Group = SINGLE_PROCESS,
    workers: int = 1,
) -> torch.optim.Optimizer:
    """Build an optimizer with BUILDERS[kind]; "muon" is Muon for the blocks' matrices and AdamW for the rest.

    learning_rate: until the first `update`. dtype: of the run's matmuls, and of Muon's; instead of float16, whose range
    is too small, they are in float32. group, workers: the processes or the threads that share Muon's work.
    """
    muon_dtype = torch.float32 if dtype == torch.float16 else dtype
    matrices = muon_matrices(model) if kind == "muon" else {}
    rest = [p for name, p in model.named_parameters() if p.requires_grad and name not in matrices]
    # Weight decay pulls parameters toward 0. In matrices, it favors solutions with small weights, which memorize less.
    # Biases and the weights of norms are too few to memorize anything, and decay would pull norms away from 1, their
    # neutral value, and shrink the activations. So only parameters with two dimensions decay, as in GPT-3 and nanoGPT.
    groups: list[dict[str, Any]] = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    by_shape: dict[tuple[int, int], list[Tensor]] = {}
    for name, p in matrices.items():
        by_shape.setdefault(muon_shape(name, p), []).append(p)
    for shape, params in by_shape.items():
        groups.append({"params": params, "weight_decay": weight_decay, "shape": shape, "dtype": muon_dtype})
    fused = rest[0].device.type in ("cpu", "cuda")  # fused kernels respect found_inf
    settings: dict[str, Any] = {"lr": learning_rate, "betas": betas, "fused": fused}
    if kind == "muon":
        settings |= {"processes": group, "workers": workers}
    return BUILDERS[kind](groups, **settings)


def set_rates(optimizer: torch.optim.Optimizer, rates: LearningRates, step: int) -> None:
    """Set the learning rates, and Muon's momentum. step: the number of steps done."""
    for group in optimizer.param_groups:
        values = {"lr": rates.learning_rate}
        if "shape" in group:  # a group of Muon ("momentum" is also a key of torch's SGD and RMSprop)
            values = {"lr": rates.muon_learning_rate, "momentum": muon_momentum_at(step)}
        for name, value in values.items():
            if isinstance(group.get(name), Tensor):  # of a captured step, which reads this memory
                group[name].fill_(value)
            else:
                group[name] = value


def use_device_rates(optimizer: torch.optim.Optimizer) -> None:
    """Keep the values of set_rates in tensors on the device, for a step that is captured as a CUDA graph.

    The fused kernels read a rate in float32 instead of float64, a relative difference of at most 6e-8.
    """
    for group in optimizer.param_groups:
        device = group["params"][0].device
        group["capturable"], group["lr"] = True, torch.zeros((), device=device)
        if "shape" in group:
            group["momentum"] = torch.zeros((), device=device)
    optimizer._warned_capturable_if_run_uncaptured = True  # by torch, of the first steps, which are not captured


def update(optimizer: torch.optim.Optimizer, rates: LearningRates | None, step: int, skip: Tensor) -> None:
    """Update the weights and clear the gradients.

    rates, step: see set_rates; None: they are set. skip: a tensor on the device, 1.0 if nothing may change, else 0.0.
    If the optimizer's kernels do not read it, this waits for the device.
    """
    if rates is not None:
        set_rates(optimizer, rates, step)
    if getattr(optimizer, "_step_supports_amp_scaling", False):  # torch's flag of fused optimizers
        optimizer.found_inf = skip  # the fused step changes nothing if this is 1
        optimizer.step()
    elif not skip.item():
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def muon_matrices(model: nn.Module) -> dict[str, Tensor]:
    """The matrices of the blocks, which Muon updates, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad and ".h." in name and p.dim() == 2}


def muon_shape(name: str, p: Tensor) -> tuple[int, int]:
    """The shorter and the longer side of a parameter's matrices. c_attn has three: queries, keys and values."""
    rows, columns = len(p) // (3 if "c_attn" in name else 1), p.shape[1]
    return min(rows, columns), max(rows, columns)


class AdamW(torch.optim.AdamW):
    """torch's AdamW without its decorators, which only keep these methods out of compiled graphs, but import torch's
    compiler, which takes almost a second.
    """

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    load_state_dict = inspect.unwrap(torch.optim.AdamW.load_state_dict)
    state_dict = inspect.unwrap(torch.optim.AdamW.state_dict)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class Muon(AdamW):
    """Muon (Jordan et al. 2024) for parameter groups with a "shape" (short, long), AdamW for the others.

    The group's matrices or their transposes have this shape. A parameter with k times as many rows is treated as k
    matrices. Momentum is Nesterov's, group["momentum"]; weight decay is decoupled; the update of a tall matrix is
    scaled by sqrt(rows / columns).

    The gradient of a matrix is often dominated by a few directions, in which a step changes much, while it changes
    hardly anything in the others. Muon replaces it by the nearest orthogonal matrix, which has the same size in every
    direction, so that rare directions, which may matter as much, are learned as fast.

    Unlike torch.optim.Muon, this optimizer orthogonalizes a group in batched matmuls, treats queries, keys and values
    as three matrices, skips a step if `found_inf` is 1 without waiting for the device, and divides the work among
    processes, including FSDP2's shards, or among the workers of a process.
    """

    def __init__(
        self, groups: list[dict[str, Any]], processes: Group = SINGLE_PROCESS, workers: int = 1, **settings: Any
    ):
        super().__init__(groups, **settings)
        self.processes, self.workers = processes, workers
        for group in self.matrices():
            group["momentum"] = 0.95
            for p in group["params"]:
                self.state[p] = {"step": torch.zeros((), device=p.device), "momentum_buffer": torch.zeros_like(p)}
        self.found_inf: Tensor | None = None

    def matrices(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if "shape" in group]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)  # leaves the step counts on the CPU if AdamW is not fused
        for group in self.matrices():
            for p in group["params"]:
                self.state[p]["step"] = self.state[p]["step"].to(p.device)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        if self.workers == 1:
            self.update_matrices(self.matrices())
        else:
            worker_threads(self.workers).map(self.update_matrices, self.divided())
        super().step()

    def divided(self) -> list[list[dict[str, Any]]]:
        """The groups of matrices with a part of their parameters for each worker, which take about the same time."""
        by_worker, costs = [[] for _ in range(self.workers)], [0] * self.workers
        for group in self.matrices():
            members = [[] for _ in by_worker]
            for p in sorted(group["params"], key=len, reverse=True):
                least = costs.index(min(costs))
                members[least].append(p)
                costs[least] += p.numel() * group["shape"][0]
            for groups, params in zip(by_worker, members, strict=True):
                groups.extend([{**group, "params": params}] if params else [])
        return by_worker

    @torch.no_grad()  # of the thread that calls it
    def update_matrices(self, groups: list[dict[str, Any]]) -> None:
        for group in groups:
            params, (short, long), lr, momentum = group["params"], group["shape"], group["lr"], group["momentum"]
            shards, gradients = [to_local(p) for p in params], [to_local(p.grad) for p in params]
            buffers = [to_local(self.state[p]["momentum_buffer"]) for p in params]
            apply = shards[0].new_ones(()) if self.found_inf is None else 1 - self.found_inf  # 0.0: skip the step
            for gradient, buffer in zip(gradients, buffers, strict=True):
                torch.where(apply.bool(), gradient, buffer, out=gradient)  # if skipped, lerp leaves the buffer as it is
            # The buffer is a mean of the gradients in which older ones count less. Nesterov's momentum mixes the newest
            # gradient into it once more, so that the update follows a change of direction sooner.
            lerp_(buffers, gradients, 1 - momentum)
            lerp_(gradients, buffers, momentum)
            full = [gather_like(g.to(group["dtype"]), p) for g, p in zip(gradients, params, strict=True)]
            wide = [m.view(-1, short, long) if m.shape[1] == long else m.view(-1, long, short).mT for m in full]
            update = self.distributed_orthogonalize(torch.cat(wide)).float().mul_(-lr * apply)  # (n, short, long)
            # An orthogonal matrix keeps the length of its input. A tall one spreads it over more outputs, each of which
            # changes less, which the factor compensates.
            updates = [
                u.reshape(p.shape) if p.shape[1] == long else u.mT.reshape(p.shape) * (long / short) ** 0.5
                for u, p in zip(update.split([len(m) for m in wide]), params, strict=True)
            ]
            # Without alpha, torch would convert `apply` to a number on the host, which waits for the device.
            torch._foreach_add_([self.state[p]["step"] for p in params], apply, alpha=1)
            torch._foreach_mul_(shards, 1 - lr * group["weight_decay"] * apply)
            torch._foreach_add_(shards, [to_local(distribute_like(p, u)) for p, u in zip(params, updates, strict=True)])
            for p in params:
                p.grad = None  # so that AdamW ignores them

    def distributed_orthogonalize(self, matrices: Tensor) -> Tensor:
        """`orthogonalize`, divided among the processes. matrices: (n, short, long), the same on each process."""
        n, (rank, size) = len(matrices), (self.processes.rank, self.processes.size)
        share = -(-n // size)
        local = matrices[rank * share : (rank + 1) * share]
        padding = local.new_zeros(share - len(local), *local.shape[1:])
        return self.processes.all_gather(orthogonalize(torch.cat([local, padding]) if len(padding) else local))[:n]


BUILDERS: dict[str, Callable[..., torch.optim.Optimizer]] = {  # functions of parameter groups, lr, betas and fused
    "adamw": AdamW,  # Loshchilov & Hutter 2019
    "muon": Muon,
}
OPTIMIZERS = tuple(BUILDERS)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Approximate the nearest (semi-)orthogonal matrix to each of (n, short, long).

    Its singular values are between 0.68 and 1.21 where the matrix's are at least 0.002 of its norm. Five quintic
    Newton-Schulz iterations with the coefficients of Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/
    """
    # The nearest orthogonal matrix has the same singular vectors, with singular values of 1. Computing those is slow,
    # but a x + b (x x^T) x + c (x x^T)^2 x needs only matmuls, and maps each singular value s to a s + b s^3 + c s^5.
    # After five times, all from 0.01 to 1 are near 1. A matrix that is divided by its norm has none above 1.
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices / matrices.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def lerp_(tensors: list[Tensor], ends: list[Tensor], weight: float | Tensor) -> None:
    """torch._foreach_lerp_, which would wait for the device to read a weight that is one tensor."""
    torch._foreach_lerp_(tensors, ends, [weight] * len(tensors) if isinstance(weight, Tensor) else weight)


def muon_momentum_at(step: int) -> float:
    """Muon's momentum: from 0.85 to 0.95 over the first 300 steps, as in modded-nanogpt.

    It averages over about 1 / (1 - momentum) steps, 7 to 20. At first, gradients change too fast for a longer average.
    """
    return 0.85 + 0.1 * min(1.0, step / 300)


DECAYS: dict[str, Callable[[float], float]] = {  # factors from 1 to 0 as functions of the progress, 0 to 1
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),  # Loshchilov & Hutter 2017
    "linear": lambda progress: 1.0 - progress,
    "wsd": lambda progress: 1.0 - progress,  # warmup, stable, decay (Hu et al. 2024, MiniCPM): only in the last steps
}
LR_SCHEDULES = (*DECAYS, "constant")  # constant: without a decay


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as tensors named PARAMETER/KEY, such as "transformer.wte.weight/exp_avg"."""
    names = {p: name for name, p in model.named_parameters()}
    return {f"{names[p]}/{key}": value for p, state in optimizer.state.items() for key, value in state.items()}


def load_state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Load the result of `state_tensors`. Moments move to their parameter's device; torch places the step counts."""
    indices = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    parameters = dict(model.named_parameters())
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, kind = key.rpartition("/")
        p = parameters[name]
        if tensor.dim():
            tensor = distribute_like(p, pad_rows(tensor, len(p)))
        state.setdefault(indices[id(p)], {})[kind] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
