"""How many prompt tokens fit into a step: what was measured decides, and no single measurement does."""

from __future__ import annotations

import pytest
from twofold.step.prefill_budget import MIN_TOKENS, PrefillBudget


def measured(decode_ms: float, token_ms: float, max_step_s: float | None = None) -> PrefillBudget:
    """After twenty steps of each kind on a machine of such times."""
    budget = PrefillBudget(512, max_step_s)
    for _ in range(20):
        budget.observe(0, 4, decode_ms * 1e-3)
        budget.observe(128, 4, (decode_ms + 128 * token_ms) * 1e-3)
    budget.observe(0, 4, decode_ms * 1e-3)
    return budget


@pytest.mark.parametrize(
    ("decode_ms", "token_ms", "max_step_s", "tokens", "alone"),
    [
        (2.0, 0.19, None, 240, 512),  # 50 ms, the least limit there is
        (50.0, 1.0, None, 144, 512),  # four steps: 200 ms
        (50.0, 10.0, None, MIN_TOKENS, 80),  # 15 tokens would fit; alone 1 s
        (500.0, 10.0, None, 144, 512),  # a large model: 2 s; alone 6 s
        (500.0, 100.0, None, MIN_TOKENS, 48),
        (2.0, 0.19, 0.022, 96, 512),  # asked for
        (20.0, 0.19, 0.01, MIN_TOKENS, 512),  # less than a step without prefill
        (2.0, 0.01, None, 512, 512),  # never above the tokens of a step
    ],
)
def test_the_chunk_fills_the_time_that_a_step_may_take(decode_ms, token_ms, max_step_s, tokens, alone):
    budget = measured(decode_ms, token_ms, max_step_s)
    assert budget.num_tokens(4) == tokens
    assert budget.num_tokens(0) == alone


def test_outliers_and_a_first_step_that_warms_up_change_nothing():
    budget = measured(2.0, 0.19)
    for num_prefill in (0, 128):
        budget.observe(num_prefill, 4, 3.0)
        budget.observe(num_prefill, 4, 1e-6)
    assert budget.num_tokens(4) == 240
    budget = PrefillBudget(512)
    budget.observe(200, 0, 60.0)
    for _ in range(5):
        budget.observe(0, 1, 0.002)
        budget.observe(budget.num_tokens(1), 1, 0.002 + 0.00019 * budget.num_tokens(1))
    assert budget.num_tokens(1) == 240


def test_a_step_without_prefill_is_measured_before_streams_are_made_to_wait_and_now_and_then():
    budget = PrefillBudget(512)
    assert budget.num_tokens(0) == 512, "nothing is known and no request waits"
    budget.observe(512, 0, 1.0)
    assert budget.num_tokens(0) == 512
    assert budget.num_tokens(1) == 0
    budget.observe(0, 1, 0.0)  # even if a virtual clock does not advance
    assert budget.num_tokens(1) == 512
    budget.observe(0, 1, 0.1)
    sizes = []
    for _ in range(200):
        sizes.append(budget.num_tokens(1))
        budget.observe(sizes[-1], 1, 0.1 + 0.001 * sizes[-1])
    assert [index for index, size in enumerate(sizes) if size == 0] == [64, 129, 194]
    assert all(size >= MIN_TOKENS for size in sizes if size)


def test_few_tokens_do_not_determine_the_cost_per_token():
    budget = measured(2.0, 0.19)
    for _ in range(20):
        budget.observe(2, 4, 0.004)
    assert budget.num_tokens(4) == 240
