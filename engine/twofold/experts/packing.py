"""Packing of a model's experts into the native store, each once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

from twofold import _core
from twofold.api.errors import ModelLoadError
from twofold.blocks import ops
from twofold.weights.weight_format import LayerExperts

if TYPE_CHECKING:
    from twofold.experts.slot_plan import MoeShape
    from twofold.experts.spread import ExpertSpread

_EXPERTS_AT_ONCE: Final = 16
_COPIES_AT_ONCE: Final = 4  # one of Llama 4's is 252 MB


def pack_experts(
    shape: MoeShape,
    experts: Iterable[LayerExperts],
    pool: ops.ThreadPool,
    progress: Callable[[int, int, int], None] | None,
    spread: ExpertSpread | None = None,
) -> _core.ExpertStore:
    """A store filled with the layers from `experts`, or this rank's share of them. Raises ModelLoadError."""
    try:
        store = make_store(shape, pool, spread)
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


def make_store(
    shape: MoeShape, pool: ops.ThreadPool, spread: ExpertSpread | None = None
) -> _core.ExpertStore:
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
        ranks=spread.ranks if spread else None,
        holders=spread.holders if spread else (),
        second_half=shape.second_half,
    )


def put_layer(store: _core.ExpertStore, pool: ops.ThreadPool, layer: int, experts: LayerExperts) -> None:
    """Pack the experts of a layer that `store` holds, in batches, so that copies made on demand are never all in
    memory."""
    weights = experts.weights
    count = _EXPERTS_AT_ONCE if isinstance(weights, list) else _COPIES_AT_ONCE
    for first, end in _held_stretches(store, layer, len(weights)):
        for begin in range(first, end, count):
            try:
                store.put(pool, layer, begin, weights[begin : min(begin + count, end)])
            except ValueError as error:
                raise experts.refused(error) from None
    if experts.biases is not None:
        store.put_biases(layer, 0, experts.biases)


def _held_stretches(store: _core.ExpertStore, layer: int, num_experts: int) -> Iterator[tuple[int, int]]:
    """(first, end) of adjacent experts that `store` holds."""
    first = 0
    for expert in range(num_experts + 1):
        if expert == num_experts or not store.holds(layer, expert):
            if first < expert:
                yield first, expert
            first = expert + 1
