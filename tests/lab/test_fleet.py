"""Fleets in the lab: the discrete-event simulation by hand-worked cases, and the command's answers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from twofold.api.errors import ConfigError
from twofold.telemetry.writer import open_sink
from twofold.tools.cli.main import main
from twofold.tools.lab.fleet_simulation import Arrival, ReplicaLimits, StepTimes, simulate_fleet

from tests.dashboard.synthetic_run import ManualClock, run_info, synthetic_history
from tests.lab.conftest import EXPERTS, routing

TIMES = StepTimes(base_s=0.01, decode_s=0.001, prefill_s=0.0001)
LIMITS = ReplicaLimits(max_num_seqs=4, max_num_batched_tokens=100)


def test_a_prompt_is_prefilled_in_chunks_and_decoded_a_token_per_step() -> None:
    (served,) = simulate_fleet([Arrival(1.0, 250, 3)], [TIMES], LIMITS, overhead_s=0.5)
    prefill_s = 3 * 0.01 + 250 * 0.0001
    assert served.ttft_s == pytest.approx(prefill_s + 0.5)
    assert served.e2e_s == pytest.approx(prefill_s + 2 * 0.011 + 0.5)
    assert served.tpot_s == pytest.approx(0.011)


def test_two_requests_share_steps() -> None:
    first, second = simulate_fleet([Arrival(0.0, 50, 10), Arrival(0.001, 50, 10)], [TIMES], LIMITS)
    # The second waits for the first one's prefill, then its own chunk joins a decode step.
    assert first.ttft_s == pytest.approx(0.015)
    assert second.ttft_s == pytest.approx(0.015 - 0.001 + 0.01 + 0.001 + 0.005)
    assert first.e2e_s == pytest.approx(0.015 + 0.016 + 8 * 0.012)


@pytest.mark.parametrize("limits", [ReplicaLimits(1, 100), ReplicaLimits(4, 100, kv_tokens=70)])
def test_a_full_replica_queues(limits: ReplicaLimits) -> None:
    first, second = simulate_fleet([Arrival(0.0, 50, 2), Arrival(0.0, 50, 2)], [TIMES], limits)
    assert second.ttft_s == pytest.approx(first.e2e_s + 0.015)


def test_a_request_beyond_the_cache_runs_alone_and_nothing_hangs() -> None:
    limits = ReplicaLimits(4, 100, kv_tokens=10)
    assert len(simulate_fleet([Arrival(0.0, 50, 2)] * 3, [TIMES], limits)) == 3


def test_later_turns_are_routed_to_their_prefix() -> None:
    load = [Arrival(float(number), 1000, 2) for number in range(20)]
    load += [Arrival(30.0 + number, 1100, 2, cached_tokens=1000, follows=number) for number in range(20)]
    served = simulate_fleet(load, [TIMES] * 2, LIMITS)
    assert {each.replica for each in served} == {0, 1}
    for turn, before in zip(served[20:], served[:20], strict=True):
        assert turn.replica == before.replica
        assert turn.ttft_s == pytest.approx(0.01 + 100 * 0.0001)


def test_a_second_replica_halves_the_queue() -> None:
    load = [Arrival(0.1 * number, 100, 40) for number in range(100)]
    p95 = [
        np.percentile([each.e2e_s for each in simulate_fleet(load, [TIMES] * n, ReplicaLimits(2, 100))], 95)
        for n in (1, 2, 8)
    ]
    assert p95[0] > 3 * p95[1]
    assert p95[2] <= p95[1]
    assert p95[2] == pytest.approx(0.02 + 39 * 0.0115, rel=0.1)  # nearly alone


def test_measured_steps_give_their_times() -> None:
    draw = np.random.default_rng(0)
    decode, prefill = draw.integers(0, 20, 500).astype(float), draw.integers(0, 500, 500).astype(float)
    found = StepTimes.fitted(decode, prefill, 0.01 + 0.001 * decode + 0.0001 * prefill)
    assert (found.base_s, found.decode_s, found.prefill_s) == pytest.approx((0.01, 0.001, 0.0001))
    noisy = 0.01 + 0.001 * decode + 0.0001 * prefill + draw.exponential(0.02, 500)
    mean_s = StepTimes.fitted(decode, prefill, noisy).seconds(decode, prefill).mean()  # type: ignore[arg-type, attr-defined]
    assert mean_s == pytest.approx(noisy.mean())  # a queue feels the mean, tails included
    exact = StepTimes.fitted(
        np.array([1.0, 16, 0, 0]),
        np.array([0.0, 0, 32, 512]),
        np.array([0.01, 0.04, 0.1, 1.0]),
        is_exact=True,
    )
    assert exact.seconds(1, 0) == pytest.approx(0.01, rel=0.3)
    assert StepTimes.fitted(decode, prefill * 0, np.full(500, 0.02)).prefill_s == 0
    falling = StepTimes.fitted(decode, prefill, 0.1 - 0.001 * decode)
    assert min(falling.base_s, falling.decode_s, falling.prefill_s) >= 0
    with pytest.raises(ConfigError, match="at least 3"):
        StepTimes.fitted(decode[:2], prefill[:2], np.ones(2))


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = f"sqlite:///{tmp_path_factory.mktemp('fleet') / 't.db'}"
    clock = ManualClock()
    sink = open_sink(url, now=clock)
    synthetic_history(sink, clock, seconds=8, info=run_info("none", num_slots=0))
    sink.close()
    return url


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    assert main(["lab", "fleet", *arguments, "--json"]) == 0, capsys.readouterr().err
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return found


def test_the_command_finds_the_smallest_fleet(capsys: pytest.CaptureFixture[str], database: str) -> None:
    found = rows(capsys, database, "--slo", "ttft_p95_ms=2000", "--rate", "12", "--seconds", "60")
    assert [row["replicas"] for row in found] == list(range(1, len(found) + 1))
    assert [row["holds"] for row in found] == [False] * (len(found) - 1) + [True]
    assert len(found) > 1
    p95 = [float(str(row["ttft_p95_ms"])) for row in found]
    assert p95 == sorted(p95, reverse=True)
    recorded = rows(
        capsys, database, "--slo", "e2el_p95_ms=1e9".replace("1e9", "1000000000"), "--arrivals", database
    )
    assert len(recorded) == 1


def test_a_profile_is_simulated_with_a_trace(
    capsys: pytest.CaptureFixture[str], trace_file: Path, synthetic_model: str
) -> None:
    flags = (
        "--trace",
        str(trace_file),
        "--model",
        synthetic_model,
        "--rate",
        "1",
        "--seconds",
        "20",
        "--slo",
        "tpot_p95_ms=1000",
    )
    found = rows(capsys, "rtx4090-pcie4,rtx3060-pcie3", *flags)
    assert {row["machine"] for row in found} == {"rtx4090-pcie4", "rtx3060-pcie3"}
    fast, slow = (
        next(float(str(row["tpot_p95_ms"])) for row in found if row["machine"] == name)
        for name in ("rtx4090-pcie4", "rtx3060-pcie3")
    )
    assert fast < slow


@pytest.mark.slow
def test_a_sweep_on_ray_gives_the_same_rows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="needs twofold[ray]")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    trace = tmp_path / "sized.npz"
    np.savez(trace, **routing(), num_experts=np.array(EXPERTS), sizes=np.array([512.0, 256, 16, 4e6, 1e8]))
    arguments = ["lab", "simulate", str(trace), "--profile", "rtx4090-pcie4,rtx3060-pcie3", "--json"]
    arguments += ["--slots", "0.25,0.5", "--batch", "1,4"]
    assert main(arguments) == 0
    here = json.loads(capsys.readouterr().out)
    assert main([*arguments, "--ray"]) == 0
    assert json.loads(capsys.readouterr().out) == here
    assert len(here) >= 2 * 2 * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rtx4090-pcie4", "--slo", "ttft_p95_ms=9"], "no --trace was given"),
        (["rtx4090-pcie4", "--slo", ""], "--slo is empty"),
        (["rtx4090-pcie4", "--slo", "ttft_p95_ms=9", "--rate", "0"], "--rate 0.0 was given"),
        (["sqlite:////nowhere/t.db", "--slo", "ttft_p95_ms=9"], "does not exist"),
    ],
)
def test_arguments_that_cannot_be_used(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", "fleet", *arguments]) == 2
    assert message in capsys.readouterr().err
