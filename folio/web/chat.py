"""Chat templates: convert OpenAI's messages to the prompt format that a model was trained on."""

from typing import Any

from folio import UserError
from folio.base.files import shorten
from folio.data.blocks import END
from folio.data.shards import PromptFormat
from folio.data.sources.chats import Message, format_chat, is_empty, join_parts
from folio.data.tokenizer import EOT_TEXT

ROLES = ("system", "developer", "user", "assistant")
MESSAGE_FIELDS = ("role", "content", "name")
ANSWER_PREFIX = {"chat": " ", "pairs": ""}  # text between the prompt and the answer, by prompt format
STOP = {"chat": ("\nUser:",), "pairs": ()}  # texts before which an answer ends, too


def chat_prompt(prompt_format: PromptFormat, messages: list[dict[str, Any]]) -> str:
    """Return the prompt of a conversation. The answer is the text generated after it and ANSWER_PREFIX.

    A message is {"role", "content"}; content is a string or a list of parts {"type": "text", "text"}, which are joined
    by line breaks. It may have a "name", but prompts have none, so that a role cannot have two names. For "chat", the
    prompt has the format of prepare/pairs.py, up to the assistant's turn. For "pairs", it is the content of the only
    message. Raises UserError for messages that do not fit the format.
    """
    if not isinstance(messages, list) or not messages:
        raise UserError('messages must be a list of at least one {"role": "user", "content": "..."}')
    texts = [read_message(f"messages[{n}]", message) for n, message in enumerate(messages)]
    check_names(messages)
    if prompt_format == "chat":
        *segments, _, _ = format_chat([*texts, Message("assistant", "", is_target=True)])
        return "".join(EOT_TEXT if text is END else text for text, _ in segments)
    if len(texts) > 1:
        raise UserError(
            f"messages has {len(texts)} messages, but this model was trained on single prompts, not on conversations; "
            f"send only the last message, or train a model on conversations: prepare/pairs.py with lines "
            f'{{"messages": [{{"role": "user", "content": "..."}}, ...]}}'
        )
    if texts[0].role != "user":
        raise UserError('messages[0].role must be "user", because this model was trained on single prompts')
    return texts[0].content


def read_message(name: str, message: Any) -> Message:
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


def check_names(messages: list[dict[str, Any]]) -> None:
    """Raise UserError if two messages of one role have different names."""
    names: dict[str, Any] = {}  # by role
    for n, message in enumerate(messages):
        name = message.get("name")
        if name and names.setdefault(message["role"], name) != name:
            raise UserError(
                f"messages[{n}].name differs from the name of another {message['role']} message, but prompts of "
                f"this model have no names; write names in the content"
            )
