"""A tiny random gpt-oss, as `testing` makes models of other families: its experts as floats or as MXFP4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from tests.tiny_models.writing import F32, RandomWeights, TinyModel

U8 = npt.NDArray[np.uint8]

E2M1_VALUES: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclass(frozen=True)
class TinyGptOss(TinyModel):
    """The defaults are a small gpt-oss-20b; every field is one corner of the configuration."""

    architecture: str = "GptOssForCausalLM"
    attention_bias: bool = True
    """Biases of q, k, v and o."""
    sliding_window: int | None = 9
    layer_types: tuple[str, ...] | None = None
    """None: every other layer has the window, starting with the first."""
    experts: Literal["float", "mxfp4"] = "float"
    """mxfp4: hidden_size and moe_intermediate_size are multiples of 32."""

    def is_moe_layer(self, layer: int) -> bool:
        return True

    @property
    def fits_gguf(self) -> bool:
        return self.rope_scaling is None and self.layer_types is None

    @property
    def norm_sizes(self) -> dict[str, int]:
        return {}

    def extra_weights(self, layer: int, prefix: str, random: RandomWeights) -> None:
        """See `TinyModel.extra_weights`."""
        random.vector(f"{prefix}.self_attn.sinks", self.num_heads, 0.0)
        random.found[f"{prefix}.self_attn.sinks"] *= 5
        random.vector(f"{prefix}.mlp.router.bias", self.num_experts, 0.0)
        random.found[f"{prefix}.mlp.router.weight"] = random.found.pop(f"{prefix}.mlp.gate.weight")
        experts = f"{prefix}.mlp.experts"
        three = [
            np.stack([random.found.pop(f"{experts}.{e}.{part}_proj.weight") for e in range(self.num_experts)])
            for part in ("gate", "up", "down")
        ]
        three = [2 * matrix for matrix in three]  # beyond the limit now and then
        if self.experts == "mxfp4":
            three = [dequantised(*quantised(matrix)) for matrix in three]
        gate, up, down = three
        random.found[f"{experts}.gate_up_proj"] = in_turn(gate, up, 1).swapaxes(1, 2)
        random.found[f"{experts}.down_proj"] = down.swapaxes(1, 2)
        sizes = {"gate_up": 2 * self.moe_intermediate_size, "down": self.hidden_size}
        for part, size in sizes.items():
            shape = (self.num_experts, size)
            random.found[f"{experts}.{part}_proj_bias"] = random.rng.normal(0, 0.5, shape).astype(np.float32)

    def written(self, weights: dict[str, F32]) -> dict[str, Any]:
        """See `TinyModel.written`: MXFP4's two tensors for a matrix."""
        if self.experts == "float":
            return weights
        found: dict[str, Any] = {}
        for name, values in weights.items():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                codes, exponents = quantised(np.ascontiguousarray(values.swapaxes(1, 2)))
                pairs = codes.reshape(*exponents.shape, 16, 2)
                found[f"{name}_blocks"] = pairs[..., 0] | pairs[..., 1] << np.uint8(4)
                found[f"{name}_scales"] = exponents
            else:
                found[name] = values
        return found

    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        config = super().config()
        for key in ("num_experts", "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step"):
            del config[key]
        del config["use_sliding_window"], config["moe_intermediate_size"]
        config |= {
            "model_type": "gpt_oss",
            "num_local_experts": self.num_experts,
            "intermediate_size": self.moe_intermediate_size,
            "swiglu_limit": 7.0,
        }
        if self.layer_types is not None:
            config["layer_types"] = list(self.layer_types)
        if self.experts == "mxfp4":
            config["quantization_config"] = {
                "quant_method": "mxfp4",
                "modules_to_not_convert": [
                    "model.layers.*.self_attn",
                    "model.layers.*.mlp.router",
                    "lm_head",
                ],
            }
        return config

    @property
    def gguf_architecture(self) -> str:
        return "gpt-oss"

    @property
    def gguf_names(self) -> dict[str, str]:
        """See `TinyModel.gguf_names`."""
        return {
            "post_attention_layernorm": "post_attention_norm",
            "mlp.router": "ffn_gate_inp",
            "self_attn.sinks": "attn_sinks",
        }

    def gguf_source(self) -> dict[str, F32]:
        """See `TinyModel.gguf_source`."""
        found: dict[str, F32] = {}
        for name, values in self.weights().items():
            layer, _, part = name.partition(".experts.")
            if not part:
                found[f"{name}.weight" if name.endswith(".sinks") else name] = values
                continue
            kind = "bias" if part.endswith("_bias") else "weight"
            rows = values if kind == "bias" else values.swapaxes(1, 2)
            parts = (
                {"gate": rows[:, 0::2], "up": rows[:, 1::2]} if part.startswith("gate_up") else {"down": rows}
            )
            for which, matrix in parts.items():
                found[f"{layer}.experts.{which}.{kind}"] = np.ascontiguousarray(matrix)
        return found

    def add_gguf_metadata(self, writer: Any, package: Any, *, split_kv: bool) -> None:
        """See `TinyModel.add_gguf_metadata`."""
        if self.rope_scaling is not None and self.rope_scaling["rope_type"] == "yarn":
            writer.add_rope_scaling_type(package.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(self.rope_scaling["factor"])
            writer.add_rope_scaling_orig_ctx_len(self.rope_scaling["original_max_position_embeddings"])


def in_turn(gate: F32, up: F32, axis: int) -> F32:
    """Row 2i of `gate`, row 2i + 1 of `up`."""
    shape = list(gate.shape)
    shape[axis] *= 2
    return np.stack([gate, up], axis=axis + 1).reshape(shape)


def quantised(values: F32) -> tuple[U8, U8]:
    """MXFP4 of [..., columns]: codes [..., columns], exponents [..., columns / 32]. Plain and slow."""
    blocks = values.reshape(*values.shape[:-1], -1, 32)
    largest = np.abs(blocks).max(-1)
    exponents = np.where(largest > 0, np.floor(np.log2(np.maximum(largest, 1e-30))) - 2 + 127, 0)
    exponents = np.clip(exponents, 0, 254).astype(np.uint8)
    scaled = blocks / np.exp2(exponents.astype(np.float32) - 127)[..., None]
    codes = np.abs(scaled[..., None] - E2M1_VALUES).argmin(-1).astype(np.uint8)
    return codes.reshape(values.shape), exponents


def dequantised(codes: U8, exponents: U8) -> F32:
    """The values of `quantised`."""
    scales = np.exp2(exponents.astype(np.float32) - 127).repeat(32, -1)
    values: F32 = E2M1_VALUES[codes] * scales
    return values
