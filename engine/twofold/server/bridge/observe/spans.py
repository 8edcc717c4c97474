"""One OpenTelemetry span per request for generated text, with child spans for its stages (GenAI semantic conventions).

Spans are made when the request has ended, from times that are measured anyway. A bounded queue and a thread pass them
on: a slow or absent collector costs spans, which are counted, and never time. No span holds a prompt or an answer.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from twofold.server.bridge.observe.answered import AnsweredRequest, answered
from twofold.server.http.arrival import times_of

_MAX_QUEUED: Final = 8192
"""Spans that wait for the collector; further ones are dropped."""
_BATCH: Final = 512
_GATHER_S: Final = 0.5
"""Pause between two exports, so that spans travel in batches."""
_CLOSE_TIMEOUT_S: Final = 2.0
_EXPORT_TIMEOUT_S: Final = 5.0
_TRACE_PATH: Final = "/v1/traces"
_BESIDE_DECODE: Final = "deliver"
"""Stage after which the next one does not wait."""


class RequestSpans:
    """Makes the spans of finished requests. Called on the event loop; never waits."""

    def __init__(self, exporter: SpanExporter, version: str = "") -> None:
        self._processor = _BoundedProcessor(exporter)
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override these, OTEL_TRACES_SAMPLER chooses what is kept.
        resource = Resource.create({"service.name": "twofold", "service.version": version})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("twofold", version)
        self._propagator = TraceContextTextMapPropagator()

    @property
    def counts(self) -> Mapping[str, int]:
        """Spans so far by outcome: exported, failed or dropped."""
        return self._processor.counts

    def write(self, scope: MutableMapping[str, Any], status: int) -> None:
        """Write the spans of the request of an ASGI scope, which ended just now with this HTTP status."""
        request, times = answered(scope), times_of(scope)
        attributes = _http_attributes(scope, status) | _attributes(request)
        name = "POST"
        if request is not None:
            name = f"{attributes['gen_ai.operation.name']} {request.model}"
        span = self._tracer.start_span(
            name,
            context=self._propagator.extract(_trace_headers(scope)),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=_ns(times.received_s),
        )
        failed = status >= 500 or "error" in attributes.get("gen_ai.response.finish_reasons", ())
        if status >= 400 or failed:
            span.set_attribute("error.type", str(status) if status >= 400 else "engine_error")
        if failed:
            span.set_status(StatusCode.ERROR)
        end_ns = _ns(times.unix_s(time.perf_counter()))
        if span.is_recording():
            parts = {str(part): seconds for part, seconds in times.parts.items()}
            end_ns = max(end_ns, self._write_stages(span, times.received_s, _stages(request, parts)))
        span.end(end_ns)

    def close(self) -> None:
        """Export what waits, for two seconds at most."""
        self._processor.shutdown()

    def _write_stages(
        self, span: Span, begin_s: float, stages: Sequence[tuple[int | None, Mapping[str, float]]]
    ) -> int:
        """Child spans one after the other; returns the end of the last one. Those of several answers begin where the
        common stages end. The first token is delivered while the answer is decoded, so both begin together."""
        context = set_span_in_context(span)
        common_end_s, last_ns = begin_s, 0
        for index, seconds in stages:
            at_s = begin_s if index is None else common_end_s
            attributes = {} if index is None else {"twofold.answer_index": index}
            for stage, taken_s in seconds.items():
                if taken_s > 0:
                    child = self._tracer.start_span(
                        stage, context=context, attributes=attributes, start_time=_ns(at_s)
                    )
                    end_ns = _ns(at_s + taken_s)
                    child.end(end_ns)
                    last_ns = max(last_ns, end_ns)
                if stage != _BESIDE_DECODE:
                    at_s += taken_s
            if index is None:
                common_end_s = at_s
        return last_ns


def otlp_spans(endpoint: str, version: str) -> RequestSpans:
    """Spans for the collector at `endpoint`; without a path, OTLP's own is added."""
    url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _TRACE_PATH
    return RequestSpans(OTLPSpanExporter(endpoint=url, timeout=_EXPORT_TIMEOUT_S), version)


class _BoundedProcessor(SpanProcessor):
    """Queue between the event loop and the exporter's thread. The SDK's own neither counts what it drops nor bounds its
    end."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._queue: queue.Queue[ReadableSpan] = queue.Queue(_MAX_QUEUED)
        self._closing = threading.Event()
        self.counts = Counter(dict.fromkeys(("exported", "failed", "dropped"), 0))
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        try:
            self._queue.put_nowait(span)
        except queue.Full:
            self.counts["dropped"] += 1

    def shutdown(self) -> None:
        self._closing.set()
        self._thread.join(_CLOSE_TIMEOUT_S)
        # Interrupts an export that is under way.
        self._exporter.shutdown()

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(_GATHER_S)
            for batch in self._batches():
                try:
                    is_exported = self._exporter.export(batch) is SpanExportResult.SUCCESS
                except Exception:  # the exporter failed: its spans are lost and counted
                    is_exported = False
                self.counts["exported" if is_exported else "failed"] += len(batch)

    def _batches(self) -> Iterator[list[ReadableSpan]]:
        while not self._queue.empty():
            batch: list[ReadableSpan] = []
            with contextlib.suppress(queue.Empty):
                while len(batch) < _BATCH:
                    batch.append(self._queue.get_nowait())
            yield batch


def _ns(unix_s: float) -> int:
    return int(unix_s * 1e9)


def _trace_headers(scope: Mapping[str, Any]) -> dict[str, str]:
    wanted = (b"traceparent", b"tracestate")
    return {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in wanted}


def _http_attributes(scope: Mapping[str, Any], status: int) -> dict[str, Any]:
    host, port = scope.get("server") or ("", None)
    attributes = {
        "http.request.method": scope["method"],
        "http.response.status_code": status,
        "http.route": scope["path"],
        "server.address": host,
        "server.port": port,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _attributes(request: AnsweredRequest | None) -> dict[str, Any]:
    """What was asked and how the answers ended; texts, stop strings among them, stay out."""
    if request is None:
        return {}
    is_chat = request.endpoint == "chat.completions"
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat" if is_chat else "text_completion",
        "gen_ai.provider.name": "twofold",
        "gen_ai.request.model": request.requested_model or request.model,
        "gen_ai.response.model": request.model,
        "gen_ai.response.id": request.request_id,
        "gen_ai.request.choice.count": len(request.timers),
    }
    attributes |= {f"gen_ai.request.{name}": value for name, value in request.settings.items()}
    reasons = [timer.reason for timer in request.timers if timer.reason]
    if reasons:
        attributes["gen_ai.response.finish_reasons"] = reasons
    if usages := request.usages:
        attributes |= {
            "gen_ai.usage.input_tokens": sum(usage.prompt_tokens for usage in request.prompts),
            "gen_ai.usage.cache_read.input_tokens": sum(usage.cached_tokens for usage in request.prompts),
            "gen_ai.usage.output_tokens": sum(usage.completion_tokens for usage in usages),
        }
    if request.ttft_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = request.ttft_s
    return attributes


def _stages(
    request: AnsweredRequest | None, parts: Mapping[str, float]
) -> list[tuple[int | None, Mapping[str, float]]]:
    """Seconds of the common stages (index None), then of each finished answer's own."""
    found: list[tuple[int | None, Mapping[str, float]]] = [(None, parts)]
    for index, timer in enumerate(() if request is None else request.timers):
        if timer.usage is not None:
            stages = timer.stages(timer.usage)
            found.append((index, {name: seconds for name, seconds in stages.items() if name not in parts}))
    return found
