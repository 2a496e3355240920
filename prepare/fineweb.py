"""FineWeb-Edu's sample of 10 billion tokens (Penedo et al. 2024) in GPT-2's tokens.

    python prepare/fineweb.py --limit=20000
    python prepare/fineweb.py
    python prepare/fineweb.py --ready=True --shards=9

Its parquet files take some 27 GB in Hugging Face's cache, and the shards 20 GB. --ready=True fetches shards of 100
million tokens that others have tokenized, in llm.c's format, and trains on them as they are.
"""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError, configurator  # noqa: E402
from folio.corpus import Corpus, parquet_sources  # noqa: E402
from folio.fetch import hub_files, hub_parquet  # noqa: E402
from folio.prepare import PrepareConfig, prepare  # noqa: E402
from folio.shards import open_dataset  # noqa: E402

REPOSITORY, SUBSET = "HuggingFaceFW/fineweb-edu", "sample-10BT"
READY = "kjj0/finewebedu10B-gpt2"  # of modded-nanogpt


@dataclass(frozen=True)
class FineWebConfig(PrepareConfig):
    name: str = "fineweb"  # folder under data_dir
    # --- the text ---
    source: str | None = None  # a folder of parquet files with a column "text"; None: the Hugging Face hub
    limit: int | None = None  # documents to take, from the first; None: all
    ready: bool = False  # True: fetch ready-made shards in place of text
    shards: int | None = None  # training shards to fetch with --ready=True; None: all
    tokenizer: str = "gpt2"  # as above
    val_fraction: float | None = 0.001  # of the documents, for validation

    def problems(self) -> list[tuple[str, str]]:
        found = super().problems()
        for name in ("limit", "shards"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                found.append((name, "it must be at least 1, or None"))
        return found


def main(cfg: FineWebConfig) -> None:
    configurator.check(cfg)
    if cfg.ready:
        fetch_ready(cfg, cfg.data_folder / cfg.name)
        return
    sources, _ = parquet_sources(
        hub_parquet(cfg.source or REPOSITORY, None if cfg.source else SUBSET), "text", cfg.limit
    )
    prepare(cfg, Corpus(sources, limit=cfg.limit), cfg.name)


def fetch_ready(cfg: FineWebConfig, folder: Path) -> None:
    """Fetch the validation shard and the first training shards into the data set's folder, whole or not at all."""
    if folder.exists() and not cfg.overwrite:
        raise UserError(f"{folder} is there already: give this one another --name, or say --overwrite=True")
    part = folder.with_name(f".{folder.name}.part")
    wanted = ["*_val_*.bin", "*_train_*.bin"]
    if cfg.shards:
        wanted = ["*_val_*.bin", *(f"*_train_{k:06d}.bin" for k in range(1, cfg.shards + 1))]
    hub_files(READY, wanted, part)
    shutil.rmtree(part / ".cache", ignore_errors=True)  # the hub's notes on the downloads
    data = open_dataset(part)
    if cfg.overwrite:
        shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    counts = [sum(map(len, split)) for split in (data.train, data.val)]
    print(
        f"{folder}: {counts[0]:,} training and {counts[1]:,} validation tokens of GPT-2, in "
        f"{len(data.train)} + {len(data.val)} shards"
    )


if __name__ == "__main__":
    configurator.run_script(main, FineWebConfig)
