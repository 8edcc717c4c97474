"""Adapters of a loaded model: puts each of an adapter's products to the rows of the packed matrix that it changes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Protocol

import numpy as np

from twofold import _core
from twofold.adapters.adapter import Adapter, LowRank
from twofold.adapters.base_shapes import PARTS, BaseExperts, BaseShapes
from twofold.api.errors import ModelLoadError
from twofold.blocks import ops
from twofold.blocks.block import ExpertBlock
from twofold.blocks.block_weights import BlockWeights, Stacked
from twofold.models.model_files import ModelFiles
from twofold.step.adapter_rows import F32, AdapterEnds, AdapterSteps
from twofold.weights.gguf_source import GgufSource
from twofold.weights.weight_format import WeightMatrix

_WEIGHT: Final = ".weight"
EMBEDDING_NAME: Final = "model.embed_tokens"
HEAD_NAME: Final = "lm_head"


def shapes_of(files: ModelFiles) -> BaseShapes:
    """The matrices of a model that adapters may change, and what their files leave out of it."""
    # A tied head has the embedding's spec. Its adapter is one of its own, but not in GGUF files.
    specs = list(dict.fromkeys(spec for _, weights in files.parts() for spec in weights.specs.values()))
    if files.config.head.tied:
        specs.append(replace(files.head.specs["vocabulary"], name=f"{HEAD_NAME}{_WEIGHT}", gguf=""))
    experts = {}
    for block, weights in files.blocks():
        for group, own in block.of_one_size(weights) if isinstance(block, ExpertBlock) else ():
            routed = group.routed
            sizes = routed.num_experts, routed.hidden_size, routed.intermediate_size
            experts[_name(group, own)] = BaseExperts(*sizes, **group.fused_form._asdict())
    fields = files.tensors.file.fields if isinstance(files.tensors, GgufSource) else {}
    architecture = str(fields.get("general.architecture", ""))
    return BaseShapes.of_specs(specs, experts, renamed=files.config.renamed, architecture=architecture)


def _name(experts: ExpertBlock, weights: BlockWeights) -> str:
    return experts.stacked_experts(weights)[0].name.rpartition(".")[0]


def refused(adapter: Adapter, name: str) -> ModelLoadError:
    """The error for a product of a matrix that takes none."""
    return ModelLoadError(
        f"adapter {adapter.name}: {name}: adapters do not change this matrix; train it without this module"
    )


@dataclass(frozen=True)
class Prepared:
    """An adapter's products, each with the matrix that it changes."""

    matrices: list[tuple[ops.PackedMatrix, ops.LowRank]] = field(default_factory=list)
    experts: list[tuple[tuple[int, int, int], ops.LowRank]] = field(default_factory=list)
    """((layer, expert, matrix), product)."""
    ends: AdapterEnds | None = None

    @property
    def num_bytes(self) -> int:
        return sum(part.bytes for _, part in (*self.matrices, *self.experts))


def low_rank_like(likes: dict[tuple[str, int], ops.LowRank], module: str, product: LowRank) -> ops.LowRank:
    """A native product of an expert, which shares `a` with an earlier one of the same expert if it is the same array.

    likes: products by module and address of `a`.
    """
    key = module, product.a.ctypes.data
    made = ops.LowRank(product.a, product.b, like=likes.get(key))
    likes.setdefault(key, made)
    return made


class AdaptedModel(Protocol):
    """A loaded model that adapters may be put to. Changes happen between two steps."""

    @property
    def shapes(self) -> BaseShapes:
        """The matrices of the model, for reading an adapter's files."""

    def prepare(self, adapter: Adapter) -> Any:
        """The adapter's products as `put` takes them, with their `num_bytes`. Takes its time; on any thread.

        Raises ModelLoadError for a product of a matrix that takes none.
        """

    def lacks_room(self, prepared: Any) -> bool:
        """Whether other adapters must leave memory first."""

    def put(self, number: int, prepared: Any) -> None:
        """Compute rows of the adapter `number` with these products, completely or not at all.

        Raises ModelLoadError, and CapacityError where memory is too small.
        """

    def drop(self, number: int) -> None:
        """Forget the adapter; no running request may use it. Safe for one that was never put."""


@dataclass(frozen=True)
class ModelAdapters:
    """What adapters of one model may change, and where. Changes happen between two steps."""

    files: ModelFiles
    """The files that the model was loaded from; their tensors know the packed matrices."""
    steps: AdapterSteps
    store: _core.ExpertStore
    head: ops.LmHead
    pool: ops.ThreadPool

    @cached_property
    def shapes(self) -> BaseShapes:
        """The matrices of the model, for reading an adapter's files."""
        return shapes_of(self.files)

    def prepare(self, adapter: Adapter) -> Prepared:
        """The adapter's products in native memory. Takes its time; on any thread.

        Raises ModelLoadError for a product of a matrix that takes none.
        """
        table, head = adapter.replaced.get(EMBEDDING_NAME), adapter.replaced.get(HEAD_NAME)
        own_head = None if head is None else self._own_head(head, adapter.products.get(HEAD_NAME))
        ends = table, adapter.products.get(EMBEDDING_NAME), own_head
        likes: dict[tuple[str, int], ops.LowRank] = {}
        prepared = Prepared(ends=AdapterEnds(*ends) if any(each is not None for each in ends) else None)
        for name, product in adapter.products.items():
            if name == EMBEDDING_NAME or (name == HEAD_NAME and head is not None):
                continue
            module, _, part = name.rpartition(".")
            experts, _, expert = module.rpartition(".")
            if experts in self._places:
                layer, first = self._places[experts]
                place = layer, first + int(expert), PARTS.index(part)
                prepared.experts.append((place, low_rank_like(likes, module, product)))
                continue
            if (places := self._matrices.get(name)) is None:
                raise refused(adapter, name)
            for matrix, first_row, own, transposed in places:
                a, b = product.a, product.b[own.start : own.stop]
                if transposed:
                    a, b = np.ascontiguousarray(b.T), np.ascontiguousarray(a.T)
                prepared.matrices.append((matrix, ops.LowRank(a, b, first_row)))
        return prepared

    def lacks_room(self, prepared: Prepared) -> bool:
        """See `AdaptedModel.lacks_room`: only their number is bounded."""
        return False

    def put(self, number: int, prepared: Prepared) -> None:
        """Compute rows of the adapter `number` with these products, completely or not at all. Raises ModelLoadError."""
        try:
            for matrix, part in prepared.matrices:
                matrix.put_adapter(self.steps.native, number, part)
            for place, part in prepared.experts:
                self.store.put_adapter(self.steps.native, number, place, part)
            if prepared.ends is not None:
                self.steps.ends[number] = prepared.ends
        except ValueError as error:
            self.drop(number)
            raise ModelLoadError(f"the adapter does not fit the model: {error}") from None

    def drop(self, number: int) -> None:
        """Forget the adapter; no running request may use it. Safe for one that was never put."""
        for places in self._matrices.values():
            for place in places:
                place.matrix.drop_adapter(number)
        self.store.drop_adapter(number)
        self.steps.ends.pop(number, None)

    def _own_head(self, weights: F32, product: LowRank | None) -> ops.LmHead:
        """The model's head with other weights [vocabulary, hidden], which the product changes."""
        if product is not None:
            weights = weights + product.b @ product.a
        matrix = WeightMatrix(weights, "f32", weights.shape[1])
        return self.head.with_weight(ops.PackedMatrix(self.pool, [matrix]))

    @cached_property
    def _matrices(self) -> dict[str, list[Stacked]]:
        """Where the rows of each matrix lie, by its name."""
        found = {
            weights.specs[part].name.removesuffix(_WEIGHT): places
            for _, weights in self.files.blocks()
            for part, places in weights.stacked.items()
        }
        return found | {
            HEAD_NAME: self.files.head.stacked["vocabulary"]
        }  # whatever its tensor is called, where it is tied

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        """(MoE layer, number of the first one) by the name of experts."""
        found: dict[str, tuple[int, int]] = {}
        layer = 0
        for block, weights in self.files.blocks():
            if isinstance(block, ExpertBlock):
                first = 0
                for group, own in block.of_one_size(weights):
                    found[_name(group, own)] = layer, first
                    first += group.routed.num_experts
                layer += 1
        return found
