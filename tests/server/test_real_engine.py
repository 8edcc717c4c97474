"""The server with the real engine and a tiny random model: behaviour that needs both."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from live_server import HTTP, serving
from twofold.api.config import EngineConfig, ServerConfig
from twofold.api.request_record import RequestRecord
from twofold.api.types import SamplingParams
from twofold.engine import Engine
from twofold.server.app import create_app
from twofold.server.bridge.models.sampling_defaults import sampling_defaults
from twofold.telemetry.sink import TelemetrySink

from tests.tiny_models.writing import TinyModel, write_tiny_model

WAIT_S = 20
LONG = 60_000
"""Tokens of a context in which an answer runs far longer than any test."""


class RecordingSink(TelemetrySink):
    """Keeps how requests ended."""

    def __init__(self) -> None:
        self.ended: list[RequestRecord] = []
        self.some_ended = threading.Event()

    def request(self, record: RequestRecord) -> None:
        if record.finish_reason is not None:
            self.ended.append(record)
            self.some_ended.set()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny", TinyModel(max_position_embeddings=LONG)
    )


@pytest.fixture(scope="module")
def sink() -> RecordingSink:
    return RecordingSink()


@pytest.fixture(scope="module")
def engine(model: Path, sink: RecordingSink) -> Iterator[Engine]:
    config = EngineConfig(
        model=str(model),
        accelerator="emulated:rtx4090-pcie4",
        gpu_experts_ratio=0.5,
        cpu_threads=1,
        max_total_tokens=LONG,
        max_num_seqs=4,
    )
    loaded = Engine.load(config, telemetry=sink)
    loaded.start()
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def url(engine: Engine, model: Path) -> Iterator[str]:
    app = create_app(engine, ServerConfig(), sampling_defaults=sampling_defaults(model))
    with serving(app) as base:
        yield base


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=WAIT_S) as made:
        yield made


def ask(client: openai.OpenAI, text: str, **options):
    options = {"temperature": 0, "max_tokens": 24} | options
    return client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": text}], **options
    )


def test_the_answer_equals_the_engines_for_the_rendered_conversation(engine, client):
    answer = ask(client, "the king and the fox")
    prompt = engine.tokenizer.encode(
        engine.tokenizer.apply_chat_template([{"role": "user", "content": "the king and the fox"}])
    )
    texts: list[str] = []
    usage = engine.generate(
        prompt, SamplingParams(max_tokens=24), lambda chunk: texts.append(chunk.text), request_id="direct"
    )
    assert answer.choices[0].message.content == "".join(texts)
    assert answer.usage.prompt_tokens == usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == usage.completion_tokens


def test_streamed_and_whole_answers_are_the_same(client):
    whole = ask(client, "a miller", temperature=1.0, seed=5)
    pieces = list(
        ask(client, "a miller", temperature=1.0, seed=5, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces if chunk.choices)
    assert text == whole.choices[0].message.content
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert pieces[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_concurrent_answers_equal_each_alone(client):
    prompts = [f"tale number {number}" for number in range(8)]
    alone = [ask(client, prompt).choices[0].message.content for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: ask(client, prompt).choices[0].message.content, prompts))
    assert together == alone
    assert len(set(alone)) > 1


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(client):
    text = ask(client, "the king", extra_body={"ignore_eos": True}).choices[0].message.content
    stop = text[8:11]
    stopped = ask(client, "the king", stop=[stop], extra_body={"ignore_eos": True})
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].message.content == text[: text.index(stop)]


def test_max_tokens_is_kept_exactly(client):
    answer = ask(client, "the king", max_tokens=7, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 7
    assert answer.choices[0].finish_reason == "length"


def test_a_client_that_hangs_up_frees_its_place(client, sink):
    sink.some_ended.clear()
    stream = ask(client, "the king", max_tokens=LONG, stream=True, extra_body={"ignore_eos": True})
    chunks = iter(stream)
    next(chunks)
    assert not sink.some_ended.is_set()
    stream.close()
    assert sink.some_ended.wait(WAIT_S)
    assert sink.ended[-1].finish_reason == "cancelled"


def test_a_prompt_longer_than_the_context_is_400(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=[5] * LONG)
    assert caught.value.code == "context_length_exceeded"


def test_a_token_outside_the_vocabulary_is_400(client):
    with pytest.raises(openai.BadRequestError, match="outside the vocabulary"):
        client.completions.create(model="tiny", prompt=[2_000_000])


def test_the_answers_headers_and_metrics_mark_the_emulation(url, client):
    ask(client, "the king")
    health = HTTP.get(f"{url}/health")
    assert health.headers["x-twofold-accelerator"] == "emulated:rtx4090-pcie4"
    assert health.headers["x-twofold-clock"] == "virtual"
    assert health.json()["emulated"] is True
    metrics = dict(
        line.rsplit(" ", 1)
        for line in HTTP.get(f"{url}/metrics").text.splitlines()
        if not line.startswith("#")
    )
    placed = sum(
        float(metrics[f'twofold:expert_{name}_total{{model_name="tiny"}}'])
        for name in ("hits", "cpu_misses", "fetched")
    )
    assert placed > 0
    assert 0 <= float(metrics['vllm:kv_cache_usage_perc{model_name="tiny"}']) < 1


def test_routed_experts_are_npy_in_base64(client: openai.OpenAI, engine: Engine) -> None:
    requested = {"return_routed_experts": True, "ignore_eos": True}
    request = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 6, "temperature": 0.0}
    whole = client.completions.create(**request, extra_body=requested)
    routed = decode_npy(whole.choices[0].model_extra["routed_experts"])
    tokens = whole.usage.prompt_tokens + whole.usage.completion_tokens - 1
    assert routed.shape == (tokens, engine.info.num_layers, engine.info.top_k)
    assert routed.max() < engine.info.num_experts
    chunks = list(client.completions.create(**request, stream=True, extra_body=requested))
    streamed = [
        c.choices[0].model_extra["routed_experts"]
        for c in chunks
        if "routed_experts" in (c.choices[0].model_extra or {})
    ]
    assert len(streamed) == 1, "only the last chunk carries it"
    assert np.array_equal(decode_npy(streamed[0]), routed)
    plain = client.completions.create(**request)
    assert "routed_experts" not in (plain.choices[0].model_extra or {})


def decode_npy(text: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


def test_an_earlier_prompt_is_found_with_the_same_salt(client: openai.OpenAI, url: str) -> None:
    prompt = [7, 5, 6] * 15

    def found(**fields: Any) -> int:
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, extra_body=fields)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert [found(), found(), found(cache_salt="mine"), found(cache_salt="mine")] == [0, 32, 0, 32]
    metrics = HTTP.get(f"{url}/metrics").text
    assert 'vllm:prefix_cache_hits_total{model_name="tiny"}' in metrics
