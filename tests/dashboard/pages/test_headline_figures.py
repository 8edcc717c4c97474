"""Every headline figure of every page equals SQL that was written by hand; a figure without SQL fails."""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from twofold.experts.profiles import load_profile
from twofold.telemetry.writer import open_sink

from dashboard import formats
from tests.dashboard.app_pages import PAGES, show, texts
from tests.dashboard.synthetic_run import ManualClock, run_info, synthetic_history, training_history

Figure = tuple[str, Callable[..., str]]
"""A query, and the text of its one row's values; with several rows, of an array per column."""

ELSEWHERE: Final = {
    "Link busy (emulated)": "test_expert_pages: union of overlapping copies",
    "Uploads never used": "test_expert_pages: uploads with their later uses",
    "Uses per upload": "test_expert_pages: uploads with their later uses",
    "Upload's price, misses": "tests/lab: from the cost model, not from rows",
}
"""Figures that one query cannot give, and the test that computes them otherwise."""
TABLES_ONLY: Final = {
    "lab": "computes on demand: tests/lab",
    "compare": "test_compare",
    "loadtests": "test_loadtests",
    "slow_steps": "tests/dashboard/test_slow_steps.py",
}
"""Pages without headline figures of the recorded runs, and the test that compares their tables with SQL."""

FINISHED: Final = "FROM request WHERE finish_reason IN ('stop', 'length')"
DECODE: Final = "step WHERE num_prefill_tokens = 0"
LAYERS: Final = (
    "(SELECT step, layer, max(layer_us) AS layer_us, max(token_layer.cpu_us) AS cpu_us, "
    "sum(token_layer.num_cpu + token_layer.num_fetched) AS misses FROM token_layer JOIN step USING (run_id, step) "
    "WHERE num_prefill_tokens = 0 GROUP BY step, layer)"
)
"""Layers of decode steps."""
DISTINCT: Final = (
    "(SELECT DISTINCT step, layer, expert, placement FROM token_expert JOIN step USING (run_id, step) "
    "WHERE num_prefill_tokens = 0)"
)
"""Experts of layers of decode steps, each counted once however many tokens share it."""


def share(part: float, total: float) -> str:
    return f"{part / total:.1%}"


def percentile(percent: float, text: Callable[[float], str] = formats.seconds) -> Callable[..., str]:
    return lambda values: text(float(np.percentile(values, percent)))


def placed(name: str) -> Figure:
    return (f"SELECT sum({name}), sum(num_hits + num_cpu + num_fetched) FROM layer_second", share)


def client(name: str, sql: str) -> dict[str, Figure]:
    query = f"SELECT {sql} {FINISHED}"
    return {f"{name}, p50": (query, percentile(50)), f"{name}, p50 beside": (query, percentile(95, _p95))}


def _p95(value: float) -> str:
    return f"p95 {formats.seconds(value)}"


OVERVIEW: Final[dict[str, Figure]] = {
    "Decode tokens/s": (f"SELECT sum(num_decode_tokens) / (sum(wall_us) / 1e6) FROM {DECODE}", formats.rate),
    **client("TTFT", "first_token_s - received_s"),
    **client("TPOT", "(finished_s - first_token_s) / (completion_tokens - 1)"),
    "Running / waiting": ("SELECT count(*), 0 FROM run WHERE finished_s IS NULL", "{} / {}".format),
    "Answered / requests": (
        "SELECT count(*) FILTER (WHERE finish_reason IN ('stop', 'length')), count(*) FROM request",
        "{} / {}".format,
    ),
}
REQUESTS: Final[dict[str, Figure]] = {
    name: (f"SELECT {sql} FROM request ORDER BY number DESC LIMIT 1", text)
    for name, sql, text in (
        ("TTFT", "first_token_s - received_s", formats.seconds),
        ("TTFT beside", "queue_s + prefill_s", lambda value: f"{formats.seconds(value)} emulated"),
        ("TPOT", "(finished_s - first_token_s) / (completion_tokens - 1)", formats.seconds),
        ("TPOT beside", "decode_s / (completion_tokens - 1)", lambda it: f"{formats.seconds(it)} emulated"),
        ("E2E", "finished_s - received_s", formats.seconds),
        ("Prompt tokens", "prompt_tokens", str),
        ("Prompt tokens beside", "cached_tokens", "{} cached".format),
        ("Answer tokens", "completion_tokens", str),
        ("Ended by", "finish_reason", str),
    )
}
FLEET: Final[dict[str, Figure]] = {
    "Servers": (
        "SELECT count(*) FILTER (WHERE finished_s IS NULL), count(*) FROM run",
        "{} of {} live".format,
    ),
    "Requests": ("SELECT count(*) FROM request", str),
    "Answer tokens": ("SELECT sum(completion_tokens) FROM request", str),
    "Prefix hits": ("SELECT sum(cached_tokens), sum(prompt_tokens) FROM request", share),
}
USED: Final[dict[str, Figure]] = {
    "Experts used": ("SELECT count(*) FROM (SELECT DISTINCT layer, expert FROM token_expert)", str),
    "Experts used beside": ("SELECT num_layers * num_experts FROM run", "of {}".format),
}
MACHINE: Final[dict[str, Figure]] = {
    "Twofold": ("SELECT version FROM run", str),
    "Instruction set": ("SELECT cpu_isa FROM run", str),
    "CPU threads": ("SELECT cpu_threads FROM run", str),
    "Memory nodes": (
        "SELECT coalesce(json_extract(machine_json, '$.system.\"NUMA nodes\"'), '–') FROM run",
        str,
    ),
    "Prediction error": ("SELECT '–'", str),
}
EMULATED: Final[dict[str, dict[str, Figure]]] = {
    "overview": {
        **OVERVIEW,
        "Decode tokens/s beside": (
            f"SELECT sum(num_decode_tokens) / (sum(step_us) / 1e6) FROM {DECODE}",
            lambda value: f"{formats.rate(value)} emulated",
        ),
        "Hit rate": placed("num_hits"),
        "PCIe per token": (
            "SELECT (SELECT sum(size_bytes) FROM upload) * 1.0 / sum(num_prefill_tokens + num_decode_tokens) FROM step",
            formats.size,
        ),
        "PCIe per token beside": (
            "SELECT (SELECT sum(size_bytes) FROM upload) / (sum(step_us) / 1e6) FROM step",
            lambda value: f"{formats.link_rate(value)} emulated",
        ),
    },
    "requests": REQUESTS,
    "fleet": FLEET,
    "placement": {
        "On GPU, hit": placed("num_hits"),
        "On GPU, fetched": placed("num_fetched"),
        "On CPU": placed("num_cpu"),
        **USED,
    },
    "pcie": {
        "Link busy (emulated) beside": ("SELECT 'of the time in steps'", str),
        "PCIe traffic (emulated)": (
            "SELECT (SELECT sum(size_bytes) FROM upload) / (sum(step_us) / 1e6) FROM step",
            formats.link_rate,
        ),
        # Copies back to back of 393,216 bytes: 10 us of latency, then 25 GB/s.
        "PCIe traffic (emulated) beside": (
            "SELECT (SELECT sum(size_bytes) FROM upload) / (sum(step_us) / 1e6) / (393216 / (10e-6 + 393216 / 25e9)) "
            "FROM step",
            "{:.0%} of ceiling".format,
        ),
        "Copies": ("SELECT count(*) FROM upload", str),
        "Median copy": ("SELECT size_bytes FROM upload", percentile(50, formats.size)),
    },
    "cache": {
        "Hit rate": placed("num_hits"),
        "Hit rate beside": ("SELECT 'all tokens of the window'", str),
        "Slots": ("SELECT num_slots FROM run", str),
        "Slots beside": (
            "SELECT num_slots * 1.0 / num_layers / num_experts FROM run",
            "{:.0%} of all experts".format,
        ),
        "Evictions": ("SELECT count(*) FROM cache_event WHERE kind = 1", str),
        "Decode tokens analysed": (
            "SELECT count(*) FROM token_layer JOIN step USING (run_id, step) "
            "WHERE layer = 0 AND num_prefill_tokens = 0",
            str,
        ),
    },
    "scheduler": {
        "Layers of decode steps": (f"SELECT count(*) FROM {LAYERS}", str),
        "Median layer (emulated)": (
            f"SELECT layer_us FROM {LAYERS}",
            lambda values: formats.microseconds(float(np.sort(values)[len(values) // 2])),
        ),
        "Layers with misses": (f"SELECT sum(misses > 0), count(*) FROM {LAYERS}", share),
        "Misses fetched": (
            f"SELECT sum(placement = 'fetched'), sum(placement <> 'hit') FROM {DISTINCT}",
            share,
        ),
    },
    "machine": MACHINE,
    "training": {},
}
WEIGHTS_READ: Final[dict[str, Figure]] = {
    "Expert weights read": (
        f"SELECT (SELECT count(*) FROM {DISTINCT}) * 393216.0 / sum(cpu_us) / 1e3 FROM {LAYERS}",
        "{:.1f} GB/s".format,
    ),
    "Expert weights read beside": (
        f"SELECT layer, count(*) * 393216.0 / cpu_us / 1e3 FROM {DISTINCT} JOIN {LAYERS} USING (step, layer) "
        "GROUP BY step, layer",
        lambda layer, rate: (
            f"median layer {np.median([np.median(rate[layer == at]) for at in set(layer)]):.1f} GB/s"
        ),
    ),
    "Of the ceiling": (
        f"SELECT (SELECT count(*) FROM {DISTINCT}) * 393216.0 / sum(cpu_us) / 1e3, 70 FROM {LAYERS}",
        share,
    ),
    "Threads": ("SELECT cpu_threads FROM run", str),
    "Instruction set": ("SELECT cpu_isa FROM run", str),
}
CPU: Final[dict[str, dict[str, Figure]]] = {
    "overview": {
        **OVERVIEW,
        "Expert weights used": (
            "SELECT (SELECT sum(num_cpu) FROM layer_second) * 393216.0 / (sum(experts_cpu_us) / 1e6) FROM step",
            formats.link_rate,
        ),
        "Expert weights used beside": (
            "SELECT (SELECT sum(num_cpu) FROM layer_second) * 393216.0 / (sum(experts_cpu_us) / 1e6) / 70e9 FROM step",
            "{:.0%} of 70.0 GB/s".format,
        ),
        "CPU threads": ("SELECT cpu_threads FROM run", str),
    },
    "requests": {
        name: figure for name, figure in REQUESTS.items() if name not in ("TTFT beside", "TPOT beside")
    },
    "fleet": FLEET,
    "placement": {
        **USED,
        **WEIGHTS_READ,
        "Uses by the top tenth": (
            "SELECT sum(uses) FILTER (WHERE place <= 4), sum(uses) FROM (SELECT count(*) AS uses, row_number() OVER "
            "(PARTITION BY layer ORDER BY count(*) DESC) AS place FROM token_expert GROUP BY layer, expert)",
            share,
        ),
    },
    "pcie": WEIGHTS_READ,
    "cache": {},
    "scheduler": {
        **WEIGHTS_READ,
        "Layers of decode steps": (f"SELECT count(*) FROM {LAYERS}", str),
        "Median layer": (
            f"SELECT layer_us FROM {LAYERS}",
            lambda values: formats.microseconds(float(np.sort(values)[len(values) // 2])),
        ),
    },
    "machine": {
        **MACHINE,
        "Prediction error": (
            "SELECT abs(predicted_us / layer_us - 1) FROM (SELECT DISTINCT step, layer, predicted_us, layer_us "
            "FROM token_layer)",
            percentile(50, formats.percent),
        ),
    },
    "training": {},
}


@pytest.fixture(scope="module", params=["emulated:rtx4090-pcie4", "none"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose requests have times and cache hits that differ."""
    path = tmp_path_factory.mktemp("figures") / "t.db"
    slots: dict[str, object] = {} if request.param != "none" else {"num_slots": 0, "policy": ""}
    figures = load_profile("rtx4090-pcie4").cost_figures
    machine = {
        "profile": {name: {"value": value, "source": "test"} for name, value in figures.items()},
        "model_sizes": [256.0, 256.0, 16.0, 100_000.0, 1_000_000.0],
    }
    clock = ManualClock()
    sink = open_sink(f"sqlite:///{path}", now=clock)
    info = run_info(request.param, machine_json=json.dumps(machine), **slots)
    synthetic_history(sink, clock, seconds=8, info=info)
    sink.close()
    with sqlite3.connect(path) as connection:
        connection.execute(
            "UPDATE request SET received_s = submitted_s - 0.01 * (1 + number), first_token_s = first_token_s + 0.07 * "
            "(1 + number), cached_tokens = 3 * (number % 2), finished_s = finished_s + 0.02 * number"
        )
    return path


def shown(monkeypatch: pytest.MonkeyPatch, path: Path, page: str) -> dict[str, str]:
    """Headline figures, and what stands beside them."""
    found = {}
    for metric in show(monkeypatch, path, page, window="all").metric:
        found[metric.label] = metric.value
        if metric.delta:
            found[f"{metric.label} beside"] = metric.delta
    return found


def computed(path: Path, figure: Figure) -> str:
    query, text = figure
    with sqlite3.connect(path) as connection:
        rows: list[Any] = connection.execute(query).fetchall()
    return text(*rows[0]) if len(rows) == 1 else text(*map(np.array, zip(*rows, strict=True)))


@pytest.mark.parametrize("page", [page for page in PAGES if page not in TABLES_ONLY])
def test_headline_figures_are_sqls(monkeypatch: pytest.MonkeyPatch, recorded: Path, page: str) -> None:
    with sqlite3.connect(recorded) as connection:
        ((has_slots,),) = connection.execute("SELECT num_slots > 0 FROM run").fetchall()
    figures = (EMULATED if has_slots else CPU)[page]
    found = {
        label: value for label, value in shown(monkeypatch, recorded, page).items() if label not in ELSEWHERE
    }
    assert found == {label: computed(recorded, figure) for label, figure in figures.items()}


def test_no_page_is_without_sql() -> None:
    assert set(PAGES) == EMULATED.keys() | TABLES_ONLY.keys()


TRAINING: Final[dict[str, Figure]] = {
    "Step": ("SELECT max(step), max(num_steps) FROM training_step", "{} of {}".format),
    "Time left": ("SELECT '–'", str),
    "Loss": ("SELECT loss FROM training_step ORDER BY step DESC LIMIT 1", "{:.4f}".format),
    "Held-out loss, best": ("SELECT min(eval_loss) FROM training_step", "{:.4f}".format),
    "Tokens/s": ("SELECT tokens_per_s FROM training_step ORDER BY step DESC LIMIT 1", formats.rate),
    "Memory": ("SELECT memory_bytes FROM training_step ORDER BY step DESC LIMIT 1", formats.size),
}


def test_training_figures_are_sqls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    sink = open_sink(f"sqlite:///{path}")
    training_history(sink)
    sink.close()
    assert shown(monkeypatch, path, "training") == {
        label: computed(path, figure) for label, figure in TRAINING.items()
    }
    with sqlite3.connect(path) as connection:
        blobs = connection.execute("SELECT expert_load FROM training_step").fetchall()
    load = sum(np.frombuffer(zlib.decompress(blob), "<u4").reshape(2, 6).astype(int) for (blob,) in blobs)
    assert f" = {load.max():,}. The busiest expert" in texts(show(monkeypatch, path, "training"))
