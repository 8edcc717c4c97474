"""Tiny random DeepSeek-V2 and V3 models in Hugging Face layout, as `testing` makes them of the other families."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.tiny_models.writing import TinyModel

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class TinyDeepseek(TinyModel):
    """Model to write. The defaults are a small DeepSeek-V3; every field is one corner of the configuration."""

    architecture: str = "DeepseekV3ForCausalLM"
    """Or "DeepseekV2ForCausalLM"."""
    q_lora_rank: int | None = 20
    """None: queries come from the hidden state in one product."""
    kv_lora_rank: int = 24
    qk_nope_head_dim: int = 10
    qk_rope_head_dim: int = 8
    v_head_dim: int = 12
    num_shared_experts: int = 1
    first_dense: int = 1
    """Number of first layers without experts."""
    num_groups: int = 1
    top_groups: int = 1
    routed_scaling_factor: float = 1.0
    rope_interleave: bool = True
    """V3 only; V2 always pairs neighbours."""
    num_mtp_layers: int = 0
    """Layers after the last that predict further tokens (V3's multi-token prediction)."""

    @property
    def num_gguf_layers(self) -> int:
        return self.num_layers + self.num_mtp_layers

    @property
    def gguf_architecture(self) -> str:
        return "deepseek2"

    @property
    def fits_gguf(self) -> bool:
        """GGUF files have neither biases of latent attention nor the other order of pairs."""
        return super().fits_gguf and not self.attention_bias and self.rope_interleave

    @property
    def is_v3(self) -> bool:
        return self.architecture != "DeepseekV2ForCausalLM"

    def is_moe_layer(self, layer: int) -> bool:
        return layer >= self.first_dense

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        config = super().config()
        for key in ("num_experts", "head_dim", "mlp_only_layers", "decoder_sparse_step"):
            config.pop(key, None)
        config |= {
            "num_key_value_heads": self.num_heads,
            "n_routed_experts": self.num_experts,
            "n_shared_experts": self.num_shared_experts,
            "first_k_dense_replace": self.first_dense,
            "moe_layer_freq": 1,
            "q_lora_rank": self.q_lora_rank,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_nope_head_dim": self.qk_nope_head_dim,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "v_head_dim": self.v_head_dim,
            "n_group": self.num_groups,
            "topk_group": self.top_groups,
            "routed_scaling_factor": self.routed_scaling_factor,
        }
        if self.is_v3:
            return config | {
                "model_type": "deepseek_v3",
                "scoring_func": "sigmoid",
                "topk_method": "noaux_tc",
                "rope_interleave": self.rope_interleave,
                "num_nextn_predict_layers": self.num_mtp_layers,
            }
        return config | {
            "model_type": "deepseek_v2",
            "scoring_func": "softmax",
            "topk_method": "greedy" if self.num_groups == 1 else "group_limited_greedy",
            "norm_topk_prob": False,
        }

    def weights(self) -> dict[str, F32]:
        """Every tensor by name, random but always the same for the same model."""
        rng = np.random.default_rng(self.seed)
        weights: dict[str, F32] = {}
        hidden = self.hidden_size

        def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
            weights[name] = rng.normal(0.0, gain / columns**0.5, (rows, columns)).astype(np.float32)

        def vector(name: str, size: int, mean: float) -> None:
            weights[name] = rng.normal(mean, 0.2, size).astype(np.float32)

        def feed_forward(prefix: str, inner: int) -> None:
            matrix(f"{prefix}.gate_proj.weight", inner, hidden, 1.5)
            matrix(f"{prefix}.up_proj.weight", inner, hidden, 1.5)
            matrix(f"{prefix}.down_proj.weight", hidden, inner, 1.5)

        def attention(prefix: str) -> None:
            queries = self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
            if self.q_lora_rank is None:
                matrix(f"{prefix}.q_proj.weight", queries, hidden, 1.5)
            else:
                matrix(f"{prefix}.q_a_proj.weight", self.q_lora_rank, hidden)
                vector(f"{prefix}.q_a_layernorm.weight", self.q_lora_rank, 1.0)
                matrix(f"{prefix}.q_b_proj.weight", queries, self.q_lora_rank, 1.5)
            compressed = self.kv_lora_rank + self.qk_rope_head_dim
            matrix(f"{prefix}.kv_a_proj_with_mqa.weight", compressed, hidden)
            vector(f"{prefix}.kv_a_layernorm.weight", self.kv_lora_rank, 1.0)
            expanded = self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
            matrix(f"{prefix}.kv_b_proj.weight", expanded, self.kv_lora_rank, 1.5)
            matrix(f"{prefix}.o_proj.weight", hidden, self.num_heads * self.v_head_dim, 1.5)
            if self.attention_bias:
                if self.q_lora_rank is not None:
                    vector(f"{prefix}.q_a_proj.bias", self.q_lora_rank, 0.0)
                vector(f"{prefix}.kv_a_proj_with_mqa.bias", compressed, 0.0)
                vector(f"{prefix}.o_proj.bias", hidden, 0.0)

        matrix("model.embed_tokens.weight", self.vocab_size, hidden, hidden**0.5)
        for layer in range(self.num_layers + self.num_mtp_layers):
            prefix = f"model.layers.{layer}"
            vector(f"{prefix}.input_layernorm.weight", hidden, 1.0)
            vector(f"{prefix}.post_attention_layernorm.weight", hidden, 1.0)
            attention(f"{prefix}.self_attn")
            if not self.is_moe_layer(layer):
                feed_forward(f"{prefix}.mlp", self.intermediate_size)
                continue
            matrix(f"{prefix}.mlp.gate.weight", self.num_experts, hidden, 2.0)
            if self.is_v3:
                vector(f"{prefix}.mlp.gate.e_score_correction_bias", self.num_experts, 0.0)
            for expert in range(self.num_experts):
                feed_forward(f"{prefix}.mlp.experts.{expert}", self.moe_intermediate_size)
            feed_forward(f"{prefix}.mlp.shared_experts", self.num_shared_experts * self.moe_intermediate_size)
            if layer >= self.num_layers:  # what such a layer has of its own
                matrix(f"{prefix}.eh_proj.weight", hidden, 2 * hidden)
                for norm in ("enorm", "hnorm", "shared_head.norm"):
                    vector(f"{prefix}.{norm}.weight", hidden, 1.0)
        vector("model.norm.weight", hidden, 1.0)
        if not self.tie_word_embeddings:
            matrix("lm_head.weight", self.vocab_size, hidden, 2.0)
        return weights

    def gguf_heads(self, split_kv: bool) -> tuple[int, int, int]:
        """Number of key/value heads, key length and value length: of one latent head, or as older files say."""
        if split_kv:
            return 1, self.kv_lora_rank + self.qk_rope_head_dim, self.kv_lora_rank
        return self.num_heads, self.qk_nope_head_dim + self.qk_rope_head_dim, self.v_head_dim

    def gguf_weights(self, found: dict[str, F32], *, split_kv: bool) -> dict[str, F32]:
        """kv_b as newer GGUF files hold it: keys' part transposed and values' part, by head; or as it is."""
        if not split_kv:
            return found
        split: dict[str, F32] = {}
        for name, values in found.items():
            if not name.endswith("attn_kv_b.weight"):
                split[name] = values
                continue
            by_head = values.reshape(self.num_heads, -1, self.kv_lora_rank)
            keys, rest = np.split(by_head, [self.qk_nope_head_dim], axis=1)
            split[name.replace("kv_b", "k_b")] = np.ascontiguousarray(keys.swapaxes(1, 2))
            split[name.replace("kv_b", "v_b")] = np.ascontiguousarray(rest)
        return split

    def add_gguf_metadata(self, writer: Any, package: Any, *, split_kv: bool) -> None:
        """Adds llama.cpp's metadata for DeepSeek-V2 and V3; without `split_kv`, that of older converters."""
        rope = self.qk_rope_head_dim
        if split_kv:
            writer.add_key_length_mla(self.qk_nope_head_dim + rope)
            writer.add_value_length_mla(self.v_head_dim)
        writer.add_vocab_size(self.vocab_size)
        if self.num_mtp_layers:
            writer.add_nextn_predict_layers(self.num_mtp_layers)
        writer.add_leading_dense_block_count(self.first_dense)
        if self.q_lora_rank is not None:
            writer.add_q_lora_rank(self.q_lora_rank)
        writer.add_kv_lora_rank(self.kv_lora_rank)
        writer.add_rope_dimension_count(rope)
        writer.add_expert_shared_count(self.num_shared_experts)
        writer.add_expert_weights_scale(self.routed_scaling_factor)
        if self.num_groups > 1:
            writer.add_expert_group_count(self.num_groups)
            writer.add_expert_group_used_count(self.top_groups)
        gating = package.ExpertGatingFuncType
        writer.add_expert_gating_func(gating.SIGMOID if self.is_v3 else gating.SOFTMAX)
        scaling = self.rope_scaling
        if scaling is not None:
            writer.add_rope_scaling_type(package.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(scaling["factor"])
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
            writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])


V3 = TinyDeepseek()
V2 = TinyDeepseek(architecture="DeepseekV2ForCausalLM")
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
CASES: dict[str, TinyDeepseek] = {
    "v3": V3,
    "v3-plain-queries": replace(V3, q_lora_rank=None),
    "v3-groups": replace(V3, num_experts=12, num_groups=4, top_groups=2, top_k=5, routed_scaling_factor=2.5),
    "v3-one-group-of-two": replace(V3, num_experts=6, num_groups=3, top_groups=1, top_k=2),
    "v3-raw-weights": replace(V3, norm_topk_prob=False, routed_scaling_factor=1.7),
    "v3-yarn": replace(V3, rope_scaling=YARN, rope_form="rope_scaling"),
    "v3-yarn-mscale": replace(V3, rope_scaling=YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}),
    "v3-yarn-without-mscale": replace(
        V3, rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    ),
    "v3-halves": replace(V3, rope_interleave=False, rope_scaling=YARN),
    "v3-bias": replace(V3, attention_bias=True),
    "v3-bias-plain-queries": replace(V3, attention_bias=True, q_lora_rank=None),
    "v3-no-dense": replace(V3, first_dense=0, num_layers=2),
    "v3-mostly-dense-tied": replace(V3, num_layers=4, first_dense=3, tie_word_embeddings=True),
    "v3-odd-sizes": replace(
        V3, num_heads=7, hidden_size=35, q_lora_rank=9, kv_lora_rank=33, qk_nope_head_dim=5, qk_rope_head_dim=2,
        v_head_dim=3, moe_intermediate_size=19, vocab_size=321, num_shards=2,
    ),
    "v3-values-wider-than-latents": replace(V3, kv_lora_rank=6, v_head_dim=20, num_heads=2),
    "v2": V2,
    "v2-lite": replace(V2, q_lora_rank=None, num_shared_experts=2, top_k=3, num_experts=9),
    "v2-groups": replace(
        V2, num_experts=12, num_groups=3, top_groups=2, top_k=4, routed_scaling_factor=16.0, num_shared_experts=3
    ),
    "v2-yarn": replace(V2, rope_scaling=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, q_lora_rank=None),
    "v2-everything": replace(
        V2, num_layers=4, num_heads=6, hidden_size=42, q_lora_rank=14, kv_lora_rank=18, qk_nope_head_dim=6,
        qk_rope_head_dim=10, v_head_dim=14, first_dense=2, attention_bias=True, num_experts=10, num_groups=5,
        top_groups=3, top_k=5, routed_scaling_factor=3.0, rope_scaling=YARN, tie_word_embeddings=True,
    ),
}  # fmt: skip
