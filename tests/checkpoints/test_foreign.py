import os
import shutil
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from folio import UserError
from folio.base.files import read_json
from folio.checkpoints import checkpoint, foreign, foreign_tokenizers
from folio.decoding.language_model import LanguageModel
from folio.machine import memory
from model import GPT, GPTConfig
from sample import SampleConfig
from sample import main as sample
from tests.support.foreign import (
    LONG,
    PAIRS,
    VOCAB,
    assert_refused,
    change_file,
    change_json,
    change_tensors,
    save_changed_checkpoint,
    save_nanogpt_checkpoint,
)
from tests.support.runs import same_tensors
from tests.support.tiny_tokenizers import bpe
from tests.support.tolerances import logits_error, within
from train import train

pytestmark = pytest.mark.architecture("folio/checkpoints/foreign.py, which reads GPT-2's weights only")


def assert_same(hf_model: Any, init_from: Path) -> None:
    ids = torch.arange(40).view(2, 20)
    loaded, lazy = foreign.load(str(init_from)), foreign.load(str(init_from), lazy=True)
    ours = loaded.build().eval()
    assert all(p.is_meta for p in lazy.build().parameters()) and lazy.model.keys() == loaded.model.keys()
    for name, tensor in loaded.model.items():
        assert torch.equal(lazy.model[name], tensor) and lazy.model[name].stride() == tensor.stride()
    expected = hf_model(ids).logits[:, -1:]
    torch.testing.assert_close(ours(ids)[0], expected, **within(expected, logits_error(ours.config, 20)))


def test_hugging_faces_weights_compute_the_same(hf_model, folder):
    assert_same(hf_model, folder)
    loaded = foreign.load(str(folder))
    assert loaded.tokenizer.encode("hello").tolist() == [258, ord("o") - 33] and loaded.tokenizer.eot == 259


def test_a_model_larger_than_memory_is_an_error(folder, monkeypatch):
    """It was copied until the system killed the process. int8 and int4 copy one tensor at a time."""
    monkeypatch.setattr(memory, "free", lambda device: 2**14)
    with pytest.raises(UserError, match=r"gpt2-tiny: .* 0 MiB, .*--dtype=int8"):
        foreign.load(str(folder))
    assert LanguageModel.load(folder, dtype="int4").generate("hello", max_new_tokens=2)


def test_copied_weights_count_once(folder, monkeypatch):
    """They counted twice, so that a model of more than half the free memory was an error in float32."""
    size = 4 * sum(tensor.numel() for tensor in foreign.load(str(folder)).model.values())
    copied = False
    check_tensors = foreign.check_tensors

    def check_and_count(*args):
        nonlocal copied
        tensors = check_tensors(*args)
        copied = True
        return tensors

    monkeypatch.setattr(foreign, "check_tensors", check_and_count)
    monkeypatch.setattr(memory, "free", lambda device: 0 if copied else size)
    assert LanguageModel.load(folder, dtype="float32").path == folder


def test_old_files_with_buffers_and_without_prefix(hf_model, folder):
    tensors = load_file(folder / "model.safetensors")
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    old |= {"h.0.attn.bias": torch.ones(1, 1, 32, 32).tril(), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    torch.save(old, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert_same(hf_model, folder)


def test_a_tokenizer_with_more_tokens_than_the_model_is_an_error(folder):
    with open(folder / "merges.txt", "a", encoding="utf-8") as file:
        file.write("hell o\n")
    change_json(folder, "vocab.json", **{"hello": 259, "<|endoftext|>": 260})
    assert_refused(folder, r"260 tokens.* 261")


def test_incomplete_folders_are_errors(folder):
    save_file({"h.0.ln_1.weight": torch.ones(16)}, folder / "model.safetensors")
    assert_refused(folder, r"has no transformer\.wte\.weight")
    (folder / "model.safetensors").write_bytes(b"half")
    assert_refused(folder, "is not a folder of Hugging Face's GPT-2")
    (folder / "model.safetensors").unlink()
    assert_refused(folder, r"neither model\.safetensors nor pytorch_model\.bin")


def test_an_untied_output_matrix_is_an_error(hf_model, folder):
    """lm_head.weight was ignored, so that an untied model computed different logits than transformers."""
    embeddings = load_file(folder / "model.safetensors")["transformer.wte.weight"]
    change_tensors(folder, {"lm_head.weight": embeddings.clone()})
    assert_same(hf_model, folder)
    change_tensors(folder, {"lm_head.weight": embeddings + 1e-3})
    assert_refused(folder, r"lm_head\.weight .* differs from the token embeddings")


CONFIG, WEIGHTS = "config.json", "model.safetensors"


@pytest.mark.parametrize(
    "file, changes, reason",
    [
        (CONFIG, dict(model_type=LONG), "config.json .*model_type='x+.*; .*only 'gpt2'"),
        (CONFIG, dict(activation_function="relu"), "activation_function='relu'; .*only 'gelu_new' or 'gelu' or "),
        (CONFIG, dict(layer_norm_epsilon=1e-6), "layer_norm_epsilon=1e-06; .*only 1e-05"),
        (CONFIG, dict(scale_attn_weights=False), "scale_attn_weights=False; .*only True"),
        (CONFIG, dict(scale_attn_by_inverse_layer_idx=True), "inverse_layer_idx=True; .*only False"),
        (CONFIG, dict(tie_word_embeddings=False), "tie_word_embeddings=False; .*only True"),
        (CONFIG, dict(auto_map={"AutoModelForCausalLM": "own.Model"}), "auto_map={.*; .*only None"),
        (CONFIG, dict(vocab_size=300), r"transformer\.wte\.weight .*\(260, 16\) instead of \(300, 16\)"),
        (CONFIG, dict(n_embd=None), r"integers above 0.*n_embd=None"),
        (CONFIG, dict(n_layer=LONG), r"integers above 0.*n_layer='x+"),
        (CONFIG, dict(n_layer=[[["text"] * 99] * 99] * 9), r"integers above 0.*n_layer=\["),
        (CONFIG, dict(n_layer=1), r"a tensor 'transformer\.h\.1\..*model\.py"),
        (CONFIG, dict(n_layer=10**9), r"has no transformer\.h\.2\."),
        (CONFIG, dict(n_layer=10**400), r"has no transformer\.h\.2\."),
        (WEIGHTS, {"transformer.h.1.attn.c_attn.bias": None}, r"has no transformer\.h\.1\.attn\.c_attn\.bias"),
        (WEIGHTS, {"score.weight": torch.ones(2, 16)}, r"a tensor 'transformer\.score\.weight'.*model\.py"),
        (WEIGHTS, {LONG: torch.ones(2)}, r"a tensor 'transformer\.x+.*model\.py"),
        (WEIGHTS, {"ln_f.bias": torch.ones(16)}, r"'transformer\.ln_f\.bias' twice"),
        (WEIGHTS, {"transformer.ln_f.bias": torch.ones(16).byte()}, r"ln_f\.bias .*torch\.uint8.*not floating-point"),
        (WEIGHTS, {"transformer.h.0.mlp.c_fc.weight": torch.ones(16, 32)}, r"\(32, 16\) instead of \(64, 16\)"),
    ],
)
def test_an_unsupported_folder_is_an_error(file, changes, reason, folder):
    """A different epsilon, scale, width or tensor was ignored, or ended in a traceback or an error of several lines."""
    change_file(folder, file, changes)
    assert_refused(folder, reason)


def save_sharded(hf_model: Any, folder: Path) -> tuple[Path, dict[str, str]]:
    """Replace the weights in the folder by shards. Returns the index, and the shard of each tensor."""
    (folder / WEIGHTS).unlink()
    hf_model.save_pretrained(folder, max_shard_size="9KB")
    index = folder / "model.safetensors.index.json"
    return index, read_json(index)["weight_map"]


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_sharded_weights_are_read(kind, hf_model, folder):
    """For a folder with model.safetensors.index.json, the error was that it has no weights."""
    index, weight_map = save_sharded(hf_model, folder)
    assert len(set(weight_map.values())) > 2
    if kind == "bin":  # as older versions of transformers save it
        for name in set(weight_map.values()):
            torch.save(load_file(folder / name), folder / name.replace("safetensors", "bin"))
            (folder / name).unlink()
        index.unlink()
        weight_map = {tensor: name.replace("safetensors", "bin") for tensor, name in weight_map.items()}
        change_json(folder, "pytorch_model.bin.index.json", weight_map=weight_map)
    assert_same(hf_model, folder)


def test_shards_that_do_not_match_their_index_are_errors(hf_model, folder, tmp_path):
    index, original = save_sharded(hf_model, folder)
    name, shard = next(iter(original.items()))
    save_file({name: torch.ones(2)}, tmp_path / "outside.safetensors")
    shutil.copy(folder / shard, folder / "again.safetensors")
    for weight_map, reason in (
        ({**original, name: "../outside.safetensors"}, r"outside its folder: '\.\./outside"),
        ({**original, name: str(tmp_path / "outside.safetensors")}, "outside its folder"),
        ({**original, name: "missing.safetensors"}, "missing.safetensors"),
        ({n: file for n, file in original.items() if file != shard}, r"has no transformer\."),
        ({**original, "again": "again.safetensors"}, r"'transformer.*', which another shard also has"),
        ([], "is not a folder of Hugging Face's GPT-2"),
        ({name: 5}, "is not a folder of Hugging Face's GPT-2"),
    ):
        change_json(folder, index.name, weight_map=weight_map)
        assert_refused(folder, reason)
    change_json(folder, index.name, weight_map=original)
    (folder / shard).write_bytes(b"half")
    assert_refused(folder, "is not a folder of Hugging Face's GPT-2")


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "module._orig_mod."])
def test_nanogpts_checkpoint_computes_the_same(prefix, tmp_path):
    ours = save_nanogpt_checkpoint(tmp_path / "out" / "ckpt.pt", prefix)
    loaded = foreign.load(str(tmp_path / "out" / "ckpt.pt"))
    ids, model = torch.randint(3, (2, 10)), loaded.build().eval()
    model.kernel = ours.kernel  # torch's kernel rounds in another order
    assert torch.equal(model(ids)[0], ours(ids)[0])
    assert loaded.tokenizer.characters == "\nab"


@pytest.mark.parametrize(
    "changes, reason",
    [
        (dict(model={"lm_head.weight": torch.ones(3, 16)}), r"lm_head\.weight .* differs from the token embeddings"),
        (dict(model={LONG: torch.ones(2)}), r"a tensor 'x+.*model\.py"),
        (dict(model={LONG: "text"}), "'x+.* is not a tensor"),
        (dict(model={"module.transformer.ln_f.weight": torch.ones(16)}), r"'transformer\.ln_f\.weight' twice"),
        (dict(model_args={"use_rope": True}), "model_args has 'use_rope'"),
        (dict(model_args={LONG: 1}), "model_args has 'x+"),
        (dict(model_args={"n_layer": LONG}), "integers above 0.*n_layer='x+"),
        (dict(config={"dataset": LONG}), "is not nanoGPT's ckpt.pt|data/x+.* next to ckpt.pt"),  # the name of a folder
        (dict(config={"dataset": None}), "vocabulary of 3 tokens .*meta.pkl .*data/NAME next to ckpt.pt"),
    ],
)
def test_an_unsupported_nanogpt_checkpoint_is_an_error(changes, reason, tmp_path):
    """An untied lm_head and the settings of nanoGPT's forks were ignored."""
    save_changed_checkpoint(tmp_path / "out" / "ckpt.pt", **changes)
    assert_refused(tmp_path / "out" / "ckpt.pt", reason)


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_larger_than_their_file_are_errors(zipped, tmp_path, monkeypatch):
    """A tensor can be a single number that is expanded: a file of 2 kB requested terabytes."""
    monkeypatch.setattr(foreign_tokenizers, "gpt2_tokenizer", bpe)
    shape = dict(block_size=2**25, vocab_size=50257, n_layer=1, n_head=1, n_embd=2**15, bias=False)
    one = torch.zeros(1, dtype=torch.float16)
    model = {name: one.expand(size) for name, size in foreign.parameter_shapes(shape).items()}
    saved = {"model": model, "model_args": shape, "config": {}}
    torch.save(saved, tmp_path / "ckpt.pt", _use_new_zipfile_serialization=zipped)
    assert (tmp_path / "ckpt.pt").stat().st_size < 10_000
    assert_refused(tmp_path / "ckpt.pt", "its tensors are larger than its data")


class Bomb:
    def __reduce__(self):
        return os.system, ("echo this must not run",)


@pytest.mark.parametrize("content", [Bomb(), {"model": Bomb()}, 5, {"model": {}}])
def test_a_pickle_that_would_run_code_is_not_loaded(content, folder, capfd):
    (folder / "model.safetensors").unlink()
    for name, path in (("ckpt.pt", folder / "ckpt.pt"), ("pytorch_model.bin", folder)):
        torch.save(content, folder / name)
        assert_refused(path, rf"{name} .*may run code" if "Bomb" in repr(content) else "is not ")
    assert "this must not run" not in capfd.readouterr().out


def zip_records(path: Path, *names: str, compression: int = zipfile.ZIP_STORED) -> None:
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", compression) as archive:
        warnings.simplefilter("ignore")  # about duplicate names
        for name in names:
            archive.writestr(name, b"\x80\x02}.")


def write_prefixed(path: Path) -> None:
    zip_records(path, "archive/data.pkl")
    path.write_bytes(b"PK\3\4" + path.read_bytes())


def write_sizes(path: Path, size: int | None = None) -> None:
    """Write two tensors in torch's old format, which declare this size (None: their own)."""
    torch.save({"a": torch.ones(3), "b": torch.ones(5)}, path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    for numel in (b"K\x03Nt", b"K\x05Nt") if size else ():
        assert content.count(numel) == 1
        content = content.replace(numel, b"J" + struct.pack("<i", size) + b"Nt")
    path.write_bytes(content)


def write_without_storages(path: Path) -> None:
    """Write an old file without the list of storages; torch would leave them uninitialized."""
    write_sizes(path)
    content = path.read_bytes()
    path.write_bytes(content[: content.rindex(b"\x80\x02")] + b"\x80\x02].")


LARGER = "its tensors are larger than the file"


@pytest.mark.parametrize(
    "write, reason",
    [
        (lambda path: zip_records(path, "archive/data.pkl", compression=zipfile.ZIP_DEFLATED), "are compressed"),
        (lambda path: zip_records(path, "archive/data.pkl", "archive/data.pkl"), "the same name"),
        (lambda path: zip_records(path, "archive/data.pkl", "other/DATA.pkl"), "the same name"),
        (lambda path: zip_records(path, "archive/version"), "data.pkl is missing"),
        (write_prefixed, "first record is not at byte 0"),
        (lambda path: write_sizes(path, 2**31 - 1), LARGER),  # torch allocates the declared size
        (lambda path: write_sizes(path, 90), LARGER),  # together, although each is smaller
        (write_without_storages, "list of storages does not match"),
    ],
)
def test_a_file_that_torch_save_does_not_write_is_not_loaded(write, reason, tmp_path, monkeypatch):
    """A compressed data.pkl of 1 MB took 3.3 GB, and tensors that are each smaller than the file any amount."""
    path = tmp_path / "ckpt.pt"
    write_sizes(path)
    foreign.load_pickle(path)
    size = path.stat().st_size
    assert 4 * 90 < size < 2 * 4 * 90
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("torch.load was called"))
    write(path)
    assert_refused(path, reason)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoints_of_nanogpt_and_its_forks_are_read(dtype, zipped, tmp_path):
    """With the state of an optimizer and a GradScaler, a state_dict with metadata, tied weights, and many other values.
    The check of the pickle must allow every opcode and global that torch.save writes for them.
    """
    save_nanogpt_checkpoint(tmp_path / "out" / "ckpt.pt")
    path = tmp_path / "out" / "ckpt.pt"
    saved = torch.load(path, weights_only=True)
    arguments = {name: value for name, value in saved["model_args"].items() if name != "dropout"}
    model = GPT(GPTConfig(**arguments, activation="gelu"), 5).to(dtype)
    optimizer = torch.optim.AdamW([{"params": [p]} for p in model.parameters()], betas=(0.9, 0.95), fused=True)
    model(torch.zeros(1, 4, dtype=torch.long))[0].sum().backward()
    optimizer.step()
    state = model.state_dict()
    assert state._metadata
    state["lm_head.weight"] = state["transformer.wte.weight"]
    state |= {"transformer.h.0.attn.bias": torch.ones(16, 16, dtype=torch.bool)}
    scaler = {"scale": 65536.0, "growth_factor": 2.0, "_growth_tracker": 3}
    others = {"seed": 2**62, "tokens": -(2**40), "best": None, "shape": torch.Size([2]), "betas": (1, 2, 3, 4), "": []}
    others |= {"device": torch.device("cpu"), "dtype": dtype, "ema": torch.nn.Parameter(torch.ones(2))}
    saved |= {"model": state, "optimizer": optimizer.state_dict(), "scaler": scaler, "iter_num": 70_000}
    saved |= {"rng": torch.get_rng_state(), "other": others}
    torch.save(saved, path, _use_new_zipfile_serialization=zipped)
    loaded = foreign.load(str(path))
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.model[name], parameter.detach().float())


def test_foreign_weights_are_sampled_and_finetuned(folder, tiny, tmp_path, capsys):
    model = save_nanogpt_checkpoint(tmp_path / "out" / "ckpt.pt")
    for init_from, start in ((folder, "hello"), (tmp_path / "out" / "ckpt.pt", "ab")):
        sample(SampleConfig(init_from=str(init_from), start=start, max_new_tokens=10, dtype="float32"))
        assert capsys.readouterr().out.startswith(start)
    shape = dict(n_layer=12, n_head=12, n_embd=768, block_size=1024)  # replaced by the checkpoint's shape
    data = dict(dataset="abc", data_dir=str(tmp_path / "data"))
    train(cfg := tiny(**shape, **data, init_from=str(tmp_path / "out" / "ckpt.pt"), max_iters=1, learning_rate=0.0))
    assert same_tensors(checkpoint.load(Path(cfg.out_dir)).model, dict(model.named_parameters()))
    with pytest.raises(UserError, match="expected scratch, resume, gpt2, gpt2-medium"):
        train(tiny(init_from="scrach"))


def test_without_a_network_the_error_lists_the_files_to_provide(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert_refused(Path("gpt2"), r"config\.json, model\.safetensors, vocab\.json, merges\.txt into a folder")


TOKENS = list(VOCAB)
QUANTIZED = np.ones((16, 64), np.float32)  # written in 8 bits


def write_gguf(hf_model: Any, path: Path, changes: dict[str, Any] | None = None) -> Path:
    """Write the model like llama.cpp's convert_hf_to_gguf.py, with its names and transposed matrices.

    changes: of fields and tensors; None omits one.
    """
    gguf = pytest.importorskip("gguf")
    content = {
        "gpt2.block_count": 2,
        "gpt2.context_length": 32,
        "gpt2.embedding_length": 16,
        "gpt2.feed_forward_length": 64,
        "gpt2.attention.head_count": 2,
        "gpt2.attention.layer_norm_epsilon": 1e-5,
        "general.name": "gpt2-tiny",
        "general.file_type": 0,
        "general.quantization_version": 2,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [1] * 259 + [3],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in PAIRS],
        "tokenizer.ggml.bos_token_id": 259,
        "tokenizer.ggml.eos_token_id": 259,
    }
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, 2)
    for name, tensor in hf_model.state_dict().items():
        if name != "lm_head.weight":
            tensor = tensor.T if name.endswith(foreign.TRANSPOSED) else tensor
            content[names.get_name(name, (".weight", ".bias"))] = tensor.contiguous().numpy()
    content |= changes or {}
    writer = gguf.GGUFWriter(path, content.pop("general.architecture", "gpt2"))
    for name, value in content.items():
        if value is QUANTIZED:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        elif isinstance(value, np.ndarray):  # NumPy lacks bfloat16
            is_bfloat16 = value.dtype == np.uint8
            writer.add_tensor(name, value, raw_dtype=gguf.GGMLQuantizationType.BF16 if is_bfloat16 else None)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif value is not None:
            kind = {bool: "bool", int: "uint32", float: "float32", str: "string"}[type(value)]
            getattr(writer, f"add_{kind}")(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def embeddings(hf_model: Any) -> np.ndarray:
    return hf_model.transformer.wte.weight.detach().numpy().copy()


def test_the_output_of_llama_cpps_converter_computes_the_same(hf_model, tmp_path):
    assert_same(hf_model, write_gguf(hf_model, tmp_path / "a.gguf"))
    assert foreign.load(str(tmp_path / "a.gguf")).tokenizer.encode("hello").tolist() == [258, VOCAB["o"]]
    # older converters repeat the embeddings as output.weight, and do not record the pre-tokenizer
    older = {"tokenizer.ggml.pre": None, "output.weight": embeddings(hf_model)}
    assert_same(hf_model, write_gguf(hf_model, tmp_path / "b.gguf", older))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gguf_in_16_bits_is_read(dtype, hf_model, tmp_path):
    """bfloat16, which llama.cpp's converter may choose by default, was an error, as if it were quantized."""
    rounded = hf_model.transformer.wte.weight.detach().to(dtype)
    hf_model.transformer.wte.weight.data.copy_(rounded)
    data = rounded.numpy() if dtype == torch.float16 else rounded.view(torch.uint8).numpy()
    assert_same(hf_model, write_gguf(hf_model, tmp_path / "x.gguf", {"token_embd.weight": data}))


def test_a_padded_vocabulary_is_read(hf_model, tmp_path):
    pads = {"tokenizer.ggml.tokens": [*VOCAB, "[PAD260]"], "tokenizer.ggml.token_type": [1] * 259 + [3, 5]}
    pads["token_embd.weight"] = np.concatenate([embeddings(hf_model), np.ones((1, 16), np.float32)])
    loaded = foreign.load(str(write_gguf(hf_model, tmp_path / "x.gguf", pads)))
    assert loaded.state["model"]["vocab_size"] == 261 and loaded.tokenizer.eot == 259


def typed_tokens(tokens: list[str], kinds: list[int]) -> dict[str, list]:
    return {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"general.architecture": "llama"}, "general.architecture='llama'; .*only 'gpt2'"),
        ({"gpt2.attention.layer_norm_epsilon": 1e-6}, "epsilon=9.99.*e-07; .*only 9.99.*e-06"),
        ({"gpt2.attention.causal": False}, "causal=False; .*only True"),
        ({"gpt2.attention.head_count": [2, 2]}, "integers above 0"),
        ({"gpt2.block_count": 2**31 - 1}, r"has no transformer\.h\.2"),
        ({"gpt2.block_count": 1}, r"a tensor 'blk\.1\..*model\.py"),
        ({"gpt2.context_length": None}, "it has no 'gpt2.context_length'"),
        ({"tokenizer.ggml.model": LONG}, "tokenizer.ggml.model='x+.*; .*only 'gpt2'"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "tokenizer.ggml.pre='llama-bpe'; .*only 'gpt-2'"),
        ({"tokenizer.ggml.add_bos_token": True}, "add_bos_token=True; .*only False"),
        ({"tokenizer.ggml.add_eos_token": True}, "add_eos_token=True; .*only False"),
        ({"tokenizer.ggml.merges": ["h e", "l l"]}, "no merge .*'hell'"),
        ({"tokenizer.ggml.merges": [f"{LONG} a"]}, "the merge 'x+"),
        ({"tokenizer.ggml.eos_token_id": 0}, "the token 0 is special; .* 259"),
        ({"tokenizer.ggml.tokens": [*TOKENS[:256], "ll", "he", *TOKENS[258:]]}, "'ll' has the id 256, .* 257"),
        ({"tokenizer.ggml.tokens": [*TOKENS[:256], "he", "he", *TOKENS[258:]]}, "'he' has the id 257"),
        ({"tokenizer.ggml.tokens": [*TOKENS[:258], LONG, TOKENS[259]]}, "no merge .*'x+.* \\(id 258\\)"),
        (typed_tokens(TOKENS[:250], [1] * 250), "lacks the token"),
        (typed_tokens(TOKENS, [1] * 258 + [4, 3]), "lacks the token 'hell'"),
        (typed_tokens([*TOKENS, "<|user|>"], [1] * 259 + [3, 3]), "the token 260 is special; .* 259"),
        (typed_tokens([*TOKENS, "<|user|>"], [1] * 259 + [3, 1]), r"no merge .*'<\|user\|>' \(id 260\)"),
        (typed_tokens(TOKENS, [1] * 10), "is not a GGUF file of GPT-2"),
        (typed_tokens(TOKENS, [77] * 260), "no merge|lacks the token"),
        ({"output.weight": np.ones((260, 16), np.float32)}, r"lm_head\.weight .* differs from the token embeddings"),
        ({"rope_freqs.weight": np.ones(4, np.float32)}, r"a tensor 'rope_freqs\.weight'.*model\.py"),
        ({"blk.1.ffn_up.bias": None}, r"has no transformer\.h\.1\.mlp\.c_fc\.bias"),
        ({"blk.1.ffn_down.weight": QUANTIZED}, r"'blk\.1\.ffn_down\.weight' is Q8_0: convert the model to F32"),
    ],
)
def test_an_unsupported_gguf_is_an_error(changes, reason, hf_model, tmp_path):
    """A different epsilon or output.weight, tokens in another order or of another type, and added tokens were loaded
    silently.
    """
    assert_refused(write_gguf(hf_model, tmp_path / "x.gguf", changes), rf"x\.gguf.*{reason}")
