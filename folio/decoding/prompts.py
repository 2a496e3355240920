"""Prompts as the model sees them."""

from typing import NamedTuple

from folio import UserError
from folio.data.tokenizer import EOT_TEXT, OnUnknown, Tokenizer


class Prompt(NamedTuple):
    """A prompt as the model sees it."""

    ids: list[int]  # at least one
    text: str  # without the characters that were left out, and with the replacements of others
    unknown: int  # how many characters the tokenizer lacks

    def cut(self, max_tokens: int | None, tokenizer: Tokenizer) -> "Prompt":
        """The first max_tokens of the prompt; all for None."""
        if max_tokens is None or len(self.ids) <= max_tokens:
            return self
        ids = self.ids[:max_tokens]
        return self._replace(ids=ids, text=tokenizer.decode(ids))


def encode_prompt(tokenizer: Tokenizer, text: str, on_unknown: OnUnknown = "error") -> Prompt:
    """The ids of a prompt, with <|endoftext|> as its special id; default_prompt if there are none.

    The model sees the end of one that is longer than its context. Raises UserError for unknown characters.
    """
    if not isinstance(text, str):
        raise UserError(f"the prompt must be text, not of type {type(text).__name__}")
    tokenizer.on_unknown = on_unknown
    eot = tokenizer.eot
    parts = [text] if eot is None else text.split(EOT_TEXT)
    encoded = [tokenizer.encode(part).tolist() for part in parts]
    unknown = sum(map(tokenizer.count_unknown, parts))
    ids = list(encoded[0])
    for part in encoded[1:]:
        ids += [eot, *part]
    seen = EOT_TEXT.join(map(tokenizer.decode, encoded)) if unknown else text
    return Prompt(ids or default_prompt(tokenizer), seen, unknown)


def describe_unseen(prompt: Prompt, text: str, name: str, tokenizer: Tokenizer, block_size: int) -> list[str]:
    """What the model does not see of a prompt that was encoded from `text`: a line each. name: of the prompt."""
    lines = []
    if prompt.unknown:
        done = "left out" if tokenizer.on_unknown == "skip" else "replaced"
        count = f"{prompt.unknown:,} of {len(text):,} characters"
        characters = " ".join(dict.fromkeys(repr(c) for c in text if tokenizer.count_unknown(c)))
        lines.append(f"{done} {count} of {name}, not in the vocabulary: {characters}")
    if len(prompt.ids) > block_size:
        lines.append(f"{name} has {len(prompt.ids):,} tokens, of which the model sees the last {block_size:,}")
    return lines


def default_prompt(tokenizer: Tokenizer) -> list[int]:
    """The prompt if none is given: the end-of-text token, else a line break, else the first token."""
    if tokenizer.eot is not None:
        return [tokenizer.eot]
    return [next((i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\n"), 0)]
