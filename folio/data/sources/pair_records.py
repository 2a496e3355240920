"""Pairs and chats of records: JSON objects and rows of tables in the formats that other programs use."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

from folio.base.files import short_repr
from folio.data.blocks import END, PATH, CorpusError, Document, Segments
from folio.data.sources.chats import (
    MESSAGE_FIELDS,
    Message,
    format_chat,
    is_empty,
    make_message,
    read_messages,
    strip_eot,
)
from folio.data.tokenizer import EOT_TEXT

# Names of fields. Upper case and white space around them make no difference, because headers of tables have them.
CHATS = ("messages", "conversations", "conversation")
SYSTEMS = ("system", "system_prompt")
PROMPTS = ("prompt", "instruction", "question", "query")
CONTEXTS = ("input", "context")  # they follow the prompt after a blank line
COMPLETIONS = ("completion", "output", "response", "answer")
OTHER_PAIRS = (("source", "target"), ("inputs", "targets"), ("user", "assistant"), ("human", "assistant"))
MEDIA = ("image", "images", "audio", "audios", "video", "videos")
UNSUPPORTED = ("tools", "functions", "function_call", "choices", "options", *MEDIA)  # they would change the meaning
OTHERS = ("history", "weight", "label", "kto_tag", "chosen", "rejected")
FALSE = ("0", "0.0", "false")  # values of such a field in a table
KNOWN = frozenset((*CHATS, *SYSTEMS, *PROMPTS, *CONTEXTS, *COMPLETIONS, *chain(*OTHER_PAIRS), *UNSUPPORTED, *OTHERS))

ADVICE = 'write {"prompt": "...", "completion": "..."} or {"messages": [{"role": "...", "content": "..."}, ...]}'
EMPTY_COMPLETION = "pair with an empty completion"  # reasons to leave out records and messages
NO_TARGET = "chat without an answer to learn"
AFTER_LAST = "message after the last answer to learn"


class PairNames(NamedTuple):
    """The known names of the fields that make a pair."""

    prompt: str
    contexts: tuple[str, ...]
    completion: str


class Record:
    """The fields of a record by their known names."""

    def __init__(self, record: dict[str, Any]):
        self.record, self.fields = record, known_fields(tuple(record))

    def __contains__(self, name: str) -> bool:
        return name in self.fields

    def __getitem__(self, name: str) -> Any:
        """The value of a field; None if it is missing."""
        return self.record[self.fields[name]] if name in self.fields else None

    def text(self, name: str) -> str:
        """Return the text of a field, in which null is an empty text. Raises CorpusError."""
        value = self[name]
        if value is not None and not isinstance(value, str):
            raise CorpusError(f"{self.fields[name]} is {short_repr(value)}, not text; write it as a string")
        return value or ""

    def used(self, *names: str) -> set[str]:
        """Return the record's own names of the fields that it has."""
        return {self.fields[name] for name in names if name in self}

    @property
    def has_message_lists(self) -> bool:
        """Whether the prompt and the completion are lists of messages, as in TRL."""
        return isinstance(self["prompt"], list) and isinstance(self["completion"], list)

    @property
    def has_messages(self) -> bool:
        return self.has_message_lists or any(not is_empty(self[name]) for name in CHATS)

    @property
    def has_turns(self) -> bool:
        """Whether a pair needs the turns of a chat."""
        return any(name in self for name in (*SYSTEMS, "history"))


def pair_document(record: dict[str, Any], add_space: bool = False) -> Document:
    """Return the segments of a pair or a chat in any of the formats of docs/use/data.md#pairs.

    They are None if the completion is empty. add_space: separate prompt and completion by a space, unless white space
    is present. This is the default for fields with other names than prompt and completion. Raises CorpusError.
    """
    fields = Record(record)
    refuse_unsupported(fields)
    if fields.has_messages:
        return _chat_document(fields)
    names = find_pair(tuple(record))
    if names is None:
        missing = "completion" if any(name in fields for name in PROMPTS) else "prompt"
        raise CorpusError(f"{missing} is missing, or has an unknown name: {ADVICE}")
    texts = [fields.text(name) for name in (names.prompt, *names.contexts)]
    prompt = "\n\n".join(text for text in texts if text.strip()) or texts[0]
    completion = fields.text(names.completion)
    used = fields.used(names.prompt, *names.contexts, names.completion, *SYSTEMS, "history")
    if not completion.replace(EOT_TEXT, "").strip():
        return Document(None, frozenset(used), {EMPTY_COMPLETION: 1})
    if fields.has_turns:
        pair = make_message(names.prompt, "user", prompt), make_message(names.completion, "assistant", completion)
        return _document([*_system(fields), *_history(fields), *pair], frozenset(used))
    if add_space or (names.prompt, names.completion) != ("prompt", "completion"):
        has_space = not prompt or prompt[-1].isspace() or completion[0].isspace()
        completion = completion if has_space else f" {completion}"
    return Document(pair_segments({"prompt": prompt, "completion": completion}), frozenset(used))


def is_chat(record: dict[str, Any]) -> bool:
    """Whether pair_document makes a chat of a record. A pair with a system prompt or a history is also one."""
    fields = Record(record)
    return fields.has_messages or fields.has_turns


def pair_segments(value: dict[str, Any]) -> Segments:
    """Return the segments of one pair, {"prompt", "completion"}. The targets are the completion and the end of text.

    <|endoftext|> is the special token; at the end of the completion, it is the end. Raises CorpusError.
    """
    for name in ("prompt", "completion"):
        if not isinstance(value.get(name), str):
            raise CorpusError(f'{name} is missing, or not text: write {{"prompt": "...", "completion": "..."}}')
    completion = strip_eot(value["completion"])
    return [*_split_at_eot(value["prompt"], False), *_split_at_eot(completion, True), (END, True)]


def _split_at_eot(text: str, is_target: bool) -> Segments:
    first, *others = text.split(EOT_TEXT)
    return [(first, is_target), *((part, is_target) for text in others for part in (END, text))]


# --- fields -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def known_fields(names: tuple[str, ...]) -> dict[str, str]:
    """Return a record's own names of its fields by their known names. Raises CorpusError if two are the same."""
    fields: dict[str, str] = {}
    for name in names:
        if (known := name.strip().lower()) in KNOWN and fields.setdefault(known, name) != name:
            raise CorpusError(f"the fields {fields[known]!r} and {name!r} have the same name; rename or remove one")
    return fields


@lru_cache(maxsize=256)
def find_pair(names: tuple[str, ...]) -> PairNames | None:
    """Return which fields of a record make a pair, or None. Raises CorpusError if several may be one."""
    fields = known_fields(names)
    prompts = [name for name in PROMPTS if name in fields]
    completions = [name for name in COMPLETIONS if name in fields]
    if "prompt" in prompts and "completion" in completions:
        prompts, completions = ["prompt"], ["completion"]
    elif completions and not prompts and "input" in fields:
        prompts = ["input"]
    elif not prompts and not completions:
        pairs = [pair for pair in OTHER_PAIRS if all(name in fields for name in pair)]
        prompts = [prompt for prompt, _ in pairs]
        completions = list(dict.fromkeys(completion for _, completion in pairs))
    for kind, candidates in (("prompt", prompts), ("completion", completions)):
        if len(candidates) > 1:
            raise CorpusError(f"both {' and '.join(candidates)} may be the {kind}; rename or remove one")
    if not completions and "chosen" in fields:
        raise CorpusError(
            "chosen and rejected are for preference training, which Folio does not have; to train on the chosen texts, "
            "rename chosen to completion, or to messages if it contains the prompt"
        )
    if not prompts or not completions:
        return None
    contexts = tuple(name for name in CONTEXTS if name in fields and name not in prompts)
    return PairNames(prompts[0], contexts, completions[0])


def refuse_unsupported(fields: Record) -> None:
    """Raise CorpusError for a field that changes the meaning of a record, and that a document cannot express."""
    for name, own_name in fields.fields.items():
        if name in UNSUPPORTED and not is_empty(fields[name]):
            raise CorpusError(f"{own_name} is not supported; write it in the prompt if it is text, or remove the field")
    for name in ("label", "kto_tag"):  # of unpaired preferences
        if str(fields[name]).strip().lower() in FALSE:
            meaning = "which marks an undesirable completion; remove the record, or the field"
            raise CorpusError(f"{fields.fields[name]} is {short_repr(fields[name])}, {meaning}")
    if fields["weight"] is not None and str(fields["weight"]).strip() not in ("", "1", "1.0"):
        raise CorpusError("weight of a record is not supported; remove it, or give messages weights of 0 or 1")


# --- chats ------------------------------------------------------------------------------------------------------------


def _chat_document(fields: Record) -> Document:
    """Return a chat of messages, possibly with a system prompt beside them. Raises CorpusError."""
    names = [name for name in CHATS if not is_empty(fields[name])]
    if len(names) > 1:
        raise CorpusError(f"both {' and '.join(names)} contain messages; remove one")
    if names:
        messages = read_messages(names[0], fields[names[0]])
    else:  # answers in the prompt are not targets
        names = ["prompt", "completion"]
        prompt, completion = (read_messages(name, fields[name]) for name in names)
        messages = [*(message._replace(is_target=False) for message in prompt), *completion]
    system = _system(fields)
    if system and any(message.role == "system" for message in messages[:1]):
        raise CorpusError("there are two system prompts, a field and a message; remove one")
    answers = [name for name in COMPLETIONS if name not in names and not is_empty(fields[name])]
    if answers and messages[-1].role != "assistant":
        raise CorpusError(f"{answers[0]} is beside messages without a last answer; add it to them, or remove it")
    used = frozenset({f"{name}{PATH}{field}" for name in fields.used(*names) for field in MESSAGE_FIELDS})
    return _document([*system, *messages], used | fields.used(*SYSTEMS))


def _document(messages: list[Message], used: frozenset[str]) -> Document:
    """Return a chat up to its last target. Messages after it are left out: nothing is learned from them.

    Raises CorpusError if there is no answer.
    """
    last = max((number for number, message in enumerate(messages, 1) if message.is_target), default=0)
    if not last:
        if not any(message.role == "assistant" for message in messages):
            raise CorpusError('no message has the role "assistant"; add one, or remove the chat')
        return Document(None, used, {NO_TARGET: 1})
    left_out, cut = {AFTER_LAST: len(messages) - last}, sum(len(message.content) for message in messages[last:])
    return Document(format_chat(messages[:last]), used, left_out, cut)


def _system(fields: Record) -> list[Message]:
    """Return the system prompt beside a chat or a pair as a message, if it is not blank."""
    texts = [(name, text) for name in SYSTEMS if (text := fields.text(name)).strip()]
    if len(texts) > 1:
        raise CorpusError(f"both {' and '.join(SYSTEMS)} are system prompts; remove one")
    return [make_message(name, "system", text) for name, text in texts]


def _history(fields: Record) -> Iterator[Message]:
    """Yield the earlier turns of a pair, [[prompt, completion], ...], with targets as in LLaMA-Factory."""
    turns = fields["history"] or []
    for turn in turns if isinstance(turns, list) else [None]:
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise CorpusError('history must be a list of turns ["...", "..."], each a prompt and its completion')
        yield from (make_message("history", role, text) for role, text in zip(("user", "assistant"), turn, strict=True))
