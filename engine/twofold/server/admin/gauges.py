"""Current values for /metrics from the engine, its telemetry and the operating system, with vLLM's names where they
fit."""

from __future__ import annotations

import json
import time
from typing import get_args

from twofold.api.core_tables import COUNTERS, meanings
from twofold.api.types import EngineStats, RunInfo, SpeculationCounts
from twofold.server.admin.process_metrics import process_rows
from twofold.server.bridge.models.protocol import ServingEngine
from twofold.server.bridge.models.served_model import ModelState, ServedModel
from twofold.server.bridge.models.state import ServerState
from twofold.server.bridge.observe.metrics import Gauge, Series, label_text, step_tokens
from twofold.telemetry.sink import LEVELS, TelemetrySink


def series(state: ServerState) -> list[Series]:
    """All current values, whatever the server's phase: each model's, then the server's own."""
    own = [*state.http.counters(), *_span_counters(state), *process_rows()]
    if state.manager is None:
        model = state.default
        return [_model_series(model, [*_engine_gauges(model), *_telemetry_gauges(state.sink), *own])]
    models = [
        _model_series(model, [_model_state(model), *_engine_gauges(model), *_telemetry_gauges(model.sink)])
        for model in state.models
    ]
    return [*models, Series("", own)]


def _model_state(model: ServedModel) -> Gauge:
    states = {label_text(state=each): float(each == model.state) for each in get_args(ModelState)}
    return "twofold:model_state", "1 for the model's present state, with several models.", states


def _model_series(model: ServedModel, gauges: list[Gauge]) -> Series:
    engine, histograms = model.loaded_engine, model.metrics.histograms()
    if engine is not None:
        histograms = [*histograms, (step_tokens(engine.stats().step_tokens), "")]
    return Series(model.name, [*model.metrics.counters(), *gauges], histograms)


def _span_counters(state: ServerState) -> list[Gauge]:
    if state.spans is None:
        return []
    counts = {label_text(outcome=outcome): float(count) for outcome, count in state.spans.counts.items()}
    return [("twofold:spans_total", "OpenTelemetry spans: exported, failed or dropped (full queue).", counts)]


def _telemetry_gauges(sink: TelemetrySink | None) -> list[Gauge]:
    stats = sink.stats() if sink is not None else None
    if stats is None:
        return []
    is_recording = float(stats.last_error is None)
    lost: dict[str, float] = {label_text(place=place): count for place, count in stats.dropped.items()}
    return [
        (
            "twofold:telemetry_recording",
            "1 while the telemetry database can be written, else 0.",
            is_recording,
        ),
        (
            "twofold:telemetry_level",
            "What is recorded (--telemetry): 1 step, 2 layer (and sums by layer), 3 expert (and every event).",
            float(1 + LEVELS.index(stats.level)),
        ),
        ("twofold:telemetry_events_written_total", "Events in the database.", stats.num_written),
        ("twofold:telemetry_events_queued", "Events that wait to be written.", stats.num_queued),
        ("twofold:telemetry_events_lost_total", "Events lost: in native rings, queue or database.", lost),
    ]


def _engine_gauges(model: ServedModel) -> list[Gauge]:
    engine = model.loaded_engine
    if engine is None:
        return []
    stats = engine.stats()
    used = 1 - stats.num_free_pages / max(stats.num_pages, 1)
    queries, hits = stats.prefix_cache_queries, stats.prefix_cache_hits
    rows: list[Gauge] = [
        ("vllm:num_requests_running", "Running requests.", stats.num_running),
        ("vllm:num_requests_waiting", "Waiting requests.", stats.num_waiting),
        (
            "vllm:kv_cache_usage_perc",
            "Share of the KV cache's pages in use by running requests, 0 to 1.",
            used,
        ),
        ("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", queries),
        ("vllm:prefix_cache_hits_total", "Prefix-cache hits, tokens.", hits),
        ("vllm:num_preemptions_total", "Preemptions.", stats.num_preemptions),
        (
            "vllm:engine_sleep_state",
            "1 for the engine's present state: awake, or discard_all (KV cache and expert slots freed).",
            _sleep_states(engine.control.asleep),
        ),
        ("twofold:info", "What runs here; always 1.", _info(engine.info)),
        (
            "vllm:cache_config_info",
            "Configuration of the KV cache; always 1.",
            _cache_config(engine, stats.num_pages),
        ),
    ]
    rows += _picture_gauges(engine)
    rows += _adapter_gauges(engine)
    rows += _speculation_counters(stats.speculation)
    if stats.num_records:
        used = 1 - stats.num_free_records / stats.num_records
        rows.append(("twofold:records_usage_perc", "Share of the sequences' records in use, 0 to 1.", used))
    return rows + _expert_gauges(engine.info, stats)


def _picture_gauges(engine: ServingEngine) -> list[Gauge]:
    """Encoded pictures; nothing for a model that reads text only."""
    if engine.pictures is None:
        return []
    stats = engine.pictures.stats()
    return [
        (
            "vllm:mm_cache_queries_total",
            "Pictures looked up in the cache of encoded pictures.",
            stats.queries,
        ),
        ("vllm:mm_cache_hits_total", "Pictures that the cache had.", stats.hits),
        ("twofold:picture_encode_seconds_total", "Time of the picture encoder.", stats.encode_s),
        ("twofold:picture_cache_bytes", "Memory of the cached encoded pictures.", stats.cached_bytes),
        ("twofold:picture_encoder_loaded", "1 while the picture encoder is in memory.", stats.is_loaded),
    ]


def _adapter_gauges(engine: ServingEngine) -> list[Gauge]:
    """Adapters of requests, and those in memory; nothing in an engine that knows none."""
    known = engine.adapters.known()
    if not known:
        return []
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for each in engine.control.requests():
        if each.request.adapter is not None:
            names[each.is_running].add(each.request.adapter.name)
    labels = label_text(
        max_lora=str(engine.config.max_loras),
        running_lora_adapters=",".join(sorted(names[True])),
        waiting_lora_adapters=",".join(sorted(names[False])),
    )
    loaded = {label_text(adapter=each.name): each.loaded.num_bytes for each in known if each.loaded}
    return [
        (
            "vllm:lora_requests_info",
            "Adapters of running and of waiting requests; the value is the present Unix time.",
            {labels: time.time()},
        ),
        ("twofold:lora_memory_bytes", "Memory of each adapter that is loaded.", loaded),
    ]


def _expert_gauges(info: RunInfo, stats: EngineStats) -> list[Gauge]:
    placed = stats.placement
    uses = {"vram": placed.hits, "uploaded": placed.fetched, "cpu": placed.cpu_misses}
    rows: list[Gauge] = [
        (
            "twofold:expert_uses_total",
            "Routed experts by place: vram (cache hit), uploaded (for the step that needed them), cpu.",
            {label_text(place=place): float(count) for place, count in uses.items()},
        ),
    ]
    # Without slots, zeros would look like a hit rate.
    shown = {"cpu_misses": True, "deferred": bool(info.output_changes)}
    for name, meaning in COUNTERS["placement"][1].items():
        if shown.get(name, bool(info.num_slots)):
            metric = f"twofold:{'' if name.endswith('_bytes') else 'expert_'}{name}_total"
            rows.append((metric, f"{meaning[0].upper()}{meaning[1:]}.", getattr(placed, name)))
    if stats.dynamic_update:
        outcomes = {label_text(reason=reason): float(n) for reason, n in stats.dynamic_update.items()}
        rows.append(("twofold:dynamic_update_total", meanings("dynamic_update"), outcomes))
    if not info.num_slots:
        return rows
    return [
        *rows,
        (
            "twofold:expert_hit_rate",
            "Share of routed experts that were in VRAM since the start, 0 to 1.",
            placed.hits / max(sum(uses.values()), 1),
        ),
        (
            "twofold:prefetch_experts_total",
            meanings("prefetch"),
            {label_text(outcome=outcome): float(count) for outcome, count in stats.prefetch.items()},
        ),
    ]


def _speculation_counters(counts: SpeculationCounts | None) -> list[Gauge]:
    if counts is None:
        return []
    accepted = enumerate(counts.accepted_by_position)
    by_position = {label_text(position=str(position)): float(count) for position, count in accepted}
    return [
        ("vllm:spec_decode_num_drafts_total", "Drafts verified.", counts.num_drafts),
        ("vllm:spec_decode_num_draft_tokens_total", "Draft tokens verified.", counts.num_draft_tokens),
        ("vllm:spec_decode_num_accepted_tokens_total", "Draft tokens accepted.", counts.num_accepted_tokens),
        (
            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
            "Accepted draft tokens by their position in the draft.",
            by_position,
        ),
    ]


def _sleep_states(asleep: bool) -> dict[str, float]:
    states = {"awake": not asleep, "weights_offloaded": False, "discard_all": asleep}
    return {label_text(sleep_state=state): float(holds) for state, holds in states.items()}


def _info(info: RunInfo) -> dict[str, float]:
    shown = {
        "version": info.version,
        "accelerator": info.accelerator,
        "clock": info.clock,
        "policy": info.policy if info.num_slots else "",
        "cpu_isa": info.cpu_isa,
    }
    return {label_text(**{name: str(value) for name, value in shown.items()}): 1.0}


def _cache_config(engine: ServingEngine, num_pages: int) -> dict[str, float]:
    """Engine configuration under vLLM's names."""
    config = json.loads(engine.info.config_json)
    found = {
        "block_size": config.get("page_size"),
        "cache_dtype": config.get("kv_cache_dtype"),
        "enable_prefix_caching": config.get("enable_prefix_caching"),
        "num_gpu_blocks": num_pages,
    }
    return {label_text(**{name: str(value) for name, value in found.items()}): 1.0}
