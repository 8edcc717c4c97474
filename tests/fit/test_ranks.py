"""`twofold fit --tensor-parallel-size`: predicted bytes of ranks are those that ranks load."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from twofold.api.config import EngineConfig
from twofold.api.parallel_config import ParallelConfig
from twofold.experts.expert_statistics import write_statistics
from twofold.fit.ranks import RanksFit, fit_ranks
from twofold.models import open_model_files
from twofold.models.sizing import measure_files
from twofold.tools.cli.main import main

from tests.parallel.ranks_in_process import RanksInProcess
from tests.tiny_models.table import EXAMPLES
from tests.tiny_models.writing import TinyModel, write_tiny_model

MODELS = EXAMPLES
AMPLE = 2**40


def fit(config: EngineConfig, parallel: ParallelConfig, available_bytes: int = AMPLE) -> RanksFit:
    return fit_ranks(config, parallel, open_model_files(config.model), available_bytes)


def check(config: EngineConfig, parallel: ParallelConfig) -> None:
    """Compare the prediction with loaded workers; rank 0 has the rest of the model."""
    predicted = [each.weight_bytes for each in fit(config, parallel).ranks]
    loaded = RanksInProcess(config, parallel)
    assert predicted[1:] == [loaded.workers[rank].num_bytes for rank in sorted(loaded.workers)]
    if not parallel.num_redundant_experts:
        size = measure_files(open_model_files(config.model))
        assert sum(predicted) == size.dense_bytes + size.expert_bytes


@pytest.mark.parametrize("family", MODELS)
def test_every_family_is_estimated_as_loaded(family: str, tmp_path: Path) -> None:
    config = EngineConfig(model=str(write_tiny_model(tmp_path, MODELS[family])), cpu_threads=1)
    check(config, ParallelConfig(3, tensor_parallel_min_bytes=0))


def test_flags_of_ranks_decide_the_shares(tmp_path: Path) -> None:
    model = str(write_tiny_model(tmp_path / "model", TinyModel()))
    uses = tmp_path / "uses.npz"
    of_model = open_model_files(model).config
    num_experts = of_model.routed.num_experts
    counts = np.arange(len(of_model.moe_layers) * num_experts).reshape(-1, num_experts)
    write_statistics(uses, counts.astype(np.int64))
    config = EngineConfig(model=model, cpu_threads=1, init_expert_location=str(uses))
    check(config, ParallelConfig(2, num_redundant_experts=2))
    check(config, ParallelConfig(2, enable_expert_parallel=False, tensor_parallel_min_bytes=0))
    whole = fit(config, ParallelConfig(2, enable_expert_parallel=False)).ranks[1]
    assert (whole.weight_bytes, whole.kv_cache_bytes) == (0, 0)


def test_each_machine_holds_its_ranks(tmp_path: Path) -> None:
    config = EngineConfig(model=str(write_tiny_model(tmp_path, TinyModel())), cpu_threads=1)
    second = ParallelConfig(4, nnodes=2, node_rank=1, master_addr="10.0.0.5")
    plan = fit(config, second)
    assert [each.machine for each in plan.ranks] == [0, 0, 1, 1]
    assert sum(plan.machine_bytes) == sum(each.total_bytes for each in plan.ranks)
    assert plan.fits
    lines = list(plan.lines())
    assert "predicted" in lines[0]
    assert lines[-1].endswith("it fits")
    assert fit(config, second, plan.machine_bytes[1]).fits
    small = fit(config, second, plan.machine_bytes[1] - 1)
    assert not small.fits
    assert list(small.lines())[-1].endswith("it does not fit")


def test_the_command_marks_its_figures_as_estimates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(write_tiny_model(tmp_path, TinyModel()))
    assert main(["fit", model, "-tp", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [each["rank"] for each in json.loads(out)["predicted"]["ranks"]] == [0, 1]
    assert main(["fit", model, "-tp", "2", "--max-total-tokens", "64"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("fit: predicted memory of 2 ranks")
    assert "for 64 tokens" in out
    assert main(["fit", model, "-tp", "2", "--accelerator", "cuda"]) == 2
    assert "whose ranks compute on CPUs" in capsys.readouterr().err
