"""Tiny random Gemma 4 models: with experts, or dense with inputs of the layers and shared keys and values."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from tests.tiny_models.writing import F32, RandomWeights, TinyModel, without_qwens

_SLIDING, _FULL = "sliding_attention", "full_attention"
_NORMS: Final = ("pre_feedforward_layernorm", "pre_feedforward_layernorm_2", "post_feedforward_layernorm",
                 "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")  # fmt: skip
_DENSE_NORMS: Final = _NORMS[0], _NORMS[2]
_KEYS_AND_VALUES: Final = re.compile(r"\.[kv]_(proj|norm)\.")


@dataclass(frozen=True)
class TinyGemma4(TinyModel):
    """Model to write, by default a small 26B-A4B; `nested`: as the text part of a vision model."""

    architecture: str = "Gemma4ForCausalLM"
    tie_word_embeddings: bool = True
    head_dim: int = 12
    """Head size of layers with a window."""
    global_head_dim: int = 24
    global_kv_heads: int | None = 1
    full: tuple[int, ...] = (1, 2)
    """Layers with full attention, the last among them."""
    attention_k_eq_v: bool = True
    sliding_window: int | None = 7
    partial_rotary_factor: float = 0.25
    global_rope_theta: float = 1_000_000.0
    softcap: float | None = 30.0
    expert_layout: Any = "fused"
    nested: bool = False
    published: bool = True
    """Whether sizes of layers with full attention are said as published, or as transformers writes them."""
    dense: bool = False
    layer_input: int = 0
    """Elements of a layer's own input; 0: there is none."""
    num_shared: int = 0
    """Last layers, which read keys and values of earlier ones."""
    double_wide: bool = False
    """Whether those have feed-forward parts twice as wide."""
    has_unread: bool = False
    """Whether the checkpoint holds keys and values of those layers, which are not read."""

    @property
    def has_experts(self) -> bool:
        return not self.dense

    def is_moe_layer(self, layer: int) -> bool:
        return not self.dense

    def shares(self, layer: int) -> bool:
        """Whether a layer reads keys and values of an earlier one."""
        return layer >= self.num_layers - self.num_shared

    def inner_size(self, layer: int) -> int:
        """Width of a layer's dense part."""
        return self.intermediate_size * (2 if self.double_wide and self.shares(layer) else 1)

    @property
    def gguf_feed_forward_length(self) -> int | list[int]:
        return [self.inner_size(layer) for layer in range(self.num_layers)]

    @property
    def biased(self) -> str:
        return "qkvo" if self.attention_bias else ""

    @property
    def norm_sizes(self) -> dict[str, int]:
        return {}

    @property
    def twin(self) -> TinyModel:
        """The text part alone."""
        return replace(self, nested=False)

    @property
    def fits_gguf(self) -> bool:
        return self.rope_scaling is None and not self.attention_bias and self.published

    def kv_heads(self, layer: int) -> int:
        own = self.global_kv_heads if layer in self.full and self.attention_k_eq_v else None
        return own or self.num_kv_heads

    def extra_weights(self, layer: int, prefix: str, random: RandomWeights) -> None:
        """See `TinyModel.extra_weights`."""
        hidden, attention = self.hidden_size, f"{prefix}.self_attn"
        random.found.pop(f"{prefix}.mlp.gate.weight", None)
        if layer in self.full:
            q_size, kv_size = (
                heads * self.global_head_dim for heads in (self.num_heads, self.kv_heads(layer))
            )
            for name, rows, columns in (
                ("q", q_size, hidden),
                ("k", kv_size, hidden),
                ("v", kv_size, hidden),
                ("o", hidden, q_size),
            ):
                random.matrix(f"{attention}.{name}_proj.weight", rows, columns)
                if self.attention_bias:
                    random.vector(f"{attention}.{name}_proj.bias", rows, 0.0)
            if self.attention_k_eq_v:
                for name in [name for name in random.found if name.startswith(f"{attention}.v_proj.")]:
                    del random.found[name]
        head_dim = self.global_head_dim if layer in self.full else self.head_dim
        for name in "qk":  # scores are not scaled
            random.vector(f"{attention}.{name}_norm.weight", head_dim, 0.5)
        random.vector(f"{prefix}.post_attention_layernorm.weight", hidden, 0.5)
        for name in _DENSE_NORMS if self.dense else _NORMS:
            random.vector(f"{prefix}.{name}.weight", hidden, 1.0 if name.startswith("pre") else 0.5)
        random.feed_forward(f"{prefix}.mlp", self.inner_size(layer), hidden)
        if not self.dense:
            random.matrix(f"{prefix}.router.proj.weight", self.num_experts, hidden, 2.0 * hidden**0.5)
            random.vector(f"{prefix}.router.scale", hidden, 1.0)
            random.vector(f"{prefix}.router.per_expert_scale", self.num_experts, 1.0)
        random.vector(f"{prefix}.layer_scalar", 1, 0.8)
        if self.layer_input:
            random.matrix(f"{prefix}.per_layer_input_gate.weight", self.layer_input, hidden)
            random.matrix(f"{prefix}.per_layer_projection.weight", hidden, self.layer_input)
            random.vector(f"{prefix}.post_per_layer_input_norm.weight", hidden, 0.5)
            if layer == self.num_layers - 1:
                wide = self.num_layers * self.layer_input
                random.matrix("model.embed_tokens_per_layer.weight", self.vocab_size + 3, wide)
                random.matrix("model.per_layer_model_projection.weight", wide, hidden)
                random.vector("model.per_layer_projection_norm.weight", self.layer_input, 1.0)
        if self.shares(layer) and not self.has_unread:
            for name in [name for name in random.found if name.startswith(attention)]:
                if _KEYS_AND_VALUES.match(name.removeprefix(attention)):
                    del random.found[name]

    def weights(self) -> dict[str, F32]:
        """Every tensor by name."""
        found = {
            name.replace(".mlp.experts.", ".experts."): values for name, values in super().weights().items()
        }
        found["model.embed_tokens.weight"] = found["model.embed_tokens.weight"] / np.float32(
            self.hidden_size**0.5
        )
        if not self.nested:
            return found
        seeing = {
            "model.vision_tower.patch_embedder.input_proj.weight": found["model.norm.weight"],
            "model.embed_vision.embedding_projection.weight": found["model.norm.weight"],
        }
        inner = {
            name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: values
            for name, values in found.items()
        }
        return inner | seeing

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        config = without_qwens(super().config(), "num_experts_per_tok", "norm_topk_prob", "hidden_act")
        kinds = [_FULL if layer in self.full else _SLIDING for layer in range(self.num_layers)]
        proportional = {
            "rope_type": "proportional",
            "partial_rotary_factor": self.partial_rotary_factor,
            "rope_theta": self.global_rope_theta,
        }
        scaled = dict(self.rope_scaling or {"rope_type": "default"}) | {"rope_theta": self.rope_theta}
        own: dict[str, Any] = {
            "global_head_dim": self.global_head_dim,
            "num_global_key_value_heads": self.global_kv_heads,
        }
        if not self.published:
            kv_heads = self.kv_heads(self.num_layers - 1)
            sizes = {"head_dim": self.global_head_dim, "num_key_value_heads": kv_heads}
            own = {"per_layer_config": {str(layer): sizes for layer in self.full}}
        config |= own | {
            "model_type": "gemma4_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": kinds,
            "sliding_window": self.sliding_window,
            "rope_parameters": {_SLIDING: scaled, _FULL: proportional},
            "attention_k_eq_v": self.attention_k_eq_v,
            "num_kv_shared_layers": self.num_shared,
            "use_double_wide_mlp": self.double_wide,
            "hidden_size_per_layer_input": self.layer_input,
            "vocab_size_per_layer_input": self.vocab_size + 3,
            "enable_moe_block": not self.dense,
            "top_k_experts": None if self.dense else self.top_k,
            "final_logit_softcapping": self.softcap,
            "use_bidirectional_attention": "vision" if self.nested else None,
        }
        config.pop("rope_theta", None)
        config.pop("rope_scaling", None)
        if not self.nested:
            return config
        outer = {key: config.pop(key) for key in ("eos_token_id", "dtype")}
        return outer | {
            "architectures": ["Gemma4ForConditionalGeneration"],
            "model_type": "gemma4",
            "text_config": config,
        }

    @property
    def gguf_architecture(self) -> str:
        return "gemma4"

    @property
    def gguf_head_dim(self) -> int:
        return self.global_head_dim

    @property
    def gguf_rope_theta(self) -> float:
        return self.global_rope_theta

    @property
    def gguf_kv_heads(self) -> int | list[int]:
        return [self.kv_heads(layer) for layer in range(self.num_layers)]

    @property
    def gguf_names(self) -> dict[str, str]:
        """See `TinyModel.gguf_names`."""
        return {
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
            "post_feedforward_layernorm": "post_ffw_norm",
            "post_feedforward_layernorm_1": "post_ffw_norm_1",
            "post_feedforward_layernorm_2": "post_ffw_norm_2",
            "router.proj": "ffn_gate_inp",
            "router.scale": "ffn_gate_inp.scale",
            "router.per_expert_scale": "ffn_down_exps.scale",
            "layer_scalar": "layer_output_scale.weight",
            "rope_freqs": "rope_freqs",
            "per_layer_input_gate": "inp_gate",
            "per_layer_projection": "proj",
            "post_per_layer_input_norm": "post_norm",
            "model.embed_tokens_per_layer": "per_layer_token_embd",
            "model.per_layer_model_projection": "per_layer_model_proj",
            "model.per_layer_projection_norm": "per_layer_proj_norm",
            "experts.gate_up_proj": "ffn_gate_up_exps.weight",
            "experts.down_proj": "ffn_down_exps.weight",
        }

    def gguf_source(self) -> dict[str, F32]:
        """See `TinyModel.gguf_source`; with the factors that say which pairs turn."""
        pairs = self.global_head_dim // 2
        turning = int(self.partial_rotary_factor * self.global_head_dim // 2)
        factors = np.where(np.arange(pairs) < turning, 1.0, 1e30).astype(np.float32)
        return replace(self, expert_layout="fused").weights() | {"rope_freqs.weight": factors}

    def add_gguf_metadata(self, writer: Any, package: Any, *, split_kv: bool) -> None:
        """See `TinyModel.add_gguf_metadata`."""
        writer.add_key_length_swa(self.head_dim)
        writer.add_value_length_swa(self.head_dim)
        writer.add_rope_dimension_count(self.global_head_dim)
        writer.add_rope_dimension_count_swa(self.head_dim)
        writer.add_rope_freq_base_swa(self.rope_theta)
        writer.add_sliding_window_pattern([layer not in self.full for layer in range(self.num_layers)])
        writer.add_shared_kv_layers(self.num_shared)
        writer.add_embedding_length_per_layer_input(self.layer_input)
        if self.softcap is not None:
            writer.add_final_logit_softcapping(self.softcap)
