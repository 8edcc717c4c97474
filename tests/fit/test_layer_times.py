"""Measured times of layers whose outputs pass a block on their way into the residual stream."""

from __future__ import annotations

from pathlib import Path

import pytest
from twofold.blocks import ops
from twofold.fit.layer_times import LayerTimes, StepPart
from twofold.models.model_files import open_model_files

from tests.tiny_models.table import EXAMPLES
from tests.tiny_models.writing import write_tiny_model


@pytest.mark.parametrize("family", ["hy_v4", "gemma4", "axk1"])
def test_layers_are_measured_without_experts_that_a_later_block_covers(tmp_path: Path, family: str) -> None:
    files = open_model_files(write_tiny_model(tmp_path, EXAMPLES[family]))
    ticks = iter(range(10**6))
    times = LayerTimes(files, ops.ThreadPool(1), "float32", lambda: float(next(ticks)))
    assert times.of_steps([StepPart(1, 4), StepPart(3, 0)]) == [1e6 * len(files.layers)] * 2
