"""Replays of a recorded run: the run's own policy hits what the run hit."""

from __future__ import annotations

import numpy as np
import pytest
from twofold.api.config import EngineConfig
from twofold.api.types import SamplingParams
from twofold.engine import Engine
from twofold.telemetry import queries
from twofold.telemetry.writer import open_sink
from twofold.tools.lab import recorded_run

PROMPTS = ("Tell me the story of the fox and the crow.", "Continue: Once upon a time")


def recorded(url: str, prefetch: str) -> queries.Run:
    """Two answers of the bundled model on an emulated GPU."""
    config = EngineConfig(accelerator="emulated:rtx4090-pcie4", gpu_experts_ratio=0.25, prefetch=prefetch)  # type: ignore[arg-type]
    sink = open_sink(url)
    engine = Engine.load(config, telemetry=sink)
    try:
        for number, prompt in enumerate(PROMPTS):
            sampling = SamplingParams(temperature=0.8, seed=number, max_tokens=60, ignore_eos=True)
            engine.generate(engine.tokenizer.encode(prompt), sampling, lambda _: None)
    finally:
        engine.close()
        sink.close()
    return queries.runs(queries.open_database(url))[0]


@pytest.fixture(scope="module", params=["off", "on"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    url = f"sqlite:///{tmp_path_factory.mktemp('replay') / 't.db'}"
    found = recorded(url, request.param)
    db = queries.open_database(url)
    return request.param, found, db, queries.layer_rows(db, found, queries.window(found))


def replayed(run: queries.Run, rows: queries.LayerRows, policies: list[str], **changes: object) -> list:
    given = {
        "residents": np.zeros((run.num_layers, run.num_experts), np.uint8),
        "first_counted_step": 0,
        "foreseen": None,
    }
    return list(recorded_run.replay_steps(run, queries.recorded_steps(rows), policies, **(given | changes)))  # type: ignore[arg-type]


def hit_rate(rows: queries.LayerRows) -> float:
    decodes = rows.steps.step[rows.steps.is_decode]
    is_hit = rows.layers.use_placement == queries.Placement.HIT
    return float(is_hit[np.isin(rows.layers.use_step, decodes)].mean())


def test_the_runs_own_policy_hits_what_the_run_hit(run: tuple) -> None:
    prefetch, info, db, rows = run
    copies = queries.copy_rows(db, info, rows.steps)
    prefetched = copies.where(copies.reason == queries.UploadReason.PREFETCH)
    foreseen = queries.used_at_once(prefetched, rows) if prefetch == "on" else None
    own, lru = replayed(info, rows, [info.policy, "lru"], foreseen=foreseen)
    if prefetch == "off":  # nothing that decides is missing
        assert own.hit_rate == pytest.approx(hit_rate(rows), abs=1e-12)
        num_tokens = rows.steps.num_tokens[rows.steps.is_decode].sum()
        decided = np.isin(copies.step, rows.steps.step[rows.steps.is_decode])
        assert own.uploads_per_token * num_tokens == pytest.approx(decided.sum())
    else:  # what routers foresaw is not recorded
        assert foreseen is not None
        assert foreseen > 0.5
        assert own.hit_rate == pytest.approx(hit_rate(rows), abs=0.04)
        (without,) = replayed(info, rows, [info.policy])
        assert abs(own.hit_rate - hit_rate(rows)) < abs(without.hit_rate - hit_rate(rows))
    assert lru.hit_rate != own.hit_rate


def test_slots_begin_as_they_were(run: tuple) -> None:
    prefetch, info, db, rows = run
    if prefetch == "on":
        return  # its hits depend on what was foreseen, too
    later = rows.latest(len(rows.steps) // 2).halves()[0]
    before = int(later.steps.step[0]) - 1
    hits = queries.RunHistory(db, info).hits(info.num_slots)
    there = queries.residency(db, info, before, hits)
    assert there.any()
    (empty,) = replayed(info, later, [info.policy])
    (warm,) = replayed(info, later, [info.policy], residents=there)
    assert abs(warm.hit_rate - hit_rate(later)) < abs(empty.hit_rate - hit_rate(later))


def test_an_oracle_is_played_with_the_future_of_these_steps(run: tuple) -> None:
    _, info, _, rows = run
    own, oracle = replayed(info, rows, [info.policy, "oracle-payback"])
    assert oracle.offline
    assert oracle.moe_us_per_token < own.moe_us_per_token


def test_reasons_against_a_replay(run: tuple) -> None:
    info = run[1]
    assert recorded_run.why_not_replayed(info) == ""
    unknown = queries.Run(**{**info.__dict__, "machine_json": "{}", "accelerator": "cuda"})
    assert "no figures" in recorded_run.why_not_replayed(unknown)


def test_steps_that_are_not_the_traces_are_refused(run: tuple) -> None:
    _, info, _, rows = run
    steps = queries.recorded_steps(rows)
    wrong = {**steps.__dict__, "begins": steps.begins[:-1]}
    with pytest.raises(ValueError, match="steps must rise from 0 to the number of tokens"):
        list(
            recorded_run.replay_steps(
                info,
                queries.RecordedSteps(**wrong),
                ["lru"],
                residents=np.zeros((1, 1), np.uint8),
                first_counted_step=0,
                foreseen=None,
            )
        )
