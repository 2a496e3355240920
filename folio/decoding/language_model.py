"""LanguageModel, a GPT with its tokenizer on a device: the API behind sample.py and `folio.load`.

`generate` and `stream` take a text. `loss`, `losses`, `logits`, `attention`, and `hidden_states` return what the model
computes for a text, as NumPy arrays. `batches` takes the ids of many prompts; a batch yields pieces of text, or tokens
with their logits.

Dimensions of arrays: T tokens of the text, V vocabulary of the tokenizer, C channels, H heads, L layers.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, TypeVar, overload

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le
from torch import Tensor

from folio import UserError
from folio.base import settings
from folio.base.number_format import counted
from folio.base.progress import note
from folio.base.settings import ConfigError, NonNegativeFloat, NonNegativeInt, Settings
from folio.checkpoints import foreign
from folio.checkpoints.build_model import model_from_tensors
from folio.checkpoints.find_runs import find_run
from folio.data.shards import PromptFormat
from folio.data.tokenizer import OnUnknown, Tokenizer
from folio.data.windows import divide
from folio.decoding.decoders import make_decoder
from folio.decoding.kv_cache import split_documents
from folio.decoding.prompts import Prompt, encode_prompt, encode_text
from folio.decoding.sampling import Sampling
from folio.decoding.scheduler import Step, generate
from folio.decoding.text_stream import TextBatch, TextStream
from folio.decoding.torch_decoder import inference_context
from folio.decoding.trace import Heads, Trace
from folio.machine import memory
from folio.machine.runtime import DTYPES, Runtime, resolve_runtime
from model import GPT

SMALL_MODEL = 4_000_000  # parameters; smaller models are fast enough that "auto" is float32, the most precise dtype
QUANTIZED = ("int8", "int4")  # CPU only

Count = Annotated[int, Ge(1)]  # without a maximum
Share = Annotated[float, Gt(0), Le(1)]
Penalty = Annotated[float, Ge(-2), Le(2)]  # OpenAI's limits
Model = TypeVar("Model", bound="LanguageModel")
Text = str | Sequence[int] | np.ndarray | Tensor  # or its token ids, (T,)
Request = tuple[Sequence[int], int]  # ids of a prompt, and the number of the sample


@dataclass(frozen=True)
class GenerationConfig(Settings):
    """Settings of text generation."""

    # --- generation ---
    num_samples: Count = 1  # texts to generate for each prompt
    max_new_tokens: Count | None = 500  # maximum per text, after its prompt; None: until its context is full
    stop: str | None = None  # end a sample before this text; in sample.py, \n is a line break; None: off
    on_unknown: OnUnknown = "error"  # unknown characters of a prompt: error, skip or replace
    context_stride: Count | None = None  # tokens to drop when the context is full; None: see docs/use/sampling.md
    batch_size: Count = 32  # texts to generate at once; fewer if they do not fit in memory
    # --- sampling ---
    temperature: NonNegativeFloat = 0.8  # below 1: more deterministic, above 1: more random; 0: the most likely token
    top_k: Count | None = 200  # sample from the k most likely tokens; None: off
    top_p: Share | None = None  # sample from the most likely tokens that together have this probability; None: off
    min_p: Share | None = None  # sample from tokens at least this probable relative to the most likely one; None: off
    repetition_penalty: Annotated[float, Ge(1e-6), Le(1e6)] = 1.0  # above 1: tokens that occurred are less likely
    presence_penalty: Penalty = 0.0  # subtracted from the logits of tokens that were sampled before; 0: off
    frequency_penalty: Penalty = 0.0  # subtracted from a token's logit for each time it was sampled; 0: off
    seed: NonNegativeInt = 1337  # random seed; sample k does not depend on num_samples

    def problems(self) -> list[tuple[str, str]]:
        """Violations of rules that types do not express, as (setting, problem and remedy)."""
        problems = []
        if self.temperature and not 1e-6 <= self.temperature <= 1e6:  # outside, float32 overflows
            problems.append(("temperature", "it must be from 1e-6 to 1e6, or 0 for the most likely token"))
        if self.stop == "":
            problems.append(("stop", "it must not be empty; None turns it off"))
        return problems

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "GenerationConfig":
        """Create settings from keyword arguments, with the command line's rules. Raises ConfigError."""
        names = settings.setting_names(cls)
        if unknown := values.keys() - names:
            raise ConfigError(f"{min(unknown)} is not a setting; the settings are {', '.join(names)}")
        return settings.from_json(cls, values)

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            repetition_penalty=self.repetition_penalty,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
        )


def share_weights(model: GPT, device: str | None = None) -> GPT:
    """A GPT that shares the model's weights. They are copied only to another device ("meta": no values)."""
    tensors = {name: p.detach().to(device=device) for name, p in model.named_parameters()}
    return model_from_tensors(model.config, tensors)


def resolve_precision(model: GPT, device: str, dtype: str) -> tuple[Runtime, str]:
    """Resolve the runtime and the dtype of the weights. Raises UserError."""
    if dtype == "auto" and model.num_params()["total"] < SMALL_MODEL:
        dtype = "float32"
    if dtype not in ("auto", *DTYPES, *QUANTIZED):
        raise UserError(f"dtype={dtype}: use auto, {', '.join((*DTYPES, *QUANTIZED))}")
    runtime = resolve_runtime(device, "float32" if dtype in QUANTIZED else dtype, False)
    if dtype in QUANTIZED and runtime.device.type != "cpu":
        raise UserError(f"dtype={dtype}: it requires a CPU, not {runtime.device}; use --dtype=auto or --device=cpu")
    return runtime, dtype if dtype in QUANTIZED else str(runtime.dtype).removeprefix("torch.")


BYTES_PER_WEIGHT = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int4": 18 / 32}  # of a matrix


def decoding_memory(model: GPT, dtype: str) -> int:
    """Bytes of the weights for decoding in a dtype. The model may be on the meta device."""
    parts = model.num_params()
    matrix_weights = parts["embeddings"] + parts["attention"] + parts["MLP"]
    other_bytes = 4 if dtype in ("int8", "int4") else BYTES_PER_WEIGHT[dtype]
    return round(BYTES_PER_WEIGHT[dtype] * matrix_weights + other_bytes * (parts["total"] - matrix_weights))


def refuse_too_large_to_decode(model: GPT, dtype: str, device: torch.device, available: int | None) -> None:
    """Raise UserError if the weights in this dtype take more than the `available` bytes. None: not known."""
    remedies = ["a smaller model"]
    for smaller in ("int4", "int8", "bfloat16") if device.type == "cpu" else ():
        if (size := decoding_memory(model, smaller)) <= available:
            remedies.append(f"--dtype={smaller}, which takes {memory.format_bytes(size)}")
    what = f"dtype={dtype}: the {model.num_params()['total']:,} weights"
    memory.require_free(decoding_memory(model, dtype), what, remedies[-1], available)


class LanguageModel:
    """A GPT and its tokenizer, for generating text and for looking at what the model computes.

    The attribute `model` is in eval mode, on the device and in the dtype; with int8 and int4, it is on the meta device,
    without weights. After changing its weights, create a new LanguageModel(gpt.model, gpt.tokenizer).
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        device: str = "auto",
        dtype: str = "auto",
        weights: Mapping[str, Tensor] | None = None,
    ):
        """Does not change the given model. device, dtype: see SampleConfig. Raises UserError.

        weights: for int8 and int4, the parameters by name if the model is on the meta device. Each is read once.
        """
        self.runtime, self.dtype = resolve_precision(model, device, dtype)
        if weights is None and model.lm_head.weight.is_meta:
            raise UserError("the model is on the meta device, without weights; load it again, with dtype=float32")
        self.tokenizer = tokenizer
        self.path: Path | None = None  # of the checkpoint, if loaded from one
        self.prompt_format: PromptFormat | None = None  # of the checkpoint's training data, if any
        if self.dtype in QUANTIZED:
            self.model = share_weights(model, "meta").eval()
            weights = dict(model.named_parameters()) if weights is None else weights
            self.decoder = make_decoder(self.model, self.runtime, self.dtype, weights)
        else:
            self.model = share_weights(model).eval()
            self.model.to(self.runtime.device, self.runtime.dtype)  # cast once, not at each step
            self.decoder = make_decoder(self.model, self.runtime)

    @classmethod
    def load(
        cls: type[Model], init_from: str | Path, which: str = "best", device: str = "auto", dtype: str = "auto"
    ) -> Model:
        """Load a run or any other source that foreign.load supports. Raises UserError.

        which: the checkpoint of a run, "best" or "last".
        """
        if which not in ("best", "last"):
            raise UserError(f"which={which}: it must be best or last")
        is_quantized = dtype in QUANTIZED  # weights are read one by one
        available = memory.free(torch.device("cpu"))  # before reading the weights, which may be used without a copy
        ckpt = foreign.load(find_run(str(init_from)), which, is_quantized)
        model = ckpt.build()
        runtime, resolved_dtype = resolve_precision(model, device, dtype)
        if runtime.device.type != "cpu":
            available = memory.free(runtime.device)
        refuse_too_large_to_decode(model, resolved_dtype, runtime.device, available)
        language_model = cls(model, ckpt.tokenizer, device, dtype, ckpt.model if is_quantized else None)
        language_model.path, language_model.prompt_format = ckpt.path, ckpt.prompt_format
        return language_model

    def __repr__(self) -> str:
        parameters, tokenizer = self.model.num_params()["total"], self.tokenizer
        return (
            f"LanguageModel({parameters:,} parameters, {tokenizer.vocab_size:,} tokens ({tokenizer.kind}), "
            f"context {self.model.config.block_size:,}, {self.dtype} on {self.runtime.device})"
        )

    # --- text ---------------------------------------------------------------------------------------------------------

    @overload
    def generate(self, prompt: str, *, num_samples: None = None, **settings: Any) -> str: ...
    @overload
    def generate(self, prompt: str, *, num_samples: int, **settings: Any) -> list[str]: ...
    @overload
    def generate(self, prompt: Sequence[str], *, num_samples: None = None, **settings: Any) -> list[str]: ...
    @overload
    def generate(self, prompt: Sequence[str], *, num_samples: int, **settings: Any) -> list[list[str]]: ...
    def generate(
        self, prompt: str | Sequence[str], *, num_samples: int | None = None, **settings: Any
    ) -> str | list[str] | list[list[str]]:
        """Generate the text that follows the prompt; with num_samples, a list of texts. Raises UserError.

        prompt: a text, or a list of texts, which gives a list with the result of each; they are generated together.
        settings: fields of GenerationConfig, such as temperature=0.7, top_k=50, stop="\\n", seed=2. The same settings
        produce the same text, also in sample.py.
        """
        is_list = isinstance(prompt, list | tuple)
        if num_samples is None and not is_list:
            return "".join(self.stream(prompt, **settings))
        config = GenerationConfig.from_dict(
            settings if num_samples is None else settings | {"num_samples": num_samples}
        )
        prompts = [self.encode_prompt(each, config.on_unknown).ids for each in (prompt if is_list else [prompt])]
        n = config.num_samples
        requests = [(ids, sample) for ids in prompts for sample in range(n)]
        texts = [text for batch in self.batches(requests, config) for text in batch.run()]
        if num_samples is None or not is_list:
            return texts
        return [texts[first : first + n] for first in range(0, len(texts), n)]

    def stream(self, prompt: str, **settings: Any) -> Iterator[str]:
        """Yield the text of `generate` in pieces of whole characters, as they are generated."""
        if "num_samples" in settings:
            raise UserError("num_samples: a stream is one text; use generate for several")
        config = GenerationConfig.from_dict(settings)
        ids = self.encode_prompt(prompt, config.on_unknown).ids
        (batch,) = self.batches([(ids, 0)], config)
        return (piece for (piece,) in batch if piece)

    # --- what the model computes for a text ---------------------------------------------------------------------------

    def loss(self, text: Text) -> float:
        """The mean of `losses`, in nats per token."""
        return float(self.losses(text).mean())

    def losses(self, text: Text) -> np.ndarray:
        """The loss of each token of a text but the first, -ln(probability) in nats: float32 (T - 1,).

        text: a text, in which <|endoftext|> is a special token, or token ids. It needs two tokens, and may be longer
        than the context: then it is divided into contexts as in tools/evaluate.py. Raises UserError, also for unknown
        characters.
        """
        ids = self._encode(text)
        if len(ids) < 2:
            raise UserError("the text has 1 token: a loss needs at least 2, because the first one is not predicted")
        parts = []
        for begin, end in zip(*divide(len(ids) - 1, self.model.config.block_size, 0), strict=True):
            logits = self._logits(ids[begin:end])
            targets = torch.tensor(ids[begin + 1 : end + 1], device=logits.device)
            parts.append(F.cross_entropy(logits, targets, reduction="none").cpu().numpy())
        return np.concatenate(parts)

    def logits(self, text: Text) -> np.ndarray:
        """The logits of the next token after each token of a text: float32 (T, V).

        Row t is computed from the tokens 0 to t, and predicts token t + 1. Columns that pad the model's vocabulary are
        left out. text: a text or token ids, of 1 to block_size tokens. Raises UserError, also for unknown characters.
        """
        return self._logits(self._encode_context(text)).cpu().numpy()

    def attention(self, text: Text) -> np.ndarray:
        """The attention weights: float32 (L, H, T, T). text: see `logits`.

        [l, h, t, s] is how much token t attends to token s in head h of layer l. Each row [l, h, t] sums to 1.
        As in transformers' `output_attentions`. Raises UserError if the weights are int8 or int4.
        """
        weights: list[Tensor] = []
        self._trace(text, lambda layer, heads: weights.append(heads.weights))
        return torch.stack(weights).float().cpu().numpy()

    def hidden_states(self, text: Text) -> np.ndarray:
        """The hidden state of each token before, between, and after the layers: float32 (L + 1, T, C).

        [0] is the embedding, with its position if the model adds one; [l] is the output of l layers, the input of the
        next one; [L] is after the final norm, too, so its product with the output matrix gives the logits. As in
        transformers' `output_hidden_states`. text: see `logits`. Raises UserError if the weights are int8 or int4.
        """
        stream = self._trace(text).stream  # (2L + 1, T, C): before each attention and MLP, and after the last layer
        with torch.no_grad():
            states = [*stream[:-1:2], self.model.transformer.ln_f(stream[-1])]
        return torch.stack(states).float().cpu().numpy()

    def _encode(self, text: Text) -> list[int]:
        """Return the ids of a text, or token ids as a list. Raises UserError if there are none or they are invalid."""
        if isinstance(text, str):
            ids = encode_text(self.tokenizer, text)
        else:
            array = np.asarray(text.cpu() if isinstance(text, Tensor) else text)
            if array.ndim != 1:
                raise UserError(f"token ids of shape {array.shape}: give one sequence, of shape (T,)")
            if array.size and array.dtype.kind not in "iu":
                raise UserError(f"token ids of type {array.dtype}: give a text, or integers")
            ids = array.tolist()
        if not ids:
            raise UserError("the text is empty: give at least one token")
        if not 0 <= min(ids) <= max(ids) < self.tokenizer.vocab_size:
            raise UserError(
                f"token ids from {min(ids)} to {max(ids)}: the tokenizer's are 0 to {self.tokenizer.vocab_size - 1:,}"
            )
        return ids

    def _encode_context(self, text: Text) -> list[int]:
        """Like _encode. Raises UserError for more tokens than the context."""
        ids, block_size = self._encode(text), self.model.config.block_size
        if len(ids) > block_size:
            raise UserError(
                f"the text has {len(ids):,} tokens, but the context has {block_size:,}: give a shorter one, such as "
                f"gpt.tokenizer.encode(text)[:{block_size}]; only loss and losses take longer ones"
            )
        return ids

    @torch.inference_mode()
    def _logits(self, ids: list[int]) -> Tensor:
        """Return the logits after each of up to block_size ids, float32 (T, V)."""
        if self.dtype in QUANTIZED:  # only the decoder has the weights
            batch = self.decoder.batch(1)
            documents = split_documents(ids, self.model.config.document_token)
            logits = torch.cat([batch.score(document) for document in documents])
        else:
            with inference_context(self.model, self.runtime):
                (logits,) = self.model.logits(torch.tensor([ids], device=self.runtime.device))
        return logits[:, : self.tokenizer.vocab_size].float()

    def _trace(self, text: Text, on_heads: Callable[[int, Heads], None] = lambda layer, heads: None) -> Trace:
        ids = self._encode_context(text)
        if self.dtype in QUANTIZED:
            raise UserError(
                f"dtype={self.dtype}: the inside of a model needs its weights; load it with dtype='float32'"
            )
        return Trace(self.model, torch.tensor(ids, device=self.runtime.device), on_heads=on_heads)

    # --- batches of prompts -------------------------------------------------------------------------------------------

    def encode_prompt(self, text: str, on_unknown: OnUnknown = "error") -> Prompt:
        """Encode a prompt with the model's tokenizer; see prompts.encode_prompt."""
        return encode_prompt(self.tokenizer, text, on_unknown)

    def batches(
        self, requests: Iterable[Request], config: GenerationConfig, stop: Sequence[str] = ()
    ) -> Iterator[TextBatch]:
        """Generate the texts that follow the prompts of requests, config.batch_size at a time, or as many as fit in
        memory. A request is the ids of a prompt, and the number of the sample, on which its random numbers depend.

        stop: texts before which a text ends, besides config.stop.
        """
        stops = [*stop, config.stop] if config.stop else stop
        device, requests, first = self.runtime.device, iter(requests), 0
        available = memory.free(device) or memory.free(torch.device("cpu"))  # Apple's GPUs share the CPU's memory
        rows = max(1, int(available / (memory.HEADROOM * self.decoder.row_bytes)))  # that fit
        batch = list(islice(requests, min(config.batch_size, rows + 1)))
        if len(batch) > rows:
            reason, texts = f"{memory.format_bytes(available)} of memory is free", counted(rows, "text is", "texts are")
            note(f"batch_size={config.batch_size:,}: {reason}, so {texts} generated at a time")
        requests, rows = chain(batch, requests), min(len(batch), rows)
        while batch := list(islice(requests, rows)):
            streams, ended = [TextStream(self.tokenizer, stops) for _ in batch], [False for _ in batch]
            yield TextBatch(range(first, first + len(batch)), self._steps(batch, config, ended), streams, ended)
            first += len(batch)

    def _steps(self, requests: Sequence[Request], config: GenerationConfig, ended: list[bool]) -> Iterator[Step]:
        """Yield the steps of one batch; see scheduler.generate."""
        return generate(
            self.decoder,
            [ids for ids, _ in requests],
            max_new_tokens=config.max_new_tokens,
            sampling=config.sampling,
            vocab_size=self.tokenizer.vocab_size,
            eot=self.tokenizer.eot,
            seed=config.seed,
            samples=[sample for _, sample in requests],
            stride=config.context_stride,
            ended=ended,
        )


class MeasuredModel(LanguageModel):
    """A language model that measures the speed at which it generates text."""

    tokens, seconds = 0, 0.0  # of all texts so far
    first_token_seconds = 0.0  # of the latest text

    def _steps(self, *args: Any) -> Iterator[Step]:
        start_time, previous_seconds = time.perf_counter(), self.seconds
        self.first_token_seconds = 0.0
        for step in super()._steps(*args):
            elapsed = time.perf_counter() - start_time
            self.first_token_seconds = self.first_token_seconds or elapsed
            self.seconds = previous_seconds + elapsed  # at each step, because Ctrl-C may end the text
            self.tokens += sum(token is not None for token in step.tokens)
            yield step

    def speed(self) -> str:
        """The numbers so far, in one line."""
        rate = self.tokens / self.seconds if self.seconds else 0
        speed = f"{counted(self.tokens, 'token')}, {rate:,.0f} tokens/s"
        latency = f"first token after {1000 * self.first_token_seconds:.0f} ms"
        source = f"; checkpoint {self.path}" if self.path else ""
        return f"{speed}, {latency}; {self.dtype} on {self.runtime.device}{source}"
