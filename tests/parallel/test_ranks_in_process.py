"""Outputs over ranks are the bits of one process, for every family, and each rank holds a share of the weights."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from twofold.api.config import EngineConfig
from twofold.api.errors import KernelError
from twofold.api.parallel_config import ParallelConfig
from twofold.engine import Engine
from twofold.experts.expert_statistics import write_statistics
from twofold.experts.spread import RankShare
from twofold.models import open_model_files
from twofold.parallel.link import RankLink
from twofold.parallel.worker import Worker

from tests.parallel.meeting import meet
from tests.parallel.ranks_in_process import PROMPT, RanksInProcess, answered
from tests.tiny_models.table import EXAMPLES
from tests.tiny_models.writing import TinyModel, write_tiny_model

MODELS = EXAMPLES
WIDE = TinyModel(
    dtype="bfloat16",
    hidden_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    num_layers=3,
    mlp_only_layers=(1,),
    intermediate_size=160,
    num_experts=10,
    top_k=4,
    moe_intermediate_size=96,
)


def config_of(directory: Path, **also: object) -> EngineConfig:
    settings = {"accelerator": "none", "cpu_threads": 1, "max_total_tokens": 256, "seed": 1} | also
    return EngineConfig(model=str(directory), **settings)  # type: ignore[arg-type]


def every_matrix(size: int = 2, **also: object) -> ParallelConfig:
    return ParallelConfig(size, tensor_parallel_min_bytes=0, **also)  # type: ignore[arg-type]


@pytest.mark.parametrize("spreads_experts", [True, False], ids=["experts", "dense"])
@pytest.mark.parametrize("family", MODELS)
def test_every_family_gives_the_bits_of_one_process_over_gloo(
    family: str, spreads_experts: bool, tmp_path: Path
) -> None:
    config = config_of(write_tiny_model(tmp_path, MODELS[family]))
    parallel = every_matrix(enable_expert_parallel=spreads_experts)
    leader, other = meet(0, 1)
    assert isinstance(leader, RankLink)
    assert isinstance(other, RankLink)
    worker = Worker(config, open_model_files(tmp_path), RankShare(other.ranks, parallel))
    serving = threading.Thread(target=worker.run, args=[other])
    serving.start()
    leader.start_pings(lambda reason: None)
    share = RankShare(leader.ranks, parallel)
    try:
        assert answered(config, share) == answered(config, None)
    finally:
        leader.close()
        serving.join()
    assert share.matrices


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("spreads_experts", [True, False])
def test_number_of_ranks_does_not_matter(size: int, spreads_experts: bool, tmp_path: Path) -> None:
    config = config_of(write_tiny_model(tmp_path, WIDE), cpu_threads=2)
    ranks = RanksInProcess(config, every_matrix(size, enable_expert_parallel=spreads_experts))
    assert answered(config, ranks.share) == answered(config, None)
    assert min(ranks.num_jobs[1:]) > 0


@pytest.mark.parametrize("format", ["Q4_K", "Q8_0", "MXFP4"])
def test_rows_of_quantised_blocks_stay_whole(format: str, tmp_path: Path) -> None:
    from twofold.tools.cli.main import main

    size = 256
    source = write_tiny_model(
        tmp_path / "source",
        replace(WIDE, hidden_size=size, moe_intermediate_size=size, intermediate_size=size),
    )
    made = tmp_path / "made"
    assert main(["quantize", str(source), str(made), "--format", format.lower(), "--max-tokens", "0"]) == 0
    config = config_of(made)
    assert answered(config, RanksInProcess(config, every_matrix(3)).share) == answered(config, None)


def test_ranks_share_the_weights_out(tmp_path: Path) -> None:
    config = config_of(write_tiny_model(tmp_path, WIDE))
    whole = Engine.load(config)
    total = whole.runner.moe.store.bytes
    whole.close()
    ranks = RanksInProcess(config, every_matrix())
    engine = Engine.load(config, share=ranks.share)
    mine, other = engine.runner.moe.store.bytes, ranks.workers[1].num_bytes
    engine.close()
    assert mine == total // 2
    # Few matrices have an odd number of panels.
    assert other == pytest.approx(mine + ranks.share.num_bytes, rel=0.05)


def test_experts_that_all_ranks_hold_are_divided_by_load(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "model", WIDE)
    counts = np.arange(20).reshape(2, 10) + 1
    statistics = tmp_path / "uses.npz"
    write_statistics(statistics, counts)
    config = config_of(directory, init_expert_location=str(statistics))
    ranks = RanksInProcess(config, every_matrix(num_redundant_experts=4))
    assert answered(config, ranks.share) == answered(config, None)
    spread = ranks.share.spread(2, 10, counts)
    assert spread is not None
    both = 0b11
    assert [mask == both for mask in spread.holders] == [*([False] * 6), *([True] * 4)] * 2


def test_a_lost_rank_ends_every_later_step_with_the_same_error(tmp_path: Path) -> None:
    config = config_of(write_tiny_model(tmp_path, WIDE))
    ranks = RanksInProcess(config, every_matrix())
    engine = Engine.load(config, share=ranks.share)
    sampling = {"max_tokens": 4, "temperature": 0.0}
    from twofold.api.types import SamplingParams

    def lose(job: object, rows: object) -> None:
        raise KernelError("rank 1 (there) was lost: it said goodbye")

    ranks.workers[1].answer = lose  # type: ignore[method-assign,assignment]
    for _ in range(2):
        with pytest.raises(KernelError, match=r"rank 1 \(there\) was lost"):
            engine.generate(PROMPT, SamplingParams(**sampling))  # type: ignore[arg-type]
    engine.close()
