"""Prompts and completions, or chats, as a data set for instruction finetuning, where only the answers are targets.

    python prepare/pairs.py pairs.jsonl
    python prepare/pairs.py chats.jsonl --name=chat --tokenizer=out-mine
    python prepare/pairs.py questions.tsv

A line of JSON is {"prompt": "...", "completion": "..."}, or {"messages": [{"role": "user", "content": "..."}, ...]},
which becomes "User: ...", a blank line, "Assistant: ...". A .tsv or .csv file has two columns, the prompt and the
completion, or a header with prompt and completion, question and answer, instruction and output (or response), input and
output, or source and target. The loss is computed over the completion, or over the assistant's messages, and the
end-of-text token after it. Other tokens are context.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError  # noqa: E402
from folio.base import settings  # noqa: E402
from folio.checkpoints.find_runs import resolve  # noqa: E402
from folio.data.blocks import Segments  # noqa: E402
from folio.data.corpus import JSON_LINES, Corpus, Documents, find_sources  # noqa: E402
from folio.data.prepare import PrepareConfig, default_name, prepare  # noqa: E402
from folio.data.sources.pairs import chat_segments, detect_prompt_format, pair_segments  # noqa: E402
from folio.data.sources.prepare_pairs import read_pair_tables  # noqa: E402

TABLES, JSON = {".tsv", ".csv"}, {".jsonl", ".ndjson", ".json", ""}  # suffixes
FORMATS = "JSON lines (.jsonl), or two columns (.tsv, .csv), also as .gz or .zst"


@dataclass(frozen=True)
class PairsConfig(PrepareConfig):
    # --- the pairs ---
    inputs: tuple[str, ...] = ()  # .jsonl, .tsv or .csv files (also .gz or .zst), folders of them, or patterns
    tokenizer: str = "gpt2"  # char, byte, gpt2, bpe, or the folder of the run to finetune

    def problems(self) -> list[tuple[str, str]]:
        problems = super().problems()
        if not self.inputs:
            problems.append(("inputs", f"name files of prompts and completions: {FORMATS}"))
        return problems


def segments(value: dict[str, Any]) -> Segments:
    """Return the segments of one pair or chat. Raises CorpusError."""
    return chat_segments(value["messages"]) if "messages" in value else pair_segments(value)


def main(cfg: PairsConfig) -> None:
    settings.check(cfg)
    cfg = cfg.replace(tokenizer=resolve(cfg.tokenizer))
    sources = find_sources(cfg.inputs, "jsonl", (*JSON_LINES, *sorted(TABLES)))
    kinds = {source.suffix for source in sources}
    if others := kinds - {*TABLES, *JSON}:
        raise UserError(f"{' '.join(cfg.inputs)}: {min(others)} is not a supported format for pairs; use {FORMATS}")
    if TABLES & kinds and not kinds <= TABLES:
        raise UserError(f"{' '.join(cfg.inputs)}: some files are tables and some are JSON; prepare them separately")
    format = dict(document=segments, masked=True)
    if TABLES & kinds:
        corpus = Documents(sources, list(read_pair_tables(sources)), prompt_format="pairs", **format)
    else:
        corpus = Corpus(sources, prompt_format=detect_prompt_format(sources), **format)
    prepare(cfg, corpus, cfg.name or default_name(cfg.inputs))


if __name__ == "__main__":
    settings.run_script(main, PairsConfig, needs_output=False)
