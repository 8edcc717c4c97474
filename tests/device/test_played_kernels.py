"""The kernels that the played device stands in for: the same bindings as twofold._cuda, on host memory.

What runs on it elsewhere in this folder is only worth something if it computes what the real kernels are documented to.
"""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from twofold import _core  # noqa: E402
from twofold.api.errors import KernelError  # noqa: E402
from twofold.blocks import ops  # noqa: E402
from twofold.device.experts import make_host_store, pack_expert  # noqa: E402
from twofold.weights.weight_format import WeightMatrix  # noqa: E402

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS = 8, 3, 64, 96, 5
NOBODY = len(_core.Placement.__members__)
"""The device's mark of a row of padding, beside the placements."""
FORMATS = ("f32", "bf16", "fp8", "q8_0", "q4_0", "q4_k")


class Layer:
    """Experts of one layer with a reference, the first half of them in slots."""

    def __init__(self, played: ModuleType, format: str) -> None:
        random = np.random.default_rng(7)
        self.team = ops.ThreadTeam(1)
        hidden, intermediate = (256, 256) if format == "q4_k" else (HIDDEN, INTERMEDIATE)

        def matrix(rows: int, columns: int) -> WeightMatrix:
            values = random.standard_normal((rows, columns), np.float32) / np.float32(columns**0.5)
            if format == "fp8":
                data = torch.from_numpy(values * 16).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
                scales = np.full((-(-rows // 128), -(-columns // 128)), 1 / 16, np.float32)
                return WeightMatrix(data, format, columns, scales)
            packed = np.ascontiguousarray(ops.quantise_rows(self.team, values, format))
            element = {"f32": np.float32, "bf16": np.uint16}.get(format, np.uint8)
            return WeightMatrix(packed.view(element), format, columns)

        self.experts = [
            (matrix(intermediate, hidden), matrix(intermediate, hidden), matrix(hidden, intermediate))
            for _ in range(EXPERTS)
        ]
        self.hidden = hidden
        self.layout = played.ExpertLayout(format, format, hidden, intermediate)
        packed = [pack_expert(*expert) for expert in self.experts]
        assert len(packed[0]) == self.layout.bytes
        self.slots = torch.stack(packed[: EXPERTS // 2])
        self.normed = torch.from_numpy(random.standard_normal((TOKENS, hidden), np.float32)).bfloat16()
        order = np.stack([random.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
        self.ids = torch.from_numpy(order.astype(np.int32))
        self.ids[-1] = -1  # padding
        self.weights = torch.from_numpy(random.random((TOKENS, TOP_K), np.float32))
        self.residual = torch.from_numpy(random.standard_normal((TOKENS, hidden), np.float32))
        pairs = TOKENS * TOP_K
        self.held = (
            torch.zeros(1, dtype=torch.int32),
            torch.zeros(EXPERTS, dtype=torch.int64),
            torch.zeros(EXPERTS + 1, dtype=torch.int32),
            torch.zeros(pairs, dtype=torch.int32),
        )
        self.groups = played.ExpertGroups(*(part.data_ptr() for part in self.held), EXPERTS)
        self.encoded = torch.zeros(self.layout.encoded_bytes(TOKENS), dtype=torch.uint8)
        self.intermediate = torch.zeros(self.layout.intermediate_bytes(pairs), dtype=torch.uint8)
        self.outputs = torch.full((pairs, hidden), float("nan"))
        self.gate_up = torch.zeros(2 * pairs * intermediate)
        self.buffers = played.ExpertBuffers(
            self.encoded.data_ptr(), self.intermediate.data_ptr(), self.outputs.data_ptr(), self.gate_up.data_ptr()
        )  # fmt: skip

    def reference(self, wanted: range) -> Any:
        """The residual and what the wanted experts add to it, in f32."""
        out = self.residual.clone()
        for t in range(TOKENS):
            for expert, weight in zip(self.ids[t].tolist(), self.weights[t], strict=True):
                if expert not in wanted:
                    continue
                gate, up, down = (
                    torch.from_numpy(ops.dequantise(self.team, matrix)) for matrix in self.experts[expert]
                )
                x = self.normed[t].float()
                out[t] += weight * (down @ (torch.nn.functional.silu(gate @ x) * (up @ x)))
        return out


def close(ours: Any, reference: Any) -> bool:
    return bool((ours - reference).norm() < 0.02 * reference.norm())


@pytest.mark.parametrize("format", FORMATS)
def test_decode_computes_the_residents_and_the_mailbox_the_rest(played: ModuleType, format: str) -> None:
    layer = Layer(played, format)
    mailbox = played.DeviceMailbox(1, TOKENS, TOP_K, layer.hidden)
    server = played.StepServer(mailbox, layer.team, make_host_store(layer.team, [layer.experts]))
    table = torch.tensor([*range(EXPERTS // 2), *[-1] * (EXPERTS // 2)], dtype=torch.int32)
    step, on_cpu = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    where = torch.zeros(TOKENS * TOP_K, dtype=torch.uint8)
    hidden = layer.residual.clone()

    def device() -> None:
        played.begin_step(step.data_ptr(), 0)
        played.place(
            layer.ids.data_ptr(), layer.weights.data_ptr(), layer.normed.data_ptr(), TOKENS, 0, table.data_ptr(),
            0, layer.slots.data_ptr(), layer.slots.stride(0), 0, 0, EXPERTS, layer.groups, where.data_ptr(),
            on_cpu.data_ptr(), 1, TOKENS, TOP_K, layer.hidden, mailbox.address, step.data_ptr(), 0,
        )  # fmt: skip
        played.encode(
            layer.layout.activations,
            layer.normed.data_ptr(),
            TOKENS,
            layer.hidden,
            layer.encoded.data_ptr(),
            0,
        )
        played.decode_experts(layer.layout, layer.groups, layer.buffers, TOKENS, TOP_K, EXPERTS, 0, 0)
        mailbox.wait("kernels", 0, step.data_ptr(), on_cpu.data_ptr(), 30.0, 0)
        played.combine(
            layer.outputs.data_ptr(), layer.weights.data_ptr(), where.data_ptr(), mailbox.results, TOKENS, TOP_K,
            layer.hidden, hidden.data_ptr(), 0, mailbox.joined_ns(0),
        )  # fmt: skip

    thread = threading.Thread(target=device)
    thread.start()
    assert server.serve(1, 30.0)["done"]
    thread.join()
    assert on_cpu.item() == int((layer.ids >= EXPERTS // 2).sum())
    assert torch.equal(where.view(TOKENS, TOP_K) == NOBODY, layer.ids < 0)
    assert close(hidden, layer.reference(range(EXPERTS)))
    assert torch.equal(hidden[-1], layer.residual[-1])


@pytest.mark.parametrize("format", FORMATS[1:])
def test_prefill_computes_what_lies_in_slots(played: ModuleType, format: str) -> None:
    layer = Layer(played, format)
    flat = layer.ids.flatten().numpy()
    pairs = np.flatnonzero((flat >= 0) & (flat < EXPERTS // 2))
    pairs = pairs[np.argsort(flat[pairs], kind="stable")].astype(np.int32)
    experts, counts = np.unique(flat[pairs], return_counts=True)
    begin = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    addresses = layer.slots.data_ptr() + experts.astype(np.int64) * layer.slots.stride(0)
    for held, values in zip(layer.held, ([len(experts)], addresses, begin, pairs), strict=True):
        held[: len(values)] = torch.from_numpy(np.asarray(values).astype(held.numpy().dtype))
    tile = played.tile_tokens_for(len(pairs), len(experts))
    tiles = torch.from_numpy(played.tile_groups(begin, tile))
    played.prefill_experts(
        layer.layout, layer.groups, layer.buffers, tiles.data_ptr(), len(tiles), tile, layer.normed.data_ptr(),
        TOKENS, TOP_K, 0,
    )  # fmt: skip
    where = torch.from_numpy(np.where(np.isin(np.arange(flat.size), pairs), 0, 3).astype(np.uint8))
    hidden = layer.residual.clone()
    played.combine(
        layer.outputs.data_ptr(), layer.weights.data_ptr(), where.data_ptr(), 0, TOKENS, TOP_K, layer.hidden,
        hidden.data_ptr(), 0,
    )  # fmt: skip
    assert close(hidden, layer.reference(range(EXPERTS // 2)))


def test_every_way_to_wait_gets_its_answers(played: ModuleType) -> None:
    probes = played.probe_hand_overs(64, 3, 3)["probes"]
    assert [probe["kind"] for probe in probes if probe["works"]] == [
        "kernels",
        "stream-memory",
        "host-function",
    ]


def test_a_wait_that_nobody_answers_ends_and_says_where(played: ModuleType) -> None:
    layer = Layer(played, "f32")
    mailbox = played.DeviceMailbox(1, TOKENS, TOP_K, layer.hidden)
    server = played.StepServer(mailbox, layer.team, make_host_store(layer.team, [layer.experts]))
    step, on_cpu = torch.ones(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    mailbox.wait("kernels", 0, step.data_ptr(), on_cpu.data_ptr(), 0.01, 0)
    served = server.serve(1, 30.0)
    assert not served["done"]
    assert "waited for the CPU's experts at MoE layer 0" in served["text"]


def test_what_a_kernel_does_not_take_is_refused(played: ModuleType) -> None:
    layer = Layer(played, "f32")
    with pytest.raises(KernelError, match="a shape, format or pointer"):
        played.encode("f32", 0, 1, 1, 0, 0)
    with pytest.raises(KernelError, match="prefill_experts"):
        played.prefill_experts(
            layer.layout, layer.groups, layer.buffers, 0, 0, 32, layer.normed.data_ptr(), TOKENS, TOP_K, 0
        )
