"""Documents with summaries as a data set in which only the summaries count: a document, "TL;DR:", and its completion.

    python prepare/summaries.py
    python prepare/summaries.py --pretraining=True
    python prepare/summaries.py articles.jsonl
    python prepare/summaries.py --source=cnn_dailymail --limit=100000

Without input, the documents are docstrings of three Python packages, and their first lines are the summaries. The
wheels are downloaded once from the Python registry and checked by their hashes. A tenth of the docstrings is held out,
by folder.

Your own documents are JSON lines {"document": ..., "summary": ...} or {"prompt": ..., "completion": ...}. --source is
cnn_dailymail or xsum on the Hugging Face hub, or a folder with such parquet files. The same command with
--pretraining=True prepares the same documents without their summaries, with the same split and the same tokenizer, to
pretrain a model that is then finetuned.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from folio import UserError, configurator  # noqa: E402
from folio.blocks import CorpusError, Segments, document_hash  # noqa: E402
from folio.configurator import NonEmptyStr, NonNegativeInt, PositiveInt  # noqa: E402
from folio.corpus import Corpus, find_sources, format_of  # noqa: E402
from folio.dataset_builder import split_by_number  # noqa: E402
from folio.docstrings import distinct, read_wheel  # noqa: E402
from folio.fetch import Wheel, fetch, hub_parquet  # noqa: E402
from folio.pairs import (  # noqa: E402
    HELD_OUT,
    Column,
    document_of,
    pair_segments,
    pairs_file,
    read_parquet,
    summary,
    write_pairs,
)
from folio.prepare import PrepareConfig, VocabSize, default_name, prepare  # noqa: E402
from folio.shards import data_root  # noqa: E402

WHEELS = (  # for any platform; Python 3.10 can parse their files
    # New BSD license
    Wheel("sympy==1.14.0", "e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5"),
    # Apache License 2.0
    Wheel("tensorflow-probability==0.25.0", "f3f4d6431656c0122906888afe1b67b4400e82bd7f254b45b92e6c5b84ea8e3e"),
    Wheel("jax==0.6.2", "bb24a82dc60ccf704dcaf6dbd07d04957f68a6c686db19630dd75260d1fb788c"),
)
HUB = {  # name -> repository, subset, revision
    "cnn_dailymail": ("abisee/cnn_dailymail", "3.0.0", None),
    "xsum": ("EdinburghNLP/xsum", None, "refs/convert/parquet"),  # the hub's conversion; the repository has a script
}
COLUMNS = (("article", "highlights"), ("document", "summary"))  # of CNN/DailyMail, and of XSum
WRITE = 'write {"document": "...", "summary": "..."}, or {"prompt": "...", "completion": "..."}'


@dataclass(frozen=True)
class SummariesConfig(PrepareConfig):
    # --- the documents ---
    inputs: tuple[str, ...] = ()  # .jsonl files (also .gz or .zst), folders of them, or patterns; none: docstrings
    source: NonEmptyStr | None = None  # cnn_dailymail, xsum, or a folder of parquet files, instead of inputs
    limit: PositiveInt | None = None  # documents to take from --source, from the first one; None: all
    document_length: PositiveInt | None = None  # characters before a document is cut; None: 600 of docstrings, or 2,400
    seed: NonNegativeInt = 7  # which documents are for validation
    pretraining: bool = False  # True: only the documents; the data set's name then ends with -documents
    # --- the tokenizer ---
    tokenizer: str = "bpe"  # char, byte, gpt2, bpe, or a folder; for pretraining, by default, that of the pairs
    vocab_size: VocabSize | None = None  # number of tokens of a bpe; None: 2,048 for docstrings, otherwise 8,192

    def problems(self) -> list[tuple[str, str]]:
        problems = super().problems()
        if self.inputs and self.source:
            problems.append(("source", "it replaces the input files; give only one of them"))
        if self.limit and not self.source:
            problems.append(("limit", "it is for --source; it has no effect on files or docstrings"))
        if others := [name for name in self.inputs if format_of(Path(name)) in ("text", "csv", "parquet")]:
            problems.append(("inputs", f"{others[0]} is not JSON lines; {WRITE} on each line of a .jsonl file"))
        return problems

    @property
    def is_docstrings(self) -> bool:
        return not self.inputs and not self.source


def main(cfg: SummariesConfig) -> None:
    configurator.check(cfg)
    cfg = cfg.replace(
        document_length=cfg.document_length or (600 if cfg.is_docstrings else 2400),
        vocab_size=cfg.vocab_size or (2048 if cfg.is_docstrings else 8192),
    )
    if cfg.is_docstrings:
        prepare_docstrings(cfg)
    elif cfg.source:
        prepare_source(cfg)
    else:
        prepare_files(cfg)


def prepare_docstrings(cfg: SummariesConfig) -> None:
    """Prepare the docstrings of the wheels. Raises UserError if one cannot be downloaded."""
    wheels = [fetch(f"the wheel of {wheel.requirement}", wheel.sha256, [wheel]) for wheel in WHEELS]
    docstrings = (docstring for wheel in wheels for docstring in read_wheel(wheel))
    shortened = (docstring._replace(document=cut(docstring.document, cfg.document_length)) for docstring in docstrings)
    pairs = (
        {
            "package": docstring.package,
            "item": docstring.folder,
            "name": f"{docstring.module}:{docstring.name}",
            "begins": docstring.begins,
            **summary(docstring.document, docstring.summary),
        }
        for docstring in distinct(shortened)
    )
    prepare_pairs(cfg, pairs, "summaries", [wheel.sha256 for wheel in WHEELS], 0.1)


def prepare_source(cfg: SummariesConfig) -> None:
    """Prepare a data set of the hub, or a folder of its files. Raises UserError."""
    if cfg.source in HUB:
        name, (repository, subset, revision) = cfg.source, HUB[cfg.source]
    else:
        name, (repository, subset, revision) = default_name([cfg.source]), (cfg.source, None, None)
    texts = read_parquet(hub_parquet(repository, subset, revision), summary_columns, cfg.limit)
    pairs = (make_pair(cfg.document_length, dict(zip(("document", "summary"), row, strict=True))) for row in texts)
    prepare_pairs(cfg, pairs, name, [repository, subset, cfg.limit], 0.01)


def summary_columns(path: Path, schema: Any) -> list[Column]:
    """The columns of a parquet file that contain documents and summaries. Raises CorpusError."""
    for names in COLUMNS:
        if set(names) <= set(schema.names):
            return [(name, None) for name in names]
    expected = ", or ".join(" and ".join(names) for names in COLUMNS)
    raise CorpusError(f"{path} has the columns {', '.join(schema.names)}; the texts must be in {expected}")


def prepare_files(cfg: SummariesConfig) -> None:
    """Prepare files of JSON lines. Raises UserError."""
    sources = find_sources(cfg.inputs, "jsonl")
    corpus = Corpus(sources, document=partial(make_pair, cfg.document_length))
    pairs = (pair for block in corpus.blocks() for pair in block.documents())
    made_of = [source.fingerprint() for source in sources]
    prepare_pairs(cfg, pairs, default_name(cfg.inputs), made_of, 0.1 if corpus.is_one_file else 0.01)


# --- pairs ------------------------------------------------------------------------------------------------------------


def make_pair(length: int, value: dict[str, Any]) -> dict[str, Any] | None:
    """A prompt and its completion from a JSON object, whose other fields are kept; None if one of the texts is empty.

    length: characters of a document. A prompt is not cut. Raises CorpusError.
    """
    if "prompt" in value or "completion" in value:
        pair_segments(value)
        return value if value["prompt"].strip() and value["completion"].strip() else None
    if missing := [name for name in ("document", "summary") if name not in value]:
        raise CorpusError(f"it has no {missing[0]}: {WRITE}")
    texts = [value["document"], value["summary"]]
    if not all(isinstance(text, str | None) for text in texts):
        raise CorpusError(f"document and summary must be strings: {WRITE}")
    if not all(text and text.strip() for text in texts):
        return None
    others = {name: field for name, field in value.items() if name not in ("document", "summary")}
    return others | summary(cut(texts[0], length), texts[1].strip())


def cut(text: str, length: int) -> str:
    """The text without white space at its ends, and at most the first `length` characters, up to the end of a word."""
    text = text.strip()
    if len(text) <= length:
        return text
    words = re.match(r".*\S(?=\s)", text[: length + 1], re.DOTALL)
    return words[0] if words else text[:length]


@dataclass(frozen=True)
class SummaryDocument:
    """Turns a pair into a document of the data set: with its summary, or without it for pretraining."""

    pretraining: bool

    def __call__(self, value: dict[str, Any]) -> str | Segments:
        return document_of(value["prompt"]) if self.pretraining else pair_segments(value)


def choose_validation(groups: list[int], fraction: float) -> np.ndarray:
    """The numbers of the documents for validation: about this fraction of them, in the groups with the smallest hashes.

    groups: the hash of each document's group, which is in one split. Raises UserError if there is only one group.
    """
    hashes = np.array(groups, dtype=np.uint64)
    different, counts = np.unique(hashes, return_counts=True)
    if not len(different):
        raise UserError("the input has no document with a summary; there is nothing to learn from")
    if len(different) == 1:
        what = "there is only one document" if len(hashes) == 1 else "all documents are the same, or of one item"
        raise UserError(f"{what}, and it cannot be in both splits; add another")
    shares = np.cumsum(counts)[:-1] / len(hashes)
    return np.flatnonzero(hashes <= different[np.abs(shares - fraction).argmin()])


def prepare_pairs(
    cfg: SummariesConfig, pairs: Iterable[dict[str, Any] | None], name: str, made_of: Any, val_fraction: float
) -> None:
    """Prepare a data set from pairs. None is left out. Pairs with one "item" or one prompt are in the same split.

    made_of: what the pairs follow from; the same value means the same data set. Raises UserError.
    """
    name = cfg.name or name
    if cfg.pretraining and not cfg.is_set("tokenizer"):
        of_pairs = data_root(cfg.data_dir) / name
        if not (of_pairs / "meta.json").exists():
            raise UserError(
                f"pretraining=True: it uses the tokenizer of {of_pairs}, which is not prepared; first run this command "
                f"without --pretraining, or set --tokenizer"
            )
        cfg = cfg.replace(tokenizer=str(of_pairs))
    cfg = cfg.replace(val_fraction=cfg.val_fraction or val_fraction)
    groups: list[int] = []
    left_out = 0

    def usable_pairs() -> Iterator[dict[str, Any]]:
        nonlocal left_out
        for pair in pairs:
            if pair is None:
                left_out += 1
                continue
            group = f"{cfg.seed} {pair.get('item', pair['prompt'])}"
            groups.append(document_hash(group.encode("utf-8", "replace")))
            yield pair

    with pairs_file(usable_pairs(), name, [made_of, cfg.document_length, cfg.seed]) as sources:
        if left_out:
            print(f"{left_out:,} pairs without a document or a summary were left out")
        validation = choose_validation(groups, cfg.val_fraction)
        folder = prepare(
            cfg,
            Corpus(sources, document=SummaryDocument(cfg.pretraining)),
            f"{name}-documents" if cfg.pretraining else name,
            split_by_number(validation),
            masked=not cfg.pretraining,
            config_file="config/summarize.py",
        )
        if not cfg.pretraining:
            chosen = set(validation.tolist())
            with open(sources[0].path, encoding="utf-8") as file:
                write_pairs(folder / HELD_OUT, (json.loads(line) for n, line in enumerate(file) if n in chosen))


if __name__ == "__main__":
    configurator.run_script(main, SummariesConfig)
