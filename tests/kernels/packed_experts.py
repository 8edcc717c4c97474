"""Experts of tests in the layouts of device slots and of the CPU's store."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from twofold import _core
from twofold.blocks import ops
from twofold.weights.weight_format import WeightMatrix

F32 = npt.NDArray[np.float32]


def pack_expert(
    gate: WeightMatrix, up: WeightMatrix, down: WeightMatrix, biases: F32 | None = None
) -> Tensor:
    """An expert's panels, one after the other, then its biases [2 intermediate + hidden], in slot layout: uint8 on the
    CPU."""
    parts = [_core.pack_panels(matrix) for matrix in (gate, up, down)]
    if biases is not None:
        for own in np.split(biases, [gate.rows, 2 * gate.rows]):
            floats = np.zeros(-(-len(own) // 16) * 16, np.float32)
            floats[: len(own)] = own
            parts.append(floats.view(np.uint8))
    return torch.from_numpy(np.concatenate(parts))


def make_host_store(
    pool: ops.ThreadPool, layers: Sequence[Sequence[tuple[WeightMatrix, WeightMatrix, WeightMatrix]]]
) -> _core.ExpertStore:
    """The experts (gate, up, down) of all layers in the CPU's store."""
    formats = [(gate.format, up.format, down.format) for gate, up, down in (layer[0] for layer in layers)]
    gate = layers[0][0][0]
    store = _core.ExpertStore(len(layers[0]), gate.columns, gate.rows, formats)
    for layer, experts in enumerate(layers):
        store.put(pool, layer, 0, list(experts))
    return store
