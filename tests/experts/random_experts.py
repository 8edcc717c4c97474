"""Random experts, their store and the layer worked out in numpy."""

from __future__ import annotations

import numpy as np
from twofold import _core
from twofold.blocks import ops

from tests.tiny_models.writing import weight_matrix

LAYERS, EXPERTS, TOP_K, HIDDEN, INNER = 3, 8, 3, 48, 40
POLICIES = [policy.name for policy in _core.cache_policies() if not policy.offline]


def bfloat16(values):
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def widen(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Model:
    """Random experts, their store, and the layer worked out in numpy's float64."""

    def __init__(self, dtype="float32", seed=0, scale=0.2):
        random = np.random.default_rng(seed)
        self.dtype = dtype

        def matrix(rows, columns):
            values = random.normal(0, scale, (rows, columns)).astype(np.float32)
            return bfloat16(values) if dtype == "bfloat16" else values

        self.experts = [
            [(matrix(INNER, HIDDEN), matrix(INNER, HIDDEN), matrix(HIDDEN, INNER)) for _ in range(EXPERTS)]
            for _ in range(LAYERS)
        ]
        format_name = {"float32": "f32", "bfloat16": "bf16"}[dtype]
        self.store = _core.ExpertStore(EXPERTS, HIDDEN, INNER, [(format_name,) * 3] * LAYERS)
        for layer, experts in enumerate(self.experts):
            self.put(layer, experts)

    def put(self, layer, experts):
        sources = [tuple(weight_matrix(m) for m in matrices) for matrices in experts]
        self.store.put(ops.ThreadPool(2), layer, 0, sources)

    def reference(self, layer, normed, ids, weights, hidden):
        out = hidden.astype(np.float64)
        for t in range(len(normed)):
            for expert, weight in zip(ids[t], weights[t], strict=True):
                gate, up, down = (
                    (widen(m) if self.dtype == "bfloat16" else m).astype(np.float64)
                    for m in self.experts[layer][expert]
                )
                g = gate @ normed[t]
                out[t] += weight * (down @ (g / (1 + np.exp(-g)) * (up @ normed[t])))
        return out


def batch(num_tokens, seed):
    random = np.random.default_rng(seed)
    normed = random.normal(size=(num_tokens, HIDDEN)).astype(np.float32)
    hidden = random.normal(size=(num_tokens, HIDDEN)).astype(np.float32)
    ids = np.stack([random.permutation(EXPERTS)[:TOP_K] for _ in range(num_tokens)]).astype(np.int32)
    weights = random.dirichlet(np.ones(TOP_K), num_tokens).astype(np.float32)
    return normed, ids, weights, hidden


def run(executor, layer, batch_arrays, step=0):
    normed, ids, weights, hidden = batch_arrays
    out = hidden.copy()
    executor.begin_step(step, [step] * len(ids), list(range(len(ids))))
    executor.forward(layer, normed, ids, weights, out)
    executor.end_step()
    return out
