"""Several models over fake engines: one load for many requests, eviction, keep-alive, failures, states."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from fake_engine import EMULATED, FakeEngine
from live_server import HTTP, WAIT_S, serving
from twofold.api.config import ServerConfig
from twofold.api.errors import ConfigError, ModelLoadError
from twofold.api.models_config import ModelsConfig, parsed_keep_alive
from twofold.server.app import app_of
from twofold.server.bridge.models import model_manager
from twofold.server.bridge.models.served_model import ModelDescription
from twofold.server.bridge.models.state import ServerState


@dataclass
class Loaded:
    engine: Any
    closed: list[str]
    num_bytes: int = 100
    sampling_defaults: None = None
    sink: None = None

    def close(self) -> None:
        self.closed.append(self.engine.info.model)
        self.engine.close()


@dataclass
class Source:
    """A model whose engine speaks at once; `gate` holds its loading up, `problem` makes it fail."""

    path: str
    num_bytes: int = 100
    gate: threading.Event = field(default_factory=threading.Event)
    problem: Exception | None = None
    engines: list[FakeEngine] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    hold: bool = False
    limit_reason: str = ""
    """The limit that ends its context before the model's own does."""

    def __post_init__(self) -> None:
        self.gate.set()

    def describe(self) -> ModelDescription:
        return ModelDescription("FakeForCausalLM", 64, self.limit_reason)

    def required_bytes(self) -> int:
        if self.num_bytes > 1000:
            raise ConfigError(f"does not fit: {self.num_bytes} bytes are needed; would fit: a smaller format")
        return self.num_bytes

    def load(self) -> Loaded:
        assert self.gate.wait(WAIT_S)
        if self.problem is not None:
            raise self.problem
        info = dataclasses.replace(EMULATED, model=self.path, context_limit_reason=self.limit_reason)
        engine = FakeEngine(info=info)
        if self.hold:
            engine.hold.clear()
        self.engines.append(engine)
        return Loaded(engine, self.closed, self.num_bytes)


@contextlib.contextmanager
def server(
    *names: str, limits: ModelsConfig | None = None, **config: Any
) -> Iterator[tuple[str, dict[str, Source]]]:
    sources = {name: Source(f"/models/{name}") for name in names}
    state = ServerState(ServerConfig(**config), None, sources, limits or ModelsConfig(models_max=2))
    try:
        with serving(app_of(state)) as url:
            yield url, sources
    finally:
        state.close()


def complete(url: str, model: str | None, prompt: str = "one two three") -> httpx.Response:
    body = {"prompt": prompt} | ({"model": model} if model else {})
    return HTTP.post(f"{url}/v1/completions", json=body)


def states(url: str) -> dict[str, str]:
    return {card["id"]: card["status"]["value"] for card in HTTP.get(f"{url}/v1/models").json()["data"]}


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        time.sleep(0.005)


def test_a_request_loads_its_model_and_none_means_the_first() -> None:
    with server("a", "b") as (url, sources):
        assert states(url) == {"a": "unloaded", "b": "unloaded"}
        assert HTTP.get(f"{url}/health").status_code == 200
        assert complete(url, "b").json()["model"] == "b"
        assert states(url) == {"a": "unloaded", "b": "loaded"}
        assert complete(url, None).json()["model"] == "a"
        assert complete(url, "b").json()["choices"][0]["text"] == "one two three "
        assert [len(source.engines) for source in sources.values()] == [1, 1]


def test_many_first_requests_load_once_while_the_server_stays_answerable() -> None:
    with server("a", "b") as (url, sources), ThreadPoolExecutor(8) as clients:
        sources["a"].gate.clear()
        waiting = [clients.submit(complete, url, "a") for _ in range(4)]
        wait_until(lambda: states(url)["a"] == "loading")
        health = HTTP.get(f"{url}/health")
        assert (health.status_code, health.json()["models"]["a"]["state"]) == (200, "loading")
        sources["a"].gate.set()
        assert {each.result(WAIT_S).status_code for each in waiting} == {200}
        assert len(sources["a"].engines) == 1


def test_the_least_recently_used_model_is_unloaded() -> None:
    with server("a", "b", "c") as (url, sources):
        for name in ("a", "b", "a", "c"):
            complete(url, name).raise_for_status()
        assert states(url) == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        assert sources["b"].closed == ["/models/b"]
        complete(url, "b").raise_for_status()
        assert states(url) == {"a": "unloaded", "b": "loaded", "c": "loaded"}


@pytest.mark.parametrize("sizes", [(400, 500, 200), (300, 300, 700)])
def test_models_are_unloaded_until_the_memory_suffices(sizes: tuple[int, ...]) -> None:
    """The limit of memory is 1,000 bytes; the setting's own lower bound is for real models."""
    limits = ModelsConfig(models_max=0)
    object.__setattr__(limits, "models_memory_bytes", 1000)
    with server("a", "b", "c", limits=limits) as (url, sources):
        for source, size in zip(sources.values(), sizes, strict=True):
            source.num_bytes = size
            complete(url, source.path[-1]).raise_for_status()
        loaded = {name for name, state in states(url).items() if state == "loaded"}
        assert loaded == {"b", "c"}


def test_running_answers_finish_before_their_model_is_unloaded() -> None:
    with (
        server("a", "b", limits=ModelsConfig(models_max=1)) as (url, sources),
        ThreadPoolExecutor(8) as clients,
    ):
        sources["a"].hold = True
        running = [clients.submit(complete, url, "a", f"{n} two three") for n in range(3)]
        wait_until(lambda: len(sources["a"].engines) == 1 and len(sources["a"].engines[0].requests) == 3)
        other = clients.submit(complete, url, "b")
        wait_until(lambda: states(url)["a"] == "unloading")
        sources["a"].hold = False
        late = clients.submit(complete, url, "a", "late words")
        assert not any(each.done() for each in (other, late, *running))
        sources["a"].engines[0].hold.set()
        texts = [each.result(WAIT_S).json()["choices"][0]["text"] for each in running]
        assert texts == [f"{n} two three " for n in range(3)]
        assert other.result(WAIT_S).json()["model"] == "b"
        assert late.result(WAIT_S).json()["choices"][0]["text"] == "late words "
        assert len(sources["a"].engines) == 2


def test_a_client_that_does_not_read_keeps_no_model_loaded() -> None:
    """The engine has finished; what is not sent yet needs none."""
    with server("a", "b", limits=ModelsConfig(models_max=1)) as (url, _), httpx.Client() as slow:
        body = {"model": "a", "prompt": "one two", "stream": True}
        with slow.stream("POST", f"{url}/v1/completions", json=body) as stream:
            assert complete(url, "b").json()["model"] == "b"
            assert b"two" in stream.read()


def test_a_failed_load_fails_all_waiting_requests_and_is_retried() -> None:
    with server("a") as (url, sources), ThreadPoolExecutor(4) as clients:
        sources["a"].problem = ModelLoadError("model.safetensors is damaged; download it again")
        sources["a"].gate.clear()
        waiting = [clients.submit(complete, url, "a") for _ in range(3)]
        wait_until(lambda: states(url)["a"] == "loading")
        sources["a"].gate.set()
        for each in waiting:
            refusal = each.result(WAIT_S)
            assert refusal.status_code == 503
            assert "damaged; download it again" in refusal.json()["error"]["message"]
        card = HTTP.get(f"{url}/v1/models/a").json()
        assert card["status"] == {"value": "unloaded", "failed": True, "reason": str(sources["a"].problem)}
        sources["a"].problem = None
        complete(url, "a").raise_for_status()


def test_a_model_that_cannot_fit_alone_is_refused_in_one_line_and_evicts_none() -> None:
    with server("a", "b") as (url, sources):
        complete(url, "a").raise_for_status()
        sources["b"].num_bytes = 2000
        message = complete(url, "b").json()["error"]["message"]
        assert "would fit: a smaller format" in message
        assert "\n" not in message
        assert states(url)["a"] == "loaded"


def test_an_unknown_name_is_404_with_the_list() -> None:
    with server("a", "b") as (url, _):
        refusal = complete(url, "c")
        assert refusal.status_code == 404
        assert "'c' does not exist here; this server serves 'a', 'b'" in refusal.json()["error"]["message"]


def test_a_client_that_disconnects_while_its_model_loads_leaks_nothing() -> None:
    with server("a", "b", limits=ModelsConfig(models_max=1)) as (url, sources):
        sources["a"].gate.clear()
        with pytest.raises(httpx.ReadTimeout), httpx.Client(timeout=0.3) as impatient:
            impatient.post(f"{url}/v1/completions", json={"model": "a", "prompt": "x"})
        sources["a"].gate.set()
        complete(url, "b").raise_for_status()
        assert states(url) == {"a": "unloaded", "b": "loaded"}


def test_keep_alive_unloads_an_idle_model_and_0_at_once() -> None:
    with server("a", "b") as (url, sources), ThreadPoolExecutor(1) as clients:
        client = ollama.Client(url)
        sources["a"].hold = True
        answer = clients.submit(client.generate, "a", "one two three", keep_alive=0)
        wait_until(lambda: bool(sources["a"].engines and sources["a"].engines[0].requests))
        assert states(url)["a"] == "loaded"
        sources["a"].engines[0].hold.set()
        assert answer.result(WAIT_S).response == "one two three "
        wait_until(lambda: states(url)["a"] == "unloaded")
        client.generate("b", keep_alive="40ms")
        wait_until(lambda: states(url)["b"] == "unloaded")
        client.generate("b", "x", keep_alive=-1)
        (listed,) = client.ps().models
        assert (listed.name, listed.expires_at.year > 2200) == ("b", True)
        assert client.generate("b", keep_alive=0).done_reason == "unload"
        wait_until(lambda: client.ps().models == [])


def test_expires_at_is_the_last_use_plus_keep_alive() -> None:
    with server("a", limits=ModelsConfig(keep_alive="5m")) as (url, _):
        client = ollama.Client(url)
        before = time.time()
        client.generate("a", "x")
        (listed,) = client.ps().models
        assert before + 299 < listed.expires_at.timestamp() < time.time() + 301
        client.generate("a", "x", keep_alive="1h30m")
        (listed,) = client.ps().models
        assert listed.expires_at.timestamp() > before + 5399


def test_a_malformed_keep_alive_is_refused() -> None:
    with server("a") as (url, _):
        body = {"model": "a", "prompt": "x", "keep_alive": "soon"}
        refusal = HTTP.post(f"{url}/api/generate", json=body)
        assert refusal.status_code == 400
        assert "keep_alive: expected a number of seconds" in refusal.json()["error"]


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (0, 0.0),
        ("0", 0.0),
        (-1, math.inf),
        ("-1m", math.inf),
        (1.5, 1.5),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("250ms", 0.25),
    ],
)
def test_keep_alive_accepts_ollamas_forms(given: float | str, seconds: float) -> None:
    assert parsed_keep_alive(given) == seconds


@pytest.mark.parametrize("given", ["", "m", "5 m", "nan", "5mm", "1h-3m"])
def test_malformed_durations(given: str) -> None:
    assert parsed_keep_alive(given) is None


def test_clients_of_all_apis_list_the_models() -> None:
    with server("a", "b") as (url, _):
        complete(url, "a").raise_for_status()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["a", "b"]
        with anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as other:
            assert [model.id for model in other.models.list()] == ["a", "b"]
        local = ollama.Client(url)
        assert [model.model for model in local.list().models] == ["a", "b"]
        assert [model.model for model in local.ps().models] == ["a"]
        assert (local.show("b").modelinfo or {})["general.basename"] == "b"
        assert HTTP.get(f"{url}/models").json() == HTTP.get(f"{url}/v1/models").json()


def test_llama_cpps_routes_load_and_unload() -> None:
    with server("a", "b") as (url, _):
        assert HTTP.post(f"{url}/models/load", json={"model": "b"}).json() == {"success": True}
        wait_until(lambda: states(url)["b"] == "loaded")
        HTTP.post(f"{url}/models/unload", json={"model": "b"}).raise_for_status()
        wait_until(lambda: states(url)["b"] == "unloaded")
        assert HTTP.post(f"{url}/models/load", json={"model": "c"}).status_code == 404


def test_metrics_slots_and_admin_routes_distinguish_models() -> None:
    key = {"Authorization": "Bearer secret"}
    with server("a", "b", admin_key="secret") as (url, sources):
        complete(url, "b").raise_for_status()
        text = HTTP.get(f"{url}/metrics").text
        assert 'vllm:generation_tokens_total{model_name="a"} 0' in text
        assert 'vllm:generation_tokens_total{model_name="b"} 3' in text
        assert 'twofold:model_state{model_name="b",state="loaded"} 1.0' in text
        assert 'twofold:model_state{model_name="a",state="loaded"} 0.0' in text
        assert text.count("# TYPE vllm:generation_tokens_total") == 1
        complete(url, "a").raise_for_status()
        assert {slot["model"] for slot in HTTP.get(f"{url}/slots").json()} == {"a", "b"}
        assert {slot["model"] for slot in HTTP.get(f"{url}/slots?model=b").json()} == {"b"}
        assert HTTP.get(f"{url}/props?model=b").json()["model_alias"] == "b"
        control: Any = sources["b"].engines[0].control
        control.requests = list  # the other model's would be an error
        found = HTTP.get(f"{url}/admin/requests?model=b", headers=key).json()
        assert found["num_requests"] == 0
        assert HTTP.get(f"{url}/admin/requests?model=c", headers=key).status_code == 404


def test_every_api_chooses_the_model() -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    with server("a", "b") as (url, sources):
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/messages", chat | {"max_tokens": 4}),
            ("/v1/messages/count_tokens", chat),
            ("/v1/responses", {"input": "x"}),
            ("/api/chat", chat | {"stream": False}),
            ("/api/generate", {"prompt": "x", "stream": False}),
            ("/tokenize", {"prompt": "x"}),
            ("/detokenize", {"tokens": []}),
        ):
            assert HTTP.post(f"{url}{path}", json=body | {"model": "b"}).status_code == 200, path
            assert HTTP.post(f"{url}{path}", json=body | {"model": "c"}).status_code == 404, path
        assert not sources["a"].engines


def test_a_failure_of_one_model_does_not_affect_the_other() -> None:
    with server("a", "b") as (url, sources):
        sources["a"].problem = RuntimeError("a bug")
        assert complete(url, "a").status_code == 503
        assert complete(url, "b").status_code == 200
        assert json.loads(HTTP.get(f"{url}/health").text)["models"]["a"]["reason"] == "a bug"


@pytest.mark.parametrize("count", [70, 100_000], ids=["inline", "worker"])
@pytest.mark.parametrize("is_loaded", [False, True], ids=["first", "loaded"])
def test_the_error_of_too_many_token_ids_names_what_limits_the_context(count: int, is_loaded: bool) -> None:
    """The reason is that of the model that the request names, as for a prompt of text."""
    why = "beyond index_topk attention is sparse"
    with server("plain", "sparse") as (url, sources):
        sources["sparse"].limit_reason = why
        for name, end in (("sparse", f"({why})"), ("plain", "shorten the prompt")):
            if is_loaded:
                assert (
                    HTTP.post(f"{url}/v1/completions", json={"model": name, "prompt": "a"}).status_code == 200
                )
            for prompt in ([1] * count, "word " * count):
                response = HTTP.post(f"{url}/v1/completions", json={"model": name, "prompt": prompt})
                error = response.json()["error"]
                assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
                assert error["message"].endswith(end), error["message"]
                assert "the context holds 64" in error["message"]


def test_each_load_unload_and_eviction_is_logged_with_its_reason(caplog, monkeypatch) -> None:
    monkeypatch.setattr(model_manager, "_SLOW_LOAD_S", 0.01)
    limits = ModelsConfig(models_max=1)

    def events() -> list[str]:
        return [record.getMessage() for record in list(caplog.records) if hasattr(record, "fields")]

    with (
        caplog.at_level(logging.INFO, logger="twofold.server"),
        server("a", "b", "c", limits=limits) as (
            url,
            sources,
        ),
    ):
        sources["a"].gate.clear()
        with ThreadPoolExecutor(1) as clients:
            waiting = clients.submit(complete, url, "a")
            wait_until(lambda: any("still loading a after 0 s; 1 request waits" in each for each in events()))
            sources["a"].gate.set()
            assert waiting.result().status_code == 200
        assert complete(url, "b").status_code == 200
        sources["c"].problem = ModelLoadError("its file is damaged")
        assert complete(url, "c").status_code == 503
        body = {"model": "a", "prompt": "one", "keep_alive": 0}
        assert HTTP.post(f"{url}/api/generate", json=body).status_code == 200
        wait_until(lambda: any("unloaded a: no request for 0 s" in each for each in events()))
    seen = [re.sub(r"in [\d.]+ s, [\d.]+ GiB", "in TIME", each) for each in events() if "still" not in each]
    assert seen[:5] == [
        "loaded a in TIME",
        "unloaded a: evicted for b",
        "loaded b in TIME",
        "unloaded b: evicted for c",
        "cannot load c: its file is damaged",
    ]
