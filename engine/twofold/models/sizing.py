"""Memory requirements of a model, from its headers alone; `twofold doctor` prints them before loading.

They cover what Twofold itself holds: dense weights, the expert store, KV cache pages. The machine's memory is not read
here; `advice` receives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from pathlib import Path
from typing import Final

from twofold.api.types import TraceSizes
from twofold.blocks.block import Block, ExpertBlock
from twofold.blocks.head import Embedding
from twofold.models.config import ModelConfig
from twofold.models.model_files import ModelFiles, OpenPart, open_model_files
from twofold.models.picture_encoder import encoder_elements

WORKING_BYTES: Final = 512 * 1024 * 1024
"""Interpreter, libraries and activations, bytes: a conservative estimate, not a measurement."""


@dataclass(frozen=True)
class ModelSize:
    """Bytes in memory after loading, with matrices packed for the kernels."""

    config: ModelConfig
    dense_bytes: int
    """Embedding, attention, routers, dense layers, head."""
    expert_bytes: int
    """All experts of all layers: the host's expert store."""
    one_expert_bytes: int
    """The largest expert: the size of a slot and of an upload; 0 in a model without experts."""
    kv_bytes_per_token: int
    """KV cache bytes per token, over all layers."""
    bytes_per_sequence: int
    """Record bytes per sequence, independent of its length."""
    file_bytes: int
    """Weights on disk."""
    device_dense_bytes: int
    """Dense weights on a device, where matrices are bf16, and its rotation table."""
    device_layer_bytes: tuple[int, ...]
    """The part of each layer."""
    rotation_bytes: int
    """The rotation table, which every device with layers has."""
    adapter_elements: int = 0
    """Elements of an adapter of rank 1 that changes every matrix of the layers but the experts'."""
    encoder_elements: int = 0
    """Weights of the picture encoder; 0: there is none."""
    table_bytes: int = 0
    """Tables whose rows are read from the files when they are needed; `dense_bytes` has the most that are cached."""

    @property
    def num_experts_total(self) -> int:
        return len(self.config.moe_layers) * self.config.routed.num_experts

    def host_bytes(self, num_kv_tokens: int) -> int:
        """Host memory to run with a KV cache for `num_kv_tokens` tokens over all requests, and one record."""
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
    """Whether a model fits, and if not, why and what to change."""

    fits: bool
    needed_bytes: int
    available_bytes: int
    max_kv_tokens: int
    """KV cache tokens that fit; 0 if the weights alone do not fit."""
    advice: str
    """Explanation, one line."""


def measure_model(directory: str | Path, *, kv_cache_dtype: str = "auto") -> ModelSize:
    """The size of a model directory; reads JSON and headers only. Raises ModelLoadError as loading would."""
    return measure_files(open_model_files(directory), kv_cache_dtype=kv_cache_dtype)


def measure_files(files: ModelFiles, *, kv_cache_dtype: str = "auto") -> ModelSize:
    """The size of opened files. kv_cache_dtype: as --kv-cache-dtype takes it."""
    config = files.config
    inputs = config.embedding.layer_inputs
    dense = [(part, weights) for part, weights in files.parts() if not isinstance(part, ExpertBlock)]
    experts = [config.routed.bytes_by_expert(formats) for formats in files.expert_formats()]
    # The device has cosines and sines of the whole context, in float32.
    rotation = 4 * config.max_context * sum(dim for _, dim in config.rotations)
    of_layer = [0] * len(config.layers)
    adapter_elements = 0
    for part, weights in dense:
        if isinstance(part, Block):
            of_layer[part.layer] += part.device_bytes(weights)
            matrices = [spec.shape for spec in weights.specs.values() if spec.role == "matrix"]
            adapter_elements += sum(map(sum, matrices))
    return ModelSize(
        config=config,
        dense_bytes=sum(part.host_bytes(weights) for part, weights in dense),
        expert_bytes=sum(map(sum, experts)),
        one_expert_bytes=max(map(max, experts), default=0),
        kv_bytes_per_token=config.cache_bytes_per_token(config.cache_dtype(kv_cache_dtype)),
        bytes_per_sequence=sum(config.record_bytes),
        file_bytes=files.file_bytes,
        device_dense_bytes=sum(part.device_bytes(weights) for part, weights in dense) + rotation,
        device_layer_bytes=tuple(of_layer),
        rotation_bytes=rotation,
        adapter_elements=adapter_elements,
        encoder_elements=encoder_elements(config, files.tensors),
        table_bytes=0 if inputs is None else inputs.table_bytes(files.embedding),
    )


def check_host_memory(size: ModelSize, available_bytes: int, num_kv_tokens: int) -> Fit:
    """Whether the model and a KV cache of `num_kv_tokens` tokens fit into `available_bytes` of host memory."""
    needed = size.host_bytes(num_kv_tokens)
    room = available_bytes - size.host_bytes(0)
    max_kv_tokens = max(0, room // size.kv_bytes_per_token)
    if needed <= available_bytes:
        advice = f"fits: needs {gib(needed)} of {gib(available_bytes)}"
    elif max_kv_tokens >= 1:
        advice = (
            f"the weights fit, a KV cache for {num_kv_tokens} tokens does not: needs {gib(needed)} of "
            f"{gib(available_bytes)}; set --max-total-tokens to {max_kv_tokens} or less"
        )
    else:
        advice = (
            f"does not fit: the weights alone need {gib(size.host_bytes(0))}, there are {gib(available_bytes)}; "
            f"close other programs, add memory, or choose a model below {gib(max(0, available_bytes - WORKING_BYTES))}"
        )
    return Fit(needed <= available_bytes, needed, available_bytes, max_kv_tokens, advice)


def describe_tables(size: ModelSize) -> str:
    """Which part of the weights stays on disk, for messages; "" if none does."""
    inputs = size.config.embedding.layer_inputs
    if inputs is None:
        return ""
    cached = min(inputs.cache_bytes, size.table_bytes)
    return (
        f"rows of tables of {gib(size.table_bytes)} are read from the files, at most {gib(cached)} are cached"
    )


def dense_stretches(files: ModelFiles, on_cpu: Sequence[bool] = ()) -> tuple[list[float], list[float], float]:
    """Cost of a token excluding experts, between consecutive layers with experts (before the first, ..., after the
    last): bytes read and floating-point operations; and the bytes of one router's gate.

    on_cpu: for each of `ModelFiles.parts`, whether it is excluded because the CPU computes it.
    """
    stretches = [
        [(part.cost(weights), here) for (part, weights), here in stretch if not isinstance(part, Embedding)]
        for stretch in _stretches(files, on_cpu)
    ]
    gates = [cost.mtp_bytes for stretch in stretches for cost, _ in stretch if cost.mtp_bytes]
    counted = [[cost for cost, here in stretch if not here] for stretch in stretches]
    return (
        [sum((cost.num_bytes for cost in stretch), 0.0) for stretch in counted],
        [sum((cost.flops for cost in stretch), 0.0) for stretch in counted],
        gates[-1] if gates else 0.0,
    )


def trace_sizes(files: ModelFiles) -> TraceSizes:
    """Sizes of a model for recorded traces, means over its MoE layers. Everything after the last one counts as the
    head."""
    routed, formats = files.config.routed, files.expert_formats()
    total_bytes = sum(sum(routed.bytes_by_expert(each)) for each in formats)
    sizes = routed.intermediate_sizes
    elements = (
        3 * routed.hidden_size * sum(map(float, sizes)) / len(sizes) * len(formats) * routed.num_experts
    )
    bits = 8 * total_bytes / max(1.0, elements)
    *before, last = dense_stretches(files)[0]
    dense_bytes = sum(before) / max(1, len(before))
    return TraceSizes(routed.hidden_size, routed.intermediate_size, bits, dense_bytes, head_bytes=last)


def cpu_stretches(files: ModelFiles, on_cpu: Sequence[bool]) -> tuple[list[float], list[float], list[float]]:
    """Costs that `dense_stretches` excludes: bytes, operations of a token, and how often the residual stream goes to
    the CPU and back, once for adjacent parts. The embedding's rows cost the transfer alone."""
    num_bytes, flops, handovers = [], [], []
    for stretch in _stretches(files, on_cpu):
        costs = [
            part.cost(weights)
            for (part, weights), here in stretch
            if here and not isinstance(part, Embedding)
        ]
        places = [False, *(here for _, here in stretch)]
        num_bytes.append(sum((cost.num_bytes for cost in costs), 0.0))
        flops.append(sum((cost.flops for cost in costs), 0.0))
        handovers.append(float(sum(here and not before for before, here in pairwise(places))))
    return num_bytes, flops, handovers


def _stretches(files: ModelFiles, on_cpu: Sequence[bool]) -> list[list[tuple[OpenPart, bool]]]:
    """Parts without experts, split at the layers with experts, each with its value of `on_cpu` (empty: False)."""
    config, found = files.config, list[list[tuple[OpenPart, bool]]]([[]])
    # An MTP layer without experts would count as part of every step's head.
    uncounted = set(range(config.num_target_layers, config.num_layers)) - set(config.moe_layers)
    for opened, here in zip(files.parts(), on_cpu or repeat(False), strict=False):
        if isinstance(opened[0], Block) and opened[0].layer in uncounted:
            continue
        if isinstance(opened[0], ExpertBlock):
            found.append([])
        else:
            found[-1].append((opened, here))
    return found


def gib(num_bytes: float) -> str:
    """The bytes in GiB, as in "1.50 GiB"."""
    return f"{num_bytes / 2**30:.2f} GiB"
