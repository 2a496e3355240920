"""Bad steps, which must not change the model: detected on the device at every step, reported when a step is logged."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from folio.base.files import write_json
from folio.data.tokenizer import Tokenizer

DECAY = 0.98  # of the running mean and variance; about 50 steps
SETTLING_STEPS = 100  # before a deviation is meaningful


class JudgedStep(NamedTuple):
    """One step's numbers."""

    step: int
    loss: float
    grad_norm: float
    skipped: bool  # bad; it changed neither weights, moments nor the optimizer's step count


class StepGuard:
    """Judges each step by its loss and gradient norm, without waiting for the device.

    A step that is not finite is bad. With skip_spikes=z, so is a step whose loss or gradient norm is more than z
    standard deviations above its running mean.
    """

    def __init__(self, device: torch.device, skip_spikes: float | None, state: dict[str, Any] | None):
        self.skip_spikes = skip_spikes
        state = {"in_a_row": 0, "skipped": 0, "moments": [[0.0, 0.0, 0.0]] * 2, **(state or {})}
        self.in_a_row, self.skipped = state["in_a_row"], state["skipped"]  # of the steps read so far
        self.streak = 0  # longest run of skipped steps in the last reading
        self.moments = torch.tensor(state["moments"], dtype=torch.float32, device=device)  # (2, 3)
        self.judged: list[Tensor] = []  # on the device
        self.sent = torch.empty(0, 3)  # (steps, 3), on the host once `arrived` has occurred
        self.arrived = torch.cuda.Event() if device.type == "cuda" else None
        self.recent: list[JudgedStep] = []  # those of the last reading and the 50 before them

    def judge(self, loss: Tensor, grad_norm: Tensor, scale: Tensor | None = None) -> Tensor:
        """1.0 if the optimizer must skip this step, else 0.0, on the device; torch calls this found_inf.

        scale: float16's loss scale. An infinite gradient of a finite loss only lowers the scale and is not counted,
        unless the scale is below 1: then the gradients themselves overflow float16.
        """
        values = torch.stack([loss, grad_norm]).float()  # (2,)
        bad = ~values.isfinite().all()
        if self.skip_spikes is not None:
            steps, mean, variance = self.moments.unbind(dim=1)  # (2,) each
            deviation = values - mean
            bad |= ((deviation > self.skip_spikes * variance.sqrt()) & (steps >= SETTLING_STEPS)).any()
            weight = (1 / (steps + 1)).clamp(min=1 - DECAY)  # the plain mean of the first steps
            new_mean = mean + weight * deviation
            new_variance = (1 - weight) * (variance + weight * deviation**2)
            self.moments = torch.where(bad, self.moments, torch.stack([steps + 1, new_mean, new_variance], dim=1))
        counted = bad
        if scale is not None:
            counted = bad & ~(loss.isfinite() & ~grad_norm.isfinite() & (scale >= 1))
        self.judged.append(torch.cat([values, counted[None]]))
        return bad.float()

    def send(self) -> None:
        """Start copying the judged steps to the host; on CUDA without waiting, where `arrived` marks the end."""
        self.sent = torch.stack(self.judged).to("cpu", non_blocking=self.arrived is not None)
        self.judged.clear()
        if self.arrived:
            self.arrived.record()

    def read(self, step: int) -> list[JudgedStep]:
        """The steps that were sent, the newest of which is `step`; waits for the device to finish it."""
        if self.arrived:
            self.arrived.synchronize()
        rows, self.sent = self.sent.tolist(), self.sent[:0]
        first = step - len(rows) + 1
        steps = [JudgedStep(n, loss, norm, bool(skipped)) for n, (loss, norm, skipped) in enumerate(rows, start=first)]
        self.streak = 0
        for judged in steps:
            self.in_a_row = self.in_a_row + 1 if judged.skipped else 0
            self.streak = max(self.streak, self.in_a_row)
            self.skipped += judged.skipped
        self.recent = self.recent[-50:] + steps
        return steps

    def record(self, out_dir: Path, judged: JudgedStep, first: int, inputs: np.ndarray, tokenizer: Tokenizer) -> str:
        """Write skipped/step-N.json about a skipped step, whose sequences (B, T) have numbers from `first` on.

        Returns a line about it.
        """
        path = out_dir / "skipped" / f"step-{judged.step:06d}.json"
        content = {
            **judged._asdict(),
            "sequences": [first, first + len(inputs) - 1],
            "text": [tokenizer.decode(x) for x in inputs],
            "before": [other._asdict() for other in self.recent if judged.step - 50 <= other.step < judged.step],
        }
        report = f"step {judged.step:,} was skipped: loss {judged.loss:.4g}, gradient norm {judged.grad_norm:.4g}"
        try:
            write_json(path, json.loads(json.dumps(content), parse_constant=str))  # NaN as "NaN"
        except OSError as error:
            return f"{report}; its record could not be written ({error})"
        return f"{report}; see {path}"

    def can_continue(self, max_bad_steps: int, val_loss: float | None) -> bool:
        """Whether the steps of the last reading, and the validation loss if it was measured, are good enough."""
        return self.streak < max_bad_steps and math.isfinite(val_loss or 0.0)

    def diagnose(self, model: nn.Module, max_bad_steps: int, val_loss: float | None, has_checkpoint: bool) -> str:
        """Why the run cannot continue, and what to do about it. has_checkpoint: whether it has saved one."""
        last = next((step for step in reversed(self.recent) if step.skipped), self.recent[-1])
        again = "resume" if has_checkpoint else "start again"
        if not all(p.isfinite().all() for p in model.parameters()):
            reason, remedy = "the weights are not finite", "start again, or from another checkpoint"
        elif val_loss is not None and not math.isfinite(val_loss):
            reason, remedy = f"the validation loss is {val_loss}", f"{again} with a smaller --learning_rate"
        elif not math.isfinite(last.loss):
            reason, remedy = (
                f"the loss is {last.loss}",
                "look at the text in skipped/, or lower --learning_rate",
            )
        elif not math.isfinite(last.grad_norm):
            reason = "the gradient is not finite"
            remedy = f"{again} with a smaller --learning_rate or --dtype=float32"
        else:
            reason = f"{max_bad_steps} spikes in a row, the last of loss {last.loss:.4g} and norm {last.grad_norm:.4g}"
            remedy = "look at the text in skipped/; if it is fine, raise --skip_spikes or leave it out"
        intact = ", and the last checkpoint is intact" if has_checkpoint else ""
        return f"{reason}; this step was not saved{intact}; {remedy}"

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, once all steps are read. float32 survives JSON exactly."""
        return {"in_a_row": self.in_a_row, "skipped": self.skipped, "moments": self.moments.tolist()}
