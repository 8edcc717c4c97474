"""Reads the bundled model's weights for training, and adds the MTP layer to its files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tales_model import Layer, Model, Shape
from tales_prediction import MtpLayer
from torch import Tensor

# Names of a layer's tensors in checkpoints and in `Layer`, which stacks the experts.
NAMES = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "post_norm",
    "mlp.gate": "router",
}


def read_trunk(directory: Path, shape: Shape) -> Model:
    """The model with its stored weights, which do not learn."""
    stored = load_file(directory / "model.safetensors")
    model = Model(shape).eval().requires_grad_(False)
    model.embedding.copy_(stored["model.embed_tokens.weight"])
    model.final_norm.copy_(stored["model.norm.weight"])
    for index, layer in enumerate(model.layers):
        _read_layer(layer, stored, f"model.layers.{index}.")
    return model


def _read_layer(layer: Layer, stored: dict[str, Tensor], prefix: str) -> None:
    for name, own in NAMES.items():
        getattr(layer, own).copy_(stored[f"{prefix}{name}.weight"])
    for own in ("gate", "up", "down"):
        experts = [
            stored[f"{prefix}mlp.experts.{expert}.{own}_proj.weight"] for expert in range(len(layer.gate))
        ]
        getattr(layer, own).copy_(torch.stack(experts))


def add_layer(layer: MtpLayer, directory: Path) -> None:
    """Add the layer to the model's files, in the layout of DeepSeek-V3's checkpoints: BF16, numbered after the last.

    The model's other tensors keep their bytes.
    """
    weights, settings = directory / "model.safetensors", directory / "config.json"
    config = json.loads(settings.read_text(encoding="utf-8"))
    prefix = f"model.layers.{config['num_hidden_layers']}."
    stored = {name: tensor for name, tensor in load_file(weights).items() if not name.startswith(prefix)}
    added: dict[str, Tensor] = {
        "enorm": layer.embedding_norm,
        "hnorm": layer.hidden_norm,
        "eh_proj": layer.projection,
        "shared_head.norm": layer.final_norm,
        **{name: getattr(layer.layer, own) for name, own in NAMES.items()},
    }
    for own in ("gate", "up", "down"):
        for expert, weight in enumerate(getattr(layer.layer, own)):
            added[f"mlp.experts.{expert}.{own}_proj"] = weight
    for name, tensor in added.items():
        stored[f"{prefix}{name}.weight"] = tensor.detach().to(torch.bfloat16).contiguous()
    unfinished = weights.with_suffix(".part")
    save_file(stored, unfinished, metadata={"format": "pt"})
    unfinished.chmod(0o644)
    unfinished.replace(weights)
    config["num_nextn_predict_layers"] = 1
    settings.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
