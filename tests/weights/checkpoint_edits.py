"""A small checkpoint, and edits of the headers and the index of safetensors files."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tiny_models.writing import TinyModel

SMALL = TinyModel(num_layers=2, num_experts=4, vocab_size=270)
INDEX = "model.safetensors.index.json"


def edit_header(file: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def edit_index(directory: Path, edit: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((directory / INDEX).read_text())
    edit(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))
