"""Times one MoE layer of kt-kernel by its raw extension. Runs alone, by whichever interpreter has kt-kernel and torch.

    python kt_worker.py '{"method": "bf16-avx2", "hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8,
                          "threads": 1, "max_tokens": 512, "seed": 0}'

Prints {"ready": ...} once loaded. Then every line of its input, {"tokens": T, "repeats": R}, is answered by a line
{"tokens": T, "seconds": [...]}: R passes of T tokens through the layer, each with a routing of its own. Its first pass
is not timed. Weights are random; what they say does not matter for the time.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from benchmarks.peers.routing import random_routing

_GROUP: Final = 32


@dataclass(frozen=True)
class Method:
    """A class of the extension and what its weights are."""

    kernel: str
    kind: str
    """raw-int4, gptq-int4, bf16, quantised (from bf16 at load) or gguf."""
    gguf_types: tuple[int, int] = (0, 0)
    """ggml's numbers for gate and up, and for down."""
    block: tuple[tuple[int, int], tuple[int, int]] = ((1, 1), (1, 1))
    """Columns and bytes of a block of each of the two."""


_Q4_K, _Q6_K, _Q8_0, _Q4_0 = (12, (256, 144)), (14, (256, 210)), (8, (32, 34)), (2, (32, 18))
METHODS: Final = {
    "raw-int4": Method("AMXInt4_KGroup_MOE", "raw-int4"),
    "raw-int4-blocked": Method("AMXInt4_KGroupBlocked_MOE", "raw-int4"),
    "raw-int4-avxvnni": Method("AVXVNNI256RawInt4_MOE", "raw-int4"),
    "raw-int4-avx2": Method("AVX2RawInt4_MOE", "raw-int4"),
    "bf16-avx2": Method("AVX2BF16_MOE", "bf16"),
    "bf16-avx512": Method("AMXBF16_MOE", "bf16"),
    "int8": Method("AMXInt8_MOE", "quantised"),
    "int4": Method("AMXInt4_MOE", "quantised"),
    "q4_k": Method("MOE", "gguf", (_Q4_K[0], _Q6_K[0]), (_Q4_K[1], _Q6_K[1])),
    "q4_k-all": Method("MOE", "gguf", (_Q4_K[0], _Q4_K[0]), (_Q4_K[1], _Q4_K[1])),
    "q4_0": Method("MOE", "gguf", (_Q4_0[0], _Q4_0[0]), (_Q4_0[1], _Q4_0[1])),
    "q8_0": Method("MOE", "gguf", (_Q8_0[0], _Q8_0[0]), (_Q8_0[1], _Q8_0[1])),
}


def main() -> int:
    task: dict[str, Any] = json.loads(sys.argv[1])
    try:
        extension = load_extension(task.get("variant"))
    except ImportError as error:
        print(json.dumps({"error": f"kt-kernel cannot be imported: {error}"}))
        return 3
    layer = Layer(extension, METHODS[task["method"]], task)
    version = importlib.metadata.version("kt-kernel")
    print(json.dumps({"ready": task["method"], "version": version}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        seconds = layer.measure(order["tokens"], order["repeats"])
        print(json.dumps({"tokens": order["tokens"], "seconds": seconds}), flush=True)
    return 0


def load_extension(variant: str | None) -> Any:
    """The compiled module alone: the package around it asks for a GPU. ImportError."""
    here = Path(__file__).resolve().parent  # where another kt_kernel lies
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != here]
    spec = importlib.util.find_spec("kt_kernel")
    if spec is None or spec.origin is None:
        raise ImportError("it is not installed")
    import torch  # noqa: F401  # its libraries are what the extension is linked with

    folder = Path(spec.origin).parent
    names = sorted(path.name for path in folder.glob("_kt_kernel_ext_*.so"))
    wanted = variant or best_variant()
    path = next((folder / name for name in names if name.startswith(f"_kt_kernel_ext_{wanted}.")), None)
    if path is None:
        raise ImportError(f"it has no variant {wanted}; it has {', '.join(names)}")
    found = importlib.util.spec_from_file_location("kt_kernel_ext", path)
    if found is None or found.loader is None:
        raise ImportError(f"{path.name} cannot be loaded")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def best_variant() -> str:
    """The most capable build that this CPU runs, as the package itself would choose."""
    flags = set(
        Path("/proc/cpuinfo").read_text(encoding="utf-8").split("flags", 1)[1].split("\n", 1)[0].split()
    )
    for variant, needed in (
        ("amx", {"amx_int8", "amx_bf16"}),
        ("avx512_bf16", {"avx512_bf16", "avx512_vnni", "avx512_vbmi"}),
        ("avx512_vbmi", {"avx512_vbmi", "avx512_vnni"}),
        ("avx512_vnni", {"avx512_vnni"}),
        ("avx512_base", {"avx512f", "avx512bw"}),
    ):
        if needed <= flags:
            return variant
    return "avx2"


class Layer:
    """One layer of random experts and buffers for up to max_tokens tokens."""

    def __init__(self, extension: Any, method: Method, task: dict[str, Any]) -> None:
        import torch

        self._torch, self._task = torch, task
        torch.manual_seed(task["seed"])
        self._draw = random.Random(task["seed"])  # noqa: S311
        self._keep: list[Any] = []
        hidden, max_tokens, top_k = task["hidden"], task["max_tokens"], task["top_k"]
        pool = extension.WorkerPoolConfig()
        pool.subpool_count = 1
        pool.subpool_numa_map = [0]
        pool.subpool_thread_count = [task["threads"]]
        self._cpu = extension.CPUInfer(pool)
        self._mask = torch.zeros(task["experts"], dtype=torch.bool)
        config = extension.moe.MOEConfig(
            task["experts"], top_k, hidden, task["intermediate"], self._mask.data_ptr()
        )
        config.layer_idx = 0
        config.pool = self._cpu.backend_
        config.max_len = max_tokens
        self._fill(extension, config, method)
        self._moe = getattr(extension.moe, method.kernel)(config)
        self._order = torch.arange(task["experts"], dtype=torch.int64)
        self._run(self._moe.load_weights_task(self._order.data_ptr()))
        self._x = torch.randn(max_tokens, hidden).to(torch.bfloat16)
        self._y = torch.empty(max_tokens, hidden, dtype=torch.bfloat16)
        self._ids = torch.zeros(max_tokens, top_k, dtype=torch.int64)
        self._weights = torch.full((max_tokens, top_k), 1 / top_k)
        self._length = torch.zeros(1, dtype=torch.int32)

    def measure(self, tokens: int, repeats: int) -> list[float]:
        """Seconds of every pass but the first."""
        took = []
        for _ in range(repeats + 1):
            ids = random_routing(self._draw, tokens, self._task["experts"], self._task["top_k"])
            self._ids[:tokens] = self._torch.tensor(ids)
            self._length[0] = tokens
            begun = time.perf_counter()
            self._run(
                self._moe.forward_task(
                    self._length.data_ptr(), self._task["top_k"], self._ids.data_ptr(), self._weights.data_ptr(),
                    self._x.data_ptr(), self._y.data_ptr(), False,
                )
            )  # fmt: skip
            took.append(time.perf_counter() - begun)
        if not bool(self._torch.isfinite(self._y[:tokens].float()).all()):
            raise RuntimeError("the layer's output is not finite")
        return took[1:]

    def _run(self, work: Any) -> None:
        self._cpu.submit(work)
        self._cpu.sync()

    def _fill(self, extension: Any, config: Any, method: Method) -> None:
        """Random weights of the kind that the method takes. They are kept alive: the extension may read them later."""
        if method.kind == "gguf":
            self._fill_gguf(extension, config, method)
            return
        torch, task = self._torch, self._task
        hidden, inner = task["hidden"], task["intermediate"]
        shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        if method.kind == "quantised":
            for name, (rows, columns) in shapes.items():
                stack = torch.randn(task["experts"], rows, columns, dtype=torch.bfloat16) / columns**0.5
                self._keep.append(stack)
                setattr(config, f"{name}_proj", stack.data_ptr())
            return
        for name, (rows, columns) in shapes.items():
            weights, scales = [], []
            for _ in range(task["experts"]):
                if method.kind == "bf16":
                    weights.append(torch.randn(rows, columns, dtype=torch.bfloat16) / columns**0.5)
                else:
                    weights.append(torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8))
                    size = torch.full((rows, columns // _GROUP), 0.2 / columns**0.5)
                    scales.append(size.to(torch.bfloat16))
            self._keep += [weights, scales]
            setattr(config, f"{name}_projs", [[w.data_ptr() for w in weights]])
            pointers = [s.data_ptr() for s in scales] or [0] * task["experts"]
            setattr(config, f"{name}_scales", [pointers])
        if method.kind == "raw-int4":
            config.quant_config.bits = 4
            config.quant_config.group_size = _GROUP
            config.quant_config.zero_point = False

    def _fill_gguf(self, extension: Any, config: Any, method: Method) -> None:
        torch, task = self._torch, self._task
        sizes = task["experts"] * task["hidden"] * task["intermediate"]
        for name, kind in (("gate", 0), ("up", 0), ("down", 1)):
            columns, block_bytes = method.block[kind]
            blocks = torch.randint(0, 256, (sizes // columns, block_bytes), dtype=torch.uint8)
            for at in scales_at(method.gguf_types[kind]):
                # 0x10xx is a small f16: about 0.0005.
                blocks[:, at + 1] = 0x10
            self._keep.append(blocks)
            setattr(config, f"{name}_proj", blocks.data_ptr())
            setattr(config, f"{name}_type", method.gguf_types[kind])
        config.hidden_type = 30  # BF16
        config.m_block = 32
        config.group_min_len = 10
        config.group_max_len = task["max_tokens"]


def scales_at(gguf_type: int) -> Iterator[int]:
    """Offsets of a block's f16 scales."""
    yield from {12: (0, 2), 14: (208,), 8: (0,), 2: (0,)}[gguf_type]


if __name__ == "__main__":
    sys.exit(main())
