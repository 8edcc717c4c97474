"""Block interface: the parts that a decoder layer is made of.

A block is the configuration of one part of one layer, a frozen dataclass. It owns the names and shapes of its tensors,
its per-sequence state, its cost, and its operators. Code that loads, sizes, quantises or runs a model iterates over the
blocks of its layers and knows no block by name.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

from twofold.blocks import ops
from twofold.blocks.block_weights import F32, BlockWeights
from twofold.blocks.device_step import Allocate, DeviceBlock, DeviceState, DeviceWeights
from twofold.weights.tensor_spec import HasTensor, TensorSpec
from twofold.weights.weight_format import (
    Activation,
    ExpertFormats,
    ExpertWeights,
    LayerFormats,
    distinct_formats,
    formats_by_expert,
    packed_expert_bytes,
)


@dataclass(frozen=True)
class Pages:
    """Per-token state, kept in pages: `planes` rows of `elements` each."""

    planes: int
    elements: int

    @property
    def elements_per_token(self) -> int:
        return self.planes * self.elements


@dataclass(frozen=True)
class Record:
    """Per-sequence state of a fixed size, independent of the sequence's length."""

    num_bytes: int


State = Pages | Record
ShapeOf = Callable[[str], tuple[int, ...] | None]
"""Shape of a checkpoint's tensor; None: it has no such tensor."""


@dataclass(frozen=True)
class Cost:
    """Cost of one forward pass through a block on an accelerator."""

    num_bytes: float
    """Weights and state read, in bytes."""
    flops: float
    mtp_bytes: float = 0.0
    """Part of the weights that is read a second time to predict the next layer's experts, in bytes."""


@dataclass(frozen=True)
class BlockPart:
    """One part of a block."""

    name: str
    tensors: Mapping[str, TensorSpec] = field(default_factory=dict)
    settings: object = None
    """Dataclass that says what kind of part it is."""
    per_position: Cost | None = None
    """Cost of one query and each position that it attends to; None: the part reads no state by position."""


@dataclass(frozen=True)
class RoutedShape:
    """Number of experts, experts per token, and expert sizes."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: Activation = "silu"
    biases: bool = False
    """Whether gate, up and down have biases."""
    limit: float = 0.0
    """Bound of gate and up, which layers may have of their own (kernels/include/twofold/expert.h); 0: none."""
    second_half: int = 0
    """Intermediate size of the second half of the experts, which tokens of pictures have; 0: there are no such."""

    def expert_bytes(self, formats: ExpertFormats) -> int:
        """Bytes of the first expert in memory, with (gate, up, down) in these formats."""
        return packed_expert_bytes(formats, self.hidden_size, self.intermediate_size, biases=self.biases)

    @property
    def intermediate_sizes(self) -> tuple[int, ...]:
        """Distinct sizes, each of as many adjacent experts."""
        return (self.intermediate_size, self.second_half) if self.second_half else (self.intermediate_size,)

    def bytes_by_expert(self, formats: LayerFormats) -> list[int]:
        """Bytes in memory of each expert of a layer, with (gate, up, down) in these formats."""
        each, sizes = formats_by_expert(formats, self.num_experts), self.intermediate_sizes
        bytes_of = {
            (its, size): packed_expert_bytes(its, self.hidden_size, size, biases=self.biases)
            for its in distinct_formats(formats)
            for size in sizes
        }
        of_size = self.num_experts // len(sizes)
        return [bytes_of[its, sizes[n // of_size]] for n, its in enumerate(each)]


class FusedForm(NamedTuple):
    """How transformers keeps a layer's experts as stacks, which adapters of whole stacks follow."""

    interleaved: bool = False
    """Whether rows of gate and up alternate; otherwise gate's come first."""
    transposed: bool = False
    """Whether stacks are [experts, in, out]."""


class ModelPart(ABC):
    """Weights of a model and their cost: a block, the embedding or the head."""

    kind: ClassVar[str]
    """Name used to choose formats: attention, experts, …"""

    @abstractmethod
    def tensors(self, found: HasTensor) -> Mapping[str, TensorSpec]:
        """Tensors by role, in this checkpoint's naming."""

    def problems(self) -> Iterator[str]:
        """Invalid sizes, described in config.json's terms."""
        return iter(())

    def check(self, weights: BlockWeights) -> None:
        """Raises ModelLoadError for tensors that this part cannot run; reads headers only."""
        weights.check()

    def host_bytes(self, weights: BlockWeights) -> int:
        """Bytes in host memory, packed for the CPU's kernels."""
        return sum(weights.packed_bytes(part) for part in weights.specs)

    def device_bytes(self, weights: BlockWeights) -> int:
        """Bytes on a device, where matrices are bf16 and exact tensors are f32."""
        return sum(
            (4 if spec.role == "exact" else 2) * math.prod(spec.shape) for spec in weights.specs.values()
        )

    def cost(self, weights: BlockWeights, tokens: int = 1, context_len: int = 0) -> Cost:
        """Cost of `tokens` tokens of one sequence after `context_len` earlier tokens."""
        return Cost(self.host_bytes(weights), tokens * self._flops_per_token(weights))

    @staticmethod
    def _flops_per_token(weights: BlockWeights) -> float:
        shapes = (spec.shape for spec in weights.specs.values())
        return sum(2.0 * math.prod(shape) for shape in shapes if len(shape) > 1)


@dataclass(frozen=True)
class Block(ModelPart):
    """One block of one layer; adds to the residual stream."""

    layer: int
    record_at: int = field(default=0, kw_only=True)
    """Byte of the layer's record per sequence where the block's begins: records of its earlier blocks come before."""

    def as_stored(self, shape_of: ShapeOf) -> Block:
        """This block, or the variant of it that a checkpoint with tensors of these shapes stores."""
        return self

    def parts(self, found: HasTensor) -> tuple[BlockPart, ...]:
        """The block's parts, in the order of computation; a block that is not composed is one part."""
        return (BlockPart(self.kind, dict(self.tensors(found)), self),)

    @property
    def state(self) -> tuple[State, ...]:
        """State that the block keeps per sequence."""
        return ()

    @property
    def state_layer(self) -> int:
        """Layer whose state the block reads: its own, or an earlier one, whose state comes before any of its own."""
        return self.layer

    @property
    def bidirectional_pictures(self) -> bool:
        """Whether tokens of a picture attend to one another."""
        return False

    @property
    def reads_pictures(self) -> bool:
        """Whether the block can compute tokens of pictures."""
        return True

    @property
    def device_page_elements(self) -> int:
        """Elements per token of the pages on a device."""
        return sum(kept.elements_per_token for kept in self.state if isinstance(kept, Pages))

    @property
    def device_elements_per_token(self) -> int:
        """Activation values per token that are alive at once on a device, excluding the residual stream."""
        return 0

    @property
    def missing_in_device_kernels(self) -> str | None:
        """Part of the block that only the CPU and plain torch compute; None: device kernels have it all."""
        return None

    @property
    def device_record_bytes(self) -> int:
        """Bytes of a sequence's record on a device."""
        return 0

    @abstractmethod
    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, moe_layer: int) -> ops.Block:
        """Pack the weights and create the CPU operator. Raises ModelLoadError.

        `moe_layer` is the layer's index among those with routed experts: its place in the expert store.
        """

    @abstractmethod
    def device(self, weights: DeviceWeights, moe_layer: int) -> DeviceBlock:
        """Copy the weights and create the device operator. Needs torch."""

    def device_state(
        self, num_pages: int, page_size: int, allocate: Allocate, num_records: int = 0
    ) -> DeviceState:
        """Device memory for the state of all sequences."""
        return ()


def in_layer(blocks: Iterable[Block], layer: int) -> tuple[Block, ...]:
    """The blocks of a layer with its number, and a place for the record of each."""
    found: list[Block] = []
    record_at = 0
    for block in blocks:
        own = sum(kept.num_bytes for kept in block.state if isinstance(kept, Record))
        found.append(replace(block, layer=layer, record_at=record_at if own else 0))
        record_at += own
    return tuple(found)


@dataclass(frozen=True)
class ResidualBlock(Block):
    """A block between preceding blocks and the residual stream: makes what they read, or takes what they add."""

    over: int = field(default=1, kw_only=True)
    """Number of preceding blocks covered."""


@dataclass(frozen=True)
class ComposedBlock(Block):
    """A block composed of parts."""

    @abstractmethod
    def parts(self, found: HasTensor) -> tuple[BlockPart, ...]: ...

    def tensors(self, found: HasTensor) -> dict[str, TensorSpec]:
        return {role: spec for part in self.parts(found) for role, spec in part.tensors.items()}

    @property
    def missing_in_device_kernels(self) -> str | None:
        """That of the first part which has one."""
        settings = (part.settings for part in self.parts(lambda spec: False))
        found = (getattr(each, "missing_in_device_kernels", None) for each in settings)
        return next(filter(None, found), None)


Changed = TypeVar("Changed", bound=Block)


def changed(block: Changed, parts: Mapping[str, Any]) -> Changed:
    """`block` with other parts: a mapping changes fields of the part that is there, anything else replaces it."""
    values = {
        name: replace(getattr(block, name), **part) if isinstance(part, Mapping) else part
        for name, part in parts.items()
    }
    return replace(block, **values)


class ExpertBlock(Block):
    """A block whose weights are individually placed experts: they go to the expert store."""

    @property
    @abstractmethod
    def routed(self) -> RoutedShape: ...

    def of_one_size(self, weights: BlockWeights) -> Sequence[tuple[ExpertBlock, BlockWeights]]:
        """The experts by their size, in the order of their numbers, each with its tensors."""
        return ((self, weights),)

    @abstractmethod
    def experts(self, weights: BlockWeights) -> Sequence[ExpertWeights]:
        """Expert weights as views of the files (copies made on demand if the files hold matrices transposed).

        Raises ModelLoadError if the experts cannot be told apart.
        """

    def biases(self, weights: BlockWeights) -> F32 | None:
        """Biases [experts, 2 intermediate + hidden], in the order gate, up, down; None if there are none."""
        return None

    @abstractmethod
    def expert_formats(self, weights: BlockWeights) -> LayerFormats:
        """Formats of the experts' matrices; reads no weights."""

    @abstractmethod
    def stacked_experts(self, weights: BlockWeights) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
        """Names and shapes under which (gate, up, down) of all experts of the first size are written to a new
        checkpoint."""

    def stacked_biases(self, weights: BlockWeights) -> tuple[TensorSpec, ...]:
        """Like `stacked_experts`, for the biases, if any."""
        return ()

    @property
    def fused_form(self) -> FusedForm:
        return FusedForm()
