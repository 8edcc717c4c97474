"""Token ids that a step gives to layers with n-gram embeddings."""

from __future__ import annotations

import numpy as np
from twofold.api.types import GenerationRequest, SamplingParams
from twofold.step.batch import ids_of, next_ids_of
from twofold.step.sequences import ScheduledSequence, Sequence


def sequence(prompt: list[int], answer: list[int], num_computed: int) -> Sequence:
    request = GenerationRequest(tuple(prompt), SamplingParams(max_tokens=9), lambda chunk: None, "r")
    return Sequence(0, request, [*prompt, *answer], 9, num_computed=num_computed)


def test_a_token_comes_with_those_before_it_and_a_prompt_is_read_ahead_of() -> None:
    decoding = ScheduledSequence(sequence([1, 2, 3], [4, 5], 4), 3, samples=True, drafts=(6, 7))
    begins = ScheduledSequence(sequence([11, 12, 13, 14, 15], [], 0), 2, samples=False)
    prefilling = ScheduledSequence(sequence([21, 22, 23, 24], [], 1), 2, samples=False)
    steps = (decoding, begins, prefilling)
    ids = ids_of(steps, 3)
    assert ids is not None
    np.testing.assert_array_equal(
        ids,
        [[5, 4, 3], [6, 5, 4], [7, 6, 5], [11, -1, -1], [12, 11, -1], [22, 21, -1], [23, 22, 21]],
    )
    np.testing.assert_array_equal(next_ids_of(steps, 3), [[13, 12, 11], [14, 13, 12], [24, 23, 22]])
    np.testing.assert_array_equal(next_ids_of(steps, 1), [[13], [14], [24]])
    assert ids_of(steps, 1) is None
    assert not len(next_ids_of(steps, 0))
