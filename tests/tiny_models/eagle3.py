"""Tiny random EAGLE-3 heads in the published layout, and a torch reference written from the paper's description."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from tests.tiny_models.writing import drawn


@dataclass(frozen=True)
class TinyEagle3:
    hidden_size: int = 48
    target_hidden_size: int = 48
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    intermediate_size: int = 40
    vocab_size: int = 320
    draft_vocab_size: int = 96
    target_layers: tuple[int, ...] = ()
    norms_before_residual: bool = False
    has_embedding: bool = True
    attention_bias: bool = False
    names: str = "midlayer."
    seed: int = 5

    def write(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)

        def draw(name: str, *shape: int, spread: float = 1.0, mean: float = 0.0) -> Tensor:
            return torch.from_numpy(drawn(self.seed, name, shape, spread=spread, mean=mean))

        def matrix(name: str, rows: int, columns: int) -> Tensor:
            return draw(name, rows, columns, spread=1.5 / columns**0.5)

        def norm(name: str, size: int) -> Tensor:
            return draw(name, size, spread=0.2, mean=1.0)

        hidden, wide = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = {
            **{name: norm(name, hidden) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
            **{
                name: matrix(name, rows, columns)
                for name, rows, columns in (
                    ("self_attn.q_proj", queries, 2 * hidden), ("self_attn.k_proj", keys, 2 * hidden),
                    ("self_attn.v_proj", keys, 2 * hidden), ("self_attn.o_proj", hidden, queries),
                    ("mlp.gate_proj", wide, hidden), ("mlp.up_proj", wide, hidden), ("mlp.down_proj", hidden, wide),
                )
            },
        }  # fmt: skip
        tensors = {f"{self.names}{name}.weight": tensor for name, tensor in layer.items()}
        if self.attention_bias:
            for part, size in (("q", queries), ("k", keys), ("v", keys)):
                tensors[f"{self.names}self_attn.{part}_proj.bias"] = draw(f"{part}_proj.bias", size)
        order = draw("d2t", self.vocab_size).argsort()
        picked = order[: self.draft_vocab_size].sort().values
        is_picked = torch.zeros(self.vocab_size, dtype=torch.bool)
        is_picked[picked] = True
        tensors |= {
            "fc.weight": matrix("fc", hidden, 3 * self.target_hidden_size),
            "norm.weight": norm("norm", hidden),
            "lm_head.weight": 3.0 * matrix("lm_head", self.draft_vocab_size, hidden),
            "d2t": picked - torch.arange(self.draft_vocab_size),
            "t2d": is_picked,
        }
        if self.has_embedding:
            tensors["embed_tokens.weight"] = draw("embed_tokens", self.vocab_size, hidden)
        save_file(tensors, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(self._config()))
        return directory

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
            "hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads, "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim, "vocab_size": self.vocab_size, "draft_vocab_size": self.draft_vocab_size,
            "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 256,
            "torch_dtype": "float32", "target_hidden_size": self.target_hidden_size,
            "norm_before_residual": self.norms_before_residual, "attention_bias": self.attention_bias,
        }  # fmt: skip
        if self.target_layers:
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(self.target_layers)}
        return config


def reference_states(directory: Path, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Output states [T, hidden] and logits [T, reduced vocabulary] of the layer over one text.

    Args:
        states: [T, hidden] before each token, as `fc` or the layer itself made them. tokens: [T].
    """
    config = json.loads((directory / "config.json").read_text())
    weights = load_file(directory / "model.safetensors")
    of = {name.replace("model.layers.0.", "midlayer."): tensor for name, tensor in weights.items()}

    def norm(rows: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"])
        return rows * scale * of[f"{name}.weight"]

    def linear(rows: Tensor, name: str) -> Tensor:
        return functional.linear(rows, of[f"midlayer.{name}.weight"], of.get(f"midlayer.{name}.bias"))

    count, dim = len(tokens), config["head_dim"]
    normed = norm(states, "midlayer.hidden_norm")
    residual = normed if config["norm_before_residual"] else states
    both = torch.cat([norm(of["embed_tokens.weight"][tokens], "midlayer.input_layernorm"), normed], -1)
    q, k, v = (linear(both, f"self_attn.{part}_proj").view(count, -1, dim).transpose(0, 1) for part in "qkv")
    frequencies = config["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
    angles = torch.arange(count)[:, None] * frequencies[None]
    cos, sin = (torch.cat([wave, wave], -1) for wave in (angles.cos(), angles.sin()))

    def rotated(rows: Tensor) -> Tensor:
        first, second = rows.chunk(2, -1)
        return rows * cos + torch.cat([-second, first], -1) * sin

    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    k, v = (rows.repeat_interleave(groups, 0) for rows in (rotated(k), v))
    attended = functional.scaled_dot_product_attention(rotated(q), k, v, is_causal=True)
    hidden = residual + linear(attended.transpose(0, 1).reshape(count, -1), "self_attn.o_proj")
    rows = norm(hidden, "midlayer.post_attention_layernorm")
    gate, up = linear(rows, "mlp.gate_proj"), linear(rows, "mlp.up_proj")
    hidden = hidden + linear(functional.silu(gate) * up, "mlp.down_proj")
    return hidden, functional.linear(norm(hidden, "norm"), of["lm_head.weight"])


def fused_states(directory: Path, states: np.ndarray[Any, Any]) -> Tensor:
    """The state [T, hidden] of three hidden states of the target side by side."""
    return functional.linear(
        torch.from_numpy(states), load_file(directory / "model.safetensors")["fc.weight"]
    )
