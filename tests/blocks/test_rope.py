"""RoPE frequencies against transformers' own functions, and what dynamic scaling promises about chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from twofold.blocks.rope import RopeTable, attention_factor, dynamic_inverse_frequencies, inverse_frequencies
from twofold.models.config import RopeConfig

HEAD_DIM = 32
MAX_POSITIONS = 64

CASES: list[tuple[RopeConfig, dict[str, Any]]] = [
    (RopeConfig("linear", 10_000.0, 4.0), {"rope_type": "linear", "factor": 4.0}),
    (RopeConfig("dynamic", 10_000.0, 2.0), {"rope_type": "dynamic", "factor": 2.0}),
    (
        RopeConfig("yarn", 1_000_000.0, 4.0, 16),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ),
    (
        RopeConfig("yarn", 10_000.0, 8.0, 64, None, 8.0, 2.0, 0.7, 1.0, False),
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.0,
            "truncate": False,
        },
    ),
    (
        RopeConfig("yarn", 10_000.0, 2.0, 32, 1.25),
        {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 32,
            "attention_factor": 1.25,
        },
    ),
]


def reference(rope: RopeConfig, parameters: dict[str, Any], length: int | None = None) -> tuple[Any, float]:
    import torch
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.Qwen3MoeConfig(
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={**parameters, "rope_theta": rope.theta},
    )
    seq_len = None if length is None else torch.tensor(length)
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope.kind](config, None, seq_len=seq_len)
    return frequencies.numpy(), factor


@pytest.mark.parametrize(("rope", "parameters"), CASES)
def test_frequencies_equal_transformers(rope: RopeConfig, parameters: dict[str, Any]) -> None:
    expected, factor = reference(rope, parameters)
    np.testing.assert_allclose(inverse_frequencies(rope, HEAD_DIM), expected, rtol=3e-7)
    assert attention_factor(rope) == pytest.approx(factor)


@pytest.mark.parametrize("length", [1, 64, 65, 100, 1000])
def test_dynamic_frequencies_equal_transformers(length: int) -> None:
    rope, parameters = CASES[1]
    expected, _ = reference(rope, parameters, length)
    ours = dynamic_inverse_frequencies(rope, HEAD_DIM, np.array([length], np.int32), MAX_POSITIONS)
    np.testing.assert_allclose(ours[0], expected, rtol=1e-6)


def test_default_angles_by_hand() -> None:
    cos, sin = RopeTable(RopeConfig(theta=100.0), 4, 16).rows(
        np.array([0, 3], np.int32), np.array([4, 4], np.int32)
    )
    angles = np.array([[0.0, 0.0], [3.0, 0.3]])
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-6)
    assert cos.dtype == sin.dtype == np.float32


def test_rows_do_not_depend_on_what_was_asked_before() -> None:
    fresh, used = (RopeTable(RopeConfig(), HEAD_DIM, 10_000) for _ in range(2))
    lengths = np.array([1], np.int32)
    used.rows(np.array([3], np.int32), lengths)
    position = np.array([5000], np.int32)
    for ours, theirs in zip(used.rows(position, lengths), fresh.rows(position, lengths), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_dynamic_chunks_equal_the_whole_prompt() -> None:
    rope, _ = CASES[1]
    table = RopeTable(rope, HEAD_DIM, MAX_POSITIONS)
    positions = np.arange(100, dtype=np.int32)
    lengths = np.full(100, 100, np.int32)
    whole = table.rows(positions, lengths)
    for begin, end in ((0, 7), (7, 64), (64, 100)):
        part = table.rows(positions[begin:end], lengths[begin:end])
        for ours, theirs in zip(part, whole, strict=True):
            np.testing.assert_array_equal(ours, theirs[begin:end])


def test_dynamic_decode_grows_beyond_the_prompt() -> None:
    """A token after the prompt sees the frequencies of its own length; sequences in one batch do not mix."""
    rope, _ = CASES[1]
    table = RopeTable(rope, HEAD_DIM, MAX_POSITIONS)
    cos, _ = table.rows(np.array([80, 80], np.int32), np.array([10, 200], np.int32))
    for row, length in ((0, 81), (1, 200)):
        frequencies = dynamic_inverse_frequencies(rope, HEAD_DIM, np.array([length], np.int32), MAX_POSITIONS)
        np.testing.assert_array_equal(cos[row], np.cos(np.float32(80) * frequencies[0]))
    assert not np.array_equal(cos[0], cos[1])
