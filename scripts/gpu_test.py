"""Everything about CUDA that needs a GPU to be checked, in one run of under ten minutes: `make test-gpu`.

    python scripts/gpu_test.py [--no-build] [--dry-run] [--json FILE]

Needs nvcc, a C++ compiler, cmake, ninja, pybind11 and torch with CUDA; builds from source. Every check is listed in the
JSON with its state ("passed", "failed", "not run"), its figures and its error. Exit status 1 if one failed, 3 where
there is no device. `--dry-run` goes as far as it can without one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpu_run

FORMATS = ("f32", "f16", "bf16", "fp8", "q8_0", "q4_0", "int8", "int4", "q4_k", "q5_k", "q6_k")
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 512, 256, 16, 4
LIMITS = {"decode": 2e-2, "prefill": 2e-2}
"""Largest ‖ours − reference‖ / ‖reference‖: activations rounded to bf16 or 8 bits."""

Check = Callable[[], dict[str, Any]]


def checks() -> Iterator[tuple[str, Check]]:
    """(name, what runs it) of every check, in order."""
    for name in FORMATS:
        yield f"decode experts, {name}", lambda name=name: decode_experts(name)  # type: ignore[misc]
    for name in FORMATS[1:]:
        yield f"prefill experts, {name}", lambda name=name: prefill_experts(name)  # type: ignore[misc]
    yield "routing", routing
    yield "rotation, KV store and decode attention", attention
    yield "hand-over probe", hand_over
    yield "hits on the GPU and misses by the mailbox, eager", lambda: hybrid(False)
    yield "hits on the GPU and misses by the mailbox, one graph", lambda: hybrid(True)
    yield "a step that nobody serves is given up", watchdog


def decode_experts(format: str) -> dict[str, Any]:
    """Every expert in a slot, batches from 1 to 32."""
    import torch

    worst = 0.0
    for num_tokens in (1, 3, 8, 32):
        case = gpu_run.make_case(format, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, num_tokens)
        experts = case.device_experts(resident=EXPERTS)
        experts.posting(False)
        hidden = torch.full((num_tokens, HIDDEN), float("nan"), device="cuda")
        hidden.copy_(case.residual)
        experts.begin_step()
        experts.forward(0, case.normed, case.ids, case.weights, hidden)
        first = hidden.clone()
        hidden.copy_(case.residual)
        experts.forward(0, case.normed, case.ids, case.weights, hidden)
        if not torch.equal(first, hidden):
            raise AssertionError("two runs of the same step differ")
        worst = max(worst, gpu_run.relative_error(first, case.reference()))
    return within(worst, LIMITS["decode"])


def prefill_experts(format: str) -> dict[str, Any]:
    """The grouped product on tensor cores, small and large tiles."""
    worst = 0.0
    for num_tokens in (40, 700):
        case = gpu_run.make_case(format, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, num_tokens)
        hidden = case.residual.clone()
        case.device_experts(resident=EXPERTS).prefill(0, case.normed, case.ids, case.weights, hidden)
        worst = max(worst, gpu_run.relative_error(hidden, case.reference()))
    return within(worst, LIMITS["prefill"])


def routing() -> dict[str, Any]:
    """Against torch."""
    import torch
    from twofold.model.device_kernels import CudaKernels, TorchKernels

    logits = torch.randn(67, 128, device="cuda")
    worst = 0.0
    for normalise in (False, True):
        ids, weights = CudaKernels(64).route(logits, 8, normalise)
        expected_ids, expected = TorchKernels().route(logits, 8, normalise)
        if not torch.equal(ids, expected_ids):
            raise AssertionError("other experts are chosen")
        worst = max(worst, gpu_run.relative_error(weights, expected))
    return within(worst, 1e-5)


def attention() -> dict[str, Any]:
    """Against torch, with and without window and head norms."""
    import torch
    from twofold.model.device_kernels import CudaKernels, HeadShape, KvLayer, TorchKernels

    worst = 0.0
    for head_dim, heads, kv_heads, window in ((128, 32, 4, 0), (64, 64, 8, 100), (64, 6, 6, 0)):
        shape = HeadShape(heads, kv_heads, head_dim, head_dim**-0.5, window, 1e-6)
        lengths = torch.tensor([1, 17, 256, 700, 0], dtype=torch.int32, device="cuda")
        tables = torch.randperm(5 * 48, device="cuda").view(5, 48).int()
        places = torch.where(
            lengths > 0,
            tables.long()[torch.arange(5, device="cuda"), ((lengths - 1).clamp(min=0) // 16).long()] * 16
            + (lengths - 1) % 16,
            -1,
        )
        qkv = torch.randn(5, (heads + 2 * kv_heads) * head_dim, device="cuda").bfloat16()
        norm = torch.rand(head_dim, device="cuda") + 0.5
        angle = torch.rand(5, head_dim // 2, device="cuda") * 6
        results = []
        cache = torch.randn(2, 240, 16, kv_heads, head_dim, device="cuda").bfloat16()
        for kernels in (CudaKernels(768), TorchKernels()):
            kv = KvLayer(cache[0].clone(), cache[1].clone())
            q = kernels.rope_store(qkv, (norm, norm), (angle.cos(), angle.sin()), places, kv, shape)
            results.append((kernels.decode_attention(q, tables, lengths, kv, shape), kv.keys, kv.values))
        worst = max(worst, *(gpu_run.relative_error(a, b) for a, b in zip(*results, strict=True)))
    return within(worst, 2e-2)


def hand_over() -> dict[str, Any]:
    """The probe that chooses how a graph waits for the CPU."""
    from twofold.experts.device_experts import probe_hand_overs

    found = probe_hand_overs(2048)
    if not found["kind"]:
        raise AssertionError(found["reason"])
    return dict(found)


def hybrid(graph: bool) -> dict[str, Any]:
    """Half of the experts in slots, the rest by the CPU, over several layers; twice, bit for bit the same."""
    worst = 0.0
    for format in ("bf16", "q8_0"):
        for num_tokens in (1, 4):
            for kind in gpu_run.working_hand_overs():
                case = gpu_run.make_case(format, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, num_tokens)
                worst = max(worst, gpu_run.hybrid_error(case, kind, graph))
    return within(worst, LIMITS["decode"])


def watchdog() -> dict[str, Any]:
    """Without a server a step ends by itself; with one, the next step works."""
    import time

    case = gpu_run.make_case("bf16", HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, 1)
    started = time.perf_counter()
    error = gpu_run.error_after_a_lost_step(case, watchdog_s=0.2)
    return within(error, LIMITS["decode"]) | {"seconds": time.perf_counter() - started}


def within(error: float, limit: float) -> dict[str, Any]:
    """The figure, or what is wrong with it."""
    if not error <= limit:
        raise AssertionError(f"relative error {error:.2e}, at most {limit:.0e} expected")
    return {"relative_error": error, "limit": limit}


def main(argv: list[str] | None = None) -> int:
    """Run as a command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    gpu_run.add_options(parser, "gpu-test.json")
    return gpu_run.run(parser.parse_args(argv), list(checks()))


if __name__ == "__main__":
    raise SystemExit(main())
