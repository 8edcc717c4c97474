"""A server with a real engine and hand-made adapters: each request is computed with the adapter that it names."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from fake_engine import NoAdapters
from live_server import HTTP
from twofold.api.config import ServerConfig
from twofold.api.types import LoadedAdapter
from twofold.server.bridge.models import adapted_model
from twofold.tools.cli.main import main

from tests.server.adapters.adapted_server import (
    LONG,
    PROMPT,
    WAIT_S,
    Served,
    started,
    write_all,
)
from tests.tiny_models.adapters import write_tiny_adapter


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("served"))


@pytest.fixture
def served(directory: Path) -> Iterator[Served]:
    with started(directory) as made:
        yield made


def test_base_and_adapters_asked_at_once_answer_as_alone(served: Served) -> None:
    names = ["tiny", "a", "b"]
    alone = {name: served.ask(name) for name in names}
    assert len(set(alone.values())) == 3, "an adapter changes nothing"
    served.engine.control.drop_prefixes()
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(served.ask, names * 2))
    assert together == [alone[name] for name in names] * 2
    assert {record.adapter for record in served.sink.ended} == {"", "a", "b"}


def test_every_dialect_computes_with_the_adapter_and_repeats_its_name(served: Served) -> None:
    messages = [{"role": "user", "content": PROMPT}]

    def answer_of(path: str, model: str, body: dict[str, Any]) -> tuple[str, str]:
        reply = HTTP.post(f"{served.url}{path}", json={"model": model} | body).json()
        return reply["model"], json.dumps(
            reply.get("choices")
            or reply.get("content")
            or reply.get("output", [{}])[0].get("content")
            or reply.get("message")
            or reply.get("response")
            or reply.get("data")
            or reply["embeddings"]
        )

    limits = {"temperature": 0, "max_tokens": 8}
    cases: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": messages, **limits},
        "/v1/completions": {"prompt": PROMPT, **limits},
        "/v1/messages": {"messages": messages, **limits},
        "/v1/responses": {"input": PROMPT, "temperature": 0, "max_output_tokens": 8},
        "/api/chat": {"messages": messages, "stream": False, "options": {"temperature": 0, "num_predict": 8}},
        "/api/generate": {"prompt": PROMPT, "stream": False, "options": {"temperature": 0, "num_predict": 8}},
        "/v1/embeddings": {"input": PROMPT},
        "/api/embed": {"input": PROMPT},
    }
    for path, body in cases.items():
        base, a = answer_of(path, "tiny", body), answer_of(path, "a", body)
        assert (base[0], a[0]) == ("tiny", "a"), path
        assert base[1] != a[1], path
    assert (
        served.ask("tiny:a")
        == served.ask("tiny", extra_body={"ignore_eos": True, "lora_path": "a"})
        == served.ask("a")
    )


def test_models_are_listed_with_their_parent(served: Served, directory: Path) -> None:
    cards = {each["id"]: each for each in HTTP.get(f"{served.url}/v1/models").json()["data"]}
    assert {name: (card["parent"], card["root"]) for name, card in cards.items()} == {
        "tiny": (None, "tiny"),
        "a": ("tiny", "a"),
        "b": ("tiny", "b"),
    }
    assert HTTP.get(f"{served.url}/v1/models/b").json() == cards["b"]
    tags = HTTP.get(f"{served.url}/api/tags").json()["models"]
    assert [(each["name"], each["details"]["parent_model"]) for each in tags] == [
        ("tiny", ""),
        ("a", "tiny"),
        ("b", "tiny"),
    ]
    unknown = served.post("/v1/completions", {"model": "c", "prompt": "x"}, {})
    assert unknown.status_code == 404
    assert "'tiny', 'a', 'b'" in unknown.json()["error"]["message"]


def test_adapters_are_loaded_and_unloaded_while_requests_run(served: Served) -> None:
    expected = served.ask("a", max_tokens=400)
    stream = served.stream("a", 400)
    chunks = iter(stream)
    texts = [next(chunks).choices[0].text]
    loaded = served.post("/v1/load_lora_adapter", {"lora_name": "c", "lora_path": "c"})
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'c' added successfully.")
    assert served.ask("c") not in {served.ask("a"), served.ask("tiny")}
    again = served.post("/v1/load_lora_adapter", {"lora_name": "c", "lora_path": "d"})
    assert again.status_code == 400
    assert "load_inplace" in again.json()["error"]["message"]
    of_c = served.ask("c")
    replaced = served.post(
        "/v1/load_lora_adapter", {"lora_name": "c", "lora_path": "d", "load_inplace": True}
    )
    assert replaced.status_code == 200
    assert served.ask("c") != of_c
    unloaded = served.post("/unload_lora_adapter", {"lora_name": "a"})
    assert unloaded.json() == {"success": True, "error_message": "", "loaded_adapters": {"b": "b", "c": "d"}}
    texts += [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert "".join(texts) == expected, "its adapter left while it ran"
    assert served.names() == ["tiny", "b", "c"]
    with pytest.raises(openai.NotFoundError):
        served.ask("a")
    assert served.post("/v1/unload_lora_adapter", {"lora_name": "a"}).status_code == 404


def test_refused_loads_leave_the_server_as_it_was(served: Served, directory: Path, tmp_path: Path) -> None:
    more = directory / "more"
    write_tiny_adapter(more / "other model", 0, columns=40)
    write_tiny_adapter(more / "high rank", 0, rank=65)
    write_tiny_adapter(more / "broken", 0)
    (more / "broken" / "adapter_model.safetensors").write_bytes(b"\xff" * 40)
    write_tiny_adapter(tmp_path / "outside", 0)
    (more / "link").symlink_to(tmp_path / "outside")
    (more / "linked file").mkdir()
    (more / "linked file" / "adapter_config.json").symlink_to(tmp_path / "outside" / "adapter_config.json")
    cases = {
        "other model": (400, "q_proj"),
        "high rank": (400, "rank"),
        "broken": (400, "adapter_model.safetensors"),
        "missing": (404, "no adapter 'missing'"),
        "../a": (400, "not below --lora-dir"),
        str(tmp_path / "outside"): (400, "not below --lora-dir"),
        "link": (400, "not below --lora-dir"),
        "linked file": (400, "not below --lora-dir"),
        "nul\0": (400, "not below --lora-dir"),
    }
    for path, (status, text) in cases.items():
        reply = served.post("/v1/load_lora_adapter", {"lora_name": "new", "lora_path": path})
        message = reply.json()["error"]["message"]
        assert (reply.status_code, text in message, "\n" in message) == (status, True, False), (
            path,
            reply.text,
        )
    named = served.post("/v1/load_lora_adapter", {"lora_name": "tiny", "lora_path": "c"})
    assert (named.status_code, named.json()["error"]["param"]) == (400, "lora_name")
    for path in (
        "/v1/load_lora_adapter",
        "/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/unload_lora_adapter",
        "/lora-adapters",
    ):
        assert served.post(path, {}, {}).status_code == 401, path
    assert served.names() == ["tiny", "a", "b"]
    assert served.ask("a")


def test_without_lora_dir_nothing_is_loaded(directory: Path) -> None:
    with started(directory, lora_dir=None) as served:
        reply = served.post(
            "/v1/load_lora_adapter", {"lora_name": "c", "lora_path": str(directory / "more" / "c")}
        )
        assert reply.status_code == 400
        assert "--lora-dir DIR" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--lora-modules", "tiny=a"], "--lora-modules: 'tiny' is the model's own name"),
        (["other", "--lora-dir", "more"], "--lora-dir was given with several models"),
        (["--port", "0", "--lora-modules", "x=nowhere"], "nowhere"),
    ],
)
def test_adapters_that_cannot_be_served_are_named_at_the_start(
    directory: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    assert main(["serve", str(directory / "tiny"), *arguments, "--accelerator", "none", "--no-auto-fit"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert reason in line


def test_without_an_admin_key_nothing_is_changed(directory: Path) -> None:
    with started(directory, ServerConfig()) as served:
        for path in ("/v1/load_lora_adapter", "/unload_lora_adapter", "/lora-adapters"):
            reply = served.post(path, {})
            assert reply.status_code == 404
            assert "--admin-key" in reply.json()["error"]["message"]
        assert len(HTTP.get(f"{served.url}/lora-adapters").json()) == 2


def test_an_adapter_that_was_read_for_a_cancelled_request_is_released() -> None:
    reads, may_read, released = threading.Event(), threading.Event(), threading.Event()
    loaded = LoadedAdapter("a", 0, "")

    class Slow(NoAdapters):
        def hold_loaded(self, parts: Any) -> None: ...

        def hold(self, parts: Any) -> LoadedAdapter:
            reads.set()
            assert may_read.wait(WAIT_S)
            return loaded

        def release(self, adapter: LoadedAdapter) -> None:
            assert adapter is loaded
            released.set()

    async def request() -> None:
        asking = asyncio.ensure_future(adapted_model._held(cast(Any, Slow()), (("a", 1.0),)))
        await asyncio.to_thread(reads.wait, WAIT_S)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        may_read.set()
        assert await asyncio.to_thread(released.wait, WAIT_S)

    asyncio.run(request())


def test_an_evicted_adapter_is_read_again(directory: Path) -> None:
    with started(directory, max_cpu_loras=1) as served:
        first = [served.ask(name) for name in ("a", "b", "a", "b")]
        assert first[:2] == first[2:]
        stream = served.stream("a", LONG - 100)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="--max-cpu-loras 1"):
            served.ask("b")
        stream.close()


def test_reading_an_adapter_does_not_block_other_requests(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(directory, max_cpu_loras=1) as served:
        reads, may_read = threading.Event(), threading.Event()
        read = served.engine.adapters._from_files

        def slow(*arguments: Any) -> Any:
            reads.set()
            assert may_read.wait(WAIT_S)
            return read(*arguments)

        monkeypatch.setattr(served.engine.adapters, "_from_files", slow)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(served.ask, "a")
            try:
                assert reads.wait(WAIT_S)
                assert served.ask("tiny")
                assert served.ask("b")
            finally:
                may_read.set()
            assert waiting.result()


def test_an_adapter_whose_files_are_gone_is_unavailable(tmp_path: Path, directory: Path) -> None:
    path = write_tiny_adapter(tmp_path / "going", 3)
    with started(
        directory, max_cpu_loras=1, lora_modules=(f"going={path}", f"a={directory / 'a'}")
    ) as served:
        (path / "adapter_model.safetensors").unlink()
        reply = served.post("/v1/completions", {"model": "going", "prompt": "x"}, {})
        assert reply.status_code == 503
        assert str(tmp_path) not in reply.text
        assert served.ask("a")


def test_scales_of_llama_cpp(served: Served) -> None:
    def asked(*scales: tuple[int, float], model: str = "tiny") -> str:
        lora = [{"id": each, "scale": scale} for each, scale in scales]
        return served.ask(model, extra_body={"ignore_eos": True, "lora": lora})

    def listed() -> list[tuple[int, str, float]]:
        return [
            (each["id"], each["path"], each["scale"])
            for each in HTTP.get(f"{served.url}/lora-adapters").json()
        ]

    base, a, b = served.ask("tiny"), served.ask("a"), served.ask("b")
    assert listed() == [(0, "a", 0.0), (1, "b", 0.0)]
    assert (asked((0, 1.0)), asked((1, 1.0)), asked(), asked((0, 0.0), model="a")) == (a, b, base, base)
    both = asked((0, 0.5), (1, -0.25))
    assert both not in (a, b, base)
    assert asked((1, -0.25), (0, 0.5)) == both
    assert served.post("/lora-adapters", [{"id": 0, "scale": 0.5}, {"id": 1, "scale": -0.25}]).json() == {
        "success": True
    }
    assert listed() == [(0, "a", 0.5), (1, "b", -0.25)]
    assert (served.ask("tiny"), served.ask("a"), asked()) == (both, a, base)
    assert served.post("/lora-adapters", [{"id": 1, "scale": 1}]).status_code == 200
    assert served.ask("tiny") == b
    for body in (
        [{"id": 7, "scale": 1}],
        [{"id": 0, "scale": 1}] * 2,
        [{"id": 0}],
        {"id": 0},
        [{"id": 0, "scale": "x"}],
    ):
        assert served.post("/lora-adapters", body).status_code == 400
    unknown = served.post("/v1/completions", {"prompt": "x", "lora": [{"id": 7, "scale": 1}]}, {})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "lora")


def test_a_sum_follows_its_parts(served: Served) -> None:
    half = {"ignore_eos": True, "lora": [{"id": 0, "scale": 0.5}]}
    before = served.ask("tiny", extra_body=half)
    replaced = {"lora_name": "a", "lora_path": "c", "load_inplace": True}
    assert served.post("/v1/load_lora_adapter", replaced).status_code == 200
    assert served.ask("tiny", extra_body=half) != before


def test_metrics_name_the_adapters(served: Served) -> None:
    stream = served.stream("a", LONG - 100)
    next(iter(stream))
    lines = HTTP.get(f"{served.url}/metrics").text.splitlines()
    stream.close()
    (info,) = (line for line in lines if line.startswith("vllm:lora_requests_info{"))
    assert 'max_lora="8",running_lora_adapters="a",waiting_lora_adapters=""' in info
    sizes = [line for line in lines if line.startswith("twofold:lora_memory_bytes{")]
    assert len(sizes) == 2
    assert all(float(line.rpartition(" ")[2]) > 0 for line in sizes)
