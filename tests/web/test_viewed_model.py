import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from folio import UserError
from folio.machine import memory
from folio.web.viewed_model import Cache, ViewedModel
from tests.support.numpy_gpt import NumpyGPT, assert_same
from tests.support.viewed_models import TOKENIZERS, build_model, save_run

CPU = torch.device("cpu")
IDS = [5, 7, 5, 1, 12]


@pytest.fixture
def run(seed, tmp_path) -> str:
    """The folder of a run with checkpoints of steps 100 and 200, the best one, and snapshots of 0 and 10."""
    models = {step: build_model("char", seed + step) for step in (0, 10, 100, 200)}
    complete, snapshots = ({step: models[step] for step in steps} for steps in ((100, 200), (0, 10)))
    return save_run(tmp_path / "run", complete, TOKENIZERS["char"], snapshots)


def test_every_checkpoint_and_snapshot_of_the_run_can_be_asked_about(run, seed, tmp_path):
    viewed = ViewedModel(run, "best", CPU)
    assert viewed.at(None) is viewed.opened and viewed.at(200) is viewed.opened

    def assert_is(step: int, expected: torch.nn.Module) -> None:
        logits, _ = viewed.at(step)(torch.tensor([IDS]))
        assert_same(logits[0, -1], NumpyGPT(expected).run(IDS).logits[-1])

    for step in (0, 10, 100, 200):
        assert_is(step, build_model("char", seed + step))
    with pytest.raises(UserError, match="no checkpoint of step 50"):
        viewed.at(50)
    save_run(tmp_path / "run", {}, viewed.tokenizer, {50: build_model("char", seed)})  # while the viewer runs
    assert list(viewed.checkpoints()) == [0, 10, 50, 100, 200]
    assert_is(50, build_model("char", seed))


def test_a_checkpoint_that_is_written_again_or_removed(run, seed):
    """A run that is started again, or resumed from an earlier step, replaces its snapshots while they are shown.

    The old weights were kept, and a file of another model, a damaged one, or one that had just been removed failed.
    """
    viewed = ViewedModel(run, "best", CPU)
    path = viewed.checkpoints()[10]
    versions = [viewed.version(10)]
    assert viewed.at(10) is viewed.at(10) and viewed.version(200) is viewed.version(None) is None

    def replace(content: bytes) -> None:
        path.write_bytes(content)
        os.utime(path, (len(versions), len(versions)))  # another time, however coarse the clock is
        versions.append(viewed.version(10))
        assert len({*versions}) == len(versions)

    other = build_model("char", seed + 1)
    replace(save(dict(other.named_parameters())))
    logits, _ = viewed.at(10)(torch.tensor([IDS]))
    assert_same(logits[0, -1], NumpyGPT(other).run(IDS).logits[-1])
    replace(save(dict(build_model("bpe", seed).named_parameters())))
    with pytest.raises(UserError, match=r"^[^\n]*the weights do not fit[^\n]*$"):
        viewed.at(10)
    replace(b"\0" * 100)
    with pytest.raises(UserError, match=r"^[^\n]*step-000010.safetensors cannot be read: [^\n]*$"):
        viewed.at(10)
    viewed.checkpoints = lambda: {10: path}  # as it was a moment before
    path.unlink()
    with pytest.raises(UserError, match="no checkpoint of step 10"):
        viewed.at(10)


@pytest.mark.parametrize("step", [None, 10])
def test_weights_are_not_a_map_of_their_file(run, step):
    """Windows does not remove a file that is mapped, so that a run could not be resumed while it was shown."""
    viewed = ViewedModel(run, "best", CPU)
    model = viewed.at(step)
    before = {name: p.clone() for name, p in model.named_parameters()}
    for file in Path(run).rglob("*.safetensors"):
        with open(file, "r+b") as content:
            content.write(bytes(file.stat().st_size))
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_a_checkpoint_that_is_opened_by_its_own_folder_has_its_run(run):
    viewed = ViewedModel(f"{run}/step-000100", "best", CPU)
    assert viewed.step == 100 and list(viewed.checkpoints()) == [0, 10, 100, 200]


def test_weights_that_memory_does_not_hold_are_refused(run, monkeypatch):
    monkeypatch.setattr(memory, "free", lambda device: 1000)
    with pytest.raises(UserError, match="step-000200: its weights in float32 take 0 MiB, and 0 MiB of memory is free"):
        ViewedModel(run, "best", CPU)


def test_a_cache_keeps_the_newest_values():
    cache = Cache(10, len)
    computed = []

    def text(length: int, key: str) -> str:
        computed.append(key)
        return key * length

    for length, key in ((4, "a"), (4, "b"), (4, "a"), (4, "c"), (4, "b"), (40, "d"), (4, "c")):
        assert cache.get(key, lambda length=length, key=key: text(length, key)) == key * length
    assert computed == ["a", "b", "c", "b", "d", "c"]  # "a" was used again, so "b" was dropped first; "d" fills it
    assert list(cache.values) == ["c"]
    with pytest.raises(ZeroDivisionError):
        cache.get("e", lambda: 1 / 0)
    assert list(cache.values) == ["c"]
