"""What this machine can do at most: bytes read and operations per second, all threads at once.

    python kernels/bench/ceilings.py [--threads 2]

Prints one JSON object: read_gb_per_s, and f32_gop_per_s, bf16_gop_per_s, int8_gop_per_s, bf16_tiles_gop_per_s and
int8_tiles_gop_per_s (AMX) as far as the CPU has them (a multiplication and an addition are two operations). The
products stay in registers, so nothing real gets there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

try:
    from twofold._core.testing import kernels
except ImportError:  # run from a checkout whose native module was built in place
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "engine"))
    from twofold._core.testing import kernels

BYTES = 512 * 1024**2
"""In all: must overflow the last cache."""
TURNS = 7
ROUNDS = 4_000_000
"""Of a loop of products in registers: tens of milliseconds."""


def measure(threads: int, num_bytes: int = BYTES, rounds: int = ROUNDS) -> dict[str, float]:
    """The fastest of several turns of each, in GB/s and 10^9 operations per second."""
    memory = [np.ones(num_bytes // threads, np.uint8) for _ in range(threads)]
    level = kernels.supported_levels()[-1]

    def read(index: int) -> int:
        return read_bytes(memory[index], level)

    found = {"read_gb_per_s": best_rate(threads, read) / 1e9}
    for kind in kernels.peak_kinds():

        def products(_: int, kind: str = kind) -> int:
            return int(kernels.peak_operations(kind, rounds_of(kind, rounds)))

        found[f"{kind}_gop_per_s"] = best_rate(threads, products) / 1e9
    return found


def rounds_of(kind: str, rounds: int) -> int:
    """Of a loop that lasts about as long as `rounds` of one with vectors: a product of tiles takes 16 cycles."""
    return max(1, rounds // 32) if kind.endswith("_tiles") else rounds


def read_bytes(memory: NDArray[np.uint8], level: str) -> int:
    kernels.read_all(memory, level=level)
    return memory.nbytes


def best_rate(threads: int, work: Callable[[int], int]) -> float:
    """Units per second of the fastest turn; a turn lasts as long as its slowest thread. `work` returns its units."""
    best = 0.0
    for _ in range(TURNS):
        done = [0] * threads
        together = threading.Barrier(threads + 1)

        def run(index: int, done: list[int] = done, together: threading.Barrier = together) -> None:
            together.wait()
            done[index] = work(index)

        pool = [threading.Thread(target=run, args=(index,)) for index in range(threads)]
        for thread in pool:
            thread.start()
        together.wait()
        begun = time.perf_counter()
        for thread in pool:
            thread.join()
        best = max(best, sum(done) / (time.perf_counter() - begun))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    if args.threads < 1:
        parser.error(f"--threads was given {args.threads}; it takes 1 or more")
    print(json.dumps(measure(args.threads)))


if __name__ == "__main__":
    main()
