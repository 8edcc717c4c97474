"""`lab simulate --acceptance`: arithmetic by hand, the engine's choice against fixed depths, acceptance of a run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from twofold import _core
from twofold.api.errors import ConfigError
from twofold.api.types import StepRecord
from twofold.experts.profiles import load_profile
from twofold.telemetry.writer import open_sink
from twofold.tools.cli.main import main
from twofold.tools.lab.drafting import Drafting, drafting_rows, read_acceptance, simulate_drafting
from twofold.tools.lab.shapes import SHAPES
from twofold.tools.lab.simulate import simulate_system
from twofold.tools.lab.systems import SYSTEMS
from twofold.tools.lab.trace import load_trace, make_trace

from tests.dashboard.synthetic_run import run_info

PROFILE = load_profile("rtx4090-pcie4")
SHAPE = SHAPES["gpt-oss-20b"]


def test_depth_0_is_the_simulation_without_drafts(trace_file: Path) -> None:
    trace = load_trace(trace_file).part("first")
    plain = simulate_system(trace, SYSTEMS["twofold"], SHAPE, PROFILE, slots=0.25)
    off = Drafting((1.0,), 0, adaptive=False, draft_us=0.0)
    found = simulate_drafting(trace, SYSTEMS["twofold"], SHAPE, PROFILE, off, slots=0.25)
    assert (found.num_tokens, found.num_drafted) == (plain.num_tokens, 0)
    assert found.total_us == pytest.approx(plain.total_us)


def test_right_drafts_by_hand() -> None:
    """All tokens route alike, on the CPU: a step of four takes its experts once, and the drafter three times."""
    ids = np.broadcast_to([[0, 1]], (9, 1, 2)).copy()
    trace = make_trace("tiny", ids, None, None, 4)
    drafting = Drafting((1.0,), 3, adaptive=False, draft_us=7.0)
    found = simulate_drafting(trace, SYSTEMS["ktransformers"], SHAPE, PROFILE, drafting, slots=0.0)
    # Steps of 4, 4 and, without a token left to draft, 1.
    assert (found.num_tokens, found.num_steps, found.num_drafted, found.num_accepted) == (9, 3, 6, 6)
    layer_us = SHAPE.cost_model(PROFILE).layer_us([], [4, 4])
    alone_us = SHAPE.cost_model(PROFILE).layer_us([], [1, 1])
    dense_us = sum(SHAPE.dense_us(PROFILE, 1))
    assert found.total_us == pytest.approx(2 * layer_us + alone_us + 3 * dense_us + 6 * 7.0, rel=1e-6)


def test_wrong_drafts_yield_one_token_a_step(trace_file: Path) -> None:
    trace = load_trace(trace_file).part("first")
    wrong = Drafting((0.0,), 2, adaptive=False, draft_us=0.0)
    found = simulate_drafting(trace, SYSTEMS["twofold"], SHAPE, PROFILE, wrong, slots=0.25)
    assert (found.num_steps, found.num_accepted) == (found.num_tokens, 0)
    assert found.num_tokens == trace.num_tokens


def test_a_row_outside_the_trace_is_refused(trace_file: Path) -> None:
    trace = load_trace(trace_file)
    config = _core.SchedulerConfig(trace.num_layers, trace.num_experts, trace.top_k, 0)
    dense_us = [0.0] * (trace.num_layers + 1)
    with pytest.raises(ValueError, match="row 2400 given"):
        _core.simulate_steps(trace.native, SHAPE.cost_model(PROFILE), config, dense_us, lambda _: [2400])


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("profile", ["rtx3060-pcie3", "rtx4090-pcie4"])
def test_the_engines_choice_is_near_the_best_fixed_depth(
    long_trace_file: Path, profile: str, acceptance: float
) -> None:
    rows = drafting_rows(
        load_trace(long_trace_file),
        [SYSTEMS["twofold"]],
        SHAPE,
        load_profile(profile),
        [0.25, 0.75],
        acceptance=(acceptance,),
        depths=[1, 2, 4],
    )
    speeds: dict[float, dict[str, float]] = {}
    for row in rows:
        speeds.setdefault(row["slots"], {})[row["drafts"]] = row["tokens_per_s"]
    for of in speeds.values():
        assert of.pop("adaptive") >= 0.95 * max(of.values()), (of, speeds)


def test_the_command_reads_a_runs_acceptance(
    tmp_path: Path, trace_file: Path, synthetic_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.db"
    sink = open_sink(f"sqlite:///{path}")
    sink.begin_run(run_info())
    for step, (drafted, accepted) in enumerate([(2, 2), (2, 1), (2, 0), (2, 2)]):
        sink.step(
            StepRecord(
                step,
                0.0,
                0,
                1 + drafted,
                1,
                0,
                1.0,
                1.0,
                num_drafted_tokens=drafted,
                num_accepted_tokens=accepted,
            )
        )
    sink.close()
    assert read_acceptance(str(path)) == pytest.approx((3 / 4, 2 / 3))
    assert read_acceptance(f"sqlite:///{path}") == read_acceptance(str(path))
    arguments = [
        "--model",
        synthetic_model,
        "--profile",
        "rtx3060-pcie3",
        "--systems",
        "twofold",
        "--slots",
        "0.25",
    ]
    command = [
        "lab",
        "simulate",
        str(trace_file),
        *arguments,
        "--acceptance",
        str(path),
        "--draft-depths",
        "2",
    ]
    assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["drafts"] for row in rows] == ["off", "depth 2", "adaptive"]
    assert rows[1]["tokens_per_step"] == pytest.approx(1 + 3 / 4 + 1 / 2, rel=0.1)
    assert main(command) == 0
    assert "adaptive" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"), [("1.2", "probabilities from 0 to 1"), ("nowhere.db", "or a telemetry database")]
)
def test_bad_acceptance(given: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_acceptance(given)


def test_batches_have_no_drafts(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "simulate", str(trace_file), "--acceptance", "0.5", "--batch", "4"]) == 2
    assert "leave out --prompts and --batch" in capsys.readouterr().err
