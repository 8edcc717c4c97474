"""Shared parts of all `twofold ctl` commands: the server's address, its admin key, and the output of answers."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

import httpx

from twofold.api.config import DEFAULT_URL
from twofold.api.errors import CapacityError, ConfigError, RequestError
from twofold.tools.cli.terminal_text import harmless
from twofold.tools.loadgen.http_client import check_url

KEY_VARIABLE: Final = "TWOFOLD_ADMIN_KEY"


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Which server")
    group.add_argument(
        "--url", default=DEFAULT_URL, help=f"address of the running server (default: {DEFAULT_URL})"
    )
    group.add_argument(
        "--admin-key",
        metavar="KEY",
        help=f"key the server was started with; prefer the variable {KEY_VARIABLE}, as command lines are visible",
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="seconds to wait for an answer (default: 120)",
    )
    group.add_argument("--model", metavar="NAME", help="which of several models (default: the one used last)")
    group.add_argument("--json", action="store_true", help="print the server's answer as JSON")


class AdminClient:
    """Client of one server's admin routes. Follows no redirect and no proxy: the key goes to that server alone."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Raises ConfigError without a key, or for an invalid address."""
        self._key = args.admin_key or os.environ.get(KEY_VARIABLE, "")
        if not self._key:
            raise ConfigError(
                f"--admin-key was not given and {KEY_VARIABLE} is not set; give the key that the server was started "
                "with (twofold serve --admin-key)"
            )
        if not self._key.isascii() or not self._key.isprintable():
            raise ConfigError("--admin-key was given a key that is not printable ASCII")
        self._url = check_url(args.url, flag="--url", allow_remote=True)
        self._timeout_s = args.timeout
        self._model = args.model

    def get(self, path: str, **query: object) -> dict[str, Any]:
        given = {name: str(value) for name, value in query.items() if value is not None}
        return self.ask("GET", path, params=given)

    def ask(
        self, method: str, path: str, body: object = None, *, params: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """The answer's JSON.

        Raises:
            CapacityError: no server answers, or it lacks memory.
            ConfigError: the key is wrong, or there are no admin routes.
            RequestError: the server refuses; the message is the server's.
        """
        try:
            answer = httpx.request(
                method,
                f"{self._url}/admin{path}",
                json=body,
                headers={"Authorization": f"Bearer {self._key}"},
                timeout=self._timeout_s,
                trust_env=False,
                params={**(params or {}), **({"model": self._model} if self._model else {})},
            )
            status, found = answer.status_code, answer.json()
        except (httpx.HTTPError, ValueError, RecursionError) as error:
            raise CapacityError(f"no Twofold server answers at {self._url}: {error}") from None
        if status == 200 and isinstance(found, dict):
            return found
        refusal = found.get("error") if isinstance(found, dict) else None
        message = harmless(str(refusal.get("message"))) if isinstance(refusal, dict) else f"HTTP {status}"
        if status in (401, 403):
            raise ConfigError(f"{message} (the key comes from --admin-key or {KEY_VARIABLE})")
        if isinstance(refusal, dict) and refusal.get("code") == "no_admin_key":
            raise ConfigError(message)
        raise CapacityError(message) if status >= 429 else RequestError(message)


def show(args: argparse.Namespace, answer: dict[str, Any], lines: Sequence[str]) -> int:
    """Print the answer as JSON if requested, else as text lines. Returns the exit code."""
    print(json.dumps(answer, indent=2) if args.json else "\n".join(map(harmless, lines)))
    return 0


def memory_lines(memory: dict[str, Any]) -> list[str]:
    used = memory["num_pages"] - memory["num_free_pages"]
    return [
        f"expert slots   {memory['num_slots']} ({_size(memory['slots_bytes'])})",
        f"KV cache       {memory['kv_tokens']} tokens in {memory['num_pages']} pages ({_size(memory['kv_bytes'])}), "
        f"{used} in use",
        f"prefix cache   {memory['num_cached_pages']} pages, {memory['num_snapshots']} snapshots "
        f"({_size(memory['prefix_cache_bytes'])})",
        f"context        {memory['max_context']} tokens a request",
    ]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
