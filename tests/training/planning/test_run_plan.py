"""A plan: every setting has a value, and nothing says who set it."""

from typing import get_type_hints

import pytest

from folio.base.settings import setting_names
from folio.training.planning.resolve import make_plan
from folio.training.planning.resume import Draft
from folio.training.planning.train_settings import TrainSettings
from train import TrainConfig

OFF = {  # settings whose None turns something off
    *("minutes", "skip_spikes", "eval_iters", "save_interval_minutes", "patience", "wandb_run_name"),
    *("total_batch_tokens", "data_dir", "size"),
    *("embd_pdrop", "attn_pdrop", "resid_pdrop"),  # GPTConfig's
}


def test_a_plan_has_a_value_for_each_setting_and_no_origins(tiny):
    plan = make_plan(Draft(tiny(device="auto", dtype="auto").replace({"dataset": "x.py:1"})))
    values = {name: getattr(plan.settings, name) for name in setting_names(TrainConfig)}
    assert {name for name, value in values.items() if value is None} <= OFF
    assert "auto" not in values.values() and not plan.settings.origins
    assert (plan.settings.device, plan.settings.dtype) == ("cpu", str(plan.runtime.dtype).removeprefix("torch."))


@pytest.mark.parametrize("accumulation", [dict(gradient_accumulation_steps=3), dict(total_batch_tokens=400)])
def test_the_settings_of_a_plan_make_the_same_plan(tiny, accumulation):
    plan = make_plan(Draft(tiny(max_iters=7, **accumulation)))
    again = make_plan(Draft(plan.settings))
    assert again.settings == plan.settings and again.batch == plan.batch and again.model == plan.model
    assert vars(again.schedule) == vars(plan.schedule)


def test_the_types_that_folio_reads_are_those_of_the_settings():
    """TrainSettings declares them, because folio imports no script."""
    declared, hints = TrainSettings.__annotations__, get_type_hints(TrainConfig)
    names = declared.keys() - {"replaces"}
    assert names <= {*setting_names(TrainConfig)}
    expected = get_type_hints(TrainSettings)
    wider = {"position": str, "optimizer": str, "lr_schedule": str}  # their values are those of model.py and optim.py
    assert {name: hints[name] for name in names - wider.keys()} == {
        name: expected[name] for name in names - wider.keys()
    }
