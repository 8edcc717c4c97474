"""Packing of a model's experts into the native store, each once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from twofold import _core
from twofold.api.errors import ModelLoadError
from twofold.blocks import ops
from twofold.weights.weight_format import LayerExperts

if TYPE_CHECKING:
    from twofold.experts.slot_plan import MoeShape

_EXPERTS_AT_ONCE: Final = 16
_COPIES_AT_ONCE: Final = 4  # one of Llama 4's is 252 MB


def pack_experts(
    shape: MoeShape,
    experts: Iterable[LayerExperts],
    pool: ops.ThreadPool,
    progress: Callable[[int, int, int], None] | None,
) -> _core.ExpertStore:
    """A store filled with the layers from `experts`. Raises ModelLoadError."""
    try:
        store = make_store(shape, pool)
        for layer, layer_experts in enumerate(experts):
            put_layer(store, pool, layer, layer_experts)
            if progress is not None:
                progress(layer + 1, store.bytes // shape.num_layers * (layer + 1), store.bytes)
    except ValueError as error:
        raise ModelLoadError(f"experts: {error}; the weights are damaged, download them again") from error
    except MemoryError as error:
        raise ModelLoadError(
            "there is not enough memory for the experts; `twofold doctor` says how much the model needs"
        ) from error
    return store


def make_store(shape: MoeShape, pool: ops.ThreadPool) -> _core.ExpertStore:
    """An empty store; its memory comes from the NUMA nodes of the threads that insert experts."""
    return _core.ExpertStore(
        shape.num_experts,
        shape.hidden,
        shape.intermediate,
        shape.formats,
        huge_pages=pool.num_nodes == 1,
        activation=shape.activation,
        biases=shape.biases,
        limits=shape.limits,
    )


def put_layer(store: _core.ExpertStore, pool: ops.ThreadPool, layer: int, experts: LayerExperts) -> None:
    """Pack a layer's experts in batches, so that copies made on demand are never all in memory."""
    weights = experts.weights
    count = _EXPERTS_AT_ONCE if isinstance(weights, list) else _COPIES_AT_ONCE
    for first in range(0, len(weights), count):
        try:
            store.put(pool, layer, first, weights[first : first + count])
        except ValueError as error:
            raise experts.refused(error) from None
    if experts.biases is not None:
        store.put_biases(layer, 0, experts.biases)
