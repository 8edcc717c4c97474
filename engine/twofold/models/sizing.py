"""How much memory a model takes, from its headers alone: what `twofold doctor` answers before anything is loaded.

It counts what Twofold itself will hold: dense weights, the expert store, KV cache pages. It does not know the machine;
`advice` is told how much memory there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from twofold.blocks.block import Cost, ExpertBlock
from twofold.blocks.head import Embedding
from twofold.models.config import ModelConfig
from twofold.models.model_files import ModelFiles, open_model_files

WORKING_BYTES: Final = 512 * 1024 * 1024
"""Interpreter, libraries and activations: an estimate on the safe side, not a measurement."""


@dataclass(frozen=True)
class ModelSize:
    """Bytes in memory once loaded, matrices packed for the kernels."""

    config: ModelConfig
    dense_bytes: int
    """Embedding, attention, routers, dense layers, head."""
    expert_bytes: int
    """All experts of all layers: the host's expert store."""
    one_expert_bytes: int
    """The largest, which is what a slot holds and an upload moves."""
    kv_bytes_per_token: int
    """What the KV cache holds of one token, over all layers."""
    bytes_per_sequence: int
    """What it holds of a sequence beside, however long that is: records."""
    file_bytes: int
    """Of the weights on disk."""
    device_dense_bytes: int
    """Of the dense weights on a device, where matrices are bf16, and of its rotation table."""

    @property
    def num_experts_total(self) -> int:
        return len(self.config.moe_layers) * self.config.num_experts

    def host_bytes(self, num_kv_tokens: int) -> int:
        """Host memory to run with a KV cache for `num_kv_tokens` tokens over all requests, and the record of one."""
        cache = self.kv_bytes_per_token * num_kv_tokens + self.bytes_per_sequence
        return self.dense_bytes + self.expert_bytes + cache + WORKING_BYTES

    def device_bytes(self, num_kv_tokens: int, num_slots: int) -> int:
        """Device memory for dense weights, the KV cache, one record and `num_slots` expert slots over all layers."""
        records = sum(block.device_record_bytes for layer in self.config.layers for block in layer)
        return (
            self.device_dense_bytes
            + records
            + self.kv_bytes_per_token * num_kv_tokens
            + self.one_expert_bytes * num_slots
        )


@dataclass(frozen=True)
class Fit:
    """Whether a model fits, and in words why not and what to change."""

    fits: bool
    needed_bytes: int
    available_bytes: int
    max_kv_tokens: int
    """KV cache tokens that there is room for; 0 when the weights alone do not fit."""
    advice: str
    """One line."""


def measure_model(directory: str | Path, *, kv_cache_dtype: str = "auto") -> ModelSize:
    """The size of a model directory; reads JSON and headers only. Raises ModelLoadError as loading would."""
    return measure_files(open_model_files(directory), kv_cache_dtype=kv_cache_dtype)


def measure_files(files: ModelFiles, *, kv_cache_dtype: str = "auto") -> ModelSize:
    """The same of files that are open already. kv_cache_dtype: as --kv-cache-dtype takes it."""
    config = files.config
    dense = [(part, weights) for part, weights in files.parts() if not isinstance(part, ExpertBlock)]
    experts = [config.routed.expert_bytes(formats) for formats in files.expert_formats()]
    # The device has cosines and sines of the whole context, in float32.
    rotation = 4 * config.max_context * sum(dim for _, dim in config.rotations)
    return ModelSize(
        config=config,
        dense_bytes=sum(part.host_bytes(weights) for part, weights in dense),
        expert_bytes=config.num_experts * sum(experts),
        one_expert_bytes=max(experts),
        kv_bytes_per_token=config.cache_bytes_per_token(config.cache_dtype(kv_cache_dtype)),
        bytes_per_sequence=config.bytes_per_sequence,
        file_bytes=files.file_bytes,
        device_dense_bytes=sum(part.device_bytes(weights) for part, weights in dense) + rotation,
    )


def check_host_memory(size: ModelSize, available_bytes: int, num_kv_tokens: int) -> Fit:
    """Whether the model and a KV cache of `num_kv_tokens` tokens fit into `available_bytes` of host memory."""
    needed = size.host_bytes(num_kv_tokens)
    room = available_bytes - size.host_bytes(0)
    max_kv_tokens = max(0, room // size.kv_bytes_per_token)
    if needed <= available_bytes:
        advice = f"fits: needs {_gib(needed)} of {_gib(available_bytes)}"
    elif max_kv_tokens >= 1:
        advice = (
            f"the weights fit, a KV cache for {num_kv_tokens} tokens does not: needs {_gib(needed)} of "
            f"{_gib(available_bytes)}; set --max-total-tokens to {max_kv_tokens} or less"
        )
    else:
        advice = (
            f"does not fit: the weights alone need {_gib(size.host_bytes(0))}, there are {_gib(available_bytes)}; "
            f"close other programs, add memory, or choose a model below {_gib(max(0, available_bytes - WORKING_BYTES))}"
        )
    return Fit(needed <= available_bytes, needed, available_bytes, max_kv_tokens, advice)


def dense_stretches(files: ModelFiles, on_cpu: Sequence[bool] = ()) -> tuple[list[float], list[float], float]:
    """What a token costs beside its experts, between one layer with experts and the next (before the first, ..., after
    the last): bytes read, floating-point operations; and the bytes of one router's gate.

    on_cpu: of each of `ModelFiles.parts`, whether it is left out because the CPU computes it.
    """
    _, *blocks_on_cpu, head_on_cpu = on_cpu or [False] * len(list(files.parts()))
    skipped = iter(blocks_on_cpu)
    num_bytes, flops = [0.0], [0.0]
    gate_bytes = 0.0
    for layer in files.layers:
        for block, weights in layer:
            is_on_cpu = next(skipped)
            if isinstance(block, ExpertBlock):
                num_bytes.append(0.0)
                flops.append(0.0)
                continue
            cost = block.cost(weights)
            gate_bytes = cost.prediction_bytes or gate_bytes
            if is_on_cpu:
                continue
            num_bytes[-1] += cost.num_bytes
            flops[-1] += cost.flops
    head = Cost(0, 0.0) if head_on_cpu else files.config.head.cost(files.head)
    return (
        [*num_bytes[:-1], num_bytes[-1] + head.num_bytes],
        [*flops[:-1], flops[-1] + head.flops],
        gate_bytes,
    )


def cpu_stretches(files: ModelFiles, on_cpu: Sequence[bool]) -> tuple[list[float], list[float], list[float]]:
    """The same of what `dense_stretches` leaves out: bytes, operations of a token, and how often the residual stream
    is handed to the CPU and back, once for neighbours. The embedding's rows cost the handover alone."""
    num_bytes, flops, handovers = [0.0], [0.0], [0.0]
    was_on_cpu = False
    for (part, weights), here in zip(files.parts(), on_cpu, strict=True):
        if isinstance(part, ExpertBlock):
            for each in (num_bytes, flops, handovers):
                each.append(0.0)
            was_on_cpu = False
            continue
        handovers[-1] += here and not was_on_cpu
        if here and not isinstance(part, Embedding):
            cost = part.cost(weights)
            num_bytes[-1] += cost.num_bytes
            flops[-1] += cost.flops
        was_on_cpu = here
    return num_bytes, flops, handovers


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
