"""Reads checkpoints of other programs: Hugging Face's GPT-2, nanoGPT's ckpt.pt, llama.cpp's GGUF.

No code in these files is run: tensors are safetensors or GGUF, or pickles that torch opens with weights_only=True.
A file that asks for anything that Folio computes differently is refused.
"""

import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from folio import checkpoint, foreign_tokenizers, memory
from folio.checkpoint import Checkpoint, CheckpointError, LazyTensors
from folio.fetch import hub_model
from folio.files import read_json
from folio.foreign_tokenizers import check_fields
from folio.tokenizer import Tokenizer
from model import ACTIVATIONS, GPT, GPTConfig

HUB = {  # nanoGPT's names -> repositories
    **{name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")},
    "distilgpt2": "distilbert/distilgpt2",
}
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")  # Conv1D: (in, out)
BUFFERS = (".attn.bias", ".attn.masked_bias")  # the causal mask, which old files hold
ACTIVATION_ALIASES = {"gelu_pytorch_tanh": "gelu_new"}  # other names that Hugging Face has for model.ACTIVATIONS
NANOGPT_ACTIVATION = "gelu"  # the only one that nanoGPT computes
LLAMA_CPP_ACTIVATION = "gelu_new"  # the only one that llama.cpp computes for GPT-2
NANOGPT_ARGUMENTS = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size")  # of its GPTConfig; and dropout
LAYER_NORM_EPSILON = 1e-5  # as in torch.nn.LayerNorm and model.py


def load(init_from: str, which: str = "best", lazy: bool = False) -> Checkpoint:
    """Load whatever training and sampling can start from: a name in HUB, a Hugging Face folder of GPT-2, nanoGPT's
    ckpt.pt or its folder, llama.cpp's GGUF, or a checkpoint or run of Folio. Of a run, `which` ("best" or "last") is
    loaded. The `state` of a foreign checkpoint has only "model", the arguments of GPTConfig. lazy: with LazyTensors,
    for a model that need not fit into memory as it is stored. Raises UserError.
    """
    path = Path(init_from)
    if init_from in HUB:
        return from_hugging_face(hub_model(HUB[init_from]), lazy)
    if (path / "config.json").is_file():
        return from_hugging_face(path, lazy)
    if (path / "ckpt.pt").is_file() and not (path / "last.json").exists():  # nanoGPT's out_dir
        path = path / "ckpt.pt"
    if path.is_file() and path.suffix == ".pt":
        return from_nanogpt(path, lazy)
    if path.is_file() and path.suffix == ".gguf":
        return from_gguf(path, lazy)
    return checkpoint.load(path, which, optimizer=False, lazy=lazy)


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def from_hugging_face(folder: Path, lazy: bool = False) -> Checkpoint:
    """GPT-2 as transformers saves it: config.json, model.safetensors or pytorch_model.bin (or their shards), and the
    tokenizer's files.
    """
    with _reading(folder, "a folder of Hugging Face's GPT-2"):
        config = read_json(folder / "config.json")
        supported = {
            "model_type": ["gpt2"],
            "activation_function": [*ACTIVATIONS, *ACTIVATION_ALIASES],
            "layer_norm_epsilon": [LAYER_NORM_EPSILON],
            "scale_attn_weights": [True],
            "scale_attn_by_inverse_layer_idx": [False],
            "tie_word_embeddings": [True],
            "auto_map": [None],  # code that comes with the model
        }
        check_fields(f"{folder}: config.json", config, supported)
        activation = config.get("activation_function", GPTConfig.activation)
        shape = dict(
            block_size=config["n_positions"],
            vocab_size=config["vocab_size"],
            n_layer=config["n_layer"],
            n_head=config["n_head"],
            n_embd=config["n_embd"],
            bias=True,
            activation=ACTIVATION_ALIASES.get(activation, activation),
        )
        tensors = hugging_face_tensors(folder)
        tokenizer = foreign_tokenizers.read_hugging_face(folder, shape["vocab_size"])
        return _checkpoint(folder, shape, tensors, tokenizer, lazy)


def hugging_face_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors by our names, each matrix as (out, in), with lm_head.weight if it is stored.

    Raises CheckpointError.
    """
    tensors = {}
    for name, tensor in _saved_tensors(folder).items():
        if name.endswith(BUFFERS):
            continue
        if name != "lm_head.weight":
            name = f"transformer.{name.removeprefix('transformer.')}"
        if name in tensors:
            raise CheckpointError(f"{folder} holds {name!r} twice, with and without the prefix transformer.")
        tensors[name] = tensor.T if name.endswith(TRANSPOSED) else tensor
    return tensors


def _saved_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of model.safetensors or pytorch_model.bin, or of the shards that its index lists."""
    for name, load_tensors in (("model.safetensors", load_file), ("pytorch_model.bin", load_pickle)):
        if (folder / name).exists():
            return load_tensors(folder / name)
        index = folder / f"{name}.index.json"
        if not index.exists():
            continue
        tensors: dict[str, Tensor] = {}
        for shard in sorted(set(read_json(index)["weight_map"].values())):
            if Path(shard).name != shard:
                raise CheckpointError(f"{index} names a file outside its folder: {shard!r}")
            shard_tensors = load_tensors(folder / shard)
            if repeated := tensors.keys() & shard_tensors.keys():
                raise CheckpointError(f"{folder / shard} holds {min(repeated)!r}, which another shard also holds")
            tensors.update(shard_tensors)
        return tensors
    raise CheckpointError(f"{folder} has neither model.safetensors nor pytorch_model.bin")


# --- nanoGPT ----------------------------------------------------------------------------------------------------------


def from_nanogpt(path: Path, lazy: bool = False) -> Checkpoint:
    """nanoGPT's ckpt.pt; the characters are those of its data set's meta.pkl (`foreign_tokenizers.read_nanogpt`)."""
    with _reading(path, "nanoGPT's ckpt.pt"):
        saved = load_pickle(path)
        arguments, config = saved["model_args"], saved.get("config") or {}
        if unknown := arguments.keys() - {*NANOGPT_ARGUMENTS, "dropout"}:
            raise CheckpointError(f"{path}: model_args has {min(unknown)!r}, which nanoGPT's GPT does not have")
        shape = {**{name: arguments[name] for name in NANOGPT_ARGUMENTS}, "activation": NANOGPT_ACTIVATION}
        tensors = {}
        for name, tensor in saved["model"].items():
            name = re.sub(r"^(_orig_mod\.|module\.)*", "", name)
            if name in tensors:
                raise CheckpointError(f"{path} holds {name!r} twice, with and without the prefix _orig_mod. or module.")
            if not name.endswith(BUFFERS):
                tensors[name] = tensor
        dataset = str(config.get("dataset") or "")
        tokenizer = foreign_tokenizers.read_nanogpt(path, dataset, shape["vocab_size"])
        return _checkpoint(path, shape, tensors, tokenizer, lazy)


# --- GGUF -------------------------------------------------------------------------------------------------------------


def from_gguf(path: Path, lazy: bool = False) -> Checkpoint:
    """A GGUF file of GPT-2's architecture, with its tokenizer; weights in F32, F16 or BF16, not quantized."""
    with _reading(path, "a GGUF file of GPT-2"):
        reader = _open_gguf(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        supported = {
            "general.architecture": ["gpt2"],
            "gpt2.attention.layer_norm_epsilon": [float(np.float32(LAYER_NORM_EPSILON))],
            "gpt2.attention.causal": [True],
            "tokenizer.ggml.model": ["gpt2"],
            "tokenizer.ggml.pre": ["gpt-2"],
            "tokenizer.ggml.add_bos_token": [False],
            "tokenizer.ggml.add_eos_token": [False],
        }
        check_fields(f"{path}", fields, supported)
        shape = dict(
            block_size=fields["gpt2.context_length"],
            vocab_size=len(fields["tokenizer.ggml.tokens"]),
            n_layer=fields["gpt2.block_count"],
            n_head=fields["gpt2.attention.head_count"],
            n_embd=fields["gpt2.embedding_length"],
            bias=True,
            activation=LLAMA_CPP_ACTIVATION,
        )
        saved = _gguf_tensors(path, reader)
        our_names = {theirs: ours for ours, theirs in gguf_names(min(shape["n_layer"], len(saved))).items()}
        our_names["output.weight"] = "lm_head.weight"
        tensors = {our_names.get(name, name): tensor for name, tensor in saved.items()}
        return _checkpoint(path, shape, tensors, foreign_tokenizers.read_gguf(path, fields), lazy)


def _open_gguf(path: Path) -> Any:
    """The package gguf's reader, with every read checked against the end of the file. Raises ValueError.

    The package takes what is past the end as empty, and so loops as often as a damaged count says. All its reads use
    the private method _get, which is overridden here; test_a_small_file_with_a_huge_array_ends fails if a later version
    no longer calls it.
    """
    from gguf import GGUFReader

    class BoundedReader(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, *rest: Any, **named: Any) -> Any:
            if offset + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError(f"it ends at byte {len(self.data):,}, in the middle of a value")
            return super()._get(offset, dtype, count, *rest, **named)

    try:
        with np.errstate(over="raise"):  # of a tensor's offset
            reader = BoundedReader(path)
    except KeyError as error:  # two fields with the same name
        raise ValueError(error.args[0]) from None
    if reader.byte_order != "I":
        raise ValueError("its byte order is not this machine's")
    if sum(tensor.n_bytes for tensor in reader.tensors) > len(reader.data):
        raise ValueError("its tensors are larger than the file")
    return reader


def _gguf_tensors(path: Path, reader: Any) -> dict[str, Tensor]:
    """The tensors by llama.cpp's names, in float32. Raises CheckpointError for quantized ones."""
    from gguf import GGMLQuantizationType as Kind
    from gguf import dequantize

    tensors = {}
    for tensor in reader.tensors:
        kind = tensor.tensor_type
        if kind not in (Kind.F32, Kind.F16, Kind.BF16):
            raise CheckpointError(f"{path}: {tensor.name!r} is {kind.name}: convert the model to F32, F16 or BF16")
        tensors[tensor.name] = torch.from_numpy(np.array(dequantize(tensor.data, kind)))
    return tensors


def gguf_names(n_layer: int) -> dict[str, str]:
    """Our names of the parameters, which are also Hugging Face's -> llama.cpp's names."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    parts = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    modules = ["transformer.wte", "transformer.wpe", "transformer.ln_f"]
    modules += [f"transformer.h.{i}.{part}" for i in range(n_layer) for part in parts]
    known = get_tensor_name_map(MODEL_ARCH.GPT2, n_layer)
    return {f"{module}.{kind}": f"{known.get_name(module)}.{kind}" for module in modules for kind in ("weight", "bias")}


# --- checks -----------------------------------------------------------------------------------------------------------


def load_pickle(path: Path) -> dict[str, Any]:
    """The content of a file that torch.save wrote. Raises CheckpointError unless it is tensors and plain values."""
    try:
        # A zip file is memory-mapped, not read: its records then cannot be compressed, nor longer than the file.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception:  # torch's unpickler raises whatever a damaged file makes its functions raise
        raise CheckpointError(f"{path} was not opened: it may run code, or is damaged; download it again") from None


@contextmanager
def _reading(path: Path, what: str) -> Iterator[None]:
    """Turn whatever a damaged or foreign file makes the block raise into a CheckpointError of one line."""
    try:
        yield
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
        SafetensorError,
    ) as error:
        raise CheckpointError(f"{path} is not {what}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    """The first line of an error's message."""
    if isinstance(error, KeyError):
        return f"it has no {error.args[0]!r}"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _checkpoint(
    path: Path, shape: dict[str, Any], tensors: dict[str, Tensor], tokenizer: Tokenizer, lazy: bool
) -> Checkpoint:
    """The checkpoint. Raises CheckpointError unless the tensors fit the model and it has a row for each token."""
    tensors = check_tensors(path, shape, tensors, lazy)
    if tokenizer.vocab_size > shape["vocab_size"]:
        raise CheckpointError(
            f"{path}: the model has {shape['vocab_size']:,} tokens, but the tokenizer has {tokenizer.vocab_size:,} "
            f"({tokenizer.kind}): the model was trained with a different tokenizer"
        )
    return Checkpoint(path, tensors, tokenizer, {"model": shape})


def check_tensors(
    path: Path, shape: dict[str, Any], tensors: dict[str, Tensor], lazy: bool = False
) -> Mapping[str, Tensor]:
    """The model's tensors, contiguous and in float32, without lm_head.weight, which is tied to the token embeddings.

    lazy: each is copied from the mapped file when it is asked for.
    Raises CheckpointError unless the tensors are exactly the model's parameters and lm_head.weight, if it is stored,
    equals the token embeddings.
    """
    tensors = dict(tensors)
    head = tensors.pop("lm_head.weight", None)
    GPTConfig(**shape)  # checks the values
    n_layer = min(shape["n_layer"], len(tensors))  # with more layers than tensors, some tensor is missing in any case
    shapes = parameter_shapes({**shape, "n_layer": n_layer})
    if missing := [name for name in shapes if name not in tensors]:
        raise CheckpointError(f"{path} has no {missing[0]}")
    if unknown := [name for name in tensors if name not in shapes]:
        raise CheckpointError(f"{path} has a tensor {unknown[0]!r}, which the model of model.py does not have")
    for name, expected in shapes.items():
        if tuple(tensors[name].shape) != expected:
            raise CheckpointError(f"{path}: {name} has the shape {tuple(tensors[name].shape)} instead of {expected}")
        if not tensors[name].is_floating_point():
            raise CheckpointError(f"{path}: {name} has the dtype {tensors[name].dtype}, which is not floating-point")
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors.values()}
    if sum(t.numel() * t.itemsize for t in tensors.values()) > sum(storages.values()):
        raise CheckpointError(f"{path} is damaged: its tensors are larger than the data that it stores")
    if head is not None and not torch.equal(head.float(), tensors["transformer.wte.weight"].float()):
        raise CheckpointError(
            f"{path} has an lm_head.weight (the output matrix) that differs from the token embeddings; Folio ties the "
            f"two, so it cannot compute this model"
        )
    if lazy:
        return LazyTensors(shapes, lambda name: tensors[name].float().clone(memory_format=torch.contiguous_format))
    copied = sum(4 * t.numel() for t in tensors.values() if t.dtype != torch.float32 or not t.is_contiguous())
    remedy = "sample.py with --dtype=int8 or int4, which copies one tensor at a time"
    memory.require_free(copied, f"{path}: its weights in float32", remedy, memory.free(torch.device("cpu")))
    return {name: tensor.float().contiguous() for name, tensor in tensors.items()}


def parameter_shapes(shape: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each of the model's parameters, by name. All blocks are like the first one."""
    with torch.device("meta"):
        parameters = GPT(GPTConfig(**{**shape, "n_layer": 1})).named_parameters()
    shapes = {}
    for name, parameter in parameters:
        n_copies = shape["n_layer"] if ".h.0." in name else 1
        for i in range(n_copies):
            shapes[name.replace(".h.0.", f".h.{i}.")] = tuple(parameter.shape)
    return shapes
