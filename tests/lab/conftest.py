"""A small synthetic trace with what real routing has: popular experts, topics per sequence, short-term repetition."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from twofold.tools.lab.shapes import SHAPES, ModelShape

LAYERS, EXPERTS, TOP_K = 4, 32, 4


def routing(num_sequences: int = 24, tokens: int = 100, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    base = rng.normal(size=(LAYERS, EXPERTS))
    ids = np.zeros((num_sequences * tokens, LAYERS, TOP_K), np.uint8)
    recent = np.zeros((LAYERS, EXPERTS))
    for t in range(len(ids)):
        if t % tokens == 0:
            topic = base + 1.5 * rng.normal(size=base.shape)
        score = topic + recent + rng.gumbel(size=base.shape)
        ids[t] = np.argsort(-score, axis=1)[:, :TOP_K]
        recent *= 0.8
        np.put_along_axis(recent, ids[t].astype(int), 1.0, axis=1)
    probs = np.sort(rng.dirichlet([2.0] * TOP_K, size=ids.shape[:2]), axis=2)[..., ::-1]
    return {"ids": ids, "probs": probs.astype(np.float16), "offsets": np.arange(0, len(ids) + 1, tokens)}


@pytest.fixture
def synthetic_model(monkeypatch: pytest.MonkeyPatch) -> str:
    """A model that has the traces' shape, by name."""
    name = "synthetic-model"
    shape = dataclasses.replace(SHAPES["gpt-oss-20b"], name=name, routing=(LAYERS, EXPERTS, TOP_K))
    monkeypatch.setitem(cast(dict[str, ModelShape], SHAPES), name, shape)
    return name


@pytest.fixture(scope="session")
def trace_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "synthetic.npz"
    np.savez(path, num_experts=np.array(EXPERTS), **routing())
    return path


@pytest.fixture(scope="session")
def long_trace_file(tmp_path_factory) -> Path:
    """Long enough that filling the cache and learning no longer decide."""
    path = tmp_path_factory.mktemp("traces") / "synthetic-long.npz"
    np.savez(path, num_experts=np.array(EXPERTS), **routing(60))
    return path
