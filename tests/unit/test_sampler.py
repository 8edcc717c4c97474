"""The sampler against hand-worked distributions."""

from __future__ import annotations

import numpy as np
import pytest
from twofold.sampler import Sampler
from twofold.types import SamplingParams

LOGITS = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))


def frequencies(params: SamplingParams, logits=LOGITS, draws: int = 4000) -> np.ndarray:
    sampler = Sampler(params, ())
    counts = np.bincount([sampler.sample(logits) for _ in range(draws)], minlength=logits.size)
    return counts / draws


def test_temperature_zero_takes_the_largest_and_the_first_of_equals():
    sampler = Sampler(SamplingParams(), ())
    assert sampler.sample(np.array([0.0, 2.0, 1.0], np.float32)) == 1
    assert sampler.sample(np.array([0.0, 2.0, 2.0], np.float32)) == 1


def test_draws_follow_the_distribution():
    expected = np.exp(LOGITS)
    assert np.abs(frequencies(SamplingParams(temperature=1.0, seed=1)) - expected).max() < 0.03


def test_temperature_sharpens():
    expected = np.exp(LOGITS) ** 2
    expected /= expected.sum()
    assert np.abs(frequencies(SamplingParams(temperature=0.5, seed=1)) - expected).max() < 0.03


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(temperature=1.0, seed=2, top_k=2), [0, 1]),
        (SamplingParams(temperature=1.0, seed=2, top_p=0.5), [0]),
        (SamplingParams(temperature=1.0, seed=2, top_p=0.79), [0, 1]),
        (SamplingParams(temperature=1.0, seed=2, top_p=0.81), [0, 1, 2]),
        (SamplingParams(temperature=1.0, seed=2, min_p=0.25), [0, 1, 2]),
        (SamplingParams(temperature=1.0, seed=2, min_p=1.0), [0]),
    ],
)
def test_filters_keep_what_they_should(params, kept):
    expected = np.zeros(4)
    expected[kept] = np.exp(LOGITS)[kept]
    expected /= expected.sum()
    assert np.abs(frequencies(params) - expected).max() < 0.03


def test_a_seed_decides_every_draw_and_requests_do_not_share_generators():
    params = SamplingParams(temperature=1.0, seed=11)
    one, two, other = (
        Sampler(params, ()),
        Sampler(params, ()),
        Sampler(SamplingParams(temperature=1.0, seed=12), ()),
    )
    first = [one.sample(LOGITS) for _ in range(50)]
    assert first == [two.sample(LOGITS) for _ in range(50)]
    assert first != [other.sample(LOGITS) for _ in range(50)]


def test_a_tiny_temperature_does_not_overflow():
    assert (
        Sampler(SamplingParams(temperature=1e-30, seed=1), ()).sample(np.array([1.0, 900.0, 3.0], np.float32))
        == 1
    )


def test_presence_and_frequency_penalties_count_the_answer_only():
    sampler = Sampler(SamplingParams(presence_penalty=0.5, frequency_penalty=0.4), (1, 1, 1))
    logits = np.array([0.0, 1.0, 0.2], np.float32)
    # 1 wins; then it costs 0.5 + 0.4 = 0.9 and ties below 0.2; then 2 costs as much.
    assert [sampler.sample(logits) for _ in range(3)] == [1, 2, 1]


def test_repetition_penalty_sees_the_prompt_and_leaves_the_callers_logits_alone():
    logits = np.array([2.0, 1.5, -1.0], np.float32)
    before = logits.copy()
    assert Sampler(SamplingParams(repetition_penalty=2.0), (0,)).sample(logits) == 1
    assert np.array_equal(logits, before)
