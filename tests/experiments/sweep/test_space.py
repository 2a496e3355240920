import pytest

from folio.base.settings import ConfigError
from folio.experiments.sweep.space import Range, Values, describe_point, grid, parse_space
from train import TrainConfig


def test_lists_and_ranges_have_the_types_of_their_settings():
    words = ["learning_rate=1e-4..1e-1:log", "n_layer=2..6", "n_head=2,4", "dataset=a,../b", "min_lr=None,1e-5"]
    assert parse_space(TrainConfig, words) == [
        Range("learning_rate", 1e-4, 0.1, log=True),
        Range("n_layer", 2, 6),
        Values("n_head", (2, 4)),
        Values("dataset", ("a", "../b")),  # a folder, not a range
        Values("min_lr", (None, 1e-5)),
    ]


def test_a_grid_has_every_combination():
    points = grid(parse_space(TrainConfig, ["learning_rate=1e-3,3e-3,1e-2", "n_head=2,4"]))
    assert len(points) == 6 == len({tuple(point.values()) for point in points})
    assert points[1] == {"learning_rate": 1e-3, "n_head": 4}
    assert describe_point(points[1]) == "learning_rate=0.001, n_head=4"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("lerning_rate=1", "lerning_rate is not a setting; did you mean learning_rate?"),
        ("rope=1", "rope is not a setting; write --position=rotary"),
        ("n_head=", "n_head=: there is no value; write NAME=VALUE,VALUE"),
        ("n_head=2,2", "n_head=2,2: 2 is given twice"),
        ("n_head=2,x", "n_head=x: it takes an integer"),
        ("n_head=0,2", "n_head=0: it must be at least 1"),
        ("n_layer=6..2", "n_layer=6..2: the range is empty; write the smaller number first"),
        ("n_layer=2..4.5", "n_layer=4.5: it takes an integer"),
        ("n_layer=2..", "n_layer=2..: a bound is missing"),
        ("dropout=0..2", "dropout=2: it must be at least 0 and less than 1"),
        ("dropout=0..0.3:log", "dropout=0..0.3:log: a logarithmic range begins above 0"),
        ("min_lr=None..1", "min_lr=None..1: None is not a bound"),
        ("position=learned,foo", "position=foo: it takes 'learned', 'sinusoidal'"),
    ],
)
def test_wrong_values_are_refused_in_one_line(word, message):
    with pytest.raises(ConfigError) as error:
        parse_space(TrainConfig, [word])
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_a_setting_is_given_once_and_a_range_needs_trials():
    with pytest.raises(ConfigError, match="n_head is given twice"):
        parse_space(TrainConfig, ["n_head=2", "n_head=4"])
    with pytest.raises(ConfigError, match="--trials=40"):
        grid(parse_space(TrainConfig, ["n_layer=2..6"]))
