"""Tiny Shakespeare, tokenized with GPT-2's tokenizer: the first 90 % for training, the rest for validation.

    python prepare/shakespeare.py

The data set has 301,966 training and 36,059 validation tokens.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio.base import settings  # noqa: E402
from folio.checkpoints.find_runs import find_run  # noqa: E402
from folio.data.corpus import Corpus  # noqa: E402
from folio.data.inputs import find_sources  # noqa: E402
from folio.data.prepare import PrepareConfig, prepare  # noqa: E402
from folio.data.sources.shakespeare import tiny_shakespeare  # noqa: E402


@dataclass(frozen=True)
class ShakespeareConfig(PrepareConfig):
    name: str = "shakespeare"  # folder under data_dir
    tokenizer: str = "gpt2"  # char, byte, gpt2, bpe (trained on this text), or the folder of a data set or a run


def main(cfg: ShakespeareConfig) -> None:
    cfg = cfg.replace(tokenizer=find_run(cfg.tokenizer))
    prepare(cfg, Corpus(find_sources([str(tiny_shakespeare())])), cfg.name)


if __name__ == "__main__":
    settings.run_script(main, ShakespeareConfig, needs_output=False)
