"""Online correction: predicted layer times follow measured ones, however wrong the calibration was."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twofold import _testing as testing

NUM_LAYERS = 6


def errors(steps: Iterator[tuple[int, list[float]]], base_us: float = 100.0) -> np.ndarray:
    """Error of each prediction, told before its layer. steps: (tokens, what each layer takes) of one step each."""
    correction = testing.LayerCorrection(NUM_LAYERS)
    found = []
    for num_tokens, measured in steps:
        for layer, us in enumerate(measured):
            predicted = base_us * correction.factor(layer, num_tokens)
            found.append(abs(predicted / us - 1))
            correction.update(layer, num_tokens, predicted, us)
    return np.array(found)


def test_nothing_measured_nothing_corrected():
    correction = testing.LayerCorrection(NUM_LAYERS)
    assert correction.factor(0, 1) == 1
    correction.update(0, 1, 0.0, 10.0)  # no prediction
    correction.update(0, 1, 10.0, 0.0)  # not measured
    assert correction.factor(0, 1) == 1


@given(wrong=st.floats(0.3, 3), noise=st.floats(0, 0.1), seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_a_calibration_of_another_day_is_put_right_within_a_few_layers(wrong, noise, seed):
    random = np.random.default_rng(seed)
    taken = ((1, list(100 * wrong * (1 + noise * random.uniform(-1, 1, NUM_LAYERS)))) for _ in range(20))
    assert np.median(errors(taken)[5:]) <= noise + 0.03


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_layers_that_were_set_aside_do_not_spoil_the_others(share):
    """No layer takes the average of 100 us and ten times that; the median fits most layers."""
    random = np.random.default_rng(0)

    def layer() -> float:
        slow = 10 if random.random() < share else 1
        return float(100 * slow * random.uniform(0.97, 1.03))

    found = errors((1, [layer() for _ in range(NUM_LAYERS)]) for _ in range(200))
    assert np.median(found[60:]) < 0.1


def test_a_cold_start_does_not_spoil_the_layers_after_it():
    found = errors(
        (1, [300.0 if step == layer == 0 else 100.0 for layer in range(NUM_LAYERS)]) for step in range(3)
    )
    assert np.all(found[2:] < 0.15)


def test_a_clock_that_halves_is_followed():
    found = errors((1, [100.0 if step < 50 else 200.0] * NUM_LAYERS) for step in range(100))
    assert found[50 * NUM_LAYERS - 1] < 0.01
    assert np.all(found[55 * NUM_LAYERS :] < 0.05)


def test_layers_of_other_formats_have_their_own_part():
    taken = [100.0, 140.0] * (NUM_LAYERS // 2)
    found = errors((1, taken) for _ in range(100))
    assert np.all(found[50 * NUM_LAYERS :] < 0.05)


def test_batches_are_corrected_apart_and_a_new_size_begins_with_the_nearest():
    correction = testing.LayerCorrection(1)
    for _ in range(100):
        correction.update(0, 1, 100 * correction.factor(0, 1), 200.0)
        correction.update(0, 64, 100 * correction.factor(0, 64), 50.0)
    assert correction.factor(0, 1) == pytest.approx(2, rel=0.02)
    assert correction.factor(0, 64) == pytest.approx(0.5, rel=0.02)
    assert correction.factor(0, 3) == pytest.approx(2, rel=0.02)
    assert correction.factor(0, 100_000) == pytest.approx(0.5, rel=0.02)
    for _ in range(3):
        correction.update(0, 3, 100 * correction.factor(0, 3), 100.0)
    assert correction.factor(0, 3) == pytest.approx(1, rel=0.1)
    assert correction.factor(0, 1) == pytest.approx(2, rel=0.02)


def test_one_measurement_moves_little():
    correction = testing.LayerCorrection(1)
    for _ in range(50):
        correction.update(0, 1, 100 * correction.factor(0, 1), 100.0)
    correction.update(0, 1, 100.0, 1e9)
    assert correction.factor(0, 1) < 1.05
