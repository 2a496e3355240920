import os
import shutil
from pathlib import Path

import pytest
import torch

from folio import UserError
from folio.checkpoints.snapshots import write_snapshot
from folio.machine import memory
from folio.web.viewed_model import LRUCache, ViewedModel
from model import GPT
from tests.support.numpy_gpt import NumpyGPT, assert_same
from tests.support.viewed_models import TOKENIZERS, build_model, save_run

CPU = torch.device("cpu")
IDS = [5, 7, 5, 1, 12]


@pytest.fixture
def run(seed, tmp_path) -> str:
    """A run with checkpoints of steps 100 and 200 (best), and snapshots of steps 0 and 10."""
    models = {step: build_model("char", seed + step) for step in (0, 10, 100, 200)}
    complete, snapshots = ({step: models[step] for step in steps} for steps in ((100, 200), (0, 10)))
    return save_run(tmp_path / "run", complete, TOKENIZERS["char"], snapshots)


def assert_logits(model: GPT, expected: GPT) -> None:
    assert_same(model(torch.tensor([IDS]))[0][0, -1], NumpyGPT(expected).run(IDS).logits[-1])


def test_every_checkpoint_and_snapshot_can_be_loaded(run, seed, tmp_path):
    viewed = ViewedModel(run, "best", CPU)
    assert viewed.model_at(None) is viewed.model and viewed.model_at(200) is viewed.model
    with pytest.raises(UserError, match="no checkpoint of step 50"):
        viewed.model_at(50)
    save_run(tmp_path / "run", {}, viewed.tokenizer, {50: build_model("char", seed + 50)})  # while the viewer runs
    assert list(viewed.checkpoints()) == [0, 10, 50, 100, 200]
    for step in (0, 10, 50, 100, 200):
        assert_logits(viewed.model_at(step), build_model("char", seed + step))


def test_replaced_and_removed_checkpoints(run, seed):
    """A restarted or resumed run replaces its snapshots while they are shown.

    The viewer showed the old weights, and crashed on files that did not fit, were damaged, or had just been removed.
    """
    viewed = ViewedModel(run, "best", CPU)
    path = viewed.checkpoints()[10]
    versions = [viewed.version(10)]
    assert viewed.model_at(10) is viewed.model_at(10) and viewed.version(200) is viewed.version(None) is None

    def replace(content: GPT | bytes) -> None:
        if isinstance(content, GPT):
            write_snapshot(Path(run), 10, dict(content.named_parameters()))
        else:
            path.write_bytes(content)
        os.utime(path, (len(versions), len(versions)))  # a different time even with a coarse clock
        versions.append(viewed.version(10))
        assert len({*versions}) == len(versions)

    other = build_model("char", seed + 1)
    replace(other)
    assert_logits(viewed.model_at(10), other)
    replace(build_model("bpe", seed))
    with pytest.raises(UserError, match=r"^[^\n]*the weights do not fit[^\n]*$"):
        viewed.model_at(10)
    replace(b"\0" * 100)
    with pytest.raises(UserError, match=r"^[^\n]*step-000010.safetensors cannot be read: [^\n]*$"):
        viewed.model_at(10)
    viewed.checkpoints = lambda: {10: path}  # listed just before it is removed
    path.unlink()
    with pytest.raises(UserError, match="no checkpoint of step 10"):
        viewed.model_at(10)


def test_a_deleted_run_is_named(run):
    """The message was that the run had no checkpoint of the step."""
    viewed = ViewedModel(run, "best", CPU)
    shutil.rmtree(run)
    assert viewed.model_at(200) is viewed.model
    for question in (lambda: viewed.model_at(10), lambda: viewed.progress(0)):
        with pytest.raises(UserError, match=r"^the folder [^\n]*run is gone [^\n]*step 200[^\n]*$"):
            question()


@pytest.mark.parametrize("step", [None, 10])
def test_weights_are_not_memory_mapped(run, step):
    """Windows does not remove mapped files, so a run could not be resumed while it was shown."""
    viewed = ViewedModel(run, "best", CPU)
    model = viewed.model_at(step)
    before = {name: p.clone() for name, p in model.named_parameters()}
    for file in Path(run).rglob("*.safetensors"):
        with open(file, "r+b") as content:
            content.write(bytes(file.stat().st_size))
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_a_checkpoint_opened_by_its_folder_belongs_to_its_run(run):
    viewed = ViewedModel(f"{run}/step-000100", "best", CPU)
    assert viewed.step == 100 and list(viewed.checkpoints()) == [0, 10, 100, 200]


def test_too_large_weights_are_refused(run, monkeypatch):
    monkeypatch.setattr(memory, "free", lambda device: 1000)
    with pytest.raises(UserError, match="step-000200: its weights in float32"):
        ViewedModel(run, "best", CPU)


def test_the_cache_drops_the_least_recently_used_values():
    cache, computed = LRUCache(10, len), []

    def text(length: int, key: str) -> str:
        computed.append(key)
        return key * length

    for length, key in ((4, "a"), (4, "b"), (4, "a"), (4, "c"), (4, "b"), (40, "d"), (4, "c")):
        assert cache.get(key, lambda length=length, key=key: text(length, key)) == key * length
    assert computed == list("abcbdc")  # "b" is dropped before "a", which was used again; "d" fills the cache
    assert list(cache.values) == ["c"]
    with pytest.raises(ZeroDivisionError):
        cache.get("e", lambda: 1 / 0)
    assert list(cache.values) == ["c"]
