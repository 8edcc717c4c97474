"""Packed matrices and fused experts in every format, and formats mixed: against float64, and whole against cut."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_reference import F32, F64, gated
from packed_reference import FORMATS, Rows, decoded, fitting_columns, random_rows
from twofold import _core
from twofold._testing import kernels
from twofold.blocks import ops
from twofold.weights.weight_format import LayerFormats, MixedFormats, formats_by_expert

from tests.kernels.kernel_levels import chosen

HIDDEN, INNER, EXPERTS, TOP_K = 512, 256, 6, 3  # multiples of every format's block
MIXED = [("q4_k", "q5_k", "q6_k"), ("bf16", "f32", "q8_0"), ("fp8", "fp8", "f16"), ("int4", "int8", "q4_0")]


def seen(x: F32, format_name: str) -> F64:
    """The activations as the chosen kernels' encoding for this format holds them."""
    level = chosen(format_name)
    kind, _ = kernels.format_kernel(level, format_name)
    return decoded(kernels.encode(x, kind, level=level), kind, x.shape[1])


def product(x: F32, matrix: Rows) -> F64:
    return seen(x, matrix.format) @ matrix.values().astype(np.float64).T


@pytest.mark.parametrize("num_rows", [1, 2, 3, 70])
def test_stacked_segments_of_several_formats(num_rows: int) -> None:
    """Rows that are no multiple of 32, so that panels end inside the stack."""
    rng = np.random.default_rng(1)
    parts = [random_rows(rng, name, rows, 256) for name, rows in (("q4_k", 33), ("f32", 5), ("q6_k", 64))]
    hidden = rng.standard_normal((num_rows, 256)).astype(np.float32)
    expected = np.concatenate([product(hidden, part) for part in parts], axis=1)
    results = []
    for threads in (1, 3):
        pool = ops.ThreadPool(threads)
        packed = ops.PackedMatrix(pool, [part.matrix() for part in parts])
        assert (packed.rows, packed.columns, packed.formats) == (102, 256, ["q4_k", "f32", "q6_k"])
        assert packed.bytes == sum(part.matrix().packed_bytes for part in parts)
        out = np.empty((num_rows, 102), np.float32)
        # rmsnorm with eps 0 of rows whose mean square is 1 changes nothing but the last bits.
        scaled = hidden / np.sqrt((hidden**2).mean(1, keepdims=True))
        ops.LmHead(pool, np.ones(256, np.float32), packed, 0.0).forward(scaled, out)
        results.append(out * np.sqrt((hidden**2).mean(1, keepdims=True)))
    np.testing.assert_allclose(results[0], expected, atol=0.02 * np.abs(expected).max())
    np.testing.assert_array_equal(results[0], results[1])


class Layer:
    """One layer of random experts and what it computes, in float64 from the encoded activations."""

    def __init__(
        self,
        formats: LayerFormats,
        activation: str = "silu",
        biased: bool = False,
        limit: float = 0.0,
    ) -> None:
        rng = np.random.default_rng(2)
        self.formats = formats
        shapes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
        self.experts = [
            tuple(random_rows(rng, name, *shape) for name, shape in zip(each, shapes, strict=True))
            for each in formats_by_expert(formats, EXPERTS)
        ]
        self.activation, self.limit = activation, limit
        self.biases = rng.standard_normal((EXPERTS, 2 * INNER + HIDDEN)).astype(np.float32) * biased
        self.biased = biased

    def store(self, pool: ops.ThreadPool) -> _core.ExpertStore:
        store = _core.ExpertStore(
            EXPERTS,
            HIDDEN,
            INNER,
            [self.formats],
            activation=self.activation,
            biases=self.biased,
            limits=[self.limit] if self.limit else [],
        )
        if self.biased:
            store.put_biases(0, 0, self.biases)
        store.put(pool, 0, 0, [tuple(m.matrix() for m in expert) for expert in self.experts[:2]])
        store.put(pool, 0, 2, [tuple(m.matrix() for m in expert) for expert in self.experts[2:]])
        return store

    def expected(self, normed: F32, ids: np.ndarray, weights: F32, hidden: F32) -> F64:
        out = hidden.astype(np.float64)
        for t, row in enumerate(normed):
            for expert, weight in zip(ids[t], weights[t], strict=True):
                gate, up, down = self.experts[expert]
                biases = np.split(self.biases[expert], [INNER, 2 * INNER])
                inner = gated(
                    self.activation,
                    product(row[None], gate) + biases[0],
                    product(row[None], up) + biases[1],
                    self.limit,
                )
                out[t] += weight * (product(inner.astype(np.float32), down)[0] + biases[2])
        return out


@pytest.mark.parametrize(
    "formats", [(name,) * 3 for name in FORMATS] + MIXED, ids=lambda formats: "-".join(dict.fromkeys(formats))
)
def test_experts_of_every_format_and_mixture(formats: tuple[str, str, str]) -> None:
    assert all(fitting_columns(name, HIDDEN) == HIDDEN for name in formats)
    check_layer(Layer(formats))


# One expert left unquantised; k-quants; mixed FP8; rows between the products that are encoded as a whole beside others.
MIXED_LAYERS = {
    "one bf16 among int4": [("bf16",) * 3 if expert == 3 else ("int4",) * 3 for expert in range(EXPERTS)],
    "k-quants": [(f"q{bits}_k", f"q{bits}_k", "q6_k") for bits in (4, 5, 6, 4, 5, 3)],
    "fp8 and bf16": [("fp8",) * 3, ("bf16",) * 3, ("fp8", "fp8", "bf16")] * 2,
    "int8_channel and others": [("int8_channel",) * 3, ("int4",) * 3, ("f32", "f32", "int8_channel")] * 2,
}


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("name", MIXED_LAYERS)
def test_experts_of_a_layer_in_their_own_formats(name: str, biased: bool) -> None:
    layer = Layer(MixedFormats(MIXED_LAYERS[name]), biased=biased, limit=0.5 if biased else 0.0)
    check_layer(layer)
    store = layer.store(ops.ThreadPool(1))
    sizes = [
        sum(rows.matrix().packed_bytes for rows in expert) + biased * 4 * (2 * INNER + HIDDEN)
        for expert in layer.experts
    ]
    assert store.formats(0) == MIXED_LAYERS[name]
    assert (store.bytes, store.expert_bytes) == (sum(sizes), max(sizes))
    assert store.mean_expert_bytes == sum(sizes) // EXPERTS
    assert store.offsets(0).tolist() == [
        sum(sizes[:expert]) for expert in range(EXPERTS)
    ]  # whole cache lines
    assert len(store.panels(0)) == sum(sizes)


@pytest.mark.parametrize("name", MIXED_LAYERS)
def test_a_mixed_layer_has_the_bits_of_one_expert_after_the_other(name: str) -> None:
    """Every expert alone, in a layer of its format, gives the same output."""
    layer, pool = Layer(MixedFormats(MIXED_LAYERS[name])), ops.ThreadPool(2)
    rng = np.random.default_rng(4)
    normed = rng.standard_normal((19, HIDDEN)).astype(np.float32)
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in normed]).astype(np.int32)
    weights = rng.dirichlet(np.ones(TOP_K), len(normed)).astype(np.float32)
    together, one_by_one = np.zeros((2, *normed.shape), np.float32)
    executor = _core.MoeExecutor(pool, layer.store(pool))
    executor.begin_step(0, [0] * len(normed), list(range(len(normed))))
    executor.forward(0, normed, ids, weights, together)
    of_format = {}
    for expert, formats in enumerate(MIXED_LAYERS[name]):
        store = of_format.setdefault(formats, _core.ExpertStore(EXPERTS, HIDDEN, INNER, [formats]))
        store.put(pool, 0, expert, [tuple(rows.matrix() for rows in layer.experts[expert])])
    executors = {formats: _core.MoeExecutor(pool, store) for formats, store in of_format.items()}
    for t in range(len(normed)):
        for k in range(TOP_K):
            alone = executors[MIXED_LAYERS[name][ids[t, k]]]
            alone.begin_step(t * TOP_K + k, [0], [t])
            row, pair = slice(t, t + 1), (slice(t, t + 1), slice(k, k + 1))
            alone.forward(0, normed[row], ids[pair].copy(), weights[pair].copy(), one_by_one[row])
    np.testing.assert_array_equal(together, one_by_one)


def test_a_store_takes_formats_of_one_expert_or_of_all() -> None:
    with pytest.raises(ValueError, match="formats of 3 experts of layer 0 were given; expected those of 4"):
        _core.ExpertStore(4, HIDDEN, INNER, [[("f32",) * 3] * 3])
    store = _core.ExpertStore(2, HIDDEN, INNER, [[("f32",) * 3, ("q4_k",) * 3]])
    rows = [
        random_rows(np.random.default_rng(1), "f32", *shape)
        for shape in [(INNER, HIDDEN)] * 2 + [(HIDDEN, INNER)]
    ]
    with pytest.raises(ValueError, match="expert 1: gate is f32"):
        store.put(ops.ThreadPool(1), 0, 1, [tuple(each.matrix() for each in rows)])


@pytest.mark.parametrize(
    ("format_name", "activation", "biased", "limit"),
    [("f32", "swiglu_oai", True, 0.5), ("mxfp4", "swiglu_oai", True, 7.0), ("int8_channel", "gelu_tanh", True, 0.0),
     ("bf16", "gelu_tanh", False, 0.0), ("f32", "silu", True, 0.5), ("q4_k", "silu", True, 0.3),
     ("int8_channel", "silu", True, 0.3), ("f32", "silu_of_limited", True, 0.5)],
)  # fmt: skip
def test_experts_with_biases_limits_and_other_activations(
    format_name: str, activation: str, biased: bool, limit: float
) -> None:
    check_layer(Layer((format_name,) * 3, activation, biased, limit))


def test_limits_are_one_per_layer() -> None:
    with pytest.raises(ValueError, match="limits of 1 layers were given; expected 2 or none"):
        _core.ExpertStore(4, HIDDEN, INNER, [("f32",) * 3] * 2, limits=[7.0])


def check_layer(layer: Layer) -> None:
    rng = np.random.default_rng(3)
    num_tokens = 67
    normed = 0.05 * rng.standard_normal((num_tokens, HIDDEN)).astype(np.float32)
    hidden = rng.standard_normal((num_tokens, HIDDEN)).astype(np.float32)
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(num_tokens)]).astype(np.int32)
    ids[:40, 0] = 5  # one busy expert: more rows than one block of activations
    ids[:40, 1:] = [[0, 3]]
    weights = rng.dirichlet(np.ones(TOP_K), num_tokens).astype(np.float32)
    results = []
    for threads, step in ((1, 67), (3, 67), (2, 1), (2, 2), (1, 9)):
        pool = ops.ThreadPool(threads)
        executor = _core.MoeExecutor(pool, layer.store(pool))
        out = hidden.copy()
        for t in range(0, num_tokens, step):
            part = slice(t, min(t + step, num_tokens))
            executor.begin_step(t, [0] * (part.stop - t), list(range(t, part.stop)))
            executor.forward(0, normed[part], ids[part], weights[part], out[part])
        results.append(out)
    expected = layer.expected(normed, ids, weights, hidden)
    np.testing.assert_allclose(results[0], expected, atol=2e-3 * np.abs(expected).max())
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


def test_a_store_lists_its_layers() -> None:
    store = _core.ExpertStore(4, HIDDEN, INNER, [("q4_k", "q4_k", "q6_k"), ("q4_k", "q4_k", "q4_k")])
    assert (store.num_layers, store.formats(0), store.formats(1)) == (
        2,
        ("q4_k", "q4_k", "q6_k"),
        ("q4_k",) * 3,
    )
    pair, down_q6, down_q4 = 8 * 2 * 4736, 16 * 6720, 16 * 4736
    assert store.expert_bytes == 2 * pair + down_q6
    assert store.bytes == 4 * (4 * pair + down_q6 + down_q4)
    with pytest.raises(ValueError, match="at least one expert"):
        _core.ExpertStore(0, HIDDEN, INNER, [])
    assert _core.ExpertStore(1, HIDDEN, INNER, []).num_layers == 0
    with pytest.raises(ValueError, match="expected silu, swiglu_oai, gelu_tanh or silu_of_limited"):
        _core.ExpertStore(4, HIDDEN, INNER, [("f32",) * 3], activation="relu")
    biased = _core.ExpertStore(4, HIDDEN, INNER, [("q4_k",) * 3], biases=True)
    assert biased.expert_bytes == 2 * pair + down_q4 + 4 * (2 * INNER + HIDDEN)
    with pytest.raises(ValueError, match="biases has shape"):
        biased.put_biases(0, 0, np.zeros((4, HIDDEN), np.float32))
