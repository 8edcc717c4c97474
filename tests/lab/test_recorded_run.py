"""What-if questions about a recorded run, against brute force and hand-worked prices."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from twofold.api.errors import ConfigError
from twofold.experts.profiles import load_profile
from twofold.telemetry import queries
from twofold.telemetry.writer import open_sink
from twofold.tools.lab import recorded_run
from twofold.tools.lab.cards import Card, with_card
from twofold.tools.lab.shapes import SHAPES

from tests.dashboard.synthetic_run import ManualClock, run_info, synthetic_history

SIZES = [256.0, 128.0, 16.0, 100_000.0, 1_000_000.0]


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> tuple[queries.Run, list[queries.RecordedRouting]]:
    url, clock = f"sqlite:///{tmp_path_factory.mktemp('lab') / 't.db'}", ManualClock()
    figures = load_profile("rtx3060-pcie3").cost_figures
    machine = {
        "name": "rtx3060-pcie3",
        "profile": {name: {"value": value, "source": "test"} for name, value in figures.items()},
        "model_sizes": SIZES,
    }
    sink = open_sink(url, now=clock)
    synthetic_history(sink, clock, seconds=8, info=run_info(machine_json=json.dumps(machine)))
    sink.close()
    db = queries.open_database(url)
    run = queries.runs(db)[0]
    rows = queries.layer_rows(db, run, queries.window(run))
    return run, [queries.recorded_routing(half) for half in rows.halves()]


def test_the_halves_are_the_whole_and_do_not_overlap(
    halves: tuple[queries.Run, list[queries.RecordedRouting]],
) -> None:
    before, after = halves[1]
    assert before.num_tokens >= 50
    assert after.num_tokens >= 50
    assert before.num_uses + after.num_uses > before.num_tokens * 6


def lru_hits(ids: np.ndarray, slots: int) -> int:
    """Hits of an LRU list per layer, one token at a time, misses admitted after the token."""
    hits = 0
    for layer in range(ids.shape[1]):
        order: list[int] = []
        for token in ids[:, layer].tolist():
            hits += len(set(token) & set(order))
            order = (token + [expert for expert in order if expert not in token])[:slots]
    return hits


def test_lru_hits_what_a_list_hits(halves: tuple[queries.Run, list[queries.RecordedRouting]]) -> None:
    run, (_, routing) = halves
    trace = recorded_run.trace_of(routing, run)
    (found,) = recorded_run.replay_policies(trace, ["lru"], num_slots=6 * 8, price=0.5)
    # Experts of one token are equally old: which of them leaves first may differ.
    assert found.hit_rate == pytest.approx(lru_hits(routing.ids, 8) / routing.ids.size, abs=0.01)
    assert found.cost_per_token == pytest.approx(found.misses_per_token + 0.5 * found.uploads_per_token)


def test_the_oracle_is_the_best_and_a_warm_start_helps(
    halves: tuple[queries.Run, list[queries.RecordedRouting]],
) -> None:
    run, (before, routing) = halves
    trace, warm_up = (recorded_run.trace_of(each, run) for each in (routing, before))
    names = ["lru", "two-in-eight", "payback", "oracle-payback"]
    cold = {r.policy: r for r in recorded_run.replay_policies(trace, names, num_slots=48, price=0.67)}
    warm = {
        r.policy: r
        for r in recorded_run.replay_policies(trace, names, num_slots=48, price=0.67, warm_up=warm_up)
    }
    assert min(cold.values(), key=lambda result: result.cost_per_token).policy == "oracle-payback"
    assert warm["lru"].hit_rate >= cold["lru"].hit_rate
    assert warm["oracle-payback"] == cold["oracle-payback"]
    assert [name for name, result in cold.items() if result.offline] == ["oracle-payback"]


def test_plans_are_priced_by_the_formula() -> None:
    shape, machine = SHAPES["qwen3-30b-a3b-q4"], load_profile("rtx4090-pcie4")
    f, size = machine.cost_figures, shape.expert_bytes
    cpu = f["cpu_expert_overhead_us"] + size / (f["cpu_bandwidth_gbps"] * 1e3)
    gpu = size / (f["vram_bandwidth_gbps"] * 1e3)
    prices = recorded_run.plan_prices(shape, machine, num_hits=2, num_misses=1)
    on_cpu = max(f["gpu_launch_us"] + 2 * gpu, f["handshake_us"] + cpu) + f["join_us"]
    landed = f["link_latency_us"] + size / (f["link_bandwidth_gbps"] * 1e3)
    fetched = max(f["gpu_launch_us"] + 2 * gpu, landed) + gpu + f["join_us"]
    assert prices == pytest.approx([on_cpu, fetched], rel=0.02)


def test_sizes_and_machine_come_from_the_run(
    halves: tuple[queries.Run, list[queries.RecordedRouting]],
) -> None:
    run = halves[0]
    shape, machine = recorded_run.shape_of(run), recorded_run.machine_of(run)
    assert shape is not None
    assert machine is not None
    assert (shape.hidden, shape.head_bytes, shape.routing) == (256.0, 1e6, (6, 32, 4))
    assert machine.cost_figures == load_profile("rtx3060-pcie3").cost_figures
    assert 0 < recorded_run.upload_price(run) < 100
    older = queries.Run(**{**run.__dict__, "machine_json": "{}"})
    named = recorded_run.machine_of(older)
    assert named is not None
    assert named.name == "rtx4090-pcie4"  # by the accelerator's name
    assert recorded_run.shape_of(older) is None
    unknown = queries.Run(**{**older.__dict__, "accelerator": "none"})
    assert recorded_run.machine_of(unknown) is None


def small(name: str, usable_gb: float) -> Card:
    """A card of the RTX 4090's rates with so much memory left to the model."""
    return Card(name, (usable_gb + 0.6) / (1024**3 / 1e9), 850 / 0.84, 165.0, 4)


def test_more_memory_is_never_slower_and_time_is_bounded(
    halves: tuple[queries.Run, list[queries.RecordedRouting]],
) -> None:
    run, (_, routing) = halves
    trace, shape, host = (
        recorded_run.trace_of(routing, run),
        recorded_run.shape_of(run),
        load_profile("rtx4090-pcie4"),
    )
    assert shape is not None
    cards = [small(str(size), size) for size in (0.001, 1.012, 1.015, 1.05)]
    none, *found = recorded_run.plan_cards(trace, shape, host, pcie=4, cards=cards)
    assert none is None, "one layer's experts alone are larger"
    shares = [result.slot_share for result in found if result]
    assert len(shares) == 3
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    speeds = [result.tokens_per_s for result in found if result]
    assert speeds[-1] == max(speeds)
    assert list(recorded_run.plan_cards(trace, shape, host, pcie=4, limit_s=-1)) == []
    (whole,) = recorded_run.simulate_machines(routing, run, [host], slots=1.0)
    assert whole.hit_rate == 1.0
    assert whole.tokens_per_s == pytest.approx(speeds[-1], rel=0.02)
    older = queries.Run(**{**run.__dict__, "machine_json": "{}"})
    with pytest.raises(ConfigError, match="did not record the sizes"):
        next(recorded_run.simulate_machines(routing, older, [host], slots=0.5))


def test_cards_are_real_ones_in_the_chosen_computer() -> None:
    """By hand: an RTX 4060 Ti has 16 GiB, 288 GB/s and eight lanes of PCIe 4.0; 0.6 GB are the driver's."""
    host = load_profile("rtx3060-pcie3")
    assert recorded_run.pcie_of(host) == 3
    sizes = [card.vram_gib for card in recorded_run.CARDS]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (8, 32)
    (card,) = [each for each in recorded_run.CARDS if each.name == "RTX 4060 Ti"]
    assert card.title == "RTX 4060 Ti 16 GB"
    assert card.usable_gb == pytest.approx(16 * 1.073741824 - 0.6)
    for pcie, link in ((3, 6.15), (4, 12.5), (5, 12.5)):
        figures = with_card(host, card, pcie=pcie).cost_figures
        assert figures["link_bandwidth_gbps"] == pytest.approx(link)
        assert figures["vram_bandwidth_gbps"] == pytest.approx(0.84 * 288)
        assert figures["cpu_bandwidth_gbps"] == host.cost_figures["cpu_bandwidth_gbps"]
    (rtx3060,) = [each for each in recorded_run.CARDS if each.name == "RTX 3060"]
    for name, value in host.cost_figures.items():
        assert with_card(host, rtx3060, pcie=3).cost_figures[name] == pytest.approx(value, rel=0.01), name


def test_another_model_is_drawn_as_skewed_and_as_repetitive_as_the_recorded_one(
    halves: tuple[queries.Run, list[queries.RecordedRouting]],
) -> None:
    run, (_, routing) = halves
    trace, shape = recorded_run.trace_of(routing, run), SHAPES["qwen3-30b-a3b-q4"]
    drawn = recorded_run.routing_like(trace, shape)
    assert (drawn.num_layers, drawn.num_experts, drawn.top_k) == shape.routing
    assert drawn.num_tokens == trace.num_tokens
    assert all(len(set(token)) == shape.routing[2] for token in drawn.ids[:, 0].tolist())

    def repeats(ids: np.ndarray) -> float:
        pairs = zip(ids[1:].reshape(-1, ids.shape[2]), ids[:-1].reshape(-1, ids.shape[2]), strict=True)
        return float(np.mean([len(set(now) & set(before)) / len(now) for now, before in pairs]))

    assert repeats(drawn.ids) == pytest.approx(repeats(trace.ids), abs=0.15)
    top = [np.sort(each)[::-1] for each in (np.array(trace.usage()), np.array(drawn.usage()))]
    shares = [values[: len(values) // 4].sum() / values.sum() for values in top]
    assert shares[1] == pytest.approx(shares[0], abs=0.1)


@pytest.mark.parametrize(
    ("own", "calibrated", "tokens", "speed", "expected"),
    [
        (True, True, 500, 40.0, "high"),
        (True, True, 500, 39.0, "medium"),
        (True, False, 500, 80.0, "medium"),
        (True, True, 500, 24.0, "low"),
        (True, True, 50, 80.0, "low"),
        (False, True, 500, 80.0, "low"),
    ],
)
def test_confidence_needs_a_margin_a_measured_computer_and_the_models_own_routing(
    own: bool, calibrated: bool, tokens: int, speed: float, expected: str
) -> None:
    sure, reasons = recorded_run.Basis(own, calibrated, tokens).confidence(speed, 20.0)
    assert sure == expected
    assert reasons[0] == f"{speed / 20 - 1:+.0%} to the wanted speed"


def test_the_last_tokens_are_kept(halves: tuple[queries.Run, list[queries.RecordedRouting]]) -> None:
    run, (_, routing) = halves
    trace = recorded_run.trace_of(routing, run)
    short = recorded_run.shortened(trace, 10)
    np.testing.assert_array_equal(short.ids, trace.ids[-10:])
    assert short.offsets[0] == 0
    assert short.offsets[-1] == 10
    assert recorded_run.shortened(trace, 10**6).num_tokens == trace.num_tokens


def test_an_empty_window_is_refused_in_words(tmp_path: Path) -> None:
    sink = open_sink(f"sqlite:///{tmp_path / 't.db'}")
    sink.begin_run(run_info())
    sink.close()
    db = queries.open_database(f"sqlite:///{tmp_path / 't.db'}")
    run = queries.runs(db)[0]
    routing = queries.recorded_routing(queries.layer_rows(db, run, queries.window(run)))
    assert routing.num_tokens == 0
    with pytest.raises(ConfigError, match="empty"):
        recorded_run.trace_of(routing, run)
