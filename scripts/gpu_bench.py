"""How fast the CUDA kernels are beside what the card can do, in one run of under ten minutes: `make bench-gpu`.

    python scripts/gpu_bench.py [--no-build] [--dry-run] [--json FILE]

Times are medians of graph replays, which read different experts in turn; ceilings (copy bandwidth, torch's product,
the link) are measured in the same run. The figures are left as JSON, together with the share of the ceiling.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpu_run

SHAPES = {"qwen3-30b-a3b": (2048, 768, 128, 8), "gpt-oss-20b": (2880, 2880, 32, 4)}
"""hidden, intermediate, experts, top-k."""
ROUNDS = 5
CALLS = 24
"""Of one replay, each with a routing of its own."""


def checks() -> Iterator[tuple[str, gpu_run.Check]]:
    """(name, what measures it)."""
    yield "copy bandwidth", copy_bandwidth
    yield "torch's bf16 product", torch_product
    yield "host to device, pinned", link
    yield "hand-over per layer", hand_over
    for shape in SHAPES:
        for format in ("bf16", "q8_0", "q4_0", "fp8") if shape == "qwen3-30b-a3b" else ("bf16", "q4_0"):
            for tokens in (1, 8, 32):
                yield (
                    f"decode {shape} {format} {tokens} tokens",
                    functools.partial(decode, shape, format, tokens),
                )
    for tokens in (512, 4096):
        yield f"prefill qwen3-30b-a3b bf16 {tokens} tokens", functools.partial(prefill, "bf16", tokens)


def time_us(run: Callable[[], object], calls: int) -> float:
    """Median over rounds of the time of one of `calls` calls that `run` makes."""
    import torch

    run()
    times = []
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


@functools.cache
def copy_gbps() -> float:
    """Read and written bytes of a copy within the device's memory."""
    import torch

    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    us = time_us(lambda: [target.copy_(source) for _ in range(4)], 4)
    return 2 * source.numel() / us / 1e3


@functools.cache
def product_tflops() -> float:
    """torch's bf16 product of random matrices."""
    import torch

    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    return 2 * 8192**3 / time_us(lambda: [a @ b for _ in range(8)], 8) / 1e6


def copy_bandwidth() -> dict[str, Any]:
    """The ceiling of decode."""
    return {"gbps": copy_gbps()}


def torch_product() -> dict[str, Any]:
    """The ceiling of prefill."""
    return {"tflops": product_tflops()}


def link() -> dict[str, Any]:
    """Copies of one expert's size, and one of a gigabyte."""
    import torch

    figures = {}
    for name, num_bytes in (("expert", 9_437_184), ("gigabyte", 1 << 30)):
        host = torch.empty(num_bytes, dtype=torch.uint8).pin_memory()
        target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        copies = 16 if name == "expert" else 2
        us = time_us(
            lambda t=target, h=host, n=copies: [t.copy_(h, non_blocking=True) for _ in range(n)], copies
        )  # type: ignore[misc]
        figures[f"{name}_gbps"] = num_bytes / us / 1e3
    return figures


def hand_over() -> dict[str, Any]:
    """Each way there is, in microseconds per layer."""
    from twofold.experts.device_experts import probe_hand_overs

    return dict(probe_hand_overs(2048))


@functools.lru_cache(maxsize=1)
def layer_of(shape: str, format: str) -> tuple[gpu_run.Case, Any]:
    """A layer whose experts are all in slots."""
    hidden, intermediate, num_experts, top_k = SHAPES[shape]
    case = gpu_run.make_case(format, hidden, intermediate, num_experts, top_k, 32)
    case.dense.clear()  # no reference is asked for, and it is large
    return case, gpu_run.slots_of_all(case, hidden, intermediate)


def decode(shape: str, format: str, num_tokens: int) -> dict[str, Any]:
    """Bytes of the experts touched over time, beside the copy bandwidth."""
    import torch

    num_experts, top_k = SHAPES[shape][2:]
    case, experts = layer_of(shape, format)
    experts.posting(False)
    normed, residual = case.normed[:num_tokens].contiguous(), case.residual[:num_tokens].contiguous()
    routings = [
        torch.randn(num_tokens, num_experts, device="cuda").softmax(1).topk(top_k, dim=1)
        for _ in range(CALLS)
    ]
    ready = [(ids.int().contiguous(), weights.contiguous()) for weights, ids in routings]

    def run() -> None:
        for ids, weights in ready:
            experts.forward(0, normed, ids, weights, residual)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    us = time_us(graph.replay, CALLS)
    touched = statistics.mean(len(ids.unique()) for ids, _ in ready)
    gbps = touched * experts.expert_bytes / us / 1e3
    return {"us": us, "experts": touched, "gbps": gbps, "share_of_copy": gbps / copy_gbps()}


def prefill(format: str, num_tokens: int) -> dict[str, Any]:
    """Operations over time, beside torch's product; grouping on the host is part of the time."""
    import torch

    hidden, intermediate, num_experts, top_k = SHAPES["qwen3-30b-a3b"]
    _, experts = layer_of("qwen3-30b-a3b", format)
    normed = torch.randn(num_tokens, hidden, device="cuda").bfloat16()
    residual = torch.zeros(num_tokens, hidden, device="cuda")
    weights, ids = torch.randn(num_tokens, num_experts, device="cuda").softmax(1).topk(top_k, dim=1)
    ids, weights = ids.int().contiguous(), weights.contiguous()
    us = time_us(lambda: [experts.prefill(0, normed, ids, weights, residual) for _ in range(4)], 4)
    tflops = 6 * num_tokens * top_k * hidden * intermediate / us / 1e6
    return {"us": us, "tflops": tflops, "share_of_product": tflops / product_tflops()}


def main(argv: list[str] | None = None) -> int:
    """Run as a command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    gpu_run.add_options(parser, "gpu-bench.json")
    return gpu_run.run(parser.parse_args(argv), list(checks()))


if __name__ == "__main__":
    raise SystemExit(main())
