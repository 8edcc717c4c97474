"""From prompt to page: a real engine answers, and the database holds that request, decision by decision."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from twofold.api.config import EngineConfig
from twofold.api.types import GenerationRequest, SamplingParams
from twofold.engine import Engine
from twofold.telemetry import queries
from twofold.telemetry.sink import CacheEventKind, Placement
from twofold.telemetry.summary import summarise
from twofold.telemetry.writer import open_sink

from tests.telemetry import table_queries
from tests.tiny_models.writing import TinyModel, write_tiny_model

PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [12, 13, 14])
ANSWER_TOKENS = 12


def answer(model: Path, url: str, accelerator: str) -> Engine:
    """An engine that has answered both prompts and is closed, its telemetry written."""
    sink = open_sink(url)
    config = EngineConfig(
        model=str(model),
        accelerator=accelerator,
        gpu_experts_ratio=None if accelerator == "none" else 0.5,
        policy="lru",
        max_num_batched_tokens=4,
    )
    engine = Engine.load(config, telemetry=sink)
    for prompt in PROMPTS:
        engine.generate(tuple(prompt), SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True))
    engine.close()
    sink.close()
    return engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_tiny_model(path, TinyModel())
    return path


@pytest.mark.parametrize("accelerator", ["none", "emulated:rtx4090-pcie4"])
def test_rows_agree_with_the_engines_own_counters(model: Path, tmp_path: Path, accelerator: str) -> None:
    url = f"sqlite:///{tmp_path / 't.db'}"
    engine = answer(model, url, accelerator)
    placement = engine.stats().placement
    summary = summarise(url)
    assert summary["hits"] == placement.hits
    assert summary["cpu_misses"] == placement.cpu_misses
    assert summary["fetched"] == placement.fetched
    assert summary["uploads"] == placement.uploads
    assert summary["evictions"] == placement.evictions
    assert summary["h2d_bytes"] == placement.h2d_bytes
    assert summary["dropped_events"] == {}
    assert summary["emulated"] == accelerator.startswith("emulated")
    assert summary["clock"] == ("virtual" if accelerator.startswith("emulated") else "wall")
    # The first token of an answer comes from the prompt's last position, so it needs no step of its own.
    assert summary["prefill_tokens"] + summary["decode_tokens"] == sum(map(len, PROMPTS)) + 2 * (
        ANSWER_TOKENS - 1
    )
    if accelerator == "none":
        assert summary["hits"] == summary["uploads"] == 0
    else:
        assert summary["hits"] > 0
        assert summary["uploads"] > 0


def test_every_token_and_layer_of_a_request_is_there(model: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 't.db'}"
    engine = answer(model, url, "emulated:rtx4090-pcie4")
    info = engine.info
    db = queries.open_database(url)
    (run,) = queries.runs(db)
    requests = queries.requests(db, run)[::-1]
    assert [request.finish_reason for request in requests] == ["length", "length"]
    for request, prompt in zip(requests, PROMPTS, strict=True):
        assert (request.prompt_tokens, request.completion_tokens) == (len(prompt), ANSWER_TOKENS)
        assert request.submitted_s <= request.first_token_s <= request.finished_s  # type: ignore[operator]
        tokens = queries.request_tokens(db, run, request.number)
        assert tokens.position.tolist() == list(range(len(prompt) + ANSWER_TOKENS - 1))
        assert (tokens.num_by_placement.sum(axis=2) == info.top_k).all()
        assert (tokens.experts >= 0).all()
        assert (tokens.experts < info.num_experts).all()
        for place in Placement:
            np.testing.assert_array_equal(
                (tokens.placement == place).sum(axis=2), tokens.num_by_placement[:, :, place]
            )
        assert (np.diff(tokens.weights, axis=2) <= 0).all(), "experts come by descending weight"
        assert (tokens.layer_us > 0).all()
        assert (tokens.step_us >= tokens.layer_us.sum(axis=1) - 1e-3).all()
        assert (np.diff(tokens.step) >= 0).all()


def test_uploads_and_decisions_belong_to_steps_and_fit_together(model: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 't.db'}"
    info = answer(model, url, "emulated:rtx4090-pcie4").info
    db = queries.open_database(url)
    (run,) = queries.runs(db)
    uploads, events = queries.uploads(db, run), table_queries.cache_events(db, run)
    assert uploads
    for upload in uploads:
        assert upload.size_bytes == info.expert_bytes
        assert 0 <= upload.layer < info.num_layers
        assert 0 <= upload.expert < info.num_experts
        assert upload.queued_us <= upload.begin_us < upload.end_us
    resident: set[tuple[int, int]] = set()
    for event in events:
        expert = (event.layer, event.expert)
        if event.kind == CacheEventKind.PUBLISH:
            assert expert not in resident
            resident.add(expert)
        elif event.kind == CacheEventKind.EVICT:
            assert expert in resident
            resident.remove(expert)
        assert len(resident) <= info.num_slots


def test_a_request_that_is_refused_leaves_no_row(model: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 't.db'}"
    sink = open_sink(url)
    engine = Engine.load(EngineConfig(model=str(model), accelerator="none"), telemetry=sink)
    too_long = GenerationRequest(
        tuple([5] * (engine.max_context + 1)), SamplingParams(), lambda _chunk: None, "too-long"
    )
    with pytest.raises(Exception, match="context"):
        engine.submit(too_long)
    engine.close()
    sink.close()
    db = queries.open_database(url)
    assert queries.requests(db, queries.runs(db)[0]) == []
