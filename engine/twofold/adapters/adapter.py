"""A LoRA adapter in the one form that all layouts are read into.

Keys are names of the base model's matrices as its published checkpoint has them, without `.weight`:

    model.layers.3.self_attn.q_proj      model.layers.3.mlp.shared_expert.up_proj
    model.layers.0.mlp.down_proj         lm_head, model.embed_tokens

A routed expert has up to three keys, whatever the checkpoint's form (separate, stacked or fused) and its names (w1, w3
and w2 are gate, up and down). EXPERTS is the name of the layer's experts, a key of `BaseShapes.experts`:

    EXPERTS.7.gate_proj      EXPERTS.7.up_proj      EXPERTS.7.down_proj
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class LowRank:
    """The change of one matrix W [rows, columns]: W + b @ a. The scale is a factor of b.

    The arrays are contiguous and read-only. Several products may share one: an expert's gate and up share `a` where the
    file has them fused. An embedding has one row per token, so token t adds b[t] @ a to its row.
    """

    a: F32
    """float32 [rank, columns]."""
    b: F32
    """float32 [rows, rank]."""

    @property
    def rank(self) -> int:
        return int(self.a.shape[0])


@dataclass(frozen=True, eq=False)
class Adapter:
    """One adapter of a base model."""

    name: str
    digest: str
    """SHA-256 of its files, hexadecimal."""
    products: Mapping[str, LowRank]
    """Changes by the name of their matrix."""
    replaced: Mapping[str, F32]
    """Whole matrices in place of the base's (embedding, head), float32 [rows, columns]. A product of the same name
    changes this one."""
    base_name: str
    """Name of the base model that the adapter gives; empty if it gives none."""

    @property
    def max_rank(self) -> int:
        """The largest rank of its products; 0 without any."""
        return max((product.rank for product in self.products.values()), default=0)

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays; one that several products share counts once."""
        return sum(dict(map(_extent, self._arrays())).values())

    def _arrays(self) -> Iterable[F32]:
        yield from self.replaced.values()
        for product in self.products.values():
            yield from (product.a, product.b)


def _extent(array: F32) -> tuple[int, int]:
    """(address, bytes) of a contiguous array."""
    return array.ctypes.data, array.nbytes
