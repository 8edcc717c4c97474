"""The kernels by the bindings that the fake device shares with twofold._cuda, whole steps with the mailbox too."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from twofold import _core
from twofold._core import device as launches
from twofold.api.errors import KernelError
from twofold.blocks import ops
from twofold.weights.weight_format import WeightMatrix

from scripts.stubs import signatures
from scripts.stubs.__main__ import PACKAGE
from tests.kernels.packed_experts import make_host_store, pack_expert

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS = 8, 3, 64, 96, 5
UNPLACED = len(_core.Placement.__members__)
"""The device's mark of a row of padding, beside the placements."""
FORMATS = ("f32", "bf16", "fp8", "q8_0", "q4_0", "q4_k")


class Layer:
    """Experts of one layer with a reference, the first half of them in slots."""

    def __init__(self, format: str) -> None:
        random = np.random.default_rng(7)
        self.pool = ops.ThreadPool(1)
        hidden, intermediate = (256, 256) if format == "q4_k" else (HIDDEN, INTERMEDIATE)

        def matrix(rows: int, columns: int) -> WeightMatrix:
            values = random.standard_normal((rows, columns), np.float32) / np.float32(columns**0.5)
            if format == "fp8":
                data = torch.from_numpy(values * 16).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
                scales = np.full((-(-rows // 128), -(-columns // 128)), 1 / 16, np.float32)
                return WeightMatrix(data, format, columns, scales)
            packed = np.ascontiguousarray(ops.quantise_rows(self.pool, values, format))
            element = {"f32": np.float32, "bf16": np.uint16}.get(format, np.uint8)
            return WeightMatrix(packed.view(element), format, columns)

        self.experts = [
            (matrix(intermediate, hidden), matrix(intermediate, hidden), matrix(hidden, intermediate))
            for _ in range(EXPERTS)
        ]
        self.hidden = hidden
        self.layout = launches.ExpertLayout(format, format, hidden, intermediate)
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
        self.held = {
            "num_groups": torch.zeros(1, dtype=torch.int32),
            "weights": torch.zeros(EXPERTS, dtype=torch.int64),
            "begin": torch.zeros(EXPERTS + 1, dtype=torch.int32),
            "pairs": torch.zeros(pairs, dtype=torch.int32),
        }
        addresses = {name: part.data_ptr() for name, part in self.held.items()}
        self.groups = launches.ExpertGroups(**addresses, capacity=EXPERTS)
        self.encoded = torch.zeros(self.layout.encoded_bytes(TOKENS), dtype=torch.uint8)
        self.intermediate = torch.zeros(self.layout.intermediate_bytes(pairs), dtype=torch.uint8)
        self.outputs = torch.full((pairs, hidden), float("nan"))
        self.gate_up = torch.zeros(2 * pairs * intermediate)
        self.buffers = launches.ExpertBuffers(
            encoded=self.encoded.data_ptr(),
            intermediate=self.intermediate.data_ptr(),
            outputs=self.outputs.data_ptr(),
            gate_up=self.gate_up.data_ptr(),
        )

    @property
    def mailbox_shape(self) -> Any:
        return launches.MailboxShape(num_layers=1, max_tokens=TOKENS, top_k=TOP_K, hidden=self.hidden)

    def combined(self, where: Any, from_cpu: int, hidden: Any, joined_ns: int = 0) -> Any:
        return launches.CombinedLayer(
            outputs=self.outputs.data_ptr(),
            weights=self.weights.data_ptr(),
            where=where.data_ptr(),
            from_cpu=from_cpu,
            num_tokens=TOKENS,
            top_k=TOP_K,
            hidden_size=self.hidden,
            hidden=hidden.data_ptr(),
            joined_ns=joined_ns,
        )

    def reference(self, wanted: range) -> Any:
        """The residual and what the wanted experts add to it, in f32."""
        out = self.residual.clone()
        for t in range(TOKENS):
            for expert, weight in zip(self.ids[t].tolist(), self.weights[t], strict=True):
                if expert not in wanted:
                    continue
                gate, up, down = (
                    torch.from_numpy(ops.dequantise(self.pool, matrix)) for matrix in self.experts[expert]
                )
                x = self.normed[t].float()
                out[t] += weight * (down @ (torch.nn.functional.silu(gate @ x) * (up @ x)))
        return out


def members(nodes: Iterable[ast.stmt]) -> dict[str, set[str]]:
    """Functions and classes, with the members of these."""
    return {
        node.name: {
            part.target.id
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
            else part.name
            for part in getattr(node, "body", ())
            if isinstance(node, ast.ClassDef) and isinstance(part, (ast.AnnAssign, ast.FunctionDef))
        }
        for node in nodes
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }


def test_it_exports_the_device_functions_of_the_cuda_stub(fake: ModuleType) -> None:
    """On a machine without nvcc this is what holds `_cuda.pyi` to the bindings."""
    reported = ast.parse((PACKAGE / "_cuda.pyi").read_text(encoding="utf-8")).body
    stub = members(node for node in reported if "TypedDict" not in ast.unparse(node).partition("\n")[0])
    for_tests = {"spare", "stress", "link_correction", "upload_counts"}
    ours = {
        name: members
        for name, members in members(signatures.definitions(fake)).items()
        if name not in for_tests
    }
    assert ours == {name: stub[name] for name in ours}
    assert stub.keys() - ours.keys() == {"devices", "why_no_device"}


def close(ours: Any, reference: Any) -> bool:
    return bool((ours - reference).norm() < 0.02 * reference.norm())


@pytest.mark.parametrize("format", FORMATS)
def test_decode_computes_the_residents_and_the_mailbox_the_rest(fake: ModuleType, format: str) -> None:
    layer = Layer(format)
    native = fake.open_device()
    mailbox = native.mailbox(layer.mailbox_shape)
    server = native.step_server(mailbox, layer.pool, make_host_store(layer.pool, [layer.experts]))
    table = torch.tensor([*range(EXPERTS // 2), *[-1] * (EXPERTS // 2)], dtype=torch.int32)
    step, on_cpu = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    where = torch.zeros(TOKENS * TOP_K, dtype=torch.uint8)
    hidden = layer.residual.clone()

    def device() -> None:
        native.begin_step(step.data_ptr(), 0)
        native.place(
            launches.RoutedLayer(
                ids=layer.ids.data_ptr(),
                weights=layer.weights.data_ptr(),
                normed=layer.normed.data_ptr(),
                num_tokens=TOKENS,
                layer=0,
            ),
            launches.PlacementTables(
                slots=table.data_ptr(),
                split=0,
                slot_base=layer.slots.data_ptr(),
                slot_stride=layer.slots.stride(0),
                store_base=0,
                store_offsets=0,
                num_experts=EXPERTS,
            ),
            launches.PlacedLayer(groups=layer.groups, where=where.data_ptr(), num_on_cpu=on_cpu.data_ptr()),
            layer.mailbox_shape,
            mailbox=mailbox.address,
            step=step.data_ptr(),
            stream=0,
        )
        rows = launches.EncodedRows(
            kind=layer.layout.activations,
            rows=layer.normed.data_ptr(),
            num_tokens=TOKENS,
            columns=layer.hidden,
            out=layer.encoded.data_ptr(),
        )
        native.encode(rows, 0)
        shape = launches.DecodeShape(
            num_tokens=TOKENS, top_k=TOP_K, num_experts=EXPERTS, shared_bytes=48 * 1024
        )
        native.decode_experts(layer.layout, layer.groups, layer.buffers, shape, 0)
        mailbox.wait(
            kind="kernels",
            layer=0,
            step=step.data_ptr(),
            num_on_cpu=on_cpu.data_ptr(),
            limit_s=30.0,
            stream=0,
        )
        native.combine(layer.combined(where, mailbox.results, hidden, mailbox.joined_ns(0)), 0)

    thread = threading.Thread(target=device)
    thread.start()
    assert server.serve(1, 30.0)["done"]
    thread.join()
    assert on_cpu.item() == int((layer.ids >= EXPERTS // 2).sum())
    assert torch.equal(where.view(TOKENS, TOP_K) == UNPLACED, layer.ids < 0)
    assert close(hidden, layer.reference(range(EXPERTS)))
    assert torch.equal(hidden[-1], layer.residual[-1])


@pytest.mark.parametrize("format", FORMATS[1:])
def test_prefill_computes_what_lies_in_slots(fake: ModuleType, format: str) -> None:
    layer = Layer(format)
    flat = layer.ids.flatten().numpy()
    pairs = np.flatnonzero((flat >= 0) & (flat < EXPERTS // 2))
    pairs = pairs[np.argsort(flat[pairs], kind="stable")].astype(np.int32)
    experts, counts = np.unique(flat[pairs], return_counts=True)
    begin = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    addresses = layer.slots.data_ptr() + experts.astype(np.int64) * layer.slots.stride(0)
    for held, values in zip(layer.held.values(), ([len(experts)], addresses, begin, pairs), strict=True):
        held[: len(values)] = torch.from_numpy(np.asarray(values).astype(held.numpy().dtype))
    tile = launches.tile_tokens_for(len(pairs), len(experts))
    tiles = torch.from_numpy(launches.tile_groups(begin, tile))
    native = fake.open_device()
    native.prefill_experts(
        layer.layout,
        layer.groups,
        layer.buffers,
        launches.PrefillTiles(tiles=tiles.data_ptr(), count=len(tiles), tokens=tile),
        launches.PrefillRows(x=layer.normed.data_ptr(), num_tokens=TOKENS, top_k=TOP_K),
        0,
    )
    where = torch.from_numpy(np.where(np.isin(np.arange(flat.size), pairs), 0, 3).astype(np.uint8))
    hidden = layer.residual.clone()
    native.combine(layer.combined(where, 0, hidden), 0)
    assert close(hidden, layer.reference(range(EXPERTS // 2)))


def test_every_kind_of_wait_gets_its_answers(fake: ModuleType) -> None:
    probes = fake.open_device().probe_handshakes(64, 3, 3)["probes"]
    assert [probe["kind"] for probe in probes if probe["works"]] == [
        "kernels",
        "stream-memory",
        "host-function",
    ]


def test_an_unanswered_wait_ends_and_names_its_place(fake: ModuleType) -> None:
    layer = Layer("f32")
    native = fake.open_device()
    mailbox = native.mailbox(layer.mailbox_shape)
    server = native.step_server(mailbox, layer.pool, make_host_store(layer.pool, [layer.experts]))
    step, on_cpu = torch.ones(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    mailbox.wait(
        kind="kernels", layer=0, step=step.data_ptr(), num_on_cpu=on_cpu.data_ptr(), limit_s=0.01, stream=0
    )
    served = server.serve(1, 30.0)
    assert not served["done"]
    assert "waited for the CPU's experts at MoE layer 0" in served["text"]


def test_what_a_kernel_does_not_take_is_refused(fake: ModuleType) -> None:
    layer, native = Layer("f32"), fake.open_device()
    with pytest.raises(KernelError, match="a shape, format or pointer"):
        native.encode(launches.EncodedRows(kind="f32", rows=0, num_tokens=1, columns=1, out=0), 0)
    with pytest.raises(KernelError, match="prefill_experts"):
        native.prefill_experts(
            layer.layout,
            layer.groups,
            layer.buffers,
            launches.PrefillTiles(tiles=0, count=0, tokens=32),
            launches.PrefillRows(x=layer.normed.data_ptr(), num_tokens=TOKENS, top_k=TOP_K),
            0,
        )
