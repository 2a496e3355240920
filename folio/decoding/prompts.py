"""Encoding of prompts and other texts for a model.

Texts get the line ends of the training data (Tokenizer.clean), and <|endoftext|> is the special token.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

from folio import UserError
from folio.base.number_format import counted
from folio.base.progress import note
from folio.data.tokenizer import EOT_TEXT, OnUnknown, Tokenizer
from folio.decoding.kv_cache import split_documents
from model import GPTConfig


class Prompt(NamedTuple):
    """An encoded prompt."""

    ids: list[int]  # at least one
    text: str  # as the model reads it: with its line ends, and unknown characters removed or replaced
    unknown: int  # number of characters that the tokenizer lacks

    def truncate(self, max_tokens: int | None, tokenizer: Tokenizer) -> "Prompt":
        """Keep the first max_tokens of the prompt; None: all."""
        if max_tokens is None or len(self.ids) <= max_tokens:
            return self
        ids = self.ids[:max_tokens]
        return self._replace(ids=ids, text=tokenizer.decode_prompt(ids))


def encode_prompt(tokenizer: Tokenizer, text: str, on_unknown: OnUnknown = "error") -> Prompt:
    """Encode a prompt as encode_text does. If there are no ids, use default_prompt.

    Raises UserError for unknown characters, unless on_unknown says otherwise.
    """
    if not isinstance(text, str):
        raise UserError(f"the prompt must be text, not of type {type(text).__name__}")
    ids = encode_text(tokenizer, text, on_unknown)
    unknown = sum(map(tokenizer.count_unknown, documents_of(tokenizer, text)))
    known_text = tokenizer.decode_prompt(ids) if unknown else tokenizer.clean(text)
    return Prompt(ids or default_prompt(tokenizer), known_text, unknown)


def encode_text(tokenizer: Tokenizer, text: str, on_unknown: OnUnknown = "error") -> list[int]:
    """Encode a text with the line ends of the training data, in which <|endoftext|> is a special token.

    Raises UserError for unknown characters, unless on_unknown says otherwise.
    """
    first, *others = (tokenizer.encode(part, on_unknown) for part in documents_of(tokenizer, text))
    ids = first.tolist()
    for part in others:
        ids += [tokenizer.eot, *part.tolist()]
    return ids


def documents_of(tokenizer: Tokenizer, text: str) -> list[str]:
    """Return the parts of a text between <|endoftext|>, at least one, with the line ends of the training data.

    To a tokenizer without the special token, <|endoftext|> is ordinary text. A line says so, once per process.
    """
    text = tokenizer.clean(text)
    if tokenizer.eot is not None:
        return text.split(EOT_TEXT)
    if EOT_TEXT in text:
        _note_missing_eot()
    return [text]


@functools.cache
def _note_missing_eot() -> None:
    note(f"{EOT_TEXT} is ordinary text here, because the model's tokenizer has no end-of-text token")


def unknown_characters(tokenizer: Tokenizer, text: str) -> Iterator[str]:
    """Yield the distinct characters of a text that the tokenizer lacks, in order."""
    return filter(tokenizer.count_unknown, dict.fromkeys("".join(documents_of(tokenizer, text))))


def prompt_warnings(
    prompt: Prompt, text: str, name: str, tokenizer: Tokenizer, config: GPTConfig, on_unknown: OnUnknown
) -> list[str]:
    """Warnings about unknown characters in the text of a prompt, and tokens that the model does not use.

    on_unknown: how the prompt was encoded.
    """
    lines = []
    if prompt.unknown:
        action = "left out" if on_unknown == "skip" else "replaced"
        count = f"{prompt.unknown:,} of {counted(len(tokenizer.clean(text)), 'character')}"
        characters = " ".join(map(repr, unknown_characters(tokenizer, text)))
        lines.append(f"{action} {count} of {name}, not in the vocabulary: {characters}")
    *unused, document = split_documents(prompt.ids, config.document_token)
    if unused:
        lines.append(
            f"the model was trained with mask_documents=True, so it uses only the last of the "
            f"{len(unused) + 1:,} documents in {name}"
        )
    if len(document) > config.block_size:
        lines.append(f"{name} has {len(prompt.ids):,} tokens, but the model uses only the last {config.block_size:,}")
    return lines


def default_prompt(tokenizer: Tokenizer) -> list[int]:
    """The default prompt: the end-of-text token if there is one, else a line break, else the first token."""
    if tokenizer.eot is not None:
        return [tokenizer.eot]
    return [next((i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\n"), 0)]
