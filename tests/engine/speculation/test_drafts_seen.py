"""What a run reports of drafts: telemetry's steps and requests, statistics, metrics and usage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from twofold.api.config import EngineConfig, ServerConfig
from twofold.api.request_record import RequestRecord
from twofold.api.types import RunInfo, SamplingParams, SpeculationCounts, StepRecord
from twofold.engine import Engine
from twofold.models.bundled import bundled_model_path
from twofold.server.app import app_of
from twofold.server.bridge.models.state import ServerState
from twofold.telemetry.sink import TelemetrySink

from tests.engine.model_runs import random_prompt
from tests.engine.speculation.speculated_answers import NGRAM, Asked, ScriptedDrafter, answers, use_drafter
from tests.tiny_models.writing import TinyModel, write_tiny_model


@dataclass
class Sink(TelemetrySink):
    steps: list[StepRecord] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)

    def begin_run(self, run: RunInfo) -> None: ...
    def step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def request(self, record: RequestRecord) -> None:
        self.requests.append(record)


def test_steps_and_requests_count_their_drafts(tmp_path: Path) -> None:
    model = str(write_tiny_model(tmp_path, TinyModel(num_layers=2)))
    requested = Asked(tuple(random_prompt(9, 1)), SamplingParams(max_tokens=14, ignore_eos=True))
    plain = Engine.load(EngineConfig(model=model, accelerator="none", cpu_threads=1))
    answer = answers(plain, [requested])[0].tokens
    assert plain.stats().speculation is None
    plain.close()
    sink = Sink()
    engine = Engine.load(
        EngineConfig(model=model, accelerator="none", cpu_threads=1, speculative_config=NGRAM), telemetry=sink
    )
    # 13 tokens after the prompt's: 4 + 4, then one wrong draft, 1, then 4, of which the last is not drafted.
    known = {requested[:2]: (*answer[:9], 7, *answer[10:])}
    use_drafter(engine, ScriptedDrafter(known, 0.0, depth=3))
    assert answers(engine, [requested])[0].tokens == answer
    drafted = [(step.num_drafted_tokens, step.num_accepted_tokens) for step in sink.steps]
    assert drafted == [(0, 0), (3, 3), (3, 3), (3, 0), (3, 3)]
    assert [step.num_decode_tokens for step in sink.steps] == [0, 4, 4, 4, 4]
    assert sink.steps[0].num_prefill_tokens == 9
    last = sink.requests[-1]
    assert (last.accepted_tokens, last.rejected_tokens) == (9, 3)
    assert engine.stats().speculation == SpeculationCounts(4, 12, 9, (3, 3, 3))
    engine.close()


@pytest.fixture
def client() -> Iterator[TestClient]:
    state = ServerState(ServerConfig(), None)
    config = EngineConfig(
        model=str(bundled_model_path()),
        accelerator="none",
        cpu_threads=1,
        speculative_config='{"method": "prediction", "adaptive": false}',
    )
    engine = Engine.load(config)
    engine.start()
    state.ready(engine)
    yield TestClient(app_of(state), base_url="http://localhost")
    engine.close()


def test_a_prediction_is_counted_in_usage_and_metrics(client: TestClient) -> None:
    body = {"messages": [{"role": "user", "content": "Tell me a tale."}], "max_tokens": 40, "temperature": 0}
    with client:
        plain = client.post("/v1/chat/completions", json=body).raise_for_status().json()
        text = plain["choices"][0]["message"]["content"]
        parts = [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]
        for content in (text, parts):
            requested = body | {"prediction": {"type": "content", "content": content}}
            found = client.post("/v1/chat/completions", json=requested).raise_for_status().json()
            assert found["choices"][0]["message"] == plain["choices"][0]["message"]
            details = found["usage"]["completion_tokens_details"]
            assert details["accepted_prediction_tokens"] > 10
        wrong = client.post("/v1/chat/completions", json=body | {"prediction": {"type": "content"}})
        assert wrong.status_code == 400
        assert "prediction.content" in wrong.json()["error"]["message"]
        metrics = client.get("/metrics").text
    assert "completion_tokens_details" not in plain["usage"]
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert f"vllm:spec_decode_{name}_total{{" in metrics
