"""What a block says of itself: tensors in both files' names, state, cost, and that it runs on what it named."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from twofold import _testing
from twofold.blocks import ops
from twofold.blocks.attention.norms import HeadNorms
from twofold.blocks.attention.projections import Projections
from twofold.blocks.attention.scores import Scores
from twofold.blocks.attention.selection import Window
from twofold.blocks.block import Block, Pages
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.experts import RoutedExperts
from twofold.blocks.ffn import DenseFfn
from twofold.blocks.gqa import Gqa
from twofold.blocks.router import Router
from twofold.blocks.shared_experts import SharedExperts
from twofold.weights.checkpoint import Checkpoint
from twofold.weights.tensor_spec import TensorSpec

from tests.tiny_models.writing import write_safetensors

GQA = Gqa(3, 64, num_heads=4, num_kv_heads=2, head_dim=16, eps=1e-6, select=Window(8))
EXPERTS = RoutedExperts(3, 64, num_experts=4, top_k=2, intermediate_size=32)
BLOCKS = [
    GQA,
    Gqa(3, 64, 4, 2, 16, 1e-6, project=Projections(bias=True), o_bias=True, norms=HeadNorms()),
    Gqa(3, 64, 4, 2, 16, 1e-6, norms=HeadNorms("flat")),
    Gqa(3, 64, 4, 2, 16, 1e-6, scores=Scores(sinks=True)),
    DenseFfn(3, 64, 96, 1e-6),
    Router(3, 64, 4, 2, 1e-6, renormalise=True, bias=True),
    Router(3, 64, 4, 2, 1e-6, renormalise=False, gates=("router",), gate_bias=True),
    EXPERTS,
    SharedExperts(3, 64, 96),
    SharedExperts(3, 64, 96, gated=True),
]


def nothing(spec: TensorSpec) -> bool:
    return False


def written(block: Block, directory: Path, seed: int = 0) -> BlockWeights:
    """Random tensors under the names that the block falls back to."""
    rng = np.random.default_rng(seed)
    specs = block.tensors(lambda spec: ".experts." not in spec.name or ".weight" in spec.name)
    tensors = {spec.name: rng.normal(0, 0.1, spec.shape).astype(np.float32) for spec in specs.values()}
    write_safetensors(directory / "model.safetensors", tensors, "float32")
    return BlockWeights(Checkpoint.open(directory), specs)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: type(block).__name__)
def test_every_tensor_has_a_name_of_its_own_in_both_kinds_of_files(block: Block, tmp_path: Path) -> None:
    weights = written(block, tmp_path)
    block.check(weights)
    specs = weights.specs.values()
    assert len({spec.name for spec in specs}) == len({spec.gguf for spec in specs}) == len(specs)
    assert all(spec.name.startswith("model.layers.3.") and spec.gguf.startswith("blk.3.") for spec in specs)
    assert all(spec.role == "exact" for spec in specs if len(spec.shape) == 1)
    assert block.host_bytes(weights) == weights.source_bytes  # whole panels of float32


def test_attention_costs_what_it_reads_of_weights_and_of_state(tmp_path: Path) -> None:
    weights = written(GQA, tmp_path)
    assert GQA.state == (Pages(planes=4, elements=16),)
    alone, after, far = (GQA.cost(weights, 1, positions) for positions in (0, 5, 1000))
    matrices = 2 * (64 + 2 * 32 + 64) * 64
    assert alone.flops == matrices
    assert alone.num_bytes == GQA.host_bytes(weights)
    assert after.flops - alone.flops == 4 * 5 * 64
    assert after.num_bytes - alone.num_bytes == 5 * 4 * 16 * 2
    assert far.num_bytes - alone.num_bytes == 8 * 4 * 16 * 2  # no more than the window
    assert GQA.cost(weights, 3, 2).flops == 3 * matrices + 4 * (2 + 3 + 4) * 64


def test_experts_cost_those_that_the_tokens_can_choose(tmp_path: Path) -> None:
    weights = written(EXPERTS, tmp_path)
    one = EXPERTS.host_bytes(weights) / 4
    assert [EXPERTS.cost(weights, tokens).num_bytes for tokens in (1, 2, 9)] == [2 * one, 4 * one, 4 * one]
    assert EXPERTS.cost(weights, 9).flops == 9 * 2 * 2 * 3 * 64 * 32


@pytest.mark.parametrize(
    ("top_k", "groups", "top_groups", "problem"),
    [
        (8, 4, 2, None),
        (2, 3, 1, "16 experts do not fill n_group 3"),
        (9, 4, 2, "num_experts_per_tok 9 is more than topk_group 2"),
        (17, 1, 1, "num_experts_per_tok 17 is more than the 16 experts"),
    ],
)
def test_groups_must_have_the_experts_that_are_chosen(
    top_k: int, groups: int, top_groups: int, problem: str | None
) -> None:
    router = Router(0, 64, 16, top_k, 1e-6, True, num_groups=groups, top_groups=top_groups)
    first = next(router.problems(), None)
    assert (first is None) if problem is None else (first is not None and first.startswith(problem))


def test_no_more_experts_are_named_than_are_there() -> None:
    """A damaged configuration asks for millions; the first that is missing says so."""
    many = RoutedExperts(0, 64, num_experts=65_535, top_k=2, intermediate_size=32)
    (missing,) = many.tensors(nothing).values()
    assert missing.name == "model.layers.0.mlp.experts.0.gate_proj.weight"
    assert missing.gguf == "blk.0.ffn_gate_exps.weight"
    three = many.tensors(lambda spec: re.search(r"experts\.[012]\.", spec.name) is not None)
    assert list(three)[-3:] == ["gate.3", "up.3", "down.3"]


@pytest.mark.parametrize("gated", [False, True])
def test_shared_experts_run_on_what_they_named(tmp_path: Path, gated: bool) -> None:
    block = SharedExperts(1, 64, 96, gated=gated)
    weights = written(block, tmp_path)
    gate, up, down = (np.asarray(weights.matrix(part).data) for part in ("gate", "up", "down"))
    rows = np.random.default_rng(1).normal(0, 1, (5, 64)).astype(np.float32)
    hidden = np.ones((5, 64), np.float32)
    _testing.add_shared_experts(block.cpu(weights, ops.ThreadPool(1), 0), hidden, rows)
    a = rows @ gate.T
    expected = (a / (1 + np.exp(-a)) * (rows @ up.T)) @ down.T
    if gated:
        expected /= 1 + np.exp(-rows @ np.asarray(weights.matrix("shared_gate").data).T)
    np.testing.assert_allclose(hidden - 1, expected, atol=2e-5)
