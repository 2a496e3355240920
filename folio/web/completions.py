"""OpenAI's completions protocol, without HTTP: request validation, choices, and response JSON.

A request asks for n choices per prompt. Choice k of prompt p has index p * n + k and is the same as sample k of
sample.py with the same settings.
"""

import json
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, NamedTuple

from annotated_types import Ge, Le

from folio import UserError
from folio.base import settings
from folio.base.settings import ConfigError, NonNegativeFloat, NonNegativeInt, PositiveInt, Settings
from folio.data.shards import PromptFormat
from folio.data.tokenizer import EOT_TEXT, Tokenizer
from folio.decoding.kv_cache import split_documents
from folio.decoding.language_model import Count, GenerationConfig, LanguageModel, Penalty, Share
from folio.decoding.prompts import encode_prompt, unknown_characters
from folio.decoding.sampling import Sampling
from folio.decoding.scheduler import Completion, TokenLogprobs
from folio.decoding.text_stream import TextStream, clean_stop
from folio.web.chat import ANSWER_PREFIX, STOP, chat_prompt
from folio.web.server import RequestError
from folio.web.streaming import CompletionReader, ResponseFormat
from folio.web.unused_fields import check_unused_fields

MAX_STOPS = 16  # OpenAI allows 4
MAX_STOP_LENGTH = 1000  # characters; the search for a longer one would be slow
MAX_LOGIT_BIASES = 300
MAX_LOGPROBS = 20
MIN_LOGPROB = -9999.0
STREAM_OPTIONS = ("include_usage", "include_obfuscation")  # the second one adds random characters against eavesdroppers
MAX_MESSAGE_LENGTH = 400  # characters of an error message that quotes a value of the request
MAX_SHOWN_CHARACTERS = 10  # unknown characters quoted in an error message


@dataclass(frozen=True)
class Limits:
    """Upper limits for one request."""

    choices: int = 128  # prompts * n
    new_tokens: int = 2**16  # max_tokens * choices
    prompt_tokens: int = 2**18  # sum over all prompts
    log_probabilities: int = 2**20  # max_tokens * choices * logprobs; each takes about 100 bytes


def error_content(problem: RequestError) -> dict[str, Any]:
    """Return an error response body in OpenAI's format."""
    status = problem.status
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": str(problem), "type": kind, "param": problem.param, "code": problem.code}}


# --- fields -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fields(Settings):
    """Fields of both endpoints, with OpenAI's defaults. top_k, min_p and repetition_penalty are vLLM's."""

    n: PositiveInt = 1
    stream: bool = False
    temperature: NonNegativeFloat = 1.0
    top_p: Share = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    seed: NonNegativeInt | None = None  # None: random
    top_k: Annotated[int, Ge(-1)] | None = None  # -1 and 0, vLLM's defaults: off
    min_p: Annotated[float, Ge(0), Le(1)] | None = None
    repetition_penalty: Annotated[float, Ge(1e-6), Le(1e6)] = 1.0
    context_stride: Count | None = None

    def problems(self) -> list[tuple[str, str]]:
        return GenerationConfig(temperature=self.temperature).problems()

    def sampling(self, logit_bias: tuple[tuple[int, float], ...]) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k if self.top_k and self.top_k > 0 else None,
            top_p=None if self.top_p == 1 else self.top_p,
            min_p=self.min_p or None,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=logit_bias,
        )


@dataclass(frozen=True)
class TextFields(Fields):
    """Fields of /v1/completions."""

    max_tokens: PositiveInt = 16
    best_of: Count | None = None
    logprobs: Annotated[int, Ge(0), Le(MAX_LOGPROBS)] | None = None

    def problems(self) -> list[tuple[str, str]]:
        problems = super().problems()
        if self.best_of not in (None, self.n):
            problems.append(("best_of", "it must equal n: this server does not rank choices"))
        return problems


@dataclass(frozen=True)
class ChatFields(Fields):
    """Fields of /v1/chat/completions."""

    max_tokens: PositiveInt | None = None  # None: until the context is full
    max_completion_tokens: PositiveInt | None = None  # newer name of max_tokens
    logprobs: bool = False
    top_logprobs: Annotated[int, Ge(0), Le(MAX_LOGPROBS)] = 0

    def problems(self) -> list[tuple[str, str]]:
        problems = super().problems()
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            problems.append(("max_completion_tokens", "it is a newer name of max_tokens; give only one of them"))
        if self.top_logprobs and not self.logprobs:
            problems.append(("top_logprobs", "it needs logprobs=true"))
        return problems


OTHER_FIELDS = ("model", "stop", "logit_bias", "stream_options")  # used by both endpoints, each read by its function


def field_names(kind: type[Fields]) -> list[str]:
    """The names of all fields that an endpoint uses."""
    return [*settings.setting_names(kind), *OTHER_FIELDS, "messages" if kind is ChatFields else "prompt"]


def read_fields(kind: type[settings.Config], body: dict[str, Any]) -> settings.Config:
    """Parse the fields of a request, which has other fields, too. null means the default. Raises RequestError."""
    fields = {name: value for name, value in body.items() if value is not None}
    try:
        return settings.from_json(kind, fields)
    except ConfigError as error:
        message = str(error).splitlines()[0]
        if len(message) > MAX_MESSAGE_LENGTH:  # keep the end, which states the rule
            message = f"{message[: MAX_MESSAGE_LENGTH // 2]} ... {message[-MAX_MESSAGE_LENGTH // 2 :]}"
        raise RequestError(message, param=message.partition("=")[0].partition(":")[0]) from None


def read_stop(body: dict[str, Any], tokenizer: Tokenizer) -> tuple[str, ...]:
    """Parse stop: a string or a list of strings. Raises RequestError."""
    value = body.get("stop")
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RequestError("stop must be a non-empty string or a list of non-empty strings", "stop")
    if len(texts) > MAX_STOPS:
        raise RequestError(f"stop must have at most {MAX_STOPS} strings, not {len(texts):,}", "stop")
    if any(len(text) > MAX_STOP_LENGTH for text in texts):
        raise RequestError(f"stop strings must have at most {MAX_STOP_LENGTH:,} characters", "stop")
    try:
        return tuple(clean_stop(tokenizer, text) for text in texts)
    except UserError as problem:
        raise RequestError(str(problem), "stop") from None


def read_biases(body: dict[str, Any], vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Parse logit_bias: an object that maps token ids to numbers added to their logits. Raises RequestError."""
    value = body.get("logit_bias")
    value = {} if value is None else value
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIASES:
        raise RequestError(f"logit_bias must be an object with at most {MAX_LOGIT_BIASES} token ids", "logit_bias")
    biases = {}
    for key, bias in value.items():
        if not key.isdecimal() or not key.isascii() or len(key) > 9 or int(key) >= vocab_size:
            message = f"logit_bias: {key[:20]!r} is not a token id from 0 to {vocab_size - 1:,}"
            raise RequestError(message, "logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise RequestError(f"logit_bias of token {key} must be a number from -100 to 100", "logit_bias")
        biases[int(key)] = float(bias)
    return tuple(biases.items())


def read_stream_options(body: dict[str, Any]) -> bool:
    """Parse stream_options and return include_usage. Raises RequestError."""
    options = body.get("stream_options")
    options = {} if options is None else options
    if isinstance(options, dict):
        include = options.get("include_usage")
        unused = [name for name in options if name not in STREAM_OPTIONS and options[name]]
        if isinstance(include, bool | None) and not unused:
            return bool(include)
    message = 'stream_options must be an object such as {"include_usage": true}, without other options'
    raise RequestError(message, "stream_options")


# --- prompts ----------------------------------------------------------------------------------------------------------


def is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_ids(ids: list[int], tokenizer: Tokenizer) -> None:
    """Raise RequestError for an id that the tokenizer does not have."""
    for token in ids:
        if not 0 <= token < tokenizer.vocab_size:
            message = f"prompt: {str(token)[:20]} is not a token id from 0 to {tokenizer.vocab_size - 1:,}"
            raise RequestError(message, "prompt")


def encode(text: str, param: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a text, at least one. <|endoftext|> becomes the special token. Raises RequestError."""
    try:
        return encode_prompt(tokenizer, text).ids
    except UserError as problem:
        unknown = [*islice(map(repr, unknown_characters(tokenizer, text)), MAX_SHOWN_CHARACTERS + 1)]
        shown = " ".join(unknown[:MAX_SHOWN_CHARACTERS]) + (" ..." if len(unknown) > MAX_SHOWN_CHARACTERS else "")
        reason = f"these characters are not in the model's vocabulary: {shown}" if unknown else str(problem)
        if tokenizer.eot is None and EOT_TEXT in text:
            reason += f" ({EOT_TEXT} is ordinary text to this model)"
        raise RequestError(f"{param}: {reason}", param) from None


def token_bytes(token: int, tokenizer: Tokenizer) -> bytes:
    return EOT_TEXT.encode() if token == tokenizer.eot else tokenizer.token_bytes(token)


def token_text(token: int, tokenizer: Tokenizer) -> str:
    """Return a token's name in log-probabilities.

    A token that is only a part of a character becomes bytes:\\xe2, as in OpenAI's API: U+FFFD would be ambiguous.
    """
    content = token_bytes(token, tokenizer)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + content.decode("utf-8", "backslashreplace")


def read_prompts(value: Any, tokenizer: Tokenizer, max_prompts: int) -> list[list[int]]:
    """Return the ids of `prompt`: a string, a list of token ids, or a list of those. Raises RequestError."""
    value = "" if value is None else value
    single = isinstance(value, str) or (isinstance(value, list) and value and all(map(is_id, value)))
    prompts = [value] if single else value
    if not isinstance(prompts, list) or not prompts:
        raise RequestError(
            "prompt must be a string, a list of strings, a list of token ids, or a list of such lists", "prompt"
        )
    if len(prompts) > max_prompts:
        raise RequestError(
            f"prompt: a request can have at most {max_prompts:,} prompts, not {len(prompts):,}", "prompt"
        )
    kind = str if isinstance(prompts[0], str) else list
    if not all(isinstance(prompt, kind) and (kind is str or all(map(is_id, prompt))) for prompt in prompts):
        raise RequestError("prompt must not mix strings, token ids, and lists of token ids", "prompt")
    if kind is str:
        return [encode(text, "prompt", tokenizer) for text in prompts]
    for ids in prompts:
        check_ids(ids, tokenizer)
    return [ids or encode("", "prompt", tokenizer) for ids in prompts]


# --- requests ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GenerationRequest:
    """A validated request."""

    choices: list["Choice"]
    stream: bool
    include_usage: bool
    prompt_tokens: int

    def usage(self) -> dict[str, int]:
        completion_tokens = sum(choice.tokens for choice in self.choices)
        total = self.prompt_tokens + completion_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def read_request(body: Any, gpt: LanguageModel, limits: Limits, chat: PromptFormat | None = None) -> GenerationRequest:
    """Parse the body of /v1/completions or, with a prompt format, of /v1/chat/completions. Raises RequestError."""
    if not isinstance(body, dict):
        raise RequestError('the body must be an object such as {"prompt": "..."}')
    tokenizer = gpt.tokenizer
    kind = ChatFields if chat else TextFields
    check_unused_fields(body, field_names(kind))
    fields = read_fields(kind, body)
    stop = read_stop(body, tokenizer)
    if isinstance(fields, ChatFields):
        try:
            text = chat_prompt(chat, body.get("messages"))
        except UserError as problem:
            raise RequestError(str(problem), "messages") from None
        prompts = [encode(text, "messages", tokenizer)]
        max_tokens = fields.max_completion_tokens or fields.max_tokens
        logprobs, stop = fields.top_logprobs if fields.logprobs else None, (*stop, *STOP[chat])
    else:
        prompts = read_prompts(body.get("prompt"), tokenizer, limits.choices)
        max_tokens, logprobs = fields.max_tokens, fields.logprobs
    lengths = [len(prompt) for prompt in prompts]
    config = gpt.model.config
    context = max(len(split_documents(prompt, config.document_token)[-1]) for prompt in prompts)
    new_tokens = check_context(context, max_tokens, config.block_size, fields.context_stride is not None)
    check_size(limits, lengths, fields.n, new_tokens, logprobs)
    sampling = fields.sampling(read_biases(body, tokenizer.vocab_size))
    seed = secrets.randbelow(2**63) if fields.seed is None else fields.seed
    choices = [
        Choice(
            index * fields.n + sample,
            Completion(
                prompt,
                sampling,
                max_new_tokens=max_tokens,
                seed=seed,
                sample=sample,
                context_stride=fields.context_stride,
                logprobs=logprobs,
            ),
            TextStream(tokenizer, stop),
            skip=ANSWER_PREFIX[chat] if chat else "",
        )
        for index, prompt in enumerate(prompts)
        for sample in range(fields.n)
    ]
    return GenerationRequest(choices, fields.stream, read_stream_options(body), sum(lengths))


def check_context(prompt_tokens: int, max_tokens: int | None, block_size: int, slides: bool) -> int:
    """Return how many tokens to generate at most after a prompt of this length.

    Raises RequestError if they do not fit in the context, unless the context slides. The last new token is not fed to
    the model, so it needs no position.
    """
    available = block_size + 1 - prompt_tokens
    new_tokens = max(1, available if max_tokens is None else max_tokens)
    if new_tokens > available and not slides:
        problem = f"this model's context length is {block_size:,} tokens, and the prompt has {prompt_tokens:,}"
        remedy = "shorten it"
        if available > 0:
            problem += f", so max_tokens can be at most {available:,}, not {new_tokens:,}"
            remedy = "shorten the prompt or lower max_tokens"
        message = f"{problem}; {remedy}, or set context_stride to slide the context"
        raise RequestError(message, "prompt", "context_length_exceeded")
    return new_tokens


def check_size(limits: Limits, lengths: list[int], n: int, new_tokens: int, logprobs: int | None) -> None:
    """Raise RequestError if a request is too large. lengths: tokens per prompt. new_tokens: per choice."""
    choices = len(lengths) * n
    for param, what, value, limit in (
        ("n", "choices (prompts * n)", choices, limits.choices),
        ("max_tokens", "new tokens (prompts * n * max_tokens)", choices * new_tokens, limits.new_tokens),
        ("prompt", "prompt tokens", sum(lengths), limits.prompt_tokens),
        ("logprobs", "log-probabilities", choices * new_tokens * (logprobs or 0), limits.log_probabilities),
    ):
        if value > limit:
            raise RequestError(f"a request can have at most {limit:,} {what}, not {value:,}", param)


# --- choices ----------------------------------------------------------------------------------------------------------


class Token(NamedTuple):
    """A token with its log-probabilities."""

    id: int
    offset: int  # characters of the choice's text before it, including the skipped prefix
    logprobs: TokenLogprobs


class ChoiceDelta(NamedTuple):
    """New text and tokens of a choice."""

    text: str
    tokens: list[Token]  # tokens that begin in the text, if log-probabilities were requested


class Choice(CompletionReader):
    """One choice of a response: text and log-probabilities of a completion, read as they are generated."""

    def __init__(self, index: int, completion: Completion, text: TextStream, skip: str):
        """skip: prefix to remove from the text."""
        super().__init__(completion, text)
        self.index, self.skip = index, skip
        self.characters = 0  # length of the text so far
        self.pending: deque[Token] = deque()  # tokens whose text is not complete
        self.deltas: list[ChoiceDelta] = []

    def delta(self) -> ChoiceDelta:
        """Return what was generated since the last call."""
        text, held_back = "", self.text.held_back
        for token in self.read():
            if token.id is not None and self.completion.logprobs is not None:
                self.pending.append(Token(token.id, self.characters + len(text) + len(held_back), token.logprobs))
            text += token.text
            held_back = self.text.held_back
        self.characters += len(text)
        if text and self.skip:
            text, self.skip = text.removeprefix(self.skip), ""
        tokens = []
        if text or self.finish_reason:
            has_all = self.finish_reason is not None and not self.stopped
            while self.pending and (self.pending[0].offset < self.characters or has_all):
                tokens.append(self.pending.popleft())
        self.deltas.append(ChoiceDelta(text, tokens))
        return self.deltas[-1]


# --- responses --------------------------------------------------------------------------------------------------------


def clip(logprob: float) -> float:
    """Replace -inf, which JSON cannot represent."""
    return max(logprob, MIN_LOGPROB)


class CompletionAnswer(ResponseFormat):
    """The response of /v1/completions: one JSON object, or a stream of server-sent events."""

    id_prefix, object_name, chunk_name = "cmpl", "text_completion", "text_completion"

    def __init__(self, request: GenerationRequest, model: str, fingerprint: str, tokenizer: Tokenizer):
        self.request, self.tokenizer, self.readers = request, tokenizer, request.choices
        self.media_type = "text/event-stream; charset=utf-8" if request.stream else "application/json"
        self.head = {"id": f"{self.id_prefix}-{secrets.token_hex(12)}", "created": int(time.time())}
        self.head |= {"model": model, "system_fingerprint": fingerprint}
        self.has_begun = False

    def update(self) -> bytes:
        changed = [(choice, choice.delta()) for choice in self.readers if choice.has_update]
        if not self.request.stream:
            return b""
        parts = [self.part(c, self.delta(d.text), d.tokens) for c, d in changed if d.text or c.finish_reason]
        if parts and not self.has_begun:
            parts, self.has_begun = self.first_parts() + parts, True
        return b"".join(self.event([part], None) for part in parts)

    def end(self) -> bytes:
        if not self.request.stream:
            return json.dumps(self.to_json()).encode()
        return (self.event([], self.request.usage()) if self.request.include_usage else b"") + b"data: [DONE]\n\n"

    def error(self, problem: RequestError) -> bytes:
        return b"data: %b\n\ndata: [DONE]\n\n" % json.dumps(error_content(problem)).encode()

    def to_json(self) -> dict[str, Any]:
        choices = []
        for choice in self.readers:
            text, tokens = "".join(d.text for d in choice.deltas), [token for d in choice.deltas for token in d.tokens]
            choices.append(self.part(choice, self.content(text), tokens))
        return {**self.head, "object": self.object_name, "choices": choices, "usage": self.request.usage()}

    def event(self, parts: list[dict[str, Any]], usage: dict[str, int] | None) -> bytes:
        """Return an event with parts of choices. usage: in the last event, None in others."""
        chunk = {**self.head, "object": self.chunk_name, "choices": parts}
        if self.request.include_usage:
            chunk["usage"] = usage
        return b"data: %b\n\n" % json.dumps(chunk).encode()

    def part(self, choice: Choice, content: dict[str, Any], tokens: Sequence[Token]) -> dict[str, Any]:
        """A choice, or a part of it."""
        logprobs = None if choice.completion.logprobs is None else self.logprobs(tokens)
        return {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def first_parts(self) -> list[dict[str, Any]]:
        """Return the parts of the first event, before any text."""
        return []

    def content(self, text: str) -> dict[str, Any]:
        """Return the fields for the text of a complete choice."""
        return {"text": text}

    def delta(self, text: str) -> dict[str, Any]:
        """Return the fields for new text of a choice."""
        return {"text": text}

    def logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        return {
            "tokens": [token_text(token.id, self.tokenizer) for token in tokens],
            "token_logprobs": [clip(token.logprobs.logprob) for token in tokens],
            "top_logprobs": [self.top_logprobs(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def top_logprobs(self, token: Token) -> dict[str, float]:
        """Return the log-probabilities of the most likely tokens and of this token."""
        top: dict[str, float] = {}
        for other, logprob in token.logprobs.top:
            top.setdefault(token_text(other, self.tokenizer), clip(logprob))  # two tokens may have the same text
        return top | {token_text(token.id, self.tokenizer): clip(token.logprobs.logprob)}


class ChatAnswer(CompletionAnswer):
    """The response of /v1/chat/completions."""

    id_prefix, object_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first_parts(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": choice.index, "delta": delta, "finish_reason": None} for choice in self.readers]

    def delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            content = [*token_bytes(token, self.tokenizer)]
            return {"token": token_text(token, self.tokenizer), "logprob": clip(logprob), "bytes": content}

        content = [
            {
                **entry(token.id, token.logprobs.logprob),
                "top_logprobs": [entry(other, logprob) for other, logprob in token.logprobs.top],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}
