"""Recordings of routed experts against the routing returned to requests, and failures of a dump."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from twofold.api.config import EngineConfig
from twofold.api.control import Resize
from twofold.api.errors import ConfigError, RequestError
from twofold.api.types import Chunk, GenerationRequest, SamplingParams
from twofold.engine import Engine
from twofold.engine.expert_recording import SAMPLED
from twofold.engine.waiting import Waiter
from twofold.experts import expert_recordings
from twofold.experts.expert_recordings import ForwardPass, Recording
from twofold.experts.expert_statistics import read_statistics

from tests.tiny_models.writing import TinyModel, write_tiny_model

LAYERS, EXPERTS, TOP_K = 3, 8, 2
MOE_LAYERS = [0, 2, 3]
"""Layer 1 of 4 has no experts; SGLang's files have a row of zeros for it."""
EMULATED = "emulated:rtx4090-pcie4"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = TinyModel(num_layers=4, mlp_only_layers=(1,), num_experts=EXPERTS, top_k=TOP_K)
    return write_tiny_model(tmp_path_factory.mktemp("recorded") / "tiny", shape)


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[Engine]:
    loaded = load(model, tmp_path)
    yield loaded
    loaded.close()


def load(model: Path, directory: Path, **settings: Any) -> Engine:
    defaults = {"accelerator": EMULATED, "gpu_experts_ratio": 0.3, "cpu_threads": 1, "max_total_tokens": 1024}
    directories = {"expert_distribution_recorder_dir": str(directory / "dumps")}
    return Engine.load(EngineConfig(model=str(model), **(defaults | directories | settings)))


def answer(engine: Engine, number: int, tokens: int = 9) -> np.ndarray[Any, Any]:
    """The routing of every token that one request computed, [tokens, layers, top_k]."""
    reported: list[Any] = []

    def take(chunk: Chunk) -> None:
        if chunk.routed_experts is not None:
            reported.append(chunk.routed_experts)

    waiter = Waiter(take)
    prompt = tuple(int(token) for token in np.random.default_rng(number).integers(5, 40, 20 + number))
    request = GenerationRequest(
        prompt,
        SamplingParams(max_tokens=tokens, ignore_eos=True),
        waiter.receive,
        f"r{number}",
        return_routed_experts=True,
    )
    engine.submit(request)
    waiter.wait(engine.step, lambda: None)
    return np.concatenate(reported)


def counted(routing: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Brute force: [layers, experts]."""
    counts = np.zeros((LAYERS, EXPERTS), np.int64)
    for token in routing:
        for layer, experts in enumerate(token):
            for expert in experts:
                counts[layer, expert] += 1
    return counts


def files(summary: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The npz and SGLang's file of a dump."""
    paths = [Path(path) for path in summary["files"]]
    npz = next(path for path in paths if path.suffix == ".npz")
    recorded = next(path for path in paths if path.suffix == ".pt" and path.name.startswith("expert_"))
    return np.load(npz), torch.load(recorded, weights_only=True)


def test_counts_are_those_of_the_recorded_routing_and_of_the_placements(engine: Engine) -> None:
    answer(engine, 50)  # before recording starts
    engine.recording.start()
    before = engine.stats().placement
    routing = [answer(engine, 1), answer(engine, 2)]
    # Another number of slots in between makes another executor, which goes on counting.
    engine.control.resize(Resize(gpu_experts_ratio=0.8))
    routing.append(answer(engine, 3))
    engine._finish_background_work()
    after, summary = engine.stats().placement, engine.recording.dump()
    ours, sglang = files(summary)
    expected = counted(np.concatenate(routing))
    assert (ours["logical_count"] == expected[None]).all()
    assert set(sglang) == {"rank", "logical_count", "average_utilization_rate_over_window"}
    assert sglang["logical_count"].shape == (1, 4, EXPERTS)
    assert (sglang["logical_count"].numpy()[0, MOE_LAYERS] == expected).all()
    assert not sglang["logical_count"][0, 1].any()
    hits, fetched = after.hits - before.hits, after.fetched - before.fetched
    assert hits > 0
    assert int(ours["hit_count"].sum()) == hits
    assert int(ours["gpu_count"].sum()) == summary["gpu_experts"] == hits + fetched
    assert summary["hit_rate"] == pytest.approx(hits / expected.sum(), abs=1e-6)
    assert (ours["gpu_count"] <= ours["logical_count"]).all()
    for path in summary["files"]:
        assert (read_statistics(path, LAYERS, EXPERTS, moe_layers=MOE_LAYERS) == expected).all()


def test_pass_and_token_counts_have_sglangs_names(engine: Engine) -> None:
    engine.recording.start("per_pass")
    routing = answer(engine, 4)
    summary = engine.recording.dump()
    _, by_pass = files(summary)
    records = by_pass["records"]
    assert len(records) == summary["forward_passes"] == summary["kept_passes"] == 9
    assert all(record["rank"] == 0 and record["gatherer_key"] == "primary" for record in records)
    passes = [record["global_physical_count"].numpy()[MOE_LAYERS] for record in records]
    assert (sum(passes) == counted(routing)).all()
    assert (passes[1] == counted(routing[-8:-7])).all()
    numbers = [record["forward_pass_id"] for record in records]
    assert numbers == list(range(numbers[0], numbers[0] + 9))
    assert by_pass["last_physical_to_logical_map"].tolist() == [list(range(EXPERTS))] * 4

    engine.recording.start("per_token")
    routing = answer(engine, 5)
    ours, by_token = files(engine.recording.dump())
    records = by_token["records"]
    assert {-1} == {int(expert) for expert in records[0]["topk_ids_of_layer"][1].flatten()}
    tokens = np.concatenate([record["topk_ids_of_layer"].numpy()[MOE_LAYERS] for record in records], axis=1)
    assert (tokens.transpose(1, 0, 2) == routing).all()
    positions = [position for record in records for position in record["positions"]]
    assert positions == list(range(len(routing)))
    where = np.concatenate([record["placement_of_layer"].numpy()[MOE_LAYERS] for record in records], axis=1)
    on_gpu = np.zeros((LAYERS, EXPERTS), np.int64)
    for layer in range(LAYERS):
        np.add.at(on_gpu[layer], tokens[layer][where[layer] != 1], 1)
    assert (on_gpu == ours["gpu_count"][0]).all()
    assert (sum(record["gpu_physical_count"].numpy()[MOE_LAYERS] for record in records) == on_gpu).all()
    assert (ours["logical_count"][0] == counted(routing)).all()
    assert "input_ids" not in records[0]


def test_stat_approx_counts_every_eighth_step(engine: Engine) -> None:
    engine.recording.start("stat_approx")
    routing = answer(engine, 6, tokens=2 * SAMPLED)
    prompt = len(routing) - (2 * SAMPLED - 1)
    summary = engine.recording.dump()
    assert summary["forward_passes"] == 2
    expected = counted(np.concatenate([routing[:prompt], routing[prompt + SAMPLED - 1 :][:1]]))
    assert (files(summary)[0]["logical_count"][0] == expected).all()


def test_stop_dump_and_dump_again(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="start a recording first"):
        engine.recording.dump()
    assert engine.recording.stop() == {"recording": False}
    engine.recording.start()
    with pytest.raises(RequestError, match="nothing was recorded since"):
        engine.recording.dump()
    first = answer(engine, 7)
    engine.recording.stop()
    answer(engine, 8)
    assert (files(engine.recording.dump())[0]["logical_count"][0] == counted(first)).all()
    with pytest.raises(RequestError, match="nothing was recorded since"):
        engine.recording.dump()
    engine.recording.start()
    second = answer(engine, 9)
    assert engine.recording.start()["discarded_passes"] == 9
    third = answer(engine, 10)
    assert (files(engine.recording.dump())[0]["logical_count"][0] == counted(third)).all()
    assert not (counted(second) == counted(third)).all()
    with pytest.raises(RequestError, match="per_pass"):
        engine.recording.start("all")
    assert len(list((tmp_path / "dumps").iterdir())) == 4


def test_what_cannot_be_written_is_still_there(engine: Engine, tmp_path: Path) -> None:
    blocked = tmp_path / "dumps"
    blocked.write_text("a file")
    engine.recording.start("per_pass")
    routing = answer(engine, 11)
    with pytest.raises(ConfigError, match=r"--expert-distribution-recorder-dir .*cannot be created"):
        engine.recording.dump()
    routing = np.concatenate([routing, answer(engine, 12)])
    blocked.unlink()
    summary = engine.recording.dump()
    assert (files(summary)[0]["logical_count"][0] == counted(routing)).all()
    numbers = [record["forward_pass_id"] for record in files(summary)[1]["records"]]
    assert numbers == sorted(numbers)
    assert len(numbers) == 18


def test_the_flag_records_from_the_start_and_writes_at_the_end(model: Path, tmp_path: Path) -> None:
    engine = load(model, tmp_path, record_gpu_expert_distribution=True)
    routing = answer(engine, 13)
    engine.close()
    masks, counts = sorted((tmp_path / "dumps").glob("*.pt"), key=lambda path: path.name, reverse=True)
    assert (read_statistics(counts, LAYERS, EXPERTS, moe_layers=MOE_LAYERS) == counted(routing)).all()
    resident = torch.load(masks, weights_only=True)["gpu_expert_masks"]
    assert resident.shape == (1, 4, EXPERTS)
    assert resident.dtype == torch.bool
    assert 0 < int(resident.sum()) <= round(0.3 * LAYERS * EXPERTS)
    load(model, tmp_path / "idle", record_gpu_expert_distribution=True).close()
    assert not (tmp_path / "idle").exists()


def test_kept_passes_are_bounded_by_number_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_recordings, "MAX_BYTES", 4 * 3 * 16 * 4)
    for most, kept in ((3, [7, 8, 9]), (100, [6, 7, 8, 9])):
        recording = Recording("per_pass", np.zeros((3, 4, 4), np.int64), most)
        for number in range(10):
            recording.keep(ForwardPass(number, np.zeros((3, 4, 4), np.int32)))
        assert [each.number for each in recording.passes] == kept
        assert recording.summary()["dropped_passes"] == 10 - len(kept)


def test_sglangs_variable_has_lower_precedence_than_ours() -> None:
    from argparse import Namespace

    from twofold.api.settings import from_namespace

    theirs = {"SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR": "/theirs"}
    ours = {"TWOFOLD_EXPERT_DISTRIBUTION_RECORDER_DIR": "/ours"}
    for environment, expected in (({}, "."), (theirs, "/theirs"), (theirs | ours, "/ours")):
        config = from_namespace(EngineConfig, Namespace(), environment)
        assert config.expert_distribution_recorder_dir == expected
