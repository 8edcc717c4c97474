"""A replica's application as its gateways reach it; other clients are refused."""

from __future__ import annotations

import hmac
import secrets
from collections import Counter

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twofold.api.request_origin import RequestOrigin
from twofold.server.fleet.forwarding import ROUTING_HEADER, TOKENS_BEGIN, GatewayRouting, is_stream
from twofold.server.http.arrival import set_answer_hook, set_origin, set_prefix_labels


class GatewayGuard:
    """ASGI application around a replica's. `secret` must come with every request."""

    def __init__(self, app: ASGIApp, replica: str) -> None:
        self.secret = secrets.token_hex(16)
        self.ongoing: Counter[str] = Counter()
        """Requests that are being answered, by gateway."""
        self._app = app
        self._replica = replica.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        secret, _, routing = dict(scope["headers"]).get(ROUTING_HEADER, b"").partition(b" ")
        if not hmac.compare_digest(secret, self.secret.encode()):
            refusal = PlainTextResponse("this port serves the gateways of a fleet; call a gateway", 403)
            await refusal(scope, receive, send)
            return
        routing, answer = GatewayRouting.read(routing), _Answer(send, self._replica)
        scope["client"] = routing.client
        set_prefix_labels(scope, routing.labels)
        set_origin(scope, RequestOrigin(routed_by=routing.routed_by))
        set_answer_hook(scope, answer.begin)
        self.ongoing[routing.gateway] += 1
        try:
            await self._app(scope, receive, answer.send)
        finally:
            self.ongoing[routing.gateway] -= 1
            self.ongoing += Counter()  # keeps the gateways above 0


class _Answer:
    """Passes a response on. Of a stream, the first bytes wait for the first token: until then another replica can
    replace this one."""

    def __init__(self, send: Send, replica: bytes) -> None:
        self._send = send
        self._replica = replica
        self._preface: bytes | None = None
        self._has_begun = False
        self._is_marked = True

    def begin(self) -> None:
        """The next bytes hold the first tokens."""
        self._has_begun = True

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (b"x-twofold-replica", self._replica)]
            self._is_marked = not is_stream(message["headers"])
        elif not self._is_marked:
            if self._has_begun or not message.get("more_body"):
                message["body"] = TOKENS_BEGIN + (self._preface or b"") + message.get("body", b"")
                self._is_marked = True
            elif self._preface is None:
                self._preface = message["body"]
                return
        await self._send(message)
