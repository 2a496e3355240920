"""Fixtures of the decoders' tests: a small model, and each decoder of a CPU in turn."""

import pytest

from folio.decoding.torch_decoder import TorchDecoder
from folio.machine.runtime import Runtime, resolve_runtime
from model import GPT
from tests.support import decoding
from tests.support.decoding import random_model


@pytest.fixture(params=["compiled", "torch"])
def runtime(request, monkeypatch) -> Runtime:
    """With both decoders in turn: that of a CPU, and that of other devices, on a CPU."""
    if request.param == "torch":
        monkeypatch.setattr(decoding, "make_decoder", TorchDecoder)
    return resolve_runtime("cpu", "float32", False)


@pytest.fixture
def model(seed: int) -> GPT:
    return random_model(seed)
