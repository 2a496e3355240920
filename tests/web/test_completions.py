import json
import math
import random
import re

import pytest

from folio.base.settings import setting_names
from folio.data.shards import PromptFormat
from folio.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from folio.decoding.language_model import LanguageModel
from folio.decoding.sampling import Sampling
from folio.decoding.scheduler import TokenLogprobs
from folio.web import completions
from folio.web.completions import ChatAnswer, CompletionAnswer, GenerationRequest, Limits, RequestError, read_request
from tests.support.decoding import random_model
from tests.support.tiny_tokenizers import bpe, trained

CONTEXT = 24
CHARACTERS = CharTokenizer("\nabcdefghij é日", eot=True)


def language_model(tokenizer: Tokenizer) -> LanguageModel:
    return LanguageModel(random_model(1, vocab_size=tokenizer.vocab_size + 3, block_size=CONTEXT), tokenizer, "cpu")


GPT = language_model(CHARACTERS)
GPT_BYTES = language_model(ByteTokenizer())
CHATS, PAIRS = "chat", "pairs"
MESSAGES = [{"role": "user", "content": "b"}]


def read(body: dict, gpt: LanguageModel = GPT, chat: PromptFormat | None = None, **limits: int) -> GenerationRequest:
    return read_request(body, gpt, Limits(**limits), chat)


# --- requests ---------------------------------------------------------------------------------------------------------


def test_defaults_are_openais():
    request = read({"prompt": "abc"})
    (completion,) = (choice.completion for choice in request.choices)
    assert completion.sampling == Sampling() and completion.max_new_tokens == 16 and completion.logprobs is None
    assert completion.prompt == [1, 2, 3]
    assert not request.stream and not request.include_usage
    null = read(dict.fromkeys([*setting_names(completions.TextFields), "stop", "logit_bias", "stream_options"]))
    assert null.choices[0].completion.sampling == Sampling() and null.choices[0].completion.max_new_tokens == 16
    assert null.choices[0].completion.prompt == [CHARACTERS.eot]  # the default prompt
    assert len({read({}).choices[0].completion.seed for _ in range(10)}) == 10
    for top_k in (0, -1):  # vLLM's values for "off"
        off = {"top_k": top_k, "min_p": 0, "repetition_penalty": 1.0}
        assert read(off).choices[0].completion.sampling == Sampling()


def test_all_fields():
    penalties = {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1.5}
    filters = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1}
    body = {"prompt": ["a", "b"], "n": 2, "best_of": 2, "max_tokens": 3, "seed": 7, "logprobs": 20}
    body |= {"stop": ["x", "yz"], "stream": True, "stream_options": {"include_usage": True}, "context_stride": 4}
    request = read({**body, **penalties, **filters, "logit_bias": {"1": -100, "2": 5.5}})
    assert request.stream and request.include_usage and request.prompt_tokens == 2
    for index, choice in enumerate(request.choices):
        completion = choice.completion
        assert choice.index == index and completion.prompt == [1 + index // 2] and completion.sample == index % 2
        assert completion.sampling == Sampling(**penalties, **filters, logit_bias=((1, -100.0), (2, 5.5)))
        assert (completion.seed, completion.max_new_tokens, completion.context_stride) == (7, 3, 4)
        assert completion.logprobs == 20
        assert choice.text.stop == ("x", "yz")


@pytest.mark.parametrize(
    "prompt, ids",
    [
        (["ab", "", "é"], [[1, 2], [14], [12]]),
        ([1, 2], [[1, 2]]),
        ([[1], [], [13, 0]], [[1], [14], [13, 0]]),
        ("a<|endoftext|>b", [[1, 14, 2]]),
        ("", [[14]]),
    ],
)
def test_prompts_are_strings_or_ids(prompt, ids):
    assert [choice.completion.prompt for choice in read({"prompt": prompt}).choices] == ids


@pytest.mark.parametrize(
    "field, remedy, values",
    [
        ("prompt", "must be a string", [5, []]),
        ("prompt", "must not mix", [["a", 1], [[1], 1], [[1], [None]]]),
        ("prompt", "from 0 to 14", [[15], [[1], [-1]], [10**4000]]),  # 15 is padding
        ("prompt", "vocabulary: 'x' 'y' '本'", ["axbyx本"]),
        ("prompt", r"'\ud800'", ["\ud800"]),
        ("prompt", "at most 128 prompts", [["x"] * 129]),
        ("max_tokens", "at least 1", [0]),
        ("temperature", "1e-6", [1e-9]),
        ("n", "integer", ["2" * 1000]),
        ("best_of", "must equal n", [3]),
        ("suffix", "not supported", ["a"]),
        ("stream_options", "include_usage", [True, {"include_usage": 1}, {"continuous_usage_stats": True}]),
        ("stop", "non-empty strings", ["", ["a", 1]]),
        ("stop", "at most 16", [["a"] * 17]),
        ("stop", "at most 1,000 characters", [["a", "a" * 1001]]),
        ("logit_bias", "must be an object", [[1]]),
        ("logit_bias", "from 0 to 14", [{"a": 1}, {"15": 1}, {"²": 1}, {"٣": 1}, {"9" * 5000: 1}]),
        ("logit_bias", "from -100 to 100", [{"1": 101}, {"1": True}]),
    ],
)
def test_an_error_names_its_field(field, remedy, values):
    for value in values:
        with pytest.raises(RequestError, match=re.escape(remedy)) as raised:
            read({field: value})
        assert raised.value.param == field
        assert raised.value.status == 400
        assert "\n" not in str(raised.value) and len(str(raised.value)) < 600


def test_prompt_and_new_tokens_must_fit_in_the_context():
    """The last token is not fed to the model, so it needs no position."""
    for length in range(1, CONTEXT + 3):
        available = CONTEXT + 1 - length
        if available > 0:
            request = read({"prompt": "a" * length, "max_tokens": available})
            assert request.choices[0].completion.max_new_tokens == available
        with pytest.raises(RequestError) as raised:
            read({"prompt": ["a", "a" * length], "max_tokens": max(available, 0) + 1})
        assert raised.value.code == "context_length_exceeded"
        assert f"{CONTEXT} tokens, and the prompt has {length}" in str(raised.value)
        assert (f"at most {available}, not {available + 1}" in str(raised.value)) == (available > 0)
        assert read({"prompt": "a" * length, "max_tokens": 99, "context_stride": 8}).prompt_tokens == length


def test_with_a_mask_of_documents_only_the_last_one_must_fit_in_the_context():
    eot = CHARACTERS.eot
    model = random_model(1, vocab_size=CHARACTERS.vocab_size, block_size=CONTEXT, document_token=eot)
    gpt, body = LanguageModel(model, CHARACTERS, "cpu"), {"prompt": [*[1] * CONTEXT, eot, 2, 3], "max_tokens": 5}
    assert read(body, gpt).choices[0].completion.prompt == body["prompt"]
    with pytest.raises(RequestError, match=f"the prompt has {CONTEXT + 3}"):
        read(body, GPT)


def test_request_size_is_limited():
    read({"prompt": ["a", "b"], "n": 3, "max_tokens": 5}, choices=6, new_tokens=30, prompt_tokens=2)
    for limits, param in (({"choices": 5}, "n"), ({"new_tokens": 29}, "max_tokens"), ({"prompt_tokens": 1}, "prompt")):
        with pytest.raises(RequestError) as raised:
            read({"prompt": ["a", "b"], "n": 3, "max_tokens": 5}, **limits)
        assert raised.value.param == param
    scored = {"prompt": "abc", "max_tokens": 2, "logprobs": 4, "n": 2}
    read(scored, log_probabilities=16)
    with pytest.raises(RequestError, match="at most 15 log-probabilities, not 16"):
        read(scored, log_probabilities=15)
    for n in (10**9, 2**62):
        with pytest.raises(RequestError, match="at most 128"):
            read({"n": n})


def test_a_conversation_becomes_a_prompt():
    request = read({"messages": MESSAGES, "stop": "x"}, GPT_BYTES, CHATS)
    (completion,) = (choice.completion for choice in request.choices)
    assert bytes(completion.prompt) == b"User: b\n\nAssistant:" and completion.max_new_tokens is None
    assert request.choices[0].text.stop == ("x", "\nUser:")
    assert bytes(read({"messages": MESSAGES}, GPT_BYTES, PAIRS).choices[0].completion.prompt) == b"b"
    for name in ("max_tokens", "max_completion_tokens"):
        assert read({"messages": MESSAGES, name: 5}, GPT_BYTES, CHATS).choices[0].completion.max_new_tokens == 5
    top = read({"messages": MESSAGES, "logprobs": True, "top_logprobs": 3}, GPT_BYTES, CHATS)
    assert top.choices[0].completion.logprobs == 3
    with pytest.raises(RequestError, match="messages") as raised:
        read({"messages": MESSAGES * 2}, GPT_BYTES, PAIRS)
    assert raised.value.param == "messages"
    with pytest.raises(RequestError, match="vocabulary: 'U'"):
        read({"messages": MESSAGES}, GPT, CHATS)


@pytest.mark.parametrize(
    "fields, param",
    [({"top_logprobs": 3}, "top_logprobs"), ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens")],
)
def test_fields_of_a_chat_that_contradict_each_other_are_errors(fields, param):
    """top_logprobs without logprobs was ignored, and so was max_tokens next to max_completion_tokens."""
    with pytest.raises(RequestError) as raised:
        read({"messages": MESSAGES, **fields}, GPT_BYTES, CHATS)
    assert raised.value.param == param


# --- answers ----------------------------------------------------------------------------------------------------------


def logprobs_of(token: int) -> TokenLogprobs:
    """Made-up log-probabilities, which decrease with the id."""
    return TokenLogprobs(-token / 7, [(other, -other / 7) for other in range(2)])


def generate(answer: CompletionAnswer, tokens: list[int], rng: random.Random) -> bytes:
    """Add tokens to the completion of an answer, a few at a time, and return the bytes sent."""
    (completion,) = (choice.completion for choice in answer.request.choices)
    remaining, sent = list(tokens), b""
    while not answer.readers[0].has_ended:
        for token in remaining[: rng.randint(1, 3)]:
            if completion.logprobs is not None:
                completion.token_logprobs.append(logprobs_of(token))
            completion.tokens.append(remaining.pop(0))
        if not remaining and rng.random() < 0.5:
            completion.finish_reason = "length"
        sent += answer.update()
    return sent + answer.end()


def events_of(sent: bytes) -> list[dict]:
    *events, done, nothing = sent.decode().split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_text_and_log_probabilities_do_not_depend_on_how_tokens_arrive(seed):
    """Streamed parts add up to the complete answer. Tokens begin at their offsets and end with the text."""
    rng = random.Random(seed)
    for _ in range(200):
        text = "".join(rng.choices("aé日🎉 ", k=rng.randint(0, 6)))
        stop = rng.choice([None, "é", "a ", "日🎉"])
        prompt = rng.choice(["é", "a日", ""])
        body = {"prompt": prompt, "logprobs": 2, "stop": stop, "stream_options": {"include_usage": True}}
        requests = [read({**body, "max_tokens": 1, "stream": stream}, GPT_BYTES) for stream in (False, True)]
        tokens = [*text.encode()]
        answers = [CompletionAnswer(request, "m", "fp_1", GPT_BYTES.tokenizer) for request in requests]
        sent, events = (generate(answer, tokens, rng) for answer in answers)
        answer = json.loads(sent)
        (choice,) = answer["choices"]
        expected = text.split(stop)[0] if stop else text
        assert choice["text"] == expected
        assert choice["finish_reason"] == ("stop" if stop and stop in text else "length")

        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == [token_text(token) for token in expected.encode()]
        positions = [position for position, c in enumerate(expected) for _ in c.encode()]
        assert logprobs["text_offset"] == positions
        assert logprobs["token_logprobs"] == [-token / 7 for token in expected.encode()]
        for name, logprob, top in zip(*list(logprobs.values())[:3], strict=True):
            assert top[name] == logprob and list(top)[:2] == ["\x00", "\x01"]

        usage = answer["usage"]
        assert usage["prompt_tokens"] == max(1, len(prompt.encode()))
        stops = [n for n in range(len(tokens) + 1) if stop and stop.encode() in bytes(tokens[:n])]
        assert usage["completion_tokens"] == (stops[0] if stops else len(tokens))
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]

        *parts, last = events_of(events)
        chunks = [part["choices"][0] for part in parts]
        assert "".join(chunk["text"] for chunk in chunks) == expected
        assert [offset for chunk in chunks for offset in chunk["logprobs"]["text_offset"]] == positions
        assert [chunk["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1]["finish_reason"] == choice["finish_reason"]
        assert last["choices"] == [] and last["usage"] == usage


def token_text(byte: int) -> str:
    return chr(byte) if byte < 128 else f"bytes:\\x{byte:02x}"


def answer_all(
    request: GenerationRequest,
    tokens: list[int],
    gpt: LanguageModel = GPT,
    kind: type[CompletionAnswer] = CompletionAnswer,
) -> bytes:
    """The bytes sent for a completion whose tokens arrive together."""
    completion = request.choices[0].completion
    completion.token_logprobs = completion.token_logprobs or [logprobs_of(token) for token in tokens]
    completion.tokens += tokens
    completion.finish_reason = "length"
    answer = kind(request, "the model", "fp_0", gpt.tokenizer)
    return answer.update() + answer.end()


def test_answer_format():
    body = {"prompt": "ab", "max_tokens": 2, "stream_options": {"include_usage": True}}
    sent, events = (answer_all(read({**body, "stream": stream}), [3, 4]) for stream in (False, True))
    answer = json.loads(sent)
    assert answer.pop("id").startswith("cmpl-") and isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "text_completion",
        "model": "the model",
        "system_fingerprint": "fp_0",
        "choices": [{"index": 0, "text": "cd", "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
    }
    event, _ = events_of(events)
    assert {name for name in event if name not in ("id", "created")} == {*answer}
    assert event["usage"] is None and event["choices"] == answer["choices"] and event["object"] == "text_completion"


def test_chat_answer_format():
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    tokens = [*" é".encode()]  # the space after "Assistant:" is not part of the answer
    sent, events = (
        answer_all(read({**body, "stream": stream}, GPT_BYTES, CHATS), tokens, GPT_BYTES, ChatAnswer)
        for stream in (False, True)
    )
    answer = json.loads(sent)
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
    (message,) = answer["choices"]
    assert message["message"] == {"role": "assistant", "content": "é", "refusal": None}
    _, first, second = message["logprobs"]["content"]
    assert first["token"] == "bytes:\\xc3" and first["bytes"] == [0xC3] and first["logprob"] == -0xC3 / 7
    assert [top["token"] for top in second["top_logprobs"]] == ["\x00", "\x01"]
    begin, event = events_of(events)
    assert begin["choices"] == [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
    assert event["choices"][0]["delta"] == {"content": "é"} and event["object"] == "chat.completion.chunk"
    assert event["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stop", [None, "d", " b", "b"])
def test_chat_log_probabilities_do_not_depend_on_how_tokens_arrive(stop, seed):
    """The last token before a stop string had none if it arrived together with the space before the answer."""
    rng = random.Random(seed)
    for answer in (" bcd", " ", "bcd", "  bd"):
        text = answer.split(stop)[0] if stop else answer
        for _ in range(20):
            body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "stop": stop}
            request = read(body, GPT_BYTES, CHATS)
            sent = generate(ChatAnswer(request, "m", "fp_0", GPT_BYTES.tokenizer), [*answer.encode()], rng)
            (choice,) = json.loads(sent)["choices"]
            assert choice["message"]["content"] == text.removeprefix(" ")
            deltas = request.choices[0].deltas
            assert [token["bytes"] for token in choice["logprobs"]["content"]] == [[byte] for byte in text.encode()]
            assert all(delta.text or delta is deltas[-1] for delta in deltas if delta.tokens)  # others are not sent


@pytest.mark.parametrize(
    "tokenizer, scored, expected",
    [
        # Keys would collide. Clients compare the largest value with that of the chosen token.
        (CharTokenizer("a?\ud800"), TokenLogprobs(-0.5, [(1, -0.25), (2, -0.5)]), {"?": -0.5}),  # both become ?
        (CHARACTERS, TokenLogprobs(-math.inf, [(2, -math.inf)]), {"b": -9999}),  # impossible tokens
    ],
)
def test_log_probabilities_are_numbers_of_the_chosen_token(tokenizer, scored, expected):
    gpt = language_model(tokenizer)
    request = read({"prompt": "a", "logprobs": 2, "max_tokens": 1}, gpt)
    request.choices[0].completion.token_logprobs.append(scored)
    (choice,) = json.loads(answer_all(request, [2], gpt))["choices"]
    assert choice["logprobs"]["top_logprobs"] == [expected]
    assert choice["logprobs"]["token_logprobs"] == [*expected.values()]


def test_decode_inverts_encode(seed):
    rng = random.Random(seed)
    for tokenizer in (bpe(), trained(), CHARACTERS, ByteTokenizer()):
        for _ in range(50):
            text = "".join(rng.choices(["a", "b", " ", "é", "日", "<|endoftext|>"], k=rng.randint(1, 9)))
            ids = completions.encode(text, "prompt", tokenizer)
            assert tokenizer.decode_prompt(ids) == text
            assert ids.count(tokenizer.eot) == text.count("<|endoftext|>")
