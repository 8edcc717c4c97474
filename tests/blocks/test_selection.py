"""Positions chosen by a part of one layer and read by the next, on the CPU and on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from twofold import _testing
from twofold.api.errors import KernelError
from twofold.blocks import ops
from twofold.blocks.attention.chooser import Chooser
from twofold.blocks.attention.chosen import ChosenPositions
from twofold.blocks.attention.gate import Gate
from twofold.blocks.attention.rotation import Rotation
from twofold.blocks.attention.scores import Scores
from twofold.blocks.attention.selection import AllPositions, Chosen, Window
from twofold.blocks.block import Pages
from twofold.blocks.block_weights import BlockWeights
from twofold.blocks.device_step import DeviceKernels, DeviceState, DeviceStep, DeviceWeights
from twofold.device.kernels import TorchKernels

from tests.blocks.chosen_layers import GQA, HIDDEN, MLA, PAGE_SIZE, Layers, native

MOST = 4
F32 = NDArray[np.float32]


@dataclass(frozen=True)
class LargestInputs(Chooser):
    """Chooses the tokens with the largest first elements of the block's input (`_testing.LargestInputs`)."""

    @property
    def planes(self) -> tuple[tuple[int, int], ...]:
        return ((1, 1),)

    def cpu(self, weights: BlockWeights, pool: ops.ThreadPool) -> ops.Chooser:
        return _testing.LargestInputs(HIDDEN)

    def device(self, weights: DeviceWeights) -> LargestInputs:
        return self

    def choose(
        self, hidden: Tensor, projected: Tensor, state: DeviceState, step: DeviceStep
    ) -> ChosenPositions:
        batch, kept = step.batch, state[0].view(-1)
        kept[batch.slot_mapping] = (4 * hidden[:, 0]).floor().to(kept.dtype)
        counts = torch.tensor(batch.query_lens or (1,) * len(hidden))
        tables = batch.page_tables.repeat_interleave(counts, 0).long()
        rows = (tables[:, :, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten(1)
        return ChosenPositions.top(kept[rows].float(), batch.positions, MOST)


BLOCKS = {
    "gqa": GQA,
    "gqa with a bound, sinks and a window": replace(
        GQA, scores=Scores(softcap=2.0, sinks=True), select=Window(7)
    ),
    "mla": MLA,
    "mla with halves and a window": replace(MLA, rotation=Rotation(), select=Window(7)),
    "mla with gates and a norm of shared keys": replace(
        MLA, gate=Gate("g_proj", "head"), key_norm=True, latent_scale=1.5
    ),
    "mla with longer latents than kernels have": replace(MLA, kv_lora_rank=514),
    "mla without rotation": replace(MLA, rotation=None),
    "mla without a shared key": replace(MLA, rotation=None, qk_rope_head_dim=0),
}


def error(ours: list[F32], expected: list[F32]) -> float:
    ratios = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(ours, expected, strict=True)]
    return float(max(ratios))


@pytest.mark.parametrize("kernels", [TorchKernels, native])
@pytest.mark.parametrize("name", BLOCKS)
def test_both_sides_attend_to_the_positions_of_a_chooser(
    name: str, kernels: Callable[[], DeviceKernels], tmp_path: Path
) -> None:
    block = BLOCKS[name]
    within = block.select
    layers = Layers(
        block, tmp_path, Chosen(MOST, LargestInputs(), within=within), Chosen(MOST, within=within)
    )
    expected = layers.on_cpu()
    assert error(layers.on_device(kernels()), expected) < 2e-2
    layers.blocks = [replace(each, select=within) for each in layers.blocks]
    assert error(layers.on_cpu(), expected) > 0.1, "the case does not tell chosen positions from all"
    assert error(layers.on_device(kernels()), layers.on_cpu()) < 2e-2


def test_a_layer_needs_positions_that_an_earlier_one_chose(tmp_path: Path) -> None:
    layers = Layers(GQA, tmp_path, Chosen(MOST), Chosen(MOST))
    for run in (layers.on_cpu, lambda: layers.on_device(TorchKernels())):
        with pytest.raises(KernelError, match="no earlier layer of this step has chosen"):
            run()


def test_a_chooser_keeps_its_state_after_keys_and_values_and_bounds_the_cost(tmp_path: Path) -> None:
    chosen = replace(GQA, select=Chosen(MOST, LargestInputs()))
    assert chosen.state == (Pages(4, 64), Pages(1, 1))
    assert chosen.device_page_elements == 2 * 2 * 64 + 1
    select = Chosen(MOST, within=Window(3))
    assert [select.num_before(position) for position in (0, 2, 9)] == [0, 2, 3]
    assert [Chosen(MOST, within=AllPositions()).num_before(p) for p in (3, 9)] == [3, 4]


def test_the_largest_scores_are_kept_and_equal_ones_by_position() -> None:
    nan, infinity = float("nan"), float("inf")
    scores = torch.tensor([[1, 3, nan, 2, 3, -infinity, 2, 2, 9]]).repeat(4, 1)
    chosen = ChosenPositions.top(scores, torch.tensor([7, 0, 2, 5]), 4)
    assert chosen.counts.tolist() == [4, 1, 3, 4]
    lists = [row[:n] for row, n in zip(chosen.positions.tolist(), chosen.counts.tolist(), strict=True)]
    assert lists == [[1, 3, 4, 6], [0], [0, 1, 2], [0, 1, 3, 4]]
    seen = chosen.within(torch.ones(4, 9, dtype=torch.bool), 1)
    assert [row.nonzero().flatten().tolist() for row in seen] == lists
    of_heads = chosen.by_head(2).within(torch.ones(2, 9, dtype=torch.bool), 4)
    assert torch.equal(of_heads[[0, 2]].transpose(0, 1).flatten(0, 1), seen)
    blocks = ChosenPositions.top(scores[:2], torch.tensor([8, 3]), 2).of_blocks(3, torch.tensor([25, 10]))
    found = zip(blocks.positions.tolist(), blocks.counts.tolist(), strict=True)
    assert [row[:n] for row, n in found] == [[3, 4, 5, 24, 25], [3, 4, 5, 9, 10]], (
        "the last block is not whole"
    )
    assert ChosenPositions.top(scores[:1], torch.tensor([7]), 20).positions.tolist()[0][:8] == [*range(8)]
