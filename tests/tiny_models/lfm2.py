"""Tiny random LFM2 models with experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tests.tiny_models.writing import F32, RandomWeights, TinyModel, without_qwens

_NAMES: Final = {
    "input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm", "o_proj": "out_proj",
    "q_norm": "q_layernorm", "k_norm": "k_layernorm", "mlp": "feed_forward",
}  # fmt: skip
_SEPARATE: Final = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@dataclass(frozen=True)
class TinyLfm2(TinyModel):
    """Model to write. The defaults are a small LFM2-8B-A1B; layers without attention have a convolution."""

    architecture: str = "Lfm2MoeForCausalLM"
    num_layers: int = 4
    tie_word_embeddings: bool = True
    attention: tuple[int, ...] = (1,)
    taps: int = 3
    conv_bias: bool = False
    first_dense: int = 1
    use_expert_bias: bool = True
    routed_scaling_factor: float = 1.0

    def is_moe_layer(self, layer: int) -> bool:
        return layer >= self.first_dense

    def extra_weights(self, layer: int, prefix: str, random: RandomWeights) -> None:
        """See `TinyModel.extra_weights`."""
        if self.is_moe_layer(layer) and self.use_expert_bias:
            random.vector(f"{prefix}.mlp.expert_bias", self.num_experts, 0.0)
        if layer in self.attention:
            return
        for name in [name for name in random.found if name.startswith(f"{prefix}.self_attn.")]:
            del random.found[name]
        hidden, conv = self.hidden_size, f"{prefix}.conv"
        random.matrix(f"{conv}.in_proj.weight", 3 * hidden, hidden, 1.5)
        random.found[f"{conv}.conv.weight"] = random.rng.normal(0, 0.6, (hidden, 1, self.taps)).astype(
            np.float32
        )
        random.matrix(f"{conv}.out_proj.weight", hidden, hidden, 1.5)
        if self.conv_bias:
            for part, size in (("in_proj", 3 * hidden), ("conv", hidden), ("out_proj", hidden)):
                random.vector(f"{conv}.{part}.bias", size, 0.0)

    @property
    def norm_sizes(self) -> dict[str, int]:
        return dict.fromkeys("qk", self.head_dim)

    def weights(self) -> dict[str, F32]:
        """Every tensor by name."""
        found = {}
        for name, values in super().weights().items():
            names = _NAMES | (_SEPARATE if ".mlp." in name and name.endswith(".weight") else {})
            theirs = ".".join(names.get(part, part) for part in name.split("."))
            found[theirs.replace("model.norm.", "model.embedding_norm.")] = values
        return found

    def gguf_source(self) -> dict[str, F32]:
        """See `TinyModel.gguf_source`."""
        return {
            name: values[:, 0] if name.endswith("conv.conv.weight") else values
            for name, values in super().weights().items()
        }

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        config = without_qwens(super().config(), "hidden_act", "rms_norm_eps", "attention_bias")
        kinds = ["full_attention" if n in self.attention else "conv" for n in range(self.num_layers)]
        return config | {
            "model_type": "lfm2_moe",
            "norm_eps": 1e-6,
            "layer_types": kinds,
            "conv_L_cache": self.taps,
            "conv_bias": self.conv_bias,
            "num_dense_layers": self.first_dense,
            "use_expert_bias": self.use_expert_bias,
            "routed_scaling_factor": self.routed_scaling_factor,
        }

    @property
    def fits_gguf(self) -> bool:
        return super().fits_gguf and self.norm_topk_prob

    @property
    def gguf_architecture(self) -> str:
        return "lfm2moe"

    @property
    def gguf_kv_heads(self) -> int | list[int]:
        return [self.num_kv_heads if n in self.attention else 0 for n in range(self.num_layers)]

    @property
    def gguf_names(self) -> dict[str, str]:
        """See `TinyModel.gguf_names`."""
        conv = {f"conv.{part}": f"shortconv.{part}" for part in ("in_proj", "conv", "out_proj")}
        return conv | {"mlp.expert_bias": "exp_probs_b.bias", "model.norm": "token_embd_norm"}

    def add_gguf_metadata(self, writer: Any, package: Any, *, split_kv: bool) -> None:
        """See `TinyModel.add_gguf_metadata`."""
        writer.add_vocab_size(self.vocab_size)
        writer.add_shortconv_l_cache(self.taps)
        writer.add_leading_dense_block_count(self.first_dense)
        writer.add_expert_gating_func(package.ExpertGatingFuncType.SIGMOID)
        if self.routed_scaling_factor != 1.0:
            writer.add_expert_weights_scale(self.routed_scaling_factor)
