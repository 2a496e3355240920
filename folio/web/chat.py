"""Chat templates: convert OpenAI's messages to the prompt format that a model was trained on."""

from dataclasses import dataclass
from typing import Any

from folio import UserError
from folio.base.files import shorten
from folio.data.blocks import END
from folio.data.shards import PromptFormat
from folio.data.sources.chats import Message, format_chat, is_empty, join_parts
from folio.data.tokenizer import EOT_TEXT
from folio.decoding.language_model import LanguageModel

ROLES = ("system", "developer", "user", "assistant")
MESSAGE_FIELDS = ("role", "content", "name")


@dataclass(frozen=True)
class ChatTemplate:
    """The prompt format of a model.

    The answer is the text generated after `prompt`, without `answer_prefix`, up to the end-of-text token or one of
    `stop`.
    """

    prompt_format: PromptFormat

    def prompt(self, messages: list[dict[str, Any]]) -> str:
        """Return the prompt of a conversation.

        A message is {"role", "content"}; content is a string or a list of parts {"type": "text", "text"}, which are
        joined by line breaks. It may have a "name", but prompts have none, so that a role cannot have two names. For
        "chat", the prompt has the format of prepare/pairs.py, up to the assistant's turn. For "pairs", it is the
        content of the only message. Raises UserError for messages that do not fit the format.
        """
        if not isinstance(messages, list) or not messages:
            raise UserError('messages must be a list of at least one {"role": "user", "content": "..."}')
        texts = [self._read(f"messages[{n}]", message) for n, message in enumerate(messages)]
        self._check_names(messages)
        if self.prompt_format == "chat":
            *segments, _, _ = format_chat([*texts, Message("assistant", "", is_target=True)])
            return "".join(EOT_TEXT if text is END else text for text, _ in segments)
        if len(texts) > 1:
            raise UserError(
                f"messages has {len(texts)} messages, but this model was trained on single prompts, not on "
                f"conversations; send only the last message, or train a model on conversations: prepare/pairs.py with "
                f'lines {{"messages": [{{"role": "user", "content": "..."}}, ...]}}'
            )
        if texts[0].role != "user":
            raise UserError('messages[0].role must be "user", because this model was trained on single prompts')
        return texts[0].content

    @property
    def answer_prefix(self) -> str:
        """Text between the prompt and the answer."""
        return " " if self.prompt_format == "chat" else ""

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings, in addition to the end-of-text token."""
        return ("\nUser:",) if self.prompt_format == "chat" else ()

    def _read(self, name: str, message: Any) -> Message:
        """Return the message with its content as one string. name: for error messages. Raises UserError."""
        if not isinstance(message, dict):
            raise UserError(f'{name} must be {{"role": "...", "content": "..."}}')
        role = message.get("role")
        if role not in ROLES:
            raise UserError(f"{name}.role must be one of {', '.join(ROLES)}")
        for field, value in message.items():
            if field not in MESSAGE_FIELDS and not is_empty(value):
                raise UserError(f"{name}.{shorten(field, 100)} is not supported: the model reads only text")
        content = join_parts(f"{name}.content", message.get("content"))
        if EOT_TEXT in content:
            raise UserError(f"{name}.content must not contain {EOT_TEXT}, which ends a message")
        return Message("system" if role == "developer" else role, content, is_target=False)

    def _check_names(self, messages: list[dict[str, Any]]) -> None:
        """Raise UserError if two messages of one role have different names."""
        names: dict[str, Any] = {}  # by role
        for n, message in enumerate(messages):
            name = message.get("name")
            if name and names.setdefault(message["role"], name) != name:
                raise UserError(
                    f"messages[{n}].name differs from the name of another {message['role']} message, but prompts of "
                    f"this model have no names; write names in the content"
                )


def chat_template(gpt: LanguageModel) -> ChatTemplate | None:
    """Return the chat template of a model, or None if it was not trained on prompts."""
    return ChatTemplate(gpt.prompt_format) if gpt.prompt_format else None
