"""One MoE layer's experts with a batch, its routing and a reference in f32, for checks of kernels and handshake."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from twofold.blocks import ops
from twofold.device.checks.experts import relative_error, run_concurrently, served_twice
from twofold.device.checks.fixed_experts import DeviceExperts
from twofold.device.device import Device
from twofold.experts.slot_plan import MoeShape
from twofold.weights.weight_format import WeightMatrix

from benchmarks.gpu.machine import Machine
from tests.kernels.packed_experts import make_host_store, pack_expert


def working_handshakes(machine: Machine) -> tuple[str, ...]:
    """The ways to hand over that this device has."""
    found = machine.keep("handshakes", lambda: machine.hardware.native.probe_handshakes(256))
    return tuple(probe["kind"] for probe in found["probes"] if probe["works"])


@dataclass
class Case:
    """One MoE layer's experts, a batch and its routing; tensors are on the device."""

    hardware: Device
    format: str
    top_k: int
    matrices: list[tuple[Any, Any, Any]]
    """WeightMatrix gate, up, down of every expert."""
    dense: list[tuple[Tensor, Tensor, Tensor]]
    """The same, f32."""
    normed: Tensor
    ids: Tensor
    weights: Tensor
    residual: Tensor

    def device_experts(
        self, resident: int, handshake: str = "kernels", watchdog_s: float = 5.0, num_layers: int = 1
    ) -> DeviceExperts:
        """The first `resident` experts in slots, in every layer the same."""
        packed = [
            pack_expert(*expert) if number < resident else None for number, expert in enumerate(self.matrices)
        ]
        intermediate, hidden = self.dense[0][0].shape
        shape = MoeShape(
            num_layers, len(packed), self.top_k, hidden, intermediate, ((self.format,) * 3,) * num_layers
        )
        tokens = min(len(self.normed), 32)
        return DeviceExperts(self.hardware, [packed] * num_layers, shape, tokens, handshake, watchdog_s)

    def reference(self, num_layers: int = 1) -> Tensor:
        """In f32 from the dequantised weights; every layer adds the same to the residual."""
        out = self.normed.float().new_zeros(self.residual.shape)
        x = self.normed.float()
        for expert, (gate, up, down) in enumerate(self.dense):
            share = (self.weights * (self.ids == expert)).sum(1, keepdim=True)
            gated = x @ gate.T
            out += share * ((gated * gated.sigmoid() * (x @ up.T)) @ down.T)
        return self.residual + num_layers * out

    def server(self, experts: DeviceExperts, num_layers: int = 1) -> Any:
        """The CPU's side of `experts`."""
        pool = ops.ThreadPool(0)
        return experts.server(pool, make_host_store(pool, [self.matrices] * num_layers))


def make_case(
    machine: Machine,
    format: str,
    hidden: int,
    intermediate: int,
    num_experts: int,
    top_k: int,
    num_tokens: int,
) -> Case:
    """Random, fresh in every call."""
    pool = ops.ThreadPool(0)
    rng = np.random.default_rng()

    def matrix(rows: int, columns: int) -> WeightMatrix:
        values = rng.standard_normal((rows, columns), np.float32) / np.float32(columns**0.5)
        if format == "fp8":
            data = torch.from_numpy(values * 16).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
            grid = np.full((-(-rows // 128), -(-columns // 128)), 1 / 16, np.float32)
            return WeightMatrix(data, format, columns, grid)
        rows_of = np.ascontiguousarray(ops.quantise_rows(pool, values, format))
        element = {"f32": np.float32, "f16": np.uint16, "bf16": np.uint16}.get(format, np.uint8)
        return WeightMatrix(rows_of.view(element), format, columns)

    matrices = [
        (matrix(intermediate, hidden), matrix(intermediate, hidden), matrix(hidden, intermediate))
        for _ in range(num_experts)
    ]
    dense = [
        tuple(torch.from_numpy(ops.dequantise(pool, part)).to(machine.device) for part in expert)
        for expert in matrices
    ]
    scores = torch.randn(num_tokens, num_experts, device=machine.device)
    weights, ids = scores.softmax(1).topk(top_k, dim=1)
    normed = torch.randn(num_tokens, hidden, device=machine.device).bfloat16()
    return Case(
        machine.hardware,
        format,
        top_k,
        matrices,
        dense,
        normed,
        ids.int().contiguous(),
        weights.contiguous(),
        torch.randn(num_tokens, hidden, device=machine.device),
    )  # type: ignore[arg-type]


def hybrid_error(machine: Machine, case: Case, kind: str, graph: bool, num_layers: int = 3) -> float:
    """Error of a step of several layers with half of the experts on the CPU. Raises where two runs differ."""
    experts = case.device_experts(len(case.matrices) // 2, kind, num_layers=num_layers)
    server = case.server(experts, num_layers)
    hidden = case.residual.clone()

    def step() -> None:
        experts.begin_step()
        for layer in range(num_layers):
            experts.forward(layer, case.normed, case.ids, case.weights, hidden)

    results = served_twice(
        machine.hardware, experts, server, step, hidden, case.residual, graph=graph, limit_s=5.0
    )
    return relative_error(results[0], case.reference(num_layers))


def error_after_a_lost_step(machine: Machine, case: Case, watchdog_s: float) -> float:
    """A step is launched and not served; the error of the one after it."""
    experts = case.device_experts(0, "kernels", watchdog_s)
    hidden = case.residual.clone()
    experts.begin_step()
    experts.forward(0, case.normed, case.ids, case.weights, hidden)
    machine.sync()  # ends by the device's own limit
    experts.resynchronise()
    experts.mailbox.abort()
    experts.mailbox.reset()
    hidden.copy_(case.residual)
    server = case.server(experts)

    def step() -> None:
        experts.begin_step()
        experts.forward(0, case.normed, case.ids, case.weights, hidden)

    number = experts.next_number()
    served = run_concurrently(machine.hardware, step, lambda: server.serve(number, 5.0))
    if not served["done"]:
        raise AssertionError(served["text"])
    return relative_error(hidden, case.reference())
