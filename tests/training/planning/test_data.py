"""The data of a run that continues: the same text, in the same order."""

from pathlib import Path

import pytest

from folio import UserError, load
from folio.checkpoints import checkpoint, run_folder
from folio.training.planning.data import open_data
from tests.support.runs import edit_state
from train import train


@pytest.mark.parametrize("windows", [None, 1])
def test_a_run_with_the_order_of_one_phase_per_epoch_is_not_resumed(tiny, tmp_path, windows):
    """It would continue with other sequences. Its weights can be finetuned, evaluated, and sampled from."""
    train(tiny(max_iters=3))
    record = {"windows": windows} if windows else {}  # runs of this order did not record it

    def make_older(state: dict) -> None:
        for part in state["parts"]:
            del part["windows"]
            part.update(record)
        if windows is None:
            del state["model"]["document_token"], state["guard"]["without_targets"]
            for name in ("parts", "not_held_out", "prompt_format"):
                del state["dataset"][name]

    for path in run_folder.directories(Path(tiny().out_dir)):
        edit_state(path, make_older)
    with pytest.raises(UserError, match=r'sampling="epoch" with one phase per epoch; start .*--init_from=.*out '):
        train(tiny(max_iters=6, init_from="resume"))
    train(tiny(init_from="resume", eval_only=True))
    train(tiny(init_from=tiny().out_dir, out_dir=str(tmp_path / "finetuned")))
    assert load(tiny().out_dir, device="cpu").generate("O", max_new_tokens=5)


@pytest.mark.parametrize("sampling", ["epoch", "random"])
def test_a_run_that_used_windows_without_targets_is_not_resumed(tiny, masked_dir, tmp_path, sampling):
    """It would continue with other sequences. A run that records that it did not is resumed."""
    cfg = tiny(data_dir=masked_dir, max_iters=2, sampling=sampling)
    train(cfg)
    train(tiny(data_dir=masked_dir, max_iters=3, init_from="resume"))
    path = checkpoint.load(Path(cfg.out_dir)).path
    assert [part.pop("without_targets") for part in checkpoint.load(path).state["parts"]] == [
        open_data(cfg).without_targets
    ] * 2
    edit_state(path, lambda state: [part.pop("without_targets") for part in state["parts"]])
    with pytest.raises(UserError, match=r"windows without targets, .* were used; start a new run .*--init_from=.*out "):
        train(tiny(data_dir=masked_dir, max_iters=6, init_from="resume"))
    train(tiny(data_dir=masked_dir, init_from="resume", eval_only=True))
    train(tiny(data_dir=masked_dir, init_from=cfg.out_dir, out_dir=str(tmp_path / "finetuned"), max_iters=1))
