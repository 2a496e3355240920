"""Weights in the formats of others, in and out: Hugging Face's GPT-2, nanoGPT's ckpt.pt, llama.cpp's GGUF.

Nothing that these files hold is run: tensors are safetensors or GGUF, or pickles that torch opens with
weights_only=True.
"""

import json
import pickle
import re
import reprlib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from folio import UserError, checkpoint
from folio.checkpoint import Checkpoint, CheckpointError
from folio.fetch import hub_model
from folio.files import read_json
from folio.shards import nanogpt_tokenizer
from folio.tokenizer import (
    EOT_TEXT,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    GPT2Tokenizer,
    RankedTokenizer,
    Tokenizer,
    byte_alphabet,
    gpt2_tokenizer,
)
from model import GPT, GPTConfig

HUB = {  # names as nanoGPT has them -> repositories
    **{name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")},
    "distilgpt2": "distilbert/distilgpt2",
}
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")  # Conv1D: (in, out)
BUFFERS = (".attn.bias", ".attn.masked_bias")  # the causal mask, which old files hold
ACTIVATIONS = {  # Hugging Face's names -> ours
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu": "gelu",
}
NO_BIAS = ("wte", "wpe")  # the embeddings
LAYER_NORM_EPSILON = 1e-5  # as torch.nn.LayerNorm and model.py have it


def load(init_from: str, which: str = "best") -> Checkpoint:
    """Whatever training and sampling can start from: a name in HUB, a Hugging Face folder of GPT-2, nanoGPT's ckpt.pt,
    llama.cpp's GGUF, or a checkpoint or run of Folio, of which `which` is taken. The `state` of a foreign one has only
    "model", the arguments of GPTConfig. Raises UserError.
    """
    path = Path(init_from)
    if init_from in HUB:
        return from_hugging_face(hub_model(HUB[init_from]))
    if (path / "config.json").is_file():
        return from_hugging_face(path)
    if (path / "ckpt.pt").is_file() and not (path / "last.json").exists():  # nanoGPT's out_dir
        path = path / "ckpt.pt"
    if path.is_file() and path.suffix == ".pt":
        return from_nanogpt(path)
    if path.is_file() and path.suffix == ".gguf":
        return from_gguf(path)
    return checkpoint.load(path, which)


def from_hugging_face(folder: Path) -> Checkpoint:
    """GPT-2 as transformers saves it: config.json, model.safetensors or pytorch_model.bin (or their shards), and the
    tokenizer's files.
    """
    with _reading(folder, "a folder of Hugging Face's GPT-2"):
        config = read_json(folder / "config.json")
        supported = {
            "model_type": ["gpt2"],
            "activation_function": list(ACTIVATIONS),
            "layer_norm_epsilon": [LAYER_NORM_EPSILON],
            "scale_attn_weights": [True],
            "scale_attn_by_inverse_layer_idx": [False],
            "tie_word_embeddings": [True],
            "auto_map": [None],  # code of the model's own
        }
        _check_fields(f"{folder}: config.json", config, supported)
        shape = dict(
            block_size=config["n_positions"],
            vocab_size=config["vocab_size"],
            n_layer=config["n_layer"],
            n_head=config["n_head"],
            n_embd=config["n_embd"],
            bias=True,
            activation=ACTIVATIONS[config.get("activation_function", "gelu_new")],
        )
        tensors = hugging_face_tensors(folder)
        return _checkpoint(folder, shape, tensors, _hugging_face_tokenizer(folder, shape["vocab_size"]))


def hugging_face_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors by our names, each matrix as (out, in), and lm_head.weight if it is there. Raises CheckpointError."""
    tensors = {}
    for name, tensor in _saved_tensors(folder).items():
        if not name.endswith(BUFFERS):
            name = name if name == "lm_head.weight" else f"transformer.{name.removeprefix('transformer.')}"
            if name in tensors:
                raise CheckpointError(f"{folder} holds {name!r} twice, with and without the prefix transformer.")
            tensors[name] = tensor.T if name.endswith(TRANSPOSED) else tensor
    return tensors


def _saved_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of model.safetensors or pytorch_model.bin, or of the shards that its index lists."""
    for name, load_tensors in (("model.safetensors", load_file), ("pytorch_model.bin", unpickled)):
        if (folder / name).exists():
            return load_tensors(folder / name)
        index = folder / f"{name}.index.json"
        if not index.exists():
            continue
        tensors: dict[str, Tensor] = {}
        for shard in sorted(set(read_json(index)["weight_map"].values())):
            if Path(shard).name != shard:
                raise CheckpointError(f"{index} names a file outside its folder: {shard!r}")
            part = load_tensors(folder / shard)
            if repeated := tensors.keys() & part.keys():
                raise CheckpointError(f"{folder / shard} holds {min(repeated)!r}, which another shard holds, too")
            tensors.update(part)
        return tensors
    raise CheckpointError(f"{folder} has neither model.safetensors nor pytorch_model.bin")


def _hugging_face_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """The BPE of merges.txt or tokenizer.json beside the weights; without both, GPT-2's if the vocabulary's size is
    GPT-2's. The other files of the tokenizer must agree with it. Raises CheckpointError.
    """
    if (folder / "tokenizer.json").exists() and (ours := _exported_by_folio(folder / "tokenizer.json")):
        return ours
    readers = {"merges.txt": _read_merges, "tokenizer.json": _read_tokenizer_json}
    tokenizers = [read(folder / name) for name, read in readers.items() if (folder / name).exists()]
    if not tokenizers:
        if not _is_gpt2_size(vocab_size):
            raise CheckpointError(
                f"{folder} has no merges.txt and no tokenizer.json, and {vocab_size:,} tokens are not GPT-2's: "
                f"put the tokenizer's files there"
            )
        tokenizers = [gpt2_tokenizer()]
    tokenizer = tokenizers[0]
    if tokenizer.ranks != tokenizers[-1].ranks:
        raise CheckpointError(f"{folder}: merges.txt and tokenizer.json disagree about the tokens")
    for name in ("vocab.json", "added_tokens.json"):
        if (folder / name).exists():
            _check_ids(f"{folder / name}", read_json(folder / name), tokenizer.ranks)
    if (folder / "tokenizer_config.json").exists():
        config = read_json(folder / "tokenizer_config.json")
        source = f"{folder}: tokenizer_config.json"
        off = [False, None]
        _check_fields(source, config, {"add_prefix_space": off, "add_bos_token": off, "add_eos_token": off})
        added = config.get("added_tokens_decoder") or {}
        _check_ids(source, {token["content"]: int(i) for i, token in added.items()}, tokenizer.ranks)
    return tokenizer


def _exported_by_folio(path: Path) -> Tokenizer | None:
    """Characters or bytes, where tokenizer.json spells them exactly as `as_library` does; else None."""
    content = read_json(path)
    vocab = content["model"]["vocab"]
    made: Tokenizer = ByteTokenizer()
    if content["model"].get("type") == "WordLevel":
        characters = sorted(vocab, key=vocab.__getitem__)
        if any(len(character) != 1 for character in characters):
            return None
        made = CharTokenizer("".join(characters), eot=bool(content["added_tokens"]))
    spelled = json.loads(as_library(made).to_str())
    same = all(content[part] == spelled[part] for part in ("model", "pre_tokenizer", "normalizer", "added_tokens"))
    return made if same else None


def _read_merges(path: Path) -> GPT2Tokenizer:
    """The tokenizer of merges.txt and the vocab.json beside it."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:]  # the first one names a version
    vocab = read_json(path.with_name("vocab.json"))
    source = f"{path.parent}: merges.txt and vocab.json"
    return GPT2Tokenizer(_ranks(source, [line.split(" ") for line in lines if line], vocab))


def _read_tokenizer_json(path: Path) -> RankedTokenizer:
    """The tokenizer of tokenizer.json: a BPETokenizer where it is as Folio writes it, and a GPT2Tokenizer where the
    end-of-text token is among the tokens of the model, as in GPT-2's own.
    """
    content = read_json(path)
    if (kind := content["model"].get("type", "BPE")) != "BPE":
        raise CheckpointError(f"{path} is {kind}, no byte-level BPE with GPT-2's rule for words, as Folio reads it")
    model, words, post = content["model"], content["pre_tokenizer"], content.get("post_processor") or {}
    if post.get("special_tokens") or post.get("type") not in (None, "ByteLevel", "TemplateProcessing"):
        raise CheckpointError(f"{path} has a post_processor that adds tokens to a text, and Folio adds none")
    vocab = dict(model["vocab"])
    merges = [pair.split(" ") if isinstance(pair, str) else list(pair) for pair in model["merges"]]
    ranks = _ranks(f"{path}", merges, vocab)
    is_gpt2 = vocab.pop(EOT_TEXT, None) is not None
    try:  # it checks all the other fields
        model = {"type": "BPE", **model, "vocab": vocab, "merges": merges}
        tokenizer = BPETokenizer({**content, "model": model, "pre_tokenizer": {"use_regex": True, **words}})
    except ValueError as error:
        raise CheckpointError(f"{path} is not a tokenizer that Folio reads: {error}") from None
    return GPT2Tokenizer(ranks) if is_gpt2 else tokenizer


def _ranks(source: str, merges: list[list[str]], vocab: dict[str, int]) -> list[bytes]:
    """The tokens by id: the 256 bytes in the order of the vocabulary, then what each merge makes. Merges and vocabulary
    are spelled in the byte alphabet.

    Raises CheckpointError where a merge does not make a new token or never applies, or where the vocabulary has other
    tokens or other ids.
    """
    alphabet = byte_alphabet()
    rank = {token: i for i, token in enumerate(sorted(alphabet, key=lambda letter: vocab.get(letter, 256)))}
    parts: dict[str, list[str]] = {}  # of each token that is merged
    for pair in merges:
        token, shown = "".join(pair), repr(" ".join(pair))
        if len(pair) != 2 or not rank.keys() >= set(pair) or token in rank:
            raise CheckpointError(f"{source}: the merge {shown} does not make a new token of two earlier ones")
        if not _merge_applies(*pair, rank, parts):
            raise CheckpointError(f"{source}: the merge {shown} never applies, since earlier merges come first")
        rank[token], parts[token] = len(rank), pair
    ranks = [bytes(map(alphabet.__getitem__, token)) for token in rank]
    _check_ids(source, vocab, ranks)
    if missing := rank.keys() - vocab.keys():
        raise CheckpointError(f"{source}: the vocabulary lacks the token {min(missing)!r}")
    return ranks


def _merge_applies(left: str, right: str, rank: dict[str, int], parts: dict[str, list[str]]) -> bool:
    """Whether byte-pair encoding of left + right makes the tokens `left` and `right`, so that merging by the rank of
    the result (tiktoken) and by the rank of the pair (the library tokenizers) are the same.

    Undoes the merges of the two tokens, the last one first, and looks at the tokens on both sides of the boundary:
    these must not merge with each other earlier than within `left` or `right`.
    """
    while left in parts or right in parts:
        if left in parts and (right not in parts or rank[left] > rank[right]):
            before, left = rank[left], parts[left][1]
        else:  # of two merges of the same rank the left one comes first
            before, right = rank[right] + 1, parts[right][0]
        if rank.get(left + right, before) < before:
            return False
    return True


def _check_ids(source: str, ids: dict[str, int], ranks: list[bytes]) -> None:
    """Raise CheckpointError unless each of these tokens has the id that it has in Folio."""
    expected = {token: i for i, token in enumerate([*spelled_out(ranks), EOT_TEXT])}
    for token, i in ids.items():
        if token not in expected:
            raise CheckpointError(
                f"{source}: no merge makes the token {token!r} (id {i!r}), and Folio adds no token but {EOT_TEXT}"
            )
        if i != expected[token]:
            raise CheckpointError(f"{source}: {token!r} has the id {i!r}, and by the order of merges {expected[token]}")


def _is_gpt2_size(vocab_size: int) -> bool:
    """Whether a vocabulary without a tokenizer may be GPT-2's: 50,257 tokens, or padded, as nanoGPT's 50,304."""
    return vocab_size == 50257 or (vocab_size % 64 == 0 and 50257 < vocab_size <= 51200)


def from_nanogpt(path: Path) -> Checkpoint:
    """nanoGPT's ckpt.pt; a data set of characters is looked for as data/NAME/meta.pkl, from its folder upwards."""
    with _reading(path, "nanoGPT's ckpt.pt"):
        saved = unpickled(path)
        arguments, config = saved["model_args"], saved.get("config") or {}
        names = "block_size vocab_size n_layer n_head n_embd bias".split()
        if unknown := arguments.keys() - {*names, "dropout"}:
            raise CheckpointError(f"{path}: model_args has {min(unknown)!r}, which nanoGPT's GPT does not have")
        shape = {**{name: arguments[name] for name in names}, "activation": "gelu"}
        tensors = {}
        for name, tensor in saved["model"].items():
            name = re.sub(r"^(_orig_mod\.|module\.)*", "", name)
            if name in tensors:
                raise CheckpointError(f"{path} holds {name!r} twice, with and without the prefix _orig_mod. or module.")
            if not name.endswith(BUFFERS):
                tensors[name] = tensor
        dataset = str(config.get("dataset") or "")
        metas = [parent / "data" / dataset / "meta.pkl" for parent in path.resolve().parents] if dataset else []
        meta = next((meta for meta in metas if meta.exists()), None)
        is_gpt2_size = _is_gpt2_size(shape["vocab_size"])
        tokenizer: Tokenizer
        if meta:
            # GPT-2's own weights, finetuned on characters, keep their size
            tokenizer = nanogpt_tokenizer(meta, None if is_gpt2_size else shape["vocab_size"])
        elif is_gpt2_size:
            tokenizer = gpt2_tokenizer()
        else:
            raise CheckpointError(
                f"{path}: {shape['vocab_size']:,} tokens are not GPT-2's, and there is no meta.pkl that lists them: "
                f"put it into data/{dataset or 'NAME'} beside {path.name}"
            )
        return _checkpoint(path, shape, tensors, tokenizer)


def from_gguf(path: Path) -> Checkpoint:
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
        _check_fields(f"{path}", fields, supported)
        shape = dict(
            block_size=fields["gpt2.context_length"],
            vocab_size=len(fields["tokenizer.ggml.tokens"]),
            n_layer=fields["gpt2.block_count"],
            n_head=fields["gpt2.attention.head_count"],
            n_embd=fields["gpt2.embedding_length"],
            bias=True,
            activation="gelu_new",
        )
        saved = _gguf_tensors(path, reader)
        our_names = {name: ours for ours, name in gguf_names(min(shape["n_layer"], len(saved))).items()}
        our_names["output.weight"] = "lm_head.weight"
        tensors = {our_names.get(name, name): tensor for name, tensor in saved.items()}
        return _checkpoint(path, shape, tensors, _gguf_tokenizer(path, fields))


def _open_gguf(path: Path) -> Any:
    """The package gguf's reader, with every read checked against the end of the file. Raises ValueError.

    The package takes what is past the end for empty, and so loops as often as a damaged count says. All its reads go
    through the private method _get, which is overridden here; test_a_small_file_with_a_huge_array_ends fails if a
    later version no longer calls it.
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
    except KeyError as error:  # two fields of the same name
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


def _gguf_tokenizer(path: Path, fields: dict[str, Any]) -> GPT2Tokenizer:
    """The tokens in the order of the merges, then the end-of-text token, then unused ones. Raises CheckpointError."""
    from gguf import TokenType

    kinds = list(zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"], strict=True))
    normal = {token: i for i, (token, kind) in enumerate(kinds) if kind == TokenType.NORMAL}
    special = [i for i, (_, kind) in enumerate(kinds) if kind not in (TokenType.NORMAL, TokenType.UNUSED)]
    ranks = _ranks(f"{path}", [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]], normal)
    for i in [fields["tokenizer.ggml.eos_token_id"], *special]:
        if i != len(ranks):
            raise CheckpointError(
                f"{path}: the token {i!r} is special, and Folio supports only one, after the last merge's: {len(ranks)}"
            )
    return GPT2Tokenizer(ranks)


def gguf_names(n_layer: int) -> dict[str, str]:
    """llama.cpp's names of our parameters, which are also Hugging Face's."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    parts = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    modules = ["transformer.wte", "transformer.wpe", "transformer.ln_f"]
    modules += [f"transformer.h.{i}.{part}" for i in range(n_layer) for part in parts]
    known = get_tensor_name_map(MODEL_ARCH.GPT2, n_layer)
    return {f"{module}.{kind}": f"{known.get_name(module)}.{kind}" for module in modules for kind in ("weight", "bias")}


def unpickled(path: Path) -> dict[str, Any]:
    """What torch.save wrote, as long as it is tensors and plain values. Raises CheckpointError for anything else."""
    try:
        # A zip file is mapped, not read: its records cannot be compressed then, nor longer than the file.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception:  # torch's unpickler raises whatever a damaged file makes its functions raise
        raise CheckpointError(f"{path} was not opened, since it may run code or is damaged; fetch it again") from None


@contextmanager
def _reading(path: Path, what: str) -> Iterator[None]:
    """Turn what a damaged or foreign file makes the code below raise into one line."""
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
        raise CheckpointError(f"{path} is not {what}: {_line(error)}") from None


def _line(error: Exception) -> str:
    """The first line of an error's message."""
    if isinstance(error, KeyError):
        return f"it has no {error.args[0]!r}"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _check_fields(source: str, fields: dict[str, Any], supported: dict[str, list[Any]]) -> None:
    """Raise CheckpointError for a field whose value is not one of those that Folio supports. Fields may be missing."""
    for name, values in supported.items():
        if name in fields and fields[name] not in values:
            only = " or ".join(map(repr, values))
            raise CheckpointError(f"{source} has {name}={reprlib.repr(fields[name])}; Folio supports only {only}")


def _checkpoint(path: Path, shape: dict[str, Any], tensors: dict[str, Tensor], tokenizer: Tokenizer) -> Checkpoint:
    """The checkpoint. Raises CheckpointError unless the tensors fit the model, and the model has a row per token."""
    tensors = _checked(path, shape, tensors)
    if tokenizer.vocab_size > shape["vocab_size"]:
        raise CheckpointError(
            f"{path}: the model has {shape['vocab_size']:,} tokens, and the tokenizer {tokenizer.vocab_size:,} "
            f"({tokenizer.kind}): it is not the one that the model was trained with"
        )
    return Checkpoint(path, tensors, tokenizer, {"model": shape})


def _checked(path: Path, shape: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model's tensors, contiguous and in float32, without lm_head.weight, which is the token embeddings again.

    Raises CheckpointError if there are others than the model has parameters, or if lm_head.weight is another matrix.
    """
    tensors = dict(tensors)
    head = tensors.pop("lm_head.weight", None)
    GPTConfig(**shape)  # checks the values
    n_layer = min(shape["n_layer"], len(tensors))  # more layers than tensors lack some, however many are asked for
    sizes = _parameter_shapes({**shape, "n_layer": n_layer})
    if missing := [name for name in sizes if name not in tensors]:
        raise CheckpointError(f"{path} has no {missing[0]}")
    if unknown := [name for name in tensors if name not in sizes]:
        raise CheckpointError(f"{path} has a tensor {unknown[0]!r}, which GPT-2 does not have")
    for name, size in sizes.items():
        if tuple(tensors[name].shape) != size:
            raise CheckpointError(f"{path}: {name} is {tuple(tensors[name].shape)}, and should be {size}")
        if not tensors[name].is_floating_point():
            raise CheckpointError(f"{path}: {name} is of {tensors[name].dtype}, which is not floating-point")
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors.values()}
    if sum(t.numel() * t.itemsize for t in tensors.values()) > sum(storages.values()):
        raise CheckpointError(f"{path} is damaged: its tensors are larger than what it stores")
    if head is not None and not torch.equal(head.float(), tensors["transformer.wte.weight"].float()):
        raise CheckpointError(
            f"{path} has an lm_head.weight (an output matrix) that differs from the token embeddings, and Folio ties "
            f"the two: it cannot compute this model"
        )
    return {name: tensor.float().contiguous() for name, tensor in tensors.items()}


def _parameter_shapes(shape: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each of the model's parameters, by name; all blocks are like the first one."""
    with torch.device("meta"):
        parameters = GPT(GPTConfig(**{**shape, "n_layer": 1})).named_parameters()
    sizes = {}
    for name, parameter in parameters:
        for i in range(shape["n_layer"] if ".h.0." in name else 1):
            sizes[name.replace(".h.0.", f".h.{i}.")] = tuple(parameter.shape)
    return sizes


# --- out --------------------------------------------------------------------------------------------------------------


def to_hugging_face(loaded: Checkpoint, folder: Path) -> None:
    """Write a folder that transformers' AutoModelForCausalLM and AutoTokenizer open, with no code of ours.

    Biases that the model lacks are written as zeros; matrices are transposed to (in, out).
    """
    from transformers import GPT2Config, PreTrainedTokenizerFast

    shape, end = loaded.state["model"], loaded.tokenizer.eot
    names = dict(n_positions=shape["block_size"], vocab_size=shape["vocab_size"])
    names |= {name: shape[name] for name in ("n_layer", "n_head", "n_embd")}
    names["activation_function"] = shape.get("activation", "gelu_new")
    config = GPT2Config(**names, bos_token_id=end, eos_token_id=end, architectures=["GPT2LMHeadModel"])
    tensors = with_biases(loaded.model)
    tensors = {n: (t.T if n.endswith(TRANSPOSED) else t).contiguous() for n, t in tensors.items()}
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    special = {} if end is None else {"eos_token": EOT_TEXT, "bos_token": EOT_TEXT}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=as_library(loaded.tokenizer), **special)
    tokenizer.save_pretrained(folder)


def to_gguf(loaded: Checkpoint, path: Path) -> None:
    """Write one file for llama.cpp, in float32, with the tokenizer; rows of the vocabulary's padding become unused
    tokens. Raises UserError for a tokenizer that llama.cpp does not have.
    """
    from gguf import GGUFWriter, LlamaFileType, TokenType

    shape, made = loaded.state["model"], loaded.tokenizer
    if not isinstance(made, RankedTokenizer):
        raise UserError(f"GGUF has no tokenizer of the kind {made.kind!r}: llama.cpp reads byte-level BPE (gpt2, bpe)")
    writer = GGUFWriter(path, "gpt2")
    writer.add_block_count(shape["n_layer"])
    writer.add_context_length(shape["block_size"])
    writer.add_embedding_length(shape["n_embd"])
    writer.add_feed_forward_length(4 * shape["n_embd"])
    writer.add_head_count(shape["n_head"])
    writer.add_layer_norm_eps(LAYER_NORM_EPSILON)
    writer.add_file_type(LlamaFileType.ALL_F32)
    spelled = spelled_out(made.ranks)
    unused = [f"[PAD{i}]" for i in range(made.vocab_size, shape["vocab_size"])]
    types = [TokenType.NORMAL] * len(spelled) + [TokenType.CONTROL] + [TokenType.UNUSED] * len(unused)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*spelled, EOT_TEXT, *unused])
    writer.add_token_types(types)
    writer.add_token_merges([f"{spelled[first]} {spelled[second]}" for first, second in merges_of(made.ranks)])
    writer.add_bos_token_id(made.eot)
    writer.add_eos_token_id(made.eot)
    writer.add_add_bos_token(False)
    names = gguf_names(shape["n_layer"])
    for name, tensor in with_biases(loaded.model).items():
        writer.add_tensor(names[name], tensor.float().contiguous().numpy())
    path.parent.mkdir(parents=True, exist_ok=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def to_nanogpt(loaded: Checkpoint, folder: Path) -> None:
    """Write ckpt.pt as nanoGPT's sample.py and train.py read it, and for characters the data set's meta.pkl, which it
    wants as data/NAME/meta.pkl in the folder that it is started from. Raises UserError for another tokenizer.
    """
    shape, made = loaded.state["model"], loaded.tokenizer
    folder.mkdir(parents=True)
    config = {}
    if isinstance(made, CharTokenizer):
        config["dataset"] = "folio_char"
        meta = folder / "data" / config["dataset"] / "meta.pkl"
        itos = dict(enumerate(made.characters)) | ({} if made.eot is None else {made.eot: EOT_TEXT})
        table = dict(vocab_size=shape["vocab_size"], itos=itos, stoi={token: i for i, token in itos.items()})
        meta.parent.mkdir(parents=True)
        meta.write_bytes(pickle.dumps(table))
    elif not isinstance(made, GPT2Tokenizer):
        raise UserError(f"nanoGPT has no tokenizer of the kind {made.kind!r}: it reads characters and GPT-2's tokens")
    names = "n_layer n_head n_embd block_size bias vocab_size".split()
    saved = {
        "model": {**loaded.model, "lm_head.weight": loaded.model["transformer.wte.weight"]},
        "model_args": {**{name: shape[name] for name in names}, "dropout": 0.0},
        "config": config,
    }
    torch.save(saved, folder / "ckpt.pt")


def with_biases(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with zeros for the biases that a model without them lacks."""
    tensors = dict(tensors)
    for name, tensor in list(tensors.items()):
        if name.endswith(".weight") and name.split(".")[1] not in NO_BIAS:
            tensors.setdefault(name.removesuffix("weight") + "bias", torch.zeros(tensor.shape[0]))  # (out,)
    return tensors


def spelled_out(ranks: list[bytes]) -> list[str]:
    """Tokens in the visible characters that stand for bytes in others' files."""
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    return ["".join(letters[byte] for byte in token) for token in ranks]


def as_library(made: Tokenizer) -> Any:
    """The same tokenizer as one of the library tokenizers."""
    import tokenizers
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

    if isinstance(made, BPETokenizer):
        return tokenizers.Tokenizer.from_str(json.dumps(made.to_json()))
    if isinstance(made, CharTokenizer):
        ids = {character: i for i, character in enumerate(made.characters)}
        unknown = made.characters[0]  # transformers wants a token for unknown characters
        found = tokenizers.Tokenizer(models.WordLevel(ids, unknown))
        found.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        found.decoder = decoders.Fuse()
    else:
        ranks = [bytes([b]) for b in range(256)] if isinstance(made, ByteTokenizer) else made.ranks
        spelled = spelled_out(ranks)
        merges = [tuple(spelled[part] for part in pair) for pair in merges_of(ranks)]
        found = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(spelled)}, merges))
        words = not isinstance(made, ByteTokenizer)
        found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
        found.decoder = decoders.ByteLevel()
    if made.eot is not None:
        found.add_special_tokens([AddedToken(EOT_TEXT, special=True)])
    return found


def merges_of(ranks: list[bytes]) -> list[tuple[int, int]]:
    """The two tokens that each token behind the 256 bytes is merged of, by their ids."""
    rank_of = {token: rank for rank, token in enumerate(ranks)}
    pairs = []
    for rank, token in enumerate(ranks):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            best = min(range(len(parts) - 1), key=lambda i: rank_of.get(parts[i] + parts[i + 1], rank))
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        if len(parts) == 2:
            pairs.append((rank_of[parts[0]], rank_of[parts[1]]))
    return pairs
