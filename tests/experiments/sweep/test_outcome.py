from folio.experiments.sweep.outcome import Outcome, Trial


def test_a_trial_is_not_pruned_by_default_and_identifies_its_outcome():
    trial = Trial(3, 1338, {"n_head": 2})
    assert trial.key == (3, 1338) and not trial.report(99.0, 1)
    assert trial.outcome("failed", error="why") == Outcome(3, 1338, {"n_head": 2}, "failed", error="why")
