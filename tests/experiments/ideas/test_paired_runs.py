from types import SimpleNamespace

import pytest
import torch

from folio.checkpoints.tensor_files import write_tensors
from folio.experiments.ideas.paired_runs import are_identical, measured, remove_weights
from folio.experiments.sweep.outcome import Outcome
from tests.support.runs import write_run


@pytest.fixture
def experiment(tmp_path):
    return SimpleNamespace(sweep=SimpleNamespace(folder=lambda point, seed: tmp_path / f"{point}-{seed}"))


PAIR = tuple(Outcome(point, 1, {}, "finished") for point in range(2))


@pytest.mark.parametrize(
    ("change", "is_identical"),
    [
        (lambda tensors: tensors, True),
        (lambda tensors: {**tensors, "a": tensors["a"].nextafter(torch.tensor(9.0))}, False),
        (lambda tensors: {"b": tensors["a"]}, False),
        (lambda tensors: {"a": tensors["a"].double()}, False),
        (lambda tensors: {"a": tensors["a"].view(1, 2)}, False),
    ],
)
def test_runs_are_identical_if_all_weights_have_the_same_bytes(change, is_identical, experiment):
    tensors = {"a": torch.tensor([1.5, float("nan")])}
    for outcome, content in zip(PAIR, (tensors, change(tensors)), strict=True):
        folder = write_run(experiment.sweep.folder(outcome.point, 1), {8: 2.0})
        write_tensors(folder / "step-000008" / "model.safetensors", content)
    assert are_identical(experiment, PAIR) == is_identical
    remove_weights(experiment, [PAIR])
    assert not are_identical(experiment, PAIR)  # unknown
    assert measured(experiment, [PAIR], 0) == {"tokens_per_second": 50.0, "memory": None}  # the log stays
