"""Records in the formats of other programs, as pairs and chats."""

import pytest

from folio.data.blocks import END, PATH, CorpusError
from folio.data.sources.pair_records import is_chat, pair_document

EOT = "<|endoftext|>"
USER, BOT = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
HUMAN, GPT = {"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}
PAIR = [("Q", False), (" A", True), (END, True)]
CHAT = [("User: Q\n\nAssistant:", False), (" A", True), (END, True)]
SYSTEM = [("System: S\n\nUser: Q\n\nAssistant:", False), (" A", True), (END, True)]
TURNS = [*CHAT, ("User: R\n\nAssistant:", False), (" B", True), (END, True)]


def of_messages(name: str) -> str:
    return f"{name}.role {name}.content"


PAIRS = [  # record, segments, and the fields that are used
    ({"prompt": "Q", "completion": "A"}, [("Q", False), ("A", True), (END, True)], "prompt completion"),
    ({"prompt": "Q", "completion": " A", "id": "1", "source": "x"}, PAIR, "prompt completion"),
    ({"prompt": "Q", "completion": " A", "answer": "B", "question": "x"}, PAIR, "prompt completion"),
    ({"Prompt": "Q", " COMPLETION ": " A"}, PAIR, "Prompt, COMPLETION "),
    ({"prompt": "", "completion": " A"}, [("", False), *PAIR[1:]], "prompt completion"),
    ({"prompt": None, "completion": " A"}, [("", False), *PAIR[1:]], "prompt completion"),
    ({"prompt": "Q", "completion": None}, None, "prompt completion"),
    ({"prompt": "Q", "response": "A"}, PAIR, "prompt response"),
    ({"question": "Q", "answer": " A"}, PAIR, "question answer"),
    ({"question": "Q\n", "answer": "A"}, [("Q\n", False), ("A", True), (END, True)], "question answer"),
    ({"query": "Q", "response": "A"}, PAIR, "query response"),
    ({"input": "Q", "output": "A"}, PAIR, "input output"),
    ({"source": "Q", "target": "A"}, PAIR, "source target"),
    ({"inputs": "Q", "targets": "A"}, PAIR, "inputs targets"),
    ({"human": "Q", "assistant": "A"}, PAIR, "human assistant"),
    ({"instruction": "Q", "output": "A"}, PAIR, "instruction output"),
    ({"instruction": "Q", "input": "", "output": "A", "text": "Q A"}, PAIR, "instruction input output"),
    ({"instruction": "Q", "input": None, "output": "A"}, PAIR, "instruction input output"),
    ({"instruction": "Q", "input": "X", "output": "A"}, [("Q\n\nX", False), *PAIR[1:]], "instruction input output"),
    ({"Instruction": "", "input": "Q", "response": "A"}, PAIR, "Instruction input response"),
    (
        {"instruction": "Q", "context": "X", "response": "A", "category": "qa"},
        [("Q\n\nX", False), *PAIR[1:]],
        "instruction context response",
    ),
    ({"question": "Q", "context": "X", "answer": "A"}, [("Q\n\nX", False), *PAIR[1:]], "question context answer"),
    ({"prompt": "Q", "completion": f" A{EOT}"}, PAIR, "prompt completion"),
    (
        {"prompt": f"{EOT}Q", "completion": f" A{EOT}B"},
        [("", False), (END, False), ("Q", False), (" A", True), (END, True), ("B", True), (END, True)],
        "prompt completion",
    ),
    ({"prompt": "Q", "completion": f" \n{EOT}"}, None, "prompt completion"),
    ({"question": "Q", "answer": ""}, None, "question answer"),
    ({"question": "Q", "answer": None}, None, "question answer"),
]
CHATS = [
    ({"messages": [USER, BOT]}, CHAT, of_messages("messages")),
    ({"prompt": "Q", "messages": [USER, BOT], "answer": "A"}, CHAT, of_messages("messages")),
    ({"prompt": None, "completion": None, "messages": [USER, BOT]}, CHAT, of_messages("messages")),
    ({"conversations": [HUMAN, GPT], "messages": None}, CHAT, "conversations.from conversations.value"),
    ({"conversation": [USER, BOT], "model": "x"}, CHAT, of_messages("conversation")),
    ({"conversations": [HUMAN, GPT], "system": "S"}, SYSTEM, "conversations.from conversations.value system"),
    ({"messages": [{"role": "system", "content": "S"}, USER, BOT], "System": ""}, SYSTEM, of_messages("messages")),
    ({"system": "S", "messages": [USER, BOT]}, SYSTEM, f"{of_messages('messages')} system"),
    ({"instruction": "Q", "input": "", "output": "A", "system": "S"}, SYSTEM, "instruction input output system"),
    ({"system_prompt": "S", "question": "Q", "response": "A"}, SYSTEM, "system_prompt question response"),
    ({"instruction": "Q", "output": "A", "history": []}, CHAT, "instruction output"),
    ({"instruction": "R", "output": "B", "history": [["Q", "A"]]}, TURNS, "instruction output history"),
    ({"instruction": "Q", "output": "", "history": []}, None, "instruction output"),
    ({"prompt": [USER], "completion": [BOT]}, CHAT, f"{of_messages('prompt')} {of_messages('completion')}"),
    (
        {"prompt": [USER, BOT, USER], "completion": [BOT]},
        [(CHAT[0][0], False), (" A", False), (END, False), *CHAT],
        f"{of_messages('prompt')} {of_messages('completion')}",
    ),
    (
        {"messages": [USER, BOT | {"weight": 0}, USER, BOT]},
        [(CHAT[0][0], False), (" A", False), (END, False), *CHAT],
        of_messages("messages"),
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}, BOT]},
        CHAT,
        f"{of_messages('messages')} messages.content.type messages.content.text",
    ),
]


def texts_by_path(value, path: str = "") -> dict[str, str]:
    """The text of each field of a record, joined."""
    if isinstance(value, str):
        return {path: value}
    texts: dict[str, str] = {}
    for name, item in value.items() if isinstance(value, dict) else ((None, item) for item in value or ()):
        for key, text in texts_by_path(item, ".".join(filter(None, (path, name)))).items():
            texts[key] = texts.get(key, "") + text
    return texts


@pytest.mark.parametrize("record, segments, used", [*PAIRS, *CHATS])
def test_records(record, segments, used):
    """The input of Alpaca's format, a system prompt, and other fields beside the known ones were dropped."""
    names = used.split(",") if "," in used else used.split()
    document = pair_document(record)
    assert document.content == segments
    texts = {path: text for path, text in texts_by_path(record).items() if text}
    assert {path for path in texts if path.replace(".", PATH) in document.used} == {n for n in names if n in texts}
    assert is_chat(record) == ((record, segments, used) in CHATS)
    if segments is None:
        assert document.left_out == {"pair with an empty completion": 1}


def test_tables_add_a_space():
    record = {"prompt": "Q", "completion": "A"}
    assert pair_document(record, add_space=True).content == PAIR
    for prompt, completion in (("Q ", "A"), ("Q", "\tA"), ("", "A")):
        segments = pair_document({"prompt": prompt, "completion": completion}, add_space=True).content
        assert segments == [(prompt, False), (completion, True), (END, True)]


@pytest.mark.parametrize(
    "record, error",
    [
        ({}, "prompt is missing.* write"),
        ({"text": "Q"}, "prompt is missing.* write"),
        ({"prompt": "Q"}, "completion is missing.* write"),
        ({"prompt": "Q", "Prompt": "R", "completion": "A"}, "'prompt' and 'Prompt' have the same name; rename"),
        ({"question": "Q", "instruction": "R", "answer": "A"}, "instruction and question may be the prompt"),
        ({"question": "Q", "response": "R", "answer": "A"}, "response and answer may be the completion"),
        ({"user": "Q", "human": "R", "assistant": "A"}, "user and human may be the prompt"),
        ({"question": "Q", "answer": 42}, "answer is 42, not text; write it as a string"),
        ({"prompt": [USER], "completion": "A"}, r"prompt is \[\{'content'.*not text"),
        ({"prompt": "Q", "chosen": "A", "rejected": "B"}, "preference training.*rename chosen to completion"),
        ({"chosen": [USER, BOT], "rejected": [USER, BOT]}, "preference training"),
        ({"prompt": "Q", "completion": "A", "label": False}, "label is False"),
        ({"prompt": "Q", "completion": "A", "label": "0"}, "label is '0'"),
        ({"prompt": "Q", "completion": "A", "kto_tag": False}, "kto_tag is False"),
        ({"prompt": "Q", "completion": "A", "weight": 0}, "weight of a record"),
        ({"question": "Q", "answer": "A", "choices": ["A", "B"]}, "choices is not supported"),
        ({"question": "Q", "answer": "A", "image": {"url": "x"}}, "image is not supported"),
        ({"messages": [USER, BOT], "tools": [{"type": "function"}]}, "tools is not supported"),
        ({"messages": [USER, BOT], "weight": 0.5}, "weight of a record"),
        ({"messages": "User: Q"}, "messages must be a list"),
        ({"messages": []}, "prompt is missing"),
        ({"messages": [USER]}, 'no message has the role "assistant"'),
        ({"messages": [USER, BOT], "conversation": [USER, BOT]}, "messages and conversation contain messages"),
        ({"messages": [{"role": "system", "content": "S"}, USER, BOT], "system": "S"}, "two system prompts"),
        ({"system": "S", "system_prompt": "T", "question": "Q", "answer": "A"}, "are system prompts; remove one"),
        ({"messages": [USER, BOT, USER], "response": "B"}, "response is beside messages without a last answer"),
        ({"instruction": "Q", "output": "A", "history": "R"}, "history must be a list of turns"),
        ({"instruction": "Q", "output": "A", "history": [["R"]]}, "history must be a list of turns"),
        ({"instruction": f"Q{EOT}", "output": "A", "system": "S"}, r"must not contain <\|endoftext\|>"),
    ],
)
def test_records_with_another_meaning_are_refused(record, error):
    """Most of them were prepared without a word about the fields that were not used."""
    with pytest.raises(CorpusError, match=error):
        pair_document(record)


def test_empty_fields_are_not_refused():
    record = {"messages": [USER, BOT], "tools": [], "images": None, "weight": 1, "label": True}
    assert pair_document(record).content == CHAT
    assert pair_document({"messages": [USER, BOT], "conversation": []}).content == CHAT
    assert pair_document({"messages": [], "prompt": "Q", "completion": "A", "label": "True"}).content[1] == ("A", True)
    assert pair_document({"prompt": "Q ", "completion": "A", "label": "", "weight": ""}).content[1] == ("A", True)


@pytest.mark.parametrize(
    "last", [[USER], [USER, BOT | {"weight": 0}], [USER, BOT | {"content": None}], [USER, BOT | {"loss": False}]]
)
def test_messages_after_the_last_answer_to_learn_are_left_out(last):
    """They ran into the next chat, because no end-of-text token followed, and lengths were those of several chats."""
    content, _, left_out, cut = pair_document({"messages": [USER, BOT, *last]})
    assert content == CHAT
    assert left_out == {"message after the last answer to learn": len(last)}
    assert cut == sum(len(message["content"] or "") for message in last)


@pytest.mark.parametrize("answer", [{"weight": 0}, {"content": ""}, {"content": " \n"}, {"loss": 0}, {"masked": True}])
def test_a_chat_without_an_answer_to_learn_is_left_out(answer):
    """An empty answer was a target: it taught the end-of-text token."""
    content, _, left_out, _ = pair_document({"messages": [USER, BOT | answer]})
    assert content is None
    assert left_out == {"chat without an answer to learn": 1}
