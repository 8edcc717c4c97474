"""EAGLE-3's head against a torch reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from twofold.blocks import ops
from twofold.step.drafters.eagle3_head import Eagle3Files, Eagle3Head

from tests.models.transformers_runs import one_torch_thread
from tests.tiny_models.eagle3 import TinyEagle3, fused_states, reference_states

__all__ = ["one_torch_thread"]  # a fixture

HEADS = {
    "published": TinyEagle3(),
    "norms before residual": TinyEagle3(norms_before_residual=True, names="model.layers.0."),
    "biases": TinyEagle3(attention_bias=True, hidden_size=64, target_hidden_size=48),
}


@pytest.mark.parametrize("kind", HEADS)
def test_logits_are_the_references(tmp_path: Path, kind: str) -> None:
    """The prompt comes in two parts, and drafted tokens read the layer's own states."""
    tiny = HEADS[kind]
    directory = tiny.write(tmp_path)
    pool = ops.ThreadPool(1)
    files = Eagle3Files(directory)
    head = Eagle3Head(files, pool, None)  # type: ignore[arg-type]
    draw = np.random.default_rng(1)
    of_target = draw.standard_normal((11, 3 * tiny.target_hidden_size)).astype(np.float32)
    tokens = draw.integers(0, tiny.vocab_size, 13)
    cache = ops.StateCache(files.config.cache_planes("float32"), 4, 8)
    tables = np.array([[2, 0]], np.int32)

    def run(begin: int, states: np.ndarray) -> np.ndarray:
        end = begin + len(states)
        positions = np.arange(begin, end, dtype=np.int32)
        return head.forward(
            tokens[begin:end].tolist(), states, positions, np.zeros(len(states), np.int32), tables, cache
        )

    fused = head.fused(of_target)
    parts = [run(0, fused[:7]), run(7, fused[7:])]
    parts.append(run(11, parts[-1][-1:]))
    parts.append(run(12, parts[-1][-1:]))
    found = np.concatenate(parts)
    states = fused_states(directory, of_target)
    torch.testing.assert_close(torch.from_numpy(fused), states, atol=1e-4, rtol=1e-4)
    for _ in range(2):
        out, _ = reference_states(directory, states, torch.from_numpy(tokens[: len(states)]))
        states = torch.cat([states, out[-1:]])
    out, logits = reference_states(directory, states, torch.from_numpy(tokens))
    torch.testing.assert_close(torch.from_numpy(found), out, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.from_numpy(head.logits(found)), logits, atol=1e-4, rtol=1e-4)
