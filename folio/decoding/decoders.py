"""What a decoder is, and the choice of one for a model: compiled on a CPU, or torch's.

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
    """Rows of tokens that are continued together: their key-value cache, and how the next tokens are sampled."""

    logits: Tensor  # (B, V) in float32, after the newest token of each row; valid until the next call
    steps_ahead: int  # steps to launch before a step's tokens are fetched, so that a GPU never waits for the host
    chunk: int | None  # tokens of prompts to prefill between two steps, so that a step is not late; None: any number
    keeps_rows: bool  # whether rows that take no part in steps keep their keys and values

    def start(self, row: int, sample: Sample) -> None:
        """Set how the tokens of a row are sampled from now on."""

    def prefill(self, contexts: dict[int, list[int]], prefixes: dict[int, Prefix]) -> None:
        """Fill these rows of the cache with ids at positions 0, 1, ..., and compute the logits after them.

        prefixes: what need not be computed, by row. The other rows stay as they are.
        """

    def score(self, row: int, context: list[int], count: int) -> Tensor:
        """As `prefill` of a row that has the first `count` ids already. Returns the logits after each of the others,
        (ids, V).
        """

    def sample(self, rows: list[int]) -> Callable[[], list[int]]:
        """Sample the next token of these rows from their logits. Returns a function that fetches the newest token of
        every row.
        """

    def step(self, rows: list[int]) -> Callable[[], list[int]]:
        """Append the tokens that were sampled last to these rows, and sample the next ones."""


class Decoder(Protocol):
    """A model's weights in the form that is fastest for decoding on its device."""

    config: GPTConfig

    @property
    def row_bytes(self) -> int:
        """How much memory a row of a batch takes."""

    def batch(self, rows: int, vocab_size: int | None = None) -> Batch:
        """A batch without tokens. Ids from vocab_size on, a model's padding, are never sampled."""


def make_decoder(
    model: GPT, runtime: Runtime, dtype: str | None = None, weights: Mapping[str, Tensor] | None = None
) -> Decoder:
    """The decoder for the runtime's device. The model's weights must not change while it is used.

    dtype: "int8" or "int4" for a CPU; None: that of the weights. weights: as in CPUDecoder, for int8 and int4. Puts the
    model into eval mode. If the model or a sampling filter was changed, or numba is missing, torch decodes, and a line
    says why. Raises UserError if that cannot compute in the dtype.
    """
    from folio.decoding.torch_decoder import TorchDecoder

    if runtime.device.type != "cpu":
        return TorchDecoder(model, runtime)
    from folio.decoding.cpu_decoder import CPUDecoder, why_torch_decodes

    reason = why_torch_decodes(model)
    if reason is None:
        dtype = dtype or str(model.transformer.wte.weight.dtype).removeprefix("torch.")
        return CPUDecoder(model, dtype, weights)
    if dtype:
        raise UserError(f"dtype={dtype}: torch decodes, which cannot compute in it, because {reason}; use --dtype=auto")
    print_once(f"torch decodes, which is slower, because {reason}")
    return TorchDecoder(model, runtime)


@cache
def print_once(line: str) -> None:
    note(line)
