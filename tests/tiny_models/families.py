"""Tiny random models of further families, as `testing` makes them of Qwen3-MoE and Mixtral."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.tiny_models.deepseek import TinyDeepseek
from tests.tiny_models.writing import F32, RandomWeights, TinyModel, without_qwens


def _add_prediction(prefix: str, hidden: int, random: RandomWeights) -> None:
    random.matrix(f"{prefix}.eh_proj.weight", hidden, 2 * hidden)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        random.vector(f"{prefix}.{norm}.weight", hidden, 1.0)


@dataclass(frozen=True)
class TinyGlm4Moe(TinyModel):
    """Model to write. The defaults are a small GLM-4.5-Air; every field is one corner of the configuration."""

    architecture: str = "Glm4MoeForCausalLM"
    attention_bias: bool = True
    """Biases of q, k and v."""
    use_qk_norm: bool = False
    partial_rotary_factor: float = 0.5
    num_shared_experts: int = 1
    first_dense: int = 1
    """Number of first layers without experts."""
    num_groups: int = 1
    top_groups: int = 1
    routed_scaling_factor: float = 1.0
    num_mtp_layers: int = 0
    """Layers after the last that predict further tokens."""

    def is_moe_layer(self, layer: int) -> bool:
        return layer >= self.first_dense

    @property
    def biased(self) -> str:
        return "qkv" if self.attention_bias else ""

    @property
    def norm_sizes(self) -> dict[str, int]:
        return dict.fromkeys("qk", self.head_dim) if self.use_qk_norm else {}

    @property
    def num_written_layers(self) -> int:
        return self.num_layers + self.num_mtp_layers

    @property
    def num_gguf_layers(self) -> int:
        return self.num_written_layers

    def extra_weights(self, layer: int, prefix: str, random: RandomWeights) -> None:
        """See `TinyModel.extra_weights`."""
        hidden = self.hidden_size
        if self.is_moe_layer(layer):
            random.vector(f"{prefix}.mlp.gate.e_score_correction_bias", self.num_experts, 0.0)
            inner = self.num_shared_experts * self.moe_intermediate_size
            random.feed_forward(f"{prefix}.mlp.shared_experts", inner, hidden, 1.5)
        if layer >= self.num_layers:
            _add_prediction(prefix, hidden, random)

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        config = without_qwens(super().config(), "num_experts")
        return config | {
            "model_type": "glm4_moe",
            "n_routed_experts": self.num_experts,
            "n_shared_experts": self.num_shared_experts,
            "first_k_dense_replace": self.first_dense,
            "use_qk_norm": self.use_qk_norm,
            "partial_rotary_factor": self.partial_rotary_factor,
            "n_group": self.num_groups,
            "topk_group": self.top_groups,
            "routed_scaling_factor": self.routed_scaling_factor,
            "num_nextn_predict_layers": self.num_mtp_layers,
        }

    @property
    def gguf_architecture(self) -> str:
        return "glm4moe"

    @property
    def gguf_names(self) -> dict[str, str]:
        """See `TinyModel.gguf_names`."""
        return {"post_attention_layernorm": "post_attention_norm"}

    def add_gguf_metadata(self, writer: Any, package: Any, *, split_kv: bool) -> None:
        """See `TinyModel.add_gguf_metadata`."""
        writer.add_rope_dimension_count(int(self.head_dim * self.partial_rotary_factor))
        writer.add_leading_dense_block_count(self.first_dense)
        writer.add_expert_shared_count(self.num_shared_experts)
        writer.add_expert_weights_scale(self.routed_scaling_factor)
        writer.add_expert_gating_func(package.ExpertGatingFuncType.SIGMOID)
        if self.num_groups > 1:
            writer.add_expert_group_count(self.num_groups)
            writer.add_expert_group_used_count(self.top_groups)
        if self.num_mtp_layers:
            writer.add_nextn_predict_layers(self.num_mtp_layers)


@dataclass(frozen=True)
class TinyPredictingQwen3Moe(TinyModel):
    """A small Qwen3-MoE with a prediction layer, as the bundled model has one."""

    num_mtp_layers: int = 1

    @property
    def num_written_layers(self) -> int:
        return self.num_layers + self.num_mtp_layers

    @property
    def num_gguf_layers(self) -> int:
        return self.num_written_layers

    def extra_weights(self, layer: int, prefix: str, random: RandomWeights) -> None:
        """See `TinyModel.extra_weights`."""
        if layer >= self.num_layers:
            _add_prediction(prefix, self.hidden_size, random)

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        return super().config() | {"num_nextn_predict_layers": self.num_mtp_layers}

    def add_gguf_metadata(self, writer: Any, package: Any, *, split_kv: bool) -> None:
        """See `TinyModel.add_gguf_metadata`."""
        if self.num_mtp_layers:
            writer.add_nextn_predict_layers(self.num_mtp_layers)


@dataclass(frozen=True)
class TinyGlm4MoeLite(TinyDeepseek):
    """A small GLM-4.7-Flash."""

    architecture: str = "Glm4MoeLiteForCausalLM"

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        config = super().config()
        for key in ("first_k_dense_replace", "moe_layer_freq", "scoring_func"):
            del config[key]
        kinds = ["sparse" if self.is_moe_layer(layer) else "dense" for layer in range(self.num_layers)]
        return config | {"model_type": "glm4_moe_lite", "mlp_layer_types": kinds}


@dataclass(frozen=True)
class TinyKimi(TinyDeepseek):
    """A small Kimi-K2; `nested`: the text part of a small Kimi-K2.5, with a tensor of its vision tower."""

    nested: bool = False

    @property
    def twin(self) -> TinyDeepseek:
        """The same as a DeepSeek-V3."""
        fields = {name: value for name, value in vars(self).items() if name != "nested"}
        return TinyDeepseek(**fields)

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        config = super().config() | {"model_type": "kimi_k2"}
        if not self.nested:
            return config
        outer = {
            key: config.pop(key) for key in ("tie_word_embeddings", "bos_token_id", "eos_token_id", "dtype")
        }
        return outer | {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "model_type": "kimi_k25",
            "text_config": config,
        }

    def weights(self) -> dict[str, F32]:
        """Every tensor by name."""
        weights = super().weights()
        if not self.nested:
            return weights
        seeing = {"vision_tower.patch_embed.proj.bias": weights["model.norm.weight"]}
        return {f"language_model.{name}": values for name, values in weights.items()} | seeing


@dataclass(frozen=True)
class TinyQwen2Moe(TinyModel):
    """A small Qwen2-57B-A14B."""

    architecture: str = "Qwen2MoeForCausalLM"
    attention_bias: bool = True
    """Biases of q, k and v."""
    norm_topk_prob: bool = False
    shared_intermediate_size: int = 40
    max_window_layers: int = 28

    @property
    def biased(self) -> str:
        return "qkv" if self.attention_bias else ""

    def extra_weights(self, layer: int, prefix: str, random: RandomWeights) -> None:
        """See `TinyModel.extra_weights`."""
        if self.is_moe_layer(layer):
            shared, hidden = f"{prefix}.mlp.shared_expert", self.hidden_size
            random.feed_forward(shared, self.shared_intermediate_size, hidden, 1.5)
            random.matrix(f"{shared}_gate.weight", 1, hidden, 2.0)

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        config = super().config()
        return config | {
            "model_type": "qwen2_moe",
            "qkv_bias": config.pop("attention_bias"),
            "shared_expert_intermediate_size": self.shared_intermediate_size,
            "max_window_layers": self.max_window_layers,
        }

    @property
    def gguf_architecture(self) -> str:
        return "qwen2moe"

    def add_gguf_metadata(self, writer: Any, package: Any, *, split_kv: bool) -> None:
        """See `TinyModel.add_gguf_metadata`."""
        writer.add_expert_shared_feed_forward_length(self.shared_intermediate_size)


@dataclass(frozen=True)
class TinyOlmoe(TinyModel):
    """A small OLMoE: heads fill the hidden size, which the norms of q and k are as wide as."""

    architecture: str = "OlmoeForCausalLM"
    hidden_size: int = 64
    norm_topk_prob: bool = False

    def is_moe_layer(self, layer: int) -> bool:
        return True

    @property
    def norm_sizes(self) -> dict[str, int]:
        return {"q": self.num_heads * self.head_dim, "k": self.num_kv_heads * self.head_dim}

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        config = without_qwens(super().config(), "head_dim", "moe_intermediate_size")
        return config | {
            "model_type": "olmoe",
            "intermediate_size": self.moe_intermediate_size,
            "clip_qkv": None,
        }

    @property
    def gguf_architecture(self) -> str:
        return "olmoe"


@dataclass(frozen=True)
class TinyMiniMaxM2(TinyModel):
    """A small MiniMax-M2."""

    architecture: str = "MiniMaxM2ForCausalLM"
    head_dim: int = 24
    rotary_dim: int = 12
    num_mtp_layers: int = 0
    """Layers after the last that predict further tokens."""

    def is_moe_layer(self, layer: int) -> bool:
        return True

    @property
    def norm_sizes(self) -> dict[str, int]:
        return {"q": self.num_heads * self.head_dim, "k": self.num_kv_heads * self.head_dim}

    @property
    def num_written_layers(self) -> int:
        return self.num_layers + self.num_mtp_layers

    def extra_weights(self, layer: int, prefix: str, random: RandomWeights) -> None:
        """See `TinyModel.extra_weights`."""
        random.vector(f"{prefix}.mlp.e_score_correction_bias", self.num_experts, 0.0)

    def weights(self) -> dict[str, F32]:
        """Every tensor by name; separate experts under their published names, fused ones under transformers'."""
        if self.expert_layout == "fused":
            return super().weights()
        names = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        return {
            ".".join(names.get(part, part) for part in name.split(".")): values
            for name, values in super().weights().items()
        }

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        config = without_qwens(super().config(), "num_experts", "norm_topk_prob", "attention_bias")
        return config | {
            "model_type": "minimax_m2",
            "intermediate_size": config.pop("moe_intermediate_size"),
            "num_local_experts": self.num_experts,
            "rotary_dim": self.rotary_dim,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "num_mtp_modules": self.num_mtp_layers,
        }

    @property
    def gguf_architecture(self) -> str:
        return "minimax-m2"

    @property
    def gguf_feed_forward_length(self) -> int:
        return self.moe_intermediate_size

    @property
    def gguf_names(self) -> dict[str, str]:
        """See `TinyModel.gguf_names`."""
        return {"block_sparse_moe.e_score_correction": "exp_probs_b"}

    def add_gguf_metadata(self, writer: Any, package: Any, *, split_kv: bool) -> None:
        """See `TinyModel.add_gguf_metadata`."""
        writer.add_rope_dimension_count(self.rotary_dim)
        writer.add_expert_gating_func(package.ExpertGatingFuncType.SIGMOID)


@dataclass(frozen=True)
class TinyErnie(TinyModel):
    """A small ERNIE-4.5-21B-A3B."""

    architecture: str = "Ernie4_5_MoeForCausalLM"
    num_shared_experts: int = 2
    first_moe: int = 1
    last_moe: int = -1
    moe_interval: int = 1
    num_mtp_layers: int = 0
    """Whether there are tensors that predict further tokens."""

    def is_moe_layer(self, layer: int) -> bool:
        last = self.num_layers - 1 if self.last_moe == -1 else self.last_moe
        return self.first_moe <= layer <= last and (layer + 1) % self.moe_interval == 0

    @property
    def norm_sizes(self) -> dict[str, int]:
        return {}

    @property
    def num_written_layers(self) -> int:
        return self.num_layers + bool(self.num_mtp_layers)

    def weights(self) -> dict[str, F32]:
        """Every tensor by name."""
        own = f"model.layers.{self.num_layers}."
        return {name.replace(own, "model.mtp_block.0."): values for name, values in super().weights().items()}

    def extra_weights(self, layer: int, prefix: str, random: RandomWeights) -> None:
        """See `TinyModel.extra_weights`."""
        if layer == self.num_layers:
            random.matrix("model.mtp_linear_proj.0.weight", self.hidden_size, 2 * self.hidden_size)
            for norm in ("emb", "hidden"):
                random.vector(f"model.mtp_{norm}_norm.0.weight", self.hidden_size, 1.0)
        if not self.is_moe_layer(layer):
            return
        bias = f"{prefix}.mlp.moe_statics.e_score_correction_bias"
        random.vector(bias, self.num_experts, 0.0)
        random.found[bias] = random.found[bias][None]
        if self.num_shared_experts:
            inner = self.num_shared_experts * self.moe_intermediate_size
            random.feed_forward(f"{prefix}.mlp.shared_experts", inner, self.hidden_size, 1.5)

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        config = without_qwens(
            super().config(), "num_experts", "num_experts_per_tok", "norm_topk_prob", "attention_bias"
        )
        return config | {
            "model_type": "ernie4_5_moe",
            "use_bias": False,
            "moe_num_experts": self.num_experts,
            "moe_k": self.top_k,
            "moe_num_shared_experts": self.num_shared_experts,
            "moe_layer_start_index": self.first_moe,
            "moe_layer_end_index": self.last_moe,
            "moe_layer_interval": self.moe_interval,
            "num_nextn_predict_layers": self.num_mtp_layers,
        }

    @property
    def gguf_architecture(self) -> str:
        return "ernie4_5-moe"

    @property
    def gguf_names(self) -> dict[str, str]:
        """See `TinyModel.gguf_names`."""
        return {"mlp.moe_statics.e_score_correction": "exp_probs_b"}

    def add_gguf_metadata(self, writer: Any, package: Any, *, split_kv: bool) -> None:
        """See `TinyModel.add_gguf_metadata`."""
        writer.add_interleave_moe_layer_step(self.moe_interval)
        writer.add_leading_dense_block_count(self.first_moe)
        if self.num_shared_experts:
            writer.add_expert_shared_count(self.num_shared_experts)
            inner = self.num_shared_experts * self.moe_intermediate_size
            writer.add_expert_shared_feed_forward_length(inner)
