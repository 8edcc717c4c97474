"""Facts about a base model that adapter files leave out: its matrices, its routed experts, its names in GGUF files."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from twofold.weights.checkpoint import renamed_tensor
from twofold.weights.tensor_spec import TensorSpec

GATE_UP: Final = "gate_up_proj"
"""Name of gate and up fused into one matrix."""
PARTS: Final = ("gate_proj", "up_proj", "down_proj")
"""Names of an expert's matrices in the keys of an adapter."""
_WEIGHT: Final = ".weight"
_REORDERED: Final = ".linear_attn."
_WRAPPERS: Final = (".orig_module", ".original_moe")
"""Parts of names that trainers insert (KTransformers)."""
_SYNONYMS: Final = (
    (".mlp.", ".block_sparse_moe."), (".block_sparse_moe.", ".mlp."), ("model.language_model.", "model."),
    ("language_model.model.", "model."), ("model.unembed_tokens", "lm_head"),
)  # fmt: skip
"""Names that trainers give to modules beside those of a published checkpoint: transformers 5 calls Mixtral's
block_sparse_moe mlp, models of text and images have a prefix."""


@dataclass(frozen=True)
class BaseExperts:
    """The routed experts of one layer."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    interleaved: bool = False
    """Whether transformers' fused gate and up alternate row by row, as gpt-oss's; otherwise gate is the first half."""
    transposed: bool = False
    """Whether transformers keeps the fused stacks as [experts, in, out], as those of gpt-oss and Llama 4."""

    @cached_property
    def numbers(self) -> frozenset[str]:
        """Numbers of the experts, as names have them."""
        return frozenset(map(str, range(self.num_experts)))

    def shape(self, part: str) -> tuple[int, int]:
        """(rows, columns) of one expert's gate_proj, up_proj, down_proj or gate_up_proj."""
        if part == "down_proj":
            return self.hidden_size, self.intermediate_size
        return self.intermediate_size * (2 if part == GATE_UP else 1), self.hidden_size


@dataclass(frozen=True)
class GgufMatrix:
    """A matrix of the base model, or some rows of it, as GGUF files have it."""

    name: str
    """Name in checkpoints, without `.weight`."""
    rows: tuple[int, int] | None = None
    """(first row, rows of the whole tensor) if several matrices are one in the file."""
    heads: int = 0
    """Heads whose rows the file orders for rotation of adjacent pairs; 0: rows are in the checkpoint's order."""


@dataclass(frozen=True)
class BaseShapes:
    """What an adapter of one base model may change."""

    matrices: Mapping[str, tuple[int, int]]
    """(rows, columns) by name in the published checkpoint, without `.weight`; routed experts are left out."""
    experts: Mapping[str, BaseExperts] = field(default_factory=dict)
    """Routed experts by the name that comes before an expert's number: model.layers.3.mlp.experts."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Prefixes of names (theirs, ours), as `Checkpoint.open` takes them."""
    replaceable: frozenset[str] = frozenset({"model.embed_tokens", "lm_head"})
    """Matrices that an adapter may replace as a whole."""
    gguf: Mapping[str, tuple[GgufMatrix, ...]] = field(default_factory=dict)
    """Matrices by the name of their tensor in GGUF files, which `.weight` ends."""
    architecture: str = ""
    """general.architecture of its GGUF files; empty: not compared."""

    @classmethod
    def of_specs(
        cls,
        specs: Iterable[TensorSpec],
        experts: Mapping[str, BaseExperts],
        *,
        renamed: tuple[tuple[str, str], ...] = (),
        architecture: str = "",
    ) -> BaseShapes:
        """Facts about a model with these tensors; specs of vectors and of stacks are left out.

        `gguf` lacks linear attention, whose rows and columns GGUF files order by heads of their own.
        """
        matrices: dict[str, tuple[int, int]] = {}
        gguf: dict[str, tuple[GgufMatrix, ...]] = {}
        routed = tuple(f"{name}." for name in experts)
        for spec in specs:
            if len(spec.shape) != 2 or not spec.name.endswith(_WEIGHT) or spec.name.startswith(routed):
                continue
            name = spec.name.removesuffix(_WEIGHT)
            matrices[name] = spec.shape[0], spec.shape[1]
            if spec.gguf and _REORDERED not in name:
                gguf[spec.gguf] = (
                    *gguf.get(spec.gguf, ()),
                    GgufMatrix(name, spec.gguf_rows, spec.gguf_heads),
                )
        return cls(matrices, experts, renamed, gguf=gguf, architecture=architecture)

    def shape_of(self, name: str) -> tuple[int, int] | None:
        """(rows, columns) of a matrix that an adapter may change, also of a routed expert's; None: there is none."""
        if name in self.matrices:
            return self.matrices[name]
        module, _, part = name.rpartition(".")
        layer, _, number = module.rpartition(".")
        experts = self.experts.get(layer)
        if experts is None or part not in PARTS or number not in experts.numbers:
            return None
        return experts.shape(part)

    def matrix_name(self, theirs: str) -> str | None:
        """The base's name of a matrix that an adapter's file calls `theirs`; None: the base has none like it."""
        return self._found(theirs, self.matrices)

    def experts_name(self, theirs: str) -> str | None:
        """The base's name of routed experts that an adapter's file calls `theirs`; None: it has none like them."""
        return self._found(theirs, self.experts)

    def experts_of_layer(self, layer: int) -> str | None:
        """Name of a layer's routed experts; None: it has none, or several."""
        found = [name for name in self.experts if f".layers.{layer}." in name]
        return found[0] if len(found) == 1 else None

    def _found(self, theirs: str, names: Container[str]) -> str | None:
        return next((name for name in self._candidates(theirs) if name in names), None)

    def _candidates(self, theirs: str) -> Iterator[str]:
        """Names that the base may have for a module of an adapter, the likeliest first."""
        for wrapper in _WRAPPERS:
            theirs = theirs.replace(wrapper, "")
        for name in (theirs, f"model.{theirs}"):
            ours = renamed_tensor(f"{name}{_WEIGHT}", self.renamed).removesuffix(_WEIGHT)
            for each in dict.fromkeys((name, ours)):
                yield each
                for old, new in _SYNONYMS:
                    if old in each:
                        yield each.replace(old, new, 1)
