"""Prepare your text as a data set: files, folders, "patterns*", or - for standard input.

    python prepare/text.py novel.txt
    python prepare/text.py *.txt
    python prepare/text.py letters/ diaries/ --name=mine --tokenizer=gpt2
    python prepare/text.py "crawl/*.jsonl.zst" --name=crawl --tokenizer=bpe --vocab_size=16384 --field=content

Reads .txt, .md, .jsonl, .csv (also compressed as .gz or .zst) and .parquet. The tail of a single text is
used for validation. Several documents (files, JSON lines, rows) are assigned to splits by a hash of their content.
"""

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError  # noqa: E402
from folio.base import settings  # noqa: E402
from folio.base.settings import line_breaks  # noqa: E402
from folio.checkpoints.find_runs import resolve  # noqa: E402
from folio.data.corpus import Corpus, Format, find_sources  # noqa: E402
from folio.data.prepare import PrepareConfig, default_name, prepare  # noqa: E402


@dataclass(frozen=True)
class TextConfig(PrepareConfig):
    # --- the text ---
    inputs: tuple[str, ...] = ()  # files, folders, patterns, or - for standard input
    field: str = "text"  # field of JSON lines, or column of tables, that contains the text
    split_on: str | None = None  # separator of documents in text files; \n is a line break; None: one document per file
    format: Format | None = None  # format of all files; None: by their suffix, otherwise text

    def problems(self) -> list[tuple[str, str]]:
        problems = super().problems()
        if not self.inputs:
            problems.append(("inputs", "name a file, a folder, a pattern, or - for standard input"))
        if self.split_on == "":
            problems.append(("split_on", "it must not be empty; for one document per file, leave it out"))
        return problems


def main(cfg: TextConfig) -> None:
    settings.check(cfg)
    cfg = cfg.replace(tokenizer=resolve(cfg.tokenizer))
    with tempfile.TemporaryDirectory() as folder:
        inputs = [str(save_stdin(Path(folder), cfg.format)) if name == "-" else name for name in cfg.inputs]
        split_on = cfg.split_on and line_breaks(cfg.split_on)
        corpus = Corpus(find_sources(inputs, cfg.format), cfg.field, split_on)
        prepare(cfg, corpus, cfg.name or default_name(cfg.inputs))


def save_stdin(folder: Path, format: Format | None) -> Path:
    """Save standard input to a file, because a corpus is read several times. Raises UserError if the disk is full."""
    suffix = "txt" if format in (None, "text") else format
    path = folder / f"standard-input.{suffix}"
    try:
        with open(path, "wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
    except OSError as error:
        raise UserError(
            f"standard input could not be saved in {folder} ({error.strerror}); set TMPDIR to a folder with more space"
        ) from None
    return path


if __name__ == "__main__":
    settings.run_script(main, TextConfig, needs_output=False)
