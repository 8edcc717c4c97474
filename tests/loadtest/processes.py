"""A server for load tests, and their processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from twofold.telemetry.sink import LoadSample, parse_load_samples


class Chat(BaseHTTPRequestHandler):
    """Behaves as the requested model is called."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None: ...

    def do_GET(self) -> None:
        body = (
            {"data": [{"id": "good", "max_model_len": 2048}]}
            if self.path == "/v1/models"
            else {"model": "good", "accelerator": "none"}
        )
        self._answer(200, body)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/internal/load_samples":
            self.server.load_samples.append(request)  # type: ignore[attr-defined]
            self._answer(self.server.samples_status, {"accepted": 1})  # type: ignore[attr-defined]
            return
        if not request.get("stream"):  # whether tools are taken
            self._answer(400 if self.server.refuses_tools else 200, {})  # type: ignore[attr-defined]
            return
        self.server.requests.append(request)  # type: ignore[attr-defined]
        if request["model"] == "slow":
            self.server.gone.append(self._wait_until_the_client_is_gone())  # type: ignore[attr-defined]
            return
        if request["model"] == "busy":
            self._answer(503, {"error": {"message": "busy"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        request["id"] = f"chatcmpl-{len(self.server.requests)}-{id(request)}"  # type: ignore[attr-defined]
        for number in range(request["max_tokens"]):
            delta: dict[str, Any] = {"content": f"w{number} "}
            if request.get("tool_choice") == "required":
                call = {"id": f"call-{number}", "function": {"name": "find_tale", "arguments": "{}"}}
                delta = {"tool_calls": [{"index": number} | call]} if number < 2 else {}
            choice = {"index": 0, "delta": delta, "finish_reason": None}
            self._event({"id": request["id"], "choices": [choice]})
            if request["model"] == "hangs-up":
                self.close_connection = True
                return
        reason = "tool_calls" if request.get("tool_choice") else "length"
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        self._event({"choices": [], "usage": {"completion_tokens": request["max_tokens"]}})
        if request["model"] != "endless":
            self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _wait_until_the_client_is_gone(self) -> bool:
        self.connection.settimeout(30)
        self.close_connection = True
        return self.connection.recv(1) == b""

    def _event(self, value: object) -> None:
        self._chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _chunk(self, payload: bytes) -> None:
        self.wfile.write(f"{len(payload):x}\r\n".encode() + payload + b"\r\n")
        self.wfile.flush()

    def _answer(self, status: int, body: object) -> None:
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Chat)
    server.daemon_threads = True
    server.load_samples, server.requests, server.samples_status = [], [], 200  # type: ignore[attr-defined]
    server.gone, server.refuses_tools = [], False  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def loadtest(
    server: ThreadingHTTPServer, tmp_path: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "twofold.tools.cli", "loadtest"),
            *("--host", f"http://127.0.0.1:{server.server_port}", "--output", str(tmp_path)),
            *("--users", "3", "--seconds", "2", "--spawn-rate", "100", *arguments),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "http_proxy": "http://127.0.0.1:9"},  # nothing may go through a proxy
    )


def samples_of(server: ThreadingHTTPServer) -> list[LoadSample]:
    return [s for body in server.load_samples for s in parse_load_samples(body)]  # type: ignore[attr-defined]
