"""A learned indexer on a device: the positions that it chooses, against its scores in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from twofold.blocks.attention import chooser
from twofold.blocks.attention.block_indexer import BlockIndexer
from twofold.blocks.attention.chooser import SCORES_AT_ONCE
from twofold.blocks.attention.gated_pool_indexer import GatedPoolIndexer
from twofold.blocks.attention.indexer import Indexer
from twofold.blocks.attention.pooled_indexer import PooledIndexer
from twofold.blocks.attention.rotation import PAIRED, Rotation
from twofold.blocks.attention.selection import Chosen, SelectionOnDevice
from twofold.blocks.block import Cost, Pages
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.device_step import DeviceKernels
from twofold.blocks.gqa import Gqa
from twofold.blocks.mla import Mla
from twofold.device.kernels import TorchKernels

from tests.blocks.chosen_layers import GQA, MLA, PROMPTS, Layers, native, steps

MOST = 4
F64 = NDArray[np.float64]


def indexer(rotation: Rotation = PAIRED, most: int = MOST) -> Indexer:
    assert MLA.q_lora_rank is not None
    return Indexer(
        num_heads=5,
        head_dim=18,
        most=most,
        rank=MLA.q_lora_rank,
        eps=MLA.eps,
        rank_eps=MLA.latent_eps,
        rotation=rotation,
    )


def pooled(most_pools: int) -> GatedPoolIndexer:
    assert MLA.q_lora_rank is not None
    return GatedPoolIndexer(
        5, 18, pooled=3, most_pools=most_pools, rank=MLA.q_lora_rank, eps=MLA.eps, rank_eps=MLA.latent_eps
    )


def rms(x: F64, weight: F64, eps: float) -> F64:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def scores(x: F64, weights: BlockWeights, layers: Layers, rotation: Rotation) -> F64:
    """[T, T] for the block's inputs of one sequence."""
    shape = indexer(rotation)

    def tensor(part: str) -> F64:
        spec = weights.specs[part]
        if len(spec.shape) == 1:
            return weights.vector(part).astype(np.float64)
        bits = np.asarray(weights.matrix(part).data).view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(spec.shape).astype(np.float64)

    def rotated(v: F64) -> F64:
        half = layers.cos.shape[1]
        cos, sin = (angles[: len(x)].astype(np.float64) for angles in (layers.cos, layers.sin))
        if v.ndim == 3:
            cos, sin = cos[:, None], sin[:, None]
        pairs = (0, 1) if rotation.neighbours else (0, half)
        step = 2 if rotation.neighbours else 1
        a, b = (v[..., at : at + step * half : step] for at in pairs)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, v[..., 2 * half :]], -1)

    normed = rms(x, tensor("norm"), MLA.eps)
    k = normed @ tensor("index_k").T
    k = (k - k.mean(-1, keepdims=True)) / np.sqrt(k.var(-1, keepdims=True) + 1e-6)
    k = rotated(k * tensor("index_norm") + tensor("index_norm_bias"))
    low = rms(normed @ tensor("q").T, tensor("q_norm"), MLA.latent_eps)
    q = rotated((low @ tensor("index_q").T).reshape(len(x), shape.num_heads, shape.head_dim))
    weighted = np.einsum("thd,sd->hts", q, k).clip(min=0) * (normed @ tensor("index_weights").T).T[:, :, None]
    return np.asarray(weighted.sum(0))


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Any], list[Any]]]:
    """Lists and their lengths, by the layer that reads them, of all steps from now on."""
    seen: list[tuple[list[Any], list[Any]]] = []
    prepare = SelectionOnDevice.prepare

    def watched(self: SelectionOnDevice, *given: Any) -> object:
        chosen = prepare(self, *given)
        assert chosen is not None
        seen.append((chosen.positions.tolist(), chosen.counts.tolist()))
        return chosen

    monkeypatch.setattr(SelectionOnDevice, "prepare", watched)
    return seen


@pytest.mark.parametrize("at_once", [SCORES_AT_ONCE, 30])
@pytest.mark.parametrize("kernels", [TorchKernels, native])
@pytest.mark.parametrize("rotation", [PAIRED, Rotation()])
def test_a_device_chooses_positions_with_the_largest_scores(
    rotation: Rotation,
    kernels: Callable[[], DeviceKernels],
    at_once: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chooser, "SCORES_AT_ONCE", at_once)
    layers = Layers(MLA, tmp_path, Chosen(MOST, indexer(rotation)), Chosen(MOST))
    seen = recorded(monkeypatch)
    layers.on_device(kernels())
    assert seen[0::2] == seen[1::2], "the second layer reads the lists of the first"
    inputs = [
        np.stack(
            [
                x[n]
                for (_, of), x in zip(steps(), layers.inputs, strict=True)
                for n in range(len(of))
                if of[n] == s
            ]
        ).astype(np.float64)
        for s in range(len(PROMPTS))
    ]
    best = [scores(x, layers.weights[0], layers, rotation) for x in inputs]
    differs = 0
    for (positions, sequences), (lists, counts) in zip(steps(), seen[0::2], strict=True):
        for n, (position, s) in enumerate(zip(positions, sequences, strict=True)):
            own, row = lists[n][: counts[n]], best[s][position, : position + 1]
            assert own == sorted(set(own))
            assert len(own) == min(MOST, position + 1)
            assert max(own) <= position
            kept = np.sort(row)[-len(own) :]
            room = 0.03 * np.ptp(row)
            assert row[own].min() >= kept.min() - room
            differs += len(own) <= position and own != list(range(position + 1))[-len(own) :]
    assert differs > 5, "the case does not tell scores from the last positions"


@pytest.mark.parametrize("local", [0, 1])
def test_key_heads_choose_the_same_blocks_on_both_sides(
    local: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = BlockIndexer(2, 64, block=2, most_blocks=2, local=local, eps=1e-6, rotation=Rotation())
    layers = Layers(GQA, tmp_path, Chosen(heads.most, heads), Chosen(heads.most))
    seen = recorded(monkeypatch)
    plain, natively = (np.concatenate(layers.on_device(each)) for each in (TorchKernels(), native()))
    lists = [
        [
            [own[:count] for own, count in zip(row, counts, strict=True)]
            for row, counts in zip(*step, strict=True)
        ]
        for step in seen
    ]
    half = len(lists) // 2
    rows = [pair for of in range(half) for pair in zip(lists[of], lists[half + of], strict=True)]
    assert np.mean([ours == theirs for ours, theirs in rows]) > 0.9, "only equal scores may differ"
    assert any(first != second for (first, second), _ in rows), "key heads have lists of their own"
    expected = np.concatenate(layers.on_cpu())
    for found in (plain, natively):
        errors = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
        assert (errors < 0.03).mean() > 0.8, "more than one choice in five differs"


POOLS = PooledIndexer(3, 64, pool=2, most_pools=2, eps=1e-6, rotation=Rotation(), pool_rotation=Rotation())


@pytest.mark.parametrize(
    ("attention", "own", "kernels"),
    [(MLA, pooled(2), TorchKernels), (GQA, POOLS, TorchKernels), (GQA, POOLS, native)],
    ids=["gated pools", "pools", "pools natively"],
)
def test_both_sides_choose_the_same_pools(
    attention: Gqa | Mla,
    own: GatedPoolIndexer | PooledIndexer,
    kernels: Callable[[], DeviceKernels],
    tmp_path: Path,
) -> None:
    layers = Layers(attention, tmp_path, Chosen(own.most, own), Chosen(own.most))
    expected, found = np.concatenate(layers.on_cpu()), np.concatenate(layers.on_device(kernels()))
    errors = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert (errors < 0.03).mean() > 0.8, "more than one choice in five differs"


@pytest.mark.parametrize("dtype", ["bfloat16", "q8", "fp8"])
@pytest.mark.parametrize(
    ("attention", "own"),
    [(MLA, indexer()), (MLA, pooled(2)), (GQA, POOLS)],
    ids=["positions", "gated pools", "pools"],
)
def test_keys_of_any_type_choose_the_same_positions_within_rounding(
    attention: Gqa | Mla, own: Indexer | GatedPoolIndexer | PooledIndexer, dtype: str, tmp_path: Path
) -> None:
    layers = Layers(attention, tmp_path, Chosen(own.most, own), Chosen(own.most))
    exact, rounded = (np.concatenate(layers.on_cpu(kind)) for kind in ("float32", dtype))
    errors = np.linalg.norm(rounded - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert (errors < 0.1).mean() > 0.8, "more than one choice in five differs"


def test_an_indexer_keeps_a_key_per_token_and_costs_a_scan() -> None:
    select = Chosen(MOST, indexer(most=MOST))
    assert Chosen(MOST).planes == ()
    assert [Pages(*plane) for plane in select.planes] == [Pages(1, 18)]
    assert select.scan(1, MOST - 1) == Cost(0, 0), "all positions are kept without scores"
    assert select.scan(2, 9) == Cost(9 * 2 * 18, (10 + 11) * 2.0 * 5 * 19)
    assert Chosen(MOST).scan(1, 9) == Cost(0, 0)
    assert [each.device_elements_per_token for each in (select, Chosen(MOST))] == [5 * 18 + MOST, 0]
