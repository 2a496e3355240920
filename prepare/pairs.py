"""Prompts and completions, or chats, as a data set in which only the answers count: for instruction finetuning.

    python prepare/pairs.py pairs.jsonl
    python prepare/pairs.py chats.jsonl --name=chat --tokenizer=out-mine

A line is {"prompt": "...", "completion": "..."}, or {"messages": [{"role": "user", "content": "..."}, ...]}, which
becomes "User: ...", a blank line, "Assistant: ...". The loss is taken over the completion, or over what the assistant
says, and the end-of-text token after it. The rest is only context.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import configurator  # noqa: E402
from folio.blocks import Segments  # noqa: E402
from folio.corpus import JSON_LINES, Corpus, find_sources  # noqa: E402
from folio.pairs import chat_segments, pair_segments, prompt_format_of  # noqa: E402
from folio.prepare import PrepareConfig, default_name, prepare  # noqa: E402


@dataclass(frozen=True)
class PairsConfig(PrepareConfig):
    # --- the pairs ---
    inputs: tuple[str, ...] = ()  # .jsonl files (also .gz or .zst), folders of them, or patterns
    tokenizer: str = "gpt2"  # char, byte, gpt2, bpe, or the folder of the run to finetune

    def problems(self) -> list[tuple[str, str]]:
        problems = super().problems()
        if not self.inputs:
            problems.append(("inputs", "name a .jsonl file"))
        if tables := [name for name in self.inputs if {".csv", ".parquet"} & {*Path(name).suffixes}]:
            problems.append(
                ("inputs", f"{tables[0]} is not JSON lines; docs/change-it.md has a script for two columns")
            )
        return problems


def segments(value: dict[str, Any]) -> Segments:
    """The segments of one pair or chat. Raises CorpusError."""
    return chat_segments(value["messages"]) if "messages" in value else pair_segments(value)


def main(cfg: PairsConfig) -> None:
    configurator.check(cfg)
    sources = find_sources(cfg.inputs, "jsonl", JSON_LINES)
    corpus = Corpus(sources, document=segments, masked=True, prompt_format=prompt_format_of(sources))
    prepare(cfg, corpus, cfg.name or default_name(cfg.inputs))


if __name__ == "__main__":
    configurator.run_script(main, PairsConfig)
