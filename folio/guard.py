"""Steps that must not count: found on the device at every step, told at the next one at which the loop waits anyway."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

DECAY = 0.98  # of the running mean and deviation: a memory of some 50 steps
SETTLING = 100  # steps before a deviation means anything


class Step(NamedTuple):
    """What the device found about one step."""

    loss: float
    grad_norm: float
    skipped: bool  # it did not reach weights, moments or the optimizer's step count, and should have


class StepGuard:
    """Judges each step by its loss and gradient norm, without waiting for the device.

    A step that is not finite is bad. With skip_spikes=z, so is one whose loss or gradient norm lies more than z
    standard deviations above its running mean. scaling: under float16's loss scaling an infinite gradient of a finite
    loss only means that the scale is too large; such a step is passed over without being counted.
    """

    def __init__(self, device: torch.device, skip_spikes: float | None, scaling: bool, state: dict[str, Any] | None):
        self.skip_spikes, self.scaling = skip_spikes, scaling
        state = state or {"in_a_row": 0, "skipped": 0, "moments": [[0.0, 0.0, 0.0]] * 2}
        self.in_a_row = torch.tensor(state["in_a_row"], device=device)
        self.skipped = torch.tensor(state["skipped"], device=device)
        self.moments = torch.tensor(state["moments"], device=device)  # (2, 3): of loss and norm, steps, mean, variance
        self.seen: list[Tensor] = []

    def judge(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """1.0 if the optimizer must pass this step over, else 0.0, on the device: what torch calls found_inf."""
        values = torch.stack([loss, grad_norm]).float()  # (2,)
        bad = ~values.isfinite().all()
        if self.skip_spikes is not None:
            steps, mean, variance = self.moments.unbind(dim=1)  # (2,) each
            off = values - mean
            bad |= ((off > self.skip_spikes * variance.sqrt()) & (steps >= SETTLING)).any()
            weight = (1 / (steps + 1)).clamp(min=1 - DECAY)  # a plain mean until the memory is full
            moved = torch.stack([steps + 1, mean + weight * off, (1 - weight) * (variance + weight * off**2)], dim=1)
            self.moments = torch.where(bad, self.moments, moved)
        counted = bad & ~loss.isfinite() if self.scaling else bad
        self.in_a_row = torch.where(counted, self.in_a_row + 1, 0)
        self.skipped = self.skipped + counted
        self.seen.append(torch.cat([values, counted[None]]))
        return bad.float()

    def read(self) -> list[Step]:
        """The steps judged since the last reading. Waits for the device."""
        rows = torch.stack(self.seen).tolist() if self.seen else []
        self.seen.clear()
        return [Step(loss, grad_norm, bool(skipped)) for loss, grad_norm, skipped in rows]

    def state(self) -> dict[str, Any]:
        """All that has to come back when a run goes on; float32 survives JSON to the bit. Waits for the device."""
        return {
            "in_a_row": self.in_a_row.item(),
            "skipped": self.skipped.item(),
            "moments": self.moments.tolist(),
        }
