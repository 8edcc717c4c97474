"""Everything about CUDA that needs a GPU to be checked, in one run of under ten minutes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.report import Check, Named

if TYPE_CHECKING:
    from benchmarks.gpu.machine import Machine

QWEN, GPT_OSS = "qwen3-30b-a3b", "gpt-oss-20b"
FORMATS = ("f32", "f16", "bf16", "fp8", "q8_0", "q4_0", "int8", "int4", "q4_k", "q5_k", "q6_k")


def kernels(name: str, *arguments: Any) -> Check:
    """A check of kernel_checks; imported when it runs, because listing needs no torch."""

    def check(machine: Machine) -> dict[str, Any]:
        from tests.gpu import kernel_checks

        found: Callable[..., dict[str, Any]] = getattr(kernel_checks, name)
        return found(machine, *arguments)

    return check


def engine(name: str, shape: str | None = None, *arguments: Any) -> Check:
    """The same of engine_checks."""

    def check(machine: Machine) -> dict[str, Any]:
        from benchmarks.gpu import models
        from tests.gpu import engine_checks

        found: Callable[..., dict[str, Any]] = getattr(engine_checks, name)
        return found(machine, *((models.SHAPES[shape],) if shape else ()), *arguments)

    return check


def checks(formats: tuple[str, ...] = FORMATS) -> list[Named]:
    """(name, what runs it) of every check, in order: small things before what stands on them."""
    return [
        *((f"decode experts, {name}", kernels("decode_experts", name)) for name in formats),
        *((f"prefill experts, {name}", kernels("prefill_experts", name)) for name in formats if name != "f32"),
        ("routing", kernels("routing")),
        ("rotation, KV store and decode attention", kernels("attention")),
        ("latent attention", kernels("latent_attention")),
        ("gated delta nets", kernels("gated_delta_nets")),
        ("handshake probe", kernels("handshake_probe")),
        ("hits on the GPU and misses by the mailbox, eager", kernels("hybrid", False)),
        ("hits on the GPU and misses by the mailbox, one graph", kernels("hybrid", True)),
        ("a step without a server is given up", kernels("watchdog")),
        *(
            (f"logits for every placement, {QWEN}, batch of {batch}", engine("logits_for_every_placement", QWEN, batch))
            for batch in (1, 4)
        ),
        ("logits against the engine without a GPU", engine("logits_against_the_cpu_engine")),
        *(
            (f"placement frozen, two runs bit-identical, {mode}", engine("frozen_placement", None, mode))
            for mode in ("graph", "eager", "placed")
        ),
        ("a lost step costs no request", engine("lost_step")),
        *(
            (f"every placement, upload and eviction is reported, {mode}", engine("every_event_is_told", None, mode))
            for mode in ("graph", "placed")
        ),
        (f"logits for every placement, {GPT_OSS}, batch of 1", engine("logits_for_every_placement", GPT_OSS, 1)),
    ]  # fmt: skip


SANITIZED = (
    "decode experts, bf16", "decode experts, q8_0", "decode experts, q4_0", "decode experts, q4_k",
    "prefill experts, bf16", "prefill experts, q8_0", "routing", "rotation, KV store and decode attention",
    "hits on the GPU and misses by the mailbox, eager",
)  # fmt: skip
"""Checks that `make sanitize-gpu` runs: every kernel once, because sanitizers are slow."""
