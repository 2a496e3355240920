"""LanguageModel, a GPT with its tokenizer on a device: the API behind sample.py and `folio.load`.

`generate` and `stream` take a text. `complete`, `texts`, and `steps` take the ids of many prompts, and yield whole
texts, pieces of text, or tokens with their logits.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar, overload

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from folio import UserError
from folio.base import settings
from folio.base.progress import note
from folio.base.settings import ConfigError, NonNegativeFloat, NonNegativeInt, Settings
from folio.checkpoints import foreign
from folio.checkpoints.find_runs import resolve
from folio.data.shards import PromptFormat
from folio.data.tokenizer import OnUnknown, Tokenizer
from folio.decoding.decoders import make_decoder
from folio.decoding.prompts import Prompt, encode_prompt
from folio.decoding.sampling import Sampling
from folio.decoding.scheduler import Step, generate
from folio.decoding.text_stream import TextStream
from folio.machine import memory
from folio.machine.runtime import DTYPES, Runtime, resolve_runtime
from model import GPT

SMALL_MODEL = 4_000_000  # parameters; smaller models are fast enough that "auto" is float32, the most precise dtype
QUANTIZED = ("int8", "int4")  # CPU only

Count = Annotated[int, Ge(1)]  # without a maximum
Share = Annotated[float, Gt(0), Le(1)]
Penalty = Annotated[float, Ge(-2), Le(2)]  # OpenAI's limits
Model = TypeVar("Model", bound="LanguageModel")


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
        names = cls.__dataclass_fields__
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
    return GPT.from_tensors(model.config, {name: p.detach().to(device=device) for name, p in model.named_parameters()})


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
    """A GPT and its tokenizer, for generating text.

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
        ckpt = foreign.load(resolve(str(init_from)), which, is_quantized)
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
    def generate(self, prompt: str, *, num_samples: int | None = None, **settings: Any) -> str | list[str]:
        """Generate the text that follows the prompt; with num_samples, a list of texts. Raises UserError.

        settings: fields of GenerationConfig, such as temperature=0.7, top_k=50, stop="\\n", seed=2. The same settings
        produce the same text, also in sample.py.
        """
        if num_samples is None:
            return "".join(self.stream(prompt, **settings))
        config = GenerationConfig.from_dict({**settings, "num_samples": num_samples})
        ids = self.encode_prompt(prompt, config.on_unknown).ids
        requests = ((ids, sample) for sample in range(config.num_samples))
        return list(self.complete(requests, config.num_samples, config))

    def stream(self, prompt: str, **settings: Any) -> Iterator[str]:
        """Yield the text of `generate` in pieces of whole characters, as they are generated."""
        if "num_samples" in settings:
            raise UserError("num_samples: a stream is one text; use generate for several")
        config = GenerationConfig.from_dict(settings)
        ids = self.encode_prompt(prompt, config.on_unknown).ids
        return (piece for (piece,) in self.texts([ids], [0], config) if piece)

    # --- batches of prompts -------------------------------------------------------------------------------------------

    def encode_prompt(self, text: str, on_unknown: OnUnknown = "error") -> Prompt:
        """Encode a prompt with the model's tokenizer; see prompts.encode_prompt."""
        return encode_prompt(self.tokenizer, text, on_unknown)

    def complete(
        self, requests: Iterable[tuple[list[int], int]], count: int, config: GenerationConfig
    ) -> Iterator[str]:
        """Yield the text for each of `count` requests (ids of a prompt, number of the sample), batch by batch."""
        rows, requests = self.rows(count, config.batch_size), iter(requests)
        while batch := list(islice(requests, rows)):
            prompts, samples = zip(*batch, strict=True)
            for pieces in zip(*self.texts(prompts, samples, config), strict=True):
                yield "".join(pieces)

    def rows(self, texts: int, batch_size: int) -> int:
        """The number of texts to generate at once: batch_size, or fewer if they do not fit in memory."""
        requested, device = min(batch_size, texts), self.runtime.device
        available = memory.free(device) or memory.free(torch.device("cpu"))  # Apple's GPUs share the CPU's memory
        fitting = max(1, int(available / (memory.HEADROOM * self.decoder.row_bytes)))
        if fitting < requested:
            reason = f"{memory.format_bytes(available)} of memory is free"
            note(f"batch_size={batch_size:,}: {reason}, so {fitting:,} texts are generated at a time")
        return min(fitting, requested)

    def batches(self, config: GenerationConfig) -> Iterator[range]:
        """Yield the numbers of a prompt's samples, batch by batch."""
        rows = self.rows(config.num_samples, config.batch_size)
        for first in range(0, config.num_samples, rows):
            yield range(first, min(first + rows, config.num_samples))

    def texts(
        self, prompts: Sequence[list[int]], samples: Sequence[int], config: GenerationConfig
    ) -> Iterator[list[str]]:
        """Yield the text that follows each prompt: at each step, a piece for each row."""
        texts, ended = [TextStream(self.tokenizer, config.stop) for _ in prompts], [False] * len(prompts)
        for step in self.steps(prompts, samples, config, ended):
            yield [
                text.push(token) if token is not None or has_ended else ""
                for text, token, has_ended in zip(texts, step.tokens, ended, strict=True)
            ]
            ended[:] = [text.ended for text in texts]
        yield [text.push(None) for text in texts]

    def steps(
        self,
        prompts: Sequence[list[int]],
        samples: Sequence[int],
        config: GenerationConfig,
        ended: list[bool] | None = None,
    ) -> Iterator[Step]:
        """Yield the tokens that follow each prompt, and their logits, step by step.

        Row b is sample samples[b]. The caller can set ended[b] = True to end it.
        """
        return generate(
            self.decoder,
            prompts,
            max_new_tokens=config.max_new_tokens,
            sampling=config.sampling,
            vocab_size=self.tokenizer.vocab_size,
            eot=self.tokenizer.eot,
            seed=config.seed,
            samples=samples,
            stride=config.context_stride,
            ended=ended,
        )
