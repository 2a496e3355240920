"""folio/training/planning/step_times.py: the expected seconds per step."""

import pytest

from folio.training.planning.shapes import CHANNELS, Shape
from folio.training.planning.step_times import TYPICAL, VOCAB_SIZE, StepTimes


def test_the_times_are_typical_before_any_is_measured():
    for channels, (per_step, per_token) in TYPICAL.items():
        expected = 1e-3 * per_step + 1e-6 * per_token * 4096
        assert StepTimes(VOCAB_SIZE)(Shape.of(channels), 4096) == pytest.approx(expected)
    times = [StepTimes(VOCAB_SIZE)(Shape.of(channels), 4096) for channels in CHANNELS]
    assert times == sorted(times)


def test_the_nearest_measured_shape_says_how_fast_the_machine_is():
    typical, times = StepTimes(VOCAB_SIZE), StepTimes(VOCAB_SIZE)
    shapes = {channels: Shape.of(channels) for channels in CHANNELS}
    times.measured(shapes[64], 2048, 2 * typical(shapes[64], 2048))
    times.measured(shapes[256], 2048, 3 * typical(shapes[256], 2048))
    for channels, ratio in {32: 2, 64: 2, 96: 2, 192: 3, 256: 3, 768: 3}.items():
        assert times(shapes[channels], 8192) == pytest.approx(ratio * typical(shapes[channels], 8192))


def test_other_shapes_and_vocabularies_are_in_proportion_to_their_flops():
    def per_token(channels: int, vocab_size: int) -> float:
        times = StepTimes(vocab_size)
        return times(Shape.of(channels), 2) - times(Shape.of(channels), 1)

    largest = Shape.of(max(TYPICAL))
    ratio = Shape.of(1280).flops_per_token(VOCAB_SIZE) / largest.flops_per_token(VOCAB_SIZE)
    assert per_token(1280, VOCAB_SIZE) == pytest.approx(ratio * per_token(max(TYPICAL), VOCAB_SIZE))
    ratio = Shape.of(64).flops_per_token(50_000) / Shape.of(64).flops_per_token(VOCAB_SIZE)
    assert per_token(64, 50_000) == pytest.approx(ratio * per_token(64, VOCAB_SIZE))
