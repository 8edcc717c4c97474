"""One line per HTTP answer in the log: refused requests always, the others with --log-requests.

No line holds a prompt, an answer, a key or a body. A client chooses its name, its model and its path, so these are cut
and their unprintable characters are replaced.
"""

from __future__ import annotations

import logging
import time
from collections.abc import MutableMapping
from typing import Any, Final

from twofold.server.bridge.observe.answered import AnsweredRequest, answered
from twofold.server.http.arrival import model_of, problem_of, times_of
from twofold.server.http.errors import CLIENT_CLOSED_REQUEST

_log = logging.getLogger("twofold.server")

_MOST_PER_S: Final = 50
"""Most refused requests that are logged in a second: a client can send them by the thousand."""
_MAX_NAME: Final = 80
_MAX_PROBLEM: Final = 500
_PROBES: Final = frozenset(("/health", "/ready", "/metrics", "/chat/markdown"))
"""Paths that monitors and the chat page ask every second; a 503 is an answer, so they are logged only when refused."""


class RequestLog:
    """Writes the lines. Used on the event loop only."""

    def __init__(self, *, logs_all: bool) -> None:
        self._logs_all = logs_all
        self._second = 0
        self._in_second = 0
        self._left_out = 0

    def write(self, scope: MutableMapping[str, Any], status: int, request_id: str) -> None:
        """Log the request of an ASGI scope, which ended just now. status: 0 if its client left before any answer."""
        failed, problem = problem_of(scope)
        if scope["path"] in _PROBES and not problem:
            return
        if max(status, failed) >= 400 and status != CLIENT_CLOSED_REQUEST:
            self._write_refusal(scope, max(status, failed), problem, request_id)
        elif self._logs_all:
            fields = _request(scope, request_id, status) | _amounts(scope, answered(scope))
            _log.info("%s", _line(fields), extra={"fields": fields})

    def _write_refusal(
        self, scope: MutableMapping[str, Any], status: int, problem: str, request_id: str
    ) -> None:
        if not self._has_room():
            return
        fields = _request(scope, request_id, status) | {"problem": printable(problem, _MAX_PROBLEM)}
        level = logging.ERROR if status >= 500 else logging.WARNING
        _log.log(level, "%s", _line(fields), extra={"fields": fields})

    def _has_room(self) -> bool:
        second = int(time.monotonic())
        if second != self._second:
            if self._left_out:
                _log.warning("%d more refused requests were not logged", self._left_out)
            self._second, self._in_second, self._left_out = second, 0, 0
        self._in_second += 1
        self._left_out += self._in_second > _MOST_PER_S
        return self._in_second <= _MOST_PER_S


def printable(text: str, most: int = _MAX_NAME) -> str:
    """Text of a client for a line of the log: on one line, cut, without control characters."""
    text = " ".join(text[:most].split())
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _request(scope: MutableMapping[str, Any], request_id: str, status: int) -> dict[str, Any]:
    """Names of the request; the route is its template, or the path where there is none."""
    found = answered(scope)
    agents = [value for name, value in scope["headers"] if name == b"user-agent"]
    return {
        "status": status,
        "method": printable(scope["method"]),
        "route": printable(getattr(scope.get("route"), "path", "") or scope["path"]),
        "model": printable(model_of(scope) or (found.model if found is not None else "")),
        "client": printable(agents[0].decode("latin-1") if agents else ""),
        "request_id": request_id,
    }


def _amounts(scope: MutableMapping[str, Any], request: AnsweredRequest | None) -> dict[str, Any]:
    """Tokens, speed and hit rate of an answered request; times are wall-clock times."""
    amounts: dict[str, Any] = {"seconds": round(time.perf_counter() - times_of(scope).received, 3)}
    if request is None:
        return amounts
    if usages := request.usages:
        generated = sum(usage.completion_tokens for usage in usages)
        amounts |= {
            "prompt_tokens": sum(usage.prompt_tokens for usage in request.prompts),
            "cached_tokens": sum(usage.cached_tokens for usage in request.prompts),
            "generated_tokens": generated,
        }
        decode_s = max(usage.wall_s[2] for usage in usages)
        if decode_s > 0 and generated > len(usages):
            # The first token of each answer ends its prefill.
            amounts["tokens_per_s"] = round((generated - len(usages)) / decode_s, 1)
    if request.ttft_s is not None:
        amounts["ttft_s"] = round(request.ttft_s, 3)
    if (rate := request.expert_hit_rate()) is not None:
        amounts["expert_hit_rate"] = round(rate, 3)
    amounts["finish"] = ",".join(dict.fromkeys(timer.reason for timer in request.timers if timer.reason))
    return amounts


def _line(fields: dict[str, Any]) -> str:
    """The fields as text; empty ones are left out."""
    left = fields["status"] in (0, CLIENT_CLOSED_REQUEST)
    words = ["client left" if left else str(fields["status"]), fields["method"], fields["route"]]
    words += [f"{name}={fields[name]}" for name in ("model", "client") if fields[name]]
    for name, form in _FORMS.items():
        if fields.get(name) not in (None, ""):
            words.append(form.format(fields[name]))
    return " ".join(words) + (f": {fields['problem']}" if fields.get("problem") else "")


_FORMS: Final = {
    "prompt_tokens": "prompt={}",
    "cached_tokens": "cached={}",
    "generated_tokens": "generated={}",
    "ttft_s": "ttft={:.3f}s",
    "tokens_per_s": "{:.1f} tokens/s",
    "expert_hit_rate": "experts hit {:.0%}",
    "finish": "finish={}",
    "seconds": "in {:.3f}s",
}
"""Text of each amount, in order."""
