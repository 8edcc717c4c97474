"""Drafts verified on a device: tokens with any drafter are those without, in graphs and in steps the host places.

This is not a GPU run: torch's products are the CPU's, computed so that they do not depend on the number of rows.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from twofold.api.config import EngineConfig
from twofold.api.types import SamplingParams
from twofold.device.runner import DeviceRunner, LostStepError
from twofold.engine import Engine

from tests.device.row_independence import independent_rows
from tests.device.runner_runs import found_device
from tests.engine.model_runs import random_prompt
from tests.engine.speculation.speculated_answers import (
    Asked,
    ScriptedDrafter,
    all_records,
    answers,
    expect_nothing_held,
    speculating,
    use_drafter,
)
from tests.tiny_models.table import linear_layers, tiny
from tests.tiny_models.writing import TinyModel, write_tiny_model

MODELS = {
    "keys-and-values": TinyModel(
        dtype="bfloat16",
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        num_layers=2,
        num_experts=10,
    ),
    "latent": tiny("deepseek_v3", dtype="bfloat16", num_experts=12, n_group=4, topk_group=2, top_k=5),
    "gated-delta": tiny(
        "qwen3_next",
        dtype="bfloat16",
        hidden_size=64,
        num_heads=2,
        num_kv_heads=1,
        head_dim=256,
        num_layers=3,
        layer_types=linear_layers(3, 1),
    ),
    "streams-pools-and-tables": tiny(
        "qwen4_exp",
        dtype="bfloat16",
        hidden_size=64,
        num_heads=2,
        num_kv_heads=1,
        head_dim=256,
        indexer_head_dim=96,
    ),
    "short-convolution": tiny("lfm2_moe", dtype="bfloat16", hidden_size=64, num_heads=4, head_dim=64),
}
REQUESTED = (
    Asked(tuple(random_prompt(9, 1)), SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)),
    Asked(
        tuple(random_prompt(20, 2)), SamplingParams(max_tokens=14, temperature=1.0, seed=5, ignore_eos=True)
    ),
    Asked(
        tuple(random_prompt(5, 3)),
        SamplingParams(max_tokens=14, temperature=0.8, seed=6, presence_penalty=1.0),
    ),
    Asked(
        tuple(random_prompt(12, 4)),
        SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True, logprobs=1),
    ),
)


def config_of(path: Path, **changes: object) -> EngineConfig:
    config = EngineConfig(
        model=str(path),
        accelerator="cuda",
        num_gpu_experts=4,
        cpu_threads=1,
        max_total_tokens=512,
        max_num_seqs=4,
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def runner_of(engine: Engine) -> DeviceRunner:
    assert isinstance(engine.runner, DeviceRunner)
    return engine.runner


def check(
    path: Path, requested: tuple[Asked, ...], *, placed: bool = False, prefix_caching: bool = False
) -> None:
    config = config_of(path, enable_prefix_caching=prefix_caching)
    plain = Engine.load(config)
    if placed:
        runner_of(plain).why_placed = "a test"
    expected = answers(plain, requested)
    plain.close()
    known = {
        (one.prompt, one.sampling): answer.tokens for one, answer in zip(requested, expected, strict=True)
    }
    engine = speculating(config)
    records = all_records(engine)
    if placed:
        runner_of(engine).why_placed = "a test"
    for wrong, depth in ((0.0, 7), (0.4, 3)):
        use_drafter(engine, ScriptedDrafter(known, wrong, depth))
        assert [answer.tokens for answer in answers(engine, requested)] == [
            answer.tokens for answer in expected
        ]
        expect_nothing_held(engine, records)
    counts = engine.stats().speculation
    assert counts is not None
    assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens
    runner = runner_of(engine)
    assert placed or (runner.num_table_steps > 0 and runner.why_placed is None)
    engine.close()


@pytest.mark.parametrize("model", MODELS)
def test_answers_are_those_without_drafts(simt: ModuleType, tmp_path: Path, model: str) -> None:
    path = write_tiny_model(tmp_path, MODELS[model])
    with found_device(lambda: simt.open_device(0, total_bytes=2 << 30, tick_us=2.0)), independent_rows():
        check(path, REQUESTED[:2])


@pytest.mark.parametrize("model", MODELS)
def test_the_torch_reference_and_the_host_place_steps_with_drafts(
    fake: ModuleType, tmp_path: Path, model: str
) -> None:
    path = write_tiny_model(tmp_path, MODELS[model])
    with found_device(lambda: fake.open_device(0, total_bytes=2 << 30, tick_us=2.0)), independent_rows():
        check(path, REQUESTED, placed=True, prefix_caching=True)


def test_a_lost_step_is_computed_again_from_the_same_states(
    fake: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_model(tmp_path, MODELS["gated-delta"])
    requested = REQUESTED[:2]
    with found_device(lambda: fake.open_device(0, total_bytes=2 << 30, tick_us=2.0)), independent_rows():
        plain = Engine.load(config_of(path))
        expected = answers(plain, requested)
        plain.close()
        engine = speculating(config_of(path))
        known = {
            (one.prompt, one.sampling): answer.tokens for one, answer in zip(requested, expected, strict=True)
        }
        use_drafter(engine, ScriptedDrafter(known, 0.3, 4))
        runner = runner_of(engine)
        run, steps = runner._run_table_step, []

        def lost_after_it_ran(*args: object) -> object:
            result = run(*args)  # type: ignore[arg-type]
            steps.append(args[0])
            if len(steps) == 3:
                raise LostStepError("a test")
            return result

        monkeypatch.setattr(runner, "_run_table_step", lost_after_it_ran)
        assert [answer.tokens for answer in answers(engine, requested)] == [
            answer.tokens for answer in expected
        ]
        assert runner.why_placed == "a test"
        engine.close()
