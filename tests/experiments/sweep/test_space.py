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
        ("lerning_rate=1", "lerning_rate.*did you mean learning_rate"),
        ("n_head=", r"n_head=.*NAME=VALUE,VALUE"),
        ("n_head=2,2", r"n_head=2,2: 2 .*twice"),
        ("n_head=0,2", r"n_head=0: .*at least 1"),
        ("n_layer=6..2", r"n_layer=6\.\.2: .*smaller number first"),
        ("n_layer=2..", r"n_layer=2\.\.: .*missing"),
        ("n_layer=..2", r"n_layer=\.\.2: .*missing"),
        ("dropout=0..2", r"dropout=2: .*less than 1"),
        ("dropout=0..0.3:log", r"dropout=0\.\.0\.3:log: .*above 0"),
        ("min_lr=None..1", r"min_lr=None\.\.1: None"),
    ],
)
def test_invalid_values_are_an_error(word, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        parse_space(TrainConfig, [word])


def test_a_setting_is_given_once_and_a_range_needs_trials():
    with pytest.raises(ConfigError, match="n_head is given twice"):
        parse_space(TrainConfig, ["n_head=2", "n_head=4"])
    with pytest.raises(ConfigError, match="--trials=40"):
        grid(parse_space(TrainConfig, ["n_layer=2..6"]))
