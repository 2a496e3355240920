import pytest
import torch
from numpy_gpt import NumpyGPT, assert_same
from viewed_models import TOKENIZERS, build_model, save_run

from folio import UserError
from folio.viewed_model import Cache, ViewedModel

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


def test_a_checkpoint_that_is_opened_by_its_own_folder_has_its_run(run):
    viewed = ViewedModel(f"{run}/step-000100", "best", CPU)
    assert viewed.step == 100 and list(viewed.checkpoints()) == [0, 10, 100, 200]


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
