"""Messages in the forms of other programs, as one text."""

import pytest

from folio.data.blocks import END, CorpusError
from folio.data.sources.chats import Message, format_chat, read_messages

HELLO = {"role": "user", "content": "Hello"}
HI = {"role": "assistant", "content": "Hi."}


def test_the_answers_and_their_ends_are_targets():
    messages = [{"role": "developer", "content": "Be short."}, HELLO, HELLO, HI, HI, HELLO]
    assert format_chat(read_messages("messages", messages)) == [
        ("System: Be short.\n\nUser: Hello\n\nUser: Hello\n\nAssistant:", False),
        (" Hi.", True),
        (END, True),
        ("Assistant:", False),
        (" Hi.", True),
        (END, True),
        ("User: Hello\n\n", False),
    ]


def parts_of(*texts: str, **more) -> list[dict]:
    return [{"type": "text", "text": text, **more} for text in texts]


@pytest.mark.parametrize(
    "message, role, text, is_target",
    [
        ({"from": "human", "value": "a"}, "user", "a", False),
        ({"from": "gpt", "value": "a"}, "assistant", "a", True),
        ({"role": "Assistant ", "content": "a"}, "assistant", "a", True),  # it was the context of a role of its own
        ({"role": "model", "content": "a", "tool_calls": [], "name": None, "id": 5}, "assistant", "a", True),
        ({"role": "developer", "content": "a", "weight": None}, "system", "a", False),
        ({"role": "user", "content": parts_of("a", "b")}, "user", "a\nb", False),
        ({"role": "assistant", "content": parts_of("a", image_url=None)}, "assistant", "a", True),
        (HELLO | {"weight": 0}, "user", "Hello", False),
        (HELLO | {"masked": False}, "user", "Hello", False),
        *((HI | field, "assistant", "Hi.", False) for field in ({"weight": 0}, {"train": False}, {"masked": True})),
        *((HI | field, "assistant", "Hi.", True) for field in ({"weight": 1.0}, {"train": True, "masked": False})),
        (HI | {"content": "Hi.<|endoftext|>"}, "assistant", "Hi.", True),  # it was text before the end
    ],
)
def test_messages_of_other_programs(message, role, text, is_target):
    assert read_messages("messages", [message]) == [Message(role, text, is_target)]


@pytest.mark.parametrize(
    "message, error",
    [
        ("Hello", r"messages\[1\] must be"),
        ({"content": "a"}, r"messages\[1\]: the role None is not supported; use system, user, or assistant"),
        ({"role": "tool", "content": "5"}, r"the role 'tool' is not"),
        ({"from": "observation", "value": "5"}, "the role 'observation' is not"),
        ({"role": "asistant", "content": "a"}, "the role 'asistant' is not"),  # it was context, not a target
        ({"role": "assistant", "from": "gpt", "content": "a"}, "role and from, .* remove one"),
        ({"role": "assistant"}, r"messages\[1\].content must be a string"),
        (HI | {"loss_scale": 0.5}, r"\.loss_scale is 0.5; only 0 and 1"),
        (HI | {"content": None, "tool_calls": [{"id": "a"}]}, r"messages\[1\].tool_calls is not supported"),
        (HI | {"function_call": {"name": "f"}}, r"function_call is not supported"),
        (HI | {"name": "Ann"}, r"\.name is not supported"),
        (HI | {"reasoning_content": "Hm."}, r"\.reasoning_content is not supported"),
        (HI | {"weight": 0.5}, r"\.weight is 0.5; only 0 and 1"),
        (HI | {"train": "no"}, r"\.train is 'no'; only"),
        (HELLO | {"weight": 1}, r"\.weight: only messages of the assistant are targets"),
        (HELLO | {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "not 'image_url': .* only text"),
        (HELLO | {"content": ["a"]}, "may only contain parts"),
        (HELLO | {"content": "a<|endoftext|>"}, r"content must not contain <\|endoftext\|>"),
        (HI | {"content": "<|endoftext|>a"}, r"content must not contain <\|endoftext\|>"),
    ],
)
def test_messages_with_another_meaning_are_refused(message, error):
    """Fields such as tool_calls and weight were ignored, and messages of unknown roles were context."""
    with pytest.raises(CorpusError, match=error):
        read_messages("messages", [HELLO, message])


def test_an_answer_that_is_not_a_target_has_the_same_tokens():
    counted, masked = (format_chat(read_messages("messages", [HELLO, HI | {"weight": w}])) for w in (1, 0))
    assert [text for text, _ in masked] == [text for text, _ in counted]
    assert [is_target for _, is_target in masked] == [False, False, False]
