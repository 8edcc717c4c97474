"""Block interface: the parts a decoder layer is made of, and how a block reads its tensors.

A block is the configuration of one part of one layer, a frozen dataclass. It owns the names and shapes of its tensors,
its per-sequence state, its cost, and its operators. Code that loads, sizes, quantises or runs a model iterates over the
blocks of its layers and knows no block by name.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from twofold._core import pack_panels
from twofold.api.errors import KernelError, ModelLoadError
from twofold.blocks import ops
from twofold.blocks.panels import PACKED_WHEN_LOADED, MappedPanels, Matrices, Panels
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


@dataclass(frozen=True)
class Cost:
    """Cost of one forward pass through a block on an accelerator."""

    num_bytes: float
    """Weights and state read, in bytes."""
    flops: float
    prediction_bytes: float = 0.0
    """Part of the weights that is read a second time to predict the next layer's experts, in bytes."""


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

    def expert_bytes(self, formats: tuple[str, str, str]) -> int:
        """Bytes of one expert in memory, with (gate, up, down) in these formats."""
        return packed_expert_bytes(formats, self.hidden_size, self.intermediate_size, biases=self.biases)


class BlockWeights:
    """A block's tensors in an opened checkpoint, keyed by their role in the block ("q", "norm").

    Matrices are views of the mapped files; vectors are float32 copies. Methods other than `check` raise ModelLoadError
    only if the files changed after `check`.
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
        """Format conversion of all tensors that need not be exact; None: the files' formats."""

    def from_panels(self, panels: Panels) -> BlockWeights:
        """The same tensors, packed by or mapped from `panels`."""
        return BlockWeights(self.source, self.specs, panels, self.recoding)

    def recoded(self, recoding: Recoding | None) -> BlockWeights:
        """The same tensors, converted to another format as they are read."""
        return BlockWeights(self.source, self.specs, self._panels, recoding)

    def __contains__(self, part: str) -> bool:
        return part in self.specs

    @property
    def is_mapped(self) -> bool:
        """Whether packed matrices come from a file of panels instead of `source`."""
        return isinstance(self._panels, MappedPanels)

    @property
    def names(self) -> list[str]:
        """Checkpoint names of the tensors and of their companions (scales)."""
        return [
            name for spec in self.specs.values() for name in (spec.name, *self.source.companions(spec.name))
        ]

    @property
    def source_bytes(self) -> int:
        """Size in the files, bytes."""
        return sum(self.source.entry(name).num_bytes for name in self.names)

    def check(self) -> None:
        """Raises ModelLoadError for a tensor that is missing or has the wrong dtype or shape; reads headers only."""
        for part in self.specs:
            self.format(part)

    def format(self, part: str) -> str:
        """Format of `part` in memory."""
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
        """Matrices of a stacked tensor, as the files have them."""
        spec = self.specs[part]
        return self.source.stack(spec.name, spec.shape)

    def halves(self, part: str, both: WeightMatrix) -> tuple[WeightMatrix, WeightMatrix]:
        """The upper and the lower half of the rows of a matrix of `part`: gate and up.

        Raises ModelLoadError if the halves share scales.
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
        """The matrices stacked row-wise and packed for the CPU; `where` begins the message of a ModelLoadError."""
        name = " + ".join(self.specs[part].name for part in parts)
        return self.pack(pool, where, name, lambda: [self.matrix(part) for part in parts])

    def pack(self, pool: ops.ThreadPool, where: str, name: str, matrices: Matrices) -> ops.PackedMatrix:
        """Like `packed`, for matrices computed from tensors; `name` is their name in a file of panels."""
        try:
            return self._panels.matrix(pool, name, matrices)
        except KernelError as error:
            raise self.refused(error, where) from None

    def checked(self, pool: ops.ThreadPool, part: str) -> WeightMatrix:
        """A matrix used without packing. Raises ModelLoadError for a NaN or an infinity."""
        matrix = self.matrix(part)
        try:
            ops.expect_finite(pool, matrix)
        except KernelError as error:
            raise self.refused(error) from None
        return matrix

    def refused(self, error: Exception, where: str = "experts") -> ModelLoadError:
        """The ModelLoadError for weights that native code rejected with `error`. Reads all matrices to name the
        tensor."""
        for spec in self.specs.values():
            if len(spec.shape) == 1:
                continue
            for index, matrix in enumerate(self.source.stack(spec.name, spec.shape)):
                try:
                    pack_panels(matrix)
                except ValueError as found:
                    entry = self.source.entry(spec.name)
                    number = f", matrix {index}" if len(spec.shape) > 2 else ""
                    return ModelLoadError(
                        f"{entry.file}: tensor {spec.name}{number}: {found}; the file is damaged, download it again"
                    )
        return ModelLoadError(f"{where}: {error}; the weights are damaged, download them again")

    def packed_bytes(self, part: str) -> int:
        """Bytes of the packed panels of a matrix or a stack; of a vector, its float32 bytes."""
        spec = self.specs[part]
        if len(spec.shape) == 1:
            return 4 * spec.shape[0]
        *stacked, rows, columns = spec.shape
        return math.prod(stacked) * packed_bytes(self.format(part), rows, columns)


class ModelPart(ABC):
    """Weights of a model and their cost: a block, the embedding or the head."""

    kind: ClassVar[str]
    """Name used to choose formats: attention, experts, …"""

    @abstractmethod
    def tensors(self, found: Found) -> Mapping[str, TensorSpec]:
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

    def cost(self, weights: BlockWeights, tokens: int = 1, behind: int = 0) -> Cost:
        """Cost of `tokens` tokens of one sequence after `behind` earlier tokens."""
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
        """State that the block keeps per sequence."""
        return ()

    @property
    def device_elements_per_token(self) -> int:
        """Activation values per token that are alive at once on a device, excluding the residual stream."""
        return 0

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


class ExpertBlock(Block):
    """A block whose weights are individually placed experts: they go to the expert store."""

    @property
    @abstractmethod
    def routed(self) -> RoutedShape: ...

    @abstractmethod
    def experts(self, weights: BlockWeights) -> Sequence[ExpertWeights]:
        """Expert weights as views of the files (copies made on demand if the files hold matrices transposed).

        All experts have the same format for each of the three matrices.

        Raises ModelLoadError if the experts cannot be told apart.
        """

    def biases(self, weights: BlockWeights) -> F32 | None:
        """Biases [experts, 2 intermediate + hidden], in the order gate, up, down; None if there are none."""
        return None

    @abstractmethod
    def expert_formats(self, weights: BlockWeights) -> tuple[str, str, str]:
        """Formats of the (gate, up, down) matrices; reads no weights."""

    @abstractmethod
    def stacked_experts(self, weights: BlockWeights) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
        """Names and shapes under which all experts' (gate, up, down) are written to a new checkpoint."""

    def stacked_biases(self, weights: BlockWeights) -> tuple[TensorSpec, ...]:
        """Like `stacked_experts`, for the biases, if any."""
        return ()
