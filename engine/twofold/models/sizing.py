"""How much memory a model takes, from its headers alone: what `twofold doctor` answers before anything is loaded.

It counts what Twofold itself will hold: dense weights, the expert store, KV cache pages. It does not know the machine;
`advice` is told how much memory there is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from twofold.blocks.weight_plan import MoePlan, TensorSpec
from twofold.models.config import ModelConfig
from twofold.models.model_files import ModelFiles, open_model_files
from twofold.weights.weight_format import packed_bytes

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
    """Keys and values of one token over all layers, in `kv_dtype_bytes` each."""
    file_bytes: int
    """Of the weights on disk."""
    device_dense_bytes: int
    """Of the dense weights on a device, where matrices are bf16, and of its rotation table."""

    @property
    def num_experts_total(self) -> int:
        return len(self.config.moe_layers) * self.config.num_experts

    def host_bytes(self, num_kv_tokens: int) -> int:
        """Host memory to run with a KV cache for `num_kv_tokens` tokens over all requests."""
        return self.dense_bytes + self.expert_bytes + self.kv_bytes_per_token * num_kv_tokens + WORKING_BYTES

    def device_bytes(self, num_kv_tokens: int, num_slots: int) -> int:
        """Device memory for dense weights, the KV cache and `num_slots` expert slots over all layers."""
        return (
            self.device_dense_bytes
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


def measure_model(directory: str | Path, *, kv_dtype_bytes: int = 4) -> ModelSize:
    """The size of a model directory; reads JSON and headers only. Raises ModelLoadError as loading would."""
    return measure_files(open_model_files(directory), kv_dtype_bytes=kv_dtype_bytes)


def measure_files(files: ModelFiles, *, kv_dtype_bytes: int = 4) -> ModelSize:
    """The same of files that are open already."""
    config = files.config
    inner, hidden = config.moe_intermediate_size, config.hidden_size
    experts = [
        packed_bytes(gate, inner, hidden)
        + packed_bytes(up, inner, hidden)
        + packed_bytes(down, hidden, inner)
        for gate, up, down in files.expert_formats()
    ]
    return ModelSize(
        config=config,
        dense_bytes=_dense_bytes(files),
        expert_bytes=config.num_experts * sum(experts),
        one_expert_bytes=max(experts),
        kv_bytes_per_token=2 * config.num_layers * config.num_kv_heads * config.head_dim * kv_dtype_bytes,
        file_bytes=sum(files.tensors.entry(name).num_bytes for name in files.tensors),
        device_dense_bytes=_device_dense_bytes(files),
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


def dense_stretches(files: ModelFiles) -> tuple[list[float], list[float], float]:
    """What a token costs beside its experts, between one layer with experts and the next (before the first, ..., after
    the last): bytes read, floating-point operations; and the bytes of one router's gate.
    """
    config, plan = files.config, files.plan
    num_bytes, flops = [0.0], [0.0]
    gate_bytes = 0

    def add(spec: TensorSpec, spec_bytes: int) -> None:
        num_bytes[-1] += spec_bytes
        flops[-1] += 2.0 * math.prod(spec.shape) if len(spec.shape) > 1 else 0.0

    for layer in plan.layers:
        ffn = layer.feed_forward
        for spec in layer.dense_tensors():
            if isinstance(ffn, MoePlan) and spec is ffn.router:
                gate_bytes = _plain_bytes(files, spec)
                add(spec, gate_bytes)
            else:
                add(spec, _packed_bytes(files, spec))
        if isinstance(ffn, MoePlan):
            num_bytes.append(0.0)
            flops.append(0.0)
    head = plan.lm_head or TensorSpec(plan.embedding.name, (config.vocab_size, config.hidden_size))
    add(head, _packed_bytes(files, head))
    return num_bytes, flops, float(gate_bytes)


def _dense_bytes(files: ModelFiles) -> int:
    """The stretches' weights, and an embedding of its own: its rows are read from the mapped file."""
    plan = files.plan
    embedding = 0 if plan.lm_head is None else files.tensors.entry(plan.embedding.name).num_bytes
    return embedding + round(sum(dense_stretches(files)[0])) + _packed_bytes(files, plan.final_norm)


def _device_dense_bytes(files: ModelFiles) -> int:
    """As `DeviceModel` holds them: bf16 matrices, f32 routers and vectors, cosines and sines of the whole context."""
    plan, config = files.plan, files.config
    total = sum(2 * math.prod(spec.shape) for spec in (plan.embedding, plan.lm_head) if spec is not None)
    for layer in plan.layers:
        ffn = layer.feed_forward
        exact = ffn.router if isinstance(ffn, MoePlan) else None
        for spec in layer.dense_tensors():
            total += (4 if spec is exact or len(spec.shape) == 1 else 2) * math.prod(spec.shape)
    return total + 4 * config.hidden_size + 4 * config.max_context * config.head_dim


def _packed_bytes(files: ModelFiles, spec: TensorSpec) -> int:
    """Panels of a matrix or a stack of them; a vector is float32."""
    if len(spec.shape) == 1:
        return 4 * spec.shape[0]
    *stacked, rows, columns = spec.shape
    format = files.tensors.check(spec.name, spec.shape)
    return math.prod(stacked) * packed_bytes(format, rows, columns)


def _plain_bytes(files: ModelFiles, spec: TensorSpec) -> int:
    """A router's gate: bfloat16 as it is, anything else as float32."""
    format = files.tensors.check(spec.name, spec.shape)
    return math.prod(spec.shape) * (2 if format == "bf16" else 4)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
