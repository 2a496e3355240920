"""The start of a run: from scratch, from its own last checkpoint (resume), or from other weights (finetune).

A setting takes the first value available, in this order:

    a new run            the arguments, the default
    a resumed run        the arguments, the checkpoint, the default
      fixed settings     the checkpoint (roles.KEPT); another value on the command line is an error
      minutes            the arguments on the command line (for that many more), the checkpoint
      step counts        as above; if max_iters changes, counts chosen for the old value are scaled
      device, dtype      as a new run, but "auto" keeps what it was resolved to (folio/machine/runtime.py)
    a finetuned run      as a new run
      mask_documents     the arguments, the checkpoint
      model shape        the checkpoint (SHAPE), except a block_size that the positions allow; other values as above

Arguments are config files and options; the last one to set a value wins. Where a config file contradicts a setting
that only the checkpoint decides, its value is ignored and a line says so.
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
from folio.base.files import is_utf8, locked
from folio.base.number_format import counted
from folio.base.progress import note
from folio.base.roles import INEXACT, KEPT, OF_THE_COMMAND, UNCHANGEABLE, UNREPORTED, Role, names_with, names_without
from folio.base.settings import COMMAND_LINE, NOT_UTF8, Config, ConfigError
from folio.base.workers import check_launch, under_torchrun
from folio.checkpoints import checkpoint, foreign, run_folder
from folio.checkpoints.build_model import crop_block_size
from folio.checkpoints.checkpoint import MODEL_SETTINGS, Checkpoint
from folio.checkpoints.find_runs import resolve
from folio.checkpoints.identify import HUB, NoCheckpointError
from folio.checkpoints.run_folder import CheckpointError
from folio.checkpoints.schema import PartRecord
from folio.checkpoints.training_data import changed_data, prepared_again
from folio.data.tokenizer import Tokenizer
from folio.data.windows import WINDOWS_VERSION, Mixture
from folio.machine import distributed
from folio.machine.runtime import Runtime
from folio.training.schedule import STEP_COUNTS, Schedule, StepCounts
from model import GPT, GPTConfig

DROPOUT = [name for name in MODEL_SETTINGS if "drop" in name]  # may change
SHAPE = [name for name in MODEL_SETTINGS if name not in DROPOUT]  # determine the shapes or the meaning of the weights
SIZE_AUTO = "--size=auto"  # origin of the settings that it chose


@contextmanager
def reserve(out_dir: Path, eval_only: bool) -> Iterator[None]:
    """Lock out_dir for this run, unless it only evaluates. Raises UserError if another run holds the lock, or if one of
    several processes would train the whole run.

    On exit, a new folder is removed if it is empty.
    """
    check_launch()
    if eval_only:
        yield
        return
    if not is_utf8(str(out_dir)):
        raise UserError(f"out_dir={out_dir}: {NOT_UTF8}")
    existed = os.path.exists(out_dir)  # False for an impossible name
    busy = f"out_dir={out_dir}: another run is writing there; wait for it, or choose another --out_dir"
    # A failed node's lock can remain for a while, and is_locked() briefly acquires a free one.
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


def repair(out_dir: Path, resuming: bool) -> None:
    """Finish or undo what a killed run left unfinished in out_dir. Raises UserError if it cannot be written.

    resuming: otherwise, the files of an earlier run stay until the new one has saved.
    """
    try:
        checkpoint.clear_unfinished(out_dir)
        if resuming:
            run_folder.restore_pointers(out_dir)
    except OSError as error:
        raise cannot_write(out_dir, error) from None


def cannot_write(out_dir: Path, error: OSError) -> UserError:
    return UserError(f"out_dir={out_dir}: it cannot be written ({error}); choose another --out_dir")


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "python": sys.version.split()[0]}


@dataclass(frozen=True)
class Start(Generic[Config]):
    """The starting point of a run: a checkpoint, and the settings adapted to it."""

    cfg: Config
    checkpoint: Checkpoint | None  # None: from scratch
    saved_cfg: Config | None = None  # the settings in the checkpoint of the run to resume; None: a new run
    adds_minutes: bool = False  # True: the resumed run is trained for cfg.minutes more
    seconds_spent: float = 0.0  # of cfg.minutes, to choose the model
    fits_minutes: bool = False  # True: the step counts of a new run take less than cfg.minutes

    @property
    def resuming(self) -> bool:
        return self.saved_cfg is not None

    @property
    def saved_state(self) -> dict[str, Any]:
        """state.json of the run to resume; empty for a new run."""
        return self.checkpoint.state if self.resuming else {}

    @property
    def last_part(self) -> Mapping[str, Any]:
        """The last part of the run to resume, a schema.PartRecord; empty for a new run."""
        return self.saved_state["parts"][-1] if self.resuming else {}

    @property
    def last_learning_rate(self) -> float | None:
        """The learning rate of the last step of the run to resume; None for a new run."""
        if not self.resuming:
            return None
        schedule = self.saved_cfg.schedule(self.saved_cfg.step_counts, self.last_part)
        return schedule.learning_rate_at(max(0, self.saved_state["step"] - 1))

    @property
    def max_val_tokens(self) -> int | None:
        """Tokens of each validation set that an evaluation measures; None: all.

        A resumed run measures the same text as before, whatever its micro-batch is now, unless eval_iters changes.
        """
        if not self.resuming or self.cfg.eval_iters != self.saved_cfg.eval_iters:
            return self.cfg.max_val_tokens
        return self.last_part.get("max_val_tokens", self.saved_cfg.max_val_tokens)

    def schedule(self, counts: StepCounts) -> Schedule:
        """The schedule of the run with these step counts, from time_budget."""
        part = {**self.last_part, "decisions": None} if self.adds_minutes else self.last_part
        return self.cfg.schedule(counts, part)

    def lengthened(self, max_iters: int) -> StepCounts:
        """The step counts of the resumed run for another length."""
        counts, saved_counts = self.cfg.step_counts, self.saved_cfg.step_counts
        unchanged = [name for name in STEP_COUNTS if getattr(counts, name) == getattr(saved_counts, name)]
        to_scale = [name for name in unchanged if self.cfg.is_from_file(name) or self.saved_cfg.minutes]
        lengthened = replace(counts, max_iters=saved_counts.max_iters).scaled(max_iters, to_scale)
        if "warmup_iters" in unchanged:
            lengthened = lengthened.without_second_warmup(saved_counts, self.saved_state["step"])
        return lengthened

    def require_same_data(self, data: Mixture) -> None:
        """Raise UserError if the data's tokenizer is not the checkpoint's, or the data is not the resumed run's."""
        if not self.checkpoint:
            return
        ckpt, tokenizer, dataset = self.checkpoint, data.tokenizer, self.cfg.dataset
        if ckpt.tokenizer.hash != tokenizer.hash and not (self.adds_eot(tokenizer) and not self.resuming):
            raise UserError(
                f"the checkpoint {ckpt.path} was trained with another tokenizer ({ckpt.tokenizer.kind}, "
                f"{counted(ckpt.tokenizer.vocab_size, 'token')}) than {dataset} ({tokenizer.kind}, "
                f"{counted(tokenizer.vocab_size, 'token')}); prepare the data with the checkpoint's tokenizer: "
                f"--tokenizer={ckpt.path}"
            )
        if self.resuming and (changed := changed_data(self.saved_state, data)):
            raise UserError(
                f"{', '.join(changed)} is not this run's original data; start a new run from its weights with "
                f"--init_from={self.cfg.out_dir} and another --out_dir"
            )
        if self.resuming and not self.cfg.eval_only and (order := unknown_order(self.saved_cfg, self.last_part, data)):
            raise UserError(
                f"{self.cfg.out_dir} cannot be resumed: {order}; start a new run from its weights with "
                f"--init_from={self.cfg.out_dir} and another --out_dir"
            )
        again = [part.folder.name for part, _ in data.datasets if prepared_again(ckpt, part)]
        if again and not self.resuming and distributed.rank_from_env() == 0:
            note(
                f"{', '.join(again)}: prepared again since {ckpt.path} was trained, so the validation text may contain "
                f"its training text, and the validation loss may be too low"
            )

    def adds_eot(self, tokenizer: Tokenizer) -> bool:
        """Whether the data's tokenizer is the checkpoint's plus an end-of-text token."""
        saved_tokenizer = self.checkpoint.tokenizer
        return saved_tokenizer.eot is None and saved_tokenizer.with_eot().hash == tokenizer.hash

    def build_model(self, tokenizer: Tokenizer) -> GPT | None:
        """Build the checkpoint's model with the run's dropout, block_size, and mask_documents; None from scratch.

        If the data's tokenizer adds an end-of-text token, the embedding table gets a row for it.
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
            change = f"the model was trained with {trained}"
            if model.config.position == "learned":
                change = f"the first {block_size} of the {trained} trained positions are used"
            print(f"block_size {block_size}: {change}")
            crop_block_size(model, block_size)
        model.config = replace(model.config, document_token=document_token(self.cfg, tokenizer))
        return model

    def parts(self, runtime: Runtime) -> list[PartRecord]:
        """The records of the run's parts, including the one that begins now. Prints a line when resuming."""
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
        part |= {name: self.last_part[name] for name in ("rollbacks", "lr_factor") if name in self.last_part}
        if not self.resuming:
            return [part]
        same_machine = all(self.last_part[name] == part[name] for name in ("resolved", "versions"))
        changes = changed_settings(self.saved_cfg, self.cfg)
        keeps_its_length = not (self.adds_minutes or (self.saved_state.get("budget") and self.cfg.minutes))
        part |= {
            "from_step": self.saved_state["step"],
            "after": self.saved_state.get("stopped_by") or "a kill",
            "changes": changes,
            "exact": same_machine and keeps_its_length and not changes.keys() & names_with(type(self.cfg), INEXACT),
        }
        listed = "".join(f", {name} {new} (was {old})" for name, (old, new) in changes.items())
        print(f"resuming from {self.checkpoint.path}{listed}{'' if part['exact'] else '; not bitwise identical'}")
        return [*run_folder.parts_of(Path(self.cfg.out_dir), self.saved_state), part]


def unknown_order(cfg: Any, part: Mapping[str, Any], data: Mixture) -> str | None:
    """A clause about the order of the sequences of a run if this version cannot reproduce it, or None.

    cfg: train.py's settings of the run. part: one of its parts, a PartRecord. data: of the run.
    """
    reason = "its sequences have an order that no longer exists"
    if cfg.sampling == "epoch" and part.get("windows") != WINDOWS_VERSION:
        return f'{reason}: sampling="epoch" with one phase per epoch'
    if part.get("without_targets", 0) != data.without_targets:
        return f"{reason}: windows without targets, of which its data set has {data.without_targets:,}, were used"
    return None


def model_config(cfg: Any, data: Mixture) -> GPTConfig:
    """The configuration of a new model. cfg: train.py's settings. Raises UserError."""
    settings = {name: getattr(cfg, name) for name in MODEL_SETTINGS}
    return GPTConfig(vocab_size=data.vocab_size, document_token=document_token(cfg, data.tokenizer), **settings)


def document_token(cfg: Any, tokenizer: Tokenizer) -> int | None:
    """The token that ends a document in the data, if attention is confined to documents.

    Raises UserError if the data have none.
    """
    if cfg.mask_documents and tokenizer.eot is None:
        raise UserError("mask_documents=True: the data is one text, without end-of-text tokens; leave it out")
    return tokenizer.eot if cfg.mask_documents else None


def with_vocab_size(model: GPT, vocab_size: int, seed: int) -> GPT:
    """Copy a model with a larger vocabulary. The new rows are initialized as in a new model."""
    larger = GPT(replace(model.config, vocab_size=vocab_size), seed)
    tensors = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in larger.named_parameters():
            p[: len(tensors[name])] = tensors[name]
    return larger


def resolve_latest(user_cfg: Config) -> Config:
    """Replace "latest", in out_dir (resume) or init_from (finetune), by the folder of the newest run.

    Raises UserError if there is no run, or under torchrun, whose processes and restarts may find different ones.
    """
    setting = "out_dir" if user_cfg.init_from == "resume" else "init_from"
    name = getattr(user_cfg, setting)
    folder = resolve(name)
    if folder != name and under_torchrun():
        raise UserError(f"{setting}={name}: under torchrun, name the run's folder: --{setting}={folder}")
    return user_cfg.replace(**{setting: folder})


def load_start(user_cfg: Config) -> Start[Config]:
    """Load the checkpoint that the run starts from, if any, and adapt the user's settings to it. Raises UserError.

    user_cfg: train.py's settings. A run that torchrun has restarted resumes, whatever init_from is.
    """
    out_dir = Path(user_cfg.out_dir)
    restarted = under_torchrun() and distributed.is_restart(run_folder.torchrun_id(out_dir))
    if restarted or user_cfg.init_from == "resume":
        return resume_run(user_cfg, load_run(out_dir), restarted)
    start = Start(user_cfg, None)
    if user_cfg.init_from != "scratch":
        start = finetune_run(user_cfg, load_weights(user_cfg.init_from))
    if run_folder.exists(out_dir) and not (user_cfg.overwrite or user_cfg.eval_only):
        raise UserError(
            f"{out_dir} holds the checkpoints of an earlier run: resume it with --init_from=resume, choose another "
            f"--out_dir, or replace them with --overwrite=True"
        )
    return start


def resume_run(user_cfg: Config, ckpt: Checkpoint, restarted: bool) -> Start[Config]:
    """The start of a run that continues from its own checkpoint. Raises UserError.

    restarted: torchrun has restarted the run, with the same command.
    """
    try:
        saved_cfg = settings.from_json(type(user_cfg), ckpt.state["config"])
    except ConfigError as error:
        raise CheckpointError(f"{ckpt.path}: state.json is damaged: {error}") from None
    skipped = sum(end - begin for part in ckpt.state["parts"] for begin, end in [part.get("skipped_sequences", (0, 0))])
    if ckpt.state["next_sequence"] != ckpt.state["step"] * saved_cfg.accumulation * saved_cfg.batch_size + skipped:
        raise CheckpointError(f"{ckpt.path}: state.json is damaged: next_sequence does not fit its step")
    saved_cfg = saved_cfg.replace(ckpt.state.get("origins") or {})
    if restarted:
        user_cfg = user_cfg.replace(init_from="resume", overwrite=False)
    cfg = merge_saved_settings(user_cfg, saved_cfg, ckpt.path, restarted)
    cfg = cfg.replace(**shape_settings(cfg, ckpt))
    cfg = cfg.replace(**batch_settings(user_cfg, cfg, saved_cfg, ckpt.path))
    adds_minutes = not restarted and minutes_are_added(user_cfg, saved_cfg, ckpt.state)
    cfg = cfg.replace(**resumed_step_counts(user_cfg, cfg, saved_cfg, ckpt.state["step"], adds_minutes))
    all_origins = {**dict.fromkeys(asdict(cfg), str(ckpt.path)), **cfg.origins}  # every setting is known now
    settings.check(cfg.replace(all_origins))
    require_same_run(saved_cfg, cfg, ckpt.path)
    return Start(cfg, ckpt, saved_cfg, adds_minutes)


def minutes_are_added(user_cfg: Config, saved_cfg: Config, saved_state: dict[str, Any]) -> bool:
    """Whether a resumed run is trained for user_cfg.minutes more; otherwise, any time budget of the run continues.

    It continues if the minutes on the command line are its own and are not used up, so that the command that started a
    run also resumes it.
    """
    if user_cfg.minutes is None or user_cfg.is_from_file("minutes") or user_cfg.eval_only:
        return False
    max_iters = Schedule(saved_cfg.step_counts, decisions=saved_state["parts"][-1]["decisions"]).max_iters
    return user_cfg.minutes != saved_cfg.minutes or saved_state["step"] >= max_iters


def merge_saved_settings(user_cfg: Config, saved_cfg: Config, path: Path, restarted: bool) -> Config:
    """The user's settings; those that are not set come from the checkpoint at `path`.

    A config file cannot change the fixed settings of a run, because the original command line may have overridden the
    file; a line names the values that are ignored. On the command line, such a change is an error (require_same_run).
    A setting on the command line turns off one of a config file that it `replaces`, unless the command sets both, as it
    did at the start.
    """
    run_settings = names_without(type(user_cfg), OF_THE_COMMAND)
    replaces = user_cfg.replaces
    by_command = {name for name in run_settings if user_cfg.is_set(name) and not user_cfg.is_from_file(name)}
    turned_off = {replaces[name] for name in replaces.keys() & by_command} - by_command
    repeated = {replaces[name] for name in replaces if restarted or saved_cfg.origins.get(name) == COMMAND_LINE}
    turned_off -= {name for name in repeated if user_cfg.is_set(name)}
    unset = [name for name in run_settings if not user_cfg.is_set(name) and name not in turned_off]
    chosen = [name for name, origin in saved_cfg.origins.items() if origin == SIZE_AUTO]
    ignored = [
        name
        for name in dict.fromkeys((*names_with(type(user_cfg), KEPT), *chosen))
        if user_cfg.is_from_file(name)
        and name not in turned_off
        and getattr(user_cfg, name) != getattr(saved_cfg, name)
    ]
    if ignored and distributed.rank_from_env() == 0:
        differences = [f"{name}={getattr(saved_cfg, name)} (not {getattr(user_cfg, name)})" for name in ignored]
        print(f"fixed settings come from the checkpoint {path}: {', '.join(differences)}")
    from_checkpoint = [*unset, *ignored]
    origins = {name: origin for name, origin in user_cfg.origins.items() if name not in (*ignored, *turned_off)}
    origins |= {name: saved_cfg.origins[name] for name in from_checkpoint if name in saved_cfg.origins}
    saved_values = {name: getattr(saved_cfg, name) for name in from_checkpoint}
    return user_cfg.replace(origins, **saved_values, **dict.fromkeys(turned_off))


def finetune_run(user_cfg: Config, ckpt: Checkpoint) -> Start[Config]:
    """The start of a new run from trained weights."""
    cfg = user_cfg.replace(**shape_settings(user_cfg, ckpt))
    is_masked = ckpt.config().document_token is not None
    if not cfg.is_set("mask_documents"):
        cfg = cfg.replace(mask_documents=is_masked)
    if distributed.rank_from_env() == 0 and not cfg.eval_only:
        print(f"a new run in {cfg.out_dir}, from the weights of {ckpt.path}")
        if run_folder.exists(Path(cfg.init_from)):
            print(f"(to continue the run in {cfg.init_from} instead: --init_from=resume --out_dir={cfg.init_from})")
    if distributed.rank_from_env() == 0 and (is_masked or cfg.mask_documents):
        trained = "as the weights were trained" if is_masked else "but the weights were trained without it"
        if not cfg.mask_documents:
            trained = "but the weights were trained with it"
        print(f"mask_documents={cfg.mask_documents}, {trained}")
    settings.check(cfg)
    return Start(cfg, ckpt)


def load_run(out_dir: Path) -> Checkpoint:
    """Load the last checkpoint of the run to resume. Raises UserError."""
    try:
        return checkpoint.load(out_dir)
    except NoCheckpointError as error:
        raise NoCheckpointError(error.path, "--out_dir=") from None


def load_weights(init_from: str) -> Checkpoint:
    """Load a checkpoint to finetune: a run, a name on the Hugging Face hub, or a foreign format. Raises UserError."""
    try:
        return foreign.load(init_from)
    except NoCheckpointError as error:
        if error.identity or Path(init_from).exists():
            raise NoCheckpointError(error.path, "--init_from=") from None
        known = ", ".join(["scratch", "resume", *HUB])
        raise UserError(f"init_from={init_from}: expected {known}, or the path of a checkpoint") from None


def shape_settings(cfg: Config, ckpt: Checkpoint) -> dict[str, Any]:
    """The settings of the model's shape, from the checkpoint.

    `cfg` may have a shorter block_size, and a longer one if positions are not learned. Other values in a config file
    are ignored, and a line names them. Raises UserError for any other conflict.
    """
    default = {field.name: field.default for field in fields(cfg)}
    config = ckpt.config()
    shape = {name: getattr(config, name) for name in SHAPE}
    refused, ignored = [], []
    for name, trained in shape.items():
        requested, origin = getattr(cfg, name), cfg.origins.get(name)
        if requested == trained or (requested == default[name] and origin is None):
            continue
        if name == "block_size" and (requested < trained or shape["position"] != "learned"):
            shape[name] = requested
        elif origin in (None, COMMAND_LINE):
            limit = ", the size of its position table" if name == "block_size" else ""
            refused.append(f"{name}={requested}: the checkpoint {ckpt.path} has {name}={trained}{limit}")
        else:
            ignored.append(f"{name}={trained} (not {requested})")
    if refused:
        raise UserError(f"{'; '.join(refused)}; leave the setting out")
    if ignored and distributed.rank_from_env() == 0:
        print(f"the model's shape comes from the checkpoint {ckpt.path}: {', '.join(ignored)}")
    return shape


def batch_settings(user_cfg: Config, cfg: Config, saved_cfg: Config, path: Path) -> dict[str, Any]:
    """The settings of a resumed run's batch, which keep the sequences per step. Raises UserError if they cannot.

    If the user sets only batch_size or only gradient_accumulation_steps, the other one follows.
    """
    sequences = saved_cfg.accumulation * saved_cfg.batch_size
    if cfg.accumulation * cfg.batch_size == sequences:
        return {}
    batch = names_with(type(cfg), Role.BATCH)
    given = {name: getattr(cfg, name) for name in batch if user_cfg.is_set(name) and not user_cfg.is_from_file(name)}
    follows = {"batch_size": "gradient_accumulation_steps", "gradient_accumulation_steps": "batch_size"}
    if len(given) == 1 and follows.keys() >= given.keys():
        ((name, value),) = given.items()
        if sequences % value == 0:
            return {"total_batch_tokens": None, follows[name]: sequences // value}
    divisors = [n for n in range(1, min(sequences, 4096) + 1) if sequences % n == 0]
    nearest = sorted(sorted(divisors, key=lambda n: abs(n - cfg.batch_size))[:3])
    raise UserError(
        f"{', '.join(f'{name}={value}' for name, value in given.items())}: a step of {path} has "
        f"{counted(sequences, 'sequence')}, which cannot change; set only --batch_size, to one of "
        f"{', '.join(map(str, nearest))}, or start a new run from its weights with --init_from={cfg.out_dir} and "
        f"another --out_dir"
    )


def resumed_step_counts(
    user_cfg: Config, cfg: Config, saved_cfg: Config, step: int, adds_minutes: bool
) -> dict[str, Any]:
    """The step counts of a run that is resumed after `step` steps.

    A run with a time budget keeps its counts; those of added minutes follow later (Start.lengthened). Otherwise, if
    max_iters changes, counts chosen for the old value are scaled, except that a warmup that is over is not repeated.
    """
    if cfg.minutes:
        counts = asdict(saved_cfg.step_counts)
        by_command = [name for name in STEP_COUNTS if user_cfg.origins.get(name) == COMMAND_LINE]
        if adds_minutes:
            counts |= {name: getattr(user_cfg, name) for name in by_command if name != "max_iters"}
        changed = {name: getattr(user_cfg, name) for name in by_command if getattr(user_cfg, name) != counts[name]}
        if changed and distributed.rank_from_env() == 0:
            ignored = ", ".join(f"{name}={value}" for name, value in changed.items())
            print(f"the time budget keeps its step counts; ignored: {ignored}")
        return counts
    was_scaled = [name for name in STEP_COUNTS if cfg.is_from_file(name) or saved_cfg.minutes]
    to_scale = [name for name in was_scaled if not user_cfg.is_set(name)]
    counts = replace(cfg.step_counts, max_iters=saved_cfg.max_iters).scaled(cfg.max_iters, to_scale)
    if user_cfg.origins.get("warmup_iters") != COMMAND_LINE:
        counts = counts.without_second_warmup(saved_cfg.step_counts, step)
    return asdict(counts)


def require_same_run(saved_cfg: Config, cfg: Config, path: Path) -> None:
    """Raise UserError if a setting changes that determines the model or the order of the sequences.

    path: the checkpoint of the run to resume.
    """
    fixed = names_with(type(cfg), UNCHANGEABLE)
    changes = {name: (getattr(saved_cfg, name), getattr(cfg, name)) for name in fixed}
    refused = [f"{name}: {old} before, {new} now" for name, (old, new) in changes.items() if old != new]
    if refused:
        raise UserError(
            f"{path} cannot be resumed with other settings: {'; '.join(refused)}; set them back, or start a new "
            f"run from its weights with --init_from={cfg.out_dir} and another --out_dir"
        )


def changed_settings(saved_cfg: Config, cfg: Config) -> dict[str, list]:
    """The settings that differ: name -> [old, new]."""
    old, new = asdict(saved_cfg), asdict(cfg)
    reported = names_without(type(cfg), UNREPORTED)
    return {name: [old[name], new[name]] for name in reported if old[name] != new[name]}
