"""Fixtures for the tests of decoders: a small model, and both decoders on a CPU."""

import pytest

from folio.decoding.torch_decoder import TorchDecoder
from folio.machine.runtime import Runtime, resolve_runtime
from model import GPT
from tests.support import decoding
from tests.support.decoding import random_model


@pytest.fixture(params=["compiled", "torch"])
def runtime(request, monkeypatch) -> Runtime:
    """Runs a test with both decoders on a CPU: the compiled one, and torch's."""
    if request.param == "torch":
        monkeypatch.setattr(decoding, "make_decoder", TorchDecoder)
    return resolve_runtime("cpu", "float32", False)


@pytest.fixture
def model(seed: int) -> GPT:
    return random_model(seed)
