"""Steps that must not count: found on the device at every step, told where the loop looks at its numbers."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from folio.files import write_json
from folio.tokenizer import Tokenizer

DECAY = 0.98  # of the running mean and deviation: a memory of some 50 steps
SETTLING = 100  # steps before a deviation means anything


class Step(NamedTuple):
    """What the device found about one step."""

    step: int
    loss: float
    grad_norm: float
    skipped: bool  # it did not reach weights, moments or the optimizer's step count, and should have


class StepGuard:
    """Judges each step by its loss and gradient norm, without waiting for the device.

    A step that is not finite is bad. With skip_spikes=z, so is one whose loss or gradient norm lies more than z
    standard deviations above its running mean.
    """

    def __init__(self, device: torch.device, skip_spikes: float | None, state: dict[str, Any] | None):
        self.skip_spikes = skip_spikes
        state = state or {"in_a_row": 0, "skipped": 0, "moments": [[0.0, 0.0, 0.0]] * 2}
        self.in_a_row, self.skipped = state["in_a_row"], state["skipped"]  # of the steps that were read
        self.streak = 0  # the longest run of skipped steps that the last reading saw
        self.moments = torch.tensor(state["moments"], device=device)  # (2, 3): of loss and norm, steps, mean, variance
        self.seen: list[Tensor] = []  # on the device
        self.sent = torch.empty(0, 3)  # (steps, 3), on their way to the host, and there once `arrived` has come to pass
        self.arrived = torch.cuda.Event() if device.type == "cuda" else None
        self.recent: list[Step] = []  # those of the last reading, and the 50 before them

    def judge(self, loss: Tensor, grad_norm: Tensor, scale: Tensor | None = None) -> Tensor:
        """1.0 if the optimizer must skip this step, else 0.0, on the device: what torch calls found_inf.

        scale: float16's loss scale. An infinite gradient of a finite loss only lowers it, and is not counted, until
        the scale is below 1: then the gradients themselves do not fit into float16.
        """
        values = torch.stack([loss, grad_norm]).float()  # (2,)
        bad = ~values.isfinite().all()
        if self.skip_spikes is not None:
            steps, mean, variance = self.moments.unbind(dim=1)  # (2,) each
            off = values - mean
            bad |= ((off > self.skip_spikes * variance.sqrt()) & (steps >= SETTLING)).any()
            weight = (1 / (steps + 1)).clamp(min=1 - DECAY)  # a plain mean until the memory is full
            moved = torch.stack([steps + 1, mean + weight * off, (1 - weight) * (variance + weight * off**2)], dim=1)
            self.moments = torch.where(bad, self.moments, moved)
        counted = bad
        if scale is not None:
            counted = bad & ~(loss.isfinite() & ~grad_norm.isfinite() & (scale >= 1))
        self.seen.append(torch.cat([values, counted[None]]))
        return bad.float()

    def send(self) -> None:
        """Start copying what was judged to the host; on CUDA without waiting, as only there `arrived` tells the end."""
        self.sent = torch.stack(self.seen).to("cpu", non_blocking=self.arrived is not None)
        self.seen.clear()
        if self.arrived:
            self.arrived.record()

    def read(self, step: int) -> list[Step]:
        """The steps that were sent, of which `step` is the newest; waits for the device to be done with that one."""
        if self.arrived:
            self.arrived.synchronize()
        rows, self.sent = self.sent.tolist(), self.sent[:0]
        first = step - len(rows) + 1
        found = [Step(n, loss, norm, bool(skipped)) for n, (loss, norm, skipped) in enumerate(rows, start=first)]
        self.streak = 0
        for one in found:
            self.in_a_row = self.in_a_row + 1 if one.skipped else 0
            self.streak = max(self.streak, self.in_a_row)
            self.skipped += one.skipped
        self.recent = self.recent[-50:] + found
        return found

    def record(self, out_dir: Path, found: Step, first: int, inputs: np.ndarray, tokenizer: Tokenizer) -> str:
        """Write skipped/step-N.json about a skipped step whose sequences, (B, T), begin at number `first`; say it."""
        path = out_dir / "skipped" / f"step-{found.step:06d}.json"
        content = {
            **found._asdict(),
            "sequences": [first, first + len(inputs) - 1],
            "text": [tokenizer.decode(x) for x in inputs],
            "before": [other._asdict() for other in self.recent if found.step - 50 <= other.step < found.step],
        }
        told = f"step {found.step:,} was skipped: loss {found.loss:.4g}, gradient norm {found.grad_norm:.4g}"
        try:
            write_json(path, json.loads(json.dumps(content), parse_constant=str))  # NaN as "NaN"
        except OSError as error:
            return f"{told}; its record could not be written ({error})"
        return f"{told}; see {path}"

    def diagnose(self, model: nn.Module, max_bad_steps: int, val_loss: float | None) -> str | None:
        """Why the run cannot go on, and what helps against that; or None if it can."""
        if self.streak < max_bad_steps and math.isfinite(val_loss or 0.0):
            return None
        last = next((step for step in reversed(self.recent) if step.skipped), self.recent[-1])
        if not all(p.isfinite().all() for p in model.parameters()):
            seen, remedy = "the weights are not finite", "begin anew, or from another checkpoint"
        elif val_loss is not None and not math.isfinite(val_loss):
            seen, remedy = f"the validation loss is {val_loss}", "go on with a smaller --learning_rate"
        elif not math.isfinite(last.loss):
            seen, remedy = f"the loss is {last.loss}", "look at the text in skipped/, or take a smaller --learning_rate"
        elif not math.isfinite(last.grad_norm):
            seen, remedy = "the gradient is not finite", "go on with a smaller --learning_rate, or --dtype=float32"
        else:
            seen = f"{max_bad_steps} spikes in a row, the last of loss {last.loss:.4g} and norm {last.grad_norm:.4g}"
            remedy = "look at the text in skipped/; if it is as it should be, raise --skip_spikes or leave it out"
        return f"{seen}; none of it was saved, and the last checkpoint is good; {remedy}"

    def state(self) -> dict[str, Any]:
        """All that has to come back when a run goes on; float32 survives JSON to the bit. Once all steps are read."""
        return {"in_a_row": self.in_a_row, "skipped": self.skipped, "moments": self.moments.tolist()}
