"""Holds a packed model in memory: says "ready" after a token and when all is resident, ends when its input does.

Runs alone: python packed_worker.py '{"model": "packed", "threads": 2}'
"""

from __future__ import annotations

import json
import sys
import time

from twofold.api.config import EngineConfig
from twofold.api.types import SamplingParams
from twofold.engine import Engine


def main() -> int:
    task = json.loads(sys.argv[1])
    engine = Engine.load(
        EngineConfig(
            model=task["model"], accelerator="none", cpu_threads=task["threads"], enable_prefix_caching=False
        )
    )
    engine.generate(list(range(5, 21)), SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    while (weights := engine.mapped_weights) and weights.resident_bytes < weights.mapped_bytes:
        time.sleep(0.05)
    print("ready", flush=True)
    sys.stdin.read()
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
