"""Spec of a model's tensor: its names in both kinds of files, its shape, and how it may be quantised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Role = Literal["matrix", "exact", "embedding"]
"""matrix: any format; embedding: the embedding's rows and the head, 8 bits at least; exact: floats (norms, biases, a
router's gate)."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor as a block requires it."""

    name: str
    """Hugging Face's name, also used internally."""
    shape: tuple[int, ...]
    """Rows first; a stack of matrices is (matrices, rows, columns)."""
    role: Role
    gguf: str
    """Name in GGUF files."""
    gguf_rows: tuple[int, int] | None = None
    """(first row, rows in all) if several of our tensors are one in the GGUF file."""
    gguf_heads: int = 0
    """Heads whose rows a GGUF file orders for rotation of adjacent pairs (2i, 2i + 1), where we pair (i, i + d/2); 0:
    rows are in our order."""
    zero_centred: bool = False
    """Whether 1 is added to a norm's values on reading."""


HasTensor = Callable[[TensorSpec], bool]
"""Whether a checkpoint has a tensor: for choosing between naming variants."""
