"""Times Twofold's steps at a long context. Stand-alone; takes the same orders as long_context_llama_worker.py.

    python long_context_worker.py '{"model": "m.gguf", "kv": "q8", "threads": 2, "context": 33000, "isa": ""}'

Prints {"ready": level} once loaded. Then every line of its input is answered by {"seconds": S}: {"fill": N} makes the
context N positions long, each chunk of 512 tokens seeing only itself; {"decode": n} takes n steps of one token behind
it, {"prefill": n} one step of n tokens. What these two add is forgotten again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

_CHUNK = 512
_PAGE_SIZE = 16


def main() -> int:
    task: dict[str, Any] = json.loads(sys.argv[1])
    if task["isa"]:
        os.environ["TWOFOLD_ISA"] = task["isa"]
    try:
        worker = Worker(task)
    except ImportError as error:
        print(json.dumps({"error": f"twofold cannot be imported: {error}"}))
        return 3
    print(json.dumps({"ready": worker.level}), flush=True)
    for line in sys.stdin:
        (order, count), *_ = json.loads(line).items()
        begun = time.perf_counter()
        getattr(worker, order)(count)
        print(json.dumps({"seconds": time.perf_counter() - begun}), flush=True)
    return 0


class Worker:
    """A model on the CPU with one sequence."""

    def __init__(self, task: dict[str, Any]) -> None:
        import numpy as np
        from twofold.api.config import EngineConfig
        from twofold.blocks import ops
        from twofold.blocks.rope import RopeTable
        from twofold.experts.accelerator import AcceleratorChoice
        from twofold.models.model_files import open_model_files
        from twofold.step.expert_loading import load_experts, slot_plan
        from twofold.step.model import LoadedModel

        self._np, self._ops = np, ops
        self.level = ops.isa_choice()[0]
        files = open_model_files(task["model"])
        pool = ops.ThreadPool(task["threads"])
        self._model = LoadedModel(files, pool)
        asked = EngineConfig(model=task["model"], accelerator="none", kv_cache_dtype=task["kv"])
        choice = AcceleratorChoice("none", "asked for")
        self._moe = load_experts(files, pool, choice, asked, slot_plan(asked, files, 0))
        pages = task["context"] // _PAGE_SIZE + 1
        planes = files.config.cache_planes(files.config.cache_dtype(task["kv"]))
        self._cache = ops.StateCache(planes, pages, _PAGE_SIZE)
        self._pages = np.arange(pages, dtype=np.int32)[None]
        config = files.config
        self._rope = RopeTable(config.rope, config.rope_dim, config.max_position_embeddings)
        self._tokens = np.random.default_rng(0).integers(0, config.vocab_size, task["context"], np.int32)
        self._length = self._step = 0

    def fill(self, length: int) -> None:
        for begin in range(self._length, length, _CHUNK):
            self._forward(begin, min(length, begin + _CHUNK), alone=True)
        self._length = length

    def decode(self, count: int) -> None:
        for position in range(self._length, self._length + count):
            self._forward(position, position + 1)

    def prefill(self, count: int) -> None:
        self._forward(self._length, self._length + count)

    def _forward(self, begin: int, end: int, alone: bool = False) -> None:
        np, count = self._np, end - begin
        positions = np.arange(begin, end, dtype=np.int32)
        cos, sin = self._rope.rows(positions, np.full(count, end, np.int32))
        # Alone: rotated by their own positions, stored and attended to as if the sequence began with their pages.
        first = begin if alone else 0
        batch = self._ops.AttentionBatch(
            positions - np.int32(first),
            np.zeros(count, np.int32),
            self._pages[:, first // _PAGE_SIZE :].copy(),
            cos,
            sin,
        )
        self._step += 1
        self._moe.begin_step(self._step, [0] * count, positions.tolist())
        hidden = self._model.forward(self._tokens[begin:end], batch, self._cache, self._moe.executor)
        self._model.logits(hidden[-1:])
        self._moe.end_step()


if __name__ == "__main__":
    sys.exit(main())
