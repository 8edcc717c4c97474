"""Inspection endpoints: /tokenize, /detokenize, /version, /ready, /props, /slots and the list of models."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import twofold
from fake_engine import FakeEngine
from live_server import HTTP, serving
from twofold.api.config import ServerConfig
from twofold.api.types import GenerationRequest, RequestProgress, SamplingParams
from twofold.server.admin.inspection import SlotTable
from twofold.server.app import app_of, create_app
from twofold.server.bridge.models.state import ServerState

from tests.e2e.waiting import wait_until

HELLO = [{"role": "user", "content": "once upon"}]


@pytest.fixture(scope="module")
def shared_url() -> Iterator[str]:
    """Shared server for requests that change no state."""
    engine = FakeEngine()
    with serving(create_app(engine, ServerConfig())) as base:
        yield base
    engine.close()


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "once upon a time"}, [0, 1, 2, 3]),
        ({"prompt": ""}, []),
        ({"prompt": "a a", "model": "fake-tales", "return_token_strs": False, "unknown": 1}, [0, 0]),
        ({"messages": HELLO}, [0, 1]),
        ({"messages": HELLO, "add_generation_prompt": False}, [0, 1, 2]),
        ({"messages": HELLO, "chat_template_kwargs": {"mood": "sad"}}, [0, 1, 2]),
        ({"messages": HELLO, "max_tokens": 5, "stream": True, "temperature": 0}, [0, 1]),
        ({"prompt": "word " * 100}, [0] * 100),
    ],
)
def test_tokens_are_counted_and_given(url, body, tokens):
    answer = HTTP.post(f"{url}/tokenize", json=body)
    assert answer.json() == {"count": len(tokens), "max_model_len": 64, "tokens": tokens, "token_strs": None}


def test_tokens_have_texts_and_are_encoded_back(url):
    answer = HTTP.post(
        f"{url}/tokenize", json={"prompt": "fox, fox köning", "return_token_strs": True}
    ).json()
    assert answer["token_strs"] == ["fox, ", "fox ", "köning "]
    assert HTTP.post(f"{url}/detokenize", json={"tokens": answer["tokens"]}).json() == {
        "prompt": "fox, fox köning "
    }
    assert HTTP.post(f"{url}/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"),
    [
        ("/tokenize", {}, 400, "prompt", "required"),
        ("/tokenize", [], 400, None, ""),
        ("/tokenize", {"prompt": 7}, 400, "prompt", "string"),
        ("/tokenize", {"messages": []}, 400, "messages", "at least 1"),
        ("/tokenize", {"messages": [{"role": "user", "content": "refuse me"}]}, 400, "messages", "refused"),
        ("/tokenize", {"prompt": "word " * 5000}, 400, "prompt", "5000 tokens > 63 maximum"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model", "does not exist"),
        ("/detokenize", {}, 400, "tokens", "required"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]", "greater than"),
        ("/detokenize", {"tokens": [0, 999]}, 400, "tokens", "999 is outside the vocabulary"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]", "'a'"),
        ("/detokenize", {"tokens": [0] * 70_000}, 400, None, "65536 values"),
    ],
)
def test_what_cannot_be_tokenised_is_refused_and_named(shared_url, path, body, status, param, words):
    answer = HTTP.post(shared_url + path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_a_large_text_is_tokenised_by_way_of_the_other_process(engine):
    engine.max_context = 20_000
    with serving(create_app(engine, ServerConfig())) as url:
        for body in (
            {"prompt": "word " * 15_000},
            {"messages": [{"role": "user", "content": "word " * 15_000}]},
        ):
            assert HTTP.post(f"{url}/tokenize", json=body).json()["count"] == 15_000


@pytest.mark.parametrize("caches", [True, False])
def test_tokens_of_earlier_turns_are_kept_only_where_prefixes_are(engine, caches):
    engine.config = replace(engine.config, enable_prefix_caching=caches)
    state = ServerState(ServerConfig(), None)
    state.ready(engine)
    assert (state.default.token_cache is not None) == caches
    with serving(app_of(state)) as url:
        body = {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 2}
        assert HTTP.post(f"{url}/v1/chat/completions", json=body).status_code == 200


def test_readiness_and_version_through_the_phases(engine):
    state = ServerState(ServerConfig(api_key=("sesame",)), None)
    with serving(app_of(state)) as url:

        def seen() -> tuple[int, str]:
            answer = HTTP.get(f"{url}/ready")
            assert HTTP.head(f"{url}/ready").status_code == answer.status_code
            return answer.status_code, answer.json()["status"]

        assert seen() == (503, "loading")
        assert HTTP.get(f"{url}/version").json() == {"version": twofold.__version__}
        state.ready(engine)
        assert seen() == (200, "ready")
        state.phase = "draining"
        assert seen() == (503, "draining")
        # Monitors of a drain may still read.
        assert HTTP.get(f"{url}/slots", headers={"authorization": "Bearer sesame"}).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/props"),
        ("GET", "/slots"),
        ("GET", "/nowhere"),
    ],
)
def test_a_key_guards_whatever_is_not_for_monitors(engine, method, path):
    with serving(create_app(engine, ServerConfig(api_key=("sesame",)))) as url:
        assert HTTP.request(method, url + path, json={"prompt": "a", "tokens": []}).status_code == 401
        for monitored in ("/health", "/ready", "/version", "/metrics"):
            assert HTTP.get(url + monitored).status_code == 200
    with serving(create_app(None, ServerConfig())) as url:
        expected = 404 if path == "/nowhere" else 503
        assert HTTP.request(method, url + path, json={"prompt": "a", "tokens": []}).status_code == expected


def test_properties_name_what_runs_but_no_path(engine):
    defaults = SamplingParams(temperature=0.7, top_k=20, seed=5)
    with serving(create_app(engine, ServerConfig(), sampling_defaults=defaults)) as url:
        props = HTTP.get(f"{url}/props").json()
    assert (props["total_slots"], props["model_path"], props["chat_template"]) == (
        4,
        "fake-tales",
        "{{ messages }}",
    )
    settings = props["default_generation_settings"]
    assert (settings["n_ctx"], settings["is_processing"]) == (64, False)
    assert {name: settings["params"][name] for name in ("temperature", "top_k", "seed", "n_predict")} == {
        "temperature": 0.7,
        "top_k": 20,
        "seed": 5,
        "n_predict": -1,
    }


@pytest.mark.parametrize("names", [("model_info", "get_model_info"), ("server_info", "get_server_info")])
def test_sglangs_router_finds_the_models_name(engine, names):
    with serving(create_app(engine, ServerConfig())) as url:
        answers = [HTTP.get(f"{url}/{name}") for name in names]
        listed = HTTP.get(f"{url}/v1/models").json()["data"][0]["id"]
    assert {each.status_code for each in answers} == {200}
    assert answers[0].json() == answers[1].json()
    assert answers[0].json()["served_model_name"] == listed
    assert "/" not in answers[0].json()["model_path"]


@pytest.mark.parametrize("shows", [False, True])
def test_slots_report_the_progress_of_each_request(engine: FakeEngine, shows: bool):
    engine.hold.clear()
    with serving(create_app(engine, ServerConfig(slots_show_prompts=shows))) as url:
        body = {"prompt": "a b c", "max_tokens": 3, "temperature": 0}
        posts = [
            threading.Thread(target=HTTP.post, args=(f"{url}/v1/completions",), kwargs={"json": body})
            for _ in range(engine.config.max_num_seqs)
        ]
        posts[0].start()
        assert engine.started.wait(30)
        first, *others = HTTP.get(f"{url}/slots").json()
        for post in posts[1:]:
            post.start()
        wait_until(lambda: len(engine.control.requests()) == engine.config.max_num_seqs)
        full = HTTP.get(f"{url}/slots", params={"fail_on_no_slot": 1})
        engine.hold.set()
        for post in posts:
            post.join()
        idle = HTTP.get(f"{url}/slots").json()
    assert full.status_code == 503
    assert (first["is_processing"], first["n_prompt_tokens"], first["params"]["temperature"]) == (True, 3, 0)
    assert first["next_token"] == [{"has_next_token": True, "n_remain": 2, "n_decoded": 1}]
    assert first["request_id"].startswith("cmpl-")
    assert first.get("prompt") == ("a b c " if shows else None)
    assert [slot["is_processing"] for slot in others] == [False] * 3
    assert [slot["id"] for slot in idle] == [0, 1, 2, 3]
    assert not any(slot["is_processing"] for slot in idle)


def test_a_request_keeps_its_slot():
    request = GenerationRequest((1,), SamplingParams(), lambda chunk: None, "r")

    def live(*numbers: int) -> list[RequestProgress]:
        return [RequestProgress(request, number, 1, True, 0, 0) for number in numbers]

    table = SlotTable()
    for numbers, slots in (
        ((7, 8), [7, 8, None]),
        ((8, 9), [9, 8, None]),
        ((9, 10, 8), [9, 8, 10]),
        ((), [None] * 3),
    ):
        assert [None if p is None else p.number for p in table.places(live(*numbers), 3)] == slots
    waiting = RequestProgress(request, 11, 1, False, 0, 0)
    assert table.places([waiting], 1) == [None]


def test_models_are_listed_in_both_forms(engine, tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    engine.info = engine.info.__class__(**{**vars(engine.info), "model": str(tmp_path)})
    with serving(create_app(engine, ServerConfig(served_model_name=("tales",)))) as url:
        listed = HTTP.get(f"{url}/v1/models").json()
    (card,) = listed["data"]
    assert (card["id"], card["max_model_len"], card["root"]) == ("tales", 64, tmp_path.name)
    (model,) = listed["models"]
    assert (model["name"], model["size"], model["details"]["format"]) == ("tales", 1000, "safetensors")
    assert str(tmp_path) not in str(listed)


def test_the_schema_names_them_all(url):
    schema = HTTP.get(f"{url}/openapi.json").json()["paths"]
    assert {"/tokenize", "/detokenize", "/version", "/ready", "/props", "/slots"} <= set(schema)
    for path in ("/tokenize", "/detokenize", "/api/chat"):
        assert schema[path]["post"]["requestBody"]["required"]


def test_the_schema_is_whole(url):
    """Every reference leads somewhere, and every operation tells its refusals."""
    document = HTTP.get(f"{url}/openapi.json").json()
    text = json.dumps(document)
    assert "$defs" not in text
    referred = set(re.findall(r"#/components/schemas/([\w-]+)", text))
    assert {"Error", "Message", "OllamaMessage"} <= referred <= document["components"]["schemas"].keys()
    for path in document["paths"].values():
        for operation in path.values():
            refusals = {"401", "403", "404", "500", "503"}
            if "requestBody" in operation:
                refusals |= {"400", "408", "413", "415", "429"}
            assert {"200"} | refusals <= operation["responses"].keys()
            assert "422" not in operation["responses"]
    chat = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    validator = jsonschema.Draft202012Validator(chat | {"components": document["components"]})
    assert validator.is_valid({"messages": [{"role": "user", "content": "a"}], "temperature": 0.5})
    assert not validator.is_valid({"messages": [{"role": 7}]})


@pytest.mark.parametrize("speculates", [False, True])
def test_slots_report_whether_drafting_is_active(speculates):
    engine = FakeEngine()
    engine.speculates = speculates
    with serving(create_app(engine, ServerConfig())) as url:
        assert [slot["speculative"] for slot in HTTP.get(f"{url}/slots").json()] == [speculates] * 4
    engine.close()
