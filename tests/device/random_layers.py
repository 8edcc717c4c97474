"""A random layer of experts in device memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from twofold._core import device as launches
from twofold.blocks import ops
from twofold.device.adapters.step import AdaptedExperts
from twofold.device.layouts import Grouping, by_expert
from twofold.weights.weight_format import WeightMatrix

F32 = npt.NDArray[np.float32]
EXPERTS, TOP_K, SIZE = 4, 2, 256
CPU = torch.device("cpu")


def matrix(
    random: np.random.Generator, pool: ops.ThreadPool, format: str, rows: int = SIZE, columns: int = SIZE
) -> WeightMatrix:
    values = random.standard_normal((rows, columns), np.float32) / np.float32(columns**0.5)
    if format == "fp8":
        data = torch.from_numpy(values * 16).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        scales = np.full((-(-rows // 128), -(-columns // 128)), 1 / 16, np.float32)
        return WeightMatrix(data, format, columns, scales)
    packed = np.ascontiguousarray(ops.quantise_rows(pool, values, format))
    element = {"f32": np.float32, "f16": np.uint16, "bf16": np.uint16}.get(format, np.uint8)
    return WeightMatrix(packed.view(element), format, columns)


def on_device(native: Any, layer: Any, many: bool, adapted: AdaptedExperts | None = None) -> F32:
    """f32 [pairs, hidden]: every pair's output, by the decode kernels or, with `many`, those of tensor cores.

    adapted: adapters of the rows, of layer 0.
    """
    experts, begin, pairs = by_expert(layer.ids)
    (num_experts, top_k), hidden = (len(layer.slots), layer.ids.shape[1]), layer.rows.shape[1]
    grouping = Grouping(num_experts, layer.ids.size, CPU)
    addresses = layer.slots.data_ptr() + experts.astype(np.int64) * layer.slots.stride(0)
    grouping.fill(addresses, begin, pairs)
    encoded = torch.zeros(layer.layout.encoded_bytes(len(layer.rows)), dtype=torch.uint8)
    inner = torch.zeros(layer.layout.intermediate_bytes(layer.ids.size), dtype=torch.uint8)
    outputs = torch.full((layer.ids.size, hidden), float("nan"))
    gate_up, parts = torch.zeros((2, layer.ids.size, 2, layer.inner))
    ids, where = torch.from_numpy(layer.ids), torch.zeros(layer.ids.size, dtype=torch.uint8)
    buffers = launches.ExpertBuffers(
        encoded=encoded.data_ptr(),
        intermediate=inner.data_ptr(),
        outputs=outputs.data_ptr(),
        gate_up=gate_up.data_ptr(),
        adapted=None if adapted is None else parts,
    )
    if adapted is not None:
        adapted.before(0, layer.rows, ids, where, parts)
    rows = layer.rows.data_ptr()
    if many:
        tiles = torch.from_numpy(launches.tile_groups(begin, 32))
        native.prefill_experts(
            layer.layout,
            grouping.groups,
            buffers,
            launches.PrefillTiles(tiles=tiles.data_ptr(), count=len(tiles), tokens=32),
            launches.PrefillRows(x=rows, num_tokens=len(layer.rows), top_k=top_k),
            0,
        )
    else:
        encoding = launches.EncodedRows(
            kind=layer.layout.activations,
            rows=rows,
            num_tokens=len(layer.rows),
            columns=hidden,
            out=encoded.data_ptr(),
        )
        native.encode(encoding, 0)
        shape = launches.DecodeShape(
            num_tokens=len(layer.rows), top_k=top_k, num_experts=num_experts, shared_bytes=48 * 1024
        )
        native.decode_experts(layer.layout, grouping.groups, buffers, shape, 0)
    if adapted is not None:
        adapted.after(0, parts, ids, where, outputs)
    return outputs.numpy()
