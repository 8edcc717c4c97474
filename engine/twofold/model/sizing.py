"""How much memory a model takes, from its headers alone: what `twofold doctor` answers before anything is loaded.

It counts what Twofold itself will hold: dense weights, the expert store, KV cache pages. It does not know the machine;
`advice` is told how much memory there is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from twofold.model.config import ModelConfig
from twofold.model.model_files import ModelFiles, open_model_files
from twofold.model.weight_plan import TensorSpec

WORKING_BYTES: Final = 512 * 1024 * 1024
"""Interpreter, libraries and activations: an estimate on the safe side, not a measurement."""


@dataclass(frozen=True)
class ModelSize:
    """Bytes in memory once loaded. float16 counts as the float32 it is converted to."""

    config: ModelConfig
    dense_bytes: int
    """Embedding, attention, routers, dense layers, head."""
    expert_bytes: int
    """All experts of all layers: the host's expert store."""
    kv_bytes_per_token: int
    """Keys and values of one token over all layers, in `kv_dtype_bytes` each."""
    file_bytes: int
    """Of the weights on disk."""

    @property
    def num_experts_total(self) -> int:
        return len(self.config.moe_layers) * self.config.num_experts

    @property
    def one_expert_bytes(self) -> int:
        """One expert of one layer, which is what a slot holds and an upload moves."""
        return self.expert_bytes // self.num_experts_total

    def host_bytes(self, num_kv_tokens: int) -> int:
        """Host memory to run with a KV cache for `num_kv_tokens` tokens over all requests."""
        return self.dense_bytes + self.expert_bytes + self.kv_bytes_per_token * num_kv_tokens + WORKING_BYTES

    def device_bytes(self, num_kv_tokens: int, num_slots: int) -> int:
        """Device memory for dense weights, the KV cache and `num_slots` expert slots over all layers."""
        return self.dense_bytes + self.kv_bytes_per_token * num_kv_tokens + self.one_expert_bytes * num_slots


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
    files = open_model_files(directory)
    config = files.config
    return ModelSize(
        config=config,
        dense_bytes=sum(_loaded_bytes(files, spec) for spec in files.plan.dense_tensors()),
        expert_bytes=sum(_loaded_bytes(files, spec) for spec in files.plan.expert_tensors()),
        kv_bytes_per_token=2 * config.num_layers * config.num_kv_heads * config.head_dim * kv_dtype_bytes,
        file_bytes=sum(files.tensors.entry(name).num_bytes for name in files.tensors),
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


def _loaded_bytes(files: ModelFiles, spec: TensorSpec) -> int:
    entry = files.tensors.entry(spec.name)
    return 2 * entry.num_bytes if entry.dtype == "F16" else entry.num_bytes


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
