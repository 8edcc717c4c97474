"""The table of formats against the headers the kernels are built from, and what a WeightMatrix accepts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from twofold.weights.weight_format import FORMATS, PANEL_ROWS, WeightMatrix, packed_bytes, source_row_bytes

HEADERS = Path(__file__).resolve().parents[2] / "kernels/include/twofold/formats"


def test_the_table_is_the_headers() -> None:
    """As the registry lists them; tests/kernels/test_formats.py compares all fields with what was compiled."""
    listed = re.findall(r"^  X\((\w+)\)", (HEADERS / "registry.h").read_text(), re.M)
    assert [name.lower() for name in listed] == list(FORMATS)
    assert f"kPanelRows = {PANEL_ROWS};" in (HEADERS / "panel.h").read_text()


def test_sizes_by_hand() -> None:
    assert source_row_bytes("q4_0", 64) == 36
    assert source_row_bytes("f16", 7) == 14
    assert source_row_bytes("int8_channel", 96) == 2 + 96
    assert packed_bytes("q4_0", 33, 64) == 2 * 2 * 576
    assert packed_bytes("bf16", 32, 3) == 2 * 128
    assert packed_bytes("fp8", 1, 129) == 2 * 4224
    with pytest.raises(ValueError, match="60 columns in format q8_0; expected a multiple of 32"):
        source_row_bytes("q8_0", 60)


def test_views_of_rows() -> None:
    rows = np.arange(6 * 18, dtype=np.uint8).reshape(6, 18)
    matrix = WeightMatrix(rows[::2], "q4_0", 32)
    assert (matrix.shape, matrix.source_bytes, matrix.packed_bytes) == ((3, 32), 3 * 18, 576)
    np.testing.assert_array_equal(matrix.row_range(1, 3).data, rows[2::2])


def test_rows_of_fp8_take_their_scales_along() -> None:
    data = np.zeros((300, 200), np.uint8)
    scales = np.arange(6, dtype=np.float32).reshape(3, 2)
    part = WeightMatrix(data, "fp8", 200, scales).row_range(128, 300)
    assert part.scales is not None
    np.testing.assert_array_equal(part.scales, scales[1:])
    part = WeightMatrix(data, "fp8", 200, scales).row_range(
        100, 300
    )  # the first 28 rows have the first scales
    assert part.scales is not None
    np.testing.assert_array_equal(part.scales, scales.repeat(128, 0)[100:300])
    part = WeightMatrix(data, "fp8", 200, scales).every_other(1)
    assert part.scales is not None
    np.testing.assert_array_equal(part.scales, scales.repeat(128, 0)[1:300:2])


BYTES = np.zeros((4, 34), np.uint8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((BYTES, "q9", 32), "weight format 'q9'; expected one of f32"),
        ((BYTES, "q8_0", 64), r"uint8 \(4, 34\) for 64 columns .*expected uint8 \(rows, 68\)"),
        ((BYTES.astype(np.float32), "q8_0", 32), "float32"),
        ((BYTES[0], "q8_0", 32), r"\(34,\)"),
        ((np.zeros((4, 8), np.float32)[:, ::2], "f32", 4), "contiguous rows"),
        ((np.zeros((4, 4), np.uint16), "f32", 4), "expected float32"),
        ((np.zeros((4, 4), np.uint8), "fp8", 4), "fp8 without scales"),
        ((BYTES, "q8_0", 32, np.ones((1, 1), np.float32)), "q8_0 with scales"),
        ((np.zeros((4, 4), np.uint8), "fp8", 4, np.ones((2, 1), np.float32)), r"expected float32 \(1, 1\)"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightMatrix(*arguments)
