"""Tiny random Granite models with experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.tiny_models.writing import F32, RandomWeights, TinyModel, without_qwens


@dataclass(frozen=True)
class TinyGranite(TinyModel):
    """Model to write. The defaults are a small Granite-3.1-3B-A800M; layout "fused" has transformers 5's names."""

    architecture: str = "GraniteMoeForCausalLM"
    """With shared experts "GraniteMoeSharedForCausalLM"."""
    shared_intermediate_size: int = 0
    embedding_multiplier: float = 12.0
    residual_multiplier: float = 0.22
    attention_multiplier: float = 0.125
    logits_scaling: float = 3.0

    def is_moe_layer(self, layer: int) -> bool:
        return True

    @property
    def norm_sizes(self) -> dict[str, int]:
        return {}

    def extra_weights(self, layer: int, prefix: str, random: RandomWeights) -> None:
        """See `TinyModel.extra_weights`."""
        if self.shared_intermediate_size:
            shared = f"{prefix}.mlp.shared_experts"
            random.feed_forward(shared, self.shared_intermediate_size, self.hidden_size, 1.5)

    def weights(self) -> dict[str, F32]:
        """Every tensor by name."""
        published = self.expert_layout == "separate"
        names = {
            "mlp.gate.weight": f"router{'.layer' if published else ''}.weight",
            "mlp.experts.gate_up_proj": "input_linear.weight" if published else "experts.gate_up_proj",
            "mlp.experts.down_proj": "output_linear.weight" if published else "experts.down_proj",
        }
        found: dict[str, F32] = {}
        for name, values in TinyModel.weights(replace(self, expert_layout="fused")).items():
            layer, _, part = name.partition(".mlp.")
            shared = f"{layer}.shared_mlp"
            if f"mlp.{part}" in names:
                found[f"{layer}.block_sparse_moe.{names[f'mlp.{part}']}"] = values
            elif part == "shared_experts.gate_proj.weight":
                found[f"{shared}.input_linear.weight"] = values
            elif part == "shared_experts.up_proj.weight":
                gate = found[f"{shared}.input_linear.weight"]
                found[f"{shared}.input_linear.weight"] = np.concatenate([gate, values])
            elif part == "shared_experts.down_proj.weight":
                found[f"{shared}.output_linear.weight"] = values
            else:
                found[name] = values
        return found

    def gguf_source(self) -> dict[str, F32]:
        """See `TinyModel.gguf_source`."""
        return super().weights()

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        config = without_qwens(super().config(), "num_experts", "norm_topk_prob")
        shared = (
            {"shared_intermediate_size": self.shared_intermediate_size}
            if self.shared_intermediate_size
            else {}
        )
        return config | shared | {
            "model_type": "granitemoeshared" if shared else "granitemoe",
            "intermediate_size": config.pop("moe_intermediate_size"),
            "num_local_experts": self.num_experts,
            "embedding_multiplier": self.embedding_multiplier,
            "residual_multiplier": self.residual_multiplier,
            "attention_multiplier": self.attention_multiplier,
            "logits_scaling": self.logits_scaling,
        }  # fmt: skip

    @property
    def gguf_architecture(self) -> str:
        return "granitemoe"

    @property
    def gguf_feed_forward_length(self) -> int:
        return self.moe_intermediate_size

    @property
    def gguf_pairs_neighbours(self) -> bool:
        return True

    def add_gguf_metadata(self, writer: Any, package: Any, *, split_kv: bool) -> None:
        """See `TinyModel.add_gguf_metadata`."""
        writer.add_attention_scale(self.attention_multiplier)
        writer.add_embedding_scale(self.embedding_multiplier)
        writer.add_residual_scale(self.residual_multiplier)
        writer.add_logit_scale(self.logits_scaling)
        if self.shared_intermediate_size:
            writer.add_expert_shared_feed_forward_length(self.shared_intermediate_size)
