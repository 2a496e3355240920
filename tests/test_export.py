from pathlib import Path

import pytest
import torch
from tiny_tokenizers import TEXT, bpe, trained
from transformers import AutoModelForCausalLM, AutoTokenizer

from folio import UserError, convert
from folio.checkpoint import Checkpoint
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


def checkpoint_of(tokenizer: Tokenizer, bias: bool, padding: int = 0) -> Checkpoint:
    """A model of random weights, its biases among them."""
    shape = dict(block_size=64, vocab_size=tokenizer.vocab_size + padding, n_layer=2, n_head=2, n_embd=16, bias=bias)
    torch.manual_seed(3)
    model = GPT(GPTConfig(**shape))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return Checkpoint(Path("random"), {n: p.detach() for n, p in model.named_parameters()}, tokenizer, {"model": shape})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
def test_transformers_opens_it_and_computes_the_same(kind, bias, tmp_path):
    loaded = checkpoint_of(KINDS[kind](), bias, padding=5)
    convert.to_hugging_face(loaded, tmp_path / "hf")
    assert "tokens read alike" in export.parity(loaded, tmp_path / "hf")
    theirs, model = (
        AutoTokenizer.from_pretrained(tmp_path / "hf"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "hf"),
    )
    text = TEXT.replace("<|endoftext|>", "")
    ids = theirs(text, return_tensors="pt").input_ids
    assert ids[0].tolist() == loaded.tokenizer.encode(text).tolist() and theirs.decode(ids[0]) == text
    assert theirs.eos_token_id == loaded.tokenizer.eot == model.config.eos_token_id
    ours = loaded.build(GPT, GPTConfig).eval()
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


def test_a_bpe_of_ones_own_comes_in_again(tmp_path):
    loaded = checkpoint_of(trained(), bias=True)
    convert.to_hugging_face(loaded, tmp_path / "hf")
    again = convert.load(str(tmp_path / "hf"))
    assert again.tokenizer.encode(TEXT).tolist() == trained().encode(TEXT).tolist()
    assert all(torch.equal(tensor, loaded.model[name]) for name, tensor in again.model.items())
