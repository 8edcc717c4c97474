"""A tensor that a model is made of: its names in both kinds of files, its shape, and what quantising may do to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Role = Literal["matrix", "exact", "embedding"]
"""matrix: any format; embedding: rows of tokens and the head, of 8 bits at least; exact: floats (norms, biases, a
router's gate)."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor as a block wants it."""

    name: str
    """Hugging Face's, and ours."""
    shape: tuple[int, ...]
    """Rows first; a stack of matrices is (matrices, rows, columns)."""
    role: Role
    gguf: str
    """What a GGUF file calls it."""
    gguf_rows: tuple[int, int] | None = None
    """(first row, rows in all) where several of ours are one tensor in the GGUF file."""
    gguf_heads: int = 0
    """Heads whose rows a GGUF file has in the order in which rotation pairs neighbours (2i, 2i + 1), where we pair
    (i, i + d/2); 0: rows are in our order."""
    zero_centred: bool = False
    """Of a norm: whether 1 is added to its values when they are read."""


Found = Callable[[TensorSpec], bool]
"""Whether a checkpoint has a tensor: how a block chooses between spellings."""
