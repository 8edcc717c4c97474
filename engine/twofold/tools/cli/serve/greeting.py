"""What `twofold serve` prints when it is ready: what runs where, what to open, what to type."""

from __future__ import annotations

import contextlib
import json
import shlex
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from twofold import __version__
from twofold.api.addresses import is_loopback, without_password
from twofold.api.config import DASHBOARD_URL, EngineConfig, ServerConfig
from twofold.api.models_config import ModelsConfig
from twofold.api.types import RunInfo
from twofold.tools.cli.model_options import emulation_notice

_EVERY_ADDRESS: Final = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 (names of the wildcard, not a bind)
"""Hosts that mean all addresses of this machine, and the one that a program on it can open."""
_NOWHERE: Final = {"0.0.0.0": "192.0.2.1", "::": "2001:db8::1"}  # noqa: S104
"""Addresses reserved for documentation: they choose a route, and nothing is sent there."""
_EXAMPLE_DATABASE: Final = "sqlite:///twofold.db"

Row = tuple[str, str]


@dataclass(frozen=True)
class Server:
    """Where a server listens and what it records."""

    url: str
    """URL of its API, with the host that it listens on."""
    config: ServerConfig
    telemetry_url: str | None


def greeting(info: RunInfo, name: str, server: Server, engine: EngineConfig, *, can_chat: bool = True) -> str:
    """The rows of a server with one model. can_chat: the model has a chat template."""
    experts = info.num_layers * info.num_experts
    if info.num_slots:
        share = 100 * info.num_slots / max(1, experts)
        placed = f"{info.num_slots} of {experts} have a slot in VRAM ({share:.0f} %), policy {info.policy}"
    else:
        placed = f"all {experts} run on the CPU" if experts else "none: a dense model"
    shape = f"{info.architecture}, no MoE layers"
    if experts:
        shape = f"{info.architecture}, {info.num_layers} MoE layers of {info.num_experts} experts, top {info.top_k}"
    chosen = "auto → " if engine.accelerator == "auto" else ""
    rows = [
        ("model", f"{name} ({shape})"),
        ("accelerator", f"{chosen}{info.accelerator}: {info.accelerator_reason}"),
        ("experts", placed),
        *(("answers", text) for text in info.output_changes),
        *([("context", info.context_limit_reason)] if info.context_limit_reason else []),
        ("CPU", f"{info.cpu_isa}, {info.cpu_threads} threads"),
        ("speculation", speculation(engine)),
        *(("adapters", text) for text in adapters(engine)),
        *_rows_of(server, next(iter(engine.adapters), name), can_chat=can_chat),
    ]
    return "\n".join([*_lines(rows), *_notes(server, info.accelerator)])


def models_greeting(names: list[str], limits: ModelsConfig, server: Server, engine: EngineConfig) -> str:
    """The rows of a server whose models are loaded on demand, the first by default."""
    memory = (limits.models_memory_bytes or 0) / 2**30
    most = f"{limits.models_max} at a time" if limits.models_max else "as many as fit"
    rows = [
        ("models", f"{len(names)}, loaded on demand: {', '.join(names[:8])}{', …' if names[8:] else ''}"),
        ("default", f"{names[0]}, for requests that name no model"),
        ("loaded", f"{most}, within {memory:.2f} GiB of memory"),
        (
            "prefixes",
            engine.prefix_cache_dir or "lost when a model is unloaded (--prefix-cache-dir keeps them)",
        ),
        ("accelerator", engine.accelerator),
        ("speculation", speculation(engine)),
        *(("adapters", text) for text in adapters(engine)),
        *_rows_of(server, names[0]),
    ]
    return "\n".join([*_lines(rows), *_notes(server, engine.accelerator)])


def speculation(engine: EngineConfig) -> str:
    """The drafter that is on, or how to turn one on."""
    chosen = engine.speculation
    if engine.speculative_config is None:
        return "off, but for requests with a prediction (--speculative-config turns it on)"
    by = f" by {chosen.model}" if chosen.model else ""
    return f"{chosen.method}{by}, at most {chosen.num_speculative_tokens} tokens drafted"


def adapters(engine: EngineConfig) -> Iterator[str]:
    """The served adapters, and the folder from which more may be loaded."""
    if names := list(engine.adapters):
        yield f"{', '.join(names[:8])}{', …' if names[8:] else ''}: requests choose by their model"
    if engine.lora_dir:
        yield f"more from {engine.lora_dir} while it runs"


def addresses(url: str) -> str:
    """A URL that a program on this machine can open; where all addresses are served, also one for other machines."""
    host = urlsplit(url).hostname or ""
    if host not in _EVERY_ADDRESS:
        return url
    reachable = _own_address(host)
    other = f" (from other machines: {_with_host(url, reachable)})" if reachable else ""
    return _with_host(url, _EVERY_ADDRESS[host]) + other


def _with_host(url: str, host: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=f"{host}:{parts.port}").geturl()


def _own_address(wildcard: str) -> str:
    """This machine's address on its default route; empty without one. Sends nothing."""
    family = socket.AF_INET6 if ":" in wildcard else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((_NOWHERE[wildcard], 9))
        found: str = probe.getsockname()[0]
        return f"[{found}]" if ":" in found else found
    return ""


def _rows_of(server: Server, name: str, *, can_chat: bool = True) -> list[Row]:
    """What to open and what to type."""
    own_url = addresses(server.url).partition(" ")[0]
    database = without_password(server.telemetry_url or "")
    dashboard = f"twofold dashboard --telemetry-url {database or _EXAMPLE_DATABASE}"
    if not database:
        dashboard = (
            f"none without a database: serve with --telemetry-url {_EXAMPLE_DATABASE}, then {dashboard}"
        )
    else:
        dashboard += f", then {server.config.dashboard_url or DASHBOARD_URL}"
    return [
        ("API", addresses(server.url)),
        ("chat", f"{own_url.removesuffix('/v1')}/ in a browser"),
        ("try", _curl(own_url, name, server.config, can_chat=can_chat)),
        ("telemetry", database or "off (--telemetry-url records every decision)"),
        ("dashboard", dashboard),
        ("stop", "Ctrl-C: running answers finish first; Ctrl-C again: stop at once"),
    ]


def _curl(url: str, name: str, config: ServerConfig, *, can_chat: bool) -> str:
    body: dict[str, object] = {"model": name, "max_tokens": 100}
    if can_chat:
        path, body = (
            "chat/completions",
            body | {"messages": [{"role": "user", "content": "Tell me a story."}]},
        )
    else:
        path, body = "completions", body | {"prompt": "Once upon a time"}
    key = " -H 'Authorization: Bearer KEY'" if config.api_key else ""
    text = shlex.quote(json.dumps(body, ensure_ascii=False))
    return f"curl {url}/{path}{key} -H 'Content-Type: application/json' -d {text}"


def _notes(server: Server, accelerator: str) -> Iterator[str]:
    if notice := emulation_notice(accelerator):
        yield f"  {notice}"
    if not server.config.api_key and not is_loopback(server.config.host):
        yield f"  warning: any client that reaches {server.config.host} may use it; require a key with --api-key"


def _lines(rows: Iterable[Row]) -> Iterator[str]:
    yield f"Twofold {__version__} is ready"
    for label, text in rows:
        yield f"  {label:<12} {text}"
