"""Reads checkpoints of other programs: Hugging Face's GPT-2, nanoGPT's ckpt.pt, llama.cpp's GGUF.

No code in these files is run: tensors are safetensors or GGUF, or pickles that torch opens with weights_only=True after
folio/base/pickles.py has checked them. A file that asks for anything that Folio computes differently is refused.
"""

import io
import re
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from struct import unpack_from
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from folio.base import pickles
from folio.base.download import hub_model
from folio.base.files import MAX_TEXT_BYTES, check_regular, read_json, short_repr, shorten
from folio.checkpoints import checkpoint, foreign_tokenizers
from folio.checkpoints.checkpoint import Checkpoint, LazyTensors
from folio.checkpoints.foreign_tokenizers import check_fields
from folio.checkpoints.run_folder import CheckpointError
from folio.data.tokenizer import Tokenizer
from folio.machine import memory
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

# --- GGUF ---
GGUF_FIELDS = (  # that are read
    *("general.architecture", "gpt2.attention.layer_norm_epsilon", "gpt2.attention.causal", "gpt2.context_length"),
    *("gpt2.block_count", "gpt2.attention.head_count", "gpt2.embedding_length"),
    *(f"tokenizer.ggml.{name}" for name in ("model", "pre", "add_bos_token", "add_eos_token")),
    *(f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "merges", "eos_token_id")),
)
GGUF_NAMES = 1 << 14  # fields, or tensors; a GPT of 1,000 layers has 12,000 tensors
GGUF_ELEMENTS = 1 << 21  # of an array

# --- pickles of torch.save ---
PICKLE_BYTES = 1 << 24  # 16 MiB, without the tensors' data
STORAGES = {  # the storages that a pickle may name -> bytes per element
    **dict.fromkeys(("torch DoubleStorage", "torch LongStorage"), 8),
    **dict.fromkeys(("torch FloatStorage", "torch IntStorage"), 4),
    **dict.fromkeys(("torch HalfStorage", "torch BFloat16Storage", "torch ShortStorage"), 2),
    **dict.fromkeys(("torch ByteStorage", "torch CharStorage", "torch BoolStorage"), 1),
}
NAMES = {
    *STORAGES,
    *(f"torch._utils _rebuild_{kind}" for kind in ("tensor", "tensor_v2", "parameter")),
    *("torch Size", "torch device", "torch float32", "torch float16", "torch bfloat16"),
    pickles.ORDERED_DICT,
}


def load(init_from: str, which: str = "best", lazy: bool = False) -> Checkpoint:
    """Load whatever training and sampling can start from: a name in HUB, a Hugging Face folder of GPT-2, nanoGPT's
    ckpt.pt or its folder, llama.cpp's GGUF, or a checkpoint or run of Folio. Of a run, `which` ("best" or "last") is
    loaded. The `state` of a foreign checkpoint has only "model", the arguments of GPTConfig. lazy: with LazyTensors,
    for a model that need not fit into memory as it is stored. Raises UserError.
    """
    path = Path(init_from)
    if init_from in HUB:
        return from_hugging_face(hub_model(HUB[init_from]), lazy)
    if _is_file(path / "config.json"):
        return from_hugging_face(path, lazy)
    if _is_file(path / "ckpt.pt") and not (path / "last.json").exists():  # nanoGPT's out_dir
        path = path / "ckpt.pt"
    if path.suffix == ".pt" and _is_file(path):
        return from_nanogpt(path, lazy)
    if path.suffix == ".gguf" and _is_file(path):
        return from_gguf(path, lazy)
    return checkpoint.load(path, which, optimizer=False, lazy=lazy)


def _is_file(path: Path) -> bool:
    """Whether there is something that is not a folder. A device or a FIFO is refused where it is read."""
    return path.exists() and not path.is_dir()


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
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise CheckpointError(f"{folder} holds {short_repr(name)}, which is not a tensor")
        if name.endswith(BUFFERS):
            continue
        if name != "lm_head.weight":
            name = f"transformer.{name.removeprefix('transformer.')}"
        if name in tensors:
            raise CheckpointError(f"{folder} holds {short_repr(name)} twice, with and without the prefix transformer.")
        tensors[name] = tensor.T if name.endswith(TRANSPOSED) else tensor
    return tensors


def _saved_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of model.safetensors or pytorch_model.bin, or of the shards that its index lists."""
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
                raise CheckpointError(
                    f"{folder / shard} holds {short_repr(min(repeated))}, which another shard also holds"
                )
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
            raise CheckpointError(
                f"{path}: model_args has {short_repr(min(unknown))}, which nanoGPT's GPT does not have"
            )
        shape = {**{name: arguments[name] for name in NANOGPT_ARGUMENTS}, "activation": NANOGPT_ACTIVATION}
        tensors = {}
        for name, tensor in saved["model"].items():
            if not isinstance(tensor, Tensor):
                raise CheckpointError(f"{path} holds {short_repr(name)}, which is not a tensor")
            name = re.sub(r"^(_orig_mod\.|module\.)*", "", name)
            if name in tensors:
                raise CheckpointError(f"{path} holds {short_repr(name)} twice, with and without _orig_mod. or module.")
            if not name.endswith(BUFFERS):
                tensors[name] = tensor
        dataset = config.get("dataset")
        named = dataset if isinstance(dataset, str) else ""
        tokenizer = foreign_tokenizers.read_nanogpt(path, named, shape["vocab_size"])
        return _checkpoint(path, shape, tensors, tokenizer, lazy)


# --- GGUF -------------------------------------------------------------------------------------------------------------


def from_gguf(path: Path, lazy: bool = False) -> Checkpoint:
    """A GGUF file of GPT-2's architecture, with its tokenizer; weights in F32, F16 or BF16, not quantized."""
    with _reading(path, "a GGUF file of GPT-2"):
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
        our_names = {theirs: ours for ours, theirs in gguf_names(min(shape["n_layer"], len(saved))).items()}
        our_names["output.weight"] = "lm_head.weight"
        tensors = {our_names.get(name, name): tensor for name, tensor in saved.items()}
        return _checkpoint(path, shape, tensors, foreign_tokenizers.read_gguf(path, fields), lazy)


def _open_gguf(path: Path) -> Any:
    """The package gguf's reader, with every read checked against the end of the file, and with arrays as arrays. Raises
    ValueError.

    The package takes what is past the end as empty, and so loops as often as a damaged count says; and it makes an
    object of 800 bytes for each element of an array. All its reads use the private method _get, which is overridden
    here; test_a_small_file_with_a_huge_array_ends fails if a later version no longer calls it.
    """
    from gguf import GGUFReader, GGUFValueType

    class BoundedReader(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, *rest: Any, **named: Any) -> Any:
            self._check_end(offset + int(count) * np.dtype(dtype).itemsize)
            return super()._get(offset, dtype, count, *rest, **named)

        def _check_end(self, offset: int) -> None:
            if offset > len(self.data):
                raise ValueError(f"it ends at byte {len(self.data):,}, in the middle of a value")

        def _get_field_parts(self, offset: int, kind: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
            """The bytes of a value, its parts, which of them are data, and its types. An array is one part."""
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
            """The first byte and the end of each string of an array, (N, 2), and the end of the array."""
            self._check_end(offset + 8 * count)
            _check_count("strings in an array", count, GGUF_ELEMENTS)
            bounds = np.empty((count, 2), np.int64)
            for i in range(count):
                self._check_end(offset + 8)
                start = offset + 8
                offset = start + unpack_from("=Q", self.data, offset)[0]
                self._check_end(offset)
                bounds[i] = start, offset
            return bounds, offset

        def _build_fields(self, offset: int, count: int) -> int:
            _check_count("fields", count, GGUF_NAMES)
            return super()._build_fields(offset, count)

        def _build_tensor_info(self, offset: int, count: int) -> Any:
            _check_count("tensors", count, GGUF_NAMES)
            return super()._build_tensor_info(offset, count)

    check_regular(path)
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


def _check_count(what: str, count: int, limit: int) -> None:
    """Raise ValueError if a GGUF file has more of something than the limit."""
    if count > limit:
        raise ValueError(f"it has {count:,} {what}, more than {limit:,}")


def _gguf_value(reader: Any, name: str) -> Any:
    """The value of a field. Raises ValueError if it is larger than any model's."""
    from gguf import GGUFValueType

    field = reader.fields[name]
    part, kind = field.parts[-1], field.types[-1]
    is_array, is_text = field.types[0] == GGUFValueType.ARRAY, kind == GGUFValueType.STRING
    _check_count(f"elements in {name}", len(part) if is_array else 1, GGUF_ELEMENTS)
    if is_text:
        size = np.ptp(part) if is_array and len(part) else len(part)
        _check_count(f"bytes in {name}", size, MAX_TEXT_BYTES)
    if is_array and is_text:
        content = memoryview(reader.data)
        return [str(content[start:end], "utf-8") for start, end in part.tolist()]
    return part.tolist() if is_array else field.contents()


def _gguf_tensors(path: Path, reader: Any) -> dict[str, Tensor]:
    """The tensors by llama.cpp's names, in float32. Raises CheckpointError for quantized ones."""
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
    """Our names of the parameters, which are also Hugging Face's -> llama.cpp's names."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    parts = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    modules = ["transformer.wte", "transformer.wpe", "transformer.ln_f"]
    modules += [f"transformer.h.{i}.{part}" for i in range(n_layer) for part in parts]
    known = get_tensor_name_map(MODEL_ARCH.GPT2, n_layer)
    return {f"{module}.{kind}": f"{known.get_name(module)}.{kind}" for module in modules for kind in ("weight", "bias")}


# --- checks -----------------------------------------------------------------------------------------------------------


def load_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises OSError if it is not a regular file."""
    check_regular(path)
    return load_file(path)


def load_pickle(path: Path) -> dict[str, Any]:
    """The content of a file that torch.save wrote. Raises CheckpointError unless it is tensors and plain values."""
    try:
        check_regular(path)
        is_zip = zipfile.is_zipfile(path)
        storages = _storages_of_zip(path) if is_zip else _storages_of_old_format(path)
        if sum(storages.values()) > path.stat().st_size:
            raise ValueError("its tensors are larger than the file")
        # A zip file is memory-mapped, not read.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # torch's unpickler raises whatever a damaged file makes its functions raise
        reason = _first_line(error)
        raise CheckpointError(
            f"{path} was not opened: it may run code, or is damaged ({reason}); download it again"
        ) from None


def _storages_of_zip(path: Path) -> dict[str, int]:
    """Check a zip file of torch.save: its records and its pickle. Returns the bytes of the storages by their keys.

    Raises ValueError. What zipfile reads must be what torch reads: the first record is at byte 0, and no two records
    have the same name.
    """
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        pickled = [record for record in records if record.filename.lower().endswith("/data.pkl")]
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise ValueError("its records are compressed")
        if sum(record.file_size for record in records) > path.stat().st_size:
            raise ValueError("its records are larger than the file")
        if len(pickled) != 1 or len({record.filename.lower() for record in records}) < len(records):
            raise ValueError("its records have the same name, or it has no data.pkl")
        if min(record.header_offset for record in records) != 0:
            raise ValueError("its first record is not at its beginning")
        if any(record.file_size > PICKLE_BYTES and "/data/" not in record.filename for record in records):
            raise ValueError(f"a record that is not a tensor's data has more than {PICKLE_BYTES:,} bytes")
        return _storages(pickles.check(io.BytesIO(archive.read(pickled[0])), names=NAMES))


def _storages_of_old_format(path: Path) -> dict[str, int]:
    """Check a file of the format before torch 1.6: a magic number, the version, the machine, the values and the keys of
    the storages, each a pickle; then the storages. Returns the bytes of the storages by their keys. Raises ValueError.
    """
    if tarfile.is_tarfile(path):  # an even older format
        raise ValueError("it is a tar file")
    with open(path, "rb") as file:
        content = io.BytesIO(file.read(PICKLE_BYTES))
    *_, values, keys = [pickles.check(content, names=NAMES) for _ in range(5)]
    storages = _storages(values)
    if not isinstance(keys.value, list) or {*keys.value} != storages.keys():
        raise ValueError("its list of storages is not that of its tensors")
    return storages


def _storages(content: pickles.Content) -> dict[str, int]:
    """The bytes of the storages that a pickle names, by their keys. Raises ValueError."""
    storages: dict[str, int] = {}
    for (identifier,) in content.persistent:
        _, storage, key, _, numel, *_ = identifier
        if type(numel) is not int or numel < 0:
            raise ValueError(f"a tensor has {short_repr(numel)} elements")
        storages[key] = max(storages.get(key, 0), numel * STORAGES[storage])
    return storages


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
    """The first line of an error's message, or its beginning."""
    if isinstance(error, KeyError):
        return f"it has no {short_repr(error.args[0])}"
    return shorten((str(error).strip().splitlines() or [type(error).__name__])[0])


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
        raise CheckpointError(
            f"{path} has a tensor {short_repr(unknown[0])}, which the model of model.py does not have"
        )
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
