"""Mla, which never expands keys and values, against a float64 model that does, and against itself cut differently."""

from __future__ import annotations

from dataclasses import dataclass, replace

import kernel_reference as reference
import numpy as np
import pytest
from numpy.typing import NDArray
from twofold import _testing
from twofold.api.errors import KernelError
from twofold.blocks import ops

EPS, LATENT_EPS = 1e-5, 1e-6
Array = NDArray  # of floats, or of bfloat16 bits


@dataclass(frozen=True)
class Case:
    hidden: int = 48
    heads: int = 4
    q_rank: int | None = 20
    latent: int = 24
    nope: int = 10
    rope: int = 8
    value: int = 12
    dtype: str = "float32"
    cache_dtype: str = "float32"
    bias: bool = False
    neighbours: bool | None = True
    """Whether rotation pairs neighbours; None: there is none."""
    most: int = 0
    """Positions that are chosen for a query; 0: all."""
    page_size: int = 4
    tokens: int = 23


CASES = [
    Case(),
    Case(q_rank=None),
    Case(neighbours=False, bias=True),
    Case(q_rank=None, bias=True, heads=1, value=33),
    Case(heads=7, latent=33, nope=5, rope=2, value=3, q_rank=9, hidden=31),
    Case(heads=40, tokens=37, page_size=3),
    Case(heads=3, latent=70, nope=64, rope=32, value=64, tokens=70, page_size=16),
    Case(dtype="bfloat16", latent=64, nope=32, rope=16, value=32, q_rank=32, hidden=64),
    Case(page_size=1, tokens=1),
    Case(tokens=1030, page_size=64, heads=2),
    Case(neighbours=None),
    Case(neighbours=None, rope=0),
    Case(most=5),
    Case(most=600, tokens=1300, page_size=64, heads=33, hidden=16, latent=16, nope=4, value=4),
]


class Setup(reference.PagedAttention):
    """Weights, input and angles of a case; `run` puts the tokens through a block in the given order and cuts."""

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(7)
        c = self.case = case
        rows = c.q_rank or c.heads * (c.nope + c.rope)

        def matrix(*shape: int) -> Array:
            return reference.weights(rng, shape, c.dtype)

        def norm(size: int) -> Array:
            return rng.uniform(0.5, 1.5, size).astype(np.float32)

        def bias(size: int) -> Array | None:
            return rng.standard_normal(size).astype(np.float32) if c.bias else None

        self.norm, self.q_norm, self.latent_norm = norm(c.hidden), norm(rows), norm(c.latent)
        self.a, self.a_bias = matrix(rows + c.latent + c.rope, c.hidden), bias(rows + c.latent + c.rope)
        self.q_b = matrix(c.heads * (c.nope + c.rope), rows) if c.q_rank else None
        self.kv_b = matrix(c.heads, c.nope + c.value, c.latent)
        self.o, self.o_bias = matrix(c.hidden, c.heads * c.value), bias(c.hidden)
        self.hidden = rng.standard_normal((c.tokens, c.hidden)).astype(np.float32)
        angles = np.arange(c.tokens)[:, None] * 10 ** -np.linspace(0, 2, c.rope // 2)[None]
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.scale = float((c.nope + c.rope) ** -0.5)

    def block(self, pool: ops.ThreadPool, layer: int = 0) -> ops.Decoder:
        c = self.case
        keys, values = self.kv_b[:, : c.nope], self.kv_b[:, c.nope :]
        attention = ops.Mla(
            pool,
            layer=layer,
            num_heads=c.heads,
            nope_dim=c.nope,
            rope_dim=c.rope,
            project={
                "weight": reference.packed(pool, self.a),
                "bias": self.a_bias,
                "norm": self.norm,
                "eps": EPS,
            },
            q_b=None
            if self.q_b is None
            else {"weight": reference.packed(pool, self.q_b), "norm": self.q_norm, "eps": LATENT_EPS},
            latent_norm={"weight": self.latent_norm, "eps": LATENT_EPS},
            k_b=reference.packed(pool, *(np.ascontiguousarray(head.T) for head in keys)),
            v_b=reference.packed(pool, *(np.ascontiguousarray(head) for head in values)),
            rotation=None if c.neighbours is None else {"neighbours": c.neighbours},
            select={"most": c.most, "chooser": _testing.LargestInputs(c.hidden)} if c.most else None,
            scores={"rule": ops.ScoreRule(scale=self.scale)},
            out={"weight": reference.packed(pool, self.o), "bias": self.o_bias},
        )
        return ops.Decoder([attention])

    def cache(self, num_sequences: int = 1) -> ops.StateCache:
        c = self.case
        planes = [(1, c.latent + c.rope, c.cache_dtype), *[(1, 1, "float32")] * (c.most > 0)]
        return ops.StateCache([planes] * 2, num_sequences * self.pages_per_sequence, c.page_size)

    def expected(self) -> NDArray[np.float64]:
        """Keys and values of every head, attended to one token and head at a time."""
        c = self.case
        a = reference.rmsnorm(self.hidden, self.norm, EPS) @ reference.widen(self.a).T
        if self.a_bias is not None:
            a = a + self.a_bias
        q, latent, key = np.split(a, a.shape[1] - np.array([c.latent + c.rope, c.rope]), axis=1)
        if self.q_b is not None:
            q = reference.rmsnorm(q, self.q_norm, LATENT_EPS) @ reference.widen(self.q_b).T
        latent = reference.rmsnorm(latent, self.latent_norm, LATENT_EPS)
        q = q.reshape(c.tokens, c.heads, c.nope + c.rope)
        expanded = np.einsum("hrc,tc->thr", reference.widen(self.kv_b), latent)
        out = np.zeros((c.tokens, c.heads, c.value))
        turned = np.stack([self._turned(key[t], t) for t in range(c.tokens)])
        chosen = reference.chosen_positions(self.hidden, c.most or c.tokens)
        for t, h in np.ndindex(c.tokens, c.heads):
            seen = np.flatnonzero(chosen[t])
            scores = expanded[seen, h, : c.nope] @ q[t, h, : c.nope]
            scores += turned[seen] @ self._turned(q[t, h, c.nope :], t)
            out[t, h] = reference.softmax(scores * self.scale) @ expanded[seen, h, c.nope :]
        added = out.reshape(c.tokens, -1) @ reference.widen(self.o).T
        return self.hidden + added + (0 if self.o_bias is None else self.o_bias)

    def _turned(self, x: Array, t: int) -> Array:
        if self.case.neighbours is None:
            return x
        if self.case.neighbours:
            x = np.concatenate([x[0::2], x[1::2]])
        return reference.rotate(x, self.cos[t], self.sin[t])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64(case: Case) -> None:
    setup = Setup(case)
    np.testing.assert_allclose(
        setup.run([case.tokens]), setup.expected(), atol=2e-5 + 8 * reference.rounding(case.dtype), rtol=1e-5
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cuts_and_threads_change_no_bit(case: Case) -> None:
    setup = Setup(case)
    whole = setup.run([case.tokens])
    one_by_one = list(range(1, case.tokens + 1))
    for cuts in ([*range(5, case.tokens, 5), case.tokens], one_by_one):
        for threads in (1, 3):
            assert np.array_equal(setup.run(cuts, threads), whole)


def test_choosing_all_positions_changes_no_bit() -> None:
    case = Case(tokens=600, page_size=64)
    whole = Setup(case).run([case.tokens])
    assert np.array_equal(Setup(replace(case, most=case.tokens)).run([case.tokens]), whole)


def test_many_tokens_are_computed_in_parts_and_change_no_bit() -> None:
    """More queries than are held at once: 64 MiB of them are 819 tokens of 128 heads."""
    setup = Setup(
        Case(hidden=8, heads=128, q_rank=4, latent=152, nope=2, rope=8, value=2, tokens=900, page_size=64)
    )
    whole = setup.run([900], threads=2)
    assert np.array_equal(setup.run([700, 900]), whole)


def test_runs_of_consecutive_pages_change_no_bit() -> None:
    setup = Setup(Case(page_size=3, tokens=29))
    shuffled = setup.run([29])
    for order in (range(10), [4, 5, 6, 0, 1, 2, 3, 9, 8, 7]):
        assert np.array_equal(setup.run([11, 12, 29], tables=np.array([order], np.int32)), shuffled)


@pytest.mark.parametrize(("dtype", "rounding"), [("bfloat16", 2e-2), ("q8", 3e-2), ("fp8", 2e-1)])
def test_a_narrow_cache_rounds_latents_only(dtype: str, rounding: float) -> None:
    for most in (0, 9):
        setup = Setup(Case(cache_dtype=dtype, tokens=30, most=most))
        got = setup.run([30])
        assert np.abs(got - setup.expected()).max() < rounding
        assert not np.array_equal(got, Setup(replace(setup.case, cache_dtype="float32")).run([30]))
        assert np.array_equal(got, setup.run([1, 2, 17, 30], threads=2))


@pytest.mark.parametrize("threads", [1, 2])
def test_sequences_in_one_batch_are_independent(threads: int) -> None:
    Setup(Case(tokens=12)).check_sequences_are_apart(threads)


def test_an_empty_batch_is_nothing_to_do() -> None:
    setup = Setup(Case())
    rows = np.empty((0, 48), np.float32)
    setup.block(ops.ThreadPool(1)).forward(rows, setup.batch([], [], setup.tables()), setup.cache())


def test_refuses_what_does_not_fit() -> None:
    setup = Setup(Case())
    pool, tables, cache = ops.ThreadPool(1), setup.tables(), setup.cache()
    batch, rows = setup.batch([0, 1], [0, 0], tables), setup.hidden[:2].copy()
    block = setup.block(pool)
    with pytest.raises(KernelError, match=r"hidden is float32 \(3, 48\)"):
        block.forward(setup.hidden[:3].copy(), batch, cache)
    with pytest.raises(KernelError, match="layer is 2"):
        setup.block(pool, 2).forward(rows, batch, cache)
    with pytest.raises(KernelError, match="the cache has 2 planes, and latents of 32 elements; expected 1"):
        block.forward(rows, batch, ops.StateCache([[(2, 32, "float32")]], 9, 4))
    with pytest.raises(KernelError, match="page_tables"):
        block.forward(rows, batch, ops.StateCache([[(1, 32, "float32")]], 1, 4))
    few = ops.AttentionBatch(
        np.zeros(1, np.int32),
        np.zeros(1, np.int32),
        tables,
        setup.cos[:1, :2].copy(),
        setup.sin[:1, :2].copy(),
    )
    with pytest.raises(KernelError, match="rotates 2 pairs; expected 4"):
        block.forward(rows[:1], few, cache)
    wrong = Setup(replace(setup.case, value=13))
    wrong.o = setup.o
    with pytest.raises(KernelError, match=r"Mla.out: weight is packed \(48, 48\); expected \(48, 52\)"):
        wrong.block(pool)
    wrong.kv_b = wrong.kv_b.reshape(2, -1, setup.case.latent)
    with pytest.raises(KernelError, match="Mla: k_b"):
        wrong.block(pool)
    assert np.array_equal(rows, setup.hidden[:2]), "a refused call must change nothing"
