"""Weights in the formats of others, in and out: Hugging Face's GPT-2, nanoGPT's ckpt.pt, llama.cpp's GGUF.

Nothing that these files hold is run: tensors are safetensors or GGUF, or pickles that torch opens with
weights_only=True.
"""

import json
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from folio import UserError, checkpoint
from folio.checkpoint import Checkpoint, CheckpointError
from folio.dataset import nanogpt_tokenizer
from folio.fetch import hub_model
from folio.files import read_json
from folio.tokenizer import (
    EOT_TEXT,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    GPT2Tokenizer,
    RankedTokenizer,
    Tokenizer,
    byte_alphabet,
    gpt2_ranks,
    gpt2_tokenizer,
)
from folio.tokenizer import load as load_tokenizer

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
NO_BIAS = ("transformer.wte.weight", "transformer.wpe.weight")


def load(init_from: str, which: str = "best") -> Checkpoint:
    """Whatever training and sampling can begin with: a name in HUB, a Hugging Face folder of GPT-2, nanoGPT's ckpt.pt,
    llama.cpp's GGUF, or a checkpoint or run of our own, of which `which` is taken. The `state` of others' has only
    "model", the arguments of GPTConfig. Raises UserError.
    """
    path = Path(init_from)
    if init_from in HUB:
        return from_hugging_face(hub_model(HUB[init_from]))
    if (path / "config.json").is_file():
        return from_hugging_face(path)
    if path.is_file() and path.suffix == ".pt":
        return from_nanogpt(path)
    if path.is_file() and path.suffix == ".gguf":
        return from_gguf(path)
    return checkpoint.load(path, which)


def from_hugging_face(folder: Path) -> Checkpoint:
    """GPT-2 as transformers saves it: config.json, model.safetensors or pytorch_model.bin, and perhaps merges.txt."""
    try:
        config = read_json(folder / "config.json")
        if config.get("model_type") != "gpt2":
            what = f"{config.get('model_type')} ({', '.join(config.get('architectures') or ['?'])})"
            raise CheckpointError(f"{folder} holds {what}, and Folio knows the architecture of gpt2 alone")
        unlike = dict(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
        for name, ours in unlike.items():
            if config.get(name, ours) != ours:
                raise CheckpointError(f"{folder}: config.json has {name}={config[name]}, and Folio computes {ours}")
        activation = config.get("activation_function", "gelu_new")
        if activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise CheckpointError(f"{folder}: config.json has activation_function={activation}; Folio knows {known}")
        shape = dict(
            block_size=config["n_positions"],
            vocab_size=config["vocab_size"],
            **{name: config[name] for name in ("n_layer", "n_head", "n_embd")},
            bias=True,
            activation=ACTIVATIONS[activation],
        )
        tensors = hugging_face_tensors(folder)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"{folder} is not a folder of Hugging Face's GPT-2: {error}") from None
    tensors = _checked(folder, shape, tensors)
    return _fitting(folder, shape, tensors, _tokenizer_of(folder, shape["vocab_size"]))


def hugging_face_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors by our names, each matrix as (out, in)."""
    if (folder / "model.safetensors").exists():
        saved = load_file(folder / "model.safetensors")
    elif (folder / "pytorch_model.bin").exists():
        saved = unpickled(folder / "pytorch_model.bin")
    else:
        raise CheckpointError(f"{folder} has neither model.safetensors nor pytorch_model.bin")
    tensors = {}
    for name, tensor in saved.items():
        if name != "lm_head.weight" and not name.endswith(BUFFERS):
            name = f"transformer.{name.removeprefix('transformer.')}"
            tensors[name] = tensor.T if name.endswith(TRANSPOSED) else tensor
    return tensors


def _tokenizer_of(folder: Path, vocab_size: int) -> Tokenizer:
    """The BPE of merges.txt or tokenizer.json beside the weights, or GPT-2's if the vocabulary is as large."""
    if (folder / "merges.txt").exists():
        return GPT2Tokenizer(gpt2_ranks(folder / "merges.txt"))
    if vocab_size >= 50257:
        return gpt2_tokenizer()
    if (folder / "tokenizer.json").exists():
        return load_tokenizer(folder)
    raise CheckpointError(
        f"{folder} has no merges.txt and no tokenizer.json, and {vocab_size:,} tokens are not GPT-2's"
    )


def from_nanogpt(path: Path) -> Checkpoint:
    """nanoGPT's ckpt.pt; a data set of characters is looked for as data/NAME/meta.pkl, from its folder upwards."""
    saved = unpickled(path)
    try:
        arguments, config = saved["model_args"], saved.get("config") or {}
        shape = {name: arguments[name] for name in "block_size vocab_size n_layer n_head n_embd bias".split()}
        shape["activation"] = "gelu"
        tensors = {re.sub(r"^(_orig_mod\.|module\.)*", "", name): tensor for name, tensor in saved["model"].items()}
        dataset = str(config.get("dataset") or "")
    except (LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not nanoGPT's ckpt.pt: {error!r}") from None
    tensors = {n: t for n, t in tensors.items() if n != "lm_head.weight" and not n.endswith(BUFFERS)}
    metas = [parent / "data" / dataset / "meta.pkl" for parent in path.resolve().parents] if dataset else []
    meta = next((meta for meta in metas if meta.exists()), None)
    tokenizer = nanogpt_tokenizer(meta) if meta else gpt2_tokenizer()
    return _fitting(path, shape, _checked(path, shape, tensors), tokenizer)


def from_gguf(path: Path) -> Checkpoint:
    """A GGUF file of GPT-2's architecture, with its tokenizer; weights in float32 or float16, not quantized."""
    from gguf import GGMLQuantizationType, GGUFReader

    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        if fields["general.architecture"] != "gpt2" or fields["tokenizer.ggml.model"] != "gpt2":
            raise CheckpointError(f"{path} holds {fields['general.architecture']}, and Folio knows gpt2 alone")
        shape = dict(
            block_size=int(fields["gpt2.context_length"]),
            vocab_size=len(fields["tokenizer.ggml.tokens"]),
            n_layer=int(fields["gpt2.block_count"]),
            n_head=int(fields["gpt2.attention.head_count"]),
            n_embd=int(fields["gpt2.embedding_length"]),
            bias=True,
            activation="gelu_new",
        )
        alphabet = byte_alphabet()
        tokens = fields["tokenizer.ggml.tokens"][: fields["tokenizer.ggml.eos_token_id"]]
        tokenizer = GPT2Tokenizer([bytes(map(alphabet.__getitem__, token)) for token in tokens])
        ours = {theirs: name for name, theirs in gguf_names(shape["n_layer"]).items()}
        tensors = {}
        for tensor in reader.tensors:
            if tensor.tensor_type not in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
                raise CheckpointError(f"{path}: {tensor.name} is quantized ({tensor.tensor_type.name})")
            if tensor.name != "output.weight":
                tensors[ours[tensor.name]] = torch.from_numpy(tensor.data.copy())
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a GGUF file of GPT-2: {error!r}") from None
    return _fitting(path, shape, _checked(path, shape, tensors), tokenizer)


def gguf_names(n_layer: int) -> dict[str, str]:
    """llama.cpp's names of our parameters, which are also Hugging Face's."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    parts = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    modules = ["transformer.wte", "transformer.wpe", "transformer.ln_f"]
    modules += [f"transformer.h.{i}.{part}" for i in range(n_layer) for part in parts]
    known = get_tensor_name_map(MODEL_ARCH.GPT2, n_layer)
    return {f"{module}.{kind}": f"{known.get_name(module)}.{kind}" for module in modules for kind in ("weight", "bias")}


def _fitting(path: Path, shape: dict[str, Any], tensors: dict[str, Tensor], tokenizer: Tokenizer) -> Checkpoint:
    """The checkpoint, if the model has a row for each token. Raises CheckpointError."""
    if tokenizer.vocab_size > shape["vocab_size"]:
        raise CheckpointError(
            f"{path}: the model knows {shape['vocab_size']:,} tokens, and the tokenizer that was found makes "
            f"{tokenizer.vocab_size:,} ({tokenizer.kind}): it is not the one that the model was trained with"
        )
    return Checkpoint(path, tensors, tokenizer, {"model": shape})


def unpickled(path: Path) -> dict[str, Any]:
    """What torch.save wrote, as long as it is tensors and plain values. Raises CheckpointError for anything else."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, TypeError, OSError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} was not opened, since it may run code or is damaged: {first}") from None


def _checked(path: Path, shape: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, contiguous and in float32, if the embeddings are as the shape says. Raises CheckpointError."""
    kinds = {"bias": bool, "activation": str}
    if wrong := [name for name in shape if type(shape[name]) is not kinds.get(name, int)]:
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
    writer.add_layer_norm_eps(1e-5)
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
        table = dict(vocab_size=made.vocab_size, itos=itos, stoi={token: i for i, token in itos.items()})
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
        if name.endswith(".weight") and name not in NO_BIAS:
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
