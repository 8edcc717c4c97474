"""The API as the openai client sees it, over a real socket, around a fake engine that says the prompt back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import openai
import pytest
from fake_engine import FakeEngine
from live_server import HTTP, serving
from twofold.api.config import ServerConfig
from twofold.api.types import SamplingParams
from twofold.server.app import create_app

MODEL = "fake-tales"


def ask(client: openai.OpenAI, text: str, **options):
    return client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": text}], **options
    )


def test_models_are_listed_and_found(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    card = client.models.retrieve(MODEL)
    assert (card.id, card.root, card.parent, card.type) == (MODEL, MODEL, None, "model")


def test_an_unknown_model_is_404_with_its_name(client):
    with pytest.raises(openai.NotFoundError, match=r"'gpt-9' does not exist here.*'fake-tales'") as caught:
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "a"}])
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_a_chat_answer_has_text_reason_and_usage(client):
    answer = ask(client, "once upon a time")
    assert answer.choices[0].message.content == "once upon a time "
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
        "prompt_tokens": 4,
        "completion_tokens": 4,
        "total_tokens": 8,
    }
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"


def test_a_streamed_chat_has_the_same_content_in_pieces(client):
    chunks = list(ask(client, "once upon a time", stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "once upon a time "
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_ends_with_usage_when_asked(client):
    chunks = list(ask(client, "a b c", stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == 6
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stream_ends_with_done(url):
    body = {"messages": [{"role": "user", "content": "a b"}], "stream": True}
    response = HTTP.post(f"{url}/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\ndata: [DONE]\n\n")


def test_text_completions_whole_and_streamed(client):
    whole = client.completions.create(model=MODEL, prompt="the old miller")
    assert whole.choices[0].text == "the old miller "
    assert whole.object == "text_completion"
    streamed = client.completions.create(model=MODEL, prompt="the old miller", stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "the old miller "


def test_a_completion_takes_token_ids(client, engine):
    client.completions.create(model=MODEL, prompt=[5, 6, 7])
    assert engine.requests[-1].prompt_token_ids == (5, 6, 7)


def test_content_may_be_a_list_of_text_parts(client):
    parts = [{"type": "text", "text": "once "}, {"type": "text", "text": "upon"}]
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": parts}])
    assert answer.choices[0].message.content == "once upon "


def test_silence_means_openais_defaults(client, engine):
    ask(client, "a b c")
    assert engine.requests[-1].sampling == SamplingParams(temperature=1.0, top_p=1.0, max_tokens=64 - 3)


def test_the_models_own_defaults_precede_openais(engine):
    defaults = SamplingParams(temperature=0.6, top_p=0.95, top_k=20)
    with serving(create_app(engine, ServerConfig(), sampling_defaults=defaults)) as url:
        HTTP.post(f"{url}/v1/completions", json={"prompt": "a", "top_p": 0.5})
    sampling = engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.5, 20)


def test_every_sampling_field_arrives(client, engine):
    extra = {"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": True}
    ask(
        client,
        "a b c",
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        seed=11,
        stop=["x", "y"],
        max_completion_tokens=2,
        max_tokens=3,
        extra_body=extra,
    )
    assert engine.requests[-1].sampling == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        repetition_penalty=1.2,
        seed=11,
        max_tokens=2,
        stop=("x", "y"),
        ignore_eos=True,
    )


def test_an_answer_cut_by_max_tokens_finishes_with_length(client):
    answer = ask(client, "a b c d", max_tokens=2)
    assert answer.choices[0].message.content == "a b "
    assert answer.choices[0].finish_reason == "length"


def test_a_wish_beyond_the_context_is_cut_to_it(client, engine):
    ask(client, "a b c d", max_tokens=10**12)
    assert engine.requests[-1].sampling.max_tokens == 60


def test_unknown_fields_are_ignored(client):
    extra = {
        "user": "u",
        "metadata": {"a": 1},
        "made_up": [1, {"b": None}],
        "store": True,
        "top_logprobs": None,
    }
    assert ask(client, "a", extra_body=extra).choices[0].message.content == "a "


@pytest.mark.parametrize("name", ["x-twofold-accelerator", "x-twofold-clock"])
@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nothing", "/v1/completions"])
def test_every_answer_names_what_computed_it(url, path, name):
    expected = {"x-twofold-accelerator": "emulated:rtx4090-pcie4", "x-twofold-clock": "virtual"}
    assert HTTP.get(url + path).headers[name] == expected[name]


def test_a_request_id_is_given_or_echoed(url):
    assert len(HTTP.get(f"{url}/health").headers["x-request-id"]) == 32
    echoed = HTTP.get(f"{url}/health", headers={"x-request-id": "trace-7"})
    assert echoed.headers["x-request-id"] == "trace-7"
    hostile = HTTP.get(f"{url}/health", headers={"x-request-id": "a b<script>"})
    assert len(hostile.headers["x-request-id"]) == 32


TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a b"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_a_trace_is_kept_with_its_request_and_returned(url, engine, path, body):
    given = f"00-{TRACE}-b7ad6b7169203331-01"
    answer = HTTP.post(url + path, json=body, headers={"traceparent": given})
    assert answer.headers["traceresponse"] == given
    assert engine.requests[-1].origin.trace_id == TRACE
    for invalid in ("nonsense", given.replace("0a", "0A"), f"00-{'0' * 32}-b7ad6b7169203331-01"):
        answer = HTTP.post(url + path, json=body, headers={"traceparent": invalid})
        assert "traceresponse" not in answer.headers
        assert engine.requests[-1].origin.trace_id == ""


def test_several_clients_at_once_get_their_own_answers(engine, url):
    engine.config = replace(engine.config, max_num_seqs=16)

    def one(number: int) -> str:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            stream = ask(client, f"this is request {number}", stream=number % 2 == 0)
            if number % 2:
                return stream.choices[0].message.content
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(16))) == [f"this is request {number} " for number in range(16)]


def test_health_reports_the_queue_and_the_accelerator(url):
    health = HTTP.get(f"{url}/health")
    assert health.status_code == 200
    body = health.json()
    assert body["status"] == "ready"
    assert body["emulated"] is True
    assert body["queue"] == {"running": 0, "waiting": 0}
    assert body["max_context"] == 64


def test_metrics_count_requests_and_tokens(client, url):
    ask(client, "a b c")
    list(ask(client, "a b", stream=True))
    lines = HTTP.get(f"{url}/metrics").text.splitlines()
    labels = f'model_name="{MODEL}"'
    assert f"vllm:prompt_tokens_total{{{labels}}} 5" in lines
    assert f"vllm:prefix_cache_queries_total{{{labels}}} 9" in lines
    assert f"vllm:prefix_cache_hits_total{{{labels}}} 7" in lines
    assert f"vllm:generation_tokens_total{{{labels}}} 5" in lines
    assert f'vllm:request_success_total{{{labels},finished_reason="stop"}} 2' in lines
    assert f"vllm:time_to_first_token_seconds_count{{{labels}}} 2" in lines
    assert f"vllm:inter_token_latency_seconds_count{{{labels}}} 3" in lines


def test_the_name_of_the_model_can_be_chosen(engine: FakeEngine):
    with serving(create_app(engine, ServerConfig(served_model_name=("tales",)))) as url:
        assert HTTP.get(f"{url}/v1/models").json()["data"][0]["id"] == "tales"
        assert HTTP.post(f"{url}/v1/completions", json={"model": "tales", "prompt": "a"}).status_code == 200
        assert HTTP.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": "a"}).status_code == 404


CHAT = {"messages": [{"role": "user", "content": "a"}]}
NAMING_ROUTES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/messages": CHAT | {"max_tokens": 4},
    "/v1/messages/count_tokens": CHAT,
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": []},
    "/api/chat": CHAT,
    "/api/generate": {"prompt": "a"},
    "/api/show": {},
    "/api/pull": {},
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/score": {"text_1": "a", "text_2": "b"},
    "/api/embed": {"input": "a"},
    "/api/embeddings": {"prompt": "a"},
}
"""Routes whose body names a model, with what else each needs."""


@pytest.mark.parametrize(
    ("served", "listed", "status"),
    [((), MODEL, 404), (("tales",), "tales", 404), (("*",), MODEL, 200), (("tales,*",), "tales", 200)],
)
def test_an_unlisted_name_is_404_unless_any_name_is_served(engine: FakeEngine, served, listed, status):
    with serving(create_app(engine, ServerConfig(served_model_name=served))) as url:
        assert [card["id"] for card in HTTP.get(f"{url}/v1/models").json()["data"]] == [listed]
        assert HTTP.get(f"{url}/v1/models/gpt-9").status_code == status
        for path, body in NAMING_ROUTES.items():
            answer = HTTP.post(url + path, json={"model": "gpt-9"} | body)
            assert answer.status_code == status, f"{path}: {answer.text}"
            if status == 404:
                assert "'gpt-9' does not exist here" in answer.text
                assert "--served-model-name '*'" in answer.text
            assert HTTP.post(url + path, json={"model": listed} | body).status_code == 200, path


def test_the_schema_of_the_api_is_served(url):
    paths = HTTP.get(f"{url}/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health"} <= set(paths)
    assert "/internal/load_samples" not in paths
