"""Rows per second of a table in a file, read cold from the disk, from the page cache and from the row cache.

`python -m benchmarks.tables FOLDER` writes a table there and reads rows of it as prompts and decode steps do: 16 rows
a token, of 160 bfloat16 values, as Qwen3.8-Flash-Next has them.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import time
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from twofold.blocks import ops
from twofold.weights.checkpoint import read_header
from twofold.weights.host_memory import resident_bytes
from twofold.weights.tensor_source import TensorSource

COLUMNS: Final = 160
ROWS_OF_TOKEN: Final = 16
_PIECE_ROWS: Final = 1 << 18


def write_table(path: Path, num_rows: int) -> None:
    """A file of random rows; one that is there already is kept."""
    num_bytes = 2 * COLUMNS * num_rows
    header = {"table": {"dtype": "BF16", "shape": [num_rows, COLUMNS], "data_offsets": [0, num_bytes]}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    if path.exists() and path.stat().st_size == 8 + len(text) + num_bytes:
        return
    piece = np.random.default_rng(0).integers(0, 0x3F80, (_PIECE_ROWS, COLUMNS), np.uint16)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for begin in range(0, num_rows, _PIECE_ROWS):
            file.write(piece[: num_rows - begin].tobytes())
        file.flush()
        os.fsync(file.fileno())


def drop_page_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


class Reader:
    def __init__(self, path: Path, cache_bytes: int, num_threads: int) -> None:
        source = TensorSource(path.parent, read_header(path))
        matrix = source.matrix("table", source.entry("table").shape[:2])
        self.table = ops.RowTable(ops.ThreadPool(num_threads), [matrix], cache_bytes)

    def rate(self, ids: npt.NDArray[np.int64]) -> str:
        """Rows per second and cache hits of one read of rows `ids`, and the memory of the process after it."""
        out = np.zeros((len(ids), ROWS_OF_TOKEN * COLUMNS), np.float32)
        before = self.table.num_reads, self.table.num_hits
        began = time.perf_counter()
        self.table.read(ids, out)
        took = time.perf_counter() - began
        hits = (self.table.num_hits - before[1]) / (self.table.num_reads - before[0])
        return (
            f"{ids.size / took:12,.0f} rows/s, {1e6 * took / len(ids):9.1f} us a token, {100 * hits:5.1f} % hits, "
            f"{resident_bytes() / 1e6:6.0f} MB resident"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder on the disk to measure")
    parser.add_argument("--gib", type=float, default=8.0, help="size of the table (default: %(default)s)")
    parser.add_argument(
        "--cache-mib", type=float, default=256.0, help="bound of the row cache (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads that read (default: %(default)s)")
    args = parser.parse_args()
    path, num_rows = args.folder / "table.safetensors", int(args.gib * 2**30) // (2 * COLUMNS)
    write_table(path, num_rows)
    random = np.random.default_rng(1)

    def drawn(tokens: int) -> npt.NDArray[np.int64]:
        return random.integers(0, num_rows, (tokens, ROWS_OF_TOKEN))

    reader = Reader(path, int(args.cache_mib * 2**20), args.threads)
    print(f"table {reader.table.bytes / 2**30:.2f} GiB, row cache {reader.table.cache_bytes / 2**20:.1f} MiB")
    drop_page_cache(path)
    prompt, others, token = drawn(args.tokens), drawn(args.tokens), drawn(1)
    print(f"{args.tokens} tokens, cold disk:    {reader.rate(prompt)}")
    print(f"the same, row cache:     {reader.rate(prompt)}")
    ahead = time.perf_counter()
    reader.table.read_ahead(others)
    ahead = time.perf_counter() - ahead
    print(f"reading ahead asked for {others.size} rows in {1e3 * ahead:.1f} ms; 1 s later:")
    time.sleep(1)
    print(f"{args.tokens} other tokens:        {reader.rate(others)}")
    print(f"1 token, cold disk:      {reader.rate(token)}")
    print(f"1 token, row cache:      {reader.rate(token)}")
    uncached = Reader(path, 0, args.threads)
    print(f"the prompt, page cache:  {uncached.rate(prompt)}")
    print(f"1 token, page cache:     {uncached.rate(token)}")
    for _ in range(4):
        reader.rate(drawn(args.tokens))
    print(f"{args.tokens} more tokens, cold:   {reader.rate(drawn(args.tokens))}")


if __name__ == "__main__":
    main()
