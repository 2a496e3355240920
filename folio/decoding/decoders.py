"""The interface of decoders, and the choice of one for a model: compiled for a CPU, or torch's.

Dimensions: B batch (rows), V vocabulary.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Protocol

from torch import Tensor

from folio import UserError
from folio.base.progress import note
from folio.decoding.kv_cache import Prefix
from folio.decoding.sampling import Sample
from folio.machine.runtime import Runtime
from model import GPT, GPTConfig


class Batch(Protocol):
    """A batch of sequences (rows) that are decoded together: their key-value cache, logits, and sampling settings."""

    logits: Tensor  # (B, V) in float32, after the newest token of each row; valid until the next call
    steps_ahead: int  # steps to launch before a step's tokens are fetched, so that a GPU never waits for the host
    chunk: int | None  # prompt tokens to prefill between two steps, to bound the step's latency; None: no limit
    keeps_rows: bool  # whether rows that are not part of a step keep their keys and values

    def start(self, row: int, sample: Sample) -> None:
        """Set the sampling settings of a row."""

    def prefill(self, contexts: dict[int, list[int]], prefixes: dict[int, Prefix]) -> None:
        """Fill these rows of the cache with ids at positions 0, 1, ..., and compute the logits after them.

        prefixes: by row, the part of the context that is cached. The other rows stay as they are.
        """

    def sample(self, rows: list[int]) -> Callable[[], list[int]]:
        """Sample the next token of these rows from their logits.

        Returns a function that fetches the newest token of every row.
        """

    def step(self, rows: list[int]) -> Callable[[], list[int]]:
        """Append the last sampled tokens to these rows, and sample the next ones. Returns a function like `sample`."""


class Decoder(Protocol):
    """A model's weights in the fastest format for decoding on its device."""

    config: GPTConfig

    @property
    def row_bytes(self) -> int:
        """Memory per row of a batch."""

    def batch(self, rows: int, vocab_size: int | None = None) -> Batch:
        """An empty batch. Ids >= vocab_size, which pad a model's vocabulary, are never sampled."""


def make_decoder(
    model: GPT, runtime: Runtime, dtype: str | None = None, weights: Mapping[str, Tensor] | None = None
) -> Decoder:
    """Build the decoder for the runtime's device, and put the model into eval mode.

    The model's weights must not change while the decoder is used. dtype: "int8" or "int4" for a CPU; None: that of the
    weights. weights: see CPUDecoder, for int8 and int4. If the model or a sampling filter was changed, or numba is
    missing, torch decodes, and a line says why. Raises UserError if torch does not support the dtype.
    """
    from folio.decoding.torch_decoder import TorchDecoder

    if runtime.device.type != "cpu":
        return TorchDecoder(model, runtime)
    from folio.decoding.cpu_decoder import CPUDecoder, unsupported_reason

    reason = unsupported_reason(model)
    if reason is None:
        dtype = dtype or str(model.transformer.wte.weight.dtype).removeprefix("torch.")
        return CPUDecoder(model, dtype, weights)
    if dtype:
        raise UserError(f"dtype={dtype}: it needs the compiled decoder, but {reason}; use --dtype=auto")
    print_once(f"torch decodes, which is slower, because {reason}")
    return TorchDecoder(model, runtime)


@cache
def print_once(line: str) -> None:
    note(line)
