"""Writes deploy/grafana/twofold.json, the board for Grafana. A panel is one row of `ROWS`; a test compares the file."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

BOARD: Final = Path(__file__).parents[1] / "deploy" / "grafana" / "twofold.json"
_WIDTH: Final = 24
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_NO_SLOTS: Final = "This server has no expert slots in VRAM"
_NO_DATABASE: Final = "This server records no telemetry (--telemetry-url)"


def _series(name: str, more: str = "") -> str:
    return f'{name}{{model_name=~"$model",instance=~"$instance"{more}}}'


def _rate(name: str, more: str = "") -> str:
    return f"rate({_series(name, more)}[$__rate_interval])"


def _sum(name: str, by: str = "", more: str = "") -> str:
    grouping = f" by ({by})" if by else ""
    return f"sum{grouping}({_rate(name, more)})"


def _quantiles(name: str) -> dict[str, str]:
    buckets = _sum(f"{name}_bucket", "le")
    return {f"p{round(100 * q)}": f"histogram_quantile({q}, {buckets})" for q in (0.5, 0.95, 0.99)}


@dataclass(frozen=True)
class Panel:
    """One panel: title, what it shows and what to do about it, and its queries by legend."""

    title: str
    text: str
    queries: dict[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    no_value: str = ""
    """Why some servers have no such series; shown instead of "No data"."""


ROWS: Final[dict[str, tuple[Panel, ...]]] = {
    "Now": (
        Panel(
            "Running", "Requests in the batch. At --max-num-seqs, new ones wait.",
            {"running": f"sum({_series('vllm:num_requests_running')})"}, kind="stat", width=4,
        ),
        Panel(
            "Waiting", "Requests that wait for a place or for KV cache pages. Growing: the load exceeds the capacity.",
            {"waiting": f"sum({_series('vllm:num_requests_waiting')})"}, kind="stat", width=4,
        ),
        Panel(
            "Generated", "Tokens generated per second, by the wall clock.",
            {"tokens/s": _sum("vllm:generation_tokens_total")}, kind="stat", width=4,
        ),
        Panel(
            "TTFT p95", "From the request's first byte to its first token.",
            {"p95": _quantiles("vllm:time_to_first_token_seconds")["p95"]}, unit="s", kind="stat", width=4,
        ),
        Panel(
            "KV cache", "Share of pages in use. Near 100 %: sequences are preempted; raise --max-total-tokens.",
            {"used": f"max({_series('vllm:kv_cache_usage_perc')})"}, unit="percentunit", kind="stat", width=4,
        ),
        Panel(
            "Up since", "Start of the server process. Recent without a deployment: look for crashes in its log.",
            {"{{instance}}": f"1000 * max by (instance) ({_series('process_start_time_seconds')})"},
            unit="dateTimeFromNow", kind="stat", width=4,
        ),
    ),
    "What clients feel": (
        Panel(
            "Time to first token", "Rising: see where it goes in the next row.",
            _quantiles("vllm:time_to_first_token_seconds"), unit="s",
        ),
        Panel(
            "Inter-token latency", "Rising with the running requests: lower --max-num-seqs, or set --max-itl-ms.",
            _quantiles("vllm:inter_token_latency_seconds"), unit="s",
        ),
        Panel(
            "End-to-end latency", "First byte of the request to the last token. It grows with the answer's length.",
            _quantiles("vllm:e2e_request_latency_seconds"), unit="s",
        ),
        Panel(
            "Tokens per second", "Prompt tokens count when their request finishes; cached ones cost nothing.",
            {
                "generated": _sum("vllm:generation_tokens_total"),
                "prompt, {{source}}": _sum("vllm:prompt_tokens_by_source_total", "source"),
            },
        ),
        Panel(
            "Finished requests per second", "abort: the client disconnected; error: see the server's log.",
            {"{{finished_reason}}": _sum("vllm:request_success_total", "finished_reason")}, stacked=True,
        ),
        Panel(
            "Refused requests per second", "429 and 503: the server is full; add a server or raise --max-waiting.",
            {"{{code}}": _sum("twofold:requests_refused_total", "code")}, stacked=True,
        ),
    ),
    "Where the time goes": (
        Panel(
            "Mean time to first token by stage",
            "read and deliver: the process is short of CPU; queue: of capacity; prefill: prompts are long.",
            {
                "{{stage}}": f"""{_sum("twofold:request_stage_seconds_sum", "stage", ',stage!="decode"')} / scalar("""
                f"""{_sum("twofold:request_stage_seconds_count", "", ',stage="queue"')})"""
            },
            unit="s", width=16, stacked=True,
        ),
        Panel(
            "p95 by phase", "Time in the queue, in prefill and in decode.",
            {
                phase: _quantiles(f"vllm:request_{phase}_time_seconds")["p95"]
                for phase in ("queue", "prefill", "decode")
            },
            unit="s",
        ),
        Panel(
            "Requests", "Waiting above zero for long: the load exceeds the capacity.",
            {
                state: f"sum({_series(f'vllm:num_requests_{state}')})" for state in ("running", "waiting")
            },
        ),
        Panel(
            "Tokens per step", "Small: too few requests to batch. At --max-num-batched-tokens: prefill-bound.",
            {
                "mean": f"{_sum('vllm:iteration_tokens_total_sum')} / {_sum('vllm:iteration_tokens_total_count')}",
                "p95": _quantiles("vllm:iteration_tokens_total")["p95"],
            },
        ),
        Panel(
            "Lengths of requests", "Mean tokens by request. Longer prompts than planned: raise the KV cache.",
            {
                kind: f"{_sum(f'vllm:request_{kind}_tokens_sum')} / {_sum(f'vllm:request_{kind}_tokens_count')}"
                for kind in ("prompt", "generation")
            },
        ),
    ),
    "KV cache": (
        Panel(
            "Pages in use", "Share of the KV cache's pages that running requests use.",
            {"{{instance}}": f"max by (instance) ({_series('vllm:kv_cache_usage_perc')})"}, unit="percentunit",
        ),
        Panel(
            "Prefix cache hits",
            "Share of prompt tokens that the cache held. Low with a shared system prompt: check that it is first.",
            {"hits": f"{_sum('vllm:prefix_cache_hits_total')} / {_sum('vllm:prefix_cache_queries_total')}"},
            unit="percentunit",
        ),
        Panel(
            "Preemptions per second", "Above zero: the KV cache is too small for --max-num-seqs such requests.",
            {"preemptions": _sum("vllm:num_preemptions_total")},
        ),
    ),
    "Experts": (
        Panel(
            "Where routed experts ran", "cpu is normal for experts that are rarely used; uploaded ones wait for PCIe.",
            {
                "{{place}}": f"{_sum('twofold:expert_uses_total', 'place')} / "
                f"scalar({_sum('twofold:expert_uses_total')})"
            },
            unit="percentunit", stacked=True,
        ),
        Panel(
            "Copied over PCIe", "Compare it with the link's bandwidth in twofold calibrate.",
            {"host to device": _sum("twofold:h2d_bytes_total")}, unit="Bps", no_value=_NO_SLOTS,
        ),
        Panel(
            "Uploads and evictions per second",
            "Equal and high: the experts in use do not fit; raise --gpu-experts-ratio.",
            {
                what: _sum(f"twofold:expert_{what}_total") for what in ("uploads", "evictions")
            },
            no_value=_NO_SLOTS,
        ),
        Panel(
            "Prefetched experts per second", "Mostly wasted or late: prefetching does not pay on this link.",
            {"{{outcome}}": _sum("twofold:prefetch_experts_total", "outcome")}, stacked=True, no_value=_NO_SLOTS,
        ),
    ),
    "Server": (
        Panel(
            "CPU", "Cores in use. At the number of --cpu-threads while idle: another program competes for them.",
            {"{{instance}}": _sum("process_cpu_seconds_total", "instance")},
        ),
        Panel(
            "Memory", "Resident memory. It falls again after a load of long prompts only if caches are dropped.",
            {"{{instance}}": f"max by (instance) ({_series('process_resident_memory_bytes')})"}, unit="bytes",
        ),
        Panel(
            "HTTP answers per second", "By class of status; 4xx are the clients' errors.",
            {"{{status}}": _sum("http_requests_total", "status")}, stacked=True,
        ),
        Panel(
            "Telemetry", "Lost events above zero: the disk is too slow or full; see the server's log.",
            {
                "written per second": _sum("twofold:telemetry_events_written_total"),
                "lost per second": _sum("twofold:telemetry_events_lost_total"),
                "queued": f"sum({_series('twofold:telemetry_events_queued')})",
            },
            no_value=_NO_DATABASE,
        ),
    ),
}  # fmt: skip


def board() -> dict[str, Any]:
    """The board as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append({"type": "row", "title": title, "gridPos": _position(0, top, _WIDTH, 1), "panels": []})
        top, left = top + 1, 0
        for panel in row:
            height = 4 if panel.kind == "stat" else 8
            if left + panel.width > _WIDTH:
                top, left = top + height, 0
            panels.append(_panel(panel) | {"gridPos": _position(left, top, panel.width, height)})
            left += panel.width
        top += height
    for number, each in enumerate(panels, 1):
        each["id"] = number
    return {
        "title": "Twofold",
        "uid": "twofold",
        "description": "Load, latency, KV cache and expert placement of Twofold servers.",
        "tags": ["twofold", "llm"],
        "schemaVersion": 38,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.no_value:
        defaults["noValue"] = panel.no_value
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        defaults["custom"] = {"fillOpacity": 40 if panel.stacked else 10, "stacking": stacking}
    targets = [
        {"refId": chr(ord("A") + number), "expr": query, "legendFormat": legend, "datasource": _SOURCE}
        for number, (legend, query) in enumerate(panel.queries.items())
    ]
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": targets,
    }


def _position(left: int, top: int, width: int, height: int) -> dict[str, int]:
    return {"x": left, "y": top, "w": width, "h": height}


def _variables() -> list[dict[str, Any]]:
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    chosen = {"multi": True, "includeAll": True, "current": {"text": "All", "value": "$__all"}, "refresh": 2}
    filters = [
        {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": _SOURCE,
            "query": f"label_values(vllm:num_requests_running, {metric_label})",
            **chosen,
        }
        for name, label, metric_label in (
            ("model", "Model", "model_name"),
            ("instance", "Server", "instance"),
        )
    ]
    return [source, *filters]


def text() -> str:
    return json.dumps(board(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.exit(BOARD.write_text(text(), encoding="utf-8") and 0)
