import json
import sys

from folio.base.settings import ROOT
from folio.experiments.ideas import counts
from model import GPT, GPTConfig


def test_parameters_and_flops_are_those_of_the_model(tmp_path, monkeypatch, capsys):
    """The FLOPs that torch counts in a training step are those of the formula in model.py."""
    model = dict(block_size=16, vocab_size=11, n_layer=2, n_head=2, n_embd=8, bias=False)
    (tmp_path / "state.json").write_text(json.dumps({"model": model}))
    monkeypatch.setattr(sys, "path", [*sys.path])
    counts.main(str(ROOT), str(tmp_path / "state.json"))
    config = GPTConfig(**model)
    assert json.loads(capsys.readouterr().out) == {
        "parameters": GPT(config).num_params()["total"],
        "flops_per_token": config.flops_per_token()["total"],
    }
