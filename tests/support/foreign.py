"""Files in the formats of transformers and nanoGPT, and changes to them."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from folio import UserError
from folio.checkpoints import foreign
from folio.data.tokenizer import byte_alphabet
from model import GPT, GPTConfig

PAIRS = [("h", "e"), ("l", "l"), ("he", "ll")]
VOCAB = {token: i for i, token in enumerate([*byte_alphabet(), "he", "ll", "hell", "<|endoftext|>"])}

LONG = "x" * 2**17  # a name in a file; a key of 1 MB caused a message of 1 MB


def assert_refused(path: Path, reason: str) -> None:
    """Assert that loading is an error for this reason (a pattern), in one line with shortened names."""
    with pytest.raises(UserError, match=reason) as error:
        foreign.load(str(path)).build()
    assert len(str(error.value)) < 800 and len(str(error.value).splitlines()) == 1


def change_json(folder: Path, name: str, **changes) -> None:
    """Change fields of a JSON file in the folder."""
    path = folder / name
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**content, **changes}), encoding="utf-8")


def change_tensors(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Change tensors of model.safetensors; None removes one."""
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    save_file({n: t for n, t in tensors.items() if t is not None}, folder / "model.safetensors")


def change_file(folder: Path, name: str, changes: dict | str) -> None:
    """Change tensors or fields of a file in the folder, or replace its text."""
    if isinstance(changes, str):
        (folder / name).write_text(changes, encoding="utf-8")
    elif name == "model.safetensors":
        change_tensors(folder, changes)
    else:
        change_json(folder, name, **changes)


def save_nanogpt_checkpoint(path: Path, prefix: str = "_orig_mod.") -> GPT:
    """Write ckpt.pt and its data set like nanoGPT's train.py and prepare.py. Returns the model."""
    shape = dict(block_size=16, vocab_size=3, n_layer=2, n_head=2, n_embd=16, bias=False)
    model = GPT(GPTConfig(**shape, activation="gelu"), 5).eval()
    arguments = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, bias=False, vocab_size=3, dropout=0.0)
    saved = dict(model={prefix + name: tensor for name, tensor in model.state_dict().items()}, model_args=arguments)
    saved |= dict(optimizer={"state": {}}, iter_num=7, best_val_loss=torch.tensor(1.5), config={"dataset": "abc"})
    path.parent.mkdir(parents=True)
    torch.save(saved, path)
    write_nanogpt_data(path.parent.parent / "data" / "abc")
    return model


def write_nanogpt_data(folder: Path) -> None:
    """Write the data set of the text "\\nab\\nab..." like nanoGPT's prepare.py."""
    folder.mkdir(parents=True)
    for split in ("train", "val"):
        (folder / f"{split}.bin").write_bytes(bytes([0, 0, 1, 0, 2, 0] * 200))
    itos = dict(enumerate("\nab"))
    (folder / "meta.pkl").write_bytes(pickle.dumps(dict(vocab_size=3, itos=itos, stoi={c: i for i, c in itos.items()})))


def save_changed_checkpoint(path: Path, **changes) -> None:
    """save_nanogpt_checkpoint with changed arguments (model_args), tensors (model) or settings (config)."""
    save_nanogpt_checkpoint(path, prefix="")
    saved = torch.load(path, weights_only=True)
    for name, change in changes.items():
        saved[name] = {**saved[name], **change}
    torch.save(saved, path)
