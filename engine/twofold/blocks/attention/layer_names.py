"""Names of an attention layer's tensors."""

from __future__ import annotations

from dataclasses import dataclass

from twofold.weights.tensor_spec import Role, TensorSpec


@dataclass(frozen=True)
class LayerNames:
    """Specs of one layer's tensors, by their names within the layer, in Hugging Face's files and in GGUF files."""

    layer: int
    module: str = "self_attn"
    gguf_module: str = ""
    """Module in GGUF files' names; empty: their names have none."""
    zero_centred: bool = False
    """Whether checkpoints store norms minus 1."""

    def matrix(self, name: str, gguf: str, *shape: int, role: Role = "matrix") -> TensorSpec:
        """A weight of the attention's module; `name` and `gguf` without ".weight"."""
        return self._spec(f"{self.module}.{name}.weight", f"{gguf}.weight", shape, role)

    def bias(self, name: str, gguf: str, size: int) -> TensorSpec:
        return self._spec(f"{self.module}.{name}.bias", f"{gguf}.bias", (size,), "exact")

    def exact(self, name: str, gguf: str, *shape: int) -> TensorSpec:
        """A tensor of the attention's module under its full name; `gguf` is empty if GGUF files have no name for it."""
        return self._spec(f"{self.module}.{name}", gguf, shape, "exact")

    def norm(self, name: str, gguf: str, size: int) -> TensorSpec:
        """A norm of the attention's module."""
        spec = self._spec(f"{self.module}.{name}.weight", f"{gguf}.weight", (size,), "exact")
        return self._centred(spec)

    def input_norm(self, size: int) -> TensorSpec:
        name, gguf = f"model.layers.{self.layer}.input_layernorm.weight", f"blk.{self.layer}.attn_norm.weight"
        return self._centred(TensorSpec(name, (size,), "exact", gguf))

    def _centred(self, spec: TensorSpec) -> TensorSpec:
        return TensorSpec(spec.name, spec.shape, spec.role, spec.gguf, zero_centred=self.zero_centred)

    def _spec(self, name: str, gguf: str, shape: tuple[int, ...], role: Role) -> TensorSpec:
        theirs = f"{self.gguf_module}.{gguf}" if self.gguf_module else gguf
        whole = f"blk.{self.layer}.{theirs}" if gguf else ""
        return TensorSpec(f"model.layers.{self.layer}.{name}", shape, role, whole)
