"""Replay, simulation and the oracle's share of a recorded run: a telemetry URL stands where a trace file does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from twofold.telemetry import queries
from twofold.telemetry.writer import open_sink
from twofold.tools.cli.main import main
from twofold.tools.lab import recorded_run
from twofold.tools.lab.replay import DEFAULT_PRICE
from twofold.tools.lab.run_trace import source_of

from tests.dashboard.synthetic_run import ManualClock, run_info, synthetic_history
from tests.telemetry.postgres_server import running_server

MACHINE = json.dumps({"model_sizes": [64.0, 32.0, 4.5, 4096.0, 65536.0]})


def record(url: str, *, level: str = "expert", num_runs: int = 1) -> None:
    for number in range(num_runs):
        clock = ManualClock()
        sink = open_sink(url, now=clock, level=level)
        info = run_info(num_layers=3 + number, num_experts=16, num_slots=12, machine_json=MACHINE)
        synthetic_history(sink, clock, seconds=6, info=info)
        sink.close()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = f"sqlite:///{tmp_path_factory.mktemp('runs') / 't.db'}"
    record(found, num_runs=2)
    return found


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    with running_server() as server:
        found = server.new_database("lab")
        record(found, num_runs=2)
        yield found


def rows_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, float]]:
    assert main(["lab", *arguments, "--json"]) == 0
    return list(json.loads(capsys.readouterr().out))


def test_a_run_is_replayed_as_the_file_of_its_routing(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = source_of(url, run_id=1).trace
    assert trace.num_layers == 3
    file = tmp_path / f"{trace.name}.npz"
    np.savez(
        file,
        ids=trace.ids,
        probs=trace.probs,
        offsets=trace.offsets,
        num_experts=np.array(trace.num_experts),
        sizes=np.array(trace.sizes),
    )
    options = {
        "replay": ["--slots", "0.25", "--policies", "lru,payback,oracle-payback", "--price", "0.5"],
        "oracle-share": ["--slots", "0.25", "--tokens", "8", "--price", "0.5"],
        "simulate": ["--slots", "0.25", "--profile", "rtx4090-pcie4"],
    }
    for action, given in options.items():
        of_run = rows_of(capsys, action, url, "--run", "1", *given)
        assert of_run
        assert of_run == rows_of(capsys, action, str(file), *given), action


def test_a_run_is_priced_as_it_was_served(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = queries.find_run(queries.open_database(url), 1)
    price = recorded_run.upload_price(run)
    assert price != DEFAULT_PRICE
    for action in ("replay", "oracle-share"):
        rows = rows_of(capsys, action, url, "--run", "1", "--slots", "0.25")
        assert {row["price"] for row in rows} == {price}
    # The run's machine is the emulated one.
    machines = ["--profile", "run,rtx4090-pcie4", "--slots", "0.25", "--systems", "twofold"]
    own, named = rows_of(capsys, "simulate", url, "--run", "1", *machines)
    assert own == named
    (own,) = rows_of(
        capsys, "replay", url, "--run", "1", "--slots", "0.25", "--policies", "lru", "--profile", "run"
    )
    assert own["price"] == price


def test_a_fleet_is_simulated_with_the_routing_of_a_url(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    slo = ["--slo", "e2el_p95_ms=60000", "--seconds", "20", "--max-replicas", "1"]
    (row,) = rows_of(capsys, "fleet", "rtx4090-pcie4", "--trace", url, *slo)
    assert row["tokens_per_s"] > 0


def test_the_machine_of_a_file_is_unknown(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = source_of(url).trace
    np.savez(tmp_path / "t.npz", ids=trace.ids, sizes=np.array(trace.sizes), num_experts=np.array(16))
    assert main(["lab", "simulate", str(tmp_path / "t.npz"), "--profile", "run"]) == 2
    assert "give a telemetry URL of a calibrated run" in capsys.readouterr().err


def test_the_last_run_is_read_unless_another_is_named(url: str) -> None:
    assert source_of(url).trace.num_layers == 4
    assert 0 < source_of(url, max_tokens=20).trace.num_tokens <= 20 < source_of(url).trace.num_tokens


def test_a_run_in_postgresql_is_the_same_trace(url: str, postgres_url: str) -> None:
    for run_id in (1, 2):
        here, there = source_of(url, run_id=run_id).trace, source_of(postgres_url, run_id=run_id).trace
        np.testing.assert_array_equal(here.ids, there.ids)
        np.testing.assert_array_equal(here.offsets, there.offsets)
        assert here.sizes == there.sizes


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        (["--run", "9"], "holds no run 9; it has runs 1 to 2"),
        (["--last-tokens", "0"], "--last-tokens is 0; expected 1 or more"),
    ],
)
def test_a_bad_choice_is_one_line(
    url: str, capsys: pytest.CaptureFixture[str], given: list[str], reported: str
) -> None:
    assert main(["lab", "replay", url, *given]) == 2
    error = capsys.readouterr().err
    assert reported in error
    assert len(error.splitlines()) == 1


def test_a_run_without_routing_names_the_level(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite:///{tmp_path / 't.db'}"
    record(url, level="layer")
    assert main(["lab", "replay", url]) == 2
    assert "Start the server with --telemetry expert" in capsys.readouterr().err
    assert main(["lab", "replay", f"sqlite:///{tmp_path / 'none.db'}"]) == 2
    assert "none.db" in capsys.readouterr().err
