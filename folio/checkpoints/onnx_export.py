"""Exports a model as an ONNX graph that takes and returns the key-value cache, and runs it with ONNX Runtime.

torch.onnx traces model.py, so that the graph supports every position method and a modified model.py. Its inputs and
outputs have the names of Hugging Face's optimum:

    input_ids               (B, T)         the new tokens
    attention_mask          (B, P + T)     1 for a token, 0 for padding, for the cached and the new tokens
    position_ids            (B, T)         the positions of the new tokens, not counting padding
    past_key_values.I.key   (B, H, P, D)   the cache of layer I, like past_key_values.I.value; P is 0 for a prompt
    logits                  (B, T, V)      of all new tokens
    present.I.key           (B, H, P + T, D)   past_key_values.I.key of the next call, like present.I.value

The first three are int64, the others float32. Rows of different lengths can be padded on either side.

Dimensions: B batch (rows), T time, P cached tokens, S = P + T keys, C channels, H heads, D head size, V vocabulary.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from folio import UserError
from folio.checkpoints.checkpoint import Checkpoint
from folio.checkpoints.export_formats import ExportedModel, hugging_face_config, open_tokenizer, write_tokenizer
from model import GPT, AttentionKernel, CausalSelfAttention, Mask

OPSET = 20  # the first with Gelu(approximate="tanh")
PACKAGES = ("onnx", "onnxscript", "onnxruntime", "transformers")
MODEL = "model.onnx"
INPUTS = ("input_ids", "attention_mask", "position_ids")  # and the cache
STEPS = 32  # the check decodes the last tokens of a text one by one
PADDING_POSITION = 2**31  # after every token, so that no token attends to padding


class PastKeyValues(AttentionKernel):
    """Attention to cached keys and values, followed by those of the new tokens.

    past, present: keys and values of each layer in turn, (B, H, P, D) and (B, H, S, D). mask: the attention_mask.
    """

    def __init__(self, past: list[Tensor], mask: Tensor, position_ids: Tensor):
        self.past, self.mask, self.position_ids = past, mask, position_ids
        self.present: list[Tensor] = []

    def begin_forward(self, idx: Tensor) -> tuple[Tensor, Tensor]:
        key_positions = self.mask.cumsum(dim=1) - 1  # (B, S)
        return self.position_ids, key_positions.masked_fill(self.mask == 0, PADDING_POSITION)

    def __call__(self, layer: CausalSelfAttention, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        keys = torch.cat([self.past[2 * layer.index], k], dim=2)  # (B, H, S, D)
        values = torch.cat([self.past[2 * layer.index + 1], v], dim=2)
        self.present += [keys, values]
        return super().__call__(layer, q, keys, values, mask)


class DecodingStep(nn.Module):
    """A model with the inputs and outputs of the graph."""

    def __init__(self, model: GPT):
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: list[Tensor]
    ) -> tuple[Tensor, ...]:
        kernel = PastKeyValues(past, attention_mask, position_ids)
        return self.model.logits(input_ids, kernel), *kernel.present


def write_onnx(loaded: Checkpoint, folder: Path) -> None:
    """Write a folder with model.onnx, transformers' tokenizer, and the config.json that optimum needs.

    Weights above 1.5 GiB go to model.onnx.data, because a protobuf is limited to 2 GiB. Raises UserError if torch.onnx
    cannot trace model.py.
    """
    folder.mkdir(parents=True)
    trace(loaded.build(document_token=None).eval()).save(folder / MODEL)  # a cache does not record where documents end
    write_tokenizer(loaded, folder)
    hugging_face_config(loaded.state["model"], loaded.tokenizer.eot).save_pretrained(folder)


def trace(model: GPT) -> torch.onnx.ONNXProgram:
    """The graph of a model. Raises UserError."""
    from onnxscript import ir

    config = model.config
    B, T, P = 3, 2, 4  # of the example inputs; distinct sizes other than 1 stay dynamic
    shape = (B, config.n_head, P, config.n_embd // config.n_head)
    names = [f"{i}.{part}" for i in range(config.n_layer) for part in ("key", "value")]
    ids, mask, positions = (torch.zeros(B, n, dtype=torch.long) for n in (T, P + T, T))
    try:
        with silenced_torch():
            program = torch.onnx.export(
                DecodingStep(model),
                (ids, mask, positions, [torch.zeros(shape) for _ in names]),
                input_names=[*INPUTS, *(f"past_key_values.{name}" for name in names)],
                output_names=["logits", *(f"present.{name}" for name in names)],
                dynamic_shapes=(
                    {0: "batch_size", 1: "sequence_length"},
                    {0: "batch_size", 1: "total_sequence_length"},
                    {0: "batch_size", 1: "sequence_length"},
                    [{0: "batch_size", 2: "past_sequence_length"} for _ in names],
                ),
                opset_version=OPSET,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        reason = str(error.__cause__ or error).strip().split("\n")[0]
        raise UserError(f"--to=onnx: torch.onnx cannot trace this model.py ({reason})") from None
    ir.passes.common.ClearMetadataAndDocStringPass()(program.model)  # removes paths of source files
    return program


@contextmanager
def silenced_torch() -> Iterator[None]:
    """Silence torch, which logs missing packages and prints whole graphs after an error."""
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def open_with_onnxruntime(folder: Path) -> ExportedModel:
    from onnxruntime import InferenceSession

    session = InferenceSession(folder / MODEL)

    def logits(ids: Tensor) -> Tensor:
        """Logits of a text: the prompt in one call, then the last tokens one by one."""
        prompt = max(1, ids.shape[1] - STEPS)
        caches = session.get_inputs()[len(INPUTS) :]
        past = {cache.name: np.zeros((len(ids), cache.shape[1], 0, cache.shape[3]), np.float32) for cache in caches}
        parts = []
        for start, end in [(0, prompt), *((i, i + 1) for i in range(prompt, ids.shape[1]))]:
            mask = np.ones((len(ids), end), dtype=np.int64)
            inputs = (ids[:, start:end].numpy(), mask, mask.cumsum(axis=1)[:, start:] - 1)
            part, *present = session.run(None, {**dict(zip(INPUTS, inputs, strict=True)), **past})
            past = dict(zip(past, present, strict=True))
            parts.append(torch.from_numpy(part))
        return torch.cat(parts, dim=1)

    return ExportedModel(*open_tokenizer(folder), logits)
