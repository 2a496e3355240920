"""Documents with summaries as a data set where only the summaries are targets: a document, "TL;DR:", its summary.

    python prepare/summaries.py
    python prepare/summaries.py --pretraining=True
    python prepare/summaries.py articles.jsonl
    python prepare/summaries.py --source=cnn_dailymail --limit=100000

Without inputs, the documents are docstrings of three Python packages, and their first lines are the summaries. The
wheels are downloaded once from PyPI and verified by their hashes. A tenth of the docstrings is held out, by folder.

Your documents are JSON {"document": ..., "summary": ...} or {"prompt": ..., "completion": ...}, or such columns.
--source is cnn_dailymail or xsum on the Hugging Face hub, or a folder with such parquet files. With --pretraining=True,
the same command prepares the documents without their summaries, with the same split and tokenizer, for pretraining.
"""

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError  # noqa: E402
from folio.base import settings  # noqa: E402
from folio.base.download import Wheel, fetch, hub_parquet  # noqa: E402
from folio.base.settings import NonEmptyStr, NonNegativeInt, PositiveInt  # noqa: E402
from folio.checkpoints.find_runs import find_run  # noqa: E402
from folio.data.account import Account  # noqa: E402
from folio.data.blocks import Document  # noqa: E402
from folio.data.corpus import Corpus  # noqa: E402
from folio.data.inputs import Inputs, saved_stdin  # noqa: E402
from folio.data.prepare import VocabSize, default_name  # noqa: E402
from folio.data.records import lower_header, parquet_sources  # noqa: E402
from folio.data.shards import data_root  # noqa: E402
from folio.data.sources.docstrings import read_wheel, remove_duplicates  # noqa: E402
from folio.data.sources.pairs import find_pair_files, summary  # noqa: E402
from folio.data.sources.prepare_pairs import NO_INPUTS, TextPairsConfig, prepare_pairs, read_pair  # noqa: E402

WHEELS = (  # for all platforms; Python 3.10 can parse the files
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
FIELDS = (("document", "summary"), ("article", "highlights"))  # of XSum and of CNN/DailyMail
FORMAT_ADVICE = 'write {"document": "...", "summary": "..."}, or {"prompt": "...", "completion": "..."}'


@dataclass(frozen=True)
class SummariesConfig(TextPairsConfig):
    config_file = "config/summarize.py"

    # --- the texts ---
    inputs: tuple[str, ...] = ()  # JSON, tables, or parquet files, folders of them, or patterns; none: docstrings
    source: NonEmptyStr | None = None  # cnn_dailymail, xsum, or a folder of parquet files, instead of inputs
    document_length: PositiveInt | None = None  # maximum characters; None: 600 for docstrings, otherwise 2,400
    seed: NonNegativeInt = 7  # selects the documents for validation
    pretraining: bool = False  # True: prepare only the documents, as the data set NAME-documents
    # --- the tokenizer ---
    tokenizer: str = "bpe"  # char, byte, gpt2, bpe, or a folder; the default for pretraining: that of the pairs
    vocab_size: VocabSize | None = None  # vocabulary size of a bpe; None: 2,048 for docstrings, otherwise 8,192


def main(cfg: SummariesConfig) -> None:
    settings.check(cfg)
    cfg = cfg.replace(tokenizer=find_run(cfg.tokenizer))
    cfg = cfg.replace(
        document_length=cfg.document_length or (600 if cfg.is_embedded else 2400),
        vocab_size=cfg.vocab_size or (2048 if cfg.is_embedded else 8192),
    )
    if cfg.is_embedded:
        prepare_docstrings(cfg)
    elif cfg.source:
        prepare_source(cfg)
    else:
        prepare_files(cfg)


def prepare_docstrings(cfg: SummariesConfig) -> None:
    """Prepare the docstrings of the wheels. Raises UserError if one cannot be downloaded."""
    wheels = [fetch(f"the wheel of {wheel.requirement}", wheel.sha256, [wheel]) for wheel in WHEELS]
    docstrings = (docstring for wheel in wheels for docstring in read_wheel(wheel))
    length = cfg.document_length
    truncated = (docstring._replace(document=truncate(docstring.document, length)) for docstring in docstrings)
    pairs = (
        {
            "package": docstring.package,
            "item": docstring.folder,
            "name": f"{docstring.module}:{docstring.name}",
            "begins": docstring.begins,
            **summary(docstring.document, docstring.summary),
        }
        for docstring in remove_duplicates(truncated)
    )
    prepare_texts(cfg, pairs, "summaries", NO_INPUTS, 0.1)


def prepare_source(cfg: SummariesConfig) -> None:
    """Prepare a data set from the hub or from a folder of parquet files. Raises UserError."""
    if cfg.source in HUB:
        name, (repository, subset, revision) = cfg.source, HUB[cfg.source]
    else:
        name, (repository, subset, revision) = default_name([cfg.source]), (cfg.source, None, None)
    files = hub_parquet(repository, subset, revision)
    inputs, _ = parquet_sources(files, limit=cfg.limit)
    prepare_records(cfg, inputs, name, 0.01)


def prepare_files(cfg: SummariesConfig) -> None:
    """Prepare files of records. Raises UserError."""
    with saved_stdin(cfg.inputs) as paths:
        inputs = find_pair_files(paths, cfg.format, cfg.keep_line_ends)
        prepare_records(cfg, inputs, default_name(cfg.inputs), 0.1 if len(inputs.sources) == 1 else 0.01)


def prepare_records(cfg: SummariesConfig, inputs: Inputs, name: str, val_fraction: float) -> None:
    """Prepare the pairs in JSON, tables, or parquet files. Raises UserError."""
    account = inputs.account()
    corpus = Corpus(inputs, partial(summary_pair, cfg.document_length), name_columns=lower_header)
    pairs = corpus.documents(account)
    prepare_texts(cfg, pairs, name, inputs, val_fraction, account)


def prepare_texts(
    cfg: SummariesConfig,
    pairs: Iterable[dict[str, Any] | None],
    name: str,
    inputs: Inputs,
    val_fraction: float,
    account: Account | None = None,
) -> None:
    """Prepare pairs as a data set, or their documents for pretraining. Raises UserError. account: of the pairs."""
    name = cfg.name or name
    if cfg.pretraining and not cfg.is_set("tokenizer"):
        pairs_folder = data_root(cfg.data_dir) / name
        if not (pairs_folder / "meta.json").exists():
            raise UserError(
                f"pretraining=True: it uses the tokenizer of {pairs_folder}, which is not prepared; first run this "
                f"command without --pretraining, or set --tokenizer"
            )
        cfg = cfg.replace(tokenizer=str(pairs_folder))
    cfg = cfg.replace(val_fraction=cfg.val_fraction or val_fraction)
    prepare_pairs(cfg, pairs, name, inputs, documents_only=cfg.pretraining, account=account)


# --- pairs ------------------------------------------------------------------------------------------------------------


def summary_pair(length: int, record: dict[str, Any]) -> Document:
    """Return a pair from a record {"prompt", "completion"} or {"document", "summary"}. None if a text is empty.

    CNN/DailyMail calls them "article" and "highlights". length: maximum characters of a document. Prompts are not
    truncated. Raises CorpusError.
    """
    names = next((names for names in FIELDS if {*names} <= record.keys()), FIELDS[0])
    beyond = 0

    def make(document: str, text: str) -> dict[str, str]:
        nonlocal beyond
        truncated = truncate(document, length)
        beyond = len(document) - len(truncated)
        return summary(truncated, text)

    content, used, left_out, cut = read_pair(record, names, make, FORMAT_ADVICE)
    left_out = {**left_out, "character of documents beyond document_length": beyond}
    return Document(content, used, left_out, cut + beyond)


def truncate(text: str, length: int) -> str:
    """Strip white space, and truncate the text to at most `length` characters at the end of a word."""
    text = text.strip()
    if len(text) <= length:
        return text
    words = re.match(r".*\S(?=\s)", text[: length + 1], re.DOTALL)
    return words[0] if words else text[:length]


if __name__ == "__main__":
    settings.run_script(main, SummariesConfig, needs_output=False)
