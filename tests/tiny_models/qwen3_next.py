"""Tiny random models of Qwen3-Next and Qwen3.5-MoE, as `testing` makes them of Qwen3-MoE and Mixtral."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from tests.tiny_models.writing import F32, RandomWeights, TinyModel

_MTP: Final = {
    "eh_proj.": "mtp.fc.", "enorm.": "mtp.pre_fc_norm_embedding.", "hnorm.": "mtp.pre_fc_norm_hidden.",
    "shared_head.norm.": "mtp.norm.", "": "mtp.layers.0.",
}  # fmt: skip
"""Published names of the prediction layer's parts."""


@dataclass(frozen=True)
class TinyQwen3Next(TinyModel):
    """Model to write. The defaults are a small Qwen3-Next; every field is one corner of the configuration."""

    architecture: str = "Qwen3NextForCausalLM"
    num_layers: int = 4
    num_k_heads: int = 2
    num_v_heads: int = 4
    key_dim: int = 12
    value_dim: int = 10
    """Value size of a head of the gated delta net."""
    conv_kernel: int = 4
    full_attention: tuple[int, ...] = (3,)
    """Layers."""
    partial_rotary_factor: float = 0.25
    shared_intermediate_size: int = 40
    has_mtp: bool = False

    def is_moe_layer(self, layer: int) -> bool:
        return layer == self.num_layers or super().is_moe_layer(layer)

    @property
    def num_written_layers(self) -> int:
        return self.num_layers + self.has_mtp

    @property
    def num_gguf_layers(self) -> int:
        return self.num_written_layers

    @property
    def biased(self) -> str:
        return "qkvo" if self.attention_bias else ""

    @property
    def norm_sizes(self) -> dict[str, int]:
        return dict.fromkeys("qk", self.head_dim)

    def extra_weights(self, layer: int, prefix: str, random: RandomWeights) -> None:
        """See `TinyModel.extra_weights`."""
        hidden = self.hidden_size
        if self.is_moe_layer(layer):
            random.feed_forward(f"{prefix}.mlp.shared_expert", self.shared_intermediate_size, hidden, 1.5)
            random.matrix(f"{prefix}.mlp.shared_expert_gate.weight", 1, hidden, 2.0)
        if layer == self.num_layers:
            random.matrix(f"{prefix}.eh_proj.weight", hidden, 2 * hidden)
            for norm in ("enorm", "hnorm", "shared_head.norm"):
                random.vector(f"{prefix}.{norm}.weight", hidden, 1.0)
        if layer in (*self.full_attention, self.num_layers):
            rows = 2 * self.num_heads * self.head_dim
            random.matrix(f"{prefix}.self_attn.q_proj.weight", rows, hidden)
            if self.attention_bias:
                random.vector(f"{prefix}.self_attn.q_proj.bias", rows, 0.0)
            return
        for name in [name for name in random.found if name.startswith(f"{prefix}.self_attn.")]:
            del random.found[name]
        own, channels = f"{prefix}.linear_attn", 2 * self._keys + self._values
        self._projections(own, random)
        random.matrix(f"{own}.conv1d.weight", channels, self.conv_kernel, 1.5)
        random.found[f"{own}.conv1d.weight"] = random.found[f"{own}.conv1d.weight"][:, None]
        random.vector(f"{own}.A_log", self.num_v_heads, -1.5)
        random.vector(f"{own}.dt_bias", self.num_v_heads, -1.0)
        random.vector(f"{own}.norm.weight", self.value_dim, 1.0)
        random.matrix(f"{own}.out_proj.weight", hidden, self._values, 1.5)

    @property
    def _keys(self) -> int:
        return self.num_k_heads * self.key_dim

    @property
    def _values(self) -> int:
        return self.num_v_heads * self.value_dim

    def _projections(self, own: str, random: RandomWeights) -> None:
        random.matrix(f"{own}.in_proj_qkvz.weight", 2 * (self._keys + self._values), self.hidden_size)
        random.matrix(f"{own}.in_proj_ba.weight", 2 * self.num_v_heads, self.hidden_size)

    def weights(self) -> dict[str, F32]:
        """Every tensor by name; norms are centred at zero."""
        weights = super().weights()
        for name in weights:
            if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
                weights[name] = weights[name] - np.float32(1.0)
        return {self._published(name): values for name, values in weights.items()}

    def _published(self, name: str) -> str:
        own = f"model.layers.{self.num_layers}."
        for ours, theirs in _MTP.items():
            if name.startswith(own + ours):
                return theirs + name.removeprefix(own + ours)
        return name

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        config = super().config()
        del config["use_sliding_window"], config["sliding_window"]
        full = self.full_attention
        kinds = ["full_attention" if n in full else "linear_attention" for n in range(self.num_layers)]
        if self.rope_form == "rope_parameters":
            config["rope_parameters"]["partial_rotary_factor"] = self.partial_rotary_factor
        else:
            config["partial_rotary_factor"] = self.partial_rotary_factor
        return config | {
            "model_type": "qwen3_next",
            "layer_types": kinds,
            "linear_num_key_heads": self.num_k_heads,
            "linear_num_value_heads": self.num_v_heads,
            "linear_key_head_dim": self.key_dim,
            "linear_value_head_dim": self.value_dim,
            "linear_conv_kernel_dim": self.conv_kernel,
            "shared_expert_intermediate_size": self.shared_intermediate_size,
        }

    @property
    def gguf_architecture(self) -> str:
        return "qwen3next"

    @property
    def gguf_names(self) -> dict[str, str]:
        """See `TinyModel.gguf_names`."""
        return {
            "post_attention_layernorm": "post_attention_norm",
            "linear_attn.in_proj_qkv": "attn_qkv",
            "linear_attn.in_proj_z": "attn_gate",
            "linear_attn.in_proj_ba": "ssm_ba",
            "linear_attn.in_proj_b": "ssm_beta",
            "linear_attn.in_proj_a": "ssm_alpha",
            "linear_attn.conv1d": "ssm_conv1d",
            "linear_attn.A_log": "ssm_a",
            "linear_attn.dt_proj": "ssm_dt",
            "linear_attn.norm": "ssm_norm",
            "linear_attn.out_proj": "ssm_out",
        }

    def gguf_source(self) -> dict[str, F32]:
        """See `TinyModel.gguf_source`."""
        found: dict[str, F32] = {}
        for name, values in self.weights().items():
            for ours, theirs in _MTP.items():
                if name.startswith(theirs):
                    name = f"model.layers.{self.num_layers}.{ours}{name.removeprefix(theirs)}"
            if name.endswith("in_proj_qkvz.weight"):
                found |= self._ungrouped(name, values)
            elif name.endswith("A_log"):
                found[name] = -np.exp(values)
            elif name.endswith("dt_bias"):
                found[name.replace("dt_bias", "dt_proj.bias")] = values
            elif name.endswith("conv1d.weight"):
                found[name] = values[:, 0]
            elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
                found[name] = values + np.float32(1.0)
            else:
                found[name] = values
        return found

    def _ungrouped(self, name: str, values: F32) -> dict[str, F32]:
        heads, of_values = self.num_k_heads, self._values // self.num_k_heads
        groups = values.reshape(heads, -1, self.hidden_size)
        ends = np.cumsum([self.key_dim, self.key_dim, of_values])
        q, k, v, z = (part.reshape(-1, self.hidden_size) for part in np.split(groups, ends, 1))
        return {
            name.replace("qkvz", "qkv"): np.concatenate([q, k, v]),
            name.replace("qkvz", "z"): np.ascontiguousarray(z),
        }

    def add_gguf_metadata(self, writer: Any, package: Any, *, split_kv: bool) -> None:
        """See `TinyModel.add_gguf_metadata`."""
        writer.add_expert_shared_feed_forward_length(self.shared_intermediate_size)
        writer.add_ssm_conv_kernel(self.conv_kernel)
        writer.add_ssm_state_size(self.key_dim)
        writer.add_ssm_group_count(self.num_k_heads)
        writer.add_ssm_time_step_rank(self.num_v_heads)
        writer.add_ssm_inner_size(self._values)
        writer.add_full_attention_interval(4)
        if self.has_mtp:
            writer.add_nextn_predict_layers(1)
        writer.add_rope_dimension_count(int(self.head_dim * self.partial_rotary_factor))


@dataclass(frozen=True)
class TinyQwen35Moe(TinyQwen3Next):
    """A small Qwen3.5-MoE; `nested`: the text part of a vision model, with a tensor of its vision tower."""

    architecture: str = "Qwen3_5MoeForCausalLM"
    nested: bool = False

    @property
    def twin(self) -> TinyModel:
        return replace(self, nested=False)

    def _projections(self, own: str, random: RandomWeights) -> None:
        rows = {"qkv": 2 * self._keys + self._values, "z": self._values}
        for part, count in (rows | dict.fromkeys("ba", self.num_v_heads)).items():
            random.matrix(f"{own}.in_proj_{part}.weight", count, self.hidden_size)

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        config = super().config() | {
            "model_type": "qwen3_5_moe_text",
            "mtp_num_hidden_layers": int(self.has_mtp),
        }
        for key in ("mlp_only_layers", "decoder_sparse_step", "norm_topk_prob", "intermediate_size"):
            del config[key]
        if not self.nested:
            return config
        outer = {
            key: config.pop(key) for key in ("tie_word_embeddings", "bos_token_id", "eos_token_id", "dtype")
        }
        return outer | {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "model_type": "qwen3_5_moe",
            "text_config": config,
        }

    def weights(self) -> dict[str, F32]:
        """Every tensor by name."""
        weights = super().weights()
        if not self.nested:
            return weights
        seeing = {"model.visual.patch_embed.proj.bias": weights["model.norm.weight"]}
        return {
            name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: values
            for name, values in weights.items()
        } | seeing

    @property
    def gguf_architecture(self) -> str:
        return "qwen35moe"

    def gguf_source(self) -> dict[str, F32]:
        """See `TinyModel.gguf_source`: value heads go round the key heads."""
        found = super().gguf_source()
        for name, values in found.items():
            part = name.rpartition("linear_attn.")[2]
            if part.startswith(("in_proj_qkv", "conv1d")):
                first = 2 * self._keys
                found[name] = np.concatenate([values[:first], self._tiled(values[first:])])
            elif part.startswith(("in_proj_z", "in_proj_b", "in_proj_a", "A_log", "dt_proj")):
                found[name] = self._tiled(values)
            elif part.startswith("out_proj"):
                found[name] = np.ascontiguousarray(self._tiled(values.T).T)
        return found

    def _tiled(self, values: F32) -> F32:
        of_key_head = self.num_v_heads // self.num_k_heads
        by_head = values.reshape(self.num_k_heads, of_key_head, -1, *values.shape[1:])
        return np.ascontiguousarray(by_head.swapaxes(0, 1)).reshape(values.shape)

    def add_gguf_metadata(self, writer: Any, package: Any, *, split_kv: bool) -> None:
        """See `TinyModel.add_gguf_metadata`."""
        super().add_gguf_metadata(writer, package, split_kv=split_kv)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
