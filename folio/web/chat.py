"""Chats with a model that was trained on prompts: OpenAI's messages as the text that it was trained to answer."""

from dataclasses import dataclass
from typing import Any

from folio import UserError
from folio.data.blocks import END
from folio.data.shards import PromptFormat
from folio.data.sources.pairs import chat_segments
from folio.data.tokenizer import EOT_TEXT
from folio.decoding.language_model import LanguageModel

ROLES = ("system", "developer", "user", "assistant")


@dataclass(frozen=True)
class ChatTemplate:
    """How the prompts that a model was trained on are written. has_eot: whether its tokenizer has an end-of-text token.

    The answer is the text that follows `prompt`, without `answer_prefix`, up to the end-of-text token or one of `stop`.
    """

    prompt_format: PromptFormat
    has_eot: bool

    def prompt(self, messages: list[dict[str, Any]]) -> str:
        """The prompt of a conversation: {"role", "content"} each, where content is text, or a list of parts
        {"type": "text", "text"}, which become lines.

        For "chat", it is the text that prepare/pairs.py makes of the messages, up to where the assistant speaks. For
        "pairs", it is the only message as it is. Raises UserError for what cannot be written so.
        """
        if not isinstance(messages, list) or not messages:
            raise UserError('messages must be a list of at least one {"role": "user", "content": "..."}')
        texts = [self._read(f"messages[{n}]", message) for n, message in enumerate(messages)]
        if self.prompt_format == "chat":
            *segments, _, _ = chat_segments([*texts, {"role": "assistant", "content": ""}])
            end = EOT_TEXT if self.has_eot else ""
            return "".join(end if text is END else text for text, _ in segments)
        if len(texts) > 1:
            raise UserError(
                f"messages has {len(texts)} messages, and this model was trained on single prompts, not on "
                f"conversations: send only the last message"
            )
        if texts[0]["role"] != "user":
            raise UserError('messages[0].role: this model was trained on single prompts; it must be "user"')
        return texts[0]["content"]

    @property
    def answer_prefix(self) -> str:
        """What precedes each answer, and is not part of it."""
        return " " if self.prompt_format == "chat" else ""

    @property
    def stop(self) -> tuple[str, ...]:
        """The texts before which an answer ends, if the end-of-text token has not ended it."""
        if self.prompt_format == "pairs":
            return ()
        return ("\nUser:",) if self.has_eot else ("User:",)  # without that token, nothing is between them in training

    def _read(self, name: str, message: Any) -> dict[str, str]:
        """A message with its content as text. name: of the message, for messages to the user. Raises UserError."""
        if not isinstance(message, dict):
            raise UserError(f'{name} must be {{"role": "...", "content": "..."}}')
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise UserError(f"{name}.role must be one of {', '.join(ROLES)}")
        if isinstance(content, list):
            for part in content:
                if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                    raise UserError(f'{name}.content: this model reads only parts {{"type": "text", "text": "..."}}')
            content = "\n".join(part["text"] for part in content)
        if not isinstance(content, str):
            raise UserError(f"{name}.content must be text")
        if self.has_eot and EOT_TEXT in content:
            raise UserError(f"{name}.content must not contain {EOT_TEXT}, which ends an answer")
        return {"role": role, "content": content}


def chat_template(gpt: LanguageModel) -> ChatTemplate | None:
    """The template of a model's chats. None: it was not trained on prompts, and continues text."""
    if gpt.prompt_format is None:
        return None
    return ChatTemplate(gpt.prompt_format, gpt.tokenizer.eot is not None)
