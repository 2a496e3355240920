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
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from folio import configurator  # noqa: E402
from folio.bitext import (  # noqa: E402
    TranslationDocument,
    hub_subset,
    language_columns,
    language_of,
    language_problem,
    read_aligned,
    read_table,
)
from folio.blocks import CorpusError  # noqa: E402
from folio.configurator import NonEmptyStr, NonNegativeInt, PositiveInt, comma_separated  # noqa: E402
from folio.corpus import COMPRESSIONS, Corpus, Source, find_sources  # noqa: E402
from folio.dataset_builder import SplitRule, split_by_number  # noqa: E402
from folio.fetch import hub_parquet  # noqa: E402
from folio.pairs import HELD_OUT, Texts, pairs_file, read_parquet, write_pairs  # noqa: E402
from folio.phrases import LANGUAGES, held_out_pairs, training_pairs  # noqa: E402
from folio.prepare import PrepareConfig, VocabSize, default_name, prepare  # noqa: E402

HUB = ("opus-100", "tatoeba")


@dataclass(frozen=True)
class TranslationConfig(PrepareConfig):
    # --- the texts ---
    inputs: tuple[str, ...] = ()  # .tsv or .jsonl files, or two line-aligned files (also .gz or .zst); none: phrases
    source: NonEmptyStr | None = None  # opus-100, tatoeba, or a folder of parquet files, instead of inputs
    languages: NonEmptyStr | None = None  # from,to; for phrases two or more; None: as the names say, or all of phrases
    limit: PositiveInt | None = None  # pairs to take from --source, from the first one; None: all
    # --- phrases ---
    pairs: PositiveInt = 400_000  # for training
    held_out: PositiveInt = 2_000  # dates and numbers for validation; each is translated into every language
    seed: NonNegativeInt = 1337  # which dates and numbers are drawn, and between which languages
    # --- the tokenizer ---
    tokenizer: str = "bpe"  # char, byte, gpt2, bpe (trained on these texts), or the folder of a data set or a run
    vocab_size: VocabSize | None = None  # number of tokens of a bpe; None: 512 for phrases, otherwise 8,192

    def problems(self) -> list[tuple[str, str]]:
        problems = super().problems()
        if self.inputs and self.source:
            problems.append(("source", "it replaces the input files; give only one of them"))
        if self.limit and not self.source:
            problems.append(("limit", "it is for --source; for phrases, set --pairs"))
        codes = self.codes
        if unknown := list(filter(None, map(language_problem, codes))):
            problems.append(("languages", unknown[0]))
        elif self.is_phrases and (other := [code for code in codes if code not in LANGUAGES]):
            problems.append(("languages", f"there are no phrases in {other[0]!r}, only in {', '.join(LANGUAGES)}"))
        elif self.languages and (len(codes) < 2 or len(set(codes)) < len(codes)):
            problems.append(("languages", "name two different languages, separated by a comma"))
        elif not self.is_phrases and len(codes) > 2:
            problems.append(("languages", "name two: your texts are translated from the first into the second one"))
        if self.source and not self.languages:
            problems.append(("languages", "name the two languages, as in --languages=en,de"))
        return problems

    @property
    def is_phrases(self) -> bool:
        return not self.inputs and not self.source

    @property
    def codes(self) -> list[str]:
        """The languages that the setting names."""
        return comma_separated(self.languages or "")


def main(cfg: TranslationConfig) -> None:
    configurator.check(cfg)
    cfg = cfg.replace(vocab_size=cfg.vocab_size or (512 if cfg.is_phrases else 8192))
    if cfg.is_phrases:
        prepare_phrases(cfg)
    elif cfg.source:
        prepare_source(cfg)
    else:
        prepare_files(cfg)


def prepare_phrases(cfg: TranslationConfig) -> None:
    """Prepare phrases as a data set, with the pairs for validation and their kinds in a file beside the shards."""
    languages = cfg.codes or LANGUAGES
    drawn = (languages, cfg.val_fraction or 0.1, cfg.seed)
    validation = list(held_out_pairs(cfg.held_out, *drawn))
    pairs = itertools.chain(validation, training_pairs(cfg.pairs, *drawn))
    made_of = [languages, cfg.pairs, cfg.held_out, cfg.seed, version("babel"), version("num2words")]
    split_rule = split_by_number(np.arange(len(validation)))
    folder = prepare_objects(cfg, pairs, "translation", made_of, None, split_rule)
    write_pairs(folder / HELD_OUT, validation)


def prepare_source(cfg: TranslationConfig) -> None:
    """Prepare a data set of the hub, or a folder of its files."""
    languages = (cfg.codes[0], cfg.codes[1])
    if cfg.source in HUB:
        repository, subset = hub_subset(cfg.source, languages)
        name = f"{cfg.source}-{'-'.join(languages)}"
    else:
        repository, subset, name = cfg.source, None, default_name([cfg.source])
    texts = read_parquet(hub_parquet(repository, subset), partial(language_columns, languages), cfg.limit)
    cfg = cfg.replace(val_fraction=cfg.val_fraction or 0.01)
    prepare_objects(cfg, by_language(texts, languages), name, [repository, subset, cfg.limit], languages)


def prepare_files(cfg: TranslationConfig) -> None:
    """Prepare files by their suffix: JSON lines, tables, or else two line-aligned files. Raises UserError."""
    suffixes = [suffix_of(name) for name in cfg.inputs]
    languages = (cfg.codes[0], cfg.codes[1]) if cfg.languages else None
    if set(suffixes) == {".jsonl"}:
        corpus = Corpus(find_sources(cfg.inputs, "jsonl"), document=TranslationDocument(languages))
        prepare(cfg, corpus, cfg.name or default_name(cfg.inputs), masked=True)
        return
    sources = find_sources(cfg.inputs, "text")
    if set(suffixes) == {".tsv"}:
        if languages is None:
            raise CorpusError(f"{cfg.inputs[0]}: name the languages of its columns, as in --languages=en,de")
        texts = itertools.chain.from_iterable(map(read_table, sources))
        name = cfg.name or default_name(cfg.inputs)
    elif len(sources) == 2 and not {".jsonl", ".tsv", ".csv", ".parquet"} & {*suffixes}:
        languages = languages or languages_of(*sources)
        texts, name = read_aligned(*sources), default_name(cfg.inputs[:1])
    else:
        raise CorpusError(
            f"{', '.join(cfg.inputs)}: give .jsonl files, .tsv files, or two files with one sentence per line"
        )
    made_of = [source.fingerprint() for source in sources]
    prepare_objects(cfg, by_language(texts, languages), name, made_of, languages)


def suffix_of(name: str) -> str:
    """The suffix of a file's name, without that of a compressed one."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes if suffix.lower() not in COMPRESSIONS]
    return suffixes[-1] if suffixes else ""


def languages_of(first: Source, second: Source) -> Texts:
    """The languages that the names of two files end with, as corpus.en and corpus.de. Raises CorpusError."""
    codes = [language_of(source.path) for source in (first, second)]
    if None in codes or codes[0] == codes[1]:
        raise CorpusError(f"{first.name}, {second.name}: name their languages, as in --languages=en,de")
    return codes[0], codes[1]


def by_language(texts: Iterable[Texts], languages: Texts) -> Iterator[dict[str, str]]:
    """The texts as JSON objects."""
    return (dict(zip(languages, pair, strict=True)) for pair in texts)


def prepare_objects(
    cfg: TranslationConfig,
    objects: Iterable[dict[str, Any]],
    name: str,
    made_of: list[Any],
    languages: Texts | None,
    split_rule: SplitRule | None = None,
) -> Path:
    """Prepare a data set from JSON objects. Returns its folder.

    made_of: what the objects follow from; the same value means the same data set.
    """
    with pairs_file(objects, name, [made_of, languages]) as sources:
        corpus = Corpus(sources, document=TranslationDocument(languages))
        config_file = f"config/{'translate' if cfg.is_phrases else 'shakespeare_char'}.py"
        return prepare(cfg, corpus, cfg.name or name, split_rule, masked=True, config_file=config_file)


if __name__ == "__main__":
    configurator.run_script(main, TranslationConfig)
