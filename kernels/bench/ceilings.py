"""What this machine can do at most: bytes read and operations per second, all threads at once.

    python kernels/bench/ceilings.py [--threads 2] [--level avx2]

Prints one JSON object: read_gb_per_s, fork_join_us (of an empty loop), and f32_gop_per_s, bf16_gop_per_s,
int8_gop_per_s, bf16_tiles_gop_per_s and int8_tiles_gop_per_s (AMX) as far as the level has them (a multiplication and
an addition are two operations). The products stay in registers, so nothing real gets there. Without --level: the level
of this process, as TWOFOLD_ISA says.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

try:
    from twofold.blocks import ops
except ImportError:  # run from a checkout whose native module was built in place
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "engine"))
    from twofold.blocks import ops


def measure(threads: int, level: str | None = None) -> dict[str, float]:
    """The fastest of several turns of each, in GB/s, microseconds and 10^9 operations per second."""
    return ops.measure_ceilings(ops.ThreadPool(threads), level=level)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--level", help="of the CPU kernels (default: this process's)")
    args = parser.parse_args()
    if args.threads < 1:
        parser.error(f"--threads was given {args.threads}; it takes 1 or more")
    print(json.dumps(measure(args.threads, args.level)))


if __name__ == "__main__":
    main()
