"""Translations as a data set in which only the answers count: "en: Tuesday, March 3, 2026 | de:" and its completion.

    python prepare/translation.py
    python prepare/translation.py sentences.tsv --languages=en,de
    python prepare/translation.py corpus.en corpus.de
    python prepare/translation.py pairs.jsonl --languages=en,de
    python prepare/translation.py --source=opus-100 --languages=en,de --limit=100000

Without input, the texts are phrases of dates, numbers, and units in six languages, from CLDR and num2words: equal parts
of full dates with weekday, cardinals from 0 to 999,999 in words, ordinals to 9,999 in words, and numbers to 999.99 with
a unit. A tenth of the dates and numbers are held out, in all languages at once.

Your own texts are translated from the first of two languages into the second one: the columns of a .tsv file, two files
with one sentence per line, or JSON lines {"en": ..., "de": ...} or {"prompt": ..., "completion": ...}. --source is
opus-100 or tatoeba on the Hugging Face hub, or a folder with such parquet files.
"""

import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio.base import settings  # noqa: E402
from folio.base.download import hub_parquet  # noqa: E402
from folio.base.settings import NonEmptyStr, NonNegativeInt, PositiveInt, comma_separated  # noqa: E402
from folio.checkpoints.find_runs import resolve  # noqa: E402
from folio.data.blocks import CorpusError  # noqa: E402
from folio.data.corpus import COMPRESSIONS, Source, find_sources  # noqa: E402
from folio.data.prepare import VocabSize, default_name  # noqa: E402
from folio.data.sources.bitext import (  # noqa: E402
    hub_subset,
    language_columns,
    language_of,
    language_problem,
    read_aligned,
    read_table,
    translation_pair,
)
from folio.data.sources.pairs import Texts  # noqa: E402
from folio.data.sources.phrases import LANGUAGES, held_out_pairs, training_pairs  # noqa: E402
from folio.data.sources.prepare_pairs import TextPairsConfig, prepare_pairs, read_json_lines, read_parquet  # noqa: E402

HUB = ("opus-100", "tatoeba")
LEAST_HELD_OUT, MOST_HELD_OUT = 0.01, 0.9  # of the dates and numbers, so that both splits have some of each kind


@dataclass(frozen=True)
class TranslationConfig(TextPairsConfig):
    config_file = "config/translate.py"

    # --- the texts ---
    inputs: tuple[str, ...] = ()  # .tsv or .jsonl files, or two line-aligned files (also .gz or .zst); none: phrases
    source: NonEmptyStr | None = None  # opus-100, tatoeba, or a folder of parquet files, instead of inputs
    languages: NonEmptyStr | None = None  # from,to; for phrases two or more; None: as the names say, or all of phrases
    seed: NonNegativeInt = 1337  # which pairs are for validation, and which phrases are drawn
    # --- phrases ---
    pairs: PositiveInt = 400_000  # for training
    held_out: PositiveInt = 2_000  # dates and numbers for validation; each is translated into every language
    # --- the tokenizer ---
    vocab_size: VocabSize | None = None  # number of tokens of a bpe; None: 512 for phrases, otherwise 8,192

    def problems(self) -> list[tuple[str, str]]:
        problems = super().problems()
        if self.is_embedded and self.val_fraction and not LEAST_HELD_OUT <= self.val_fraction <= MOST_HELD_OUT:
            problems.append(("val_fraction", f"for phrases, use {LEAST_HELD_OUT} to {MOST_HELD_OUT}"))
        codes = self.codes
        if unknown := list(filter(None, map(language_problem, codes))):
            problems.append(("languages", unknown[0]))
        elif self.is_embedded and (other := [code for code in codes if code not in LANGUAGES]):
            problems.append(("languages", f"there are no phrases in {other[0]!r}, only in {', '.join(LANGUAGES)}"))
        elif self.languages and (len(codes) < 2 or len(set(codes)) < len(codes)):
            problems.append(("languages", "name two different languages, separated by a comma"))
        elif not self.is_embedded and len(codes) > 2:
            problems.append(("languages", "name two: your texts are translated from the first into the second one"))
        if self.source and not self.languages:
            problems.append(("languages", "name the two languages, as in --languages=en,de"))
        return problems

    @property
    def codes(self) -> list[str]:
        """The languages that the setting names."""
        return comma_separated(self.languages or "")


def main(cfg: TranslationConfig) -> None:
    settings.check(cfg)
    cfg = cfg.replace(tokenizer=resolve(cfg.tokenizer))
    if cfg.is_embedded:
        prepare_phrases(cfg)
    elif cfg.source:
        prepare_source(cfg)
    else:
        prepare_files(cfg)


def prepare_phrases(cfg: TranslationConfig) -> None:
    """Prepare phrases as a data set."""
    cfg = cfg.replace(val_fraction=cfg.val_fraction or 0.1, vocab_size=cfg.vocab_size or 512)
    languages = cfg.codes or LANGUAGES
    drawn = (languages, cfg.val_fraction, cfg.seed)
    validation = list(held_out_pairs(cfg.held_out, *drawn))
    pairs = itertools.chain(validation, training_pairs(cfg.pairs, *drawn))
    prepare_pairs(cfg, pairs, cfg.name or "translation", [], len(validation))


def prepare_source(cfg: TranslationConfig) -> None:
    """Prepare a data set of the hub, or a folder of its files. Raises UserError."""
    languages = (cfg.codes[0], cfg.codes[1])
    if cfg.source in HUB:
        repository, subset = hub_subset(cfg.source, languages)
        name = f"{cfg.source}-{'-'.join(languages)}"
    else:
        repository, subset, name = cfg.source, None, default_name([cfg.source])
    texts = read_parquet(hub_parquet(repository, subset), partial(language_columns, languages))
    pairs = pairs_of(itertools.islice(texts, cfg.limit), languages)
    prepare_texts(cfg, pairs, cfg.name or name, [], 0.01)


def prepare_files(cfg: TranslationConfig) -> None:
    """Prepare files by their suffixes: JSON lines, tables, or else two line-aligned files. Raises UserError."""
    languages = (cfg.codes[0], cfg.codes[1]) if cfg.languages else None
    sources = find_sources(cfg.inputs, "text")
    suffixes = {suffix_of(source.path) for source in sources}
    inputs = cfg.inputs
    if suffixes == {".jsonl"}:
        pairs = read_json_lines(sources, partial(translation_pair, languages))
    elif suffixes == {".tsv"}:
        if languages is None:
            raise CorpusError(f"{sources[0].name}: name the languages of its columns, as in --languages=en,de")
        pairs = pairs_of(itertools.chain.from_iterable(map(read_table, sources)), languages)
    elif len(sources) == 2 and not {".jsonl", ".tsv", ".csv", ".parquet"} & suffixes:
        languages = languages_of(sources, languages)
        pairs = pairs_of(read_aligned(*sources), languages)
        inputs = inputs[:1]
    else:
        raise CorpusError(
            f"{', '.join(cfg.inputs)}: give .jsonl files, .tsv files, or two files with one sentence per line"
        )
    prepare_texts(cfg, pairs, cfg.name or default_name(inputs), sources, 0.1)


def suffix_of(path: Path) -> str:
    """The suffix of a file's name, without that of a compressed one."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in COMPRESSIONS]
    return suffixes[-1] if suffixes else ""


def languages_of(sources: list[Source], languages: Texts | None) -> Texts:
    """The languages of two files: those that their names end with, as corpus.en and corpus.de, or those that the user
    gave. Raises CorpusError if there are none, or if the names are in the other order.
    """
    named = tuple(language_of(source.path) for source in sources)
    names = ", ".join(source.name for source in sources)
    if languages is None and (None in named or named[0] == named[1]):
        raise CorpusError(f"{names}: name their languages, as in --languages=en,de")
    if languages is not None and named == languages[::-1]:
        raise CorpusError(f"{names}: give them in the order of --languages={','.join(languages)}")
    return languages or named


def pairs_of(texts: Iterable[Texts], languages: Texts) -> Iterator[dict[str, Any] | None]:
    """The texts as prompts and completions."""
    return (translation_pair(languages, dict(zip(languages, pair, strict=True))) for pair in texts)


def prepare_texts(
    cfg: TranslationConfig,
    pairs: Iterable[dict[str, Any] | None],
    name: str,
    sources: list[Source],
    val_fraction: float,
) -> None:
    """Prepare the user's texts as a data set."""
    cfg = cfg.replace(val_fraction=cfg.val_fraction or val_fraction, vocab_size=cfg.vocab_size or 8192)
    prepare_pairs(cfg, pairs, name, sources)


if __name__ == "__main__":
    settings.run_script(main, TranslationConfig)
