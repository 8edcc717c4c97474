"""LoRA adapters of the tiny model with random factors, as PEFT writes them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

_ROWS = {"q_proj": 64, "v_proj": 32}


def write_tiny_adapter(directory: Path, seed: int, *, rank: int = 2, columns: int = 48) -> Path:
    """Write an adapter of the attention of `TinyModel()`, large enough to change its answers."""
    directory.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "peft_version": "0.21.2"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for layer in range(3):
        for name, rows in _ROWS.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{module}.lora_A.weight"] = random.normal(size=(rank, columns)).astype(np.float32)
            tensors[f"{module}.lora_B.weight"] = random.normal(size=(rows, rank)).astype(np.float32)
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory
