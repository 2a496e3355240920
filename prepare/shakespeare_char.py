"""Tiny Shakespeare, one token per character: the first 90 % for training, the rest for validation.

    python prepare/shakespeare_char.py

The data set has 1,003,854 training and 111,540 validation tokens, and a vocabulary of 65 characters.
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
class ShakespeareCharConfig(PrepareConfig):
    config_file = "config/shakespeare_char.py"

    name: str = "shakespeare_char"  # folder under data_dir


def main(cfg: ShakespeareCharConfig) -> None:
    cfg = cfg.replace(tokenizer=find_run(cfg.tokenizer))
    prepare(cfg, Corpus(find_sources([str(tiny_shakespeare())])), cfg.name)


if __name__ == "__main__":
    settings.run_script(main, ShakespeareCharConfig, needs_output=False)
