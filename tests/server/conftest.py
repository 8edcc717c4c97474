"""Fixtures of the server tests: a fake engine, and an application around it on a real socket."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

# pytest's importlib mode does not put a test's folder on the path.
sys.path.insert(0, str(Path(__file__).parent))

from fake_engine import FakeEngine
from live_server import serving
from twofold.api.config import ServerConfig
from twofold.server.app import create_app


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine()
    yield fake
    fake.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[str, FakeEngine]]:
    """Shared server for requests that do not reach the engine."""
    engine = FakeEngine()
    with serving(create_app(engine, ServerConfig())) as base:
        yield base, engine
    engine.close()


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    with serving(create_app(engine, ServerConfig())) as base:
        yield base


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=30) as openai_client:
        yield openai_client
