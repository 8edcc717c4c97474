"""A model whose experts have formats of their own: wherever they are kept and computed, answers have the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from twofold.api.config import EngineConfig
from twofold.api.parallel_config import ParallelConfig
from twofold.blocks import ops
from twofold.blocks.recoding import Recoding
from twofold.engine import Engine
from twofold.engine.packing import pack_directory
from twofold.fit.ranks import fit_ranks
from twofold.models.model_files import open_model_files
from twofold.models.sizing import measure_files
from twofold.tools.cli.main import main
from twofold.weights.panel_file import PANEL_FILE, read_contents
from twofold.weights.weight_format import MixedFormats

from tests.parallel.ranks_in_process import RanksInProcess, answered
from tests.weights.scheme_cases import CASES, MODEL, write, write_by_expert

ONE_PLAIN: tuple[str | None, dict[str, Any]] = (None, {"-:.*experts\\.3\\..*": {}})
IN_EIGHT_BITS = "gptq in 8 bits", {"+:.*experts\\.3\\..*": {"bits": 8, "group_size": 128}}
STORED = {"plain": ONE_PLAIN, "8 bits": IN_EIGHT_BITS}


def config_of(directory: Path, **also: Any) -> EngineConfig:
    settings = {"accelerator": "none", "cpu_threads": 1, "max_total_tokens": 256, "seed": 1} | also
    return EngineConfig(model=str(directory), **settings)


@pytest.mark.parametrize("stored", STORED)
def test_placement_ranks_and_panel_files_change_no_bit(tmp_path: Path, stored: str) -> None:
    source, packed = tmp_path / "source", tmp_path / "packed"
    write_by_expert(source, *STORED[stored])
    expected = answered(config_of(source), None)
    emulated = {"accelerator": "emulated:rtx4090-pcie4"}
    for settings in (
        {"cpu_threads": 2},
        *(emulated | {"gpu_experts_ratio": ratio} for ratio in (0.0, 0.3, 1.0)),
        {"packed_cache": str(tmp_path / "cache")},  # written
        {"packed_cache": str(tmp_path / "cache")},  # mapped
    ):
        assert answered(config_of(source, **settings), None) == expected, settings
    files = open_model_files(source)
    for size in (2, 3):
        parallel = ParallelConfig(size, tensor_parallel_min_bytes=0, enable_expert_parallel=True)
        ranks = RanksInProcess(config_of(source), parallel)
        assert answered(config_of(source), ranks.share) == expected
        assert min(ranks.num_jobs[1:]) > 0
        predicted = [each.weight_bytes for each in fit_ranks(config_of(source), parallel, files, 2**40).ranks]
        assert predicted[1:] == [ranks.workers[rank].num_bytes for rank in range(1, size)]
    assert pack_directory(files, source, packed, ops.ThreadPool(2))
    assert open_model_files(packed).expert_formats() == files.expert_formats()
    for settings in ({}, emulated | {"gpu_experts_ratio": 0.3}):
        assert answered(config_of(packed, **settings), None) == expected


def test_every_expert_takes_its_own_bytes(tmp_path: Path) -> None:
    write_by_expert(tmp_path, *ONE_PLAIN)
    files = open_model_files(tmp_path)
    routed, (formats, _) = files.config.routed, files.expert_formats()
    assert isinstance(formats, MixedFormats)
    small, large = routed.expert_bytes(formats[0]), routed.expert_bytes(formats[3])
    total = MODEL.num_layers * ((MODEL.num_experts - 1) * small + large)
    assert large > 6 * small
    size = measure_files(files)
    assert (size.expert_bytes, size.one_expert_bytes) == (total, large)
    engine = Engine.load(config_of(tmp_path))
    try:
        assert engine.runner.moe.store.bytes == total
    finally:
        engine.close()


def test_a_quantised_model_has_one_format_and_the_weights_that_have_it_already(tmp_path: Path) -> None:
    source, made = tmp_path / "source", tmp_path / "made"
    write_by_expert(source, *ONE_PLAIN)
    assert main(["quantize", str(source), str(made), "--format", "q4_0", "--max-tokens", "0"]) == 0
    before, after = open_model_files(source), open_model_files(made)
    assert set(after.expert_formats()) == {("q4_0",) * 3}
    for expert in (0, 2):
        for old, new in zip(before.expert_weights(1)[expert], after.expert_weights(1)[expert], strict=True):
            np.testing.assert_array_equal(old.data, new.data)
    recoded = before.recoded([Recoding("int8", None)] * len(list(before.parts())))
    assert set(recoded.expert_formats()) == {("int8",) * 3}


def test_the_version_of_a_panel_file_marks_formats_by_expert(tmp_path: Path) -> None:
    write(tmp_path / "alike", CASES["gptq"])
    write_by_expert(tmp_path / "mixed", *ONE_PLAIN)
    for name, version in (("alike", 1), ("mixed", 2)):
        source, packed = tmp_path / name, tmp_path / f"{name}-packed"
        assert pack_directory(open_model_files(source), source, packed, ops.ThreadPool(1))
        contents = read_contents(packed / PANEL_FILE)
        assert contents.version == version
        assert (packed / PANEL_FILE).read_bytes()[8] == version
        of_layer = contents.experts.formats[0]
        assert len(of_layer) == (3 if version == 1 else MODEL.num_experts)
