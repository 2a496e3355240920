import io
import json
import os
import pickle
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from folio import UserError, convert
from folio.tokenizer import byte_alphabet
from model import GPT, GPTConfig
from sample import SampleConfig
from sample import main as sample
from train import train


@pytest.fixture
def theirs(seed: int) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=260, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=259, eos_token_id=259
    )
    model = GPT2LMHeadModel(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


@pytest.fixture
def folder(theirs: GPT2LMHeadModel, tmp_path: Path) -> Path:
    """A folder as transformers saves it, with a tiny table of merges."""
    theirs.save_pretrained(tmp_path / "theirs")
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    pairs = [f"{letters[ord('h')]} {letters[ord('e')]}", f"{letters[ord('l')]} {letters[ord('l')]}", "he ll"]
    (tmp_path / "theirs" / "merges.txt").write_text("#version: 0.2\n" + "\n".join(pairs) + "\n", encoding="utf-8")
    return tmp_path / "theirs"


def assert_same(theirs: GPT2LMHeadModel, init_from: Path) -> None:
    ids = torch.arange(40).view(2, 20)
    ours = convert.load(str(init_from)).build(GPT, GPTConfig).eval()
    torch.testing.assert_close(ours(ids)[0], theirs(ids).logits[:, -1:], atol=1e-4, rtol=1e-4)


def test_hugging_faces_weights_compute_the_same(theirs, folder):
    assert_same(theirs, folder)
    loaded = convert.load(str(folder))
    assert loaded.tokenizer.encode("hello").tolist() == [258, ord("o") - 33] and loaded.tokenizer.eot == 259


def test_old_files_with_buffers_and_without_prefix(theirs, folder):
    tensors = load_file(folder / "model.safetensors")
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    old |= {"h.0.attn.bias": torch.ones(1, 1, 32, 32).tril(), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    torch.save(old, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert_same(theirs, folder)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(model_type="llama", architectures=["LlamaForCausalLM"]),
            r"holds llama \(LlamaForCausalLM\), and Folio reads only",
        ),
        (dict(activation_function="relu"), "config.json has activation_function=relu; Folio knows"),
        (dict(vocab_size=300), r"transformer\.wte\.weight is \(260, 16\), and should be \(300, 16\)"),
        (dict(n_embd=None), "has n_embd=None, which is not a positive integer"),
    ],
)
def test_what_does_not_fit_is_named(change, message, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UserError, match=message):
        convert.load(str(folder))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(folder):
    with open(folder / "merges.txt", "a", encoding="utf-8") as file:
        file.write("hell o\n")
    with pytest.raises(UserError, match=r"the model knows 260 tokens, and the tokenizer that was found makes 261"):
        convert.load(str(folder))


def test_incomplete_folders_are_told(folder):
    save_file({"h.0.ln_1.weight": torch.ones(16)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"has no transformer\.wte\.weight"):
        convert.load(str(folder))
    (folder / "model.safetensors").write_bytes(b"half")
    with pytest.raises(UserError, match="is not a folder of Hugging Face's GPT-2"):
        convert.load(str(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        convert.load(str(folder))


def nanogpt_checkpoint(path: Path, prefix: str = "_orig_mod.") -> GPT:
    """ckpt.pt as nanoGPT's train.py saves it, with its data set beside."""
    shape = dict(block_size=16, vocab_size=3, n_layer=2, n_head=2, n_embd=16, bias=False)
    ours = GPT(GPTConfig(**shape, activation="gelu"), 5).eval()
    arguments = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, bias=False, vocab_size=3, dropout=0.0)
    saved = dict(model={prefix + name: tensor for name, tensor in ours.state_dict().items()}, model_args=arguments)
    saved |= dict(optimizer={"state": {}}, iter_num=7, best_val_loss=torch.tensor(1.5), config={"dataset": "abc"})
    path.parent.mkdir(parents=True)
    torch.save(saved, path)
    data = path.parent.parent / "data" / "abc"
    data.mkdir(parents=True)
    for split in ("train", "val"):
        (data / f"{split}.bin").write_bytes(bytes([0, 0, 1, 0, 2, 0] * 200))
    itos = dict(enumerate("\nab"))
    (data / "meta.pkl").write_bytes(pickle.dumps(dict(vocab_size=3, itos=itos, stoi={c: i for i, c in itos.items()})))
    return ours


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "module._orig_mod."])
def test_nanogpts_checkpoint_computes_the_same(prefix, tmp_path):
    ours = nanogpt_checkpoint(tmp_path / "out" / "ckpt.pt", prefix)
    loaded = convert.load(str(tmp_path / "out" / "ckpt.pt"))
    ids = torch.randint(3, (2, 10))
    assert torch.equal(loaded.build(GPT, GPTConfig).eval()(ids)[0], ours(ids)[0])
    assert loaded.tokenizer.characters == "\nab"


class Bomb:
    def __reduce__(self):
        return os.system, ("echo this must not run",)


@pytest.mark.parametrize("content", [Bomb(), {"model": Bomb()}, 5, {"model": {}}])
def test_a_pickle_that_wants_to_run_code_is_refused(content, tmp_path, capfd):
    torch.save(content, tmp_path / "ckpt.pt")
    with pytest.raises(UserError, match=r"ckpt\.pt (was not opened, since it may run code|is not nanoGPT's)"):
        convert.load(str(tmp_path / "ckpt.pt"))
    assert "this must not run" not in capfd.readouterr().out


def test_foreign_weights_are_sampled_and_finetuned(folder, tiny, tmp_path):
    nanogpt_checkpoint(tmp_path / "out" / "ckpt.pt")
    for init_from, start in ((folder, "hello"), (tmp_path / "out" / "ckpt.pt", "ab")):
        out = io.StringIO()
        with redirect_stdout(out):
            sample(SampleConfig(init_from=str(init_from), start=start, max_new_tokens=10, dtype="float32"))
        assert out.getvalue().startswith(start)
    shape = dict(n_layer=12, n_head=12, n_embd=768, block_size=1024)  # the defaults give way to the checkpoint's
    cfg = tiny(**shape, init_from=str(tmp_path / "out" / "ckpt.pt"), dataset="abc", data_dir=str(tmp_path / "data"))
    assert train(cfg) < 1.3
    with pytest.raises(UserError, match="it is not scratch, resume, gpt2, gpt2-medium"):
        train(tiny(init_from="gtp2"))


def test_without_a_network_it_is_told_which_files_to_put_where(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"or put config\.json, model\.safetensors, merges\.txt into a folder"):
        convert.load("gpt2")
