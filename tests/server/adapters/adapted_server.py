"""A server with a real engine and hand-made adapters, and its clients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
from live_server import HTTP, serving
from twofold.api.config import EngineConfig, ServerConfig
from twofold.api.request_record import RequestRecord
from twofold.engine import Engine
from twofold.server.app import create_app
from twofold.telemetry.sink import TelemetrySink

from tests.tiny_models.adapters import write_tiny_adapter
from tests.tiny_models.writing import TinyModel, write_tiny_model

ADMIN = {"Authorization": "Bearer operator"}
LONG = 20_000
PROMPT = "the king and the fox"
WAIT_S = 60


class RecordingSink(TelemetrySink):
    def __init__(self) -> None:
        self.ended: list[RequestRecord] = []

    def request(self, record: RequestRecord) -> None:
        if record.finish_reason is not None:
            self.ended.append(record)


class Served:
    """A running server with its clients."""

    def __init__(self, url: str, engine: Engine, sink: RecordingSink) -> None:
        self.url, self.engine, self.sink = url, engine, sink
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=WAIT_S)

    def ask(self, model: str, prompt: str = PROMPT, **options: Any) -> str:
        made = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}} | options
        return self.client.completions.create(model=model, prompt=prompt, **made).choices[0].text

    def stream(self, model: str, num_tokens: int) -> Any:
        return self.client.completions.create(
            model=model,
            prompt=PROMPT,
            temperature=0,
            max_tokens=num_tokens,
            stream=True,
            extra_body={"ignore_eos": True},
        )

    def post(self, path: str, body: Any, headers: dict[str, str] = ADMIN) -> httpx.Response:
        return HTTP.post(f"{self.url}{path}", json=body, headers=headers)

    def names(self) -> list[str]:
        return [each["id"] for each in HTTP.get(f"{self.url}/v1/models").json()["data"]]


def write_all(root: Path) -> Path:
    """The model, adapters a and b, and a directory of further adapters."""
    write_tiny_model(root / "tiny", TinyModel(max_position_embeddings=LONG))
    for seed, path in enumerate(("a", "b", "more/c", "more/d")):
        write_tiny_adapter(root / path, seed)
    return root


@contextlib.contextmanager
def started(directory: Path, server: ServerConfig | None = None, **settings: Any) -> Iterator[Served]:
    sink = RecordingSink()
    config = EngineConfig(
        model=str(directory / "tiny"),
        accelerator="none",
        cpu_threads=1,
        max_total_tokens=LONG,
        max_num_seqs=8,
        **{
            "lora_modules": (f"a={directory / 'a'}", f"b={directory / 'b'}"),
            "lora_dir": str(directory / "more"),
        }
        | settings,
    )
    engine = Engine.load(config, telemetry=sink)
    engine.start()
    try:
        with serving(create_app(engine, server or ServerConfig(admin_key="operator"))) as url:
            yield Served(url, engine, sink)
    finally:
        engine.close()
