"""The schema of a checkpoint's state.json: the types and ranges of its values."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, TypedDict

from annotated_types import Ge, Le

from folio.base.settings import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    convert,
    type_hints,
)
from folio.data.shards import PromptFormat

MAX_LAYERS = 4096  # reports build the model on the meta device, which takes about a millisecond per layer
Float32 = Annotated[float, Ge(-3e38), Le(3e38)]
Moments = tuple[Float32, Float32, Float32]  # steps, mean, variance


class GuardProgress(TypedDict):
    """StepGuard.state(), and the last evaluations (TrainState.progress)."""

    in_a_row: NonNegativeInt
    skipped: NonNegativeInt
    without_targets: NonNegativeInt
    moments: tuple[Moments, Moments]  # of loss and gradient norm
    val_losses: list[NonNegativeFloat]  # of the last evaluations
    evaluated_at: NonNegativeInt  # step of the last one


class ScalerProgress(TypedDict, total=False):
    """GradScaler.state_dict(), which is empty unless the run is in float16."""

    scale: PositiveFloat
    growth_factor: PositiveFloat
    backoff_factor: PositiveFloat
    growth_interval: PositiveInt
    _growth_tracker: NonNegativeInt


class RunProgress(TypedDict):
    """The progress of a run; bitwise identical after a resume."""

    step: NonNegativeInt  # number of completed steps
    next_sequence: NonNegativeInt  # the entire data state, because sequence i is a function of i
    best_val_loss: NonNegativeFloat | None  # None: not evaluated yet
    best_step: NonNegativeInt  # 0: not evaluated yet
    evaluations_since_best: NonNegativeInt
    guard: GuardProgress
    grad_scaler: ScalerProgress


class ResolvedSettings(TypedDict):
    """The resolved values of "auto"."""

    device: str
    dtype: Literal["float32", "bfloat16", "float16"]
    compile: bool | Literal["reduce-overhead"]


class Resolved(ResolvedSettings, total=False):
    """Runtime.resolved."""

    processes: PositiveInt  # if more than one


class RequiredModel(TypedDict):
    """The required fields of a ModelRecord."""

    block_size: PositiveInt
    vocab_size: PositiveInt
    n_layer: Annotated[int, Ge(1), Le(MAX_LAYERS)]
    n_head: PositiveInt
    n_embd: PositiveInt
    document_token: NonNegativeInt | None


class ModelRecord(RequiredModel, total=False):
    """GPTConfig's arguments. A modified model.py may have others."""

    dropout: Probability
    embd_pdrop: Probability | None
    attn_pdrop: Probability | None
    resid_pdrop: Probability | None


class DatasetRecord(TypedDict):
    """The training data of a run."""

    folder: str
    hash: str
    parts: dict[str, str]  # the hash of each data set, by its name
    not_held_out: list[str]  # data sets of which the weights that the run started from were trained on another split
    prompt_format: PromptFormat | None  # None: plain text without prompts


class Versions(TypedDict):
    """The programs that computed a part of a run (folio/training/planning/resolve.py)."""

    torch: str
    python: str


class RaceTurn(TypedDict):
    """A turn of a model in the race of --size=auto (folio/training/planning/race.py)."""

    model: str
    step: PositiveInt  # of the model, after the turn
    steps: PositiveInt  # of the turn
    step_seconds: PositiveFloat  # the median
    loss: NonNegativeFloat | None  # training loss of the last step; None: it had no targets, or was not finite
    decay_steps: NonNegativeInt  # of a copy, before its loss was measured
    val_loss: NonNegativeFloat | None  # None: not measured, or not finite
    spent: PositiveFloat  # seconds of the race, up to the end of the turn


class RaceFile(TypedDict):
    """race.json: a race that is not over."""

    config: dict[str, Any]  # train.py's settings, without those that the race chooses
    origins: dict[str, str]
    data: str  # the hash of the data
    turns: list[RaceTurn]


class RequiredPart(TypedDict):
    """The required fields of a PartRecord."""

    from_step: NonNegativeInt  # number of steps before this part
    init_from: str
    after: str | None  # how the previous part ended; None for the first part
    changes: dict[str, tuple[Any, Any]]  # setting -> old value, new value
    exact: bool  # whether the resume is bitwise identical to an uninterrupted run
    resolved: Resolved
    versions: Versions
    threads: PositiveInt  # torch's CPU threads
    decisions: list[tuple[NonNegativeInt, PositiveInt]]  # on the run's length: (step, max_iters)
    max_val_tokens: PositiveInt | None  # tokens of each validation set that an evaluation measures; None: all


class PartRecord(RequiredPart, total=False):
    """A part of a run: the steps from its start, a resume or a rollback, to the next one."""

    rollbacks: PositiveInt  # the number of rollbacks so far, if any
    lr_factor: PositiveFloat  # of all learning rates, if there were rollbacks
    skipped_sequences: tuple[NonNegativeInt, NonNegativeInt]  # begin and end, if a rollback begins this part
    race: list[RaceTurn]  # by which --size=auto chose the model, if it was a new run
    # Version of the training order and the validation windows (folio/data/windows.py); if missing, the first one. A run
    # of another version can be sampled from, but with sampling="epoch" neither resumed nor replayed.
    windows: PositiveInt
    without_targets: PositiveInt  # possible training windows without targets, which were not drawn, if there are any


def measured_text(part: Mapping[str, Any]) -> tuple:
    """What the validation losses of a part of a run measure. They are comparable only if it is equal."""
    return part.get("windows"), part["max_val_tokens"]


def measured_since(parts: Sequence[Mapping[str, Any]]) -> int:
    """The step from which all evaluations measure the same text as the last one. parts: PartRecords."""
    steps = [part["from_step"] for before, part in pairwise(parts) if measured_text(before) != measured_text(part)]
    return steps[-1] if steps else -1


class StateFile(RunProgress):
    """state.json."""

    format_version: int
    run_id: str  # shared by all checkpoints of a run, also after a resume
    model: ModelRecord
    config: dict[str, Any]  # train.py's settings
    origins: dict[str, str]  # where each setting was set
    dataset: DatasetRecord
    parts: list[PartRecord]
    torchrun: str | None
    stopped_by: str | None
    wandb_id: str | None
    budget: dict[str, NonNegativeFloat] | None


def with_missing_fields(state: Any) -> Any:
    """state.json of a run whose sequences have the first order, with the fields that it did not record.

    Its weights can be used, but with sampling="epoch", it cannot be resumed. One that was trained with mask_documents
    stays incomplete: without its end-of-text token, its attention would be computed without the mask.
    """
    try:
        if any("windows" in part for part in state["parts"]):
            return state
        recorded = {"parts": {}, "not_held_out": [], "prompt_format": None, **state["dataset"]}
        is_masked = state["config"].get("mask_documents")
        model = state["model"] if is_masked else {"document_token": None, **state["model"]}
        names = ("eval_iters", "batch_size", "block_size")
        eval_iters, batch_size, block_size = (state["config"].get(name) for name in names)
        max_val_tokens = eval_iters and eval_iters * batch_size * block_size
        parts = [{"max_val_tokens": max_val_tokens, **part} for part in state["parts"]]
        guard = {"without_targets": 0, "val_losses": [], "evaluated_at": 0, **state["guard"]}
        return {**state, "model": model, "dataset": recorded, "parts": parts, "guard": guard}
    except (TypeError, LookupError, AttributeError):  # it is invalid
        return state


def check_fields(state: Any) -> dict[str, Any]:
    """The content of state.json, its numbers with the types of their fields. Raises ValueError with the invalid names.

    A field is invalid if it is missing, of the wrong type or out of range.
    """
    if not isinstance(state, dict):
        raise ValueError("its content")
    hints, fields, invalid = type_hints(StateFile, include_extras=True), dict(state), []
    for name, hint in hints.items():
        try:
            fields[name] = convert(state[name], hint)
        except (LookupError, ValueError):
            invalid.append(name)
    if invalid:
        raise ValueError(", ".join(invalid))
    is_evaluated = fields["best_val_loss"] is not None
    if is_evaluated != (fields["best_step"] > 0) or fields["best_step"] > fields["step"]:
        raise ValueError("best_step")
    steps = [*(part["from_step"] for part in fields["parts"]), fields["step"]]
    is_history = len(steps) > 1 and steps[0] == 0 and steps == sorted(steps)
    if not (is_history and all(part["decisions"] for part in fields["parts"])):
        raise ValueError("parts")
    return fields
