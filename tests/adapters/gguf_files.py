"""GGUF adapters, written by the `gguf` package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt


def write_gguf_adapter(
    path: Path,
    tensors: Mapping[str, npt.NDArray[Any]],
    *,
    architecture: str = "qwen3moe",
    alpha: float | None = 4.0,
    type_name: str = "F32",
    edit: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """Save tensors as one of llama.cpp's adapters; `edit` may add metadata."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    if alpha is not None:
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    if edit is not None:
        edit(writer)
    kind = gguf.GGMLQuantizationType[type_name]
    for name, values in tensors.items():
        if type_name == "F32":
            writer.add_tensor(name, np.ascontiguousarray(values))
        else:
            writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
