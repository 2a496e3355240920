from folio.experiments.sweep.outcome import Outcome, Trial


def test_a_trial_is_never_hopeless_by_itself_and_its_outcome_says_which_it_is():
    trial = Trial(3, 1338, {"n_head": 2})
    assert trial.key == (3, 1338) and not trial.report(99.0, 1)
    assert trial.outcome("failed", error="why") == Outcome(3, 1338, {"n_head": 2}, "failed", error="why")
