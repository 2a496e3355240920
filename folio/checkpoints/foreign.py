"""Reads checkpoints of other programs: Hugging Face's GPT-2, nanoGPT's ckpt.pt, llama.cpp's GGUF.

No code in these files is run: tensors are safetensors or GGUF, or pickles that folio/base/pickles.py checks and torch
loads with weights_only=True. A model that Folio would compute differently is an error.
"""

import io
import re
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from struct import unpack_from
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from folio.base import pickles
from folio.base.download import hub_model
from folio.base.files import MAX_TEXT_BYTES, check_regular, read_json, refuse_lfs_pointer, short_repr
from folio.checkpoints import checkpoint, foreign_tokenizers
from folio.checkpoints.checkpoint import Checkpoint, LazyTensors
from folio.checkpoints.foreign_tokenizers import check_fields
from folio.checkpoints.identify import HUB, Identity, identify
from folio.checkpoints.run_folder import CheckpointError, as_checkpoint_error, first_line
from folio.data.tokenizer import Tokenizer
from folio.machine import memory
from model import ACTIVATIONS, GPT, GPTConfig

TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")  # Conv1D: (in, out)
BUFFERS = (".attn.bias", ".attn.masked_bias")  # the causal mask, stored in old files
ACTIVATION_ALIASES = {"gelu_pytorch_tanh": "gelu_new"}  # Hugging Face's other names for model.ACTIVATIONS
NANOGPT_ACTIVATION = "gelu"  # the only one in nanoGPT
LLAMA_CPP_ACTIVATION = "gelu_new"  # the only one in llama.cpp for GPT-2
NANOGPT_ARGUMENTS = ("n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size")  # and dropout
LAYER_NORM_EPSILON = 1e-5  # as in torch.nn.LayerNorm and model.py

# --- GGUF ---
GGUF_FIELDS = (  # the fields that Folio reads
    *("general.architecture", "gpt2.attention.layer_norm_epsilon", "gpt2.attention.causal", "gpt2.context_length"),
    *("gpt2.block_count", "gpt2.attention.head_count", "gpt2.embedding_length"),
    *(f"tokenizer.ggml.{name}" for name in ("model", "pre", "add_bos_token", "add_eos_token")),
    *(f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "merges", "eos_token_id")),
)
MAX_GGUF_NAMES = 1 << 14  # fields, or tensors; a GPT of 1,000 layers has 12,000 tensors
MAX_GGUF_ELEMENTS = 1 << 21  # of an array

# --- pickles of torch.save ---
MAX_PICKLE_BYTES = 1 << 24  # 16 MiB, without the data of tensors
STORAGES = {  # allowed storages -> bytes per element
    **dict.fromkeys(("torch DoubleStorage", "torch LongStorage"), 8),
    **dict.fromkeys(("torch FloatStorage", "torch IntStorage"), 4),
    **dict.fromkeys(("torch HalfStorage", "torch BFloat16Storage", "torch ShortStorage"), 2),
    **dict.fromkeys(("torch ByteStorage", "torch CharStorage", "torch BoolStorage"), 1),
}
GLOBALS = {  # allowed globals
    *STORAGES,
    *(f"torch._utils _rebuild_{kind}" for kind in ("tensor", "tensor_v2", "parameter")),
    *("torch Size", "torch device", "torch float32", "torch float16", "torch bfloat16"),
    pickles.ORDERED_DICT,
}


def load(init_from: str, which: str = "best", lazy: bool = False) -> Checkpoint:
    """Load a model for training or sampling: a name in HUB, a Hugging Face folder of GPT-2, nanoGPT's ckpt.pt or its
    folder, llama.cpp's GGUF, or a checkpoint or run of Folio.

    which: the checkpoint of a run, "best" or "last". lazy: with LazyTensors, for a model that may not fit into memory
    as stored. The `state` of a foreign checkpoint has only "model", the arguments of GPTConfig. Raises UserError.
    """
    path = Path(init_from)
    match identify(path):
        case Identity(format="hub"):
            return from_hugging_face(hub_model(HUB[init_from]), lazy)
        case Identity(format="hugging_face"):
            return from_hugging_face(path, lazy)
        case Identity(format="nanogpt"):
            return from_nanogpt(path / "ckpt.pt" if path.is_dir() else path, lazy)
        case Identity(format="gguf"):
            return from_gguf(path, lazy)
    return checkpoint.load(path, which, optimizer=False, lazy=lazy)


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def from_hugging_face(folder: Path, lazy: bool = False) -> Checkpoint:
    """Load GPT-2 as saved by transformers: config.json, model.safetensors or pytorch_model.bin (or their shards), and
    the tokenizer's files.
    """
    with as_checkpoint_error(folder, "is not a folder of Hugging Face's GPT-2"):
        config = read_json(folder / "config.json")
        supported = {
            "model_type": ["gpt2"],
            "activation_function": [*ACTIVATIONS, *ACTIVATION_ALIASES],
            "layer_norm_epsilon": [LAYER_NORM_EPSILON],
            "scale_attn_weights": [True],
            "scale_attn_by_inverse_layer_idx": [False],
            "tie_word_embeddings": [True],
            "auto_map": [None],  # custom code
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
    """The tensors under Folio's names, each matrix as (out, in), including lm_head.weight if stored.

    Raises CheckpointError.
    """

    def rename(name: str) -> str:
        return name if name == "lm_head.weight" else f"transformer.{name.removeprefix('transformer.')}"

    tensors = _renamed(folder, _saved_tensors(folder), rename)
    return {name: tensor.T if name.endswith(TRANSPOSED) else tensor for name, tensor in tensors.items()}


def _saved_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of model.safetensors or pytorch_model.bin, or of the shards in its index."""
    for name, load_tensors in (("model.safetensors", load_safetensors), ("pytorch_model.bin", load_pickle)):
        if (folder / name).exists():
            return load_tensors(folder / name)
        index = folder / f"{name}.index.json"
        if not index.exists():
            continue
        tensors: dict[str, Tensor] = {}
        for shard in sorted(set(read_json(index)["weight_map"].values())):
            if Path(shard).name != shard:
                raise CheckpointError(f"{index} names a file outside its folder: {short_repr(shard)}")
            shard_tensors = load_tensors(folder / shard)
            if repeated := tensors.keys() & shard_tensors.keys():
                raise CheckpointError(f"{folder / shard} has {short_repr(min(repeated))}, which another shard also has")
            tensors.update(shard_tensors)
        return tensors
    raise CheckpointError(f"{folder} has neither model.safetensors nor pytorch_model.bin")


# --- nanoGPT ----------------------------------------------------------------------------------------------------------


def from_nanogpt(path: Path, lazy: bool = False) -> Checkpoint:
    """Load nanoGPT's ckpt.pt. The characters come from the data set's meta.pkl (`foreign_tokenizers.read_nanogpt`)."""
    with as_checkpoint_error(path, "is not nanoGPT's ckpt.pt"):
        saved = load_pickle(path)
        arguments, config = saved["model_args"], saved.get("config") or {}
        if unknown := arguments.keys() - {*NANOGPT_ARGUMENTS, "dropout"}:
            raise CheckpointError(
                f"{path}: model_args has {short_repr(min(unknown))}, which nanoGPT's GPT does not have"
            )
        shape = {**{name: arguments[name] for name in NANOGPT_ARGUMENTS}, "activation": NANOGPT_ACTIVATION}
        tensors = _renamed(path, saved["model"], lambda name: re.sub(r"^(_orig_mod\.|module\.)*", "", name))
        dataset = config.get("dataset")
        dataset = dataset if isinstance(dataset, str) else ""
        tokenizer = foreign_tokenizers.read_nanogpt(path, dataset, shape["vocab_size"])
        return _checkpoint(path, shape, tensors, tokenizer, lazy)


# --- GGUF -------------------------------------------------------------------------------------------------------------


def from_gguf(path: Path, lazy: bool = False) -> Checkpoint:
    """Load a GGUF file of GPT-2's architecture, with its tokenizer. Weights are F32, F16 or BF16, not quantized."""
    with as_checkpoint_error(path, "is not a GGUF file of GPT-2"):
        reader = _open_gguf(path)
        fields = {name: _gguf_value(reader, name) for name in GGUF_FIELDS if name in reader.fields}
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
        names = {gguf_name: name for name, gguf_name in gguf_names(min(shape["n_layer"], len(saved))).items()}
        names["output.weight"] = "lm_head.weight"
        tensors = {names.get(name, name): tensor for name, tensor in saved.items()}
        return _checkpoint(path, shape, tensors, foreign_tokenizers.read_gguf(path, fields), lazy)


def _open_gguf(path: Path) -> Any:
    """Open a file with a subclass of the gguf package's reader that checks the bounds of each read and reads an array
    as one array. Raises ValueError.

    The package treats data past the end of the file as empty, so that a damaged count causes a long loop, and creates
    an object of 800 bytes for each element of an array. All its reads use the private method _get, which is overridden
    here; test_a_small_file_with_a_huge_array_ends fails if a later version does not call it.
    """
    from gguf import GGUFReader, GGUFValueType

    class BoundedReader(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, *args: Any, **kwargs: Any) -> Any:
            self._check_end(offset + int(count) * np.dtype(dtype).itemsize)
            return super()._get(offset, dtype, count, *args, **kwargs)

        def _check_end(self, offset: int) -> None:
            if offset > len(self.data):
                raise ValueError(f"it ends at byte {len(self.data):,}, in the middle of a value")

        def _get_field_parts(self, offset: int, kind: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
            """The size of a value, its parts, the indices of the data parts, and its types. An array is one part."""
            if kind != GGUFValueType.ARRAY:
                return super()._get_field_parts(offset, kind)
            inner, count = GGUFValueType(self._get(offset, np.uint32)[0]), int(self._get(offset + 4, np.uint64)[0])
            start = offset + 12
            if inner == GGUFValueType.STRING:
                part, end = self._find_strings(start, count)
            elif inner in self.gguf_scalar_to_np:
                part = self._get(start, self.gguf_scalar_to_np[inner], count)
                end = start + part.nbytes
            else:
                raise ValueError("it has an array of arrays")
            return end - offset, [part], [0], [GGUFValueType.ARRAY, inner]

        def _find_strings(self, offset: int, count: int) -> tuple[np.ndarray, int]:
            """The start and end offsets of the strings of an array, (N, 2), and the end of the array."""
            self._check_end(offset + 8 * count)
            _check_count("strings in an array", count, MAX_GGUF_ELEMENTS)
            bounds = np.empty((count, 2), np.int64)
            for i in range(count):
                self._check_end(offset + 8)
                start = offset + 8
                offset = start + unpack_from("=Q", self.data, offset)[0]
                self._check_end(offset)
                bounds[i] = start, offset
            return bounds, offset

        def _build_fields(self, offset: int, count: int) -> int:
            _check_count("fields", count, MAX_GGUF_NAMES)
            return super()._build_fields(offset, count)

        def _build_tensor_info(self, offset: int, count: int) -> Any:
            _check_count("tensors", count, MAX_GGUF_NAMES)
            return super()._build_tensor_info(offset, count)

    check_regular(path)
    try:
        with np.errstate(over="raise"):  # overflow of a tensor's offset
            reader = BoundedReader(path)
    except KeyError as error:  # two fields with the same name
        raise ValueError(error.args[0]) from None
    if reader.byte_order != "I":
        raise ValueError("its byte order is not this machine's")
    if sum(tensor.n_bytes for tensor in reader.tensors) > len(reader.data):
        raise ValueError("its tensors are larger than the file")
    return reader


def _check_count(what: str, count: int, limit: int) -> None:
    """Raise ValueError if a count in a GGUF file is above the limit. what: a plural noun for the message."""
    if count > limit:
        raise ValueError(f"it has {count:,} {what}, more than {limit:,}")


def _gguf_value(reader: Any, name: str) -> Any:
    """The value of a field. Raises ValueError if it is implausibly large."""
    from gguf import GGUFValueType

    field = reader.fields[name]
    part, kind = field.parts[-1], field.types[-1]
    is_array, is_text = field.types[0] == GGUFValueType.ARRAY, kind == GGUFValueType.STRING
    _check_count(f"elements in {name}", len(part) if is_array else 1, MAX_GGUF_ELEMENTS)
    if is_text:
        size = np.ptp(part) if is_array and len(part) else len(part)
        _check_count(f"bytes in {name}", size, MAX_TEXT_BYTES)
    if is_array and is_text:
        content = memoryview(reader.data)
        return [str(content[start:end], "utf-8") for start, end in part.tolist()]
    return part.tolist() if is_array else field.contents()


def _gguf_tensors(path: Path, reader: Any) -> dict[str, Tensor]:
    """The tensors under llama.cpp's names, in float32. Raises CheckpointError for quantized tensors."""
    from gguf import GGMLQuantizationType as Kind
    from gguf import dequantize

    tensors = {}
    for tensor in reader.tensors:
        kind = tensor.tensor_type
        if kind not in (Kind.F32, Kind.F16, Kind.BF16):
            raise CheckpointError(
                f"{path}: {short_repr(tensor.name)} is {kind.name}: convert the model to F32, F16 or BF16"
            )
        tensors[tensor.name] = torch.from_numpy(np.array(dequantize(tensor.data, kind)))
    return tensors


def gguf_names(n_layer: int) -> dict[str, str]:
    """Folio's names of the parameters, which are also Hugging Face's -> llama.cpp's names."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    parts = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    modules = ["transformer.wte", "transformer.wpe", "transformer.ln_f"]
    modules += [f"transformer.h.{i}.{part}" for i in range(n_layer) for part in parts]
    known = get_tensor_name_map(MODEL_ARCH.GPT2, n_layer)
    return {f"{module}.{kind}": f"{known.get_name(module)}.{kind}" for module in modules for kind in ("weight", "bias")}


# --- checks -----------------------------------------------------------------------------------------------------------


def _renamed(path: Path, saved: Mapping[str, Tensor], rename: Callable[[str], str]) -> dict[str, Tensor]:
    """The tensors under other names, without buffers. Raises CheckpointError."""
    tensors = {}
    for saved_name, tensor in saved.items():
        if not isinstance(saved_name, str) or not isinstance(tensor, Tensor):
            raise CheckpointError(f"{path}: {short_repr(saved_name)} is not a tensor")
        name = rename(saved_name)
        if name in tensors:
            raise CheckpointError(f"{path} has {short_repr(name)} twice, with and without a prefix")
        if not name.endswith(BUFFERS):
            tensors[name] = tensor
    return tensors


def load_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises OSError if it is not a regular file."""
    check_regular(path)
    return load_file(path)


def load_pickle(path: Path) -> dict[str, Any]:
    """Load a file of torch.save. Raises CheckpointError unless it contains only tensors and plain values."""
    refuse_lfs_pointer(path)
    try:
        check_regular(path)
        is_zip = zipfile.is_zipfile(path)
        storages = _storages_of_zip(path) if is_zip else _storages_of_old_format(path)
        if sum(storages.values()) > path.stat().st_size:
            raise ValueError("its tensors are larger than the file")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # for a damaged file, torch's unpickler can raise any type
        reason = first_line(error)
        raise CheckpointError(
            f"{path} was not loaded, because it is damaged or may run code ({reason}); download it again"
        ) from None


def _storages_of_zip(path: Path) -> dict[str, int]:
    """Check the records and the pickle of a zip file of torch.save. Returns the size of each storage by key.

    Raises ValueError. So that zipfile and torch read the same records, the first one must be at byte 0, and their names
    must be unique.
    """
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        pickled = [record for record in records if record.filename.lower().endswith("/data.pkl")]
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise ValueError("its records are compressed")
        if sum(record.file_size for record in records) > path.stat().st_size:
            raise ValueError("its records are larger than the file")
        if len(pickled) != 1 or len({record.filename.lower() for record in records}) < len(records):
            raise ValueError("two records have the same name, or data.pkl is missing")
        if min(record.header_offset for record in records) != 0:
            raise ValueError("its first record is not at byte 0")
        if any(record.file_size > MAX_PICKLE_BYTES and "/data/" not in record.filename for record in records):
            raise ValueError(f"a record that is not tensor data has more than {MAX_PICKLE_BYTES:,} bytes")
        return _storages(pickles.check(io.BytesIO(archive.read(pickled[0])), names=GLOBALS))


def _storages_of_old_format(path: Path) -> dict[str, int]:
    """Check a file in the format before torch 1.6. Returns the size of each storage by key. Raises ValueError.

    The file contains five pickles (magic number, version, machine, values, storage keys), then the storages.
    """
    if tarfile.is_tarfile(path):  # an even older format
        raise ValueError("it is a tar file")
    with open(path, "rb") as file:
        content = io.BytesIO(file.read(MAX_PICKLE_BYTES))
    *_, values, keys = [pickles.check(content, names=GLOBALS) for _ in range(5)]
    storages = _storages(values)
    if not isinstance(keys.value, list) or {*keys.value} != storages.keys():
        raise ValueError("its list of storages does not match its tensors")
    return storages


def _storages(content: pickles.Content) -> dict[str, int]:
    """The size in bytes of each storage that a pickle uses, by key. Raises ValueError."""
    storages: dict[str, int] = {}
    for (identifier,) in content.persistent:
        _, storage, key, _, numel, *_ = identifier
        if type(numel) is not int or numel < 0:
            raise ValueError(f"a tensor has {short_repr(numel)} elements")
        storages[key] = max(storages.get(key, 0), numel * STORAGES[storage])
    return storages


def _checkpoint(
    path: Path, shape: dict[str, Any], tensors: dict[str, Tensor], tokenizer: Tokenizer, lazy: bool
) -> Checkpoint:
    """Build the checkpoint. Raises CheckpointError unless the tensors match the model and its vocabulary has a row for
    each token.
    """
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

    lazy: copy each tensor from the mapped file on access. Raises CheckpointError unless the tensors are exactly the
    model's parameters and lm_head.weight, if stored, equals the token embeddings.
    """
    tensors = dict(tensors)
    head = tensors.pop("lm_head.weight", None)
    GPTConfig(**shape)  # checks the values
    n_layer = min(shape["n_layer"], len(tensors))  # limits the work; with more layers, tensors are missing in any case
    shapes = parameter_shapes({**shape, "n_layer": n_layer})
    if missing := [name for name in shapes if name not in tensors]:
        raise CheckpointError(f"{path} has no {missing[0]}")
    if unknown := [name for name in tensors if name not in shapes]:
        raise CheckpointError(f"{path} has a tensor {short_repr(unknown[0])}, which model.py does not have")
    for name, expected in shapes.items():
        if tuple(tensors[name].shape) != expected:
            raise CheckpointError(f"{path}: {name} has the shape {tuple(tensors[name].shape)} instead of {expected}")
        if not tensors[name].is_floating_point():
            raise CheckpointError(f"{path}: {name} has the dtype {tensors[name].dtype}, which is not floating-point")
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors.values()}
    if sum(t.numel() * t.itemsize for t in tensors.values()) > sum(storages.values()):
        raise CheckpointError(f"{path} is damaged: its tensors are larger than its data")
    if head is not None and not torch.equal(head.float(), tensors["transformer.wte.weight"].float()):
        raise CheckpointError(
            f"{path}: lm_head.weight (the output matrix) differs from the token embeddings; Folio supports only tied "
            f"embeddings"
        )
    if lazy:
        return LazyTensors(shapes, lambda name: tensors[name].float().clone(memory_format=torch.contiguous_format))
    copied = sum(4 * t.numel() for t in tensors.values() if t.dtype != torch.float32 or not t.is_contiguous())
    remedy = "sample.py with --dtype=int8 or int4, which copies one tensor at a time"
    memory.require_free(copied, f"{path}: its weights in float32", remedy, memory.free(torch.device("cpu")))
    return {name: tensor.float().contiguous() for name, tensor in tensors.items()}


def parameter_shapes(shape: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the model's parameters by name. All blocks have the shapes of the first one."""
    with torch.device("meta"):
        parameters = GPT(GPTConfig(**{**shape, "n_layer": 1})).named_parameters()
    shapes = {}
    for name, parameter in parameters:
        n_copies = shape["n_layer"] if ".h.0." in name else 1
        for i in range(n_copies):
            shapes[name.replace(".h.0.", f".h.{i}.")] = tuple(parameter.shape)
    return shapes
