"""The Grafana board and Prometheus rules: names that exist, rules by hand-worked series, and live panels with data."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from twofold.server.fleet.merged_metrics import merged_metrics
from twofold.tools.loadgen.server_process import serving

from scripts import grafana_board
from tests.e2e.waiting import killed_at_end, wait_until

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus"
PANELS = [panel for row in grafana_board.ROWS.values() for panel in row]

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="needs prometheus and promtool (Debian's package prometheus)",
)


def promtool(*arguments: str) -> str:
    done = subprocess.run(["promtool", *arguments], cwd=RULES, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_board_is_what_the_script_writes() -> None:
    assert grafana_board.BOARD.read_text(encoding="utf-8") == grafana_board.text(), (
        "run python -m scripts.grafana_board"
    )


def test_every_metric_asked_for_exists() -> None:
    """Names in panels, rules and alerts are those of the reference of /metrics, which a test compares with the code."""
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    kinds = dict(re.findall(r"^\| `([\w:]+)` \| (\w+)", page, re.MULTILINE))
    known = {name for name, kind in kinds.items() if kind != "histogram"} | {
        f"{name}_{part}"
        for name, kind in kinds.items()
        if kind == "histogram"
        for part in ("bucket", "sum", "count")
    }
    queries = [query for panel in PANELS for query in panel.queries.values()]
    queries += [(RULES / name).read_text() for name in ("recording_rules.yml", "alerts.yml")]
    requested = {
        name
        for query in queries
        for name in re.findall(r"\b((?:vllm:|twofold:|process_(?!start_time_s\b)|http_)\w+)\b", query)
    }
    assert requested
    assert requested <= known


def test_panels_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in grafana_board.board()["panels"]:
        x, y, w, h = (panel["gridPos"][side] for side in "xywh")
        assert x + w <= 24
        covered = {(column, line) for column in range(x, x + w) for line in range(y, y + h)}
        assert not covered & cells, panel["title"]
        cells |= covered


@needs_prometheus
def test_promtool_accepts_the_configuration_and_the_rules() -> None:
    assert "13 rules found" in promtool("check", "config", "prometheus.yml")
    promtool("check", "rules", "recording_rules.yml", "alerts.yml")


@needs_prometheus
def test_rules_by_hand_worked_series(tmp_path: Path) -> None:
    """Every alert fires for a bad server and not for a good one; a changed limit fails."""
    promtool("test", "rules", "rule_tests.yml")
    for name in ("recording_rules.yml", "alerts.yml", "rule_tests.yml"):
        text = (RULES / name).read_text()
        (tmp_path / name).write_text(
            text.replace("kv_cache_usage_perc[10m]) > 0.95", "kv_cache_usage_perc[10m]) > 0.98")
        )
    done = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "rule_tests.yml")], capture_output=True, timeout=120
    )
    assert done.returncode != 0
    alerts = re.findall(r"alert: (\w+)", (RULES / "alerts.yml").read_text())
    tested = re.findall(r'alertname="(\w+)"', (RULES / "rule_tests.yml").read_text())
    assert sorted(alerts) == sorted(set(tested))


@contextlib.contextmanager
def prometheus(folder: Path, targets: list[str]) -> Iterator[str]:
    """The URL of a Prometheus that scrapes `targets` every second, with our rules."""
    config = (RULES / "prometheus.yml").read_text()
    config = config.replace("15s", "1s").replace('["127.0.0.1:10002"]', json.dumps(targets))
    (folder / "prometheus.yml").write_text(config)
    for name in ("recording_rules.yml", "alerts.yml"):
        shutil.copy(RULES / name, folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
    ]
    log = (folder / "prometheus.log").open("w")
    with (
        log,
        killed_at_end(
            subprocess.Popen(
                [*command, f"--web.listen-address=127.0.0.1:{port}"],
                stdout=log,
                stderr=log,
                cwd=folder,
                text=True,
            )
        ) as process,
    ):
        url = f"http://127.0.0.1:{port}"

        def is_ready() -> bool:
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"{url}/-/ready", trust_env=False).status_code == 200
            return False

        wait_until(is_ready)
        yield url


def answers(url: str, query: str) -> list[list[Any]]:
    """Values that are numbers, by series, for a query of now."""
    found = httpx.get(f"{url}/api/v1/query", params={"query": query}, trust_env=False).json()
    assert found["status"] == "success", (query, found)
    return [
        series["value"] for series in found["data"]["result"] if series["value"][1] not in ("NaN", "+Inf")
    ]


@contextlib.contextmanager
def load(bases: list[str]) -> Iterator[None]:
    """Two users a server who ask the same chat again and again, and a request that is refused, until the block ends."""
    ended = threading.Event()

    def user(base: str) -> None:
        with httpx.Client(base_url=base, timeout=60, trust_env=False) as client:
            while not ended.is_set():
                body = {"messages": [{"role": "user", "content": "Tell me a tale."}], "max_tokens": 8}
                client.post("/v1/chat/completions", json=body).raise_for_status()
                client.post("/v1/chat/completions", json={"messages": []})

    users = [threading.Thread(target=user, args=(base,)) for base in bases for _ in range(2)]
    for each in users:
        each.start()
    try:
        yield
    finally:
        ended.set()
        for each in users:
            each.join(60)


@pytest.mark.slow
@needs_prometheus
def test_no_panel_lacks_data(tmp_path: Path) -> None:
    """A real Prometheus scrapes two live servers under load: one with an emulated GPU, one without a GPU."""
    command = [sys.executable, "-m", "twofold.tools.cli", "serve", "--port", "0"]
    emulated = [*command, "--accelerator", "emulated:rtx4090-pcie4", "--gpu-experts-ratio", "0.3"]
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(serving(flags, tmp_path / f"{name}.log", timeout_s=120))
            for name, flags in (
                ("emulated", [*emulated, "--telemetry-url", f"sqlite:///{tmp_path}/t.db"]),
                ("cpu", [*command, "--accelerator", "none"]),
            )
        ]
        instances = [server.url.removeprefix("http://") for server in servers]
        url = stack.enter_context(prometheus(tmp_path, instances))
        stack.enter_context(load([server.url for server in servers]))
        wanted = [
            (instance, panel, query)
            for instance, has_all in zip(instances, (True, False), strict=True)
            for panel in PANELS
            for query in panel.queries.values()
            if has_all or not panel.no_value
        ]

        def missing() -> list[str]:
            return [
                f"{panel.title} of {instance}: {requested}"
                for instance, panel, query in wanted
                if not answers(url, requested := filled_in(query, instance))
            ]

        with contextlib.suppress(TimeoutError):
            wait_until(lambda: not missing(), limit_s=90)
        assert missing() == []
        rules = re.findall(r"record: (\S+)", (RULES / "recording_rules.yml").read_text())
        wait_until(lambda: all(answers(url, rule) for rule in rules), limit_s=60)
        assert firing(url) == set()


@pytest.mark.slow
@needs_prometheus
def test_each_replica_of_a_fleet_is_an_instance(tmp_path: Path) -> None:
    one = "# HELP vllm:num_requests_running Now.\n# TYPE vllm:num_requests_running gauge\n"
    one += 'vllm:num_requests_running{model_name="m"} 3\n'
    page = merged_metrics({"left": one, "right": one}).encode()

    class Gateway(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_args: object) -> None: ...

    gateway = ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    thread = threading.Thread(target=gateway.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        with prometheus(tmp_path, [f"127.0.0.1:{gateway.server_port}"]) as url:
            wait_until(lambda: len(answers(url, "vllm:num_requests_running")) == 2)
            found = httpx.get(
                f"{url}/api/v1/query", params={"query": "vllm:num_requests_running"}, trust_env=False
            )
            labels = [each["metric"] for each in found.json()["data"]["result"]]
    finally:
        gateway.shutdown()
        thread.join()
        gateway.server_close()
    assert {each["instance"] for each in labels} == {"left", "right"}


def firing(url: str) -> set[str]:
    alerts = httpx.get(f"{url}/api/v1/alerts", trust_env=False).json()["data"]["alerts"]
    return {alert["annotations"]["summary"] for alert in alerts if alert["state"] == "firing"}


def filled_in(query: str, instance: str) -> str:
    """A panel's query with Grafana's variables replaced."""
    return query.replace("$model", ".*").replace("$instance", instance).replace("$__rate_interval", "15s")
