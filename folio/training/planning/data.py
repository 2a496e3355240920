"""The data of a run: opened, and compared with that of the checkpoint that the run starts from."""

from collections.abc import Mapping
from typing import Any

from folio import UserError
from folio.base.number_format import counted
from folio.base.progress import note
from folio.checkpoints.checkpoint import Checkpoint
from folio.checkpoints.training_data import changed_data, prepared_again
from folio.data.find_data import find_datasets
from folio.data.tokenizer import Tokenizer
from folio.data.windows import WINDOWS_VERSION, Mixture
from folio.machine import distributed
from folio.training.planning.budget import affordable_tokens, evaluation_seconds
from folio.training.planning.resume import Draft
from folio.training.planning.train_settings import TrainSettings


def open_data(cfg: TrainSettings, max_val_tokens: int | None = None) -> Mixture:
    """Open the data of the settings. max_val_tokens: of each data set, see ValidationWindows."""
    datasets = find_datasets(cfg.dataset, cfg.data_dir)
    return Mixture(datasets, cfg.block_size, cfg.seed, cfg.sampling, max_val_tokens)


def check_data(draft: Draft, data: Mixture) -> None:
    """Raise UserError if the data's tokenizer is not the checkpoint's, or the data is not the resumed run's."""
    ckpt, saved, tokenizer, cfg = draft.weights, draft.saved, data.tokenizer, draft.cfg
    if not ckpt:
        return
    new_run = f"start a new run from its weights with --init_from={cfg.out_dir} and another --out_dir"
    if ckpt.tokenizer.hash != tokenizer.hash and not (adds_eot(ckpt, tokenizer) and not saved):
        raise UserError(
            f"the checkpoint {ckpt.path} was trained with another tokenizer ({ckpt.tokenizer.kind}, "
            f"{counted(ckpt.tokenizer.vocab_size, 'token')}) than {cfg.dataset} ({tokenizer.kind}, "
            f"{counted(tokenizer.vocab_size, 'token')}); prepare the data with the checkpoint's tokenizer: "
            f"--tokenizer={ckpt.path}"
        )
    if saved and (changed := changed_data(saved.state, data)):
        raise UserError(f"{', '.join(changed)} is not this run's original data; {new_run}")
    if saved and not cfg.eval_only and (order := unknown_order(saved.settings, saved.part, data)):
        raise UserError(f"{cfg.out_dir} cannot be resumed: {order}; {new_run}")
    again = [dataset.folder.name for dataset, _ in data.datasets if prepared_again(ckpt, dataset)]
    if again and not saved and distributed.rank_from_env() == 0:
        note(
            f"{', '.join(again)}: prepared again since {ckpt.path} was trained, so the validation text may contain "
            f"its training text, and the validation loss may be too low"
        )


def adds_eot(ckpt: Checkpoint, tokenizer: Tokenizer) -> bool:
    """Whether the data's tokenizer is the checkpoint's plus an end-of-text token."""
    return ckpt.tokenizer.eot is None and ckpt.tokenizer.with_eot().hash == tokenizer.hash


def unknown_order(cfg: TrainSettings, part: Mapping[str, Any], data: Mixture) -> str | None:
    """A clause about the order of the sequences of a run if this version cannot reproduce it, or None.

    cfg: of the run. part: one of its parts, a PartRecord. data: of the run.
    """
    reason = "its sequences have an order that no longer exists"
    if cfg.sampling == "epoch" and part.get("windows") != WINDOWS_VERSION:
        return f'{reason}: sampling="epoch" with one phase per epoch'
    if part.get("without_targets", 0) != data.without_targets:
        return f"{reason}: windows without targets, of which its data set has {data.without_targets:,}, were used"
    return None


def limit_validation(cfg: TrainSettings, data: Mixture, step_seconds: float) -> str | None:
    """Evaluate a part of the validation set if even two evaluations would exceed their share of a run of cfg.minutes.

    Returns a line about it, or None. A part that the user chose with eval_iters stays.
    """
    tokens = [windows.tokens for windows in data.validation.values()]
    seconds_per_token = evaluation_seconds(1, cfg.step_tokens, step_seconds)
    limit = None if cfg.eval_iters else affordable_tokens(cfg.minutes, tokens, seconds_per_token)
    if limit is None:
        return None
    data.limit_validation(limit)
    return (
        f"validation: {data.validation_tokens:,} of {sum(tokens):,} tokens, in evenly spaced contexts, the same ones "
        f"throughout, because evaluations may take a tenth of the time; --eval_iters chooses another part"
    )
