"""OpenAI's completions protocol without HTTP: a request that is checked, the choices of its answer, and their JSON.

A request asks for n choices for each of its prompts. Choice k of prompt p has the index p * n + k, and is sample k of
sample.py with the same settings.
"""

import codecs
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
from folio.data.tokenizer import EOT_TEXT, Tokenizer
from folio.decoding.language_model import Count, GenerationConfig, LanguageModel, Penalty, Share
from folio.decoding.prompts import encode_prompt
from folio.decoding.sampling import Sampling
from folio.decoding.scheduler import Completion, TokenLogprobs
from folio.decoding.text_stream import TextStream
from folio.web.chat import ChatTemplate
from folio.web.server import RequestError
from folio.web.streaming import CompletionReader, ResponseFormat

MOST_STOPS = 16  # OpenAI allows 4; lm-eval's tasks have more
LONGEST_STOP = 1000  # characters; a longer one would take long to look for
MOST_BIASES = 300
MOST_LOGPROBS = 20
LOWEST_LOGPROB = -9999.0
LONGEST_MESSAGE = 400  # characters, of one with a value that a client gave
SHOWN_CHARACTERS = 10  # of those that a tokenizer lacks


@dataclass(frozen=True)
class Limits:
    """The most that one request may ask for."""

    choices: int = 128  # prompts * n
    new_tokens: int = 2**16  # max_tokens * choices
    prompt_tokens: int = 2**18  # of all prompts
    log_probabilities: int = 2**20  # scored tokens * logprobs; each takes about 100 bytes


def error_content(problem: RequestError) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    status = problem.status
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": str(problem), "type": kind, "param": problem.param, "code": problem.code}}


# --- fields -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fields(Settings):
    """The fields that both protocols have, with OpenAI's defaults. Those of vLLM are top_k to repetition_penalty."""

    n: PositiveInt = 1
    stream: bool = False
    temperature: NonNegativeFloat = 1.0
    top_p: Share = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    seed: NonNegativeInt | None = None  # None: a random one
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
    """Those of /v1/completions."""

    max_tokens: NonNegativeInt = 16
    best_of: Count | None = None
    echo: bool = False
    logprobs: Annotated[int, Ge(0), Le(MOST_LOGPROBS)] | None = None
    suffix: str = ""

    def problems(self) -> list[tuple[str, str]]:
        problems = super().problems()
        if self.best_of not in (None, self.n):
            problems.append(("best_of", "it must be n: this server does not select among more choices"))
        if self.suffix:
            problems.append(("suffix", "this model continues text, and cannot insert it before a suffix"))
        if self.max_tokens == 0 and not self.echo:
            problems.append(("max_tokens", "it must be at least 1, or 0 with echo"))
        return problems


@dataclass(frozen=True)
class ChatFields(Fields):
    """Those of /v1/chat/completions."""

    max_tokens: PositiveInt | None = None  # None: until the context is full
    max_completion_tokens: PositiveInt | None = None  # the newer name
    logprobs: bool = False
    top_logprobs: Annotated[int, Ge(0), Le(MOST_LOGPROBS)] = 0


def read_fields(kind: type[settings.Config], body: dict[str, Any]) -> settings.Config:
    """The fields of a request; null means the default, and unknown ones are ignored. Raises RequestError."""
    given = {name: value for name, value in body.items() if value is not None}
    try:
        return settings.from_json(kind, given)
    except ConfigError as problems:
        message = str(problems).splitlines()[0]
        if len(message) > LONGEST_MESSAGE:  # the value is long, and what is wrong with it comes last
            message = f"{message[: LONGEST_MESSAGE // 2]} ... {message[-LONGEST_MESSAGE // 2 :]}"
        raise RequestError(message, param=message.partition("=")[0].partition(":")[0]) from None


def read_stop(body: dict[str, Any]) -> tuple[str, ...]:
    """stop: a text, or a list of texts. Raises RequestError."""
    value = body.get("stop")
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RequestError("stop: it takes text or a list of texts, none of them empty", "stop")
    if len(texts) > MOST_STOPS:
        raise RequestError(f"stop: it takes at most {MOST_STOPS} texts, not {len(texts):,}", "stop")
    if any(len(text) > LONGEST_STOP for text in texts):
        raise RequestError(f"stop: a text can have at most {LONGEST_STOP:,} characters", "stop")
    return tuple(texts)


def read_biases(body: dict[str, Any], vocab_size: int) -> tuple[tuple[int, float], ...]:
    """logit_bias: an object of token ids and what to add to their logits. Raises RequestError."""
    value = body.get("logit_bias")
    value = {} if value is None else value
    if not isinstance(value, dict) or len(value) > MOST_BIASES:
        raise RequestError(f"logit_bias: it takes an object with at most {MOST_BIASES} token ids", "logit_bias")
    biases = {}
    for key, bias in value.items():
        if not key.isdecimal() or not key.isascii() or len(key) > 9 or int(key) >= vocab_size:
            message = f"logit_bias: {key[:20]!r} is not the id of a token; there are {vocab_size:,}"
            raise RequestError(message, "logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise RequestError(f"logit_bias: token {key} must have a number from -100 to 100", "logit_bias")
        biases[int(key)] = float(bias)
    return tuple(biases.items())


def read_stream_options(body: dict[str, Any]) -> bool:
    """stream_options.include_usage. Raises RequestError."""
    options = body.get("stream_options")
    options = {} if options is None else options
    include = options.get("include_usage") if isinstance(options, dict) else options
    if not isinstance(options, dict) or not isinstance(include, bool | None):
        message = 'stream_options: it takes an object such as {"include_usage": true}'
        raise RequestError(message, "stream_options")
    return bool(include)


# --- prompts ----------------------------------------------------------------------------------------------------------


class RequestPrompt(NamedTuple):
    ids: list[int]  # at least one
    is_empty: bool  # whether the client gave none, and the model sees the default prompt


def is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_ids(ids: list[int], param: str, tokenizer: Tokenizer) -> None:
    """Raises RequestError for an id that the tokenizer does not have."""
    for token in ids:
        if not 0 <= token < tokenizer.vocab_size:
            message = f"{param}: there is no token {str(token)[:20]}; ids are from 0 to {tokenizer.vocab_size - 1:,}"
            raise RequestError(message, param)


def encode(text: str, param: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of a text, with <|endoftext|> as its special id; at least one. Raises RequestError."""
    try:
        return encode_prompt(tokenizer, text).ids
    except UserError as problem:
        characters = dict.fromkeys(text if tokenizer.eot is None else text.replace(EOT_TEXT, ""))
        unknown = [*islice(map(repr, filter(tokenizer.count_unknown, characters)), SHOWN_CHARACTERS + 1)]
        shown = " ".join(unknown[:SHOWN_CHARACTERS]) + (" ..." if len(unknown) > SHOWN_CHARACTERS else "")
        reason = f"these characters are not in the vocabulary of the model: {shown}" if unknown else str(problem)
        raise RequestError(f"{param}: {reason}", param) from None


def decode(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text of ids, with <|endoftext|> for its special id."""
    return b"".join(token_bytes(token, tokenizer) for token in ids).decode("utf-8", "replace")


def token_bytes(token: int, tokenizer: Tokenizer) -> bytes:
    return EOT_TEXT.encode() if token == tokenizer.eot else tokenizer.token_bytes(token)


def token_text(token: int, tokenizer: Tokenizer) -> str:
    """A token in log-probabilities. One that is only a part of a character is written like bytes:\\xe2, as OpenAI does,
    because U+FFFD would be the text of many tokens.
    """
    content = token_bytes(token, tokenizer)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + content.decode("utf-8", "backslashreplace")


def read_prompts(value: Any, tokenizer: Tokenizer, most: int) -> list[RequestPrompt]:
    """The prompts of the field `prompt`: a text, ids, or a list of at most so many of those. Raises RequestError."""
    value = "" if value is None else value
    single = isinstance(value, str) or (isinstance(value, list) and value and all(map(is_id, value)))
    prompts = [value] if single else value
    if not isinstance(prompts, list) or not prompts:
        raise RequestError(
            "prompt: it takes a text, a list of texts, a list of token ids, or a list of those", "prompt"
        )
    if len(prompts) > most:
        raise RequestError(
            f"prompt: a request can have at most {most:,} prompts, and this one has {len(prompts):,}", "prompt"
        )
    kind = str if isinstance(prompts[0], str) else list
    if not all(isinstance(prompt, kind) and (kind is str or all(map(is_id, prompt))) for prompt in prompts):
        raise RequestError("prompt: its list must hold texts only, or token ids only, or lists of token ids", "prompt")
    if kind is str:
        return [RequestPrompt(encode(text, "prompt", tokenizer), not text) for text in prompts]
    for ids in prompts:
        check_ids(ids, "prompt", tokenizer)
    return [RequestPrompt(ids or encode("", "prompt", tokenizer), not ids) for ids in prompts]


# --- requests ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """A request that can be answered."""

    choices: list["Choice"]
    stream: bool
    include_usage: bool
    prompt_tokens: int

    @property
    def completions(self) -> list[Completion]:
        return [choice.completion for choice in self.choices]

    def usage(self) -> dict[str, int]:
        completion_tokens = sum(choice.tokens for choice in self.choices)
        total = self.prompt_tokens + completion_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def read_request(body: Any, gpt: LanguageModel, limits: Limits, chat: ChatTemplate | None = None) -> Request:
    """The request in the body of /v1/completions, or with a template in that of /v1/chat/completions.

    Raises RequestError.
    """
    if not isinstance(body, dict):
        raise RequestError('the body must be an object, as {"prompt": "..."}')
    tokenizer = gpt.tokenizer
    fields = read_fields(ChatFields if chat else TextFields, body)
    stop = read_stop(body)
    if isinstance(fields, ChatFields):
        try:
            text = chat.prompt(body.get("messages"))
        except UserError as problem:
            raise RequestError(str(problem), "messages") from None
        prompts = [RequestPrompt(encode(text, "messages", tokenizer), False)]
        max_tokens = fields.max_completion_tokens or fields.max_tokens
        logprobs, echo, stop = fields.top_logprobs if fields.logprobs else None, False, (*stop, *chat.stop)
    else:
        prompts = read_prompts(body.get("prompt"), tokenizer, limits.choices)
        max_tokens, logprobs, echo = fields.max_tokens, fields.logprobs, fields.echo
    scores_prompts = echo and logprobs is not None
    slides = fields.context_stride is not None and not scores_prompts
    lengths = [len(prompt.ids) for prompt in prompts]
    new = check_context(max(lengths), max_tokens, gpt.model.config.block_size, slides)
    check_size(limits, lengths, fields.n, new, logprobs, scores_prompts)
    sampling = fields.sampling(read_biases(body, tokenizer.vocab_size))
    seed = secrets.randbelow(2**63) if fields.seed is None else fields.seed
    choices = [
        Choice(
            index * fields.n + sample,
            Completion(
                prompt.ids,
                sampling,
                max_new_tokens=max_tokens,
                seed=seed,
                sample=sample,
                context_stride=fields.context_stride,
                logprobs=logprobs,
                prompt_logprobs=scores_prompts,
            ),
            TextStream(tokenizer, stop),
            echo=prompt.ids if echo and not prompt.is_empty else [],
            skip=chat.answer_prefix if chat else "",
        )
        for index, prompt in enumerate(prompts)
        for sample in range(fields.n)
    ]
    return Request(choices, fields.stream, read_stream_options(body), sum(lengths))


def check_context(prompt: int, max_tokens: int | None, block_size: int, slides: bool) -> int:
    """How many tokens may follow so many of a prompt. Raises RequestError for more than fit, unless the context slides.

    The last token is not read, so it needs no place in the context.
    """
    fits = block_size + 1 - prompt
    new = max(1, fits if max_tokens is None else max_tokens)
    if new > fits and not slides:
        problem = f"the context of this model is {block_size:,} tokens, and the prompt has {prompt:,}"
        remedy = "shorten it"
        if fits > 0:
            problem += f", so max_tokens can be at most {fits:,}, not {new:,}"
            remedy = "shorten the prompt or lower max_tokens"
        slide = "set context_stride, so that the context slides (not with echo and logprobs)"
        raise RequestError(f"{problem}: {remedy}, or {slide}", "prompt", "context_length_exceeded")
    return new


def check_size(
    limits: Limits, lengths: list[int], n: int, new: int, logprobs: int | None, scores_prompts: bool
) -> None:
    """Raises RequestError for a request that is too large. lengths: of its prompts. new: tokens of each choice."""
    tokens, choices = sum(lengths), len(lengths) * n
    scored = choices * new + n * tokens * scores_prompts
    for param, what, value, limit in (
        ("n", "choices (prompts * n)", choices, limits.choices),
        ("max_tokens", "new tokens (prompts * n * max_tokens)", choices * new, limits.new_tokens),
        ("prompt", "tokens in its prompts", tokens, limits.prompt_tokens),
        ("logprobs", "log-probabilities", scored * (logprobs or 0), limits.log_probabilities),
    ):
        if value > limit:
            raise RequestError(f"a request can have at most {limit:,} {what}, and this one has {value:,}", param)


# --- choices ----------------------------------------------------------------------------------------------------------


class Token(NamedTuple):
    """A token with its log-probabilities."""

    id: int
    offset: int  # the characters of the choice's text before it, with what is left out at the beginning
    logprobs: TokenLogprobs | None  # None for the first token of a prompt


class ChoiceDelta(NamedTuple):
    """What is new of a choice."""

    text: str
    tokens: list[Token]  # those that begin in the text, if log-probabilities were asked for


class Choice(CompletionReader):
    """One choice of an answer: the text of a completion and the log-probabilities of its tokens, as they arrive."""

    def __init__(self, index: int, completion: Completion, text: TextStream, echo: list[int], skip: str):
        """echo: the ids of the prompt if its text comes first. skip: a character that is left out at the beginning."""
        super().__init__(completion, text)
        self.index, self.echo, self.skip = index, echo, skip
        self.characters = 0  # of the text so far
        self.pending: deque[Token] = deque()  # tokens whose text is held back
        self.deltas: list[ChoiceDelta] = []  # so far

    def delta(self) -> ChoiceDelta:
        """What is new since the last call."""
        text = self._read_echo() if self.echo else ""
        held_back = self.text.held_back
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

    def _read_echo(self) -> str:
        """The text of the prompt. Its log-probabilities are complete before the first token."""
        ids, self.echo = self.echo, []
        decoder, text = codecs.getincrementaldecoder("utf-8")("replace"), ""
        for token, logprobs in zip(ids, self.completion.prompt_token_logprobs or [None] * len(ids), strict=True):
            if self.completion.logprobs is not None:
                self.pending.append(Token(token, len(text), logprobs))
            text += decoder.decode(token_bytes(token, self.text.tokenizer))
        return text + decoder.decode(b"", final=True)


# --- answers ----------------------------------------------------------------------------------------------------------


def clip(logprob: float) -> float:
    """JSON has no infinity."""
    return max(logprob, LOWEST_LOGPROB)


class CompletionAnswer(ResponseFormat):
    """The answer to a request of /v1/completions: one piece of JSON, or a stream of server-sent events."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"  # of the id; the values of "object"

    def __init__(self, request: Request, model: str, fingerprint: str, tokenizer: Tokenizer):
        self.request, self.tokenizer, self.readers = request, tokenizer, request.choices
        self.media_type = "text/event-stream; charset=utf-8" if request.stream else "application/json"
        self.head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time())}
        self.head |= {"model": model, "system_fingerprint": fingerprint}
        self.has_begun = False  # whether an event was sent

    def news(self) -> bytes:
        changed = [(choice, choice.delta()) for choice in self.readers if choice.has_news]
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
        return {**self.head, "object": self.whole, "choices": choices, "usage": self.request.usage()}

    def event(self, parts: list[dict[str, Any]], usage: dict[str, int] | None) -> bytes:
        """An event with parts of choices. usage: of the last one."""
        chunk = {**self.head, "object": self.chunk, "choices": parts}
        if self.request.include_usage:
            chunk["usage"] = usage
        return b"data: %b\n\n" % json.dumps(chunk).encode()

    def part(self, choice: Choice, content: dict[str, Any], tokens: Sequence[Token]) -> dict[str, Any]:
        """A choice, or a part of it."""
        logprobs = None if choice.completion.logprobs is None else self.logprobs(tokens)
        return {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def first_parts(self) -> list[dict[str, Any]]:
        """What comes before the text of the choices."""
        return []

    def content(self, text: str) -> dict[str, Any]:
        """The text of a choice."""
        return {"text": text}

    def delta(self, text: str) -> dict[str, Any]:
        """A part of the text of a choice."""
        return {"text": text}

    def logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        return {
            "tokens": [token_text(token.id, self.tokenizer) for token in tokens],
            "token_logprobs": [token.logprobs and clip(token.logprobs.logprob) for token in tokens],
            "top_logprobs": [token.logprobs and self.top_logprobs(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def top_logprobs(self, token: Token) -> dict[str, float]:
        """Those of the most likely tokens and of this one, which is last if it is not among them."""
        top: dict[str, float] = {}
        for other, logprob in token.logprobs.top:
            top.setdefault(token_text(other, self.tokenizer), clip(logprob))  # two tokens may have one text
        return top | {token_text(token.id, self.tokenizer): clip(token.logprobs.logprob)}


class ChatAnswer(CompletionAnswer):
    """That of /v1/chat/completions."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

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
