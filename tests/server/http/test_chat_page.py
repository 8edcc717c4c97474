"""The chat page: who gets it, that it asks this server only, its Markdown, and its placements beside SQL."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from live_server import HTTP, serving
from twofold.api.config import EngineConfig, ServerConfig
from twofold.engine import Engine
from twofold.server.app import create_app
from twofold.server.web.routes import FILES
from twofold.telemetry.writer import open_sink
from twofold.text.markdown.parsing import MAX_CHARS

from tests.e2e.waiting import wait_until

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
MODEL = Path(__file__).resolve().parents[3] / "models/twofold-tales"


@pytest.mark.parametrize("path", ["/", *FILES])
def test_a_browser_gets_the_page_without_a_key(engine: FakeEngine, path: str) -> None:
    with serving(create_app(engine, ServerConfig(api_key=("sesame",)))) as url:
        page = HTTP.get(url + path, headers=BROWSER)
        assert page.status_code == 200
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy, "no other page may show it in a frame"
        assert "unsafe" not in policy
        assert page.headers["x-frame-options"] == "DENY"
        assert page.headers["x-content-type-options"] == "nosniff"
        assert not re.findall(r"(?:src|href|fetch\()=?[\"'(]+(?:https?:)?//", page.text), (
            "another host is asked"
        )
        assert "innerHTML" not in page.text, "an answer's text must not become HTML"


def test_placements_equal_the_database(tmp_path: Path) -> None:
    sink = open_sink(f"sqlite:///{tmp_path}/t.db")
    config = EngineConfig(model=str(MODEL), accelerator="emulated:rtx4090-pcie4", gpu_experts_ratio=0.25)
    engine = Engine.load(config, telemetry=sink)
    engine.start()
    try:
        with serving(create_app(engine, ServerConfig(), sink)) as url:
            body = {"model": "twofold-tales", "prompt": "Once upon", "max_tokens": 12, "ignore_eos": True}
            wait_until(lambda: sink.run_id is not None)
            # As a second server in the same database, begun later.
            with sqlite3.connect(tmp_path / "t.db", timeout=10) as db:
                names = [name for _, name, *_ in db.execute("PRAGMA table_info(run)") if name != "run_id"]
                db.execute(f"INSERT INTO run ({', '.join(names)}) SELECT {', '.join(names)} FROM run")
            answer = HTTP.post(f"{url}/v1/completions", json=body).json()
            engine.close()
            sink.close()
            placed = HTTP.get(f"{url}/chat/placement/{answer['id']}")
            missing = HTTP.get(f"{url}/chat/placement/cmpl-none")
            about = HTTP.get(f"{url}/chat/about").json()
    finally:
        engine.close()
        sink.close()
    with sqlite3.connect(tmp_path / "t.db") as db:
        rows = db.execute(
            "SELECT sum(num_hits), sum(num_cpu), sum(num_fetched) FROM token_layer GROUP BY position ORDER BY position"
        ).fetchall()
    first = answer["usage"]["prompt_tokens"] - 1
    got = [(each["hit"], each["cpu"], each["fetched"]) for each in placed.json()["tokens"]]
    assert got == rows[first:]
    assert len(got) == answer["usage"]["completion_tokens"]
    assert placed.json()["emulated"] is True
    assert missing.status_code == 404
    assert about["dashboard"] == "http://127.0.0.1:8501"
    assert about["dashboard_command"] == f"twofold dashboard --telemetry-url sqlite:///{tmp_path}/t.db"


def test_without_telemetry_there_are_no_placements(engine: FakeEngine) -> None:
    with serving(create_app(engine, ServerConfig())) as url:
        refused = HTTP.get(f"{url}/chat/placement/cmpl-1")
    assert refused.status_code == 404
    assert "--telemetry-url" in refused.json()["error"]["message"]


def test_markdown_is_rendered_without_a_model_and_with_the_key_only(engine: FakeEngine) -> None:
    with serving(create_app(engine, ServerConfig(api_key=("sesame",)))) as url:
        key = {"authorization": "Bearer sesame"}
        assert HTTP.post(f"{url}/chat/markdown", json={"text": "a"}).status_code == 401
        found = HTTP.post(f"{url}/chat/markdown", json={"text": "one\n\n**two**"}, headers=key).json()[
            "blocks"
        ]
        long = HTTP.post(f"{url}/chat/markdown", json={"text": "a" * (MAX_CHARS + 1)}, headers=key)
        about = HTTP.get(f"{url}/chat/about", headers=key).json()
    assert found == [
        {"line": 0, "html": "<p>one</p>\n"},
        {"line": 2, "html": "<p><strong>two</strong></p>\n"},
    ]
    assert long.status_code == 400
    assert about == {"dashboard": None, "dashboard_command": None}
