"""Translations as a data set where only the completions are targets: "en: Tuesday, March 3, 2026 | de:" ...

    python prepare/translation.py
    python prepare/translation.py --languages=en,sv,nl
    python prepare/translation.py sentences.tsv --languages=en,de
    python prepare/translation.py corpus.en corpus.de
    python prepare/translation.py pairs.jsonl --languages=en,de
    python prepare/translation.py --source=opus-100 --languages=en,de --limit=100000

Without inputs, the texts are phrases in six languages, or in other --languages of CLDR and num2words: equal parts of
full dates with weekday, cardinals from 0 to 999,999 in words, ordinals to 9,999 in words, and numbers to 999.99 with a
unit. Phrases that a language lacks, or that are ambiguous, are left out, and a line says so. A tenth of the dates and
numbers are held out, in all languages.

Your texts are translated from the first of two languages to the second: the columns of a .tsv or .csv file, two files
with one sentence per line, or JSON {"en": ..., "de": ...} or {"prompt": ..., "completion": ...}. The sentence pairs of
Tatoeba and manythings.org are such tables. --source is opus-100 or tatoeba on the Hugging Face hub, or a folder with
such parquet files.
"""

import itertools
import os
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
from folio.checkpoints.find_runs import find_run  # noqa: E402
from folio.data.account import Account  # noqa: E402
from folio.data.blocks import read_record  # noqa: E402
from folio.data.corpus import Corpus, Documents  # noqa: E402
from folio.data.inputs import TEXT_FORMATS, CorpusError, Inputs, Source, find_sources, saved_stdin  # noqa: E402
from folio.data.prepare import Fraction, VocabSize, default_name  # noqa: E402
from folio.data.records import parquet_sources  # noqa: E402
from folio.data.sources.bitext import (  # noqa: E402
    detect_language,
    hub_subset,
    language_problem,
    read_aligned,
    translation_columns,
    translation_pair,
)
from folio.data.sources.pairs import Texts  # noqa: E402
from folio.data.sources.phrase_checks import check_languages, drop_ambiguous  # noqa: E402
from folio.data.sources.phrases import LANGUAGES, available_languages, held_out_pairs, training_pairs  # noqa: E402
from folio.data.sources.prepare_pairs import TextPairsConfig, prepare_pairs  # noqa: E402

HUB = ("opus-100", "tatoeba")
MIN_VAL_FRACTION, MAX_VAL_FRACTION = 0.01, 0.9  # for phrases, so that both splits have some of each kind


@dataclass(frozen=True)
class TranslationConfig(TextPairsConfig):
    config_file = "config/translate.py"

    # --- the texts ---
    inputs: tuple[str, ...] = ()  # tables, JSON, or parquet files, or two line-aligned files; none: phrases
    source: NonEmptyStr | None = None  # opus-100, tatoeba, or a folder of parquet files, instead of inputs
    languages: NonEmptyStr | None = None  # source,target; for phrases two or more; None: from file names, or all
    val_fraction: Fraction | None = None  # share for validation; None: 0.1, or 0.01 with --source
    seed: NonNegativeInt = 1337  # selects the pairs for validation, and the random phrases
    # --- phrases ---
    pairs: PositiveInt = 400_000  # number of training pairs
    held_out: PositiveInt = 2_000  # dates and numbers for validation, each translated to every language
    # --- the tokenizer ---
    vocab_size: VocabSize | None = None  # vocabulary size of a bpe; None: 512 for phrases, otherwise 8,192

    def problems(self) -> list[tuple[str, str]]:
        problems = super().problems()
        if self.is_embedded and self.val_fraction and not MIN_VAL_FRACTION <= self.val_fraction <= MAX_VAL_FRACTION:
            problems.append(("val_fraction", f"for phrases, use {MIN_VAL_FRACTION} to {MAX_VAL_FRACTION}"))
        codes = self.codes
        if unknown := list(filter(None, map(language_problem, codes))):
            problems.append(("languages", unknown[0]))
        elif self.is_embedded and (other := sorted({*codes} - {*available_languages()})):
            usable = ", ".join(available_languages())
            problems.append(("languages", f"there are no phrases in {other[0]!r}, only in {usable}"))
        elif self.languages and (len(codes) < 2 or len(set(codes)) < len(codes)):
            problems.append(("languages", "name two different languages, separated by a comma"))
        elif not self.is_embedded and len(codes) > 2:
            problems.append(("languages", "name two: your texts are translated from the first to the second"))
        if self.source and not self.languages:
            problems.append(("languages", "set the two languages, as in --languages=en,de"))
        return problems

    def unused(self, corpus: Documents) -> Iterator[tuple[str, str]]:
        yield from super().unused(corpus)
        if not self.is_embedded:
            yield "pairs", "it is for phrases"
            yield "held_out", "it is for phrases"

    @property
    def codes(self) -> list[str]:
        """The language codes in the setting."""
        return comma_separated(self.languages or "")


def main(cfg: TranslationConfig) -> None:
    settings.check(cfg)
    cfg = cfg.replace(tokenizer=find_run(cfg.tokenizer))
    if cfg.is_embedded:
        prepare_phrases(cfg)
    elif cfg.source:
        prepare_source(cfg)
    else:
        prepare_files(cfg)


def prepare_phrases(cfg: TranslationConfig) -> None:
    """Prepare phrases as a data set."""
    cfg = cfg.replace(val_fraction=cfg.val_fraction or 0.1, vocab_size=cfg.vocab_size or 512)
    coverage, left_out = check_languages(cfg.codes or LANGUAGES)
    print("\n".join(left_out), end="\n" if left_out else "")
    arguments = (coverage, cfg.val_fraction, cfg.seed)
    answers: dict[str, str] = {}
    validation = list(drop_ambiguous(held_out_pairs(cfg.held_out, *arguments), answers))
    pairs = itertools.chain(validation, drop_ambiguous(training_pairs(cfg.pairs, *arguments), answers))
    usable = sum(pair is not None for pair in validation)
    name = cfg.name or "translation"
    prepare_pairs(cfg, pairs, name, validation=usable, unused="whose prompt has another answer")


def prepare_source(cfg: TranslationConfig) -> None:
    """Prepare a data set from the hub or from a folder of parquet files. Raises UserError."""
    languages = (cfg.codes[0], cfg.codes[1])
    if cfg.source in HUB:
        repository, subset = hub_subset(cfg.source, languages)
        name = f"{cfg.source}-{'-'.join(languages)}"
    else:
        repository, subset, name = cfg.source, None, default_name([cfg.source])
    files = hub_parquet(repository, subset)
    inputs, _ = parquet_sources(files, limit=cfg.limit)
    prepare_records(cfg, inputs, languages, cfg.name or name, 0.01)


def prepare_files(cfg: TranslationConfig) -> None:
    """Prepare records, or two line-aligned files. Raises UserError."""
    with saved_stdin(cfg.inputs) as paths:
        prepare_paths(cfg, paths)


def prepare_paths(cfg: TranslationConfig, paths: list[str]) -> None:
    """Prepare the files of `prepare_files`. Raises UserError."""
    languages = (cfg.codes[0], cfg.codes[1]) if cfg.languages else None
    if len(paths) == 1 and os.path.isdir(paths[0]) and os.access(paths[0], os.R_OK):
        files = {detect_language(path): str(path) for path in sorted(Path(paths[0]).iterdir())}
        if len(files) == 2 and set(files) == {*(languages or files)} - {None}:  # two line-aligned files
            paths = [files[code] for code in languages or files]
    inputs = find_sources(paths, cfg.format, keep_line_ends=cfg.keep_line_ends, tables=len(paths) == 1)
    is_text = [source.format in TEXT_FORMATS for source in inputs.sources]
    if not any(is_text):
        prepare_records(cfg, inputs, languages, cfg.name or default_name(cfg.inputs), 0.1)
    elif is_text == [True, True]:
        inputs = find_sources([str(source.path) for source in inputs.sources], "text")  # lines are never subtitles
        languages, account = file_languages(inputs.sources, languages), inputs.account()
        records = (dict(zip(languages, pair, strict=True)) for pair in read_aligned(*inputs.sources, account))
        make = partial(translation_pair, languages)
        pairs = (read_record(record, make, cfg.keep_line_ends, account) for record in records)
        prepare_texts(cfg, pairs, cfg.name or default_name(cfg.inputs[:1]), inputs, 0.1, account)
    else:
        raise CorpusError(
            f"{', '.join(cfg.inputs)}: use tables, JSON, or parquet files, or two files with one sentence per line"
        )


def prepare_records(
    cfg: TranslationConfig, inputs: Inputs, languages: Texts | None, name: str, val_fraction: float
) -> None:
    """Prepare the pairs in tables, JSON, or parquet files. Raises UserError."""
    make, account = partial(translation_pair, languages), inputs.account()
    corpus = Corpus(inputs, make, name_columns=partial(translation_columns, languages))
    prepare_texts(cfg, corpus.documents(account), name, inputs, val_fraction, account)


def file_languages(sources: list[Source], languages: Texts | None) -> Texts:
    """Return the languages of two files from the setting, or from names such as corpus.en and corpus.de.

    Raises CorpusError if there are none, or if the names are in reverse order.
    """
    detected = tuple(detect_language(source.path) for source in sources)
    names = ", ".join(source.name for source in sources)
    if languages is None and (None in detected or detected[0] == detected[1]):
        raise CorpusError(f"{names}: set the languages, as in --languages=en,de")
    if languages is not None and detected == languages[::-1]:
        raise CorpusError(f"{names}: put them in the order of --languages={','.join(languages)}")
    return languages or detected


def prepare_texts(
    cfg: TranslationConfig,
    pairs: Iterable[dict[str, Any] | None],
    name: str,
    inputs: Inputs,
    val_fraction: float,
    account: Account,
) -> None:
    """Prepare the user's texts as a data set. account: receives what was read."""
    cfg = cfg.replace(val_fraction=cfg.val_fraction or val_fraction, vocab_size=cfg.vocab_size or 8192)
    prepare_pairs(cfg, pairs, name, inputs, account=account)


if __name__ == "__main__":
    settings.run_script(main, TranslationConfig, needs_output=False)
