"""Times how long Twofold takes to load a model.

Runs alone: python load_worker.py '{"model": "m.gguf", "threads": 2}'
"""

from __future__ import annotations

import json
import sys
import time


def main() -> int:
    task = json.loads(sys.argv[1])
    try:
        from twofold.api.config import EngineConfig
        from twofold.api.errors import TwofoldError
        from twofold.engine import Engine
    except ImportError as error:
        print(json.dumps({"error": f"twofold cannot be imported: {error}"}))
        return 3
    begun = time.perf_counter()
    try:
        engine = Engine.load(
            EngineConfig(
                model=task["model"],
                accelerator="none",
                cpu_threads=task["threads"],
                enable_prefix_caching=False,
            )
        )
    except TwofoldError as error:
        print(json.dumps({"error": str(error)}))
        return 4
    print(json.dumps({"load_s": time.perf_counter() - begun}))
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
