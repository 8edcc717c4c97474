"""Types of `twofold._core.device` (engine/bindings/launches): kernel arguments for a layer on a device.

All are frozen, and keep nothing alive. The headers in kernels/device document the memory they point to.
"""

from typing import Final

from twofold import _core
from twofold._core import _I32, _Address

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
        limit: float = 0.0,
    ) -> None:
        """limit: of the activation (kernels/include/twofold/expert.h); 0: none."""
    bytes: Final[int]
    activations: Final[str]

    def encoded_bytes(self, num_tokens: int) -> int: ...
    def intermediate_bytes(self, num_pairs: int) -> int: ...

class ExpertGroups:
    """Addresses of a layer's grouping in device memory."""

    def __init__(
        self, *, num_groups: _Address, weights: _Address, begin: _Address, pairs: _Address, capacity: int
    ) -> None: ...

class ExpertBuffers:
    """Addresses of the experts' buffers in device memory."""

    def __init__(
        self,
        *,
        encoded: _Address,
        intermediate: _Address,
        outputs: _Address,
        gate_up: _Address = None,
        adapted: _Address = None,
    ) -> None: ...

class EncodedRows:
    """bf16 rows and the address of their encoded rows."""

    def __init__(
        self, *, kind: str, rows: _Address, num_tokens: int, columns: int, out: _Address
    ) -> None: ...

class DecodeShape:
    """Bounds of a decode launch."""

    def __init__(self, *, num_tokens: int, top_k: int, num_experts: int, shared_bytes: int) -> None: ...

class PrefillTiles:
    """The tiles of a prefill launch, in device memory."""

    def __init__(self, *, tiles: _Address, count: int, tokens: int) -> None: ...

class PrefillRows:
    """bf16 rows [num_tokens][hidden] of a prefill launch."""

    def __init__(self, *, x: _Address, num_tokens: int, top_k: int) -> None: ...

class CombinedLayer:
    """Partial results of both sides and the hidden states they are added to."""

    def __init__(
        self,
        *,
        outputs: _Address,
        weights: _Address,
        where: _Address,
        from_cpu: _Address,
        num_tokens: int,
        top_k: int,
        hidden_size: int,
        hidden: _Address,
        joined_ns: _Address = None,
    ) -> None: ...

def tile_groups(begin: _I32, tile_tokens: int) -> _I32:
    """int32 [tiles, 2] of group and first pair within it."""

def tile_tokens_for(num_pairs: int, num_groups: int) -> int: ...

class RoutedLayer:
    """A layer's routing in device memory."""

    def __init__(
        self,
        *,
        ids: _Address,
        weights: _Address,
        normed: _Address,
        num_tokens: int,
        layer: int,
        ahead: _Address = None,
    ) -> None: ...

class PlacementTables:
    """Tables that the device reads to place a layer's experts."""

    def __init__(
        self,
        *,
        slots: _Address,
        split: _Address,
        slot_base: int,
        slot_stride: int,
        store_base: int,
        store_offsets: _Address,
        num_experts: int,
        prices: _Address = None,
        kinds: _Address = None,
        num_kinds: int = 1,
    ) -> None: ...

class PlacedLayer:
    """Results of a layer's placement, in device memory."""

    def __init__(self, *, groups: ExpertGroups, where: _Address, num_on_cpu: _Address) -> None: ...

class MailboxShape:
    """Capacity of a mailbox."""

    def __init__(
        self, *, num_layers: int, max_tokens: int, top_k: int, hidden: int, num_ahead: int = 0
    ) -> None: ...

def factors_bytes() -> int:
    """Bytes of one matrix's entry in a table of factors."""

class LowRankTable:
    """Adapters' factors of a product in device memory."""

    def __init__(
        self, *, factors: _Address, num_entries: int, stride: int, first: int, count: int, max_rank: int
    ) -> None: ...

class AdaptedRows:
    """The adapter of each token, and the rows of a product."""

    def __init__(
        self,
        *,
        adapters: _Address,
        entries: _Address = None,
        where: _Address = None,
        num_tokens: int,
        per_token: int,
    ) -> None: ...

class LowRankInput:
    """Rows that A is multiplied with, bf16 or f32."""

    def __init__(self, *, x: _Address, is_f32: bool, divisor: int, columns: int, stride: int) -> None: ...

class LowRankOutput:
    """Rows that receive B (A x), bf16 or f32."""

    def __init__(self, *, y: _Address, is_f32: bool, adds: bool, width: int, stride: int) -> None: ...

class KvPages:
    """One layer's keys and values: bf16 [pages, page_size, kv_heads, head_dim]."""

    def __init__(
        self, *, keys: _Address, values: _Address, page_size: int, num_kv_heads: int, head_dim: int
    ) -> None: ...

class QkvRows:
    """Projection rows for queries, keys and values, and their rotation."""

    def __init__(
        self,
        *,
        qkv: _Address,
        num_tokens: int,
        num_heads: int,
        q_norm: _Address,
        k_norm: _Address,
        epsilon: float,
        cos: _Address,
        sin: _Address,
        rotary: int,
        slot_mapping: _Address,
        v_norm: _Address = None,
    ) -> None: ...

class PositionLists:
    """Ascending positions chosen for each query, i32 [queries, lists, most]."""

    def __init__(self, *, positions: _Address, counts: _Address, most: int, lists: int = 1) -> None: ...

class DecodeAttention:
    """One query per sequence over its pages."""

    def __init__(
        self,
        *,
        q: _Address,
        page_tables: _Address,
        seq_lens: _Address,
        num_sequences: int,
        num_heads: int,
        max_pages: int,
        max_length: int,
        rule: _core.ScoreRule,
        select: _core.Stretch,
        sinks: _Address = None,
        chosen: PositionLists,
    ) -> None: ...

class MlaPages:
    """One layer's latents: bf16 [pages, page_size, latent + rope]."""

    def __init__(self, *, rows: _Address, page_size: int, latent: int, rope: int) -> None: ...

class MlaRows:
    """Outputs of latent attention's projections, and their destination."""

    def __init__(
        self,
        *,
        compressed: _Address,
        stride: int,
        queries: _Address,
        num_tokens: int,
        num_heads: int,
        nope: int,
        norm: _Address,
        epsilon: float,
        cos: _Address,
        sin: _Address,
        neighbours: bool,
        slot_mapping: _Address,
    ) -> None: ...

class MlaDecode:
    """One absorbed query per sequence and head."""

    def __init__(
        self,
        *,
        absorbed: _Address,
        page_tables: _Address,
        seq_lens: _Address,
        num_sequences: int,
        num_heads: int,
        max_pages: int,
        max_length: int,
        rule: _core.ScoreRule,
        select: _core.Stretch,
        sinks: _Address = None,
        chosen: PositionLists,
    ) -> None: ...

class IndexPages:
    """Keys of one layer's indexer: bf16 [pages, page_size, head_dim]."""

    def __init__(self, *, keys: _Address, page_size: int, head_dim: int) -> None: ...

class IndexRows:
    """Outputs of an indexer's projections, and their destination."""

    def __init__(
        self,
        *,
        keys: _Address,
        stride: int,
        queries: _Address,
        num_tokens: int,
        num_heads: int,
        query_norm: _Address,
        norm: _Address,
        bias: _Address,
        epsilon: float,
        cos: _Address,
        sin: _Address,
        rotary: int,
        rotates_last: bool,
        neighbours: bool,
        slot_mapping: _Address,
    ) -> None: ...

class IndexChoice:
    """One query per sequence and head, and the best positions for it."""

    def __init__(
        self,
        *,
        queries: _Address,
        weights: _Address,
        stride: int,
        page_tables: _Address,
        seq_lens: _Address,
        num_sequences: int,
        num_heads: int,
        max_pages: int,
        max_length: int,
        most: int,
        block: int = 1,
        local: int = 0,
        positions: _Address,
        counts: _Address,
        pooled: bool = False,
    ) -> None: ...

class IndexPools:
    """Pools of consecutive positions, whose keys are made of their positions' keys."""

    def __init__(
        self,
        *,
        pool: int,
        page_tables: _Address,
        max_pages: int,
        sequences: _Address,
        positions: _Address,
        slot_mapping: _Address,
        num_tokens: int,
        norm: _Address,
        epsilon: float,
        cos: _Address,
        sin: _Address,
        rotary: int,
    ) -> None: ...

class DeltaRecords:
    """One layer's records of gated delta nets."""

    def __init__(
        self,
        *,
        slabs: _Address,
        tail: _Address,
        num_k_heads: int,
        num_v_heads: int,
        key_dim: int,
        value_dim: int,
        taps: int,
    ) -> None: ...

class DeltaRows:
    """Outputs of a gated delta net's projections for tokens."""

    def __init__(
        self,
        *,
        projected: _Address,
        stride: int,
        conv: _Address,
        decay_rate: _Address,
        decay_bias: _Address,
        positions: _Address,
        records: _Address,
        num_sequences: int,
        num_tokens: int,
        chain: _Address,
    ) -> None: ...
