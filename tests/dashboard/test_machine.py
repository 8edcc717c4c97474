"""The Machine page, and what the engine and the operating system tell about the machine."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from twofold.telemetry import gpu_samples, machine_samples, queries
from twofold.telemetry.writer import open_sink

from dashboard import formats
from tests.dashboard.app_pages import answers, metrics, show, texts, write_database
from tests.dashboard.plotly_values import values_of
from tests.dashboard.synthetic_run import ManualClock, run_info, synthetic_history

MACHINE = {
    "system": {"processor": "Xeon <b>8488C</b>", "NUMA nodes": "2"},
    "versions": {"torch": "2.8.0"},
    "profile": {"cpu_bandwidth_gbps": {"value": 70.0, "source": "measured here"}},
}


def test_machine_shows_what_was_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    clock = ManualClock()
    sink = open_sink(f"sqlite:///{path}", now=clock)
    info = run_info(
        "none", num_slots=0, config_json='{"page_size": 16, "seed": null}', machine_json=json.dumps(MACHINE)
    )
    made = synthetic_history(sink, clock, seconds=4, info=info)
    sink.close()
    app = show(monkeypatch, path, "machine")
    shown, text = metrics(app), texts(app)
    assert (shown["Twofold"], shown["Instruction set"], shown["Memory nodes"]) == ("0.1.0", "avx512", "2")
    assert '">Xeon &lt;b&gt;8488C&lt;/b&gt;</td>' in text
    assert '">torch</td><td>2.8.0</td>' in text
    assert '">cpu bandwidth</td><td>70 GB/s</td><td class="tf-text">measured here</td>' in text
    assert '">page_size</td><td class="tf-text">16</td>' in text
    assert "seed" not in text
    # Overview of a run without an accelerator: what its experts read, against the ceiling.
    app = show(monkeypatch, path)
    with sqlite3.connect(path) as connection:
        ((seconds,),) = connection.execute("SELECT sum(experts_cpu_us) / 1e6 FROM step").fetchall()
    uses = made.num_hits + made.num_cpu + made.num_fetched
    assert made.num_cpu <= uses
    rate = made.num_cpu * made.info.expert_bytes / seconds
    assert metrics(app)["Expert weights used"] == f"{rate / 1e9:.2f} GB/s"
    assert f"{rate / 70e9:.0%} of 70.0 GB/s" in [metric.delta for metric in app.metric]
    assert "no link" in texts(app)
    assert "Hit rate" not in metrics(app)


def test_samples_of_the_machine_are_written_with_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "t.db"
    write_database(path, "cuda:0", seconds=2)
    db, run, _ = answers(path)
    samples = queries.machine_samples(db, run, queries.Window(0, 2**40))
    assert len(samples.at_s) >= 1
    assert samples.load_1m[0] >= 0
    assert not show(monkeypatch, path, "machine", window="all").exception
    with sqlite3.connect(path) as connection:
        connection.executemany(
            "INSERT INTO machine_sample (run_id, at_s, load_1m, clock_mhz) VALUES (1, ?, 1.0, 2000.0)",
            [(float(second),) for second in range(5000)],
        )
    thinned = queries.machine_samples(db, run, queries.Window(0, 5000))
    assert 800 <= len(thinned.at_s) <= 1000
    assert np.isnan(thinned.temperature_c).all()


class FakeNvml:
    """Two GPUs as nvidia-ml-py tells of them; the second one tells no power."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    def nvmlInit(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetUtilizationRates(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=40 + 20 * device)

    def nvmlDeviceGetClockInfo(self, device: int, kind: int) -> int:
        return 2500 - 100 * device * kind

    def nvmlDeviceGetPowerUsage(self, device: int) -> int:
        if device:
            raise RuntimeError("Not Supported")
        return 215_500

    def nvmlDeviceGetTemperature(self, device: int, kind: int) -> int:
        return 60 + 5 * device + kind

    def nvmlDeviceGetMemoryInfo(self, _device: int) -> SimpleNamespace:
        return SimpleNamespace(used=3 * 10**9, total=24 * 10**9)


@pytest.fixture
def fresh_nvml() -> Iterator[None]:
    gpu_samples._nvml.cache_clear()
    yield
    gpu_samples._nvml.cache_clear()


@pytest.mark.usefixtures("fresh_nvml")
def test_gpus_are_recorded_and_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    path = tmp_path / "t.db"
    write_database(path, "cuda:0", seconds=2)
    with sqlite3.connect(path) as connection:
        found = connection.execute(
            "SELECT gpu_percent, gpu_clock_mhz, gpu_power_w, gpu_temperature_c, vram_used_bytes, vram_bytes "
            "FROM machine_sample"
        ).fetchall()
    assert set(found) == {(50.0, 2400.0, 215.5, 65.0, 6 * 10**9, 48 * 10**9)}
    app = show(monkeypatch, path, "machine", window="all")
    for title in ("Clock, MHz", "Memory, GB", "GPU in use, %", "Power of the GPUs, W", "Temperature, °C"):
        assert f"**{title}**" in texts(app)
    traces = [trace for chart in app.get("plotly_chart") for trace in json.loads(chart.proto.spec)["data"]]
    shown = {trace["name"]: values_of(trace["y"]) for trace in traces if trace["name"].startswith("VRAM")}
    assert {name: values[0] for name, values in shown.items()} == {"VRAM in use": 6.0, "VRAM": 48.0}


class NoDriver(FakeNvml):
    def nvmlInit(self) -> None:
        raise RuntimeError("Driver Not Loaded")


@pytest.mark.parametrize("module", [None, NoDriver()])
@pytest.mark.usefixtures("fresh_nvml")
def test_without_nvml_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: NoDriver | None
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    path = tmp_path / "t.db"
    write_database(path, "none", seconds=2)
    app = show(monkeypatch, path, "machine", window="all")
    assert "**Memory, GB**" in texts(app)
    assert "GPU in use" not in texts(app)
    assert "Power of the GPUs" not in texts(app)


def test_figures_have_units() -> None:
    assert formats.named_figure("link_latency_us", 10.0) == ("link latency", "10 µs")
    assert formats.named_figure("gpu_gflops", 82_600.0) == ("gpu", "82,600 GFLOP/s")
    assert formats.named_figure("contention", 0.2) == ("contention", "0.2")


def test_a_sample_is_read_from_the_kernels_files(tmp_path: Path) -> None:
    def put(name: str, text: str) -> None:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    put("proc/loadavg", "1.25 0.80 0.50 2/345 6789\n")
    put("proc/meminfo", "MemTotal:  100 kB\nMemAvailable:   64 kB\n")
    put("proc/cpuinfo", "cpu MHz\t\t: 2000.5\ncpu MHz\t\t: 3000.5\n")
    put("sys/class/thermal/thermal_zone0/temp", "45000\n")
    put("sys/class/hwmon/hwmon1/temp1_input", "61500\n")
    put("sys/class/hwmon/hwmon1/temp2_input", "broken\n")
    sample = machine_samples.read(7.0, tmp_path)
    assert (sample.at_s, sample.load_1m, sample.available_bytes) == (7.0, 1.25, 65_536)
    assert (sample.clock_mhz, sample.lowest_clock_mhz, sample.temperature_c) == (2500.5, 2000.5, 61.5)
    put("sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq", "1800000\n")
    assert machine_samples.read(7.0, tmp_path).clock_mhz == 1800.0
    nothing = machine_samples.read(7.0, tmp_path / "none")
    assert (nothing.load_1m, nothing.clock_mhz, nothing.temperature_c) == (0.0, None, None)
