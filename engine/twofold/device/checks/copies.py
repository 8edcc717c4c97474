"""Checks of a device's memory: copies in both directions, and experts uploaded into slots."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from twofold import _core
from twofold.blocks import ops
from twofold.device.checks.running import Figures, WrongResultError
from twofold.device.device import Device
from twofold.experts.cpu_cost import machine_cost_model
from twofold.experts.profiles import UNCALIBRATED, load_profile
from twofold.weights.weight_format import WeightMatrix

_COPY_BYTES: Final = 4 << 20
_READ_BYTES: Final = 64 << 10
"""Bytes that a kernel reads from host memory."""
_MEASURED_BYTES: Final = 64 << 20
_EXPERTS: Final = 4
_HIDDEN, _INTERMEDIATE = 64, 32


def copy_both_ways(device: Device) -> Figures:
    """Pinned host memory to the device, by a copy and by a kernel, and back. Raises WrongResultError."""
    sent = device.staging_buffer((_COPY_BYTES,), torch.uint8)
    sent.numpy()[:] = np.random.default_rng(0).integers(0, 256, _COPY_BYTES, np.uint8)
    with device.active():
        there = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device.torch_device)
        there.copy_(sent, non_blocking=True)
        _expect_equal(_read_back(device, there), sent, "a copy to the device and back")
        there.zero_()
        device.native.read_host(sent, there, _READ_BYTES, device.stream())
        read = _read_back(device, there)[:_READ_BYTES]
        _expect_equal(read, sent[:_READ_BYTES], "host memory read by a kernel")
    return {"bytes": _COPY_BYTES, "read_by_kernel_bytes": _READ_BYTES}


def upload_experts(device: Device, pool: ops.ThreadPool) -> Figures:
    """Random experts uploaded into slots: each slot then holds one of them. Raises WrongResultError."""
    random = np.random.default_rng(1)
    store = _core.ExpertStore(_EXPERTS, _HIDDEN, _INTERMEDIATE, [("f32", "f32", "f32")])

    def matrix(rows: int, columns: int) -> WeightMatrix:
        return WeightMatrix(random.standard_normal((rows, columns), np.float32), "f32", columns)

    sizes = ((_INTERMEDIATE, _HIDDEN), (_INTERMEDIATE, _HIDDEN), (_HIDDEN, _INTERMEDIATE))
    store.put(
        pool, 0, 0, [(matrix(*sizes[0]), matrix(*sizes[1]), matrix(*sizes[2])) for _ in range(_EXPERTS)]
    )
    cost = machine_cost_model(load_profile(UNCALIBRATED), store, None)
    accelerator = device.native.accelerator(store, cost, _core.SchedulerConfig(1, _EXPERTS, 1, _EXPERTS))
    executor = _core.MoeExecutor.on_device(pool, store, accelerator, preload=True)
    executor.idle()
    with device.active():
        slots = torch.zeros(
            (_EXPERTS, accelerator.slot_stride), dtype=torch.uint8, device=device.torch_device
        )
        # A kernel reads any address of the device, as it reads the host's.
        device.native.read_host(accelerator.slot_base, slots, slots.numel(), device.stream())
        read = _read_back(device, slots)
    panels = torch.from_numpy(np.array(store.panels(0)).reshape(_EXPERTS, -1))[:, : store.expert_bytes]
    found = {
        expert
        for expert, bytes_of in enumerate(panels)
        for slot in read
        if torch.equal(slot[: store.expert_bytes], bytes_of)
    }
    if len(found) < _EXPERTS:
        raise WrongResultError(f"{_EXPERTS - len(found)} of {_EXPERTS} uploaded experts are in no slot")
    return {"bytes": _EXPERTS * store.expert_bytes, "warning": accelerator.warning}


def bandwidths(device: Device) -> Figures:
    """GB/s from host to device, back, and within the device; the median of five copies."""
    host = device.staging_buffer((_MEASURED_BYTES,), torch.uint8)
    link = device.native.link_probe(_MEASURED_BYTES)
    with device.active():
        first, second = (
            torch.zeros(_MEASURED_BYTES, dtype=torch.uint8, device=device.torch_device) for _ in range(2)
        )

        def gbps(us: list[float], num_bytes: int = _MEASURED_BYTES) -> float:
            return round(num_bytes / 1e3 / max(float(np.median(us)), 1e-3), 2)

        to_host = [device.time_us(lambda: host.copy_(first, non_blocking=True)) for _ in range(5)]
        within = [device.time_us(lambda: second.copy_(first)) for _ in range(5)]
    return {
        "to_device_gbps": gbps([link.copies_us(_MEASURED_BYTES) for _ in range(5)]),
        "to_host_gbps": gbps(to_host),
        "within_device_gbps": gbps(within, 2 * _MEASURED_BYTES),
    }


def _read_back(device: Device, tensor: Tensor) -> Tensor:
    host = device.staging_buffer(tuple(tensor.shape), tensor.dtype)
    host.copy_(tensor, non_blocking=True)
    device.synchronise()
    return host


def _expect_equal(received: Tensor, sent: Tensor, what: str) -> None:
    wrong = int((received != sent).sum())
    if wrong:
        raise WrongResultError(f"{what} changed {wrong} of {sent.numel()} bytes")
