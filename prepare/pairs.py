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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError  # noqa: E402
from folio.base import settings  # noqa: E402
from folio.checkpoints.find_runs import resolve  # noqa: E402
from folio.data.inputs import RECORD_SUFFIXES, TEXT_FORMATS, find_sources  # noqa: E402
from folio.data.prepare import PrepareConfig, default_name, prepare  # noqa: E402
from folio.data.sources.pairs import describe_pair, pair_corpus  # noqa: E402

FORMATS = "JSON (.jsonl, .json), tables (.tsv, .csv), or .parquet, also as .gz, .zst or .xz"


@dataclass(frozen=True)
class PairsConfig(PrepareConfig):
    # --- the pairs ---
    inputs: tuple[str, ...] = ()  # JSON, tables, or parquet files, folders of them, or patterns
    keep_line_ends: bool = False  # True: keep \r\n and \r; by default, they become \n
    tokenizer: str = "gpt2"  # char, byte, gpt2, bpe, or the folder of the run to finetune

    def problems(self) -> list[tuple[str, str]]:
        problems = super().problems()
        if not self.inputs:
            problems.append(("inputs", f"name files of prompts and completions: {FORMATS}"))
        return problems


def main(cfg: PairsConfig) -> None:
    settings.check(cfg)
    cfg = cfg.replace(tokenizer=resolve(cfg.tokenizer))
    inputs = find_sources(cfg.inputs, suffixes=RECORD_SUFFIXES, keep_line_ends=cfg.keep_line_ends, tables=True)
    if others := [source.name for source in inputs.sources if source.format in TEXT_FORMATS]:
        raise UserError(f"{others[0]} is text without records; for prompts and completions, use {FORMATS}")
    corpus = pair_corpus(inputs)
    print(f"first pair: {describe_pair(next(corpus.documents(), None) or [])}")
    prepare(cfg, corpus, cfg.name or default_name(cfg.inputs))


if __name__ == "__main__":
    settings.run_script(main, PairsConfig, needs_output=False)
