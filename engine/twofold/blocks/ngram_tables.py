"""Tables of n-grams (Qwen3.8-Flash-Next): rows of all layers, by hashes of the last tokens; a part of the embedding.

Reference: transformers `models/qwen4_exp`, `Qwen4ExpTextNGramEmbedding`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from twofold.api.errors import ModelLoadError
from twofold.blocks import ops
from twofold.blocks.block_weights import F32, BlockWeights
from twofold.blocks.ngram_hash import NgramHash
from twofold.blocks.table_inputs import I64, HostInputs, TableInputs
from twofold.weights.tensor_spec import HasTensor, TensorSpec

if TYPE_CHECKING:
    from twofold.weights.checkpoint import Checkpoint

MODULE = "ple.ple_embedding"
"""Module of a layer's table in Hugging Face checkpoints."""


@dataclass(frozen=True)
class NgramTables(TableInputs):
    """Tables of n-grams of some layers."""

    layers: tuple[int, ...]
    """The layers that have one, ascending."""
    hashes: tuple[NgramHash, ...]
    """Hashes of each table."""
    size: int
    """Elements of a layer's input: the rows of all heads, one after the other."""
    divisor: int = 1
    """The rows of a table are padded to a multiple of it."""
    num_shards: int = 1
    """Parts of a table that checkpoints store by themselves, unless they store it whole."""

    @property
    def width(self) -> int:
        return self.size * len(self.layers)

    @property
    def num_ids(self) -> int:
        return len(self.hashes[0].multipliers)

    @property
    def on_host(self) -> bool:
        return True

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return self.size // len(self.hashes[0].sizes)

    def first(self, layer: int) -> int:
        """Where a layer's input begins in those of all layers."""
        return self.size * self.layers.index(layer)

    def problems(self, vocab_size: int) -> Iterator[str]:
        if self.size % len(self.hashes[0].sizes):
            yield f"ple_embed_dim {self.size} is not a multiple of {len(self.hashes[0].sizes)} rows of a token"

    @property
    def ignored(self) -> tuple[str, ...]:
        """Patterns of tensors whose values are those of the configuration; `check` compares them."""
        return tuple(f"model.layers.*.{MODULE}.{name}" for name in ("layer_multipliers", "ngram_heads_*"))

    def tensors(self, found: HasTensor) -> dict[str, TensorSpec]:
        specs: dict[str, TensorSpec] = {}
        for layer, hashes in zip(self.layers, self.hashes, strict=True):
            num_rows = -(-hashes.num_rows // self.divisor) * self.divisor
            name = f"model.layers.{layer}.{MODULE}.ngram_embedding"
            of_gguf = "" if specs else "per_layer_token_embd.weight"  # their files have one table
            whole = TensorSpec(f"{name}.weight", (num_rows, self.columns), "embedding", of_gguf)
            if self.num_shards == 1 or found(whole):
                specs[f"table {layer}.0"] = whole
                continue
            of_shard = -(-num_rows // self.num_shards)
            for number, begin in enumerate(range(0, num_rows, of_shard)):
                shape = (min(of_shard, num_rows - begin), self.columns)
                shard = replace(whole, name=f"{name}.shard_{number}.weight", shape=shape, gguf="")
                specs[f"table {layer}.{number}"] = shard
        return specs

    def table_parts(self, weights: BlockWeights) -> tuple[tuple[str, ...], ...]:
        names = (f"table {layer}." for layer in self.layers)
        return tuple(tuple(part for part in weights.specs if part.startswith(name)) for name in names)

    def check(self, weights: BlockWeights) -> None:
        """Raises ModelLoadError for hashes other than the configuration's."""
        for layer, hashes in zip(self.layers, self.hashes, strict=True):
            for name, expected in (
                ("layer_multipliers", hashes.multipliers),
                ("ngram_heads_vocab_sizes", hashes.sizes),
                ("ngram_heads_offsets", hashes.offsets),
            ):
                _expect_integers(weights, f"model.layers.{layer}.{MODULE}.{name}", expected)

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool) -> HostInputs:
        return _NgramRows(self, self.row_tables(weights, pool))


def _expect_integers(weights: BlockWeights, name: str, expected: tuple[int, ...]) -> None:
    if name not in weights.source:
        return
    source: Checkpoint = weights.source  # type: ignore[assignment]  # files of GGUF have no such names
    if not np.array_equal(source.integers(name, (len(expected),)), expected):
        raise ModelLoadError(
            f"{source.entry(name).file}: tensor {name} has other values than vocab_size, ngram_size, heads_per_ngram, "
            "ngram_vocab_size_base and seed give; configuration and weights belong to different models, download both "
            "again"
        )


class _NgramRows(HostInputs):
    def __init__(self, inputs: NgramTables, tables: list[ops.RowTable]) -> None:
        super().__init__(tables)
        self._hashes = inputs.hashes
        self._size = inputs.size

    def rows(self, ids: I64) -> list[I64]:
        return [each.rows(ids) for each in self._hashes]

    def forward(self, ids: I64, hidden: F32 | None, out: F32) -> None:
        for number, (table, rows) in enumerate(zip(self.tables, self.rows(ids), strict=True)):
            table.read(rows, out, number * self._size)
