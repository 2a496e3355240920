"""Prompts and completions, or chats, as a data set for instruction finetuning, where only the answers are targets.

    python prepare/pairs.py pairs.jsonl
    python prepare/pairs.py chats.jsonl --name=chat --tokenizer=out-mine
    python prepare/pairs.py questions.tsv

A record of JSON, a table, or a parquet file is {"prompt": "...", "completion": "..."}, or {"messages": [{"role":
"user", "content": "..."}, ...]}, which becomes "User: ...", a blank line, "Assistant: ...". The records of Alpaca,
ShareGPT, TRL and others, and tables of two columns, are read, too (docs/use/data.md#pairs). The loss is computed over
the completion, or over the assistant's messages, and the end-of-text token after it. Other tokens are context.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio.base import settings  # noqa: E402
from folio.checkpoints.find_runs import find_run  # noqa: E402
from folio.data.inputs import Format, saved_stdin  # noqa: E402
from folio.data.prepare import PrepareConfig, default_name, prepare  # noqa: E402
from folio.data.sources.pairs import PAIR_FORMATS, describe_pair, find_pair_files, pair_corpus  # noqa: E402


@dataclass(frozen=True)
class PairsConfig(PrepareConfig):
    # --- the pairs ---
    inputs: tuple[str, ...] = ()  # JSON, tables, or parquet files, folders of them, patterns, or - for standard input
    format: Format | None = None  # format of all files; None: by their content and their names
    keep_line_ends: bool = False  # True: keep \r\n and \r; by default, they become \n
    tokenizer: str = "gpt2"  # char, byte, gpt2, bpe, or the folder of the run to finetune

    def problems(self) -> list[tuple[str, str]]:
        problems = super().problems()
        if not self.inputs:
            problems.append(("inputs", f"name files of prompts and completions: {PAIR_FORMATS}"))
        return problems


def main(cfg: PairsConfig) -> None:
    settings.check(cfg)
    cfg = cfg.replace(tokenizer=find_run(cfg.tokenizer))
    with saved_stdin(cfg.inputs) as paths:
        corpus = pair_corpus(find_pair_files(paths, cfg.format, cfg.keep_line_ends))
        print(f"first pair: {describe_pair(next(filter(None, corpus.documents()), []))}")
        prepare(cfg, corpus, cfg.name or default_name(cfg.inputs))


if __name__ == "__main__":
    settings.run_script(main, PairsConfig, needs_output=False)
