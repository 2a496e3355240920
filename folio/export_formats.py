"""Writes checkpoints in the formats of other programs: Hugging Face's GPT-2, llama.cpp's GGUF, nanoGPT's ckpt.pt.

FORMATS has one entry per format: tools/export.py offers whatever is in it.
"""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from folio import UserError, convert
from folio.checkpoint import Checkpoint
from folio.convert import (
    LAYER_NORM_EPSILON,
    LLAMA_CPP_ACTIVATION,
    NANOGPT_ACTIVATION,
    NANOGPT_ARGUMENTS,
    TRANSPOSED,
    gguf_names,
)
from folio.foreign_tokenizers import merge_pairs, spell_tokens, to_library
from folio.tokenizer import EOT_TEXT, CharTokenizer, GPT2Tokenizer, RankedTokenizer
from model import GPTConfig

EMBEDDINGS = ("wte", "wpe")  # the only weights that never have a bias
NANOGPT_DATASET = "folio_char"  # name of the data set whose meta.pkl is exported for nanoGPT


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def write_hugging_face(loaded: Checkpoint, folder: Path) -> None:
    """Write a folder that transformers' AutoModelForCausalLM and AutoTokenizer open without Folio's code.

    Biases that the model lacks are written as zeros; matrices are transposed to (in, out).
    """
    from transformers import GPT2Config, PreTrainedTokenizerFast

    shape, eot = loaded.state["model"], loaded.tokenizer.eot
    settings = dict(n_positions=shape["block_size"], activation_function=shape.get("activation", GPTConfig.activation))
    settings |= {name: shape[name] for name in ("vocab_size", "n_layer", "n_head", "n_embd")}
    config = GPT2Config(**settings, bos_token_id=eot, eos_token_id=eot, architectures=["GPT2LMHeadModel"])
    tensors = {
        name: (tensor.T if name.endswith(TRANSPOSED) else tensor).contiguous()
        for name, tensor in with_biases(loaded.model).items()
    }
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    special_tokens = {} if eot is None else {"eos_token": EOT_TEXT, "bos_token": EOT_TEXT}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=to_library(loaded.tokenizer), **special_tokens)
    tokenizer.save_pretrained(folder)


def with_biases(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with zeros for the biases that a model without biases lacks."""
    tensors = dict(tensors)
    for name, tensor in list(tensors.items()):
        if name.endswith(".weight") and name.split(".")[1] not in EMBEDDINGS:
            tensors.setdefault(name.removesuffix("weight") + "bias", torch.zeros(tensor.shape[0]))  # (out,)
    return tensors


# --- GGUF -------------------------------------------------------------------------------------------------------------


def write_gguf(loaded: Checkpoint, path: Path) -> None:
    """Write one file for llama.cpp, in float32, with the tokenizer. Rows that pad the vocabulary become unused tokens.

    Raises UserError for a tokenizer that llama.cpp does not have.
    """
    from gguf import GGUFWriter, LlamaFileType, TokenType

    shape, tokenizer = loaded.state["model"], loaded.tokenizer
    if not isinstance(tokenizer, RankedTokenizer):
        raise UserError(
            f"GGUF has no tokenizer of the kind {tokenizer.kind!r}: llama.cpp reads byte-level BPE (gpt2, bpe)"
        )
    writer = GGUFWriter(path, "gpt2")
    writer.add_block_count(shape["n_layer"])
    writer.add_context_length(shape["block_size"])
    writer.add_embedding_length(shape["n_embd"])
    writer.add_feed_forward_length(4 * shape["n_embd"])
    writer.add_head_count(shape["n_head"])
    writer.add_layer_norm_eps(LAYER_NORM_EPSILON)
    writer.add_file_type(LlamaFileType.ALL_F32)
    spelled = spell_tokens(tokenizer.ranks)
    padding = [f"[PAD{i}]" for i in range(tokenizer.vocab_size, shape["vocab_size"])]
    types = [TokenType.NORMAL] * len(spelled) + [TokenType.CONTROL] + [TokenType.UNUSED] * len(padding)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*spelled, EOT_TEXT, *padding])
    writer.add_token_types(types)
    writer.add_token_merges([f"{spelled[left]} {spelled[right]}" for left, right in merge_pairs(tokenizer.ranks)])
    writer.add_bos_token_id(tokenizer.eot)
    writer.add_eos_token_id(tokenizer.eot)
    writer.add_add_bos_token(False)
    names = gguf_names(shape["n_layer"])
    for name, tensor in with_biases(loaded.model).items():
        writer.add_tensor(names[name], tensor.float().contiguous().numpy())
    path.parent.mkdir(parents=True, exist_ok=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- nanoGPT ----------------------------------------------------------------------------------------------------------


def write_nanogpt(loaded: Checkpoint, folder: Path) -> None:
    """Write ckpt.pt as nanoGPT's sample.py and train.py read it, and for characters the data set's meta.pkl, which they
    read from data/NAME/meta.pkl in the folder that they are started from. Raises UserError for other tokenizers.
    """
    shape, tokenizer = loaded.state["model"], loaded.tokenizer
    folder.mkdir(parents=True)
    config = {}
    if isinstance(tokenizer, CharTokenizer):
        config["dataset"] = NANOGPT_DATASET
        itos = dict(enumerate(tokenizer.characters))
        if tokenizer.eot is not None:
            itos[tokenizer.eot] = EOT_TEXT
        table = dict(vocab_size=shape["vocab_size"], itos=itos, stoi={token: i for i, token in itos.items()})
        meta = folder / "data" / NANOGPT_DATASET / "meta.pkl"
        meta.parent.mkdir(parents=True)
        meta.write_bytes(pickle.dumps(table))
    elif not isinstance(tokenizer, GPT2Tokenizer):
        raise UserError(
            f"nanoGPT has no tokenizer of the kind {tokenizer.kind!r}: it reads characters and GPT-2's tokens"
        )
    saved = {
        "model": {**loaded.model, "lm_head.weight": loaded.model["transformer.wte.weight"]},
        "model_args": {**{name: shape[name] for name in NANOGPT_ARGUMENTS}, "dropout": 0.0},
        "config": config,
    }
    torch.save(saved, folder / "ckpt.pt")


# --- formats ----------------------------------------------------------------------------------------------------------


class ExportedModel(NamedTuple):
    """An exported model, opened again by a reader of its format."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    logits: Callable[[Tensor], Tensor]  # ids (1, T) -> (1, T, V)


def open_with_transformers(folder: Path) -> ExportedModel:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).float()
    return ExportedModel(
        lambda text: tokenizer(text, add_special_tokens=False).input_ids,
        tokenizer.decode,
        lambda ids: model(ids).logits,
    )


def open_with_folio(path: Path) -> ExportedModel:
    loaded = convert.load(str(path))
    model = loaded.build().eval()
    return ExportedModel(
        lambda text: loaded.tokenizer.encode(text).tolist(),
        loaded.tokenizer.decode,
        lambda ids: model(ids, ids)[0],
    )


@dataclass(frozen=True)
class Format:
    """A format that a checkpoint can be exported to."""

    content: str  # what is written, for --help
    write: Callable[[Checkpoint, Path], None]
    open: Callable[[Path], ExportedModel]
    suffix: str = ""  # of the file that is written; "" if it is a folder
    activation: str | None = None  # the only one that its program computes; None: any


FORMATS = {
    "hf": Format(
        "a folder that transformers' AutoModelForCausalLM and AutoTokenizer open",
        write_hugging_face,
        open_with_transformers,
    ),
    "gguf": Format(
        "a float32 file for llama.cpp, of a model with a BPE tokenizer",
        write_gguf,
        open_with_folio,
        suffix=".gguf",
        activation=LLAMA_CPP_ACTIVATION,
    ),
    "nanogpt": Format(
        "a folder with ckpt.pt, and for characters the data set's meta.pkl",
        write_nanogpt,
        open_with_folio,
        activation=NANOGPT_ACTIVATION,
    ),
}
