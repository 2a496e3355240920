"""Questions and answers as a data set in which only the answers count: for finetuning on instructions or chats.

    python prepare/pairs.py pairs.jsonl
    python prepare/pairs.py chats.jsonl --name=chat --tokenizer=out-mine

A line is {"prompt": "...", "completion": "..."}, or {"messages": [{"role": "user", "content": "..."}, ...]}, which
reads "User: ...", a blank line, "Assistant: ...". What the assistant says, and the end-of-text token behind it, are
what the loss is taken over; the rest is only read.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import configurator  # noqa: E402
from folio.corpus import END, Corpus, CorpusError, Segments, find_sources  # noqa: E402
from folio.prepare import PrepareConfig, default_name, prepare  # noqa: E402


@dataclass(frozen=True)
class PairsConfig(PrepareConfig):
    # --- the pairs ---
    inputs: tuple[str, ...] = ()  # .jsonl files (also .gz or .zst), folders of them, or patterns
    tokenizer: str = "gpt2"  # char, byte, gpt2, bpe, or that of the run that is to be finetuned: its folder

    def problems(self) -> list[tuple[str, str]]:
        found = super().problems()
        if not self.inputs:
            found.append(("inputs", "name a .jsonl file"))
        return found


def segments(value: dict[str, Any]) -> Segments:
    """The pieces of one pair or chat, and which of them count. Raises CorpusError."""
    if "messages" in value:
        return chat(value["messages"])
    for name in ("prompt", "completion"):
        if not isinstance(value.get(name), str):
            raise CorpusError(f'{name} is missing, or no text: write {{"prompt": "...", "completion": "..."}}')
    return [(value["prompt"], False), (value["completion"], True), (END, True)]


def chat(messages: Any) -> Segments:
    """The pieces of a chat, and which of them count. Raises CorpusError."""
    found: Segments = []
    for message in messages if isinstance(messages, list) else [None]:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise CorpusError('messages must be a list of {"role": "...", "content": "..."}')
        head = f"{message['role'].capitalize()}:"
        if message["role"] == "assistant":
            found += [(head, False), (f" {message['content']}", True), (END, True)]
        else:
            found.append((f"{head} {message['content']}\n\n", False))
    if not any(counts for _, counts in found):
        raise CorpusError('no message has the role "assistant", so nothing would count')
    return found


def main(cfg: PairsConfig) -> None:
    configurator.check(cfg)
    corpus = Corpus(find_sources(cfg.inputs, "jsonl"), document=segments)
    prepare(cfg, corpus, cfg.name or default_name(cfg.inputs[0]), masked=True)


if __name__ == "__main__":
    configurator.run_script(main, PairsConfig)
