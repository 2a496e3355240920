import pickle
from pathlib import Path

import gguf
import pytest
import torch
from tiny_tokenizers import TEXT, bpe, trained
from transformers import AutoModelForCausalLM, AutoTokenizer

from folio import UserError, convert
from folio.checkpoint import Checkpoint
from folio.generate import Sampling, generate
from folio.runtime import resolve_runtime
from folio.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from model import GPT, GPTConfig
from tools import export
from train import train

KINDS = {
    "char": lambda: CharTokenizer.of(TEXT),
    "char with eot": lambda: CharTokenizer.of(TEXT, eot=True),
    "byte": ByteTokenizer,
    "gpt2": bpe,
    "bpe": trained,
}


def checkpoint_of(tokenizer: Tokenizer, bias: bool, padding: int = 0, activation: str = "gelu_new") -> Checkpoint:
    """A model of random weights, its biases among them."""
    shape = dict(block_size=64, vocab_size=tokenizer.vocab_size + padding, n_layer=2, n_head=2, n_embd=16, bias=bias)
    shape["activation"] = activation
    torch.manual_seed(3)
    model = GPT(GPTConfig(**shape))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return Checkpoint(Path("random"), {n: p.detach() for n, p in model.named_parameters()}, tokenizer, {"model": shape})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias, activation", [(False, "gelu_new"), (True, "gelu_new"), (False, "gelu"), (True, "gelu")])
def test_transformers_opens_it_and_computes_the_same(kind, bias, activation, tmp_path):
    loaded = checkpoint_of(KINDS[kind](), bias, 5, activation)
    folder = tmp_path / "hf"
    convert.to_hugging_face(loaded, folder)
    assert "tokens read alike" in export.parity(loaded, *export.opened("hf", folder))
    theirs, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    text = TEXT.replace("<|endoftext|>", "")
    ids = theirs(text, return_tensors="pt").input_ids
    assert ids[0].tolist() == loaded.tokenizer.encode(text).tolist() and theirs.decode(ids[0]) == text
    assert theirs.eos_token_id == loaded.tokenizer.eot == model.config.eos_token_id
    ours = loaded.build().eval()
    torch.testing.assert_close(model(ids).logits, ours(ids, ids)[0], atol=1e-4, rtol=1e-4)


def test_out_and_in_again_are_the_same_tensors(tmp_path):
    loaded = checkpoint_of(bpe(), bias=True)
    convert.to_hugging_face(loaded, tmp_path / "hf")
    tensors = convert._checked(tmp_path, loaded.state["model"], convert.hugging_face_tensors(tmp_path / "hf"))
    assert "transformer.h.0.attn.c_attn.biasbias" not in tensors  # as it was once
    assert tensors.keys() == loaded.model.keys()
    assert all(torch.equal(tensor, loaded.model[name]) for name, tensor in tensors.items())


def test_merges_are_found_again():
    assert convert.merges_of(bpe().ranks) == [(104, 101), (108, 108), (256, 257), (258, 111), (32, 119)]
    spelled = {i: token for token, i in trained().to_json()["model"]["vocab"].items()}
    pairs = [[spelled[part] for part in pair] for pair in convert.merges_of(trained().ranks)]
    assert pairs == [list(pair) for pair in trained().to_json()["model"]["merges"]]


def test_the_command_writes_checks_and_cleans_up(tiny, tmp_path, capsys, monkeypatch):
    cfg = tiny(max_iters=6)
    train(cfg)
    export.main([cfg.out_dir, str(tmp_path / "hf")])
    assert "tokens read alike, logits within" in capsys.readouterr().out
    with pytest.raises(UserError, match="is there already"):
        export.main([cfg.out_dir, str(tmp_path / "hf")])
    monkeypatch.setattr(convert, "TRANSPOSED", ("attn.c_attn.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"))
    with pytest.raises(UserError, match="logits are off by"):
        export.main([cfg.out_dir, str(tmp_path / "wrong")])
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize(
    "to, kind", [("gguf", "gpt2"), ("gguf", "bpe"), ("nanogpt", "char with eot"), ("nanogpt", "gpt2")]
)
@pytest.mark.parametrize("bias", [False, True])
def test_what_was_written_comes_in_again(to, kind, bias, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "gpt2_tokenizer", bpe)  # which nanoGPT takes where there is no meta.pkl
    monkeypatch.setattr(convert, "_is_gpt2_size", lambda size: kind == "gpt2")
    loaded = checkpoint_of(KINDS[kind](), bias, 5, "gelu" if to == "nanogpt" else "gelu_new")
    made = tmp_path / ("made.gguf" if to == "gguf" else "made")
    export.WRITERS[to](loaded, made)
    assert "tokens read alike" in export.parity(loaded, *export.opened(to, made))
    again = convert.load(str(made if to == "gguf" else made / "ckpt.pt"))
    assert again.state["model"] == {**loaded.state["model"], "bias": bias or to == "gguf"}
    assert all(torch.equal(again.model[name], tensor) for name, tensor in loaded.model.items())
    others = again.model.keys() - loaded.model.keys()
    assert all(name.endswith(".bias") and not again.model[name].any() for name in others)
    assert bool(others) == (to == "gguf" and not bias)


@pytest.mark.parametrize(
    "to, kind, reason",
    [
        ("gguf", "char", "GGUF has no tokenizer of the kind 'char': llama.cpp reads byte-level BPE"),
        ("gguf", "byte", "GGUF has no tokenizer of the kind 'byte'"),
        ("nanogpt", "byte", "nanoGPT has no tokenizer of the kind 'byte': it reads characters and GPT-2's tokens"),
        ("nanogpt", "bpe", "nanoGPT has no tokenizer of the kind 'bpe'"),
    ],
)
def test_a_tokenizer_that_others_lack_is_refused(to, kind, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "load", lambda *_: checkpoint_of(KINDS[kind](), False))
    made = tmp_path / ("made.gguf" if to == "gguf" else "made")
    with pytest.raises(UserError, match=reason):
        export.main([f"--to={to}", "random", str(made)])
    assert not made.exists()
    with pytest.raises(UserError, match="otherwise a folder"):
        export.main([f"--to={to}", "random", str(tmp_path / ("made" if to == "gguf" else "made.gguf"))])


@pytest.mark.parametrize("to, activation", [("nanogpt", "gelu_new"), ("gguf", "gelu")])
def test_the_other_gelu_is_near(to, activation, tmp_path, monkeypatch):
    """Exact GELU and GPT-2's approximation of it: what it changes is measured."""
    monkeypatch.setattr(convert, "gpt2_tokenizer", bpe)
    monkeypatch.setattr(convert, "_is_gpt2_size", lambda size: True)
    loaded = checkpoint_of(bpe(), False, activation=activation)
    made = tmp_path / ("made.gguf" if to == "gguf" else "made")
    export.WRITERS[to](loaded, made)
    with pytest.raises(UserError, match="off by"):
        export.parity(loaded, *export.opened(to, made))
    assert "e-04 of the largest" in export.parity(loaded, *export.opened(to, made), export.OTHER_GELU)


def test_nanogpts_checkpoint_is_as_its_sample_py_reads_it(tmp_path):
    """model_args fit its GPTConfig, the tied matrix is there twice, and meta.pkl maps characters both ways."""
    loaded = checkpoint_of(CharTokenizer.of(TEXT), bias=False)
    convert.to_nanogpt(loaded, tmp_path / "made")
    saved = torch.load(tmp_path / "made" / "ckpt.pt", weights_only=True)
    assert set(saved["model_args"]) == {"n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "dropout"}
    assert saved["model"]["lm_head.weight"] is not None
    meta = pickle.loads((tmp_path / "made" / "data" / saved["config"]["dataset"] / "meta.pkl").read_bytes())
    text = "hello world"
    assert "".join(meta["itos"][meta["stoi"][character]] for character in text) == text


def test_a_quantized_gguf_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"other\.gguf has general.architecture='llama'; Folio supports only 'gpt2'"):
        convert.load(str(tmp_path / "other.gguf"))
    convert.to_gguf(checkpoint_of(bpe(), True), tmp_path / "half.gguf")
    (tmp_path / "half.gguf").write_bytes((tmp_path / "half.gguf").read_bytes()[:5000])
    with pytest.raises(UserError, match=r"half\.gguf is not a GGUF file of GPT-2"):
        convert.load(str(tmp_path / "half.gguf"))


@pytest.mark.slow
@pytest.mark.parametrize("kind, bias, padding", [("gpt2", True, 0), ("bpe", False, 0), ("bpe", False, 5)])
def test_llama_cpp_computes_and_writes_the_same(kind, bias, padding, tmp_path):
    """Needs llama.cpp's Python package: pip install llama-cpp-python, which compiles for some minutes."""
    llama_cpp = pytest.importorskip("llama_cpp")
    loaded = checkpoint_of(KINDS[kind](), bias, padding)
    convert.to_gguf(loaded, tmp_path / "made.gguf")
    theirs = llama_cpp.Llama(str(tmp_path / "made.gguf"), n_ctx=64, logits_all=True, verbose=False, n_threads=1)
    text = TEXT.replace("<|endoftext|>", "")[:60]
    ids = theirs.tokenize(text.encode(), add_bos=False, special=False)
    assert ids == loaded.tokenizer.encode(text).tolist() and theirs.detokenize(ids).decode() == text
    assert theirs.token_eos() == loaded.tokenizer.eot
    theirs.eval(ids)
    ours = loaded.build().eval()
    expected = ours(torch.tensor([ids]), torch.tensor([ids]))[0][0].detach()
    found = torch.from_numpy(theirs.scores[: len(ids)].copy())
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-3  # its float16 key-value cache
    theirs.reset()
    steps = generate(
        ours, [ids], resolve_runtime("cpu", "float32", False), max_new_tokens=8, sampling=Sampling(temperature=0)
    )
    written = [token for token, _ in zip(theirs.generate(ids, temp=0.0, repeat_penalty=1.0), range(8), strict=False)]
    assert written == [step.tokens[0] for step in steps]


def test_a_bpe_of_ones_own_comes_in_again(tmp_path):
    loaded = checkpoint_of(trained(), bias=True)
    convert.to_hugging_face(loaded, tmp_path / "hf")
    again = convert.load(str(tmp_path / "hf"))
    assert again.tokenizer.encode(TEXT).tolist() == trained().encode(TEXT).tolist()
    assert all(torch.equal(tensor, loaded.model[name]) for name, tensor in again.model.items())


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_folder_comes_in_again(kind, tmp_path):
    """Characters and bytes did not: their tokenizer.json was refused as "no byte-level BPE"."""
    loaded = checkpoint_of(KINDS[kind](), bias=True)
    convert.to_hugging_face(loaded, tmp_path / "hf")
    again = convert.load(str(tmp_path / "hf"))
    text = TEXT.replace("<|endoftext|>", "")
    assert again.tokenizer.encode(text).tolist() == loaded.tokenizer.encode(text).tolist()
    assert again.tokenizer.vocab_size == loaded.tokenizer.vocab_size and again.tokenizer.eot == loaded.tokenizer.eot
    assert all(torch.equal(tensor, again.model[name]) for name, tensor in loaded.model.items())


def test_a_place_that_cannot_be_written_is_one_line(tiny, tmp_path):
    train(tiny(max_iters=2))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/made cannot be written .*; name another place"):
        export.main(["--to=nanogpt", tiny().out_dir, str(tmp_path / "file" / "made")])


def test_the_out_dir_of_nanogpt_is_opened_as_it_is(tiny, tmp_path):
    train(tiny(max_iters=2))
    export.main(["--to=nanogpt", tiny().out_dir, str(tmp_path / "theirs")])
    assert convert.load(str(tmp_path / "theirs")).tokenizer.kind == "char"
