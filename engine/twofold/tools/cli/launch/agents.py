"""Configures coding agents to use our server: environment, arguments and files, by their public documentation.

Uses only the agent process's environment and arguments, and files of our own: no user's configuration is changed.
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

KEY_NAME: Final = "TWOFOLD_API_KEY"
"""Environment variable that agents' settings refer to, so that no file holds a key."""
NO_KEY: Final = "unused"
"""Agents require a key; a server without one ignores it."""
_PATIENCE_MS: Final = 3_600_000
"""Request timeout. Agents abort after minutes; a long prompt may take this long with experts in slow memory."""
_LOCAL: Final = "127.0.0.1,localhost,::1"
_PROXIES: Final = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy")


@dataclass(frozen=True)
class Provider:
    """The server that an agent uses."""

    base_url: str
    """Base URL without /v1."""
    api_key: str
    model: str
    max_model_len: int | None = None
    """Tokens; None: the server does not report it."""


@dataclass(frozen=True)
class Settings:
    """Environment, arguments and file that an agent is started with."""

    environment: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    """Variables to remove because they would select another server."""
    arguments: tuple[str, ...] = ()
    """Arguments before the user's own."""
    config: str | None = None
    """Content of our configuration file, for an agent that takes one."""
    config_variable: str = ""
    """Variable that passes the file's path to the agent."""


@dataclass(frozen=True)
class Agent:
    executable: str
    needs: str
    """The API endpoint that the agent uses."""
    settings: Callable[[Provider], Settings]


def local_proxy_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Settings that keep requests to a server on this machine off a proxy."""
    before = environment.get("no_proxy") or environment.get("NO_PROXY")
    value = f"{before},{_LOCAL}" if before else _LOCAL
    return {"NO_PROXY": value, "no_proxy": value}


def _claude(provider: Provider) -> Settings:
    tiers = ("OPUS", "SONNET", "HAIKU")
    return Settings(
        environment={
            "ANTHROPIC_BASE_URL": provider.base_url,
            "ANTHROPIC_AUTH_TOKEN": provider.api_key,
            "ANTHROPIC_MODEL": provider.model,
            "ANTHROPIC_SMALL_FAST_MODEL": provider.model,
            **{f"ANTHROPIC_DEFAULT_{tier}_MODEL": provider.model for tier in tiers},
            "CLAUDE_CODE_SUBAGENT_MODEL": provider.model,
            # A block at the start of the prompt that differs per request: it would prevent prefix-cache hits.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "API_TIMEOUT_MS": str(_PATIENCE_MS),
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(_PATIENCE_MS),
        },
        unset=(
            "ANTHROPIC_API_KEY",
            "CLAUDE_CODE_USE_BEDROCK",
            "CLAUDE_CODE_USE_VERTEX",
            "CLAUDE_CODE_USE_FOUNDRY",
        ),
    )


def _codex(provider: Provider) -> Settings:
    values: dict[str, str | int] = {
        "model": provider.model,
        "model_provider": "twofold",
        "model_providers.twofold.name": "Twofold",
        "model_providers.twofold.base_url": f"{provider.base_url}/v1",
        "model_providers.twofold.wire_api": "responses",
        "model_providers.twofold.env_key": KEY_NAME,
        "model_providers.twofold.stream_idle_timeout_ms": _PATIENCE_MS,
    }
    if provider.max_model_len is not None:
        values["model_context_window"] = provider.max_model_len
    # Values are TOML; its strings and numbers are written like JSON's.
    overrides = [part for name, value in values.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    return Settings({KEY_NAME: provider.api_key}, arguments=tuple(overrides))


def _opencode(provider: Provider) -> Settings:
    model: dict[str, object] = {"name": provider.model}
    if provider.max_model_len is not None:
        # An answer may use all that the prompt leaves; the agent wants a number and reserves that much.
        output = min(32_768, provider.max_model_len // 4)
        model["limit"] = {"context": provider.max_model_len, "output": output}
    options = {
        "baseURL": f"{provider.base_url}/v1",
        "apiKey": f"{{env:{KEY_NAME}}}",
        "timeout": _PATIENCE_MS,
    }
    config = {
        "model": f"twofold/{provider.model}",
        "small_model": f"twofold/{provider.model}",
        "provider": {
            "twofold": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Twofold",
                "options": options,
                "models": {provider.model: model},
            }
        },
    }
    return Settings(
        {KEY_NAME: provider.api_key},
        config=json.dumps(config, indent=2) + "\n",
        config_variable="OPENCODE_CONFIG",
    )


def _qwen(provider: Provider) -> Settings:
    local = urllib.parse.urlsplit(provider.base_url).hostname in _LOCAL.split(",")
    return Settings(
        {
            "OPENAI_BASE_URL": f"{provider.base_url}/v1",
            "OPENAI_API_KEY": provider.api_key,
            "OPENAI_MODEL": provider.model,
        },
        # Qwen Code ignores NO_PROXY: it would ask a proxy for this machine's server.
        unset=_PROXIES if local else (),
    )


AGENTS: Final[dict[str, Agent]] = {
    "claude": Agent("claude", "/v1/messages", _claude),
    "codex": Agent("codex", "/v1/responses", _codex),
    "opencode": Agent("opencode", "/v1/chat/completions", _opencode),
    "qwen": Agent("qwen", "/v1/chat/completions", _qwen),
}
