"""A running server as what answers in `twofold chat`: ours, or any that speaks OpenAI's chat completions."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import httpx

from twofold.api.errors import CapacityError, ConfigError, RequestError
from twofold.tools.cli.chat.sources import Answer, Piece, Summary, Turns

_CONNECT_S: Final = 10.0
_ANSWER_S: Final = 3600.0
"""Longest silence: a long prompt may take this long with experts in slow memory."""
_USES: Final = re.compile(r'^twofold:expert_uses_total\{.*place="(\w+)".*\} (\S+)$', re.MULTILINE)


class ServedModel:
    """A model of a running server."""

    def __init__(self, base_url: str, key: str, model: str | None) -> None:
        """base_url: with or without /v1. model: a name of GET /v1/models; None: the first.

        Raises:
            CapacityError: no server answers there.
            ConfigError: it needs another key, or has no such model.
        """
        self.url = base_url.rstrip("/").removesuffix("/v1")
        # The user's proxies cannot reach this machine's servers.
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(_ANSWER_S, connect=_CONNECT_S),
            trust_env=False,
        )
        names = self.models
        self.model = names[0] if model is None else model
        if model is not None:
            self.choose(model)
        health = self._get("/health")
        self.accelerator = str(health.get("accelerator", "")) if isinstance(health, dict) else ""
        self._has_slots = isinstance(health, dict) and bool(health.get("num_slots"))

    @property
    def models(self) -> list[str]:
        """Names of its models and adapters."""
        try:
            answer = self._client.get(f"{self.url}/v1/models")
            if answer.status_code in (401, 403):
                raise ConfigError(f"the server at {self.url} needs a key; set TWOFOLD_API_KEY")
            names = [str(card["id"]) for card in answer.raise_for_status().json()["data"]]
        except httpx.HTTPError as error:
            raise CapacityError(f"no model server answers at {self.url}: {error}") from None
        except (ValueError, LookupError, TypeError):
            raise CapacityError(
                f"{self.url}/v1/models lists no models: no model server answers there"
            ) from None
        if not names:
            raise CapacityError(f"the server at {self.url} serves no model")
        return names

    def choose(self, model: str) -> None:
        """Use another model from now on. ConfigError if there is none of this name."""
        names = self.models
        if model not in names:
            raise ConfigError(f"{self.url} does not serve {model!r}; it serves {', '.join(names)}")
        self.model = model

    def answer(self, turns: Turns, sampling: Mapping[str, Any]) -> Answer:
        body = {
            "model": self.model,
            "messages": [dict(turn) for turn in turns],
            "stream": True,
            "stream_options": {"include_usage": True},
            **sampling,
        }
        before, first, last = self._uses(), 0.0, 0.0
        num_tokens, num_pieces, reason = 0, 0, None
        for event in self._stream(body):
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
            for choice in event.get("choices", [])[:1]:
                reason = choice.get("finish_reason") or reason
                for piece in _pieces(choice.get("delta") or {}):
                    last = time.monotonic()
                    first = first or last
                    num_pieces += 1
                    yield piece
        num_tokens = num_tokens or num_pieces
        speed = (num_tokens - 1) / (last - first) if num_tokens > 1 and last > first else None
        now = self._uses()
        routed = sum(now.values()) - sum(before.values())
        hits = now.get("vram", 0.0) - before.get("vram", 0.0)
        hit_rate = hits / routed if self._has_slots and routed > 0 else None
        yield Summary(num_tokens, speed, hit_rate, is_cut=reason == "length")

    def _stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of an answer. RequestError, CapacityError."""
        try:
            with self._client.stream("POST", f"{self.url}/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    raise RequestError(_problem(answer))
                yield from _events(answer)
        except httpx.HTTPError as error:
            raise CapacityError(f"the connection to {self.url} broke: {error}") from None

    def _uses(self) -> dict[str, float]:
        """Routed experts by place since the server's start; of all its requests. Empty for other servers."""
        if not self._has_slots:
            return {}
        try:
            text = self._client.get(f"{self.url}/metrics").text
        except httpx.HTTPError:
            return {}
        return {place: float(count) for place, count in _USES.findall(text)}

    def _get(self, path: str) -> Any:
        try:
            return self._client.get(self.url + path).json()
        except (httpx.HTTPError, ValueError):
            return None


def _events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if not line.startswith("data:") or line[5:].strip() == "[DONE]":
            continue
        event = json.loads(line[5:])
        if event.get("error"):
            raise CapacityError(_message(event["error"]))
        yield event


def _pieces(delta: dict[str, Any]) -> Iterator[Piece]:
    if thinking := delta.get("reasoning") or delta.get("reasoning_content"):
        yield Piece("reasoning", str(thinking))
    if text := delta.get("content"):
        yield Piece("content", str(text))


def _problem(answer: httpx.Response) -> str:
    text = answer.read().decode(errors="replace")
    try:
        return _message(json.loads(text)["error"])
    except (ValueError, LookupError, TypeError):
        return f"the server answered {answer.status_code}: {text[:200]}"


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
