"""Rows of a table in a file: their values, what is cached, and the memory that it takes."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from twofold.api.errors import KernelError
from twofold.blocks import ops
from twofold.weights.checkpoint import read_header
from twofold.weights.host_memory import resident_bytes
from twofold.weights.tensor_source import TensorSource
from twofold.weights.weight_format import WeightMatrix

from tests.tiny_models.writing import write_safetensors

POOL = ops.ThreadPool(2)
ROWS, COLUMNS = 300, 32
SLOT_BYTES = 128 + 16


def parts(path: Path, sizes: tuple[int, ...] = (ROWS,)) -> tuple[np.ndarray, list[WeightMatrix]]:
    values = np.random.default_rng(0).standard_normal((ROWS, COLUMNS), np.float32)
    pieces = np.split(values, np.cumsum(sizes)[:-1])
    tensors = {str(number): piece for number, piece in enumerate(pieces)}
    write_safetensors(path / "rows.safetensors", tensors, "float32")
    source = TensorSource(path, read_header(path / "rows.safetensors"))
    return values, [source.matrix(name, (len(piece), COLUMNS)) for name, piece in tensors.items()]


@pytest.mark.parametrize("slots", [0, 1, 5, 64, ROWS])
def test_rows_are_exact_whatever_is_cached(tmp_path: Path, slots: int) -> None:
    values, matrices = parts(tmp_path, (100, 1, 199))
    table = ops.RowTable(POOL, matrices, slots * SLOT_BYTES)
    assert (table.rows, table.columns, table.bytes) == (ROWS, COLUMNS, values.nbytes)
    assert table.cache_bytes <= slots * SLOT_BYTES
    assert table.num_slots == slots // min(max(slots, 1), 8) * min(slots, 8)
    rng = np.random.default_rng(1)
    for count in (1, 7, 40, 2):
        ids = rng.integers(0, ROWS, (count, 3))
        out = np.zeros((count, 3 * COLUMNS + 5), np.float32)
        table.read_ahead(ids)
        table.read(ids, out, 5)
        np.testing.assert_array_equal(out[:, 5:], values[ids].reshape(count, -1))
        assert not out[:, :5].any()


def test_the_rows_used_last_are_cached(tmp_path: Path) -> None:
    _, matrices = parts(tmp_path)
    table = ops.RowTable(POOL, matrices, 8 * SLOT_BYTES)
    out = np.empty((1, COLUMNS), np.float32)
    for row in (*range(8), 0, 8, 0, 1):
        table.read(np.array([[row]]), out)
    assert (table.num_reads, table.num_hits) == (12, 2)  # row 1 made room for row 8, and row 0 did not


def test_rows_in_memory_are_read_in_place() -> None:
    values = np.random.default_rng(0).standard_normal((ROWS, COLUMNS), np.float32)
    table = ops.RowTable(POOL, [WeightMatrix(values, "f32", COLUMNS)], 1 << 20)
    assert table.cache_bytes == 0
    out = np.empty((1, COLUMNS), np.float32)
    table.read(np.array([[7]]), out)
    np.testing.assert_array_equal(out[0], values[7])


@pytest.mark.parametrize("row", [-1, ROWS])
def test_a_row_outside_is_refused(tmp_path: Path, row: int) -> None:
    table = ops.RowTable(POOL, parts(tmp_path)[1], 1 << 20)
    expected = f"row {row} was asked for; the table has {ROWS} rows"
    with pytest.raises(KernelError, match=expected):
        table.read(np.array([[row]]), np.empty((1, COLUMNS), np.float32))
    with pytest.raises(KernelError, match=expected):
        table.read_ahead(np.array([[row]]))


def test_a_file_that_became_shorter_is_an_error(tmp_path: Path) -> None:
    table = ops.RowTable(POOL, parts(tmp_path)[1], 1 << 20)
    with open(tmp_path / "rows.safetensors", "r+b") as file:
        file.truncate(1000)
    with pytest.raises(KernelError, match="of a table cannot be read; the file has become shorter"):
        table.read(np.array([[ROWS - 1]]), np.empty((1, COLUMNS), np.float32))


def test_a_table_larger_than_the_bound_takes_no_more_memory(tmp_path: Path) -> None:
    """A file with holes: 64 MiB of rows, many of which are read through a cache of 1 MiB."""
    rows, columns = 1 << 17, 128
    path = tmp_path / "rows.safetensors"
    entry = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [0, 4 * rows * columns]}
    header = json.dumps({"0": entry}).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 4 * rows * columns)
    source = TensorSource(tmp_path, read_header(path))
    table = ops.RowTable(POOL, [source.matrix("0", (rows, columns))], 1 << 20)
    ids = np.random.default_rng(0).permutation(rows)[: 1 << 13].reshape(-1, 64)
    out = np.ones((len(ids), 64 * columns), np.float32)
    before = resident_bytes()
    table.read(ids, out)
    assert resident_bytes() - before < 6 << 20
    assert not out.any()
