"""The sampler against hand-worked distributions."""

from __future__ import annotations

import numpy as np
import pytest
from twofold.api.constraints import TokenMatcher
from twofold.api.types import SamplingParams
from twofold.blocks import ops
from twofold.step.sampler import Sampler, SpeculativePicks, sample

POOL = ops.ThreadPool(1)
LOGITS = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))


def pick(sampler: Sampler, logits: np.ndarray) -> int:
    return sample(POOL, [sampler], logits[None, :])[0]


def frequencies(params: SamplingParams, logits=LOGITS, draws: int = 4000) -> np.ndarray:
    sampler = Sampler(params, ())
    counts = np.bincount([pick(sampler, logits) for _ in range(draws)], minlength=logits.size)
    return counts / draws


def test_temperature_zero_takes_the_largest_and_the_first_of_equals():
    sampler = Sampler(SamplingParams(), ())
    assert pick(sampler, np.array([0.0, 2.0, 1.0], np.float32)) == 1
    assert pick(sampler, np.array([0.0, 2.0, 2.0], np.float32)) == 1


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
    first = [pick(one, LOGITS) for _ in range(50)]
    assert first == [pick(two, LOGITS) for _ in range(50)]
    assert first != [pick(other, LOGITS) for _ in range(50)]


def test_a_tiny_temperature_does_not_overflow():
    assert (
        pick(Sampler(SamplingParams(temperature=1e-30, seed=1), ()), np.array([1.0, 900.0, 3.0], np.float32))
        == 1
    )


def test_presence_and_frequency_penalties_count_the_answer_only():
    sampler = Sampler(SamplingParams(presence_penalty=0.5, frequency_penalty=0.4), (1, 1, 1))
    logits = np.array([0.0, 1.0, 0.2], np.float32)
    # 1 wins; then it costs 0.5 + 0.4 = 0.9 and ties below 0.2; then 2 costs as much.
    assert [pick(sampler, logits) for _ in range(3)] == [1, 2, 1]


def test_repetition_penalty_sees_the_prompt_and_leaves_the_callers_logits_alone():
    logits = np.array([2.0, 1.5, -1.0], np.float32)
    before = logits.copy()
    assert pick(Sampler(SamplingParams(repetition_penalty=2.0), (0,)), logits) == 1
    assert np.array_equal(logits, before)


ANSWER = np.array([0.0, 5.0, 4.0, 3.0, 2.0, 1.0], np.float32)


@pytest.mark.parametrize(
    ("params", "prompt", "expected"),
    [
        # min_tokens holds back the end of text (1) and stop_token_ids until enough tokens were taken.
        (SamplingParams(min_tokens=2), (), [2, 2, 1]),
        (SamplingParams(min_tokens=2, stop_token_ids=(2,)), (), [3, 3, 1]),
        (SamplingParams(min_tokens=1, ignore_eos=True), (), [2, 1, 1]),
        (SamplingParams(stop_token_ids=(1,)), (), [1, 1, 1]),
        (SamplingParams(logit_bias=((3, 2.5),)), (), [3, 3, 3]),
        (SamplingParams(logit_bias=((1, -100.0), (2, -1.5))), (), [3, 3, 3]),
        # Bias comes before the penalties: 6 first, then 6 / 2 against 5, then against 5 / 2 and as large as 3.
        (SamplingParams(logit_bias=((2, 2.0),), repetition_penalty=2.0), (), [2, 1, 2]),
        # No bias brings back what must not come.
        (SamplingParams(logit_bias=((1, 100.0),), bad_words=((1,),)), (), [2, 2, 2]),
        (SamplingParams(bad_words=((1,), (2, 2))), (), [2, 3, 2]),
        # The words before the last one may lie in the prompt, and across its end.
        (SamplingParams(bad_words=((4, 1),)), (3, 4), [2, 1, 1]),
        (SamplingParams(bad_words=((4, 2, 2), (4, 1), (2, 1))), (4,), [2, 3, 1]),
        (SamplingParams(bad_words=((9, 9, 9, 1),)), (9, 9), [1, 1, 1]),
    ],
)
def test_forbidden_and_biased_tokens(params, prompt, expected):
    sampler = Sampler(params, prompt, eos_token_ids={1})
    assert [pick(sampler, ANSWER) for _ in range(3)] == expected


def test_every_token_forbidden_gives_the_first():
    words = tuple((token,) for token in range(6))
    assert pick(Sampler(SamplingParams(bad_words=words), ()), ANSWER) == 0


def test_log_probabilities_are_of_the_raw_logits():
    params = SamplingParams(
        logprobs=2, temperature=0.1, seed=1, top_k=1, bad_words=((1,),), presence_penalty=1.0
    )
    sampler = Sampler(params, ())
    before = ANSWER.copy()
    expected = ANSWER.astype(np.float64) - np.log(np.exp(ANSWER.astype(np.float64)).sum())
    for token in (2, 2, 2):
        assert pick(sampler, ANSWER) == token
        assert sampler.logprob is not None
        assert (sampler.logprob.token_id, [t for t, _ in sampler.logprob.top]) == (token, [1, 2])
        found = [sampler.logprob.logprob, *(value for _, value in sampler.logprob.top)]
        assert np.abs(np.array(found) - expected[[token, 1, 2]]).max() < 1e-14
    assert np.array_equal(ANSWER, before)


class Even(TokenMatcher):
    """Admits even tokens; every third token is forced."""

    ended, error, masks_first = False, None, False

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.num_prepared = 0

    @property
    def forced(self) -> int | None:
        return 5 if len(self.taken) % 3 == 2 else None

    def mask(self) -> np.ndarray:
        return np.array([0x55555555], np.uint32)

    def admits(self, token: int) -> bool:
        return token % 2 == 0

    def take(self, token: int) -> None:
        self.taken.append(token)

    def prepare(self) -> None:
        self.num_prepared += 1

    def fail(self, reason: str) -> None:
        raise AssertionError(reason)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("constrained", [(False, False), (True, False), (True, True)])
def test_tokens_picked_ahead_are_those_picked_one_by_one(
    temperature: float, constrained: tuple[bool, bool]
) -> None:
    """Also where a matcher rejects or forces one, after which another random number is drawn."""
    num_rows = 8
    logits = np.random.default_rng(7).standard_normal((2 * num_rows, 16)).astype(np.float32)

    def samplers() -> list[Sampler]:
        return [
            Sampler(
                SamplingParams(temperature=temperature, seed=seed), (), matcher=Even() if matched else None
            )
            for seed, matched in enumerate(constrained)
        ]

    one_by_one, ahead = samplers(), samplers()
    expected = [sample(POOL, one_by_one, logits[[row, num_rows + row]].copy()) for row in range(num_rows)]
    picks = SpeculativePicks.of(POOL, ahead, [num_rows, num_rows], logits)
    assert picks is not None
    for row, tokens in enumerate(expected):
        rows = [row, num_rows + row]
        found = picks.take(rows, ahead)
        assert (sample(POOL, ahead, logits[rows]) if found is None else found) == tokens
    for a, b in zip(one_by_one, ahead, strict=True):
        assert (a.matcher is None) == (b.matcher is None)
        if isinstance(a.matcher, Even) and isinstance(b.matcher, Even):
            assert (a.matcher.taken, a.matcher.num_prepared) == (b.matcher.taken, b.matcher.num_prepared)


def test_tokens_that_depend_on_one_another_are_not_picked_ahead() -> None:
    logits = np.tile(LOGITS, (2, 1))
    for params in (SamplingParams(presence_penalty=1.0), SamplingParams(logprobs=1)):
        assert SpeculativePicks.of(POOL, [Sampler(params, ())], [2], logits) is None
