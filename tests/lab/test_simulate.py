"""`twofold lab simulate`: the arithmetic of a run checked by hand, the peers' rules, the capacity planner."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from twofold import _core
from twofold.api.errors import ConfigError
from twofold.experts.profiles import load_profile, shipped_profiles
from twofold.models import open_model_files
from twofold.models.sizing import trace_sizes
from twofold.tools.cli.main import main
from twofold.tools.lab.explain import where_peers_win
from twofold.tools.lab.shapes import SHAPES, ModelShape
from twofold.tools.lab.simulate import simulate_rows, simulate_system, slots_for_vram
from twofold.tools.lab.systems import SYSTEMS
from twofold.tools.lab.trace import load_trace, make_trace

from tests.tiny_models.writing import TinyModel, write_tiny_model

PROFILE = load_profile("rtx4090-pcie4")
SHAPE = SHAPES["gpt-oss-20b"]


def test_all_on_the_cpu_by_hand():
    """No slots: every layer costs handshake, its experts at CPU speed and the join; nothing else moves."""
    ids = np.array([[[0, 1]], [[2, 3]], [[0, 3]]])
    trace = make_trace("tiny", ids, None, None, 4)
    result = simulate_system(trace, SYSTEMS["ktransformers"], SHAPE, PROFILE, slots=0.0, keep_layer_us=True)
    figures = PROFILE.cost_figures
    expert = figures["cpu_expert_overhead_us"] + SHAPE.expert_bytes / (figures["cpu_bandwidth_gbps"] * 1e3)
    layer = figures["handshake_us"] + 2 * expert + figures["join_us"]
    assert result.layer_us == pytest.approx([layer] * 3)
    assert result.total_us == pytest.approx(3 * (layer + sum(SHAPE.dense_us(PROFILE, 1))))
    assert (result.num_hits, result.num_cpu, result.num_uploads, result.link_us) == (0, 6, 0, 0)


def test_all_resident_by_hand():
    ids = np.array([[[0, 1]], [[2, 3]], [[0, 3]]])
    trace = make_trace("tiny", ids, None, None, 4)
    result = simulate_system(
        trace, SYSTEMS["twofold"], SHAPE, PROFILE, slots=1.0, prior_usage=[1.0] * 4, keep_layer_us=True
    )
    figures = PROFILE.cost_figures
    layer = (
        figures["gpu_launch_us"]
        + 2 * SHAPE.expert_bytes / (figures["vram_bandwidth_gbps"] * 1e3)
        + figures["join_us"]
    )
    assert result.layer_us == pytest.approx([layer] * 3)
    assert (result.num_hits, result.num_uploads) == (6, 0)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("profile", shipped_profiles())
def test_twofold_is_not_slower_than_any_peer(trace_file, profile, batch):
    trace = load_trace(trace_file)
    rows = list(
        simulate_rows(
            trace, list(SYSTEMS.values()), SHAPE, load_profile(profile), [0.1, 0.25, 0.5, 0.75], [batch]
        )
    )
    for slots in (0.1, 0.25, 0.5, 0.75):
        speed = {r["system"]: r["tokens_per_s"] for r in rows if r["slots"] == slots}
        assert speed["twofold"] >= 0.98 * max(speed.values()), (slots, speed)


def test_rows_are_consistent(trace_file):
    trace = load_trace(trace_file)
    for row in simulate_rows(trace, list(SYSTEMS.values()), SHAPE, PROFILE, [0.25], [1, 2]):
        assert 0 <= row["link_busy"] <= 1
        assert 0 < row["moe_share"] < 1
        assert row["clock"] == "virtual"
        assert row["uploads_per_token"] >= row["fetched_per_token"]
        if row["system"] in ("fiddler", "ktransformers"):
            assert row["uploads_per_token"] == 0
        if row["system"] == "llama-cpp":  # every miss runs on the CPU and is admitted afterwards
            assert row["fetched_per_token"] == 0 < row["uploads_per_token"]
        if row["system"] == "freetoken":  # what is fetched is kept, and nothing else
            assert row["uploads_per_token"] == row["fetched_per_token"] > 0


def test_more_slots_are_never_much_slower(trace_file):
    rows = simulate_rows(
        load_trace(trace_file), [SYSTEMS["twofold"]], SHAPE, PROFILE, [0, 0.25, 0.5, 0.75, 1], [1]
    )
    speeds = [row["tokens_per_s"] for row in rows]
    assert speeds == sorted(speeds)


def test_prompts_are_played_in_chunks_and_streamed_ahead(trace_file, synthetic_model, capsys):
    def rows(*more):
        arguments = [
            "--model",
            synthetic_model,
            "--profile",
            "rtx3060-pcie3",
            "--systems",
            "twofold",
            "--json",
        ]
        assert main(["lab", "simulate", str(trace_file), *arguments, "--slots", "0.25", *more]) == 0
        return json.loads(capsys.readouterr().out)

    (decode,) = rows()
    (ahead,) = rows("--prompts", "2000")
    (alone,) = rows("--prompts", "2000", "--no-stream-ahead")
    assert (decode["steps"], ahead["steps"], ahead["batch"]) == ("decode", "prompts", 2000)
    assert ahead["tokens_per_s"] > decode["tokens_per_s"]
    assert ahead["tokens_per_s"] >= alone["tokens_per_s"]


def test_a_prompts_dense_time_by_hand():
    """All resident, a chunk and a rest: what is dense takes its bytes' time, or its tokens' if that is longer."""
    ids = np.broadcast_to([[0, 1]], (50_000, 1, 2)).copy()
    trace = make_trace("tiny", ids, None, None, 4)
    common = {"slots": 1.0, "prior_usage": [1.0] * 4}
    result = simulate_system(trace, SYSTEMS["twofold"], SHAPE, PROFILE, prompt_chunk=40_000, **common)
    token, dense = SHAPE.dense_token_us(PROFILE, 1)[0], SHAPE.dense_us(PROFILE, 1)
    assert token * 10_000 > dense[0]
    assert result.num_steps == 2
    assert result.total_us - result.moe_us == pytest.approx(50_000 * token + 2 * dense[-1])


def test_prompts_need_a_chunk_and_a_policy_without_a_future():
    trace = make_trace("tiny", np.array([[[0, 1]]]), None, None, 4)
    dense_us = SHAPE.dense_us(PROFILE, 1)
    config = _core.SchedulerConfig(1, 4, 2, 2, "belady")
    with pytest.raises(
        ValueError, match="policy belady given, one that needs no future expected for prompts"
    ):
        _core.simulate(trace.native, 1, SHAPE.cost_model(PROFILE), config, dense_us, prompt_chunk=5)


def test_fetch_rules_by_name():
    trace = make_trace("tiny", np.array([[[0, 1]]]), None, None, 4)
    with pytest.raises(ValueError, match="fetch rule 'x' given, one of best-split, none"):
        _core.SchedulerConfig(1, 4, 2, 2, "lru", fetch_rule="x")
    config = _core.SchedulerConfig(1, 4, 2, 2, "lru")
    with pytest.raises(ValueError, match="dense_us of 1 entries"):
        _core.simulate(trace.native, 1, SHAPE.cost_model(PROFILE), config, [1.0])


def test_capacity(trace_file):
    trace = load_trace(trace_file)
    total_gb = SHAPE.expert_bytes * trace.num_layers * trace.num_experts / 1e9
    low, high = (slots_for_vram(SHAPE, trace, gb, 1.0) for gb in (4.2, 4.7))
    assert 0 < low < high < 1
    assert (high - low) * total_gb == pytest.approx(0.5), "half a GB more is that much more room"
    assert slots_for_vram(SHAPE, trace, 100, 1.0) == 1
    with pytest.raises(ConfigError, match=r"needs [\d.]+ GB for dense weights"):
        slots_for_vram(SHAPE, trace, 2.0, 1.0)


def test_command_line(trace_file, synthetic_model, tmp_path, capsys):
    arguments = [
        "lab",
        "simulate",
        str(trace_file),
        "--model",
        synthetic_model,
        "--systems",
        "twofold,cpu-lru",
    ]
    assert main([*arguments, "--profile", "rtx3060-pcie3,h200-pcie5", "--slots", "0.25", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(r["profile"], r["system"]) for r in rows] == [
        ("rtx3060-pcie3", "twofold"),
        ("rtx3060-pcie3", "cpu-lru"),
        ("h200-pcie5", "twofold"),
        ("h200-pcie5", "cpu-lru"),
    ]
    page = tmp_path / "plan.html"
    assert main([*arguments, "--profile", "rtx4090-pcie4", "--vram", "4.2,4.7", "--html", str(page)]) == 0
    assert "4.2 GB" in page.read_text()
    assert main([*arguments, "--profile", "rtx4090-pcie4", "--slots", "0.5", "--policy", "lfru"]) == 0
    assert "lfru" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--systems", "llama"], "system 'llama' is unknown; expected one of twofold, fiddler"),
        (["--policy", "x"], "policy 'x' is unknown"),
        (["--vram", "1"], "--vram 1: synthetic-model needs"),
        (["--profile", "nope"], "'nope' is unknown"),
        (
            ["--model", "nope"],
            "sizes of model 'nope' are not known; give --model a model directory, a GGUF file",
        ),
        (
            ["--model", "gpt-oss-20b"],
            "synthetic has 4 MoE layers of 32 experts, top 4, gpt-oss-20b 24 MoE layers of 32 experts, top 4",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(trace_file, synthetic_model, extra, message, capsys):
    assert main(["lab", "simulate", str(trace_file), "--model", synthetic_model, *extra]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error)


def test_a_trace_of_any_model_has_its_sizes_or_those_of_a_model(tmp_path, capsys):
    """A recording of a model of no name that is known: by its own sizes, and without these by the model's files."""
    model = write_tiny_model(tmp_path / "tiny", TinyModel(num_layers=3))
    files = open_model_files(model)
    config, sizes = files.config, trace_sizes(files)
    assert sizes[:2] == (config.routed.hidden_size, config.routed.intermediate_size)
    shape = ModelShape("tiny", *sizes, routing=(3, config.routed.num_experts, config.routed.top_k))
    one_expert = config.routed.expert_bytes(files.expert_formats()[0])
    assert shape.expert_bytes == pytest.approx(one_expert)

    ids = np.tile(np.arange(config.routed.top_k), (4, 3, 1))
    np.savez(tmp_path / "own.npz", ids=ids, num_experts=config.routed.num_experts, sizes=np.array(sizes))
    np.savez(tmp_path / "bare.npz", ids=ids, num_experts=config.routed.num_experts)

    def rows(name, *more):
        trace = str(tmp_path / name)
        assert main(["lab", "simulate", trace, "--json", "--profile", "rtx4090-pcie4", *more]) == 0
        return [
            {key: value for key, value in row.items() if key not in ("trace", "model")}
            for row in json.loads(capsys.readouterr().out)
        ]

    assert rows("own.npz") == rows("bare.npz", "--model", str(model))
    assert main(["lab", "simulate", str(tmp_path / "bare.npz")]) == 2
    assert "give --model a model directory" in capsys.readouterr().err
    np.savez(tmp_path / "own.npz", ids=ids, num_experts=config.routed.num_experts, sizes=-np.array(sizes))
    with pytest.raises(ConfigError, match="expected 5 positive floats"):
        load_trace(tmp_path / "own.npz")


def test_cells_that_a_peer_wins_are_explained_by_their_counts():
    """The first cell is ours; in the others the peer hits more, pays less, or only orders differently."""

    def row(slots, system, speed, *, policy="lru", hits=0.5, uploads=2.0, fetched=0.5, busy=0.4):
        names = {"trace": "t", "profile": "m", "batch": 1, "slots": slots, "system": system, "policy": policy}
        counts = {
            "hit_rate": hits,
            "uploads_per_token": uploads,
            "fetched_per_token": fetched,
            "link_busy": busy,
        }
        return names | counts | {"tokens_per_s": speed}

    rows = [
        row(0.1, "twofold", 101.0), row(0.1, "x", 100.0, hits=0.9),
        row(0.2, "twofold", 100.0), row(0.2, "x", 103.0, hits=0.52, policy="static", uploads=0.0, busy=0.0),
        row(0.3, "twofold", 100.0), row(0.3, "x", 102.0, hits=0.6, uploads=5.0, fetched=1.0, busy=0.7),
        row(0.4, "twofold", 100.0), row(0.4, "x", 101.0),
    ]  # fmt: skip
    assert where_peers_win(rows) == [
        "t, m, batch 1, 20% slots: x is 3.0% faster than twofold: it hits 2.0 points more (its experts were chosen "
        "from the other half of this very trace, ours are learnt as it plays); it uploads 2.00 less per token, which "
        "leaves more of the memory's bandwidth to the CPU (link 0% busy, ours 40%)",
        "t, m, batch 1, 30% slots: x is 2.0% faster than twofold: it hits 10.0 points more (for 3.00 uploads more per "
        "token, which our price of an upload refuses); it waits for 0.50 more fetched experts per token",
        "t, m, batch 1, 40% slots: x is 1.0% faster than twofold: the same hits and uploads, in another order within "
        "the layers",
    ]
