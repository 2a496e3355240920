"""Where a run starts: from scratch, from its own last checkpoint (resume), or from other weights (finetune)."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Generic

import torch

from folio import UserError, checkpoint, configurator, convert, distributed
from folio.checkpoint import Checkpoint
from folio.configurator import COMMAND_LINE, Config
from folio.files import locked
from folio.runtime import Runtime
from folio.schedule import STEP_COUNTS, Schedule, StepCounts
from folio.windows import Mixture
from model import GPT, GPTConfig

MODEL_SETTINGS = [field.name for field in fields(GPTConfig) if field.name != "vocab_size"]
DROPOUT = [name for name in MODEL_SETTINGS if "drop" in name]  # free to change
SHAPE = [name for name in MODEL_SETTINGS if name not in DROPOUT]  # of the weights in a checkpoint

FIXED = [*SHAPE, "seed", "sampling", "optimizer", "batch_size * gradient_accumulation_steps"]  # when resuming
INEXACT = {  # a resumed run may change these, and is then no longer bitwise identical
    "batch_size",
    "gradient_accumulation_steps",
    "total_batch_tokens",
    "dtype",
    "device",
    "compile",
    "parallel",
    "recompute",
}
UNRECORDED = {"out_dir", "data_dir", "dataset", "init_from", "overwrite", "print_config", "eval_only"}


@contextmanager
def reserve(out_dir: Path, eval_only: bool) -> Iterator[None]:
    """Lock out_dir for this run while the block lasts; not for one that writes nothing. Raises UserError.

    A folder that the run leaves empty is removed.
    """
    if eval_only:
        yield
        return
    existed = os.path.exists(out_dir)  # False for an impossible name
    busy = f"out_dir={out_dir}: another run is writing there; wait for it, or choose another --out_dir"
    timeout = 60.0 if distributed.under_torchrun() else 0.0  # the lock of a lost node may outlive it
    try:
        with ExitStack() as stack:
            if distributed.rank_from_env() == 0:
                try:
                    stack.enter_context(locked(out_dir / ".lock", busy, timeout))
                except OSError as error:
                    raise cannot_write(out_dir, error) from None
            yield
    finally:
        if not existed:
            with suppress(OSError):  # it is not empty, or was not created
                out_dir.rmdir()


def cannot_write(out_dir: Path, error: OSError) -> UserError:
    return UserError(f"out_dir={out_dir}: it cannot be written ({error}); choose another --out_dir")


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "python": sys.version.split()[0]}


@dataclass(frozen=True)
class Start(Generic[Config]):
    """Where a run starts, and its settings with what the checkpoint overrides."""

    cfg: Config
    checkpoint: Checkpoint | None  # None: from scratch
    resuming: bool
    changes: dict[str, list]  # settings that differ from those of the run to resume: name -> [before, now]

    @property
    def earlier(self) -> dict[str, Any]:
        """state.json of the run to resume; empty for a new run."""
        return self.checkpoint.state if self.resuming else {}

    def require_same_data(self, data: Mixture) -> None:
        """Raise UserError if the data set has another tokenizer than the checkpoint, or is not the resumed run's."""
        if not self.checkpoint:
            return
        saved, tokenizer, dataset = self.checkpoint, data.tokenizer, self.cfg.dataset
        if saved.tokenizer.hash != tokenizer.hash:
            raise UserError(
                f"the checkpoint {saved.path} was trained with another tokenizer ({saved.tokenizer.kind}, "
                f"{saved.tokenizer.vocab_size:,} tokens) than {dataset} ({tokenizer.kind}, "
                f"{tokenizer.vocab_size:,} tokens), so its ids mean other text; prepare the data with the "
                f"checkpoint's tokenizer: --tokenizer={saved.path}"
            )
        if self.resuming and self.earlier["dataset"]["hash"] != data.hash:
            raise UserError(
                f"{dataset} is not this run's original data; start a new run from its weights with "
                f"--init_from={self.cfg.out_dir} and another --out_dir"
            )

    def build_model(self) -> GPT | None:
        """The checkpoint's model, with the run's dropout and block_size; None from scratch."""
        if not self.checkpoint:
            return None
        model = self.checkpoint.build(**{name: getattr(self.cfg, name) for name in DROPOUT})
        trained, block_size = model.config.block_size, self.cfg.block_size
        if block_size < trained:
            print(f"block_size {block_size}: the first {block_size} of the {trained} trained positions are used")
            model.crop_block_size(block_size)
        return model

    def resumes(self, runtime: Runtime) -> list[dict[str, Any]]:
        """The entries of state.json about each resume of the run, this one included; prints a line about it."""
        if not self.resuming:
            return []
        earlier = self.earlier
        same_machine = earlier["resolved"] == runtime.resolved and earlier["versions"] == versions()
        entry = {
            "step": earlier["step"],
            "after": earlier.get("stopped_by") or "a kill",
            "changes": self.changes,
            "exact": same_machine and not self.changes.keys() & INEXACT,
        }
        if self.cfg.minutes:
            entry["decisions"] = f"the run's length is decided again after step {earlier['step']:,}"
            entry["exact"] = False
        changes = "".join(f", {name} {now} (was {before})" for name, (before, now) in self.changes.items())
        print(f"resuming from {self.checkpoint.path}{changes}{'' if entry['exact'] else '; not bitwise identical'}")
        return [*earlier.get("resumes", []), entry]


def starting_point(given: Config) -> Start[Config]:
    """Load what the run starts from, and adapt its settings to it. Raises UserError.

    given: train.py's settings. A run that torchrun has restarted resumes, whatever init_from says.
    """
    out_dir = Path(given.out_dir)
    restarted = distributed.under_torchrun() and distributed.restarted(checkpoint.written_by(out_dir))
    if restarted or given.init_from == "resume":
        settings = {"init_from": "resume", "overwrite": False} if restarted else {}
        return resumed(given, checkpoint.load(out_dir), settings)
    if given.init_from == "scratch":
        start = Start(given, None, False, {})
    else:
        start = finetuning(given, load_weights(given.init_from))
    if checkpoint.exists(out_dir) and not (given.overwrite or given.eval_only):
        raise UserError(
            f"{out_dir} holds the checkpoints of an earlier run: resume it with --init_from=resume, choose another "
            f"--out_dir, or replace them with --overwrite=True"
        )
    return start


def resumed(given: Config, saved: Checkpoint, settings: dict[str, Any]) -> Start[Config]:
    """The start of a run that continues from its own checkpoint. settings: changes to the given ones."""
    cfg = given.replace(
        **settings, **shape_settings(given, saved, resuming=True), **resumed_step_counts(given, saved.state)
    )
    configurator.check(cfg)
    return Start(cfg, saved, True, changed_settings(cfg, saved))


def finetuning(given: Config, saved: Checkpoint) -> Start[Config]:
    """The start of a new run from trained weights."""
    cfg = given.replace(**shape_settings(given, saved, resuming=False))
    configurator.check(cfg)
    return Start(cfg, saved, False, {})


def load_weights(init_from: str) -> Checkpoint:
    """A checkpoint to finetune from: a run, a name on the hub, or weights in another format. Raises UserError."""
    if not Path(init_from).exists() and init_from not in convert.HUB:
        known = ", ".join(["scratch", "resume", *convert.HUB])
        raise UserError(f"init_from={init_from}: it is not {known}, or the path of a checkpoint")
    return convert.load(init_from)


def shape_settings(cfg: Config, saved: Checkpoint, resuming: bool) -> dict[str, Any]:
    """The settings of the model's shape, from the checkpoint. A shorter block_size is kept, and crops the positions.

    A config file may set another shape when finetuning; a line then names what has no effect. Raises UserError for
    any other conflict.
    """
    default = {field.name: field.default for field in fields(cfg)}
    model_defaults = {field.name: field.default for field in fields(GPTConfig)}  # an older file may lack some
    shape = {name: saved.state["model"].get(name, model_defaults[name]) for name in SHAPE}
    refused, ignored = [], []
    for name, trained in shape.items():
        asked, origin = getattr(cfg, name), cfg.origins.get(name)
        if asked == trained or (asked == default[name] and origin is None):
            continue
        if name == "block_size" and asked < trained:
            shape[name] = asked
        elif resuming or origin in (None, COMMAND_LINE):
            refused.append(f"{name}={asked}: the checkpoint {saved.path} has {name}={trained}")
        else:
            ignored.append(f"{name}={trained} (not {asked})")
    if refused:
        raise UserError(f"{'; '.join(refused)}; leave the setting out")
    if ignored and distributed.rank_from_env() == 0:
        print(f"the model's shape comes from {saved.path}: {', '.join(ignored)}")
    return shape


def resumed_step_counts(cfg: Config, earlier: dict[str, Any]) -> dict[str, Any]:
    """Step counts that a resumed run takes from its checkpoint, whose state.json is `earlier`. Raises UserError.

    A run with a time budget keeps the counts that it came to. A warmup that is over stays over in a longer run.
    """
    before = earlier["config"]
    if cfg.minutes:
        if cfg.minutes != before.get("minutes") and not cfg.eval_only:
            max_iters = Schedule(StepCounts(before["max_iters"]), decisions=earlier.get("decisions")).max_iters
            raise UserError(
                f"minutes={cfg.minutes:g}: the length of the run in {cfg.out_dir} was set when it started; resume it "
                f"without --minutes, and with --max_iters={max_iters} or another"
            )
        return {name: before[name] for name in STEP_COUNTS}
    warmup = StepCounts(before["max_iters"], before["warmup_iters"]).warmup_steps
    warmup_is_set = cfg.origins.get("warmup_iters") == COMMAND_LINE
    if not warmup_is_set and warmup <= earlier["step"] < cfg.step_counts.warmup_steps:
        return {"warmup_iters": warmup}
    return {}


def changed_settings(cfg: Config, saved: Checkpoint) -> dict[str, list]:
    """The settings that differ from those of the run to resume: name -> [before, now].

    Raises UserError for FIXED ones, which define the model or which sequence comes when.
    """
    now = asdict(cfg)
    before = {name: value for name, value in saved.state["config"].items() if name in now}
    sequences = "batch_size * gradient_accumulation_steps"
    now[sequences] = cfg.accumulation * cfg.batch_size
    earlier_cfg = type(cfg)(**before)  # what the checkpoint does not say has its default
    before[sequences] = earlier_cfg.accumulation * earlier_cfg.batch_size
    changes = {name: [before[name], now[name]] for name in now if name in before and before[name] != now[name]}
    refused = [f"{name}: {changes[name][0]} before, {changes[name][1]} now" for name in FIXED if name in changes]
    if refused:
        raise UserError(
            f"{saved.path} cannot be resumed with other settings: {'; '.join(refused)}; set them back, or start a new "
            f"run from its weights with --init_from={cfg.out_dir} and another --out_dir"
        )
    return {name: change for name, change in changes.items() if name not in UNRECORDED}
