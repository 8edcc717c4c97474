"""Memory and time of a fine-tuning run, estimated before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from twofold.api.errors import ConfigError
from twofold.models.model_files import ModelFiles
from twofold.models.sizing import measure_files
from twofold.training.base import expert_modules
from twofold.training.finetune.targets import Targets

_LIBRARIES_BYTES: Final = 640 << 20
"""torch, transformers and PEFT, measured: an interpreter that has imported them and trained a model of some KB."""
_OPTIMISER_BYTES: Final = 16
"""Per trained parameter in float32: value, gradient, and AdamW's two moments."""
_BYTES_KEPT: Final = 8
"""Per routed row and unit of the intermediate size (`ExpertLayer`)."""
_ROWS_OF_HIDDEN: Final = 14
"""Rows of the hidden size that a layer keeps for backward: inputs of norms, projections, rotation and experts."""
_COPIES_OF_LOGITS: Final = 4
"""Logits, the same in float32, their probabilities and their gradient."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model that memory depends on."""

    hidden: int
    vocabulary: int
    num_layers: int
    attention_rows: int
    """Units of queries, keys and values."""
    num_heads: int
    dense_intermediate: int
    routed_rows: int
    """Experts per token times an expert's intermediate size."""
    num_moe_layers: int

    @classmethod
    def of(cls, config: Any, files: ModelFiles) -> Shape:
        """config: transformers' one."""
        text = config.get_text_config()
        routed = files.config.routed if files.config.moe_layers else None
        heads = int(text.num_attention_heads)
        head_dim = getattr(text, "head_dim", None) or getattr(text, "v_head_dim", None)
        return cls(
            hidden=int(text.hidden_size),
            vocabulary=int(text.vocab_size),
            num_layers=int(text.num_hidden_layers),
            attention_rows=3 * heads * int(head_dim or text.hidden_size // heads),
            num_heads=heads,
            dense_intermediate=int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size),
            routed_rows=0 if routed is None else routed.top_k * routed.intermediate_size,
            num_moe_layers=len(files.config.moe_layers),
        )

    def kept_bytes(self, tokens: int) -> int:
        """What one MoE layer's experts keep for backward."""
        return _BYTES_KEPT * tokens * self.routed_rows

    def activation_bytes(self, tokens: int, longest: int, dense_bytes: int) -> int:
        """What the rest keeps. longest: tokens of a row; dense_bytes: of one number."""
        of_token = _ROWS_OF_HIDDEN * self.hidden + 2 * self.attention_rows
        of_token += 3 * self.dense_intermediate * (self.num_layers > self.num_moe_layers)
        layers = self.num_layers * tokens * (of_token * dense_bytes + self.num_heads * longest * dense_bytes)
        return layers + _COPIES_OF_LOGITS * 4 * tokens * self.vocabulary


@dataclass(frozen=True)
class MemoryForecast:
    """Bytes by purpose."""

    experts: int
    """The base's routed experts, in their own format."""
    dense: int
    adapter: int
    """Factors, gradients and the optimiser's state."""
    activations: int
    kept: int
    """Activations of routed experts that are kept; those of other layers are computed again."""
    num_kept_layers: int
    num_parameters: int
    """Trained ones."""

    @property
    def total(self) -> int:
        return self.beside_experts + self.on_host

    @property
    def beside_experts(self) -> int:
        """What lies where the dense part is."""
        return self.dense + self.adapter + self.activations

    @property
    def on_host(self) -> int:
        """What lies in host memory also where a device has the dense part."""
        return self.experts + self.kept + _LIBRARIES_BYTES

    def __str__(self) -> str:
        parts = {
            "experts as stored": self.experts,
            "dense part": self.dense,
            "adapter and optimiser": self.adapter,
            "activations": self.activations + self.kept,
            "libraries": _LIBRARIES_BYTES,
        }
        return f"{self.total / 1e9:.2f} GB: " + ", ".join(
            f"{name} {size / 1e9:.2f}" for name, size in parts.items()
        )

    def check(self, available: int, on_device: int | None = None) -> None:
        """Raises ConfigError if it does not fit.

        Args:
            available: bytes of host memory.
            on_device: those of the device with the dense part; None: that is on the host too.
        """
        remedy = (
            "lower --batch-tokens, --activation-bytes or --rank, give --dtype bfloat16, or take a base in a smaller "
            "format"
        )
        if on_device is not None and self.beside_experts > on_device:
            raise ConfigError(
                f"training needs {self}, of which the device takes all but experts and libraries, "
                f"{self.beside_experts / 1e9:.2f} GB, and has {on_device / 1e9:.2f} GB; {remedy}, or --accelerator none"
            )
        on_host = self.total if on_device is None else self.on_host
        if on_host > available:
            raise ConfigError(f"training needs {self}, and {available / 1e9:.2f} GB are available; {remedy}")


def forecast_memory(
    files: ModelFiles,
    model: Any,
    targets: Targets,
    *,
    rank: int,
    rows: tuple[int, int],
    keeps_bytes: int | None,
) -> MemoryForecast:
    """The memory of a run.

    Args:
        model: transformers' model, on the meta device.
        rows: (tokens, longest row) of the largest micro-batch.
        keeps_bytes: most activations of routed experts to keep; None: those of all layers.
    """
    shape = Shape.of(model.config, files)
    routed = {id(each) for module in expert_modules(model) for each in module.parameters(recurse=False)}
    dense = {id(each): each for each in model.parameters() if id(each) not in routed}
    number_bytes = next(iter(dense.values())).element_size()
    of_layer = shape.kept_bytes(rows[0])
    num_kept = shape.num_moe_layers
    if keeps_bytes is not None and of_layer:
        num_kept = min(num_kept, keeps_bytes // of_layer)
    num_parameters = targets.num_parameters(rank)
    return MemoryForecast(
        experts=measure_files(files).expert_bytes,
        dense=sum(each.numel() * each.element_size() for each in dense.values()),
        adapter=_OPTIMISER_BYTES * num_parameters,
        activations=shape.activation_bytes(*rows, number_bytes),
        kept=num_kept * of_layer,
        num_kept_layers=num_kept,
        num_parameters=num_parameters,
    )
