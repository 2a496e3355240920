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


NAMES = ["prompt response", "question answer", "query response", "input output", "source target", "inputs targets"]
NAMES += ["human assistant", "instruction output"]
WITH_CONTEXT = [("Q\n\nX", False), *PAIR[1:]]
PAIRS = [  # record, segments, and the fields that are used
    *((dict(zip(names.split(), ("Q", "A"), strict=True)), PAIR, names) for names in NAMES),
    ({"prompt": "Q", "completion": "A"}, [("Q", False), ("A", True), (END, True)], "prompt completion"),
    ({"prompt": "Q", "completion": " A", "id": "1", "source": "x"}, PAIR, "prompt completion"),
    ({"prompt": "Q", "completion": " A", "answer": "B", "question": "x"}, PAIR, "prompt completion"),
    ({"Prompt": "Q", " COMPLETION ": " A"}, PAIR, "Prompt, COMPLETION "),
    ({"prompt": "", "completion": " A"}, [("", False), *PAIR[1:]], "prompt completion"),
    ({"prompt": None, "completion": " A"}, [("", False), *PAIR[1:]], "prompt completion"),
    ({"question": "Q", "answer": " A"}, PAIR, "question answer"),
    ({"question": "Q\n", "answer": "A"}, [("Q\n", False), ("A", True), (END, True)], "question answer"),
    ({"instruction": "Q", "input": "", "output": "A", "text": "Q A"}, PAIR, "instruction input output"),
    ({"instruction": "Q", "input": None, "output": "A"}, PAIR, "instruction input output"),
    ({"instruction": "Q", "input": "X", "output": "A"}, WITH_CONTEXT, "instruction input output"),
    ({"Instruction": "", "input": "Q", "response": "A"}, PAIR, "Instruction input response"),
    (
        {"instruction": "Q", "context": "X", "response": "A", "category": "qa"},
        WITH_CONTEXT,
        "instruction context response",
    ),
    ({"question": "Q", "context": "X", "answer": "A"}, WITH_CONTEXT, "question context answer"),
    ({"prompt": "Q", "completion": f" A{EOT}"}, PAIR, "prompt completion"),
    (
        {"prompt": f"{EOT}Q", "completion": f" A{EOT}B"},
        [("", False), (END, False), *PAIR, ("B", True), (END, True)],
        "prompt completion",
    ),
    *(({"prompt": "Q", "completion": empty}, None, "prompt completion") for empty in (None, "", f" \n{EOT}")),
]
PROMPT_MASKED = [(CHAT[0][0], False), (" A", False), (END, False), *CHAT]
MESSAGES = "messages.role messages.content"
CHATS = [
    ({"messages": [USER, BOT]}, CHAT, MESSAGES),
    ({"prompt": "Q", "messages": [USER, BOT], "answer": "A"}, CHAT, MESSAGES),
    ({"prompt": None, "completion": None, "messages": [USER, BOT]}, CHAT, MESSAGES),
    ({"conversations": [HUMAN, GPT], "messages": None}, CHAT, "conversations.from conversations.value"),
    ({"conversation": [USER, BOT], "model": "x"}, CHAT, "conversation.role conversation.content"),
    ({"conversations": [HUMAN, GPT], "system": "S"}, SYSTEM, "conversations.from conversations.value system"),
    ({"messages": [{"role": "system", "content": "S"}, USER, BOT], "System": ""}, SYSTEM, MESSAGES),
    ({"system": "S", "messages": [USER, BOT]}, SYSTEM, f"{MESSAGES} system"),
    ({"instruction": "Q", "input": "", "output": "A", "system": "S"}, SYSTEM, "instruction input output system"),
    ({"system_prompt": "S", "question": "Q", "response": "A"}, SYSTEM, "system_prompt question response"),
    ({"instruction": "Q", "output": "A", "history": []}, CHAT, "instruction output"),
    ({"instruction": "R", "output": "B", "history": [["Q", "A"]]}, TURNS, "instruction output history"),
    ({"instruction": "Q", "output": "", "history": []}, None, "instruction output"),
    *(
        (
            {"prompt": prompt, "completion": [BOT]},
            segments,
            "prompt.role prompt.content completion.role completion.content",
        )
        for prompt, segments in (([USER], CHAT), ([USER, BOT, USER], PROMPT_MASKED))
    ),
    ({"messages": [USER, BOT | {"weight": 0}, USER, BOT]}, PROMPT_MASKED, MESSAGES),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}, BOT]},
        CHAT,
        f"{MESSAGES} messages.content.type messages.content.text",
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


NOT_LEARNED = [{"weight": 0}, {"loss": False}, {"loss": 0}, {"masked": True}, {"content": None}, {"content": ""}]
NOT_LEARNED += [{"content": " \n"}]


@pytest.mark.parametrize("last", [USER, *(BOT | change for change in NOT_LEARNED)])
def test_answers_that_are_not_learned(last):
    """After the last answer to learn, they ran into the next chat, because no end-of-text token followed. An empty
    answer was a target: it taught the end-of-text token.
    """
    content, _, left_out, cut = pair_document({"messages": [USER, BOT, USER, last]})
    assert content == CHAT
    assert left_out == {"message after the last answer to learn": 2}
    assert cut == len("Q") + len(last["content"] or "")
    if last != USER:
        content, _, left_out, _ = pair_document({"messages": [USER, last]})
        assert content is None
        assert left_out == {"chat without an answer to learn": 1}
