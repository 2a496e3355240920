"""OpenWebText (Gokaslan & Cohen 2019), tokenized with GPT-2's tokenizer and split as in nanoGPT.

    python prepare/openwebtext.py --limit=20000
    python prepare/openwebtext.py
    python prepare/openwebtext.py --source=FOLDER

All 8,013,769 documents give 9,035,582,198 training and 4,434,897 validation tokens. The parquet files take about 24 GB
in Hugging Face's cache, and the shards 18 GB. A subset with --limit takes a few minutes.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Ge

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError  # noqa: E402
from folio.base import settings  # noqa: E402
from folio.base.download import hub_parquet  # noqa: E402
from folio.base.files import read_json  # noqa: E402
from folio.checkpoints.find_runs import find_run  # noqa: E402
from folio.data.builder import split_by_number  # noqa: E402
from folio.data.corpus import Corpus  # noqa: E402
from folio.data.prepare import Fraction, PrepareConfig, prepare  # noqa: E402
from folio.data.records import parquet_sources  # noqa: E402

REPOSITORY = "Skylion007/openwebtext"
REVISION = "refs/convert/parquet"  # the hub's conversion, to avoid running the repository's script
DOCUMENTS = 8_013_769
TOKENS = {"train": 9_035_582_198, "val": 4_434_897}  # nanoGPT's counts, with an end-of-text token after each document
SEED = 2357  # as in nanoGPT's train_test_split


@dataclass(frozen=True)
class OpenWebTextConfig(PrepareConfig):
    name: str = "openwebtext"  # folder under data_dir
    # --- the text ---
    source: str | None = None  # a folder of parquet files with a column "text"; None: the Hugging Face hub
    limit: Annotated[int, Ge(2)] | None = None  # use only the first N documents; None: all
    tokenizer: str = "gpt2"  # as in nanoGPT; the expected totals are for this tokenizer
    val_fraction: Fraction = 0.0005  # share for validation, as in train_test_split(test_size=0.0005, seed=2357)


def validation_rows(rows: int, test_size: float) -> np.ndarray:
    """Return the sorted rows of the test split of datasets.Dataset.train_test_split(test_size, seed=2357)."""
    return np.sort(np.random.default_rng(SEED).permutation(rows)[: math.ceil(test_size * rows)])


def main(cfg: OpenWebTextConfig) -> None:
    settings.check(cfg)
    cfg = cfg.replace(tokenizer=find_run(cfg.tokenizer))
    files = hub_parquet(cfg.source or REPOSITORY, revision=None if cfg.source else REVISION)
    inputs, rows = parquet_sources(files, "text", cfg.limit)
    val = validation_rows(rows, cfg.val_fraction)
    folder = prepare(cfg, Corpus(inputs, split_rule=split_by_number(val)), cfg.name)
    try:
        tokens = read_json(folder / "report.json")["tokens"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{folder / 'report.json'} is damaged ({error}); prepare it again: --overwrite=True") from None
    is_full = rows == DOCUMENTS and cfg.tokenizer == "gpt2" and not cfg.dedup
    if is_full and tokens != TOKENS:
        raise UserError(f"{folder} has {tokens} tokens, not nanoGPT's {TOKENS}: the source has changed")


if __name__ == "__main__":
    settings.run_script(main, OpenWebTextConfig, needs_output=False)
