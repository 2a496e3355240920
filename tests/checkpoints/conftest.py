"""Fixtures for reading other programs' files: a tiny GPT-2 from transformers, and its folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.foreign import PAIRS, VOCAB


@pytest.fixture
def hf_model(seed: int) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=260, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=259, eos_token_id=259
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


@pytest.fixture
def folder(hf_model: Any, tmp_path: Path) -> Path:
    """A folder as transformers saves it, with a few merges."""
    hf_model.save_pretrained(tmp_path / "gpt2-tiny")
    lines = "".join(" ".join(pair) + "\n" for pair in PAIRS)
    (tmp_path / "gpt2-tiny" / "merges.txt").write_text(f"#version: 0.2\n{lines}", encoding="utf-8")
    (tmp_path / "gpt2-tiny" / "vocab.json").write_text(json.dumps(VOCAB), encoding="utf-8")
    return tmp_path / "gpt2-tiny"
