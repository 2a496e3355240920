"""Writes checkpoints in the formats of other programs: Hugging Face's GPT-2, llama.cpp's GGUF, nanoGPT's ckpt.pt.

FORMATS has the formats for GPT-2; tools/export.py also writes onnx and html, which support other models.
"""

import pickle
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from folio import UserError
from folio.checkpoints import foreign
from folio.checkpoints.checkpoint import Checkpoint
from folio.checkpoints.foreign import (
    LAYER_NORM_EPSILON,
    LLAMA_CPP_ACTIVATION,
    NANOGPT_ACTIVATION,
    NANOGPT_ARGUMENTS,
    TRANSPOSED,
    gguf_names,
)
from folio.checkpoints.foreign_tokenizers import merge_pairs, spell_tokens, to_hugging_face
from folio.checkpoints.tensor_files import write_tensors
from folio.data.sources.chats import CHAT_TEMPLATES
from folio.data.tokenizer import EOT_TEXT, CharTokenizer
from folio.data.windows import parse_mixture
from model import GPTConfig, sinusoids

EMBEDDINGS = ("wte", "wpe")  # modules without a bias
POSITION_EMBEDDINGS = "transformer.wpe.weight"
TOKEN_EMBEDDINGS = "transformer.wte.weight"  # also the output matrix
DROPOUTS = ("dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop")  # not needed for inference
SUPPORTED = (*DROPOUTS, "activation", "position", "document_token")  # settings with their own checks, or a line
GELUS = ("gelu_new", "gelu")  # GPT-2's tanh approximation, and the exact function
NANOGPT_DATASET = "folio_char"  # name of the data set with the exported meta.pkl


def with_position_table(loaded: Checkpoint) -> Checkpoint:
    """The checkpoint, with sinusoidal positions converted to a table of position embeddings as in GPT-2."""
    shape = loaded.state["model"]
    if shape.get("position") != "sinusoidal":
        return loaded
    config = loaded.config()
    tensors = {**loaded.model, POSITION_EMBEDDINGS: sinusoids(torch.arange(config.block_size), config.n_embd)}
    return replace(loaded, model=tensors, state={**loaded.state, "model": {**shape, "position": "learned"}})


# --- documents --------------------------------------------------------------------------------------------------------


def masks_documents(loaded: Checkpoint) -> bool:
    """Whether attention is confined to documents, which no other program computes."""
    return loaded.state["model"].get("document_token") is not None


def describe_documents(loaded: Checkpoint) -> Iterator[str]:
    """Yield a line about the limits of an export if `masks_documents`."""
    if masks_documents(loaded):
        no_template = " and no chat template" if loaded.prompt_format and not chat_template(loaded) else ""
        yield (
            f"the model was trained with mask_documents=True: attention does not cross {EOT_TEXT}, after which "
            f"positions restart. Other programs do not compute this, so the export is exact only for text without that "
            f"token. It sets no token at the beginning{no_template}"
        )


def chat_template(loaded: Checkpoint) -> str | None:
    """The template for the prompts of the model, if they have a format that the exported model computes.

    The turns of a chat end with the end-of-text token.
    """
    if loaded.prompt_format is None or (loaded.prompt_format == "chat" and masks_documents(loaded)):
        return None
    return CHAT_TEMPLATES[loaded.prompt_format]


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def write_hugging_face(loaded: Checkpoint, folder: Path) -> None:
    """Write a folder for transformers' AutoModelForCausalLM and AutoTokenizer, which need no code of Folio.

    Missing biases are written as zeros; matrices are transposed to (in, out).
    """
    folder.mkdir(parents=True)
    hugging_face_config(loaded.state["model"], loaded.tokenizer.eot).save_pretrained(folder)
    write_tensors(folder / "model.safetensors", conv1d_tensors(loaded.model), {"format": "pt"})
    write_tokenizer(loaded, folder)


def write_tokenizer(loaded: Checkpoint, folder: Path) -> None:
    """Write the tokenizer's files for transformers' AutoTokenizer."""
    from transformers import PreTrainedTokenizerFast

    settings: dict[str, Any] = {"model_max_length": loaded.state["model"]["block_size"]}
    if loaded.tokenizer.eot is not None:
        settings["eos_token"] = EOT_TEXT
        if not masks_documents(loaded):
            settings["bos_token"] = EOT_TEXT
        if template := chat_template(loaded):
            settings["chat_template"] = template
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=to_hugging_face(loaded.tokenizer), **settings)
    tokenizer.save_pretrained(folder)


def transformers_model(shape: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """transformers' GPT-2 with these tensors. Independent of model.py."""
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel(hugging_face_config(shape, eot=None)).eval()
    weights = {name.removeprefix("transformer."): tensor for name, tensor in conv1d_tensors(tensors).items()}
    model.transformer.load_state_dict(weights)  # lm_head is tied to wte
    return model


def hugging_face_config(shape: dict[str, Any], eot: int | None) -> Any:
    """transformers' GPT2Config for a model of this shape."""
    from transformers import GPT2Config

    settings = dict(n_positions=shape["block_size"], activation_function=shape.get("activation", GPTConfig.activation))
    settings |= {name: shape[name] for name in ("vocab_size", "n_layer", "n_head", "n_embd")}
    bos = eot if shape.get("document_token") is None else None
    return GPT2Config(**settings, bos_token_id=bos, eos_token_id=eot, architectures=["GPT2LMHeadModel"])


def conv1d_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as transformers stores them: with all biases, and matrices of blocks as (in, out)."""
    return {
        name: (tensor.T if name.endswith(TRANSPOSED) else tensor).contiguous()
        for name, tensor in with_biases(tensors).items()
    }


def with_biases(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with zeros for missing biases."""
    tensors = dict(tensors)
    for name, tensor in list(tensors.items()):
        if name.endswith(".weight") and name.split(".")[1] not in EMBEDDINGS:
            tensors.setdefault(name.removesuffix("weight") + "bias", torch.zeros(tensor.shape[0]))  # (out,)
    return tensors


TOKENIZER_NAMES = {"char": "characters", "byte": "bytes", "gpt2": "GPT-2's BPE", "bpe": "a BPE like GPT-2's"}
MODEL_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

| | |
|---|---|
{table}

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({name!r})  # the path of this folder
model = AutoModelForCausalLM.from_pretrained({name!r})
prompt = {prompt!r}
n = {new_tokens}  # tokens to generate
tokenizer.truncation_side = "left"
inputs = tokenizer(prompt, return_tensors="pt", truncation=True, max_length=tokenizer.model_max_length - n)
outputs = model.generate(**inputs, max_new_tokens=n, do_sample=True)
print(tokenizer.decode(outputs[0]))
```

- The prompt and the generated text must fit the context. Otherwise transformers fails with
  `IndexError: index out of range in self`. The code above therefore keeps only the end of a long prompt, leaving
  space for `n` new tokens.
- {unknown}{documents}

## Export

Exported by Folio (`python tools/export.py --to=hf`). The check compared transformers {transformers} with Folio on the
text of Folio's train.py and on a text generated by the model: {checked}.
"""
UNKNOWN_CHARACTERS = """The vocabulary has {count:,} characters. For other characters, the tokenizer fails with
  `WordLevel error: Missing [UNK] token from the vocabulary`: remove or replace them in your text."""


def model_card(loaded: Checkpoint, name: str, checked: str) -> str:
    """README.md of a Hugging Face folder: a description of the model, its use, and its limits.

    name: of the folder. checked: the result of checking the export.
    """
    from transformers import __version__

    shape, tokenizer, state = loaded.state["model"], loaded.tokenizer, loaded.state
    sizes = f"{shape['n_layer']} layers, {shape['n_head']} heads, {shape['n_embd']} channels"
    parameters = sum(tensor.numel() for tensor in loaded.model.values())
    zeros = sum(tensor.numel() for tensor in with_biases(loaded.model).values()) - parameters
    rows = {
        "architecture": f"GPT-2 (`GPT2LMHeadModel`): {sizes}, `{shape.get('activation', GPTConfig.activation)}`",
        "parameters": f"{parameters:,}" + (f", and {zeros:,} zero biases, which GPT-2 requires" if zeros else ""),
        "tokenizer": f"{TOKENIZER_NAMES[tokenizer.kind]}, {tokenizer.vocab_size:,} tokens",
        "context": f"{shape['block_size']:,} tokens",
    }
    if shape.get("position") == "sinusoidal":
        rows["positions"] = f"sinusoidal (Vaswani et al. 2017): constants in `{POSITION_EMBEDDINGS}`, not trained"
    if "dataset" in state:
        rows["training data"] = ", ".join(Path(name).name for name, _ in parse_mixture(state["dataset"]["folder"]))
    if state.get("best_val_loss") is not None and state["best_step"] == state["step"]:
        rows["validation loss"] = f"{state['best_val_loss']:.4f} nats per token, after {state['step']:,} steps"
        if state.get("dataset", {}).get("not_held_out"):
            rows["validation loss"] += ", on text that the weights it started from may have been trained on"
    unknown = "The tokenizer encodes any text."
    if isinstance(tokenizer, CharTokenizer):
        unknown = UNKNOWN_CHARACTERS.format(count=len(tokenizer.characters))
    return MODEL_CARD.format(
        name=name,
        table="\n".join(f"| {row} | {value} |" for row, value in rows.items()),
        new_tokens=max(1, shape["block_size"] // 2),
        prompt=tokenizer.decode([0]) if tokenizer.count_unknown("The") else "The",
        unknown=unknown,
        documents="".join(f"\n- {line[0].upper()}{line[1:]}." for line in describe_documents(loaded)),
        checked=checked,
        transformers=__version__,
    )


# --- GGUF -------------------------------------------------------------------------------------------------------------


def write_gguf(loaded: Checkpoint, path: Path, matrices: str = "F32") -> None:
    """Write a file for llama.cpp, with the tokenizer. Padding rows of the vocabulary become unused tokens.

    matrices: F32, F16, Q8_0 or Q4_0; other tensors are float32, as with llama-quantize.
    """
    from gguf import GGML_QUANT_VERSION, GGUFWriter, LlamaFileType, TokenType, quants

    shape, tokenizer = loaded.state["model"], loaded.tokenizer
    writer = GGUFWriter(path, "gpt2")
    writer.add_block_count(shape["n_layer"])
    writer.add_context_length(shape["block_size"])
    writer.add_embedding_length(shape["n_embd"])
    writer.add_feed_forward_length(4 * shape["n_embd"])
    writer.add_head_count(shape["n_head"])
    writer.add_layer_norm_eps(LAYER_NORM_EPSILON)
    writer.add_file_type(LlamaFileType.ALL_F32 if matrices == "F32" else LlamaFileType[f"MOSTLY_{matrices}"])
    writer.add_quantization_version(GGML_QUANT_VERSION)
    spelled = spell_tokens(tokenizer.ranks)
    padding = [f"[PAD{i}]" for i in range(tokenizer.vocab_size, shape["vocab_size"])]
    types = [TokenType.NORMAL] * len(spelled) + [TokenType.CONTROL] + [TokenType.UNUSED] * len(padding)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*spelled, EOT_TEXT, *padding])
    writer.add_token_types(types)
    writer.add_token_merges([f"{spelled[left]} {spelled[right]}" for left, right in merge_pairs(tokenizer.ranks)])
    if not masks_documents(loaded):
        writer.add_bos_token_id(tokenizer.eot)
    writer.add_eos_token_id(tokenizer.eot)
    writer.add_add_bos_token(False)
    if template := chat_template(loaded):
        writer.add_chat_template(template)
    names = gguf_names(shape["n_layer"])
    for name, tensor in with_biases(loaded.model).items():
        array, kind = tensor.float().contiguous().numpy(), gguf_type(name, tensor, matrices)
        writer.add_tensor(names[name], quants.quantize(array, kind), raw_dtype=kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_type(name: str, tensor: Tensor, matrices: str) -> Any:
    """The type of a tensor in a file with matrices of this type, as chosen by llama-quantize.

    For Q4_0, llama-quantize writes the output matrix, which GPT-2 shares with wte, in Q6_K. The package gguf cannot
    write Q6_K, so Q8_0 is used.
    """
    from gguf import GGMLQuantizationType as Type

    if tensor.dim() == 1 or name == POSITION_EMBEDDINGS:
        return Type.F32
    return Type.Q8_0 if matrices == "Q4_0" and name == TOKEN_EMBEDDINGS else Type[matrices]


# --- nanoGPT ----------------------------------------------------------------------------------------------------------


def write_nanogpt(loaded: Checkpoint, folder: Path) -> None:
    """Write ckpt.pt for nanoGPT's sample.py and train.py. For characters, also write the data set's meta.pkl, which
    they read from data/NAME/ in the working directory.
    """
    shape, tokenizer = loaded.state["model"], loaded.tokenizer
    folder.mkdir(parents=True)
    config = {}
    if isinstance(tokenizer, CharTokenizer):
        config["dataset"] = NANOGPT_DATASET
        itos = dict(enumerate(tokenizer.characters))
        if tokenizer.eot is not None:
            itos[tokenizer.eot] = EOT_TEXT
        meta = dict(vocab_size=shape["vocab_size"], itos=itos, stoi={token: i for i, token in itos.items()})
        path = folder / "data" / NANOGPT_DATASET / "meta.pkl"
        path.parent.mkdir(parents=True)
        path.write_bytes(pickle.dumps(meta))
    saved = {
        "model": {**loaded.model, "lm_head.weight": loaded.model["transformer.wte.weight"]},
        "model_args": {**{name: shape[name] for name in NANOGPT_ARGUMENTS}, "dropout": 0.0},
        "config": config,
    }
    torch.save(saved, folder / "ckpt.pt")


# --- formats ----------------------------------------------------------------------------------------------------------


class ExportedModel(NamedTuple):
    """An exported model, loaded by a program that reads its format."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    logits: Callable[[Tensor], Tensor]  # ids (1, T) -> (1, T, V)


def open_with_transformers(folder: Path) -> ExportedModel:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder).float()
    return ExportedModel(*open_tokenizer(folder), lambda ids: model(ids).logits)


def open_tokenizer(folder: Path) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    """The encode and decode functions of a folder from write_tokenizer, for ExportedModel."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    # verbose=False: no warning for texts longer than the context
    return lambda text: tokenizer(text, add_special_tokens=False, verbose=False).input_ids, tokenizer.decode


def open_with_folio(path: Path) -> ExportedModel:
    loaded = foreign.load(str(path))
    model = loaded.build().eval()
    return ExportedModel(
        lambda text: loaded.tokenizer.encode(text).tolist(),
        loaded.tokenizer.decode,
        model.logits,
    )


@dataclass(frozen=True)
class ExportFormat:
    """An export format of checkpoints."""

    content: str  # description of the output
    write: Callable[[Checkpoint, Path], None]
    open: Callable[[Path], ExportedModel]
    tokenizers: tuple[str, ...]  # supported kinds
    activations: tuple[str, ...]  # supported exactly; another one of GELUS is approximated
    packages: tuple[str, ...] = ()  # required packages
    adds_biases: bool = False  # whether missing biases are written as zeros
    suffix: str = ""  # of the output file; "" for a folder
    card: Callable[[Checkpoint, str, str], str] | None = None  # (checkpoint, name of the folder, result of the check)


FORMATS = {
    "hf": ExportFormat(
        "a folder that transformers' AutoModelForCausalLM and AutoTokenizer open",
        write_hugging_face,
        open_with_transformers,
        tokenizers=("char", "byte", "gpt2", "bpe"),
        activations=GELUS,
        packages=("transformers",),
        adds_biases=True,
        card=model_card,
    ),
    "gguf": ExportFormat(
        "a float32 file for llama.cpp, of a model with a BPE tokenizer",
        write_gguf,
        open_with_folio,
        tokenizers=("gpt2", "bpe"),
        activations=(LLAMA_CPP_ACTIVATION,),
        packages=("gguf", "transformers"),
        adds_biases=True,
        suffix=".gguf",
    ),
    "nanogpt": ExportFormat(
        "a folder with ckpt.pt, and for characters the data set's meta.pkl",
        write_nanogpt,
        open_with_folio,
        tokenizers=("char", "gpt2"),
        activations=(NANOGPT_ACTIVATION,),
    ),
}


def check_fits(loaded: Checkpoint, to: str) -> None:
    """Raise UserError if the format FORMATS[to] does not support something in a checkpoint, or requires more.

    loaded: from with_position_table. GPT-2's parameters are defined in this file, because model.py may be modified.
    """
    target, shape, source = FORMATS[to], loaded.state["model"], f"{loaded.path}: --to={to}"
    for name in NANOGPT_ARGUMENTS:
        if name not in shape:
            raise UserError(f"{source} requires the model's setting {name}, which the checkpoint does not have")
    check_settings(shape, (*NANOGPT_ARGUMENTS, *SUPPORTED), source)
    position = shape.get("position", "learned")
    if position != "learned":
        raise UserError(f"{source} does not support position={position!r}, only learned and sinusoidal")
    activation = shape.get("activation", GPTConfig.activation)
    if activation not in (*target.activations, *GELUS):
        raise UserError(f"{source} does not support activation={activation!r}, only {' and '.join(GELUS)}")
    check_tokenizer(loaded, to, target.tokenizers)
    allowed = gpt2_parameters(shape, len(loaded.model), bias=shape["bias"] or target.adds_biases)
    required = gpt2_parameters(shape, len(loaded.model), bias=shape["bias"] and not target.adds_biases)
    check_parameters(loaded, allowed, required, source)


def check_settings(shape: dict[str, Any], known: Collection[str], source: str) -> None:
    """Raise UserError if a setting of the model is not known to a format, and is neither off nor the default.

    shape: the model's settings. source: the start of the message. A default that changes the model is detected later,
    by comparing logits.
    """
    for name, value in shape.items():
        if name not in known and value and value != getattr(GPTConfig, name, None):  # None, False, 0: off
            raise UserError(f"{source} does not support the model's setting {name}={value!r}")


def check_tokenizer(loaded: Checkpoint, to: str, kinds: tuple[str, ...]) -> None:
    """Raise UserError unless the tokenizer is of a kind that the format supports."""
    kind = loaded.tokenizer.kind
    if kind not in kinds:
        remedy = f"use --to=hf, or prepare the text with --tokenizer={kinds[-1]} and train again"
        if kind not in FORMATS["hf"].tokenizers:  # music
            remedy = "use --to=html"
        raise UserError(
            f"{loaded.path}: --to={to} does not support the tokenizer {kind!r}, only {' and '.join(kinds)}; {remedy}"
        )


def check_parameters(
    loaded: Checkpoint, allowed: dict[str, tuple[int, ...]], required: Iterable[str], source: str
) -> None:
    """Raise UserError if a checkpoint lacks a required parameter, or has one with a name or shape that is not allowed.

    source: the start of the message.
    """
    for name, tensor in loaded.model.items():
        if name not in allowed:
            raise UserError(f"{source} does not support the parameter {name}, which GPT-2 does not have")
        if tuple(tensor.shape) != allowed[name]:
            raise UserError(f"{source} requires {name} with shape {allowed[name]}, not {tuple(tensor.shape)}")
    for name in required:
        if name not in loaded.model:
            raise UserError(f"{source} requires the parameter {name}, which the checkpoint does not have")


def gpt2_parameters(shape: dict[str, Any], max_layers: int, bias: bool) -> dict[str, tuple[int, ...]]:
    """The shapes of GPT-2's parameters by name, for a model of these sizes with at most `max_layers` layers."""
    C = shape["n_embd"]
    sizes = {"wte": (shape["vocab_size"], C), "wpe": (shape["block_size"], C), "ln_f": (C,)}
    layer = {"ln_1": (C,), "attn.c_attn": (3 * C, C), "attn.c_proj": (C, C)}
    layer |= {"ln_2": (C,), "mlp.c_fc": (4 * C, C), "mlp.c_proj": (C, 4 * C)}
    for i in range(min(shape["n_layer"], max_layers)):
        sizes |= {f"h.{i}.{module}": size for module, size in layer.items()}
    parameters = {f"transformer.{module}.weight": size for module, size in sizes.items()}
    if bias:
        biases = {module: size[:1] for module, size in sizes.items() if module not in EMBEDDINGS}
        parameters |= {f"transformer.{module}.bias": size for module, size in biases.items()}
    return parameters
