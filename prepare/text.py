"""Prepare your text as a data set: files, folders, "patterns*", or - for standard input.

    python prepare/text.py novel.txt
    python prepare/text.py *.txt
    python prepare/text.py letters/ diaries/ --name=mine --tokenizer=gpt2
    python prepare/text.py "crawl/*.jsonl.zst" --name=crawl --tokenizer=bpe --vocab_size=16384 --field=content

Reads text (.txt, .md, .srt, .vtt) and records (.jsonl, .json, .csv, .tsv, .parquet), also as .gz, .zst or .xz.
The tail of a single text is used for validation. Several documents (files, records) are assigned to splits by a hash
of their content. What was left out is printed, and counted in report.json.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio.base import settings  # noqa: E402
from folio.base.settings import line_breaks  # noqa: E402
from folio.checkpoints.find_runs import find_run  # noqa: E402
from folio.data.blocks import Field  # noqa: E402
from folio.data.corpus import Corpus  # noqa: E402
from folio.data.inputs import TEXT_FORMATS, Format, find_sources, saved_stdin  # noqa: E402
from folio.data.prepare import PrepareConfig, default_name, prepare  # noqa: E402
from folio.data.tokenizer import unify_line_ends  # noqa: E402


@dataclass(frozen=True)
class TextConfig(PrepareConfig):
    # --- the text ---
    inputs: tuple[str, ...] = ()  # files, folders, patterns, or - for standard input
    field: str = "text"  # field of JSON lines, or column of tables, that contains the text
    split_on: str | None = None  # separator of documents in text files; \n is a line break; None: one document per file
    format: Format | None = None  # format of all files; None: by their content and their names
    keep_line_ends: bool = False  # True: keep \r\n and \r; by default, they become \n

    def problems(self) -> list[tuple[str, str]]:
        problems = super().problems()
        if not self.inputs:
            problems.append(("inputs", "name a file, a folder, a pattern, or - for standard input"))
        if self.split_on == "":
            problems.append(("split_on", "it must not be empty; for one document per file, leave it out"))
        return problems

    @property
    def separator(self) -> str | None:
        """The separator of documents, with the line ends of the text."""
        separator = self.split_on and line_breaks(self.split_on)
        return separator if self.keep_line_ends or not separator else unify_line_ends(separator)

    def unused(self, corpus: Corpus) -> Iterator[tuple[str, str]]:
        formats = {source.format for source in corpus.sources}
        yield from super().unused(corpus)
        if formats.isdisjoint(TEXT_FORMATS):
            yield "split_on", "no file is text without records"
        if formats <= {*TEXT_FORMATS}:
            yield "field", "no file has records with fields"


def main(cfg: TextConfig) -> None:
    settings.check(cfg)
    cfg = cfg.replace(tokenizer=find_run(cfg.tokenizer))
    with saved_stdin(cfg.inputs) as paths:
        inputs = find_sources(paths, cfg.format, keep_line_ends=cfg.keep_line_ends)
        corpus = Corpus(inputs, Field(cfg.field), split_on=cfg.separator)
        prepare(cfg, corpus, cfg.name or default_name(cfg.inputs))


if __name__ == "__main__":
    settings.run_script(main, TextConfig, needs_output=False)
