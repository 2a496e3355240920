"""Chats: reads messages in the forms of other programs, and formats them as one text with targets."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from folio.base.files import short_repr
from folio.data.blocks import END, PATH, CorpusError, Segments
from folio.data.shards import PromptFormat
from folio.data.tokenizer import EOT_TEXT

ROLES = {"system": "system", "developer": "system"}  # names of roles in the data of other programs
ROLES |= dict.fromkeys(("user", "human", "prompter"), "user")
ROLES |= dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot"), "assistant")
# Fields of a message that its prompt and its targets are made of.
WEIGHTS = ("weight", "train", "masked", "loss", "loss_weight", "loss_scale")  # 0 or 1; "masked" is the opposite
MESSAGE_FIELDS = ("role", "from", "content", "value", f"content{PATH}type", f"content{PATH}text", *WEIGHTS)
# Fields of a message that would change its meaning, and that a prompt cannot express.
UNSUPPORTED = {
    *("name", "tool_calls", "function_call", "tool_call_id", "refusal", "prefix", "train_detail"),
    *("reasoning", "reasoning_content", "thinking", "image", "images", "audio", "audios", "video", "videos"),
}


TEXT_PARTS = ("text", "input_text", "output_text")  # types of parts of a content


class Message(NamedTuple):
    """A turn of a chat. is_target: whether it is an answer to learn."""

    role: str  # system, user or assistant
    content: str
    is_target: bool


def format_chat(messages: Iterable[Message]) -> Segments:
    """Return the segments of a chat. The targets are the answers to learn and the end of text after each.

    The text between two answers is one segment, so that it is tokenized as in a prompt.
    """
    chat: Segments = []
    context = ""
    for message in messages:
        context += f"{message.role.capitalize()}:"
        if message.role == "assistant":
            chat += [(context, False), (f" {message.content}", message.is_target), (END, message.is_target)]
            context = ""
        else:
            context += f" {message.content}\n\n"
    return [*chat, (context, False)] if context else chat


CHAT_TEMPLATES: dict[PromptFormat, str] = {  # Jinja templates of the same prompts, for other programs
    "chat": (
        "{% for message in messages %}"
        "{% if message.role == 'assistant' %}{{ 'Assistant: ' + message.content + eos_token }}"
        "{% elif message.role == 'developer' %}{{ 'System: ' + message.content + '\\n\\n' }}"
        "{% else %}{{ message.role | capitalize + ': ' + message.content + '\\n\\n' }}"
        "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    ),
    "pairs": (
        "{% if messages | length > 1 %}"
        "{{ raise_exception('this model was trained on single prompts, not on conversations') }}"
        "{% endif %}{{ messages[0].content }}"
    ),
}


# --- from JSON to messages --------------------------------------------------------------------------------------------


def read_messages(name: str, value: Any) -> list[Message]:
    """Read a list of {"role", "content"}, or {"from", "value"} (ShareGPT). name: of the field, for messages.

    A message of the assistant is a target, unless it is empty, or has "weight": 0, "masked": true, or another of
    WEIGHTS. Raises CorpusError.
    """
    if not isinstance(value, list):
        raise CorpusError(f'{name} must be a list of {{"role": "...", "content": "..."}}')
    return [_read_message(f"{name}[{number}]", message) for number, message in enumerate(value)]


def make_message(name: str, role: str, content: str, is_target: bool = True) -> Message:
    """Return a message. An empty answer is not a target. name: of the content, for messages.

    At the end of an answer, <|endoftext|> is its end. Raises CorpusError if it is elsewhere.
    """
    if role == "assistant":
        content = strip_eot(content)
    if EOT_TEXT in content:
        raise CorpusError(f"{name} must not contain {EOT_TEXT}, which ends a message; remove it, or split the message")
    return Message(role, content, is_target and role == "assistant" and bool(content.strip()))


def strip_eot(completion: str) -> str:
    """Remove <|endoftext|> at the end of a completion, and white space after it."""
    text = completion.rstrip()
    return text.removesuffix(EOT_TEXT) if text.endswith(EOT_TEXT) else completion


def _read_message(name: str, message: Any) -> Message:
    if not isinstance(message, dict):
        raise CorpusError(f'{name} must be {{"role": "...", "content": "..."}}')
    for field, value in message.items():
        if field in UNSUPPORTED and not is_empty(value):
            raise CorpusError(f"{name}.{field} is not supported: a prompt has only roles and texts; remove it")
    role, content = _either(name, message, "role", "from"), _either(name, message, "content", "value")
    known = ROLES.get(role.strip().lower()) if isinstance(role, str) else None
    if known is None:
        raise CorpusError(f"{name}: the role {short_repr(role)} is not supported; use system, user, or assistant")
    is_null = content is None and not message.keys().isdisjoint(("content", "value"))
    text = "" if is_null else join_parts(f"{name}.content", content)
    return make_message(f"{name}.content", known, text, _counts(name, message, known))


def _either(name: str, message: dict[str, Any], field: str, other: str) -> Any:
    """Return the value of one of two fields with the same meaning. Raises CorpusError if both have one."""
    values = [message[n] for n in (field, other) if message.get(n) is not None]
    if len(values) > 1:
        raise CorpusError(f"{name} has {field} and {other}, which mean the same; remove one")
    return values[0] if values else None


def join_parts(name: str, content: Any) -> str:
    """Return the content of a message: a string, or a list of text parts, which are joined by line breaks.

    name: of the content, for messages. Raises CorpusError.
    """
    if isinstance(content, list):
        for part in content:
            is_text = isinstance(part, dict) and part.get("type") in TEXT_PARTS
            if not is_text or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else part
                rule = 'may only contain parts {"type": "text", "text": "..."}'
                raise CorpusError(f"{name} {rule}, not {short_repr(kind)}: the model reads only text")
        content = "\n".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise CorpusError(f"{name} must be a string, not {short_repr(content)}")
    return content


def _counts(name: str, message: dict[str, Any], role: str) -> bool:
    """Whether the answer is to be learned. Raises CorpusError for other weights than 0 and 1."""
    counts = True
    for field in WEIGHTS:
        value = message.get(field)
        if value is None:
            continue
        if value not in (0, 1):  # also False and True
            raise CorpusError(f"{name}.{field} is {short_repr(value)}; only 0 and 1, or false and true, are supported")
        is_target = bool(value) != (field == "masked")
        if is_target and role != "assistant" and field != "masked":
            raise CorpusError(f"{name}.{field}: only messages of the assistant are targets; remove it, or set it to 0")
        counts = counts and is_target
    return counts


def is_empty(value: Any) -> bool:
    """Whether the value of an optional field says nothing."""
    return value in (None, False, "", [], {})
