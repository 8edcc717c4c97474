"""Kernels and the handshake by themselves, against f32 and torch."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from twofold._core.device import AdaptedRows
from twofold.blocks import ops
from twofold.blocks.attention.block_indexer import BlockIndexer, BlockIndexerOnDevice
from twofold.blocks.attention.chosen import ChosenPositions
from twofold.blocks.attention.index_device import IndexNormsOnDevice, PoolKeysOnDevice
from twofold.blocks.attention.indexer import Indexer, IndexerOnDevice
from twofold.blocks.attention.linear import LinearOnDevice
from twofold.blocks.attention.pooled_indexer import PooledIndexer, PooledIndexerOnDevice
from twofold.blocks.attention.rotation import Rotation
from twofold.blocks.attention.scores import Scores
from twofold.blocks.attention.selection import AllPositions, SelectionOnDevice, Window
from twofold.blocks.device_step import DeviceBatch, DeviceStep, HeadShape, KvLayer
from twofold.blocks.gated_delta import GatedDelta, GatedDeltaOnDevice
from twofold.blocks.mla import Mla
from twofold.blocks.mla_device import MlaOnDevice
from twofold.blocks.router import Router
from twofold.device.adapters.factors import FactorBytes, FactorTable, moved
from twofold.device.adapters.products import Products
from twofold.device.checks.experts import relative_error
from twofold.device.kernels import TorchKernels
from twofold.experts.profiles import COST_FIGURES
from twofold.training.device_experts import DeviceExperts, ExpertKind
from twofold.training.device_lane import DeviceLane, training_cost
from twofold.training.experts import ExpertLayer
from twofold.training.factors import Factors
from twofold.weights.weight_format import FORMATS

from benchmarks.gpu.machine import Machine, expect
from tests.gpu.experts import (
    Case,
    error_after_a_lost_step,
    hybrid_error,
    make_case,
    working_handshakes,
)
from tests.kernels.packed_experts import make_host_store

EXPERTS, TOP_K = 16, 4
LIMITS = {"decode": 2e-2, "prefill": 2e-2}
"""Largest ‖ours − reference‖ / ‖reference‖: activations rounded to bf16 or 8 bits."""


def layer_of(machine: Machine, format: str, num_tokens: int) -> Case:
    """Random experts and tokens."""
    least = FORMATS[format].block_columns
    hidden, intermediate = (max(least, size) for size in (machine.sizes.hidden, machine.sizes.intermediate))
    return make_case(machine, format, hidden, intermediate, EXPERTS, TOP_K, num_tokens)


def decode_experts(machine: Machine, format: str) -> dict[str, Any]:
    """Every expert in a slot, batches from 1 to 32."""
    worst = 0.0
    for num_tokens in (1, 3, 8, 32):
        case = layer_of(machine, format, num_tokens)
        experts = case.device_experts(resident=EXPERTS)
        hidden = torch.full_like(case.residual, float("nan"))
        hidden.copy_(case.residual)
        with experts.rehearsal():
            experts.begin_step()
            experts.forward(0, case.normed, case.ids, case.weights, hidden)
            first = hidden.clone()
            hidden.copy_(case.residual)
            experts.forward(0, case.normed, case.ids, case.weights, hidden)
        if not torch.equal(first, hidden):
            raise AssertionError("two runs of the same step differ")
        worst = max(worst, relative_error(first, case.reference()))
    return within(worst, LIMITS["decode"])


def prefill_experts(machine: Machine, format: str) -> dict[str, Any]:
    """The grouped product on tensor cores, small and large tiles."""
    worst = 0.0
    for num_tokens in machine.sizes.prefill_tokens:
        case = layer_of(machine, format, num_tokens)
        hidden = case.residual.clone()
        case.device_experts(resident=EXPERTS).prefill(0, case.normed, case.ids, case.weights, hidden)
        worst = max(worst, relative_error(hidden, case.reference()))
    return within(worst, LIMITS["prefill"])


def training_experts(machine: Machine, format: str) -> dict[str, Any]:
    """All experts of a layer on the device: output and gradients are the CPU's."""
    case = layer_of(machine, format, 40)
    pool, (intermediate, hidden) = ops.ThreadPool(0), case.dense[0][0].shape
    store = make_host_store(pool, [case.matrices])
    experts = DeviceExperts(
        case.hardware, store, [ExpertKind("silu", 0.0, False)], (hidden, intermediate), (10.0, 10.0)
    )
    figures = dict.fromkeys(COST_FIGURES, 0.0) | dict.fromkeys(
        ("cpu_bandwidth_gbps", "cpu_gflops", "vram_bandwidth_gbps", "gpu_gflops", "link_bandwidth_gbps"), 1e9
    )
    cost = training_cost(figures, store, [(1, 1e9), (2, 2e9)])  # so the plan gives the device all
    x, ids, weights = case.normed.float().cpu(), case.ids.cpu(), case.weights.cpu()
    factors = tuple(
        Factors(0.1 * torch.randn(EXPERTS, 4, columns), 0.1 * torch.randn(EXPERTS, rows, 4))
        for rows, columns in ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    )
    leaves = [x, weights, *(part for each in factors for part in (each.a, each.b))]
    for leaf in leaves:
        leaf.requires_grad_()
    of_lanes = []
    for lane in (None, DeviceLane(cost, EXPERTS, experts)):
        layer = ExpertLayer(pool, store, 0)
        layer.lane = lane
        y = layer(x, ids, weights, factors)
        of_lanes.append([y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))])
    return within(max(relative_error(there, here) for here, there in zip(*of_lanes, strict=True)), 1e-4)


def adapters(machine: Machine) -> dict[str, Any]:
    """B (A x) of rows that use one of two adapters or none, beside two matrices' product in bf16."""
    torch.manual_seed(3)
    device, width, rank, num_rows = machine.hardware, machine.sizes.hidden, 16, 9
    data, table = FactorBytes(), FactorTable((1, 2, 1, 2), rank, machine.device)
    factors = [
        [(torch.randn(rank, width).bfloat16().float(), torch.randn(rank, width) / width) for _ in range(2)]
        for _ in range(2)
    ]
    entries = []
    for parts in factors:
        own = table.empty()
        for index, (a, b) in enumerate(parts):
            own[0, 0, index] = data.factors(a.numpy(), b.numpy(), index * width)
        entries.append(own)
    memory = data.on(machine.device)
    for number, own in enumerate(entries):
        table.put(number, moved(own, memory.data_ptr()))
    x, y = torch.randn(num_rows, width).bfloat16(), torch.randn(num_rows, 2 * width).bfloat16()
    numbers = torch.arange(num_rows, dtype=torch.int32) % 3 - 1
    expected = y.float()
    for row, number in enumerate(numbers.tolist()):
        if number >= 0:
            expected[row] += torch.cat([(x[row].float() @ a.T) @ b for a, b in factors[number]])
    ours, on_device = y.to(machine.device), numbers.to(machine.device)
    rows = AdaptedRows(adapters=on_device, num_tokens=num_rows, per_token=1)
    Products(device).add(table.native(), 2 * rank, rows, x.to(machine.device), ours)
    machine.hardware.synchronise()
    return within(relative_error(ours.float().cpu(), expected), 1e-2)


def routing(machine: Machine) -> dict[str, Any]:
    """Against torch."""
    logits = torch.randn(67, 128, device=machine.device)
    worst = 0.0
    for normalise in (False, True):
        router = Router(0, hidden_size=8, num_experts=128, top_k=8, eps=1e-6, renormalise=normalise)
        ids, weights = machine.hardware.kernels(64).route(logits, router, None)
        expected_ids, expected = TorchKernels().route(logits, router, None)
        if not torch.equal(ids, expected_ids):
            raise AssertionError("other experts are chosen")
        worst = max(worst, relative_error(weights, expected))
    return within(worst, 1e-5)


def attention(machine: Machine) -> dict[str, Any]:
    """Against torch, with and without window and head norms, over all positions and over chosen ones."""
    worst = 0.0
    for head_dim, heads, kv_heads, window in ((128, 32, 4, 0), (64, 64, 8, 100), (64, 6, 6, 0)):
        select = Window(window) if window else AllPositions()
        shape = HeadShape(heads, kv_heads, head_dim, 1e-6, select, Scores(head_dim**-0.5))
        lengths = torch.tensor([1, 17, 256, 700, 0], dtype=torch.int32, device=machine.device)
        tables = torch.randperm(5 * 48, device=machine.device).view(5, 48).int()
        places = torch.where(
            lengths > 0,
            tables.long()[torch.arange(5, device=machine.device), ((lengths - 1).clamp(min=0) // 16).long()]
            * 16
            + (lengths - 1) % 16,
            -1,
        )
        qkv = torch.randn(5, (heads + 2 * kv_heads) * head_dim, device=machine.device).bfloat16()
        scores = torch.randn(5, 768, device=machine.device)
        chosen = ChosenPositions.top(scores, lengths.long() - 1, 300)
        norm = torch.rand(head_dim, device=machine.device) + 0.5
        angle = torch.rand(5, head_dim // 2, device=machine.device) * 6
        results = []
        cache = torch.randn(2, 240, 16, kv_heads, head_dim, device=machine.device).bfloat16()
        for kernels in (machine.hardware.kernels(768), TorchKernels()):
            kv = KvLayer(cache[0].clone(), cache[1].clone())
            q = kernels.rope_store(qkv, (norm, norm, None), (angle.cos(), angle.sin()), places, kv, shape)
            attended = [
                kernels.decode_attention(q, tables, lengths, kv, shape, chosen=each)
                for each in (None, chosen)
            ]
            results.append((*attended, kv.keys, kv.values))
        worst = max(worst, *(relative_error(a, b) for a, b in zip(*results, strict=True)))
    return within(worst, 2e-2)


def latent_attention(machine: Machine) -> dict[str, Any]:
    """Against torch: the whole block, of DeepSeek-V3's sizes and odd ones, in a batch with a row of padding; over all
    positions and over chosen ones."""
    worst = 0.0
    for heads, latent, rope, neighbours in ((128, 512, 64, True), (17, 130, 6, False)):
        rotation = Rotation(neighbours=neighbours)
        shape = Mla(0, 256, heads, None, latent, 32, rope, 32, 1e-6, Scores(0.1), rotation=rotation)
        rows = heads * shape.qk_head_dim + shape.cached

        def random(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, device=machine.device) / sizes[-1] ** 0.5

        def matrix(*sizes: int) -> torch.Tensor:
            return random(*sizes).bfloat16()

        block = MlaOnDevice(
            shape,
            project=LinearOnDevice(matrix(rows, 256), norm=1 + random(256), eps=1e-6),
            expand=None,
            latent_norm=1 + random(latent),
            key_norm=None,
            k_b=matrix(heads, 32, latent),
            v_b=matrix(heads, latent, 32),
            select=SelectionOnDevice(),
            out=LinearOnDevice(matrix(256, heads * 32)),
        )
        lengths = torch.tensor([1, 17, 256, 700, 0], dtype=torch.int32, device=machine.device)
        tables = torch.randperm(5 * 48, device=machine.device).view(5, 48).int()
        last = (lengths - 1).clamp(min=0)
        slots = tables.gather(1, (last // 16).long()[:, None])[:, 0].long() * 16 + last % 16
        batch = DeviceBatch(last.long(), last.long(), slots.where(lengths > 0, -1), tables, lengths)
        angle = torch.rand(5, rope // 2, device=machine.device) * 6
        hidden, cache = random(5, 256) * 16, matrix(240, 16, shape.cached)
        chosen = ChosenPositions.top(random(5, 768), lengths.long() - 1, 300)
        for operator in (block, replace(block, select=SelectionOnDevice(chooses=True))):
            results = []
            for kernels in (machine.hardware.kernels(768), TorchKernels()):
                state, out = (cache.clone(),), hidden.clone()
                step = DeviceStep(batch, [(angle.cos(), angle.sin())], kernels, NoExperts())
                step.chosen_positions = chosen
                operator.forward(out, out, state, step)
                results.append((out - hidden, state[0]))
            worst = max(worst, *(relative_error(a, b) for a, b in zip(*results, strict=True)))
    return within(worst, 2e-2)


def indexers(machine: Machine) -> dict[str, Any]:
    """Lists against torch, of DeepSeek-V3.2's and MiniMax-M3's sizes, and of pools, in a batch with a row of padding:
    the share of positions that one side alone chooses."""
    worst = 0.0

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=machine.device) / sizes[-1] ** 0.5

    def linear(rows: int, columns: int) -> LinearOnDevice:
        return LinearOnDevice(random(rows, columns).bfloat16(), norm=1 + random(columns), eps=1e-6)

    lengths = torch.tensor([1, 17, 2500, 700, 0], dtype=torch.int32, device=machine.device)
    tables = torch.randperm(5 * 160, device=machine.device).view(5, 160).int()
    last = (lengths - 1).clamp(min=0)
    slots = tables.gather(1, (last // 16).long()[:, None])[:, 0].long() * 16 + last % 16
    batch = DeviceBatch(last.long(), lengths.long() - 1, slots.where(lengths > 0, -1), tables, lengths)
    angle = torch.rand(5, 32, device=machine.device) * 6
    norms = IndexNormsOnDevice(1 + random(128), random(128), 1e-6)
    of_tokens = Indexer(64, 128, 512, rank=1536, eps=1e-6, rank_eps=1e-6, rotation=Rotation())
    of_blocks = BlockIndexer(4, 128, block=128, most_blocks=4, local=1, eps=1e-6, rotation=Rotation())
    of_pools = PooledIndexer(
        8, 128, 4, most_pools=128, eps=1e-6, rotation=Rotation(), pool_rotation=Rotation()
    )
    own = replace(norms, bias=None, queries=1 + random(128))
    pools = PoolKeysOnDevice(4, 1 + random(128), 1e-6, Rotation())
    for operator in (
        IndexerOnDevice(of_tokens, linear(64 * 128, 1536), linear(128 + 64, 256), norms),
        BlockIndexerOnDevice(of_blocks, linear(4 * 128, 256), linear(128, 256), own),
        PooledIndexerOnDevice(of_pools, linear(9 * 128, 256), replace(own, keys=None), pools),
    ):
        hidden, projected, keys = (
            random(5, 256) * 16,
            random(5, 1536).bfloat16(),
            random(800, 16, 1, 128) * 11,
        )
        seen = []
        for kernels in (machine.hardware.kernels(2560), TorchKernels()):
            step = DeviceStep(batch, [(angle.cos(), angle.sin())], kernels, NoExperts())
            chosen = operator.choose(hidden, projected, (keys.bfloat16(),), step)
            all_positions = torch.ones(5, 2560, dtype=torch.bool, device=machine.device)
            seen.append(chosen.within(all_positions, 4).float())
        worst = max(worst, relative_error(*seen) ** 2 / 2)
    return within(worst, 1e-2)


def gated_delta_nets(machine: Machine) -> dict[str, Any]:
    """Against torch: the whole block, of Qwen3-Next's sizes and odd ones: a chunk, one step twice, and a draft."""
    worst = 0.0
    for heads, of_key, key, value in ((16, 2, 128, 128), (3, 1, 130, 33)):
        shape = GatedDelta(0, 256, heads, heads * of_key, key, value, 4, 1e-6)

        def random(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, device=machine.device) / sizes[-1] ** 0.5

        inputs = shape.channels + shape.values + 2 * shape.num_v_heads
        block = GatedDeltaOnDevice(
            shape,
            project=LinearOnDevice(random(inputs, 256).bfloat16(), norm=1 + random(256), eps=1e-6),
            conv=random(shape.channels, 4),
            decay_rate=-random(shape.num_v_heads).abs(),
            decay_bias=random(shape.num_v_heads),
            head_norm=1 + random(value),
            out=LinearOnDevice(random(256, shape.values).bfloat16()),
        )
        hidden, results = random(21, 256) * 16, []
        for kernels in (machine.hardware.kernels(768), TorchKernels()):

            def allocate(sizes: tuple[int, ...], *, exact: bool = False) -> torch.Tensor:
                return torch.zeros(
                    sizes, device=machine.device, dtype=torch.float32 if exact else torch.bfloat16
                )

            state, parts = shape.device_state(1, 16, allocate, 3), []
            for rows, begin, records, chain in (
                (hidden[:19], 0, (2,), None),
                *((hidden[19:], 19, (2, -1), None) for _ in range(2)),
                (hidden[19:], 19, (2, 0), (0, 1)),
            ):
                numbers = torch.tensor(records, dtype=torch.int32, device=machine.device)
                positions = (
                    torch.arange(len(rows), device=machine.device)
                    if begin == 0
                    else torch.tensor(chain or (0, 0), device=machine.device) + begin
                )
                chained = None if chain is None else torch.tensor(chain, device=machine.device).int()
                lens = (len(rows),) if begin == 0 else None
                batch = DeviceBatch(
                    positions, positions, positions, numbers, numbers, lens, records=numbers, chain=chained
                )
                out = rows.clone()
                block.forward(out, out, state, DeviceStep(batch, [(out, out)], kernels, NoExperts()))
                parts.append((out - rows)[: 19 if begin == 0 else 1 if chain is None else 2])
            results.append(torch.cat(parts))
        worst = max(worst, relative_error(*results))
    return within(worst, 2e-2)


class NoExperts:
    """Experts of a block without any."""

    look_ahead = None

    def cache_prior(self, moe_layer, num_tokens):
        return None

    def forward(self, *_: Any) -> None:
        raise AssertionError("latent attention asked for experts")


def handshake_probe(machine: Machine) -> dict[str, Any]:
    """The probe that chooses how a graph waits for the CPU."""
    found = machine.hardware.native.probe_handshakes(2048)
    if not found["kind"]:
        raise AssertionError(found["reason"])
    return dict(found)


def hybrid(machine: Machine, graph: bool) -> dict[str, Any]:
    """Half of the experts in slots, the rest by the CPU, over several layers; twice, bit for bit the same."""
    worst = 0.0
    for format in ("bf16", "q8_0"):
        for num_tokens in (1, 4):
            for kind in working_handshakes(machine):
                case = layer_of(machine, format, num_tokens)
                worst = max(worst, hybrid_error(machine, case, kind, graph))
    return within(worst, LIMITS["decode"])


def watchdog(machine: Machine) -> dict[str, Any]:
    """Without a server a step times out; with one, the next step works."""
    case = layer_of(machine, "bf16", 1)
    started = time.perf_counter()
    error = error_after_a_lost_step(machine, case, watchdog_s=0.2)
    return within(error, LIMITS["decode"]) | {"seconds": time.perf_counter() - started}


def within(error: float, limit: float) -> dict[str, Any]:
    """The figure with its verdict."""
    return expect(
        {"relative_error": error, "limit": limit}, error <= limit, f"relative error of at most {limit:.0e}"
    )
