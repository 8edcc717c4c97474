"""A server of several real models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from live_server import HTTP, serving
from twofold.api.config import EngineConfig, ServerConfig
from twofold.api.models_config import ModelsConfig
from twofold.api.settings import from_namespace
from twofold.engine.prefix.loading import open_store
from twofold.server.app import app_of
from twofold.server.bridge.models.state import ServerState
from twofold.telemetry.writer import open_sink
from twofold.tools.cli.hub.several_models import SharedByModels, completed, on_demand_models
from twofold.tools.cli.main import build_parser

PROMPT = "Once upon a time there was a fox who lived in a forest"


@contextlib.contextmanager
def server(folder: Path, *flags: str, telemetry: str | None = None) -> Iterator[str]:
    given = ["--models-dir", str(folder), "--max-total-tokens", "1024", "--cpu-threads", "1", *flags]
    args = build_parser("serve").parse_args(["serve", *given, "--accelerator", "none"])
    limits = completed(from_namespace(ModelsConfig, args), "none")
    store = open_store(from_namespace(EngineConfig, args))
    sink = open_sink(telemetry) if telemetry else None
    shared = SharedByModels(limits, store, lambda: None if sink is None else sink.another_run())
    state = ServerState(ServerConfig(), sink, on_demand_models(args, shared), limits)
    try:
        with serving(app_of(state)) as url:
            yield url
    finally:
        state.close()
        for each in (store, sink):
            if each is not None:
                each.close()


def ask(url: str, model: str, prompt: str = PROMPT, max_tokens: int = 24) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "seed": 7}
    answer = HTTP.post(f"{url}/v1/completions", json=body)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found
