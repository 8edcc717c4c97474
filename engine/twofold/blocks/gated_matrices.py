"""Gate, up and down of a gated feed-forward layer, as checkpoints spell them: each by itself, or gate and up in one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from twofold.blocks import ops
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.experts import halves
from twofold.weights.tensor_spec import HasTensor, TensorSpec
from twofold.weights.weight_format import packed_bytes


@dataclass(frozen=True)
class GatedMatrices:
    """The three matrices, [inner, hidden] twice and [hidden, inner]."""

    layer: int
    module: str
    """Module name in checkpoints."""
    hidden: int
    inner: int
    gguf_suffix: str = ""
    """What follows the part in GGUF's names."""
    fused: tuple[str, str] | None = None
    """Checkpoint names of (gate and up, down), if some checkpoints fuse gate and up."""

    def tensors(self, found: HasTensor) -> dict[str, TensorSpec]:
        hf, gguf = f"model.layers.{self.layer}.{self.module}", f"blk.{self.layer}"
        wide, narrow = (self.inner, self.hidden), (self.hidden, self.inner)
        if self.fused is not None:
            both, down = (f"{hf}.{name}.weight" for name in self.fused)
            joined = TensorSpec(both, (2 * self.inner, self.hidden), "matrix", "")
            if found(joined):
                return {"gate_up": joined, "down": TensorSpec(down, narrow, "matrix", "")}
        specs = {
            part: TensorSpec(
                f"{hf}.{part}_proj.weight", shape, "matrix", f"{gguf}.ffn_{part}{self.gguf_suffix}.weight"
            )
            for part, shape in (("gate", wide), ("up", wide), ("down", narrow))
        }
        if (
            self.fused is not None and not found(specs["gate"]) and found(specs["up"])
        ):  # one tensor in GGUF files
            both = specs["up"].gguf
            for first, part in enumerate(("gate", "up")):
                rows = (first * self.inner, 2 * self.inner)
                specs[part] = replace(specs[part], gguf=both, gguf_rows=rows)
        return specs

    def host_bytes(self, weights: BlockWeights) -> int:
        """Host bytes; gate and up are packed separately."""
        matrices = (part for part in ("gate", "up", "down") if part in weights)
        num_bytes = sum(map(weights.packed_bytes, matrices))
        if "gate_up" in weights:
            num_bytes += 2 * packed_bytes(weights.format("gate_up"), self.inner, self.hidden)
        return num_bytes

    def packed(self, weights: BlockWeights, pool: ops.ThreadPool, where: str) -> dict[str, ops.PackedMatrix]:
        """Gate, up and down."""

        def half(number: int, part: str) -> ops.PackedMatrix:
            if "gate_up" not in weights:
                return weights.packed(pool, where, part)
            rows = range(number * self.inner, (number + 1) * self.inner)
            return weights.pack(
                pool,
                where,
                f"{where}: {part}",
                lambda: [halves(weights.matrix("gate_up"))[number]],
                rows=[("gate_up", rows)],
            )

        return {"gate": half(0, "gate"), "up": half(1, "up"), "down": weights.packed(pool, where, "down")}
