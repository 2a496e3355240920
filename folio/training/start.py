"""Where a run starts: from scratch, from its own last checkpoint (resume), or from other weights (finetune).

The value of a setting is the first of:

    a new run          the arguments, the default
    a resumed run      the arguments, the checkpoint, the default
      what defines it  the checkpoint (FIXED, BATCH, dataset, minutes): the command line may not set anything else
      counts of steps  as max_iters: if it changes, those that were chosen for it change in proportion
      device, dtype    as a new run, but "auto" is what it was (folio/machine/runtime.py)
    a finetuned run    as a new run
      the shape        the checkpoint (SHAPE): the command line may not set anything else, but a shorter block_size

Arguments are config files and options; the last one to set a value wins. A config file that disagrees with what only
the checkpoint says has no effect there, and a line says so.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic

import torch

from folio import UserError
from folio.base import settings
from folio.base.files import locked
from folio.base.settings import COMMAND_LINE, Config, ConfigError
from folio.base.workers import under_torchrun
from folio.checkpoints import checkpoint, foreign, run_folder
from folio.checkpoints.checkpoint import Checkpoint
from folio.checkpoints.find_runs import resolve
from folio.checkpoints.run_folder import CheckpointError
from folio.checkpoints.schema import PartRecord
from folio.data.tokenizer import Tokenizer
from folio.data.windows import Mixture
from folio.machine import distributed
from folio.machine.runtime import Runtime
from folio.training.schedule import STEP_COUNTS, Schedule
from model import GPT, GPTConfig

MODEL_SETTINGS = [field.name for field in fields(GPTConfig) if field.name != "vocab_size"]
DROPOUT = [name for name in MODEL_SETTINGS if "drop" in name]  # free to change
SHAPE = [name for name in MODEL_SETTINGS if name not in DROPOUT]  # of the weights in a checkpoint

FIXED = (*SHAPE, "seed", "sampling", "optimizer")  # when resuming, and the sequences per step
BATCH = ("batch_size", "gradient_accumulation_steps", "total_batch_tokens")  # which give the sequences per step
REPLACES = {  # setting the first one turns the second one off
    "gradient_accumulation_steps": "total_batch_tokens",
    "total_batch_tokens": "gradient_accumulation_steps",
    "max_iters": "minutes",
}
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
OF_THE_COMMAND = {"out_dir", "init_from", "overwrite", "print_config", "eval_only"}  # not of the run
UNCOMPARED = {"seed", "out_dir", "data_dir", "overwrite", "wandb_run_name"}  # they do not describe a run's settings
UNREPORTED = {*OF_THE_COMMAND, "data_dir", "dataset"}  # changes that say nothing about the run


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
    # The lock of a lost node may outlive it; and is_locked may hold a free one for an instant.
    timeout = 60.0 if under_torchrun() else 0.5
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
    before: Config | None = None  # the settings of the run to resume; None: a new run

    @property
    def resuming(self) -> bool:
        return self.before is not None

    @property
    def earlier(self) -> dict[str, Any]:
        """state.json of the run to resume; empty for a new run."""
        return self.checkpoint.state if self.resuming else {}

    @property
    def earlier_part(self) -> Mapping[str, Any]:
        """The last part of the run to resume, a schema.PartRecord; empty for a new run."""
        return self.earlier["parts"][-1] if self.resuming else {}

    @property
    def last_learning_rate(self) -> float | None:
        """The learning rate of the last step of the run to resume; None for a new run."""
        if not self.resuming:
            return None
        decisions = self.earlier_part["decisions"] if self.before.minutes else None
        schedule = self.before.schedule(self.before.step_counts, decisions)
        return schedule.learning_rate_at(max(0, self.earlier["step"] - 1))

    def require_same_data(self, data: Mixture) -> None:
        """Raise UserError if the data set has another tokenizer than the checkpoint, or is not the resumed run's."""
        if not self.checkpoint:
            return
        saved, tokenizer, dataset = self.checkpoint, data.tokenizer, self.cfg.dataset
        if saved.tokenizer.hash != tokenizer.hash and not (self.adds_eot(tokenizer) and not self.resuming):
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

    def adds_eot(self, tokenizer: Tokenizer) -> bool:
        """Whether the data's tokenizer is the checkpoint's plus an end-of-text token."""
        before = self.checkpoint.tokenizer
        return before.eot is None and before.with_eot().hash == tokenizer.hash

    def build_model(self, tokenizer: Tokenizer) -> GPT | None:
        """The checkpoint's model, with the run's dropout and block_size, and a row for an end-of-text token that the
        data's tokenizer adds; None from scratch.
        """
        if not self.checkpoint:
            return None
        model = self.checkpoint.build(**{name: getattr(self.cfg, name) for name in DROPOUT})
        if self.adds_eot(tokenizer) and model.config.vocab_size < tokenizer.vocab_size:
            model = with_vocab_size(model, tokenizer.vocab_size, self.cfg.seed)
            if distributed.rank_from_env() == 0:
                print(f"the data has an end-of-text token, which the model learns as id {tokenizer.eot:,}")
        trained, block_size = model.config.block_size, self.cfg.block_size
        if block_size != trained:
            used = f"the model was trained with {trained}"
            if model.config.position == "learned":
                used = f"the first {block_size} of the {trained} trained positions are used"
            print(f"block_size {block_size}: {used}")
            model.crop_block_size(block_size)
        return model

    def parts(self, runtime: Runtime) -> list[PartRecord]:
        """The parts of the run, with the one that begins here; prints a line about a resume."""
        part: PartRecord = {
            "from_step": 0,
            "init_from": self.cfg.init_from,
            "after": None,
            "changes": {},
            "exact": True,
            "resolved": runtime.resolved,
            "versions": versions(),
            "threads": torch.get_num_threads(),
            "decisions": None,  # Session.save fills them in
        }
        if not self.resuming:
            return [part]
        same_machine = all(self.earlier_part[name] == part[name] for name in ("resolved", "versions"))
        changes = changed_settings(self.before, self.cfg)
        keeps_its_length = not self.cfg.minutes  # a time budget decides it again
        part |= {
            "from_step": self.earlier["step"],
            "after": self.earlier.get("stopped_by") or "a kill",
            "changes": changes,
            "exact": same_machine and keeps_its_length and not changes.keys() & INEXACT,
        }
        shown = "".join(f", {name} {now} (was {before})" for name, (before, now) in changes.items())
        print(f"resuming from {self.checkpoint.path}{shown}{'' if part['exact'] else '; not bitwise identical'}")
        return [*run_folder.parts_of(Path(self.cfg.out_dir), self.earlier), part]


def with_vocab_size(model: GPT, vocab_size: int, seed: int) -> GPT:
    """A copy of a model with rows for more ids. The new rows are initialized as in a new model."""
    larger = GPT(replace(model.config, vocab_size=vocab_size), seed)
    tensors = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in larger.named_parameters():
            p[: len(tensors[name])] = tensors[name]
    return larger


def with_run_named(given: Config) -> Config:
    """The settings with the folder of the run that "latest" names, if they resume it or start from its weights.

    Raises UserError if there is no run, and under torchrun, whose processes and restarts may find different ones.
    """
    setting = "out_dir" if given.init_from == "resume" else "init_from"
    name = getattr(given, setting)
    folder = resolve(name)
    if folder != name and under_torchrun():
        raise UserError(f"{setting}={name}: under torchrun, name the run's folder: --{setting}={folder}")
    return given.replace(**{setting: folder})


def starting_point(given: Config) -> Start[Config]:
    """Load what the run starts from, and adapt its settings to it. Raises UserError.

    given: train.py's settings. A run that torchrun has restarted resumes, whatever init_from says.
    """
    out_dir = Path(given.out_dir)
    restarted = under_torchrun() and distributed.is_restart(run_folder.torchrun_id(out_dir))
    if restarted or given.init_from == "resume":
        return resumed(given, checkpoint.load(out_dir), restarted)
    start = Start(given, None) if given.init_from == "scratch" else finetuning(given, load_weights(given.init_from))
    if run_folder.exists(out_dir) and not (given.overwrite or given.eval_only):
        raise UserError(
            f"{out_dir} holds the checkpoints of an earlier run: resume it with --init_from=resume, choose another "
            f"--out_dir, or replace them with --overwrite=True"
        )
    return start


def resumed(given: Config, saved: Checkpoint, restarted: bool) -> Start[Config]:
    """The start of a run that continues from its own checkpoint. restarted: by torchrun, with the same command.

    Whatever nobody has set comes from the checkpoint. Raises UserError.
    """
    try:
        before = settings.from_json(type(given), saved.state["config"])
    except ConfigError as error:
        raise CheckpointError(f"{saved.path}: state.json is damaged: {error}") from None
    if saved.state["next_sequence"] != saved.state["step"] * before.accumulation * before.batch_size:
        raise CheckpointError(f"{saved.path}: state.json is damaged: next_sequence does not fit its step")
    before = before.replace(saved.state.get("origins") or {})
    if restarted:
        given = given.replace(init_from="resume", overwrite=False)
    cfg = with_recorded_settings(given, before, saved.path, restarted)
    cfg = cfg.replace(**shape_settings(cfg, saved))
    cfg = cfg.replace(**resumed_step_counts(given, cfg, before, saved.state))
    all_origins = {**dict.fromkeys(asdict(cfg), str(saved.path)), **cfg.origins}  # every setting is known now
    settings.check(cfg.replace(all_origins))
    refuse_other_run(before, cfg, saved.path)
    return Start(cfg, saved, before)


def with_recorded_settings(given: Config, before: Config, path: Path, restarted: bool) -> Config:
    """The given settings; those that nobody has set as they were before, in the checkpoint at `path`.

    A config file does not change what defines the run: its command line may have changed a setting of the file, and the
    file alone does not say so. A line names what the file sets differently. On the command line it is an error, see
    refuse_other_run. A setting that REPLACES another turns off a config file's, unless the same command, restarted,
    has set both from the start.
    """
    of_the_run = [field.name for field in fields(given) if field.name not in OF_THE_COMMAND]
    by_command = {name for name in of_the_run if given.is_set(name) and not given.is_from_file(name)}
    replaced = {REPLACES[name] for name in REPLACES.keys() & by_command} - by_command
    if restarted:
        replaced = {name for name in replaced if not given.is_set(name)}
    taken = [name for name in of_the_run if not given.is_set(name) and name not in replaced]
    ignored = [
        name
        for name in (*FIXED, *BATCH, "dataset", "minutes")
        if given.is_from_file(name) and name not in replaced and getattr(given, name) != getattr(before, name)
    ]
    if ignored and distributed.rank_from_env() == 0:
        differences = [f"{name}={getattr(before, name)} (not {getattr(given, name)})" for name in ignored]
        print(f"what defines the run comes from {path}: {', '.join(differences)}")
    recorded = [*taken, *ignored]
    origins = {name: origin for name, origin in given.origins.items() if name not in (*ignored, *replaced)}
    origins |= {name: before.origins[name] for name in recorded if name in before.origins}
    return given.replace(origins, **{name: getattr(before, name) for name in recorded}, **dict.fromkeys(replaced))


def finetuning(given: Config, saved: Checkpoint) -> Start[Config]:
    """The start of a new run from trained weights."""
    cfg = given.replace(**shape_settings(given, saved))
    if distributed.rank_from_env() == 0 and not given.eval_only:
        print(f"a new run in {given.out_dir}, from the weights of {saved.path}")
        if run_folder.exists(Path(given.init_from)):
            print(f"(to continue the run in {given.init_from} instead: --init_from=resume --out_dir={given.init_from})")
    settings.check(cfg)
    return Start(cfg, saved)


def load_weights(init_from: str) -> Checkpoint:
    """A checkpoint to finetune from: a run, a name on the hub, or weights in another format. Raises UserError."""
    if not Path(init_from).exists() and init_from not in foreign.HUB:
        known = ", ".join(["scratch", "resume", *foreign.HUB])
        raise UserError(f"init_from={init_from}: it is not {known}, or the path of a checkpoint")
    return foreign.load(init_from)


def shape_settings(cfg: Config, saved: Checkpoint) -> dict[str, Any]:
    """The settings of the model's shape, from the checkpoint.

    A shorter block_size is kept; a longer one too, unless positions are learned. A config file may set another shape; a
    line then names what has no effect. Raises UserError for any other conflict.
    """
    default = {field.name: field.default for field in fields(cfg)}
    config = saved.config()
    shape = {name: getattr(config, name) for name in SHAPE}
    refused, ignored = [], []
    for name, trained in shape.items():
        asked, origin = getattr(cfg, name), cfg.origins.get(name)
        if asked == trained or (asked == default[name] and origin is None):
            continue
        if name == "block_size" and (asked < trained or shape["position"] != "learned"):
            shape[name] = asked
        elif origin in (None, COMMAND_LINE):
            limit = ", and only so many learned positions" if name == "block_size" else ""
            refused.append(f"{name}={asked}: the checkpoint {saved.path} has {name}={trained}{limit}")
        else:
            ignored.append(f"{name}={trained} (not {asked})")
    if refused:
        raise UserError(f"{'; '.join(refused)}; leave the setting out")
    if ignored and distributed.rank_from_env() == 0:
        print(f"the model's shape comes from {saved.path}: {', '.join(ignored)}")
    return shape


def resumed_step_counts(given: Config, cfg: Config, before: Config, earlier: dict[str, Any]) -> dict[str, Any]:
    """The step counts of a resumed run. earlier: its state.json. Raises UserError.

    A run with a time budget keeps the counts that it came to. Otherwise, if max_iters changes, the counts that were
    chosen for it change in proportion, except a warmup that is over, which is not repeated.
    """
    if cfg.minutes:
        if cfg.minutes != before.minutes and not cfg.eval_only:
            max_iters = Schedule(before.step_counts, decisions=earlier["parts"][-1]["decisions"]).max_iters
            raise UserError(
                f"minutes={cfg.minutes:g}: the length of the run in {cfg.out_dir} was set when it started; resume it "
                f"without --minutes, and with --max_iters={max_iters} or another"
            )
        recorded = asdict(before.step_counts)
        by_command = [name for name in STEP_COUNTS if given.origins.get(name) == COMMAND_LINE]
        unused = [f"{name}={getattr(given, name)}" for name in by_command if getattr(given, name) != recorded[name]]
        if unused and distributed.rank_from_env() == 0:
            print(f"a time budget keeps the step counts that it started with; without effect: {', '.join(unused)}")
        return recorded
    was_scaled = [name for name in STEP_COUNTS if cfg.is_from_file(name) or before.minutes]
    taken = [name for name in was_scaled if not given.is_set(name)]
    counts = replace(cfg.step_counts, max_iters=before.max_iters).scaled(cfg.max_iters, taken)
    warmup_is_set = given.origins.get("warmup_iters") == COMMAND_LINE
    if not warmup_is_set and before.step_counts.warmup_steps <= earlier["step"] < counts.warmup_steps:
        counts = replace(counts, warmup_iters=before.step_counts.warmup_steps)
    return asdict(counts)


def refuse_other_run(before: Config, cfg: Config, path: Path) -> None:
    """Raise UserError if a setting changes that defines the model, or which sequence comes when.

    before: the settings of the run to resume, whose checkpoint is at `path`.
    """
    changes = {name: (getattr(before, name), getattr(cfg, name)) for name in FIXED}
    changes["batch_size * gradient_accumulation_steps"] = tuple(c.accumulation * c.batch_size for c in (before, cfg))
    refused = [f"{name}: {old} before, {new} now" for name, (old, new) in changes.items() if old != new]
    if refused:
        raise UserError(
            f"{path} cannot be resumed with other settings: {'; '.join(refused)}; set them back, or start a new "
            f"run from its weights with --init_from={cfg.out_dir} and another --out_dir"
        )


def changed_settings(before: Config, cfg: Config) -> dict[str, list]:
    """The settings that differ: name -> [before, now]."""
    old, new = asdict(before), asdict(cfg)
    return {name: [old[name], new[name]] for name in new if old[name] != new[name] and name not in UNREPORTED}
