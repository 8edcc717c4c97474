"""The routed experts of a layer: gated feed-forward layers whose weights go to the expert store.

Checkpoints spell them in three ways: one tensor for each matrix of each expert; fused (`gate_up_proj` [E, 2I, H] and
`down_proj` [E, H, I], as transformers 5 keeps them); stacked (`gate_proj`, `up_proj`, `down_proj`, each [E, ...], as
GGUF files keep them and `twofold quantize` writes them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final

from twofold.blocks import ops
from twofold.blocks.block import Cost, ExpertBlock, FusedForm, RoutedShape, ShapeOf
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.device_step import DeviceBlock, DeviceState, DeviceStep, DeviceWeights
from twofold.weights.tensor_spec import HasTensor, TensorSpec
from twofold.weights.weight_format import (
    Activation,
    ExpertsOnDemand,
    ExpertWeights,
    LayerFormats,
    WeightMatrix,
    layer_formats,
)

if TYPE_CHECKING:
    from torch import Tensor

PARTS: Final = ("gate", "up", "down")


@dataclass(frozen=True)
class RoutedExperts(ExpertBlock):
    kind: ClassVar[str] = "experts"

    hidden_size: int
    num_experts: int
    top_k: int
    intermediate_size: int
    modules: tuple[str, ...] = ("mlp",)
    """Names of the MoE module in checkpoints: the first that exists, else the last. "": none."""
    projections: tuple[tuple[str, str, str], ...] = (("gate_proj", "up_proj", "down_proj"),)
    """Names of (gate, up, down) in checkpoints with separate experts; the first that exists, else the last."""
    fused: tuple[tuple[str, str], ...] = (("experts.gate_up_proj", "experts.down_proj"),)
    """Names of fused (gate and up, down) within the MoE module; the first that exists, else the last."""
    activation: Activation = "silu"
    """Activation function of the gate."""
    limit: float = 0.0
    """Bound of gate and up (kernels/include/twofold/expert.h); 0: none."""
    transposed: bool = False
    """Whether fused matrices are transposed: [E, H, 2I] and [E, I, H]."""
    weighs_rows: bool = False
    """Whether a token's routing weight multiplies its one expert's input instead of the output."""
    first: int = 0
    """Number of the first one in checkpoints with separate experts."""

    @property
    def routed(self) -> RoutedShape:
        return RoutedShape(
            self.num_experts,
            self.top_k,
            self.hidden_size,
            self.intermediate_size,
            self.activation,
            self.has_biases,
            self.limit,
        )

    @property
    def has_biases(self) -> bool:
        """Whether gate, up and down have biases (see `biases`)."""
        return False

    @property
    def fused_form(self) -> FusedForm:
        return FusedForm(transposed=self.transposed)

    def host_bytes(self, weights: BlockWeights) -> int:
        """Bytes of all experts in the store."""
        return sum(self.routed.bytes_by_expert(self.expert_formats(weights)))

    def as_stored(self, shape_of: ShapeOf) -> RoutedExperts:
        """These experts, or those whose fused matrices are not transposed, if the stored shapes say so."""
        plain = replace(self, transposed=False)
        for specs in (plain._fused(module, *names) for module in self.modules for names in self.fused):
            if all(shape_of(spec.name) == spec.shape for spec in specs.values()):
                return plain
        return self

    def problems(self) -> Iterator[str]:
        if self.weighs_rows and self.top_k != 1:
            yield f"num_experts_per_tok {self.top_k} is not 1, which alone is supported where weights multiply rows"

    def tensors(self, found: HasTensor) -> dict[str, TensorSpec]:
        for module in self.modules:
            stacked = self._stacked(module)
            for fused in (self._fused(module, *names) for names in self.fused):
                if found(fused["gate_up"]):
                    return fused
            if found(stacked["gate"]) or found(stacked["up"]):
                return stacked
            for names in self.projections:
                if found(self._one(module, names, 0, 0)):
                    return self._separate(module, names, found)
        # Names of missing tensors are those that current files of either kind use.
        first = self._one(self.modules[-1], self.projections[-1], 0, 0)
        return {"gate.0": replace(first, gguf=self._stacked(self.modules[0])["gate"].gguf)}

    def stacked_experts(self, weights: BlockWeights) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
        any_name = next(iter(weights.specs.values())).name
        found = (module for module in self.modules if any_name.startswith(f"{self._where(module)}."))
        module = self.modules[0] if self.first else next(found)  # others before the first one have its name
        gate, up, down = self._stacked(module).values()
        return gate, up, down

    def expert_formats(self, weights: BlockWeights) -> LayerFormats:
        if "gate_up" in weights:
            both = weights.format("gate_up")
            return both, both, weights.format("down")
        if "gate" in weights:
            return weights.format("gate"), weights.format("up"), weights.format("down")
        if weights.recoding is not None:
            return weights.format("gate.0"), weights.format("up.0"), weights.format("down.0")

        def stored(part: str) -> str:  # checked when the model was opened
            return weights.source.entry(weights.specs[part].name).format or ""

        each = range(self.num_experts)
        return layer_formats((stored(f"gate.{n}"), stored(f"up.{n}"), stored(f"down.{n}")) for n in each)

    def experts(self, weights: BlockWeights) -> Sequence[ExpertWeights]:
        if "gate_up" in weights:
            both, down = weights.stack("gate_up"), weights.stack("down")
            if self.transposed:
                return TransposedExperts(both, down, halves)
            return [(*halves(one), below) for one, below in zip(both, down, strict=True)]
        if "gate" in weights:
            gates, ups, downs = (weights.stack(part) for part in PARTS)
            return list(zip(gates, ups, downs, strict=True))
        return [
            (
                weights.matrix(f"gate.{expert}"),
                weights.matrix(f"up.{expert}"),
                weights.matrix(f"down.{expert}"),
            )
            for expert in range(self.num_experts)
        ]

    def cost(self, weights: BlockWeights, tokens: int = 1, context_len: int = 0) -> Cost:
        """Cost for the largest number of distinct experts that `tokens` tokens can choose, on any processor."""
        chosen = min(tokens * self.top_k, self.num_experts)
        flops = 2.0 * 3 * self.hidden_size * self.intermediate_size
        return Cost(self.host_bytes(weights) * chosen / self.num_experts, flops * tokens * self.top_k)

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool, moe_layer: int) -> ops.Block:
        """Names the layer to the executor, which holds the store and runs the experts."""
        return ops.RoutedExperts(self.hidden_size, moe_layer, self.weighs_rows)

    def device(self, weights: DeviceWeights, moe_layer: int) -> DeviceBlock:
        return RoutedExpertsOnDevice(moe_layer, self.weighs_rows)

    def _where(self, module: str) -> str:
        return f"model.layers.{self.layer}.{module}".removesuffix(".")

    def _shape(self, part: str) -> tuple[int, int]:
        return (
            (self.hidden_size, self.intermediate_size)
            if part == "down"
            else (self.intermediate_size, self.hidden_size)
        )

    def _fused(self, module: str, gate_up: str, down: str) -> dict[str, TensorSpec]:
        hf, gguf = self._where(module), f"blk.{self.layer}"
        inner, hidden = self.intermediate_size, self.hidden_size
        if self.transposed:
            return {
                "gate_up": TensorSpec(f"{hf}.{gate_up}", (self.num_experts, hidden, 2 * inner), "matrix", ""),
                "down": TensorSpec(f"{hf}.{down}", (self.num_experts, inner, hidden), "matrix", ""),
            }
        both = (self.num_experts, 2 * inner, hidden)
        return {
            "gate_up": TensorSpec(f"{hf}.{gate_up}", both, "matrix", f"{gguf}.ffn_gate_up_exps.weight"),
            "down": replace(self._stacked(module)["down"], name=f"{hf}.{down}"),
        }

    def _stacked(self, module: str) -> dict[str, TensorSpec]:
        hf, gguf = f"{self._where(module)}.experts", f"blk.{self.layer}"
        return {
            part: TensorSpec(
                f"{hf}.{part}_proj",
                (self.num_experts, *self._shape(part)),
                "matrix",
                f"{gguf}.ffn_{part}_exps.weight",
            )
            for part in PARTS
        }

    def _one(self, module: str, names: tuple[str, str, str], part: int, expert: int) -> TensorSpec:
        return TensorSpec(
            f"{self._where(module)}.experts.{self.first + expert}.{names[part]}.weight",
            self._shape(PARTS[part]),
            "matrix",
            f"blk.{self.layer}.ffn_{PARTS[part]}.{expert}.weight",
        )

    def _separate(self, module: str, names: tuple[str, str, str], found: HasTensor) -> dict[str, TensorSpec]:
        """Tensors of the experts that exist, and of the first missing one: a wrong count must not request millions."""
        specs: dict[str, TensorSpec] = {}
        for expert in range(self.num_experts):
            three = [self._one(module, names, part, expert) for part in range(3)]
            specs |= {f"{part}.{expert}": spec for part, spec in zip(PARTS, three, strict=True)}
            if not found(three[0]):
                break
        return specs


class TransposedExperts(ExpertsOnDemand):
    """Experts whose fused matrices are transposed: each is copied on every request."""

    def __init__(
        self,
        both: Sequence[WeightMatrix],
        down: Sequence[WeightMatrix],
        cut: Callable[[WeightMatrix], tuple[WeightMatrix, WeightMatrix]],
    ) -> None:
        """`cut` splits the fused rows into gate and up."""
        self._both, self._down, self._cut = both, down, cut

    def __len__(self) -> int:
        return len(self._both)

    def expert(self, index: int) -> ExpertWeights:
        return (*self._cut(self._both[index].transposed()), self._down[index].transposed())


def halves(both: WeightMatrix) -> tuple[WeightMatrix, WeightMatrix]:
    """The upper and the lower half of the rows: gate and up."""
    middle = both.rows // 2
    return both.row_range(0, middle), both.row_range(middle, both.rows)


@dataclass(frozen=True)
class RoutedExpertsOnDevice:
    moe_layer: int
    weighs_rows: bool

    def forward(self, hidden: Tensor, total: Tensor, state: DeviceState, step: DeviceStep) -> None:
        routed = step.chosen()
        if step.moe.look_ahead is not None and self.moe_layer + 1 < len(step.routers):
            step.moe.look_ahead(step.routers[self.moe_layer + 1].look(hidden))
        rows, weights = routed.normed, routed.weights
        if self.weighs_rows:
            rows, weights = (rows * weights).bfloat16(), weights.new_ones(weights.shape)
        step.moe.forward(self.moe_layer, rows, routed.ids, weights, total)
