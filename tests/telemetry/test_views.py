"""SQL views show the events of blocks as rows, in plain SQL of SQLite."""

from __future__ import annotations

import asyncio
import sqlite3
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasette.app import Datasette
from twofold.telemetry import queries
from twofold.telemetry.sink import CACHE_EVENT_DTYPE, EVENT_DTYPES, TOKEN_LAYER_DTYPE, UPLOAD_DTYPE
from twofold.telemetry.writer import open_sink

from tests.dashboard.synthetic_run import ManualClock, run_info, synthetic_history


def written(path: Path, **events: np.ndarray) -> Path:
    sink = open_sink(f"sqlite:///{path / 't.db'}")
    sink.begin_run(run_info())
    for kind, rows in events.items():
        sink.native_events(kind, rows)
    sink.close()
    return path / "t.db"


def drawn(kind: str, count: int) -> np.ndarray:
    """Events with every field drawn from all its values, numbers below zero included."""
    rng = np.random.default_rng(7)
    rows = np.zeros(count, EVENT_DTYPES[kind])
    for name in rows.dtype.names or ():
        dtype = rows[name].dtype
        if dtype.kind == "f":
            rows[name] = rng.normal(size=rows[name].shape) * 10.0 ** rng.integers(-12, 13, rows[name].shape)
        else:
            limits = np.iinfo(dtype)
            rows[name] = rng.integers(limits.min, limits.max, rows[name].shape, dtype=dtype, endpoint=True)
    # What the writer sums has to be what an engine reports.
    rows["layer"] = rng.integers(0, 6, count)
    for name, most in (("reason", 3), ("kind", 4), ("size_bytes", 2**40)):
        if name in (rows.dtype.names or ()):
            rows[name] = rng.integers(0, most, count)
    rows["step"] = 1000 + np.sort(rng.integers(0, 90, count))
    if kind == "token_layer":
        rows["num_routed"] = rng.integers(0, 17, count)
        rows["placement"] = rng.integers(0, 3, rows["placement"].shape)
        rows["request"] = rng.integers(-1, 4, count)
    return rows


@pytest.mark.parametrize("kind", list(EVENT_DTYPES))
def test_a_view_has_every_event_bit_for_bit(tmp_path: Path, kind: str) -> None:
    rows = drawn(kind, 300)
    path = written(tmp_path, **{kind: rows})
    names = list(rows.dtype.names or ())
    with sqlite3.connect(path) as database:
        found = database.execute(f"SELECT {', '.join(names)} FROM {kind}").fetchall()
    expected = [
        tuple(
            row[name][: row["num_routed"]].tobytes() if rows.dtype[name].subdtype else row[name].item()
            for name in names
        )
        for row in rows
    ]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("kind", list(EVENT_DTYPES))
def test_the_query_returns_the_events_that_were_pushed(tmp_path: Path, kind: str) -> None:
    rows = drawn(kind, 300)
    db = queries.open_database(f"sqlite:///{written(tmp_path, **{kind: rows})}")
    run = queries.runs(db)[0]
    found = queries.events(db, run, kind)
    assert bool((np.diff(found["step"]) >= 0).all())
    order = sorted(name for name in rows.dtype.names or () if rows.dtype[name].subdtype is None)
    np.testing.assert_array_equal(np.sort(found, order=order), np.sort(rows, order=order))
    some = queries.events(db, run, kind, first_step=1030, last_step=1040, request=int(rows["request"][0]))
    inside = (rows["step"] >= 1030) & (rows["step"] <= 1040) & (rows["request"] == rows["request"][0])
    assert len(some) == inside.sum()


def test_a_block_worked_out_by_hand(tmp_path: Path) -> None:
    """Two tokens of two experts each, written as bytes: what the views must read from them."""
    path = written(tmp_path)
    block = {
        "run_id": 1, "request": 5, "first_step": 40, "last_step": 41, "num_events": 2,
        "step": bytes([0, 0, 0, 0, 1, 0, 0, 0]),
        "position": struct.pack("<ii", 16, 17), "layer": struct.pack("<hh", 2, 2),
        "num_routed": bytes([2, 1]), "num_hits": bytes([1, 0]), "num_cpu": bytes([1, 0]), "num_fetched": bytes([0, 1]),
        "experts": struct.pack("<HHHH", 300, 7, 511, 0), "placement": bytes([0, 1, 2, 0]),
        "weights": struct.pack("<ffff", 0.75, 0.25, 1.0, 0.0),
        **{name: struct.pack("<ff", 1.5, 1024.0) for name in ("layer_us", "cpu_us", "gpu_us", "predicted_us")},
    }  # fmt: skip
    with sqlite3.connect(path) as database:
        database.execute(
            f"INSERT INTO token_layer_block ({', '.join(block)}) VALUES ({', '.join('?' * len(block))})",
            list(block.values()),
        )
        found = database.execute(
            "SELECT step, request, position, layer, rank, expert, placement, weight FROM token_expert"
        ).fetchall()
        times = database.execute("SELECT step, layer_us, num_fetched FROM token_layer").fetchall()
    assert found == [
        (40, 5, 16, 2, 0, 300, "hit", 0.75),
        (40, 5, 16, 2, 1, 7, "cpu", 0.25),
        (41, 5, 17, 2, 0, 511, "fetched", 1.0),
    ]
    assert times == [(40, 1.5, 0), (41, 1024.0, 1)]


def test_numbers_at_the_limits_of_their_types(tmp_path: Path) -> None:
    tokens = np.zeros(6, TOKEN_LAYER_DTYPE)
    tokens["layer_us"] = [0.0, -0.0, np.inf, np.nan, 1e-30, 2.0**61]
    uploads = np.zeros(2, UPLOAD_DTYPE)
    uploads["size_bytes"], uploads["request"] = [2**62, 0], [-1, 2**40]
    decisions = np.zeros(2, CACHE_EVENT_DTYPE)
    decisions["victim"], decisions["at_us"] = [-(2**31), 2**31 - 1], [1e15 + 0.5, -1e-3]
    path = written(tmp_path, token_layer=tokens, upload=uploads, cache_event=decisions)
    with sqlite3.connect(path) as database:
        assert [row[0] for row in database.execute("SELECT layer_us FROM token_layer")] == [
            0.0, 0.0, None, None, 0.0, 2.0**61,
        ]  # fmt: skip
        assert database.execute("SELECT size_bytes, request FROM upload").fetchall() == [
            (2**62, -1),
            (0, 2**40),
        ]
        assert database.execute("SELECT victim, at_us FROM cache_event").fetchall() == [
            (-(2**31), 1e15 + 0.5),
            (2**31 - 1, -1e-3),
        ]


def test_a_request_is_found_by_its_index(tmp_path: Path) -> None:
    path = written(tmp_path, token_layer=drawn("token_layer", 300))
    with sqlite3.connect(path) as database:
        plan = database.execute(
            "EXPLAIN QUERY PLAN SELECT * FROM token_expert WHERE run_id = 1 AND request = 2"
        ).fetchall()
    assert any("token_layer_block_by_request (run_id=? AND request=?" in row[3] for row in plan), plan


def test_experts_are_counted_without_unpacking_them(tmp_path: Path) -> None:
    """Datasette counts a view before it opens it, and has one second for that: 10 million rows here took 14 s."""
    even, uneven = drawn("token_layer", 900), drawn("token_layer", 300)
    even["num_routed"], even["request"] = 16, 1
    uneven["request"] = 2
    path = written(tmp_path, token_layer=np.concatenate([even, uneven]))
    instructions = 0

    def count() -> None:
        nonlocal instructions
        instructions += 1

    with sqlite3.connect(path) as database:
        database.set_progress_handler(count, 1)
        ((found,),) = database.execute("SELECT count(*) FROM token_expert WHERE request = 1").fetchall()
        assert found == 16 * len(even)
        assert instructions < 8 * found
        ((found,),) = database.execute("SELECT count(*) FROM token_expert WHERE request = 2").fetchall()
        assert found == uneven["num_routed"].sum()


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("views") / "t.db"
    clock = ManualClock()
    sink = open_sink(f"sqlite:///{path}", now=clock)
    synthetic_history(sink, clock, seconds=4)
    sink.close()
    return path


def test_datasette_shows_experts(run_file: Path) -> None:
    async def requested(path: str) -> Any:
        datasette = Datasette([str(run_file)], settings={"suggest_facets": False})
        answer = await datasette.client.get(path)
        assert answer.status_code == 200, answer.text[:300]
        return answer.json()

    listed = asyncio.run(requested("/t.json"))
    assert {"token_expert", "token_layer", "upload", "cache_event"} <= {
        view["name"] for view in listed["views"]
    }
    first = asyncio.run(requested("/t/token_expert.json?_size=5&_shape=objects"))["rows"]
    with sqlite3.connect(run_file) as database:
        database.row_factory = sqlite3.Row
        expected = [dict(row) for row in database.execute("SELECT * FROM token_expert LIMIT 5")]
        counts = database.execute(
            "SELECT expert, count(*) FROM token_expert WHERE request = 0 GROUP BY expert ORDER BY expert"
        ).fetchall()
    assert first == expected
    statement = "select+expert,+count(*)+from+token_expert+where+request=0+group+by+expert+order+by+expert"
    page = asyncio.run(requested(f"/t.json?sql={statement}&_shape=arrays"))
    assert [tuple(row) for row in page["rows"]] == [tuple(row) for row in counts]
    assert len(counts) > 10
