"""Types of `twofold._core.device` (bind_device_launches.cpp): kernel arguments for a layer on a device.

All are frozen. Addresses are integers, from torch's data_ptr(); 0 is none. kernels/cuda/expert_layer.h and
step_control.h document the memory they point to.
"""

from typing import final

import numpy as np
from numpy.typing import NDArray

@final
class ExpertLayout:
    """Layout of one expert's panels: gate, up, down, one after the other, then biases. Sizes in bytes."""

    def __init__(
        self,
        gate_up: str,
        down: str,
        hidden: int,
        intermediate: int,
        activation: str = "silu",
        biases: bool = False,
    ) -> None: ...
    @property
    def bytes(self) -> int: ...
    @property
    def activations(self) -> str: ...
    def encoded_bytes(self, num_tokens: int) -> int: ...
    def intermediate_bytes(self, num_pairs: int) -> int: ...

@final
class ExpertGroups:
    """Addresses of a layer's grouping in device memory."""

    def __init__(self, *, num_groups: int, weights: int, begin: int, pairs: int, capacity: int) -> None: ...

@final
class ExpertBuffers:
    """Addresses of the experts' buffers in device memory."""

    def __init__(self, *, encoded: int, intermediate: int, outputs: int, gate_up: int = 0) -> None: ...

@final
class EncodedRows:
    """bf16 rows and the address of their encoded rows."""

    def __init__(self, *, kind: str, rows: int, num_tokens: int, columns: int, out: int) -> None: ...

@final
class DecodeShape:
    """Bounds of a decode launch."""

    def __init__(self, *, num_tokens: int, top_k: int, num_experts: int, shared_bytes: int) -> None: ...

@final
class PrefillTiles:
    """The tiles of a prefill launch, in device memory."""

    def __init__(self, *, tiles: int, count: int, tokens: int) -> None: ...

@final
class PrefillRows:
    """bf16 rows [num_tokens][hidden] of a prefill launch."""

    def __init__(self, *, x: int, num_tokens: int, top_k: int) -> None: ...

@final
class CombinedLayer:
    """Partial results of both sides and the hidden states they are added to."""

    def __init__(
        self,
        *,
        outputs: int,
        weights: int,
        where: int,
        from_cpu: int,
        num_tokens: int,
        top_k: int,
        hidden_size: int,
        hidden: int,
        joined_ns: int = 0,
    ) -> None: ...

def tile_groups(begin: NDArray[np.int32], tile_tokens: int) -> NDArray[np.int32]:
    """[tiles, 2] of group and first pair within it."""

def tile_tokens_for(num_pairs: int, num_groups: int) -> int: ...

@final
class RoutedLayer:
    """A layer's routing in device memory."""

    def __init__(
        self, *, ids: int, weights: int, normed: int, num_tokens: int, layer: int, ahead: int = 0
    ) -> None: ...

@final
class PlacementTables:
    """Tables that the device reads to place a layer's experts."""

    def __init__(
        self,
        *,
        slots: int,
        split: int,
        slot_base: int,
        slot_stride: int,
        store_base: int,
        store_stride: int,
        num_experts: int,
        prices: int = 0,
    ) -> None: ...

@final
class PlacedLayer:
    """Results of a layer's placement, in device memory."""

    def __init__(self, *, groups: ExpertGroups, where: int, num_on_cpu: int) -> None: ...

@final
class MailboxShape:
    """Capacity of a mailbox."""

    def __init__(
        self, *, num_layers: int, max_tokens: int, top_k: int, hidden: int, num_ahead: int = 0
    ) -> None: ...
