"""Prepares a data set of prompts and completions. A file in its folder contains the pairs for validation."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from folio import UserError
from folio.base.files import atomic_write
from folio.base.number_format import counted
from folio.base.progress import progress_bar
from folio.base.settings import NonEmptyStr, NonNegativeInt, PositiveInt
from folio.base.terminal import say
from folio.data.account import IN, Account
from folio.data.blocks import CorpusError, Document, document_hash
from folio.data.corpus import Documents
from folio.data.inputs import Format, Inputs
from folio.data.prepare import PrepareConfig, VocabSize, prepare, refuse_inputs_inside
from folio.data.shards import data_root
from folio.data.sources.pair_records import Record, refuse_unsupported
from folio.data.sources.pairs import HELD_OUT, Texts, pair_segments, strip_tldr, write_pairs

NO_INPUTS = Inputs([])  # of texts that a script generates, or downloads


@dataclass(frozen=True)
class TextPairsConfig(PrepareConfig):
    """Settings of all scripts for pairs."""

    # --- the texts ---
    inputs: tuple[str, ...] = ()
    source: NonEmptyStr | None = None
    limit: PositiveInt | None = None  # use only the first N pairs of --source; None: all
    seed: NonNegativeInt = 1337  # selects the pairs for validation
    format: Format | None = None  # format of all files; None: by their content and their names
    keep_line_ends: bool = False  # True: keep \r\n and \r; by default, they become \n
    # --- the tokenizer ---
    tokenizer: str = "bpe"  # char, byte, gpt2, bpe (trained on these texts), or the folder of a data set or a run
    vocab_size: VocabSize | None = None

    def problems(self) -> list[tuple[str, str]]:
        problems = super().problems()
        if self.inputs and self.source:
            problems.append(("source", "it replaces the input files; use only one of them"))
        if self.limit and not self.source:
            problems.append(("limit", "it is only for --source"))
        return problems

    @property
    def is_embedded(self) -> bool:
        """Whether the script generates the texts."""
        return not self.inputs and not self.source


# --- from records to pairs --------------------------------------------------------------------------------------------


def read_pair(
    record: dict[str, Any], names: Texts, make: Callable[[str, str], dict[str, str]], advice: str
) -> Document:
    """Return a prompt and its completion from a record, with its other fields. None if a text is empty.

    The record has the fields prompt and completion, or the two fields `names`, from which `make` creates them.
    advice: the format of the record, for messages. Raises CorpusError.
    """
    if "prompt" in record or "completion" in record:
        refuse_unsupported(Record(record))
        pair_segments(record)
        is_usable = record["prompt"].strip() and record["completion"].strip()
        return Document(record if is_usable else None, frozenset(("prompt", "completion")))
    if missing := [name for name in names if name not in record]:
        raise CorpusError(f"it has no {missing[0]}, only {', '.join(record) or 'no fields'}; {advice}")
    texts = ["" if record[name] is None else record[name] for name in names]
    if not all(isinstance(text, str) for text in texts):
        raise CorpusError(f"{' and '.join(names)} must be strings; {advice}")
    first, second = (text.strip() for text in texts)
    others = {name: field for name, field in record.items() if name not in names}
    if not first or not second:
        return Document(None, frozenset(names))
    white_space = sum(map(len, texts)) - len(first) - len(second)
    left_out = {"character of white space at the ends of texts": white_space}
    return Document(others | make(first, second), frozenset(names), left_out, white_space)


# --- the data set -----------------------------------------------------------------------------------------------------


def prepare_pairs(
    cfg: TextPairsConfig,
    pairs: Iterable[dict[str, Any] | None],
    name: str,
    inputs: Inputs = NO_INPUTS,
    validation: int | None = None,
    documents_only: bool = False,
    unused: str = "with an empty text",
    account: Account | None = None,
) -> None:
    """Prepare the data set `name` from pairs, which must fit in memory. A pair of None is counted, but not used.

    inputs: the files of the pairs. validation: the number of leading pairs for validation; None: about
    cfg.val_fraction of all, where pairs with the same field "item", or else the same prompt, are in the same split.
    documents_only: prepare only the documents of summaries, without masks, as NAME-documents. unused: what pairs of
    None are, for the message. account: receives what was read when `pairs` are iterated. Raises UserError.
    """
    folder_name = f"{name}-documents" if documents_only else name
    refuse_inputs_inside(data_root(cfg.data_dir) / folder_name, (source.path for source in inputs.sources))
    say(f"making the pairs of {name}")
    results = list(progress_bar(iterable=pairs, unit=" pairs", leave=False))
    usable = [pair for pair in results if pair is not None]
    left_out = len(results) - len(usable)
    account = inputs.account() if account is None else account
    account["pairs"].update({IN: len(results), "used": len(usable), unused: left_out})
    if usable:
        print(f"first pair: {json.dumps(usable[0]['prompt'], ensure_ascii=False)}", end=" -> ")
        print(json.dumps(usable[0]["completion"], ensure_ascii=False))
    if left_out:
        say(f"left out: {counted(left_out, 'pair')} {unused}")
    if validation is None:
        groups = [f"{cfg.seed} {pair.get('item', pair['prompt'])}".encode("utf-8", "replace") for pair in usable]
        val = select_validation([document_hash(group) for group in groups], cfg.val_fraction)
    else:
        val = np.arange(validation)
    corpus = Documents(
        inputs,
        usable,
        val,
        recipe={"seed": cfg.seed, "documents_only": documents_only},
        make=_document if documents_only else pair_segments,
        masked=not documents_only,
        prompt_format=None if documents_only else "pairs",
        account=account,
    )
    folder = prepare(cfg, corpus, folder_name)
    if not documents_only and not (folder / HELD_OUT).exists():
        try:
            with atomic_write(folder / HELD_OUT) as temporary:
                write_pairs(temporary, (usable[number] for number in val))
        except OSError as error:
            raise UserError(
                f"{folder / HELD_OUT} could not be written ({error.strerror}); free some space, and repeat the command"
            ) from None


def _document(value: dict[str, Any]) -> str:
    return strip_tldr(value["prompt"])


def select_validation(groups: list[int], fraction: float) -> np.ndarray:
    """Return the indices of about this fraction of the pairs, in the groups with the smallest hashes.

    groups: the hash of each pair's group. All pairs of a group are in one split. Raises UserError if there is only one
    group.
    """
    hashes = np.array(groups, dtype=np.uint64)
    unique, counts = np.unique(hashes, return_counts=True)
    if not len(unique):
        raise UserError("the input has no pair of texts; use files that contain pairs")
    if len(unique) == 1:
        problem = "there is only one pair" if len(hashes) == 1 else "all pairs have the same prompt, or are of one item"
        raise UserError(f"{problem}, and it cannot be in both splits; add another")
    shares = np.cumsum(counts)[:-1] / len(hashes)
    return np.flatnonzero(hashes <= unique[np.abs(shares - fraction).argmin()])
