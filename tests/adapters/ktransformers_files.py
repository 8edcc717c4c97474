"""KTransformers' adapters, written by hand."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from safetensors.numpy import save_file

from tests.adapters.adapter_files import COUNT, HIDDEN, INNER, LAYER, Tensors, factors, numbers, write

Q: Final = f"{LAYER}.self_attn.q_proj"
FUSED: Final = "fused_expert_lora.safetensors"
MANIFEST: Final = "kt_adapter_manifest.json"


def fused(rank: int = 2) -> Tensors:
    """The routed experts' tensors of the one layer."""
    tensors: Tensors = {}
    for part, rows, columns in (("gate", INNER, HIDDEN), ("up", INNER, HIDDEN), ("down", HIDDEN, INNER)):
        tensors[f"layers.0.experts.{part}_lora_a"] = numbers(COUNT, rank, columns, seed=len(tensors))
        tensors[f"layers.0.experts.{part}_lora_b"] = numbers(COUNT, rows, rank, seed=len(tensors))
    return tensors


def write_kt(directory: Path, tensors: Tensors, **settings: Any) -> Path:
    write(directory, factors(Q, 8, HIDDEN), **settings)
    save_file(tensors, directory / FUSED)
    return directory


def write_manifest(
    directory: Path, edit: Callable[[dict[str, Any]], object] | None = None, **lora: Any
) -> Path:
    files = ("adapter_config.json", "adapter_model.safetensors", FUSED)
    artifacts = {name: _record(directory / name) for name in files}
    manifest = {
        "version": 1,
        "status": "ready",
        "lora": {"rank": 2, "alpha": 4.0, **lora},
        "artifacts": artifacts,
    }
    if edit is not None:
        edit(manifest)
    (directory / MANIFEST).write_text(json.dumps(manifest))
    return directory


def _record(file: Path) -> dict[str, Any]:
    raw = file.read_bytes()
    return {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
