"""Configures coding agents to use our server: environment, arguments and files, by their public documentation.

Uses only the agent process's environment and arguments, and files of our own: no user's configuration is changed.
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

KEY_NAME: Final = "TWOFOLD_API_KEY"
"""Environment variable that agents' settings refer to, so that no file holds a key."""
NO_KEY: Final = "unused"
"""Agents require a key; a server without one ignores it."""
_PATIENCE_MS: Final = 3_600_000
"""Request timeout. Agents abort after minutes; a long prompt may take this long with experts in slow memory."""
LEAST_CONTEXT: Final = 32_768
"""Tokens. Agents' first requests alone take 10,000 to 25,000."""
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

    @property
    def answer_room(self) -> int:
        """Tokens that an agent keeps free for an answer, which may use all that the prompt leaves."""
        return min(32_000, (self.max_model_len or 131_072) // 4)


@dataclass(frozen=True)
class Settings:
    """Environment, arguments and files that an agent is started with."""

    environment: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    """Variables to remove because they would select another server."""
    arguments: tuple[str, ...] = ()
    """Arguments before the user's own."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Our configuration files for agents that take some: path below the agent's folder → content."""


@dataclass(frozen=True)
class Agent:
    """A coding agent, and how it is pointed at a server."""

    executable: str
    needs: str
    """The API endpoint that the agent uses."""
    settings: Callable[[Provider, Path], Settings]
    """Its settings for a server. Their files lie in the given folder, which is ours."""
    calls_tools: bool = True


def local_proxy_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Settings that keep requests to a server on this machine off a proxy."""
    before = environment.get("no_proxy") or environment.get("NO_PROXY")
    value = f"{before},{_LOCAL}" if before else _LOCAL
    return {"NO_PROXY": value, "no_proxy": value}


def _claude(provider: Provider, folder: Path) -> Settings:
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
            **_claude_context(provider),
        },
        unset=(
            "ANTHROPIC_API_KEY",
            "CLAUDE_CODE_USE_BEDROCK",
            "CLAUDE_CODE_USE_VERTEX",
            "CLAUDE_CODE_USE_FOUNDRY",
        ),
    )


def _claude_context(provider: Provider) -> dict[str, str]:
    """When Claude Code compacts.

    It assumes 200,000 tokens and takes no window below 100,000; for less it gets the share of that window.
    """
    length, room = provider.max_model_len, provider.answer_room
    if length is None:
        return {}
    window = max(_CLAUDE_LEAST_WINDOW, length)
    found = {
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(room),
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(min(window, 1_000_000)),
    }
    if length > _CLAUDE_WINDOW:
        found["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(length)
    elif length < _CLAUDE_LEAST_WINDOW:
        # It takes the share of what its window leaves beside an answer of at most 20,000 tokens.
        begins = length - room - length // 16
        share = 100 * begins // (window - min(room, 20_000))
        found["CLAUDE_AUTOCOMPACT_PCT_OVERRIDE"] = str(max(1, share))
    return found


_CLAUDE_WINDOW: Final = 200_000
_CLAUDE_LEAST_WINDOW: Final = 100_000


def _codex(provider: Provider, folder: Path) -> Settings:
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
        values["model_auto_compact_token_limit"] = provider.max_model_len - provider.answer_room
    # Values are TOML; its strings and numbers are written like JSON's.
    overrides = [part for name, value in values.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    return Settings({KEY_NAME: provider.api_key}, arguments=tuple(overrides))


def _opencode(provider: Provider, folder: Path) -> Settings:
    model: dict[str, object] = {"name": provider.model}
    if provider.max_model_len is not None:
        model["limit"] = {"context": provider.max_model_len, "output": provider.answer_room}
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
    file = "config.json"
    return Settings(
        {KEY_NAME: provider.api_key, "OPENCODE_CONFIG": str(folder / file)}, files={file: _json(config)}
    )


def _qwen(provider: Provider, folder: Path) -> Settings:
    local = urllib.parse.urlsplit(provider.base_url).hostname in _LOCAL.split(",")
    environment, files = {}, {}
    if provider.max_model_len is not None:
        file = "system-defaults.json"
        # The lowest of its settings files: the user's own override it.
        files = {file: _json({"model": {"generationConfig": {"contextWindowSize": provider.max_model_len}}})}
        environment = {
            "QWEN_CODE_SYSTEM_DEFAULTS_PATH": str(folder / file),
            "QWEN_CODE_MAX_OUTPUT_TOKENS": str(provider.answer_room),
        }
    return Settings(
        {
            "OPENAI_BASE_URL": f"{provider.base_url}/v1",
            "OPENAI_API_KEY": provider.api_key,
            "OPENAI_MODEL": provider.model,
            **environment,
        },
        # Qwen Code ignores NO_PROXY: it would ask a proxy for this machine's server.
        unset=_PROXIES if local else (),
        files=files,
    )


def _cline(provider: Provider, folder: Path) -> Settings:
    name = "openai-compatible"
    settings = {"provider": name, "model": provider.model, "baseUrl": f"{provider.base_url}/v1"}
    entry = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    files = {
        "settings/providers.json": _json(
            {"version": 1, "lastUsedProvider": name, "modes": {}, "providers": {name: entry}}
        )
    }
    if provider.max_model_len is not None:
        model = {
            "id": provider.model,
            "name": provider.model,
            "contextWindow": provider.max_model_len,
            "maxInputTokens": provider.max_model_len - provider.answer_room,
            "maxTokens": provider.answer_room,
        }
        models = {"version": 1, "providers": {name: {"models": {provider.model: model}}}}
        files["settings/models.json"] = _json(models)
    arguments = ("--data-dir", str(folder), "--provider", name, "--model", provider.model)
    return Settings({"OPENAI_API_KEY": provider.api_key}, arguments=arguments, files=files)


def _continue(provider: Provider, folder: Path) -> Settings:
    model: dict[str, Any] = {
        "name": provider.model,
        "provider": "openai",
        "model": provider.model,
        "apiBase": f"{provider.base_url}/v1",
        "apiKey": f"${{{{ secrets.{KEY_NAME} }}}}",
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use"],
    }
    if provider.max_model_len is not None:
        model["defaultCompletionOptions"] = {
            "contextLength": provider.max_model_len,
            "maxTokens": provider.answer_room,
        }
    config = {"name": "Twofold", "version": "1.0.0", "schema": "v1", "models": [model]}
    file = "config.yaml"  # JSON is YAML
    return Settings(
        {KEY_NAME: provider.api_key},
        arguments=("--config", str(folder / file)),
        files={file: _json(config)},
    )


def _aider(provider: Provider, folder: Path) -> Settings:
    name = f"openai/{provider.model}"
    environment = {
        "OPENAI_API_BASE": f"{provider.base_url}/v1",
        "OPENAI_API_KEY": provider.api_key,
        "AIDER_MODEL": name,
        "AIDER_WEAK_MODEL": name,
        "AIDER_TIMEOUT": str(_PATIENCE_MS // 1000),
        "AIDER_SHOW_MODEL_WARNINGS": "false",
    }
    if provider.max_model_len is None:
        return Settings(environment)
    about = {
        "max_tokens": provider.answer_room,
        "max_input_tokens": provider.max_model_len,
        "max_output_tokens": provider.answer_room,
        "litellm_provider": "openai",
        "mode": "chat",
    }
    file = "model-metadata.json"
    return Settings(
        environment | {"AIDER_MODEL_METADATA_FILE": str(folder / file)}, files={file: _json({name: about})}
    )


def _crush(provider: Provider, folder: Path) -> Settings:
    model: dict[str, object] = {"id": provider.model, "name": provider.model}
    if provider.max_model_len is not None:
        model |= {"context_window": provider.max_model_len, "default_max_tokens": provider.answer_room}
    chosen = {"provider": "twofold", "model": provider.model}
    config = {
        "providers": {
            "twofold": {
                "name": "Twofold",
                "type": "openai-compat",
                "base_url": f"{provider.base_url}/v1",
                "api_key": f"${KEY_NAME}",
                "models": [model],
            }
        },
        "models": {"large": chosen, "small": chosen},
    }
    environment = {
        KEY_NAME: provider.api_key,
        "CRUSH_GLOBAL_CONFIG": str(folder),  # the folder of crush.json
        "CRUSH_DISABLE_PROVIDER_AUTO_UPDATE": "1",
    }
    return Settings(environment, files={"crush.json": _json(config)})


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


AGENTS: Final[dict[str, Agent]] = {
    "claude": Agent("claude", "/v1/messages", _claude),
    "codex": Agent("codex", "/v1/responses", _codex),
    "opencode": Agent("opencode", "/v1/chat/completions", _opencode),
    "qwen": Agent("qwen", "/v1/chat/completions", _qwen),
    "cline": Agent("cline", "/v1/chat/completions", _cline),
    "continue": Agent("cn", "/v1/chat/completions", _continue),
    "aider": Agent("aider", "/v1/chat/completions", _aider, calls_tools=False),
    "crush": Agent("crush", "/v1/chat/completions", _crush),
}
