"""What a layer is made of: the interface of a block, and how a block reads its tensors.

A block is the configuration of one part of one layer, a frozen dataclass. It owns the names and shapes of its tensors,
the state it keeps of a sequence, what it costs, and how it runs. Whoever loads, sizes, quantises or runs a model walks
the blocks of its layers and knows none by name.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from twofold.api.errors import KernelError, ModelLoadError
from twofold.blocks import ops
from twofold.blocks.panels import PACKED_WHEN_LOADED, Matrices, Panels
from twofold.blocks.recoding import Recoding
from twofold.weights.tensor_source import TensorSource
from twofold.weights.tensor_spec import Found, TensorSpec
from twofold.weights.weight_format import (
    Activation,
    ExpertWeights,
    WeightMatrix,
    packed_bytes,
    packed_expert_bytes,
)

if TYPE_CHECKING:
    from twofold.blocks.device_step import Allocate, DeviceBlock, DeviceState, DeviceWeights

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Pages:
    """State of every token, kept in pages: `planes` rows of `elements` each."""

    planes: int
    elements: int

    @property
    def elements_per_token(self) -> int:
        return self.planes * self.elements


@dataclass(frozen=True)
class Record:
    """State of a sequence as a whole, of one size however long it is."""

    num_bytes: int


State = Pages | Record


@dataclass(frozen=True)
class Cost:
    """Of one forward pass through a block on an accelerator."""

    num_bytes: float
    """Weights and state that are read."""
    flops: float
    prediction_bytes: float = 0.0
    """Of the weights, what predicting the next layer's experts reads once more."""


@dataclass(frozen=True)
class RoutedShape:
    """How many experts there are, how many a token goes to, and how large each is."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: Activation = "silu"
    biases: bool = False
    """Of gate, up and down."""

    def expert_bytes(self, formats: tuple[str, str, str]) -> int:
        """Of one expert in memory, (gate, up, down) in these formats."""
        return packed_expert_bytes(formats, self.hidden_size, self.intermediate_size, biases=self.biases)


class BlockWeights:
    """A block's tensors in an opened checkpoint, each by what it is to the block ("q", "norm").

    Matrices are views of the mapped files; vectors are float32 copies. All but `check` raise ModelLoadError only where
    the files changed after it.
    """

    def __init__(
        self,
        source: TensorSource,
        specs: Mapping[str, TensorSpec],
        panels: Panels = PACKED_WHEN_LOADED,
        recoding: Recoding | None = None,
    ) -> None:
        self.source = source
        self.specs = specs
        self._panels = panels
        self.recoding = recoding
        """Of all that need not be exact; None: it is as the files have it."""

    def from_panels(self, panels: Panels) -> BlockWeights:
        """The same tensors, packed by or mapped from `panels`."""
        return BlockWeights(self.source, self.specs, panels, self.recoding)

    def recoded(self, recoding: Recoding | None) -> BlockWeights:
        """The same tensors, read in another format."""
        return BlockWeights(self.source, self.specs, self._panels, recoding)

    def __contains__(self, part: str) -> bool:
        return part in self.specs

    @property
    def names(self) -> list[str]:
        """Of the tensors and of what belongs to them (scales), in the checkpoint."""
        return [
            name for spec in self.specs.values() for name in (spec.name, *self.source.companions(spec.name))
        ]

    @property
    def source_bytes(self) -> int:
        """In the files."""
        return sum(self.source.entry(name).num_bytes for name in self.names)

    def check(self) -> None:
        """Raises ModelLoadError for a tensor that is missing or has the wrong dtype or shape; reads headers only."""
        for part in self.specs:
            self.format(part)

    def format(self, part: str) -> str:
        """In memory."""
        spec = self.specs[part]
        found = self.source.check(spec.name, spec.shape)
        return found if self.recoding is None or spec.role == "exact" else self.recoding.format

    def matrix(self, part: str) -> WeightMatrix:
        spec = self.specs[part]
        found = self.source.matrix(spec.name, (spec.shape[0], spec.shape[1]))
        if self.recoding is None or spec.role == "exact":
            return found
        return self.recoding.matrix(self.source.where, spec.name, found)

    def stack(self, part: str) -> list[WeightMatrix]:
        """As the files have them."""
        spec = self.specs[part]
        return self.source.stack(spec.name, spec.shape)

    def halves(self, part: str, both: WeightMatrix) -> tuple[WeightMatrix, WeightMatrix]:
        """The upper and the lower half of the rows of a matrix of `part`: gate and up.

        Raises ModelLoadError where they share scales.
        """
        middle = both.rows // 2
        try:
            return both.row_range(0, middle), both.row_range(middle, both.rows)
        except ValueError as error:
            raise ModelLoadError(
                f"{self.source.where}: tensor {self.specs[part].name} cannot be cut into gate and up: {error}; use a "
                "checkpoint that has them apart"
            ) from None

    def vector(self, part: str) -> F32:
        spec = self.specs[part]
        values = self.source.vector(spec.name, spec.shape)
        return values + np.float32(1.0) if spec.zero_centred else values

    def optional_vector(self, part: str) -> F32 | None:
        return self.vector(part) if part in self.specs else None

    def packed(self, pool: ops.ThreadPool, where: str, *parts: str) -> ops.PackedMatrix:
        """The matrices one above the other, packed for the CPU; `where` begins the message of a ModelLoadError."""
        name = " + ".join(self.specs[part].name for part in parts)
        return self.pack(pool, where, name, lambda: [self.matrix(part) for part in parts])

    def pack(self, pool: ops.ThreadPool, where: str, name: str, matrices: Matrices) -> ops.PackedMatrix:
        """The same of matrices that are made from tensors; `name` is theirs in a file of panels."""
        try:
            return self._panels.matrix(pool, name, matrices)
        except KernelError as error:
            raise ModelLoadError(f"{where}: {error}; the weights are damaged, download them again") from None

    def packed_bytes(self, part: str) -> int:
        """Panels of a matrix or a stack of them; a vector is float32."""
        spec = self.specs[part]
        if len(spec.shape) == 1:
            return 4 * spec.shape[0]
        *stacked, rows, columns = spec.shape
        return math.prod(stacked) * packed_bytes(self.format(part), rows, columns)


class ModelPart(ABC):
    """Weights of a model and what they cost: a block, the embedding, the head."""

    kind: ClassVar[str]
    """What people call it when they choose formats: attention, experts, …"""

    @abstractmethod
    def tensors(self, found: Found) -> Mapping[str, TensorSpec]:
        """Its tensors in the spelling of this checkpoint, by what they are to it."""

    def problems(self) -> Iterator[str]:
        """What cannot be about its sizes, in the words of config.json."""
        return iter(())

    def check(self, weights: BlockWeights) -> None:
        """Raises ModelLoadError for tensors that it cannot run, from headers alone."""
        weights.check()

    def host_bytes(self, weights: BlockWeights) -> int:
        """In memory, packed for the CPU's kernels."""
        return sum(weights.packed_bytes(part) for part in weights.specs)

    def device_bytes(self, weights: BlockWeights) -> int:
        """On a device, where matrices are bf16 and what must be exact is f32."""
        return sum(
            (4 if spec.role == "exact" else 2) * math.prod(spec.shape) for spec in weights.specs.values()
        )

    def cost(self, weights: BlockWeights, tokens: int = 1, behind: int = 0) -> Cost:
        """Of `tokens` tokens of one sequence that has `behind` before them."""
        return Cost(self.host_bytes(weights), tokens * self._flops_per_token(weights))

    @staticmethod
    def _flops_per_token(weights: BlockWeights) -> float:
        shapes = (spec.shape for spec in weights.specs.values())
        return sum(2.0 * math.prod(shape) for shape in shapes if len(shape) > 1)


@dataclass(frozen=True)
class Block(ModelPart):
    """One block of one layer; adds to the residual stream."""

    layer: int

    @property
    def state(self) -> tuple[State, ...]:
        """What it keeps of a sequence."""
        return ()

    @property
    def device_elements_per_token(self) -> int:
        """Values of a token that are alive at once while it runs on a device, beside the residual stream."""
        return 0

    @property
    def device_record_bytes(self) -> int:
        """Of a sequence's record on a device."""
        return 0

    @abstractmethod
    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, moe_layer: int) -> ops.Block:
        """Pack the weights and make the CPU's operator. Raises ModelLoadError.

        `moe_layer` is the layer's number among those with routed experts: its place in the expert store.
        """

    @abstractmethod
    def device(self, weights: DeviceWeights, moe_layer: int) -> DeviceBlock:
        """Copy the weights and make the device's operator. Needs torch."""

    def device_state(
        self, num_pages: int, page_size: int, allocate: Allocate, num_records: int = 0
    ) -> DeviceState:
        """Memory on a device for what it keeps of all sequences."""
        return ()


class ExpertBlock(Block):
    """A block whose weights are experts that are placed one by one: they go to the expert store."""

    @property
    @abstractmethod
    def routed(self) -> RoutedShape: ...

    @abstractmethod
    def experts(self, weights: BlockWeights) -> Sequence[ExpertWeights]:
        """Views of the files (copies, made when asked for, where these hold matrices turned).

        Of one matrix all have the same format.

        Raises ModelLoadError where they cannot be told apart.
        """

    def biases(self, weights: BlockWeights) -> F32 | None:
        """[experts, 2 intermediate + hidden]: of gate, of up, of down; None where there are none."""
        return None

    @abstractmethod
    def expert_formats(self, weights: BlockWeights) -> tuple[str, str, str]:
        """Of the (gate, up, down) matrices; nothing is read."""

    @abstractmethod
    def stacked_experts(self, weights: BlockWeights) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
        """The names and shapes under which all experts' (gate, up, down) are written anew."""

    def stacked_biases(self, weights: BlockWeights) -> tuple[TensorSpec, ...]:
        """The same of their biases, if there are any."""
        return ()
