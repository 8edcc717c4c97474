"""OpenTelemetry spans: what they say, what they leave out, and that no collector can slow the server."""

from __future__ import annotations

import gzip
import http.server
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from twofold.api.config import ServerConfig
from twofold.api.errors import ConfigError
from twofold.server.app import app_of
from twofold.server.bridge.models import state as state_module
from twofold.server.bridge.models.state import ServerState
from twofold.server.bridge.observe import spans as spans_module
from twofold.server.bridge.observe.spans import RequestSpans

from tests.e2e.waiting import wait_until
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import HTTP, serving

SECRET = "xylophone"
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Server:
    """A live server whose spans go to `exporter`."""

    def __init__(self, url: str, exporter: InMemorySpanExporter) -> None:
        self.url, self._exporter = url, exporter

    def post(self, path: str, body: dict[str, Any], **headers: str) -> int:
        return HTTP.post(f"{self.url}{path}", json=body, headers=headers).status_code

    def exported(self) -> tuple[ReadableSpan, ...]:
        """All spans. A request's span is written after its answer was sent, and after its children."""
        spans = self._exporter.get_finished_spans
        wait_until(lambda: any(span.kind is SpanKind.SERVER for span in spans()))
        return spans()

    def finished(self) -> tuple[ReadableSpan, dict[str, ReadableSpan]]:
        """The request's span and its children by name, once they have been exported."""
        spans = self.exported()
        (root,) = (span for span in spans if span.kind is SpanKind.SERVER)
        children = {span.name: span for span in spans if span is not root}
        assert root.context is not None
        for child in children.values():
            assert child.parent is not None
            assert child.parent.span_id == root.context.span_id
        return root, children


@pytest.fixture
def traced(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(spans_module, "_GATHER_S", 0.01)
    exporter = InMemorySpanExporter()
    state = ServerState(ServerConfig(), None)
    state.spans = RequestSpans(exporter, "9.9")
    state.ready(engine)
    with serving(app_of(state)) as url:
        yield Server(url, exporter)
    state.close()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_chat(traced: Server) -> None:
    body = {
        "model": "fake-tales",
        "messages": [{"role": "user", "content": f"{SECRET} b c d"}],
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 3,
        "stop": [SECRET],
        "seed": 7,
    }
    assert traced.post("/v1/chat/completions", body) == 200
    root, children = traced.finished()
    found = attributes(root)
    assert root.name == "chat fake-tales"
    assert found.pop("gen_ai.response.id").startswith("chatcmpl-")
    assert found.pop("gen_ai.response.time_to_first_chunk") > 0
    assert found.pop("server.port") == int(traced.url.rpartition(":")[2])
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "twofold",
        "gen_ai.request.model": "fake-tales",
        "gen_ai.response.model": "fake-tales",
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.seed": 7,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.usage.output_tokens": 3,
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": "/v1/chat/completions",
        "server.address": "127.0.0.1",
    }
    assert root.status.status_code is StatusCode.UNSET
    assert root.resource.attributes["service.name"] == "twofold"
    assert root.resource.attributes["service.version"] == "9.9"
    assert {
        "read",
        "parse",
        "tokenise_wait",
        "template",
        "tokenise",
        "queue",
        "prefill",
        "decode",
    } <= children.keys()
    assert "compile" not in children


def test_children_follow_one_another(traced: Server) -> None:
    """By the fake engine: 0.25 s in the queue, 0.5 s prefill, 1.5 s decode."""
    assert traced.post("/v1/completions", {"prompt": "a b c"}) == 200
    root, children = traced.finished()
    ordered = sorted(children.values(), key=lambda span: span.start_time or 0)
    assert [span.name for span in ordered if span.name in ("read", "queue", "prefill", "decode")] == [
        "read",
        "queue",
        "prefill",
        "decode",
    ]
    assert ordered[0].start_time == root.start_time
    for before, after in itertools.pairwise(ordered):
        assert after.start_time == pytest.approx(before.end_time, abs=1000)
    length_s = {span.name: ((span.end_time or 0) - (span.start_time or 0)) / 1e9 for span in ordered}
    assert (length_s["queue"], length_s["prefill"], length_s["decode"]) == pytest.approx((0.25, 0.5, 1.5))
    assert (root.end_time or 0) / 1e9 == pytest.approx(time.time(), abs=60)


def test_children_end_before_their_parent(traced: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token's delivery delays no decoding, and a clock that is set meanwhile moves no end."""
    stages = {"queue": 0.1, "prefill": 0.2, "deliver": 5.0, "decode": 0.3}
    monkeypatch.setattr(spans_module, "_stages", lambda request, parts: [(None, parts), (0, stages)])
    clock = time.time
    monkeypatch.setattr(time, "time_ns", lambda: int((clock() - 3600) * 1e9))
    assert traced.post("/v1/completions", {"prompt": "a b c"}) == 200
    root, children = traced.finished()
    assert children["decode"].start_time == children["deliver"].start_time
    assert children["deliver"].start_time == pytest.approx(children["prefill"].end_time, abs=1000)
    for child in children.values():
        assert (root.start_time or 0) <= (child.start_time or 0) <= (child.end_time or 0)
        assert (child.end_time or 0) <= (root.end_time or 0), child.name


def test_several_answers_share_their_prompts(traced: Server) -> None:
    """Two prompts with two answers each: the tokens of a prompt count once."""
    assert traced.post("/v1/completions", {"prompt": ["a b c", "d e"], "n": 2, "max_tokens": 1}) == 200
    spans = traced.exported()
    (root,) = (span for span in spans if span.kind is SpanKind.SERVER)
    found = attributes(root)
    assert found["gen_ai.request.choice.count"] == 4
    assert found["gen_ai.usage.input_tokens"] == 5
    assert found["gen_ai.usage.output_tokens"] == 4
    assert found["gen_ai.response.finish_reasons"] == ("length",) * 4
    decodes = [attributes(span)["twofold.answer_index"] for span in spans if span.name == "decode"]
    assert decodes == [0, 1, 2, 3]
    assert sum(span.name == "read" for span in spans) == 1


@pytest.mark.parametrize("sampled", [True, False])
def test_the_clients_trace_is_continued(traced: Server, sampled: bool) -> None:
    header = f"00-{TRACE_ID}-{PARENT_ID}-{'01' if sampled else '00'}"
    assert traced.post("/v1/completions", {"prompt": "a b"}, traceparent=header) == 200
    if not sampled:
        assert traced.post("/v1/completions", {"prompt": "a b"}) == 200  # the only one that is recorded
        assert traced.finished()[0].parent is None
        return
    root, children = traced.finished()
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == PARENT_ID
    assert {f"{span.context.trace_id:032x}" for span in (root, *children.values()) if span.context} == {
        TRACE_ID
    }


@pytest.mark.parametrize(
    "header", ["", "nonsense", "00-0-0-01", "00-" + "f" * 5000, f"ff-{TRACE_ID}-{PARENT_ID}-01"]
)
def test_a_malformed_trace_begins_a_new_one(traced: Server, header: str) -> None:
    assert traced.post("/v1/completions", {"prompt": "a b"}, traceparent=header) == 200
    root, _ = traced.finished()
    assert root.parent is None


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", {"messages": []}, 400),
        (
            "/v1/chat/completions",
            {"model": "unknown", "messages": [{"role": "user", "content": SECRET}]},
            404,
        ),
        ("/v1/completions", {"prompt": f"{SECRET} " * 100}, 400),
    ],
)
def test_a_refused_request_has_a_span_too(
    traced: Server, path: str, body: dict[str, Any], status: int
) -> None:
    assert traced.post(path, body) == status
    root, children = traced.finished()
    assert attributes(root)["error.type"] == str(status)
    assert attributes(root)["http.response.status_code"] == status
    # By convention 4xx is the client's error, not the server's.
    assert root.status.status_code is StatusCode.UNSET
    assert children.keys() <= {"read", "parse", "tokenise_wait", "template", "tokenise"}
    assert SECRET not in root.to_json()


def test_a_failing_engine_is_an_error(traced: Server, engine: FakeEngine) -> None:
    engine.fail_after_words = 1
    assert traced.post("/v1/completions", {"prompt": "a b c"}) == 500
    root, _ = traced.finished()
    assert root.status.status_code is StatusCode.ERROR
    assert attributes(root)["gen_ai.response.finish_reasons"] == ("error",)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": SECRET}], "user": SECRET, "stop": SECRET},
        ),
        ("/v1/completions", {"prompt": SECRET, "suffix": None, "bad_words": [SECRET]}),
        ("/v1/responses", {"input": SECRET, "instructions": SECRET, "metadata": {"a": SECRET}}),
        (
            "/v1/messages",
            {"model": "fake-tales", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 2},
        ),
        (
            "/api/chat",
            {"model": "fake-tales", "messages": [{"role": "user", "content": SECRET}], "stream": False},
        ),
        ("/api/generate", {"model": "fake-tales", "prompt": SECRET, "stream": False}),
    ],
)
def test_no_text_leaks_in_any_api(traced: Server, path: str, body: dict[str, Any]) -> None:
    """The prompt and the answer, which repeats it, are neither in spans nor in metrics."""
    assert traced.post(path, body) == 200
    metrics = HTTP.get(f"{traced.url}/metrics").text
    root, children = traced.finished()
    assert attributes(root)["gen_ai.usage.output_tokens"] >= 1
    assert SECRET not in metrics + "".join(span.to_json() for span in (root, *children.values()))


def test_only_requests_for_text_have_spans(traced: Server) -> None:
    for path in ("/health", "/metrics", "/v1/models"):
        HTTP.get(f"{traced.url}{path}")
    traced.post("/tokenize", {"prompt": "a"})
    traced.post("/v1/completions", {"prompt": "a"})
    assert attributes(traced.finished()[0])["http.route"] == "/v1/completions"


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes OTLP over HTTP."""

    taken: list[tuple[str, ExportTraceServiceRequest]]
    release: threading.Event

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.taken.append((self.path, ExportTraceServiceRequest.FromString(body)))
        self.release.wait(30)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[tuple[str, type[Collector]]]:
    """Base URL of a live collector, and its handler; clearing `release` makes it slow."""
    handler = type("Fresh", (Collector,), {"taken": [], "release": threading.Event()})
    handler.release.set()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", handler
        handler.release.set()
        server.shutdown()


@pytest.mark.parametrize(
    ("given", "path"), [("", "/v1/traces"), ("/", "/v1/traces"), ("/in/traces", "/in/traces")]
)
def test_a_collector_takes_protobuf_over_http(
    engine: FakeEngine, collector: tuple[str, type[Collector]], given: str, path: str
) -> None:
    base, handler = collector
    state = ServerState(ServerConfig(otlp_endpoint=base + given), None)
    state.ready(engine)
    with serving(app_of(state)) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="unused") as client:
        client.completions.create(model="fake-tales", prompt="a b c")
        wait_until(lambda: handler.taken)
        state.close()
        lines = HTTP.get(f"{url}/metrics").text.splitlines()
    requests = [request for taken_path, request in handler.taken if taken_path == path]
    spans = [
        span
        for each in requests
        for resource in each.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    (root,) = (span for span in spans if not span.parent_span_id)
    assert root.name == "text_completion fake-tales"
    assert {span.name for span in spans} >= {"read", "queue", "prefill", "decode"}
    values = {item.key: item.value for item in root.attributes}
    assert values["gen_ai.usage.output_tokens"].int_value == 3
    exported = [line for line in lines if line.startswith("twofold:spans_total") and "exported" in line]
    assert exported[0].endswith(f" {len(spans)}.0")


def test_a_collector_that_does_not_answer_delays_no_request(
    engine: FakeEngine, collector: tuple[str, type[Collector]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the queue full, requests are answered, spans are dropped and counted, and closing takes two seconds."""
    monkeypatch.setattr(spans_module, "_MAX_QUEUED", 10)
    monkeypatch.setattr(spans_module, "_GATHER_S", 0.01)
    base, handler = collector
    handler.release.clear()
    state = ServerState(ServerConfig(otlp_endpoint=base), None)
    state.ready(engine)
    with serving(app_of(state)) as url:
        HTTP.post(f"{url}/v1/completions", json={"prompt": "a"}).raise_for_status()
        wait_until(lambda: handler.taken)  # and the export waits for an answer
        for _ in range(5):
            HTTP.post(f"{url}/v1/completions", json={"prompt": "a b"}).raise_for_status()
        assert state.spans is not None
        counts = state.spans.counts
        wait_until(lambda: counts["dropped"] > 0)
        assert counts["exported"] == 0
        begun_s = time.monotonic()
        state.close()
        assert time.monotonic() - begun_s < 10


class Broken(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        raise OSError("no route")


def test_an_exporter_that_raises_is_counted(engine: FakeEngine) -> None:
    state = ServerState(ServerConfig(), None)
    state.spans = RequestSpans(Broken())
    state.ready(engine)
    with serving(app_of(state)) as url:
        HTTP.post(f"{url}/v1/completions", json={"prompt": "a"}).raise_for_status()
    state.close()  # exports what waits
    assert state.spans.counts["failed"] > 4
    assert state.spans.counts["exported"] == 0


def test_without_the_extra_the_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "twofold.server.bridge.observe.spans", None)
    with pytest.raises(ConfigError, match=r"--otlp-endpoint.*pip install 'twofold\[otel\]'"):
        state_module.ServerState(ServerConfig(otlp_endpoint="http://127.0.0.1:4318"), None)


@pytest.mark.parametrize("given", ["127.0.0.1:4317", "grpc://127.0.0.1:4317", "http://", "http://a b", ""])
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint was given"):
        ServerConfig(otlp_endpoint=given)
