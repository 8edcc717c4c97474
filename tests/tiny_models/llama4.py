"""Tiny random Llama 4 models."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.tiny_models.writing import F32, RandomWeights, TinyModel, without_qwens


@dataclass(frozen=True)
class TinyLlama4(TinyModel):
    """Model to write, by default a small Scout; `nested`: as the text part of a vision model."""

    architecture: str = "Llama4ForCausalLM"
    num_layers: int = 4
    top_k: int = 1
    use_qk_norm: bool = True
    attention_chunk_size: int = 8192
    floor_scale: int = 8192
    attn_scale: float = 0.1
    no_rope_interval: int = 4
    moe_interval: int = 1
    nested: bool = False

    def is_moe_layer(self, layer: int) -> bool:
        return (layer + 1) % self.moe_interval == 0

    @property
    def norm_sizes(self) -> dict[str, int]:
        return {}

    @property
    def twin(self) -> TinyModel:
        """The text part alone."""
        return replace(self, nested=False)

    @property
    def fits_gguf(self) -> bool:
        said = self.attention_chunk_size, self.floor_scale, self.attn_scale, self.no_rope_interval
        return super().fits_gguf and self.use_qk_norm and said == (8192, 8192, 0.1, 4)

    def extra_weights(self, layer: int, prefix: str, random: RandomWeights) -> None:
        """See `TinyModel.extra_weights`."""
        if self.is_moe_layer(layer):
            random.feed_forward(
                f"{prefix}.mlp.shared_expert", self.moe_intermediate_size, self.hidden_size, 1.5
            )

    def weights(self) -> dict[str, F32]:
        """Every tensor by name: fused experts, the other way round."""
        names = {"mlp": "feed_forward", "gate": "router"}
        found: dict[str, F32] = {}
        for name, values in TinyModel.weights(replace(self, expert_layout="fused")).items():
            turned = np.ascontiguousarray(values.swapaxes(1, 2)) if values.ndim == 3 else values
            found[".".join(names.get(part, part) for part in name.split("."))] = turned
        if not self.nested:
            return found
        seeing = {"vision_model.class_embedding": found["model.norm.weight"]}
        return {f"language_model.{name}": values for name, values in found.items()} | seeing

    def gguf_source(self) -> dict[str, F32]:
        """See `TinyModel.gguf_source`; with the factors of Llama 3's scaling."""
        factors = (
            {} if self.rope_scaling is None else {"rope_freqs.weight": self._factors(dict(self.rope_scaling))}
        )
        return super().weights() | factors

    def _factors(self, rope: dict[str, Any]) -> F32:
        dims = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        turns = rope["original_max_position_embeddings"] / (2 * math.pi * self.rope_theta**dims)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = np.clip((turns - low) / (high - low), 0, 1) if high > low else turns > low
        factors: F32 = (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)
        return factors

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        config = without_qwens(super().config(), "num_experts", "norm_topk_prob")
        config |= {
            "model_type": "llama4_text",
            "intermediate_size": config.pop("moe_intermediate_size"),
            "intermediate_size_mlp": self.intermediate_size,
            "num_local_experts": self.num_experts,
            "interleave_moe_layer_step": self.moe_interval,
            "no_rope_layer_interval": self.no_rope_interval,
            "use_qk_norm": self.use_qk_norm,
            "attention_chunk_size": self.attention_chunk_size,
            "attn_temperature_tuning": True,
            "floor_scale": self.floor_scale,
            "attn_scale": self.attn_scale,
        }
        if not self.nested:
            return config
        outer = {key: config.pop(key) for key in ("tie_word_embeddings", "eos_token_id", "dtype")}
        return outer | {
            "architectures": ["Llama4ForConditionalGeneration"],
            "model_type": "llama4",
            "text_config": config,
        }

    @property
    def gguf_architecture(self) -> str:
        return "llama4"

    @property
    def gguf_names(self) -> dict[str, str]:
        """See `TinyModel.gguf_names`."""
        return {"rope_freqs": "rope_freqs"}

    def add_gguf_metadata(self, writer: Any, package: Any, *, split_kv: bool) -> None:
        """See `TinyModel.add_gguf_metadata`."""
        writer.add_rope_dimension_count(self.head_dim)
        writer.add_interleave_moe_layer_step(self.moe_interval)
        writer.add_vocab_size(self.vocab_size)
