"""FineWeb-Edu's sample of 10 billion tokens (Penedo et al. 2024), tokenized with GPT-2's tokenizer.

    python prepare/fineweb.py --limit=20000
    python prepare/fineweb.py
    python prepare/fineweb.py --ready=True --shards=9

The parquet files take about 27 GB in Hugging Face's cache, and the shards 20 GB. --ready=True downloads pre-tokenized
shards of 100 million tokens in llm.c's format, which train.py reads directly.
"""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError  # noqa: E402
from folio.base import settings  # noqa: E402
from folio.base.download import hub_files, hub_parquet  # noqa: E402
from folio.base.files import replace_folder, settle_folder  # noqa: E402
from folio.base.settings import PositiveInt  # noqa: E402
from folio.checkpoints.find_runs import find_run  # noqa: E402
from folio.data.corpus import Corpus  # noqa: E402
from folio.data.prepare import Fraction, PrepareConfig, prepare  # noqa: E402
from folio.data.records import parquet_sources  # noqa: E402
from folio.data.shards import data_root, open_dataset  # noqa: E402

REPOSITORY, SUBSET = "HuggingFaceFW/fineweb-edu", "sample-10BT"
READY_REPOSITORY = "kjj0/finewebedu10B-gpt2"  # the shards of modded-nanogpt


@dataclass(frozen=True)
class FineWebConfig(PrepareConfig):
    name: str = "fineweb"  # folder under data_dir
    # --- the text ---
    source: str | None = None  # a folder of parquet files with a column "text"; None: the Hugging Face hub
    limit: PositiveInt | None = None  # use only the first N documents; None: all
    ready: bool = False  # True: download pre-tokenized shards
    shards: PositiveInt | None = None  # training shards to download with --ready=True; None: all
    tokenizer: str = "gpt2"  # char, byte, gpt2, bpe (trained on this text), or the folder of a data set or a run
    val_fraction: Fraction | None = 0.001  # share of the documents for validation


def main(cfg: FineWebConfig) -> None:
    settings.check(cfg)
    cfg = cfg.replace(tokenizer=find_run(cfg.tokenizer))
    if cfg.ready:
        download_shards(cfg)
        return
    files = hub_parquet(cfg.source or REPOSITORY, subset=None if cfg.source else SUBSET)
    inputs, _ = parquet_sources(files, "text", cfg.limit)
    prepare(cfg, Corpus(inputs), cfg.name)


def download_shards(cfg: FineWebConfig) -> None:
    """Download the validation shard and the first training shards to the data set's folder, atomically."""
    folder = data_root(cfg.data_dir) / cfg.name
    settle_folder(folder)
    if folder.exists() and not cfg.overwrite:
        raise UserError(f"{folder} already exists: set another --name, or --overwrite=True")
    part = folder.with_name(f".{folder.name}.part")
    training = ["*_train_*.bin"]
    if cfg.shards:
        training = [f"*_train_{k:06d}.bin" for k in range(1, cfg.shards + 1)]
    hub_files(READY_REPOSITORY, ["*_val_*.bin", *training], part)
    shutil.rmtree(part / ".cache", ignore_errors=True)  # the hub's metadata of the downloads
    data = open_dataset(part)
    replace_folder(part, folder)
    train_tokens, val_tokens = (sum(map(len, split)) for split in (data.train, data.val))
    print(
        f"{folder}: {train_tokens:,} training and {val_tokens:,} validation tokens of GPT-2, in "
        f"{len(data.train)} + {len(data.val)} shards"
    )


if __name__ == "__main__":
    settings.run_script(main, FineWebConfig, needs_output=False)
