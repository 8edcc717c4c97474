"""How a device's kernels see a model's experts: their layouts by layer, and what the kernels may use."""

from __future__ import annotations

from typing import Any, Final

import torch

from twofold.errors import ConfigError
from twofold.experts.moe import MoeShape

_SHARED_BYTES_OF_ALL: Final = 48 * 1024


def layouts_of(module: Any, shape: MoeShape) -> list[Any]:
    """The module's ExpertLayout of each layer.

    Raises:
        ConfigError: the device has no kernels for a layer's formats.
    """
    return [_layout(module, formats, shape) for formats in shape.formats]


def shared_bytes(device: torch.device) -> int:
    """Shared memory that a block of the decode kernels may take."""
    if device.type != "cuda":
        return _SHARED_BYTES_OF_ALL
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", _SHARED_BYTES_OF_ALL))


def _layout(module: Any, formats: tuple[str, str, str], shape: MoeShape) -> Any:
    gate, up, down = formats
    if gate != up:
        raise ConfigError(
            f"experts with gate in {gate} and up in {up} have no kernels on a device; gate and up of one format were "
            "expected. Use --accelerator none"
        )
    return module.ExpertLayout(gate, down, shape.hidden, shape.intermediate)
