"""One step in which rows use adapters: what its dense products, experts, embeddings and logits add."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from twofold._core.device import AdaptedRows
from twofold.device.adapters.factors import FactorTable
from twofold.device.adapters.products import AdaptedProducts, DenseTable, HomeRows, Products

TABLE, EMBEDDING, HEAD, HEAD_PRODUCT = range(4)
"""Parts of an adapter's ends: its own embedding table, what is added to embeddings, its own head, what is added to
logits."""


@dataclass(frozen=True)
class AdaptedExperts:
    """Adapters' parts of routed experts, around the launches of each layer's experts."""

    products: Products
    table: FactorTable
    """[layers, adapters, experts, gate, up and down]."""
    adapters: Tensor
    """int32 [T], -1: none."""

    def before(self, layer: int, normed: Tensor, ids: Tensor, where: Tensor | int, parts: Tensor) -> None:
        """Fill parts [pairs, 2, intermediate] f32 with what is added to gate and up before the activation.

        Args:
            normed: bf16 [T, hidden]; ids: int32 [T, top_k]; where: u8 [T, top_k], or its address.
            parts: `ExpertBuffers.adapted` of the launches that follow.
        """
        table = self.table.native(layer, first=0, count=2)
        rows, num_pairs = self._rows(ids, where), ids.numel()
        t = self.products.ranks(num_pairs, 2 * self.table.max_rank)
        self.products.down(table, rows, normed, t, divisor=ids.shape[1])
        self.products.up(table, rows, t, parts[:num_pairs].flatten(1), adds=False)

    def after(self, layer: int, parts: Tensor, ids: Tensor, where: Tensor | int, outputs: Tensor) -> None:
        """Add to outputs f32 [pairs, hidden], reading what the launches left in parts."""
        rows, num_pairs = self._rows(ids, where), ids.numel()
        self.products.add(
            self.table.native(layer, first=2, count=1),
            self.table.max_rank,
            rows,
            parts[:num_pairs, 0],
            outputs[:num_pairs],
        )

    def _rows(self, ids: Tensor, where: Tensor | int) -> AdaptedRows:
        num_tokens, top_k = ids.shape
        return AdaptedRows(
            adapters=self.adapters, entries=ids, where=where, num_tokens=num_tokens, per_token=top_k
        )


@dataclass(frozen=True)
class AdaptedStep:
    """See `DeviceAdapters.step`."""

    homes: Sequence[HomeRows]
    """By device; embeddings and logits are on the first one."""
    dense: Mapping[int, DenseTable]
    """By the id of the tensor that adapters change."""
    expert_tables: Sequence[FactorTable]
    """By device; empty: no adapter changes an expert."""
    ends: FactorTable | None
    """[1, adapters, 1, parts]; None: no adapter changes embeddings or logits."""

    def of(self, rows: Sequence[int]) -> AdaptedStep:
        """The same with some of the step's rows."""
        homes = [
            replace(each, adapters=each.adapters[torch.tensor(rows, device=each.adapters.device)])
            for each in self.homes
        ]
        return replace(self, homes=homes)

    def dense_products(self) -> AbstractContextManager[object]:
        """Context of the products with the model's dense tensors."""
        return AdaptedProducts(self.dense, self.homes)

    @property
    def experts(self) -> list[AdaptedExperts]:
        """By device; empty: none is changed."""
        return [
            AdaptedExperts(home.products, table, home.adapters)
            for home, table in zip(self.homes, self.expert_tables, strict=False)
        ]

    @property
    def products(self) -> Products:
        """Products of the first device."""
        return self.homes[0].products

    def change_embeddings(self, token_ids: Tensor, rows: Tensor) -> None:
        """Change embeddings f32 [T, hidden] of tokens int64 [T] in place, before they are scaled."""
        if self.ends is None:
            return
        width, own = rows.shape[1], self._rows()
        self.products.gather(self.ends.native(first=TABLE, count=1, max_rank=width), own, token_ids, rows)
        table = self.ends.native(first=EMBEDDING, count=1)
        t = self.products.ranks(len(rows), self.ends.max_rank)
        self.products.gather(table, own, token_ids, t)
        self.products.up(table, own, t, rows, adds=True)

    def change_logits(self, normed: Tensor, logits: Tensor) -> None:
        """Change logits f32 [T, vocabulary] of the head's inputs bf16 [T, hidden] in place."""
        if self.ends is None:
            return
        own = self._rows()
        whole = self.ends.native(first=HEAD, count=1, max_rank=logits.shape[1])
        self.products.down(whole, own, normed, logits)
        table = self.ends.native(first=HEAD_PRODUCT, count=1)
        self.products.add(table, self.ends.max_rank, own, normed, logits)

    def _rows(self) -> AdaptedRows:
        adapters = self.homes[0].adapters
        return AdaptedRows(adapters=adapters, num_tokens=len(adapters), per_token=1)
