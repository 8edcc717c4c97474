"""The gated delta net: kernels of every level against float64, the operator against transformers' recurrence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from twofold._testing import kernels
from twofold.api.errors import KernelError
from twofold.blocks import ops

from tests.tiny_models.writing import weight_matrix

F32 = np.float32
LEVELS = kernels.supported_levels()
COLUMNS = kernels.delta_columns()


def tokens(rng: np.random.Generator, T: int, K: int) -> dict[str, Any]:
    q, k = rng.standard_normal((2, T, K)).astype(F32)
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    return {
        "q": q / K**0.5,
        "k": k,
        "v": rng.standard_normal((T, COLUMNS)).astype(F32),
        "decay": rng.uniform(0.8, 1.0, T).astype(F32),
        "beta": rng.uniform(0.0, 1.0, T).astype(F32),
    }


def recurrence(of: dict[str, Any], state: Any) -> Any:
    """In float64, as published: the state decays before it is asked about the key."""
    out = []
    for q, k, v, decay, beta in zip(*(of[part].astype(np.float64) for part in of), strict=True):
        state *= decay
        state += np.outer(k, beta * (v - state.T @ k))
        out.append(state.T @ q)
    return np.array(out)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("K", [1, 2, 3, 17, 128])
def test_a_state_is_carried_as_in_float64_and_no_bit_depends_on_where_a_chunk_ends(
    level: str, K: int
) -> None:
    rng = np.random.default_rng(K)
    of, first = tokens(rng, 24, K), rng.standard_normal((K, COLUMNS)).astype(F32)
    state, expected = first.copy(), first.astype(np.float64)
    out = kernels.delta_rule(**of, state=state, level=level)
    np.testing.assert_allclose(out, recurrence(of, expected), atol=1e-5)
    np.testing.assert_allclose(state, expected, atol=1e-5)
    for sizes in ([1] * 24, [5, 1, 18]):
        again, at, parts = first.copy(), 0, []
        for size in sizes:
            chunk = {part: np.ascontiguousarray(values[at : at + size]) for part, values in of.items()}
            parts.append(kernels.delta_rule(**chunk, state=again, level=level))
            at += size
        assert np.array_equal(np.concatenate(parts), out)
        assert np.array_equal(again, state)


def sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-x.astype(np.float64)))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("taps", "n"), [(2, 1), (3, 7), (4, 16), (4, 37), (5, 128)])
def test_a_convolution_and_gates_match_float64(level: str, taps: int, n: int) -> None:
    rng = np.random.default_rng(n)
    x, w = rng.standard_normal((9, n)).astype(F32), rng.standard_normal((taps, n)).astype(F32)
    sums = sum(x[j : 10 - taps + j].astype(np.float64) * w[j] for j in range(taps))
    np.testing.assert_allclose(
        kernels.short_convolution(x, w, level=level), sums * sigmoid(sums), atol=2e-6, rtol=2e-6
    )
    gate = (30 * rng.standard_normal(n)).astype(F32)
    y = x[0].copy()
    kernels.sigmoid_multiply(gate, y, level=level)
    np.testing.assert_allclose(y, x[0] * sigmoid(gate), atol=1e-6, rtol=2e-6)


class Net:
    """An operator of random weights, and what it is given."""

    def __init__(self, k_heads: int, of_key: int, K: int, V: int, taps: int, **order: bool) -> None:
        rng = np.random.default_rng(K + V)
        heads, hidden = k_heads * of_key, 24
        self.shape = {"num_k_heads": k_heads, "num_v_heads": heads, "key_dim": K}
        order = {"tiled": False, "grouped": False, "grouped_gates": False} | order
        channels, values = (2 * k_heads * K + heads * V), heads * V
        self.hidden_size = hidden
        self.norm = rng.normal(1, 0.2, hidden).astype(F32)
        self.inputs = rng.normal(0, hidden**-0.5, (channels + values + 2 * heads, hidden)).astype(F32)
        self.conv = rng.normal(0, 0.7, (taps, channels)).astype(F32)
        self.rate, self.bias = (
            -rng.uniform(0.05, 0.5, heads).astype(F32),
            rng.normal(-1, 0.3, heads).astype(F32),
        )
        self.head_norm = rng.normal(1, 0.2, V).astype(F32)
        self.out = rng.normal(0, values**-0.5, (hidden, values)).astype(F32)
        self.pool = ops.ThreadPool(2)
        self.record = ops.GatedDelta.record_bytes(
            num_k_heads=k_heads, num_v_heads=heads, key_dim=K, value_dim=V, taps=taps
        )
        packed = [ops.PackedMatrix(self.pool, [weight_matrix(matrix)]) for matrix in (self.inputs, self.out)]
        block = ops.GatedDelta(
            self.pool,
            project={"weight": packed[0], "norm": self.norm, "eps": 1e-6},
            conv=self.conv,
            decay_rate=self.rate,
            decay_bias=self.bias,
            head_norm={"weight": self.head_norm, "eps": 1e-6},
            gate={"activation": "silu"},
            out={"weight": packed[1]},
            **self.shape,
            value_dim=V,
            **order,
            layer=0,
        )
        self.decoder = ops.Decoder([block])
        self.dims = (k_heads, heads, K, V, taps)

    def cache(self, num_records: int = 3) -> ops.StateCache:
        return ops.StateCache([[]], 1, 16, [self.record], num_records)

    def forward(self, hidden: Any, positions: list[int], index: list[int], records: Any, cache: Any) -> Any:
        rows, none = hidden.copy(), np.zeros((len(hidden), 1), F32)
        tables = np.zeros((max(index, default=0) + 1, 1), np.int32)
        numbers = None if records is None else np.array(records, np.int32)
        batch = ops.AttentionBatch(
            np.array(positions, np.int32), np.array(index, np.int32), tables, none, none, numbers
        )
        self.decoder.forward(rows, batch, cache)
        return rows


@pytest.mark.parametrize(
    ("dims", "order"),
    [
        ((2, 2, 16, 32, 4), {}),
        ((3, 2, 5, 37, 4), {}),
        ((1, 1, 1, 1, 2), {}),
        ((2, 3, 7, 9, 5), {"tiled": True}),
        ((2, 2, 6, 33, 3), {"grouped": True, "grouped_gates": True}),
        ((2, 2, 6, 33, 3), {"grouped_gates": True}),
    ],
)
def test_the_operator_equals_transformers_recurrence(dims: Any, order: dict[str, bool]) -> None:
    import torch
    from transformers.models.qwen3_next import modeling_qwen3_next as reference

    net = Net(*dims, **order)
    k_heads, heads, K, V, taps = net.dims
    of_key, T = heads // k_heads, 21
    hidden = np.random.default_rng(1).normal(0, 1, (T, net.hidden_size)).astype(F32)
    x = torch.from_numpy(hidden)
    x = torch.nn.functional.rms_norm(x, x.shape[1:], torch.from_numpy(net.norm), 1e-6)
    rows = x @ torch.from_numpy(net.inputs).T
    main, gates = rows[:, : -2 * heads], rows[:, -2 * heads :]
    if order.get("grouped"):
        sizes = [K, K, of_key * V, of_key * V]
        parts = [part.flatten(1) for part in main.view(T, k_heads, -1).split(sizes, 2)]
    else:
        parts = list(main.split([k_heads * K, k_heads * K, heads * V, heads * V], 1))
    if order.get("grouped_gates"):
        b, a = (part.flatten(1) for part in gates.view(T, k_heads, -1).split([of_key, of_key], 2))
    else:
        b, a = gates.split([heads, heads], 1)
    conv = torch.from_numpy(net.conv).T.contiguous()
    padded = torch.nn.functional.pad(torch.cat(parts[:3], 1).T[None], (taps - 1, 0))
    mixed = torch.nn.functional.silu(torch.nn.functional.conv1d(padded, conv[:, None], groups=len(conv)))[0].T
    q, k, v = mixed.split([k_heads * K, k_heads * K, heads * V], 1)
    q, k = (part.reshape(1, T, k_heads, K) for part in (q, k))
    # Its own order of value heads: neighbours have one key head. Ours may go round the key heads.
    q, k = (
        part.repeat(1, 1, of_key, 1) if order.get("tiled") else part.repeat_interleave(of_key, 2)
        for part in (q, k)
    )
    decay = torch.from_numpy(net.rate) * torch.nn.functional.softplus(a + torch.from_numpy(net.bias))
    out, _ = reference.torch_recurrent_gated_delta_rule(
        q, k, v.reshape(1, T, heads, V), g=decay[None], beta=b.sigmoid()[None], use_qk_l2norm_in_kernel=True
    )
    gated = torch.nn.functional.rms_norm(out[0], (V,), torch.from_numpy(net.head_norm), 1e-6)
    gated = gated * torch.nn.functional.silu(parts[3].reshape(T, heads, V))
    expected = hidden + (gated.flatten(1) @ torch.from_numpy(net.out).T).numpy()
    cache = net.cache()
    got = net.forward(hidden, list(range(T)), [0] * T, [1], cache)
    np.testing.assert_allclose(got, expected, atol=3e-5)

    # In chunks, beside another sequence, in a record that has been used: the same bits.
    other = net.forward(hidden[:5], list(range(5)), [0] * 5, [2], cache)
    for sizes in ((1,) * T, (2, 1, 9, 9)):
        at, parts_of = 0, []
        for size in sizes:
            rows_of, places = [hidden[at : at + size]], list(range(at, at + size))
            if at < 5:
                rows_of.append(hidden[:1])
                places = [*places, 0]
            found = net.forward(
                np.concatenate(rows_of),
                places,
                [0] * size + [1] * (len(places) - size),
                [1, 0][: len(rows_of)],
                cache,
            )
            parts_of.append(found[:size])
            if len(rows_of) == 2:
                assert np.array_equal(found[size], other[0])
            at += size
        assert np.array_equal(np.concatenate(parts_of), got)


def test_a_record_that_does_not_fit_is_refused() -> None:
    net = Net(2, 2, 6, 5, 4)
    hidden = np.zeros((2, net.hidden_size), F32)
    for records, places, index, message in (
        (None, [0, 1], [0, 0], "records were not given"),
        ([3], [0, 1], [0, 0], "a record is 3; the cache has records 0 to 2"),
        ([1, 1], [0, 0], [0, 1], "record 1 is used twice"),
        ([1], [0, 2], [0, 0], "record 1 is used twice"),
    ):
        with pytest.raises(KernelError, match=message):
            net.forward(hidden, places, index, records, net.cache())
    with pytest.raises(KernelError, match="expected"):
        net.forward(hidden, [0, 1], [0, 0], [0], ops.StateCache([[]], 1, 16, [64], 1))
