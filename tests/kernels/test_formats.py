"""Source rows, panels and back: dequantise against the formats' definitions, panels against dequantise."""

from __future__ import annotations

import numpy as np
import pytest
from packed_reference import BLOCKS, FORMATS, GGUF_FORMATS, Rows, fitting_columns, plain_values, random_rows
from twofold._testing import kernels
from twofold.api.errors import ConfigError, KernelError

from tests.kernels.kernel_levels import over, runnable


def test_every_block_format_has_a_row() -> None:
    assert set(BLOCKS) == {name for name, (columns, *_) in FORMATS.items() if columns > 1}


@pytest.mark.parametrize("name", sorted(GGUF_FORMATS))
def test_ggufs_formats_match_the_gguf_package(name: str) -> None:
    import gguf

    rows = random_rows(np.random.default_rng(1), name, 40, 1024)
    expected = gguf.quants.dequantize(rows.data, gguf.GGMLQuantizationType[GGUF_FORMATS[name]])
    assert np.array_equal(rows.values(), expected)


def test_ggufs_nvfp4_is_ours_with_a_head() -> None:
    import gguf

    blocks = np.random.default_rng(1).integers(0, 256, (40, 16 * 36), np.uint8)
    blocks[:, ::36] = np.resize(np.arange(256), (40, 16))  # every scale, whatever its sign
    rows = Rows("nvfp4", 1024, np.hstack([np.ones((40, 1), np.float32).view(np.uint8), blocks]))
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.NVFP4)
    assert np.array_equal(rows.values(), expected)
    assert np.array_equal(kernels.unpack(rows.packed(), "nvfp4", 40, 1024), expected)


@pytest.mark.parametrize("name", sorted(set(FORMATS) - set(GGUF_FORMATS)))
def test_the_other_formats_match_their_definition(name: str) -> None:
    rows = random_rows(np.random.default_rng(2), name, 300, fitting_columns(name, 250))
    assert np.array_equal(rows.values(), plain_values(rows))


@pytest.mark.parametrize("name", ["f16", "bf16", "fp8"])
def test_every_code_of_small_floats_is_widened_exactly(name: str) -> None:
    if name == "fp8":
        rows = Rows(name, 256, np.arange(256, dtype=np.uint8)[None], np.ones((1, 2), np.float32))
    else:
        rows = Rows(name, 1 << 16, np.arange(1 << 16, dtype=np.uint16).view(np.uint8)[None])
    got, expected = rows.values(), plain_values(rows)
    assert np.array_equal(np.isnan(got), np.isnan(expected))
    number = ~np.isnan(expected)
    assert np.array_equal(got[number].view(np.uint32), expected[number].view(np.uint32))


@pytest.mark.parametrize("name", sorted(FORMATS))
@over("num_rows", [1, 31, 32, 33, 130])
@over("columns", [1, 64, 129, 512])
def test_a_panel_holds_the_rows_that_were_packed(name: str, num_rows: int, columns: int) -> None:
    rows = random_rows(np.random.default_rng(num_rows), name, num_rows, fitting_columns(name, columns))
    packed = rows.packed()
    assert packed.shape[0] == -(-num_rows // 32)
    assert packed.ctypes.data % 64 == 0
    assert np.array_equal(kernels.unpack(packed, name, num_rows, rows.columns), rows.values())


@pytest.mark.parametrize("level", runnable())
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_level_unpacks_panels(level: str, name: str) -> None:
    """Minima may be added with one rounding. Columns end within a step and at the end of one."""
    for columns in (fitting_columns(name, 1), fitting_columns(name, 129), 1024):
        rows = random_rows(np.random.default_rng(7), name, 40, columns)
        expected = kernels.unpack(rows.packed(), name, 40, columns)
        got = kernels.unpack(rows.packed(), name, 40, columns, level=level)
        assert got.shape == (64, columns)
        np.testing.assert_allclose(got[:40], expected, rtol=0, atol=2**-23 * np.abs(expected).max())
        assert not got[40:].any()


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_rows_that_a_panel_misses_are_zero_bytes(name: str) -> None:
    rng = np.random.default_rng(3)
    columns = fitting_columns(name, 256)
    whole = random_rows(rng, name, 32, columns)
    full, one = whole.packed(), whole.part(0, 1).packed()
    assert np.array_equal(kernels.unpack(one, name, 1, columns), kernels.unpack(full, name, 32, columns)[:1])
    assert np.count_nonzero(one) < np.count_nonzero(full) / 8


def test_refuses_what_is_no_row_of_the_format() -> None:
    with pytest.raises(ConfigError, match='"q7_k" does not exist'):
        kernels.pack(np.zeros((1, 4), np.uint8), "q7_k", 1)
    with pytest.raises(KernelError, match="q8_0 with 33 columns"):
        kernels.pack(np.zeros((1, 34), np.uint8), "q8_0", 33)
    with pytest.raises(KernelError, match="fp8 rows need"):
        kernels.pack(np.zeros((1, 34), np.uint8), "fp8", 34)
    with pytest.raises(KernelError, match="expected 1088"):
        kernels.unpack(np.zeros(1087, np.uint8), "q8_0", 1, 32)
