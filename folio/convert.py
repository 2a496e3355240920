"""Weights of others as a checkpoint of Folio's: Hugging Face's GPT-2, and nanoGPT's ckpt.pt.

Nothing that these files hold is run: tensors are safetensors, or pickles that torch opens with weights_only=True.
"""

import pickle
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from folio import UserError
from folio.checkpoint import Checkpoint, CheckpointError
from folio.dataset import open_dataset
from folio.fetch import hub_model
from folio.files import read_json
from folio.tokenizer import GPT2Tokenizer, Tokenizer, gpt2_ranks, gpt2_tokenizer

HUB = {  # names as nanoGPT has them -> repositories
    **{name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")},
    "distilgpt2": "distilbert/distilgpt2",
}
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")  # Conv1D: (in, out)
BUFFERS = (".attn.bias", ".attn.masked_bias")  # the causal mask, which old files hold


def is_foreign(init_from: str) -> bool:
    """Whether this is a name or a path that `load` opens."""
    path = Path(init_from)
    return init_from in HUB or (path / "config.json").is_file() or (path.is_file() and path.suffix == ".pt")


def load(init_from: str) -> Checkpoint:
    """A checkpoint to finetune or sample from: a name in HUB, a Hugging Face folder, or nanoGPT's ckpt.pt.

    Its `state` has only "model", the arguments of GPTConfig. Raises UserError.
    """
    if init_from in HUB:
        return from_hugging_face(hub_model(HUB[init_from]))
    path = Path(init_from)
    return from_nanogpt(path) if path.is_file() else from_hugging_face(path)


def from_hugging_face(folder: Path) -> Checkpoint:
    """GPT-2 as transformers saves it: config.json, model.safetensors or pytorch_model.bin, and perhaps merges.txt."""
    try:
        config = read_json(folder / "config.json")
        if config.get("model_type") != "gpt2":
            what = f"{config.get('model_type')} ({', '.join(config.get('architectures') or ['?'])})"
            raise CheckpointError(f"{folder} holds {what}, and Folio knows the architecture of gpt2 alone")
        unlike = dict(activation_function="gelu_new", scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
        for name, ours in unlike.items():
            if config.get(name, ours) != ours:
                raise CheckpointError(f"{folder}: config.json has {name}={config[name]}, and Folio computes {ours}")
        shape = dict(
            block_size=config["n_positions"],
            vocab_size=config["vocab_size"],
            **{name: config[name] for name in ("n_layer", "n_head", "n_embd")},
            bias=True,
        )
        tensors = {}
        for name, tensor in _tensors(folder).items():
            name = name.removeprefix("transformer.")
            if name != "lm_head.weight" and not name.endswith(BUFFERS):
                tensors[f"transformer.{name}"] = tensor.T if name.endswith(TRANSPOSED) else tensor
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"{folder} is not a folder of Hugging Face's GPT-2: {error}") from None
    tensors = _checked(folder, shape, tensors)
    return Checkpoint(folder, tensors, _tokenizer_of(folder, shape["vocab_size"]), {"model": shape})


def _tensors(folder: Path) -> dict[str, Tensor]:
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    if (folder / "pytorch_model.bin").exists():
        return unpickled(folder / "pytorch_model.bin")
    raise CheckpointError(f"{folder} has neither model.safetensors nor pytorch_model.bin")


def _tokenizer_of(folder: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer that lies beside the weights as merges.txt, or GPT-2's own if the vocabulary is as large."""
    if (folder / "merges.txt").exists():
        return GPT2Tokenizer(gpt2_ranks(folder / "merges.txt"))
    if vocab_size >= 50257:
        return gpt2_tokenizer()
    raise CheckpointError(f"{folder} has no merges.txt, and {vocab_size:,} tokens are not GPT-2's 50,257")


def from_nanogpt(path: Path) -> Checkpoint:
    """nanoGPT's ckpt.pt; a data set of characters is looked for as data/NAME/meta.pkl, from its folder upwards."""
    saved = unpickled(path)
    try:
        arguments, config = saved["model_args"], saved.get("config") or {}
        shape = {name: arguments[name] for name in "block_size vocab_size n_layer n_head n_embd bias".split()}
        tensors = {re.sub(r"^(_orig_mod\.|module\.)*", "", name): tensor for name, tensor in saved["model"].items()}
        dataset = str(config.get("dataset") or "")
    except (LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not nanoGPT's ckpt.pt: {error!r}") from None
    tensors = {n: t for n, t in tensors.items() if n != "lm_head.weight" and not n.endswith(BUFFERS)}
    metas = [parent / "data" / dataset / "meta.pkl" for parent in path.resolve().parents] if dataset else []
    meta = next((meta for meta in metas if meta.exists()), None)
    tokenizer = open_dataset(meta.parent).load_tokenizer() if meta else gpt2_tokenizer()
    return Checkpoint(path, _checked(path, shape, tensors), tokenizer, {"model": shape})


def unpickled(path: Path) -> dict[str, Any]:
    """What torch.save wrote, as long as it is tensors and plain values. Raises CheckpointError for anything else."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, TypeError, OSError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} was not opened, since it may run code or is damaged: {first}") from None


def _checked(path: Path, shape: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, contiguous and in float32, if the embeddings are as the shape says. Raises CheckpointError."""
    if wrong := [name for name in shape if type(shape[name]) is not (bool if name == "bias" else int)]:
        raise CheckpointError(f"{path} has {wrong[0]}={shape[wrong[0]]!r}, which is no number")
    expected = {
        "transformer.wte.weight": (shape["vocab_size"], shape["n_embd"]),
        "transformer.wpe.weight": (shape["block_size"], shape["n_embd"]),
        "transformer.h.0.attn.c_attn.weight": (3 * shape["n_embd"], shape["n_embd"]),
    }
    for name, size in expected.items():
        if name not in tensors:
            raise CheckpointError(f"{path} has no {name}")
        if tuple(tensors[name].shape) != size:
            raise CheckpointError(f"{path}: {name} is {tuple(tensors[name].shape)}, and should be {size}")
    return {name: tensor.float().contiguous() for name, tensor in tensors.items()}


def refuse_without(init_from: str) -> None:
    """Raise UserError for a name or a path that is nothing."""
    if not Path(init_from).exists() and init_from not in HUB:
        raise UserError(
            f"init_from={init_from}: it is not scratch, resume, {', '.join(HUB)}, or the folder of a checkpoint"
        )
