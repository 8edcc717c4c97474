"""/admin and `twofold ctl` on a real server: authorisation, reports, changes, and how fast a refusal is."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fake_engine import FakeEngine
from live_server import HTTP, serving
from twofold.api.config import EngineConfig, ServerConfig
from twofold.api.errors import ConfigError
from twofold.engine import Engine
from twofold.experts.expert_statistics import write_statistics
from twofold.experts.placement_files import write_placement
from twofold.server.app import create_app
from twofold.tools.cli.main import main

from tests.tiny_models.writing import TinyModel, write_tiny_model

ADMIN = "admin-secret"
SERVING = "serving-secret"
LONG = 20_000
PATHS = (
    ("GET", "/admin/status"), ("GET", "/admin/requests"), ("DELETE", "/admin/requests/x"), ("GET", "/admin/cache"),
    ("POST", "/admin/cache/drop_prefixes"), ("GET", "/admin/placement"), ("POST", "/admin/resize"),
    ("POST", "/admin/sleep"), ("POST", "/admin/wake"), ("GET", "/admin/experts"), ("POST", "/admin/experts/start"),
    ("POST", "/admin/experts/stop"), ("POST", "/admin/experts/dump"), ("POST", "/start_expert_distribution_record"),
    ("GET", "/stop_expert_distribution_record"), ("GET", "/dump_expert_distribution_record"),
    ("GET", "/admin/placement/experts"), ("POST", "/admin/placement/experts"),
)  # fmt: skip


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny", TinyModel(max_position_embeddings=LONG)
    )


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[Engine]:
    loaded = Engine.load(
        EngineConfig(
            model=str(model),
            accelerator="emulated:rtx4090-pcie4",
            gpu_experts_ratio=0.5,
            cpu_threads=1,
            max_total_tokens=LONG,
            max_num_seqs=2,
            max_waiting=3,
            expert_distribution_recorder_dir=str(tmp_path / "dumps"),
        )
    )
    loaded.start()
    yield loaded
    loaded.close()


@pytest.fixture
def url(engine: Engine) -> Iterator[str]:
    config = ServerConfig(admin_key=ADMIN, api_key=(SERVING,), served_model_name=("tiny", "gpt-4o", "tiny"))
    with serving(create_app(engine, config)) as base:
        yield base


@pytest.mark.parametrize(
    ("config", "key", "status"),
    [
        ({"admin_key": ADMIN}, None, 401),
        ({"admin_key": ADMIN, "api_key": (SERVING,)}, SERVING, 401),
        ({"admin_key": ADMIN}, ADMIN + "x", 401),
        ({}, ADMIN, 404),
        ({"api_key": (SERVING,)}, SERVING, 404),
    ],
)
def test_only_the_admin_key_opens_it_and_without_one_the_refusal_names_the_flag(config, key, status):
    fake = FakeEngine()
    with serving(create_app(fake, ServerConfig(**config))) as base:
        for method, path in PATHS:
            answer = HTTP.request(method, base + path, headers=bearer(key) if key else {})
            assert answer.status_code == status, path
            if status == 404:
                assert answer.json()["error"]["code"] == "no_admin_key"
                assert path in answer.json()["error"]["message"]
                assert "--admin-key" in answer.json()["error"]["message"]
        assert "admin" not in HTTP.get(f"{base}/openapi.json").text
    fake.close()


def test_the_admin_key_opens_nothing_else(url):
    for path in ("/v1/models", "/slots", "/props"):
        assert HTTP.get(url + path, headers=bearer(ADMIN)).status_code == 401
        assert HTTP.get(url + path, headers=bearer(SERVING)).status_code == 200


def test_keys_that_cannot_be_are_refused():
    for keys in ({"admin_key": ""}, {"admin_key": "a b"}, {"admin_key": "x", "api_key": ("x",)}):
        with pytest.raises(ConfigError, match="--admin-key"):
            ServerConfig(**keys)


def test_every_alias_is_listed_and_answered(url):
    listed = HTTP.get(f"{url}/v1/models", headers=bearer(SERVING)).json()
    assert (
        [card["id"] for card in listed["data"]]
        == [card["name"] for card in listed["models"]]
        == ["tiny", "gpt-4o"]
    )
    for name, status in (("tiny", 200), ("gpt-4o", 200), ("other", 404)):
        body = {"model": name, "prompt": [5, 6], "max_tokens": 2}
        answer = HTTP.post(f"{url}/v1/completions", json=body, headers=bearer(SERVING))
        assert (
            answer.status_code
            == HTTP.get(f"{url}/v1/models/{name}", headers=bearer(SERVING)).status_code
            == status
        )


class Stream(threading.Thread):
    """One long answer; its pieces and how it ended."""

    def __init__(self, url: str, tokens: int, request_id: str) -> None:
        super().__init__(daemon=True)
        self.body = {
            "prompt": [5, 6, 7],
            "max_tokens": tokens,
            "stream": True,
            "ignore_eos": True,
            "temperature": 0,
        }
        self.url, self.request_id = url, request_id
        self.begun = threading.Event()
        self.lines: list[str] = []
        self.start()

    def run(self) -> None:
        headers = bearer(SERVING) | {"x-request-id": self.request_id}
        with (
            httpx.Client(timeout=60, trust_env=False) as client,
            client.stream("POST", f"{self.url}/v1/completions", json=self.body, headers=headers) as answer,
        ):
            for line in answer.iter_lines():
                if line:
                    self.lines.append(line)
                    self.begun.set()

    def text(self) -> str:
        self.join(60)
        assert self.lines[-1] == "data: [DONE]"
        return "".join(json.loads(line[6:])["choices"][0]["text"] for line in self.lines[:-1])


def ctl(capsys: pytest.CaptureFixture[str], url: str, *words: str) -> tuple[int, str]:
    code = main(["ctl", *words, "--url", url, "--admin-key", ADMIN])
    out = capsys.readouterr()
    return code, out.out + out.err


def requested(capsys: pytest.CaptureFixture[str], url: str, *words: str) -> dict[str, Any]:
    code, out = ctl(capsys, url, *words, "--json")
    assert code == 0, out
    return dict(json.loads(out))


def test_a_server_is_seen_changed_and_put_to_sleep_from_the_command_line(url, engine, capsys):
    plain = Stream(url, 3600, "plain").text()
    stream = Stream(url, 3600, "watched")
    assert stream.begun.wait(60)
    status = requested(capsys, url, "status")
    assert (status["model"], status["aliases"], status["state"]) == ("tiny", ["gpt-4o"], "ready")
    (request,) = requested(capsys, url, "requests")["requests"]
    assert (request["prompt_tokens"], request["max_tokens"], request["state"]) == (3, 3600, "running")
    assert request["age_s"] > 0
    resized = requested(capsys, url, "resize", "--gpu-experts-ratio", "1", "--max-total-tokens", "4000")[
        "memory"
    ]
    assert resized["num_slots"] == engine.info.num_layers * engine.info.num_experts
    assert resized["kv_tokens"] == 4000
    assert requested(capsys, url, "sleep")["state"] == "asleep"
    assert HTTP.get(f"{url}/ready").status_code == 503
    refused = HTTP.post(f"{url}/v1/completions", json={"prompt": [5]}, headers=bearer(SERVING))
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_asleep")
    assert refused.headers["retry-after"]
    assert requested(capsys, url, "wake")["state"] == "ready"
    assert stream.text() == plain
    cache = requested(capsys, url, "cache")
    assert cache["experts"]["hits"] > 0
    assert cache["prefix_cache"]["pages"] > 0
    assert sum(layer["resident"] for layer in cache["expert_slots_per_layer"]) == resized["num_slots"]
    assert (
        requested(capsys, url, "cache", "--drop-prefixes")["dropped_pages"] == cache["prefix_cache"]["pages"]
    )
    assert len(requested(capsys, url, "placement", "--layer", "0", "--top", "2")["layers"][0]["experts"]) == 2
    for subject in ("status", "requests", "cache", "placement"):
        code, out = ctl(capsys, url, subject)
        assert code == 0
        assert out.strip()


def placement(capsys: pytest.CaptureFixture[str], url: str, *words: str) -> tuple[int, str]:
    server = ["--url", url, "--admin-key", ADMIN]
    code = main(["placement", *words, *(server if words[0] != "show" or len(words) == 1 else [])])
    out = capsys.readouterr()
    return code, out.out + out.err


def test_a_placement_is_shown_written_and_put_back_while_a_request_runs(url, engine, capsys, tmp_path):
    plain = Stream(url, 1200, "plain").text()
    stream = Stream(url, 1200, "watched")
    assert stream.begun.wait(60)
    layers, experts, slots = engine.info.num_layers, engine.info.num_experts, engine.info.num_slots
    code, out = placement(capsys, url, "import", "--strategy", "uniform")
    assert (code, f"placed {slots} experts in {slots} slots" in out) == (0, True), out
    assert "policy payback continues from there" in out
    file = str(tmp_path / "placed.npz")
    assert placement(capsys, url, "export", file)[0] == 0
    assert placement(capsys, url, "import", file)[0] == 0
    assert stream.text() == plain
    code, out = placement(capsys, url, "import", "--strategy", "uniform")
    assert code == 0
    code, shown = placement(capsys, url, "show")
    assert (code, shown.splitlines()[0]) == (
        0,
        f"tiny: {slots} of {layers * experts} experts in {slots} slots, strategy payback, policy payback",
    )
    first = [line.split() for line in shown.splitlines() if line.split()[:1] == ["0"]]
    assert first == [["0", str(slots // layers), str(experts), f"0-{slots // layers - 1}"]]
    assert placement(capsys, url, "export", file)[0] == 0
    code, of_file = placement(capsys, url, "show", file)
    assert (code, of_file.splitlines()[2:]) == (0, shown.splitlines()[2:])
    write_statistics(tmp_path / "counts.pt", np.arange(layers * experts).reshape(1, layers, experts))
    assert placement(capsys, url, "import", str(tmp_path / "counts.pt"))[0] == 0
    resident = engine.control.expert_placement().resident
    assert resident[-1] == tuple(range(experts - len(resident[-1]), experts))
    other = str(tmp_path / "other.npz")
    write_placement(other, np.ones((2, 3), np.bool_), "other")
    for words, message in (
        (["import", other], f"2 layers of 3 experts, the server's model has {layers} layers of {experts}"),
        (["import"], "either a FILE or --strategy"),
        (["export", str(tmp_path / "placed.txt")], "ends in .npz"),
        (["show", str(tmp_path / "counts.pt")], "places none"),
        (["show", str(tmp_path / "none.npz")], "cannot be read"),
    ):
        code, out = placement(capsys, url, *words)
        assert (code, message in out) == (2, True), out


def test_one_request_can_be_ended(url, engine, capsys):
    stream = Stream(url, 15_000, "unwanted")
    assert stream.begun.wait(60)
    (request,) = requested(capsys, url, "requests")["requests"]
    assert ctl(capsys, url, "requests", "--cancel", request["id"])[0] == 0
    stream.join(60)
    assert not engine.control.requests()
    code, out = ctl(capsys, url, "requests", "--cancel", request["id"])
    assert (code, "no request" in out) == (2, True)


def test_routed_experts_are_recorded_while_streams_run_by_sglangs_routes_and_the_command_line(
    url, engine, capsys, tmp_path
):
    def routed(tokens: int) -> int:
        return tokens * engine.info.num_layers * engine.info.top_k

    def sglang(method: str, verb: str) -> dict[str, Any]:
        answer = HTTP.request(method, f"{url}/{verb}_expert_distribution_record", headers=bearer(ADMIN))
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    assert sglang("POST", "start")["recording"]
    streams = [Stream(url, 900, f"recorded{n}") for n in range(2)]
    assert all(stream.begun.wait(60) for stream in streams)
    first = requested(capsys, url, "experts", "dump")
    assert streams[0].text() == streams[1].text()
    second = sglang("GET", "dump")
    for dumped in (first, second):
        assert (dumped["mode"], dumped["routed_experts"]) == ("stat", routed(dumped["tokens"]))
        assert len(dumped["files"]) == 2
        assert 0 < dumped["hit_rate"] < 1
    # The last of the prompt's three tokens is always computed; the one before it may be a prefix-cache hit.
    assert 2 * 899 < first["tokens"] + second["tokens"] <= 2 * 902
    refused = HTTP.post(f"{url}/admin/experts/dump", headers=bearer(ADMIN))
    assert (refused.status_code, "nothing was recorded" in refused.text) == (400, True)
    assert sglang("GET", "stop")["recording"] is False

    requested(capsys, url, "experts", "start", "--mode", "per_token")
    Stream(url, 3, "tokens").text()
    code, out = ctl(capsys, url, "experts", "dump")
    assert (code, "per_token: 3 forward passes" in out) == (0, True)
    bad = HTTP.post(f"{url}/admin/experts/start", json={"mode": "all"}, headers=bearer(ADMIN))
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "mode")
    Stream(url, 3, "lost").text()
    shutil.rmtree(tmp_path / "dumps")
    (tmp_path / "dumps").write_text("no directory")
    unwritten = HTTP.post(f"{url}/dump_expert_distribution_record", headers=bearer(ADMIN))
    assert (unwritten.status_code, unwritten.json()["error"]["code"]) == (500, "cannot_write")
    assert "--expert-distribution-recorder-dir" in ctl(capsys, url, "experts", "dump")[1]
    assert requested(capsys, url, "experts")["forward_passes"] == 3
    assert ctl(capsys, url, "experts", "stop", "--mode", "stat")[0] == 2


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["resize", "--max-total-tokens", "3"], 2, "less than one page"),
        (["resize"], 2, "no new size was given"),
        (["placement", "--layer", "77"], 2, "layer 77"),
    ],
)
def test_refusals_are_reported_in_one_line(url, capsys, words, code, message):
    assert ctl(capsys, url, *words)[0] == code
    assert message in ctl(capsys, url, *words)[1]


def test_a_wrong_key_and_a_missing_server_are_reported(url, capsys):
    assert main(["ctl", "status", "--url", url, "--admin-key", "other"]) == 2
    assert "admin key" in capsys.readouterr().err
    assert main(["ctl", "status", "--url", "http://127.0.0.1:9", "--admin-key", "x"]) == 1
    assert "no Twofold server answers" in capsys.readouterr().err


def test_ctl_names_the_flag_of_a_server_without_admin_routes(capsys):
    fake = FakeEngine()
    with serving(create_app(fake, ServerConfig())) as base:
        assert main(["ctl", "status", "--url", base, "--admin-key", "x"]) == 2
    fake.close()
    assert "started with --admin-key KEY" in capsys.readouterr().err


def test_bodies_are_checked(url):
    for path, body in (
        ("resize", b"{"),
        ("resize", b"[]"),
        ("resize", b'{"gpu_experts_ratio": "much"}'),
        ("resize", b'{"pages": 3}'),
        ("resize", b'{"max_total_tokens": 1e99}'),
        ("placement/experts", b'{"resident": [[-1]]}'),
        ("placement/experts", b'{"resident": [["0"]]}'),
        ("placement/experts", b'{"resident": [[0]]}'),
        ("placement/experts", b'{"resident": []}'),
    ):
        answer = HTTP.post(f"{url}/admin/{path}", content=body, headers=bearer(ADMIN))
        assert answer.status_code == 400, body


@pytest.mark.slow  # it fills a queue with real answers
def test_a_full_queue_refuses_with_retry_after(url):
    held = [Stream(url, 15_000, f"held{n}") for n in range(2)]
    assert all(stream.begun.wait(60) for stream in held)
    waiting = [Stream(url, 1, f"waits{n}") for n in range(3)]
    deadline = time.monotonic() + 30
    while len(HTTP.get(f"{url}/admin/requests", headers=bearer(ADMIN)).json()["requests"]) < 5:
        assert time.monotonic() < deadline
    times = []
    for _ in range(20):
        begun = time.perf_counter()
        answer = HTTP.post(f"{url}/v1/completions", json={"prompt": [5, 6]}, headers=bearer(SERVING))
        times.append(time.perf_counter() - begun)
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
    # The quickest: what else this machine does is not the server's. Under load: benchmarks/overload.py.
    assert min(times) < 0.05
    for stream in held:
        HTTP.delete(f"{url}/admin/requests/cmpl-{stream.request_id}", headers=bearer(ADMIN))
        HTTP.delete(f"{url}/admin/requests/{stream.request_id}", headers=bearer(ADMIN))
    for stream in [*held, *waiting]:
        stream.join(60)
