"""Times one MoE layer of Twofold or of kt-kernel. Runs alone, by any interpreter that has the engine, and numpy.

    python layer_worker.py '{"engine": "twofold", "weights": "q4_0", "hidden": 2048, "intermediate": 768, "top_k": 8,
                             "experts": 128, "threads": 1, "seed": 0, "cases": [[1, 20, false], [512, 1, true]]}'

`weights` is a format, or one of kt-kernel's METHODS. A case is tokens, passes, and whether every expert gets the same
number of tokens. Prints a line of JSON per case ({"tokens", "seconds", "touched"}): the time of every pass after an
untimed one, and how many experts it touched. Each pass has a routing of its own. Weights are random.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from benchmarks.models.random_blocks import FORMATS, random_rows

METHODS: Final[Mapping[str, tuple[str, str]]] = {
    "raw-int4": ("AMXInt4_KGroup_MOE", "int4"),
    "raw-int4-avxvnni": ("AVXVNNI256RawInt4_MOE", "int4"),
    "raw-int4-avx2": ("AVX2RawInt4_MOE", "int4"),
    "q4_k": ("MOE", "gguf"),
    "int8": ("AMXInt8_MOE", "bf16 stack"),
    "int4": ("AMXInt4_MOE", "bf16 stack"),
    "bf16-avx2": ("AVX2BF16_MOE", "bf16"),
    "bf16-avx512": ("AMXBF16_MOE", "bf16"),
}
"""Class of kt-kernel's module, and its weights: 4 bits with a scale for 32; Q4_K, and Q6_K in down; a stack of BF16,
which it quantises to one scale for a row; BF16."""
_GROUP: Final = 32
_GGML_TYPES: Final = {"q4_k": 12, "q6_k": 14, "bf16": 30}
_BF16_EXPONENT: Final = 0x7F80
"""All of its bits are set in infinities and NaNs alone."""


class TwofoldLayer:
    """A layer of random experts. Raises ImportError."""

    def __init__(self, task: dict[str, Any], rng: np.random.Generator, max_tokens: int) -> None:
        from twofold.blocks import ops
        from twofold.experts.accelerator import AcceleratorChoice
        from twofold.experts.moe import MoeRuntime
        from twofold.experts.slot_plan import DenseCost, MoeShape, SlotPlan
        from twofold.weights.weight_format import LayerExperts, WeightMatrix, element_type

        name, hidden, inner = task["weights"], task["hidden"], task["intermediate"]

        def matrix(rows: int, columns: int) -> WeightMatrix:
            data = random_rows(rng, FORMATS[name], rows, columns)
            return WeightMatrix(data.view(element_type(name)), name, columns)

        experts = [
            (matrix(inner, hidden), matrix(inner, hidden), matrix(hidden, inner))
            for _ in range(task["experts"])
        ]
        self._moe = MoeRuntime(
            MoeShape(1, task["experts"], task["top_k"], hidden, inner, ((name,) * 3,)),
            [LayerExperts(experts)],
            ops.ThreadPool(task["threads"]),
            AcceleratorChoice("none", "asked for"),
            SlotPlan(0, "payback"),
            DenseCost([0.0, 0.0], [0.0, 0.0]),
        )
        self._x = rng.standard_normal((max_tokens, hidden), np.float32)
        self._y = np.zeros_like(self._x)
        self._step = 0

    def run(self, ids: list[list[int]], weights: np.ndarray) -> float:
        """Seconds of one pass of tokens with these experts, [tokens][top_k]."""
        tokens, chosen = len(ids), np.array(ids, np.int32)
        x, y = self._x[:tokens], self._y[:tokens]
        y[:] = 0
        self._moe.begin_step(self._step, [0] * tokens, list(range(tokens)))
        begun = time.perf_counter()
        self._moe.executor.forward(0, x, chosen, weights, y)
        seconds = time.perf_counter() - begun
        self._moe.executor.end_step()
        self._step += 1
        return seconds

    def is_finite(self) -> bool:
        """Whether all outputs are numbers."""
        return bool(np.isfinite(self._y).all())


class KtLayer:
    """The same by kt-kernel's compiled module. Its arrays are kept: the module may read them later."""

    def __init__(self, task: dict[str, Any], rng: np.random.Generator, max_tokens: int) -> None:
        extension = kt_extension()
        self._rng = rng
        self._kept: list[np.ndarray] = []
        pool = extension.WorkerPoolConfig()
        pool.subpool_count = 1
        pool.subpool_numa_map = [0]
        pool.subpool_thread_count = [task["threads"]]
        self._cpu = extension.CPUInfer(pool)
        experts, hidden, inner = task["experts"], task["hidden"], task["intermediate"]
        on_gpu = self._keep(np.zeros(experts, bool))
        config = extension.moe.MOEConfig(experts, task["top_k"], hidden, inner, on_gpu)
        config.layer_idx = 0
        config.pool = self._cpu.backend_
        config.max_len = max_tokens
        kernel, kind = METHODS[task["weights"]]
        for part, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            if kind in ("gguf", "bf16 stack"):
                name = "bf16" if kind == "bf16 stack" else "q6_k" if part == "down" else "q4_k"
                setattr(config, f"{part}_proj", self._random(name, experts * rows, columns))
                setattr(config, f"{part}_type", _GGML_TYPES[name])
            else:
                make = self._random if kind == "bf16" else self._random_int4
                setattr(config, f"{part}_projs", [[make(kind, rows, columns) for _ in range(experts)]])
                scales = [0 if kind == "bf16" else self._scales(rows, columns) for _ in range(experts)]
                setattr(config, f"{part}_scales", [scales])
        if kind == "int4":
            config.quant_config.bits, config.quant_config.group_size = 4, _GROUP
            config.quant_config.zero_point = False
        if kind == "gguf":
            config.hidden_type = _GGML_TYPES["bf16"]
            config.m_block, config.group_min_len, config.group_max_len = 32, 10, max_tokens
        self._moe = getattr(extension.moe, kernel)(config)
        self._wait_for(self._moe.load_weights_task(self._keep(np.arange(experts, dtype=np.int64))))
        self._x = self._random("bf16", max_tokens, hidden)
        self._y = np.zeros((max_tokens, hidden), np.uint16)

    def run(self, ids: list[list[int]], weights: np.ndarray) -> float:
        length, chosen = np.array([len(ids)], np.int32), np.array(ids, np.int64)
        begun = time.perf_counter()
        self._wait_for(
            self._moe.forward_task(
                length.ctypes.data, chosen.shape[1], chosen.ctypes.data, weights.ctypes.data, self._x,
                self._y.ctypes.data, False,
            )
        )  # fmt: skip
        return time.perf_counter() - begun

    def is_finite(self) -> bool:
        return bool(((self._y & _BF16_EXPONENT) != _BF16_EXPONENT).all())

    def _wait_for(self, work: Any) -> None:
        self._cpu.submit(work)
        self._cpu.sync()

    def _keep(self, array: np.ndarray) -> int:
        """The array's address."""
        self._kept.append(array)
        return array.ctypes.data

    def _random(self, name: str, rows: int, columns: int) -> int:
        return self._keep(random_rows(self._rng, FORMATS[name], rows, columns))

    def _random_int4(self, name: str, rows: int, columns: int) -> int:
        return self._keep(self._rng.integers(0, 256, (rows, columns // 2), np.uint8))

    def _scales(self, rows: int, columns: int) -> int:
        """BF16 scales that give 4-bit weights the size of the other formats'."""
        bits = np.float32(0.2 / columns**0.5).view(np.uint32) >> 16
        return self._keep(np.full((rows, columns // _GROUP), bits, np.uint16))


def kt_extension() -> Any:
    """kt-kernel's compiled module for this CPU, by the package's own loader: the package around it asks for a GPU.
    Raises ImportError.
    """
    package = importlib.util.find_spec("kt_kernel")
    if package is None or package.origin is None:
        raise ImportError("kt-kernel is not installed")
    import torch  # noqa: F401  # the module is linked with its libraries

    loader = Path(package.origin).with_name("_cpu_detect.py")
    spec = importlib.util.spec_from_file_location("kt_loader", loader)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.initialize()[0]


ENGINES: Final = {"twofold": TwofoldLayer, "kt-kernel": KtLayer}


def main() -> int:
    task: dict[str, Any] = json.loads(sys.argv[1])
    experts, top_k = task["experts"], task["top_k"]
    rng = np.random.Generator(np.random.SFC64(task["seed"]))
    draw = random.Random(task["seed"])  # noqa: S311
    try:
        layer = ENGINES[task["engine"]](task, rng, max(tokens for tokens, *_ in task["cases"]))
    except ImportError as error:
        print(json.dumps({"error": f"{task['engine']} cannot be imported: {error}"}))
        return 3
    for tokens, passes, is_balanced in task["cases"]:
        seconds, touched = [], []
        weights = np.full((tokens, top_k), 1 / top_k, np.float32)
        for _ in range(passes + 1):
            ids = routing(draw, tokens, experts, top_k, is_balanced=is_balanced)
            seconds.append(layer.run(ids, weights))
            touched.append(len({expert for row in ids for expert in row}))
        if not layer.is_finite():
            raise RuntimeError("the layer's output is not finite")
        print(json.dumps({"tokens": tokens, "seconds": seconds[1:], "touched": touched[1:]}), flush=True)
    return 0


def routing(
    draw: random.Random, tokens: int, experts: int, top_k: int, *, is_balanced: bool
) -> list[list[int]]:
    """[tokens][top_k] different experts for each token: all equally likely, or dealt out again and again."""
    if is_balanced:
        return [[(token * top_k + slot) % experts for slot in range(top_k)] for token in range(tokens)]
    return [draw.sample(range(experts), top_k) for _ in range(tokens)]


if __name__ == "__main__":
    sys.exit(main())
