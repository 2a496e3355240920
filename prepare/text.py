"""A data set out of your own text: files, folders, "patterns*", or - for standard input.

    python prepare/text.py novel.txt
    python prepare/text.py letters/*.txt
    python prepare/text.py letters/ diaries/ --name=mine --tokenizer=gpt2
    python prepare/text.py "crawl/*.jsonl.zst" --name=crawl --tokenizer=bpe --vocab_size=16384 --field=content

Read are .txt, .md, .jsonl, .csv (each also .gz or .zst) and .parquet. One text is divided at its tail; of many
documents (files, JSON lines, rows) each is for training or validation by what it says.
"""

import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError, configurator  # noqa: E402
from folio.configurator import line_breaks  # noqa: E402
from folio.corpus import Corpus, find_sources  # noqa: E402
from folio.prepare import PrepareConfig, default_name, prepare  # noqa: E402


@dataclass(frozen=True)
class TextConfig(PrepareConfig):
    # --- the text ---
    inputs: tuple[str, ...] = ()  # files, folders, patterns, or - for standard input
    field: str = "text"  # of a JSON line, or the column of a row, that holds the document
    split_on: str | None = None  # what divides text files into documents; \n is a line break; None: a file is one
    format: Literal["text", "jsonl", "csv", "parquet"] | None = None  # of the files; None: by their suffix, else text

    def problems(self) -> list[tuple[str, str]]:
        found = super().problems()
        if not self.inputs:
            found.append(("inputs", "name a file, a folder, a pattern, or - for standard input"))
        if self.split_on == "":
            found.append(("split_on", "it must not be empty; None takes each file as one document"))
        if self.inputs and not self.name and not self.common_name:
            found.append(("name", "several inputs need a --name for what they become"))
        return found

    @property
    def common_name(self) -> str:
        """What the data set is called after by default: its one input, or the folder of all; empty if there is none."""
        if len(self.inputs) > 1:
            try:
                return os.path.commonpath(self.inputs)
            except ValueError:  # absolute and relative paths
                return ""
        return "stdin" if self.inputs == ("-",) else self.inputs[0]


def main(cfg: TextConfig) -> None:
    configurator.check(cfg)
    with tempfile.TemporaryDirectory() as folder:
        inputs = [str(spooled(Path(folder), cfg.format)) if word == "-" else word for word in cfg.inputs]
        split_on = cfg.split_on and line_breaks(cfg.split_on)
        corpus = Corpus(find_sources(inputs, cfg.format), cfg.field, split_on)
        prepare(cfg, corpus, cfg.name or default_name(cfg.common_name))


def spooled(folder: Path, format: str | None) -> Path:
    """What comes on standard input, as a file, since it is read more than once."""
    path = folder / f"standard-input.{format if format and format != 'text' else 'txt'}"
    try:
        with open(path, "wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
    except OSError as error:
        raise UserError(f"standard input could not be kept in {folder} ({error.strerror}); set TMPDIR") from None
    return path


if __name__ == "__main__":
    configurator.run_script(main, TextConfig)
