"""Gqa, StateCache and AttentionBatch against a float64 model, and against themselves cut differently."""

from __future__ import annotations

from dataclasses import dataclass, replace

import kernel_reference as reference
import numpy as np
import pytest
from numpy.typing import NDArray
from twofold import _testing
from twofold.api.errors import ConfigError, KernelError
from twofold.blocks import ops

EPS = 1e-6


@dataclass(frozen=True)
class Case:
    hidden: int = 48
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    dtype: str = "float32"
    cache_dtype: str = "float32"
    qk_norm: bool = True
    flat_norms: bool = False
    bias: bool = False
    sinks: bool = False
    window: int | None = None
    chunk: int | None = None
    turns: bool = True
    neighbours: bool = False
    temperature: tuple[float, float] | None = None
    softcap: float = 0.0
    most: int = 0
    """Positions that are chosen for a query; 0: all."""
    pictures: tuple[tuple[int, int], ...] = ()
    """(begin, end) of tokens that attend to one another."""
    page_size: int = 4
    rotated: int = 8
    tokens: int = 23


CASES = [
    Case(),
    Case(kv_heads=4),
    Case(kv_heads=1, heads=7, head_dim=24, rotated=12),
    Case(heads=3, kv_heads=3, head_dim=20, rotated=4, qk_norm=False, bias=True),
    Case(heads=6, kv_heads=3, flat_norms=True),
    Case(dtype="bfloat16", head_dim=64, rotated=32),
    Case(window=1),
    Case(window=5, page_size=3),
    Case(window=100),
    Case(page_size=16, tokens=70, heads=8, kv_heads=2),
    Case(page_size=1, tokens=1),
    Case(tokens=40, window=8, heads=32, kv_heads=1, head_dim=8, rotated=4),
    Case(sinks=True, qk_norm=False, heads=6, kv_heads=2, tokens=30),
    Case(sinks=True, window=5, dtype="bfloat16", head_dim=64, rotated=32),
    Case(tokens=1040, page_size=16, hidden=16, heads=4, kv_heads=2, window=530, sinks=True),
    Case(chunk=5, page_size=3, neighbours=True, qk_norm=False),
    Case(turns=False, temperature=(4.0, 0.7)),
    Case(softcap=1.5, sinks=True, window=9),
    Case(softcap=0.7, tokens=1100, page_size=64, hidden=16, heads=2, kv_heads=1),
    Case(tokens=1300, page_size=16, hidden=16, heads=2, kv_heads=1, chunk=600),
    # Over the edges of blocks of positions, windows that begin in another block than they end among them.
    Case(tokens=1100, page_size=64, hidden=16, heads=2, kv_heads=1),
    Case(tokens=1040, page_size=16, hidden=16, heads=2, kv_heads=1, window=530),
    Case(most=5),
    Case(most=3, window=4, softcap=1.5, sinks=True),  # some tokens attend to nothing but the sink
    Case(most=2, window=1, qk_norm=False),  # and some to nothing
    Case(most=600, tokens=1300, page_size=16, hidden=16, heads=40, kv_heads=2, window=1200),
    Case(pictures=((0, 4), (6, 15), (15, 16), (17, 23))),
    Case(pictures=((3, 14), (16, 20)), window=5, sinks=True, page_size=3),
    Case(pictures=((2, 21),), window=1, qk_norm=False),
    # Over the edges of blocks: a window that begins in another block than its picture ends.
    Case(
        tokens=1100,
        page_size=64,
        hidden=16,
        heads=2,
        kv_heads=1,
        pictures=((400, 700), (1000, 1030)),
        window=530,
    ),
    Case(tokens=1100, page_size=64, hidden=16, heads=2, kv_heads=1, pictures=((500, 513), (600, 1099))),
]
# A relative bound on the error of a whole block's output.
ROUNDING = {"bfloat16": 2e-2, "q8": 3e-2, "fp8": 2e-1}


class Setup(reference.PagedAttention):
    """Weights, input and angles of a case; `run` puts the tokens through a block in the given order and cuts."""

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(7)
        c = self.case = case
        rows = (c.heads + 2 * c.kv_heads) * c.head_dim
        self.weights: dict[str, NDArray | None] = {
            "norm": rng.uniform(0.5, 1.5, c.hidden).astype(np.float32),
            "qkv": reference.weights(rng, (rows, c.hidden), c.dtype),
            "qkv_bias": rng.standard_normal(rows).astype(np.float32) if c.bias else None,
            "q_norm": self._norm(rng, c.heads),
            "k_norm": self._norm(rng, c.kv_heads),
            "o": reference.weights(rng, (c.hidden, c.heads * c.head_dim), c.dtype),
            "o_bias": rng.standard_normal(c.hidden).astype(np.float32) if c.bias else None,
            "sinks": 3 * rng.standard_normal(c.heads).astype(np.float32) if c.sinks else None,
        }
        self.hidden = rng.standard_normal((c.tokens, c.hidden)).astype(np.float32)
        angles = np.arange(c.tokens)[:, None] * 10 ** -np.linspace(0, 2, c.rotated)[None]
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        if c.pictures:
            self.ends = np.arange(1, c.tokens + 1, dtype=np.int32)
            for begin, end in c.pictures:
                self.ends[begin:end] = end

    def _norm(self, rng: np.random.Generator, heads: int) -> NDArray[np.float32] | None:
        size = self.case.head_dim * (heads if self.case.flat_norms else 1)
        return rng.uniform(0.5, 1.5, size).astype(np.float32) if self.case.qk_norm else None

    def block(self, pool: ops.ThreadPool, layer: int = 0) -> ops.Decoder:
        w, c = self.weights, self.case
        kv = -2 * c.kv_heads * c.head_dim
        qkv = reference.packed(pool, w["qkv"][:kv], w["qkv"][kv : kv // 2], w["qkv"][kv // 2 :])
        period, slope = c.temperature or (0.0, 0.0)
        attention = ops.Gqa(
            pool,
            layer=layer,
            heads={"num_heads": c.heads, "num_kv_heads": c.kv_heads, "head_dim": c.head_dim},
            project={"weight": qkv, "bias": w["qkv_bias"], "norm": w["norm"], "eps": EPS},
            q_norm={"weight": w["q_norm"], "eps": EPS} if c.qk_norm else None,
            k_norm={"weight": w["k_norm"], "eps": EPS} if c.qk_norm else None,
            flat_norms=c.flat_norms,
            rotation={"neighbours": c.neighbours} if c.turns else None,
            scale={"period": period, "slope": slope},
            select={
                "stretch": ops.Stretch(window=c.window or 0, chunk=c.chunk or 0),
                "most": c.most or None,
                "bidirectional": bool(c.pictures),
                "chooser": _testing.LargestInputs(c.hidden) if c.most else None,
            },
            scores={"rule": ops.ScoreRule(scale=c.head_dim**-0.5, softcap=c.softcap), "sinks": w["sinks"]},
            out={"weight": reference.packed(pool, w["o"]), "bias": w["o_bias"]},
        )
        return ops.Decoder([attention])

    def cache(self, num_sequences: int = 1, layers: int = 2) -> ops.StateCache:
        c = self.case
        pages = num_sequences * self.pages_per_sequence
        planes = [(2 * c.kv_heads, c.head_dim, c.cache_dtype), *[(1, 1, "float32")] * (c.most > 0)]
        return ops.StateCache([planes] * layers, pages, c.page_size)

    def expected(self) -> NDArray[np.float64]:
        c = self.case
        return reference.attention_block(
            self.hidden,
            self.weights,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            eps=EPS,
            window=c.window,
            chunk=c.chunk,
            neighbours=c.neighbours,
            temperature=c.temperature,
            softcap=c.softcap,
            most=c.most,
            ends=self.ends,
            cos=self.cos[:, : c.rotated * c.turns],
            sin=self.sin[:, : c.rotated * c.turns],
        )


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
    step = 5 if case.tokens < 100 else 171
    last_alone = [*range(step, case.tokens - 6, step), *range(case.tokens - 5, case.tokens + 1)]
    one_by_one = list(range(1, case.tokens + 1)) if case.tokens < 100 else last_alone
    for cuts in ([*range(step, case.tokens, step), case.tokens], one_by_one):
        apart = [cut for cut in cuts if not any(begin < cut < end for begin, end in case.pictures)]
        for threads in (1, 3):
            assert np.array_equal(setup.run(apart, threads), whole)


def test_pictures_change_nothing_in_a_layer_that_is_not_bidirectional() -> None:
    setup = Setup(Case(window=7))
    plain = setup.run([23])
    setup.ends = Setup(Case(pictures=((4, 19),))).ends
    assert np.array_equal(setup.run([23]), plain)


@pytest.mark.parametrize("ends", [[1, 2, 4], [2, 1, 3], [2, 2, 2], [3, 2, 3]], ids=str)
def test_refuses_ends_outside_the_batch(ends: list[int]) -> None:
    setup = Setup(Case(pictures=((0, 3),)))
    setup.ends = np.array(ends, np.int32)
    with pytest.raises(KernelError, match="attends up to before"):
        setup.batch([0, 1, 2], [0, 0, 0], setup.tables())


def test_a_sink_takes_its_share_however_large_it_is() -> None:
    """Either nothing is left of all other logits, or nothing of the sink."""
    setup = Setup(Case())
    plain = setup.run([23])
    setup.weights["sinks"] = np.full(4, -200, np.float32)
    np.testing.assert_array_equal(setup.run([23]), plain)
    setup.weights["sinks"] = np.full(4, 200, np.float32)
    np.testing.assert_array_equal(setup.run([23]), setup.hidden)


def test_choosing_all_positions_changes_no_bit() -> None:
    for case in (Case(), Case(tokens=1100, page_size=64, hidden=16, heads=4, kv_heads=2, window=600)):
        whole = Setup(case).run([case.tokens])
        assert np.array_equal(Setup(replace(case, most=case.tokens)).run([case.tokens]), whole)


@pytest.mark.parametrize("window", [None, 7])
def test_runs_of_consecutive_pages_change_no_bit(window: int | None) -> None:
    """Pages in order are read as one stretch, shuffled ones page by page, and some of both in between."""
    setup = Setup(Case(window=window, page_size=3, tokens=29))
    shuffled = setup.run([29])
    for order in (range(10), [4, 5, 6, 0, 1, 2, 3, 9, 8, 7]):
        assert np.array_equal(setup.run([11, 12, 29], tables=np.array([order], np.int32)), shuffled)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    "case",
    [
        Case(tokens=30),
        Case(tokens=600, heads=6, head_dim=20, page_size=16),
        Case(tokens=300, heads=36, head_dim=20, page_size=16, most=70),
    ],
    ids=str,
)
def test_a_narrow_cache_rounds_keys_and_values_only(dtype: str, case: Case) -> None:
    setup = Setup(replace(case, cache_dtype=dtype))
    tokens = case.tokens
    got = setup.run([tokens])
    assert np.abs(got - setup.expected()).max() < ROUNDING[dtype]
    assert not np.array_equal(got, Setup(case).run([tokens]))
    # Many rows read keys and values widened for all of them, few read them as they lie.
    assert np.array_equal(got, setup.run([1, 2, 17, tokens - 1, tokens], threads=2))


@pytest.mark.parametrize("threads", [1, 2])
def test_sequences_in_one_batch_are_independent(threads: int) -> None:
    Setup(Case(tokens=12)).check_sequences_are_apart(threads)


def test_layers_of_the_cache_are_apart() -> None:
    setup = Setup(Case(tokens=6))
    pool = ops.ThreadPool(1)
    block, cache, tables = setup.block(pool, 1), setup.cache(), setup.tables()
    below = setup.block(pool, 0)
    other = setup.hidden[::-1].copy()
    below.forward(other, setup.batch(list(range(6)), [0] * 6, tables), cache)
    rows = setup.hidden[:5].copy()
    block.forward(rows, setup.batch(list(range(5)), [0] * 5, tables), cache)
    below.forward(other, setup.batch(list(range(6)), [0] * 6, tables), cache)
    last = setup.hidden[5:].copy()
    block.forward(last, setup.batch([5], [0], tables), cache)
    assert np.array_equal(np.concatenate([rows, last]), setup.run([6]))


def test_an_empty_batch_is_nothing_to_do() -> None:
    setup = Setup(Case())
    rows = np.empty((0, 48), np.float32)
    setup.block(ops.ThreadPool(1)).forward(rows, setup.batch([], [], setup.tables()), setup.cache())


def test_refuses_what_does_not_fit() -> None:
    setup = Setup(Case())
    pool, tables, cache = ops.ThreadPool(1), setup.tables(), setup.cache()
    block = setup.block(pool)
    batch = setup.batch([0, 1], [0, 0], tables)
    rows = setup.hidden[:2].copy()
    with pytest.raises(KernelError, match=r"hidden is float64 \(2, 48\); expected float32 \(2, 48\)"):
        block.forward(rows.astype(np.float64), batch, cache)
    with pytest.raises(KernelError, match=r"hidden is float32 \(3, 48\)"):
        block.forward(setup.hidden[:3].copy(), batch, cache)
    with pytest.raises(KernelError, match="C-contiguous"):
        block.forward(np.asfortranarray(rows), batch, cache)
    rows.flags.writeable = False
    with pytest.raises(KernelError, match="read-only"):
        block.forward(rows, batch, cache)
    rows = setup.hidden[:2].copy()
    with pytest.raises(KernelError, match="layer is 2"):
        setup.block(pool, 2).forward(rows, batch, cache)
    with pytest.raises(KernelError, match="4 planes of 32"):
        block.forward(rows, batch, ops.StateCache([[(4, 32, "float32")]], 9, 4))
    with pytest.raises(KernelError, match="page_tables"):
        block.forward(rows, batch, ops.StateCache([[(4, 16, "float32")]], 1, 4))
    far = ops.AttentionBatch(
        np.array([99], np.int32), np.zeros(1, np.int32), tables, setup.cos[:1], setup.sin[:1]
    )
    with pytest.raises(KernelError, match="needs 25 pages"):
        block.forward(rows[:1], far, cache)
    with pytest.raises(KernelError, match="negative"):
        ops.AttentionBatch(
            np.array([-1], np.int32), np.zeros(1, np.int32), tables, setup.cos[:1], setup.sin[:1]
        )
    with pytest.raises(KernelError, match="sequence_index"):
        ops.AttentionBatch(np.zeros(1, np.int32), np.ones(1, np.int32), tables, setup.cos[:1], setup.sin[:1])
    with pytest.raises(KernelError, match="4 planes of 16 elements; expected 5 of 16"):
        Setup(replace(setup.case, most=3)).block(pool).forward(rows, batch, setup.cache())
    with pytest.raises(KernelError, match="multiple of num_kv_heads"):
        Setup(replace(setup.case, heads=3)).block(pool)
    assert np.array_equal(rows, setup.hidden[:2]), "a refused call must change nothing"


def test_cache_reports_its_size_and_refuses_nonsense() -> None:
    cache = ops.StateCache([[(8, 32, "bfloat16")]] * 2, 3, 16)
    assert cache.bytes == 2 * 3 * 16 * 4 * 32 * 2 * 2
    with pytest.raises(ConfigError, match="num_pages is 0"):
        ops.StateCache([[(8, 32, "float32")]] * 2, 0, 16)
    scaled = ops.StateCache([[(8, 31, "q8"), (1, 3, "fp8")]], 3, 16)
    assert scaled.bytes == 3 * 16 * (8 * (31 + 4) + 3)
    with pytest.raises(ConfigError, match='dtype is "float16"'):
        ops.StateCache([[(8, 32, "float16")]] * 2, 3, 16)
    with pytest.raises(ConfigError, match="lower the number of pages"):
        ops.StateCache([[(128, 256, "float32")]] * 100, 2**30, 2**20)
