"""The CUDA kernels' own sources at random shapes, run by the SIMT machine, against torch. Not a GPU run."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from twofold._core import device as launches
from twofold.blocks import ops
from twofold.blocks.attention.chosen import ChosenPositions
from twofold.blocks.attention.scores import Scores
from twofold.blocks.attention.selection import AllPositions, Window
from twofold.blocks.device_step import HeadShape, KvLayer, gated
from twofold.blocks.router import Router
from twofold.device.kernels import TorchKernels
from twofold.weights.weight_format import FORMATS

from tests.device.fake_device import FakeDevice
from tests.device.random_layers import matrix, on_device
from tests.kernels.packed_experts import pack_expert

drawn = settings(
    max_examples=8, derandomize=True, deadline=None, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck), database=None,
)  # fmt: skip


def error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the expected one's length; NaN where any is."""
    return float((ours.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-9))


def kernels_of(simt: ModuleType, max_length: int) -> object:
    return FakeDevice(simt.open_device()).kernels(max_length)


@settings(drawn, max_examples=30)
@given(data=st.data())
def test_routing(simt: ModuleType, data: st.DataObject) -> None:
    groups = data.draw(st.integers(1, 6), "groups")
    of_group = data.draw(st.integers(2, 45), "experts of a group")
    top_groups = data.draw(st.integers(1, groups), "groups taken")
    top_k = data.draw(st.integers(1, min(12, top_groups * of_group)), "top_k")
    score = data.draw(st.sampled_from(["softmax", "sigmoid", "sqrt_softplus", "softmax_of_chosen"]))
    router = Router(
        0,
        8,
        groups * of_group,
        top_k,
        1e-6,
        data.draw(st.booleans(), "renormalise"),
        scale=1.7,
        score=score,
        num_groups=groups,
        top_groups=top_groups,
        group_score=data.draw(st.sampled_from(["max", "top_two_sum"])),
        zero_others=data.draw(st.booleans(), "zero_others"),
    )
    torch.manual_seed(data.draw(st.integers(0, 999), "seed"))
    logits = torch.randn(data.draw(st.integers(1, 9), "tokens"), router.num_experts)
    bias = (
        torch.rand(router.num_experts) - float(router.zero_others)
        if data.draw(st.booleans(), "bias")
        else None
    )
    ids, weights = kernels_of(simt, 64).route(logits, router, bias)
    expected_ids, expected = TorchKernels().route(logits, router, bias)
    assert torch.equal(ids, expected_ids)
    assert error(weights, expected) < 1e-5


@settings(drawn, max_examples=30)
@given(data=st.data())
def test_rotation_cache_and_attention(simt: ModuleType, data: st.DataObject) -> None:
    head_dim = data.draw(st.sampled_from([64, 128, 256, 512]), "head_dim")
    kv_heads = data.draw(st.integers(1, 3), "kv heads")
    heads = kv_heads * data.draw(st.integers(1, 9), "heads of one")
    page_size = data.draw(st.integers(1, 19), "page size")
    lengths = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=3), "lengths")
    window = data.draw(st.sampled_from([0, 1, 40]), "window")
    half = 32 * data.draw(st.integers(1, head_dim // 64), "half of the rotated part")
    torch.manual_seed(data.draw(st.integers(0, 999), "seed"))
    select = Window(window) if window else AllPositions()
    shape = HeadShape(heads, kv_heads, head_dim, 1e-6, select, Scores(head_dim**-0.5))
    num_pages = -(-max(*lengths, 1) // page_size)
    tables = torch.randperm(len(lengths) * num_pages).view(len(lengths), num_pages).int()
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    slots = [
        int(tables[s, (n - 1) // page_size]) * page_size + (n - 1) % page_size if n else -1
        for s, n in enumerate(lengths)
    ]
    qkv = torch.randn(len(lengths), (heads + 2 * kv_heads) * head_dim).bfloat16()
    norm = torch.rand(head_dim) + 0.5 if data.draw(st.booleans(), "norm") else None
    v_norm = torch.rand(head_dim) + 0.5 if data.draw(st.booleans(), "v_norm") else None
    sinks = torch.randn(heads) * 2 if data.draw(st.booleans(), "sinks") else None
    angle = torch.rand(len(lengths), half) * 6
    chosen = None
    if data.draw(st.booleans(), "positions are chosen"):
        scores = torch.randn(len(lengths), max(lengths) + 1)
        chosen = ChosenPositions.top(scores, seq_lens.long() - 1, data.draw(st.integers(1, 300), "most"))
    cache = torch.randn(2, tables.numel(), page_size, kv_heads, head_dim).bfloat16()
    results = []
    for kernels in (kernels_of(simt, max(*lengths, 1)), TorchKernels()):
        kv = KvLayer(cache[0].clone(), cache[1].clone())
        angles = (angle.cos().contiguous(), angle.sin().contiguous())
        q = kernels.rope_store(qkv, (norm, norm, v_norm), angles, torch.tensor(slots), kv, shape)
        out = kernels.decode_attention(q, tables, seq_lens, kv, shape, sinks, chosen)
        results.append((q, kv.keys, kv.values, out[seq_lens > 0]))
    for ours, expected in zip(*results, strict=True):
        assert error(ours, expected) < 1e-2


@drawn
@given(data=st.data())
def test_experts_for_few_tokens_and_for_many(simt: ModuleType, data: st.DataObject) -> None:
    format = data.draw(
        st.sampled_from(["f32", "bf16", "q8_0", "int4", "q6_k", "int8_channel", "mxfp4"]), "format"
    )
    unit = max(16, FORMATS[format].block_columns)
    hidden, inner = (unit * data.draw(st.integers(1, 300 // unit), name) for name in ("hidden", "inner"))
    tokens, experts = data.draw(st.integers(1, 40), "tokens"), data.draw(st.integers(1, 5), "experts")
    top_k = data.draw(st.integers(1, experts), "top_k")
    random, pool = np.random.default_rng(data.draw(st.integers(0, 999), "seed")), ops.ThreadPool(1)

    sizes = ((inner, hidden), (inner, hidden), (hidden, inner))
    matrices = [tuple(matrix(random, pool, format, *size) for size in sizes) for _ in range(experts)]
    activation = data.draw(
        st.sampled_from(("silu", "swiglu_oai", "gelu_tanh", "silu_of_limited")), "activation"
    )
    biased, limit = data.draw(st.booleans(), "biased"), data.draw(st.sampled_from((0.0, 0.5, 7.0)), "limit")
    biases = random.standard_normal((experts, 2 * inner + hidden), np.float32) * biased
    slots = torch.stack(
        [pack_expert(*each, own if biased else None) for each, own in zip(matrices, biases, strict=True)]
    )
    rows = torch.from_numpy(random.standard_normal((tokens, hidden), np.float32)).bfloat16()
    ids = np.stack([random.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
    expected = torch.empty(ids.size, hidden)
    for pair, expert in enumerate(ids.reshape(-1)):
        gate, up, down = (torch.from_numpy(ops.dequantise(pool, part)) for part in matrices[expert])
        x = rows[pair // top_k].float()
        gate_bias, up_bias, bias = torch.from_numpy(biases[expert]).split([inner, inner, hidden])
        expected[pair] = down @ gated(activation, gate @ x + gate_bias, up @ x + up_bias, limit) + bias

    layout = launches.ExpertLayout(format, format, hidden, inner, activation, biased, limit)
    layer = SimpleNamespace(layout=layout, inner=inner, slots=slots, rows=rows, ids=ids)
    device = simt.open_device()
    for many in (False, True) if format != "f32" else (False,):
        outputs = torch.from_numpy(on_device(device, layer, many))
        assert error(outputs, expected) < (1e-5 if format == "f32" else 2e-2)
