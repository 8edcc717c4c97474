"""Plain numpy models of what the native operations compute, in float64 where rounding matters."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray
from twofold._testing import kernels
from twofold.blocks import ops

from tests.kernels.kernel_levels import chosen
from tests.tiny_models.writing import weight_matrix

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


def to_bf16_bits(x: F32) -> NDArray[np.uint16]:
    """Round to nearest even, as the kernels do (no NaN here)."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widen(w: NDArray) -> F64:
    """Elements of any type as float64."""
    if w.dtype == np.uint8:  # FP8 codes, of which kernels see 2^-8 of the value
        exponent, mantissa = (w >> 3 & 15).astype(int), (w & 7).astype(np.float64)
        magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
        return np.where(w & 128, -magnitude, magnitude) / 256
    if w.dtype == np.uint16:
        return (w.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return w.astype(np.float64)


def weights(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> NDArray:
    """Random weights of size about 1/sqrt(columns), so that products stay near 1; all 8-bit codes."""
    if dtype == "int8":
        return rng.integers(-127, 128, shape).astype(np.int8)
    if dtype == "fp8":
        return rng.choice([code for code in range(256) if code & 127 != 127], shape).astype(np.uint8)
    w = (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
    return w if dtype == "float32" else to_bf16_bits(w)


def packed(pool: ops.ThreadPool, *parts: NDArray) -> ops.PackedMatrix:
    """Plain matrices stacked by rows."""
    return ops.PackedMatrix(pool, [weight_matrix(part) for part in parts])


def rounding(dtype: str) -> float:
    """Rounding error of the chosen kernels relative to a product's terms: bf16 activations where weights are bf16."""
    kind, _ = kernels.format_kernel(chosen("bf16"), "bf16")
    return 2.0**-8 if dtype == "bfloat16" and kind == "bf16" else 0.0


def silu(x: F64) -> F64:
    return x / (1 + np.exp(-x))


def swiglu_oai(gate: F64, up: F64, limit: float) -> F64:
    gate = np.minimum(gate, limit)
    return gate / (1 + np.exp(-1.702 * gate)) * (np.clip(up, -limit, limit) + 1)


def gelu_tanh(gate: F64) -> F64:
    return gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))


ACTIVATIONS = ("silu", "swiglu_oai", "gelu_tanh", "silu_of_limited")


def gated(activation: str, gate: F64, up: F64, limit: float = 0.0) -> F64:
    """Activation of gate and up (kernels/include/twofold/expert.h); limit 0: none."""
    limit = limit or np.inf
    if activation == "swiglu_oai":
        return swiglu_oai(gate, up, limit)
    if activation == "silu_of_limited":
        return silu(np.minimum(gate, limit)) * np.clip(up, -limit, limit)
    activated = silu(gate) if activation == "silu" else gelu_tanh(gate)
    return np.minimum(activated, limit) * np.clip(up, -limit, limit)


def rmsnorm(x: NDArray, w: NDArray, eps: float) -> F64:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w


def rotate(x: F64, cos: NDArray, sin: NDArray) -> F64:
    """x [..., D]; cos, sin [pairs]: the first 2 * pairs elements are rotated, the rest passes."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def softmax(x: F64) -> F64:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def chosen_positions(hidden: NDArray, most: int) -> NDArray[np.bool_]:
    """What `_testing.LargestInputs` chooses for each token: bool [T, T]."""
    scores, chosen = np.floor(4 * hidden[:, 0]), np.zeros((len(hidden), len(hidden)), bool)
    for t in range(len(hidden)):
        chosen[t, np.argsort(-scores[: t + 1], kind="stable")[:most]] = True
    return chosen


def attention_block(
    hidden: NDArray,
    weights: dict[str, NDArray | None],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    eps: float,
    window: int | None,
    cos: NDArray,
    sin: NDArray,
    chunk: int | None = None,
    neighbours: bool = False,
    temperature: tuple[float, float] | None = None,
    softcap: float = 0.0,
    most: int = 0,
    ends: NDArray[np.int32] | None = None,
) -> F64:
    """One whole sequence at once, from position 0: hidden + o_proj(attention(norm(hidden))).

    ends: [T] position after the last one that each token attends to; None: the one after its own.
    """
    num_tokens = len(hidden)
    ends = np.arange(1, num_tokens + 1, dtype=np.int32) if ends is None else ends
    qkv = rmsnorm(hidden, widen(weights["norm"]), eps) @ widen(weights["qkv"]).T
    if weights["qkv_bias"] is not None:
        qkv = qkv + weights["qkv_bias"]
    qkv = qkv.reshape(num_tokens, heads + 2 * kv_heads, head_dim)
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    if weights["q_norm"] is not None:  # per head, or over all heads
        q = rmsnorm(q.reshape(num_tokens, -1, len(weights["q_norm"])), weights["q_norm"], eps).reshape(
            q.shape
        )
    if weights["k_norm"] is not None:
        k = rmsnorm(k.reshape(num_tokens, -1, len(weights["k_norm"])), weights["k_norm"], eps).reshape(
            k.shape
        )
    if neighbours:
        half = cos.shape[-1]
        order = [*range(0, 2 * half, 2), *range(1, 2 * half, 2), *range(2 * half, head_dim)]
        q, k = q[..., order], k[..., order]
    q = np.stack([rotate(q[t], cos[t], sin[t]) for t in range(num_tokens)])
    k = np.stack([rotate(k[t], cos[t], sin[t]) for t in range(num_tokens)])
    if temperature is not None:
        period, slope = temperature
        q = q * (1 + slope * np.log1p((np.arange(num_tokens) + 1) // period))[:, None, None]
    out = np.zeros((num_tokens, heads, head_dim))
    chosen = chosen_positions(hidden, most or num_tokens)
    for t in range(num_tokens):
        first = 0 if window is None else max(0, t + 1 - window)
        first = first if chunk is None else max(first, t // chunk * chunk)
        seen = np.arange(first, ends[t]) if most == 0 else first + np.flatnonzero(chosen[t, first : t + 1])
        for head in range(heads if len(seen) else 0):
            kv = head // (heads // kv_heads)
            scores = k[seen, kv] @ q[t, head] * head_dim**-0.5
            if softcap > 0:
                scores = softcap * np.tanh(scores / softcap)
            if weights.get("sinks") is not None:  # one more, without a value
                scores = np.append(scores, weights["sinks"][head])
            p = softmax(scores)[: len(seen)]
            out[t, head] = p @ v[seen, kv]
    result = hidden + out.reshape(num_tokens, -1) @ widen(weights["o"]).T
    if weights["o_bias"] is not None:
        result = result + weights["o_bias"]
    return result


class PagedAttention:
    """One attention block run over a paged cache. A subclass makes `block`, `cache` and the inputs of its case."""

    case: Any
    hidden: F32
    cos: F32
    sin: F32
    ends: NDArray[np.int32] | None = None
    """[T] Position after the last one that each token attends to; None: the one after its own."""

    def block(self, pool: ops.ThreadPool, layer: int = 0) -> Any:
        raise TypeError("a subclass makes the block")

    def cache(self, num_sequences: int = 1) -> ops.StateCache:
        raise TypeError("a subclass makes the cache")

    @property
    def pages_per_sequence(self) -> int:
        return -(-self.case.tokens // self.case.page_size)

    def tables(self, num_sequences: int = 1) -> NDArray[np.int32]:
        """Pages handed out in a shuffled order, so that neighbours in a sequence are not neighbours in memory."""
        pages = np.random.default_rng(3).permutation(num_sequences * self.pages_per_sequence)
        return pages.reshape(num_sequences, -1).astype(np.int32)

    def batch(
        self, positions: list[int], sequences: list[int], tables: NDArray[np.int32]
    ) -> ops.AttentionBatch:
        batch = ops.AttentionBatch(
            np.array(positions, np.int32),
            np.array(sequences, np.int32),
            tables,
            np.ascontiguousarray(self.cos[positions]),
            np.ascontiguousarray(self.sin[positions]),
        )
        if self.ends is not None:
            batch.see_until(self.ends[positions])
        return batch

    def run(self, cuts: list[int], threads: int = 1, tables: NDArray[np.int32] | None = None) -> F32:
        """The sequence in chunks that end at `cuts`."""
        pool = ops.ThreadPool(threads)
        block, cache = self.block(pool, 1), self.cache()
        tables = self.tables() if tables is None else tables
        parts = []
        for begin, end in itertools.pairwise([0, *cuts]):
            rows = self.hidden[begin:end].copy()
            block.forward(rows, self.batch(list(range(begin, end)), [0] * (end - begin), tables), cache)
            parts.append(rows)
        return np.concatenate(parts)

    def check_sequences_are_apart(self, num_threads: int) -> None:
        """Sequences of 12 tokens in one batch give what one alone gives."""
        alone = self.run([12])
        block, cache, tables = self.block(ops.ThreadPool(num_threads)), self.cache(3), self.tables(3)
        # Sequence 0 all at once, 1 and 2 lag behind; later they decode side by side.
        first = [(0, p) for p in range(12)] + [(2, p) for p in range(4)] + [(1, p) for p in range(9)]
        steps = [first, *[[(2, 4 + i), (1, 9 + i)] for i in range(3)], [(2, p) for p in range(7, 12)]]
        for step in steps:
            rows = self.hidden[[p for _, p in step]].copy()
            block.forward(rows, self.batch([p for _, p in step], [s for s, _ in step], tables), cache)
            assert np.array_equal(rows, alone[[p for _, p in step]])
