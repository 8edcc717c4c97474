"""/v1/embeddings and Ollama's routes, by OpenAI's and Ollama's own clients and a real engine."""

from __future__ import annotations

import base64
import json
import queue
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import ollama
import openai
import pytest
from fake_engine import FakeEngine
from live_server import HTTP, serving
from twofold.api.config import EngineConfig, ServerConfig
from twofold.api.errors import CapacityError
from twofold.api.pooling import ModelPooling, Pooling
from twofold.api.types import GenerationRequest, SamplingParams
from twofold.engine import Engine
from twofold.server.app import create_app

from tests.engine.embedding_models import F32, write_embedding_model

TEXTS = ["the fox and the hen", "a", "singing in the rain and the sun", "the fox and the goose"]
CONTEXT = 48


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Engine]]:
    path = write_embedding_model(tmp_path_factory.mktemp("models") / "tiny", tied=True)
    config = EngineConfig(
        model=str(path),
        max_model_len=CONTEXT,
        max_num_seqs=2,
        max_waiting=1,
        pooler_config='{"is_matryoshka": true}',
    )
    engine = Engine.load(config)
    engine.start()
    with serving(create_app(engine, ServerConfig())) as base:
        yield base, engine
    engine.close()


def expected(engine: Engine, prompt: list[int], pooling: Pooling | None = None) -> F32:
    """The engine's own vector, which its tests compare with sentence-transformers' arithmetic."""
    vectors: queue.SimpleQueue[F32 | None] = queue.SimpleQueue()
    engine.submit(
        GenerationRequest(
            tuple(prompt),
            SamplingParams(max_tokens=0),
            lambda chunk: vectors.put(chunk.pooled),
            uuid.uuid4().hex,
            pooling=pooling or Pooling(),
        )
    )
    vector = vectors.get(timeout=20)
    assert vector is not None
    return vector


@pytest.fixture
def client(served: tuple[str, Engine]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served[0]}/v1", api_key="unused", max_retries=0, timeout=30) as made:
        yield made


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_openais_client_gets_one_vector_per_input_in_order(
    client: openai.OpenAI, served: Any, encoding: Any
) -> None:
    """More inputs than the engine has places for."""
    engine = served[1]
    requested = {} if encoding is None else {"encoding_format": encoding}
    answer = client.embeddings.create(model="tiny", input=TEXTS, **requested)
    assert [each.index for each in answer.data] == [0, 1, 2, 3]
    prompts = [engine.tokenizer.encode(text, add_special_tokens=True) for text in TEXTS]
    for each, prompt in zip(answer.data, prompts, strict=True):
        vector: Any = each.embedding
        if encoding == "base64":
            vector = np.frombuffer(base64.b64decode(vector), "<f4")
        np.testing.assert_array_equal(np.asarray(vector, np.float32), expected(engine, prompt))
    count = sum(map(len, prompts))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens, answer.model) == (count, count, "tiny")


def test_texts_ids_and_lists_of_either_are_the_same_inputs(client: openai.OpenAI, served: Any) -> None:
    engine = served[1]
    ids = [engine.tokenizer.encode(text, add_special_tokens=True) for text in TEXTS[:2]]
    given: list[Any] = [TEXTS[:2], ids]
    vectors = [
        [each.embedding for each in client.embeddings.create(model="tiny", input=one).data] for one in given
    ]
    singles = [
        client.embeddings.create(model="tiny", input=one).data[0].embedding for one in (TEXTS[0], ids[1])
    ]
    assert vectors[0] == vectors[1] == singles


def test_dimensions_cut_and_renormalise(client: openai.OpenAI, served: Any) -> None:
    whole, short = (
        np.array(client.embeddings.create(model="tiny", input="the fox", **requested).data[0].embedding)
        for requested in ({}, {"dimensions": 8})
    )
    assert short.shape == (8,)
    np.testing.assert_allclose(short, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)
    raw = client.embeddings.create(model="tiny", input="the fox", extra_body={"normalize": False})
    ids = served[1].tokenizer.encode("the fox", add_special_tokens=True)
    np.testing.assert_allclose(raw.data[0].embedding, expected(served[1], ids, Pooling(normalise=False)))


def test_a_named_prompt_is_put_before_the_input(client: openai.OpenAI) -> None:
    named = client.embeddings.create(model="tiny", input="the fox", extra_body={"prompt_name": "query"})
    written = client.embeddings.create(model="tiny", input="Query:the fox")
    assert named.data[0].embedding == written.data[0].embedding


def test_a_long_input_is_cut_on_demand_as_its_tokens_are(client: openai.OpenAI, served: Any) -> None:
    text = "the fox and " * 20_000
    ids = served[1].tokenizer.encode(text[:2000])
    for limit, count in ((-1, CONTEXT), (5, 5)):
        cut = client.embeddings.create(model="tiny", input=text, extra_body={"truncate_prompt_tokens": limit})
        assert cut.usage.prompt_tokens == count
        assert (
            cut.data[0].embedding
            == client.embeddings.create(model="tiny", input=ids[:count]).data[0].embedding
        )


LONG = [5] * (CONTEXT + 1)


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/embeddings", {}, "input", "required"),
        ("/v1/embeddings", {"input": ""}, "input", "empty"),
        ("/v1/embeddings", {"input": []}, "input", "at least 1"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input[1]", "the input is empty"),
        ("/v1/embeddings", {"input": ["a", 3]}, "input[1]", "string"),
        ("/v1/embeddings", {"input": [[5], []]}, "input[1]", "at least 1"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input", "at most 2048"),
        (
            "/v1/embeddings",
            {"input": [[5], LONG]},
            "input[1]",
            "input[1] is too long: 49 tokens > 48 maximum",
        ),
        ("/v1/embeddings", {"input": ["a", "fox " * 9999]}, "input[1]", "more than 48 tokens > 48 maximum"),
        ("/v1/embeddings", {"input": [[5], [320]]}, "input[1]", "token id 320 is outside the vocabulary"),
        ("/v1/embeddings", {"input": "a", "dimensions": 49}, "dimensions", "have 48 elements"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "'base64'"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "code"}, "prompt_name", "'query', 'document'"),
        ("/v1/embeddings", {"input": [5], "prompt_name": "query"}, "input", "send texts"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1"),
        ("/v1/embeddings", {"input": "a", "priority": 3}, "priority", "priority is 3"),
        ("/v1/embeddings", {"messages": [{"role": "user"}], "input": "a"}, "messages", "send input"),
        ("/api/embed", {"model": "tiny", "input": ["a", ""]}, None, "input[1]: the input is empty"),
        ("/api/embed", {"model": "tiny", "input": "fox " * 99, "truncate": False}, None, "input is too long"),
        ("/api/embed", {"model": "tiny", "input": "a", "dimensions": 49}, None, "dimensions: 49 was given"),
        ("/api/embeddings", {"model": "other", "prompt": "a"}, None, "does not exist"),
    ],
)
def test_refused_bodies(
    served: Any, path: str, body: dict[str, Any], param: str | None, message: str
) -> None:
    response = HTTP.post(served[0] + path, json=body)
    assert response.status_code == (404 if body.get("model") == "other" else 400), response.text
    error = response.json()["error"]
    if path.startswith("/api"):  # Ollama's shape: a text
        assert message in error
    else:
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert message in error["message"]


def test_ollamas_client_embeds(served: Any) -> None:
    base, engine = served
    ids = [engine.tokenizer.encode(text, add_special_tokens=True) for text in TEXTS]
    with ollama.Client(host=base, trust_env=False, timeout=30) as client:
        answer = client.embed(model="tiny:latest", input=TEXTS)
        assert answer.prompt_eval_count == sum(map(len, ids))
        for vector, prompt in zip(answer.embeddings, ids, strict=True):
            np.testing.assert_array_equal(np.asarray(vector, np.float32), expected(engine, prompt))
        assert len(client.embed(model="tiny", input="the fox", dimensions=7).embeddings[0]) == 7
        assert client.embed(model="tiny", input="fox " * 5000).prompt_eval_count == CONTEXT, "cut by default"
        assert client.embed(model="tiny", input=[]).embeddings == []
        older = client.embeddings(model="tiny", prompt=TEXTS[0]).embedding
        np.testing.assert_allclose(older, expected(engine, ids[0], Pooling(normalise=False)))
        assert client.embeddings(model="tiny", prompt="").embedding == []
        assert client.show("tiny").capabilities == ["completion", "embedding"]


def test_metrics_and_the_queue_count_each_input(served: Any) -> None:
    base = served[0]

    def read() -> dict[str, float]:
        lines = [line for line in HTTP.get(f"{base}/metrics").text.splitlines() if not line.startswith("#")]
        return {line.split("{")[0] + str("stop" in line): float(line.split()[-1]) for line in lines}

    before = read()
    HTTP.post(f"{base}/v1/embeddings", json={"input": [[5, 6], [7, 8, 9]]}).raise_for_status()
    after = read()
    grown = {name: after[name] - value for name, value in before.items()}
    assert grown["vllm:request_success_totalTrue"] == 2
    assert grown["vllm:prompt_tokens_totalFalse"] == 5
    assert grown["vllm:generation_tokens_totalFalse"] == 0
    assert grown["vllm:request_prefill_time_seconds_countFalse"] == 2
    assert grown["vllm:time_to_first_token_seconds_countFalse"] == 0
    assert grown["vllm:request_time_per_output_token_seconds_countFalse"] == 0


# ---- with the fake engine ------------------------------------------------------------------------------------------


def test_a_model_that_is_not_matryoshka_refuses_dimensions(url: str, engine: FakeEngine) -> None:
    response = HTTP.post(f"{url}/v1/embeddings", json={"input": "a", "dimensions": 2})
    assert response.status_code == 400
    assert "its files do not say that they may be cut" in response.json()["error"]["message"]
    assert HTTP.post(f"{url}/v1/embeddings", json={"input": "a", "dimensions": 3}).status_code == 200
    engine.pooling = ModelPooling(size=3, dimensions=(2,))
    assert HTTP.post(f"{url}/v1/embeddings", json={"input": "a", "dimensions": 2}).status_code == 200
    assert "it takes 2" in HTTP.post(f"{url}/v1/embeddings", json={"input": "a", "dimensions": 1}).text


def test_many_inputs_take_as_many_places_as_there_are(url: str, engine: FakeEngine) -> None:
    """The fake refuses a fifth running request."""
    answer = HTTP.post(f"{url}/v1/embeddings", json={"input": [f"w{n} x" for n in range(50)]})
    assert [each["index"] for each in answer.json()["data"]] == list(range(50))
    assert len(engine.requests) == 50
    assert {each.request_id.partition("-")[0] for each in engine.requests} == {"embeddings"}


def test_a_full_engine_is_429_and_one_that_drains_503(url: str, engine: FakeEngine) -> None:
    engine.fail_on_submit = CapacityError("full")
    assert HTTP.post(f"{url}/v1/embeddings", json={"input": "a"}).status_code == 429
    engine.fail_on_submit = CapacityError("draining", draining=True)
    response = HTTP.post(f"{url}/api/embed", json={"model": "fake-tales", "input": "a"})
    assert (response.status_code, response.json()) == (503, {"error": "draining"})


def test_a_client_that_hangs_up_frees_its_places(url: str, engine: FakeEngine) -> None:
    engine.hold.clear()
    with pytest.raises(Exception, match="timed out"):
        HTTP.post(f"{url}/v1/embeddings", json={"input": ["a", "b"]}, timeout=0.5)
    assert engine.idle.wait(20)
    assert len(engine.cancelled) == 2
    engine.hold.set()
    assert json.loads(HTTP.post(f"{url}/v1/embeddings", json={"input": "a"}).text)["data"]
