"""Translations as a data set in which only the answers count: "en: Tuesday, March 3, 2026 | de:" and its completion.

    python prepare/translation.py

Without input, the texts are phrases of dates, numbers, and units in six languages, from CLDR and num2words: equal parts
of full dates with weekday, cardinals from 0 to 999,999 in words, ordinals to 9,999 in words, and numbers to 999.99 with
a unit. A tenth of the dates and numbers are held out, in all languages at once.
"""

import itertools
import os
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from folio import configurator  # noqa: E402
from folio.configurator import NonNegativeInt, PositiveInt, comma_separated  # noqa: E402
from folio.corpus import Corpus, find_sources  # noqa: E402
from folio.dataset_builder import split_by_number  # noqa: E402
from folio.pairs import HELD_OUT, pair_segments, write_pairs  # noqa: E402
from folio.phrases import LANGUAGES, held_out_pairs, training_pairs  # noqa: E402
from folio.prepare import PrepareConfig, VocabSize, prepare  # noqa: E402


@dataclass(frozen=True)
class TranslationConfig(PrepareConfig):
    # --- the texts ---
    languages: str = ",".join(LANGUAGES)  # two or more of these
    # --- phrases ---
    pairs: PositiveInt = 400_000  # for training
    held_out: PositiveInt = 2_000  # dates and numbers for validation; each is translated into every language
    seed: NonNegativeInt = 1337  # which dates and numbers are drawn, and between which languages
    # --- the tokenizer ---
    tokenizer: str = "bpe"  # char, byte, gpt2, bpe (trained on these texts), or the folder of a data set or a run
    vocab_size: VocabSize = 512  # number of tokens of a bpe

    def problems(self) -> list[tuple[str, str]]:
        problems = super().problems()
        languages = comma_separated(self.languages)
        if unknown := [language for language in languages if language not in LANGUAGES]:
            problems.append(("languages", f"there are no phrases in {unknown[0]!r}, only in {', '.join(LANGUAGES)}"))
        elif len(languages) < 2 or len(set(languages)) < len(languages):
            problems.append(("languages", "name two or more different languages, separated by commas"))
        return problems


def main(cfg: TranslationConfig) -> None:
    configurator.check(cfg)
    prepare_phrases(cfg, comma_separated(cfg.languages))


def prepare_phrases(cfg: TranslationConfig, languages: list[str]) -> None:
    """Prepare phrases as a data set, with the pairs for validation and their kinds in a file beside the shards."""
    drawn = (languages, cfg.val_fraction or 0.1, cfg.seed)
    validation = list(held_out_pairs(cfg.held_out, *drawn))
    versions = "-".join(f"{package}-{version(package)}" for package in ("babel", "num2words"))
    name = f"phrases-{'-'.join(languages)}-{cfg.pairs}-{cfg.held_out}-{cfg.seed}-{versions}.jsonl"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        write_pairs(path, itertools.chain(validation, training_pairs(cfg.pairs, *drawn)))
        os.utime(path, (0, 0))  # so that the same phrases are recognized as the same file
        corpus = Corpus(find_sources([str(path)]), document=pair_segments)
        split_rule = split_by_number(np.arange(len(validation)))
        prepared = prepare(cfg, corpus, cfg.name or "translation", split_rule, masked=True)
    write_pairs(prepared / HELD_OUT, validation)


if __name__ == "__main__":
    configurator.run_script(main, TranslationConfig)
