"""Memory that a model needs on devices: of the whole, of each decoder layer, and of each device's part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from twofold import _core
from twofold._core.device import factors_bytes
from twofold.adapters.reading import reserved_bytes
from twofold.api.adapter_config import AdapterConfig
from twofold.api.config import EngineConfig
from twofold.api.picture_config import PictureConfig
from twofold.models import picture_encoder
from twofold.models.sizing import ModelSize

_SLACK_BYTES: Final = 16 * 2**20
"""Alignment of an adapter's arrays."""
_DENSE_ENTRIES: Final = 256
"""Entries of a decoder layer's dense matrices in the adapters' tables: heads where latent attention has them."""


@dataclass(frozen=True)
class LayerNeeds:
    """Memory that a decoder layer needs on its device, beside experts."""

    dense_bytes: int
    page_bytes_per_token: int
    record_bytes: int
    has_experts: bool
    state_layer: int
    """The layer whose keys and values it reads: itself, or an earlier one on the same device."""


@dataclass(frozen=True)
class DeviceNeeds:
    """Memory that a model needs on the device."""

    dense_bytes: int
    kv_bytes_per_token: int
    one_expert_bytes: int
    """The largest expert's size."""
    num_layers: int
    """MoE layers."""
    num_experts: int
    """Experts per layer."""
    top_k: int
    max_context: int
    activation_bytes_per_token: int = 0
    """Peak activation memory of one layer in a prefill chunk, per token."""
    adapted_bytes_per_token: int = 0
    """Further memory of such a layer where tokens may use adapters."""
    sampled_row_bytes: int = 0
    """Logits of one token plus the sampler's intermediates."""
    record_bytes: int = 0
    """Fixed-size state of one sequence over all layers (recurrent layers); 0: the model has none."""
    layers: tuple[LayerNeeds, ...] = ()
    """The part of each decoder layer in `dense_bytes`, `kv_bytes_per_token` and `record_bytes`."""
    rotation_bytes: int = 0
    """The rotation table, in `dense_bytes`."""
    adapter_elements: int = 0
    """As in `ModelSize`."""
    encoder_elements: int = 0
    """As in `ModelSize`."""

    def picture_bytes(self, config: PictureConfig, device: int) -> int:
        """Memory reserved for the picture encoder on a device."""
        return picture_encoder.encoder_bytes(self.encoder_elements, config, device)

    def adapter_bytes(self, config: EngineConfig) -> int:
        """Memory reserved for LoRA adapters on each device: `max_adapter_bytes`, and what a step needs."""
        if not config.loads_adapters:
            return 0
        return self.max_adapter_bytes(config) + config.max_num_batched_tokens * self.adapted_bytes_per_token

    def max_adapter_bytes(self, config: AdapterConfig) -> int:
        """Memory of adapters and the tables that kernels find them through: those to be loaded, or `max_loras` of the
        largest rank that change the dense matrices, if these are more and may be loaded while the server runs."""
        of_rank = 2 * self.adapter_elements * config.max_loras if config.lora_dir is not None else 0
        entries = 3 * self.num_layers * self.num_experts + _DENSE_ENTRIES * len(self.layers)
        tables = factors_bytes() * config.max_cpu_loras * entries
        return (
            max(reserved_bytes(config, as_f32=True), of_rank * config.max_lora_rank) + tables + _SLACK_BYTES
        )

    @property
    def slot_bytes(self) -> int:
        return _core.slot_stride(self.one_expert_bytes)

    def shares(self, num_devices: int, homes: Sequence[int]) -> list[DeviceShare]:
        """The dense part of each device. homes: the device of each decoder layer; empty: the first one."""
        others = []
        for device in range(1, num_devices):
            own = [layer for layer, home in zip(self.layers, homes, strict=False) if home == device]
            others.append(
                DeviceShare(
                    sum(layer.dense_bytes for layer in own) + (self.rotation_bytes if own else 0),
                    sum(layer.page_bytes_per_token for layer in own),
                    sum(layer.record_bytes for layer in own),
                )
            )
        moved = [sum(column) for column in zip(*others, strict=True)] or [0, 0, 0]
        copied = self.rotation_bytes * sum(other.dense_bytes > 0 for other in others)
        first = DeviceShare(
            self.dense_bytes - moved[0] + copied,
            self.kv_bytes_per_token - moved[1],
            self.record_bytes - moved[2],
        )
        return [first, *others]


class DeviceShare(NamedTuple):
    """A device's part of a model's dense weights and state."""

    dense_bytes: int
    kv_bytes_per_token: int
    record_bytes: int
    """One sequence's."""


def needs_of(size: ModelSize) -> DeviceNeeds:
    """Device needs from `measure_model`'s result, with the device's KV cache type."""
    model = size.config
    # Per pair: outputs and gate and up products in f32, input of down in bf16. Per token: residual stream, its norm,
    # queries, keys and values, router scores.
    pair_bytes = 4 * model.hidden_size + 10 * max(model.routed.intermediate_sizes)
    elements = max(block.device_elements_per_token for layer in model.layers for block in layer)
    page_elements = sum(block.device_page_elements for layer in model.layers for block in layer)
    return DeviceNeeds(
        dense_bytes=size.device_dense_bytes,
        kv_bytes_per_token=2 * page_elements,
        one_expert_bytes=max(1, size.one_expert_bytes),  # 0 in a model without experts
        num_layers=len(size.config.moe_layers),
        num_experts=size.config.routed.num_experts,
        top_k=size.config.routed.top_k,
        max_context=size.config.max_context,
        activation_bytes_per_token=model.routed.top_k * pair_bytes + 10 * model.hidden_size + 8 * elements,
        adapted_bytes_per_token=8 * model.routed.top_k * model.routed.intermediate_size,
        sampled_row_bytes=40 * model.vocab_size,
        record_bytes=sum(block.device_record_bytes for layer in model.layers for block in layer),
        layers=tuple(
            LayerNeeds(
                size.device_layer_bytes[number],
                2 * sum(block.device_page_elements for block in layer),
                sum(block.device_record_bytes for block in layer),
                number in model.moe_layers,
                state_layer,
            )
            for number, (layer, state_layer) in enumerate(zip(model.layers, model.state_layers, strict=True))
        ),
        rotation_bytes=size.rotation_bytes,
        adapter_elements=size.adapter_elements,
        encoder_elements=size.encoder_elements,
    )
