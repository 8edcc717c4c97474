"""One load test in one process: its plan, server, client and samples; kept at `environment.loadtest`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from locust.env import Environment
from twofold.tools.loadgen.http_client import (
    BlockingHttpClient,
    HttpStatusError,
    api_key,
    check_url,
    served_model,
)
from twofold.tools.loadgen.loadtest_plan import LoadTestPlan
from twofold.tools.loadgen.sample_store import SampleStore
from twofold.tools.loadgen.shapes import stage_at
from twofold.tools.loadgen.user_kinds import TOOLS

from loadtest.workers import Workers

_DEFAULT_CONTEXT: Final = 2048
"""Context that is assumed where the server does not list `max_model_len`."""


class UnreachableError(Exception):
    """No server answers, or it is not an OpenAI server."""


@dataclass
class LoadTest:
    """State that the users of this process share."""

    plan: LoadTestPlan
    client: BlockingHttpClient
    workers: Workers
    store: SampleStore
    model: str
    max_context: int
    calls_tools: bool
    begun_s: float

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.begun_s

    def stage(self) -> str:
        """Name of the current stage; of the last one once the time is over."""
        stages = self.plan.user_stages
        return (stage_at(stages, self.elapsed_s) or stages[-1]).name


def prepare(environment: Environment, plan: LoadTestPlan, kinds: Iterable[str]) -> LoadTest:
    """Check the host, ask for its model, and name the test.

    Raises:
        ConfigError: load on the host is not allowed.
        UnreachableError: no OpenAI server answers there.
    """
    host = check_url(plan.host, flag="--host", allow_remote=plan.allow_remote_host)
    client = BlockingHttpClient(host, api_key())
    model, max_context = _served_model(client, plan.model)
    workers: Workers = environment.loadtest_workers
    workers.begin(plan.to_json())
    environment.host = host
    environment.loadtest = LoadTest(
        plan=plan,
        client=client,
        workers=workers,
        store=SampleStore(
            host,
            workers.loadtest_id,
            Path(plan.output) / f"{workers.file_name}.jsonl",
            plan.facts_json(),
        ),
        model=model,
        max_context=max_context,
        calls_tools="agent" in kinds and _calls_tools(client, model),
        begun_s=time.monotonic(),
    )
    return environment.loadtest


def _served_model(client: BlockingHttpClient, wanted: str) -> tuple[str, int]:
    """(name, tokens of its context)."""
    try:
        name, context = served_model(client.json("GET", "/v1/models"), wanted)
        return name, context or _DEFAULT_CONTEXT
    except (HttpStatusError, OSError, ValueError) as error:
        raise UnreachableError(
            f"no OpenAI server answers at {client.base_url} ({error}); start one with `make run` or "
            "`twofold serve`, or give its --host"
        ) from None


def _calls_tools(client: BlockingHttpClient, model: str) -> bool:
    """Whether the server accepts tools for this model; asked with one request of one token."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Find a tale."}],
        "max_tokens": 1,
        "tools": list(TOOLS),
        "tool_choice": "required",
    }
    try:
        client.json("POST", "/v1/chat/completions", body, timeout_s=60)
    except HttpStatusError:
        return False
    except (OSError, ValueError) as error:
        raise UnreachableError(f"the server at {client.base_url} did not answer a request: {error}") from None
    return True


def describe(client: BlockingHttpClient) -> str:
    """The loaded model and accelerator, and whether it is emulated; the times are always the users' wall clock."""
    try:
        health: dict[str, Any] = client.json("GET", "/health")
        served: dict[str, Any] = health.get("models") or {health.get("model", "model"): health}
        loaded = {name: one["accelerator"] for name, one in served.items() if "accelerator" in one}
    except (HttpStatusError, OSError, ValueError, AttributeError):
        return "the server does not answer /health"
    if not loaded:
        return f"{', '.join(served)}, not loaded yet"
    is_emulated = any(str(accelerator).startswith("emulated") for accelerator in loaded.values())
    note = " (emulated; times are the users' wall clock)" if is_emulated else ""
    return ", ".join(f"{name} on {accelerator}" for name, accelerator in loaded.items()) + note
