"""FP8 as transformers and DeepSeek store it ("fp8", "fbgemm_fp8"): a float or exponent for each block, row or tensor.

    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0", …}

A matrix `X.weight` has its scales in `X.weight_scale_inv`, a stack of experts `X` in `X_scale_inv`; other names are of
some publishers. Values are multiplied by them, whatever the names suggest. Reference: transformers
`integrations/finegrained_fp8.py` and `quantizers/quantizer_finegrained_fp8.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from twofold.weights.json_file import Fields
from twofold.weights.schemes.floats import float8_matrix
from twofold.weights.schemes.granularity import Grid
from twofold.weights.schemes.scheme import IGNORED_TENSORS, SchemeMatrix, missing
from twofold.weights.tensor_source import TensorEntry, scales_name
from twofold.weights.weight_format import SCALE_GRID

METHODS: Final = ("fp8", "fbgemm_fp8")
_SCALES: Final = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")
_OF_ACTIVATIONS: Final = ("activation_scale", "input_scale", "qscale_act", "input_scale_ub")
_LEFT_OUT: Final = (
    *IGNORED_TENSORS,
    *(
        ("the checkpoint's fixed scale of activations", f"*{of}{part}")
        for of in "._"
        for part in _OF_ACTIVATIONS
    ),
)


@dataclass(frozen=True)
class Float8:
    """The grid of all matrices with codes of 8 bits."""

    stated: tuple[Grid, ...]
    left_out: tuple[tuple[str, str], ...] = _LEFT_OUT

    def matrices(self, entries: Mapping[str, TensorEntry]) -> list[SchemeMatrix]:
        found: list[SchemeMatrix] = []
        for name, entry in entries.items():
            if entry.dtype != "F8_E4M3" or len(entry.shape) < 2:
                continue
            module, is_module = name.removesuffix(".weight"), name.endswith(".weight")
            names = [f"{module}.{scale}" for scale in _SCALES] if is_module else [scales_name(name)]
            scale = next((entries[each] for each in names if each in entries), None)
            if scale is None:
                raise missing(entry, scales_name(name))
            found += float8_matrix(name, {"weight": entry, "scale": scale}, "scale", *self.stated)
        return found


def parse(section: Fields) -> Float8:
    """Parse the configuration. Raises ModelLoadError for a block that is not two sizes."""
    section.only("expert_dtype", "fp8", None)
    sizes = section.integers("weight_block_size", minimum=1)
    if len(sizes) not in (0, 2):
        raise section.error("weight_block_size", list(sizes), "rows and columns of a block, or null")
    # Missing, it is transformers' default; null means one scale for a tensor.
    default = () if "weight_block_size" in section.data else (Grid(SCALE_GRID, SCALE_GRID),)
    return Float8((Grid(sizes[0], sizes[1]),) if sizes else default)
