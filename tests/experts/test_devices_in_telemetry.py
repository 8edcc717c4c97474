"""Events of several devices: told apart in blocks, views, totals, exports and queries; no bytes with one device."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from twofold.api.config import EngineConfig
from twofold.api.control import Resize
from twofold.api.types import SamplingParams
from twofold.engine import Engine
from twofold.experts.profiles import load_profile
from twofold.telemetry import queries
from twofold.telemetry.exports.perfetto import write_perfetto
from twofold.telemetry.exports.tables import all_tables
from twofold.telemetry.exports.window import export_window
from twofold.telemetry.queries.residency import decided_shape, latest_decisions
from twofold.telemetry.writer import open_sink

from tests.e2e.waiting import wait_until
from tests.tiny_models.writing import TinyModel, write_tiny_model

# Experts of a few KB: only a slow CPU and slow links leave work to both devices.
SLOW = {"cpu_bandwidth_gbps": 1e-3, "link_bandwidth_gbps": 2e-3, "vram_bandwidth_gbps": 0.1}


def slow_pair(folder: Path) -> str:
    """Accelerator of two slow devices, "first" and "second"."""
    paths = []
    for name in ("first", "second"):
        profile = load_profile("rtx4090-pcie4")
        figures = {
            figure: dataclasses.replace(each, value=SLOW.get(figure, each.value))
            for figure, each in profile.figures.items()
        }
        paths.append(folder / f"{name}.json")
        paths[-1].write_text(dataclasses.replace(profile, name=name, figures=figures).to_json())
    return "emulated:" + "+".join(map(str, paths))


class Recorded(NamedTuple):
    path: Path
    db: queries.Database
    run: queries.Run
    placed: np.ndarray
    """Device [layers, experts] that held each expert at the end, -1: none."""


def record(folder: Path, accelerator: str) -> Recorded:
    model = write_tiny_model(folder / "model", TinyModel(dtype="bfloat16", num_layers=3, num_experts=12))
    url = f"sqlite:///{folder / 'telemetry.db'}"
    sink = open_sink(url)
    config = EngineConfig(model=str(model), accelerator=accelerator, gpu_experts_ratio=0.5, cpu_threads=1)
    engine = Engine.load(config, telemetry=sink)
    sampling = SamplingParams(max_tokens=200, temperature=0.9, seed=3, ignore_eos=True)
    engine.generate(tuple(range(5, 25)), sampling)
    moe = engine.runner.moe
    placed = moe.executor.placement_devices()
    assert placed is not None
    engine.close()
    sink.close()
    db = queries.open_database(url)
    (run,) = queries.runs(db)
    return Recorded(folder / "telemetry.db", db, run, placed)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("pair")
    return record(folder, slow_pair(folder))


def test_views_have_the_devices_of_uploads_and_experts(pair: Recorded) -> None:
    with sqlite3.connect(pair.path) as database:
        uploads = dict(database.execute("SELECT device, COUNT(*) FROM upload GROUP BY device").fetchall())
        decided = {row[0] for row in database.execute("SELECT DISTINCT device FROM cache_event")}
        ran = dict(
            database.execute(
                "SELECT device, COUNT(*) FROM token_expert WHERE placement != 'cpu' GROUP BY device"
            )
        )
        on_cpu = database.execute("SELECT MAX(device) FROM token_expert WHERE placement = 'cpu'").fetchone()
    assert set(uploads) == decided == set(ran) == {0, 1}
    assert on_cpu == (0,)
    first, second = queries.device_uses(pair.db, pair.run)
    assert (first.name, second.name) == ("first", "second")
    assert [first.num_uploads, second.num_uploads] == [uploads[0], uploads[1]]
    assert [first.num_runs, second.num_runs] == [ran[0], ran[1]]
    assert (first.num_slots, second.num_slots) == (9, 9)
    assert (
        first.upload_bytes + second.upload_bytes == queries.placement_totals(pair.db, pair.run).upload_bytes
    )


def test_the_last_residents_are_on_the_devices_that_held_them(pair: Recorded) -> None:
    last, shape = 1 << 40, pair.placed.shape
    kind, _ = latest_decisions(pair.db, pair.run, last, decided_shape(pair.run, shape))
    layer, expert = np.nonzero(pair.placed >= 0)
    assert len(layer) > 0
    assert (kind[pair.placed[layer, expert], layer, expert] == queries.CacheEventKind.ADMIT).all()
    # Others are on their way.
    assert (kind == queries.CacheEventKind.ADMIT).sum() <= pair.run.num_slots
    there = queries.residency(pair.db, pair.run, last, np.zeros(shape, np.int64))
    np.testing.assert_array_equal(there > 0, (kind == queries.CacheEventKind.ADMIT).any(axis=0))
    kept = queries.Residents(pair.db, pair.run).after(last, np.zeros(shape, np.int64))
    np.testing.assert_array_equal(kept, there)


def test_exports_have_the_devices(pair: Recorded, tmp_path: Path) -> None:
    window = export_window(pair.db, pair.run)
    rows = {table.name: list(table.parts) for table in all_tables(pair.db, window)}
    for name in ("upload", "cache_event", "token_expert"):
        assert {device for part in rows[name] for device in part["device"]} == {0, 1}
    write_perfetto(pair.db, window, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert any("demand of second" in name for name in names)
    copies = [event for event in events if event["ph"] == "X" and "bytes" in event["args"]]
    assert {(event["args"]["device"], (event["tid"] - 10) // 2) for event in copies} == {(0, 0), (1, 1)}


def test_copies_by_device_are_those_of_each_link(pair: Recorded) -> None:
    steps = queries.step_rows(pair.db, pair.run, queries.window(pair.run))
    copies = queries.copy_rows(pair.db, pair.run, steps)
    links = queries.copies_by_device(copies, 2)
    assert sum(link.num_copies for link in links) == len(copies)
    for link in links:
        own = copies.where(copies.device == link.device)
        assert link.num_bytes == own.size_bytes.sum()
        # Copies over one link never overlap.
        assert link.copying_us == pytest.approx(own.copying_us.sum())


def test_one_device_takes_no_bytes(tmp_path: Path) -> None:
    one = record(tmp_path, "emulated:rtx4090-pcie4")
    with sqlite3.connect(one.path) as database:
        for table, name in (("upload", "device"), ("cache_event", "device"), ("token_layer", "devices")):
            sizes = database.execute(f"SELECT SUM(length({name})), SUM(num_events) FROM {table}_block")
            size, num_events = sizes.fetchone()
            assert size == 0 < num_events
        assert database.execute("SELECT MAX(device), COUNT(*) FROM token_expert").fetchone()[0] == 0
        assert not database.execute("SELECT name FROM run_total WHERE name LIKE 'device%'").fetchall()
    (only,) = queries.device_uses(one.db, one.run)
    totals = queries.placement_totals(one.db, one.run)
    assert (only.num_runs, only.num_uploads) == (totals.num_hits + totals.num_fetched, totals.num_uploads)


@pytest.mark.parametrize("devices", [1, 2])
def test_freed_slots_hold_no_expert_in_the_tables(devices: int, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", TinyModel(dtype="bfloat16", num_layers=3, num_experts=12))
    url = f"sqlite:///{tmp_path / 'telemetry.db'}"
    sink = open_sink(url)
    accelerator = slow_pair(tmp_path) if devices == 2 else "emulated:rtx4090-pcie4"
    config = EngineConfig(model=str(model), accelerator=accelerator, gpu_experts_ratio=0.5, cpu_threads=1)
    engine = Engine.load(config, telemetry=sink)
    sampling = SamplingParams(max_tokens=40, temperature=0.9, seed=3, ignore_eos=True)
    db = queries.open_database(url)

    def recorded() -> np.ndarray:
        """1 + the device that holds each expert by the tables, after all that was recorded; 0: none."""
        engine._finish_background_work()
        wait_until(lambda: sink.stats().num_queued == 0)
        (run,) = queries.runs(db)
        hits, last = np.zeros((3, 12), np.int64), 1 << 40
        there = queries.residency(db, run, last, hits)
        np.testing.assert_array_equal(queries.Residents(db, run).after(last, hits), there)
        return there

    def held() -> np.ndarray:
        placed = engine.runner.moe.executor.placement_devices()
        assert placed is not None
        return placed + 1

    engine.generate(tuple(range(5, 25)), sampling)
    for ratio in (0.25, 0.75):
        engine.control.resize(Resize(gpu_experts_ratio=ratio))
        assert held().any()
        np.testing.assert_array_equal(recorded(), held())
        engine.generate(tuple(range(5, 25)), sampling)
        np.testing.assert_array_equal(recorded(), held())
    engine.control.sleep()
    assert not recorded().any()
    engine.control.wake()
    np.testing.assert_array_equal(recorded(), held())
    engine.close()
    sink.close()
