"""Times one MoE layer of Twofold. Runs alone, and answers orders on its input as kt_worker.py does.

    python layer_worker.py '{"format": "q4_0", "hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8,
                             "threads": 1, "max_tokens": 512, "seed": 0}'

Prints {"ready": ...} once its random experts are packed. Then every line of its input, {"tokens": T, "repeats": R}, is
answered by a line {"tokens": T, "seconds": [...], "touched": [...]}: R passes of T tokens, each with a routing of its
own, and how many experts each touched. With "balanced": true every expert gets as many tokens as every other. The
first pass is not timed.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from benchmarks.peers.random_blocks import FORMATS, random_rows
from benchmarks.peers.routing import balanced_routing, random_routing


def main() -> int:
    task: dict[str, Any] = json.loads(sys.argv[1])
    try:
        layer = Layer(task)
    except ImportError as error:
        print(json.dumps({"error": f"twofold cannot be imported: {error}"}))
        return 3
    print(json.dumps({"ready": task["format"], "isa": layer.isa, "bytes": layer.expert_bytes}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        answer = layer.measure(order["tokens"], order["repeats"], bool(order.get("balanced")))
        print(json.dumps(answer), flush=True)
    return 0


class Layer:
    """One layer of random experts, and a pool of threads of its own."""

    def __init__(self, task: dict[str, Any]) -> None:
        from twofold.blocks import ops
        from twofold.experts.accelerator import AcceleratorChoice
        from twofold.experts.moe import MoeRuntime
        from twofold.experts.slot_plan import DenseCost, MoeShape, SlotPlan
        from twofold.weights.weight_format import LayerExperts

        self._task = task
        self._draw = random.Random(task["seed"])  # noqa: S311
        rng = np.random.Generator(np.random.SFC64(task["seed"]))
        name = task["format"]
        shape = MoeShape(
            1, task["experts"], task["top_k"], task["hidden"], task["intermediate"], ((name, name, name),)
        )
        hidden, inner = task["hidden"], task["intermediate"]
        sizes = ((inner, hidden), (inner, hidden), (hidden, inner))
        experts = (
            tuple(_matrix(rng, name, rows, columns) for rows, columns in sizes)
            for _ in range(task["experts"])
        )
        self._moe = MoeRuntime(
            shape,
            [LayerExperts(list(experts))],  # type: ignore[arg-type]  # three matrices each
            ops.ThreadPool(task["threads"]),
            AcceleratorChoice("none", "asked for"),
            SlotPlan(0, "payback"),
            DenseCost([0.0, 0.0], [0.0, 0.0]),
        )
        self.expert_bytes = self._moe.expert_bytes
        self.isa = ops.isa_choice()[0]
        self._x = rng.standard_normal((task["max_tokens"], hidden), np.float32)
        self._y = np.zeros_like(self._x)

    def measure(self, tokens: int, repeats: int, balanced: bool) -> dict[str, Any]:
        """Seconds and experts touched of every pass but the first."""
        task = self._task
        route = balanced_routing if balanced else random_routing
        took, touched = [], []
        weights = np.full((tokens, task["top_k"]), 1 / task["top_k"], np.float32)
        x, y = self._x[:tokens], self._y[:tokens]
        for turn in range(repeats + 1):
            ids = np.array(route(self._draw, tokens, task["experts"], task["top_k"]), np.int32)
            y[:] = 0
            self._moe.begin_step(turn, [0] * tokens, list(range(tokens)))
            begun = time.perf_counter()
            self._moe.executor.forward(0, x, ids, weights, y)
            took.append(time.perf_counter() - begun)
            self._moe.end_step()
            touched.append(len(np.unique(ids)))
        if not np.isfinite(y).all():
            raise RuntimeError("the layer's output is not finite")
        return {"tokens": tokens, "seconds": took[1:], "touched": touched[1:]}


def _matrix(rng: np.random.Generator, name: str, rows: int, columns: int) -> Any:
    from twofold.weights.weight_format import WeightMatrix, element_type

    data: npt.NDArray[Any] = random_rows(rng, FORMATS[name], rows, columns)
    return WeightMatrix(data.view(element_type(name)), name, columns)


if __name__ == "__main__":
    sys.exit(main())
