"""Fixture of a server with a tiny model that reads pictures."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from live_server import serving
from seeing_model import TEMPLATE, Seeing
from twofold.api.config import EngineConfig, ServerConfig
from twofold.engine import Engine
from twofold.server.app import create_app

from tests.tiny_models.pictures import write_picture_model


@pytest.fixture(scope="session", params=["qwen3_vl_moe", "qwen3_5_moe"])
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    folder = tmp_path_factory.mktemp(request.param)
    whole = write_picture_model(folder, request.param)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = EngineConfig(
        model=str(folder), accelerator="none", cpu_threads=2, max_total_tokens=2048,
        limit_mm_per_prompt='{"image": 4}',
    )  # fmt: skip
    engine = Engine.load(config)
    engine.start()
    domains = ServerConfig(
        allowed_media_domains=("127.0.0.1,changing.test",), allowed_local_media_path=str(folder)
    )
    try:
        with serving(create_app(engine, domains)) as url:
            yield Seeing(url, engine, folder, whole)
    finally:
        engine.close()
