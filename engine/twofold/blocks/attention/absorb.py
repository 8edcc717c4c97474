"""Absorb: matrices that would expand latents to keys and values, multiplied with queries and latents instead."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from twofold.blocks import ops
from twofold.blocks.attention.layer_names import LayerNames
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.device_step import DeviceWeights
from twofold.weights.tensor_spec import HasTensor, TensorSpec
from twofold.weights.weight_format import SCALE_GRID, WeightMatrix, packed_bytes

if TYPE_CHECKING:
    from torch import Tensor

_PLAIN: Final = ("f32", "bf16", "f16")


@dataclass(frozen=True)
class Absorbed:
    """The keys' and the values' part of kv_b, by head."""

    num_heads: int
    nope: int
    """Elements of a key that are expanded."""
    value: int
    latent: int

    def tensors(self, names: LayerNames, found: HasTensor) -> dict[str, TensorSpec]:
        """As published; or by head, with the keys' part transposed, as in newer GGUF files.

        Quantising skips the tensor: absorbed matrices are multiplied with its columns, not with its rows.
        """
        heads, nope, value, latent, of = self.num_heads, self.nope, self.value, self.latent, names.matrix
        kv_b = of("kv_b_proj", "attn_kv_b", heads * (nope + value), latent, role="exact")
        k_b = of("k_b_proj", "attn_k_b", heads, latent, nope, role="exact")
        v_b = of("v_b_proj", "attn_v_b", heads, value, latent, role="exact")
        by_head = found(k_b) and not found(kv_b)
        return {"k_b": k_b, "v_b": v_b} if by_head else {"kv_b": kv_b}

    def host_bytes(self, weights: BlockWeights) -> int:
        if "kv_b" not in weights:
            return weights.packed_bytes("k_b") + weights.packed_bytes("v_b")
        keys, values = self._formats(weights.format("kv_b"))
        of_head = packed_bytes(keys, self.latent, self.nope) + packed_bytes(values, self.value, self.latent)
        return self.num_heads * of_head

    @property
    def num_weights(self) -> int:
        return self.num_heads * (self.nope + self.value) * self.latent

    def matrices(
        self, weights: BlockWeights, pool: ops.ThreadPool
    ) -> tuple[list[WeightMatrix], list[WeightMatrix]]:
        """Exact matrices per head: for its query [latent, nope], and for its weighted latents [value, latent].

        In the file's format if that can be transposed and split by head, else in float32.
        """
        if "kv_b" not in weights:
            return weights.stack("k_b"), weights.stack("v_b")
        whole = weights.matrix("kv_b")
        keys, values = self._formats(whole.format)
        plain = whole
        # A row's own scales would be a column's after transposing.
        turns = keys == whole.format and (whole.scales is None or not whole.has_scales_by_row)
        if not turns or values != whole.format:
            plain = WeightMatrix(ops.dequantise(pool, whole), "f32", whole.columns)
        of_keys = whole if turns else plain
        of_values = whole if values == whole.format else plain
        return (
            [of_keys.row_range(*rows).transposed() for rows in self._rows(0, self.nope)],
            [of_values.row_range(*rows) for rows in self._rows(self.nope, self.nope + self.value)],
        )

    def _rows(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Rows of kv_b from `begin` to `end` of each head."""
        stride = self.nope + self.value
        return [(head * stride + begin, head * stride + end) for head in range(self.num_heads)]

    def _formats(self, format: str) -> tuple[str, str]:
        """Formats of the keys' and the values' part of a kv_b in `format`."""
        if format in _PLAIN:
            return format, format
        if format == "fp8":  # each of its scales is of 128 x 128
            whole = all(size % SCALE_GRID == 0 for size in (self.nope, self.value))
            return ("fp8", "fp8") if whole else ("f32", "f32")
        return "f32", format  # blocks of a row's columns

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, layer: int) -> dict[str, ops.PackedMatrix]:
        absorbed = functools.cache(lambda: self.matrices(weights, pool))
        ends = {"k_b": (0, self.nope), "v_b": (self.nope, self.nope + self.value)}

        def packed(part: str, name: str, index: int) -> ops.PackedMatrix:
            rows = [("kv_b", range(*each)) for each in self._rows(*ends[part])]
            return weights.pack(
                pool,
                f"layer {layer}, attention",
                f"layer {layer}: {name}, absorbed",
                lambda: absorbed()[index],
                by_head=True,
                rows=rows if "kv_b" in weights else (),
                transposed=part == "k_b",
            )

        return {"k_b": packed("k_b", "keys", 0), "v_b": packed("v_b", "values", 1)}

    def device(self, weights: DeviceWeights) -> dict[str, Tensor]:
        """bf16 k_b [heads, nope, latent] and v_b [heads, latent, value]."""
        if "kv_b" not in weights.source:
            return {part: weights.stack(part).transpose(1, 2).contiguous() for part in ("k_b", "v_b")}
        both = weights.matrix("kv_b")
        rows = np.arange(len(both)).reshape(self.num_heads, self.nope + self.value)
        return {
            "k_b": weights.by_head(both, rows[:, : self.nope]),
            "v_b": weights.by_head(both, rows[:, self.nope :], is_transposed=True),
        }
